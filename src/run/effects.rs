//! Performs effects: model calls, tool calls, completion checks. Each gives the event that tells how it went.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::Mutex;

use super::Error;
use super::bench::{self, Bench};
use super::decide::Rules;
use super::event::{Call, Event};
use super::hub::Hub;
use super::retry::{self, Losses, has_another_model_call};
use super::session::Session;
use super::state::{Effect, State};
use crate::audit;
use crate::chaos::{KillAt, Moment};
use crate::clock::{Clock, Timestamp};
use crate::error::Fault;
use crate::model::{self, ModelClient, NoTokens};
use crate::store::{RunRecord, Store};
use crate::tool::world::{Blame, Lost};
use crate::tool::{Effect as ToolEffect, ToolResult};
use crate::workspace::Revision;

/// How long making a sandbox with its workspace may take.
const OPENING: Duration = Duration::from_secs(300);
/// How long taking a workspace in may take.
const SNAPSHOT: Duration = Duration::from_secs(300);

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
    /// A run that stood still for longer looks again before it goes on.
    pub stale_after: Duration,
    /// How long another process may stand still before its runs are taken over.
    pub lease: Duration,
}

impl Shop {
    /// What one run needs while it is driven.
    pub async fn job(&self, record: &RunRecord, session: &Session, clock: Arc<dyn Clock>) -> Result<Job, Error> {
        let rules = Rules::of(record.task.clone(), self.store.spec(&record.task).await?)?;
        Ok(Job {
            client: OnceLock::new(),
            benches: self.benches.clone(),
            clock,
            kill_at: self.kill_at,
            bench: Mutex::default(),
            artifacts: session.artifacts().map(str::to_owned).collect(),
            record: record.clone(),
            rules,
        })
    }
}

/// One run while it is driven.
#[derive(Debug)]
pub struct Job {
    pub record: RunRecord,
    pub rules: Rules,
    /// Made at the first need, so that a run whose key is not there can still be looked at, and cancelled.
    client: OnceLock<Arc<dyn ModelClient>>,
    benches: bench::Maker,
    clock: Arc<dyn Clock>,
    kill_at: KillAt,
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

/// `Err`: what went wrong is the host's, and nothing that the run should hear of.
type Work = Pin<Box<dyn Future<Output = Result<Outcome, Error>> + Send>>;

impl Job {
    /// The work of an effect. Dropping it stops the effect; nothing of it is then kept.
    pub fn perform(self: Arc<Self>, effect: &Effect, state: &State, session: &Session) -> Option<Work> {
        let now = self.clock.now();
        match *effect {
            Effect::CallModel {
                step,
                attempt,
                not_before,
            } => {
                let request = model::Request {
                    messages: session.messages(),
                    tools: self.rules.registry.definitions(),
                    timeout: state.step_limit(now),
                };
                let wait = not_before.map_or(Duration::ZERO, |at| at.since(now));
                let failures = state.failures(step);
                Some(Box::pin(async move {
                    tokio::time::sleep(wait).await;
                    Ok(self.call_model(step, attempt, failures, &request).await.into())
                }))
            }
            Effect::RunTool { step, attempt } => {
                let call = session.call(step)?.clone();
                let attempt = Attempt::of(state, step, attempt, now);
                Some(Box::pin(async move {
                    tokio::time::sleep(attempt.losses.wait()).await;
                    self.run_tool(&call, attempt).await
                }))
            }
            Effect::RunCheck { step, attempt } => {
                let command = self.rules.task.check.clone()?;
                let attempt = Attempt::of(state, step, attempt, now);
                Some(Box::pin(async move {
                    tokio::time::sleep(attempt.losses.wait()).await;
                    self.run_check(step, &command, attempt).await
                }))
            }
            Effect::Decide { .. } | Effect::Start { .. } | Effect::Probe { .. } | Effect::End { .. } => None,
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
            self.benches.put_away(Arc::clone(bench)).await;
        }
        *slot = Slot::Empty;
    }

    fn client(&self) -> Result<&dyn ModelClient, model::Error> {
        if let Some(client) = self.client.get() {
            return Ok(client.as_ref());
        }
        let made = self.rules.task.model.client()?;
        Ok(self.client.get_or_init(|| made).as_ref())
    }

