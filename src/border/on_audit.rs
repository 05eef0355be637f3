//! Decisions on the audit chain: queued as they fall, committed in batches. When the queue is full nothing more is let out, and
//! what is refused meanwhile is counted on the record.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use serde_json::json;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::log::Whose;
use crate::audit::Record;
use crate::egress::journal::{Decision, Journal, Outcome, Unwritable};
use crate::egress::rules::RuleId;
use crate::store::Store;
use crate::tasks::Tasks;

/// The action of each decision on the chain.
pub const DECIDED: &str = "network.decided";
/// The action of the count of those that are not there one by one.
pub const UNCOUNTED: &str = "network.uncounted";

/// Decisions that may wait.
const QUEUE: usize = 8192;
/// Decisions of one commit.
const BATCH: usize = 512;
/// How long the first of a batch waits for others.
const GATHER: Duration = Duration::from_millis(20);
/// Before a failed commit is tried again.
const PAUSE: Duration = Duration::from_millis(500);

#[derive(Debug)]
enum Entry {
    Decided(Box<Record>),
    /// Answered once all before it is on the record.
    Settle(oneshot::Sender<()>),
}

/// The record of all borders of one server.
#[derive(Debug)]
pub struct OnAudit {
    queue: mpsc::Sender<Entry>,
    state: Arc<State>,
    writer: Tasks,
}

#[derive(Debug, Default)]
struct State {
    /// The store takes nothing now.
    is_stuck: AtomicBool,
    /// Refusals that found the queue full.
    uncounted: AtomicU64,
}

impl OnAudit {
    /// To be called within a runtime, which its writer lives in.
    pub fn new(store: Arc<dyn Store>) -> Self {
        let (queue, entries) = mpsc::channel(QUEUE);
        let (state, writer) = (Arc::new(State::default()), Tasks::default());
        let of_writer = Arc::clone(&state);
        writer.spawn("network decisions", |stop| write(entries, store, of_writer, stop));
        Self { queue, state, writer }
    }

    /// The way onto the record for the border of one sandbox.
    pub(super) fn of(&self, whose: &Whose) -> Arc<dyn Journal> {
        Arc::new(OfSandbox {
            whose: whose.clone(),
            queue: self.queue.clone(),
            state: Arc::clone(&self.state),
            begun: Mutex::default(),
        })
    }

    /// Waits until all that was decided so far is on the record.
    pub(super) async fn settle(&self) {
        let (done, settled) = oneshot::channel();
        if self.queue.send(Entry::Settle(done)).await.is_ok() {
            // Its writer may have ended.
            let _ = settled.await;
        }
    }
}

impl Drop for OnAudit {
    fn drop(&mut self) {
        self.writer.stopping().cancel();
    }
}

/// The decisions of one sandbox's border.
#[derive(Debug)]
struct OfSandbox {
    whose: Whose,
    queue: mpsc::Sender<Entry>,
    state: Arc<State>,
    /// The steps during which what is open now began.
    begun: Mutex<BTreeMap<u64, BTreeSet<u32>>>,
}

/// Why an intent is not taken.
#[derive(Debug, thiserror::Error)]
#[error("the audit log takes no more records, and nothing is done off the record")]
struct OffRecord;

#[async_trait]
impl Journal for OfSandbox {
    async fn intend(&self, decision: &Decision) -> Result<(), Unwritable> {
        if self.state.is_stuck.load(Ordering::Relaxed) || self.queue.capacity() == 0 {
            return Err(Unwritable(OffRecord.into()));
        }
        let mut begun = self.begun.lock().unwrap_or_else(PoisonError::into_inner);
        begun.insert(decision.id, self.whose.steps.now());
        Ok(())
    }

    fn record(&self, decision: Decision) {
        let begun = self
            .begun
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&decision.id);
        let steps = begun.unwrap_or_else(|| self.whose.steps.now());
        let record = Box::new(record(&self.whose, &steps, &decision));
        if self.queue.try_send(Entry::Decided(record)).is_err() {
            self.state.uncounted.fetch_add(1, Ordering::Relaxed);
        }
    }
}

fn record(whose: &Whose, steps: &BTreeSet<u32>, decision: &Decision) -> Record {
    let run = whose.run.as_ref().map(ToString::to_string);
    let mut ids = BTreeMap::from([("sandbox".to_owned(), whose.sandbox.to_string())]);
    let actor = match &run {
        Some(run) => format!("run:{run}"),
        None => format!("sandbox:{}", whose.sandbox),
    };
    ids.extend(run.map(|run| ("run".to_owned(), run)));
    // Of several steps side by side it cannot be told which one it was: the details name them all.
    if let (1, Some(step)) = (steps.len(), steps.first()) {
        ids.insert("step".to_owned(), step.to_string());
    }
    let outcome = match decision.outcome {
        Outcome::Allowed => "allowed",
        Outcome::Denied => "denied",
        Outcome::Cut => "cut",
        Outcome::Failed => "failed",
    };
    let details = json!({
        "number": decision.id, "channel": decision.channel, "host": decision.host, "port": decision.port,
        "address": decision.address, "method": decision.method, "path": decision.path, "status": decision.status,
        "bytes_up": decision.sent, "bytes_down": decision.received, "rule": decision.rule, "reason": decision.reason,
        "credential": decision.credential, "credential_version": decision.credential_version,
        "duration_ms": decision.duration.as_millis() as u64, "steps": steps,
    });
    Record {
        at: decision.at,
        actor,
        action: DECIDED.to_owned(),
        outcome: outcome.to_owned(),
        ids,
        details,
    }
}

