//! The pure machine. No IO, no clock, no randomness: production, resume, replay and tests all call [`step`].
//!
//! ```text
//!            Claimed             ModelReplied                    last ToolFinished | ToolRefused | ApprovalDecided(no)
//!  Queued ───────────▶ Reasoning ────────────▶ Calling ─────────────────────────────────────────┐
//!                        ▲  ▲ │ ModelFailed(retry_in): same step, attempt + 1                   │
//!                        │  └─┘                 │ each call: Pending ─Decide─▶ Running ─▶ Done  │
//!                        │                      │                    └▶ Awaiting ─▶ Approved ─┘ │
//!                        ├──────────────────────│───────────────────────────────────────────────┘
//!                        │  CheckFinished(no)   │ `finish` let through, or an answer without calls
//!                        └────────── Checking ◀─┴──▶ Ending ─Ended─▶ Ended
//!                                       └─ passed ────▲
//!  from any state that has not begun to end:  CancelRequested, DeadlineReached, a budget, a fatal fault ─▶ Ending
//!  Pause is a hold on top of a phase: asked, then held at the next point where nothing runs, or `now`: held at once.
//!  A call with an effect outside that was cut off:  Running ─▶ Unsure ─NotDone─▶ Running
//!                                                      OutcomeUnknown └─▶ Doubtful ─▶ Running (a person said so) | Done
//!  Forked: from any state to Queued; `then` keeps where the child goes on.
//! ```
//!
//! [`due`] says which effects should be going on in a state. The driver starts what is due and not yet going on, and stops
//! what goes on and is no longer due; so resuming after a crash and carrying on are the same code. The effects that
//! [`step`] returns are what became due by this entry.
#![warn(clippy::wildcard_enum_match_arm)]

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::event::{Call, Entry, Event, FORMAT_VERSION, Forked, Limit, Outcome, Submitted};
use crate::clock::Timestamp;
use crate::error::Fault;
use crate::ids::{ApprovalId, RunId};
use crate::model::{Finish, Reply, Usage};
use crate::policy::Budgets;
use crate::store::Checkpoint;
use crate::tool::Effect as ToolEffect;
use crate::workspace::Revision;

/// Empty or cut answers in a row before the run fails with `no_progress` (requirement A7).
pub const IDLE_REPLIES: u32 = 3;

/// Where a run is. The conversation is kept apart (`session.rs`), so nothing here grows with it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct State {
    pub format_version: u32,
    /// The last entry folded in.
    pub seq: u64,
    pub at: Timestamp,
    pub phase: Phase,
    /// Of a fork that is Queued: where it goes on, if not with the model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub then: Option<Box<Phase>>,
    pub hold: Hold,
    pub used: Used,
    pub budgets: Budgets,
    pub check: Option<String>,
    /// The workspace as the last finished step left it.
    pub workspace: Revision,
    /// Number of the next step; steps count from 1.
    pub next_step: u32,
    /// When the total time is used up; set by the first claim, moved on by every wait for a person and every outage.
    pub deadline: Option<Timestamp>,
    /// Since when nothing is due.
    pub parked_since: Option<Timestamp>,
    pub idle_replies: u32,
    /// Failed attempts at the model call, or the check, that is going on.
    pub failures: u32,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "name", rename_all = "snake_case")]
pub enum Phase {
    Queued,
    Reasoning {
        step: u32,
        attempt: u32,
        not_before: Option<Timestamp>,
    },
    Calling {
        calls: Vec<CallState>,
    },
    Checking {
        step: u32,
        attempt: u32,
        claim: Claim,
    },
    Ending {
        outcome: Outcome,
    },
    Ended {
        outcome: Outcome,
    },
}

/// Whether someone wants the run to stand still.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Hold {
    Free,
    /// At the next point where nothing runs.
    Asked,
    Held,
}

/// One tool call of the current turn; its arguments are in the session.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CallState {
    pub step: u32,
    pub effect: ToolEffect,
    /// Set on a well-formed `finish`.
    pub claim: Option<Claim>,
    pub status: CallStatus,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "name", rename_all = "snake_case")]
