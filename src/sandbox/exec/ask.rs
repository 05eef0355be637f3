//! Questions to the guest that are no exec: whether it is there, which execs it has, one word to one of them, a dial.

use std::time::Duration;

use bytes::BytesMut;
use prost::Message;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::timeout;

use super::driver::{Refused, about, read_event};
use super::{Cause, Ended, Place};
use crate::ids::ExecId;
use crate::sandbox::Error;
use crate::wire::{self, Event, ended, event, request};

/// How long the guest may take to answer.
const ANSWER: Duration = Duration::from_secs(10);
/// Most execs that one sandbox can have; more are a lie.
const MAX_EXECS: usize = 4096;
/// Most bytes that it may tell of them all: the guest cuts each one's arguments.
const MAX_TOLD: usize = 16 << 20;
/// Room for a frame of a few fields.
const ROOM: usize = 4 << 10;

/// A detachable exec, as its guest tells of it.
#[derive(Debug, Clone, PartialEq)]
pub struct ExecInfo {
    pub id: ExecId,
    /// Cut after 1 KiB.
    pub argv: Vec<Vec<u8>>,
    pub pid: u32,
    /// Since it began.
    pub age: Duration,
    /// `None` = it runs. Without what the host's counters would say: attach to have its end judged.
    pub ended: Option<Ended>,
    pub attached: bool,
}

/// One word to a detachable exec.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tell {
    /// To the main process's group; 0 = just look whether it runs.
    Signal(i32),
    /// To every process of the exec.
    SignalTree(i32),
    /// SIGKILL to the whole tree.
    Kill { by: String },
    /// SIGTERM, the exec's grace, SIGKILL, to the whole tree.
    Terminate { by: String },
}

/// A conversation of one request and few answers.
struct Asked<'a> {
    place: &'a Place,
    stream: UnixStream,
    buffer: BytesMut,
}

impl<'a> Asked<'a> {
    async fn new(place: &'a Place, kind: request::Kind) -> Result<Self, Error> {
        let mut frame = Vec::new();
        let request = wire::Request {
            generation: wire::GENERATION,
            kind: Some(kind),
        };
        wire::encode_request(&request, &mut frame).map_err(|error| place.lost(error.to_string()))?;
        let mut stream = place.backend.connect(&place.sandbox).await?;
        // A guest without a process for it has said so and hung up, perhaps before it was asked: what it says tells.
        let _ = stream.write_all(&frame).await;
        let buffer = BytesMut::new();
        Ok(Self { place, stream, buffer })
    }

    async fn event(&mut self) -> Result<event::Kind, Error> {
        let read = read_event(&mut self.stream, &mut self.buffer, ROOM);
        let event = match timeout(ANSWER, read).await {
            Ok(Ok(event)) => event,
            Ok(Err(error)) => return Err(self.place.lost(error.to_string())),
            Err(_) => return Err(self.place.lost(format!("it gave no answer within {ANSWER:?}"))),
        };
        match event {
            Some(Event { kind: Some(kind) }) => Ok(kind),
            Some(Event { kind: None }) => Err(self.out_of_place()),
            None => Err(self.place.lost("it hung up")),
        }
    }

    fn out_of_place(&self) -> Error {
        self.place.lost("its first word was out of place")
    }
}

/// Asks the guest whether it is there and speaks our language.
pub(in crate::sandbox) async fn ping(place: &Place) -> Result<(), Error> {
    let mut asked = Asked::new(place, request::Kind::Ping(wire::Ping {})).await?;
    match asked.event().await? {
        event::Kind::Pong(wire::Pong {
            generation: wire::GENERATION,
        }) => Ok(()),
        // It is there, and has no process left for more than to say so.
        event::Kind::Fault(wire::Fault { code, .. }) if code == "limit" => Ok(()),
        event::Kind::Fault(wire::Fault { message, .. }) => Err(place.lost(message)),
        event::Kind::Pong(_)
        | event::Kind::Started(_)
        | event::Kind::Output(_)
        | event::Kind::Ended(_)
        | event::Kind::Credit(_)
        | event::Kind::Superseded(_)
        | event::Kind::Told(_)
        | event::Kind::Exec(_) => Err(asked.out_of_place()),
    }
}

/// Which detachable execs the guest has: those that run, and those that ended and were not released. Oldest first.
pub(in crate::sandbox) async fn list(place: &Place) -> Result<Vec<ExecInfo>, Error> {
    let mut asked = Asked::new(place, request::Kind::List(wire::List {})).await?;
    let mut execs = Vec::new();
    let mut told = 0;
    loop {
        match asked.event().await? {
            event::Kind::Exec(said) if execs.len() < MAX_EXECS => {
                told += said.encoded_len();
                if told > MAX_TOLD {
                    return Err(place.lost("it told too much of its execs"));
                }
                match info(said) {
                    Some(info) => execs.push(info),
                    None => return Err(place.lost("it told of an exec that cannot be")),
                }
            }
            event::Kind::Told(_) => break,
            event::Kind::Fault(wire::Fault { message, .. }) => return Err(place.lost(message)),
            event::Kind::Exec(_)
            | event::Kind::Pong(_)
            | event::Kind::Started(_)
            | event::Kind::Output(_)
            | event::Kind::Ended(_)
            | event::Kind::Credit(_)
            | event::Kind::Superseded(_) => return Err(asked.out_of_place()),
        }
    }
    execs.sort_by_key(|exec| std::cmp::Reverse(exec.age));
    Ok(execs)
}

