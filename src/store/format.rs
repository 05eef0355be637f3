//! Stored JSON: written one way, and read version first (requirement F2).

use std::fmt::Display;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{Checkpoint, Error, Signal};
use crate::audit::{self, Sealed, Unreadable};
use crate::run::Entry;
use crate::run::event::FORMAT_VERSION;

/// A signal as an inbox row holds it.
#[derive(Serialize, Deserialize)]
struct Posted {
    format_version: u32,
    #[serde(flatten)]
    signal: Signal,
}

pub(super) fn encode<T: Serialize>(value: &T) -> String {
    serde_json::to_string(value).expect("stored types have string keys only")
}

pub(super) fn encode_signal(signal: Signal) -> String {
    encode(&Posted {
        format_version: FORMAT_VERSION,
        signal,
    })
}

pub(super) fn decode_signal(what: impl Display, text: &str) -> Result<Signal, Error> {
    versioned::<Posted>(&what, text).map(|posted| posted.signal)
}

/// Reads the journal entry that stands at `seq`.
pub(super) fn decode_entry(run: &str, seq: u64, text: &str) -> Result<Entry, Error> {
    let what = format!("entry {seq} of run `{run}`");
    let entry: Entry = versioned(&what, text)?;
    in_place(what, "seq", seq, entry.seq)?;
    Ok(entry)
}

/// Reads the checkpoint that stands at `revision`.
pub(super) fn decode_checkpoint(run: &str, revision: u64, text: &str) -> Result<Checkpoint, Error> {
    let what = format!("checkpoint {revision} of run `{run}`");
    let checkpoint: Checkpoint = versioned(&what, text)?;
    in_place(what, "revision", revision, checkpoint.revision)?;
    Ok(checkpoint)
}

/// Reads the audit entry that stands at `seq`.
pub(super) fn decode_sealed(seq: u64, text: &str) -> Result<Sealed, Error> {
    let what = format!("audit entry {seq}");
    match audit::read(text) {
        Ok(sealed) => {
            in_place(what, "seq", seq, sealed.seq)?;
            Ok(sealed)
        }
        Err(Unreadable::Version { found, known }) => Err(Error::UnknownVersion { what, found, known }),
        Err(error @ (Unreadable::Text(_) | Unreadable::Rewritten)) => Err(Error::Damaged {
            what,
            reason: error.to_string(),
        }),
    }
}

fn in_place(what: String, field: &str, wanted: u64, found: u64) -> Result<(), Error> {
    if wanted == found {
        return Ok(());
    }
    Err(Error::Damaged {
        what,
        reason: format!("its `{field}` says {found}"),
    })
}

fn versioned<T: DeserializeOwned>(what: &impl Display, text: &str) -> Result<T, Error> {
    #[derive(Deserialize)]
    struct Version {
        format_version: u64,
    }
    let damaged = |error: serde_json::Error| Error::Damaged {
        what: what.to_string(),
        reason: error.to_string(),
    };
    let version: Version = serde_json::from_str(text).map_err(damaged)?;
    if !(1..=u64::from(FORMAT_VERSION)).contains(&version.format_version) {
        return Err(Error::UnknownVersion {
            what: what.to_string(),
            found: version.format_version,
            known: u64::from(FORMAT_VERSION),
        });
    }
    serde_json::from_str(text).map_err(damaged)
}
