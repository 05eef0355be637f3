//! The durable store: tasks, runs, journals, checkpoints, inboxes and the audit log. One seam, [`Store`].
//!
//! Promises of every implementation, checked by `suite.rs` on all of them:
//! - a call that returned `Ok` is durable (SQLite: WAL, `synchronous=FULL`); one that returned an error changed nothing;
//! - [`Store::commit`] is one transaction: entries, checkpoint, run summary, consumed signals and audit records become
//!   visible together or not at all;
//! - it is refused when the fence is stale or the journal is not at `expected_seq` (requirement E12);
//! - everything carries a `format_version`; an unknown one is refused by name, never guessed at (requirement F2);
//! - several processes may share one store; each call is atomic among all of them.
//!
//! Plain domain types only: no SQL in a signature. Calls may be cancelled; the transaction then still ends whole.

mod format;
pub mod memory;
mod rules;
pub mod sqlite;
#[cfg(test)]
pub mod suite;

use std::collections::BTreeMap;
use std::fmt::Debug;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};

use crate::audit;
use crate::clock::Timestamp;
use crate::error::Kind;
use crate::ids::{ApprovalId, RunId, SessionId, TaskId, TraceId};
use crate::run::Entry;
use crate::workspace::TreeId;

/// A task and its first run, as created.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NewTask {
    pub record: RunRecord,
    /// The whole request, versioned JSON that only `task.rs` reads.
    pub spec: serde_json::Value,
    pub idempotency: Option<Idempotency>,
    /// The journal's first entry; of a fork, the first after its base.
    pub first: Entry,
    pub checkpoint: Checkpoint,
    /// Of a run that was recorded elsewhere: all that follows, to its end.
    pub recorded: Option<Recorded>,
    pub audit: Vec<audit::Record>,
}

/// The rest of a run that was recorded elsewhere.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Recorded {
    pub entries: Vec<Entry>,
    pub checkpoints: Vec<Checkpoint>,
}

/// A client's key: same key + same body gives the same task, same key + other body is refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Idempotency {
    pub key: String,
    pub body_hash: String,
}

/// One run as lists show it; a projection of its journal, rewritten with every commit.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunRecord {
    pub task: TaskId,
    pub run: RunId,
    pub session: SessionId,
    pub trace: TraceId,
    pub parent: Option<RunId>,
    /// Of a fork: how much of its parent's journal and checkpoints are its own beginning.
    pub base: Option<Base>,
    /// Public state, upper snake case: `QUEUED`, `REASONING`, …
    pub state: String,
    pub is_terminal: bool,
    /// Newest journal position.
    pub seq: u64,
    /// Newest checkpoint.
    pub revision: u64,
    /// Who may write. Raised by every claim.
    pub fence: u64,
    pub owner: Option<Owner>,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
    pub labels: BTreeMap<String, String>,
}

/// Where a fork leaves its parent. Everything up to there is read from the parent, so a fork costs the same whatever lies
/// behind it; a run that has children is therefore never removed before them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Base {
    /// The parent's last entry that counts.
    pub seq: u64,
    /// The parent's last checkpoint that counts.
    pub revision: u64,
}

/// The process that drives a run.
pub type Owner = crate::process::Process;

/// Journal position + execution state + workspace tree, and what they were made under.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Checkpoint {
    pub format_version: u32,
    /// From 0 (as submitted), +1 for each.
    pub revision: u64,
    /// The journal position it stands for.
    pub seq: u64,
    pub tree: TreeId,
    pub policy_hash: String,
    /// The execution state, versioned JSON that only `run/state.rs` reads.
    pub state: serde_json::Value,
    pub at: Timestamp,
}

/// One atomic step forward of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Commit {
    pub run: RunId,
    pub fence: u64,
    /// The journal's position before this commit.
    pub expected_seq: u64,
    /// Numbered from `expected_seq + 1`, never empty.
    pub entries: Vec<Entry>,
    pub checkpoint: Option<Checkpoint>,
    /// State as of the last entry.
    pub state: String,
    pub is_terminal: bool,
    /// Inbox rows that these entries answer; removed.
    pub consumed: Vec<u64>,
    pub audit: Vec<audit::Record>,
}

/// Something that the outside wants of a run; consumed by its driver at a safe point, in order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Signal {
    Pause {
        by: String,
        reason: String,
        /// Stop what is going on, too.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        now: bool,
    },
    Resume {
        by: String,
        /// Differences that do not matter to whoever resumes.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        accept: Vec<crate::run::grounds::Ground>,
    },
    Cancel {
        by: String,
        reason: String,
    },
    /// `approval` `None` = the only one that is open.
    Decide {
        approval: Option<ApprovalId>,
        approved: bool,
        by: String,
        reason: String,
    },
}

/// A signal in its place in a run's inbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pending {
    pub id: u64,
    pub signal: Signal,
}

