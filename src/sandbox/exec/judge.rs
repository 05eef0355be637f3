//! The judgement on how an exec ended: what the guest said, held against what the host's own counters say.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::time::Instant;

use super::company::{Company, Lasting, Stay};
use super::{Cause, EndReason, Ended, Pressure};
use crate::error::chain;
use crate::sandbox::{Backend, Error, Handle, Losses};
use crate::wire::{self, ended};

/// Where a command runs.
#[derive(Debug, Clone)]
pub(in crate::sandbox) struct Place {
    pub backend: Arc<dyn Backend>,
    pub sandbox: Handle,
    pub memory_limit_bytes: u64,
    pub pids_limit: u64,
    /// Why the sandbox is ended on purpose, once it is.
    pub ending: Arc<OnceLock<EndReason>>,
    pub company: Company,
}

impl Place {
    pub fn lost(&self, reason: impl Into<String>) -> Error {
        Error::GuestLost {
            sandbox: self.sandbox.id.clone(),
            reason: reason.into(),
        }
    }
}

/// The counters as they stood when the exec began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Before(pub Losses);

impl Before {
    /// For the guest to keep, as another server may hear of the end.
    pub fn note(self) -> Vec<u8> {
        [self.0.oom_kills.to_le_bytes(), self.0.pids_refused.to_le_bytes()].concat()
    }

    pub fn from_note(note: &[u8]) -> Option<Self> {
        let (oom_kills, rest) = note.split_first_chunk::<8>()?;
        Some(Self(Losses {
            oom_kills: u64::from_le_bytes(*oom_kills),
            pids_refused: u64::from_le_bytes(*rest.first_chunk()?),
        }))
    }
}

/// What is known of an exec beside what its guest says.
#[derive(Debug)]
pub(super) struct Judge {
    pub place: Place,
    /// `None` when nobody wants the end explained.
    pub before: Option<Result<Before, Error>>,
    pub limit: Option<Duration>,
    pub begun: Instant,
    /// The guest's own word on a kill is taken: whoever asked for it may have been another connection.
    pub detachable: bool,
    /// `None` where its beginning was not seen here.
    pub stay: Option<Stay>,
}

/// What the counters say of the time in between.
#[derive(Default)]
struct Since {
    oom_kills: u64,
    forks_refused: u64,
    peak_bytes: u64,
    unknown: Option<String>,
}

impl Judge {
    /// `asked` is the cause of a kill that went out through this connection.
    pub async fn ended(&mut self, said: wire::Ended, asked: Option<Cause>) -> Ended {
        let since = self.since().await;
        // The counters are the sandbox's. A kill is this command's where no other was there to be killed, or where something of
        // its tree was killed and nobody here did it.
        let alone = self.stay.as_ref().is_some_and(Stay::is_alone);
        if let Some(stay) = &mut self.stay {
            let lasting = said.kept_descendants > 0;
            stay.end(if lasting { Lasting::Yes } else { Lasting::No });
        }
        let is_killed = match said.status {
            Some(ended::Status::Signal(signal)) => signal == libc::SIGKILL,
            // As a shell tells of it.
            Some(ended::Status::ExitCode(code)) => code == 128 + libc::SIGKILL,
            None => false,
        };
        let has_proof = alone || is_killed || said.others_killed > 0;
        let out_of_memory = |cause| match since.oom_kills {
            0 => cause,
            _ if !has_proof => cause,
            _ => Cause::OutOfMemory {
                limit_bytes: self.place.memory_limit_bytes,
                peak_bytes: since.peak_bytes,
            },
        };
        let by_guest = |said: &wire::Ended| (self.detachable && said.killed).then(|| said.killed_by.clone());
        let cause = match (said.status, self.limit, asked) {
            // A flag that we gave no occasion for counts for nothing.
            (Some(_), Some(limit), _) if said.timed_out => Cause::TimedOut {
                after_ms: limit.as_millis() as u64,
            },
            (Some(_), _, Some(cause)) if said.killed => cause,
            (Some(status), _, _) => match (status, by_guest(&said)) {
                (_, Some(by)) => Cause::Killed { by },
                (ended::Status::ExitCode(0), None) => Cause::Exited { code: 0 },
                (ended::Status::ExitCode(code @ 1..=255), None) => out_of_memory(Cause::Exited { code }),
                (ended::Status::Signal(libc::SIGKILL), None) => {
                    out_of_memory(Cause::Signalled { signal: libc::SIGKILL })
                }
                (ended::Status::Signal(signal @ 1..=64), None) => Cause::Signalled { signal },
                (ended::Status::ExitCode(_) | ended::Status::Signal(_), None) => impossible(),
            },
            (None, _, _) => impossible(),
        };
        // The sandbox is going away: whatever the program made of that is no end of its own.
        let cause = self.place.ending.get().cloned().map_or(cause, Cause::from);
        let told = Ended::told(cause, &said);
        Ended {
            duration: told.duration.min(self.begun.elapsed()),
            pressure: Pressure {
                oom_kills: since.oom_kills,
                forks_refused: since.forks_refused,
                pids_limit: if self.before.is_some() {
                    self.place.pids_limit
                } else {
                    0
                },
                ..told.pressure
            },
            unknown: since.unknown,
            ..told
        }
    }

    /// The end of an exec whose guest said nothing of it, or nothing that makes sense.
    pub async fn lost(&self, reason: String) -> Ended {
        let cause = match self.place.ending.get() {
            Some(reason) => reason.clone().into(),
            // Of a sandbox that is gone there are no counters; that adds nothing to its being lost.
            None => match self.since().await {
                Since {
                    oom_kills: 1..,
                    peak_bytes,
                    ..
                } => Cause::SandboxOutOfMemory {
                    limit_bytes: self.place.memory_limit_bytes,
                    peak_bytes,
                },
                Since { .. } => Cause::SandboxLost { reason },
            },
        };
        self.bare(cause)
    }

    /// An end of which no more is known than its cause and the time.
    pub fn bare(&self, cause: Cause) -> Ended {
        Ended {
            duration: self.begun.elapsed(),
            ..Ended::new(cause)
        }
    }

    async fn since(&self) -> Since {
        let unread = |error: &Error| Since {
            unknown: Some(format!("whether memory ran out: {}", chain(error))),
            ..Since::default()
        };
        let before = match &self.before {
            None => return Since::default(),
            Some(Err(error)) => return unread(error),
            Some(Ok(Before(before))) => before,
        };
        let Place { backend, sandbox, .. } = &self.place;
        let after = match backend.losses(sandbox).await {
            Err(error) => return unread(&error),
            Ok(after) => after,
        };
        let oom_kills = after.oom_kills.saturating_sub(before.oom_kills);
        let peak_bytes = match oom_kills {
            0 => 0,
            _ => match backend.usage(sandbox).await {
                Err(error) => return unread(&error),
                Ok(usage) => usage.memory_peak_bytes,
            },
        };
        Since {
            oom_kills,
            forks_refused: after.pids_refused.saturating_sub(before.pids_refused),
            peak_bytes,
            unknown: None,
        }
    }
}

fn impossible() -> Cause {
    Cause::SandboxLost {
        reason: "its guest told of an end that cannot be".to_owned(),
    }
}
