//! One command on a server, from here: its stream, and how it is taken up again when the connection breaks.
//!
//! ```text
//!          stdin ─┐                        ┌─► screen (stdout, stderr)
//!   window size ──┼─► Link ─ Exec/Attach ──┤
//!       signals ─ Signal (a call of its own: it passes input that the command does not read)
//! ```
//!
//! A broken stream is asked for again by Attach, from the first byte of each stream that has not come yet.

use std::time::Duration;

use futures::StreamExt;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};
use tonic_types::StatusExt;

use super::screen::{self, Piece, Places, To};
use super::{Client, input, terminal};
use crate::api::proto;
use crate::cli::Error;
use crate::error::Kind;

/// How often a stream that broke is asked for again, and after how long: a server may be starting anew.
const AGAIN: (u32, Duration) = (120, Duration::from_millis(500));
/// How long a call that sends a signal may take.
const SIGNAL: Duration = Duration::from_secs(10);

/// What is sent to a command, whichever call carries it.
#[derive(Debug)]
enum Input {
    Stdin(Vec<u8>),
    Eof,
    Resize(proto::TerminalSize),
}

impl Input {
    fn exec(self) -> proto::ExecRequest {
        use proto::exec_request::Kind;
        let kind = match self {
            Self::Stdin(bytes) => Kind::Stdin(bytes),
            Self::Eof => Kind::StdinEof(true),
            Self::Resize(size) => Kind::Resize(size),
        };
        proto::ExecRequest { kind: Some(kind) }
    }

    fn attach(self) -> proto::AttachRequest {
        use proto::attach_request::Kind;
        let kind = match self {
            Self::Stdin(bytes) => Kind::Stdin(bytes),
            Self::Eof => Kind::StdinEof(true),
            Self::Resize(size) => Kind::Resize(size),
        };
        proto::AttachRequest { kind: Some(kind) }
    }
}

/// A stream that is open. The end of input is said, never shown by an end of what is sent: who leaves says nothing of it.
#[derive(Debug)]
pub(super) struct Link {
    inputs: mpsc::Sender<Input>,
    events: Streaming<proto::ExecEvent>,
}

impl Link {
    /// Starts a command; gives it with its id.
    pub async fn exec(client: &mut Client, start: proto::ExecStart) -> Result<(Self, proto::ExecStarted), Error> {
        let (inputs, queue) = mpsc::channel(2);
        let first = proto::ExecRequest {
            kind: Some(proto::exec_request::Kind::Start(start)),
        };
        let requests = futures::stream::iter([first]).chain(ReceiverStream::new(queue).map(Input::exec));
        let requests = requests.chain(futures::stream::pending());
        let mut events = client.exec(requests).await?.into_inner();
        match events.message().await?.and_then(|event| event.kind) {
            Some(proto::exec_event::Kind::Started(started)) => Ok((Self { inputs, events }, started)),
            Some(_) | None => Err(Error::new(
                Kind::Internal,
                "the server did not say that the command started",
            )),
        }
    }

    /// Goes on with one.
    pub async fn attach(client: &mut Client, start: proto::AttachStart) -> Result<Self, Status> {
        let (inputs, queue) = mpsc::channel(2);
        let first = proto::AttachRequest {
            kind: Some(proto::attach_request::Kind::Start(start)),
        };
        let requests = futures::stream::iter([first]).chain(ReceiverStream::new(queue).map(Input::attach));
        let requests = requests.chain(futures::stream::pending());
        let events = client.attach(requests).await?.into_inner();
        Ok(Self { inputs, events })
    }
}

/// What is passed to and fro.
#[derive(Debug, Clone, Copy)]
pub(super) struct Passing {
    pub stdin: bool,
    /// The command has a pseudo-terminal.
    pub terminal: bool,
}

/// How it went.
#[derive(Debug)]
pub(super) struct Passed {
    pub end: End,
    /// The last line of standard output has no end.
    pub is_mid_line: bool,
}

/// What ended it, seen from here.
#[derive(Debug)]
pub(super) enum End {
    Ended(proto::ExecEnded),
    /// Whoever read the output has gone, and the command was killed for it.
    NobodyReads,
    /// Output could not be written here; if it ran still, the command was killed for it.
    Unwritten(std::io::Error),
    /// The person left; the command goes on, or ends, as it was told at its start.
    Left,
    Failed(Error),
}

