//! One exec: starts the program, carries bytes both ways, sees to its end.
//!
//! ```text
//! Starting ─► Running ─► Over ─► gone
//!     └─ fault             │ output sent, end told, nothing kept alive; a detachable one stays until it is released
//! ```
//! A single poll loop without ticks. Nothing is buffered without bound: output is read only as far as `streams` allows, input
//! is taken only within the window (`wire::STDIN_WINDOW`). Whatever goes wrong here ends this process alone.

use std::collections::{HashSet, VecDeque};
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill, killpg};
use nix::sys::signalfd::SignalFd;
use nix::sys::statvfs::statvfs;
use nix::unistd::Pid;
use prost::Message;
use prost::bytes::BytesMut;

use super::child::{Child, fault};
use super::leash::{Leash, Patience, Tag};
use super::outbox::Outbox;
use super::streams::{Keep, Source};
use super::sys::{self, Reaped};
use super::{terminal, tree};
use crate::wire::{self, Event, Fault, Input, Offsets, Started, Stream, event, input, request, tell};

/// How long the file plane may tidy up when the host has hung up in the middle of a write.
const TIDY: Duration = Duration::from_secs(1);
/// How long a detachable exec that ended waits to be released.
const RELEASE: Duration = Duration::from_secs(300);
/// What is read of the host's at once.
const READ: usize = 64 << 10;
/// Longest note of the host's.
const MAX_NOTE: usize = 256;
/// Bytes of argv that are told of.
const MAX_ARGV: usize = 1 << 10;

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
    /// Input that the program has not read yet: at most `wire::STDIN_WINDOW`.
    pending: VecDeque<u8>,
    /// Of a connection that was lost: no credit is given for it.
    uncredited: usize,
    stdin_eof: bool,
    sources: Vec<Source>,
    begun: Instant,
    begun_ms: u64,
    times_out: Option<Instant>,
    kill_at: Option<Instant>,
    timed_out: bool,
    killed_by: Option<String>,
    killed_descendants: HashSet<Pid>,
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
            stdin: child.stdin.map(ours).transpose()?,
            pending: VecDeque::new(),
            uncredited: 0,
            stdin_eof: false,
            sources: child.outputs.into_iter().map(source).collect::<Result<_, _>>()?,
            begun,
            begun_ms: sys::monotonic_ms(),
            times_out: (!times_out.is_zero()).then(|| begun.checked_add(times_out)).flatten(),
            kill_at: None,
            timed_out: false,
            killed_by: None,
            killed_descendants: HashSet::new(),
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
        let result = self.carry_on();
        if result.is_err() {
            if self.facts.files {
                self.let_tidy_up();
            }
            self.end_tree();
        }
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

    fn wait(&self) -> io::Result<Ready> {
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
            Phase::Starting { report: pipe, .. } => report = add(&mut fds, Some(pipe.as_fd()), IN),
            Phase::Running | Phase::Over { .. } => {
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
        let any = |at: Option<usize>| at.is_some_and(|at| fds[at].any().unwrap_or(true));
        let of_connection = connection.map_or(PollFlags::empty(), |at| fds[at].revents().unwrap_or(PollFlags::POLLERR));
        Ok(Ready {
            connection: of_connection.contains(IN),
            hung_up: of_connection.intersects(PollFlags::POLLHUP | PollFlags::POLLERR),
            signals: any(Some(0)),
            leash: any(leash),
            report: any(report),
            stdin: any(stdin),
        })
    }

    fn timeout(&self) -> PollTimeout {
        let release = match &self.phase {
            Phase::Over { release_at, .. } if self.facts.detachable && self.peer.is_none() => Some(*release_at),
            Phase::Over { .. } => None,
            Phase::Starting { .. } | Phase::Running => self.times_out,
        };
        let Some(next) = self.kill_at.or(release) else {
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
            self.terminate();
        }
    }

    /// SIGTERM now, SIGKILL after the grace.
    fn terminate(&mut self) {
        self.kill_at = Instant::now().checked_add(self.facts.grace);
        tree::signal_all(Signal::SIGTERM, &HashSet::new());
        // A stopped process hears it only when it goes on.
        tree::signal_all(Signal::SIGCONT, &HashSet::new());
    }

    fn hear_signals(&mut self) {
        while let Ok(Some(info)) = self.signals.read_signal() {
            // The sandbox is to end: nobody will ask any more.
            self.released |= info.ssi_signo == Signal::SIGTERM as u32;
        }
        let (main, ended) = (self.main, &mut self.main_ended);
        self.alone = !tree::reap_ended(|reaped| note(main, ended, reaped));
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

    fn started(&self) -> Started {
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
    fn describe(&self, tag: Tag) {
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
    fn lose_peer(&mut self) -> io::Result<()> {
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
    fn hear_init(&mut self) {
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

    fn welcome(&mut self, request: wire::Request, connection: UnixStream) -> io::Result<()> {
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
    fn refuses(&self, from: &Offsets) -> Option<Fault> {
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

    fn offsets(&self, of: impl Fn(&Source) -> u64) -> Offsets {
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

    fn take_input(&mut self) -> io::Result<()> {
        let Some(peer) = &mut self.peer else {
            return Ok(());
        };
        let mut chunk = [0; READ];
        match peer.connection.read(&mut chunk) {
            Ok(0) => return Err(ErrorKind::ConnectionAborted.into()),
            Ok(length) => peer.inbox.extend_from_slice(&chunk[..length]),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => return Ok(()),
            Err(_) => return Err(ErrorKind::ConnectionAborted.into()),
        }
        while let Some(peer) = &mut self.peer
            && let Some(input) = wire::take::<Input>(&mut peer.inbox)?
        {
            match input.kind {
                Some(input::Kind::Stdin(data)) => {
                    self.pending.extend(&data);
                    if self.pending.len() > 2 * wire::STDIN_WINDOW {
                        return Err(ErrorKind::InvalidData.into());
                    }
                }
                Some(input::Kind::StdinEof(_)) => self.stdin_eof = true,
                Some(_) | None => self.obey(input),
            }
        }
        self.feed()
    }

    /// Does what was asked for beside input.
    fn obey(&mut self, input: Input) {
        let runs = self.main_ended.is_none();
        match input.kind {
            Some(input::Kind::Signal(number)) => {
                // To the group first, as a terminal would; to the process alone if it has left that.
                if let Ok(signal) = Signal::try_from(number)
                    && runs
                    && killpg(self.main, signal).is_err()
                {
                    let _ = kill(self.main, signal);
                }
            }
            Some(input::Kind::SignalTree(number)) => {
                if let Ok(signal) = Signal::try_from(number) {
                    tree::signal_all(signal, &HashSet::new());
                }
            }
            Some(input::Kind::Kill(by)) => {
                self.note_kill(by);
                self.end_tree();
            }
            Some(input::Kind::Terminate(by)) => {
                self.note_kill(by);
                self.terminate();
            }
            Some(input::Kind::Resize(size)) => {
                if let Some(terminal) = self.sources.iter().find_map(Source::terminal) {
                    let _ = terminal::resize(&terminal, size);
                }
            }
            Some(input::Kind::Taken(offsets)) => {
                for source in &mut self.sources {
                    source.take_to(part(&offsets, source.stream));
                }
            }
            Some(input::Kind::Note(note)) if note.len() <= MAX_NOTE => self.note = note,
            Some(input::Kind::Note(_) | input::Kind::Stdin(_) | input::Kind::StdinEof(_)) | None => {}
        }
    }

    fn note_kill(&mut self, by: String) {
        if self.main_ended.is_none() {
            self.killed_by.get_or_insert(by);
        }
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
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // It has closed its end: whatever else comes goes nowhere.
                Err(_) => self.stdin = None,
            }
        }
        if self.pending.is_empty() && self.stdin_eof {
            self.close_stdin();
        }
        let others = taken.min(self.uncredited);
        self.uncredited -= others;
        match taken - others {
            0 => Ok(()),
            credit => self.push(event::Kind::Credit(credit as u32)),
        }
    }

    fn close_stdin(&mut self) {
        let terminal = self.sources.iter().find_map(Source::terminal);
        if let (Some(stdin), Some(terminal)) = (&mut self.stdin, terminal) {
            // Input may go on after it, as at a real one.
            self.stdin_eof = false;
            if let Some(end) = terminal::end_of_input(&terminal) {
                let _ = stdin.write(&[end]);
            }
        } else {
            self.stdin = None;
        }
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
        peer.flush()?;
        if matches!(self.phase, Phase::Starting { .. }) {
            return Ok(());
        }
        for _ in 0..TURN {
            let mut idle = true;
            for source in &mut self.sources {
                if peer.outbox.is_empty() && source.give(&mut peer.outbox)? {
                    idle = false;
                    peer.flush()?;
                }
            }
            if idle || !peer.outbox.is_empty() {
                break;
            }
        }
        let sent = self.sources.iter().all(Source::is_sent);
        if let Phase::Over { ended, .. } = &self.phase
            && sent
            && peer.outbox.is_empty()
            && !peer.told
        {
            peer.told = true;
            let ended = ended.clone();
            let ended = self.with_counts(&ended);
            self.push(event::Kind::Ended(ended))?;
            if let Some(peer) = &mut self.peer {
                peer.flush()?;
            }
        }
        Ok(())
    }

    fn with_counts(&self, ended: &wire::Ended) -> wire::Ended {
        wire::Ended {
            made: Some(self.offsets(Source::made)),
            dropped: Some(self.offsets(Source::dropped)),
            ..ended.clone()
        }
    }

    fn end_tree(&mut self) {
        let (main, ended) = (self.main, &mut self.main_ended);
        let killed = tree::kill_all(|reaped| note(main, ended, reaped));
        self.killed_descendants.extend(killed);
        self.killed_descendants.remove(&main);
        self.alone = true;
    }

    /// The host has hung up on the file plane: the end of its input tells it to take its temporary file away.
    fn let_tidy_up(&mut self) {
        self.stdin = None;
        self.sources.clear();
        let until = Instant::now() + TIDY;
        while self.main_ended.is_none() {
            let left = until.saturating_duration_since(Instant::now());
            let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO);
            let mut fds = [PollFd::new(self.signals.as_fd(), PollFlags::POLLIN)];
            if left.is_zero() || poll(&mut fds, timeout) != Ok(1) {
                return;
            }
            self.hear_signals();
        }
    }

    /// The main process has ended: its descendants follow, unless they may stay. What is left in the pipes then is sent, and
    /// after that the end.
    fn conclude(&mut self) {
        let mut kept = 0;
        self.kill_at = None;
        if self.facts.keep_background && self.killed_by.is_none() && !self.timed_out {
            kept = tree::count();
            let (main, ended) = (self.main, &mut self.main_ended);
            self.alone = !tree::reap_ended(|reaped| note(main, ended, reaped));
        } else {
            self.end_tree();
        }
        self.stdin = None;
        self.stdin_eof = true;
        for source in &mut self.sources {
            source.conclude(self.facts.keep_background && !self.alone);
        }
        let Some(main) = &self.main_ended else {
            return;
        };
        let status = match libc::WIFSIGNALED(main.status) {
            true => wire::ended::Status::Signal(libc::WTERMSIG(main.status)),
            false => wire::ended::Status::ExitCode(libc::WEXITSTATUS(main.status)),
        };
        let (disk_full, disk_bytes) = if self.facts.files { (false, 0) } else { disk() };
        let ended = wire::Ended {
            status: Some(status),
            timed_out: self.timed_out,
            killed: self.killed_by.is_some(),
            killed_by: self.killed_by.clone().unwrap_or_default(),
            killed_descendants: self.killed_descendants.len() as u32,
            kept_descendants: kept as u32,
            duration_us: self.begun.elapsed().as_micros() as u64,
            user_us: main.user_us,
            system_us: main.system_us,
            max_rss_bytes: main.max_rss_bytes,
            made: None,
            dropped: None,
            disk_full,
            disk_bytes,
        };
        self.phase = Phase::Over {
            ended,
            release_at: Instant::now() + RELEASE,
        };
        self.describe(Tag::Ended);
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

fn note(main: Pid, ended: &mut Option<Reaped>, reaped: Reaped) {
    if reaped.pid == main {
        *ended = Some(reaped);
    }
}

fn part(offsets: &Offsets, stream: Stream) -> u64 {
    match stream {
        Stream::Stdout => offsets.stdout,
        Stream::Stderr => offsets.stderr,
        Stream::Pty => offsets.pty,
        Stream::Unspecified => 0,
    }
}

/// Whether the workspace is full, and its size.
fn disk() -> (bool, u64) {
    let Ok(disk) = statvfs("/workspace") else {
        return (false, 0);
    };
    let full = disk.blocks_available() == 0 || (disk.files() > 0 && disk.files_available() == 0);
    (
        full && disk.blocks() > 0,
        disk.blocks().saturating_mul(disk.fragment_size()),
    )
}