pub enum CallStatus {
    Pending,
    Awaiting {
        approval: ApprovalId,
    },
    Approved {
        approval: ApprovalId,
    },
    /// `failures` counts attempts that were lost with their sandbox, not those that an outage cut off.
    Running {
        attempt: u32,
        failures: u32,
    },
    /// It may have happened, or not; the tool is asked.
    Unsure {
        attempt: u32,
    },
    /// Not even the tool knows; a person is asked.
    Doubtful {
        approval: ApprovalId,
        attempt: u32,
    },
    Done,
}

/// What the model says it has achieved; the completion check has the last word.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Claim {
    pub summary: String,
    pub result: Option<Value>,
}

/// What a run has used up so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Used {
    /// Model calls and tool calls together; further attempts at a step do not count.
    pub steps: u32,
    pub model_calls: u32,
    pub tool_calls: u32,
    pub tokens: Usage,
    /// `None` once a call's price was not known.
    pub cost_micros: Option<u64>,
}

impl Used {
    fn nothing() -> Self {
        Self {
            steps: 0,
            model_calls: 0,
            tool_calls: 0,
            tokens: Usage::default(),
            cost_micros: Some(0),
        }
    }
}

/// Something the driver is to do. Idempotent by its own value: the same effect is never going on twice.
#[derive(Debug, Clone, PartialEq)]
pub enum Effect {
    CallModel {
        step: u32,
        attempt: u32,
        not_before: Option<Timestamp>,
    },
    /// Ask the policy; answer with `ToolStarted`, `ToolRefused` or `ApprovalRequested`.
    Decide {
        step: u32,
    },
    /// An approved call: check that the approval still fits, then `ToolStarted`.
    Start {
        step: u32,
        approval: ApprovalId,
    },
    RunTool {
        step: u32,
        attempt: u32,
    },
    /// Find out whether that attempt happened: `ToolFinished`, `NotDone`, or `OutcomeUnknown`.
    Probe {
        step: u32,
        attempt: u32,
    },
    RunCheck {
        step: u32,
        attempt: u32,
    },
    End {
        outcome: Outcome,
    },
}

/// An entry that cannot happen in this state.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("entry {seq} ({event}) cannot follow {state} at {at}")]
pub struct Denied {
    pub seq: u64,
    pub event: &'static str,
    pub state: &'static str,
    pub at: u64,
}

/// The state that a journal's first entry makes.
///
/// # Errors
/// When the entry is not `Submitted` with number 1.
pub fn start(entry: &Entry) -> Result<State, Denied> {
    if let Event::Submitted(task) = &entry.event
        && entry.seq == 1
    {
        return Ok(State::submitted(task, entry.at));
    }
    Err(Denied {
        seq: entry.seq,
        event: entry.event.name(),
        state: "nothing",
        at: 0,
    })
}

/// The state after `entry`: the first of a journal starts one, every other steps on.
///
/// # Errors
/// As [`start`] and [`step`].
pub fn next(state: Option<&State>, entry: &Entry) -> Result<State, Denied> {
    match state {
        None => start(entry),
        Some(state) => step(state, entry).map(|(next, _)| next),
    }
}

/// The state that a checkpoint holds.
///
/// # Errors
/// An unknown `format_version` is refused before anything else is looked at (requirement F2).
pub fn of_checkpoint(run: &RunId, checkpoint: &Checkpoint) -> Result<State, super::Error> {
    let found = checkpoint
        .state
        .get("format_version")
        .and_then(Value::as_u64)
        .unwrap_or_default();
    if found != u64::from(FORMAT_VERSION) {
        return Err(super::Error::UnknownVersion {
            run: run.clone(),
            found: found as u32,
        });
    }
    serde_json::from_value(checkpoint.state.clone()).map_err(|error| super::Error::Checkpoint {
        run: run.clone(),
        revision: checkpoint.revision,
        source: error,
    })
}

/// Decides what `entry` means in `state`: the next state, and the effects that became due.
///
/// # Errors
/// [`Denied`] when the entry is not the next one or cannot happen here; the state is then unchanged (requirement A1).
pub fn step(state: &State, entry: &Entry) -> Result<(State, Vec<Effect>), Denied> {
    let denied = || Denied {
        seq: entry.seq,
        event: entry.event.name(),
        state: state.public(),
        at: state.seq,
    };
    if entry.seq != state.seq + 1 {
        return Err(denied());
    }
    let mut next = state.clone();
    next.apply(&entry.event, entry.at).ok_or_else(denied)?;
    next.seq = entry.seq;
    next.at = entry.at;
    next.keep_deadline(entry.at);
    let before = due(state);
    let effects = due(&next)
        .into_iter()
        .filter(|effect| !before.contains(effect))
        .collect();
    Ok((next, effects))
}

