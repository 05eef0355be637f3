//! A model whose answers come from a file: for tests, demos and replays. Never passed off as a real one.
//!
//! One assistant message a line, in the Chat Completions `message` shape; blank lines are skipped:
//!
//! ```json
//! {"content": "Let me look.", "tool_calls": [{"id": "c1", "function": {"name": "shell", "arguments": {"command": "ls"}}}]}
//! {"role": "assistant", "tool_calls": [{"function": {"name": "finish", "arguments": "{\"summary\": \"done\"}"}}]}
//! ```
//!
//! `arguments` may be text (passed on as it stands, bad JSON too) or an object. A missing id, or one that an earlier call
//! of the script has, becomes `call_<index>_<n>`. Two fields are ours: `usage` (`input_tokens`, `cached_tokens`,
//! `output_tokens`; without it tokens are estimated, see `estimate`) and `delay_ms` (the time that the answer takes).
//! `refusal`, `annotations`, `audio` and `function_call` may be there but empty, as providers write them. Any other key
//! is refused.
//!
//! It keeps no state: the answer to give is the number of assistant messages that the conversation already holds, so a
//! run goes on after a crash where it was.

use std::collections::HashSet;
use std::time::Duration;

use async_trait::async_trait;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::{Assistant, Error, Finish, Message, ModelClient, Reply, Request, TokenSink, ToolCall, Usage, estimate};

/// A parsed script.
#[derive(Debug, Clone)]
pub struct Scripted {
    label: String,
    turns: Vec<Turn>,
}

