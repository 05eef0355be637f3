//! Moves the bytes of a [`Mux`]: one poll loop over the two streams and the local sockets.
//!
//! Knows neither who is behind the sockets nor what is said. The caller owns the loop ([`Pump::turn`]), so that it can wait
//! for other things too.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::line::{Heard, Packets};
use super::mux::{Incoming, Mux, News, Side};

/// Bytes read from the other end at a time.
const READ: usize = 64 << 10;

/// One end: a [`Mux`] with its streams and sockets.
#[derive(Debug)]
pub struct Pump {
    pub mux: Mux,
    from: std::fs::File,
    to: std::fs::File,
    peers: BTreeMap<u32, Peer>,
    is_lost: bool,
    /// Guest: where the host may be another without a word.
    packets: Option<Packets>,
}

#[derive(Debug)]
struct Peer {
    socket: UnixStream,
    /// It has gone, but has left words for which there is no room yet.
    has_hung_up: bool,
    /// It knows that the other end says no more.
    is_told: bool,
}

/// What a turn brought.
#[derive(Debug, Default)]
pub struct Turn {
    pub news: Vec<News>,
    /// Which of the caller's descriptors are ready, in its order.
    pub ready: Vec<bool>,
    /// Sockets of connections whose host has died; see [`Pump::expect_breaks`].
    pub orphans: Vec<UnixStream>,
}

