//! The one task that owns one sandbox: takes orders, watches its time and its life, does what the machine says.
//!
//! Order of things: what the next server must know is written down before it is told to anyone; the end begins with the
//! lease withdrawn; it is told once every process has been killed, so that nothing runs on; the place is given back when
//! they are gone, before the traces are.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::Error;
use super::ask::Shape;
use super::execs::take_over;
use super::lease::{self, Lease};
use super::maker::{Made, blocking, remove};
use super::member::{Done, Member, Order, View};
use super::quota::Place;
use super::service::{Inner, OnShutdown, Taken, What};
use super::snapshot::{Draft, Kept};
use super::state::{Cause, Denied, Effect, End, Event, State, step};
use super::trail::{Ids, actor};
use crate::error::chain;
use crate::ids::SnapshotId;
use crate::sandbox::{self, Doomed};
use crate::workspace;
use crate::workspace::overlay::{Kept as Workspace, Reading};

/// Before another try to end what would not end.
const PAUSE: Duration = Duration::from_secs(1);
/// Tries to end a sandbox while the server itself is stopping.
const LAST_TRIES: u32 = 3;
/// Orders that may wait for a snapshot.
const MOST_WAITING: usize = 64;

/// How a sandbox is made: one of its own, or a parked one that is furnished.
pub(super) type Creation = BoxFuture<'static, Result<Made, Error>>;

pub(super) struct Driver {
    pub fleet: Arc<Inner>,
    pub member: Arc<Member>,
    pub orders: mpsc::Receiver<Order>,
    pub view: watch::Sender<View>,
    pub lease: Lease,
    pub place: Place,
    /// Whether the commands of an earlier server have been taken over: a guest that stands still cannot tell of them.
    pub has_execs: bool,
}

/// A snapshot that is being taken, and who waits for it.
struct Job {
    work: BoxFuture<'static, Shot>,
    by: String,
    done: Done<Taken>,
}

/// What came of a snapshot: also where it was taken, its processes may stand still now.
struct Shot {
    taken: Result<(Workspace, Option<SnapshotId>), Error>,
    thawed: Result<(), sandbox::Error>,
}

/// What became of a sandbox that lived.
#[derive(PartialEq)]
enum Left {
    /// It is to be ended.
    Ending,
    /// It stays, for the next server.
    Behind,
}

impl Driver {
    /// Makes a sandbox and drives it to its end.
    pub async fn create(mut self, creation: Creation, by: String, stop: CancellationToken) {
        if let Some(made) = self.await_creation(creation, &by, &stop).await {
            self.drive(made, &stop).await;
        }
    }

    /// Drives a sandbox to its end.
    pub async fn drive(mut self, mut made: Made, stop: &CancellationToken) {
        if self.state().end().is_none() && self.live(&mut made, stop).await == Left::Behind {
            if let Some(post) = &made.post {
                post.close().await;
            }
            return;
        }
        self.finish(made, stop).await;
    }

    async fn await_creation(&mut self, mut creation: Creation, by: &str, stop: &CancellationToken) -> Option<Made> {
        let result = loop {
            tokio::select! {
                biased;
                result = &mut creation => break result,
                Some(order) = self.orders.recv() => match order {
                    Order::End(end) => {
                        self.note(Event::EndAsked(end));
                    }
                    other => self.refuse(other, Denied::NotReady),
                },
                () = stop.cancelled(), if self.state().end().is_none() => {
                    let end = self.end_of(Cause::Shutdown, "");
                    self.note(Event::EndAsked(end));
                }
            }
        };
        let facts = &self.member.facts;
        let details = json!({ "backend": facts.backend, "image": facts.image, "isolation": facts.isolation,
            "policy": facts.policy_name, "policy_hash": facts.policy_hash, "limits": facts.limits,
            "labels": facts.labels, "env": facts.env.keys().collect::<Vec<_>>(), "from_pool": facts.from_pool,
            "expires_at": self.lease.expires_at });
        match result {
            Ok(mut made) => {
                if let Some((warm, of_image)) = made.warm.take() {
                    self.member.codes.set_warm(warm, &of_image);
                }
                self.lease.spec = made.sandbox.spec().clone();
                // Nobody can have set it: there is one driver.
                let _ = self.member.sandbox.set(Arc::clone(&made.sandbox));
                let _ = self.member.directory.set(made.directory.clone());
                self.record(&actor(by), "sandbox.created", "ok", details).await;
                if self.state().end().is_none()
                    && let Err(error) = self.write_lease().await
                {
                    let end = self.end_of(Cause::CreateFailed, &chain(&error));
                    let _ = self.member.failure.set(Arc::new(error));
                    self.note(Event::EndAsked(end));
                }
                if !self.has_execs && self.state().end().is_none() {
                    self.take_over(&made).await;
                }
                self.member.activity.touch();
                self.note(Event::Created);
                Some(made)
            }
            Err(error) => {
                let reason = chain(&error);
                let end = self.end_of(Cause::CreateFailed, &reason);
                let _ = self.member.failure.set(Arc::new(error));
                self.note(Event::CreateFailed(end));
                self.record(&actor(by), "sandbox.created", "failed", json!({ "reason": reason }))
                    .await;
                self.fleet.registry.prune(self.member.clock.now());
                None
            }
        }
    }

