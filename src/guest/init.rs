//! PID 1: accepts connections, forks a shim for each, reaps, and passes connections between shims.
//!
//! It reads no frame and keeps no state but the pids of its shims and the list of detachable execs (`register`), so that
//! nothing a connection carries can end it.
//!
//! One shim that has done what there was may wait for the next connection itself, so that a command that follows another
//! finds a process that is there already:
//!
//! ```text
//! init accepts, forks ─► busy ── Free, Yes ──► waits, in init's place ── accepts, Busy ──► busy
//!                            └── Free, No, or not fit for another ──► ends
//! ```
//! While none waits, init looks for connections; in a quiet moment it makes one that waits.

use std::io::{self, ErrorKind, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::{env, fs};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::socket::{SockFlag, accept4};
use nix::sys::stat::{Mode, umask};
use nix::unistd::{ForkResult, Pid};

use super::leash::{Leash, Message, Patience, Tag};
use super::mux::Breaks;
use super::register::{Register, Shims, say};
use super::shim::Room;
use super::sys::{self, Reaped};
use super::{Source, mux, shim, tree};
use crate::wire;

/// Shims beyond the most commands at once, for connections that run nothing: those that end commands above all.
const SPARE: usize = 32;

/// CAP_KILL, CAP_SETGID, CAP_SETUID: to become the program's user, and to end it.
const KEPT_CAPABILITIES: u64 = 1 << 5 | 1 << 6 | 1 << 7;

/// After so many ms without anything to do, a shim is made that waits, where none does.
const QUIET: u16 = 50;

/// Serves connections from `source` until SIGTERM.
pub fn run(source: Source) -> io::Result<()> {
    prctl::set_dumpable(false)?;
    // Once for all programs; what is written to one that no longer reads is an error, not our end.
    sys::reset_signals()?;
    sys::ignore_signal(Signal::SIGPIPE);
    let source = harden(source)?;
    // A tree is found over /proc; without it no end of an exec could be promised.
    fs::metadata("/proc/self/stat").map_err(|error| io::Error::other(format!("/proc is not mounted: {error}")))?;
    let signals = signals()?;
    let (listener, shims, most) = match source {
        Opened::Connected(connection) => return shim::run(connection, &signals, None, Room::Free).map(drop),
        Opened::Listening(listener) => (Listener::Socket(listener), Shims::new(), None),
        Opened::Stdio(breaks, most) => {
            let (handoff, mux) = mux::start(breaks)?;
            // One that has no leash.
            (Listener::Handoff(handoff), Shims::from([(mux, None)]), Some(most))
        }
    };
    Init {
        listener,
        signals,
        shims,
        waiting: None,
        most,
        register: Register::default(),
    }
    .serve()
}

enum Opened {
    Listening(OwnedFd),
    Connected(UnixStream),
    Stdio(Breaks, usize),
}

/// Where connections come from, one at a time.
pub enum Listener {
    Socket(OwnedFd),
    /// The mux opens them and passes them on.
    Handoff(OwnedFd),
    /// None will come any more.
    Closed,
}

pub enum Accepted {
    Connection(UnixStream),
    /// Gone again, or out of some resource: the others go on.
    NotNow,
    NeverAgain,
}

impl Listener {
    fn number(&self) -> Option<RawFd> {
        match self {
            Self::Socket(fd) | Self::Handoff(fd) => Some(fd.as_raw_fd()),
            Self::Closed => None,
        }
    }

    /// The next connection, if it is there.
    pub fn accept(&self) -> io::Result<Accepted> {
        let accepted = match self {
            Self::Socket(listener) => accept4(listener.as_fd(), SockFlag::SOCK_CLOEXEC).map(Some),
            Self::Handoff(handoff) => mux::handed(handoff),
            Self::Closed => Ok(None),
        };
        match accepted {
            Ok(Some(connection)) => Ok(Accepted::Connection(connection.into())),
            Ok(None) => Ok(Accepted::NeverAgain),
            Err(Errno::EAGAIN | Errno::EINTR | Errno::ECONNABORTED | Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM) => {
                Ok(Accepted::NotNow)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Waits for the next connection; `None` when there will be none.
    pub fn next(&self) -> io::Result<Option<UnixStream>> {
        loop {
            let (Self::Socket(fd) | Self::Handoff(fd)) = self else {
                return Ok(None);
            };
            match poll(&mut [PollFd::new(fd.as_fd(), PollFlags::POLLIN)], PollTimeout::NONE) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
            match self.accept()? {
                Accepted::Connection(connection) => return Ok(Some(connection)),
                Accepted::NeverAgain => return Ok(None),
                Accepted::NotNow => {}
            }
        }
    }
}

/// Leaves this process with one descriptor, three capabilities and nothing that a program could inherit.
fn harden(source: Source) -> io::Result<Opened> {
    env::set_current_dir("/")?;
    let keep = |fd: RawFd| -> io::Result<OwnedFd> {
        let owned = sys::adopt(fd)?;
        sys::close_range(3, fd as u32 - 1, false)?;
        sys::close_range(fd + 1, u32::MAX, false)?;
        fcntl(&owned, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
        Ok(owned)
    };
    let opened = match source {
        Source::ListenFd(fd) => Opened::Listening(keep(fd)?),
        Source::ConnectFd(fd) => Opened::Connected(keep(fd)?.into()),
        Source::Stdio(breaks, most) => {
            sys::close_range(3, u32::MAX, false)?;
            // gVisor makes these whatever it is told. They are its own, and nobody needs them.
            let _ = (fs::remove_file("/dev/fuse"), fs::remove_dir_all("/dev/net"));
            Opened::Stdio(breaks, most)
        }
        Source::ListenPath(path) => {
            sys::close_range(3, u32::MAX, false)?;
            match fs::remove_file(&path) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                Ok(()) | Err(_) => {}
            }
            umask(Mode::from_bits_truncate(0o177));
            Opened::Listening(UnixListener::bind(&path)?.into())
        }
    };
    if let Opened::Listening(listener) = &opened {
        fcntl(listener, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    }
    umask(Mode::from_bits_truncate(0o022));
    sys::drop_bounding_set();
    sys::limit_capabilities(KEPT_CAPABILITIES)?;
    Ok(opened)
}

fn signals() -> io::Result<SignalFd> {
    let mut mask = SigSet::empty();
    mask.add(Signal::SIGCHLD);
    mask.add(Signal::SIGTERM);
    mask.add(Signal::SIGINT);
    mask.thread_block()?;
    Ok(SignalFd::with_flags(
        &mask,
        SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK,
    )?)
}

struct Init {
    listener: Listener,
    signals: SignalFd,
    /// Of the mux too.
    shims: Shims,
    /// The shim that takes the next connection.
    waiting: Option<Pid>,
    /// Commands at once. `None` where the kernel's own limits end nothing else.
    most: Option<usize>,
    register: Register,
}

impl Init {
    fn serve(mut self) -> io::Result<()> {
        let mut is_tired = false;
        loop {
            let (Listener::Socket(listener) | Listener::Handoff(listener)) = &self.listener else {
                self.end();
                return Ok(());
            };
            let wanted = match self.waiting {
                None => PollFlags::POLLIN,
                Some(_) => PollFlags::empty(),
            };
            let mut fds = vec![
                PollFd::new(listener.as_fd(), wanted),
                PollFd::new(self.signals.as_fd(), PollFlags::POLLIN),
            ];
            let mut pids = Vec::with_capacity(self.shims.len());
            for (pid, leash) in &self.shims {
                if let Some(leash) = leash {
                    fds.push(PollFd::new(leash.as_fd(), PollFlags::POLLIN));
                    pids.push(*pid);
                }
            }
            // Where connections come through the mux, a fork costs too much to be made for one that may not come.
            let makes_one = self.waiting.is_none() && matches!(self.listener, Listener::Socket(_)) && !is_tired;
            let timeout = if makes_one {
                PollTimeout::from(QUIET)
            } else {
                PollTimeout::NONE
            };
            match poll(&mut fds, timeout) {
                Ok(0) => {
                    self.waiting = self.fork(None, Room::Free).ok();
                    // Out of processes: not again before something has happened.
                    is_tired = self.waiting.is_none();
                    continue;
                }
                Ok(_) | Err(Errno::EINTR) => is_tired = false,
                Err(error) => return Err(error.into()),
            }
            let ready = |fd: &PollFd<'_>| fd.any().unwrap_or(true);
            let (connected, signalled) = (ready(&fds[0]), ready(&fds[1]));
            let speaking: Vec<Pid> = pids
                .into_iter()
                .zip(&fds[2..])
                .filter(|(_, fd)| ready(fd))
                .map(|(pid, _)| pid)
                .collect();
            for pid in speaking {
                self.hear(pid);
            }
            if signalled && self.asked_to_end() {
                self.end();
                return Ok(());
            }
            if connected {
                self.accept()?;
            }
        }
    }

    /// Takes one message of a shim's.
    fn hear(&mut self, pid: Pid) {
        let Some(Some(leash)) = self.shims.get(&pid) else {
            return;
        };
        match leash.receive(Patience::Now) {
            Ok(Some(Message { tag: Tag::Busy, .. })) => {
                self.waiting.take_if(|waiting| *waiting == pid);
            }
            Ok(Some(Message { tag: Tag::Free, .. })) => {
                // Where there are too many, one that waits would not know it.
                let may_wait = self.waiting.is_none() && self.room() == Room::Free;
                if may_wait {
                    self.waiting = Some(pid);
                }
                say(&self.shims, pid, if may_wait { Tag::Yes } else { Tag::No });
            }
            Ok(Some(message)) => self.register.hear(pid, message, &self.shims),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            // The shim is about to be reaped.
            Ok(None) | Err(_) => drop(self.shims.insert(pid, None)),
        }
    }

    /// Takes all pending signals.
    fn asked_to_end(&mut self) -> bool {
        let mut end = false;
        while let Ok(Some(info)) = self.signals.read_signal() {
            end |= info.ssi_signo != Signal::SIGCHLD as u32;
        }
        self.reap();
        end
    }

    fn reap(&mut self) {
        let mut lost_shim = false;
        tree::reap_ended(|Reaped { pid, status, .. }| {
            if self.shims.remove(&pid).is_some() {
                self.waiting.take_if(|waiting| *waiting == pid);
                self.register.forget(pid);
                lost_shim |= status != 0;
            }
        });
        if lost_shim {
            // A shim that did not end by itself left its tree to us.
            tree::kill_strays(&self.shims.keys().copied().collect());
        }
    }

    fn accept(&mut self) -> io::Result<()> {
        let connection = match self.listener.accept()? {
            Accepted::Connection(connection) => connection,
            Accepted::NotNow => return Ok(()),
            Accepted::NeverAgain => {
                self.listener = Listener::Closed;
                return Ok(());
            }
        };
        let room = self.room();
        if room == Room::None {
            refuse(connection, Errno::EAGAIN);
            return Ok(());
        }
        if let Err((errno, Some(connection))) = self.fork(Some(connection), room) {
            refuse(connection, errno);
        }
        Ok(())
    }

    /// Forks a shim for a connection, or for the next that comes.
    fn fork(&mut self, connection: Option<UnixStream>, room: Room) -> Result<Pid, (Errno, Option<UnixStream>)> {
        let (ours, theirs) = match Leash::pair() {
            Ok(pair) => pair,
            Err(errno) => return Err((errno, connection)),
        };
        match sys::fork() {
            Ok(ForkResult::Child) => {
                // A descriptor of its own: under gVisor this one goes on telling of init's signals.
                let result = signals().and_then(|signals| {
                    let mut kept = vec![theirs.as_raw_fd(), signals.as_fd().as_raw_fd()];
                    kept.extend(connection.as_ref().map(AsRawFd::as_raw_fd));
                    kept.extend(self.listener.number());
                    close_others(kept)?;
                    shim::run_all(connection, &signals, &theirs, &self.listener, room)
                });
                sys::exit(i32::from(result.is_err()))
            }
            Ok(ForkResult::Parent { child }) => {
                self.shims.insert(child, Some(ours));
                Ok(child)
            }
            Err(errno) => Err((errno, connection)),
        }
    }

    /// How much may begin. The mux is one of the shims.
    fn room(&self) -> Room {
        match self.most {
            Some(most) if self.shims.len() > most + SPARE => Room::None,
            Some(most) if self.shims.len() > most => Room::Words { most },
            Some(_) | None => Room::Free,
        }
    }

    /// Asks everything to end, and waits for that; whoever sent SIGTERM kills this process when it takes too long.
    fn end(&mut self) {
        // The mux goes when all that it carries has ended.
        self.listener = Listener::Closed;
        let _ = nix::sys::signal::kill(Pid::from_raw(-1), Signal::SIGTERM);
        while let Ok(Some(_)) = sys::reap(sys::Wait::UntilOneEnds) {}
    }
}

/// Closes what a shim has from init beside its standard streams and `kept`. Nothing of it is used again: a shim exits.
fn close_others(mut kept: Vec<RawFd>) -> io::Result<()> {
    kept.sort_unstable();
    let mut first = 3;
    for fd in kept {
        sys::close_range(first, fd as u32 - 1, false)?;
        first = fd + 1;
    }
    Ok(sys::close_range(first, u32::MAX, false)?)
}

/// Says that no process could be made. Best effort: the peer must not be able to hold init up.
fn refuse(mut connection: UnixStream, errno: Errno) {
    let fault = wire::Fault {
        code: "limit".to_owned(),
        message: format!("the sandbox can have no further process: {errno}"),
        errno: errno as i32,
        kept: None,
    };
    let event = wire::Event {
        kind: Some(wire::event::Kind::Fault(fault)),
    };
    let mut frame = Vec::new();
    if wire::encode(&event, &mut frame).is_ok() && connection.set_nonblocking(true).is_ok() {
        let _ = connection.write(&frame);
    }
}
