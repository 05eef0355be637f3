//! The strict fake: a store in memory that can be told to fail around a commit.
//!
//! It keeps what a database keeps (JSON text, read version first) and asks the same `rules.rs`, so that what passes here
//! passes there. [`Memory::another`] is what a second process would open.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;

use super::{
    Base, Checkpoint, Commit, Created, Error, Idempotency, NewTask, Owner, Pending, Query, RunRecord, Signal, Store,
    format, rules,
};
use crate::audit::{self, Link};
use crate::clock::Clock;
use crate::ids::{RunId, TaskId};
use crate::run::Entry;

/// On which side of a commit the crash happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// The caller sees an error and nothing was written.
    Before,
    /// The caller sees an error although everything was written.
    After,
}

#[derive(Debug)]
pub struct Memory {
    shared: Arc<Mutex<State>>,
    clock: Arc<dyn Clock>,
    /// Writes made through this handle; changes under the lock only.
    own_writes: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    specs: HashMap<TaskId, serde_json::Value>,
    keys: HashMap<String, (String, TaskId)>,
    /// In the order of their creation.
    runs: Vec<Run>,
    audit: Vec<String>,
    signals: u64,
    writes: u64,
    commits: u64,
    faults: BTreeMap<u64, When>,
}

#[derive(Debug)]
pub(crate) struct Run {
    record: RunRecord,
    pub(crate) entries: Vec<String>,
    /// By revision.
    pub(crate) checkpoints: BTreeMap<u64, String>,
    inbox: BTreeMap<u64, String>,
}

impl Memory {
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        Self {
            shared: Arc::default(),
            clock,
            own_writes: AtomicU64::default(),
        }
    }

    /// The same store as another process would open it.
    pub fn another(&self) -> Self {
        Self {
            shared: self.shared.clone(),
            clock: self.clock.clone(),
            own_writes: AtomicU64::default(),
        }
    }

    /// Makes the `n`th call of [`Store::commit`] on this store (from 1, over all handles) end in an error. A commit that is
    /// refused by the rules counts too.
    pub fn fail_at(&self, n: u64, when: When) {
        self.state().faults.insert(n, when);
    }

    /// How often [`Store::commit`] was called.
    pub fn commits(&self) -> u64 {
        self.state().commits
    }

    /// Lets a test change what is stored behind the store's back: the entries and checkpoints of each run, the audit log.
    #[cfg(test)]
    pub(crate) fn tamper(&self, edit: impl FnOnce(&mut [Run], &mut Vec<String>)) {
        let state = &mut *self.state();
        edit(&mut state.runs, &mut state.audit);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Every write below checks first and changes last, so a panic in between left nothing half done.
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wrote(&self, state: &mut State) {
        state.writes += 1;
        self.own_writes.fetch_add(1, Ordering::SeqCst);
    }
}

impl State {
    fn find(&self, run: &RunId) -> Result<&Run, Error> {
        let found = self.runs.iter().find(|row| row.record.run == *run);
        found.ok_or_else(|| rules::absent("run", run.as_str()))
    }

    fn find_mut(&mut self, run: &RunId) -> Result<&mut Run, Error> {
        let found = self.runs.iter_mut().find(|row| row.record.run == *run);
        found.ok_or_else(|| rules::absent("run", run.as_str()))
    }

    /// The runs that hold a run's journal, from itself to its first ancestor, each with the entry and the checkpoint up to
    /// which it counts.
    fn line(&self, run: &RunId) -> Result<Vec<(&Run, Base)>, Error> {
        let everything = Base {
            seq: u64::MAX,
            revision: u64::MAX,
        };
        let mut line = vec![(self.find(run)?, everything)];
        while let Some((child, until)) = line.last()
            && let (Some(parent), Some(base)) = (&child.record.parent, child.record.base)
        {
            // A child may go out from before its parent's own beginning.
            let base = Base {
                seq: base.seq.min(until.seq),
                revision: base.revision.min(until.revision),
            };
            line.push((self.find(parent)?, base));
        }
        Ok(line)
    }

