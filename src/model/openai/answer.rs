//! The fragments of one streamed answer, put together.
//!
//! Chunks are read as loose JSON, since "compatible" servers differ in what they leave out. What is put right here:
//!
//! - tool calls: a known id goes on with its call, a new id opens one, else `index` decides, else the last call goes on;
//!   so `index` may be missing or always 0, and an id may come late or never. Ids that the conversation already holds, or
//!   none, are replaced by `call_<answer>_<n>`.
//! - `arguments` may be missing, null, empty or an object; text is kept as written, valid or not.
//! - `content` may be null or a list of parts; a `refusal` stands for missing content.
//! - no `[DONE]`: an answer is whole once a finish reason came; without either the stream broke.
//! - an `error` object, or an `error` event, inside a 200 stream ends the call.
//! - usage may come in any chunk (the last one counts), under `x_groq`, or never: then it is estimated.
//! - `reasoning_content`, `reasoning_details` and `extra_content` are what providers want back unchanged: they become
//!   [`Opaque`]. Other vendor fields (`reasoning` among them) are dropped.

use std::collections::{BTreeMap, HashSet};

use serde_json::{Map, Value};

use super::refusal;
use crate::model::chat::Opaque;
use crate::model::{Assistant, Error, Finish, Message, Reply, Request, TokenSink, ToolCall, Usage, estimate};

/// Fields that go back to the provider as they came.
const ECHOED: [&str; 3] = ["reasoning_content", "reasoning_details", "extra_content"];

/// Whether the answer itself is still coming.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    Open,
    /// A finish reason came; only usage and the end of the stream may follow.
    Whole,
}

#[derive(Debug, Default)]
pub(super) struct Answer {
    content: String,
    refusal: String,
    calls: Vec<Fragment>,
    finish: Option<Finish>,
    done: bool,
    usage: Option<Usage>,
    model: Option<String>,
    echoed: Map<String, Value>,
}

/// A tool call so far.
#[derive(Debug, Default)]
struct Fragment {
    index: Option<u64>,
    id: String,
    name: String,
    arguments: String,
    echoed: Map<String, Value>,
}

impl Answer {
    pub(super) fn progress(&self) -> Progress {
        match self.finish {
            Some(_) => Progress::Whole,
            None => Progress::Open,
        }
    }

    /// The server said that the stream is over.
    pub(super) fn done(&mut self) {
        self.done = true;
    }

    /// Takes one event, or a whole document.
    pub(super) fn push(&mut self, event: &str, data: &str, tokens: &dyn TokenSink) -> Result<(), Error> {
        if data.trim().is_empty() {
            return Ok(());
        }
        let chunk: Value = match serde_json::from_str(data) {
            Ok(chunk) => chunk,
            Err(_) if self.progress() == Progress::Whole => return Ok(()),
            Err(error) => {
                return Err(Error::Broken {
                    reason: format!("a chunk is not JSON: {error}"),
                });
            }
        };
        if event == "error" || chunk.get("error").is_some_and(|error| !error.is_null()) {
            return Err(refusal::in_stream(&chunk));
        }
        if let Some(model) = text(&chunk, "model") {
            self.model = Some(model.to_owned());
        }
        let reported = chunk.get("usage").filter(|usage| !usage.is_null());
        if let Some(usage) = reported.or_else(|| chunk.pointer("/x_groq/usage")).and_then(usage) {
            self.usage = Some(usage);
        }
        let choices = chunk.get("choices").and_then(Value::as_array);
        let ours = |choice: &&Value| choice.get("index").and_then(Value::as_u64).unwrap_or(0) == 0;
        let Some(choice) = choices.and_then(|choices| choices.iter().find(ours)) else {
            return Ok(());
        };
        // A whole document says `message` where a chunk says `delta`.
        if let Some(delta) = choice.get("delta").or_else(|| choice.get("message")) {
            self.delta(delta, tokens);
        }
        if let Some(reason) = text(choice, "finish_reason") {
            self.finish = Some(finish(reason)?);
        }
        Ok(())
    }