/// The decision that a record is of; `None` for any other, and for one of a build that wrote it otherwise.
pub fn decision_of(record: &Record) -> Option<Decision> {
    let details = &record.details;
    let text = |name: &str| details[name].as_str().map(str::to_owned);
    let number = |name: &str| details[name].as_u64();
    let outcome = match record.outcome.as_str() {
        "allowed" => Outcome::Allowed,
        "denied" => Outcome::Denied,
        "cut" => Outcome::Cut,
        "failed" => Outcome::Failed,
        _ => return None,
    };
    if record.action != DECIDED {
        return None;
    }
    Some(Decision {
        id: number("number")?,
        at: record.at,
        channel: serde_json::from_value(details["channel"].clone()).ok()?,
        host: text("host")?,
        port: number("port")?.try_into().ok()?,
        address: text("address").and_then(|address| address.parse().ok()),
        method: text("method"),
        path: text("path"),
        status: number("status").and_then(|status| status.try_into().ok()),
        sent: number("bytes_up")?,
        received: number("bytes_down")?,
        outcome,
        rule: RuleId::from(text("rule")?),
        reason: text("reason")?,
        credential: text("credential"),
        credential_version: text("credential_version"),
        duration: Duration::from_millis(number("duration_ms")?),
    })
}

/// Commits what comes until `stop`, and then what is queued once more.
async fn write(mut queue: mpsc::Receiver<Entry>, store: Arc<dyn Store>, state: Arc<State>, stop: CancellationToken) {
    let mut entries = Vec::new();
    loop {
        let count = tokio::select! {
            biased;
            count = queue.recv_many(&mut entries, BATCH) => count,
            () = stop.cancelled() => 0,
        };
        if count == 0 {
            return;
        }
        if !entries.iter().any(|entry| matches!(entry, Entry::Settle(_))) {
            tokio::time::sleep(GATHER).await;
        }
        let (mut records, mut settled) = (Vec::with_capacity(entries.len()), Vec::new());
        for entry in entries.drain(..) {
            match entry {
                Entry::Decided(record) => records.push(*record),
                Entry::Settle(done) => settled.push(done),
            }
        }
        let uncounted = state.uncounted.swap(0, Ordering::Relaxed);
        if let Some(last) = records.last().filter(|_| uncounted > 0) {
            let many = Record {
                actor: "server".to_owned(),
                action: UNCOUNTED.to_owned(),
                outcome: "denied".to_owned(),
                ids: BTreeMap::new(),
                details: json!({ "decisions": uncounted }),
                ..last.clone()
            };
            records.push(many);
        }
        commit(records, &*store, &state, &stop).await;
        for done in settled {
            // Whoever no longer waits needs no answer.
            let _ = done.send(());
        }
    }
}

async fn commit(records: Vec<Record>, store: &dyn Store, state: &State, stop: &CancellationToken) {
    if records.is_empty() {
        return;
    }
    while let Err(error) = store.audit(records.clone()).await {
        state.is_stuck.store(true, Ordering::Relaxed);
        let error = crate::error::chain(&error);
        tracing::error!(
            error,
            records = records.len(),
            "the audit log takes no decisions of the network"
        );
        if stop.is_cancelled() {
            return;
        }
        tokio::select! {
            () = tokio::time::sleep(PAUSE) => {}
            () = stop.cancelled() => {}
        }
    }
    state.is_stuck.store(false, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::border::Steps;
    use crate::clock::{System, Timestamp};
    use crate::egress::journal::Channel;
    use crate::ids::{RunId, SandboxId};
    use crate::store::memory::Memory;

    fn decision(id: u64) -> Decision {
        Decision {
            address: Some([1, 2, 3, 4].into()),
            method: Some("GET".to_owned()),
            path: Some("/x".to_owned()),
            status: Some(200),
            sent: 1,
            received: 2,
            outcome: Outcome::Allowed,
            rule: RuleId::from("a"),
            credential: Some("token".to_owned()),
            duration: Duration::from_millis(3),
            ..Decision::undecided(id, Timestamp(7), Channel::Connect, "a.example".to_owned(), 443)
        }
    }

    /// Each decision is on the chain once it was settled, with the steps in which it began.
    #[tokio::test]
    async fn a_decision_is_on_the_chain_with_run_and_step() {
        let store: Arc<dyn Store> = Arc::new(Memory::new(Arc::new(System)));
        let records = OnAudit::new(Arc::clone(&store));
        let whose = Whose {
            sandbox: SandboxId::from_bits(1),
            run: Some(RunId::from_bits(2)),
            steps: Steps::default(),
        };
        let journal = records.of(&whose);
        let step = whose.steps.enter(4);
        journal.intend(&decision(1)).await.unwrap();
        drop(step);
        let _other = whose.steps.enter(5);
        journal.record(decision(1));
        let _beside = whose.steps.enter(6);
        journal.record(decision(2));
        records.settle().await;
        let found = store.audit_log(0, 10).await.unwrap();
        let told: Vec<_> = found
            .iter()
            .map(|entry| {
                (
                    entry.record.ids.get("step").cloned(),
                    entry.record.details["steps"].clone(),
                )
            })
            .collect();
        assert_eq!(told, [(Some("4".to_owned()), json!([4])), (None, json!([5, 6]))]);
        let first = &found[0].record;
        assert_eq!(first.ids["run"], whose.run.as_ref().unwrap().to_string());
        assert_eq!(first.actor, format!("run:{}", whose.run.as_ref().unwrap()));
        assert_eq!(decision_of(first), Some(decision(1)));
    }
}
