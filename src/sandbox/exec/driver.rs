//! The conversation with the guest about one exec.
//!
//! ```text
//! Exec, Attach ──► fault                       an error of the call
//!              ──► started ─► (output|credit)* ─► ended       judged
//!                                              ─► superseded  Superseded
//!                                              ─► nothing     SandboxLost, or why the sandbox was ended
//! ```
//! Whatever else the guest says is a lie or a break, and ends as [`Cause::SandboxLost`]. A kill and the time limit are looked
//! at before output: a guest that floods holds neither up.

use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::UnixStream;
use tokio::net::unix::{ReadHalf, WriteHalf};
use tokio::sync::{Notify, Semaphore, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};

use super::company::Lasting;
use super::handle::{Action, Taken};
use super::judge::{Before, Judge};
use super::{Cause, Control, Ended, Exec, MAX_GRACE, Offsets, Output, Outputs, Piece, Place, Stdin, Tell, ask};
use crate::ids::ExecId;
use crate::sandbox::Error;
use crate::wire::{self, Event, Started, Stream, event, request};

/// How much longer than it has to the guest may take to answer, before it is taken for lost.
const SLACK: Duration = Duration::from_secs(5);
/// How long a command may take to start.
const START: Duration = Duration::from_secs(30);
/// Chunks of output ([`wire::CHUNK`] each at most) that wait for whoever takes them.
const QUEUE: usize = 8;
/// What is read from the guest at once: little at first, all of this once it has much to say.
const READ: usize = 256 << 10;
const FIRST_READ: usize = 16 << 10;
/// A piece that is smaller gets memory of its own: it shall not hold on to all that was read with it.
const SMALL: usize = 4 << 10;

/// Whether the end is judged by the sandbox's counters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::sandbox) enum Counters {
    Read,
    /// A file call: there is no end to explain.
    Spare,
}

/// Starts what `exec` asks for; `memory` goes with its mould.
///
/// # Errors
/// [`Error::NotStarted`] when the guest could not; [`Error::GuestLost`] when it did not answer sensibly.
pub(in crate::sandbox) async fn start(
    place: Place,
    id: ExecId,
    mut exec: wire::Exec,
    stdin: Stdin,
    counters: Counters,
    memory: Option<BorrowedFd<'_>>,
) -> Result<Exec, Error> {
    let limit = (exec.timeout_ms > 0).then(|| Duration::from_millis(exec.timeout_ms));
    let grace = Duration::from_millis(exec.grace_ms);
    let (detachable, gaps) = (exec.detachable, exec.drop_oldest);
    exec.id = id.to_string();
    let counted = async {
        match counters {
            Counters::Read => Some(place.backend.losses(&place.sandbox).await.map(Before)),
            Counters::Spare => None,
        }
    };
    let stay = (!exec.files).then(|| {
        let lasting = exec.detachable || exec.keep_background;
        place.company.join(if lasting { Lasting::Yes } else { Lasting::No })
    });
    let begun = Instant::now();
    let (before, opened) = tokio::join!(counted, open(&place, request::Kind::Exec(exec), memory));
    let opened = opened?;
    let note = match &before {
        Some(Ok(before)) if detachable => Some(before.note()),
        Some(_) | None => None,
    };
    let conversation = Conversation {
        judge: Judge {
            place,
            before,
            limit,
            begun,
            detachable,
            stay,
        },
        id,
        from: Offsets::default(),
        grace,
        gaps,
    };
    let exec = conversation.begin(opened);
    if let Some(note) = note {
        // It may have ended by now.
        let _ = exec
            .control
            .actions
            .try_send(Action::Input(wire::input::Kind::Note(note)));
    }
    Ok(feed(exec, stdin))
}

/// Goes on with a detachable exec.
///
/// # Errors
/// [`Error::NoExec`], [`Error::OutputDropped`]; [`Error::GuestLost`] when the guest did not answer sensibly.
pub(in crate::sandbox) async fn attach(place: Place, id: ExecId, from: Offsets) -> Result<Exec, Error> {
    let request = request::Kind::Attach(wire::Attach {
        id: id.to_string(),
        from: Some(wire::Offsets {
            stdout: from.stdout,
            stderr: from.stderr,
            pty: from.pty,
        }),
    });
    let opened = open(&place, request, None).await.map_err(|error| about(&id, error))?;
    let said = &opened.started;
    // What the guest says of the beginning is not checked by anything; it can but blur what is known of the end.
    let before = match Before::from_note(&said.note) {
        Some(before) => Ok(before),
        None => place.backend.losses(&place.sandbox).await.map(Before),
    };
    let now = Instant::now();
    let conversation = Conversation {
        judge: Judge {
            place,
            before: Some(before),
            limit: (said.timeout_ms > 0).then(|| Duration::from_millis(said.timeout_ms)),
            begun: now.checked_sub(Duration::from_millis(said.age_ms)).unwrap_or(now),
            detachable: true,
            stay: None,
        },
        id,
        from,
        // Its own is not known.
        grace: MAX_GRACE,
        gaps: said.drop_oldest,
    };
    Ok(conversation.begin(opened))
}

