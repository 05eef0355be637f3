//! Performs effects: model calls, tool calls, completion checks. Each gives the event that tells how it went.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;

use super::Error;
use super::bench::{self, Bench};
use super::event::{Call, Event};
use super::hub::Hub;
use super::session::Session;
use super::state::{Effect, State};
use crate::audit;
use crate::chaos::KillAt;
use crate::clock::Clock;
use crate::error::Fault;
use crate::model::{self, ModelClient, NoTokens};
use crate::policy::Policy;
use crate::store::{Owner, RunRecord, Store};
use crate::task::Task;
use crate::tool::Effect as ToolEffect;
use crate::tool::registry::{Builtin, Registry};
use crate::workspace::Revision;

/// Attempts at one model call before the run fails.
pub const MODEL_ATTEMPTS: u32 = 5;
/// Attempts at one tool call, or check, whose sandbox was lost.
pub const SANDBOX_ATTEMPTS: u32 = 3;

/// What all runs of a service share.
#[derive(Debug)]
pub struct Shop {
    pub store: Arc<dyn Store>,
    pub benches: bench::Maker,
    pub clock: Arc<dyn Clock>,
    pub hub: Hub,
    /// This host's name, for the record.
    pub host: String,
    pub kill_at: KillAt,
}

impl Shop {
    /// Owners of unfinished runs whose process still lives: their runs are not to be taken.
    pub async fn living_owners(&self) -> Result<Vec<Owner>, Error> {
        let me = Owner::current().map_err(Error::Host)?;
        let runs = self.store.unfinished().await?;
        Ok(runs
            .into_iter()
            .filter_map(|run| run.owner)
            .filter(|owner| *owner != me && owner.is_alive())
            .collect())
    }

    /// What one run needs while it is driven.
    pub async fn job(&self, record: &RunRecord, session: &Session) -> Result<Job, Error> {
        let task = Task::from_value(self.store.spec(&record.task).await?)?;
        let policy = Policy::from_snapshot(&task.policy)?;
        Ok(Job {
            client: task.model.client()?,
            benches: self.benches.clone(),
            clock: Arc::clone(&self.clock),
            bench: Mutex::default(),
            artifacts: session.artifacts().map(str::to_owned).collect(),
            record: record.clone(),
            registry: Registry::all(),
            task,
            policy,
        })
    }
}

/// One run while it is driven.
#[derive(Debug)]
pub struct Job {
    pub record: RunRecord,
    pub task: Task,
    pub policy: Policy,
    pub registry: Registry,
    client: Arc<dyn ModelClient>,
    benches: bench::Maker,
    clock: Arc<dyn Clock>,
    /// Where tools run; made at the first need, given up whenever it may no longer be what the journal says.
    bench: Mutex<Slot>,
    /// What the run had stored when it was claimed.
    artifacts: Vec<String>,
}

/// The bench of a run, and how far it is. Its making must run to its end, or it would leave half a sandbox behind; so it
/// stands here, not in the effect that asked for it and may be dropped.
#[derive(Default)]
enum Slot {
    #[default]
    Empty,
    Opening(Opening),
    Open(Arc<Bench>),
}

type Opening = Pin<Box<dyn Future<Output = Result<Bench, bench::Error>> + Send>>;

impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Empty => f.write_str("Empty"),
            Self::Opening(_) => f.write_str("Opening"),
            Self::Open(bench) => f.debug_tuple("Open").field(bench).finish(),
        }
    }
}

/// How an effect went, and what goes on the audit record besides.
#[derive(Debug)]
pub struct Outcome {
    pub event: Event,
    pub audit: Vec<audit::Record>,
}

impl From<Event> for Outcome {
    fn from(event: Event) -> Self {
        Self {
            event,
            audit: Vec::new(),
        }
    }
}

type Work = Pin<Box<dyn Future<Output = Outcome> + Send>>;

