//! What every face asks of the fleet. Each call finds its member and gives it an order, or enters it.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use super::Error;
use super::activity::Busy;
use super::ask::check_variable;
use super::create::MEMORY_SNAPSHOT;
use super::execs::{Attached, Entry, ExecView, Launch, Offsets, Start};
use super::maker::{Maker, blocking};
use super::member::{Facts, Member, Order, View};
use super::nursery::Nursery;
use super::pool::{Stock, WarmPool};
use super::quota::Quota;
use super::registry::{Query, Registry};
use super::snapshot::{self, SnapshotInfo};
use super::state::{Cause, Denied, End};
use super::trail::{Ids, Trail, actor};
use crate::border::Borders;
use crate::clock::{Clock, Timestamp};
use crate::ids::{SandboxId, SnapshotId};
use crate::sandbox::backend::Backends;
use crate::sandbox::disk::Holds;
use crate::sandbox::{self, Sandbox, Usage};
use crate::store::Store;
use crate::tasks::Tasks;
use crate::workdir::WorkDirs;
use crate::workspace::{Pool, Revision};

/// Ended sandboxes that may wait for the removal of their traces.
const MOST_CLEANUPS: usize = 64;
/// How long the record may take to be brought up to date at the end.
const LAST_RECORDS: Duration = Duration::from_secs(5);
/// How long after its guest is heard no more a sandbox may take to be known as ended.
const SETTLE: Duration = Duration::from_millis(500);

/// What a server's end means for its sandboxes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum OnShutdown {
    /// They stay, for the next server.
    #[default]
    Keep,
    /// They end with it.
    End,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Sandboxes that there may be at once.
    pub max_sandboxes: usize,
    pub on_shutdown: OnShutdown,
    pub stocks: Vec<Stock>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            max_sandboxes: 100,
            on_shutdown: OnShutdown::Keep,
            stocks: Vec::new(),
        }
    }
}

/// What a snapshot is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// The workspace.
    Files,
    /// All that runs, too.
    Memory,
}

/// A snapshot that was taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Taken {
    pub revision: Revision,
    /// With [`What::Memory`].
    pub memory: Option<SnapshotId>,
}

/// Whom a signal goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Aim {
    /// The command's process group.
    Group,
    /// Every process of the command.
    Tree,
}

/// What a fleet is made of.
#[derive(Debug, Clone)]
pub struct Parts {
    pub data_dir: PathBuf,
    pub backends: Backends,
    pub trees: Pool,
    pub work_dirs: WorkDirs,
    pub store: Arc<dyn Store>,
    pub clock: Arc<dyn Clock>,
    /// Without these a policy that names a network is refused.
    pub borders: Option<Borders>,
}

/// All directly used sandboxes of one server; clones share it.
#[derive(Debug, Clone)]
pub struct Fleet(Arc<Inner>);

#[derive(Debug)]
pub(super) struct Inner {
    pub config: Config,
    pub maker: Maker,
    pub registry: Registry,
    pub quota: Quota,
    pub pool: WarmPool,
    pub nursery: Nursery,
    pub trail: Trail,
    pub cleanups: Arc<Semaphore>,
    pub clock: Arc<dyn Clock>,
    pub tasks: Tasks,
    /// Ends after all others.
    writer: Tasks,
}

impl Inner {
    /// # Errors
    /// When nothing new may be begun now.
    pub fn check(&self) -> Result<(), Error> {
        match self.tasks.stopping().is_cancelled() {
            true => Err(Error::Stopping),
            false => self.trail.check(),
        }
    }
}

/// A sandbox as it stands.
#[derive(Debug, Clone, PartialEq)]
pub struct Info {
    pub id: SandboxId,
    pub facts: Facts,
    pub view: View,
}

impl Info {
    pub(super) fn of(member: &Member) -> Self {
        Self {
            id: member.id.clone(),
            facts: member.facts.clone(),
            view: member.view.borrow().clone(),
        }
    }
}

/// A sandbox that something is done in: it does not become idle meanwhile.
#[derive(Debug)]
pub struct Visit {
    member: Arc<Member>,
    sandbox: Arc<Sandbox>,
    trail: Trail,
    by: String,
    _busy: Busy,
}

