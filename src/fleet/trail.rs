//! What the fleet puts on the audit record.
//!
//! Records are queued in the order in which things happened and committed in batches, so that a command does not wait
//! for a disk. The queue has a bound, which is how far the record may be behind: when it is full, or when the store takes
//! no more, nothing further is done until it does.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::Value;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::Error;
use crate::audit::Record;
use crate::clock::Clock;
use crate::ids::SandboxId;
use crate::store::Store;

/// Records that may wait.
const QUEUE: usize = 4096;
/// Records of one commit.
const BATCH: usize = 512;
/// How long the first record of a batch waits for others: those of a short command are one commit, made after it and not
/// beside it.
const GATHER: Duration = Duration::from_millis(20);
/// Before a failed commit is tried again.
const PAUSE: Duration = Duration::from_millis(500);

/// The way onto the record; clones share it.
#[derive(Debug, Clone)]
pub(super) struct Trail {
    queue: mpsc::Sender<Entry>,
    is_stuck: Arc<AtomicBool>,
    clock: Arc<dyn Clock>,
}

#[derive(Debug)]
enum Entry {
    Record(Box<Record>),
    /// Answered once all before it is on the record.
    Flush(oneshot::Sender<()>),
}

/// The other end, run by one task.
#[derive(Debug)]
pub(super) struct Writer {
    queue: mpsc::Receiver<Entry>,
    is_stuck: Arc<AtomicBool>,
    store: Arc<dyn Store>,
}

impl Trail {
    pub fn new(store: Arc<dyn Store>, clock: Arc<dyn Clock>) -> (Self, Writer) {
        let (send, receive) = mpsc::channel(QUEUE);
        let is_stuck = Arc::new(AtomicBool::new(false));
        let trail = Self {
            queue: send,
            is_stuck: Arc::clone(&is_stuck),
            clock,
        };
        let writer = Writer {
            queue: receive,
            is_stuck,
            store,
        };
        (trail, writer)
    }

    /// # Errors
    /// [`Error::OffRecord`] when nothing can be put on the record now. Asked before anything new is begun.
    pub fn check(&self) -> Result<(), Error> {
        match self.is_stuck.load(Ordering::Relaxed) {
            true => Err(Error::OffRecord),
            false => Ok(()),
        }
    }

    /// Queues a record of now; waits while the queue is full.
    pub async fn put(&self, actor: &str, action: &str, outcome: &str, ids: Ids<'_>, details: Value) {
        let record = Record {
            at: self.clock.now(),
            actor: actor.to_owned(),
            action: action.to_owned(),
            outcome: outcome.to_owned(),
            ids: ids.map(),
            details,
        };
        if self.queue.send(Entry::Record(Box::new(record))).await.is_err() {
            tracing::error!(action, "not on the audit record: its writer has ended");
        }
    }

    /// Waits until all that was queued is on the record.
    pub async fn flush(&self) {
        let (done, flushed) = oneshot::channel();
        if self.queue.send(Entry::Flush(done)).await.is_ok() {
            // Its writer may have ended.
            let _ = flushed.await;
        }
    }
}

/// The ids that a record belongs to.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ids<'a> {
    pub sandbox: &'a SandboxId,
    pub exec: Option<&'a str>,
}

impl Ids<'_> {
    fn map(self) -> BTreeMap<String, String> {
        let sandbox = ("sandbox".to_owned(), self.sandbox.to_string());
        let exec = self.exec.map(|exec| ("exec".to_owned(), exec.to_owned()));
        std::iter::once(sandbox).chain(exec).collect()
    }
}

/// Who acts, as the record names them.
pub(super) fn actor(by: &str) -> String {
    match by {
        "" => "client".to_owned(),
        by => format!("user:{by}"),
    }
}

impl Writer {
    /// Commits what comes until every [`Trail`] is gone, or until `stop`: then what is queued is tried once more.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut entries = Vec::new();
        loop {
            let count = tokio::select! {
                biased;
                count = self.queue.recv_many(&mut entries, BATCH) => count,
                () = stop.cancelled() => 0,
            };
            if count == 0 {
                return;
            }
            self.gather(&mut entries, &stop).await;
            let mut records = Vec::with_capacity(entries.len());
            let mut flushed = Vec::new();
            for entry in entries.drain(..) {
                match entry {
                    Entry::Record(record) => records.push(*record),
                    Entry::Flush(done) => flushed.push(done),
                }
            }
            self.commit(records, &stop).await;
            for done in flushed {
                // Whoever no longer waits needs no answer.
                let _ = done.send(());
            }
        }
    }

    /// Takes what comes soon after; not when somebody waits.
    async fn gather(&mut self, entries: &mut Vec<Entry>, stop: &CancellationToken) {
        let mut enough = std::pin::pin!(tokio::time::sleep(GATHER));
        while entries.len() < BATCH && !entries.iter().any(|entry| matches!(entry, Entry::Flush(_))) {
            let room = BATCH - entries.len();
            tokio::select! {
                biased;
                count = self.queue.recv_many(entries, room) => if count == 0 { return },
                () = &mut enough => return,
                () = stop.cancelled() => return,
            }
        }
    }

    async fn commit(&self, records: Vec<Record>, stop: &CancellationToken) {
        if records.is_empty() {
            return;
        }
        while let Err(error) = self.store.audit(records.clone()).await {
            self.is_stuck.store(true, Ordering::Relaxed);
            let error = crate::error::chain(&error);
            tracing::error!(error, records = records.len(), "the audit log takes no records");
            if stop.is_cancelled() {
                return;
            }
            tokio::select! {
                () = tokio::time::sleep(PAUSE) => {}
                () = stop.cancelled() => {}
            }
        }
        self.is_stuck.store(false, Ordering::Relaxed);
    }
}
