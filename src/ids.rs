//! Identities: one newtype each, that parses and prints one way (`run_` and 26 characters).
//!
//! An id is 128 random bits in lower-case base 32 (RFC 4648 alphabet, no padding), so it cannot be guessed and all ids
//! of a kind have one length (some runtimes take a prefix of an id for the id).

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Text that is no id of the wanted kind.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not an id of the form `{prefix}…`")]
pub struct Invalid {
    text: String,
    prefix: &'static str,
}

const LENGTH: usize = 26;

fn encode(prefix: &str, bits: u128) -> String {
    const ALPHABET: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
    let digits = (0..LENGTH).map(|n| ALPHABET[(bits >> (5 * n)) as usize & 31] as char);
    prefix.chars().chain(digits).collect()
}

fn is_id(prefix: &str, text: &str) -> bool {
    text.strip_prefix(prefix)
        .is_some_and(|rest| rest.len() == LENGTH && rest.bytes().all(|b| matches!(b, b'a'..=b'z' | b'2'..=b'7')))
}

/// Text that somebody gave for an id, short enough for an error and without what drives a terminal.
pub fn shown(text: &str) -> String {
    const MOST: usize = 64;
    let mut shown: String = text.chars().take(MOST).flat_map(char::escape_debug).collect();
    if text.chars().nth(MOST).is_some() {
        shown.push('…');
    }
    shown
}

/// From the kernel.
pub(crate) fn random_bits() -> u128 {
    let rng = ring::rand::SystemRandom::new();
    let bytes = ring::rand::generate::<[u8; 16]>(&rng).expect("the kernel gives random bytes");
    u128::from_le_bytes(bytes.expose())
}

macro_rules! id {
    ($(#[$note:meta])* $name:ident, $prefix:literal) => {
        $(#[$note])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// Makes a new one from the kernel's randomness.
            pub fn random() -> Self {
                Self(encode($prefix, random_bits()))
            }

            /// Makes the one that these bits stand for.
            pub fn from_bits(bits: u128) -> Self {
                Self(encode($prefix, bits))
            }

            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl FromStr for $name {
            type Err = Invalid;

            fn from_str(text: &str) -> Result<Self, Invalid> {
                text.to_owned().try_into()
            }
        }

        impl TryFrom<String> for $name {
            type Error = Invalid;

            fn try_from(text: String) -> Result<Self, Invalid> {
                if is_id($prefix, &text) {
                    Ok(Self(text))
                } else {
                    Err(Invalid { text: shown(&text), prefix: $prefix })
                }
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> String {
                id.0
            }
        }
    };
}

id!(
    /// What was asked.
    TaskId, "task_");
id!(
    /// One attempt at a task; a resume keeps it.
    RunId, "run_");
id!(
    /// The conversation of a run.
    SessionId, "ses_");
id!(
    /// Ties a run to the caller's own trace.
    TraceId, "trc_");
id!(
    /// One ephemeral container.
    SandboxId, "sbx_");
id!(
    /// One command in a sandbox.
    ExecId, "exe_");
id!(
    /// A code kernel in a sandbox, which keeps its state.
    ContextId, "ctx_");
id!(
    /// A sandbox with all that ran in it, kept to make others from.
    SnapshotId, "snap_");
id!(
    /// A person's decision that is asked for.
    ApprovalId, "apr_");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_parses_and_prints_one_way() {
        let id = RunId::random();
        assert_eq!(id.to_string().parse::<RunId>().unwrap(), id);
        assert_eq!(RunId::from_bits(0).as_str(), "run_aaaaaaaaaaaaaaaaaaaaaaaaaa");
        for bad in [
            "",
            "run_",
            "task_aaaaaaaaaaaaaaaaaaaaaaaaaa",
            "run_AAAAAAAAAAAAAAAAAAAAAAAAAA",
            "run_../../../../../../../../a",
        ] {
            assert!(bad.parse::<RunId>().is_err(), "{bad}");
        }
        let long = format!("run_\u{1b}{}", "x".repeat(10_000));
        let wanted = format!("`run_\\u{{1b}}{}…` is not an id of the form `run_…`", "x".repeat(59));
        assert_eq!(long.parse::<RunId>().unwrap_err().to_string(), wanted);
    }
}
