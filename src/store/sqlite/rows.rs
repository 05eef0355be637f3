//! Rows and what they mean, each way. Every function works within the caller's transaction.

use std::collections::BTreeMap;
use std::str::FromStr;

use rusqlite::{Connection, OptionalExtension, Row, named_params, params};

use super::Fail;
use crate::audit::{self, Link, Sealed};
use crate::clock::Timestamp;
use crate::ids::{RunId, TaskId};
use crate::run::Entry;
use crate::store::{Checkpoint, Error, Pending, Query, RunRecord, format, rules};

/// The row number of a run, which its other rows name it by.
pub(super) type Id = i64;

macro_rules! select_runs {
    ($rest:literal) => {
        concat!(
            "SELECT id, task, run, session, trace, parent, base, state, is_terminal, seq, revision, fence, owner, ",
            "created_at, updated_at, labels FROM runs ",
            $rest
        )
    };
}

fn record(row: &Row<'_>) -> Result<(Id, RunRecord), Fail> {
    let run: String = row.get("run")?;
    let damaged = |reason: String| Error::Damaged {
        what: format!("run `{run}`"),
        reason,
    };
    fn id<T: FromStr<Err: std::fmt::Display>>(text: &str) -> Result<T, String> {
        text.parse().map_err(|error: T::Err| error.to_string())
    }
    let text = |column: &str| row.get::<_, String>(column);
    let parent: Option<String> = row.get("parent")?;
    let base: Option<String> = row.get("base")?;
    let base = base.as_deref().map(serde_json::from_str).transpose();
    let owner: Option<String> = row.get("owner")?;
    let owner = owner.as_deref().map(serde_json::from_str).transpose();
    let labels: Result<BTreeMap<String, String>, _> = serde_json::from_str(&text("labels")?);
    let record = RunRecord {
        task: id(&text("task")?).map_err(damaged)?,
        run: id(&run).map_err(damaged)?,
        session: id(&text("session")?).map_err(damaged)?,
        trace: id(&text("trace")?).map_err(damaged)?,
        parent: parent.as_deref().map(id).transpose().map_err(damaged)?,
        base: base.map_err(|error| damaged(error.to_string()))?,
        state: text("state")?,
        is_terminal: row.get("is_terminal")?,
        seq: row.get("seq")?,
        revision: row.get("revision")?,
        fence: row.get("fence")?,
        owner: owner.map_err(|error| damaged(error.to_string()))?,
        created_at: Timestamp(row.get("created_at")?),
        updated_at: Timestamp(row.get("updated_at")?),
        labels: labels.map_err(|error| damaged(error.to_string()))?,
    };
    Ok((row.get("id")?, record))
}

pub(super) fn find_run(db: &Connection, run: &RunId) -> Result<(Id, RunRecord), Fail> {
    let mut select = db.prepare_cached(select_runs!("WHERE run = ?1"))?;
    let mut rows = select.query([run.as_str()])?;
    match rows.next()? {
        Some(row) => record(row),
        None => Err(rules::absent("run", run.as_str()).into()),
    }
}

pub(super) fn newest_run(db: &Connection, task: &TaskId) -> Result<RunRecord, Fail> {
    let mut select = db.prepare_cached(select_runs!("WHERE task = ?1 ORDER BY id DESC LIMIT 1"))?;
    let mut rows = select.query([task.as_str()])?;
    match rows.next()? {
        Some(row) => Ok(record(row)?.1),
        None => Err(rules::absent("task", task.as_str()).into()),
    }
}

pub(super) fn unfinished(db: &Connection) -> Result<Vec<RunRecord>, Fail> {
    let mut select = db.prepare_cached(select_runs!("WHERE NOT is_terminal ORDER BY created_at, run"))?;
    let mut rows = select.query([])?;
    let mut found = Vec::new();
    while let Some(row) = rows.next()? {
        found.push(record(row)?.1);
    }
    Ok(found)
}

pub(super) fn list(db: &Connection, query: &Query) -> Result<Vec<RunRecord>, Fail> {
    let mut select = db.prepare_cached(select_runs!(
        "WHERE (:states = '[]' OR state IN (SELECT value FROM json_each(:states)))
           AND NOT EXISTS (
               SELECT 1 FROM json_each(:labels) AS wanted WHERE NOT EXISTS (
                   SELECT 1 FROM json_each(runs.labels) AS label
                   WHERE label.key = wanted.key AND label.value = wanted.value))
           AND (:after_at IS NULL OR (created_at, run) < (:after_at, :after_run))
         ORDER BY created_at DESC, run DESC LIMIT :limit"
    ))?;
    let after = query.after.as_ref();
    let mut rows = select.query(named_params! {
        ":states": format::encode(&query.states),
        ":labels": format::encode(&query.labels),
        ":after_at": after.map(|(at, _)| at.0),
        ":after_run": after.map(|(_, run)| run.as_str()),
        ":limit": at_most(query.limit),
    })?;
    let mut found = Vec::new();
    while let Some(row) = rows.next()? {
        found.push(record(row)?.1);
    }
    Ok(found)
}

