//! The chain: each entry's hash covers the whole entry and the hash before it.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::canonical::{Canonical, settle};
use super::{Record, Sealed};

/// The version that this build writes on entries and heads.
pub const FORMAT_VERSION: u32 = 1;

const START: &str = "0000000000000000000000000000000000000000000000000000000000000000";

/// A place in the chain: how many entries there are up to it, and the hash of the last of them. Prints as `COUNT:HASH`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Link {
    pub seq: u64,
    pub hash: String,
}

/// Text that is no `COUNT:HASH`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not of the form `COUNT:HASH` (64 lower-case hex digits)")]
pub struct InvalidLink(String);

impl Link {
    /// The place before the first entry.
    pub fn start() -> Self {
        Self {
            seq: 0,
            hash: START.to_owned(),
        }
    }

    pub fn of(entry: &Sealed) -> Self {
        Self {
            seq: entry.seq,
            hash: entry.hash.clone(),
        }
    }
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.seq, self.hash)
    }
}

impl FromStr for Link {
    type Err = InvalidLink;

    fn from_str(text: &str) -> Result<Self, InvalidLink> {
        let invalid = || InvalidLink(text.to_owned());
        let (seq, hash) = text.split_once(':').ok_or_else(invalid)?;
        let is_hash = hash.len() == START.len() && hash.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        match seq.parse() {
            Ok(seq) if is_hash => Ok(Self {
                seq,
                hash: hash.to_owned(),
            }),
            _ => Err(invalid()),
        }
    }
}

/// Puts `record` behind `after`.
pub fn seal(after: &Link, mut record: Record) -> Sealed {
    record.details = settle(record.details);
    let mut entry = Sealed {
        format_version: FORMAT_VERSION,
        seq: after.seq + 1,
        record,
        prev: after.hash.clone(),
        hash: String::new(),
    };
    entry.hash = hash(&entry);
    entry
}

/// Why a text is not an entry that [`seal`] made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unreadable {
    #[error("it has format version {found}; this build reads up to {known}")]
    Version { found: u64, known: u64 },
    #[error("it is no entry: {0}")]
    Text(String),
    /// Same meaning, other bytes: a field that nobody reads would not be covered by the hash.
    #[error("its text is not the one that was written")]
    Rewritten,
}

/// An entry as a line of the log and a row of the store have it.
pub fn write(entry: &Sealed) -> String {
    serde_json::to_string(entry).expect("an entry has string keys only")
}

/// Reads what [`write`] wrote, byte by byte the same. Does not check the hash.
pub fn read(text: &str) -> Result<Sealed, Unreadable> {
    #[derive(Deserialize)]
    struct Version {
        format_version: u64,
    }
    let no_entry = |error: serde_json::Error| Unreadable::Text(error.to_string());
    let version: Version = serde_json::from_str(text).map_err(no_entry)?;
    if version.format_version != u64::from(FORMAT_VERSION) {
        return Err(Unreadable::Version {
            found: version.format_version,
            known: u64::from(FORMAT_VERSION),
        });
    }
    let entry: Sealed = serde_json::from_str(text).map_err(no_entry)?;
    if write(&entry) == text {
        Ok(entry)
    } else {
        Err(Unreadable::Rewritten)
    }
}

/// The hash that `entry` must carry.
pub(super) fn hash(entry: &Sealed) -> String {
    let Sealed {
        format_version,
        seq,
        record,
        prev,
        hash: _,
    } = entry;
    let Record {
        at,
        actor,
        action,
        outcome,
        ids,
        details,
    } = record;
    let mut canonical = Canonical::new("exuvia audit entry");
    canonical.count(u64::from(*format_version));
    canonical.count(*seq);
    canonical.text(prev);
    canonical.signed(at.0);
    canonical.text(actor);
    canonical.text(action);
    canonical.text(outcome);
    canonical.count(ids.len() as u64);
    for (name, id) in ids {
        canonical.text(name);
        canonical.text(id);
    }
    canonical.value(details);
    blake3::hash(canonical.bytes()).to_hex().to_string()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;

    use super::*;
    use crate::clock::Timestamp;

    fn record(details: serde_json::Value) -> Record {
        Record {
            at: Timestamp(1_700_000_000_123),
            actor: "run:run_x".to_owned(),
            action: "exec.ended".to_owned(),
            outcome: "ok".to_owned(),
            ids: BTreeMap::from([("run".to_owned(), "run_x".to_owned())]),
            details,
        }
    }

    #[test]
    fn an_entry_has_this_hash_for_ever() {
        let entry = seal(
            &Link::start(),
            record(json!({"b": [1, -2, 0.1], "a": {"z": null, "y": true}})),
        );
        let line = concat!(
            r#"{"format_version":1,"seq":1,"at":1700000000123,"actor":"run:run_x","action":"exec.ended","outcome":"ok","#,
            r#""ids":{"run":"run_x"},"details":{"a":{"y":true,"z":null},"b":[1,-2,0.1]},"#,
            r#""prev":"0000000000000000000000000000000000000000000000000000000000000000","#,
            r#""hash":"6faf94a2f9319faa6977734045eb21bea9da6114f9df9753959bbf25767a783b"}"#,
        );
        assert_eq!(write(&entry), line);
        assert_eq!(read(line), Ok(entry.clone()));
        let next = seal(&Link::of(&entry), record(json!(null)));
        assert_eq!((next.seq, &next.prev), (2, &entry.hash));
    }

    #[test]
    fn the_order_of_keys_does_not_matter() {
        let one = seal(&Link::start(), record(json!({"a": 1, "b": {"c": 2, "d": 3}})));
        let other = seal(&Link::start(), record(json!({"b": {"d": 3, "c": 2}, "a": 1})));
        assert_eq!(one.hash, other.hash);
        assert_eq!(
            serde_json::to_string(&one).unwrap(),
            serde_json::to_string(&other).unwrap()
        );
    }

    #[test]
    fn a_value_too_deep_to_be_read_back_is_kept_as_text() {
        let mut deep = json!("bottom");
        for _ in 0..500 {
            deep = json!([deep]);
        }
        let entry = seal(&Link::start(), record(deep));
        let text = serde_json::to_string(&entry).unwrap();
        let back: Sealed = serde_json::from_str(&text).unwrap();
        assert_eq!(back, entry);
        assert_eq!(hash(&back), entry.hash);
        assert!(text.contains("bottom"));
    }

    #[test]
    fn a_link_parses_and_prints_one_way() {
        let link = Link::of(&seal(&Link::start(), record(json!(null))));
        assert_eq!(link.to_string().parse::<Link>().unwrap(), link);
        for bad in ["", "1", "1:", "x:00", ":", &format!("1:{}", START.replace('0', "A"))] {
            assert!(bad.parse::<Link>().is_err(), "{bad}");
        }
    }

    proptest::proptest! {
        #[test]
        fn numbers_keep_their_hash_through_text(float in proptest::num::f64::NORMAL, int: i64, uint: u64) {
            let entry = seal(&Link::start(), record(json!([float, int, uint, -0.0, 1.0])));
            let back: Sealed = serde_json::from_str(&serde_json::to_string(&entry).unwrap()).unwrap();
            proptest::prop_assert_eq!(hash(&back), entry.hash);
        }
    }
}
