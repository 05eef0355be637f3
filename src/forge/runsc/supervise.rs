//! The supervisor: PID 1 of the namespace that `runsc` runs in, and the way between clients and the guest.
//!
//! It starts the sandbox, reaps whatever ends, passes each connection on over the pipes, and ends when the guest's pipe has.
//! The kernel ends everything in the namespace with it. It sees what is on the stage and nothing else of the host.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, OFlag, fcntl};
use nix::poll::PollTimeout;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, pipe2};

use super::super::birth::LISTENER;
use super::super::serve::say;
use super::super::step::fault;
use super::super::{Ask, Checkpoint, Fault, Ready, Said, ask, said};
use super::stage::{ANSWER, CONTROL};
use super::{RESTORED, call, place};
use crate::guest::sys;
use crate::wire;
use crate::wire::mux::{News, Side};
use crate::wire::pump::Pump;

/// The one container of this `runsc` root.
const ID: &str = "sandbox";
/// How long a client of the control socket may take to say what it wants; it is the server.
const ASKED: Duration = Duration::from_secs(5);
/// Longest part of `runsc`'s own log that is told.
const TOLD: usize = 800;

/// How the sandbox comes to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Begin {
    Fresh,
    Restored,
}

/// Runs until the sandbox has ended; tells the server how the start went.
pub(super) fn run() -> io::Result<()> {
    let begin = match std::env::args_os().nth(2) {
        Some(word) if word == RESTORED => Begin::Restored,
        Some(_) | None => Begin::Fresh,
    };
    let (listener, control) = (inherited(LISTENER)?.into(), inherited(CONTROL)?.into());
    let answer = inherited(ANSWER)?;
    match up(begin) {
        Ok((pump, signals)) => {
            say(&answer, said::Kind::Ready(Ready {}))?;
            drop(answer);
            serve(pump, signals, listener, control)
        }
        Err(error) => {
            let errno = Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO));
            say(
                &answer,
                said::Kind::Fault(fault(format!("start runsc: {error}"), errno)),
            )?;
            Err(error)
        }
    }
}

