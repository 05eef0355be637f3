//! A stated guess at token counts, for answers that come without any: one token for each four bytes, rounded up.
//!
//! A budget that counts nothing would never end a run, so a guess is made, and [`Usage::estimated`] says that it is one.

use super::{Assistant, Message, Request, Usage};

const BYTES_PER_TOKEN: u64 = 4;

fn tokens(bytes: usize) -> u64 {
    (bytes as u64).div_ceil(BYTES_PER_TOKEN)
}

/// The guess for one call.
pub fn usage(request: &Request, answer: &Assistant) -> Usage {
    let messages: usize = request.messages.iter().map(message_bytes).sum();
    let tools: usize = request
        .tools
        .iter()
        .map(|tool| tool.name.len() + tool.description.len() + tool.parameters.to_string().len())
        .sum();
    Usage {
        input_tokens: tokens(messages + tools),
        cached_tokens: 0,
        output_tokens: tokens(assistant_bytes(answer)),
        estimated: true,
    }
}

fn message_bytes(message: &Message) -> usize {
    match message {
        Message::System { content } | Message::User { content } | Message::Tool { content, .. } => content.len(),
        Message::Assistant(assistant) => assistant_bytes(assistant),
    }
}

fn assistant_bytes(assistant: &Assistant) -> usize {
    let calls = assistant
        .tool_calls
        .iter()
        .map(|call| call.name.len() + call.arguments.len());
    assistant.content.as_ref().map_or(0, String::len) + calls.sum::<usize>()
}
