//! One exec: starts the program, carries bytes both ways, sees to its end. The loop is here; `attach` has who is attached,
//! `input` what the host sends, `end` how it ends.
//!
//! ```text
//! Starting ─► Running ─► Over ─► gone
//!     └─ fault             │ output sent, end told, nothing kept alive; a detachable one stays until it is released
//! ```
//! A single poll loop without ticks. Nothing is buffered without bound: output is read only as far as `streams` allows, input
//! is taken only within the window (`wire::STDIN_WINDOW`). Whatever goes wrong here ends this process alone.

mod attach;
mod end;
mod input;

use std::collections::{HashSet, VecDeque};
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signalfd::SignalFd;
use nix::unistd::Pid;
use prost::Message;
use prost::bytes::BytesMut;

pub use self::attach::no_such_exec;
use self::end::Used;
use self::input::TypedEnd;
use super::child::Child;
use super::leash::{Leash, Tag};
use super::outbox::Outbox;
use super::streams::{Keep, Source};
use super::sys::{self, Reaped};
use super::terminal::Keys;
use crate::wire::{self, Event, Fault, Offsets, Stream, event};

/// Bytes of argv that are told of.
const MAX_ARGV: usize = 1 << 10;
/// How long a program that takes no input may run before its host hears that it does: what ends or writes sooner is told of
/// together with that, in one go.
const HUSH: Duration = Duration::from_millis(2);

/// What is known of an exec before it runs.
pub struct Facts {
    id: String,
    argv: Vec<Vec<u8>>,
    timeout_ms: u64,
    grace: Duration,
    files: bool,
    keep_background: bool,
    detachable: bool,
    keep: Keep,
}

impl Facts {
    pub fn of(exec: &wire::Exec) -> Self {
        let mut room = MAX_ARGV;
        let cut = |word: &Vec<u8>| {
            let length = word.len().min(room);
            room -= length;
            word[..length].to_vec()
        };
        Self {
            id: exec.id.clone(),
            argv: exec.argv.iter().take(64).map(cut).collect(),
            timeout_ms: exec.timeout_ms,
            grace: Duration::from_millis(exec.grace_ms),
            files: exec.files,
            keep_background: exec.keep_background,
            detachable: exec.detachable,
            keep: match (exec.drop_oldest, exec.detachable) {
                (true, _) => Keep::Dropping,
                (false, true) => Keep::Waiting,
                (false, false) => Keep::Nothing,
            },
        }
    }
}

enum Phase {
    /// Forked, not yet known whether the program runs.
    Starting {
        report: File,
        said: Vec<u8>,
    },
    Running,
    /// The main process has ended.
    Over {
        ended: wire::Ended,
        release_at: Instant,
    },
}

/// Whoever is attached.
struct Peer {
    connection: UnixStream,
    inbox: BytesMut,
    outbox: Outbox,
    /// The end was put into the outbox.
    told: bool,
}

