//! A store that answers late, fails, or fails after what was written has become durable: what a network does to a database.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;

use crate::audit;
use crate::ids::{RunId, TaskId};
use crate::run::Entry;
use crate::store::{
    Checkpoint, Commit, Created, Error, Idempotency, NewTask, Owner, Pending, Query, RunRecord, Signal, Store,
};

/// The longest that an answer is late.
const LATE: Duration = Duration::from_millis(300);

/// How often what goes wrong; the same seed gives the same faults in the same order of writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Faults {
    pub seed: u64,
    /// Of 1,000 writes.
    pub per_mille: u64,
}

impl Faults {
    /// What `EXUVIA_STORE_FAULTS` says.
    ///
    /// # Errors
    /// When it is set to something else than `SEED:PER_MILLE`.
    pub fn from_env() -> Result<Option<Self>, String> {
        let Ok(text) = std::env::var("EXUVIA_STORE_FAULTS") else {
            return Ok(None);
        };
        let parsed = text.split_once(':').and_then(|(seed, per_mille)| {
            Some(Self {
                seed: seed.parse().ok()?,
                per_mille: per_mille.parse().ok().filter(|most| *most <= 1000)?,
            })
        });
        parsed
            .map(Some)
            .ok_or_else(|| format!("`{text}` is not `SEED:PER_MILLE`"))
    }
}

/// What becomes of one write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Well,
    Late(Duration),
    /// It never arrived.
    Refused,
    /// It is durable, and its answer was lost.
    Lost,
}

/// A store with faults in front of it. Reads go through: what cannot be read is asked for again anyway.
#[derive(Debug)]
pub struct Faulty {
    store: Arc<dyn Store>,
    faults: Faults,
    writes: AtomicU64,
    /// Writes that did not go well.
    hurt: AtomicU64,
}

impl Faulty {
    pub fn new(store: Arc<dyn Store>, faults: Faults) -> Self {
        Self {
            store,
            faults,
            writes: AtomicU64::new(0),
            hurt: AtomicU64::new(0),
        }
    }

    /// How many writes did not go well so far.
    pub fn hurt(&self) -> u64 {
        self.hurt.load(Ordering::SeqCst)
    }

    /// One step of SplitMix64 (Steele, Lea, Flood 2014) for each write.
    fn fate(&self) -> Fate {
        let nth = self.writes.fetch_add(1, Ordering::SeqCst) + 1;
        let mut mixed = self.faults.seed.wrapping_add(nth.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        if mixed % 1000 >= self.faults.per_mille {
            return Fate::Well;
        }
        self.hurt.fetch_add(1, Ordering::SeqCst);
        match (mixed >> 32) % 3 {
            0 => Fate::Late(LATE.mul_f64(((mixed >> 40) % 100) as f64 / 100.0)),
            1 => Fate::Refused,
            _ => Fate::Lost,
        }
    }

    async fn write<T>(&self, doing: &'static str, write: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
        let failed = |why: &'static str| Error::Backend {
            doing,
            source: why.into(),
        };
        match self.fate() {
            Fate::Well => write.await,
            Fate::Late(by) => {
                let answer = write.await;
                tokio::time::sleep(by).await;
                answer
            }
            Fate::Refused => Err(failed(
                "the connection broke before it was written (a fault that was asked for)",
            )),
            Fate::Lost => {
                write.await?;
                Err(failed(
                    "the connection broke after it was written (a fault that was asked for)",
                ))
            }
        }
    }
}

#[async_trait]
impl Store for Faulty {
    async fn create(&self, task: NewTask) -> Result<Created, Error> {
        self.write("create a task", self.store.create(task)).await
    }

    async fn known(&self, key: &Idempotency) -> Result<Option<RunRecord>, Error> {
        self.store.known(key).await
    }

    async fn run(&self, run: &RunId) -> Result<RunRecord, Error> {
        self.store.run(run).await
    }

    async fn run_of_task(&self, task: &TaskId) -> Result<RunRecord, Error> {
        self.store.run_of_task(task).await
    }

    async fn spec(&self, task: &TaskId) -> Result<serde_json::Value, Error> {
        self.store.spec(task).await
    }

    async fn list(&self, query: &Query) -> Result<Vec<RunRecord>, Error> {
        self.store.list(query).await
    }

    async fn unfinished(&self) -> Result<Vec<RunRecord>, Error> {
        self.store.unfinished().await
    }

    async fn claim(&self, run: &RunId, owner: &Owner, dead: Option<&Owner>) -> Result<RunRecord, Error> {
        self.write("claim a run", self.store.claim(run, owner, dead)).await
    }

    async fn release(&self, run: &RunId, fence: u64) -> Result<(), Error> {
        self.write("release a run", self.store.release(run, fence)).await
    }

    async fn commit(&self, commit: Commit) -> Result<(), Error> {
        self.write("commit", self.store.commit(commit)).await
    }

    async fn journal(&self, run: &RunId, after: u64, limit: usize) -> Result<Vec<Entry>, Error> {
        self.store.journal(run, after, limit).await
    }

    async fn checkpoint(&self, run: &RunId, revision: Option<u64>) -> Result<Checkpoint, Error> {
        self.store.checkpoint(run, revision).await
    }

    async fn signal(&self, run: &RunId, signal: Signal) -> Result<(), Error> {
        self.write("signal a run", self.store.signal(run, signal)).await
    }

    async fn inbox(&self, run: &RunId) -> Result<Vec<Pending>, Error> {
        self.store.inbox(run).await
    }

    async fn discard(&self, run: &RunId, fence: u64, signal: u64) -> Result<(), Error> {
        self.write("discard a signal", self.store.discard(run, fence, signal))
            .await
    }

    async fn data_version(&self) -> Result<u64, Error> {
        self.store.data_version().await
    }

    async fn audit(&self, records: Vec<audit::Record>) -> Result<(), Error> {
        self.write("append to the audit log", self.store.audit(records)).await
    }

    async fn audit_log(&self, after: u64, limit: usize) -> Result<Vec<audit::Sealed>, Error> {
        self.store.audit_log(after, limit).await
    }
}