/// One command, as followed from here.
#[derive(Debug)]
pub(super) struct Session {
    pub client: Client,
    pub sandbox: String,
    pub exec: String,
    pub places: Places,
    pub passing: Passing,
    /// The keys that leave it, where it has this terminal.
    pub detach_keys: Vec<input::Sequence>,
}

/// Signals to this process. From when they are listened for they no longer end it by themselves.
struct Signals {
    interrupt: Signal,
    quit: Signal,
    terminate: Signal,
    hang_up: Signal,
    resized: Signal,
}

/// What a signal here means.
enum Told {
    /// To the command.
    Stop {
        signal: i32,
    },
    HangUp,
    Resized,
}

impl Signals {
    fn listen() -> Result<Self, Error> {
        let listen = |kind| {
            signal(kind).map_err(|error| Error::new(Kind::Internal, format!("cannot listen for signals: {error}")))
        };
        Ok(Self {
            interrupt: listen(SignalKind::interrupt())?,
            quit: listen(SignalKind::quit())?,
            terminate: listen(SignalKind::terminate())?,
            hang_up: listen(SignalKind::hangup())?,
            resized: listen(SignalKind::window_change())?,
        })
    }

    async fn next(&mut self) -> Told {
        // None of these loses a signal when another is first.
        tokio::select! {
            _ = self.interrupt.recv() => Told::Stop { signal: nix::libc::SIGINT },
            _ = self.quit.recv() => Told::Stop { signal: nix::libc::SIGQUIT },
            _ = self.terminate.recv() => Told::Stop { signal: nix::libc::SIGTERM },
            _ = self.hang_up.recv() => Told::HangUp,
            _ = self.resized.recv() => Told::Resized,
        }
    }
}

impl Session {
    /// Passes everything to and fro until the command has ended or nothing more can be done.
    pub async fn follow(mut self, link: Link) -> Passed {
        let signals = match Signals::listen() {
            Ok(signals) => signals,
            Err(error) => return Passed::failed(error),
        };
        // Held until the last byte is out.
        let raw = match self.passing {
            Passing {
                stdin: true,
                terminal: true,
            } => terminal::Raw::enter(),
            Passing { .. } => Ok(None),
        };
        let raw = match raw {
            Ok(raw) => raw,
            Err(error) => {
                return Passed::failed(Error::new(
                    Kind::Unavailable,
                    format!("cannot use the terminal: {error}"),
                ));
            }
        };
        // Dropped, and with them ended, when this function ends.
        let mut writer = JoinSet::new();
        let (pieces, queue) = mpsc::channel(2);
        writer.spawn(screen::write(queue));
        let mut pump = Pump {
            stdin: self.passing.stdin.then(input::stdin),
            keys: raw
                .is_some()
                .then(|| input::Keys::leaving_by(std::mem::take(&mut self.detach_keys))),
            pieces: Some(pieces),
            waiting_in: None,
            waiting_out: None,
            signals,
            asked: 0,
            calls: JoinSet::new(),
            leaving: false,
            // Also what changed while it started, and for one that was started elsewhere.
            resized: self.passing.terminal,
        };
        let end = self.pass(&mut pump, link).await;
        // What came is written out, unless somebody here has had enough.
        pump.pieces = None;
        let (is_mid_line, failed) = loop {
            tokio::select! {
                written = writer.join_next() => break match written {
                    Some(Ok(written)) => (written.is_mid_line, written.failed),
                    Some(Err(_)) | None => (false, None),
                },
                told = pump.signals.next() => match told {
                    Told::Stop { .. } | Told::HangUp => break (true, None),
                    Told::Resized => {}
                },
            }
        };
        drop(raw);
        let end = failed.map_or(end, End::Unwritten);
        Passed { end, is_mid_line }
    }

    /// Follows one stream after the other.
    async fn pass(&mut self, pump: &mut Pump, mut link: Link) -> End {
        let mut failures = 0;
        loop {
            let before = self.places;
            let mut broken = match self.pass_link(pump, &mut link).await {
                Ok(end) => return end,
                Err(status) => status,
            };
            failures = if self.places == before { failures } else { 0 };
            drop(link);
            link = loop {
                failures += 1;
                if failures <= AGAIN.0 && self.skip_dropped(&broken) {
                    match self.attach().await {
                        Ok(link) => break link,
                        Err(status) => broken = status,
                    }
                    continue;
                }
                let passes = matches!(broken.code(), Code::Unavailable | Code::Unknown | Code::Cancelled);
                if !passes || failures > AGAIN.0 {
                    return End::Failed(broken.into());
                }
                tokio::select! {
                    () = tokio::time::sleep(AGAIN.1) => {}
                    told = pump.signals.next() => if let Some(end) = self.told_while_apart(&told) { return end },
                }
                match self.attach().await {
                    Ok(link) => break link,
                    Err(status) => broken = status,
                }
            };
            pump.resized = self.passing.terminal;
            if self.passing.stdin {
                err!("exuvia: the connection broke and is back; input sent just before it broke may be lost");
            }
        }
    }

