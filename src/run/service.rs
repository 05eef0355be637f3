//! What the outside asks of runs: submit, look, watch, signal. Faces (`api`, `cli`) are thin over this.

use std::collections::{BTreeMap, HashMap, hash_map};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::Stream;
use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, Semaphore};
use tokio_util::sync::CancellationToken;

use super::decide::Rules;
use super::driver::{self, Rest};
use super::effects::Shop;
use super::event::{Entry, Event, FORMAT_VERSION, Outcome, Submitted};
use super::grounds::Ground;
use super::session::Session;
use super::state::{self, State};
use super::{Error, commit};
use crate::audit::Mirror;
use crate::ids::{ApprovalId, RunId, TaskId, TraceId};
use crate::model::Message;
use crate::policy::{BudgetOverrides, Policies};
use crate::sandbox::{BackendName, ImageRef};
use crate::store::{Created, Idempotency, NewTask, Owner, Query, RunRecord, Signal};
use crate::task::{Model, Task};
use crate::tasks::Tasks;
use crate::workspace::{Pool, Revision};

/// How often signals of other processes on the same data directory are looked for. Those of this process are immediate.
const MAILBOX: Duration = Duration::from_millis(200);
/// Rounds of the mailbox after which the audit file is brought up to the store.
const HEADS: u64 = 25;
/// How long a signal may take to be answered before the caller is told the state as it is.
const ANSWER: Duration = Duration::from_secs(15);
/// Seconds that a run whose host or store fails waits for its next try; the last for all that follow.
const PAUSES: [u64; 8] = [1, 2, 5, 10, 30, 60, 120, 300];
/// Entries read for a watcher at a time.
const PAGE: usize = 256;

/// What a model is told before the task.
pub const SYSTEM_PROMPT: &str = include_str!("system.md");

/// Runs, as a service; clones share it.
#[derive(Debug, Clone)]
pub struct Service(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    shop: Arc<Shop>,
    pool: Pool,
    mirror: Arc<Mirror>,
    data_dir: PathBuf,
    owner: Owner,
    tasks: Tasks,
    /// Runs driven side by side; the rest stay QUEUED.
    slots: Semaphore,
    active: Mutex<HashMap<RunId, Arc<Notify>>>,
    rested: Notify,
}

/// A task as a client asks for it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Submission {
    pub prompt: String,
    pub model: Model,
    pub policy: String,
    /// `None` = an empty workspace.
    pub workspace: Option<Revision>,
    /// Whether an empty workspace is meant. Without it a check is refused where there are no files to judge.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub empty_workspace: bool,
    pub check: Option<String>,
    pub budgets: BudgetOverrides,
    pub labels: BTreeMap<String, String>,
    pub image: Option<ImageRef>,
    pub backend: Option<BackendName>,
    pub trace: Option<TraceId>,
}

/// A run as it stands: the record, the folded state, the conversation and what was asked.
#[derive(Debug, Clone)]
pub struct View {
    pub record: RunRecord,
    pub state: State,
    pub session: Session,
    pub submitted: Submitted,
    pub entries: Vec<Entry>,
}

impl View {
    /// How it ended, once it has.
    pub fn outcome(&self) -> Option<&Outcome> {
        match &self.state.phase {
            state::Phase::Ended { outcome } => Some(outcome),
            state::Phase::Queued
            | state::Phase::Reasoning { .. }
            | state::Phase::Calling { .. }
            | state::Phase::Checking { .. }
            | state::Phase::Ending { .. } => None,
        }
    }
}

impl Service {
    /// A service over these parts; drives nothing until told to.
    pub fn new(
        shop: Arc<Shop>,
        pool: Pool,
        mirror: Arc<Mirror>,
        data_dir: PathBuf,
        parallel_runs: usize,
    ) -> Result<Self, Error> {
        let service = Self(Arc::new(Inner {
            shop,
            pool,
            mirror,
            data_dir,
            owner: Owner::current().map_err(Error::Host)?,
            tasks: Tasks::default(),
            slots: Semaphore::new(parallel_runs.max(1)),
            active: Mutex::default(),
            rested: Notify::new(),
        }));
        let mailbox = service.clone();
        service.0.tasks.spawn("mailbox", move |stop| async move {
            tokio::select! {
                () = stop.cancelled() => {}
                () = mailbox.read_mail() => {}
            }
        });
        let watcher = service.clone();
        service.0.tasks.spawn("owners", move |stop| async move {
            tokio::select! {
                () = stop.cancelled() => {}
                () = watcher.watch_owners() => {}
            }
        });
        Ok(service)
    }