/// An error that names the exec.
pub(super) fn about(id: &ExecId, error: Refused) -> Error {
    match error {
        Refused::Other(error) => error,
        Refused::Fault(fault) => match (fault.code.as_str(), fault.kept) {
            ("no_such_exec", _) => Error::NoExec(id.clone()),
            ("output_dropped", Some(kept)) => Error::OutputDropped {
                exec: id.clone(),
                kept: Offsets {
                    stdout: kept.stdout,
                    stderr: kept.stderr,
                    pty: kept.pty,
                },
            },
            _ => fault_error(fault),
        },
    }
}

fn fault_error(fault: wire::Fault) -> Error {
    Error::NotStarted {
        code: fault.code,
        message: fault.message,
    }
}

/// Why a request was not begun.
pub(super) enum Refused {
    Fault(wire::Fault),
    Other(Error),
}

impl From<Refused> for Error {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Fault(fault) => fault_error(fault),
            Refused::Other(error) => error,
        }
    }
}

/// A request that was begun.
pub(super) struct Opened {
    pub stream: UnixStream,
    pub buffer: BytesMut,
    pub started: Started,
}

/// Sends a request on a connection of its own, with a descriptor, and hears that it was begun.
async fn open(place: &Place, kind: request::Kind, descriptor: Option<BorrowedFd<'_>>) -> Result<Opened, Refused> {
    let lost = |reason: String| Refused::Other(place.lost(reason));
    let mut frame = Vec::new();
    let message = wire::Request {
        generation: wire::GENERATION,
        kind: Some(kind),
    };
    wire::encode_request(&message, &mut frame).map_err(|error| {
        Refused::Other(Error::NotStarted {
            code: "too_large".to_owned(),
            message: format!("the command with its arguments and environment is too large: {error}"),
        })
    })?;
    let mut stream = place.backend.connect(&place.sandbox).await.map_err(Refused::Other)?;
    let mut buffer = BytesMut::new();
    let first = timeout(START, async {
        let sent = async {
            let begun = match descriptor {
                Some(descriptor) => send_with(&stream, &frame, descriptor).await?,
                None => 0,
            };
            stream.write_all(&frame[begun..]).await
        };
        let sent = sent.await;
        // A guest that had no process for it has said so and hung up, perhaps before it was asked.
        match read_event(&mut stream, &mut buffer, 4 << 10).await {
            Ok(Some(event)) => Ok(Some(event)),
            other => sent.and(other),
        }
    });
    let first = match first.await {
        Err(_) => return Err(lost(format!("it did not start the command within {START:?}"))),
        Ok(Err(error)) => return Err(lost(error.to_string())),
        Ok(Ok(None)) => return Err(lost("it hung up".to_owned())),
        Ok(Ok(Some(event))) => event,
    };
    match first.kind {
        Some(event::Kind::Started(started)) => Ok(Opened {
            stream,
            buffer,
            started,
        }),
        Some(event::Kind::Fault(fault)) => Err(Refused::Fault(fault)),
        Some(
            event::Kind::Pong(_)
            | event::Kind::Output(_)
            | event::Kind::Ended(_)
            | event::Kind::Credit(_)
            | event::Kind::Superseded(_)
            | event::Kind::Told(_)
            | event::Kind::Exec(_),
        )
        | None => Err(lost("its first word was out of place".to_owned())),
    }
}

/// Sends the beginning of `frame`, and with it a descriptor; how much was sent.
async fn send_with(stream: &UnixStream, frame: &[u8], descriptor: BorrowedFd<'_>) -> io::Result<usize> {
    let numbers = [descriptor.as_raw_fd()];
    let control = [ControlMessage::ScmRights(&numbers)];
    loop {
        stream.writable().await?;
        let sent = stream.try_io(Interest::WRITABLE, || {
            let parts = [IoSlice::new(frame)];
            let sent = sendmsg::<()>(stream.as_raw_fd(), &parts, &control, MsgFlags::MSG_NOSIGNAL, None);
            sent.map_err(io::Error::from)
        });
        match sent {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            other => return other,
        }
    }
}

/// The next whole event; `None` at a clean end. Cancellation-safe: what was read is in the buffer.
pub(super) async fn read_event(
    stream: &mut (impl AsyncReadExt + Unpin),
    buffer: &mut BytesMut,
    room: usize,
) -> io::Result<Option<Event>> {
    loop {
        if let Some(event) = wire::take::<Event>(buffer)? {
            return Ok(Some(event));
        }
        buffer.reserve(room);
        if stream.read_buf(buffer).await? == 0 {
            return Ok(None);
        }
    }
}