    fn told_while_apart(&self, told: &Told) -> Option<End> {
        match told {
            Told::Stop { .. } | Told::HangUp => Some(End::Left),
            Told::Resized => None,
        }
    }

    /// What the server has dropped by now cannot be had: goes on behind it, and says so.
    fn skip_dropped(&mut self, status: &Status) -> bool {
        let Some(info) = status
            .get_details_error_info()
            .filter(|info| info.reason == "OUTPUT_DROPPED")
        else {
            return false;
        };
        let place = match info.metadata.get("stream").map(String::as_str) {
            Some("stdout") => &mut self.places.stdout,
            Some("stderr") => &mut self.places.stderr,
            Some("pty") => &mut self.places.pty,
            Some(_) | None => return false,
        };
        let first = info.metadata.get("first_offset").and_then(|first| first.parse().ok());
        let Some(first) = first.filter(|first: &u64| *first > *place) else {
            return false;
        };
        tell_lost(first - *place);
        *place = first;
        true
    }

    /// Takes the stream up where it broke.
    async fn attach(&mut self) -> Result<Link, Status> {
        let start = proto::AttachStart {
            sandbox_id: self.sandbox.clone(),
            exec_id: self.exec.clone(),
            stdout_offset: self.places.stdout,
            stderr_offset: self.places.stderr,
            pty_offset: self.places.pty,
        };
        Link::attach(&mut self.client, start).await
    }

    /// Passes until the command ends; `Err` is how the stream broke.
    async fn pass_link(&mut self, pump: &mut Pump, link: &mut Link) -> Result<End, Status> {
        // A stream that takes no more input has ended, as its other half will tell: input waits for the next one.
        let mut takes_input = true;
        loop {
            if pump.leaving {
                return Ok(End::Left);
            }
            if pump.resized && pump.waiting_in.is_none() {
                pump.resized = false;
                pump.waiting_in = Some(Input::Resize(terminal::size()));
            }
            // Each of these can be let go of without a loss: what was taken is handled below, before the next round.
            let next = tokio::select! {
                // Output that nobody takes holds up further output, and nothing else.
                event = link.events.message(), if pump.waiting_out.is_none() => Next::Event(Box::new(event)),
                room = has_room(pump.pieces.as_ref()), if pump.waiting_out.is_some() => Next::RoomOut(room),
                chunk = next(&mut pump.stdin), if pump.waiting_in.is_none() => Next::Typed(chunk),
                room = has_room(Some(&link.inputs)), if takes_input && pump.waiting_in.is_some() => Next::RoomIn(room),
                told = pump.signals.next() => Next::Told(told),
                Some(_) = pump.calls.join_next() => Next::Called,
            };
            match next {
                Next::Event(event) => {
                    let event = (*event)?.ok_or_else(|| Status::unavailable("the server ended the stream"))?;
                    if let Some(ended) = self.take(pump, event) {
                        return Ok(End::Ended(ended));
                    }
                }
                Next::RoomOut(true) => pump.send_out(),
                Next::RoomOut(false) => {
                    self.signal(pump, nix::libc::SIGKILL, Whom::Tree);
                    pump.settle().await;
                    return Ok(End::NobodyReads);
                }
                Next::Typed(chunk) => pump.typed(chunk),
                Next::RoomIn(true) => {
                    if let Some(input) = pump.waiting_in.take() {
                        // It was waited for.
                        let _ = link.inputs.try_send(input);
                    }
                }
                Next::RoomIn(false) => takes_input = false,
                Next::Told(Told::HangUp) => return Ok(End::Left),
                Next::Told(Told::Resized) => pump.resized = self.passing.terminal,
                Next::Told(Told::Stop { signal }) => {
                    pump.asked += 1;
                    match pump.asked {
                        1 => self.signal(pump, signal, Whom::Group),
                        2 => self.signal(pump, nix::libc::SIGTERM, Whom::Tree),
                        3 => self.signal(pump, nix::libc::SIGKILL, Whom::Tree),
                        _ => return Ok(End::Left),
                    }
                }
                Next::Called => {}
            }
        }
    }