    pub(super) fn owner(&self) -> &Owner {
        &self.0.owner
    }

    pub fn workspaces(&self) -> &Pool {
        &self.0.pool
    }

    pub fn shop(&self) -> &Shop {
        &self.0.shop
    }

    /// Takes up every unfinished run that no living process has (requirement E16).
    pub async fn recover(&self) -> Result<Vec<RunId>, Error> {
        let mut taken = Vec::new();
        for record in self.0.shop.store.unfinished().await? {
            let is_free = record
                .owner
                .as_ref()
                .is_none_or(|owner| *owner == self.0.owner || !owner.is_alive());
            let waits = matches!(record.state.as_str(), "WAITING_APPROVAL" | "PAUSED");
            if is_free && (!waits || !self.0.shop.store.inbox(&record.run).await?.is_empty()) {
                self.drive(&record.run);
                taken.push(record.run);
            }
        }
        Ok(taken)
    }

    /// Accepts a task and starts its first run.
    ///
    /// # Errors
    /// Everything that can be known to be wrong is refused here, and nothing is stored.
    pub async fn submit(&self, submission: Submission, key: Option<String>) -> Result<RunRecord, Error> {
        let created = self.create(submission, key).await?;
        let record = match created {
            Created::New(record) | Created::Known(record) => record,
        };
        self.keep_record().await;
        if !record.is_terminal {
            self.drive(&record.run);
        }
        Ok(record)
    }

    pub(super) async fn create(&self, submission: Submission, key: Option<String>) -> Result<Created, Error> {
        let inner = &self.0;
        let body = serde_json::to_vec(&submission).expect("a submission is plain data");
        let idempotency = key.map(|key| Idempotency {
            key,
            body_hash: blake3::hash(&body).to_hex().to_string(),
        });
        // First of all: what was accepted once stays accepted, whatever has become of its policy or files since.
        if let Some(wanted) = &idempotency
            && let Some(record) = inner.shop.store.known(wanted).await?
        {
            return Ok(Created::Known(record));
        }
        if submission.prompt.trim().is_empty() {
            return Err(Error::Invalid("the prompt is empty".into()));
        }
        check_files(&submission)?;
        crate::task::check_labels(&submission.labels).map_err(Error::Invalid)?;
        let policy = Policies::load(&submission.policy, &inner.data_dir)?;
        let budgets = policy.narrow_budgets(&submission.budgets).map_err(Error::Budgets)?;
        submission.model.client()?;
        if budgets.cost_micros.is_some() && !submission.model.is_priced() {
            return Err(Error::Invalid("a cost budget needs a price for the model".into()));
        }
        let image = submission.image.unwrap_or_else(|| policy.image().clone());
        // The same content to the end of the run, whatever the name means later.
        let image = crate::sandbox::image::pinned(image, &inner.data_dir).map_err(super::bench::Error::Sandbox)?;
        let wanted = submission.backend.or(policy.backend());
        let backend = inner.shop.benches.choose(wanted, &policy, &image).await?;
        let workspace = match submission.workspace {
            Some(workspace) => {
                self.require(workspace).await?;
                workspace
            }
            None => inner.pool.empty().await?.into(),
        };
        let task = Task {
            format_version: FORMAT_VERSION,
            prompt: submission.prompt,
            model: submission.model,
            policy_name: policy.name().to_owned(),
            policy_hash: policy.hash().to_owned(),
            policy: policy.snapshot(),
            budgets,
            workspace,
            check: submission.check,
            image,
            backend,
            labels: submission.labels,
        };
        let new = self.new_task(&task, submission.trace, idempotency)?;
        inner.shop.kill_at.before(1, 1);
        let created = inner.shop.store.create(new).await?;
        inner.shop.kill_at.after(1, 1);
        Ok(created)
    }

    pub(super) fn data_dir(&self) -> &std::path::Path {
        &self.0.data_dir
    }

