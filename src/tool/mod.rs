//! Tools: what a model can call, how their arguments are checked, what their results look like.
//!
//! Owns: the registry (names, schemas, effect classes), argument checking, the result envelope and its size cap, one file
//! a built-in tool. Must not know: runs, journals, models' wire formats, sandboxes. Whether a call may be made is `policy`'s
//! to say.
//!
//! One call: [`run`] → `registry` finds the tool → `arguments` checks → the tool's file acts through a [`world::World`] → a
//! [`result::Draft`] → cut to size. What a tool does, or cannot do, is always a [`ToolResult`]; only a lost world is an error.

pub mod arguments;
pub mod edit_file;
pub mod finish;
pub mod list_files;
pub mod memory;
pub mod path;
pub mod read_artifact;
pub mod read_file;
pub mod registry;
pub mod result;
mod run;
pub mod search;
pub mod shell;
pub mod world;
pub mod write_file;

pub use run::{Limits, run};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::Fault;

/// What a tool can touch; decides what may run side by side and what may be tried again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Effect {
    /// Changes nothing.
    ReadOnly,
    /// Changes the workspace and nothing outside the sandbox: rolled back with the workspace tree.
    Workspace,
    /// Changes something outside, and does it once however often it is called with the same idempotency key.
    Idempotent,
    /// Changes something outside; twice is not the same as once. Never tried again on a guess (requirement D5).
    External,
    /// Handled by the runtime itself (`finish`): no sandbox.
    Control,
}

/// The one result envelope (requirement H2).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ToolResult {
    pub status: Status,
    /// One line for people and for the model.
    pub summary: String,
    #[serde(default)]
    pub data: Value,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ToolError>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    Ok,
    Error,
    /// Done, but not all of the output is here: `data.artifact` names the rest.
    Truncated,
}

/// An error that a model can act on (requirement C6).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolError {
    /// Stable, lower snake case: `unknown_tool`, `invalid_arguments`, `denied`, `timeout`, `out_of_memory`, `not_found`, …
    pub r#type: String,
    pub possible_cause: String,
    pub retryable: bool,
    pub suggestion: String,
}

impl ToolResult {
    pub fn ok(summary: impl Into<String>, data: Value) -> Self {
        Self {
            status: Status::Ok,
            summary: summary.into(),
            data,
            error: None,
        }
    }

    pub fn error(summary: impl Into<String>, data: Value, error: ToolError) -> Self {
        Self {
            status: Status::Error,
            summary: summary.into(),
            data,
            error: Some(error),
        }
    }

    /// The result that stands for a call that never ran.
    pub fn refused(fault: &Fault, suggestion: &str) -> Self {
        let error = ToolError {
            r#type: fault.code.clone(),
            possible_cause: fault.message.clone(),
            retryable: fault.retryable,
            suggestion: suggestion.to_owned(),
        };
        Self::error(fault.message.clone(), Value::Null, error)
    }

    /// What the model reads: the envelope as compact JSON.
    pub fn to_message(&self) -> String {
        serde_json::to_string(self).expect("a result is plain data")
    }
}
