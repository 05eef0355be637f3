//! Models: the [`ModelClient`] seam, its adapters, and the canonical conversation that all of them speak.
//!
//! Owns: wire formats of providers, their errors made typed, usage, prices. Must not know: runs, journals, sandboxes,
//! policies. A model step is atomic: [`ModelClient::complete`] gives a whole [`Reply`] or an [`Error`]; what streamed
//! before that goes to the [`TokenSink`] alone and is never kept, so a step can always be asked again until committed.

pub mod chat;
pub mod estimate;
pub mod masked;
pub mod openai;
pub mod price;
pub mod scripted;
pub mod spec;

use std::fmt::Debug;
use std::time::Duration;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};

use crate::error::Kind;

/// One message of a conversation, in the Chat Completions shape.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "role", rename_all = "snake_case")]
pub enum Message {
    System {
        content: String,
    },
    User {
        content: String,
    },
    Assistant(Assistant),
    /// The result of the tool call `tool_call_id`.
    Tool {
        tool_call_id: String,
        content: String,
    },
}

/// What a model said.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Assistant {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// Provider-specific items (encrypted reasoning, signatures), echoed to the same provider unchanged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub opaque: Option<serde_json::Value>,
}

/// A call that the model asks for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolCall {
    /// Unique within the conversation; made up by us where a provider gives none.
    pub id: String,
    pub name: String,
    /// JSON text as the model wrote it; not yet checked. An empty text means `{}`.
    pub arguments: String,
}

/// A tool as the model is told of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ToolDefinition {
    pub name: String,
    pub description: String,
    /// JSON Schema of the arguments.
    pub parameters: serde_json::Value,
}

/// One model call.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    pub messages: Vec<Message>,
    /// Sorted by name, so that the prefix of all calls of a run is the same bytes.
    pub tools: Vec<ToolDefinition>,
    pub timeout: Duration,
}

/// A whole answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Reply {
    pub message: Assistant,
    pub finish: Finish,
    pub usage: Usage,
    /// The model's own name for itself.
    pub model: String,
}

/// Why the model stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    Stop,
    ToolCalls,
    /// Cut at its own output limit.
    Length,
    Filtered,
}

/// Tokens of one call, or a sum of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    pub input_tokens: u64,
    /// Part of `input_tokens` that the provider had cached.
    pub cached_tokens: u64,
    pub output_tokens: u64,
    /// The provider told none, so this is our own guess (or the sum holds one); see [`estimate`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub estimated: bool,
}

impl Usage {
    pub fn total(self) -> u64 {
        self.input_tokens.saturating_add(self.output_tokens)
    }

    pub fn plus(self, other: Self) -> Self {
        Self {
            input_tokens: self.input_tokens.saturating_add(other.input_tokens),
            cached_tokens: self.cached_tokens.saturating_add(other.cached_tokens),
            output_tokens: self.output_tokens.saturating_add(other.output_tokens),
            estimated: self.estimated || other.estimated,
        }
    }
}

/// Receives text as it is made; lossy by contract, and never part of the history.
pub trait TokenSink: Send + Sync + Debug {
    fn token(&self, text: &str);
}

/// A sink that drops everything.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoTokens;

impl TokenSink for NoTokens {
    fn token(&self, _: &str) {}
}

/// Asks a model. Dropping the future cancels the call; nothing of it is kept.
#[async_trait]
pub trait ModelClient: Send + Sync + Debug {
    /// What this client is, for every output: `openai:gpt-…`, `scripted:fix.jsonl`.
    fn label(&self) -> String;
    /// Whether answers come from a file, not from a model; every output says so.
    fn is_scripted(&self) -> bool;
    async fn complete(&self, request: &Request, tokens: &dyn TokenSink) -> Result<Reply, Error>;
}

/// A model call that gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the provider limits the rate")]
    RateLimited { retry_after: Option<Duration> },
    #[error("the provider is overloaded (HTTP {status})")]
    Overloaded { status: u16, retry_after: Option<Duration> },
    #[error("the provider cannot be reached at `{url}`")]
    Unreachable {
        url: String,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error("the stream broke: {reason}")]
    Broken { reason: String },
    #[error("the model did not answer within {after:?}")]
    Timeout { after: Duration },
    #[error("the provider refused the credential (HTTP {status}): {message}")]
    Auth { status: u16, message: String },
    #[error("the account has no quota left: {message}")]
    Quota { message: String },
    #[error("the conversation is longer than the model's context: {message}")]
    ContextLength { message: String },
    #[error("the provider refused the request (HTTP {status}): {message}")]
    Refused { status: u16, message: String },
    #[error("the script `{script}` has no message {index}")]
    ScriptEnded { script: String, index: usize },
    #[error("the model is not configured: {0}")]
    Config(String),
}

impl Error {
    pub fn kind(&self) -> Kind {
        match self {
            Self::RateLimited { .. } | Self::Overloaded { .. } | Self::Unreachable { .. } | Self::Broken { .. } => {
                Kind::Unavailable
            }
            Self::Timeout { .. } => Kind::Deadline,
            Self::Auth { .. } => Kind::Denied,
            Self::Quota { .. } => Kind::Exhausted,
            Self::ContextLength { .. } | Self::Refused { .. } | Self::Config(_) => Kind::Invalid,
            Self::ScriptEnded { .. } => Kind::Exhausted,
        }
    }

    /// Stable code for [`crate::error::Fault`].
    pub fn code(&self) -> &'static str {
        match self {
            Self::RateLimited { .. } => "provider_rate_limited",
            Self::Overloaded { .. } => "provider_overloaded",
            Self::Unreachable { .. } => "provider_unreachable",
            Self::Broken { .. } => "provider_stream_broken",
            Self::Timeout { .. } => "provider_timeout",
            Self::Auth { .. } => "provider_auth",
            Self::Quota { .. } => "provider_quota",
            Self::ContextLength { .. } => "context_length_exceeded",
            Self::Refused { .. } => "provider_refused",
            Self::ScriptEnded { .. } => "script_ended",
            Self::Config(_) => "model_config",
        }
    }

    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::RateLimited { retry_after } | Self::Overloaded { retry_after, .. } => *retry_after,
            Self::Unreachable { .. }
            | Self::Broken { .. }
            | Self::Timeout { .. }
            | Self::Auth { .. }
            | Self::Quota { .. }
            | Self::ContextLength { .. }
            | Self::Refused { .. }
            | Self::ScriptEnded { .. }
            | Self::Config(_) => None,
        }
    }
}
