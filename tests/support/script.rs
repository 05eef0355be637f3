//! Scripted models, and tasks that use them.

use exuvia::api::proto;
use serde_json::{Value, json};

/// What a model will answer, turn by turn.
#[derive(Debug, Clone, Default)]
pub struct Script(Vec<Value>);

impl Script {
    pub fn new() -> Self {
        Self::default()
    }

    /// A turn of one call.
    pub fn call(self, tool: &str, arguments: Value) -> Self {
        self.calls(&[(tool, arguments)])
    }

    /// A turn of several calls.
    pub fn calls(mut self, calls: &[(&str, Value)]) -> Self {
        let calls = calls
            .iter()
            .map(|(tool, arguments)| json!({ "function": { "name": tool, "arguments": arguments } }));
        self.0.push(json!({ "tool_calls": calls.collect::<Vec<_>>() }));
        self
    }

    pub fn shell(self, command: &str) -> Self {
        self.call("shell", json!({ "command": command }))
    }

    pub fn write(self, path: &str, content: &str) -> Self {
        self.call("write_file", json!({ "path": path, "content": content }))
    }

    pub fn finish(self, summary: &str) -> Self {
        self.call("finish", json!({ "summary": summary }))
    }

    /// A turn that is text alone.
    pub fn say(mut self, text: &str) -> Self {
        self.0.push(json!({ "content": text }));
        self
    }

    /// The last turn's answer takes that long.
    pub fn delayed(self, ms: u64) -> Self {
        self.with("delay_ms", json!(ms))
    }

    /// The last turn used that many tokens.
    pub fn tokens(self, input: u64, output: u64) -> Self {
        self.with("usage", json!({ "input_tokens": input, "output_tokens": output }))
    }

    fn with(mut self, key: &str, value: Value) -> Self {
        self.0.last_mut().expect("a turn to set it on")[key] = value;
        self
    }

    pub fn jsonl(&self) -> String {
        self.0.iter().map(|turn| format!("{turn}\n")).collect()
    }

    /// A task that this script answers.
    pub fn task(&self) -> proto::Task {
        let script = proto::ScriptedModel {
            name: "test.jsonl".into(),
            jsonl: self.jsonl(),
        };
        proto::Task {
            prompt: "do it".into(),
            model: Some(proto::Model {
                kind: Some(proto::model::Kind::Scripted(script)),
            }),
            ..Default::default()
        }
    }
}
