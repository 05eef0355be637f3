//! Drives one run: claims it, commits first, acts second, until it ends, parks or the service stops.
//!
//! ```text
//!   inbox ──▶ entries ─┐
//!   outcomes ──────────┼─▶ state::step ─▶ store.commit ─▶ publish ─▶ start what is due, stop what is not
//!   timer ─────────────┘
//! ```
//!
//! A driver is the only writer of its run: each commit carries the fence that its claim gave, and the store refuses an
//! older one. Whatever is in flight is held in memory only, so a driver may be dropped or killed at any point: the next
//! claim raises the attempt numbers and starts it again from the last committed workspace.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::task::{AbortHandle, JoinSet};
use tokio_util::sync::CancellationToken;

use super::effects::{Outcome as Done, Shop};
use super::event::{Entry, Event, FORMAT_VERSION};
use super::grounds::{Grounds, Mismatch};
use super::session::Session;
use super::state::{self, Effect, State};
use super::{Error, commit, decide};
use crate::chaos::Moment;
use crate::clock::{Clock, Steady, Timestamp};
use crate::ids::RunId;
use crate::store::{Owner, RunRecord};

/// A run that stood still for longer looks again before it goes on, where nobody said otherwise.
pub const STALE_AFTER: Duration = Duration::from_secs(6 * 3600);

/// A run that waits longer than this for a model holds no sandbox and no worker meanwhile.
const FAR: Duration = Duration::from_secs(60);

/// Why a driver let go of its run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rest {
    Ended,
    /// It waits for a person.
    Parked,
    /// It waits for a time that is far off, and holds nothing meanwhile.
    Waiting(Timestamp),
    /// The service stops; any worker can go on.
    Released,
}

/// Drives `run` until it rests.
///
/// # Errors
/// When the run cannot be claimed or read, or another worker has taken it over; it is then as the store has it.
pub async fn drive(
    shop: Arc<Shop>,
    run: RunId,
    owner: &Owner,
    wake: Arc<Notify>,
    stop: CancellationToken,
) -> Result<Rest, Error> {
    let mut driver = Driver::claim(shop, run, owner).await?;
    let rest = driver.go(owner, &wake, &stop).await;
    driver.leave(&rest).await;
    rest
}

/// Answers what is in the inbox of a run whose turn has not come, and starts nothing: a cancel ends it, a pause holds it.
/// [`Rest::Released`] means that it still waits for its turn.
///
/// # Errors
/// As [`drive`].
pub async fn answer(shop: Arc<Shop>, run: RunId, owner: &Owner) -> Result<Rest, Error> {
    let mut driver = Driver::claim(shop, run, owner).await?;
    let rest = driver.answer().await;
    driver.leave(&rest).await;
    rest
}

struct Driver {
    shop: Arc<Shop>,
    record: RunRecord,
    state: State,
    session: Session,
    revision: u64,
    job: Arc<super::effects::Job>,
    /// What the run stands on here, and which of it is not what it was.
    found: Box<Grounds>,
    mismatches: Vec<Mismatch>,
    /// Nobody sets it while the run is driven: a deadline is about work, not about what a clock shows.
    clock: Arc<dyn Clock>,
    in_flight: JoinSet<(Effect, Result<Done, Error>)>,
    handles: HashMap<String, AbortHandle>,
}

impl Driver {
    async fn claim(shop: Arc<Shop>, run: RunId, owner: &Owner) -> Result<Self, Error> {
        let holder = shop.store.run(&run).await?.owner;
        let dead = holder.filter(|holder| !holder.is_alive());
        let record = shop.store.claim(&run, owner, dead.as_ref()).await?;
        Self::load(shop, record).await
    }

    async fn load(shop: Arc<Shop>, record: RunRecord) -> Result<Self, Error> {
        let entries = super::journal(shop.store.as_ref(), &record.run).await?;
        let checkpoint = shop.store.checkpoint(&record.run, None).await?;
        let state = super::fold(&record.run, &entries)?;
        super::agree(&record.run, &entries, &checkpoint)?;
        let session = Session::of(&entries);
        let clock: Arc<dyn Clock> = Arc::new(Steady::over(Arc::clone(&shop.clock)));
        let job = Arc::new(shop.job(&record, &session, Arc::clone(&clock)).await?);
        let found = Box::new(shop.grounds(&job.rules).await);
        let mismatches = state.grounds.as_ref().map(|grounds| grounds.mismatches(&found));
        Ok(Self {
            clock,
            found,
            mismatches: mismatches.unwrap_or_default(),
            session,
            state,
            revision: checkpoint.revision,
            job,
            shop,
            record,
            in_flight: JoinSet::new(),
            handles: HashMap::new(),
        })
    }

