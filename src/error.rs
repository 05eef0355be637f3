//! What all errors share: a [`Kind`] that decides status and exit code, and the one error contract, [`Fault`].

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// What class of failure an error is; every module's `Error` has a `kind()`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    Invalid,
    Denied,
    NotFound,
    Exists,
    WrongState,
    Conflict,
    Exhausted,
    Deadline,
    Unavailable,
    Internal,
}

impl Kind {
    /// Whether the same call may succeed later without anything else being changed.
    pub fn is_retryable(self) -> bool {
        match self {
            Self::Unavailable | Self::Deadline | Self::Conflict => true,
            Self::Invalid
            | Self::Denied
            | Self::NotFound
            | Self::Exists
            | Self::WrongState
            | Self::Exhausted
            | Self::Internal => false,
        }
    }
}

/// The one error contract (requirement C1): in events, in tool results, in the API.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// Stable, lower snake case: `timeout`, `cancelled`, `provider_rate_limited`, …
    pub code: String,
    /// One sentence for a person.
    pub message: String,
    pub retryable: bool,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub details: BTreeMap<String, String>,
}

impl Fault {
    pub fn new(code: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            code: code.into(),
            message: message.into(),
            retryable: false,
            details: BTreeMap::new(),
        }
    }

    /// The fault that stands for `error`, with its whole chain of causes in the message.
    pub fn of(code: impl Into<String>, kind: Kind, error: &dyn std::error::Error) -> Self {
        Self {
            retryable: kind.is_retryable(),
            ..Self::new(code, chain(error))
        }
    }

    pub fn retryable(mut self, retryable: bool) -> Self {
        self.retryable = retryable;
        self
    }

    pub fn with(mut self, name: &str, value: impl Into<String>) -> Self {
        self.details.insert(name.to_owned(), value.into());
        self
    }
}

/// An error and its causes on one line, `a: b: c`.
pub fn chain(error: &dyn std::error::Error) -> String {
    std::iter::successors(Some(error), |error| error.source())
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(": ")
}
