//! From a wish to a member: key, plan, place, pool, driver.

use std::sync::{Arc, OnceLock};

use tokio::sync::{mpsc, oneshot, watch};

use super::activity::Activity;
use super::ask::{Ask, Plan};
use super::code::Codes;
use super::driver::{Creation, Driver};
use super::execs::Execs;
use super::lease::{FORMAT_VERSION, Key, Lease};
use super::maker::Made;
use super::member::{Facts, Member, Order, View};
use super::quota::Place;
use super::service::{Fleet, Info, Inner};
use super::state::{Cause, End, State};
use super::{Error, pool};
use crate::ids::SandboxId;
use crate::sandbox::{Capabilities, Identity, Isolation, Spec};

/// What a sandbox lacks that cannot be kept with its memory.
pub(super) const MEMORY_SNAPSHOT: &str = "memory_snapshot";
/// Orders that a driver may be behind.
const ORDERS: usize = 64;

impl Fleet {
    /// Makes a sandbox, and answers once it takes commands.
    ///
    /// Who stops waiting leaves nothing behind, unless the request has a key: then it is made all the same, for whoever
    /// comes again with that key.
    ///
    /// # Errors
    /// Everything that can be known to be wrong is refused before anything is made.
    pub async fn create(&self, ask: Ask, key: Option<String>) -> Result<Info, Error> {
        let member = match key {
            None => self.make(ask, None).await?,
            Some(key) => {
                let body = serde_json::to_vec(&ask).map_err(|error| Error::Invalid(error.to_string()))?;
                let body_hash = blake3::hash(&body).to_hex().to_string();
                self.make_keyed(ask, Key { key, body_hash }).await?
            }
        };
        Ok(Info::of(&member))
    }

    /// The same key gives the same sandbox, also to who asks while it is being made.
    async fn make_keyed(&self, ask: Ask, key: Key) -> Result<Arc<Member>, Error> {
        let keyed = self.inner().registry.keyed(&key)?;
        let (done, answer) = oneshot::channel();
        let fleet = self.clone();
        // A task of its own: who comes again must find what the first has begun.
        self.inner().tasks.spawn("create with a key", move |_| async move {
            let making = || async { fleet.make(ask, Some(key.clone())).await.map(|member| member.id.clone()) };
            let made = keyed.made.get_or_try_init(making).await.cloned();
            if made.is_err() {
                fleet.inner().registry.forget_unused(&key);
            }
            // It is there for who comes again.
            let _ = done.send(made);
        });
        let id = answer.await.map_err(|_| Error::Stopping)??;
        self.inner().registry.find(id.as_str())
    }

    async fn make(&self, ask: Ask, key: Option<Key>) -> Result<Arc<Member>, Error> {
        let inner = self.inner();
        inner.check()?;
        let maker = &inner.maker;
        let plan = ask.plan(maker).await?;
        let place = inner.quota.take(plan.ask.queue_timeout).await?;
        let is_kept = key.is_some();
        let (send, receive) = oneshot::channel();
        let inner_of_task = Arc::clone(inner);
        // From here on it runs to its end, whoever waits.
        inner.tasks.spawn("sandbox", move |stop| async move {
            let inner = inner_of_task;
            let (parked, dead) = match plan.memory {
                None => inner.pool.take(&plan.shape).await,
                // What is to go on cannot go into another that is there already.
                Some(_) => (None, Vec::new()),
            };
            for made in dead {
                pool::clear(made).await;
            }
            let by = plan.ask.by.clone();
            let (driver, creation) = enlist(&inner, plan, parked, key, place);
            inner.registry.add(Arc::clone(&driver.member));
            if let Err(member) = send.send(Arc::clone(&driver.member))
                && !is_kept
            {
                abandon(&member);
            }
            driver.create(creation, by, stop).await;
        });
        let member: Arc<Member> = receive.await.map_err(|_| Error::Stopping)?;
        let mut waiting = Waiting {
            member: &member,
            is_over: is_kept,
        };
        let made = member.made().await;
        waiting.is_over = true;
        drop(waiting);
        made.map(|()| member)
    }
}

/// Ends a sandbox whose client has gone away before it heard of it.
struct Waiting<'a> {
    member: &'a Arc<Member>,
    is_over: bool,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            abandon(self.member);
        }
    }
}

fn abandon(member: &Member) {
    let end = End {
        cause: Cause::Killed,
        by: String::new(),
        reason: "its client went away before it was made".to_owned(),
        at: member.clock.now(),
    };
    // The queue of one of whom nobody has heard is not full.
    if let Err(error) = member.orders.try_send(Order::End(end)) {
        tracing::error!(sandbox = %member.id, %error, "a sandbox without a client stays until its time is over");
    }
}