impl Visit {
    pub fn sandbox(&self) -> &Sandbox {
        &self.sandbox
    }

    /// That the sandbox is over, once it is.
    pub fn over(&self) -> Option<Error> {
        let end = self.member.view.borrow().state.end().cloned();
        end.map(|end| self.member.denied(Denied::Over(end)))
    }

    /// What went wrong with it: how the sandbox ended, when that is why its guest was lost.
    pub async fn failed(&self, error: sandbox::Error) -> Error {
        if let sandbox::Error::GuestLost { .. } = error {
            let mut view = self.member.view.clone();
            let settled = view.wait_for(|view| view.state.end().is_some());
            let _ = tokio::time::timeout(SETTLE, settled).await;
            if let Some(over) = self.over() {
                return over;
            }
        }
        error.into()
    }

    /// Puts what was done on the record.
    pub async fn record(&self, action: &str, outcome: &str, details: Value) {
        let ids = Ids {
            sandbox: self.sandbox.id(),
            exec: None,
        };
        self.trail.put(&actor(&self.by), action, outcome, ids, details).await;
    }
}

impl Fleet {
    /// A fleet with nothing in it; [`Fleet::recover`] finds what an earlier server left.
    ///
    /// # Errors
    /// For a pool that cannot be kept here.
    pub async fn new(parts: Parts, config: Config) -> Result<Self, Error> {
        let maker = Maker::new(
            &parts.data_dir,
            parts.backends,
            parts.trees,
            parts.work_dirs,
            parts.borders,
        )?;
        let pool = WarmPool::new(&config.stocks, &maker).await?;
        let (trail, writer) = Trail::new(parts.store, Arc::clone(&parts.clock));
        let (tasks, writers) = (Tasks::default(), Tasks::default());
        writers.spawn("audit records of sandboxes", |stop| writer.run(stop));
        Ok(Self(Arc::new(Inner {
            nursery: Nursery::new(maker.clone(), tasks.clone()),
            quota: Quota::new(config.max_sandboxes),
            config,
            maker,
            registry: Registry::default(),
            pool,
            trail,
            cleanups: Arc::new(Semaphore::new(MOST_CLEANUPS)),
            clock: parts.clock,
            tasks,
            writer: writers,
        })))
    }

    pub(super) fn inner(&self) -> &Arc<Inner> {
        &self.0
    }

    /// Begins to make sandboxes, and working directories for more, ahead. To be called once the fleet has recovered.
    pub fn fill_pool(&self) {
        let work_dirs = self.0.maker.work_dirs().clone();
        self.0.tasks.spawn("working directories", |stop| work_dirs.keep(stop));
        if !self.0.config.stocks.is_empty() {
            let (pool, maker, nursery) = (self.0.pool.clone(), self.0.maker.clone(), self.0.nursery.clone());
            self.0.tasks.spawn("pool", |stop| pool.keep(maker, nursery, stop));
        }
    }

    /// How many sandboxes are parked, by stock.
    pub fn parked(&self) -> Vec<usize> {
        self.0.pool.parked()
    }

    /// # Errors
    /// [`Error::NotFound`].
    pub fn get(&self, id: &str) -> Result<Info, Error> {
        Ok(Info::of(self.0.registry.find(id)?.as_ref()))
    }

    /// Newest first.
    pub fn list(&self, query: &Query) -> Vec<Info> {
        let found = self.0.registry.list(query);
        found.iter().map(|member| Info::of(member)).collect()
    }

    pub async fn pause(&self, id: &str, by: String) -> Result<Info, Error> {
        self.order(id, |done| Order::Pause { by, done })
            .await
            .map(|(info, ())| info)
    }

    pub async fn resume(&self, id: &str, by: String) -> Result<Info, Error> {
        self.order(id, |done| Order::Resume { by, done })
            .await
            .map(|(info, ())| info)
    }

    /// Sets its time to `ttl` from now, but not beyond the wall time that its policy gives it in all.
    ///
    /// # Errors
    /// [`Error::Denied`] when its time was over already: it is not saved.
    pub async fn renew(&self, id: &str, ttl: Duration, by: String) -> Result<Info, Error> {
        if ttl.is_zero() {
            return Err(Error::Invalid(
                "`ttl` is longer than nothing; Kill ends a sandbox".into(),
            ));
        }
        let renewed = self.order(id, |done| Order::Renew { ttl, by, done }).await;
        renewed.map(|(info, ())| info)
    }

