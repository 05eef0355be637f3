//! The output of one exec: each stream a pipe (or a terminal) and, where output is kept, the ring of its last bytes.
//!
//! Without a ring, output is read only when the host takes it. With one, it is read ahead: in the waiting kind as long as
//! not more than [`wire::RING`] bytes are kept, of which up to [`wire::REPLAY`] were taken already; in the dropping kind always.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::fd::{AsFd, BorrowedFd};

use super::outbox::Outbox;
use super::sys;
use crate::wire::{self, CHUNK, Stream};

/// What a terminal may still show after the command's end, when something else keeps it open.
const LAST_WORDS: usize = 256 << 10;
/// Chunks that are moved before others get their turn.
const TURN: usize = 16;

/// What becomes of output that nobody takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    Nothing,
    /// The program waits.
    Waiting,
    /// The oldest goes.
    Dropping,
}

#[derive(Debug)]
pub struct Source {
    pub stream: Stream,
    pipe: Option<File>,
    keep: Keep,
    ring: VecDeque<u8>,
    /// Bytes read so far.
    made: u64,
    /// The next byte for whoever is attached.
    next: u64,
    /// The host has passed on all before this.
    taken: u64,
    dropped: u64,
    /// After the command's end: how much still belongs to its output.
    left: Option<usize>,
    /// After that, what comes is thrown away.
    discarding: bool,
}

impl Source {
    pub fn new(stream: Stream, pipe: File, keep: Keep) -> Self {
        Self {
            stream,
            pipe: Some(pipe),
            keep,
            ring: VecDeque::new(),
            made: 0,
            next: 0,
            taken: 0,
            dropped: 0,
            left: None,
            discarding: false,
        }
    }

    pub fn made(&self) -> u64 {
        self.made
    }

    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// The first byte that is kept.
    pub fn first(&self) -> u64 {
        self.made - self.ring.len() as u64
    }

    /// Goes on from `from` for a new connection, which must be within what is kept.
    pub fn go_on_from(&mut self, from: u64) {
        self.next = from;
        self.taken = from;
    }

    pub fn take_to(&mut self, offset: u64) {
        self.taken = self.taken.max(offset.min(self.next));
    }

    /// How much may be read ahead.
    fn room(&self) -> usize {
        match self.keep {
            Keep::Nothing => 0,
            Keep::Dropping => CHUNK,
            Keep::Waiting => {
                let kept = self.made - self.taken.saturating_sub(wire::REPLAY as u64).max(self.first());
                (wire::RING as u64).saturating_sub(kept) as usize
            }
        }
    }

