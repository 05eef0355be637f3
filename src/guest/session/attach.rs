//! Who is attached, and who may be: connections that init hands over, and what init is told of the exec.

use std::io::{self, ErrorKind};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use prost::Message;

use super::{Peer, Phase, Session, answer, part};
use crate::guest::child::fault;
use crate::guest::leash::{Patience, Tag};
use crate::guest::streams::{Keep, Source};
use crate::wire::{self, Fault, Offsets, Started, Stream, event, request, tell};

/// How long init may take to hear that an exec goes.
const LEAVE: Duration = Duration::from_secs(1);

impl Session<'_> {
    pub(super) fn started(&self) -> Started {
        Started {
            pid: self.main.as_raw().unsigned_abs(),
            timeout_ms: self.facts.timeout_ms,
            age_ms: self.begun.elapsed().as_millis() as u64,
            note: self.note.clone(),
            stdin_closed: self.stdin.is_none() || self.stdin_eof,
            drop_oldest: self.facts.keep == Keep::Dropping,
        }
    }

    /// Tells init what this exec is, for those who list.
    pub(super) fn describe(&self, tag: Tag) {
        let Some(leash) = self.leash else {
            return;
        };
        let info = wire::ExecInfo {
            id: self.facts.id.clone(),
            argv: self.facts.argv.clone(),
            pid: self.main.as_raw().unsigned_abs(),
            // On the common clock: whoever lists makes an age of it.
            age_ms: self.begun_ms,
            ended: match &self.phase {
                Phase::Over { ended, .. } => Some(self.with_counts(ended)),
                Phase::Starting { .. } | Phase::Running => None,
            },
            attached: self.peer.is_some(),
        };
        // Init always takes what it gets; if it is gone, so is everything.
        let _ = leash.send(
            tag,
            self.facts.id.as_bytes(),
            &info.encode_to_vec(),
            None,
            Patience::Wait,
        );
    }

    /// The connection is gone: a detachable exec goes on without.
    pub(super) fn lose_peer(&mut self) -> io::Result<()> {
        let was_told = self.peer.take().is_none_or(|peer| peer.told);
        if self.facts.detachable {
            self.uncredited = self.pending.len();
            self.describe(Tag::Describe);
            return Ok(());
        }
        match &self.phase {
            // Only what was to live on is left.
            Phase::Over { .. } if self.facts.keep_background || was_told => Ok(()),
            Phase::Starting { .. } | Phase::Running | Phase::Over { .. } => Err(ErrorKind::ConnectionAborted.into()),
        }
    }

    /// A request that init passes on, with its connection.
    pub(super) fn hear_init(&mut self) {
        let Some(message) = self.leash.and_then(|leash| leash.receive(Patience::Now).ok().flatten()) else {
            return;
        };
        match (message.tag, message.connection) {
            (Tag::HandOver, Some(connection)) => {
                // A connection that fails is that one's trouble.
                if let Ok(request) = wire::Request::decode(message.body.as_slice()) {
                    let _ = self.welcome(request, connection.into());
                }
            }
            (Tag::Forget, _) => self.released = true,
            _ => {}
        }
    }

    /// Before this process goes: init is told, and whoever was handed over until then learns that there is no such exec.
    pub(super) fn leave(&self) {
        let Some(leash) = self.leash else {
            return;
        };
        if leash
            .send(Tag::Leave, self.facts.id.as_bytes(), &[], None, Patience::Wait)
            .is_err()
        {
            return;
        }
        loop {
            let mut fds = [PollFd::new(leash.as_fd(), PollFlags::POLLIN)];
            // Init answers at once, but where its word found no room: what stands in the way has been read by then.
            let timeout = PollTimeout::try_from(LEAVE).unwrap_or(PollTimeout::ZERO);
            if !matches!(poll(&mut fds, timeout), Ok(1) | Err(Errno::EINTR)) {
                return;
            }
            match leash.receive(Patience::Now) {
                Ok(Some(message)) => match (message.tag, message.connection) {
                    (Tag::HandOver, Some(connection)) => {
                        let gone = event::Kind::Fault(no_such_exec(&self.facts.id));
                        let mut connection = UnixStream::from(connection);
                        // Nobody may hold this process up.
                        let _ = connection.set_nonblocking(true);
                        let _ = answer(&mut connection, gone);
                    }
                    (Tag::Yes, _) => return,
                    _ => {}
                },
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Ok(None) | Err(_) => return,
            }
        }
    }

    pub(super) fn welcome(&mut self, request: wire::Request, connection: UnixStream) -> io::Result<()> {
        let mut peer = Peer::new(connection)?;
        match request.kind {
            Some(request::Kind::Attach(attach)) => {
                let from = attach.from.unwrap_or_default();
                if let Some(fault) = self.refuses(&from) {
                    peer.outbox.push(event::Kind::Fault(fault))?;
                    return peer.flush();
                }
                // What the one before had sent still counts.
                let _ = self.take_input();
                if let Some(mut old) = self.peer.take() {
                    let _ = old.outbox.push(event::Kind::Superseded(wire::Superseded {}));
                    let _ = old.flush();
                    self.uncredited = self.pending.len();
                }
                for source in &mut self.sources {
                    source.go_on_from(part(&from, source.stream));
                }
                self.peer = Some(peer);
                if matches!(self.phase, Phase::Starting { .. }) {
                    // It is told when it is so.
                    return Ok(());
                }
                self.describe(Tag::Describe);
                let started = self.started();
                self.push(event::Kind::Started(started))
            }
            Some(request::Kind::Tell(tell)) => {
                let running = self.main_ended.is_none();
                match tell.kind {
                    Some(tell::Kind::Input(input)) => self.obey(input),
                    Some(tell::Kind::Release(_)) => self.released |= !running,
                    None => {}
                }
                peer.outbox.push(event::Kind::Told(wire::Told { running }))?;
                peer.flush()
            }
            Some(request::Kind::Ping(_) | request::Kind::Exec(_) | request::Kind::List(_) | request::Kind::Dial(_))
            | None => Ok(()),
        }
    }

    /// Why nobody can go on from there.
    pub(super) fn refuses(&self, from: &Offsets) -> Option<Fault> {
        let kept = self.offsets(Source::first);
        for source in &self.sources {
            let wanted = part(from, source.stream);
            if wanted > source.made() {
                let message = format!("byte {wanted} of a stream that has {}", source.made());
                return Some(fault("bad_request", message, None));
            }
            if wanted < source.first() {
                let message = format!(
                    "byte {wanted} was dropped, the first that is kept is {}",
                    source.first()
                );
                return Some(Fault {
                    kept: Some(kept),
                    ..fault("output_dropped", message, None)
                });
            }
        }
        None
    }

    pub(super) fn offsets(&self, of: impl Fn(&Source) -> u64) -> Offsets {
        let mut offsets = Offsets::default();
        for source in &self.sources {
            match source.stream {
                Stream::Stdout => offsets.stdout = of(source),
                Stream::Stderr => offsets.stderr = of(source),
                Stream::Pty => offsets.pty = of(source),
                Stream::Unspecified => {}
            }
        }
        offsets
    }

    pub(super) fn with_counts(&self, ended: &wire::Ended) -> wire::Ended {
        wire::Ended {
            made: Some(self.offsets(Source::made)),
            dropped: Some(self.offsets(Source::dropped)),
            ..ended.clone()
        }
    }
}

/// What whoever asks for an exec is told that is not there.
pub fn no_such_exec(id: &str) -> Fault {
    fault(
        "no_such_exec",
        format!("no exec `{id}` that could be attached to"),
        None,
    )
}