/// A descriptor that was placed for this program, and shall not be for the next.
fn inherited(number: RawFd) -> io::Result<OwnedFd> {
    let fd = sys::adopt(number)?;
    fcntl(&fd, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
    Ok(fd)
}

fn up(begin: Begin) -> io::Result<(Pump, SignalFd)> {
    let signals = signals()?;
    let pump = start(begin)?;
    give_up_power()?;
    Ok((pump, signals))
}

fn serve(pump: Pump, signals: SignalFd, listener: UnixListener, control: UnixListener) -> io::Result<()> {
    for socket in [&listener, &control] {
        socket.set_nonblocking(true)?;
    }
    let supervisor = Supervisor {
        pump,
        signals,
        listener: Some(listener),
        control,
        asking: None,
        still: None,
    };
    supervisor.serve()
}

/// Keeps the files of uid 0 on the stage, and nothing else of root: from here on it reads what a guest sends.
fn give_up_power() -> io::Result<()> {
    nix::sys::prctl::set_no_new_privs()?;
    sys::drop_bounding_set();
    Ok(sys::limit_capabilities(0)?)
}

fn signals() -> io::Result<SignalFd> {
    let mut mask = SigSet::empty();
    mask.add(Signal::SIGCHLD);
    mask.add(Signal::SIGTERM);
    mask.thread_block()?;
    let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
    Ok(SignalFd::with_flags(&mask, flags)?)
}

/// Starts the sandbox with a pipe each way.
fn start(begin: Begin) -> io::Result<Pump> {
    let (guest_reads, to): (OwnedFd, OwnedFd) = pipe2(OFlag::O_CLOEXEC)?;
    let (from, guest_writes): (OwnedFd, OwnedFd) = pipe2(OFlag::O_CLOEXEC)?;
    let mut command = match begin {
        Begin::Fresh => call("run"),
        Begin::Restored => {
            let mut command = call("restore");
            command.arg(format!("--image-path={}", place::IMAGE));
            command
        }
    };
    command
        .arg("--detach")
        .arg(format!("--bundle={}", place::BUNDLE))
        .arg(ID)
        .stdin(Stdio::from(guest_reads))
        .stdout(Stdio::from(guest_writes));
    let status = command.status()?;
    // The guest's ends are in there: a pipe ends when its last holder does.
    drop(command);
    if !status.success() {
        return Err(io::Error::other(told(&status.to_string())));
    }
    let mut pump = Pump::new(Side::Host, from, to)?;
    if begin == Begin::Restored {
        pump.mux.resume(true);
    }
    Ok(pump)
}

/// Why a call failed: the last of what `runsc` wrote, else `otherwise`.
fn told(otherwise: &str) -> String {
    let log = fs::read(place::LOG).unwrap_or_default();
    let log = String::from_utf8_lossy(&log);
    let last = log
        .lines()
        .rev()
        .find(|line| !line.trim().is_empty())
        .unwrap_or(otherwise);
    last.chars().take(TOLD).collect()
}

struct Supervisor {
    pump: Pump,
    signals: SignalFd,
    /// None once the guest is gone.
    listener: Option<UnixListener>,
    control: UnixListener,
    /// Who waits for a checkpoint.
    asking: Option<UnixStream>,
    /// For whom the sandbox stands still since its checkpoint, until they hang up.
    still: Option<UnixStream>,
}

impl Supervisor {
    fn serve(mut self) -> io::Result<()> {
        loop {
            // A client that comes while there is no room waits in the socket's queue.
            let listener = self.listener.as_ref().filter(|_| self.pump.mux.can_open());
            let (has_still, has_listener) = (self.still.is_some(), listener.is_some());
            let others = [
                Some(self.signals.as_fd()),
                Some(self.control.as_fd()),
                self.still.as_ref().map(AsFd::as_fd),
                listener.map(AsFd::as_fd),
            ];
            let others: Vec<_> = others.into_iter().flatten().collect();
            let turn = match self.pump.turn(&others, PollTimeout::NONE) {
                // The guest broke the rules: nothing that it says counts any more.
                Err(error) if error.kind() == ErrorKind::InvalidData => return Err(error),
                turn => turn?,
            };
            let is_ready = |at: usize| turn.ready.get(at) == Some(&true);
            if is_ready(0) {
                self.signalled();
            }
            if is_ready(1) {
                self.asked();
            }
            if has_still && is_ready(2) {
                self.go_on()?;
            }
            if has_listener && is_ready(2 + usize::from(has_still)) {
                self.accept();
            }
            if turn.news.contains(&News::Paused) {
                self.checkpoint()?;
            }
            if self.pump.is_lost() {
                // Whoever waits in the queue hears of it.
                self.listener = None;
                if self.pump.is_idle() {
                    return Ok(());
                }
            }
        }
    }

    fn signalled(&mut self) {
        while let Ok(Some(signal)) = self.signals.read_signal() {
            if signal.ssi_signo == Signal::SIGTERM as u32 {
                self.pump.mux.end_all();
            }
        }
        // Of what `runsc` leaves to us nobody wants to know how it ended; the pipe tells of the end that counts.
        while !matches!(
            waitpid(Pid::from_raw(-1), Some(WaitPidFlag::WNOHANG)),
            Ok(WaitStatus::StillAlive) | Err(_)
        ) {}
    }

    fn accept(&mut self) {
        let accepted = self.listener.as_ref().map(UnixListener::accept);
        // Gone again, or out of descriptors: the others go on.
        if let Some(Ok((client, _))) = accepted {
            let id = self.pump.mux.open();
            if self.pump.attach(id, client).is_err() {
                self.pump.mux.close(id);
            }
        }
    }

    fn asked(&mut self) {
        let Ok((client, _)) = self.control.accept() else { return };
        let read = client
            .set_nonblocking(false)
            .and_then(|()| client.set_read_timeout(Some(ASKED)))
            .and_then(|()| wire::read::<Ask>(&mut &client));
        let problem = match read.map(|ask| ask.and_then(|ask| ask.kind)) {
            Ok(Some(ask::Kind::Checkpoint(Checkpoint {})))
                if self.asking.is_none() && self.still.is_none() && !self.pump.is_lost() =>
            {
                self.pump.mux.pause();
                self.asking = Some(client);
                return;
            }
            Ok(Some(ask::Kind::Checkpoint(Checkpoint {}))) => "checkpoint what has ended, or is being checkpointed",
            Ok(None) | Err(_) => "understand what is asked",
        };
        tell(client, Err(fault(problem.to_owned(), Errno::EINVAL)));
    }

    /// The guest is quiet: nothing is in the pipes. From here on nothing in the sandbox runs, so that whoever asked can take its
    /// files as they are; the snapshot itself is of one that runs.
    fn checkpoint(&mut self) -> io::Result<()> {
        let Some(client) = self.asking.take() else {
            return Ok(());
        };
        if let Err(fault) = done(call("pause").arg(ID)) {
            self.pump.mux.resume(false);
            tell(client, Err(fault));
            return Ok(());
        }
        let mut command = call("checkpoint");
        command
            .arg(format!("--image-path={}", place::MEMORY))
            // Fast; whoever keeps it for long can compress it later.
            .arg("--compression=none")
            .arg("--leave-running")
            .arg(ID);
        match done(&mut command) {
            Ok(()) => {
                self.still = client.try_clone().ok();
                tell(client, Ok(()));
                match self.still.is_some() {
                    true => Ok(()),
                    false => self.go_on(),
                }
            }
            Err(fault) => {
                // First the sandbox, then the word: who hears it finds it running.
                let went_on = self.go_on();
                tell(client, Err(fault));
                went_on
            }
        }
    }

    /// Ends the standing still.
    ///
    /// # Errors
    /// When it does not go on: it is of no use to anyone then, and ends with the supervisor.
    fn go_on(&mut self) -> io::Result<()> {
        self.still = None;
        done(call("resume").arg(ID)).map_err(|fault| io::Error::other(fault.step))?;
        self.pump.mux.resume(false);
        Ok(())
    }
}

/// Runs a call of `runsc` to its end.
fn done(command: &mut Command) -> Result<(), Fault> {
    let mut words = command.get_args().filter_map(|word| word.to_str());
    let verb = words.find(|word| !word.starts_with('-')).unwrap_or("call").to_owned();
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(fault(format!("{verb}: {}", told(&status.to_string())), Errno::EIO)),
        Err(error) => Err(fault(format!("call runsc: {error}"), Errno::EIO)),
    }
}

/// Best effort: who has gone hears nothing.
fn tell(mut client: UnixStream, outcome: Result<(), Fault>) {
    let kind = match outcome {
        Ok(()) => said::Kind::Ready(Ready {}),
        Err(fault) => said::Kind::Fault(fault),
    };
    let _ = wire::write(&mut client, &Said { kind: Some(kind) });
}
