//! How a command ended: the cause, what it used, what the kernel refused it.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::wire;

/// How a command ended, from the kernel's own counters where they say more than the exit status (promise 5).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    pub cause: Cause,
    pub duration: Duration,
    /// Of the command and its descendants.
    pub cpu: Duration,
    /// Of the largest of them.
    pub max_rss_bytes: u64,
    /// Of both, the part of descendants that the command had not waited for.
    #[serde(skip)]
    pub others: Used,
    /// Descendants that outlived the command and were killed.
    pub killed_descendants: u32,
    /// Descendants that outlived the command and live on ([`Background::Keep`](super::Background::Keep)).
    #[serde(default)]
    pub kept_descendants: u32,
    #[serde(default)]
    pub stdout: Counts,
    #[serde(default)]
    pub stderr: Counts,
    /// Of a command on a pseudo-terminal.
    #[serde(default)]
    pub pty: Counts,
    /// What the kernel refused meanwhile: a command may have swallowed it.
    #[serde(default)]
    pub pressure: Pressure,
    /// What could not be found out about the end, and why; mostly empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unknown: Option<String>,
}

/// What processes used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Used {
    pub cpu: Duration,
    /// Of the largest.
    pub max_rss_bytes: u64,
}

/// Bytes of one stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Counts {
    /// Made by the command.
    pub bytes: u64,
    /// Of these, thrown away undelivered ([`Overflow::Drop`](super::Overflow::Drop)).
    pub dropped: u64,
}

/// What the sandbox ran out of while a command ran: differences of its counters, so commands beside it count too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Pressure {
    pub oom_kills: u64,
    /// By the limit on processes.
    pub forks_refused: u64,
    pub pids_limit: u64,
    /// At the end of the command no space, or no inode, was left in the workspace.
    pub disk_full: bool,
    pub disk_limit_bytes: u64,
}

/// Why a command is no longer running.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Cause {
    Exited {
        code: i32,
    },
    Signalled {
        signal: i32,
    },
    /// It, or a descendant, ran past its time and the whole tree was killed.
    TimedOut {
        after_ms: u64,
    },
    /// The OOM killer struck inside the sandbox while it ran and it died of that.
    OutOfMemory {
        limit_bytes: u64,
        peak_bytes: u64,
    },
    /// Killed on request.
    Killed {
        by: String,
    },
    /// Its client went away, and it was to end with it.
    Disconnected,
    /// Another attach took this exec over: it runs on, and its end is told there.
    Superseded,
    /// The sandbox was ended on request.
    SandboxKilled {
        by: String,
        reason: String,
    },
    /// The sandbox's time was up.
    SandboxExpired,
    /// Nobody had used the sandbox for as long as it allows.
    SandboxIdle,
    /// The server ended and took its sandboxes along.
    SandboxShutdown,
    /// The OOM killer ended the sandbox itself.
    SandboxOutOfMemory {
        limit_bytes: u64,
        peak_bytes: u64,
    },
    /// The sandbox itself went away.
    SandboxLost {
        reason: String,
    },
}

/// Why a sandbox is ended on purpose; see `Sandbox::ending`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EndReason {
    Killed { by: String, reason: String },
    Expired,
    Idle,
    Shutdown,
}

impl From<EndReason> for Cause {
    fn from(reason: EndReason) -> Self {
        match reason {
            EndReason::Killed { by, reason } => Self::SandboxKilled { by, reason },
            EndReason::Expired => Self::SandboxExpired,
            EndReason::Idle => Self::SandboxIdle,
            EndReason::Shutdown => Self::SandboxShutdown,
        }
    }
}

impl Ended {
    /// An end of which nothing is known but its cause.
    pub fn new(cause: Cause) -> Self {
        Self {
            cause,
            duration: Duration::ZERO,
            cpu: Duration::ZERO,
            max_rss_bytes: 0,
            others: Used::default(),
            killed_descendants: 0,
            kept_descendants: 0,
            stdout: Counts::default(),
            stderr: Counts::default(),
            pty: Counts::default(),
            pressure: Pressure::default(),
            unknown: None,
        }
    }

    /// An end as a guest tells of it, for this cause: without what the host's counters say.
    pub(super) fn told(cause: Cause, said: &wire::Ended) -> Self {
        let (made, dropped) = (said.made.unwrap_or_default(), said.dropped.unwrap_or_default());
        let counts = |made: u64, dropped: u64| Counts {
            bytes: made,
            dropped: dropped.min(made),
        };
        Self {
            duration: Duration::from_micros(said.duration_us),
            cpu: Duration::from_micros(
                said.user_us
                    .saturating_add(said.system_us)
                    .saturating_add(said.others_cpu_us),
            ),
            max_rss_bytes: said.max_rss_bytes.max(said.others_max_rss_bytes),
            others: Used {
                cpu: Duration::from_micros(said.others_cpu_us),
                max_rss_bytes: said.others_max_rss_bytes,
            },
            killed_descendants: said.killed_descendants,
            kept_descendants: said.kept_descendants,
            stdout: counts(made.stdout, dropped.stdout),
            stderr: counts(made.stderr, dropped.stderr),
            pty: counts(made.pty, dropped.pty),
            pressure: Pressure {
                disk_full: said.disk_full,
                disk_limit_bytes: said.disk_bytes,
                ..Pressure::default()
            },
            ..Self::new(cause)
        }
    }

    pub fn is_success(&self) -> bool {
        self.cause == Cause::Exited { code: 0 }
    }
}

impl Cause {
    /// Whether it is what ran inside that ended the sandbox: it took more than the sandbox may have.
    pub fn is_by_program(&self) -> bool {
        match self {
            Self::SandboxOutOfMemory { .. } | Self::SandboxExpired => true,
            Self::SandboxKilled { .. }
            | Self::SandboxIdle
            | Self::SandboxShutdown
            | Self::SandboxLost { .. }
            | Self::Exited { .. }
            | Self::Signalled { .. }
            | Self::TimedOut { .. }
            | Self::OutOfMemory { .. }
            | Self::Killed { .. }
            | Self::Disconnected
            | Self::Superseded => false,
        }
    }

    /// Whether the sandbox went with it, and why.
    pub fn sandbox_gone(&self) -> Option<String> {
        match self {
            Self::SandboxKilled { by, reason } if reason.is_empty() => Some(format!("it was ended by {by}")),
            Self::SandboxKilled { by, reason } => Some(format!("it was ended by {by}: {reason}")),
            Self::SandboxExpired => Some("its time was up".to_owned()),
            Self::SandboxIdle => Some("nobody had used it for as long as it allows".to_owned()),
            Self::SandboxShutdown => Some("the server ended".to_owned()),
            Self::SandboxOutOfMemory {
                limit_bytes,
                peak_bytes,
            } => Some(format!(
                "the OOM killer struck in it (limit {limit_bytes} bytes, peak {peak_bytes} bytes)"
            )),
            Self::SandboxLost { reason } => Some(reason.clone()),
            Self::Exited { .. }
            | Self::Signalled { .. }
            | Self::TimedOut { .. }
            | Self::OutOfMemory { .. }
            | Self::Killed { .. }
            | Self::Disconnected
            | Self::Superseded => None,
        }
    }
}