    /// Takes the workspace as it is, or all of it with what runs in it; durable on return. It goes on.
    ///
    /// # Errors
    /// [`Error::NoMemorySnapshots`] where its backend cannot do that for its isolation.
    pub async fn snapshot(&self, id: &str, what: What, by: String) -> Result<Taken, Error> {
        self.0.check()?;
        let member = self.0.registry.find(id)?;
        if what == What::Memory && member.facts.lacks.iter().any(|lack| lack == MEMORY_SNAPSHOT) {
            return Err(Error::NoMemorySnapshots {
                id: member.id.clone(),
                backend: member.facts.backend,
                isolation: member.facts.isolation,
            });
        }
        let taken = self.order(id, |done| Order::Snapshot { what, by, done }).await;
        taken.map(|(_, taken)| taken)
    }

    /// The snapshots with memory that there are, newest first.
    pub async fn snapshots(&self) -> Result<Vec<SnapshotInfo>, Error> {
        let data_dir = self.0.maker.data_dir().to_owned();
        blocking(move || snapshot::list(&data_dir)).await
    }

    /// Removes a snapshot with memory; sandboxes that were made from it stay.
    ///
    /// # Errors
    /// [`Error::NoSnapshot`].
    pub async fn delete_snapshot(&self, id: &SnapshotId, by: &str) -> Result<(), Error> {
        self.0.check()?;
        let (data_dir, of) = (self.0.maker.data_dir().to_owned(), id.clone());
        let kept = blocking(move || {
            let kept = snapshot::find(&data_dir, &of).map(|(kept, _)| kept.sandbox);
            // Also one that cannot be read.
            snapshot::delete(&data_dir, &of).map(|was_there| (was_there, kept.ok()))
        });
        let (was_there, sandbox) = kept.await?;
        if let Some(sandbox) = sandbox.filter(|_| was_there) {
            let ids = Ids {
                sandbox: &sandbox,
                exec: None,
            };
            let details = json!({ "snapshot": id });
            self.0
                .trail
                .put(&actor(by), "snapshot.deleted", "ok", ids, details)
                .await;
        }
        match was_there {
            true => Ok(()),
            false => Err(Error::NoSnapshot(id.to_string())),
        }
    }

    async fn order<T>(
        &self,
        id: &str,
        order: impl FnOnce(tokio::sync::oneshot::Sender<Result<T, Error>>) -> Order,
    ) -> Result<(Info, T), Error> {
        let member = self.0.registry.find(id)?;
        let answer = member.order(order).await?;
        Ok((Info::of(&member), answer))
    }

    /// Ends it; answers when nothing in it runs any more. Fine when it has ended.
    pub async fn kill(&self, id: &str, by: String, reason: String) -> Result<Info, Error> {
        let member = self.0.registry.find(id)?;
        let end = End {
            cause: Cause::Killed,
            by,
            reason,
            at: self.0.clock.now(),
        };
        member.end(end).await?;
        Ok(Info::of(&member))
    }

    /// Starts a command.
    ///
    /// # Errors
    /// [`Error::Sandbox`] when there is no such program, directory or user.
    pub async fn exec(&self, id: &str, start: Start) -> Result<Attached, Error> {
        self.0.check()?;
        if start.argv.is_empty() {
            return Err(Error::Invalid("`argv` is empty".into()));
        }
        for name in start.env.keys() {
            check_variable(name)?;
        }
        let member = self.0.registry.find(id)?;
        let (sandbox, busy) = member.enter()?;
        let launch = Launch {
            member: &member,
            sandbox: &sandbox,
            busy,
            trail: &self.0.trail,
            tasks: &self.0.tasks,
        };
        launch.run(start).await
    }

    /// Follows a command that runs, or ended lately, from these bytes on.
    pub fn attach(&self, id: &str, exec: &str, at: Offsets) -> Result<Attached, Error> {
        Attached::also(&self.find_exec(id, exec)?, at)
    }

