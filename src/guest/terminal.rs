//! Pseudo-terminals, from the sandbox's own devpts.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;
use nix::sys::termios::{LocalFlags, SpecialCharacterIndices, tcgetattr};

use super::{sys, tree};
use crate::wire::TerminalSize;

/// Both ends of a new terminal: the master's, then the program's.
pub fn make(size: TerminalSize) -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
    let master = open("/dev/ptmx", flags, Mode::empty())?;
    let number = sys::unlock_terminal(&master)?;
    let slave = match sys::terminal_peer(&master, flags) {
        // A kernel without the call (gVisor).
        Err(_) => open(format!("/dev/pts/{number}").as_str(), flags, Mode::empty())?,
        Ok(slave) => slave,
    };
    set_size(&master, size)?;
    Ok((master, slave))
}

/// Gives it another size. Its programs are told by the kernel, or by us where it does not: gVisor before June 2026, which from
/// the master does not tell either whom to tell (`TIOCGPGRP` answers ENOTTY), so that all of the command's hear it. Who does not
/// wait for the signal is not touched by it.
pub fn resize(master: &impl AsFd, size: TerminalSize) -> io::Result<()> {
    set_size(master, size)?;
    if is_half(master) {
        tree::signal_all(libc::SIGWINCH, &HashSet::new());
    }
    Ok(())
}

fn set_size(master: &impl AsFd, size: TerminalSize) -> io::Result<()> {
    let side = |length: u32| length.min(u32::from(u16::MAX)) as u16;
    sys::set_terminal_size(master, side(size.rows), side(size.columns))?;
    Ok(())
}

/// How a terminal takes its input, and its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Discipline {
    /// In lines: the character is the end.
    Lines,
    /// Key by key: the character is a key like others. Whoever edits lines by itself (a shell, an interpreter) takes it for the
    /// end; a terminal has no other that would leave it what it is.
    Keys,
}

/// The character that ends input, and what it is now; `None` where there is none.
pub fn end_of_input(master: &impl AsFd) -> Option<(u8, Discipline)> {
    let settings = tcgetattr(master).ok()?;
    let mode = match settings.local_flags.contains(LocalFlags::ICANON) {
        true => Discipline::Lines,
        false => Discipline::Keys,
    };
    let end = settings.control_chars[SpecialCharacterIndices::VEOF as usize];
    (end != 0).then_some((end, mode))
}

/// Whether the kernel's terminals leave a part to us, as gVisor's do.
fn is_half(master: &impl AsFd) -> bool {
    nix::unistd::tcgetpgrp(master) == Err(Errno::ENOTTY)
}

/// Input for a terminal of a kernel that sends the signals of its keys, but leaves the keys in the input, and what was typed
/// before them, where Linux flushes both: in what waits for the end of its line they are erased, as a person would.
#[derive(Debug)]
pub struct Keys {
    /// Bytes of the line that is being typed.
    line: usize,
}

/// Longest line that a terminal takes.
const LINE: usize = 4096;

impl Keys {
    /// For a terminal that needs it.
    pub fn of(master: &impl AsFd) -> Option<Self> {
        is_half(master).then_some(Self { line: 0 })
    }

    /// Writes some of `bytes`; how many it took.
    pub fn write(&mut self, master: &mut File, bytes: &[u8]) -> io::Result<usize> {
        use SpecialCharacterIndices::{VEOF, VERASE, VINTR, VQUIT, VSUSP};
        let settings = tcgetattr(&*master)?;
        let key = |index: SpecialCharacterIndices| settings.control_chars[index as usize];
        let flags = settings.local_flags;
        if !flags.contains(LocalFlags::ICANON | LocalFlags::ISIG) || key(VERASE) == 0 {
            self.line = 0;
            return master.write(bytes);
        }
        let signals = [VINTR, VQUIT, VSUSP].map(key);
        match bytes.iter().position(|byte| *byte != 0 && signals.contains(byte)) {
            Some(0) => {
                let typed = if flags.contains(LocalFlags::NOFLSH) {
                    0
                } else {
                    self.line
                };
                // In one write: nobody reads in between.
                let mut piece = vec![key(VERASE); 1 + 1 + typed];
                piece[0] = bytes[0];
                let written = master.write(&piece)?;
                self.line = 0;
                Ok(written.min(1))
            }
            found => {
                let written = master.write(&bytes[..found.unwrap_or(bytes.len())])?;
                let ends = |byte: &u8| matches!(byte, b'\n' | b'\r') || *byte == key(VEOF);
                let typed = bytes[..written].iter().rev().position(ends);
                self.line = typed.unwrap_or(self.line + written).min(LINE);
                Ok(written)
            }
        }
    }
}
