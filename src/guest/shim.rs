//! One connection: reads its request, and does it or hands it over to the shim that has the exec in question.

use std::io::{self, IoSliceMut, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

use nix::sys::prctl;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::SignalFd;
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};
use prost::Message;

use super::child::{Plan, fault};
use super::init::Listener;
use super::leash::{Leash, MAX, MAX_ID, Patience, Tag};
use super::session::{Facts, Session, answer, no_such_exec};
use super::{dial, sys};
use crate::wire::{self, Fault, event, request};

/// What a connection may begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Room {
    Free,
    /// No command: there are `most`. A word to one that runs, or about them, is heard.
    Words {
        most: usize,
    },
    None,
}

/// Whether a shim is as it was before its connection came.
#[derive(Clone, Copy, PartialEq)]
pub enum Fit {
    ForAnother,
    /// It is known to init under an id, or has kept output.
    ForNone,
}

/// Serves one connection, the next that comes where there is none yet, and, as long as init has it so, those after it.
///
/// `room` is what the first may begin; init lets a shim go on only while there is room for all.
pub fn run_all(
    first: Option<UnixStream>,
    signals: &SignalFd,
    leash: &Leash,
    listener: &Listener,
    mut room: Room,
) -> io::Result<()> {
    let mut here = first;
    loop {
        let connection = match here.take() {
            Some(connection) => connection,
            None => {
                // SIGTERM just ends this process.
                let mut term = SigSet::empty();
                term.add(Signal::SIGTERM);
                term.thread_unblock()?;
                let Some(connection) = listener.next()? else {
                    return Ok(());
                };
                leash.send(Tag::Busy, &[], &[], None, Patience::Wait)?;
                connection
            }
        };
        if run(connection, signals, Some(leash), room)? == Fit::ForNone {
            return Ok(());
        }
        let answer = ask(leash, Tag::Free, "", &[], None)?;
        if answer.is_none_or(|(tag, _)| tag != Tag::Yes) {
            return Ok(());
        }
        room = Room::Free;
    }
}

/// Serves one connection to its end. Without a leash, which is without init, there are no detachable execs.
pub fn run(mut connection: UnixStream, signals: &SignalFd, leash: Option<&Leash>, room: Room) -> io::Result<Fit> {
    prctl::set_child_subreaper(true)?;
    // Until there is a tree to see to, SIGTERM just ends this process.
    let mut term = SigSet::empty();
    term.add(Signal::SIGTERM);
    term.thread_unblock()?;
    let mut incoming = Incoming {
        connection: &connection,
        came: None,
    };
    let Some(request) = wire::read_request(&mut incoming)? else {
        return Ok(Fit::ForAnother);
    };
    let came = incoming.came;
    term.thread_block()?;
    let leaves_traces = matches!(&request.kind, Some(request::Kind::Exec(exec)) if exec.detachable || exec.drop_oldest);
    let fit = if leaves_traces { Fit::ForNone } else { Fit::ForAnother };
    match request.generation {
        wire::GENERATION => match (room, &request.kind) {
            (Room::Words { most }, Some(request::Kind::Exec(_) | request::Kind::Dial(_))) => {
                let message = format!("the sandbox has {most} commands and connections at once, which is its most");
                answer(&mut connection, event::Kind::Fault(fault("limit", message, None)))
            }
            _ => serve(connection, request, came, signals, leash),
        },
        other => {
            let message = format!("this guest speaks generation {}, not {other}", wire::GENERATION);
            answer(&mut connection, event::Kind::Fault(fault("generation", message, None)))
        }
    }
    .map(|()| fit)
}

/// What comes over a connection, and the last descriptor that came with it.
struct Incoming<'a> {
    connection: &'a UnixStream,
    came: Option<OwnedFd>,
}

impl Read for Incoming<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut space = nix::cmsg_space!(RawFd);
        let mut parts = [IoSliceMut::new(buffer)];
        let fd = self.connection.as_raw_fd();
        let received = recvmsg::<()>(fd, &mut parts, Some(&mut space), MsgFlags::MSG_CMSG_CLOEXEC)?;
        for control in received.cmsgs()? {
            if let ControlMessageOwned::ScmRights(numbers) = control {
                for number in numbers {
                    self.came = Some(sys::adopt(number)?);
                }
            }
        }
        Ok(received.bytes)
    }
}

