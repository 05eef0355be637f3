//! Durable runs: a pure core and an imperative shell.
//!
//! - `event.rs`: journal entries, the only truth about a run;
//! - `state.rs`: [`state::step`], the pure machine, and [`state::due`], what should be going on now; no IO, no clock;
//! - `session.rs`: the conversation, another projection of the same journal; `trail.rs`: what goes on the audit record;
//! - `driver.rs`: claims a run, commits first, acts second; `decide.rs`: what the policy makes of a call;
//! - `effects.rs`: performs model calls, tool calls, checks; `bench.rs`: a run's sandbox and working directory;
//! - `grounds.rs`: what a run stands on, and whether it still does when it is to go on;
//! - `fork.rs`: child runs from a checkpoint; `recording.rs`: a run as one file; `replay.rs`: what today's machine makes of it;
//! - `service.rs`: what the outside asks: submit, watch, cancel, approve, …; `hub.rs` wakes those who watch; `lease.rs` takes
//!   over from a process that stands still.
//!
//! Must not know: gRPC, the command line. Owns no file format but its own events and checkpoints.

pub mod bench;
mod commit;
mod decide;
mod driver;
mod effects;
pub mod event;
pub mod fork;
pub mod grounds;
pub mod hub;
pub mod lease;
pub mod recording;
pub mod replay;
mod retry;
pub mod service;
pub mod session;
#[cfg(test)]
mod sim;
pub mod state;
#[cfg(test)]
mod state_test;
mod trail;
mod world;

pub use driver::{Rest, STALE_AFTER};
pub use effects::Shop;
pub use event::{Entry, Event};
pub use service::Service;

use crate::error::Kind;
use crate::ids::RunId;
use crate::store::{Checkpoint, Store};
use state::State;

/// Entries that are read from a journal at a time.
const PAGE: usize = 1000;

/// Reads a whole journal.
async fn journal(store: &dyn Store, run: &RunId) -> Result<Vec<Entry>, Error> {
    let mut entries = Vec::new();
    loop {
        let page = store.journal(run, entries.len() as u64, PAGE).await?;
        let is_last = page.len() < PAGE;
        entries.extend(page);
        if is_last {
            return Ok(entries);
        }
    }
}

/// Folds a whole journal.
///
/// # Errors
/// A journal that the machine refuses is damaged; an unknown `format_version` is refused (requirement F2).
pub fn fold(run: &RunId, entries: &[Entry]) -> Result<State, Error> {
    let version = |entry: &&Entry| entry.format_version != event::FORMAT_VERSION;
    if let Some(entry) = entries.iter().find(version) {
        return Err(Error::UnknownVersion {
            run: run.clone(),
            found: entry.format_version,
        });
    }
    let mut state = None;
    for entry in entries {
        state = Some(state::next(state.as_ref(), entry)?);
    }
    state.ok_or_else(|| Error::NoJournal(run.clone()))
}

/// Whether a checkpoint is what the journal makes of the entries up to it (requirements E13, F1): a build whose machine
/// would have gone another way does not go on by guessing.
fn agree(run: &RunId, entries: &[Entry], checkpoint: &Checkpoint) -> Result<(), Error> {
    let upto = entries.partition_point(|entry| entry.seq <= checkpoint.seq);
    let folded = fold(run, &entries[..upto])?;
    if folded == state::of_checkpoint(run, checkpoint)? {
        return Ok(());
    }
    Err(Error::Diverged {
        run: run.clone(),
        revision: checkpoint.revision,
    })
}

