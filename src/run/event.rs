//! Journal entries. Append-only vocabulary: a variant may gain optional fields, never change its meaning.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::clock::Timestamp;
use crate::error::Fault;
use crate::ids::{ApprovalId, SandboxId};
use crate::model::{Assistant, Reply};
use crate::policy::{Budgets, Decision};
use crate::tool::{Effect, ToolResult};
use crate::workspace::TreeId;

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
    },
    /// The model answered; `calls` are its tool calls, numbered and classified.
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
    /// The intent: written before the tool runs.
    ToolStarted {
        step: u32,
        attempt: u32,
        key: String,
        decision: Decision,
        sandbox: Option<SandboxId>,
    },
    /// The outcome, together with the workspace as the tool left it.
    ToolFinished {
        step: u32,
        attempt: u32,
        result: ToolResult,
        tree: TreeId,
        duration: Duration,
    },
    /// The sandbox failed, not the tool; tried again while `retry`.
    ToolLost {
        step: u32,
        attempt: u32,
        fault: Fault,
        retry: bool,
    },
    CheckFinished {
        step: u32,
        attempt: u32,
        passed: bool,
        result: ToolResult,
        tree: TreeId,
        duration: Duration,
    },
    /// The check could not be run because the sandbox failed.
    CheckLost {
        step: u32,
        attempt: u32,
        fault: Fault,
        retry: bool,
    },
    PauseRequested {
        by: String,
        reason: String,
    },
    Resumed {
        by: String,
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
    pub tree: TreeId,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
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
    Finished {
        summary: String,
        result: Option<serde_json::Value>,
    },
    Failed {
        fault: Fault,
    },
    Exhausted {
        limit: Limit,
        fault: Fault,
    },
    Cancelled {
        by: String,
        reason: String,
    },
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
    /// The answer, where this is one.
    pub fn assistant(&self) -> Option<&Assistant> {
        match self {
            Self::ModelReplied { reply, .. } => Some(&reply.message),
            _ => None,
        }
    }
}
