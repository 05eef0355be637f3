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
//! Here is what a state is, and the doors; `apply.rs`: what each entry does; `moves.rs`: what entries are made of; `calls.rs`: tool
//! calls; `budgets.rs`: limits and deadlines; `forks.rs`: how a child begins.
//!
//! [`due`] says which effects should be going on in a state. The driver starts what is due and not yet going on, and stops
//! what goes on and is no longer due; so resuming after a crash and carrying on are the same code. The effects that
//! [`step`] returns are what became due by this entry.
#![warn(clippy::wildcard_enum_match_arm)]

mod apply;
mod budgets;
mod calls;
mod forks;
mod moves;

use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use calls::{RESULT_DEPTH, depth};

use super::event::{Entry, Event, FORMAT_VERSION, Outcome, Submitted};
use super::grounds::{Grounds, Mismatch};
use crate::clock::Timestamp;
use crate::ids::{ApprovalId, RunId};
use crate::model::Usage;
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
    /// Of these, those that the check's own program brought about.
    #[serde(default, skip_serializing_if = "is_none")]
    pub own_failures: u32,
    /// What the run stands on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grounds: Option<Box<Grounds>>,
    /// Why it was withheld; empty once it was let go on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub withheld: Vec<Mismatch>,
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
    /// `own`: of these, those that its own program brought about.
    Running {
        attempt: u32,
        failures: u32,
        #[serde(default, skip_serializing_if = "is_none")]
        own: u32,
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
            own_failures: 0,
            grounds: None,
            withheld: Vec::new(),
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

    fn is_ending(&self) -> bool {
        matches!(self.phase, Phase::Ending { .. } | Phase::Ended { .. })
    }
}

/// Left out, so that what was stored before there was such a count reads and compares as it was.
fn is_none(count: &u32) -> bool {
    *count == 0
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
