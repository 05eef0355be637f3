//! The commands of one sandbox: those that run, and those that ended lately.
//!
//! `log.rs`: what a command has written; `finish.rs`: how it ended; `run.rs`: starts one and takes its output. This file
//! keeps them, in a bounded number, and ends them all with their sandbox.

mod finish;
mod log;
mod run;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub use finish::{Finish, How};
pub use log::{Channel, Counts, Item, Log, NotKept, Offsets, Overflow, Reader};
pub(super) use run::Launch;
pub(super) use run::take_over;
pub use run::{Attached, OnDisconnect, Start};

use super::Error;
use super::state::End;
use crate::clock::{Clock, Timestamp};
use crate::ids::{ExecId, SandboxId};
use crate::sandbox::Control;

/// Commands of one sandbox that may run at once, those included that are being started.
const MOST_RUNNING: usize = 512;
/// Bytes and words of a command's arguments that are kept to be told of.
const MOST_ARGV: usize = 4 << 10;
const MOST_WORDS: usize = 256;
/// Ended commands that are kept, what their output may cost together, and for how long.
const MOST_ENDED: usize = 64;
const ENDED_COST: u64 = 16 << 20;
const ENDED_AGE: Duration = Duration::from_secs(600);

/// One command.
#[derive(Debug)]
pub struct Entry {
    pub id: ExecId,
    /// As much as is told of: see [`cut`].
    pub argv: Vec<Vec<u8>>,
    /// As seen inside; 0 = not known.
    pub pid: u32,
    pub started_at: Timestamp,
    pub log: Arc<Log>,
    on_disconnect: OnDisconnect,
    timeout: Option<Duration>,
    control: Control,
    ended_at: Mutex<Option<Timestamp>>,
}

/// What can be told of a command.
#[derive(Debug, Clone, PartialEq)]
pub struct ExecView {
    pub id: ExecId,
    pub argv: Vec<Vec<u8>>,
    pub pid: u32,
    pub started_at: Timestamp,
    /// `None`: it runs.
    pub finish: Option<Arc<Finish>>,
    /// Bytes made, by channel.
    pub made: Offsets,
    pub attached: bool,
}

/// The commands of a sandbox, oldest first.
#[derive(Debug)]
pub(super) struct Execs {
    kept: Mutex<Kept>,
    clock: Arc<dyn Clock>,
}

#[derive(Debug, Default)]
struct Kept {
    entries: VecDeque<Arc<Entry>>,
    /// Those that have no entry yet.
    starting: usize,
    over: Option<End>,
}

/// Counts a command that is being started, until it has an entry or has failed to start.
#[derive(Debug)]
struct Starting<'a>(&'a Execs);

impl Drop for Starting<'_> {
    fn drop(&mut self) {
        lock(&self.0.kept).starting -= 1;
    }
}

/// The beginning of arguments that are long: an entry outlives its command, and there are many.
fn cut(argv: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let mut room = MOST_ARGV;
    let cut = |word: &Vec<u8>| {
        let length = word.len().min(room);
        room -= length;
        word[..length].to_vec()
    };
    argv.iter().take(MOST_WORDS).map(cut).collect()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Entry {
    /// Ends the whole tree: SIGTERM, the command's grace, SIGKILL.
    pub async fn kill(&self, by: &str) {
        self.log.stop_waiting();
        // It has ended by itself otherwise.
        let _ = self.control.terminate(by).await;
    }

    /// The same, because its client went away.
    async fn disconnected(&self) {
        self.log.stop_waiting();
        let _ = self.control.disconnected().await;
    }

    pub fn control(&self) -> &Control {
        &self.control
    }

    /// # Errors
    /// [`Error::OutputDropped`].
    pub fn read_from(&self, at: Offsets) -> Result<Reader, Error> {
        self.log.read_from(at).map_err(|kept| Error::OutputDropped {
            exec: self.id.clone(),
            channel: kept.channel,
            wanted: kept.wanted,
            first: kept.first,
            end: kept.end,
        })
    }

    fn view(&self) -> ExecView {
        ExecView {
            id: self.id.clone(),
            argv: self.argv.clone(),
            pid: self.pid,
            started_at: self.started_at,
            finish: self.log.finish(),
            made: self.log.made(),
            attached: self.log.readers() > 0,
        }
    }
}

impl Execs {
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        Self {
            kept: Mutex::default(),
            clock,
        }
    }

    /// Room for one more command.
    ///
    /// # Errors
    /// [`Error::TooManyExecs`].
    fn begin(&self, sandbox: &SandboxId) -> Result<Starting<'_>, Error> {
        let mut kept = lock(&self.kept);
        let running = kept.entries.iter().filter(|entry| entry.log.finish().is_none());
        match running.count() + kept.starting < MOST_RUNNING {
            true => {
                kept.starting += 1;
                Ok(Starting(self))
            }
            false => Err(Error::TooManyExecs {
                id: sandbox.clone(),
                limit: MOST_RUNNING,
            }),
        }
    }

    /// Keeps a command that has started. In a sandbox that is ending it has ended.
    fn add(&self, entry: &Arc<Entry>) {
        let mut kept = lock(&self.kept);
        kept.entries.push_back(Arc::clone(entry));
        if let Some(end) = &kept.over {
            entry.log.end(Finish::with_sandbox(end, Duration::ZERO));
        }
    }

    /// Notes that a command has ended, and lets go of what is too old or too much.
    fn ended(&self, entry: &Entry) {
        let now = self.clock.now();
        *lock(&entry.ended_at) = Some(now);
        let mut kept = lock(&self.kept);
        let (mut count, mut cost) = (0, 0);
        let mut keep = Vec::with_capacity(kept.entries.len());
        // From the newest.
        for entry in kept.entries.iter().rev() {
            let ended_at = *lock(&entry.ended_at);
            keep.push(ended_at.is_none_or(|at| {
                count += 1;
                cost += entry.log.cost();
                count <= MOST_ENDED && (count == 1 || cost <= ENDED_COST) && now.since(at) < ENDED_AGE
            }));
        }
        let mut keep = keep.into_iter().rev();
        kept.entries.retain(|_| keep.next().unwrap_or(true));
    }

    pub fn find(&self, sandbox: &SandboxId, id: &str) -> Result<Arc<Entry>, Error> {
        let kept = lock(&self.kept);
        let found = kept.entries.iter().find(|entry| entry.id.as_str() == id);
        found.cloned().ok_or_else(|| Error::NoExec {
            sandbox: sandbox.clone(),
            exec: id.to_owned(),
        })
    }

    pub fn list(&self) -> Vec<ExecView> {
        lock(&self.kept).entries.iter().map(|entry| entry.view()).collect()
    }

    /// How the sandbox is ending, if it is.
    fn over(&self) -> Option<End> {
        lock(&self.kept).over.clone()
    }

    /// Ends every command with its sandbox: at once, whatever they still have to say.
    pub fn end_all(&self, end: &End) {
        let entries: Vec<Arc<Entry>> = {
            let mut kept = lock(&self.kept);
            kept.over.get_or_insert_with(|| end.clone());
            kept.entries.iter().cloned().collect()
        };
        for entry in entries {
            let duration = end.at.since(entry.started_at);
            entry.log.end(Finish::with_sandbox(end, duration));
        }
    }
}