/// What should be going on in `state`, in call order.
pub fn due(state: &State) -> Vec<Effect> {
    if state.hold == Hold::Held && !matches!(state.phase, Phase::Ending { .. }) {
        return Vec::new();
    }
    match &state.phase {
        Phase::Queued | Phase::Ended { .. } => Vec::new(),
        Phase::Reasoning {
            step,
            attempt,
            not_before,
        } => {
            vec![Effect::CallModel {
                step: *step,
                attempt: *attempt,
                not_before: *not_before,
            }]
        }
        Phase::Calling { calls } => state.window(calls).filter_map(CallState::due).collect(),
        Phase::Checking { step, attempt, .. } => vec![Effect::RunCheck {
            step: *step,
            attempt: *attempt,
        }],
        Phase::Ending { outcome } => vec![Effect::End {
            outcome: outcome.clone(),
        }],
    }
}

impl CallState {
    fn due(&self) -> Option<Effect> {
        let step = self.step;
        match &self.status {
            CallStatus::Pending => Some(Effect::Decide { step }),
            CallStatus::Approved { approval } => Some(Effect::Start {
                step,
                approval: approval.clone(),
            }),
            CallStatus::Running { attempt, .. } => Some(Effect::RunTool {
                step,
                attempt: *attempt,
            }),
            CallStatus::Unsure { attempt } => Some(Effect::Probe {
                step,
                attempt: *attempt,
            }),
            CallStatus::Awaiting { .. } | CallStatus::Doubtful { .. } | CallStatus::Done => None,
        }
    }
}

impl State {
    fn submitted(task: &Submitted, at: Timestamp) -> Self {
        Self {
            format_version: FORMAT_VERSION,
            seq: 1,
            at,
            phase: Phase::Queued,
            then: None,
            hold: Hold::Free,
            used: Used::nothing(),
            budgets: task.budgets.clone(),
            check: task.check.clone(),
            workspace: task.workspace,
            next_step: 1,
            deadline: None,
            parked_since: None,
            idle_replies: 0,
            failures: 0,
        }
    }

