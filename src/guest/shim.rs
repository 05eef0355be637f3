//! One connection, one exec: starts the program, carries bytes both ways, sees to its end.
//!
//! A single poll loop without ticks. Nothing is buffered without bound: output is read only while the host takes it, input
//! is taken only within the window (`wire::STDIN_WINDOW`). Whatever goes wrong here ends this process alone.

use std::collections::{HashSet, VecDeque};
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl;
use nix::sys::signal::{SigSet, Signal, kill, killpg};
use nix::sys::signalfd::SignalFd;
use nix::unistd::Pid;
use prost::Message;

use super::child::{Child, Plan, fault};
use super::sys::Reaped;
use super::tree;
use crate::wire::{self, CHUNK, Ended, Event, Fault, Input, Output, Started, Stream, event, input, request};

/// Output that may wait for the host before the program's pipes are left alone.
const OUTBOX: usize = 64 << 10;
/// How long the file plane may tidy up when the host has hung up in the middle of a write.
const TIDY: Duration = Duration::from_secs(1);

/// Serves one connection to its end.
pub fn run(mut connection: UnixStream, signals: &SignalFd) -> io::Result<()> {
    prctl::set_child_subreaper(true)?;
    // Until there is a tree to see to, SIGTERM just ends this process.
    let mut term = SigSet::empty();
    term.add(Signal::SIGTERM);
    term.thread_unblock()?;
    let Some(request) = wire::read::<wire::Request>(&mut connection)? else {
        return Ok(());
    };
    term.thread_block()?;
    if request.generation != wire::GENERATION {
        let message = format!(
            "this guest speaks generation {}, not {}",
            wire::GENERATION,
            request.generation
        );
        return answer(&mut connection, event::Kind::Fault(fault("generation", message, None)));
    }
    match request.kind {
        None => answer(
            &mut connection,
            event::Kind::Fault(fault("bad_request", "an empty request", None)),
        ),
        Some(request::Kind::Ping(wire::Ping {})) => {
            let generation = wire::GENERATION;
            answer(&mut connection, event::Kind::Pong(wire::Pong { generation }))
        }
        Some(request::Kind::Exec(exec)) => {
            let (timeout, grace, files) = (exec.timeout_ms, exec.grace_ms, exec.files);
            match Plan::new(exec).and_then(|plan| plan.spawn()) {
                Err(fault) => answer(&mut connection, event::Kind::Fault(fault)),
                Ok(child) => Shim::new(connection, signals, child, timeout, grace, files)?.carry(),
            }
        }
    }
}

fn answer(connection: &mut UnixStream, kind: event::Kind) -> io::Result<()> {
    wire::write(connection, &Event { kind: Some(kind) })
}

/// Where the exec is.
enum Phase {
    /// Forked, not yet known whether the program runs.
    Starting {
        report: File,
        said: Vec<u8>,
    },
    Running,
}

struct Shim<'a> {
    connection: UnixStream,
    signals: &'a SignalFd,
    main: Pid,
    phase: Phase,
    stdin: Option<File>,
    /// Input that the program has not read yet: at most `wire::STDIN_WINDOW`.
    pending: VecDeque<u8>,
    stdin_eof: bool,
    stdout: Option<File>,
    stderr: Option<File>,
    inbox: Vec<u8>,
    outbox: Vec<u8>,
    begun: Instant,
    times_out: Option<Instant>,
    grace: Duration,
    kill_at: Option<Instant>,
    files: bool,
    timed_out: bool,
    killed: bool,
    killed_descendants: HashSet<Pid>,
    main_ended: Option<Reaped>,
}

/// What woke the loop.
#[derive(Default)]
struct Ready {
    connection: bool,
    hung_up: bool,
    signals: bool,
    report: bool,
    stdin: bool,
    stdout: bool,
    stderr: bool,
}

