//! What a store must accept and refuse, as pure functions: every implementation asks these inside its transaction.
//!
//! The order of the checks is a promise: an ended run answers [`Error::Ended`] whoever asks, then the fence, then the position.

use super::{Commit, Error, Idempotency, NewTask, Owner, RunRecord};
use crate::clock::Timestamp;
use crate::ids::{RunId, TaskId};
use crate::run::event::FORMAT_VERSION;

/// Whether a new task is whole: first entry, first checkpoint and record agree.
pub(super) fn admit(task: &NewTask) -> Result<(), Error> {
    let what = || format!("the new task `{}`", task.record.task);
    written_here(what, task.first.format_version)?;
    written_here(what, task.checkpoint.format_version)?;
    whole(
        what,
        task.first.seq == task.record.base.map_or(0, |base| base.seq) + 1,
        "its first entry does not come next",
    )?;
    whole(
        what,
        task.record.base.is_none() || task.record.parent.is_some(),
        "it has a base and no parent",
    )?;
    whole(
        what,
        task.checkpoint.revision == task.record.base.map_or(0, |base| base.revision + 1),
        "its first checkpoint does not have the next revision",
    )?;
    let (mut seq, mut revision) = (task.first.seq, task.checkpoint.revision);
    for entry in task.recorded.iter().flat_map(|recorded| &recorded.entries) {
        written_here(what, entry.format_version)?;
        seq += 1;
        whole(
            what,
            entry.seq == seq,
            "its entries are not numbered one after the other",
        )?;
    }
    for checkpoint in task.recorded.iter().flat_map(|recorded| &recorded.checkpoints) {
        written_here(what, checkpoint.format_version)?;
        revision += 1;
        whole(
            what,
            checkpoint.revision == revision && checkpoint.seq <= seq,
            "its checkpoints are not numbered one after the other",
        )?;
    }
    whole(
        what,
        task.record.is_terminal == task.recorded.is_some(),
        "its first run has ended already",
    )?;
    whole(
        what,
        (seq, revision) == (task.record.seq, task.record.revision) && task.checkpoint.seq <= task.record.seq,
        "its checkpoint is not the one that its run names",
    )
}

/// The run as it is after `commit`.
pub(super) fn advance(record: &RunRecord, commit: &Commit) -> Result<RunRecord, Error> {
    open(record)?;
    if commit.fence != record.fence {
        return Err(Error::StaleFence {
            run: record.run.clone(),
            fence: commit.fence,
            found: record.fence,
        });
    }
    if commit.expected_seq != record.seq {
        return Err(Error::StaleSeq {
            run: record.run.clone(),
            expected: commit.expected_seq,
            found: record.seq,
        });
    }
    let what = || format!("the commit after entry {} of run `{}`", record.seq, record.run);
    let mut next = record.clone();
    whole(what, !commit.entries.is_empty(), "it has no entry")?;
    for entry in &commit.entries {
        written_here(what, entry.format_version)?;
        next.seq += 1;
        whole(
            what,
            entry.seq == next.seq,
            "its entries are not numbered one after the other",
        )?;
        next.updated_at = entry.at;
    }
    if let Some(checkpoint) = &commit.checkpoint {
        written_here(what, checkpoint.format_version)?;
        next.revision += 1;
        whole(
            what,
            checkpoint.revision == next.revision,
            "its checkpoint does not have the next revision",
        )?;
        whole(
            what,
            checkpoint.seq <= next.seq,
            "its checkpoint is ahead of its entries",
        )?;
    }
    next.state = commit.state.clone();
    next.is_terminal = commit.is_terminal;
    if next.is_terminal {
        next.owner = None;
    }
    Ok(next)
}

/// The run as it is once `owner` has it.
pub(super) fn claim(
    record: &RunRecord,
    owner: &Owner,
    dead: Option<&Owner>,
    now: Timestamp,
) -> Result<RunRecord, Error> {
    open(record)?;
    let is_other = |holder: &&Owner| *holder != owner && Some(*holder) != dead;
    if let Some(holder) = record.owner.as_ref().filter(is_other) {
        return Err(Error::Owned {
            run: record.run.clone(),
            pid: holder.pid,
        });
    }
    Ok(RunRecord {
        fence: record.fence + 1,
        owner: Some(owner.clone()),
        updated_at: now,
        ..record.clone()
    })
}

/// The run as it is once nobody has it; `None` when the fence is stale and nothing changes.
pub(super) fn release(record: &RunRecord, fence: u64, now: Timestamp) -> Option<RunRecord> {
    (record.fence == fence && record.owner.is_some()).then(|| RunRecord {
        owner: None,
        updated_at: now,
        ..record.clone()
    })
}

/// Whether that fence may still write (requirement E12).
pub(super) fn fenced(record: &RunRecord, fence: u64) -> Result<(), Error> {
    match record.fence {
        found if found == fence => Ok(()),
        found => Err(Error::StaleFence {
            run: record.run.clone(),
            fence,
            found,
        }),
    }
}

/// Whether the run can still be written to (requirement A5).
pub(super) fn open(record: &RunRecord) -> Result<(), Error> {
    if record.is_terminal {
        return Err(Error::Ended {
            run: record.run.clone(),
        });
    }
    Ok(())
}

/// Whether a known idempotency key was sent with the request that it belongs to.
pub(super) fn same_request(wanted: &Idempotency, body_hash: &str, task: &TaskId) -> Result<(), Error> {
    if wanted.body_hash == body_hash {
        return Ok(());
    }
    Err(Error::KeyReused {
        key: wanted.key.clone(),
        task: task.clone(),
    })
}

pub(super) fn absent(what: &'static str, id: &str) -> Error {
    Error::NotFound {
        what,
        id: id.to_owned(),
    }
}

pub(super) fn no_checkpoint(run: &RunId, revision: Option<u64>) -> Error {
    let which = revision.map_or_else(|| "newest".to_owned(), |revision| revision.to_string());
    absent("checkpoint", &format!("{run}/{which}"))
}

/// A commit that answers a signal which is not in the run's inbox.
pub(super) fn unknown_signal(run: &RunId, id: u64) -> Error {
    Error::Damaged {
        what: format!("a commit of run `{run}`"),
        reason: format!("it answers signal {id}, which is not in the inbox"),
    }
}

fn written_here(what: impl Fn() -> String, version: u32) -> Result<(), Error> {
    if version == FORMAT_VERSION {
        return Ok(());
    }
    Err(Error::UnknownVersion {
        what: what(),
        found: u64::from(version),
        known: u64::from(FORMAT_VERSION),
    })
}

fn whole(what: impl Fn() -> String, holds: bool, reason: &str) -> Result<(), Error> {
    if holds {
        return Ok(());
    }
    Err(Error::Damaged {
        what: what(),
        reason: reason.to_owned(),
    })
}