    /// The pipe, when it is to be polled; `free` says that a frame could be sent at once.
    pub fn wanted(&self, free: bool) -> Option<BorrowedFd<'_>> {
        let wanted = match (self.keep, self.left) {
            _ if self.discarding => true,
            (_, Some(0)) => false,
            (Keep::Nothing, _) => free,
            (Keep::Waiting | Keep::Dropping, _) => self.room() > 0,
        };
        self.pipe.as_ref().filter(|_| wanted).map(AsFd::as_fd)
    }

    /// Whether there is something for whoever is attached.
    pub fn is_behind(&self) -> bool {
        self.keep != Keep::Nothing && self.next < self.made
    }

    /// Whether all of the command's output was read.
    pub fn is_read(&self) -> bool {
        self.left == Some(0)
    }

    /// Whether all of the command's output was given to whoever is attached.
    pub fn is_sent(&self) -> bool {
        self.is_read() && !self.is_behind()
    }

    /// Reads ahead, or throws away.
    pub fn read_ahead(&mut self) -> io::Result<()> {
        if self.keep == Keep::Nothing && !self.discarding {
            return Ok(());
        }
        let mut chunk = [0; CHUNK];
        for _ in 0..TURN {
            let most = match self.discarding {
                true => CHUNK,
                false => self.room().min(self.left.unwrap_or(CHUNK)).min(CHUNK),
            };
            if most == 0 {
                return Ok(());
            }
            let length = self.read(&mut chunk[..most])?;
            if length == 0 {
                return Ok(());
            }
            if !self.discarding {
                self.add(&chunk[..length]);
            }
        }
        Ok(())
    }

    fn add(&mut self, bytes: &[u8]) {
        self.ring.extend(bytes);
        self.made += bytes.len() as u64;
        self.left = self.left.map(|left| left.saturating_sub(bytes.len()));
        let excess = self.ring.len().saturating_sub(wire::RING);
        self.ring.drain(..excess);
        let gap = self.first().saturating_sub(self.next);
        self.dropped += gap;
        self.next += gap;
    }

    /// Reads once; 0 when there is nothing now, or ever.
    fn read(&mut self, chunk: &mut [u8]) -> io::Result<usize> {
        let Some(pipe) = &mut self.pipe else {
            return Ok(0);
        };
        match pipe.read(chunk) {
            Ok(0) => self.close(),
            Ok(length) => return Ok(length),
            // A terminal with nobody at its other end.
            Err(error) if error.raw_os_error() == Some(libc::EIO) => self.close(),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => self.dry(),
            Err(error) => return Err(error),
        }
        Ok(0)
    }

    /// Nothing more will come.
    fn close(&mut self) {
        self.pipe = None;
        self.left = self.left.map(|_| 0);
    }

    /// Nothing is there now. A terminal does not tell beforehand how much it holds.
    fn dry(&mut self) {
        if self.stream == Stream::Pty {
            self.left = self.left.map(|_| 0);
        }
    }

    /// Puts the next piece into an empty outbox; whether there was one.
    pub fn give(&mut self, outbox: &mut Outbox) -> io::Result<bool> {
        let length = match self.keep {
            Keep::Nothing if self.discarding || self.left == Some(0) => 0,
            Keep::Nothing => {
                let most = self.left.unwrap_or(CHUNK);
                let (stream, made) = (self.stream, self.made);
                let length = outbox.fill(stream, made, most, &mut Once(self))?;
                self.made += length as u64;
                self.left = self.left.map(|left| left.saturating_sub(length));
                length
            }
            Keep::Waiting | Keep::Dropping => {
                let skip = (self.next - self.first()) as usize;
                let (front, back) = self.ring.as_slices();
                let mut piece = match front.get(skip..) {
                    Some(piece) if !piece.is_empty() => piece,
                    Some(_) | None => &back[skip - front.len()..],
                };
                outbox.fill(self.stream, self.next, CHUNK, &mut piece)?
            }
        };
        self.next += length as u64;
        Ok(length > 0)
    }

    /// The command has ended: what the pipe holds now is the rest of its output. Not until end of file, as the other end may
    /// have been passed on to another process; with `discard` such a one may go on writing, to nobody.
    pub fn conclude(&mut self, discard: bool) {
        let rest = match (&self.pipe, self.stream) {
            (None, _) => 0,
            (Some(_), Stream::Pty) => LAST_WORDS,
            (Some(pipe), Stream::Stdout | Stream::Stderr | Stream::Unspecified) => sys::pending(pipe),
        };
        self.left = Some(rest);
        self.settle(discard);
    }

    /// Once the rest was read: lets go of the pipe, or drains it from now on.
    pub fn settle(&mut self, discard: bool) {
        if self.left == Some(0) && !self.discarding {
            self.discarding = discard;
            if !discard {
                self.pipe = None;
            }
        }
    }

    /// The pipe itself, for a terminal's settings.
    pub fn terminal(&self) -> Option<BorrowedFd<'_>> {
        match self.stream {
            Stream::Pty => self.pipe.as_ref().map(AsFd::as_fd),
            Stream::Stdout | Stream::Stderr | Stream::Unspecified => None,
        }
    }

    /// Nobody will take anything more.
    pub fn hang_up(&mut self) {
        self.pipe = None;
    }
}