impl Pump {
    /// # Errors
    /// When the streams cannot be made non-blocking.
    pub fn new(side: Side, from: OwnedFd, to: OwnedFd) -> io::Result<Self> {
        for stream in [&from, &to] {
            let flags = OFlag::from_bits_retain(fcntl(stream, FcntlArg::F_GETFL)?);
            fcntl(stream, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        }
        Ok(Self {
            mux: Mux::new(side),
            from: from.into(),
            to: to.into(),
            peers: BTreeMap::new(),
            is_lost: false,
            packets: None,
        })
    }

    /// Guest: what comes is a [`super::line`].
    pub fn expect_breaks(&mut self) {
        self.packets = Some(Packets::default());
    }

    /// Whether the other end is gone.
    pub fn is_lost(&self) -> bool {
        self.is_lost
    }

    /// Whether no local socket is left.
    pub fn is_idle(&self) -> bool {
        self.peers.is_empty()
    }

    /// Gives a connection its local socket.
    pub fn attach(&mut self, id: u32, socket: UnixStream) -> io::Result<()> {
        socket.set_nonblocking(true)?;
        let peer = Peer {
            socket,
            has_hung_up: false,
            is_told: false,
        };
        self.peers.insert(id, peer);
        // Its data or its end may have come along with its opening; nothing else would wake the loop for that.
        self.deliver_to(id);
        Ok(())
    }

    /// Takes the socket of a connection away.
    pub fn detach(&mut self, id: u32) -> Option<UnixStream> {
        self.peers.remove(&id).map(|peer| peer.socket)
    }

    /// Waits until anything can be done, and does it. `others` are waited for too, for reading.
    ///
    /// # Errors
    /// A [`super::mux::Violation`], as `InvalidData`; failures of poll itself.
    pub fn turn(&mut self, others: &[BorrowedFd<'_>], timeout: PollTimeout) -> io::Result<Turn> {
        self.mux.credit();
        let mut fds: Vec<PollFd<'_>> = others.iter().map(|fd| PollFd::new(*fd, PollFlags::POLLIN)).collect();
        let streams = fds.len();
        if !self.is_lost {
            fds.push(PollFd::new(self.from.as_fd(), PollFlags::POLLIN));
            if !self.mux.outbox().is_empty() {
                fds.push(PollFd::new(self.to.as_fd(), PollFlags::POLLOUT));
            }
        }
        let locals = fds.len();
        let mut polled = Vec::new();
        let is_quiet = self.mux.is_paused();
        for (id, peer) in self.peers.iter().filter(|_| !is_quiet) {
            let mut events = PollFlags::empty();
            if self.mux.room(*id) > 0 {
                events |= PollFlags::POLLIN;
            }
            if !self.mux.waiting(*id).is_empty() {
                events |= PollFlags::POLLOUT;
            }
            // poll(2) tells of a hang-up whether asked or not: what cannot be acted on must not be asked about.
            if events.is_empty() && peer.has_hung_up {
                continue;
            }
            polled.push(*id);
            fds.push(PollFd::new(peer.socket.as_fd(), events));
        }
        match poll(&mut fds, timeout) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        let found = |fd: &PollFd<'_>| fd.revents().unwrap_or(PollFlags::empty());
        let ready = fds[..streams].iter().map(|fd| !found(fd).is_empty()).collect();
        let streams_ready = fds[streams..locals].iter().any(|fd| !found(fd).is_empty());
        let locals: Vec<(u32, PollFlags)> = polled.into_iter().zip(fds[locals..].iter().map(found)).collect();
        let mut turn = Turn {
            ready,
            ..Turn::default()
        };
        if streams_ready {
            self.hear(&mut turn)?;
        }
        for (id, events) in locals {
            if !events.is_empty() {
                self.listen(id, events);
            }
        }
        if !self.mux.is_paused() {
            // Also for what just came.
            self.deliver();
        }
        if !self.is_lost {
            self.speak();
        }
        Ok(turn)
    }

    /// Reads from the other end.
    fn hear(&mut self, turn: &mut Turn) -> io::Result<()> {
        let mut buffer = vec![0; READ];
        match self.from.read(&mut buffer) {
            Ok(0) => self.lose(),
            Ok(got) => {
                if self.packets.is_some() {
                    self.unpack(&buffer[..got], turn);
                    return Ok(());
                }
                let heard = self.mux.receive(&buffer[..got]);
                turn.news = heard.map_err(|violation| io::Error::new(ErrorKind::InvalidData, violation))?;
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(_) => self.lose(),
        }
        Ok(())
    }

    /// Takes what came over a line that breaks.
    fn unpack(&mut self, bytes: &[u8], turn: &mut Turn) {
        let Some(packets) = &mut self.packets else { return };
        let mut is_deaf = false;
        for heard in packets.take(bytes) {
            match heard {
                Heard::Bytes(_) if is_deaf => {}
                Heard::Bytes(bytes) => match self.mux.receive(&bytes) {
                    Ok(news) => turn.news.extend(news),
                    // Of a host that has died: it was on its way when the new one began.
                    Err(_) => is_deaf = true,
                },
                Heard::Garbled => is_deaf = true,
                Heard::Hail(word) => {
                    is_deaf = false;
                    // Nobody waits for what the one before had asked for.
                    turn.news.clear();
                    for id in self.mux.begin(&word) {
                        turn.orphans.extend(self.peers.remove(&id).map(|peer| peer.socket));
                    }
                }
            }
        }
        if is_deaf {
            packets.stop_listening();
            self.mux.deaf();
        }
    }

    /// Writes to the other end, as much as it takes.
    fn speak(&mut self) {
        while !self.mux.outbox().is_empty() {
            match self.to.write(self.mux.outbox()) {
                Ok(sent) => self.mux.went(sent),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(_) => return self.lose(),
            }
        }
    }

    fn lose(&mut self) {
        self.is_lost = true;
        self.mux.lost();
    }

    /// Takes what a local peer says.
    fn listen(&mut self, id: u32, events: PollFlags) {
        let has_gone = events.intersects(PollFlags::POLLHUP | PollFlags::POLLERR);
        let mut buffer = [0; super::mux::CHUNK];
        loop {
            let room = self.mux.room(id);
            if room == 0 {
                break;
            }
            let Some(peer) = self.peers.get_mut(&id) else { return };
            match peer.socket.read(&mut buffer[..room]) {
                Ok(0) if has_gone => return self.close(id),
                Ok(0) => return self.mux.end(id),
                Ok(got) => self.mux.send(id, &buffer[..got]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => return self.close(id),
            }
        }
        if !has_gone {
            return;
        }
        // It cannot be told from here whether it left words behind: it has not said its last, and there was no room.
        let may_have_words = self.mux.side() == Side::Guest && !self.mux.has_ended(id) && !self.is_lost;
        if may_have_words {
            if let Some(peer) = self.peers.get_mut(&id) {
                peer.has_hung_up = true;
            }
        } else {
            self.close(id);
        }
    }

    fn close(&mut self, id: u32) {
        self.mux.close(id);
        self.peers.remove(&id);
    }

    /// Gives local peers what came for them.
    fn deliver(&mut self) {
        let ids: Vec<u32> = self.peers.keys().copied().collect();
        for id in ids {
            self.deliver_to(id);
        }
    }

    fn deliver_to(&mut self, id: u32) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        while !self.mux.waiting(id).is_empty() {
            match peer.socket.write(self.mux.waiting(id)) {
                Ok(taken) => self.mux.took(id, taken),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // It takes no more. It may still have something to say, where it has gone too: `listen` sees to that.
                Err(_) if self.mux.side() == Side::Guest => {
                    let left = self.mux.waiting(id).len();
                    self.mux.took(id, left);
                }
                Err(_) => return self.close(id),
            }
        }
        let is_drained = self.mux.waiting(id).is_empty();
        match self.mux.incoming(id) {
            Incoming::Open => {}
            Incoming::Ended if is_drained => {
                if !std::mem::replace(&mut peer.is_told, true) {
                    // Where it is gone already there is nobody to tell.
                    let _ = peer.socket.shutdown(Shutdown::Write);
                }
                if self.mux.has_ended(id) {
                    self.mux.forget(id);
                    self.peers.remove(&id);
                }
            }
            Incoming::Ended => {}
            // A hang-up must not wait for whoever does not read; last words must.
            Incoming::Closed if is_drained || self.mux.side() == Side::Guest => {
                self.mux.forget(id);
                self.peers.remove(&id);
            }
            Incoming::Closed => {}
        }
    }
}

#[cfg(test)]
#[path = "pump_tests.rs"]
mod tests;
