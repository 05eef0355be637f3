//! The host's half of one exec.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

/// One command to run.
#[derive(Debug, Clone, PartialEq)]
pub struct Command {
    pub argv: Vec<Vec<u8>>,
    /// On top of the sandbox's own minimal environment.
    pub env: BTreeMap<String, String>,
    /// Absolute, or relative to `/workspace`.
    pub cwd: Option<Vec<u8>>,
    pub timeout: Option<Duration>,
    pub stdin: Stdin,
}

/// What the command reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stdin {
    /// `/dev/null`.
    Null,
    Bytes(Vec<u8>),
    /// Sent later through [`Exec::input`].
    Open,
}

/// How a command ended, from the kernel's own counters where they say more than the exit status (promise 5).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    pub cause: Cause,
    pub duration: Duration,
    pub cpu: Duration,
    pub max_rss_bytes: u64,
    /// Descendants that outlived the command and were killed.
    pub killed_descendants: u32,
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
    /// The sandbox itself went away.
    SandboxLost {
        reason: String,
    },
}

/// What comes out of a running command, in the order it was written per stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    Stdout(Vec<u8>),
    Stderr(Vec<u8>),
}

/// A command that runs. Dropping it kills the whole tree.
#[derive(Debug)]
pub struct Exec {
    pub output: mpsc::Receiver<Output>,
}