    fn newest(&self, task: &TaskId) -> Result<RunRecord, Error> {
        let newest = self.runs.iter().rev().find(|row| row.record.task == *task);
        newest
            .map(|row| row.record.clone())
            .ok_or_else(|| rules::absent("task", task.as_str()))
    }

    /// The chain's continuation, to be appended once nothing can fail any more.
    fn seal(&self, records: Vec<audit::Record>) -> Result<Vec<String>, Error> {
        let mut link = match self.audit.last() {
            Some(text) => Link::of(&format::decode_sealed(self.audit.len() as u64, text)?),
            None => Link::start(),
        };
        let mut sealed = Vec::with_capacity(records.len());
        for record in records {
            let entry = audit::seal(&link, record);
            link = Link::of(&entry);
            sealed.push(audit::write(&entry));
        }
        Ok(sealed)
    }

    fn commit(&mut self, commit: Commit) -> Result<(), Error> {
        let sealed = self.seal(commit.audit.clone())?;
        let row = self.find_mut(&commit.run)?;
        let next = rules::advance(&row.record, &commit)?;
        if let Some(id) = commit.consumed.iter().find(|id| !row.inbox.contains_key(id)) {
            return Err(rules::unknown_signal(&commit.run, *id));
        }
        commit.consumed.iter().for_each(|id| drop(row.inbox.remove(id)));
        row.entries.extend(commit.entries.iter().map(format::encode));
        if let Some(checkpoint) = &commit.checkpoint {
            row.checkpoints.insert(checkpoint.revision, format::encode(checkpoint));
        }
        row.record = next;
        self.audit.extend(sealed);
        Ok(())
    }
}

#[async_trait]
impl Store for Memory {
    async fn create(&self, task: NewTask) -> Result<Created, Error> {
        rules::admit(&task)?;
        let mut state = self.state();
        if let Some(wanted) = &task.idempotency
            && let Some((body_hash, known)) = state.keys.get(&wanted.key)
        {
            rules::same_request(wanted, body_hash, known)?;
            return Ok(Created::Known(state.newest(known)?));
        }
        let taken = state.specs.contains_key(&task.record.task) || state.find(&task.record.run).is_ok();
        if taken {
            return Err(Error::Backend {
                doing: "create a task",
                source: "the id is taken".into(),
            });
        }
        if let Some(parent) = &task.record.parent
            && task.record.base.is_some()
        {
            state.find(parent)?;
        }
        let sealed = state.seal(task.audit)?;
        state.audit.extend(sealed);
        if let Some(new) = task.idempotency {
            state.keys.insert(new.key, (new.body_hash, task.record.task.clone()));
        }
        state.specs.insert(task.record.task.clone(), task.spec);
        state.runs.push(Run {
            record: task.record.clone(),
            entries: std::iter::once(&task.first)
                .chain(task.recorded.iter().flat_map(|recorded| &recorded.entries))
                .map(format::encode)
                .collect(),
            checkpoints: std::iter::once(&task.checkpoint)
                .chain(task.recorded.iter().flat_map(|recorded| &recorded.checkpoints))
                .map(|checkpoint| (checkpoint.revision, format::encode(checkpoint)))
                .collect(),
            inbox: BTreeMap::new(),
        });
        self.wrote(&mut state);
        Ok(Created::New(task.record))
    }

    async fn known(&self, key: &Idempotency) -> Result<Option<RunRecord>, Error> {
        let state = self.state();
        let Some((body_hash, task)) = state.keys.get(&key.key) else {
            return Ok(None);
        };
        rules::same_request(key, body_hash, task)?;
        state.newest(task).map(Some)
    }

    async fn run(&self, run: &RunId) -> Result<RunRecord, Error> {
        Ok(self.state().find(run)?.record.clone())
    }

    async fn run_of_task(&self, task: &TaskId) -> Result<RunRecord, Error> {
        self.state().newest(task)
    }