    /// Takes an event; gives the end, if it is that.
    fn take(&mut self, pump: &mut Pump, event: proto::ExecEvent) -> Option<proto::ExecEnded> {
        use proto::exec_event::Kind;
        let (to, place, output) = match event.kind {
            Some(Kind::Stdout(output)) => (To::Stdout, &mut self.places.stdout, output),
            Some(Kind::Stderr(output)) => (To::Stderr, &mut self.places.stderr, output),
            Some(Kind::Pty(output)) => (To::Stdout, &mut self.places.pty, output),
            Some(Kind::Ended(ended)) => return Some(ended),
            Some(Kind::Started(_)) | None => return None,
        };
        let fresh = screen::take(place, output);
        if fresh.lost > 0 {
            tell_lost(fresh.lost);
        }
        if !fresh.bytes.is_empty() {
            pump.waiting_out = Some((to, fresh.bytes));
        }
        None
    }

    /// Sends a signal by a call of its own, beside whatever else is under way.
    fn signal(&self, pump: &mut Pump, signal: i32, whom: Whom) {
        let mut client = self.client.clone();
        let request = proto::SignalRequest {
            sandbox_id: self.sandbox.clone(),
            exec_id: self.exec.clone(),
            signal,
            tree: whom == Whom::Tree,
            by: crate::cli::person(),
        };
        pump.calls.spawn(async move {
            // It may have ended by now, which is as good.
            let _ = tokio::time::timeout(SIGNAL, client.signal(request)).await;
        });
    }
}

impl Passed {
    fn failed(error: Error) -> Self {
        Self {
            end: End::Failed(error),
            is_mid_line: false,
        }
    }
}

fn tell_lost(bytes: u64) {
    err!("exuvia: {bytes} bytes of output are lost: the server had dropped them");
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Whom {
    Group,
    Tree,
}

/// What comes first in a round.
enum Next {
    Event(Box<Result<Option<proto::ExecEvent>, Status>>),
    RoomOut(bool),
    Typed(Option<Vec<u8>>),
    RoomIn(bool),
    Told(Told),
    Called,
}

/// What is under way between here and the stream; it outlives a broken one.
struct Pump {
    /// `None` = at its end, or not passed on.
    stdin: Option<mpsc::Receiver<Vec<u8>>>,
    /// In raw mode.
    keys: Option<input::Keys>,
    pieces: Option<mpsc::Sender<Piece>>,
    waiting_in: Option<Input>,
    waiting_out: Option<Piece>,
    signals: Signals,
    /// How often somebody asked for the end.
    asked: u32,
    calls: JoinSet<()>,
    leaving: bool,
    /// The command is to be told the size of the terminal, once no input waits.
    resized: bool,
}

impl Pump {
    fn typed(&mut self, chunk: Option<Vec<u8>>) {
        let Some(chunk) = chunk else {
            let held = self.keys.as_mut().map(input::Keys::end).unwrap_or_default();
            // The end is found again by the next look.
            self.waiting_in = Some(match held.is_empty() {
                true => Input::Eof,
                false => Input::Stdin(held),
            });
            if matches!(self.waiting_in, Some(Input::Eof)) {
                self.stdin = None;
            }
            return;
        };
        let typed = match &mut self.keys {
            Some(keys) => keys.typed(&chunk),
            None => input::Typed {
                bytes: chunk,
                leaves: false,
            },
        };
        self.leaving = typed.leaves;
        if !typed.bytes.is_empty() {
            self.waiting_in = Some(Input::Stdin(typed.bytes));
        }
    }

    fn send_out(&mut self) {
        if let (Some(pieces), Some(piece)) = (&self.pieces, self.waiting_out.take()) {
            // It was waited for; a reader that went since is found by the next piece.
            let _ = pieces.try_send(piece);
        }
    }

    /// Waits for the signals that are on their way.
    async fn settle(&mut self) {
        while self.calls.join_next().await.is_some() {}
    }
}

/// Waits for room; `false` when nobody takes anything any more. Only one sends: the room stays.
async fn has_room<T>(queue: Option<&mpsc::Sender<T>>) -> bool {
    match queue {
        Some(queue) => queue.reserve().await.is_ok(),
        None => false,
    }
}

async fn next(stdin: &mut Option<mpsc::Receiver<Vec<u8>>>) -> Option<Vec<u8>> {
    match stdin {
        Some(chunks) => chunks.recv().await,
        None => std::future::pending().await,
    }
}