    async fn call_model(&self, step: u32, attempt: u32, failures: u32, request: &model::Request) -> Event {
        let start = self.clock.now();
        let answered = async { self.client()?.complete(request, &NoTokens).await };
        match answered.await {
            Ok(mut reply) => {
                let asked = std::mem::take(&mut reply.message.tool_calls);
                let calls = self.rules.number(step, asked, &request.messages);
                let cost_micros = self.rules.task.model.cost_micros(reply.usage);
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
                let retry_in = has_another_model_call(fault.retryable, failures).then(|| {
                    let backoff = Duration::from_secs(1 << failures.min(5));
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

    async fn run_tool(&self, call: &Call, attempt: Attempt) -> Result<Outcome, Error> {
        let (step, number) = (call.step, attempt.number);
        let Tried { done, audit, duration } = self.try_tool(call, &attempt).await?;
        let event = match done {
            Ok((result, workspace)) => Event::ToolFinished {
                step,
                attempt: number,
                result,
                workspace,
                duration,
            },
            Err(error) => {
                let Loss {
                    fault,
                    retry,
                    blame,
                    retry_in,
                } = attempt.lost(&error);
                Event::ToolLost {
                    step,
                    attempt: number,
                    fault,
                    retry,
                    blame: Some(blame),
                    retry_in,
                }
            }
        };
        Ok(Outcome { event, audit })
    }

    async fn run_check(&self, step: u32, command: &str, attempt: Attempt) -> Result<Outcome, Error> {
        let arguments = serde_json::json!({ "command": command }).to_string();
        let call = Call {
            step,
            id: String::new(),
            tool: "shell".into(),
            arguments,
            effect: ToolEffect::Workspace,
        };
        let number = attempt.number;
        let Tried { done, audit, duration } = self.try_tool(&call, &attempt).await?;
        let event = match done {
            Ok((result, workspace)) => {
                let passed = result.error.is_none();
                Event::CheckFinished {
                    step,
                    attempt: number,
                    passed,
                    result,
                    workspace,
                    duration,
                }
            }
            Err(error) => {
                let Loss {
                    fault,
                    retry,
                    blame,
                    retry_in,
                } = attempt.lost(&error);
                Event::CheckLost {
                    step,
                    attempt: number,
                    fault,
                    retry,
                    blame: Some(blame),
                    retry_in,
                }
            }
        };
        Ok(Outcome { event, audit })
    }

    /// # Errors
    /// [`bench::Error::Full`]: a full disk is no fault of the run's, and what came of the try is not to be believed. It waits.
    async fn try_tool(&self, call: &Call, attempt: &Attempt) -> Result<Tried, Error> {
        let start = self.clock.now();
        let mut audit = Vec::new();
        let done = async {
            // What the host has to do has its time too, apart from what the tool may take.
            let bench = within(OPENING, self.bench(attempt.workspace)).await?;
            let done = async {
                let limit = attempt.limit.min(bench.time_left());
                let ran = bench
                    .run(&self.rules.registry, call, &self.rules.key(call.step), limit)
                    .await;
                audit = ran.audit;
                self.kill_at.at(Moment::AfterEffect, call.step);
                let result = ran.result?;
                let workspace = match call.effect {
                    ToolEffect::Workspace | ToolEffect::Idempotent | ToolEffect::External => {
                        within(SNAPSHOT, bench.snapshot()).await?
                    }
                    ToolEffect::ReadOnly | ToolEffect::Control => attempt.workspace,
                };
                Ok((result, workspace))
            };
            let done = done.await;
            if done.is_err() {
                self.discard(&bench).await;
            }
            done
        };
        let done = done.await;
        self.benches.room(done.as_ref().err())?;
        Ok(Tried {
            done,
            audit,
            duration: self.clock.now().since(start),
        })
    }

    /// A bench that failed is no longer to be trusted: it goes, and the next attempt starts from the last committed tree.
    async fn discard(&self, failed: &Arc<Bench>) {
        let mut slot = self.bench.lock().await;
        // A neighbour that failed with it has closed it already, and may have put a new one in its place.
        if matches!(&*slot, Slot::Open(bench) if Arc::ptr_eq(bench, failed)) {
            self.benches.put_away(Arc::clone(failed)).await;
            *slot = Slot::Empty;
        }
    }

    /// The bench, with the workspace as it is in `workspace`.
    async fn bench(&self, workspace: Revision) -> Result<Arc<Bench>, bench::Error> {
        let mut slot = self.bench.lock().await;
        if let Slot::Open(bench) = &*slot
            && bench.time_left().is_zero()
        {
            // Its wall time is over: a new one goes on where it stood.
            self.benches.put_away(Arc::clone(bench)).await;
            *slot = Slot::Empty;
        }
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
        let (benches, record, task) = (self.benches.clone(), self.record.clone(), self.rules.task.clone());
        let (policy, known) = (self.rules.policy.clone(), self.artifacts.clone());
        Box::pin(async move { benches.open(&record, &task, &policy, workspace, known).await })
    }
}

/// One try of a tool call or a check.
#[derive(Debug)]
struct Attempt {
    /// From 1, outages counted.
    number: u32,
    /// Tries before this one.
    losses: Losses,
    workspace: Revision,
    limit: Duration,
}

impl Attempt {
    fn of(state: &State, step: u32, number: u32, now: Timestamp) -> Self {
        let losses = state.losses(step);
        Self {
            number,
            losses,
            workspace: state.workspace,
            limit: state.step_limit(now.plus(losses.wait())),
        }
    }

    fn lost(&self, error: &bench::Error) -> Loss {
        let blame = error.blame();
        let (retry, retry_in) = retry::after(Some(blame), error.kind().is_retryable(), self.losses);
        Loss {
            fault: Fault::of(error.code(), error.kind(), error),
            retry,
            blame,
            retry_in,
        }
    }
}

/// A try that could not be made, or was lost, and whether there is another.
struct Loss {
    fault: Fault,
    retry: bool,
    blame: Blame,
    retry_in: Option<Duration>,
}

/// How a try went, and what it ran.
struct Tried {
    done: Result<(ToolResult, Revision), bench::Error>,
    audit: Vec<audit::Record>,
    duration: Duration,
}

/// Gives up waiting for the host after `limit`; the work itself is left to whoever closes.
async fn within<T>(limit: Duration, work: impl Future<Output = Result<T, bench::Error>>) -> Result<T, bench::Error> {
    match tokio::time::timeout(limit, work).await {
        Ok(done) => done,
        Err(_) => Err(Lost::new(format!("the host did not answer within {} s", limit.as_secs())).into()),
    }
}