pub(super) fn insert_run(db: &Connection, record: &RunRecord) -> Result<Id, Fail> {
    let mut insert = db.prepare_cached(
        "INSERT INTO runs (run, task, session, trace, parent, state, is_terminal, seq, revision, fence, owner, created_at,
                           updated_at, labels, base)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15)",
    )?;
    let id = insert.insert(params![
        record.run.as_str(),
        record.task.as_str(),
        record.session.as_str(),
        record.trace.as_str(),
        record.parent.as_ref().map(RunId::as_str),
        record.state,
        record.is_terminal,
        record.seq,
        record.revision,
        record.fence,
        record.owner.as_ref().map(format::encode),
        record.created_at.0,
        record.updated_at.0,
        format::encode(&record.labels),
        record.base.as_ref().map(format::encode),
    ])?;
    Ok(id)
}

/// Writes what may change of a run.
pub(super) fn update_run(db: &Connection, id: Id, record: &RunRecord) -> Result<(), Fail> {
    let mut update = db.prepare_cached(
        "UPDATE runs SET state = ?2, is_terminal = ?3, seq = ?4, revision = ?5, fence = ?6, owner = ?7, updated_at = ?8
         WHERE id = ?1",
    )?;
    update.execute(params![
        id,
        record.state,
        record.is_terminal,
        record.seq,
        record.revision,
        record.fence,
        record.owner.as_ref().map(format::encode),
        record.updated_at.0,
    ])?;
    Ok(())
}

/// The body hash and the task that an idempotency key belongs to.
pub(super) fn find_key(db: &Connection, key: &str) -> Result<Option<(String, TaskId)>, Fail> {
    let mut select = db.prepare_cached("SELECT body_hash, task FROM idempotency WHERE key = ?1")?;
    let found: Option<(String, String)> = select
        .query_row([key], |row| Ok((row.get(0)?, row.get(1)?)))
        .optional()?;
    let Some((body_hash, task)) = found else {
        return Ok(None);
    };
    let task = task.parse().map_err(|error: crate::ids::Invalid| Error::Damaged {
        what: format!("the idempotency key `{key}`"),
        reason: error.to_string(),
    })?;
    Ok(Some((body_hash, task)))
}

pub(super) fn spec(db: &Connection, task: &TaskId) -> Result<serde_json::Value, Fail> {
    let mut select = db.prepare_cached("SELECT spec FROM tasks WHERE task = ?1")?;
    let text: Option<String> = select.query_row([task.as_str()], |row| row.get(0)).optional()?;
    let text = text.ok_or_else(|| rules::absent("task", task.as_str()))?;
    let spec = serde_json::from_str(&text).map_err(|error| Error::Damaged {
        what: format!("the request of task `{task}`"),
        reason: error.to_string(),
    })?;
    Ok(spec)
}

pub(super) fn insert_entry(db: &Connection, run: Id, seq: u64, text: &str) -> Result<(), Fail> {
    let mut insert = db.prepare_cached("INSERT INTO entries (run, seq, entry) VALUES (?1, ?2, ?3)")?;
    insert.execute(params![run, seq, text])?;
    Ok(())
}

pub(super) fn journal(db: &Connection, run: &RunId, after: u64, limit: usize) -> Result<Vec<Entry>, Fail> {
    // From the run itself to the ancestor that holds the entry after `after`.
    let mut line = Vec::new();
    let (mut holder, mut until) = (run.clone(), u64::MAX);
    loop {
        let (id, record) = find_run(db, &holder)?;
        line.push((id, until));
        match (record.parent, record.base) {
            (Some(parent), Some(base)) if after < base.seq => {
                // A child may go out from before its parent's own beginning.
                (holder, until) = (parent, until.min(base.seq));
            }
            (Some(_) | None, _) => break,
        }
    }
    let mut select = db.prepare_cached(
        "SELECT seq, entry FROM entries WHERE run = ?1 AND seq > ?2 AND seq <= ?3 ORDER BY seq LIMIT ?4",
    )?;
    let mut entries = Vec::new();
    for (id, until) in line.into_iter().rev() {
        let left = limit - entries.len();
        let mut rows = select.query(params![id, position(after), position(until), at_most(left)])?;
        while let Some(row) = rows.next()? {
            entries.push(format::decode_entry(
                run.as_str(),
                row.get(0)?,
                row.get_ref(1)?.as_str().map_err(rusqlite::Error::from)?,
            )?);
        }
    }
    Ok(entries)
}