impl Peer {
    fn new(connection: UnixStream) -> io::Result<Self> {
        connection.set_nonblocking(true)?;
        Ok(Self {
            connection,
            inbox: BytesMut::new(),
            outbox: Outbox::default(),
            told: false,
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        self.outbox.flush(&mut self.connection)
    }
}

pub struct Session<'a> {
    facts: Facts,
    signals: &'a SignalFd,
    /// Of a detachable exec.
    leash: Option<&'a Leash>,
    peer: Option<Peer>,
    main: Pid,
    phase: Phase,
    stdin: Option<File>,
    /// Of a terminal that takes its input with our help.
    keys: Option<Keys>,
    /// Input that the program has not read yet: at most `wire::STDIN_WINDOW`.
    pending: VecDeque<u8>,
    /// Of a connection that was lost: no credit is given for it.
    uncredited: usize,
    stdin_eof: bool,
    /// Whether the input so far ends within a line.
    is_mid_line: bool,
    /// Of a terminal whose input has ended.
    typed_end: Option<TypedEnd>,
    sources: Vec<Source>,
    begun: Instant,
    begun_ms: u64,
    /// Until then it is not asked whether the program runs.
    hush_until: Option<Instant>,
    times_out: Option<Instant>,
    kill_at: Option<Instant>,
    timed_out: bool,
    killed_by: Option<String>,
    killed_descendants: HashSet<Pid>,
    /// Not by this.
    others_killed: u32,
    /// By those that the main process had not waited for.
    others_used: Used,
    main_ended: Option<Reaped>,
    /// No child is left.
    alone: bool,
    released: bool,
    described_whole: bool,
    note: Vec<u8>,
}

/// What woke the loop.
#[derive(Default)]
struct Ready {
    connection: bool,
    hung_up: bool,
    signals: bool,
    leash: bool,
    report: bool,
    stdin: bool,
}

impl<'a> Session<'a> {
    pub fn new(
        connection: UnixStream,
        signals: &'a SignalFd,
        leash: Option<&'a Leash>,
        child: Child,
        facts: Facts,
    ) -> io::Result<Self> {
        let ours = |fd: OwnedFd| -> io::Result<File> {
            fcntl(&fd, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
            Ok(File::from(fd))
        };
        let begun = Instant::now();
        let times_out = Duration::from_millis(facts.timeout_ms);
        let source = |(stream, fd)| Ok::<_, io::Error>(Source::new(stream, ours(fd)?, facts.keep));
        Ok(Self {
            signals,
            leash: leash.filter(|_| facts.detachable),
            peer: Some(Peer::new(connection)?),
            main: child.pid,
            phase: Phase::Starting {
                report: ours(child.report)?,
                said: Vec::new(),
            },
            keys: child
                .outputs
                .iter()
                .find(|(stream, _)| *stream == Stream::Pty)
                .and_then(|(_, master)| Keys::of(master)),
            stdin: child.stdin.map(ours).transpose()?,
            pending: VecDeque::new(),
            uncredited: 0,
            stdin_eof: false,
            is_mid_line: false,
            typed_end: None,
            sources: child.outputs.into_iter().map(source).collect::<Result<_, _>>()?,
            begun,
            begun_ms: sys::monotonic_ms(),
            hush_until: None,
            times_out: (!times_out.is_zero()).then(|| begun.checked_add(times_out)).flatten(),
            kill_at: None,
            timed_out: false,
            killed_by: None,
            killed_descendants: HashSet::new(),
            others_killed: 0,
            others_used: Used::default(),
            main_ended: None,
            alone: false,
            released: false,
            described_whole: false,
            note: Vec::new(),
            facts,
        })
    }

    /// Runs the loop; on any failure the tree is ended all the same.
    pub fn carry(mut self) -> io::Result<()> {
        self.hush_until = self.stdin.is_none().then(|| self.begun + HUSH);
        let result = self.carry_on();
        if result.is_err() {
            if self.facts.files {
                self.let_tidy_up();
            }
            self.end_tree();
        }
        self.leave();
        result
    }

    fn carry_on(&mut self) -> io::Result<()> {
        loop {
            let ready = self.wait()?;
            // What a detachable one was sent before that still counts.
            if ready.hung_up && !(self.facts.detachable && ready.connection) {
                self.lose_peer()?;
            }
            if ready.signals {
                self.hear_signals();
            }
            if ready.report
                && let Some(fault) = self.hear_report()?
            {
                self.end_tree();
                return self.refuse(fault);
            }
            if ready.leash {
                self.hear_init();
            }
            if ready.connection && self.peer.is_some() {
                match self.take_input() {
                    Err(error) if error.kind() == ErrorKind::ConnectionAborted => self.lose_peer()?,
                    result => result?,
                }
            }
            if ready.stdin {
                self.feed()?;
            }
            self.keep_time();
            if self.main_ended.is_some() && matches!(self.phase, Phase::Running) {
                self.conclude();
            }
            self.carry_output()?;
            self.end_again()?;
            if self.is_done() {
                return Ok(());
            }
        }
    }

    /// Whether nothing is left to do.
    fn is_done(&mut self) -> bool {
        let Phase::Over { release_at, .. } = &self.phase else {
            return false;
        };
        let told = self
            .peer
            .as_ref()
            .is_none_or(|peer| peer.told && peer.outbox.is_empty());
        let expired = Instant::now() >= *release_at && self.peer.is_none();
        if !told || (self.facts.detachable && !self.released && !expired) {
            return false;
        }
        // The host knows the end by the connection's end too; what lives on needs none.
        self.peer = None;
        self.alone
    }

    fn wait(&mut self) -> io::Result<Ready> {
        const IN: PollFlags = PollFlags::POLLIN;
        let mut fds = Vec::with_capacity(8);
        fds.push(PollFd::new(self.signals.as_fd(), IN));
        let leash = add(&mut fds, self.leash.map(AsFd::as_fd), IN);
        let free = self.peer.as_ref().is_some_and(|peer| peer.outbox.is_empty());
        let connection = self.peer.as_ref().and_then(|peer| {
            let mut flags = IN;
            let behind = self.sources.iter().any(Source::is_behind);
            flags.set(PollFlags::POLLOUT, !free || behind);
            add(&mut fds, Some(peer.connection.as_fd()), flags)
        });
        // A descriptor that is not wanted now is left out: a closed pipe would else wake the loop for ever.
        let mut report = None;
        match &self.phase {
            Phase::Starting { report: pipe, .. } if self.hush_until.is_none() => {
                report = add(&mut fds, Some(pipe.as_fd()), IN);
            }
            Phase::Starting { .. } | Phase::Running | Phase::Over { .. } => {
                for source in &self.sources {
                    add(&mut fds, source.wanted(free), IN);
                }
            }
        }
        let stdin = match self.pending.is_empty() {
            true => None,
            false => add(&mut fds, self.stdin.as_ref().map(AsFd::as_fd), PollFlags::POLLOUT),
        };
        match poll(&mut fds, self.timeout()) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        // Whatever woke it, now it is asked.
        let asks = self.hush_until.take().is_some();
        let any = |at: Option<usize>| at.is_some_and(|at| fds[at].any().unwrap_or(true));
        let of_connection = connection.map_or(PollFlags::empty(), |at| fds[at].revents().unwrap_or(PollFlags::POLLERR));
        Ok(Ready {
            connection: of_connection.contains(IN),
            hung_up: of_connection.intersects(PollFlags::POLLHUP | PollFlags::POLLERR),
            signals: any(Some(0)),
            leash: any(leash),
            report: asks || any(report),
            stdin: any(stdin),
        })
    }

    fn timeout(&self) -> PollTimeout {
        let release = match &self.phase {
            Phase::Over { release_at, .. } if self.facts.detachable && self.peer.is_none() => Some(*release_at),
            Phase::Over { .. } => None,
            Phase::Starting { .. } | Phase::Running => self.times_out,
        };
        let next = self.kill_at.or(release);
        let look = self.typed_end.as_ref().map(|typed| typed.look_at);
        let Some(next) = next.into_iter().chain(self.hush_until).chain(look).min() else {
            return PollTimeout::NONE;
        };
        // Rounded up, or the loop would spin through the last millisecond.
        let millis = next
            .saturating_duration_since(Instant::now())
            .as_micros()
            .div_ceil(1000);
        PollTimeout::try_from(millis).unwrap_or(PollTimeout::MAX)
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
        self.describe(Tag::Describe);
        let started = self.started();
        self.push(event::Kind::Started(started))?;
        Ok(None)
    }

    fn push(&mut self, kind: event::Kind) -> io::Result<()> {
        match &mut self.peer {
            Some(peer) => peer.outbox.push(kind),
            None => Ok(()),
        }
    }

    /// Moves output on, and at last the end, as far as the host takes it.
    fn carry_output(&mut self) -> io::Result<()> {
        let discard = self.facts.keep_background && !self.alone;
        if !matches!(self.phase, Phase::Starting { .. }) {
            for source in &mut self.sources {
                source.read_ahead()?;
            }
        }
        if let Err(error) = self.send() {
            match error.kind() {
                ErrorKind::BrokenPipe | ErrorKind::ConnectionReset | ErrorKind::WriteZero => self.lose_peer()?,
                _ => return Err(error),
            }
        }
        if let Phase::Over { .. } = &self.phase {
            for source in &mut self.sources {
                source.settle(discard);
                if self.alone && !self.facts.detachable && self.peer.is_none() {
                    source.hang_up();
                }
            }
            if !self.described_whole && self.sources.iter().all(Source::is_read) {
                self.described_whole = true;
                self.describe(Tag::Describe);
            }
        }
        Ok(())
    }

    fn send(&mut self) -> io::Result<()> {
        /// Chunks in a row before input and time are looked at again.
        const TURN: usize = 16;
        let Some(peer) = &mut self.peer else {
            return Ok(());
        };
        if matches!(self.phase, Phase::Starting { .. }) {
            return peer.flush();
        }
        // Small pieces go out together, with the end if it is there.
        for _ in 0..TURN {
            let mut idle = true;
            for source in &mut self.sources {
                if !peer.outbox.has_room() {
                    peer.flush()?;
                }
                idle &= !(peer.outbox.has_room() && source.give(&mut peer.outbox)?);
            }
            if idle {
                break;
            }
        }
        let sent = self.sources.iter().all(Source::is_sent);
        if let Phase::Over { ended, .. } = &self.phase
            && sent
            && peer.outbox.has_room()
            && !peer.told
        {
            peer.told = true;
            let ended = ended.clone();
            let ended = self.with_counts(&ended);
            self.push(event::Kind::Ended(ended))?;
        }
        match &mut self.peer {
            Some(peer) => peer.flush(),
            None => Ok(()),
        }
    }

    /// Says that the program never ran.
    fn refuse(&mut self, fault: Fault) -> io::Result<()> {
        let Some(peer) = &mut self.peer else {
            return Ok(());
        };
        peer.connection.set_nonblocking(false)?;
        peer.outbox.push(event::Kind::Fault(fault))?;
        peer.flush()
    }
}

/// One frame, to be sent before anything else was.
pub fn answer(connection: &mut UnixStream, kind: event::Kind) -> io::Result<()> {
    wire::write(connection, &Event { kind: Some(kind) })
}

/// Adds what is to be polled; where it stands there.
fn add<'f>(fds: &mut Vec<PollFd<'f>>, fd: Option<BorrowedFd<'f>>, flags: PollFlags) -> Option<usize> {
    fds.push(PollFd::new(fd?, flags));
    Some(fds.len() - 1)
}

fn part(offsets: &Offsets, stream: Stream) -> u64 {
    match stream {
        Stream::Stdout => offsets.stdout,
        Stream::Stderr => offsets.stderr,
        Stream::Pty => offsets.pty,
        Stream::Unspecified => 0,
    }
}
