//! The Chat Completions shape of a conversation: what is sent to an endpoint, and what a transcript is written in.
//!
//! Owns: the JSON of one message, and the [`Opaque`] items that go back to the provider they came from. Next: `openai`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::{Assistant, Message, ToolCall, ToolDefinition};

/// Provider fields of one answer that must come back unchanged ([`Assistant::opaque`]).
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Opaque {
    /// The label of the client that got them; another one does not send them.
    pub provider: String,
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub message: Map<String, Value>,
    /// By tool call id.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub calls: BTreeMap<String, Map<String, Value>>,
}

impl Opaque {
    /// The items of `message`, when they came from `provider`.
    fn of(message: &Assistant, provider: &str) -> Self {
        message
            .opaque
            .as_ref()
            .and_then(|value| Self::deserialize(value).ok())
            .filter(|opaque| opaque.provider == provider)
            .unwrap_or_default()
    }
}

/// `message` as an endpoint reads it. Opaque items go along when `provider` is the label they carry.
pub fn message(message: &Message, provider: &str) -> Value {
    match message {
        Message::System { content } => json!({"role": "system", "content": content}),
        Message::User { content } => json!({"role": "user", "content": content}),
        Message::Tool { tool_call_id, content } => {
            json!({"role": "tool", "tool_call_id": tool_call_id, "content": content})
        }
        Message::Assistant(assistant) => self::assistant(assistant, provider),
    }
}

fn assistant(message: &Assistant, provider: &str) -> Value {
    let opaque = Opaque::of(message, provider);
    let mut object = Map::new();
    object.insert("role".to_owned(), json!("assistant"));
    // Null is for answers that are nothing but calls; some endpoints refuse it elsewhere.
    let content = match &message.content {
        Some(text) => json!(text),
        None if message.tool_calls.is_empty() => json!(""),
        None => Value::Null,
    };
    object.insert("content".to_owned(), content);
    if !message.tool_calls.is_empty() {
        let calls = message
            .tool_calls
            .iter()
            .map(|call| tool_call(call, opaque.calls.get(&call.id)));
        object.insert("tool_calls".to_owned(), calls.collect());
    }
    extend(&mut object, &opaque.message);
    Value::Object(object)
}

fn tool_call(call: &ToolCall, extra: Option<&Map<String, Value>>) -> Value {
    let mut object = Map::new();
    object.insert("id".to_owned(), json!(call.id));
    object.insert("type".to_owned(), json!("function"));
    let function = json!({"name": call.name, "arguments": echoed_arguments(&call.arguments)});
    object.insert("function".to_owned(), function);
    if let Some(extra) = extra {
        extend(&mut object, extra);
    }
    Value::Object(object)
}

/// Adds fields, but never over one of ours.
fn extend(object: &mut Map<String, Value>, extra: &Map<String, Value>) {
    for (name, value) in extra {
        object.entry(name.as_str()).or_insert_with(|| value.clone());
    }
}

/// Arguments that any endpoint can parse. Several answer 400 for ever to a conversation that holds a call whose
/// arguments are no JSON object, so such a text goes back as a string inside one.
fn echoed_arguments(text: &str) -> String {
    if text.trim().is_empty() {
        return "{}".to_owned();
    }
    match serde_json::from_str::<Map<String, Value>>(text) {
        Ok(_) => text.to_owned(),
        Err(_) => json!({ "invalid_json": text }).to_string(),
    }
}

/// `definition` as an endpoint reads it.
pub fn tool(definition: &ToolDefinition) -> Value {
    json!({
        "type": "function",
        "function": {
            "name": definition.name,
            "description": definition.description,
            "parameters": definition.parameters,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(id: &str, arguments: &str) -> ToolCall {
        ToolCall {
            id: id.to_owned(),
            name: "shell".to_owned(),
            arguments: arguments.to_owned(),
        }
    }

    #[test]
    fn messages_take_the_chat_completions_shape() {
        let said = Message::Assistant(Assistant {
            content: None,
            tool_calls: vec![call("a", r#"{"command": "ls"}"#), call("b", ""), call("c", r#"{"comm"#)],
            opaque: None,
        });
        assert_eq!(
            message(&said, "openai:m"),
            json!({"role": "assistant", "content": null, "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "shell", "arguments": "{\"command\": \"ls\"}"}},
                {"id": "b", "type": "function", "function": {"name": "shell", "arguments": "{}"}},
                {"id": "c", "type": "function", "function": {"name": "shell", "arguments": "{\"invalid_json\":\"{\\\"comm\"}"}},
            ]})
        );
        let nothing = Message::Assistant(Assistant::default());
        assert_eq!(message(&nothing, ""), json!({"role": "assistant", "content": ""}));
        let result = Message::Tool {
            tool_call_id: "a".to_owned(),
            content: "{}".to_owned(),
        };
        assert_eq!(
            message(&result, ""),
            json!({"role": "tool", "tool_call_id": "a", "content": "{}"})
        );
    }

    #[test]
    fn opaque_items_go_back_to_their_own_provider_alone() {
        let opaque = json!({
            "provider": "openai:m",
            "message": {"reasoning_content": "hm", "role": "system"},
            "calls": {"a": {"extra_content": {"google": {"thought_signature": "c2ln"}}}},
        });
        let said = Message::Assistant(Assistant {
            content: Some("x".to_owned()),
            tool_calls: vec![call("a", "{}")],
            opaque: Some(opaque),
        });
        let plain = json!({"role": "assistant", "content": "x", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "shell", "arguments": "{}"}},
        ]});
        assert_eq!(message(&said, "openai:other"), plain);
        let mut echoed = plain;
        echoed["reasoning_content"] = json!("hm");
        echoed["tool_calls"][0]["extra_content"] = json!({"google": {"thought_signature": "c2ln"}});
        assert_eq!(message(&said, "openai:m"), echoed);
    }
}
