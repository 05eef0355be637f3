//! Pseudo-terminals, from the sandbox's own devpts.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;
use nix::sys::termios::{LocalFlags, SpecialCharacterIndices, tcgetattr};

use super::sys;
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
    resize(&master, size)?;
    Ok((master, slave))
}

/// Tells the programs on it that it has another size.
pub fn resize(master: &impl AsFd, size: TerminalSize) -> io::Result<()> {
    let side = |length: u32| length.min(u32::from(u16::MAX)) as u16;
    sys::set_terminal_size(master, side(size.rows), side(size.columns))?;
    Ok(())
}

/// The character that ends input, while the terminal works in lines.
pub fn end_of_input(master: &impl AsFd) -> Option<u8> {
    let settings = tcgetattr(master).ok()?;
    let lines = settings.local_flags.contains(LocalFlags::ICANON);
    lines.then(|| settings.control_chars[SpecialCharacterIndices::VEOF as usize])
}
