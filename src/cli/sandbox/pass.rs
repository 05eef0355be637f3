//! Bytes in both directions, as they are and as they come, and the signals that end it.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::input;
use crate::cli::Error;
use crate::error::Kind;
use crate::sandbox::{Control, Exec, Output};

/// How long a reader that does not read may hold the end up, once a signal has come.
const LINGER: Duration = Duration::from_secs(1);

/// Who killed the command when its output could not be passed on.
pub(super) const READER_GONE: &str = "the end of whoever read its output";

/// What went through.
#[derive(Debug, Default)]
pub(super) struct Passed {
    pub stdout_bytes: u64,
    pub stderr_bytes: u64,
    /// The last line of stdout has no end.
    pub is_mid_line: bool,
    /// Whoever read the output went away, or it could not be written, and the command was killed for it.
    pub is_cut: bool,
    /// Why it could not be written.
    pub unwritten: Option<io::Error>,
}

/// The signals that ask this process to end. From when they are listened for they no longer end it by themselves.
#[derive(Debug)]
pub(super) struct Interrupts {
    interrupt: Signal,
    terminate: Signal,
    hang_up: Signal,
}

impl Interrupts {
    pub fn listen() -> Result<Self, Error> {
        let listen = |kind| {
            signal(kind).map_err(|error| Error::new(Kind::Internal, format!("cannot listen for signals: {error}")))
        };
        Ok(Self {
            interrupt: listen(SignalKind::interrupt())?,
            terminate: listen(SignalKind::terminate())?,
            hang_up: listen(SignalKind::hangup())?,
        })
    }

    /// The next one, also if it came before this call.
    async fn next(&mut self) -> &'static str {
        // None of these loses a signal when another is first.
        tokio::select! {
            _ = self.interrupt.recv() => "SIGINT",
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.hang_up.recv() => "SIGHUP",
        }
    }
}

/// Passes output on to its end, and input where asked.
pub(super) async fn pass(exec: &mut Exec, stdin: bool, mut interrupts: Interrupts) -> Passed {
    let interrupted = CancellationToken::new();
    // Dropped, and with it ended, at the end of this function.
    let mut helpers = JoinSet::new();
    if stdin {
        helpers.spawn(feed(exec.control()));
    }
    let (control, told) = (exec.control(), interrupted.clone());
    helpers.spawn(async move {
        let name = interrupts.next().await;
        // It may have ended by now, which is as good.
        let _ = control.kill(name).await;
        told.cancel();
    });
    let (mut stdout, mut stderr) = (tokio::io::stdout(), tokio::io::stderr());
    let mut passed = Passed::default();
    while let Some(output) = exec.output.recv().await {
        if passed.is_cut {
            continue;
        }
        let written = match &output {
            Output::Stdout(bytes) | Output::Pty(bytes) => {
                passed.stdout_bytes += bytes.len() as u64;
                passed.is_mid_line = !bytes.ends_with(b"\n");
                write(&mut stdout, bytes, &interrupted).await
            }
            Output::Stderr(bytes) => {
                passed.stderr_bytes += bytes.len() as u64;
                write(&mut stderr, bytes, &interrupted).await
            }
        };
        if let Err(error) = written {
            passed.is_cut = true;
            passed.unwritten = error;
            let _ = exec.kill(READER_GONE).await;
        }
    }
    passed
}

/// Writes all of it, at once and not into a buffer.
///
/// # Errors
/// `None` when nobody reads.
async fn write(
    to: &mut (impl AsyncWrite + Unpin),
    bytes: &[u8],
    interrupted: &CancellationToken,
) -> Result<(), Option<io::Error>> {
    let written = async { to.write_all(bytes).await.and(to.flush().await) };
    let late = async {
        interrupted.cancelled().await;
        tokio::time::sleep(LINGER).await;
    };
    tokio::select! {
        // What was written in part when a signal came is given up: there is no next write.
        written = written => written.map_err(|error| (error.kind() != io::ErrorKind::BrokenPipe).then_some(error)),
        () = late => Err(None),
    }
}

/// Passes standard input on.
async fn feed(command: Control) {
    let mut chunks = input::stdin();
    while let Some(chunk) = chunks.recv().await {
        if command.input(&chunk).await.is_err() {
            return;
        }
    }
    // It may have ended by now, which is as good.
    let _ = command.close_input().await;
}