impl<'a> Shim<'a> {
    fn new(
        connection: UnixStream,
        signals: &'a SignalFd,
        child: Child,
        timeout_ms: u64,
        grace_ms: u64,
        files: bool,
    ) -> io::Result<Self> {
        connection.set_nonblocking(true)?;
        let ours = |fd: OwnedFd| -> io::Result<File> {
            fcntl(&fd, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
            Ok(File::from(fd))
        };
        let begun = Instant::now();
        Ok(Self {
            connection,
            signals,
            main: child.pid,
            phase: Phase::Starting {
                report: ours(child.report)?,
                said: Vec::new(),
            },
            stdin: child.stdin.map(ours).transpose()?,
            pending: VecDeque::new(),
            stdin_eof: false,
            stdout: Some(ours(child.stdout)?),
            stderr: Some(ours(child.stderr)?),
            inbox: Vec::new(),
            outbox: Vec::new(),
            begun,
            times_out: (timeout_ms > 0)
                .then(|| begun.checked_add(Duration::from_millis(timeout_ms)))
                .flatten(),
            grace: Duration::from_millis(grace_ms),
            kill_at: None,
            files,
            timed_out: false,
            killed: false,
            killed_descendants: HashSet::new(),
            main_ended: None,
        })
    }

    /// Runs the loop; on any failure of the connection the tree is ended all the same.
    fn carry(mut self) -> io::Result<()> {
        let result = self.carry_on();
        if result.is_err() {
            if self.files {
                self.let_tidy_up();
            }
            self.end_tree();
        }
        result
    }

    fn carry_on(&mut self) -> io::Result<()> {
        loop {
            let ready = self.wait()?;
            if ready.hung_up {
                return Err(ErrorKind::ConnectionAborted.into());
            }
            if ready.signals {
                while let Ok(Some(_)) = self.signals.read_signal() {}
                let (main, ended) = (self.main, &mut self.main_ended);
                tree::reap_ended(|reaped| note(main, ended, reaped));
            }
            if ready.report
                && let Some(fault) = self.hear_report()?
            {
                self.end_tree();
                return self.finish(event::Kind::Fault(fault));
            }
            if ready.connection {
                self.take_input()?;
            }
            if ready.stdin {
                self.feed()?;
            }
            if ready.stdout {
                copy(&mut self.stdout, Stream::Stdout, &mut self.outbox)?;
            }
            if ready.stderr {
                copy(&mut self.stderr, Stream::Stderr, &mut self.outbox)?;
            }
            self.keep_time();
            if self.main_ended.is_some() && matches!(self.phase, Phase::Running) {
                return self.conclude();
            }
            self.flush()?;
        }
    }

    fn wait(&self) -> io::Result<Ready> {
        const IN: PollFlags = PollFlags::POLLIN;
        let mut connection = IN;
        connection.set(PollFlags::POLLOUT, !self.outbox.is_empty());
        let mut fds = Vec::with_capacity(6);
        fds.push(PollFd::new(self.connection.as_fd(), connection));
        fds.push(PollFd::new(self.signals.as_fd(), IN));
        // A descriptor that is not wanted now is left out: a closed pipe would else wake the loop for ever.
        let (mut report, mut stdout, mut stderr) = (None, None, None);
        match &self.phase {
            Phase::Starting { report: pipe, .. } => report = add(&mut fds, Some(pipe), IN),
            Phase::Running if self.outbox.len() < OUTBOX => {
                stdout = add(&mut fds, self.stdout.as_ref(), IN);
                stderr = add(&mut fds, self.stderr.as_ref(), IN);
            }
            Phase::Running => {}
        }
        let stdin = match self.pending.is_empty() {
            true => None,
            false => add(&mut fds, self.stdin.as_ref(), PollFlags::POLLOUT),
        };
        match poll(&mut fds, self.timeout()) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        let any = |at: Option<usize>| at.is_some_and(|at| fds[at].any().unwrap_or(true));
        let of_connection = fds[0].revents().unwrap_or(PollFlags::POLLERR);
        Ok(Ready {
            connection: of_connection.contains(IN),
            hung_up: of_connection.intersects(PollFlags::POLLHUP | PollFlags::POLLERR),
            signals: any(Some(1)),
            report: any(report),
            stdin: any(stdin),
            stdout: any(stdout),
            stderr: any(stderr),
        })
    }

    fn timeout(&self) -> PollTimeout {
        let Some(next) = self.kill_at.or(self.times_out) else {
            return PollTimeout::NONE;
        };
        // Rounded up, or the loop would spin through the last millisecond.
        let millis = next
            .saturating_duration_since(Instant::now())
            .as_micros()
            .div_ceil(1000);
        PollTimeout::try_from(millis).unwrap_or(PollTimeout::MAX)
    }

    fn keep_time(&mut self) {
        let now = Instant::now();
        if self.kill_at.is_some_and(|at| now >= at) {
            self.kill_at = None;
            self.end_tree();
        } else if self.times_out.is_some_and(|at| now >= at) && self.main_ended.is_none() {
            self.times_out = None;
            self.timed_out = true;
            self.kill_at = now.checked_add(self.grace);
            tree::signal_all(Signal::SIGTERM, &HashSet::new());
        }
    }

    /// The program runs (`None`, the pipe has ended), or it never will.
    fn hear_report(&mut self) -> io::Result<Option<Fault>> {
        let Phase::Starting { report, said } = &mut self.phase else {
            return Ok(None);
        };
        match report.read_to_end(said) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
            Err(error) => return Err(error),
            Ok(_) if said.is_empty() => {}
            Ok(_) => return Ok(Some(Fault::decode(said.as_slice()).map_err(io::Error::other)?)),
        }
        self.phase = Phase::Running;
        let pid = self.main.as_raw().unsigned_abs();
        self.push(event::Kind::Started(Started { pid }))?;
        Ok(None)
    }

