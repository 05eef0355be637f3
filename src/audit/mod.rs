//! The audit log: append-only, hash-chained, in the store and as a JSONL file.
//!
//! Owns: the record, its canonical encoding, the chain, signed heads, verification, queries. Must not know: who acts; every
//! module that decides or does something builds a [`Record`] and hands it to the store. Secrets never enter a record.
//!
//! - `canonical.rs`: the bytes that are hashed and signed; `chain.rs`: [`seal`], what binds an entry to the one before;
//! - `head.rs`: signed heads, which tell how long the chain was; `files.rs`: where all this lies in a data directory;
//! - `mirror.rs`: [`Mirror`], the JSONL copy that is kept up with the store;
//! - `verify.rs`: walks a chain, names the first broken entry; `query.rs`: finds entries.
//!
//! What it can prove: an edit, a deletion, a reorder, a repetition anywhere in the chain by the chain alone; a cut tail and a
//! database put back to an earlier copy by the signed heads. What it cannot: against someone who can read the signing key
//! on this machine, only a head that was kept elsewhere helps (`exuvia audit head`, `exuvia audit verify --head`).

mod canonical;
mod chain;
pub mod files;
pub mod head;
mod mirror;
pub mod query;
pub mod verify;

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;

pub use chain::{FORMAT_VERSION, InvalidLink, Link, Unreadable, read, seal, write};
pub use mirror::Mirror;

use serde::{Deserialize, Serialize};

use crate::clock::Timestamp;
use crate::error::Kind;
use crate::store;

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

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("could not {doing} `{path}`")]
    File {
        doing: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("`{path}` is damaged: {reason}")]
    Damaged { path: PathBuf, reason: String },
    #[error("a signed head in `{path}` has format version {found}; this build reads up to {known}")]
    UnknownVersion { path: PathBuf, found: u64, known: u64 },
    #[error("could not read the audit log of the store")]
    Store(#[source] store::Error),
    /// Store, file and heads do not tell one story: nothing more is written until a person has looked.
    #[error("`{path}` and the store disagree about audit entry {seq}: {reason}")]
    Diverged { path: PathBuf, seq: u64, reason: String },
}

impl Error {
    pub fn kind(&self) -> Kind {
        match self {
            Self::File { .. } => Kind::Unavailable,
            Self::Damaged { .. } | Self::Diverged { .. } => Kind::Internal,
            Self::UnknownVersion { .. } => Kind::WrongState,
            Self::Store(error) => error.kind(),
        }
    }
}
