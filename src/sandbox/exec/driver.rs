//! The conversation with the guest about one exec, and the judgement on how it ended.
//!
//! ```text
//! Request ──► fault                       Err(NotStarted)
//!         ──► started ─► (output|credit)* ─► ended      judged
//!                                         ─► nothing    SandboxLost
//! ```
//! Whatever else the guest says is a lie or a break, and ends as [`Cause::SandboxLost`].

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{ReadHalf, WriteHalf};
use tokio::sync::{Notify, Semaphore, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};

use super::{Action, Cause, Control, Ended, Exec, GRACE, Output, Stdin};
use crate::error::chain;
use crate::sandbox::{Backend, Error, Handle, Isolation, Usage};
use crate::wire::{self, Event, Stream, ended, event};

/// How much longer than it has to the guest may take to answer, before it is taken for lost.
const SLACK: Duration = Duration::from_secs(5);
/// How long a command may take to start.
const START: Duration = Duration::from_secs(30);
/// Chunks of output ([`wire::CHUNK`] each) that wait for whoever takes them.
const QUEUE: usize = 16;

/// Where a command runs.
#[derive(Debug, Clone)]
pub(in crate::sandbox) struct Place {
    pub backend: Arc<dyn Backend>,
    pub sandbox: Handle,
    pub memory_limit_bytes: u64,
    pub isolation: Isolation,
}

/// Whether the end is judged by the sandbox's counters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::sandbox) enum Counters {
    Read,
    /// A file call: there is no end to explain.
    Spare,
}

/// Starts what `exec` asks for.
///
/// # Errors
/// [`Error::NotStarted`] when the guest could not; [`Error::GuestLost`] when it did not answer sensibly.
pub(in crate::sandbox) async fn start(
    place: Place,
    exec: wire::Exec,
    stdin: Stdin,
    counters: Counters,
) -> Result<Exec, Error> {
    let sandbox = place.sandbox.id.clone();
    let lost = |reason: String| Error::GuestLost {
        sandbox: sandbox.clone(),
        reason,
    };
    let limit = (exec.timeout_ms > 0).then(|| Duration::from_millis(exec.timeout_ms));
    let mut request = Vec::new();
    let message = wire::Request {
        generation: wire::GENERATION,
        kind: Some(wire::request::Kind::Exec(exec)),
    };
    wire::encode(&message, &mut request).map_err(|error| Error::NotStarted {
        code: "limit".to_owned(),
        message: format!("the command with its arguments and environment is too large: {error}"),
    })?;

    let counted = async {
        match counters {
            Counters::Read => Some(place.backend.usage(&place.sandbox).await),
            Counters::Spare => None,
        }
    };
    let begin = async {
        let mut stream = place.backend.connect(&place.sandbox).await?;
        let mut buffer = Vec::new();
        let first = timeout(START, async {
            stream.write_all(&request).await?;
            read_event(&mut stream, &mut buffer).await
        });
        match first.await {
            Err(_) => Err(lost(format!("it did not start the command within {START:?}"))),
            Ok(Err(error)) => Err(lost(error.to_string())),
            Ok(Ok(None)) => Err(lost("it hung up".to_owned())),
            Ok(Ok(Some(event))) => Ok((stream, buffer, event)),
        }
    };
    let begun = Instant::now();
    let (before, begin) = tokio::join!(counted, begin);
    let (stream, buffer, first) = begin?;
    match first.kind {
        Some(event::Kind::Started(_)) => {}
        Some(event::Kind::Fault(wire::Fault { code, message, .. })) => return Err(Error::NotStarted { code, message }),
        Some(event::Kind::Pong(_) | event::Kind::Output(_) | event::Kind::Ended(_) | event::Kind::Credit(_)) | None => {
            return Err(lost("its first word was out of place".to_owned()));
        }
    }

    let (output, output_receiver) = mpsc::channel(QUEUE);
    let (actions, actions_receiver) = mpsc::channel(QUEUE);
    let (ended, ended_receiver) = oneshot::channel();
    let window = Arc::new(Semaphore::new(wire::STDIN_WINDOW));
    let driver = Driver {
        place,
        before,
        limit,
        begun,
        window: window.clone(),
        killed_by: None,
    };
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let window = driver.window.clone();
        let end = driver.drive(stream, buffer, output, actions_receiver).await;
        window.close();
        // Whoever does not wait for the end has dropped the receiver.
        let _ = ended.send(end);
    });
    let control = Control { actions, window };
    if let Stdin::Bytes(bytes) = stdin {
        let control = control.clone();
        tasks.spawn(async move {
            // A command may end before it has read everything.
            if control.input(&bytes).await.is_ok() {
                let _ = control.close_input().await;
            }
        });
    }
    Ok(Exec {
        output: output_receiver,
        control,
        ended: ended_receiver,
        _tasks: tasks,
    })
}

/// The next whole event; `None` at a clean end.
async fn read_event(stream: &mut (impl AsyncReadExt + Unpin), buffer: &mut Vec<u8>) -> io::Result<Option<Event>> {
    loop {
        if let Some(event) = wire::decode::<Event>(buffer)? {
            return Ok(Some(event));
        }
        buffer.reserve(wire::CHUNK + 1024);
        // Cancellation-safe: what was read is in the buffer.
        if stream.read_buf(buffer).await? == 0 {
            return Ok(None);
        }
    }
}