/// What a backend cannot do, by name.
pub(super) fn lacks(able: &Capabilities, isolation: Isolation) -> Vec<String> {
    let mut lacks = Vec::new();
    if !able.memory_snapshot.contains(&isolation) {
        lacks.push(MEMORY_SNAPSHOT.to_owned());
    }
    if !able.freeze {
        lacks.push("pause".to_owned());
    }
    let of_isolation = able.lacks.iter().filter(|(of, _)| *of == isolation);
    lacks.extend(of_isolation.map(|(_, lack)| lack.name().to_owned()));
    lacks
}

/// A member in its first state, its driver, and how it is going to be made.
fn enlist(inner: &Arc<Inner>, plan: Plan, parked: Option<Made>, key: Option<Key>, place: Place) -> (Driver, Creation) {
    let Plan {
        shape,
        policy,
        ttl,
        ask,
        memory,
        guard,
        lacks,
    } = plan;
    let created_at = inner.clock.now();
    let spec = match &parked {
        Some(made) => made.sandbox.spec().clone(),
        // Its identity and its directory come with it.
        None => Spec {
            id: SandboxId::random(),
            image: shape.image.clone(),
            isolation: shape.isolation,
            limits: shape.limits.clone(),
            identity: Identity { base: 0 },
            workspace: None,
            mounts: shape.mounts.clone(),
            labels: Default::default(),
        },
    };
    let id = spec.id.clone();
    let lease = Lease {
        format_version: FORMAT_VERSION,
        backend: shape.backend,
        spec,
        seccomp: shape.seccomp,
        policy_name: policy.name().to_owned(),
        policy_hash: policy.hash().to_owned(),
        policy: policy.snapshot(),
        labels: ask.labels.clone(),
        env: ask.env.clone(),
        created_at,
        expires_at: created_at.plus(ttl),
        idle_timeout: ask.idle_timeout,
        paused: false,
        from_pool: parked.is_some(),
        placeholders: guard.placeholders().clone(),
        key,
    };
    let mut driver = driver(inner, lease, lacks, State::Creating, place);
    // Those that go on with it are the guest's to tell.
    driver.has_execs = memory.is_none();
    let maker = inner.maker.clone();
    let workspace = ask.workspace;
    let creation: Creation = Box::pin(async move {
        let mut made = match (parked, memory, workspace) {
            (None, Some(memory), Some(workspace)) => maker.restore(id, &shape, workspace, &memory).await?,
            (None, _, workspace) => maker.make(id, &shape, workspace).await?,
            (Some(made), ..) => {
                if let Some(revision) = workspace
                    && let Err(error) = maker.furnish(&made, revision).await
                {
                    pool::clear(made).await;
                    return Err(error);
                }
                made
            }
        };
        match maker.stand(&made, shape.backend, &guard).await {
            Ok(post) => {
                made.post = post;
                Ok(made)
            }
            Err(error) => {
                pool::clear(made).await;
                Err(error)
            }
        }
    });
    (driver, creation)
}

/// The driver of what a lease describes, and its member.
pub(super) fn driver(inner: &Arc<Inner>, lease: Lease, lacks: Vec<String>, state: State, place: Place) -> Driver {
    let (orders, orders_receiver) = mpsc::channel(ORDERS);
    let view = watch::Sender::new(View {
        generation: 1,
        state,
        expires_at: lease.expires_at,
    });
    let facts = Facts {
        policy_name: lease.policy_name.clone(),
        policy_hash: lease.policy_hash.clone(),
        image: lease.spec.image.clone(),
        backend: lease.backend,
        isolation: lease.spec.isolation,
        limits: lease.spec.limits.clone(),
        labels: lease.labels.clone(),
        env: lease.env.clone(),
        created_at: lease.created_at,
        idle_timeout: lease.idle_timeout,
        from_pool: lease.from_pool,
        lacks,
    };
    let member = Arc::new(Member {
        id: lease.spec.id.clone(),
        facts,
        execs: Execs::new(Arc::clone(&inner.clock)),
        codes: Codes::new(lease.seccomp, lease.env.clone()),
        activity: Activity::new(Arc::clone(&inner.clock)),
        clock: Arc::clone(&inner.clock),
        on_shutdown: inner.config.on_shutdown,
        orders,
        view: view.subscribe(),
        sandbox: OnceLock::new(),
        directory: OnceLock::new(),
        failure: OnceLock::new(),
    });
    Driver {
        fleet: Arc::clone(inner),
        member,
        orders: orders_receiver,
        view,
        lease,
        place,
        has_execs: true,
    }
}