#[derive(Debug, Clone)]
struct Turn {
    message: Assistant,
    usage: Option<Usage>,
    delay: Duration,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    role: Option<String>,
    content: Option<Content>,
    #[serde(default)]
    tool_calls: Option<Vec<LineCall>>,
    usage: Option<LineUsage>,
    delay_ms: Option<u64>,
    #[serde(rename = "refusal")]
    _refusal: Option<Empty>,
    #[serde(rename = "annotations")]
    _annotations: Option<Empty>,
    #[serde(rename = "audio")]
    _audio: Option<Empty>,
    #[serde(rename = "function_call")]
    _function_call: Option<Empty>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
enum Part {
    Text { text: String },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LineCall {
    id: Option<String>,
    #[serde(rename = "type")]
    _type: Option<FunctionType>,
    #[serde(rename = "index")]
    _index: Option<u64>,
    function: LineFunction,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum FunctionType {
    Function,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LineFunction {
    name: String,
    arguments: Option<Arguments>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Arguments {
    Text(String),
    Object(Map<String, Value>),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LineUsage {
    #[serde(default)]
    input_tokens: u64,
    #[serde(default)]
    cached_tokens: u64,
    #[serde(default)]
    output_tokens: u64,
}

/// An empty list or object.
#[derive(Deserialize)]
#[serde(try_from = "Value")]
struct Empty;

impl TryFrom<Value> for Empty {
    type Error = &'static str;

    fn try_from(value: Value) -> Result<Self, &'static str> {
        let is_empty = value.as_array().is_some_and(Vec::is_empty) || value.as_object().is_some_and(Map::is_empty);
        is_empty
            .then_some(Self)
            .ok_or("`refusal`, `annotations`, `audio` and `function_call` must be empty")
    }
}

impl Scripted {
    /// Reads a script; `label` is its name in outputs.
    ///
    /// # Errors
    /// [`Error::Config`] with every bad line and its number, or for a script without any message.
    pub fn parse(label: &str, text: &str) -> Result<Self, Error> {
        let mut turns = Vec::new();
        let mut problems = Vec::new();
        let mut ids = HashSet::new();
        for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty()) {
            // A bad line counts too, so that made-up ids do not depend on it.
            match turn(line, turns.len() + problems.len(), &mut ids) {
                Ok(turn) => turns.push(turn),
                Err(problem) => problems.push(format!("line {number}: {problem}")),
            }
        }
        if !problems.is_empty() {
            return Err(Error::Config(format!(
                "the script `{label}` is bad: {}",
                problems.join("; ")
            )));
        }
        if turns.is_empty() {
            return Err(Error::Config(format!("the script `{label}` holds no message")));
        }
        Ok(Self {
            label: label.to_owned(),
            turns,
        })
    }
}

fn turn(line: &str, index: usize, ids: &mut HashSet<String>) -> Result<Turn, String> {
    // The line number is ours; the one inside serde's text is always 1.
    let line: Line =
        serde_json::from_str(line).map_err(|error| error.to_string().replace(" at line 1 column", " at column"))?;
    if let Some(role) = line.role.filter(|role| role != "assistant") {
        return Err(format!("role `{role}`: a script holds assistant messages only"));
    }
    let calls = line.tool_calls.unwrap_or_default();
    if line.content.is_none() && calls.is_empty() {
        return Err("neither `content` nor `tool_calls`".to_owned());
    }
    let content = line.content.map(|content| match content {
        Content::Text(text) => text,
        Content::Parts(parts) => parts.into_iter().map(|Part::Text { text }| text).collect(),
    });
    Ok(Turn {
        message: Assistant {
            content,
            tool_calls: (0..)
                .zip(calls)
                .map(|(n, call)| tool_call(call, index, n, ids))
                .collect(),
            opaque: None,
        },
        usage: line.usage.map(|usage| Usage {
            input_tokens: usage.input_tokens,
            cached_tokens: usage.cached_tokens,
            output_tokens: usage.output_tokens,
            estimated: false,
        }),
        delay: Duration::from_millis(line.delay_ms.unwrap_or(0)),
    })
}

fn tool_call(call: LineCall, index: usize, n: usize, ids: &mut HashSet<String>) -> ToolCall {
    let given = call.id.filter(|id| !id.is_empty() && !ids.contains(id));
    let id = given.unwrap_or_else(|| {
        let name = format!("call_{index}_{n}");
        let others = (1..).map(|k| format!("call_{index}_{n}_{k}"));
        std::iter::once(name.clone())
            .chain(others)
            .find(|id| !ids.contains(id))
            .unwrap_or(name)
    });
    ids.insert(id.clone());
    ToolCall {
        id,
        name: call.function.name,
        arguments: match call.function.arguments {
            Some(Arguments::Text(text)) => text,
            Some(Arguments::Object(object)) => Value::Object(object).to_string(),
            None => String::new(),
        },
    }
}

#[async_trait]
impl ModelClient for Scripted {
    fn label(&self) -> String {
        format!("scripted:{}", self.label)
    }

    fn is_scripted(&self) -> bool {
        true
    }

    async fn complete(&self, request: &Request, tokens: &dyn TokenSink) -> Result<Reply, Error> {
        let said = request
            .messages
            .iter()
            .filter(|message| matches!(message, Message::Assistant(_)));
        let index = said.count();
        let turn = self.turns.get(index).ok_or_else(|| Error::ScriptEnded {
            script: self.label.clone(),
            index,
        })?;
        if turn.delay > request.timeout {
            tokio::time::sleep(request.timeout).await;
            return Err(Error::Timeout { after: request.timeout });
        }
        if !turn.delay.is_zero() {
            tokio::time::sleep(turn.delay).await;
        }
        if let Some(content) = &turn.message.content {
            tokens.token(content);
        }
        Ok(Reply {
            message: turn.message.clone(),
            finish: match turn.message.tool_calls.is_empty() {
                true => Finish::Stop,
                false => Finish::ToolCalls,
            },
            usage: turn.usage.unwrap_or_else(|| estimate::usage(request, &turn.message)),
            model: "scripted".to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::NoTokens;

    fn request(messages: Vec<Message>) -> Request {
        Request {
            messages,
            tools: vec![],
            timeout: Duration::from_secs(60),
        }
    }

    fn user(text: &str) -> Message {
        Message::User {
            content: text.to_owned(),
        }
    }

    const SCRIPT: &str = r#"
{"role": "assistant", "content": "Look.", "tool_calls": [{"function": {"name": "shell", "arguments": {"command": "ls", "a": 1}}}, {"id": "x", "type": "function", "function": {"name": "finish", "arguments": "{bad"}}]}

{"content": [{"type": "text", "text": "o"}, {"type": "text", "text": "k"}], "refusal": null, "annotations": [], "tool_calls": null, "usage": {"input_tokens": 7, "output_tokens": 2}}
{"content": null, "tool_calls": [{"id": "x", "function": {"name": "finish"}}]}
"#;

    #[tokio::test]
    async fn the_answer_is_chosen_by_the_conversation_alone() {
        let script = Scripted::parse("s.jsonl", SCRIPT).unwrap();
        assert_eq!(
            (script.label().as_str(), script.is_scripted()),
            ("scripted:s.jsonl", true)
        );
        let mut messages = vec![user("fix it")];
        let first = script.complete(&request(messages.clone()), &NoTokens).await.unwrap();
        let expected = Reply {
            message: Assistant {
                content: Some("Look.".to_owned()),
                tool_calls: vec![
                    ToolCall {
                        id: "call_0_0".to_owned(),
                        name: "shell".to_owned(),
                        arguments: r#"{"command":"ls","a":1}"#.to_owned(),
                    },
                    ToolCall {
                        id: "x".to_owned(),
                        name: "finish".to_owned(),
                        arguments: "{bad".to_owned(),
                    },
                ],
                opaque: None,
            },
            finish: Finish::ToolCalls,
            usage: Usage {
                input_tokens: 2,
                cached_tokens: 0,
                output_tokens: 11,
                estimated: true,
            },
            model: "scripted".to_owned(),
        };
        assert_eq!(first, expected);
        messages.push(Message::Assistant(first.message));
        // Another client over the same file goes on where the first one was.
        let again = Scripted::parse("s.jsonl", SCRIPT).unwrap();
        let second = again.complete(&request(messages.clone()), &NoTokens).await.unwrap();
        assert_eq!(second.message.content.as_deref(), Some("ok"));
        assert_eq!(second.finish, Finish::Stop);
        assert_eq!((second.usage.total(), second.usage.estimated), (9, false));
        messages.push(Message::Assistant(second.message));
        let third = again.complete(&request(messages.clone()), &NoTokens).await.unwrap();
        // The script uses `x` twice; ids are unique within a conversation.
        assert_eq!(
            (
                third.message.tool_calls[0].id.as_str(),
                third.message.tool_calls[0].arguments.as_str()
            ),
            ("call_2_0", "")
        );
        messages.push(Message::Assistant(third.message));
        let error = again.complete(&request(messages), &NoTokens).await.unwrap_err();
        assert!(
            matches!(&error, Error::ScriptEnded { script, index: 3 } if script == "s.jsonl"),
            "{error}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_delay_longer_than_the_time_allowed_is_a_timeout() {
        let script = Scripted::parse("s", r#"{"content": "late", "delay_ms": 61000}"#).unwrap();
        let error = script.complete(&request(vec![]), &NoTokens).await.unwrap_err();
        assert!(matches!(error, Error::Timeout { after } if after == Duration::from_secs(60)));
    }

    #[test]
    fn every_bad_line_is_named_at_once() {
        let text = "{\"content\": \"fine\"}\n{\"contents\": 1}\n\nnot json\n{\"role\": \"user\", \"content\": \"x\"}\n{}\n{\"content\": \"x\", \"refusal\": \"no\"}\n{\"tool_calls\": [{\"type\": \"custom\", \"function\": {\"name\": \"a\"}}]}";
        let error = Scripted::parse("s", text).unwrap_err().to_string();
        insta::assert_snapshot!(error.replace("; ", ";\n"));
        let error = Scripted::parse("s", "\n \n").unwrap_err();
        assert_eq!(
            error.to_string(),
            "the model is not configured: the script `s` holds no message"
        );
    }
}