    async fn go(&mut self, owner: &Owner, wake: &Notify, stop: &CancellationToken) -> Result<Rest, Error> {
        if self.state.is_terminal() {
            return Ok(Rest::Ended);
        }
        let worker = format!("{}@{}", owner.pid, self.shop.host);
        self.commit(
            Event::Claimed {
                worker,
                fence: self.record.fence,
                stale: stale(&self.state, self.now(), self.shop.stale_after),
                grounds: self.state.grounds.is_none().then(|| self.found.clone()),
            },
            Vec::new(),
            Vec::new(),
        )
        .await?;
        self.withhold().await?;
        loop {
            self.answer_inbox().await?;
            if self.state.is_terminal() {
                return Ok(Rest::Ended);
            }
            if self.state.is_parked() {
                return Ok(Rest::Parked);
            }
            if let Some(until) = self.waits_until() {
                return Ok(Rest::Waiting(until));
            }
            if self.act().await? {
                continue;
            }
            let deadline = self.until_deadline();
            tokio::select! {
                biased;
                () = stop.cancelled() => return Ok(Rest::Released),
                () = wake.notified() => {}
                () = tokio::time::sleep(deadline) => self.commit(Event::DeadlineReached, Vec::new(), Vec::new()).await?,
                // Cancellation-safe: a result stays in the set until it is taken.
                Some(joined) = self.in_flight.join_next() => self.take(joined).await?,
            }
        }
    }

    /// Nothing is done on other grounds than those that the run stands on, before somebody has said that it may.
    async fn withhold(&mut self) -> Result<(), Error> {
        let mismatches = self.mismatches.clone();
        let event = Event::Withheld { mismatches };
        // Whoever resumes a run that is held already is told then.
        let may_act = self.state.hold != state::Hold::Held && !self.mismatches.is_empty();
        match may_act && state::step(&self.state, &self.entry(event.clone())).is_ok() {
            true => self.commit(event, Vec::new(), Vec::new()).await,
            false => Ok(()),
        }
    }

    async fn answer(&mut self) -> Result<Rest, Error> {
        if !self.state.is_terminal() {
            self.answer_inbox().await?;
        }
        while matches!(self.state.phase, state::Phase::Ending { .. }) {
            self.act().await?;
        }
        let is_held = self.state.hold == state::Hold::Held || self.state.is_parked();
        Ok(match (self.state.is_terminal(), is_held) {
            (true, _) => Rest::Ended,
            (false, true) => Rest::Parked,
            (false, false) => Rest::Released,
        })
    }

    /// Stops what is no longer due and starts what is; `true` when it committed something and the state has moved.
    async fn act(&mut self) -> Result<bool, Error> {
        let due = state::due(&self.state);
        self.handles.retain(|key, handle| {
            let wanted = due.iter().any(|effect| key_of(effect) == *key);
            if !wanted {
                handle.abort();
            }
            wanted
        });
        for effect in due {
            let instant = decide::at_once(&self.job.rules, &self.state, &self.session, &effect)?;
            if let Some(event) = instant {
                self.commit(event, Vec::new(), Vec::new()).await?;
                return Ok(true);
            }
            self.launch(effect);
        }
        Ok(false)
    }

    fn launch(&mut self, effect: Effect) {
        let key = key_of(&effect);
        if self.handles.contains_key(&key) {
            return;
        }
        if let Some(work) = Arc::clone(&self.job).perform(&effect, &self.state, &self.session) {
            let handle = self.in_flight.spawn(async move { (effect, work.await) });
            self.handles.insert(key, handle);
        }
    }

    async fn take(
        &mut self,
        joined: Result<(Effect, Result<Done, Error>), tokio::task::JoinError>,
    ) -> Result<(), Error> {
        let (effect, done) = match joined {
            Ok(result) => result,
            Err(error) if error.is_cancelled() => return Ok(()),
            Err(error) => return Err(Error::Broke(error.to_string())),
        };
        let key = key_of(&effect);
        // A result of something that was stopped meanwhile is dropped: its tree was never committed.
        if self.handles.remove(&key).is_some() && state::due(&self.state).contains(&effect) {
            let done = done?;
            self.commit(done.event, done.audit, Vec::new()).await?;
        }
        Ok(())
    }

    /// Turns what the outside wants into entries, in order, each consumed with its entry.
    async fn answer_inbox(&mut self) -> Result<(), Error> {
        for pending in self.shop.store.inbox(&self.record.run).await? {
            if self.state.is_terminal() {
                break;
            }
            let now = self.now();
            let (rules, mismatches) = (&self.job.rules, &self.mismatches);
            let event = decide::heard(rules, &self.state, &self.session, pending.signal, now, mismatches);
            // What cannot happen here any more (a resume of what is no longer paused) is dropped.
            let event = event.filter(|event| state::step(&self.state, &self.entry(event.clone())).is_ok());
            match event {
                Some(event) => self.commit(event, Vec::new(), vec![pending.id]).await?,
                None => {
                    self.shop
                        .store
                        .discard(&self.record.run, self.record.fence, pending.id)
                        .await?
                }
            }
        }
        Ok(())
    }