    /// The public state (requirements A2, A3).
    pub fn public(&self) -> &'static str {
        if self.hold == Hold::Held && !self.is_ending() {
            return "PAUSED";
        }
        match &self.phase {
            Phase::Queued => "QUEUED",
            Phase::Reasoning { .. } => "REASONING",
            Phase::Calling { calls } if calls.iter().any(CallState::is_running) => "WAITING_RESULT",
            Phase::Calling { .. } if due(self).is_empty() => "WAITING_APPROVAL",
            Phase::Calling { .. } => "TOOL_CALLING",
            Phase::Checking { .. } | Phase::Ending { .. } => "WAITING_RESULT",
            Phase::Ended { outcome } => outcome.public(),
        }
    }

    /// Whether the run has ended for good.
    pub fn is_terminal(&self) -> bool {
        matches!(self.phase, Phase::Ended { .. })
    }

    /// Whether the run waits for a person: nothing is due, and no worker is needed.
    pub fn is_parked(&self) -> bool {
        !self.is_terminal() && self.phase != Phase::Queued && due(self).is_empty()
    }

    /// The approvals that are open, in call order.
    pub fn open_approvals(&self) -> Vec<(u32, &ApprovalId)> {
        match &self.phase {
            Phase::Calling { calls } => calls.iter().filter_map(CallState::awaiting).collect(),
            Phase::Queued
            | Phase::Reasoning { .. }
            | Phase::Checking { .. }
            | Phase::Ending { .. }
            | Phase::Ended { .. } => Vec::new(),
        }
    }

    /// Lost attempts of what is going on in that step; decides whether there is another.
    pub fn failures(&self, step: u32) -> u32 {
        match &self.phase {
            Phase::Reasoning { .. } | Phase::Checking { .. } => self.failures,
            Phase::Calling { calls } => {
                let status = calls.iter().find(|call| call.step == step).map(|call| &call.status);
                match status {
                    Some(CallStatus::Running { failures, .. }) => *failures,
                    Some(
                        CallStatus::Pending
                        | CallStatus::Awaiting { .. }
                        | CallStatus::Approved { .. }
                        | CallStatus::Unsure { .. }
                        | CallStatus::Doubtful { .. }
                        | CallStatus::Done,
                    )
                    | None => 0,
                }
            }
            Phase::Queued | Phase::Ending { .. } | Phase::Ended { .. } => 0,
        }
    }

    /// The calls that may go on now: in call order, readers side by side up to the cap, anything else alone, and no more
    /// new ones than there are steps left.
    fn window<'a>(&self, calls: &'a [CallState]) -> impl Iterator<Item = &'a CallState> + use<'a> {
        let open: Vec<&CallState> = calls.iter().filter(|call| call.status != CallStatus::Done).collect();
        let readers = open
            .iter()
            .take_while(|call| call.effect == ToolEffect::ReadOnly)
            .count();
        let side_by_side = readers.clamp(1, self.budgets.parallel_tools.max(1) as usize);
        let mut left = self
            .budgets
            .steps
            .map_or(u32::MAX, |limit| limit.saturating_sub(self.used.steps));
        open.into_iter().take(side_by_side).filter(move |call| {
            let is_new = call.is_new();
            let fits = !is_new || left > 0;
            left -= u32::from(is_new && fits);
            fits
        })
    }

    /// How long a step that starts now may take: the shorter of its own limit and what is left of the run (requirement D2).
    pub fn step_limit(&self, now: Timestamp) -> Duration {
        let left = self.deadline.map_or(Duration::MAX, |deadline| deadline.since(now));
        self.budgets.step_time.min(left)
    }

    fn is_ending(&self) -> bool {
        matches!(self.phase, Phase::Ending { .. } | Phase::Ended { .. })
    }

    /// `None` when the event cannot happen here.
    fn apply(&mut self, event: &Event, at: Timestamp) -> Option<()> {
        match event {
            Event::Submitted(_) => None,
            Event::Claimed { .. } => self.claimed(at),
            Event::Forked(fork) => self.forked(fork),
            Event::ModelReplied {
                step,
                attempt,
                reply,
                calls,
                cost_micros,
                ..
            } => {
                self.expect_reasoning(*step, *attempt)?;
                self.replied(*step, reply, calls, *cost_micros);
                self.settle()
            }
            Event::ModelFailed {
                step,
                attempt,
                fault,
                retry_in,
            } => {
                self.expect_reasoning(*step, *attempt)?;
                match retry_in {
                    Some(wait) => {
                        self.failures += 1;
                        let (step, attempt) = (*step, attempt + 1);
                        self.phase = Phase::Reasoning {
                            step,
                            attempt,
                            not_before: Some(at.plus(*wait)),
                        };
                    }
                    None => self.end(Outcome::Failed { fault: fault.clone() }),
                }
                self.settle()
            }
            Event::ToolRefused { step, .. } => {
                self.call(*step, CallState::is_new)?.status = CallStatus::Done;
                self.advance();
                self.settle()
            }
            Event::ApprovalRequested { step, approval, .. } => {
                let call = self.call(*step, |call| call.status == CallStatus::Pending)?;
                call.status = CallStatus::Awaiting {
                    approval: approval.clone(),
                };
                self.settle()
            }
            Event::ApprovalDecided {
                step,
                approval,
                approved,
                ..
            } => {
                let call = self.call(*step, |call| call.awaiting() == Some((*step, approval)))?;
                call.status = match (&call.status, approved) {
                    (_, false) => CallStatus::Done,
                    (CallStatus::Doubtful { attempt, .. }, true) => CallStatus::Running {
                        attempt: attempt + 1,
                        failures: 0,
                    },
                    (_, true) => CallStatus::Approved {
                        approval: approval.clone(),
                    },
                };
                self.advance();
                Some(())
            }
            Event::ToolStarted { step, attempt, .. } => {
                let call = self.call(*step, CallState::is_new)?;
                let claim = call.claim.clone();
                call.status = match claim {
                    // `finish` runs nothing: that it was let through is all of it.
                    Some(_) => CallStatus::Done,
                    None => CallStatus::Running {
                        attempt: *attempt,
                        failures: 0,
                    },
                };
                self.used.steps += 1;
                self.used.tool_calls += 1;
                if let Some(claim) = claim {
                    self.finish(claim);
                }
                (*attempt == 1).then_some(())
            }
            Event::ToolFinished {
                step,
                attempt,
                workspace,
                ..
            } => {
                self.call(*step, |call| call.attempt() == Some(*attempt))?.status = CallStatus::Done;
                self.workspace = *workspace;
                self.advance();
                self.settle()
            }
            Event::ToolLost {
                step,
                attempt,
                fault,
                retry,
            } => {
                let failures = self.failures(*step) + 1;
                let call = self.call(*step, |call| call.is_running() && call.attempt() == Some(*attempt))?;
                if call.effect == ToolEffect::External {
                    call.status = CallStatus::Unsure { attempt: *attempt };
                    return self.settle();
                }
                call.status = CallStatus::Running {
                    attempt: attempt + 1,
                    failures,
                };
                if !retry {
                    self.end(Outcome::Failed { fault: fault.clone() });
                }
                Some(())
            }
            Event::OutcomeUnknown {
                step,
                attempt,
                approval,
                ..
            } => {
                let unsure = CallStatus::Unsure { attempt: *attempt };
                self.call(*step, |call| call.status == unsure)?.status = CallStatus::Doubtful {
                    approval: approval.clone(),
                    attempt: *attempt,
                };
                self.settle()
            }
            Event::NotDone { step, attempt } => {
                let unsure = CallStatus::Unsure { attempt: *attempt };
                self.call(*step, |call| call.status == unsure)?.status = CallStatus::Running {
                    attempt: attempt + 1,
                    failures: 0,
                };
                Some(())
            }
            Event::CheckFinished {
                step,
                attempt,
                passed,
                workspace,
                ..
            } => {
                let claim = self.expect_checking(*step, *attempt)?;
                self.failures = 0;
                self.workspace = *workspace;
                match passed {
                    true => self.end(Outcome::Finished {
                        summary: claim.summary,
                        result: claim.result,
                    }),
                    false => self.reason_next(),
                }
                self.settle()
            }
            Event::CheckLost {
                step,
                attempt,
                fault,
                retry,
            } => {
                let claim = self.expect_checking(*step, *attempt)?;
                self.failures += 1;
                self.phase = Phase::Checking {
                    step: *step,
                    attempt: attempt + 1,
                    claim,
                };
                if !retry {
                    self.end(Outcome::Failed { fault: fault.clone() });
                }
                Some(())
            }
            Event::PauseRequested { now, .. } => self.pause(*now),
            Event::Resumed { .. } => {
                let was = std::mem::replace(&mut self.hold, Hold::Free);
                (was != Hold::Free && !self.is_terminal()).then_some(())
            }
            Event::CancelRequested { by, reason } => self.stop(Outcome::Cancelled {
                by: by.clone(),
                reason: reason.clone(),
            }),
            Event::DeadlineReached => {
                let fault = Fault::new("total_time", "the run used up its total time");
                self.stop(Outcome::Exhausted {
                    limit: Limit::TotalTime,
                    fault,
                })
            }
            Event::Ended { outcome } => match &self.phase {
                Phase::Ending { outcome: decided } if decided == outcome => {
                    self.phase = Phase::Ended {
                        outcome: outcome.clone(),
                    };
                    Some(())
                }
                Phase::Queued
                | Phase::Reasoning { .. }
                | Phase::Calling { .. }
                | Phase::Checking { .. }
                | Phase::Ending { .. }
                | Phase::Ended { .. } => None,
            },
        }
    }

    fn claimed(&mut self, at: Timestamp) -> Option<()> {
        if let (Some(deadline), None) = (self.deadline, self.parked_since) {
            // An outage costs nobody anything. How long the step that it cut off had worked is not known: no more than a
            // step may take, so that is not given back.
            let gap = at.since(self.at).saturating_sub(self.budgets.step_time);
            // Nor does a clock that was set back meanwhile give anybody anything.
            let deadline = if at < self.at {
                deadline.shifted(self.at, at)
            } else {
                deadline
            };
            self.deadline = Some(deadline.plus(gap));
        }
        match &mut self.phase {
            Phase::Queued => {
                self.deadline = Some(at.plus(self.budgets.total_time));
                match self.then.take() {
                    Some(phase) => self.phase = *phase,
                    None => self.reason_next(),
                }
            }
            Phase::Reasoning {
                attempt, not_before, ..
            } => {
                *attempt += 1;
                // A wait from before the clock was set back could last for as long as it was set back.
                *not_before = not_before.filter(|_| at >= self.at);
            }
            Phase::Checking { attempt, .. } => *attempt += 1,
            Phase::Calling { calls } => {
                for call in calls {
                    let CallStatus::Running { attempt, .. } = &mut call.status else {
                        continue;
                    };
                    match call.effect {
                        // Nobody saw how it ended, and twice is not the same as once.
                        ToolEffect::External => call.status = CallStatus::Unsure { attempt: *attempt },
                        ToolEffect::ReadOnly | ToolEffect::Workspace | ToolEffect::Idempotent | ToolEffect::Control => {
                            *attempt += 1
                        }
                    }
                }
            }
            Phase::Ending { .. } => {}
            Phase::Ended { .. } => return None,
        }
        Some(())
    }

    /// A child starts from here, with budgets of its own and with nothing approved that has not run yet.
    fn forked(&mut self, fork: &Forked) -> Option<()> {
        let then = match std::mem::replace(&mut self.phase, Phase::Queued) {
            Phase::Ending { .. } | Phase::Ended { .. } if fork.message.is_none() => return None,
            Phase::Calling { mut calls } if fork.message.is_none() => {
                let open = calls.iter_mut().filter(|call| call.status != CallStatus::Done);
                open.for_each(|call| call.status = CallStatus::Pending);
                Some(Phase::Calling { calls })
            }
            Phase::Checking { step, claim, .. } if fork.message.is_none() => Some(Phase::Checking {
                step,
                attempt: 1,
                claim,
            }),
            Phase::Queued if fork.message.is_none() => self.then.take().map(|then| *then),
            Phase::Queued
            | Phase::Reasoning { .. }
            | Phase::Calling { .. }
            | Phase::Checking { .. }
            | Phase::Ending { .. }
            | Phase::Ended { .. } => None,
        };
        self.then = then.map(Box::new);
        self.hold = Hold::Free;
        self.used = Used::nothing();
        self.budgets = fork.budgets.clone();
        self.deadline = None;
        self.parked_since = None;
        self.idle_replies = 0;
        self.failures = 0;
        Some(())
    }

    fn replied(&mut self, step: u32, reply: &Reply, calls: &[Call], cost_micros: Option<u64>) {
        self.failures = 0;
        self.used.steps += 1;
        self.used.model_calls += 1;
        self.used.tokens = self.used.tokens.plus(reply.usage);
        self.used.cost_micros = self
            .used
            .cost_micros
            .zip(cost_micros)
            .map(|(sum, cost)| sum.saturating_add(cost));
        self.next_step = step + 1 + calls.len() as u32;
        if let Some(spent) = self.overspent() {
            return self.end(spent);
        }
        let text = reply.message.content.as_deref().unwrap_or_default().trim();
        match reply.finish {
            Finish::Filtered => self.end(Outcome::Failed {
                fault: Fault::new("provider_filtered", "the provider withheld the answer"),
            }),
            _ if !calls.is_empty() => {
                self.idle_replies = 0;
                self.phase = Phase::Calling {
                    calls: calls.iter().map(CallState::new).collect(),
                };
                self.advance();
            }
            Finish::Stop | Finish::ToolCalls if !text.is_empty() => {
                self.idle_replies = 0;
                self.finish(Claim {
                    summary: text.to_owned(),
                    result: None,
                });
            }
            Finish::Stop | Finish::ToolCalls | Finish::Length => {
                self.idle_replies += 1;
                match self.idle_replies < IDLE_REPLIES {
                    true => self.reason_next(),
                    false => self.end(Outcome::Failed {
                        fault: Fault::new(
                            "no_progress",
                            format!("the model gave {IDLE_REPLIES} empty answers in a row"),
                        ),
                    }),
                }
            }
        }
    }

    /// Moves a turn on: to the next model call, or into a limit.
    fn advance(&mut self) {
        let Phase::Calling { calls } = &self.phase else { return };
        let waits_for_nobody = !calls.iter().any(|call| call.is_running() || call.awaiting().is_some());
        match calls.iter().find(|call| call.status != CallStatus::Done) {
            None => self.reason_next(),
            Some(call) if call.is_new() && waits_for_nobody => {
                if let Some(outcome) = self.out_of_steps() {
                    self.end(outcome);
                }
            }
            Some(_) => {}
        }
    }

    fn finish(&mut self, claim: Claim) {
        if self.check.is_some() {
            self.phase = Phase::Checking {
                step: self.next_step,
                attempt: 1,
                claim,
            };
            self.next_step += 1;
        } else {
            self.end(Outcome::Finished {
                summary: claim.summary,
                result: claim.result,
            });
        }
    }

    fn reason_next(&mut self) {
        let model_calls = self.budgets.model_calls.filter(|limit| self.used.model_calls >= *limit);
        let spent = model_calls
            .map(|limit| exhausted(Limit::ModelCalls, "model_calls", limit.into()))
            .or_else(|| self.out_of_steps());
        match spent {
            Some(outcome) => self.end(outcome),
            None => {
                self.phase = Phase::Reasoning {
                    step: self.next_step,
                    attempt: 1,
                    not_before: None,
                }
            }
        }
    }

    fn out_of_steps(&self) -> Option<Outcome> {
        let limit = self.budgets.steps.filter(|limit| self.used.steps >= *limit)?;
        Some(exhausted(Limit::Steps, "steps", limit.into()))
    }

    fn overspent(&self) -> Option<Outcome> {
        let tokens = self.budgets.tokens.filter(|limit| self.used.tokens.total() > *limit);
        let cost = self
            .budgets
            .cost_micros
            .filter(|limit| self.used.cost_micros.is_none_or(|cost| cost > *limit));
        tokens
            .map(|limit| exhausted(Limit::Tokens, "tokens", limit))
            .or_else(|| cost.map(|limit| exhausted(Limit::Cost, "cost_micros", limit)))
    }

    fn end(&mut self, outcome: Outcome) {
        self.phase = Phase::Ending { outcome };
    }

    /// Ends a run from outside; whatever is in flight is dropped. Idempotent once the run is ending.
    fn stop(&mut self, outcome: Outcome) -> Option<()> {
        match &self.phase {
            Phase::Queued | Phase::Reasoning { .. } | Phase::Calling { .. } | Phase::Checking { .. } => {
                self.end(outcome);
                Some(())
            }
            Phase::Ending { .. } => Some(()),
            Phase::Ended { .. } => None,
        }
    }

    fn pause(&mut self, now: bool) -> Option<()> {
        let still = match &self.phase {
            Phase::Queued => true,
            Phase::Calling { calls } => !calls.iter().any(CallState::is_running),
            Phase::Reasoning { .. } | Phase::Checking { .. } => false,
            Phase::Ending { .. } => return Some(()),
            Phase::Ended { .. } => return None,
        };
        if self.hold == Hold::Free {
            self.hold = if still { Hold::Held } else { Hold::Asked };
        }
        if now {
            self.hold = Hold::Held;
        }
        Some(())
    }

    /// An outcome came in: a pause that was asked for takes hold where nothing else runs.
    fn settle(&mut self) -> Option<()> {
        let running = match &self.phase {
            Phase::Calling { calls } => calls.iter().any(CallState::is_running),
            Phase::Queued | Phase::Reasoning { .. } | Phase::Checking { .. } => false,
            Phase::Ending { .. } | Phase::Ended { .. } => true,
        };
        if self.hold == Hold::Asked && !running {
            self.hold = Hold::Held;
        }
        Some(())
    }

    /// Time in which the run waits for a person does not count.
    fn keep_deadline(&mut self, at: Timestamp) {
        match (self.is_parked(), self.parked_since) {
            (true, None) => self.parked_since = Some(at),
            (false, Some(since)) => {
                self.deadline = self.deadline.map(|deadline| deadline.shifted(since, at));
                self.parked_since = None;
            }
            (true, Some(_)) | (false, None) => {}
        }
    }

    fn expect_reasoning(&self, step: u32, attempt: u32) -> Option<()> {
        match &self.phase {
            Phase::Reasoning {
                step: s, attempt: a, ..
            } if (*s, *a) == (step, attempt) => Some(()),
            Phase::Queued
            | Phase::Reasoning { .. }
            | Phase::Calling { .. }
            | Phase::Checking { .. }
            | Phase::Ending { .. }
            | Phase::Ended { .. } => None,
        }
    }

    fn expect_checking(&self, step: u32, attempt: u32) -> Option<Claim> {
        match &self.phase {
            Phase::Checking {
                step: s,
                attempt: a,
                claim,
            } if (*s, *a) == (step, attempt) => Some(claim.clone()),
            Phase::Queued
            | Phase::Reasoning { .. }
            | Phase::Calling { .. }
            | Phase::Checking { .. }
            | Phase::Ending { .. }
            | Phase::Ended { .. } => None,
        }
    }

    /// The call with that step, if it may go on now and `wanted` holds for it.
    fn call(&mut self, step: u32, wanted: impl Fn(&CallState) -> bool) -> Option<&mut CallState> {
        let Phase::Calling { calls } = &self.phase else {
            return None;
        };
        let index = calls.iter().position(|call| call.step == step)?;
        let allowed = self.window(calls).any(|call| call.step == step && wanted(call));
        let Phase::Calling { calls } = &mut self.phase else {
            return None;
        };
        calls.get_mut(index).filter(|_| allowed)
    }
}

