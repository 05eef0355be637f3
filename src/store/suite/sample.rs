//! Small tasks, commits and records for tests.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::json;

use crate::audit;
use crate::clock::Timestamp;
use crate::ids::{RunId, SessionId, TaskId, TraceId};
use crate::policy::Budgets;
use crate::run::event::{FORMAT_VERSION, Outcome, Submitted};
use crate::run::{Entry, Event};
use crate::store::{Checkpoint, Commit, Idempotency, NewTask, Owner, RunRecord};
use crate::workspace::TreeId;

/// The `n`th task; created `n` seconds after the epoch.
pub fn task(n: u64) -> NewTask {
    let at = Timestamp(n as i64 * 1000);
    let record = RunRecord {
        task: TaskId::from_bits(n.into()),
        run: RunId::from_bits(n.into()),
        session: SessionId::from_bits(n.into()),
        trace: TraceId::from_bits(n.into()),
        parent: n.checked_sub(1).map(|before| RunId::from_bits(before.into())),
        base: None,
        state: "QUEUED".to_owned(),
        is_terminal: false,
        seq: 1,
        revision: 0,
        fence: 0,
        owner: None,
        created_at: at,
        updated_at: at,
        labels: BTreeMap::from([
            ("n".to_owned(), n.to_string()),
            ("a \"b\" ü".to_owned(), "{}".to_owned()),
        ]),
    };
    NewTask {
        spec: json!({ "format_version": 1, "prompt": format!("task {n}"), "z": 0.1, "a": [null] }),
        idempotency: None,
        first: Entry {
            format_version: FORMAT_VERSION,
            seq: 1,
            at,
            event: Event::Submitted(submitted(n)),
        },
        checkpoint: checkpoint(0, 1),
        recorded: None,
        audit: vec![about(&record.run, "task.submitted")],
        record,
    }
}

pub fn with_key(n: u64, key: &str, body_hash: &str) -> NewTask {
    NewTask {
        idempotency: Some(Idempotency {
            key: key.to_owned(),
            body_hash: body_hash.to_owned(),
        }),
        ..task(n)
    }
}

fn submitted(n: u64) -> Submitted {
    Submitted {
        prompt: format!("task {n}"),
        system: String::new(),
        model: "scripted:x".to_owned(),
        policy_name: "default".to_owned(),
        policy_hash: "p".to_owned(),
        budgets: Budgets {
            steps: Some(3),
            model_calls: None,
            step_time: Duration::from_secs(1),
            total_time: Duration::from_millis(1500),
            tokens: None,
            cost_micros: None,
            parallel_tools: 1,
        },
        check: None,
        workspace: TreeId::from_bytes([7; 32]).into(),
        labels: BTreeMap::new(),
    }
}

pub fn checkpoint(revision: u64, seq: u64) -> Checkpoint {
    Checkpoint {
        format_version: FORMAT_VERSION,
        revision,
        seq,
        tree: TreeId::from_bytes([revision as u8; 32]),
        policy_hash: "p".to_owned(),
        state: json!({ "revision": revision }),
        at: Timestamp(seq as i64),
    }
}

pub fn entry(seq: u64) -> Entry {
    Entry {
        format_version: FORMAT_VERSION,
        seq,
        at: Timestamp(1_000_000 + seq as i64),
        event: Event::Resumed {
            accepted: Vec::new(),
            by: format!("entry {seq}"),
        },
    }
}

/// A step forward from `record`: one entry, the next checkpoint, one audit record.
pub fn step(record: &RunRecord) -> Commit {
    let seq = record.seq + 1;
    Commit {
        run: record.run.clone(),
        fence: record.fence,
        expected_seq: record.seq,
        entries: vec![entry(seq)],
        checkpoint: Some(checkpoint(record.revision + 1, seq)),
        state: "REASONING".to_owned(),
        is_terminal: false,
        consumed: vec![],
        audit: vec![about(&record.run, "step")],
    }
}

/// The last step of `record`.
pub fn end(record: &RunRecord, outcome: Outcome) -> Commit {
    let state = match &outcome {
        Outcome::Finished { .. } => "FINISHED",
        Outcome::Failed { .. } => "FAILED",
        Outcome::Exhausted { .. } => "EXHAUSTED",
        Outcome::Cancelled { .. } => "CANCELLED",
    };
    let mut commit = step(record);
    commit.entries[0].event = Event::Ended { outcome };
    Commit {
        state: state.to_owned(),
        is_terminal: true,
        ..commit
    }
}

pub fn finished() -> Outcome {
    Outcome::Finished {
        summary: "done".to_owned(),
        result: None,
    }
}

pub fn cancelled() -> Outcome {
    Outcome::Cancelled {
        by: "user:x".to_owned(),
        reason: "enough".to_owned(),
    }
}

pub fn about(run: &RunId, action: &str) -> audit::Record {
    audit::Record {
        at: Timestamp(1),
        actor: "server".to_owned(),
        action: action.to_owned(),
        outcome: "ok".to_owned(),
        ids: BTreeMap::from([("run".to_owned(), run.to_string())]),
        details: json!({ "z": 0.5, "a": "\u{0}\u{9b}" }),
    }
}

pub fn owner(pid: u32) -> Owner {
    Owner {
        pid,
        started: u64::from(pid) * 10,
        boot: "boot".to_owned(),
    }
}
