//! How a command of the fleet ended: the command's own end, or what came over it.

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
    /// It, or a limit, as the sandbox tells.
    Itself(Cause),
    /// A call.
    Killed { by: String, reason: String },
    /// Its client went away.
    Disconnected,
    /// Its sandbox.
    Sandbox(End),
    /// The server lost it.
    Lost { reason: String },
}

/// Who ended it, as far as the server asked for that.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Asked {
    Kill { by: String },
    Disconnect,
}

impl Finish {
    /// What `ended` means, given what the server had asked for and what it knows.
    pub fn of(ended: Ended, asked: Option<&Asked>, timeout: Option<Duration>, sandbox: Option<&End>) -> Self {
        let how = match (sandbox, &ended.cause, asked) {
            // Whatever it said while its sandbox was being ended is not its own end.
            (Some(end), _, _) => How::Sandbox(end.clone()),
            (None, Cause::Killed { .. }, Some(Asked::Disconnect)) => How::Disconnected,
            (None, Cause::Killed { .. }, Some(Asked::Kill { by })) => How::Killed {
                by: by.clone(),
                reason: String::new(),
            },
            (None, Cause::SandboxLost { reason }, _) => match timeout {
                // A paused guest cannot tell that a command's time was over.
                Some(timeout) if ended.duration >= timeout => How::Itself(Cause::TimedOut {
                    after_ms: timeout.as_millis() as u64,
                }),
                Some(_) | None => How::Lost { reason: reason.clone() },
            },
            (None, cause, _) => How::Itself(cause.clone()),
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
            How::Itself(Cause::Killed { .. }) | How::Killed { .. } => "killed",
            How::Itself(Cause::SandboxLost { .. }) | How::Lost { .. } => "lost",
            How::Disconnected => "disconnected",
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
