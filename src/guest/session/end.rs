//! How an exec ends: time, signals, the whole tree, and what is then told of it.

use std::collections::HashSet;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;
use nix::sys::statvfs::statvfs;
use nix::unistd::Pid;

use super::{Phase, Session};
use crate::guest::leash::Tag;
use crate::guest::sys::Reaped;
use crate::guest::tree;
use crate::wire;

/// How long the file plane may tidy up when the host has hung up in the middle of a write.
const TIDY: Duration = Duration::from_secs(1);
/// How long a detachable exec that ended waits to be released.
const RELEASE: Duration = Duration::from_secs(300);

impl Session<'_> {
    pub(super) fn keep_time(&mut self) {
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
    pub(super) fn terminate(&mut self) {
        self.kill_at = Instant::now().checked_add(self.facts.grace);
        tree::signal_all(libc::SIGTERM, &HashSet::new());
        // A stopped process hears it only when it goes on.
        tree::signal_all(libc::SIGCONT, &HashSet::new());
    }

    pub(super) fn hear_signals(&mut self) {
        while let Ok(Some(info)) = self.signals.read_signal() {
            // The sandbox is to end: nobody will ask any more.
            self.released |= info.ssi_signo == Signal::SIGTERM as u32;
        }
        let (main, ended, others) = (self.main, &mut self.main_ended, &mut self.others_killed);
        let used = &mut self.others_used;
        let killed =
            |reaped: &Reaped| libc::WIFSIGNALED(reaped.status) && libc::WTERMSIG(reaped.status) == libc::SIGKILL;
        self.alone = !tree::reap_ended(|reaped| {
            *others += u32::from(reaped.pid != main && killed(&reaped));
            note(main, ended, used, reaped);
        });
    }

    pub(super) fn end_tree(&mut self) {
        let (main, ended, used) = (self.main, &mut self.main_ended, &mut self.others_used);
        let killed = tree::kill_all(|reaped| note(main, ended, used, reaped));
        self.killed_descendants.extend(killed);
        self.killed_descendants.remove(&main);
        self.alone = true;
    }

    /// The host has hung up on the file plane: the end of its input tells it to take its temporary file away.
    pub(super) fn let_tidy_up(&mut self) {
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
    pub(super) fn conclude(&mut self) {
        let mut kept = 0;
        self.kill_at = None;
        if self.facts.keep_background && self.killed_by.is_none() && !self.timed_out {
            kept = tree::count();
            let (main, ended, used) = (self.main, &mut self.main_ended, &mut self.others_used);
            self.alone = !tree::reap_ended(|reaped| note(main, ended, used, reaped));
        } else {
            self.end_tree();
        }
        self.stdin = None;
        self.stdin_eof = true;
        self.typed_end = None;
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
            others_killed: self.others_killed,
            others_cpu_us: self.others_used.cpu_us,
            others_max_rss_bytes: self.others_used.max_rss_bytes,
        };
        self.phase = Phase::Over {
            ended,
            release_at: Instant::now() + RELEASE,
        };
        self.describe(Tag::Ended);
    }
}

/// What processes used.
#[derive(Default)]
pub(super) struct Used {
    cpu_us: u64,
    /// Of the largest.
    max_rss_bytes: u64,
}

fn note(main: Pid, ended: &mut Option<Reaped>, others: &mut Used, reaped: Reaped) {
    if reaped.pid == main {
        *ended = Some(reaped);
    } else {
        others.cpu_us += reaped.user_us + reaped.system_us;
        others.max_rss_bytes = others.max_rss_bytes.max(reaped.max_rss_bytes);
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
