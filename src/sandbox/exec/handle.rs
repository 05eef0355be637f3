//! The handles on a running command.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use tokio::sync::{Notify, Semaphore, mpsc, oneshot};
use tokio::task::JoinSet;

use super::{Cause, Ended, Offsets, Output, TerminalSize};
use crate::ids::ExecId;
use crate::wire;

/// How much is taken between two words to the guest about it.
const TELL_TAKEN: u64 = 128 << 10;

/// The command takes no more input: it has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the command has ended and takes no more input")]
pub struct Closed;

/// A command that runs. Dropping it kills the whole tree, unless the command is detachable: then it runs on.
#[derive(Debug)]
pub struct Exec {
    /// Ends after the last output. Bounded: a command whose output is not taken waits.
    pub output: Outputs,
    pub(super) id: ExecId,
    pub(super) pid: u32,
    pub(super) control: Control,
    pub(super) ended: oneshot::Receiver<Ended>,
    /// The driver, and the feeder of [`Stdin::Bytes`](super::Stdin::Bytes): they live as long as this.
    pub(super) _tasks: JoinSet<()>,
}

impl Exec {
    pub fn id(&self) -> &ExecId {
        &self.id
    }

    /// Of its main process, as seen inside.
    pub fn pid(&self) -> u32 {
        self.pid
    }

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
    /// Dropping the future is dropping the exec.
    pub async fn ended(mut self) -> Ended {
        self.output.close();
        while self.output.recv().await.is_some() {}
        match (&mut self.ended).await {
            Ok(ended) => ended,
            // The driver sends before it ends, unless it panicked.
            Err(_) => Ended::new(Cause::SandboxLost {
                reason: "the task that drove the command broke off".to_owned(),
            }),
        }
    }
}

/// The output of one exec, as it comes.
#[derive(Debug)]
pub struct Outputs {
    receiver: mpsc::Receiver<Output>,
    taken: Arc<Taken>,
}

impl Outputs {
    pub(super) fn new(receiver: mpsc::Receiver<Output>, taken: Arc<Taken>) -> Self {
        Self { receiver, taken }
    }

    /// The next piece; `None` after the last. Cancellation-safe.
    pub async fn recv(&mut self) -> Option<Output> {
        let output = self.receiver.recv().await?;
        self.taken.note(&output);
        Some(output)
    }

    /// What is here already.
    pub fn try_recv(&mut self) -> Option<Output> {
        let output = self.receiver.try_recv().ok()?;
        self.taken.note(&output);
        Some(output)
    }

    /// Lets the command go on without its output being taken: whatever comes now is thrown away.
    pub fn close(&mut self) {
        self.receiver.close();
    }
}

/// How far the output was taken: a guest that keeps output for a later attach may let go of the rest.
#[derive(Debug)]
pub(super) struct Taken {
    /// Whether the guest wants to know.
    pub wanted: bool,
    stdout: AtomicU64,
    stderr: AtomicU64,
    pty: AtomicU64,
    since: AtomicU64,
    pub enough: Notify,
}

impl Taken {
    pub fn new(wanted: bool, from: Offsets) -> Self {
        Self {
            wanted,
            stdout: from.stdout.into(),
            stderr: from.stderr.into(),
            pty: from.pty.into(),
            since: 0.into(),
            enough: Notify::new(),
        }
    }

    pub fn note(&self, output: &Output) {
        if !self.wanted {
            return;
        }
        let place = match output {
            Output::Stdout(_) => &self.stdout,
            Output::Stderr(_) => &self.stderr,
            Output::Pty(_) => &self.pty,
        };
        let piece = output.piece();
        place.store(piece.end(), Ordering::Relaxed);
        let length = piece.len() as u64;
        if self.since.fetch_add(length, Ordering::Relaxed) + length >= TELL_TAKEN {
            self.since.store(0, Ordering::Relaxed);
            self.enough.notify_one();
        }
    }

    pub fn offsets(&self) -> Offsets {
        Offsets {
            stdout: self.stdout.load(Ordering::Relaxed),
            stderr: self.stderr.load(Ordering::Relaxed),
            pty: self.pty.load(Ordering::Relaxed),
        }
    }
}

/// What can be done to a running command.
#[derive(Debug, Clone)]
pub struct Control {
    pub(super) actions: mpsc::Sender<Action>,
    /// Bytes of stdin that may still be sent.
    pub(super) window: Arc<Semaphore>,
}

#[derive(Debug)]
pub(super) enum Action {
    Input(wire::input::Kind),
    /// The end of the command, and what is to be its cause.
    Kill {
        how: wire::input::Kind,
        cause: Cause,
    },
}

impl Control {
    /// Sends bytes to standard input; waits while the command does not read.
    ///
    /// Not cancellation-safe: a part may have been sent.
    pub async fn input(&self, bytes: &[u8]) -> Result<(), Closed> {
        for chunk in bytes.chunks(wire::CHUNK) {
            let permit = self.window.acquire_many(chunk.len() as u32).await.map_err(|_| Closed)?;
            permit.forget();
            self.send(Action::Input(wire::input::Kind::Stdin(Bytes::copy_from_slice(chunk))))
                .await?;
        }
        Ok(())
    }

    /// Ends standard input; on a pseudo-terminal, as Ctrl-D.
    pub async fn close_input(&self) -> Result<(), Closed> {
        self.send(Action::Input(wire::input::Kind::StdinEof(true))).await
    }

    /// Sends a signal to the command's process group.
    pub async fn signal(&self, number: i32) -> Result<(), Closed> {
        self.send(Action::Input(wire::input::Kind::Signal(number))).await
    }

    /// Sends a signal to every process of the command.
    pub async fn signal_tree(&self, number: i32) -> Result<(), Closed> {
        self.send(Action::Input(wire::input::Kind::SignalTree(number))).await
    }

    /// Gives the pseudo-terminal another size; without one, nothing happens.
    pub async fn resize(&self, size: TerminalSize) -> Result<(), Closed> {
        self.send(Action::Input(wire::input::Kind::Resize(size.into()))).await
    }

    /// SIGKILL to the whole tree; `by` is who asked, and becomes [`Cause::Killed`].
    pub async fn kill(&self, by: impl Into<String>) -> Result<(), Closed> {
        let by = by.into();
        let how = wire::input::Kind::Kill(by.clone());
        self.send(Action::Kill {
            how,
            cause: Cause::Killed { by },
        })
        .await
    }

    /// SIGTERM to the whole tree, the command's grace, SIGKILL to what is left. `by` becomes [`Cause::Killed`].
    pub async fn terminate(&self, by: impl Into<String>) -> Result<(), Closed> {
        let by = by.into();
        let how = wire::input::Kind::Terminate(by.clone());
        self.send(Action::Kill {
            how,
            cause: Cause::Killed { by },
        })
        .await
    }

    /// Ends it as [`Control::terminate`] does, because its client went away: [`Cause::Disconnected`].
    pub async fn disconnected(&self) -> Result<(), Closed> {
        let how = wire::input::Kind::Terminate(String::new());
        self.send(Action::Kill {
            how,
            cause: Cause::Disconnected,
        })
        .await
    }

    async fn send(&self, action: Action) -> Result<(), Closed> {
        self.actions.send(action).await.map_err(|_| Closed)
    }
}

impl From<TerminalSize> for wire::TerminalSize {
    fn from(size: TerminalSize) -> Self {
        Self {
            rows: size.rows.into(),
            columns: size.columns.into(),
        }
    }
}