pub(super) fn insert_checkpoint(db: &Connection, run: Id, revision: u64, text: &str) -> Result<(), Fail> {
    let mut insert = db.prepare_cached("INSERT INTO checkpoints (run, revision, checkpoint) VALUES (?1, ?2, ?3)")?;
    insert.execute(params![run, revision, text])?;
    Ok(())
}

pub(super) fn checkpoint(db: &Connection, run: &RunId, revision: Option<u64>) -> Result<Checkpoint, Fail> {
    let (mut id, mut record) = find_run(db, run)?;
    // A revision from before a fork is its parent's.
    while let (Some(parent), Some(base)) = (&record.parent, record.base)
        && revision.is_some_and(|revision| revision <= base.revision)
    {
        (id, record) = find_run(db, parent)?;
    }
    let mut select = db.prepare_cached(
        "SELECT revision, checkpoint FROM checkpoints WHERE run = ?1 AND (?2 IS NULL OR revision = ?2)
         ORDER BY revision DESC LIMIT 1",
    )?;
    let found: Option<(u64, String)> = select
        .query_row(params![id, revision.map(position)], |row| {
            Ok((row.get(0)?, row.get(1)?))
        })
        .optional()?;
    let (found, text) = found.ok_or_else(|| rules::no_checkpoint(run, revision))?;
    Ok(format::decode_checkpoint(run.as_str(), found, &text)?)
}

pub(super) fn insert_signal(db: &Connection, run: Id, text: &str) -> Result<(), Fail> {
    let mut insert = db.prepare_cached("INSERT INTO inbox (run, signal) VALUES (?1, ?2)")?;
    insert.execute(params![run, text])?;
    Ok(())
}

/// Whether it was there.
pub(super) fn delete_signal(db: &Connection, run: Id, id: u64) -> Result<bool, Fail> {
    let mut delete = db.prepare_cached("DELETE FROM inbox WHERE id = ?1 AND run = ?2")?;
    Ok(delete.execute(params![id, run])? == 1)
}

pub(super) fn inbox(db: &Connection, run: &RunId) -> Result<Vec<Pending>, Fail> {
    let (row_of_run, _) = find_run(db, run)?;
    let mut select = db.prepare_cached("SELECT id, signal FROM inbox WHERE run = ?1 ORDER BY id")?;
    let mut rows = select.query([row_of_run])?;
    let mut pending = Vec::new();
    while let Some(row) = rows.next()? {
        let (id, text): (u64, String) = (row.get(0)?, row.get(1)?);
        let signal = format::decode_signal(format_args!("signal {id} of run `{run}`"), &text)?;
        pending.push(Pending { id, signal });
    }
    Ok(pending)
}

/// Continues the audit chain from its newest entry.
pub(super) fn append_audit(db: &Connection, records: Vec<audit::Record>) -> Result<(), Fail> {
    if records.is_empty() {
        return Ok(());
    }
    let mut newest = db.prepare_cached("SELECT seq, entry FROM audit ORDER BY seq DESC LIMIT 1")?;
    let newest: Option<(u64, String)> = newest.query_row([], |row| Ok((row.get(0)?, row.get(1)?))).optional()?;
    let mut link = match newest {
        Some((seq, text)) => Link::of(&format::decode_sealed(seq, &text)?),
        None => Link::start(),
    };
    let mut insert = db.prepare_cached("INSERT INTO audit (seq, entry) VALUES (?1, ?2)")?;
    for record in records {
        let sealed = audit::seal(&link, record);
        insert.execute(params![sealed.seq, audit::write(&sealed)])?;
        link = Link::of(&sealed);
    }
    Ok(())
}

pub(super) fn audit_log(db: &Connection, after: u64, limit: usize) -> Result<Vec<Sealed>, Fail> {
    let mut select = db.prepare_cached("SELECT seq, entry FROM audit WHERE seq > ?1 ORDER BY seq LIMIT ?2")?;
    let mut rows = select.query(params![position(after), at_most(limit)])?;
    let mut entries = Vec::new();
    while let Some(row) = rows.next()? {
        let text: String = row.get(1)?;
        entries.push(format::decode_sealed(row.get(0)?, &text)?);
    }
    Ok(entries)
}

/// A position as SQLite counts; one beyond its range is beyond every row too.
fn position(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

fn at_most(limit: usize) -> i64 {
    i64::try_from(limit).unwrap_or(i64::MAX)
}
