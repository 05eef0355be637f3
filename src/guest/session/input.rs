//! What the host sends while the program runs: standard input within its window, signals, sizes, what was taken.

use std::collections::HashSet;
use std::io::{self, ErrorKind, Read, Write};
use std::time::{Duration, Instant};

use nix::unistd::Pid;

use super::{Session, part};
use crate::guest::streams::Source;
use crate::guest::terminal::Discipline;
use crate::guest::{sys, terminal, tree};
use crate::wire::{self, Input, event, input};

/// What is read of the host's at once.
const READ: usize = 64 << 10;
/// When a terminal whose input has ended is looked at after something happened.
const LOOK: Duration = Duration::from_millis(200);
/// The longest time until the end is typed again.
const RARELY: Duration = Duration::from_secs(600);
/// Longest note of the host's.
const MAX_NOTE: usize = 256;

impl Session<'_> {
    pub(super) fn take_input(&mut self) -> io::Result<()> {
        let Some(peer) = &mut self.peer else {
            return Ok(());
        };
        let mut chunk = [0; READ];
        match peer.connection.read(&mut chunk) {
            Ok(0) => return Err(ErrorKind::ConnectionAborted.into()),
            Ok(length) => peer.inbox.extend_from_slice(&chunk[..length]),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => return Ok(()),
            Err(_) => return Err(ErrorKind::ConnectionAborted.into()),
        }
        while let Some(peer) = &mut self.peer
            && let Some(input) = wire::take::<Input>(&mut peer.inbox)?
        {
            match input.kind {
                Some(input::Kind::Stdin(data)) => {
                    self.pending.extend(&data);
                    self.typed_end = None;
                    if self.pending.len() > 2 * wire::STDIN_WINDOW {
                        return Err(ErrorKind::InvalidData.into());
                    }
                }
                Some(input::Kind::StdinEof(_)) => self.stdin_eof = true,
                Some(_) | None => self.obey(input),
            }
        }
        self.feed()
    }

    /// Does what was asked for beside input.
    pub(super) fn obey(&mut self, input: Input) {
        let runs = self.main_ended.is_none();
        match input.kind {
            Some(input::Kind::Signal(number)) => {
                // To the group first, as a terminal would; to the process alone if it has left that.
                let group = Pid::from_raw(-self.main.as_raw());
                if runs && sys::send_signal(group, number).is_err() {
                    let _ = sys::send_signal(self.main, number);
                }
            }
            Some(input::Kind::SignalTree(number)) => tree::signal_all(number, &HashSet::new()),
            Some(input::Kind::Kill(by)) => {
                self.note_kill(by);
                self.end_tree();
            }
            Some(input::Kind::Terminate(by)) => {
                self.note_kill(by);
                self.terminate();
            }
            Some(input::Kind::Resize(size)) => {
                if let Some(terminal) = self.sources.iter().find_map(Source::terminal) {
                    let _ = terminal::resize(&terminal, size);
                }
            }
            Some(input::Kind::Taken(offsets)) => {
                for source in &mut self.sources {
                    source.take_to(part(&offsets, source.stream));
                }
            }
            Some(input::Kind::Note(note)) if note.len() <= MAX_NOTE => self.note = note,
            Some(input::Kind::Note(_) | input::Kind::Stdin(_) | input::Kind::StdinEof(_)) | None => {}
        }
    }

    pub(super) fn note_kill(&mut self, by: String) {
        if self.main_ended.is_none() {
            self.killed_by.get_or_insert(by);
        }
    }

    /// Gives the program what it will take of its input, and the host credit for it.
    pub(super) fn feed(&mut self) -> io::Result<()> {
        let mut taken = self.drain();
        if self.pending.is_empty() && self.stdin_eof {
            self.close_stdin();
            taken += self.drain();
        }
        let others = taken.min(self.uncredited);
        self.uncredited -= others;
        match taken - others {
            0 => Ok(()),
            credit => self.push(event::Kind::Credit(credit as u32)),
        }
    }

    /// How many bytes it took.
    fn drain(&mut self) -> usize {
        let mut taken = 0;
        while !self.pending.is_empty() {
            let Some(stdin) = &mut self.stdin else {
                taken += self.pending.len();
                self.pending.clear();
                break;
            };
            let piece = self.pending.as_slices().0;
            let written = match &mut self.keys {
                Some(keys) => keys.write(stdin, piece),
                None => stdin.write(piece),
            };
            match written {
                Ok(length) => {
                    let last = self.pending.drain(..length).next_back();
                    let is_input = self.typed_end.is_none();
                    self.is_mid_line = is_input && last.is_some_and(|byte| !matches!(byte, b'\n' | b'\r'));
                    taken += length;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // It has closed its end: whatever else comes goes nowhere.
                Err(_) => self.stdin = None,
            }
        }
        taken
    }

    pub(super) fn close_stdin(&mut self) {
        let terminal = self.sources.iter().find_map(Source::terminal);
        if let (Some(_), Some(terminal)) = (&self.stdin, terminal) {
            // Input may go on after it, as at a real one.
            self.stdin_eof = false;
            if let Some((end, discipline)) = terminal::end_of_input(&terminal) {
                // Within a line the first one hands over what there is of it; only the next is the end.
                let times = match discipline {
                    Discipline::Lines if self.is_mid_line => 2,
                    Discipline::Lines | Discipline::Keys => 1,
                };
                self.pending.extend(&[end; 2][..times]);
                // Nobody sent these.
                self.uncredited += times;
                let (now, wait) = (Instant::now(), self.typed_end.take().map_or(LOOK, |typed| typed.wait));
                self.typed_end = Some(TypedEnd {
                    discipline,
                    look_at: now + LOOK,
                    again_at: now + wait,
                    wait,
                });
            }
        } else {
            self.stdin = None;
        }
    }

    /// Types the end again where the terminal takes its input in another way now, and from time to time, less and less often.
    /// What ends one program's input says nothing to the next (a shell's command has its own), and a key that was typed before
    /// the way of input changed has lost its meaning: but there is no more input, whoever asks for it, and whenever.
    pub(super) fn end_again(&mut self) -> io::Result<()> {
        let Some(typed) = &mut self.typed_end else {
            return Ok(());
        };
        let now = Instant::now();
        typed.look_at = match now < typed.look_at {
            // Something happened: the settings may change just after it.
            true => typed.look_at.min(now + LOOK),
            false => typed.again_at,
        };
        if !self.pending.is_empty() {
            return Ok(());
        }
        let terminal = self.sources.iter().find_map(Source::terminal);
        let found = terminal.and_then(|terminal| terminal::end_of_input(&terminal));
        if found.is_some_and(|(_, discipline)| discipline != typed.discipline) {
            typed.wait = LOOK;
        } else if now >= typed.again_at {
            typed.wait = RARELY.min(typed.wait * 2);
        } else {
            return Ok(());
        }
        self.is_mid_line = false;
        self.stdin_eof = true;
        self.feed()
    }
}

/// The end of input that was typed on a terminal.
pub(super) struct TypedEnd {
    discipline: Discipline,
    /// When the terminal is looked at, if nothing happens before: nobody tells of its settings.
    pub(super) look_at: Instant,
    again_at: Instant,
    wait: Duration,
}
