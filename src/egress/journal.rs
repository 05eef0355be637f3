//! What is recorded: each decision once, with the rule that made it. Where it goes is not known here.

use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};

use super::rules::{RuleId, builtin};
use crate::clock::Timestamp;

/// Takes the border's decisions.
#[async_trait]
pub trait Journal: Send + Sync + fmt::Debug {
    /// Called before the first byte of an allowed connection or request flows, with nothing counted yet. The same `id` comes
    /// again in [`Journal::record`] once it is over. A journal that promises intent before act writes here.
    ///
    /// # Errors
    /// It cannot be written: nothing flows.
    async fn intend(&self, _decision: &Decision) -> Result<(), Unwritable> {
        Ok(())
    }

    /// Called exactly once for each decision, when it is over. Must not block.
    fn record(&self, decision: Decision);
}

/// The journal could not take an intent.
#[derive(Debug, thiserror::Error)]
#[error("the record of the network could not be written")]
pub struct Unwritable(#[source] pub Box<dyn std::error::Error + Send + Sync>);

/// By which door it came.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Channel {
    /// A `CONNECT` tunnel, or a request inside an opened one.
    Connect,
    /// A request in absolute form.
    Http,
    Socks,
    Dns,
    /// A connection that was redirected here.
    Transparent,
}

/// How it was judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    Allowed,
    Denied,
    /// It was allowed and then cut: a budget, a leak, a disagreement came up inside.
    Cut,
    /// It was allowed, and the other side could not be reached or broke off.
    Failed,
}

/// One decision.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decision {
    /// Counts up from 1 within a border.
    pub id: u64,
    pub at: Timestamp,
    pub channel: Channel,
    /// The name or address as it was judged; what is no host stands here escaped and cut.
    pub host: String,
    /// 0 for a question to DNS.
    pub port: u16,
    /// What was dialled.
    pub address: Option<IpAddr>,
    pub method: Option<String>,
    /// Without the values of its query.
    pub path: Option<String>,
    pub status: Option<u16>,
    /// Bytes to the other side, counted on the wire to it.
    pub sent: u64,
    pub received: u64,
    pub outcome: Outcome,
    /// The rule that allowed, denied or cut it.
    pub rule: RuleId,
    /// One sentence; empty where the rule says it all.
    pub reason: String,
    /// The name of the credential that was put in, or whose placeholder leaked.
    pub credential: Option<String>,
    /// The version of its value, where the source has one.
    pub credential_version: Option<String>,
    pub duration: Duration,
}

impl Decision {
    /// Until it is decided it counts as broken off, by the rule that holds where none fits.
    pub(crate) fn undecided(id: u64, at: Timestamp, channel: Channel, host: String, port: u16) -> Self {
        Self {
            id,
            at,
            channel,
            host,
            port,
            address: None,
            method: None,
            path: None,
            status: None,
            sent: 0,
            received: 0,
            outcome: Outcome::Failed,
            rule: builtin::DEFAULT_DENY,
            reason: String::new(),
            credential: None,
            credential_version: None,
            duration: Duration::ZERO,
        }
    }
}

/// The path of a request as it may be recorded: control bytes escaped, cut at 1 KiB, the query named and not shown.
pub(super) fn recorded_path(target: &str) -> String {
    let (path, query) = match target.split_once('?') {
        Some((path, _)) => (path, "?[redacted]"),
        None => (target, ""),
    };
    format!("{}{query}", shown(path.as_bytes(), 1024))
}

/// Bytes of a stranger, fit for a record.
pub(super) fn shown(bytes: &[u8], at_most: usize) -> String {
    let cut = &bytes[..bytes.len().min(at_most)];
    let dots = if cut.len() < bytes.len() { "…" } else { "" };
    format!("{}{dots}", cut.escape_ascii())
}
