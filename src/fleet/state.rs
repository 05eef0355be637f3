//! The life of one sandbox: a pure machine.
//!
//! ```text
//!            Created            PauseAsked / Freeze
//!  Creating ─────────► Running ─────────────────────► Paused
//!   │  │                │  ▲  ◄─────────────────────── │
//!   │  │                │  └── FreezeFailed             │ ResumeAsked / Thaw     (ThawFailed: Paused again)
//!   │  │ EndAsked       │ EndAsked / Stop              │ EndAsked / Stop
//!   │  └──────────────► Ending ◄───────────────────────┘
//!   │   (Created / Stop)  │    StopFailed / StopAgain: stays
//!   │ CreateFailed        │ Stopped / CleanUp
//!   └────────► Ended ◄────┘
//! ```
//! `Ending` begins by withdrawing the lease: from then on nobody takes the sandbox over. `Ended` begins when nothing in it
//! runs any more, which is when every process has been killed; what the kernel still has of them, and what is left on disk,
//! goes afterwards.
#![warn(clippy::wildcard_enum_match_arm)]

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::clock::Timestamp;

/// Where a sandbox stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    Creating,
    Running,
    Paused,
    Ending(End),
    Ended(End),
}

/// How a sandbox ended, or is ending.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct End {
    pub cause: Cause,
    /// Who asked for it; empty = nobody did.
    pub by: String,
    pub reason: String,
    pub at: Timestamp,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// By a call.
    Killed,
    /// Its time was over.
    Expired,
    /// Nothing was asked of it for its idle time.
    Idle,
    /// Its first process ended and the OOM killer had struck in it.
    OutOfMemory,
    /// It went away by itself.
    Lost,
    /// The server ended and took it along.
    Shutdown,
    CreateFailed,
}

/// What happens to a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    Created,
    CreateFailed(End),
    PauseAsked,
    FreezeFailed,
    ResumeAsked,
    ThawFailed,
    RenewAsked,
    SnapshotAsked,
    MemorySnapshotAsked,
    EndAsked(End),
    StopFailed,
    Stopped,
}

/// What is to be done then. Each can be done again without harm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    Freeze,
    Thaw,
    Extend,
    /// With a freeze around it.
    SnapshotRunning,
    /// It stands still already, and stays so.
    SnapshotPaused,
    SnapshotMemory,
    /// Withdraw the lease, end all commands, end every process.
    Stop,
    StopAgain,
    /// Give the place back, remove every trace.
    CleanUp,
}

/// Why nothing comes of an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Denied {
    /// It is being made.
    NotReady,
    Paused,
    Over(End),
    /// The driver itself is wrong.
    Impossible,
}

impl fmt::Display for Denied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotReady => f.write_str("is being made"),
            Self::Paused => f.write_str("is paused"),
            Self::Over(end) => write!(f, "has ended: {end}"),
            Self::Impossible => f.write_str("was told what cannot be"),
        }
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.cause {
            Cause::Killed => "it was killed",
            Cause::Expired => "its time was over",
            Cause::Idle => "it was idle for too long",
            Cause::OutOfMemory => "its first process was ended by the OOM killer",
            Cause::Lost => "it went away by itself",
            Cause::Shutdown => "the server shut down",
            Cause::CreateFailed => "it could not be made",
        })?;
        if !self.by.is_empty() {
            write!(f, " by {}", self.by)?;
        }
        if !self.reason.is_empty() {
            write!(f, " ({})", self.reason)?;
        }
        Ok(())
    }
}

impl State {
    /// How it ends, once that is settled.
    pub fn end(&self) -> Option<&End> {
        match self {
            Self::Creating | Self::Running | Self::Paused => None,
            Self::Ending(end) | Self::Ended(end) => Some(end),
        }
    }
}

/// Decides what `event` means in `state`. No IO and no clock.
///
/// # Errors
/// Why it means nothing; the state stays.
pub fn step(state: &State, event: Event) -> Result<(State, Option<Effect>), Denied> {
    match state {
        State::Creating => match event {
            Event::Created => Ok((State::Running, None)),
            Event::CreateFailed(end) => Ok((State::Ended(end), Some(Effect::CleanUp))),
            // Making it runs to its end first: there is nothing yet that could be stopped.
            Event::EndAsked(end) => Ok((State::Ending(end), None)),
            Event::PauseAsked
            | Event::ResumeAsked
            | Event::RenewAsked
            | Event::SnapshotAsked
            | Event::MemorySnapshotAsked => Err(Denied::NotReady),
            Event::FreezeFailed | Event::ThawFailed | Event::StopFailed | Event::Stopped => Err(Denied::Impossible),
        },
        State::Running => match event {
            Event::PauseAsked => Ok((State::Paused, Some(Effect::Freeze))),
            // Of two resumes, the second finds what it asked for.
            Event::ResumeAsked => Ok((State::Running, None)),
            Event::ThawFailed => Ok((State::Paused, None)),
            Event::RenewAsked => Ok((State::Running, Some(Effect::Extend))),
            Event::SnapshotAsked => Ok((State::Running, Some(Effect::SnapshotRunning))),
            Event::MemorySnapshotAsked => Ok((State::Running, Some(Effect::SnapshotMemory))),
            Event::EndAsked(end) => Ok((State::Ending(end), Some(Effect::Stop))),
            Event::Created | Event::CreateFailed(_) | Event::FreezeFailed | Event::StopFailed | Event::Stopped => {
                Err(Denied::Impossible)
            }
        },
        State::Paused => match event {
            Event::PauseAsked => Ok((State::Paused, None)),
            Event::FreezeFailed => Ok((State::Running, None)),
            Event::ResumeAsked => Ok((State::Running, Some(Effect::Thaw))),
            Event::RenewAsked => Ok((State::Paused, Some(Effect::Extend))),
            Event::SnapshotAsked => Ok((State::Paused, Some(Effect::SnapshotPaused))),
            // Whoever writes the memory stands still too.
            Event::MemorySnapshotAsked => Err(Denied::Paused),
            Event::EndAsked(end) => Ok((State::Ending(end), Some(Effect::Stop))),
            Event::Created | Event::CreateFailed(_) | Event::ThawFailed | Event::StopFailed | Event::Stopped => {
                Err(Denied::Impossible)
            }
        },
        State::Ending(end) => match event {
            // It was being made when its end was asked for.
            Event::Created => Ok((state.clone(), Some(Effect::Stop))),
            Event::CreateFailed(_) | Event::Stopped => Ok((State::Ended(end.clone()), Some(Effect::CleanUp))),
            // The first cause is the cause.
            Event::EndAsked(_) => Ok((state.clone(), None)),
            Event::StopFailed => Ok((state.clone(), Some(Effect::StopAgain))),
            Event::PauseAsked
            | Event::ResumeAsked
            | Event::RenewAsked
            | Event::SnapshotAsked
            | Event::MemorySnapshotAsked => Err(Denied::Over(end.clone())),
            Event::FreezeFailed | Event::ThawFailed => Err(Denied::Impossible),
        },
        State::Ended(end) => match event {
            Event::EndAsked(_) => Ok((state.clone(), None)),
            Event::PauseAsked
            | Event::ResumeAsked
            | Event::RenewAsked
            | Event::SnapshotAsked
            | Event::MemorySnapshotAsked => Err(Denied::Over(end.clone())),
            Event::Created
            | Event::CreateFailed(_)
            | Event::FreezeFailed
            | Event::ThawFailed
            | Event::StopFailed
            | Event::Stopped => Err(Denied::Impossible),
        },
    }
}
