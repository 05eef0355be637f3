//! Journal entries. Append-only vocabulary: a variant may gain optional fields, never change its meaning.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::grounds::{Grounds, Mismatch};
use crate::clock::Timestamp;
use crate::error::Fault;
use crate::ids::{ApprovalId, RunId};
use crate::model::Reply;
use crate::policy::{Budgets, Decision};
use crate::tool::world::Blame;
use crate::tool::{Effect, ToolResult};
use crate::workspace::Revision;

/// The version that this build writes on every entry, checkpoint and task (requirement F2).
pub const FORMAT_VERSION: u32 = 1;

/// One entry of a run's journal.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    pub format_version: u32,
    /// From 1, no gaps.
    pub seq: u64,
    pub at: Timestamp,
    #[serde(flatten)]
    pub event: Event,
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Event {
    /// Always the first.
    Submitted(Submitted),
    /// A worker took the run. On a run that was already going this is the recovery: whatever was in flight is lost, its
    /// attempt number rises, and this entry is the intent of the new attempt.
    Claimed {
        worker: String,
        fence: u64,
        /// How long nothing happened, where that is so long that the model is told to look again (requirement E7).
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stale: Option<Duration>,
        /// What the run stands on, written down by its first driver.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        grounds: Option<Box<Grounds>>,
    },
    /// It is to go on, and not everything that it stands on is what it was (requirement E4). Held until somebody accepts that.
    Withheld {
        mismatches: Vec<Mismatch>,
    },
    /// The first entry of a child's own; those before it are its parent's.
    Forked(Forked),
    /// The model answered. Its tool calls are in `calls`, numbered and classified, and nowhere else.
    ModelReplied {
        step: u32,
        attempt: u32,
        reply: Reply,
        calls: Vec<Call>,
        duration: Duration,
        cost_micros: Option<u64>,
    },
    ModelFailed {
        step: u32,
        attempt: u32,
        fault: Fault,
        retry_in: Option<Duration>,
    },
    /// The policy said no; the model is told by `result`.
    ToolRefused {
        step: u32,
        decision: Decision,
        result: ToolResult,
    },
    /// The policy asks for a person. The approval is bound to `action_hash`.
    ApprovalRequested {
        step: u32,
        approval: ApprovalId,
        decision: Decision,
        action_hash: String,
    },
    ApprovalDecided {
        step: u32,
        approval: ApprovalId,
        approved: bool,
        by: String,
        reason: String,
    },
    /// The intent: written before the tool runs. `finish` runs nothing; what comes of it is the check, or the end.
    ToolStarted {
        step: u32,
        attempt: u32,
        key: String,
        decision: Decision,
    },
    /// The outcome, together with the workspace as the tool left it.
    ToolFinished {
        step: u32,
        attempt: u32,
        result: ToolResult,
        workspace: Revision,
        duration: Duration,
    },
    /// The sandbox failed, not the tool; tried again while `retry`.
    ToolLost {
        step: u32,
        attempt: u32,
        fault: Fault,
        retry: bool,
        /// Not in older journals.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        blame: Option<Blame>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        retry_in: Option<Duration>,
    },
    /// A call with an effect outside was cut off, and nobody knows whether it happened. A person decides: `approved` =
    /// call it again, else the model is told (requirements D5, D6).
    OutcomeUnknown {
        step: u32,
        attempt: u32,
        approval: ApprovalId,
        decision: Decision,
        action_hash: String,
    },
    /// The tool's own status check says that the call that was cut off did not happen.
    NotDone {
        step: u32,
        attempt: u32,
    },
    CheckFinished {
        step: u32,
        attempt: u32,
        passed: bool,
        result: ToolResult,
        workspace: Revision,
        duration: Duration,
    },
    /// The check could not be run because the sandbox failed.
    CheckLost {
        step: u32,
        attempt: u32,
        fault: Fault,
        retry: bool,
        /// Not in older journals.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        blame: Option<Blame>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        retry_in: Option<Duration>,
    },
    PauseRequested {
        by: String,
        reason: String,
        /// At once: what is going on is stopped, and begun again when the run goes on.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        now: bool,
    },
    Resumed {
        by: String,
        /// What they knew to be different, and let it go on all the same.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        accepted: Vec<Mismatch>,
    },
    CancelRequested {
        by: String,
        reason: String,
    },
    /// The driver's timer: the run's total time is used up.
    DeadlineReached,
    /// Always the last.
    Ended {
        outcome: Outcome,
    },
}

/// What was asked, frozen (requirement E4 compares these).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Submitted {
    pub prompt: String,
    pub system: String,
    /// What the model is, for people: `openai:gpt-…`, `scripted:fix.jsonl`.
    pub model: String,
    pub policy_name: String,
    pub policy_hash: String,
    pub budgets: Budgets,
    /// Shell command that must exit 0 before the run counts as finished.
    pub check: Option<String>,
    pub workspace: Revision,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
}