    async fn spec(&self, task: &TaskId) -> Result<serde_json::Value, Error> {
        let spec = self.state().specs.get(task).cloned();
        spec.ok_or_else(|| rules::absent("task", task.as_str()))
    }

    async fn list(&self, query: &Query) -> Result<Vec<RunRecord>, Error> {
        let mut found: Vec<RunRecord> = self
            .state()
            .runs
            .iter()
            .map(|row| &row.record)
            .filter(|record| query.states.is_empty() || query.states.contains(&record.state))
            .filter(|record| {
                let carried = |(name, value)| record.labels.get(name) == Some(value);
                query.labels.iter().all(carried)
            })
            .filter(|record| match &query.after {
                Some((at, run)) => (record.created_at, &record.run) < (*at, run),
                None => true,
            })
            .cloned()
            .collect();
        found.sort_by(|a, b| (b.created_at, &b.run).cmp(&(a.created_at, &a.run)));
        found.truncate(query.limit);
        Ok(found)
    }

    async fn unfinished(&self) -> Result<Vec<RunRecord>, Error> {
        let state = self.state();
        let open = state.runs.iter().filter(|row| !row.record.is_terminal);
        let mut found: Vec<RunRecord> = open.map(|row| row.record.clone()).collect();
        found.sort_by(|a, b| (a.created_at, &a.run).cmp(&(b.created_at, &b.run)));
        Ok(found)
    }

    async fn claim(&self, run: &RunId, owner: &Owner, dead: Option<&Owner>) -> Result<RunRecord, Error> {
        let now = self.clock.now();
        let mut state = self.state();
        let row = state.find_mut(run)?;
        let claimed = rules::claim(&row.record, owner, dead, now)?;
        row.record = claimed.clone();
        self.wrote(&mut state);
        Ok(claimed)
    }

    async fn release(&self, run: &RunId, fence: u64) -> Result<(), Error> {
        let now = self.clock.now();
        let mut state = self.state();
        let row = state.find_mut(run)?;
        if let Some(released) = rules::release(&row.record, fence, now) {
            row.record = released;
            self.wrote(&mut state);
        }
        Ok(())
    }

    async fn commit(&self, commit: Commit) -> Result<(), Error> {
        let mut state = self.state();
        state.commits += 1;
        let nth = state.commits;
        let crash = || Error::Backend {
            doing: "commit",
            source: format!("simulated crash at commit {nth}").into(),
        };
        let fault = state.faults.get(&nth).copied();
        if fault == Some(When::Before) {
            return Err(crash());
        }
        state.commit(commit)?;
        self.wrote(&mut state);
        match fault {
            Some(_) => Err(crash()),
            None => Ok(()),
        }
    }

    async fn journal(&self, run: &RunId, after: u64, limit: usize) -> Result<Vec<Entry>, Error> {
        let state = self.state();
        let line = state.line(run)?;
        let rows = line.iter().rev().flat_map(|(row, until)| {
            let first = row.record.base.map_or(1, |base| base.seq + 1);
            (first..=until.seq).zip(&row.entries)
        });
        rows.filter(|(seq, _)| *seq > after)
            .take(limit)
            .map(|(seq, text)| format::decode_entry(run.as_str(), seq, text))
            .collect()
    }

    async fn checkpoint(&self, run: &RunId, revision: Option<u64>) -> Result<Checkpoint, Error> {
        let state = self.state();
        let line = state.line(run)?;
        let found = match revision {
            Some(revision) => line
                .iter()
                .filter(|(_, until)| revision <= until.revision)
                .find_map(|(row, _)| row.checkpoints.get_key_value(&revision)),
            None => line.first().and_then(|(row, _)| row.checkpoints.last_key_value()),
        };
        let (revision, text) = found.ok_or_else(|| rules::no_checkpoint(run, revision))?;
        format::decode_checkpoint(run.as_str(), *revision, text)
    }

