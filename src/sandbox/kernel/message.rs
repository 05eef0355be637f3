//! What a driver says, as JSON.

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

use super::frame::Nonsense;

/// Most representations of one result, and the longest name of one.
const MAX_TYPES: usize = 64;
const MAX_TYPE_NAME: usize = 255;

#[derive(Debug, Deserialize, PartialEq)]
#[serde(rename_all = "snake_case")]
pub(super) enum Message {
    /// It waits for a request.
    Ready {
        version: String,
    },
    Result {
        data: BTreeMap<String, String>,
        main: bool,
    },
    Error {
        name: String,
        value: String,
        traceback: String,
    },
    /// On standard error: what the code wrote there is all before this.
    Sync(u64),
    End(End),
    /// On both pipes, from a zygote: the child that ran the code is gone, with all its descendants.
    Gone(Gone),
}

/// The code of request `number` came to its end.
#[derive(Debug, Deserialize, PartialEq, Clone)]
pub(super) struct End {
    pub number: u64,
    pub ok: bool,
    pub interrupted: bool,
    /// What the process ends with; not from a kernel.
    #[serde(default)]
    pub status: Option<u8>,
    #[serde(default)]
    pub cpu_us: u64,
    #[serde(default)]
    pub max_rss_bytes: u64,
}

#[derive(Debug, Deserialize, PartialEq, Clone)]
pub(super) struct Gone {
    #[serde(flatten)]
    pub how: How,
    #[serde(default)]
    pub cpu_us: u64,
    #[serde(default)]
    pub max_rss_bytes: u64,
}

#[derive(Debug, Deserialize, PartialEq, Clone)]
#[serde(rename_all = "snake_case")]
pub(super) enum How {
    Status(u8),
    Signal(u8),
}

impl Message {
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, Nonsense> {
        serde_json::from_slice(bytes).map_err(|error| Nonsense::new(format!("a message that is none: {error}")))
    }
}

/// The representations of a result.
pub(super) fn unpack(data: BTreeMap<String, String>) -> Result<BTreeMap<String, Vec<u8>>, Nonsense> {
    if data.len() > MAX_TYPES || data.keys().any(|name| name.len() > MAX_TYPE_NAME) {
        return Err(Nonsense::new("a result of too many kinds"));
    }
    let decode = |(name, text): (String, String)| match STANDARD.decode(text) {
        Ok(bytes) => Ok((name, bytes)),
        Err(error) => Err(Nonsense::new(format!("a result that is no base64: {error}"))),
    };
    data.into_iter().map(decode).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_and_others_refused() {
        let end = Message::parse(br#"{"end":{"number":3,"ok":false,"interrupted":true}}"#).unwrap();
        let want = End {
            number: 3,
            ok: false,
            interrupted: true,
            status: None,
            cpu_us: 0,
            max_rss_bytes: 0,
        };
        assert_eq!(end, Message::End(want));
        assert_eq!(
            Message::parse(br#"{"gone":{"signal":9,"cpu_us":5,"max_rss_bytes":4096}}"#).unwrap(),
            Message::Gone(Gone {
                how: How::Signal(9),
                cpu_us: 5,
                max_rss_bytes: 4096,
            })
        );
        for bad in [
            "",
            "{}",
            r#"{"end":{}}"#,
            r#"{"gone":{}}"#,
            r#"{"sync":-1}"#,
            r#"{"other":1}"#,
            "\"\\ud800\"",
        ] {
            assert!(Message::parse(bad.as_bytes()).is_err(), "{bad}");
        }
        assert!(unpack(BTreeMap::from([("a".to_owned(), "?".to_owned())])).is_err());
    }
}