    /// Takes orders until the sandbox is to be ended or left.
    async fn live(&mut self, made: &mut Made, stop: &CancellationToken) -> Left {
        let mut job: Option<Job> = None;
        let mut waiting: VecDeque<Order> = VecDeque::new();
        loop {
            if let Some(end) = self.due() {
                self.note(Event::EndAsked(end));
            }
            if let Some(end) = self.state().end() {
                let denied = Denied::Over(end.clone());
                if let Some(job) = job {
                    // Whoever no longer waits needs no answer.
                    let _ = job.done.send(Err(self.member.denied(denied.clone())));
                }
                for order in waiting {
                    self.refuse(order, denied.clone());
                }
                return Left::Ending;
            }
            if job.is_none()
                && let Some(order) = waiting.pop_front()
            {
                job = self.obey(order, made).await;
                continue;
            }
            let until_due = self.until_due();
            let snapshot = async {
                match &mut job {
                    Some(job) => (&mut job.work).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = stop.cancelled() => match self.fleet.config.on_shutdown {
                    OnShutdown::Keep => return Left::Behind,
                    OnShutdown::End => {
                        let end = self.end_of(Cause::Shutdown, "");
                        self.note(Event::EndAsked(end));
                    }
                },
                () = made.life.over() => {
                    let end = self.lost(made).await;
                    self.note(Event::EndAsked(end));
                }
                Some(order) = self.orders.recv() => match order {
                    Order::End(_) | Order::Renew { .. } => {
                        // Neither begins a snapshot.
                        let _ = self.obey(order, made).await;
                    }
                    order if job.is_none() => job = self.obey(order, made).await,
                    order if waiting.len() < MOST_WAITING => waiting.push_back(order),
                    order => self.refuse(order, Denied::NotReady),
                },
                taken = snapshot => {
                    if let Some(Job { by, done, .. }) = job.take() {
                        let answer = self.taken(taken, &by).await;
                        let _ = done.send(answer);
                    }
                }
                () = tokio::time::sleep(until_due) => {}
            }
        }
    }

    /// Why it is to be ended now, if it is.
    fn due(&self) -> Option<End> {
        let now = self.member.clock.now();
        if now >= self.lease.expires_at {
            return Some(self.end_of(Cause::Expired, ""));
        }
        let idle = self.lease.idle_timeout?;
        let since = self.member.activity.idle_since()?;
        (now >= since.plus(idle)).then(|| self.end_of(Cause::Idle, ""))
    }

    /// How long nothing can be due. While something goes on, it is a whole idle time from now at least.
    fn until_due(&self) -> Duration {
        let now = self.member.clock.now();
        let expires = self.lease.expires_at.since(now);
        let idles = self.lease.idle_timeout.map(|idle| {
            let since = self.member.activity.idle_since().unwrap_or(now);
            since.plus(idle).since(now)
        });
        let soonest = idles.map_or(expires, |idles| idles.min(expires));
        // The clock is coarser than the timer.
        soonest.max(Duration::from_millis(1))
    }

    /// Why a sandbox whose first process has ended did so.
    async fn lost(&self, made: &Made) -> End {
        match made.sandbox.usage().await {
            Ok(usage) if usage.oom_kills > 0 => {
                let limit = self.member.facts.limits.memory_bytes;
                let reason = format!("limit {limit} bytes, peak {} bytes", usage.memory_peak_bytes);
                self.end_of(Cause::OutOfMemory, &reason)
            }
            Ok(_) | Err(_) => self.end_of(Cause::Lost, "its first process has ended"),
        }
    }

    /// Does what an order says; a snapshot is begun, and ends later.
    async fn obey(&mut self, order: Order, made: &mut Made) -> Option<Job> {
        // An order that comes too late does not save it.
        if let Some(end) = self.due() {
            self.note(Event::EndAsked(end.clone()));
            self.refuse(order, Denied::Over(end));
            return None;
        }
        match order {
            Order::End(end) => {
                self.note(Event::EndAsked(end));
            }
            Order::Pause { by, done } => {
                let answer = self.pause(&by, made).await;
                let _ = done.send(answer);
            }
            Order::Resume { by, done } => {
                let answer = self.resume(&by, made).await;
                let _ = done.send(answer);
            }
            Order::Renew { ttl, by, done } => {
                let answer = self.renew(ttl, &by).await;
                let _ = done.send(answer);
            }
            Order::Snapshot { what, by, done } => match self.apply(match what {
                What::Files => Event::SnapshotAsked,
                What::Memory => Event::MemorySnapshotAsked,
            }) {
                Ok(effect) => {
                    let work = match what {
                        What::Files => self.snapshot(made, effect == Some(Effect::SnapshotRunning)),
                        What::Memory => self.snapshot_memory(made),
                    };
                    return Some(Job { work, by, done });
                }
                Err(denied) => {
                    let _ = done.send(Err(self.member.denied(denied)));
                }
            },
        }
        None
    }

    async fn pause(&mut self, by: &str, made: &Made) -> Result<(), Error> {
        let before = self.state();
        let (next, effect) = step(&before, Event::PauseAsked).map_err(|denied| self.member.denied(denied))?;
        if effect == Some(Effect::Freeze) {
            self.lease.paused = true;
            if let Err(error) = self.write_lease().await {
                self.lease.paused = false;
                return Err(error);
            }
            // From here no command is begun in it.
            self.set(next);
            if let Err(error) = made.sandbox.freeze().await {
                self.note(Event::FreezeFailed);
                self.lease.paused = false;
                self.write_lease().await?;
                return Err(error.into());
            }
            self.record(&actor(by), "sandbox.paused", "ok", Value::Null).await;
        }
        Ok(())
    }

    async fn resume(&mut self, by: &str, made: &Made) -> Result<(), Error> {
        let before = self.state();
        let (next, effect) = step(&before, Event::ResumeAsked).map_err(|denied| self.member.denied(denied))?;
        if effect == Some(Effect::Thaw) {
            made.sandbox.thaw().await?;
            self.lease.paused = false;
            if let Err(error) = self.write_lease().await {
                self.lease.paused = true;
                // As it was. Where it does not stand still any more it runs, and is shown so; only the next server would freeze it.
                if made.sandbox.freeze().await.is_err() {
                    self.set(next);
                }
                return Err(error);
            }
            // From here on it runs, whatever else comes.
            self.set(next);
            if !self.has_execs {
                self.take_over(made).await;
            }
            self.record(&actor(by), "sandbox.resumed", "ok", Value::Null).await;
        }
        Ok(())
    }

    /// Goes on with what runs in it already.
    async fn take_over(&mut self, made: &Made) {
        if let Err(error) = take_over(&self.member, &made.sandbox, &self.fleet.trail, &self.fleet.tasks).await {
            let error = chain(&error);
            tracing::warn!(sandbox = %self.member.id, error, "what goes on in it cannot be attached to");
        }
        self.has_execs = true;
    }

    async fn renew(&mut self, ttl: Duration, by: &str) -> Result<(), Error> {
        self.apply(Event::RenewAsked)
            .map_err(|denied| self.member.denied(denied))?;
        let facts = &self.member.facts;
        let latest = facts.created_at.plus(facts.limits.wall_time);
        let before = self.lease.expires_at;
        self.lease.expires_at = self.member.clock.now().plus(ttl).min(latest);
        if let Err(error) = self.write_lease().await {
            self.lease.expires_at = before;
            return Err(error);
        }
        let expires_at = self.lease.expires_at;
        self.view.send_modify(|view| {
            view.generation += 1;
            view.expires_at = expires_at;
        });
        let details = json!({ "expires_at": expires_at });
        self.record(&actor(by), "sandbox.renewed", "ok", details).await;
        Ok(())
    }

    /// Takes the workspace as it is, with everything standing still meanwhile.
    fn snapshot(&self, made: &Made, is_running: bool) -> BoxFuture<'static, Shot> {
        let sandbox = Arc::clone(&made.sandbox);
        let trees = self.fleet.maker.trees().clone();
        let site = made.site.clone();
        Box::pin(async move {
            let mut wanted = Reading::Later;
            loop {
                let still = match is_running {
                    true => sandbox.freeze().await,
                    false => Ok(()),
                };
                let looked = match still {
                    Ok(()) => {
                        // Where nothing but the guest is there, nobody has a file open.
                        let reading = match sandbox.is_alone().await {
                            true => wanted,
                            false => Reading::Now,
                        };
                        trees.look(&site, reading).await.map_err(Error::from)
                    }
                    Err(error) => Err(error.into()),
                };
                // Also after a freeze that failed: it may have come half way.
                let thawed = match is_running {
                    true => sandbox.thaw().await,
                    false => Ok(()),
                };
                let taken = match looked {
                    Ok(look) => match trees.keep(&site, look).await {
                        Err(workspace::Error::Changed(_)) if wanted == Reading::Later => {
                            wanted = Reading::Now;
                            continue;
                        }
                        kept => kept.map_err(Error::from),
                    },
                    Err(error) => Err(error),
                };
                return Shot {
                    taken: taken.map(|taken| (taken, None)),
                    thawed,
                };
            }
        })
    }

