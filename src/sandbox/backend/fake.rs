//! A backend in this process: no container, no root, no walls. For tests of all that stands above sandboxes.
//!
//! Its guest (`guest`) speaks the real protocol on real sockets, runs a small shell of its own (`shell`) and does file calls
//! for real on the workspace directory, which is `/workspace` and confined to it. It is stricter than production: a call out
//! of order is refused, never forgiven. It can be told to fail or to stall at a given call, and what a connection shall say.
//!
//! It works under paused tokio time: the clock stands still while a connection has something to do, and only a program
//! that sleeps or waits for input lets it move.

mod guest;
mod shell;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::{Backend, BackendName, Capabilities, Handle, Isolation, Owned, Spec, Usage};
use crate::ids::SandboxId;
use crate::sandbox::{Error, Identity, Life};
use crate::wire;

/// A method of [`Backend`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Call {
    Create,
    Start,
    Connect,
    Freeze,
    Thaw,
    Usage,
    Stop,
    Destroy,
    ListOwned,
    Adopt,
}

/// The in-process backend.
#[derive(Debug, Default)]
pub struct Fake {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    sandboxes: BTreeMap<SandboxId, Made>,
    calls: Vec<(Call, Option<SandboxId>)>,
    plans: HashMap<Call, VecDeque<Plan>>,
    scripts: VecDeque<Vec<wire::Event>>,
    /// Of such a memory limit no sandbox is made, for so many times more.
    unfit: Option<(u64, usize)>,
}

#[derive(Debug, Clone)]
enum Plan {
    Fail(String),
    Stall(Duration),
}

#[derive(Debug, PartialEq, Clone, Copy)]
enum Phase {
    Created,
    Started,
    Stopped,
}

#[derive(Debug)]
struct Made {
    spec: Spec,
    phase: Phase,
    frozen: watch::Sender<bool>,
    /// The end of its guest.
    over: watch::Sender<bool>,
    usage: Usage,
    /// One for each connection. Dropped with the sandbox, which hangs up on all.
    connections: JoinSet<()>,
}

impl Fake {
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Makes the next `call` fail with `reason`, before it does anything. Said again: the one after that.
    pub fn fail_next(&self, call: Call, reason: &str) {
        let plan = Plan::Fail(reason.to_owned());
        self.state().plans.entry(call).or_default().push_back(plan);
    }

    /// Makes the next `times` creates of sandboxes with this memory limit fail, whatever else is made meanwhile.
    pub fn fail_of_memory(&self, bytes: u64, times: usize) {
        self.state().unfit = Some((bytes, times));
    }

    /// Makes the next `call` take `time` longer.
    pub fn stall_next(&self, call: Call, time: Duration) {
        self.state().plans.entry(call).or_default().push_back(Plan::Stall(time));
    }

    /// Makes the guest answer the next connection with just these events, then hang up: a hostile guest.
    pub fn answer_next(&self, events: Vec<wire::Event>) {
        self.state().scripts.push_back(events);
    }

    /// Sets what `usage` reads from now on.
    pub fn set_usage(&self, sandbox: &SandboxId, usage: Usage) {
        if let Some(made) = self.state().sandboxes.get_mut(sandbox) {
            made.usage = usage;
        }
    }

    /// Ends the sandbox's guest like a crash of it would: every connection breaks off.
    pub fn crash(&self, sandbox: &SandboxId) {
        if let Some(made) = self.state().sandboxes.get_mut(sandbox) {
            made.phase = Phase::Stopped;
            made.over.send_replace(true);
            made.connections.abort_all();
        }
    }

    /// All calls so far, in order.
    pub fn calls(&self) -> Vec<Call> {
        self.state().calls.iter().map(|(call, _)| *call).collect()
    }

    /// Sandboxes that were created and not destroyed.
    pub fn living(&self) -> Vec<SandboxId> {
        self.state().sandboxes.keys().cloned().collect()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A test that panicked in the middle is reported by itself.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a call and does what was planned for it.
    async fn begin(&self, call: Call, sandbox: Option<&SandboxId>) -> Result<(), Error> {
        let plan = {
            let mut state = self.state();
            state.calls.push((call, sandbox.cloned()));
            state.plans.get_mut(&call).and_then(VecDeque::pop_front)
        };
        match plan {
            None => Ok(()),
            Some(Plan::Stall(time)) => {
                tokio::time::sleep(time).await;
                Ok(())
            }
            Some(Plan::Fail(reason)) => Err(Error::Backend {
                doing: doing(call),
                sandbox: sandbox.cloned().unwrap_or_else(|| SandboxId::from_bits(0)),
                reason,
            }),
        }
    }

    /// Does `act` on a sandbox, if it is in one of `phases`.
    fn with<T>(
        &self,
        call: Call,
        sandbox: &SandboxId,
        phases: &[Phase],
        act: impl FnOnce(&mut Made) -> T,
    ) -> Result<T, Error> {
        let mut state = self.state();
        let made = state.sandboxes.get_mut(sandbox);
        let made = made.ok_or_else(|| Error::NotFound(sandbox.clone()))?;
        if !phases.contains(&made.phase) {
            return Err(Error::Backend {
                doing: doing(call),
                sandbox: sandbox.clone(),
                reason: format!("it is {:?}", made.phase).to_lowercase(),
            });
        }
        Ok(act(made))
    }
}

fn doing(call: Call) -> &'static str {
    match call {
        Call::Create => "create",
        Call::Start => "start",
        Call::Connect => "connect to",
        Call::Freeze => "freeze",
        Call::Thaw => "thaw",
        Call::Usage => "read the usage of",
        Call::Stop => "stop",
        Call::Destroy => "destroy",
        Call::ListOwned => "list",
        Call::Adopt => "take over",
    }
}

