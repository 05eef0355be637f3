//! Policies: what a run may do. As written ([`input`]) -> checked ([`check`]) -> [`Policy`] -> [`Policy::decide`].
//!
//! Owns: the file format, its checks, its canonical form and hash, decisions. Must not know: how anything is enforced.
//! Deny is the default, and every decision names its rule and where that is written.

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// What a run may use up; reaching one is EXHAUSTED (requirements A4, B7, D1). `None` = no limit.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Budgets {
    /// Model calls and tool calls together.
    pub steps: Option<u32>,
    pub model_calls: Option<u32>,
    /// One model call or one tool call.
    pub step_time: Duration,
    /// The whole run, without the time in which it waited for a person.
    pub total_time: Duration,
    /// Input and output tokens together.
    pub tokens: Option<u64>,
    /// Millionths of a US dollar. Needs a price for the model.
    pub cost_micros: Option<u64>,
    /// Tool calls of one turn that may run side by side.
    pub parallel_tools: u32,
}

/// What a policy says to one action.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decision {
    pub verdict: Verdict,
    /// The rule's name; `default` where none fits.
    pub rule: String,
    /// Where it is written, `policies/strict.toml:12`.
    pub source: String,
    /// For a person and for the model.
    pub reason: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    Allow,
    Ask,
    Deny,
}
