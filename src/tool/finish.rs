//! `finish`: the model says that the task is done. Whether it is, the run decides: it reads [`Arguments`] itself.

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;

use super::result::{Draft, brief};

#[derive(Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Arguments {
    /// What was done, in a few sentences.
    #[schemars(length(min = 1))]
    pub summary: String,
    /// The answer, where the task asks for one: any JSON value.
    pub result: Option<Value>,
}

/// What the conversation keeps of it; the result itself is in the call.
pub(super) fn run(arguments: Arguments) -> Draft {
    Draft::ok(format!("finished: {}", brief(&arguments.summary)))
}