impl CallState {
    fn new(call: &Call) -> Self {
        let claim = (call.effect == ToolEffect::Control)
            .then(|| Claim::parse(&call.arguments))
            .flatten();
        Self {
            step: call.step,
            effect: call.effect,
            claim,
            status: CallStatus::Pending,
        }
    }

    fn is_running(&self) -> bool {
        matches!(self.status, CallStatus::Running { .. })
    }

    /// Whether it is still to be begun.
    fn is_new(&self) -> bool {
        matches!(self.status, CallStatus::Pending | CallStatus::Approved { .. })
    }

    fn attempt(&self) -> Option<u32> {
        match &self.status {
            CallStatus::Running { attempt, .. } | CallStatus::Unsure { attempt } => Some(*attempt),
            CallStatus::Pending
            | CallStatus::Awaiting { .. }
            | CallStatus::Approved { .. }
            | CallStatus::Doubtful { .. }
            | CallStatus::Done => None,
        }
    }

    fn awaiting(&self) -> Option<(u32, &ApprovalId)> {
        match &self.status {
            CallStatus::Awaiting { approval } | CallStatus::Doubtful { approval, .. } => Some((self.step, approval)),
            CallStatus::Pending
            | CallStatus::Approved { .. }
            | CallStatus::Running { .. }
            | CallStatus::Unsure { .. }
            | CallStatus::Done => None,
        }
    }
}