/// Sends input that is known already.
fn feed(mut exec: Exec, stdin: Stdin) -> Exec {
    if let Stdin::Bytes(bytes) = stdin {
        let control = exec.control.clone();
        exec._tasks.spawn(async move {
            // A command may end before it has read everything.
            if control.input(&bytes).await.is_ok() {
                let _ = control.close_input().await;
            }
        });
    }
    exec
}

struct Conversation {
    judge: Judge,
    id: ExecId,
    from: Offsets,
    grace: Duration,
    /// Whether output may have been dropped.
    gaps: bool,
}

/// What the writing side tells the reading side.
#[derive(Default)]
struct Shared {
    /// Bytes of stdin sent and not yet credited.
    outstanding: usize,
    asked: Option<Cause>,
}

/// The last word on an exec.
enum Last {
    Ended(wire::Ended),
    Superseded,
}

impl Conversation {
    fn begin(self, opened: Opened) -> Exec {
        let (output, receiver) = mpsc::channel(QUEUE);
        let (actions, actions_receiver) = mpsc::channel(QUEUE);
        let (ended, ended_receiver) = oneshot::channel();
        let window = Arc::new(Semaphore::new(wire::STDIN_WINDOW));
        let taken = Arc::new(Taken::new(self.judge.detachable, self.from));
        let control = Control {
            actions,
            window: window.clone(),
        };
        let (id, pid) = (self.id.clone(), opened.started.pid);
        let outputs = Outputs::new(receiver, taken.clone());
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let end = self.drive(opened, output, actions_receiver, &taken, &window).await;
            window.close();
            // Whoever does not wait for the end has dropped the receiver.
            let _ = ended.send(end);
        });
        Exec {
            output: outputs,
            id,
            pid,
            control,
            ended: ended_receiver,
            _tasks: tasks,
        }
    }

    async fn drive(
        mut self,
        opened: Opened,
        output: mpsc::Sender<Output>,
        actions: mpsc::Receiver<Action>,
        taken: &Taken,
        window: &Semaphore,
    ) -> Ended {
        let mut stream = opened.stream;
        let shared = Mutex::new(Shared::default());
        let kill_asked = Notify::new();
        let said = {
            // Borrowed halves: an owned write half that is dropped hangs up.
            let (reader, writer) = stream.split();
            let listener = Listener {
                conversation: &self,
                shared: &shared,
                kill_asked: &kill_asked,
                taken,
                window,
                place: [self.from.stdout, self.from.stderr, self.from.pty],
            };
            let mut listen = pin!(listener.listen(reader, opened.buffer, output));
            let mut talk = pin!(talk(writer, actions, &shared, &kill_asked, taken));
            tokio::select! {
                said = &mut listen => said,
                // Nothing more can be said; the guest may still have something to say.
                () = &mut talk => (&mut listen).await,
            }
        };
        drop(stream);
        let asked = shared.into_inner().unwrap_or_default().asked;
        match said {
            Ok(Last::Ended(said)) => self.judge.ended(said, asked).await,
            Ok(Last::Superseded) => self.judge.bare(Cause::Superseded),
            Err(reason) => self.broken_off(reason).await,
        }
    }
}

impl Conversation {
    /// Without a last word. A detachable exec that is still there was taken over by another connection, and a taker that was
    /// behind has not heard of that.
    async fn broken_off(&self, reason: String) -> Ended {
        let place = &self.judge.place;
        let there = self.judge.detachable
            && place.ending.get().is_none()
            && ask::tell(place, &self.id, Tell::Signal(0)).await.is_ok();
        match there {
            true => self.judge.bare(Cause::Superseded),
            false => self.judge.lost(reason).await,
        }
    }
}

/// The reading side.
struct Listener<'a> {
    conversation: &'a Conversation,
    shared: &'a Mutex<Shared>,
    kill_asked: &'a Notify,
    taken: &'a Taken,
    window: &'a Semaphore,
    /// Where each stream goes on: stdout, stderr, pty.
    place: [u64; 3],
}

