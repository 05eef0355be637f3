//! The adapter against a server on loopback that says what real servers have been seen to say.

mod failures;
mod server;
mod streams;

use std::sync::Mutex;
use std::time::Duration;

use secrecy::SecretString;
use serde_json::json;

use self::server::Server;
use super::*;
use crate::model::{Assistant, Message, ToolCall, ToolDefinition};

/// Keeps what streamed.
#[derive(Debug, Default)]
struct Tokens(Mutex<Vec<String>>);

impl TokenSink for Tokens {
    fn token(&self, text: &str) {
        self.0.lock().unwrap().push(text.to_owned());
    }
}

fn request() -> Request {
    Request {
        messages: vec![
            Message::System {
                content: "Be brief.".to_owned(),
            },
            Message::User {
                content: "Hi".to_owned(),
            },
        ],
        tools: vec![],
        timeout: Duration::from_secs(20),
    }
}

fn settings(server: &Server) -> Settings {
    Settings::new("m", Some(&server.base_url()), Some(SecretString::from("sk-secret-1")))
}

async fn ask(server: &Server) -> Result<Reply, Error> {
    OpenAi::new(settings(server))?
        .complete(&request(), &super::super::NoTokens)
        .await
}

#[tokio::test]
async fn the_request_is_what_the_interface_asks_for() {
    let server = Server::start(vec![server::events(&[
        "{\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}",
        "[DONE]",
    ])])
    .await;
    let client = OpenAi::new(Settings {
        parallel_tool_calls: Some(true),
        ..settings(&server)
    })
    .unwrap();
    let mut request = request();
    request.tools = vec![ToolDefinition {
        name: "shell".to_owned(),
        description: "Runs.".to_owned(),
        parameters: json!({"type": "object"}),
    }];
    request.messages.push(Message::Assistant(Assistant {
        content: None,
        tool_calls: vec![ToolCall {
            id: "a".to_owned(),
            name: "shell".to_owned(),
            arguments: String::new(),
        }],
        opaque: Some(json!({"provider": client.label(), "message": {"reasoning_content": "hm"}})),
    }));
    request.messages.push(Message::Tool {
        tool_call_id: "a".to_owned(),
        content: "{}".to_owned(),
    });
    client.complete(&request, &super::super::NoTokens).await.unwrap();
    let sent = server.requests().remove(0);
    let (head, body) = sent.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("POST /v1/chat/completions HTTP/1.1\r\n"), "{head}");
    assert!(head.contains("authorization: Bearer sk-secret-1"), "{head}");
    assert_eq!(
        serde_json::from_str::<Value>(body).unwrap(),
        json!({
            "model": "m",
            "tools": [{"type": "function", "function": {"name": "shell", "description": "Runs.", "parameters": {"type": "object"}}}],
            "parallel_tool_calls": true,
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": null, "tool_calls": [
                    {"id": "a", "type": "function", "function": {"name": "shell", "arguments": "{}"}},
                ], "reasoning_content": "hm"},
                {"role": "tool", "tool_call_id": "a", "content": "{}"},
            ],
            "stream": true,
            "stream_options": {"include_usage": true},
        })
    );
}

#[tokio::test]
async fn no_key_no_header_and_the_key_is_never_shown() {
    let server = Server::start(vec![server::events(&["[DONE]"])]).await;
    let client = OpenAi::new(Settings {
        key: None,
        ..settings(&server)
    })
    .unwrap();
    client.complete(&request(), &super::super::NoTokens).await.unwrap();
    assert!(!server.requests()[0].to_lowercase().contains("authorization"));

    let client = OpenAi::new(settings(&server)).unwrap();
    let shown = format!("{client:?} {}", client.label());
    assert!(!shown.contains("sk-secret-1"), "{shown}");
    assert_eq!(client.label(), format!("openai:m@{}", server.base_url()));
    let bad_key = OpenAi::new(Settings {
        key: Some(SecretString::from("sk-secret\n2")),
        ..settings(&server)
    });
    let shown = bad_key.unwrap_err().to_string();
    assert!(!shown.contains("sk-secret"), "{shown}");
}