    fn delta(&mut self, delta: &Value, tokens: &dyn TokenSink) {
        if let Some(content) = content(delta.get("content")) {
            self.content.push_str(&content);
            if !content.is_empty() {
                tokens.token(&content);
            }
        }
        if let Some(refusal) = text(delta, "refusal") {
            self.refusal.push_str(refusal);
        }
        echo(&mut self.echoed, delta);
        for call in delta.get("tool_calls").and_then(Value::as_array).into_iter().flatten() {
            self.call(call);
        }
    }

    fn call(&mut self, delta: &Value) {
        let index = delta.get("index").and_then(Value::as_u64);
        let function = delta.get("function").unwrap_or(&Value::Null);
        let id = text(delta, "id").unwrap_or_default();
        let name = text(function, "name").unwrap_or_default();
        let call = match self.find(index, id, name) {
            Some(at) => &mut self.calls[at],
            None => {
                self.calls.push(Fragment::default());
                self.calls.last_mut().expect("one was pushed")
            }
        };
        call.index = call.index.or(index);
        if call.id.is_empty() {
            call.id = id.to_owned();
        }
        if call.name.is_empty() {
            call.name = name.to_owned();
        }
        match function.get("arguments") {
            Some(Value::String(text)) => call.arguments.push_str(text),
            None | Some(Value::Null) => {}
            Some(other) => call.arguments.push_str(&other.to_string()),
        }
        echo(&mut call.echoed, delta);
    }

    /// The call that a fragment goes on with; none opens a new one.
    fn find(&self, index: Option<u64>, id: &str, name: &str) -> Option<usize> {
        if !id.is_empty()
            && let Some(at) = self.calls.iter().rposition(|call| call.id == id)
        {
            // One id for all parallel calls has been seen too.
            let call = &self.calls[at];
            let is_reused = !name.is_empty() && !call.name.is_empty() && index.is_some() && index != call.index;
            return (!is_reused).then_some(at);
        }
        let at = match index {
            Some(index) => self.calls.iter().rposition(|call| call.index == Some(index))?,
            None => self.calls.len().checked_sub(1)?,
        };
        let call = &self.calls[at];
        // With another id it is another call. A name again means another call too, unless the server repeats the name
        // with each fragment: then the arguments so far are not whole yet.
        let is_other_id = !id.is_empty() && !call.id.is_empty();
        let is_new_name =
            !name.is_empty() && !call.name.is_empty() && (name != call.name || is_object(&call.arguments));
        (!is_other_id && !is_new_name).then_some(at)
    }

    /// The whole reply.
    ///
    /// # Errors
    /// [`Error::Broken`] when the stream ended too early, or a call has no name.
    pub(super) fn finish(self, request: &Request, model: &str, provider: &str) -> Result<Reply, Error> {
        let broken = |reason: &str| Error::Broken {
            reason: reason.to_owned(),
        };
        let finish = match self.finish {
            Some(finish) => finish,
            None if self.done => Finish::Stop,
            None => return Err(broken("it ended before the answer was whole")),
        };
        if self.calls.iter().any(|call| call.name.is_empty()) {
            return Err(broken("a tool call has no name"));
        }
        let (tool_calls, echoed_calls) = name_calls(self.calls, request);
        let opaque = Opaque {
            provider: provider.to_owned(),
            message: self.echoed,
            calls: echoed_calls,
        };
        let has_opaque = !opaque.message.is_empty() || !opaque.calls.is_empty();
        let message = Assistant {
            content: [self.content, self.refusal].into_iter().find(|text| !text.is_empty()),
            tool_calls,
            opaque: has_opaque.then(|| serde_json::to_value(opaque).expect("it is plain data")),
        };
        Ok(Reply {
            finish: match finish {
                // Several servers say `stop` after tool calls, some say `tool_calls` after none.
                Finish::Stop | Finish::ToolCalls if message.tool_calls.is_empty() => Finish::Stop,
                Finish::Stop | Finish::ToolCalls => Finish::ToolCalls,
                Finish::Length | Finish::Filtered => finish,
            },
            usage: self.usage.unwrap_or_else(|| estimate::usage(request, &message)),
            model: self.model.unwrap_or_else(|| model.to_owned()),
            message,
        })
    }
}

