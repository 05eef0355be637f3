//! How a command of the fleet ended: its own end, or that of its sandbox.

use std::time::Duration;

use crate::fleet::state::{Cause as Over, End};
use crate::sandbox::{Cause, Ended};

/// The end of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finish {
    pub how: How,
    /// What is known of the command itself; `None` when nothing was heard of its end.
    pub ended: Option<Ended>,
    pub duration: Duration,
}

/// Why it runs no more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum How {
    /// By itself, by a limit, or on request, as its sandbox tells.
    Itself(Cause),
    /// With its sandbox.
    Sandbox(End),
}

impl Finish {
    /// What `ended` means, given what the server knows.
    pub fn of(ended: Ended, timeout: Option<Duration>, sandbox: Option<&End>) -> Self {
        let how = match (sandbox, &ended.cause) {
            // Whatever it said while its sandbox was being ended is not its own end.
            (Some(end), _) => How::Sandbox(end.clone()),
            // A paused guest cannot tell that a command's time was over.
            (None, Cause::SandboxLost { .. }) if timeout.is_some_and(|timeout| ended.duration >= timeout) => {
                How::Itself(Cause::TimedOut {
                    after_ms: timeout.unwrap_or_default().as_millis() as u64,
                })
            }
            (None, cause) => How::Itself(cause.clone()),
        };
        Self {
            how,
            duration: ended.duration,
            ended: Some(ended),
        }
    }

    /// The end that comes over every command of a sandbox that ends.
    pub fn with_sandbox(end: &End, duration: Duration) -> Self {
        Self {
            how: How::Sandbox(end.clone()),
            ended: None,
            duration,
        }
    }

    /// For the audit record.
    pub fn word(&self) -> &'static str {
        match &self.how {
            How::Itself(Cause::Exited { code: 0 }) => "ok",
            How::Itself(Cause::Exited { .. }) => "failed",
            How::Itself(Cause::Signalled { .. }) => "signalled",
            How::Itself(Cause::TimedOut { .. }) => "timed_out",
            How::Itself(Cause::OutOfMemory { .. }) => "out_of_memory",
            How::Itself(Cause::Killed { .. }) => "killed",
            How::Itself(Cause::Disconnected) => "disconnected",
            How::Itself(Cause::Superseded) => "superseded",
            How::Itself(Cause::SandboxKilled { .. }) => "sandbox_killed",
            How::Itself(Cause::SandboxExpired) => "sandbox_expired",
            How::Itself(Cause::SandboxIdle) => "sandbox_idle",
            How::Itself(Cause::SandboxShutdown) => "sandbox_shutdown",
            How::Itself(Cause::SandboxOutOfMemory { .. }) => "sandbox_out_of_memory",
            How::Itself(Cause::SandboxLost { .. }) => "sandbox_lost",
            How::Sandbox(end) => match end.cause {
                Over::Killed => "sandbox_killed",
                Over::Expired => "sandbox_expired",
                Over::Idle => "sandbox_idle",
                Over::OutOfMemory => "sandbox_out_of_memory",
                Over::Lost => "sandbox_lost",
                Over::Shutdown => "sandbox_shutdown",
                Over::CreateFailed => "sandbox_create_failed",
            },
        }
    }
}