struct Driver {
    place: Place,
    before: Option<Result<Usage, Error>>,
    limit: Option<Duration>,
    begun: Instant,
    window: Arc<Semaphore>,
    killed_by: Option<String>,
}

/// What the writing side tells the reading side.
#[derive(Default)]
struct Shared {
    /// Bytes of stdin sent and not yet credited.
    outstanding: usize,
    killed_by: Option<String>,
}

impl Driver {
    async fn drive(
        mut self,
        mut stream: UnixStream,
        buffer: Vec<u8>,
        output: mpsc::Sender<Output>,
        actions: mpsc::Receiver<Action>,
    ) -> Ended {
        let shared = std::sync::Mutex::new(Shared::default());
        let kill_asked = Notify::new();
        let said = {
            // Borrowed halves: an owned write half that is dropped hangs up.
            let (reader, writer) = stream.split();
            let mut listen = pin!(self.listen(reader, buffer, output, &shared, &kill_asked));
            let mut talk = pin!(talk(writer, actions, &shared, &kill_asked));
            tokio::select! {
                biased;
                said = &mut listen => said,
                // Nothing more can be said; the guest may still have something to say.
                () = &mut talk => (&mut listen).await,
            }
        };
        drop(stream);
        self.killed_by = shared.into_inner().unwrap_or_default().killed_by;
        match said {
            Ok(said) => self.judge(said).await,
            Err(reason) => self.judge_lost(reason).await,
        }
    }

    /// Takes events until the last; the reason when there is none.
    async fn listen(
        &self,
        mut reader: ReadHalf<'_>,
        mut buffer: Vec<u8>,
        output: mpsc::Sender<Output>,
        shared: &std::sync::Mutex<Shared>,
        kill_asked: &Notify,
    ) -> Result<wire::Ended, String> {
        let mut deadline = self.limit.map(|limit| self.begun + limit + GRACE + SLACK);
        let mut killing = false;
        loop {
            let event = tokio::select! {
                biased;
                event = read_event(&mut reader, &mut buffer) => event.map_err(|error| error.to_string())?,
                () = kill_asked.notified(), if !killing => {
                    killing = true;
                    let soon = Instant::now() + SLACK;
                    deadline = Some(deadline.map_or(soon, |at| at.min(soon)));
                    continue;
                }
                () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => {
                    return Err("its guest did not end the command in time".to_owned());
                }
            };
            let Some(event) = event else {
                return Err("its guest hung up while the command ran".to_owned());
            };
            match event.kind {
                Some(event::Kind::Output(wire::Output { stream, data })) => {
                    if data.is_empty() || data.len() > wire::CHUNK {
                        return Err(format!("its guest sent {} bytes of output at once", data.len()));
                    }
                    let chunk = match Stream::try_from(stream) {
                        Ok(Stream::Stdout) => Output::Stdout(data),
                        Ok(Stream::Stderr) => Output::Stderr(data),
                        Ok(Stream::Unspecified) | Err(_) => return Err("its guest sent output of no stream".to_owned()),
                    };
                    let waiting = Instant::now();
                    // Nobody wants it any more: thrown away, so that the command can go on to its end.
                    let _ = output.send(chunk).await;
                    // The guest is not to blame for a slow taker.
                    deadline = deadline.map(|at| at + waiting.elapsed());
                }
                Some(event::Kind::Credit(bytes)) => {
                    let bytes = bytes as usize;
                    let mut shared = shared.lock().map_err(|_| "the host's own state broke".to_owned())?;
                    let left = shared.outstanding.checked_sub(bytes);
                    shared.outstanding = left.ok_or("its guest gave credit for input that was not sent")?;
                    self.window.add_permits(bytes);
                }
                Some(event::Kind::Ended(ended)) => return Ok(ended),
                Some(event::Kind::Started(_) | event::Kind::Pong(_) | event::Kind::Fault(_)) | None => {
                    return Err("its guest said something out of place".to_owned());
                }
            }
        }
    }

    fn cpu(said: &wire::Ended) -> Duration {
        Duration::from_micros(said.user_us.saturating_add(said.system_us))
    }