#[async_trait]
impl Backend for Fake {
    /// It claims the weakest isolation alone, and gives none.
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            name: BackendName::Oci,
            isolations: vec![Isolation::Container],
            user_namespace: false,
            freeze: true,
            memory_snapshot: Vec::new(),
            moulds: Vec::new(),
            borders: Vec::new(),
            lacks: Vec::new(),
        }
    }

    async fn create(&self, spec: &Spec) -> Result<Handle, Error> {
        spec.check()?;
        self.begin(Call::Create, Some(&spec.id)).await?;
        let handle = Handle {
            id: spec.id.clone(),
            identity: spec.identity,
            user: Identity::USER,
        };
        let mut state = self.state();
        if let Some((bytes, times)) = &mut state.unfit
            && (*bytes, *times > 0) == (spec.limits.memory_bytes, true)
        {
            *times -= 1;
            return Err(Error::Backend {
                doing: doing(Call::Create),
                sandbox: spec.id.clone(),
                reason: "told to".into(),
            });
        }
        if let Some(made) = state.sandboxes.get(&spec.id) {
            return match made.spec == *spec {
                true => Ok(handle),
                false => Err(Error::Backend {
                    doing: doing(Call::Create),
                    sandbox: spec.id.clone(),
                    reason: "it is there already, with another spec".to_owned(),
                }),
            };
        }
        if !self.capabilities().isolations.contains(&spec.isolation) {
            return Err(Error::Unsupported {
                wanted: spec.isolation.to_string(),
                missing: "the fake has no such wall".to_owned(),
            });
        }
        let made = Made {
            spec: spec.clone(),
            phase: Phase::Created,
            frozen: watch::channel(false).0,
            over: watch::channel(false).0,
            usage: Usage::default(),
            connections: JoinSet::new(),
        };
        state.sandboxes.insert(spec.id.clone(), made);
        Ok(handle)
    }

    async fn start(&self, sandbox: &Handle) -> Result<(), Error> {
        self.begin(Call::Start, Some(&sandbox.id)).await?;
        self.with(Call::Start, &sandbox.id, &[Phase::Created], |made| {
            made.phase = Phase::Started;
        })
    }

    async fn connect(&self, sandbox: &Handle) -> Result<UnixStream, Error> {
        self.begin(Call::Connect, Some(&sandbox.id)).await?;
        let script = self.state().scripts.pop_front();
        let broken = |error: std::io::Error| Error::Backend {
            doing: doing(Call::Connect),
            sandbox: sandbox.id.clone(),
            reason: error.to_string(),
        };
        let (ours, theirs) = UnixStream::pair().map_err(broken)?;
        let frozen = self.with(Call::Connect, &sandbox.id, &[Phase::Started], |made| {
            // Those that have ended are not kept.
            while made.connections.try_join_next().is_some() {}
            let frozen = *made.frozen.borrow();
            if !frozen {
                let guest = guest::Guest::new(made.spec.workspace.clone(), made.frozen.subscribe());
                made.connections.spawn(guest.serve(theirs, script));
            }
            frozen
        })?;
        match frozen {
            false => Ok(ours),
            true => Err(broken(std::io::Error::other("it is frozen"))),
        }
    }

    async fn freeze(&self, sandbox: &Handle, frozen: bool) -> Result<(), Error> {
        let call = if frozen { Call::Freeze } else { Call::Thaw };
        self.begin(call, Some(&sandbox.id)).await?;
        self.with(call, &sandbox.id, &[Phase::Started], |made| {
            made.frozen.send_replace(frozen);
        })
    }

    async fn usage(&self, sandbox: &Handle) -> Result<Usage, Error> {
        self.begin(Call::Usage, Some(&sandbox.id)).await?;
        let phases = [Phase::Created, Phase::Started, Phase::Stopped];
        self.with(Call::Usage, &sandbox.id, &phases, |made| made.usage)
    }

    async fn stop(&self, sandbox: &Handle, _grace: Duration) -> Result<(), Error> {
        self.begin(Call::Stop, Some(&sandbox.id)).await?;
        let phases = [Phase::Created, Phase::Started, Phase::Stopped];
        self.with(Call::Stop, &sandbox.id, &phases, |made| {
            made.phase = Phase::Stopped;
            made.over.send_replace(true);
            made.connections.abort_all();
        })
    }

    async fn destroy(&self, sandbox: &SandboxId) -> Result<(), Error> {
        self.begin(Call::Destroy, Some(sandbox)).await?;
        let gone = self.state().sandboxes.remove(sandbox);
        if let Some(mut made) = gone {
            made.connections.shutdown().await;
        }
        Ok(())
    }

    async fn list_owned(&self) -> Result<Vec<Owned>, Error> {
        self.begin(Call::ListOwned, None).await?;
        let owned = |(id, made): (&SandboxId, &Made)| Owned {
            id: id.clone(),
            owner_alive: true,
            identity: made.spec.identity,
        };
        Ok(self.state().sandboxes.iter().map(owned).collect())
    }

    /// Its sandboxes outlive no process, but they outlive a server in one.
    async fn adopt(&self, sandbox: &SandboxId) -> Result<Handle, Error> {
        self.begin(Call::Adopt, Some(sandbox)).await?;
        self.with(Call::Adopt, sandbox, &[Phase::Started], |made| Handle {
            id: sandbox.clone(),
            identity: made.spec.identity,
            user: Identity::USER,
        })
    }

    async fn life(&self, sandbox: &Handle) -> Result<Life, Error> {
        let state = self.state();
        let made = state.sandboxes.get(&sandbox.id);
        let made = made.ok_or_else(|| Error::NotFound(sandbox.id.clone()))?;
        Ok(Life::told(made.over.subscribe()))
    }
}

#[cfg(test)]
mod tests;