    /// Refuses a workspace that is not all here.
    pub(super) async fn require(&self, workspace: Revision) -> Result<(), Error> {
        let missing = |what, id: String| {
            move |error| match error {
                crate::workspace::Error::Missing(_) => crate::store::Error::NotFound { what, id }.into(),
                error => Error::from(error),
            }
        };
        let pool = &self.0.pool;
        let tree = workspace.tree;
        pool.require(tree).await.map_err(missing("tree", tree.to_string()))?;
        if let Some(times) = workspace.times {
            let found = pool.artifact(times).await;
            found.map_err(missing("file times", times.to_string()))?;
        }
        Ok(())
    }

    fn new_task(
        &self,
        task: &Task,
        trace: Option<TraceId>,
        idempotency: Option<Idempotency>,
    ) -> Result<NewTask, Error> {
        let at = self.0.shop.clock.now();
        let event = Event::Submitted(Submitted {
            prompt: task.prompt.clone(),
            system: SYSTEM_PROMPT.trim().to_owned(),
            model: task.model.label(),
            policy_name: task.policy_name.clone(),
            policy_hash: task.policy_hash.clone(),
            budgets: task.budgets.clone(),
            check: task.check.clone(),
            workspace: task.workspace,
            labels: task.labels.clone(),
        });
        let first = Entry {
            format_version: FORMAT_VERSION,
            seq: 1,
            at,
            event,
        };
        let state = state::start(&first)?;
        let trace = trace.unwrap_or_else(TraceId::random);
        Ok(NewTask {
            idempotency,
            ..commit::beginning(task, first, &state, trace, None)
        })
    }

    /// Finds a run by its own id or its task's.
    pub async fn find(&self, id: &str) -> Result<RunRecord, Error> {
        if let Ok(run) = id.parse::<RunId>() {
            return Ok(self.0.shop.store.run(&run).await?);
        }
        let task = id
            .parse::<TaskId>()
            .map_err(|_| Error::Invalid(format!("`{}` is neither a run id nor a task id", crate::ids::shown(id))))?;
        Ok(self.0.shop.store.run_of_task(&task).await?)
    }

    pub async fn view(&self, id: &str) -> Result<View, Error> {
        let record = self.find(id).await?;
        let entries = super::journal(self.0.shop.store.as_ref(), &record.run).await?;
        let state = super::fold(&record.run, &entries)?;
        let Some(Event::Submitted(submitted)) = entries.first().map(|entry| entry.event.clone()) else {
            return Err(Error::NoJournal(record.run));
        };
        Ok(View {
            session: Session::of(&entries),
            state,
            submitted,
            entries,
            record,
        })
    }

    pub async fn list(&self, query: &Query) -> Result<Vec<RunRecord>, Error> {
        Ok(self.0.shop.store.list(query).await?)
    }

    pub async fn transcript(&self, id: &str) -> Result<(RunId, Vec<Message>), Error> {
        let view = self.view(id).await?;
        Ok((view.record.run, view.session.messages()))
    }

    /// The workspace at a checkpoint; the newest one without a `revision`.
    pub async fn workspace_at(&self, id: &str, revision: Option<u64>) -> Result<Revision, Error> {
        let record = self.find(id).await?;
        let checkpoint = self.0.shop.store.checkpoint(&record.run, revision).await?;
        Ok(state::of_checkpoint(&record.run, &checkpoint)?.workspace)
    }

    /// A stored output of this run; what other runs stored is not found through it.
    pub async fn artifact(&self, id: &str, artifact: &str) -> Result<Vec<u8>, Error> {
        let view = self.view(id).await?;
        let missing = || crate::store::Error::NotFound {
            what: "artifact",
            id: artifact.to_owned(),
        };
        if !view.entries.iter().any(|entry| entry.event.names_artifact(artifact)) {
            return Err(missing().into());
        }
        let blob = artifact.parse().map_err(|_| missing())?;
        Ok(self.0.pool.artifact(blob).await?)
    }

