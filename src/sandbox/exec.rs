//! The host's half of one exec: what to run, what comes out, how it ended.
//!
//! Owns: the command (`command`), the types of output and end (`ended`), the handles on a running command (`handle`). The
//! conversation with the guest about one exec is in `driver`, other questions to the guest in `ask`, the judgement of an end
//! in `judge`, bounded capture of output in `capture`. Everything that comes from the guest is hostile: `driver` checks the
//! order and the size of what it says, and the host's own counters decide where they say more.

mod ask;
mod capture;
mod command;
mod company;
mod driver;
mod ended;
mod handle;
mod judge;

use std::ops::Deref;

use bytes::Bytes;

pub use ask::{ExecInfo, Tell};
pub(super) use ask::{dial, list, ping, release, tell};
pub use capture::{Captured, Finished};
pub use command::{Background, Command, GRACE, MAX_GRACE, Overflow, Stdin, TerminalSize};
pub(super) use company::Company;
pub(super) use driver::{Counters, attach, start};
pub use ended::{Cause, Counts, EndReason, Ended, Pressure, Used};
pub use handle::{Closed, Control, Exec, Outputs};
pub(super) use judge::Place;

/// What comes out of a running command, in the order it was written per stream. Never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    Stdout(Piece),
    Stderr(Piece),
    /// All that a pseudo-terminal shows.
    Pty(Piece),
}

/// Bytes of one stream, as they were written, and where they stand in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Of the first byte, from the start of the stream. Larger than the end of the piece before when output was dropped.
    pub offset: u64,
    pub bytes: Bytes,
}

impl Deref for Piece {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Output {
    /// Bytes of standard output, from its start.
    pub fn stdout(bytes: impl Into<Bytes>) -> Self {
        Self::Stdout(Piece::new(0, bytes))
    }

    /// Bytes of standard error, from its start.
    pub fn stderr(bytes: impl Into<Bytes>) -> Self {
        Self::Stderr(Piece::new(0, bytes))
    }

    pub fn piece(&self) -> &Piece {
        match self {
            Self::Stdout(piece) | Self::Stderr(piece) | Self::Pty(piece) => piece,
        }
    }
}

impl Piece {
    pub fn new(offset: u64, bytes: impl Into<Bytes>) -> Self {
        Self {
            offset,
            bytes: bytes.into(),
        }
    }

    /// The offset after its last byte.
    pub fn end(&self) -> u64 {
        self.offset + self.bytes.len() as u64
    }
}

/// A place in each stream of an exec.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Offsets {
    pub stdout: u64,
    pub stderr: u64,
    pub pty: u64,
}