/// Which runs to list; newest first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Query {
    /// Empty = all.
    pub states: Vec<String>,
    /// Only runs that carry all of these.
    pub labels: BTreeMap<String, String>,
    /// Only runs older than this one in the listing's order.
    pub after: Option<(Timestamp, RunId)>,
    pub limit: usize,
}

/// What came of a submission.
#[derive(Debug, Clone, PartialEq)]
pub enum Created {
    New(RunRecord),
    /// The idempotency key was known, with the same body.
    Known(RunRecord),
}

#[async_trait]
pub trait Store: Send + Sync + Debug {
    /// # Errors
    /// [`Error::KeyReused`] when the key is known with another body.
    async fn create(&self, task: NewTask) -> Result<Created, Error>;
    /// The newest run of the task that an idempotency key was given for, if it was.
    ///
    /// # Errors
    /// [`Error::KeyReused`] when the key is known with another body.
    async fn known(&self, key: &Idempotency) -> Result<Option<RunRecord>, Error>;
    async fn run(&self, run: &RunId) -> Result<RunRecord, Error>;
    /// The newest run of a task.
    async fn run_of_task(&self, task: &TaskId) -> Result<RunRecord, Error>;
    async fn spec(&self, task: &TaskId) -> Result<serde_json::Value, Error>;
    async fn list(&self, query: &Query) -> Result<Vec<RunRecord>, Error>;
    /// Every run that has not ended, oldest first.
    async fn unfinished(&self) -> Result<Vec<RunRecord>, Error>;
    /// Makes `owner` the run's only writer and raises the fence. It is taken from nobody but `dead`,
    /// an owner that the caller has seen to be dead; what came between that look and this call is refused.
    ///
    /// # Errors
    /// [`Error::Owned`] when another owner has it.
    async fn claim(&self, run: &RunId, owner: &Owner, dead: Option<&Owner>) -> Result<RunRecord, Error>;
    /// Gives the run up without ending it; ignored when the fence is stale.
    async fn release(&self, run: &RunId, fence: u64) -> Result<(), Error>;
    async fn commit(&self, commit: Commit) -> Result<(), Error>;
    /// Entries after position `after`, in order, at most `limit`.
    async fn journal(&self, run: &RunId, after: u64, limit: usize) -> Result<Vec<Entry>, Error>;
    /// The checkpoint with that revision, or the newest.
    async fn checkpoint(&self, run: &RunId, revision: Option<u64>) -> Result<Checkpoint, Error>;
    async fn signal(&self, run: &RunId, signal: Signal) -> Result<(), Error>;
    async fn inbox(&self, run: &RunId) -> Result<Vec<Pending>, Error>;
    /// Removes a signal that no longer means anything; fenced like a commit.
    async fn discard(&self, run: &RunId, fence: u64, signal: u64) -> Result<(), Error>;
    /// A number that changes when another process has written to the store; cheap to ask.
    async fn data_version(&self) -> Result<u64, Error>;
    /// Appends to the audit chain; for what no commit carries.
    async fn audit(&self, records: Vec<audit::Record>) -> Result<(), Error>;
    /// The chain after `after`, in order, at most `limit`.
    async fn audit_log(&self, after: u64, limit: usize) -> Result<Vec<audit::Sealed>, Error>;
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no {what} `{id}`")]
    NotFound { what: &'static str, id: String },
    #[error("the idempotency key `{key}` belongs to another request (task `{task}`)")]
    KeyReused { key: String, task: TaskId },
    #[error("run `{run}` is at fence {found}, not {fence}: another worker has taken it over")]
    StaleFence { run: RunId, fence: u64, found: u64 },
    #[error("run `{run}` is at entry {found}, not {expected}")]
    StaleSeq { run: RunId, expected: u64, found: u64 },
    #[error("run `{run}` has ended")]
    Ended { run: RunId },
    #[error("run `{run}` is driven by process {pid}")]
    Owned { run: RunId, pid: u32 },
    #[error("{what} has format version {found}; this build reads up to {known}")]
    UnknownVersion { what: String, found: u64, known: u64 },
    #[error("{what} is damaged: {reason}")]
    Damaged { what: String, reason: String },
    #[error("the store failed to {doing}")]
    Backend {
        doing: &'static str,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl Error {
    pub fn kind(&self) -> Kind {
        match self {
            Self::NotFound { .. } => Kind::NotFound,
            Self::KeyReused { .. } => Kind::Exists,
            Self::StaleFence { .. } | Self::StaleSeq { .. } => Kind::Conflict,
            Self::Ended { .. } | Self::Owned { .. } | Self::UnknownVersion { .. } => Kind::WrongState,
            Self::Damaged { .. } => Kind::Internal,
            Self::Backend { .. } => Kind::Unavailable,
        }
    }
}