fn serve(
    mut connection: UnixStream,
    request: wire::Request,
    came: Option<OwnedFd>,
    signals: &SignalFd,
    leash: Option<&Leash>,
) -> io::Result<()> {
    let refuse = |mut connection: UnixStream, fault| answer(&mut connection, event::Kind::Fault(fault));
    let body = match &request.kind {
        Some(request::Kind::Attach(_) | request::Kind::Tell(_)) => request.encode_to_vec(),
        Some(request::Kind::Ping(_) | request::Kind::Exec(_) | request::Kind::List(_) | request::Kind::Dial(_))
        | None => Vec::new(),
    };
    match request.kind {
        None => refuse(connection, fault("bad_request", "an empty request", None)),
        Some(request::Kind::Ping(wire::Ping {})) => {
            let generation = wire::GENERATION;
            answer(&mut connection, event::Kind::Pong(wire::Pong { generation }))
        }
        Some(request::Kind::Exec(exec)) => {
            let facts = Facts::of(&exec);
            let child = match exec.detachable {
                true => register(&exec, leash),
                false => Ok(()),
            };
            match child.and_then(|()| Plan::new(exec, came)).and_then(|plan| plan.spawn()) {
                Err(fault) => refuse(connection, fault),
                Ok(child) => Session::new(connection, signals, leash, child, facts)?.carry(),
            }
        }
        Some(request::Kind::Attach(wire::Attach { id, .. }) | request::Kind::Tell(wire::Tell { id, .. })) => {
            match hand_over(&id, &body, &connection, leash)? {
                true => Ok(()),
                false => refuse(connection, no_such_exec(&id)),
            }
        }
        Some(request::Kind::List(wire::List {})) => list(&mut connection, leash),
        Some(request::Kind::Dial(dial)) => dial::serve(connection, &dial),
    }
}

/// Makes this process the one that has the exec.
fn register(exec: &wire::Exec, leash: Option<&Leash>) -> Result<(), Fault> {
    let refused = |message: &str| fault("bad_request", message, None);
    let leash = leash.ok_or_else(|| refused("this guest has no detachable execs"))?;
    let info = wire::ExecInfo {
        id: exec.id.clone(),
        age_ms: sys::monotonic_ms(),
        attached: true,
        ..wire::ExecInfo::default()
    };
    let answer = ask(leash, Tag::Register, &exec.id, &info.encode_to_vec(), None);
    match answer {
        Ok(Some((Tag::Yes, _))) => Ok(()),
        Ok(_) => Err(refused("there is an exec of this id, or there are too many")),
        Err(error) => Err(fault("internal", format!("could not register the exec: {error}"), None)),
    }
}

/// Whether another shim has taken the connection.
fn hand_over(id: &str, body: &[u8], connection: &UnixStream, leash: Option<&Leash>) -> io::Result<bool> {
    match leash {
        Some(leash) if body.len() <= MAX && (1..=MAX_ID).contains(&id.len()) => {
            let answer = ask(leash, Tag::HandOver, id, body, Some(connection))?;
            Ok(answer.is_some_and(|(tag, _)| tag == Tag::Yes))
        }
        Some(_) | None => Ok(false),
    }
}

/// Tells of every detachable exec.
fn list(connection: &mut UnixStream, leash: Option<&Leash>) -> io::Result<()> {
    let mut after = String::new();
    while let Some(leash) = leash
        && let Some((Tag::Found, description)) = ask(leash, Tag::Next, &after, &[], None)?
    {
        let mut info = wire::ExecInfo::decode(description.as_slice()).map_err(io::Error::other)?;
        info.age_ms = sys::monotonic_ms().saturating_sub(info.age_ms);
        after.clone_from(&info.id);
        // One whose program does not run yet is none.
        if info.pid != 0 {
            answer(connection, event::Kind::Exec(info))?;
        }
    }
    answer(connection, event::Kind::Told(wire::Told { running: false }))
}

/// One question to init.
fn ask(
    leash: &Leash,
    tag: Tag,
    id: &str,
    body: &[u8],
    connection: Option<&UnixStream>,
) -> io::Result<Option<(Tag, Vec<u8>)>> {
    leash.send(tag, id.as_bytes(), body, connection.map(AsFd::as_fd), Patience::Wait)?;
    let answer = leash.receive(Patience::Wait)?;
    Ok(answer.map(|message| (message.tag, message.body)))
}