    /// Every entry after `after` with the public state that it led to, in order, then live until the run has ended: never a
    /// gap, never a duplicate. Dropping it ends it.
    pub fn watch(
        &self,
        run: RunId,
        after: u64,
    ) -> impl Stream<Item = Result<(Entry, &'static str), Error>> + Send + 'static {
        let service = self.clone();
        async_stream::try_stream! {
            // Subscribed before the first read, so that nothing can fall between backlog and live.
            let mut moved = service.0.shop.hub.subscribe(&run);
            let mut state: Option<State> = None;
            loop {
                let position = state.as_ref().map_or(0, |state| state.seq);
                let page = service.0.shop.store.journal(&run, position, PAGE).await?;
                let is_empty = page.is_empty();
                for entry in page {
                    let next = state::next(state.as_ref(), &entry)?;
                    let public = next.public();
                    let is_terminal = next.is_terminal();
                    state = Some(next);
                    if entry.seq > after {
                        yield (entry, public);
                    }
                    if is_terminal {
                        return;
                    }
                }
                if is_empty {
                    // Another process may drive the run: the level is asked for now and then as well.
                    let _ = tokio::time::timeout(MAILBOX, moved.changed()).await;
                }
            }
        }
    }

    /// Sends a signal to a run and waits until it is answered.
    pub async fn signal(&self, id: &str, signal: Signal) -> Result<View, Error> {
        let before = self.view(id).await?;
        check_signal(&before, &signal)?;
        if let Signal::Resume { accept, .. } = &signal {
            self.check_grounds(&before, accept).await?;
        }
        let signal = concrete(&before, signal);
        if before.record.is_terminal {
            return Ok(before);
        }
        let run = before.record.run;
        // A cancel is answered by the run's end, everything else by being taken.
        let ends = matches!(signal, Signal::Cancel { .. });
        let mut moved = self.0.shop.hub.subscribe(&run);
        match self.0.shop.store.signal(&run, signal.clone()).await {
            Err(crate::store::Error::Ended { .. }) => {
                let now = self.view(id).await?;
                check_signal(&now, &signal)?;
                return Ok(now);
            }
            sent => sent?,
        }
        self.wake(&run).await?;
        let answered = async {
            while !self.find(id).await?.is_terminal && (ends || !self.0.shop.store.inbox(&run).await?.is_empty()) {
                let _ = tokio::time::timeout(MAILBOX, moved.changed()).await;
            }
            Ok::<(), Error>(())
        };
        if let Ok(result) = tokio::time::timeout(ANSWER, answered).await {
            result?;
        }
        let now = self.view(id).await?;
        check_decided(&now, &signal)?;
        Ok(now)
    }

    /// Refuses to go on with a run whose grounds are not what they were (requirement E4).
    async fn check_grounds(&self, view: &View, accept: &[Ground]) -> Result<(), Error> {
        let (shop, task) = (&self.0.shop, &view.record.task);
        let Some(recorded) = &view.state.grounds else {
            return Ok(());
        };
        let rules = Rules::of(task.clone(), shop.store.spec(task).await?)?;
        let mut mismatches = recorded.mismatches(&shop.grounds(&rules).await);
        mismatches.retain(|mismatch| !accept.contains(&mismatch.ground));
        match mismatches.is_empty() {
            true => Ok(()),
            false => Err(Error::Incompatible {
                run: view.record.run.clone(),
                mismatches,
            }),
        }
    }

    /// Makes sure that somebody reads the run's inbox: its driver here, the process that owns it, or a new driver.
    async fn wake(&self, run: &RunId) -> Result<(), Error> {
        if let Some(wake) = self.lock().get(run) {
            wake.notify_one();
            return Ok(());
        }
        let owner = self.0.shop.store.run(run).await?.owner;
        if owner.is_none_or(|owner| owner == self.0.owner || !owner.is_alive()) {
            self.drive(run);
        }
        Ok(())
    }

    /// Drives a run in the background; does nothing when it is driven already.
    pub fn drive(&self, run: &RunId) {
        let wake = match self.lock().entry(run.clone()) {
            hash_map::Entry::Occupied(_) => return,
            hash_map::Entry::Vacant(place) => Arc::clone(place.insert(Arc::default())),
        };
        let (service, run) = (self.clone(), run.clone());
        self.0.tasks.spawn(format!("drive {run}"), move |stop| async move {
            // Also when it breaks: nobody may wait for a run that nothing drives.
            let driven = Driven {
                service: service.clone(),
                run: run.clone(),
            };
            let rest = service.drive_to_rest(&run, &wake, &stop).await;
            service.keep_record().await;
            drop(driven);
            // A signal that came between the driver's last look and here woke nobody.
            if rest == Some(Rest::Parked) && service.has_mail(&run).await {
                service.drive(&run);
            }
        });
    }

    /// Drives a run until it rests. What may pass (a full disk, a store that is busy) is tried again for as long as it takes,
    /// so that no run is left "running" with nobody running it; the longer nothing moves, the seldomer.
    async fn drive_to_rest(&self, run: &RunId, wake: &Arc<Notify>, stop: &CancellationToken) -> Option<Rest> {
        let (mut tries, mut stood_at) = (0, None);
        loop {
            let error = match self.drive_in_turn(run, wake, stop).await {
                Ok(Rest::Waiting(until)) => {
                    let wait = until.since(self.0.shop.clock.now());
                    tokio::select! {
                        () = stop.cancelled() => return None,
                        () = tokio::time::sleep(wait) => {}
                        () = wake.notified() => {}
                    }
                    continue;
                }
                Ok(rest) => return Some(rest),
                Err(error) => error,
            };
            let stands_at = self.0.shop.store.run(run).await.ok().map(|record| record.seq);
            // A claim is one entry: more than that is progress.
            let moved = stands_at.zip(stood_at).is_some_and(|(now, before)| now > before + 1);
            (tries, stood_at) = (if moved { 0 } else { tries }, stands_at.or(stood_at));
            let pause = error
                .may_pass()
                .then(|| Duration::from_secs(PAUSES[tries.min(PAUSES.len() - 1)]));
            tries += 1;
            tracing::error!(%run, error = %crate::error::chain(&error), again_in = ?pause, "run not driven");
            tokio::select! {
                () = stop.cancelled() => return None,
                () = tokio::time::sleep(pause?) => {}
            }
        }
    }

    /// Waits for a slot, then drives. What comes into the inbox before is answered at once: nobody waits for other runs to
    /// have one cancelled (requirement A9).
    async fn drive_in_turn(&self, run: &RunId, wake: &Arc<Notify>, stop: &CancellationToken) -> Result<Rest, Error> {
        let (shop, owner) = (&self.0.shop, &self.0.owner);
        let mut slot = self.0.slots.try_acquire().ok();
        while slot.is_none() {
            if self.has_mail(run).await {
                let rest = driver::answer(Arc::clone(shop), run.clone(), owner).await?;
                if rest != Rest::Released {
                    return Ok(rest);
                }
            }
            tokio::select! {
                () = stop.cancelled() => return Ok(Rest::Released),
                acquired = self.0.slots.acquire() => slot = acquired.ok(),
                () = wake.notified() => {}
            }
        }
        driver::drive(Arc::clone(shop), run.clone(), owner, Arc::clone(wake), stop.clone()).await
    }

    async fn has_mail(&self, run: &RunId) -> bool {
        self.0.shop.store.inbox(run).await.is_ok_and(|inbox| !inbox.is_empty())
    }

    /// Waits until this process no longer drives the run, and gives it as it stands.
    pub async fn settled(&self, run: &RunId) -> Result<View, Error> {
        loop {
            let rested = self.0.rested.notified();
            tokio::pin!(rested);
            rested.as_mut().enable();
            if !self.lock().contains_key(run) {
                return self.view(run.as_str()).await;
            }
            rested.await;
        }
    }

    /// Whether a living process other than this one has the run.
    pub fn is_elsewhere(&self, record: &RunRecord) -> bool {
        record
            .owner
            .as_ref()
            .is_some_and(|owner| *owner != self.0.owner && owner.is_alive())
    }

    /// Stops: no new claims, running steps are released. Gives the names of what did not stop in time.
    pub async fn shut_down(&self, deadline: Duration) -> Vec<String> {
        let still = self.0.tasks.shut_down(deadline).await;
        self.keep_record().await;
        still
    }

    pub fn stopping(&self) -> tokio_util::sync::CancellationToken {
        self.0.tasks.stopping()
    }

    /// Brings the audit file up to the store.
    pub(super) async fn keep_record(&self) {
        if let Err(error) = self.0.mirror.catch_up(self.0.shop.store.as_ref()).await {
            tracing::error!(error = %crate::error::chain(&error), "the audit file is behind the store");
        }
    }

    /// Looks for signals that other processes put into the inboxes of runs that this one has.
    async fn read_mail(&self) {
        let mut seen = 0;
        for round in 1u64.. {
            tokio::time::sleep(MAILBOX).await;
            // A long run's record is on file, and under a signed head, while it goes on.
            if round.is_multiple_of(HEADS) {
                self.keep_record().await;
            }
            match self.0.shop.store.data_version().await {
                Ok(version) if version == seen => continue,
                Ok(version) => seen = version,
                Err(error) => {
                    tracing::warn!(error = %crate::error::chain(&error), "cannot look for signals");
                    continue;
                }
            }
            if let Err(error) = self.deliver_mail().await {
                tracing::warn!(error = %crate::error::chain(&error), "cannot deliver signals");
            }
        }
    }

    async fn deliver_mail(&self) -> Result<(), Error> {
        for record in self.0.shop.store.unfinished().await? {
            let is_mine = record.owner.as_ref() == Some(&self.0.owner);
            if is_mine && !self.0.shop.store.inbox(&record.run).await?.is_empty() {
                self.wake(&record.run).await?;
            }
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<RunId, Arc<Notify>>> {
        self.0.active.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A run's place among those that are driven here; gone with it.
struct Driven {
    service: Service,
    run: RunId,
}

impl Drop for Driven {
    fn drop(&mut self) {
        self.service.lock().remove(&self.run);
        self.service.0.rested.notify_waiters();
    }
}

/// Refuses what can be seen to be wrong before it is sent; what changes meanwhile, the machine decides.
fn check_signal(view: &View, signal: &Signal) -> Result<(), Error> {
    let public = view.state.public();
    let wrong = |wanted| Error::WrongState {
        run: view.record.run.clone(),
        state: public.to_owned(),
        wanted,
    };
    match signal {
        Signal::Cancel { .. } if view.state.is_terminal() && public != "CANCELLED" => Err(wrong("cancelled")),
        Signal::Cancel { .. } => Ok(()),
        Signal::Pause { .. } if view.state.is_terminal() => Err(wrong("paused")),
        Signal::Pause { .. } => Ok(()),
        Signal::Resume { .. } if view.state.hold == state::Hold::Free || view.state.is_terminal() => {
            Err(wrong("resumed"))
        }
        Signal::Resume { .. } => Ok(()),
        Signal::Decide { approval, .. } => check_approval(view, approval.as_ref()),
    }
}

/// Names the approval that is meant: the one that is open now, not one that may be open when the signal is read.
fn concrete(view: &View, signal: Signal) -> Signal {
    match signal {
        Signal::Decide {
            approval: None,
            approved,
            by,
            reason,
        } => {
            let approval = view
                .state
                .open_approvals()
                .first()
                .map(|(_, approval)| (*approval).clone());
            Signal::Decide {
                approval,
                approved,
                by,
                reason,
            }
        }
        Signal::Decide { approval: Some(_), .. }
        | Signal::Pause { .. }
        | Signal::Resume { .. }
        | Signal::Cancel { .. } => signal,
    }
}

/// A check that finds no files may well pass (no tests, no failures): that a run starts from nothing must be meant.
fn check_files(submission: &Submission) -> Result<(), Error> {
    match (&submission.check, submission.workspace, submission.empty_workspace) {
        (Some(_), None, false) => Err(Error::Invalid(
            "there is a completion check and no workspace for it to judge: give a `tree`, or `empty_workspace` where \
             that is meant"
                .into(),
        )),
        (_, Some(_), true) => Err(Error::Invalid("`tree` and `empty_workspace` exclude each other".into())),
        (Some(_) | None, _, _) => Ok(()),
    }
}

/// Of two who decide at once one is heard; the other must not believe that it was they.
fn check_decided(view: &View, signal: &Signal) -> Result<(), Error> {
    let Signal::Decide {
        approval: Some(wanted),
        approved,
        by,
        ..
    } = signal
    else {
        return Ok(());
    };
    let decided = view.entries.iter().find_map(|entry| match &entry.event {
        Event::ApprovalDecided {
            approval, approved, by, ..
        } if approval == wanted => Some((*approved, by)),
        _ => None,
    });
    match decided {
        Some((verdict, who)) if (verdict, who) != (*approved, by) => Err(Error::Decided {
            by: who.clone(),
            approved: verdict,
        }),
        Some(_) | None => Ok(()),
    }
}

fn check_approval(view: &View, wanted: Option<&ApprovalId>) -> Result<(), Error> {
    let open = view.state.open_approvals();
    match wanted {
        Some(wanted) if open.iter().any(|(_, approval)| *approval == wanted) => Ok(()),
        Some(wanted) => Err(Error::NoApproval(wanted.to_string())),
        None if open.len() == 1 => Ok(()),
        None if open.is_empty() => Err(Error::NothingToApprove {
            run: view.record.run.clone(),
            state: view.state.public().to_owned(),
        }),
        None => Err(Error::Invalid(format!("{} approvals are open: name one", open.len()))),
    }
}
