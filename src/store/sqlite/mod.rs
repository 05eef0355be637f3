//! The store on SQLite: `exuvia.db` in the data directory, shared by any number of processes.
//!
//! - `schema.rs`: opening, tables (`v1.sql`), versions;
//! - `writer.rs`: the write thread and its group commit; `readers.rs`: reads off the async threads;
//! - `rows.rs`: what rows mean, each way; this file: one method a promise.
//!
//! Must not know: what a run may do. That is `rules.rs`, asked inside the write transaction.

mod readers;
mod rows;
mod schema;
#[cfg(test)]
mod tests;
mod writer;

use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use rusqlite::params;

use self::readers::Readers;
use self::writer::Writer;
use super::{
    Checkpoint, Commit, Created, Error, Idempotency, NewTask, Owner, Pending, Query, RunRecord, Signal, Store, format,
    rules,
};
use crate::audit;
use crate::clock::Clock;
use crate::ids::{RunId, TaskId};
use crate::run::Entry;

#[derive(Debug)]
pub struct Sqlite {
    writer: Writer,
    readers: Readers,
    clock: Arc<dyn Clock>,
}

impl Sqlite {
    /// Opens the store of a data directory and makes what is missing of it: the directory for its owner alone (0700), the
    /// files too (0600).
    ///
    /// # Errors
    /// [`Error::UnknownVersion`] when a newer build made it, [`Error::Damaged`] when it is no such store; neither changes it.
    pub fn open(dir: &Path, clock: Arc<dyn Clock>) -> Result<Self, Error> {
        let connection = schema::prepare(dir)?;
        Ok(Self {
            writer: Writer::start(connection)?,
            readers: Readers::new(dir.to_owned()),
            clock,
        })
    }

    /// Opens a store that is there already, for reading: it makes, migrates and writes nothing.
    ///
    /// # Errors
    /// [`Error::NotFound`]; [`Error::UnknownVersion`] also for an older one, which only a writer brings up to date.
    pub fn read_only(dir: &Path, clock: Arc<dyn Clock>) -> Result<Self, Error> {
        if !Self::exists(dir) {
            return Err(rules::absent("store in", &dir.display().to_string()));
        }
        schema::require(&schema::connect(dir)?)?;
        Ok(Self {
            writer: Writer::none(),
            readers: Readers::new(dir.to_owned()),
            clock,
        })
    }

    /// Whether a data directory has a store, without making one.
    pub fn exists(dir: &Path) -> bool {
        schema::path(dir).is_file()
    }
}

/// Why a transaction's work did not go through.
#[derive(Debug)]
enum Fail {
    Refused(Error),
    Sql(rusqlite::Error),
}

impl Fail {
    fn into_error(self, doing: &'static str) -> Error {
        use rusqlite::ErrorCode::{DatabaseCorrupt, NotADatabase};
        match self {
            Self::Refused(error) => error,
            Self::Sql(error) if matches!(error.sqlite_error_code(), Some(NotADatabase | DatabaseCorrupt)) => {
                Error::Damaged {
                    what: "the store's database".to_owned(),
                    reason: error.to_string(),
                }
            }
            Self::Sql(error) => Error::Backend {
                doing,
                source: Box::new(error),
            },
        }
    }
}

impl From<Error> for Fail {
    fn from(error: Error) -> Self {
        Self::Refused(error)
    }
}

impl From<rusqlite::Error> for Fail {
    fn from(error: rusqlite::Error) -> Self {
        Self::Sql(error)
    }
}

#[async_trait]
impl Store for Sqlite {
    async fn create(&self, task: NewTask) -> Result<Created, Error> {
        rules::admit(&task)?;
        let spec = format::encode(&task.spec);
        let first = format::encode(&task.first);
        let checkpoint = format::encode(&task.checkpoint);
        self.writer
            .write("create a task", move |db| {
                let record = task.record;
                if let Some(wanted) = &task.idempotency
                    && let Some((body_hash, known)) = rows::find_key(db, &wanted.key)?
                {
                    rules::same_request(wanted, &body_hash, &known)?;
                    return Ok(Created::Known(rows::newest_run(db, &known)?));
                }
                db.prepare_cached("INSERT INTO tasks (task, spec) VALUES (?1, ?2)")?
                    .execute(params![record.task.as_str(), spec])?;
                if let Some(new) = &task.idempotency {
                    db.prepare_cached("INSERT INTO idempotency (key, body_hash, task) VALUES (?1, ?2, ?3)")?
                        .execute(params![new.key, new.body_hash, record.task.as_str()])?;
                }
                if let (Some(parent), Some(_)) = (&record.parent, record.base) {
                    rows::find_run(db, parent)?;
                }
                let id = rows::insert_run(db, &record)?;
                rows::insert_entry(db, id, task.first.seq, &first)?;
                rows::insert_checkpoint(db, id, task.checkpoint.revision, &checkpoint)?;
                for entry in task.recorded.iter().flat_map(|recorded| &recorded.entries) {
                    rows::insert_entry(db, id, entry.seq, &format::encode(entry))?;
                }
                for checkpoint in task.recorded.iter().flat_map(|recorded| &recorded.checkpoints) {
                    rows::insert_checkpoint(db, id, checkpoint.revision, &format::encode(checkpoint))?;
                }
                rows::append_audit(db, task.audit)?;
                Ok(Created::New(record))
            })
            .await
    }