    fn entry(&self, event: Event) -> Entry {
        Entry {
            format_version: FORMAT_VERSION,
            seq: self.state.seq + 1,
            at: self.now(),
            event,
        }
    }

    /// Step, commit, publish; acting is the caller's next turn.
    async fn commit(
        &mut self,
        event: Event,
        audit: Vec<crate::audit::Record>,
        consumed: Vec<u64>,
    ) -> Result<(), Error> {
        let entry = self.entry(event);
        let at = commit::Position {
            record: &self.record,
            state: &self.state,
            session: &self.session,
            revision: self.revision,
            policy_hash: &self.job.rules.task.policy_hash,
        };
        let (next, commit) = commit::prepare(&at, entry.clone(), audit, consumed)?;
        let revision = commit
            .checkpoint
            .as_ref()
            .map_or(self.revision, |checkpoint| checkpoint.revision);
        let kill_at = self.shop.kill_at;
        kill_at.before(entry.seq, entry.seq);
        if let Event::ToolStarted { step, .. } = &entry.event {
            kill_at.at(Moment::BeforeIntent, *step);
        }
        self.shop.store.commit(commit).await?;
        kill_at.after(entry.seq, entry.seq);
        match &entry.event {
            Event::ToolStarted { step, .. } => kill_at.at(Moment::AfterIntent, *step),
            Event::ToolFinished { step, .. } => kill_at.at(Moment::AfterOutcome, *step),
            _ => {}
        }
        tracing::info!(run = %self.record.run, seq = entry.seq, event = entry.event.name(), state = next.public(), "entry");
        self.session.apply(&entry);
        if matches!(entry.event, Event::Resumed { .. }) {
            self.mismatches.clear();
        }
        self.state = next;
        self.revision = revision;
        self.shop.hub.publish(&self.record.run, entry.seq);
        if let Event::ToolFinished { step, .. } = &entry.event {
            kill_at.at(Moment::AfterCheckpoint, *step);
        }
        Ok(())
    }

    fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// When there is something to do again, if that is far off.
    fn waits_until(&self) -> Option<Timestamp> {
        let state::Phase::Reasoning {
            not_before: Some(at), ..
        } = self.state.phase
        else {
            return None;
        };
        let until = self.state.deadline.map_or(at, |deadline| deadline.min(at));
        (until.since(self.now()) > FAR).then_some(until)
    }

    fn until_deadline(&self) -> Duration {
        const NEVER: Duration = Duration::from_secs(365 * 24 * 3600);
        self.state.deadline.map_or(NEVER, |deadline| deadline.since(self.now()))
    }

    /// Lets go of everything that is held outside the store.
    async fn leave(&mut self, rest: &Result<Rest, Error>) {
        self.in_flight.shutdown().await;
        self.job.close().await;
        match rest {
            Ok(Rest::Ended) => tracing::info!(run = %self.record.run, state = self.state.public(), "run ended"),
            Ok(Rest::Waiting(until)) => tracing::info!(run = %self.record.run, %until, "run waits"),
            // Still this process's: it hears the answer, and another process knows whom to leave it to.
            Ok(Rest::Parked) => tracing::info!(run = %self.record.run, state = self.state.public(), "run parked"),
            Ok(Rest::Released) => {
                tracing::info!(run = %self.record.run, "run released");
                if let Err(error) = self.shop.store.release(&self.record.run, self.record.fence).await {
                    tracing::warn!(run = %self.record.run, %error, "could not release the run");
                }
            }
            Err(_) => {}
        }
    }
}

/// How long a run has stood still, where its model has to be told (requirement E7). One that was never driven knows nothing
/// that could be out of date.
pub(super) fn stale(state: &State, now: Timestamp, after: Duration) -> Option<Duration> {
    let away = now.since(state.at);
    (state.phase != state::Phase::Queued && away > after).then_some(away)
}

/// One text for one effect; equal effects have equal keys.
fn key_of(effect: &Effect) -> String {
    match effect {
        Effect::CallModel { step, attempt, .. } => format!("model/{step}/{attempt}"),
        Effect::RunTool { step, attempt } => format!("tool/{step}/{attempt}"),
        Effect::RunCheck { step, attempt } => format!("check/{step}/{attempt}"),
        Effect::Probe { step, attempt } => format!("probe/{step}/{attempt}"),
        Effect::Decide { step } => format!("decide/{step}"),
        Effect::Start { step, .. } => format!("start/{step}"),
        Effect::End { .. } => "end".to_owned(),
    }
}
