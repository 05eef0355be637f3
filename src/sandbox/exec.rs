//! The host's half of one exec: what to run, what comes out, how it ended.
//!
//! Owns: the command and its environment, the types of output and end, the handles on a running command. The conversation
//! with the guest is in `driver`, bounded capture of output in `capture`. Everything that comes from the guest is hostile:
//! `driver` checks the order and the size of what it says, and the host's own counters decide where they say more.

mod capture;
mod driver;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::task::JoinSet;

pub use capture::{Captured, Finished};
pub(super) use driver::{Counters, Place, ping, start};

use crate::wire;

/// Between SIGTERM and SIGKILL when a command's time is up.
pub const GRACE: Duration = Duration::from_millis(500);

/// One command to run.
#[derive(Debug, Clone, PartialEq)]
pub struct Command {
    pub argv: Vec<Vec<u8>>,
    /// On top of the sandbox's own minimal environment.
    pub env: BTreeMap<String, String>,
    /// Absolute, or relative to the default: `/workspace`, or `/tmp` in a sandbox without one.
    pub cwd: Option<Vec<u8>>,
    pub timeout: Option<Duration>,
    pub stdin: Stdin,
}

impl Command {
    /// `argv` with nothing else asked for.
    pub fn new<A: Into<Vec<u8>>>(argv: impl IntoIterator<Item = A>) -> Self {
        Self {
            argv: argv.into_iter().map(Into::into).collect(),
            env: BTreeMap::new(),
            cwd: None,
            timeout: None,
            stdin: Stdin::Null,
        }
    }

    /// `text` run by `sh -c`.
    pub fn shell(text: &str) -> Self {
        Self::new(["sh", "-c", text])
    }

    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    pub fn stdin(mut self, stdin: Stdin) -> Self {
        self.stdin = stdin;
        self
    }

    pub fn cwd(mut self, cwd: impl Into<Vec<u8>>) -> Self {
        self.cwd = Some(cwd.into());
        self
    }

    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.insert(name.to_owned(), value.to_owned());
        self
    }
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
    /// What could not be found out about the end, and why; mostly empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unknown: Option<String>,
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

impl Ended {
    pub fn is_success(&self) -> bool {
        self.cause == Cause::Exited { code: 0 }
    }

    /// An end of which nothing is known but its cause.
    fn lost(reason: impl Into<String>, duration: Duration) -> Self {
        Self {
            cause: Cause::SandboxLost { reason: reason.into() },
            duration,
            cpu: Duration::ZERO,
            max_rss_bytes: 0,
            killed_descendants: 0,
            unknown: None,
        }
    }
}

/// What comes out of a running command, in the order it was written per stream. Never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    Stdout(Vec<u8>),
    Stderr(Vec<u8>),
}

/// The command takes no more input: it has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the command has ended and takes no more input")]
pub struct Closed;

/// A command that runs. Dropping it kills the whole tree.
#[derive(Debug)]
pub struct Exec {
    /// Ends after the last output. Bounded: a command whose output is not taken waits.
    pub output: mpsc::Receiver<Output>,
    control: Control,
    ended: oneshot::Receiver<Ended>,
    /// The driver, and the feeder of [`Stdin::Bytes`]: they live as long as this.
    _tasks: JoinSet<()>,
}

impl Exec {
    /// Sends input; see [`Control::input`].
    pub async fn input(&self, bytes: &[u8]) -> Result<(), Closed> {
        self.control.input(bytes).await
    }

    /// Kills the whole tree; see [`Control::kill`].
    pub async fn kill(&self, by: impl Into<String>) -> Result<(), Closed> {
        self.control.kill(by).await
    }

    /// A handle that can be passed on. It keeps nothing alive.
    pub fn control(&self) -> Control {
        self.control.clone()
    }

    /// Waits for the end. Output that was not taken is dropped.
    ///
    /// Dropping the future kills the whole tree.
    pub async fn ended(mut self) -> Ended {
        self.output.close();
        while self.output.recv().await.is_some() {}
        match (&mut self.ended).await {
            Ok(ended) => ended,
            // The driver sends before it ends, unless it panicked.
            Err(_) => Ended::lost("the task that drove the command broke off", Duration::ZERO),
        }
    }
}

/// What can be done to a running command.
#[derive(Debug, Clone)]
pub struct Control {
    actions: mpsc::Sender<Action>,
    /// Bytes of stdin that may still be sent.
    window: Arc<Semaphore>,
}

#[derive(Debug)]
enum Action {
    Input(wire::input::Kind),
    Kill { by: String },
}

impl Control {
    /// Sends bytes to standard input; waits while the command does not read.
    ///
    /// Not cancellation-safe: a part may have been sent.
    pub async fn input(&self, bytes: &[u8]) -> Result<(), Closed> {
        for chunk in bytes.chunks(wire::CHUNK) {
            let permit = self.window.acquire_many(chunk.len() as u32).await.map_err(|_| Closed)?;
            permit.forget();
            self.send(Action::Input(wire::input::Kind::Stdin(chunk.to_vec())))
                .await?;
        }
        Ok(())
    }

    /// Ends standard input.
    pub async fn close_input(&self) -> Result<(), Closed> {
        self.send(Action::Input(wire::input::Kind::StdinEof(true))).await
    }

    /// Sends a signal to the command's process group.
    pub async fn signal(&self, number: i32) -> Result<(), Closed> {
        self.send(Action::Input(wire::input::Kind::Signal(number))).await
    }

    /// SIGKILL to the whole tree; `by` is who asked, and becomes [`Cause::Killed`].
    pub async fn kill(&self, by: impl Into<String>) -> Result<(), Closed> {
        self.send(Action::Kill { by: by.into() }).await
    }

    async fn send(&self, action: Action) -> Result<(), Closed> {
        self.actions.send(action).await.map_err(|_| Closed)
    }
}