    async fn known(&self, key: &Idempotency) -> Result<Option<RunRecord>, Error> {
        let wanted = key.clone();
        self.readers
            .read("look up an idempotency key", move |db| {
                let Some((body_hash, task)) = rows::find_key(db, &wanted.key)? else {
                    return Ok(None);
                };
                rules::same_request(&wanted, &body_hash, &task)?;
                rows::newest_run(db, &task).map(Some)
            })
            .await
    }

    async fn run(&self, run: &RunId) -> Result<RunRecord, Error> {
        let run = run.clone();
        self.readers
            .read("read a run", move |db| Ok(rows::find_run(db, &run)?.1))
            .await
    }

    async fn run_of_task(&self, task: &TaskId) -> Result<RunRecord, Error> {
        let task = task.clone();
        self.readers
            .read("read a run", move |db| rows::newest_run(db, &task))
            .await
    }

    async fn spec(&self, task: &TaskId) -> Result<serde_json::Value, Error> {
        let task = task.clone();
        self.readers.read("read a task", move |db| rows::spec(db, &task)).await
    }

    async fn list(&self, query: &Query) -> Result<Vec<RunRecord>, Error> {
        let query = query.clone();
        self.readers.read("list runs", move |db| rows::list(db, &query)).await
    }

    async fn unfinished(&self) -> Result<Vec<RunRecord>, Error> {
        self.readers.read("list runs", rows::unfinished).await
    }

    async fn claim(&self, run: &RunId, owner: &Owner, dead: Option<&Owner>) -> Result<RunRecord, Error> {
        let (run, owner, dead) = (run.clone(), owner.clone(), dead.cloned());
        let now = self.clock.now();
        self.writer
            .write("claim a run", move |db| {
                let (id, record) = rows::find_run(db, &run)?;
                let claimed = rules::claim(&record, &owner, dead.as_ref(), now)?;
                rows::update_run(db, id, &claimed)?;
                Ok(claimed)
            })
            .await
    }

    async fn release(&self, run: &RunId, fence: u64) -> Result<(), Error> {
        let run = run.clone();
        let now = self.clock.now();
        self.writer
            .write("release a run", move |db| {
                let (id, record) = rows::find_run(db, &run)?;
                match rules::release(&record, fence, now) {
                    Some(released) => rows::update_run(db, id, &released),
                    None => Ok(()),
                }
            })
            .await
    }

    async fn commit(&self, commit: Commit) -> Result<(), Error> {
        let entries: Vec<_> = commit.entries.iter().map(format::encode).collect();
        let checkpoint = commit.checkpoint.as_ref().map(format::encode);
        self.writer
            .write("commit", move |db| {
                let (id, record) = rows::find_run(db, &commit.run)?;
                let next = rules::advance(&record, &commit)?;
                for signal in &commit.consumed {
                    if !rows::delete_signal(db, id, *signal)? {
                        return Err(rules::unknown_signal(&commit.run, *signal).into());
                    }
                }
                for (entry, text) in commit.entries.iter().zip(&entries) {
                    rows::insert_entry(db, id, entry.seq, text)?;
                }
                if let Some(text) = &checkpoint {
                    rows::insert_checkpoint(db, id, next.revision, text)?;
                }
                rows::update_run(db, id, &next)?;
                rows::append_audit(db, commit.audit)
            })
            .await
    }

    async fn journal(&self, run: &RunId, after: u64, limit: usize) -> Result<Vec<Entry>, Error> {
        let run = run.clone();
        self.readers
            .read("read a journal", move |db| rows::journal(db, &run, after, limit))
            .await
    }

    async fn checkpoint(&self, run: &RunId, revision: Option<u64>) -> Result<Checkpoint, Error> {
        let run = run.clone();
        self.readers
            .read("read a checkpoint", move |db| rows::checkpoint(db, &run, revision))
            .await
    }

    async fn signal(&self, run: &RunId, signal: Signal) -> Result<(), Error> {
        let run = run.clone();
        let text = format::encode_signal(signal);
        self.writer
            .write("signal a run", move |db| {
                let (id, record) = rows::find_run(db, &run)?;
                rules::open(&record)?;
                rows::insert_signal(db, id, &text)
            })
            .await
    }

    async fn inbox(&self, run: &RunId) -> Result<Vec<Pending>, Error> {
        let run = run.clone();
        self.readers
            .read("read an inbox", move |db| rows::inbox(db, &run))
            .await
    }

    async fn discard(&self, run: &RunId, fence: u64, signal: u64) -> Result<(), Error> {
        let run = run.clone();
        self.writer
            .write("discard a signal", move |db| {
                let (id, record) = rows::find_run(db, &run)?;
                rules::fenced(&record, fence)?;
                match rows::delete_signal(db, id, signal)? {
                    true => Ok(()),
                    false => Err(rules::unknown_signal(&run, signal).into()),
                }
            })
            .await
    }

    async fn data_version(&self) -> Result<u64, Error> {
        self.writer.data_version().await
    }

    async fn audit(&self, records: Vec<audit::Record>) -> Result<(), Error> {
        self.writer
            .write("append to the audit log", move |db| rows::append_audit(db, records))
            .await
    }

    async fn audit_log(&self, after: u64, limit: usize) -> Result<Vec<audit::Sealed>, Error> {
        self.readers
            .read("read the audit log", move |db| rows::audit_log(db, after, limit))
            .await
    }
}