/// Where a child run comes from, and what is different for it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Forked {
    pub run: RunId,
    /// The last entry of the parent that belongs to the child too. (`seq` is the entry's own.)
    pub after: u64,
    /// The checkpoint that it went out from.
    pub revision: u64,
    pub by: String,
    /// For the model; the calls that were open are then given up. Without one the run goes on as it stood.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    pub policy_name: String,
    pub policy_hash: String,
    /// Anew: what the parent has used does not count.
    pub budgets: Budgets,
}

/// One tool call of a turn.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    pub step: u32,
    /// The model's id for it.
    pub id: String,
    pub tool: String,
    /// JSON text.
    pub arguments: String,
    pub effect: Effect,
}

/// How a run ended. Never overwritten.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum Outcome {
    Finished { summary: String, result: Option<Value> },
    Failed { fault: Fault },
    Exhausted { limit: Limit, fault: Fault },
    Cancelled { by: String, reason: String },
}

/// Which budget ran out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    Steps,
    ModelCalls,
    TotalTime,
    Tokens,
    Cost,
}

impl Submitted {
    /// The conversation's opening.
    pub fn opening(&self) -> [crate::model::Message; 2] {
        [
            crate::model::Message::System {
                content: self.system.clone(),
            },
            crate::model::Message::User {
                content: self.prompt.clone(),
            },
        ]
    }
}

impl Event {
    /// Whether a step is over with this entry, so that a checkpoint belongs to it (requirement E1).
    pub fn completes_step(&self) -> bool {
        match self {
            Self::ModelReplied { .. }
            | Self::ToolRefused { .. }
            | Self::ToolFinished { .. }
            | Self::CheckFinished { .. }
            | Self::ApprovalDecided { approved: false, .. }
            | Self::Ended { .. } => true,
            Self::Submitted(_)
            | Self::Forked(_)
            | Self::OutcomeUnknown { .. }
            | Self::NotDone { .. }
            | Self::Claimed { .. }
            | Self::Withheld { .. }
            | Self::ModelFailed { .. }
            | Self::ApprovalRequested { .. }
            | Self::ApprovalDecided { approved: true, .. }
            | Self::ToolStarted { .. }
            | Self::ToolLost { .. }
            | Self::CheckLost { .. }
            | Self::PauseRequested { .. }
            | Self::Resumed { .. }
            | Self::CancelRequested { .. }
            | Self::DeadlineReached => false,
        }
    }

    /// Whether this is a result whose rest is stored as that artifact.
    pub fn names_artifact(&self, artifact: &str) -> bool {
        self.result()
            .is_some_and(|result| result.data.get("artifact").and_then(Value::as_str) == Some(artifact))
    }

    /// The result that a tool or a check gave here.
    pub fn result(&self) -> Option<&ToolResult> {
        match self {
            Self::ToolRefused { result, .. }
            | Self::ToolFinished { result, .. }
            | Self::CheckFinished { result, .. } => Some(result),
            Self::Submitted(_)
            | Self::Forked(_)
            | Self::OutcomeUnknown { .. }
            | Self::NotDone { .. }
            | Self::Claimed { .. }
            | Self::Withheld { .. }
            | Self::ModelReplied { .. }
            | Self::ModelFailed { .. }
            | Self::ApprovalRequested { .. }
            | Self::ApprovalDecided { .. }
            | Self::ToolStarted { .. }
            | Self::ToolLost { .. }
            | Self::CheckLost { .. }
            | Self::PauseRequested { .. }
            | Self::Resumed { .. }
            | Self::CancelRequested { .. }
            | Self::DeadlineReached
            | Self::Ended { .. } => None,
        }
    }

    /// Its `type` as stored.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Submitted(_) => "submitted",
            Self::Claimed { .. } => "claimed",
            Self::Withheld { .. } => "withheld",
            Self::Forked(_) => "forked",
            Self::OutcomeUnknown { .. } => "outcome_unknown",
            Self::NotDone { .. } => "not_done",
            Self::ModelReplied { .. } => "model_replied",
            Self::ModelFailed { .. } => "model_failed",
            Self::ToolRefused { .. } => "tool_refused",
            Self::ApprovalRequested { .. } => "approval_requested",
            Self::ApprovalDecided { .. } => "approval_decided",
            Self::ToolStarted { .. } => "tool_started",
            Self::ToolFinished { .. } => "tool_finished",
            Self::ToolLost { .. } => "tool_lost",
            Self::CheckFinished { .. } => "check_finished",
            Self::CheckLost { .. } => "check_lost",
            Self::PauseRequested { .. } => "pause_requested",
            Self::Resumed { .. } => "resumed",
            Self::CancelRequested { .. } => "cancel_requested",
            Self::DeadlineReached => "deadline_reached",
            Self::Ended { .. } => "ended",
        }
    }
}
