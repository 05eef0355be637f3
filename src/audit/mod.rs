//! The audit log: append-only, hash-chained, in the store and as a JSONL file.
//!
//! Owns: the record, its canonical encoding, the chain, signed heads, verification, queries. Must not know: who acts; every
//! module that decides or does something builds a [`Record`] and hands it to the store. Secrets never enter a record.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::clock::Timestamp;

/// One thing that was done, decided or refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub at: Timestamp,
    /// Who: `user:alice`, `run:run_…`, `server`.
    pub actor: String,
    /// What, dotted: `task.submitted`, `run.claimed`, `sandbox.created`, `exec.started`, `exec.ended`, `policy.decided`,
    /// `approval.requested`, `approval.decided`, `run.ended`, …
    pub action: String,
    /// `ok`, `denied`, `failed` or what the action defines.
    pub outcome: String,
    /// Ids that the record belongs to, by name: `task`, `run`, `session`, `trace`, `sandbox`, `exec`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub ids: BTreeMap<String, String>,
    /// Everything else: argv, cwd, cause, duration, rule, reason, …
    #[serde(default, skip_serializing_if = "serde_json::Value::is_null")]
    pub details: serde_json::Value,
}

/// A record in its place in the chain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sealed {
    pub format_version: u32,
    /// From 1, no gaps.
    pub seq: u64,
    #[serde(flatten)]
    pub record: Record,
    /// Hash of the entry before, hex; 64 zeros for the first.
    pub prev: String,
    /// blake3 of the canonical encoding of all of the above, hex.
    pub hash: String,
}