    async fn signal(&self, run: &RunId, signal: Signal) -> Result<(), Error> {
        let mut state = self.state();
        rules::open(&state.find(run)?.record)?;
        state.signals += 1;
        let id = state.signals;
        state.find_mut(run)?.inbox.insert(id, format::encode_signal(signal));
        self.wrote(&mut state);
        Ok(())
    }

    async fn inbox(&self, run: &RunId) -> Result<Vec<Pending>, Error> {
        let state = self.state();
        let rows = state.find(run)?.inbox.iter();
        rows.map(|(id, text)| {
            let signal = format::decode_signal(format_args!("signal {id} of run `{run}`"), text)?;
            Ok(Pending { id: *id, signal })
        })
        .collect()
    }

    async fn discard(&self, run: &RunId, fence: u64, signal: u64) -> Result<(), Error> {
        let mut state = self.state();
        let row = state.find_mut(run)?;
        rules::fenced(&row.record, fence)?;
        if row.inbox.remove(&signal).is_none() {
            return Err(rules::unknown_signal(run, signal));
        }
        self.wrote(&mut state);
        Ok(())
    }

    async fn data_version(&self) -> Result<u64, Error> {
        let state = self.state();
        Ok(state.writes - self.own_writes.load(Ordering::SeqCst))
    }

    async fn audit(&self, records: Vec<audit::Record>) -> Result<(), Error> {
        let mut state = self.state();
        let sealed = state.seal(records)?;
        state.audit.extend(sealed);
        self.wrote(&mut state);
        Ok(())
    }

    async fn audit_log(&self, after: u64, limit: usize) -> Result<Vec<audit::Sealed>, Error> {
        let state = self.state();
        let rows = (1..).zip(&state.audit);
        rows.filter(|(seq, _)| *seq > after)
            .take(limit)
            .map(|(seq, text)| format::decode_sealed(seq, text))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::System;
    use crate::store::suite::{Fixture, Row, picture, sample, store_suite};

    struct InMemory(Memory);

    impl Fixture for InMemory {
        fn new() -> Self {
            Self(Memory::new(Arc::new(System)))
        }

        fn open(&self) -> Arc<dyn Store> {
            Arc::new(self.0.another())
        }

        fn tamper(&self, row: Row<'_>, from: &str, to: &str) {
            self.0.tamper(|runs, audit| {
                let places: Vec<RunId> = runs.iter().map(|row| row.record.run.clone()).collect();
                let at = |id: &RunId| places.iter().position(|run| run == id).unwrap();
                let text = match row {
                    Row::Entry(id, seq) => &mut runs[at(id)].entries[seq as usize - 1],
                    Row::Checkpoint(id, revision) => runs[at(id)].checkpoints.get_mut(&revision).unwrap(),
                    Row::Signal(id) => runs[at(id)].inbox.values_mut().next().unwrap(),
                    Row::Audit(seq) => &mut audit[seq as usize - 1],
                };
                assert!(text.contains(from));
                *text = text.replacen(from, to, 1);
            });
        }
    }

    store_suite!(InMemory);

    #[tokio::test]
    async fn a_commit_fails_on_the_side_that_was_asked_for() {
        let store = Memory::new(Arc::new(System));
        store.create(sample::task(1)).await.unwrap();
        let run = sample::task(1).record.run;
        store.fail_at(1, When::Before);
        store.fail_at(3, When::After);
        let before = picture(&store, &run).await;
        let commit = sample::step(&before.record);
        assert!(store.commit(commit.clone()).await.is_err());
        assert_eq!(picture(&store, &run).await, before);
        store.commit(commit).await.unwrap();

        let next = sample::step(&store.run(&run).await.unwrap());
        assert!(store.commit(next.clone()).await.is_err());
        assert_eq!(store.run(&run).await.unwrap().seq, 3);
        let again = store.commit(next).await;
        assert!(matches!(again, Err(Error::StaleSeq { found: 3, .. })), "{again:?}");
        assert_eq!(store.commits(), 4);
    }
}