impl Job {
    /// The idempotency key of a step (requirement B5): the same over all attempts.
    pub fn key(&self, step: u32) -> String {
        format!("{}/{step}", self.record.task)
    }

    /// The work of an effect. Dropping it stops the effect; nothing of it is then kept.
    pub fn perform(self: Arc<Self>, effect: &Effect, state: &State, session: &Session) -> Option<Work> {
        let now = self.clock.now();
        let limit = state.step_limit(now);
        match *effect {
            Effect::CallModel {
                step,
                attempt,
                not_before,
            } => {
                let request = model::Request {
                    messages: session.messages(),
                    tools: self.registry.definitions(),
                    timeout: limit,
                };
                let wait = not_before.map_or(Duration::ZERO, |at| at.since(now));
                Some(Box::pin(async move {
                    tokio::time::sleep(wait).await;
                    self.call_model(step, attempt, &request).await.into()
                }))
            }
            Effect::RunTool { step, attempt } => {
                let (call, workspace) = (session.call(step)?.clone(), state.workspace);
                Some(Box::pin(async move {
                    self.run_tool(&call, attempt, workspace, limit).await
                }))
            }
            Effect::RunCheck { step, attempt } => {
                let (command, workspace) = (self.task.check.clone()?, state.workspace);
                Some(Box::pin(async move {
                    self.run_check(step, attempt, &command, workspace, limit).await
                }))
            }
            Effect::Decide { .. } | Effect::Start { .. } | Effect::End { .. } => None,
        }
    }

    /// Gives up the sandbox and the working directory.
    pub async fn close(&self) {
        let mut slot = self.bench.lock().await;
        // It stays in its place until it is gone: whoever is dropped meanwhile leaves it to the next who closes.
        if let Slot::Opening(opening) = &mut *slot {
            *slot = opening.await.map_or(Slot::Empty, |bench| Slot::Open(Arc::new(bench)));
        }
        if let Slot::Open(bench) = &*slot {
            bench.close().await;
        }
        *slot = Slot::Empty;
    }

    async fn call_model(&self, step: u32, attempt: u32, request: &model::Request) -> Event {
        let start = self.clock.now();
        match self.client.complete(request, &NoTokens).await {
            Ok(mut reply) => {
                let asked = std::mem::take(&mut reply.message.tool_calls);
                let calls = self.number_calls(step, asked, &request.messages);
                let cost_micros = self.task.model.cost_micros(reply.usage);
                let duration = self.clock.now().since(start);
                Event::ModelReplied {
                    step,
                    attempt,
                    reply,
                    calls,
                    duration,
                    cost_micros,
                }
            }
            Err(error) => {
                let fault = Fault::of(error.code(), error.kind(), &error);
                let retry_in = (fault.retryable && attempt < MODEL_ATTEMPTS).then(|| {
                    let backoff = Duration::from_secs(1 << attempt.saturating_sub(1).min(5));
                    backoff.max(error.retry_after().unwrap_or_default())
                });
                Event::ModelFailed {
                    step,
                    attempt,
                    fault,
                    retry_in,
                }
            }
        }
    }

    async fn run_tool(&self, call: &Call, attempt: u32, workspace: Revision, limit: Duration) -> Outcome {
        let (step, start) = (call.step, self.clock.now());
        match self.try_tool(call, workspace, limit).await {
            Ok((result, workspace, audit)) => {
                let duration = self.clock.now().since(start);
                Outcome {
                    event: Event::ToolFinished {
                        step,
                        attempt,
                        result,
                        workspace,
                        duration,
                    },
                    audit,
                }
            }
            Err(error) => {
                let (fault, retry) = self.lost(error, attempt).await;
                Event::ToolLost {
                    step,
                    attempt,
                    fault,
                    retry,
                }
                .into()
            }
        }
    }