    async fn judge(&self, said: wire::Ended) -> Ended {
        let mut unknown = None;
        let cause = match (said.status, self.limit, &self.killed_by) {
            // A flag that we gave no occasion for counts for nothing.
            (Some(_), Some(limit), _) if said.timed_out => Cause::TimedOut {
                after_ms: limit.as_millis() as u64,
            },
            (Some(_), _, Some(by)) if said.killed => Cause::Killed { by: by.clone() },
            (Some(ended::Status::ExitCode(0)), _, _) => Cause::Exited { code: 0 },
            (Some(ended::Status::ExitCode(code @ 1..=255)), _, _) => {
                self.unless_out_of_memory(Cause::Exited { code }, &mut unknown).await
            }
            (Some(ended::Status::Signal(libc::SIGKILL)), _, _) => {
                let killed = Cause::Signalled { signal: libc::SIGKILL };
                self.unless_out_of_memory(killed, &mut unknown).await
            }
            (Some(ended::Status::Signal(signal @ 1..=64)), _, _) => Cause::Signalled { signal },
            (Some(ended::Status::ExitCode(_) | ended::Status::Signal(_)) | None, _, _) => Cause::SandboxLost {
                reason: "its guest told of an end that cannot be".to_owned(),
            },
        };
        Ended {
            cause,
            duration: Duration::from_micros(said.duration_us).min(self.begun.elapsed()),
            cpu: Self::cpu(&said),
            max_rss_bytes: said.max_rss_bytes,
            killed_descendants: said.killed_descendants,
            unknown,
        }
    }

    /// `cause`, unless the kernel's counters say that memory ran out meanwhile.
    async fn unless_out_of_memory(&self, cause: Cause, unknown: &mut Option<String>) -> Cause {
        match self.out_of_memory().await {
            Ok(Some(peak_bytes)) => Cause::OutOfMemory {
                limit_bytes: self.place.memory_limit_bytes,
                peak_bytes,
            },
            Ok(None) => cause,
            Err(reason) => {
                *unknown = Some(reason);
                cause
            }
        }
    }

    /// The peak, if the OOM killer struck since the command began.
    async fn out_of_memory(&self) -> Result<Option<u64>, String> {
        let unread = |error: &Error| format!("whether memory ran out: {}", chain(error));
        let before = match &self.before {
            None => return Ok(None),
            Some(before) => before.as_ref().map_err(unread)?,
        };
        let after = self
            .place
            .backend
            .usage(&self.place.sandbox)
            .await
            .map_err(|error| unread(&error))?;
        Ok((after.oom_kills > before.oom_kills).then_some(after.memory_peak_bytes))
    }

    async fn judge_lost(&self, mut reason: String) -> Ended {
        // Of a sandbox that is gone there are no counters; that adds nothing to its being lost.
        if let Ok(Some(peak)) = self.out_of_memory().await {
            let limit = self.place.memory_limit_bytes;
            // One process has all memory of it: what runs out takes the sandbox along, and is the cause all the same.
            if self.place.isolation == Isolation::Gvisor {
                let cause = Cause::OutOfMemory {
                    limit_bytes: limit,
                    peak_bytes: peak,
                };
                return Ended {
                    cause,
                    ..Ended::lost(reason, self.begun.elapsed())
                };
            }
            reason = format!("{reason}, as the OOM killer struck in it (limit {limit} bytes, peak {peak} bytes)");
        }
        Ended::lost(reason, self.begun.elapsed())
    }
}

/// Passes actions on to the guest until they, or the connection, end.
async fn talk(
    mut writer: WriteHalf<'_>,
    mut actions: mpsc::Receiver<Action>,
    shared: &std::sync::Mutex<Shared>,
    kill_asked: &Notify,
) {
    let mut frame = Vec::new();
    while let Some(action) = actions.recv().await {
        let kind = {
            let Ok(mut shared) = shared.lock() else {
                return;
            };
            match action {
                Action::Input(kind) => {
                    if let wire::input::Kind::Stdin(data) = &kind {
                        shared.outstanding += data.len();
                    }
                    kind
                }
                Action::Kill { by } => {
                    shared.killed_by.get_or_insert(by);
                    kill_asked.notify_one();
                    wire::input::Kind::Kill(true)
                }
            }
        };
        frame.clear();
        let input = wire::Input { kind: Some(kind) };
        if wire::encode(&input, &mut frame).is_err() || writer.write_all(&frame).await.is_err() {
            return;
        }
    }
}

/// Asks the guest whether it is there and speaks our language.
pub(in crate::sandbox) async fn ping(place: &Place) -> Result<(), Error> {
    let lost = |reason: String| Error::GuestLost {
        sandbox: place.sandbox.id.clone(),
        reason,
    };
    let request = wire::Request {
        generation: wire::GENERATION,
        kind: Some(wire::request::Kind::Ping(wire::Ping {})),
    };
    let mut frame = Vec::new();
    wire::encode(&request, &mut frame).map_err(|error| lost(error.to_string()))?;
    let mut stream = place.backend.connect(&place.sandbox).await?;
    stream
        .write_all(&frame)
        .await
        .map_err(|error| lost(error.to_string()))?;
    let answer = read_event(&mut stream, &mut Vec::new()).await;
    match answer
        .map_err(|error| lost(error.to_string()))?
        .and_then(|event| event.kind)
    {
        Some(event::Kind::Pong(wire::Pong {
            generation: wire::GENERATION,
        })) => Ok(()),
        Some(event::Kind::Fault(wire::Fault { message, .. })) => Err(lost(message)),
        None => Err(lost("it hung up".to_owned())),
        Some(
            event::Kind::Pong(_)
            | event::Kind::Started(_)
            | event::Kind::Output(_)
            | event::Kind::Ended(_)
            | event::Kind::Credit(_),
        ) => Err(lost("its first word was out of place".to_owned())),
    }
}