/// What can go wrong with a run, apart from how it ends.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Store(#[from] crate::store::Error),
    #[error(transparent)]
    Task(#[from] crate::task::Error),
    #[error(transparent)]
    Policy(#[from] crate::policy::Error),
    #[error(transparent)]
    Model(#[from] crate::model::Error),
    #[error(transparent)]
    Workspace(#[from] crate::workspace::Error),
    #[error(transparent)]
    Bench(#[from] bench::Error),
    #[error("the machine refused an entry")]
    Denied(#[from] state::Denied),
    #[error("run `{run}` has entries of format version {found}, which this build cannot read")]
    UnknownVersion { run: RunId, found: u32 },
    #[error("checkpoint {revision} of run `{run}` makes no sense")]
    Checkpoint {
        run: RunId,
        revision: u64,
        #[source]
        source: serde_json::Error,
    },
    #[error("checkpoint {revision} of run `{run}` is not what this build makes of its journal")]
    Diverged { run: RunId, revision: u64 },
    #[error("the policy `{name}` is no longer what run `{run}` had: {found} now, {recorded} then")]
    PolicyChanged {
        run: RunId,
        name: String,
        recorded: String,
        found: String,
    },
    /// Never empty.
    #[error(
        "run `{run}` stands on what is no longer so: {}; let it go on all the same with --accept {}",
        mismatches.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "),
        mismatches.iter().map(|mismatch| mismatch.ground.name()).collect::<Vec<_>>().join(",")
    )]
    Incompatible {
        run: RunId,
        mismatches: Vec<grounds::Mismatch>,
    },
    #[error(transparent)]
    Recording(#[from] recording::Error),
    #[error("run `{0}` has no journal")]
    NoJournal(RunId),
    #[error("no tool call has step {0}")]
    NoCall(u32),
    #[error("run `{run}` is {state}: it waits for no approval")]
    NothingToApprove { run: RunId, state: String },
    #[error("it was {} by {by} already", if *approved { "approved" } else { "denied" })]
    Decided { by: String, approved: bool },
    #[error("no open approval `{0}`")]
    NoApproval(String),
    #[error("the task asks for more than the policy gives: {}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Budgets(Vec<crate::policy::Violation>),
    #[error("{0}")]
    Invalid(String),
    #[error("run `{run}` is {state}: it cannot be {wanted}")]
    WrongState {
        run: RunId,
        state: String,
        wanted: &'static str,
    },
    #[error("a step broke: {0}")]
    Broke(String),
    #[error("cannot ask the host")]
    Host(#[source] std::io::Error),
}

impl Error {
    pub fn kind(&self) -> Kind {
        match self {
            Self::Store(error) => error.kind(),
            Self::Policy(error) => error.kind(),
            Self::Model(error) => error.kind(),
            Self::Workspace(error) => error.kind(),
            Self::Bench(error) => error.kind(),
            Self::Invalid(_) | Self::Budgets(_) => Kind::Invalid,
            Self::Recording(error) => error.kind(),
            Self::NoApproval(_)
            | Self::NothingToApprove { .. }
            | Self::Decided { .. }
            | Self::WrongState { .. }
            | Self::PolicyChanged { .. }
            | Self::Incompatible { .. }
            | Self::UnknownVersion { .. }
            | Self::Diverged { .. } => Kind::WrongState,
            Self::Task(crate::task::Error::UnknownVersion { .. }) => Kind::WrongState,
            Self::Task(crate::task::Error::Damaged(_))
            | Self::Checkpoint { .. }
            | Self::Denied(_)
            | Self::NoJournal(_)
            | Self::NoCall(_)
            | Self::Broke(_)
            | Self::Host(_) => Kind::Internal,
        }
    }

    /// Whether the same run may be driven later without anything being mended.
    fn may_pass(&self) -> bool {
        match self {
            Self::Store(crate::store::Error::Backend { .. }) | Self::Workspace(_) | Self::Bench(_) => true,
            Self::Broke(_) | Self::Host(_) => true,
            Self::Store(_)
            | Self::Task(_)
            | Self::Policy(_)
            | Self::Model(_)
            | Self::Denied(_)
            | Self::UnknownVersion { .. }
            | Self::Checkpoint { .. }
            | Self::Diverged { .. }
            | Self::NoJournal(_)
            | Self::NoCall(_)
            | Self::PolicyChanged { .. }
            | Self::Incompatible { .. }
            | Self::Recording(_)
            | Self::NoApproval(_)
            | Self::NothingToApprove { .. }
            | Self::Decided { .. }
            | Self::Budgets(_)
            | Self::Invalid(_)
            | Self::WrongState { .. } => false,
        }
    }

    /// Stable reason for clients.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Store(crate::store::Error::KeyReused { .. }) => "IDEMPOTENCY_KEY_REUSED",
            Self::Store(crate::store::Error::NotFound { .. }) => "NOT_FOUND",
            Self::Store(crate::store::Error::Owned { .. }) => "RUN_OWNED",
            Self::Store(crate::store::Error::Ended { .. }) => "RUN_ENDED",
            Self::Store(crate::store::Error::UnknownVersion { .. })
            | Self::Task(crate::task::Error::UnknownVersion { .. })
            | Self::UnknownVersion { .. } => "UNKNOWN_FORMAT_VERSION",
            Self::Store(_) => "STORE",
            Self::Task(crate::task::Error::Damaged(_)) => "INTERNAL",
            Self::Policy(_) => "POLICY",
            Self::Model(_) => "MODEL",
            Self::Workspace(_) => "WORKSPACE",
            Self::Bench(_) => "SANDBOX",
            Self::Checkpoint { .. }
            | Self::Denied(_)
            | Self::NoJournal(_)
            | Self::NoCall(_)
            | Self::Broke(_)
            | Self::Host(_) => "INTERNAL",
            Self::NoApproval(_) | Self::NothingToApprove { .. } => "NO_OPEN_APPROVAL",
            Self::Decided { .. } => "ALREADY_DECIDED",
            Self::Invalid(_) => "INVALID",
            Self::Budgets(_) => "BUDGETS",
            Self::WrongState { .. } => "WRONG_STATE",
            Self::Diverged { .. } => "CHECKPOINT_DIVERGED",
            Self::PolicyChanged { .. } => "POLICY_CHANGED",
            Self::Incompatible { mismatches, .. } => mismatches
                .first()
                .map_or("INCOMPATIBLE", |mismatch| mismatch.ground.reason()),
            Self::Recording(_) => "RECORDING",
        }
    }
}