    fn take_input(&mut self) -> io::Result<()> {
        let mut chunk = [0; CHUNK];
        match self.connection.read(&mut chunk) {
            Ok(0) => return Err(ErrorKind::ConnectionAborted.into()),
            Ok(length) => self.inbox.extend_from_slice(&chunk[..length]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return Err(error),
        }
        while let Some(input) = wire::decode::<Input>(&mut self.inbox)? {
            match input.kind {
                Some(input::Kind::Stdin(data)) => {
                    self.pending.extend(data);
                    if self.pending.len() > wire::STDIN_WINDOW {
                        return Err(ErrorKind::InvalidData.into());
                    }
                }
                Some(input::Kind::StdinEof(_)) => self.stdin_eof = true,
                Some(input::Kind::Signal(number)) => {
                    // To the group first, as a terminal would; to the process alone if it has left that.
                    if let Ok(signal) = Signal::try_from(number)
                        && self.main_ended.is_none()
                        && killpg(self.main, signal).is_err()
                    {
                        let _ = kill(self.main, signal);
                    }
                }
                Some(input::Kind::Kill(_)) => {
                    self.killed |= self.main_ended.is_none();
                    self.end_tree();
                }
                None => {}
            }
        }
        self.feed()
    }

    /// Gives the program what it will take of its input, and the host credit for it.
    fn feed(&mut self) -> io::Result<()> {
        let mut taken = 0;
        while !self.pending.is_empty() {
            let Some(stdin) = &mut self.stdin else {
                taken += self.pending.len();
                self.pending.clear();
                break;
            };
            match stdin.write(self.pending.as_slices().0) {
                Ok(length) => {
                    self.pending.drain(..length);
                    taken += length;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // It has closed its end: whatever else comes goes nowhere.
                Err(_) => self.stdin = None,
            }
        }
        if self.pending.is_empty() && self.stdin_eof {
            self.stdin = None;
        }
        if taken > 0 {
            self.push(event::Kind::Credit(taken as u32))?;
        }
        Ok(())
    }

    fn push(&mut self, kind: event::Kind) -> io::Result<()> {
        wire::encode(&Event { kind: Some(kind) }, &mut self.outbox)
    }

    fn flush(&mut self) -> io::Result<()> {
        while !self.outbox.is_empty() {
            match self.connection.write(&self.outbox) {
                Ok(length) => drop(self.outbox.drain(..length)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn end_tree(&mut self) {
        let (main, ended) = (self.main, &mut self.main_ended);
        let killed = tree::kill_all(|reaped| note(main, ended, reaped));
        self.killed_descendants.extend(killed);
        self.killed_descendants.remove(&main);
    }

    /// The host has hung up on the file plane: the end of its input tells it to take its temporary file away.
    fn let_tidy_up(&mut self) {
        self.stdin = None;
        self.stdout = None;
        self.stderr = None;
        let until = Instant::now() + TIDY;
        while self.main_ended.is_none() {
            let left = until.saturating_duration_since(Instant::now());
            let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO);
            let mut fds = [PollFd::new(self.signals.as_fd(), PollFlags::POLLIN)];
            if left.is_zero() || poll(&mut fds, timeout) != Ok(1) {
                return;
            }
            while let Ok(Some(_)) = self.signals.read_signal() {}
            let (main, ended) = (self.main, &mut self.main_ended);
            tree::reap_ended(|reaped| note(main, ended, reaped));
        }
    }

    /// The main process has ended: its descendants follow, then what is left in the pipes, then the last event.
    fn conclude(&mut self) -> io::Result<()> {
        self.end_tree();
        self.connection.set_nonblocking(false)?;
        for stream in [Stream::Stdout, Stream::Stderr] {
            let pipe = match stream {
                Stream::Stderr => &mut self.stderr,
                Stream::Stdout | Stream::Unspecified => &mut self.stdout,
            };
            // Not until end of file: the other end may have been passed on to a process of another exec.
            let mut left = pipe.as_ref().map_or(0, super::sys::pending);
            while left > 0 {
                let length = copy(pipe, stream, &mut self.outbox)?;
                if length == 0 {
                    break;
                }
                left = left.saturating_sub(length);
                self.connection.write_all(&self.outbox)?;
                self.outbox.clear();
            }
        }
        let Some(main) = &self.main_ended else {
            return Err(io::Error::other("the main process was not reaped"));
        };
        let status = match libc::WIFSIGNALED(main.status) {
            true => wire::ended::Status::Signal(libc::WTERMSIG(main.status)),
            false => wire::ended::Status::ExitCode(libc::WEXITSTATUS(main.status)),
        };
        self.finish(event::Kind::Ended(Ended {
            status: Some(status),
            timed_out: self.timed_out,
            killed: self.killed,
            killed_descendants: self.killed_descendants.len() as u32,
            duration_us: self.begun.elapsed().as_micros() as u64,
            user_us: main.user_us,
            system_us: main.system_us,
            max_rss_bytes: main.max_rss_bytes,
        }))
    }

    /// Sends the last event.
    fn finish(&mut self, kind: event::Kind) -> io::Result<()> {
        self.connection.set_nonblocking(false)?;
        self.push(kind)?;
        self.connection.write_all(&self.outbox)
    }
}

fn note(main: Pid, ended: &mut Option<Reaped>, reaped: Reaped) {
    if reaped.pid == main {
        *ended = Some(reaped);
    }
}

/// Adds `file` to what is polled; where it stands there.
fn add<'f>(fds: &mut Vec<PollFd<'f>>, file: Option<&'f File>, flags: PollFlags) -> Option<usize> {
    fds.push(PollFd::new(file?.as_fd(), flags));
    Some(fds.len() - 1)
}

/// Moves one chunk of output to the outbox; how many bytes that was. A pipe that has ended is closed.
fn copy(pipe: &mut Option<File>, stream: Stream, outbox: &mut Vec<u8>) -> io::Result<usize> {
    let Some(open) = pipe else {
        return Ok(0);
    };
    let mut data = vec![0; CHUNK];
    match open.read(&mut data) {
        Ok(0) => {
            *pipe = None;
            Ok(0)
        }
        Ok(length) => {
            data.truncate(length);
            let output = Output {
                stream: stream as i32,
                data,
            };
            wire::encode(
                &Event {
                    kind: Some(event::Kind::Output(output)),
                },
                outbox,
            )?;
            Ok(length)
        }
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(0),
        Err(error) => Err(error),
    }
}