/// Gives each call an id that the conversation does not hold yet.
fn name_calls(calls: Vec<Fragment>, request: &Request) -> (Vec<ToolCall>, BTreeMap<String, Map<String, Value>>) {
    let said = request.messages.iter().filter_map(|message| match message {
        Message::Assistant(assistant) => Some(assistant),
        Message::System { .. } | Message::User { .. } | Message::Tool { .. } => None,
    });
    let mut used: HashSet<String> = said
        .clone()
        .flat_map(|said| &said.tool_calls)
        .map(|call| call.id.clone())
        .collect();
    let answer = said.count();
    let mut echoed = BTreeMap::new();
    let calls = calls.into_iter().enumerate().map(|(n, call)| {
        let mut id = call.id;
        let mut tries = 0;
        while id.is_empty() || used.contains(&id) {
            id = match tries {
                0 => format!("call_{answer}_{n}"),
                _ => format!("call_{answer}_{n}_{tries}"),
            };
            tries += 1;
        }
        used.insert(id.clone());
        if !call.echoed.is_empty() {
            echoed.insert(id.clone(), call.echoed);
        }
        ToolCall {
            id,
            name: call.name,
            arguments: call.arguments,
        }
    });
    (calls.collect(), echoed)
}

/// A field that is text, and not empty.
fn text<'a>(value: &'a Value, name: &str) -> Option<&'a str> {
    value.get(name).and_then(Value::as_str).filter(|text| !text.is_empty())
}

fn content(value: Option<&Value>) -> Option<String> {
    match value? {
        Value::String(text) => Some(text.clone()),
        Value::Array(parts) => Some(parts.iter().filter_map(|part| text(part, "text")).collect()),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => None,
    }
}

/// Collects the fields that go back: text and lists grow, anything else is replaced.
fn echo(kept: &mut Map<String, Value>, delta: &Value) {
    for name in ECHOED {
        let Some(value) = delta.get(name).filter(|value| !value.is_null()) else {
            continue;
        };
        match (kept.get_mut(name), value) {
            (Some(Value::String(kept)), Value::String(more)) => kept.push_str(more),
            (Some(Value::Array(kept)), Value::Array(more)) => kept.extend(more.iter().cloned()),
            (Some(other), value) => *other = value.clone(),
            (None, value) => {
                kept.insert(name.to_owned(), value.clone());
            }
        }
    }
}

fn is_object(text: &str) -> bool {
    serde_json::from_str::<Map<String, Value>>(text).is_ok()
}

fn finish(reason: &str) -> Result<Finish, Error> {
    match reason {
        "tool_calls" | "function_call" | "tool_use" => Ok(Finish::ToolCalls),
        "length" | "max_tokens" => Ok(Finish::Length),
        "content_filter" => Ok(Finish::Filtered),
        "error" => Err(Error::Broken {
            reason: "the endpoint ended it with an error".to_owned(),
        }),
        // `stop`, and what servers call it: `eos`, `end_turn`, `stop_sequence`, …
        _ => Ok(Finish::Stop),
    }
}

fn usage(value: &Value) -> Option<Usage> {
    let count = |pointer: &str| value.pointer(pointer).and_then(Value::as_u64);
    let (input, output) = (count("/prompt_tokens"), count("/completion_tokens"));
    if input.is_none() && output.is_none() {
        return None;
    }
    Some(Usage {
        input_tokens: input.unwrap_or(0),
        cached_tokens: count("/prompt_tokens_details/cached_tokens")
            .or_else(|| count("/prompt_cache_hit_tokens"))
            .unwrap_or(0),
        output_tokens: output.unwrap_or(0),
        estimated: false,
    })
}