/// Says one word to a detachable exec; whether it runs.
pub(in crate::sandbox) async fn tell(place: &Place, id: &ExecId, tell: Tell) -> Result<bool, Error> {
    let input = match tell {
        Tell::Signal(number) => wire::input::Kind::Signal(number),
        Tell::SignalTree(number) => wire::input::Kind::SignalTree(number),
        Tell::Kill { by } => wire::input::Kind::Kill(by),
        Tell::Terminate { by } => wire::input::Kind::Terminate(by),
    };
    say(place, id, wire::tell::Kind::Input(wire::Input { kind: Some(input) })).await
}

/// Lets the guest forget an exec that ended.
pub(in crate::sandbox) async fn release(place: &Place, id: &ExecId) -> Result<(), Error> {
    match say(place, id, wire::tell::Kind::Release(true)).await {
        Ok(_) | Err(Error::NoExec(_)) => Ok(()),
        Err(error) => Err(error),
    }
}

async fn say(place: &Place, id: &ExecId, kind: wire::tell::Kind) -> Result<bool, Error> {
    let tell = wire::Tell {
        id: id.to_string(),
        kind: Some(kind),
    };
    let mut asked = Asked::new(place, request::Kind::Tell(tell)).await?;
    match asked.event().await? {
        event::Kind::Told(wire::Told { running }) => Ok(running),
        event::Kind::Fault(fault) => Err(about(id, Refused::Fault(fault))),
        event::Kind::Pong(_)
        | event::Kind::Started(_)
        | event::Kind::Output(_)
        | event::Kind::Ended(_)
        | event::Kind::Credit(_)
        | event::Kind::Superseded(_)
        | event::Kind::Exec(_) => Err(asked.out_of_place()),
    }
}

/// Connects to a TCP port inside. What comes back carries the connection's bytes, and each half can be closed by itself.
pub(in crate::sandbox) async fn dial(place: &Place, port: u16, wait: Duration) -> Result<UnixStream, Error> {
    let request = request::Kind::Dial(wire::Dial {
        port: port.into(),
        wait_ms: wait.as_millis() as u64,
    });
    let mut stream = Asked::new(place, request).await?.stream;
    // Not one byte more than the answer is read: what follows belongs to the connection.
    let answer = timeout(wait + ANSWER, async {
        let length = stream.read_u32().await? as usize;
        let mut frame = vec![0; length.min(wire::MAX_FRAME)];
        stream.read_exact(&mut frame).await?;
        Event::decode(frame.as_slice()).map_err(std::io::Error::other)
    });
    let answer = match answer.await {
        Ok(Ok(event)) => event.kind,
        Ok(Err(error)) => return Err(place.lost(error.to_string())),
        Err(_) => return Err(place.lost("it gave no answer to a dial")),
    };
    match answer {
        Some(event::Kind::Started(_)) => Ok(stream),
        Some(event::Kind::Fault(wire::Fault { code, message, .. })) if code == "refused" => {
            Err(Error::Refused { port, reason: message })
        }
        Some(event::Kind::Fault(fault)) => Err(Refused::Fault(fault).into()),
        Some(
            event::Kind::Pong(_)
            | event::Kind::Output(_)
            | event::Kind::Ended(_)
            | event::Kind::Credit(_)
            | event::Kind::Superseded(_)
            | event::Kind::Told(_)
            | event::Kind::Exec(_),
        )
        | None => Err(place.lost("its first word was out of place")),
    }
}

fn info(said: wire::ExecInfo) -> Option<ExecInfo> {
    let ended = match said.ended {
        None => None,
        Some(ended) => Some(end(ended)?),
    };
    Some(ExecInfo {
        id: said.id.parse().ok()?,
        argv: said.argv,
        pid: said.pid,
        age: Duration::from_millis(said.age_ms),
        ended,
        attached: said.attached,
    })
}

/// What the guest alone knows of an end.
fn end(said: wire::Ended) -> Option<Ended> {
    let cause = match said.status? {
        _ if said.timed_out => Cause::TimedOut {
            after_ms: said.duration_us / 1000,
        },
        _ if said.killed => Cause::Killed {
            by: said.killed_by.clone(),
        },
        ended::Status::ExitCode(code) => Cause::Exited { code },
        ended::Status::Signal(signal) => Cause::Signalled { signal },
    };
    Some(Ended::told(cause, &said))
}
