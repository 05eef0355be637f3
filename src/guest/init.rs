//! PID 1: accepts connections, forks a shim for each, reaps, and passes connections between shims.
//!
//! It reads no frame and keeps no state but the pids of its shims and the list of detachable execs (`register`), so that
//! nothing a connection carries can end it.

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

use super::leash::{Leash, Patience};
use super::mux::Breaks;
use super::register::{Register, Shims};
use super::shim::Room;
use super::sys::{self, Reaped};
use super::{Source, mux, shim, tree};
use crate::wire;

/// Shims beyond the most commands at once, for connections that run nothing: those that end commands above all.
const SPARE: usize = 32;

/// CAP_KILL, CAP_SETGID, CAP_SETUID: to become the program's user, and to end it.
const KEPT_CAPABILITIES: u64 = 1 << 5 | 1 << 6 | 1 << 7;

/// Serves connections from `source` until SIGTERM.
pub fn run(source: Source) -> io::Result<()> {
    prctl::set_dumpable(false)?;
    let source = harden(source)?;
    // A tree is found over /proc; without it no end of an exec could be promised.
    fs::metadata("/proc/self/stat").map_err(|error| io::Error::other(format!("/proc is not mounted: {error}")))?;
    let signals = signals()?;
    let (listener, shims, most) = match source {
        Opened::Connected(connection) => return shim::run(connection, &signals, None, Room::Free),
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
enum Listener {
    Socket(OwnedFd),
    /// The mux opens them and passes them on.
    Handoff(OwnedFd),
    /// None will come any more.
    Closed,
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
    /// Commands at once. `None` where the kernel's own limits end nothing else.
    most: Option<usize>,
    register: Register,
}

impl Init {
    fn serve(mut self) -> io::Result<()> {
        loop {
            let (Listener::Socket(listener) | Listener::Handoff(listener)) = &self.listener else {
                self.end();
                return Ok(());
            };
            let mut fds = vec![
                PollFd::new(listener.as_fd(), PollFlags::POLLIN),
                PollFd::new(self.signals.as_fd(), PollFlags::POLLIN),
            ];
            let mut pids = Vec::with_capacity(self.shims.len());
            for (pid, leash) in &self.shims {
                if let Some(leash) = leash {
                    fds.push(PollFd::new(leash.as_fd(), PollFlags::POLLIN));
                    pids.push(*pid);
                }
            }
            match poll(&mut fds, PollTimeout::NONE) {
                Ok(_) | Err(Errno::EINTR) => {}
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
        let accepted = match &self.listener {
            Listener::Socket(listener) => accept4(listener.as_fd(), SockFlag::SOCK_CLOEXEC),
            Listener::Handoff(handoff) => match mux::handed(handoff) {
                Ok(Some(connection)) => Ok(connection),
                Ok(None) => {
                    self.listener = Listener::Closed;
                    return Ok(());
                }
                Err(error) => Err(error),
            },
            Listener::Closed => return Ok(()),
        };
        let connection = match accepted {
            Ok(connection) => UnixStream::from(connection),
            // Gone again, or out of some resource: the others go on.
            Err(Errno::EAGAIN | Errno::EINTR | Errno::ECONNABORTED | Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM) => {
                return Ok(());
            }
            Err(error) => return Err(error.into()),
        };
        let room = self.room();
        if room == Room::None {
            refuse(connection, Errno::EAGAIN);
            return Ok(());
        }
        let (ours, theirs) = match Leash::pair() {
            Ok(pair) => pair,
            Err(errno) => {
                refuse(connection, errno);
                return Ok(());
            }
        };
        match sys::fork() {
            Ok(ForkResult::Child) => {
                // A descriptor of its own: under gVisor this one goes on telling of init's signals.
                let result = signals().and_then(|signals| {
                    let mut kept = [connection.as_raw_fd(), theirs.as_raw_fd(), signals.as_fd().as_raw_fd()];
                    close_others(&mut kept)?;
                    shim::run(connection, &signals, Some(&theirs), room)
                });
                sys::exit(i32::from(result.is_err()))
            }
            Ok(ForkResult::Parent { child }) => {
                self.shims.insert(child, Some(ours));
            }
            Err(errno) => refuse(connection, errno),
        }
        Ok(())
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
fn close_others(kept: &mut [RawFd; 3]) -> io::Result<()> {
    kept.sort_unstable();
    let mut first = 3;
    for fd in kept {
        sys::close_range(first, *fd as u32 - 1, false)?;
        first = *fd + 1;
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