impl Listener<'_> {
    /// Takes events until the last; the reason when there is none.
    async fn listen(
        mut self,
        mut reader: ReadHalf<'_>,
        mut buffer: BytesMut,
        output: mpsc::Sender<Output>,
    ) -> Result<Last, String> {
        let Conversation { judge, grace, .. } = self.conversation;
        let mut deadline = judge.limit.map(|limit| judge.begun + limit + *grace + SLACK);
        let mut killing = false;
        let mut room = FIRST_READ;
        let soon = |deadline: Option<Instant>| {
            let soon = Instant::now() + *grace + SLACK;
            Some(deadline.map_or(soon, |at| at.min(soon)))
        };
        loop {
            let event = tokio::select! {
                biased;
                () = self.kill_asked.notified(), if !killing => {
                    killing = true;
                    deadline = soon(deadline);
                    continue;
                }
                () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => {
                    return Err("its guest did not end the command in time".to_owned());
                }
                event = read_event(&mut reader, &mut buffer, room) => event.map_err(|error| error.to_string())?,
            };
            let Some(event) = event else {
                return Err("its guest hung up while the command ran".to_owned());
            };
            match event.kind {
                Some(event::Kind::Output(said)) => {
                    if said.data.len() >= FIRST_READ / 2 {
                        room = READ;
                    }
                    let chunk = self.output(said)?;
                    let waiting = Instant::now();
                    let mut sending = pin!(output.send(chunk));
                    loop {
                        tokio::select! {
                            biased;
                            () = self.kill_asked.notified(), if !killing => {
                                killing = true;
                                deadline = soon(deadline);
                            }
                            sent = &mut sending => {
                                if let Err(unsent) = sent {
                                    // Nobody wants it any more: thrown away, so that the command can go on to its end.
                                    self.taken.note(&unsent.0);
                                }
                                break;
                            }
                        }
                    }
                    // The guest is not to blame for a slow taker.
                    deadline = deadline.map(|at| at + waiting.elapsed());
                }
                Some(event::Kind::Credit(bytes)) => {
                    let bytes = bytes as usize;
                    let mut shared = self
                        .shared
                        .lock()
                        .map_err(|_| "the host's own state broke".to_owned())?;
                    let left = shared.outstanding.checked_sub(bytes);
                    shared.outstanding = left.ok_or("its guest gave credit for input that was not sent")?;
                    self.window.add_permits(bytes);
                }
                Some(event::Kind::Ended(ended)) => {
                    let made = ended.made.unwrap_or_default();
                    if !self.conversation.gaps && [made.stdout, made.stderr, made.pty] != self.place {
                        return Err("its guest told of output that did not come".to_owned());
                    }
                    return Ok(Last::Ended(ended));
                }
                Some(event::Kind::Superseded(_)) if judge.detachable => return Ok(Last::Superseded),
                Some(
                    event::Kind::Started(_)
                    | event::Kind::Pong(_)
                    | event::Kind::Fault(_)
                    | event::Kind::Superseded(_)
                    | event::Kind::Told(_)
                    | event::Kind::Exec(_),
                )
                | None => return Err("its guest said something out of place".to_owned()),
            }
        }
    }

    fn output(&mut self, said: wire::Output) -> Result<Output, String> {
        let wire::Output { stream, data, offset } = said;
        let length = data.len();
        if length == 0 || length > wire::CHUNK {
            return Err(format!("its guest sent {length} bytes of output at once"));
        }
        let (place, wrap): (_, fn(Piece) -> Output) = match Stream::try_from(stream) {
            Ok(Stream::Stdout) => (&mut self.place[0], Output::Stdout),
            Ok(Stream::Stderr) => (&mut self.place[1], Output::Stderr),
            Ok(Stream::Pty) => (&mut self.place[2], Output::Pty),
            Ok(Stream::Unspecified) | Err(_) => return Err("its guest sent output of no stream".to_owned()),
        };
        let fits = offset == *place || (self.conversation.gaps && offset > *place);
        let end = offset.checked_add(length as u64).filter(|_| fits);
        *place = end.ok_or("its guest sent output that is not the next")?;
        let bytes = match length < SMALL {
            true => Bytes::copy_from_slice(&data),
            false => data,
        };
        Ok(wrap(Piece { offset, bytes }))
    }
}

/// Passes actions on to the guest until they, or the connection, end.
async fn talk(
    mut writer: WriteHalf<'_>,
    mut actions: mpsc::Receiver<Action>,
    shared: &Mutex<Shared>,
    kill_asked: &Notify,
    taken: &Taken,
) {
    let mut frame = Vec::new();
    loop {
        let kind = tokio::select! {
            action = actions.recv() => {
                let (Some(action), Ok(mut shared)) = (action, shared.lock()) else {
                    return;
                };
                match action {
                    Action::Input(kind) => {
                        if let wire::input::Kind::Stdin(data) = &kind {
                            shared.outstanding += data.len();
                        }
                        kind
                    }
                    Action::Kill { how, cause } => {
                        shared.asked.get_or_insert(cause);
                        kill_asked.notify_one();
                        how
                    }
                }
            }
            () = taken.enough.notified() => {
                let Offsets { stdout, stderr, pty } = taken.offsets();
                wire::input::Kind::Taken(wire::Offsets { stdout, stderr, pty })
            }
        };
        frame.clear();
        let input = wire::Input { kind: Some(kind) };
        if wire::encode(&input, &mut frame).is_err() || writer.write_all(&frame).await.is_err() {
            return;
        }
    }
}
