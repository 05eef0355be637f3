//! The one transaction that takes a run forward: entry, checkpoint, audit records (requirement E12); and the one that begins a
//! run. Pure.

use super::event::{Entry, FORMAT_VERSION};
use super::session::Session;
use super::state::{self, Denied, State};
use super::trail;
use crate::audit;
use crate::ids::{RunId, SessionId, TaskId, TraceId};
use crate::store::{Base, Checkpoint, Commit, NewTask, RunRecord};
use crate::task::Task;

/// Where a run is before the entry.
#[derive(Debug)]
pub struct Position<'a> {
    pub record: &'a RunRecord,
    pub state: &'a State,
    pub session: &'a Session,
    pub revision: u64,
    pub policy_hash: &'a str,
}

/// A new run of `task`, under new ids; `state` is the one after its `first` entry. With a `parent` it goes on from there.
pub fn beginning(task: &Task, first: Entry, state: &State, trace: TraceId, parent: Option<(RunId, Base)>) -> NewTask {
    let (parent, base) = parent.unzip();
    let record = RunRecord {
        task: TaskId::random(),
        run: RunId::random(),
        session: SessionId::random(),
        trace,
        parent,
        base,
        state: state.public().to_owned(),
        is_terminal: false,
        seq: first.seq,
        revision: base.map_or(0, |base| base.revision + 1),
        fence: 0,
        owner: None,
        created_at: first.at,
        updated_at: first.at,
        labels: task.labels.clone(),
    };
    let checkpoint = checkpoint(&first, state, record.revision, &task.policy_hash);
    NewTask {
        spec: task.to_value(),
        idempotency: None,
        audit: trail::records(&record, &Session::default(), &first),
        first,
        checkpoint,
        recorded: None,
        record,
    }
}

/// Of the state after `entry`.
fn checkpoint(entry: &Entry, state: &State, revision: u64, policy_hash: &str) -> Checkpoint {
    Checkpoint {
        format_version: FORMAT_VERSION,
        revision,
        seq: entry.seq,
        tree: state.workspace.tree,
        policy_hash: policy_hash.to_owned(),
        state: serde_json::to_value(state).expect("a state is plain data"),
        at: entry.at,
    }
}

/// The state after `entry`, and the transaction that makes it so; nothing has happened before that is durable.
///
/// # Errors
/// When the machine refuses the entry.
pub fn prepare(
    at: &Position<'_>,
    entry: Entry,
    audit: Vec<audit::Record>,
    consumed: Vec<u64>,
) -> Result<(State, Commit), Denied> {
    let (next, _) = state::step(at.state, &entry)?;
    let completes = entry.event.completes_step();
    let checkpoint = completes.then(|| checkpoint(&entry, &next, at.revision + 1, at.policy_hash));
    // What ran comes before the entry that tells how it ended.
    let mut records = audit;
    records.extend(trail::records(at.record, at.session, &entry));
    let revision = checkpoint
        .as_ref()
        .map_or(at.revision, |checkpoint| checkpoint.revision);
    for record in &mut records {
        record.ids.insert("revision".to_owned(), revision.to_string());
    }
    let commit = Commit {
        run: at.record.run.clone(),
        fence: at.record.fence,
        expected_seq: at.state.seq,
        state: next.public().to_owned(),
        is_terminal: next.is_terminal(),
        checkpoint,
        consumed,
        audit: records,
        entries: vec![entry],
    };
    Ok((next, commit))
}
