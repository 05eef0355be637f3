//! The one transaction that takes a run forward: entry, checkpoint, audit records (requirement E12). Pure.

use super::event::{Entry, FORMAT_VERSION};
use super::session::Session;
use super::state::{self, Denied, State};
use super::trail;
use crate::audit;
use crate::store::{Checkpoint, Commit, RunRecord};

/// Where a run is before the entry.
#[derive(Debug)]
pub struct Position<'a> {
    pub record: &'a RunRecord,
    pub state: &'a State,
    pub session: &'a Session,
    pub revision: u64,
    pub policy_hash: &'a str,
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
    let checkpoint = entry.event.completes_step().then(|| Checkpoint {
        format_version: FORMAT_VERSION,
        revision: at.revision + 1,
        seq: entry.seq,
        tree: next.workspace.tree,
        policy_hash: at.policy_hash.to_owned(),
        state: serde_json::to_value(&next).expect("a state is plain data"),
        at: entry.at,
    });
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