impl Claim {
    /// `finish {summary, result?}`; `None` when the arguments are not that.
    fn parse(arguments: &str) -> Option<Self> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Arguments {
            summary: String,
            #[serde(default)]
            result: Option<Value>,
        }
        let Arguments { summary, result } = serde_json::from_str(arguments).ok()?;
        if result.as_ref().is_some_and(|result| depth(result) > RESULT_DEPTH) {
            return None;
        }
        Some(Self { summary, result })
    }
}

/// How deep the result of a `finish` may nest. Readers of journals and of protobuf have limits of their own, and what is
/// stored must be readable by all of them.
pub const RESULT_DEPTH: u32 = 32;

/// How deep a value nests; a plain one is 0.
pub fn depth(value: &Value) -> u32 {
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => 0,
        Value::Array(items) => 1 + items.iter().map(depth).max().unwrap_or(0),
        Value::Object(fields) => 1 + fields.values().map(depth).max().unwrap_or(0),
    }
}

impl Outcome {
    /// The terminal state it is.
    pub fn public(&self) -> &'static str {
        match self {
            Self::Finished { .. } => "FINISHED",
            Self::Failed { .. } => "FAILED",
            Self::Exhausted { .. } => "EXHAUSTED",
            Self::Cancelled { .. } => "CANCELLED",
        }
    }
}

fn exhausted(limit: Limit, name: &str, value: u64) -> Outcome {
    let fault = Fault::new(
        "budget_exhausted",
        format!("the run reached its limit of {value} {name}"),
    );
    Outcome::Exhausted {
        limit,
        fault: fault.with("limit", name).with("value", value.to_string()),
    }
}