/// Reads of a source's pipe that take an end for nothing.
struct Once<'a>(&'a mut Source);

impl Read for Once<'_> {
    fn read(&mut self, chunk: &mut [u8]) -> io::Result<usize> {
        self.0.read(chunk)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use nix::fcntl::{FcntlArg, OFlag, fcntl};

    use super::*;
    use crate::wire::{Event, event};

    fn source(keep: Keep) -> (Source, File) {
        let (ours, theirs) = nix::unistd::pipe2(OFlag::O_CLOEXEC).unwrap();
        sys::set_pipe_size(&ours, 1 << 20);
        fcntl(&ours, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).unwrap();
        fcntl(&theirs, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).unwrap();
        (Source::new(Stream::Stdout, ours.into(), keep), theirs.into())
    }

    /// Writes until the source takes no more.
    fn flood(source: &mut Source, pipe: &mut File, most: usize) -> usize {
        let mut written = 0;
        while written < most {
            let room = source.wanted(false).is_some();
            match pipe.write(&vec![(written >> 10) as u8; 1024.min(most - written)]) {
                Ok(length) => written += length,
                Err(_) if room => {}
                Err(_) => break,
            }
            source.read_ahead().unwrap();
        }
        written
    }

    fn taken(source: &mut Source) -> Vec<(u64, usize)> {
        let (mut outbox, mut sent, mut pieces) = (Outbox::default(), Vec::new(), Vec::new());
        while source.is_behind() {
            assert!(source.give(&mut outbox).unwrap());
            outbox.flush(&mut sent).unwrap();
        }
        while let Some(event) = wire::decode::<Event>(&mut sent).unwrap() {
            let Some(event::Kind::Output(output)) = event.kind else {
                panic!("{event:?}");
            };
            pieces.push((output.offset, output.data.len()));
        }
        pieces
    }

    #[test]
    fn a_full_ring_holds_the_program_until_output_is_taken() {
        let (mut source, mut pipe) = source(Keep::Waiting);
        flood(&mut source, &mut pipe, 16 << 20);
        assert_eq!(
            (source.made(), source.first()),
            (wire::RING as u64, 0),
            "nothing is lost"
        );
        let pieces = taken(&mut source);
        assert_eq!(pieces.iter().map(|(_, length)| length).sum::<usize>(), wire::RING);
        assert!(source.wanted(true).is_none(), "sent is not taken");
        source.take_to(wire::RING as u64);
        flood(&mut source, &mut pipe, 16 << 20);
        assert_eq!(
            source.first(),
            (wire::RING - wire::REPLAY) as u64,
            "what was taken lately is kept"
        );
        source.go_on_from(source.first());
        assert_eq!(taken(&mut source)[0].0, (wire::RING - wire::REPLAY) as u64);
    }

    #[test]
    fn a_dropping_ring_counts_what_goes() {
        let (mut source, mut pipe) = source(Keep::Dropping);
        let written = flood(&mut source, &mut pipe, 2 * wire::RING) as u64;
        assert_eq!(written, 2 * wire::RING as u64);
        source.conclude(false);
        source.read_ahead().unwrap();
        assert_eq!(
            (source.made(), source.dropped()),
            (written, written - wire::RING as u64)
        );
        let pieces = taken(&mut source);
        assert_eq!(pieces[0].0, written - wire::RING as u64);
        assert!(source.is_sent());
    }

    #[test]
    fn after_the_end_only_what_was_there_counts() {
        let (mut source, mut pipe) = source(Keep::Waiting);
        pipe.write_all(b"mine").unwrap();
        source.conclude(true);
        pipe.write_all(b"not mine").unwrap();
        source.read_ahead().unwrap();
        source.settle(true);
        source.read_ahead().unwrap();
        assert_eq!((source.made(), taken(&mut source)), (4, vec![(0, 4)]));
        assert!(source.wanted(false).is_some(), "the rest is drained");
    }
}