    fn find_exec(&self, id: &str, exec: &str) -> Result<Arc<Entry>, Error> {
        let member = self.0.registry.find(id)?;
        member.execs.find(&member.id, exec)
    }

    /// Commands, oldest first.
    pub fn execs(&self, id: &str) -> Result<Vec<ExecView>, Error> {
        Ok(self.0.registry.find(id)?.execs.list())
    }

    /// Sends a signal to a command's process group, or to all of its processes; 0 only looks whether it runs.
    ///
    /// # Errors
    /// [`Error::ExecEnded`].
    pub async fn signal(&self, id: &str, exec: &str, signal: i32, to: Aim, by: &str) -> Result<(), Error> {
        if !(0..=64).contains(&signal) {
            return Err(Error::Invalid(format!("`signal`: there is no signal {signal}")));
        }
        self.signal_entry(id, &*self.find_exec(id, exec)?, signal, to, by).await
    }

    /// As [`Self::signal`], to a command that the caller has already.
    pub async fn signal_entry(&self, id: &str, entry: &Entry, signal: i32, to: Aim, by: &str) -> Result<(), Error> {
        let ended = || Error::ExecEnded(entry.id.clone());
        if entry.log.finish().is_some() {
            return Err(ended());
        }
        if signal != 0 {
            let sent = match to {
                Aim::Group => entry.control().signal(signal).await,
                Aim::Tree => entry.control().signal_tree(signal).await,
            };
            sent.map_err(|_| ended())?;
            let sandbox = self.get(id)?.id;
            let ids = Ids {
                sandbox: &sandbox,
                exec: Some(entry.id.as_str()),
            };
            let details = json!({ "signal": signal });
            self.0.trail.put(&actor(by), "exec.signalled", "ok", ids, details).await;
        }
        Ok(())
    }

    /// Enters a sandbox, to do something with its files.
    ///
    /// # Errors
    /// [`Error::Denied`] unless it runs.
    pub fn visit(&self, id: &str, by: &str) -> Result<Visit, Error> {
        self.0.check()?;
        let member = self.0.registry.find(id)?;
        let (sandbox, busy) = member.enter()?;
        Ok(Visit {
            member,
            sandbox,
            trail: self.0.trail.clone(),
            by: by.to_owned(),
            _busy: busy,
        })
    }

    /// What its control group counts, and what its files take up where that is limited; not a sign of life.
    pub async fn usage(&self, id: &str) -> Result<(Usage, Option<Holds>), Error> {
        let member = self.0.registry.find(id)?;
        let end = member.view.borrow().state.end().cloned();
        match (end, member.sandbox.get()) {
            (Some(end), _) => Err(member.denied(Denied::Over(end))),
            (None, None) => Err(member.denied(Denied::NotReady)),
            (None, Some(sandbox)) => {
                let directory = member.directory.get().cloned();
                let directory = directory.filter(|_| member.facts.limits.disk.is_some());
                let holds = blocking(move || directory.and_then(|directory| directory.holds().ok()));
                let (usage, holds) = tokio::join!(sandbox.usage(), holds);
                Ok((usage?, holds))
            }
        }
    }

    pub fn now(&self) -> Timestamp {
        self.0.clock.now()
    }

    /// A task of the fleet's own that ends with it.
    pub fn spawn<F>(&self, name: &'static str, task: impl FnOnce(CancellationToken) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.0.tasks.spawn(name, task);
    }

    /// Is cancelled when the fleet stops.
    pub fn stopping(&self) -> CancellationToken {
        self.0.tasks.stopping()
    }

    /// Waits until all that was done so far is on the audit record.
    pub async fn flush(&self) {
        self.0.trail.flush().await;
    }

    /// Stops; what becomes of the sandboxes is told by [`Config::on_shutdown`]. Gives the names of what still ran after
    /// `deadline`.
    pub async fn shut_down(&self, deadline: Duration) -> Vec<String> {
        self.0.quota.close();
        let mut still = self.0.tasks.shut_down(deadline).await;
        if tokio::time::timeout(LAST_RECORDS, self.0.trail.flush()).await.is_err() {
            still.push("audit records of sandboxes".to_owned());
        }
        still.extend(self.0.writer.shut_down(LAST_RECORDS).await);
        still
    }
}