    /// Takes all of it: its memory, and the workspace as it was in the same moment.
    fn snapshot_memory(&self, made: &Made) -> BoxFuture<'static, Shot> {
        let sandbox = Arc::clone(&made.sandbox);
        let trees = self.fleet.maker.trees().clone();
        let site = made.site.clone();
        let data_dir = self.fleet.maker.data_dir().to_owned();
        let (lease, id, at) = (self.lease.clone(), self.member.id.clone(), self.member.clock.now());
        Box::pin(async move {
            let taken = async {
                let draft = blocking(move || Draft::begin(&data_dir)).await?;
                let still = sandbox.checkpoint(draft.dir()).await?;
                let looked = trees.look(&site, Reading::Now).await;
                drop(still);
                let taken = trees.keep(&site, looked?).await?;
                let shape = Shape {
                    backend: lease.backend,
                    image: lease.spec.image,
                    isolation: lease.spec.isolation,
                    limits: lease.spec.limits,
                    mounts: lease.spec.mounts,
                    seccomp: lease.seccomp,
                };
                let kept = Kept::new((id, at), lease.policy_name, shape, lease.env, taken.revision);
                let snapshot = blocking(move || draft.finish(&kept)).await?;
                Ok::<_, Error>((taken, Some(snapshot)))
            };
            Shot {
                taken: taken.await,
                thawed: Ok(()),
            }
        })
    }

    async fn taken(&self, shot: Shot, by: &str) -> Result<Taken, Error> {
        self.member.activity.touch();
        let taken = match (shot.taken, shot.thawed) {
            (taken, Ok(())) => taken,
            (taken, Err(error)) => {
                // It stands still, and is to be seen so: Resume tries again.
                self.note(Event::ThawFailed);
                taken.and(Err(error.into()))
            }
        };
        let (outcome, details) = match &taken {
            Ok((taken, memory)) => (
                "ok",
                json!({ "tree": taken.revision.tree, "skipped": taken.report.skipped_total, "snapshot": memory }),
            ),
            Err(error) => ("failed", json!({ "reason": chain(error) })),
        };
        self.record(&actor(by), "sandbox.snapshot", outcome, details).await;
        let (taken, memory) = taken?;
        Ok(Taken {
            revision: taken.revision,
            memory,
        })
    }

    /// Ends it, and removes every trace.
    async fn finish(mut self, made: Made, stop: &CancellationToken) {
        let Some(end) = self.state().end().cloned() else {
            return;
        };
        // First: from here on no server goes on with it.
        let (data_dir, id) = (self.fleet.maker.data_dir().to_owned(), self.member.id.clone());
        if let Err(error) = blocking(move || lease::withdraw(&data_dir, &id)).await {
            tracing::error!(sandbox = %self.member.id, %error, "its lease was not withdrawn");
        }
        self.member.execs.end_all(&end);
        self.member.codes.end_all(&end);
        // Whatever still runs for a moment reaches nothing any more.
        if let Some(post) = &made.post {
            post.close().await;
        }
        let mut tries = 0;
        let doomed = loop {
            match doomed(&made).await {
                Ok(doomed) => break doomed,
                Err(error) => {
                    tries += 1;
                    self.note(Event::StopFailed);
                    tracing::error!(sandbox = %self.member.id, error = %chain(&error), "it does not end");
                }
            }
            if stop.is_cancelled() && tries >= LAST_TRIES {
                // The next server finds it without an owner.
                return;
            }
            tokio::time::sleep(PAUSE).await;
        };
        let details = json!({ "cause": end.cause, "reason": end.reason });
        let who = if end.by.is_empty() {
            "server".to_owned()
        } else {
            actor(&end.by)
        };
        self.record(&who, "sandbox.ended", "ok", details).await;
        self.place.leaving();
        // So that what waits to be removed cannot grow without bound, however fast sandboxes come and go.
        let Ok(_slot) = Arc::clone(&self.fleet.cleanups).acquire_owned().await else {
            return;
        };
        self.note(Event::Stopped);
        let Self {
            fleet, member, place, ..
        } = self;
        // What is dying has its place until it is gone, which is the first thing that removing it waits for.
        let dying = Some(place).filter(|_| doomed == Doomed::Dying);
        let mut tries = 0;
        while let Err(error) = made.sandbox.destroy().await {
            tries += 1;
            tracing::error!(sandbox = %member.id, error = %chain(&error), "not removed yet");
            if stop.is_cancelled() && tries >= LAST_TRIES {
                return;
            }
            tokio::time::sleep(PAUSE).await;
        }
        drop(dying);
        remove(made.directory).await;
        let ids = Ids {
            sandbox: &member.id,
            exec: None,
        };
        let destroyed = "sandbox.destroyed";
        fleet.trail.put("server", destroyed, "ok", ids, Value::Null).await;
        fleet.registry.prune(member.clock.now());
    }

    fn state(&self) -> State {
        self.view.borrow().state.clone()
    }

    /// Lets the machine decide, and shows what comes of it.
    fn apply(&self, event: Event) -> Result<Option<Effect>, Denied> {
        let before = self.state();
        match step(&before, event.clone()) {
            Ok((next, effect)) => {
                self.set(next);
                Ok(effect)
            }
            Err(denied) => {
                if denied == Denied::Impossible {
                    tracing::error!(sandbox = %self.member.id, ?before, ?event, "an event that cannot be");
                }
                Err(denied)
            }
        }
    }

    /// Lets the machine know of what it takes in any state that this can happen in.
    fn note(&self, event: Event) {
        // What it refuses as impossible is on the log.
        let _ = self.apply(event);
    }

    fn set(&self, next: State) {
        self.view.send_if_modified(|view| {
            if view.state == next {
                return false;
            }
            tracing::info!(sandbox = %self.member.id, from = ?view.state, to = ?next, "moved");
            view.generation += 1;
            view.state = next;
            true
        });
    }

    fn end_of(&self, cause: Cause, reason: &str) -> End {
        End {
            cause,
            by: String::new(),
            reason: reason.to_owned(),
            at: self.member.clock.now(),
        }
    }

    fn refuse(&self, order: Order, denied: Denied) {
        let denied = || self.member.denied(denied.clone());
        // Whoever no longer waits needs no answer.
        let _ = match order {
            Order::Pause { done, .. } | Order::Resume { done, .. } | Order::Renew { done, .. } => {
                done.send(Err(denied())).is_ok()
            }
            Order::Snapshot { done, .. } => done.send(Err(denied())).is_ok(),
            Order::End(_) => true,
        };
    }

    async fn write_lease(&self) -> Result<(), Error> {
        let (lease, data_dir) = (self.lease.clone(), self.fleet.maker.data_dir().to_owned());
        let written = blocking(move || lease.write(&data_dir)).await;
        written.map_err(|source| Error::Lease {
            sandbox: self.member.id.clone(),
            source,
        })
    }

    async fn record(&self, actor: &str, action: &str, outcome: &str, details: Value) {
        let ids = Ids {
            sandbox: &self.member.id,
            exec: None,
        };
        self.fleet.trail.put(actor, action, outcome, ids, details).await;
    }
}

/// Sees to it that nothing runs on.
async fn doomed(made: &Made) -> Result<Doomed, sandbox::Error> {
    match made.sandbox.doom().await {
        Ok(doomed) => Ok(doomed),
        Err(sandbox::Error::NotFound(_)) => Ok(Doomed::Ended),
        Err(error) => {
            tracing::debug!(sandbox = %made.sandbox.id(), error = %chain(&error), "stopping failed, destroying it");
            made.sandbox.destroy().await.map(|()| Doomed::Ended)
        }
    }
}