    async fn run_check(&self, step: u32, attempt: u32, command: &str, workspace: Revision, limit: Duration) -> Outcome {
        let start = self.clock.now();
        let arguments = serde_json::json!({ "command": command }).to_string();
        let call = Call {
            step,
            id: String::new(),
            tool: "shell".into(),
            arguments,
            effect: ToolEffect::Workspace,
        };
        match self.try_tool(&call, workspace, limit).await {
            Ok((result, workspace, audit)) => {
                let duration = self.clock.now().since(start);
                let passed = result.error.is_none();
                Outcome {
                    event: Event::CheckFinished {
                        step,
                        attempt,
                        passed,
                        result,
                        workspace,
                        duration,
                    },
                    audit,
                }
            }
            Err(error) => {
                let (fault, retry) = self.lost(error, attempt).await;
                Event::CheckLost {
                    step,
                    attempt,
                    fault,
                    retry,
                }
                .into()
            }
        }
    }

    async fn try_tool(
        &self,
        call: &Call,
        workspace: Revision,
        limit: Duration,
    ) -> Result<(crate::tool::ToolResult, Revision, Vec<audit::Record>), bench::Error> {
        let bench = self.bench(workspace).await?;
        let done = bench.run(&self.registry, call, &self.key(call.step), limit).await?;
        let workspace = match call.effect {
            ToolEffect::Workspace => bench.snapshot().await?,
            ToolEffect::ReadOnly | ToolEffect::Control => workspace,
        };
        Ok((done.result, workspace, done.audit))
    }

    /// The bench, with the workspace as it is in `workspace`.
    async fn bench(&self, workspace: Revision) -> Result<Arc<Bench>, bench::Error> {
        let mut slot = self.bench.lock().await;
        if matches!(*slot, Slot::Empty) {
            *slot = Slot::Opening(self.open_bench(workspace));
        }
        // Cancellation-safe: whoever asks next, or closes, goes on with the same opening.
        let opened = match &mut *slot {
            Slot::Opening(opening) => opening.await.map(Arc::new),
            Slot::Open(bench) => Ok(Arc::clone(bench)),
            Slot::Empty => unreachable!("it was filled above"),
        };
        *slot = match &opened {
            Ok(bench) => Slot::Open(Arc::clone(bench)),
            Err(_) => Slot::Empty,
        };
        opened
    }

    fn open_bench(&self, workspace: Revision) -> Opening {
        let (benches, record, task) = (self.benches.clone(), self.record.clone(), self.task.clone());
        let (policy, known) = (self.policy.clone(), self.artifacts.clone());
        Box::pin(async move { benches.open(&record, &task, &policy, workspace, known).await })
    }

    /// The bench is no longer to be trusted: it goes, and the next attempt starts from the last committed tree.
    async fn lost(&self, error: bench::Error, attempt: u32) -> (Fault, bool) {
        self.close().await;
        let retry = error.kind().is_retryable() && attempt < SANDBOX_ATTEMPTS;
        (Fault::of(error.code(), error.kind(), &error), retry)
    }

    /// Gives each call of a turn its step, its class and an id that no earlier call has.
    fn number_calls(&self, step: u32, asked: Vec<model::ToolCall>, messages: &[model::Message]) -> Vec<Call> {
        let mut taken: std::collections::HashSet<String> = messages
            .iter()
            .filter_map(|message| match message {
                model::Message::Tool { tool_call_id, .. } => Some(tool_call_id.clone()),
                model::Message::System { .. } | model::Message::User { .. } | model::Message::Assistant(_) => None,
            })
            .collect();
        let number = |(n, call): (usize, model::ToolCall)| {
            let step = step + 1 + n as u32;
            let is_free = !call.id.is_empty() && taken.insert(call.id.clone());
            let id = if is_free { call.id } else { format!("call_{step}") };
            // A tool that is not there touches nothing.
            let effect = self
                .registry
                .find(&call.name)
                .map_or(ToolEffect::ReadOnly, Builtin::effect);
            Call {
                step,
                id,
                tool: call.name,
                arguments: call.arguments,
                effect,
            }
        };
        asked.into_iter().enumerate().map(number).collect()
    }
}
