//! What a client may call a host: a name over a small alphabet, or an address in its one spelling.
//!
//! The value that is matched is the value that is resolved, dialled and recorded: a name is lower-cased and freed of one
//! trailing dot here, once, and nobody touches it again. Whatever some resolver might read as an address in another spelling
//! (`2130706433`, `0177.1`, `0x7f.1`, `fe80::1%eth0`) is neither a name nor an address here, so no two parsers can disagree.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// The longest name in its text form, without a trailing dot (RFC 1035, 2.3.4).
const MAX_NAME: usize = 253;
const MAX_LABEL: usize = 63;

/// A host name: `[a-z0-9-]` labels of 1 to 63 bytes, 253 in all; an IDN in its `xn--` form alone.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct HostName(Arc<str>);

/// Where a client wants to go.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Host {
    Name(HostName),
    Address(IpAddr),
}

/// Why something is no host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadHost {
    #[error("the host is empty")]
    Empty,
    #[error("the host has more than {MAX_NAME} bytes")]
    TooLong,
    #[error("the host holds the byte 0x{0:02x}")]
    Byte(u8),
    #[error("a label of the host is empty, longer than {MAX_LABEL} bytes, or has a hyphen at an end")]
    Label,
    #[error("the host is an address in another spelling than its own")]
    Spelling,
    #[error("the host is an address with a scope")]
    Scope,
    #[error("the host is no IPv6 address")]
    Ipv6,
}

impl HostName {
    /// # Errors
    /// It is no name; an address is none.
    pub fn parse(text: &[u8]) -> Result<Self, BadHost> {
        match Host::parse(text)? {
            Host::Name(name) => Ok(name),
            Host::Address(_) => Err(BadHost::Spelling),
        }
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// From the left.
    pub fn labels(&self) -> std::str::Split<'_, char> {
        self.0.split('.')
    }
}

impl Host {
    /// Reads a host as it stands in a request, without a port. IPv6 may be in brackets.
    ///
    /// # Errors
    /// It is neither a name nor an address in its own spelling.
    pub fn parse(text: &[u8]) -> Result<Self, BadHost> {
        if text.is_empty() {
            return Err(BadHost::Empty);
        }
        if text.len() > MAX_NAME + 1 {
            return Err(BadHost::TooLong);
        }
        let bracketed = text.strip_prefix(b"[");
        if bracketed.is_some() || text.contains(&b':') {
            let inner = match bracketed {
                Some(rest) => rest.strip_suffix(b"]").ok_or(BadHost::Ipv6)?,
                None => text,
            };
            if inner.contains(&b'%') {
                return Err(BadHost::Scope);
            }
            let inner = std::str::from_utf8(inner).map_err(|_| BadHost::Ipv6)?;
            return match inner.parse::<Ipv6Addr>() {
                Ok(address) => Ok(Self::Address(IpAddr::V6(address))),
                Err(_) => Err(BadHost::Ipv6),
            };
        }
        let text = match text.iter().find(|b| !is_name_byte(**b)) {
            Some(byte) => return Err(BadHost::Byte(*byte)),
            None => std::str::from_utf8(text).map_err(|_| BadHost::Label)?,
        };
        if let Ok(address) = text.parse::<Ipv4Addr>() {
            return Ok(Self::Address(IpAddr::V4(address)));
        }
        let name = text.strip_suffix('.').unwrap_or(text).to_ascii_lowercase();
        if name.len() > MAX_NAME {
            return Err(BadHost::TooLong);
        }
        let is_label =
            |label: &str| (1..=MAX_LABEL).contains(&label.len()) && !label.starts_with('-') && !label.ends_with('-');
        if !name.split('.').all(is_label) {
            return Err(BadHost::Label);
        }
        if name.rsplit('.').next().is_some_and(is_numeric) {
            return Err(BadHost::Spelling);
        }
        Ok(Self::Name(HostName(name.into())))
    }

    pub fn name(&self) -> Option<&HostName> {
        match self {
            Self::Name(name) => Some(name),
            Self::Address(_) => None,
        }
    }
}

fn is_name_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'.'
}

/// Whether a last label makes a text an address for the parsers of the world (WHATWG URL, "ends in a number"; inet_aton).
fn is_numeric(label: &str) -> bool {
    let hex = label.strip_prefix("0x");
    label.bytes().all(|b| b.is_ascii_digit()) || hex.is_some_and(|rest| rest.bytes().all(|b| b.is_ascii_hexdigit()))
}

/// Splits `host:port`. The port is decimal digits without a sign or leading zeros; IPv6 must be in brackets.
///
/// # Errors
/// Not a host, or not a port.
pub fn split_authority(text: &[u8]) -> Result<(Host, Option<u16>), BadAuthority> {
    let (host, port) = match text.iter().rposition(|b| *b == b':') {
        Some(at) if !text[at..].contains(&b']') => (&text[..at], Some(&text[at + 1..])),
        _ => (text, None),
    };
    if host.contains(&b':') && !host.starts_with(b"[") {
        return Err(BadAuthority::Host(BadHost::Ipv6));
    }
    let port = match port {
        None => None,
        Some(digits) => Some(parse_port(digits).ok_or(BadAuthority::Port)?),
    };
    Ok((Host::parse(host)?, port))
}

fn parse_port(digits: &[u8]) -> Option<u16> {
    let plain = matches!(digits, [b'1'..=b'9', rest @ ..] if rest.len() < 5 && rest.iter().all(u8::is_ascii_digit));
    let text = std::str::from_utf8(digits).ok()?;
    if plain { text.parse().ok() } else { None }
}

/// Why something is no `host:port`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadAuthority {
    #[error(transparent)]
    Host(#[from] BadHost),
    #[error("the port is no number from 1 to 65535")]
    Port,
}

impl fmt::Display for HostName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => name.fmt(f),
            Self::Address(address) => address.fmt(f),
        }
    }
}

impl TryFrom<String> for HostName {
    type Error = BadHost;

    fn try_from(text: String) -> Result<Self, BadHost> {
        Self::parse(text.as_bytes())
    }
}

impl From<HostName> for String {
    fn from(name: HostName) -> Self {
        name.0.as_ref().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(text: &str) -> Result<String, BadHost> {
        Host::parse(text.as_bytes()).map(|host| host.to_string())
    }

    #[test]
    fn a_name_has_one_form() {
        for (written, read) in [
            ("api.example.com", "api.example.com"),
            ("API.Example.COM", "api.example.com"),
            ("api.example.com.", "api.example.com"),
            ("xn--bcher-kva.example", "xn--bcher-kva.example"),
            ("localhost", "localhost"),
            ("deadbeef", "deadbeef"),
            ("1.2.3.4", "1.2.3.4"),
            ("[::1]", "::1"),
            ("::FFFF:1.2.3.4", "::ffff:1.2.3.4"),
        ] {
            assert_eq!(parse(written).as_deref(), Ok(read), "{written}");
        }
    }

    /// T20: every spelling of an address that some parser would understand.
    #[test]
    fn an_address_in_another_spelling_is_nothing() {
        let spelt = [
            "2130706433",
            "017700000001",
            "0x7f000001",
            "0x7f.1",
            "127.1",
            "0177.0.0.1",
            "127.0.0.01",
            "127.0.0.1.",
            "1.2.3.4.5",
            "0x",
            "example.0x1f",
            "example.1",
            "300.1.1.1",
        ];
        for text in spelt {
            assert_eq!(parse(text), Err(BadHost::Spelling), "{text}");
        }
        assert_eq!(parse("[fe80::1%eth0]"), Err(BadHost::Scope));
        assert_eq!(parse("fe80::1%25eth0"), Err(BadHost::Scope));
        for text in ["[::1", "[::1]x", "[127.0.0.1]", "::g", "a:b"] {
            assert_eq!(parse(text), Err(BadHost::Ipv6), "{text}");
        }
    }

    /// T20, T21: what a suffix check and a resolver could read differently.
    #[test]
    fn bytes_outside_the_alphabet_end_it() {
        assert_eq!(Host::parse(b"evil.com\0.example.com"), Err(BadHost::Byte(0)));
        for (text, byte) in [
            ("a b", b' '),
            ("a_b.com", b'_'),
            ("a/b", b'/'),
            ("a@b", b'@'),
            ("a%00", b'%'),
            ("ex\u{e4}", 0xc3),
        ] {
            assert_eq!(parse(text), Err(BadHost::Byte(byte)), "{text}");
        }
        for text in [
            ".",
            "..",
            ".a",
            "a..b",
            "a.-b",
            "a-.b",
            &format!("{}.com", "a".repeat(64)),
        ] {
            assert_eq!(parse(text), Err(BadHost::Label), "{text}");
        }
        let long = vec!["a"; 127].join(".");
        assert_eq!(long.len(), 253);
        assert!(parse(&long).is_ok() && parse(&format!("{long}.")).is_ok());
        assert_eq!(parse(&format!("{long}a")), Err(BadHost::TooLong));
        assert_eq!(parse(""), Err(BadHost::Empty));
    }

    #[test]
    fn an_authority_has_at_most_one_port() {
        let split = |text: &str| split_authority(text.as_bytes()).map(|(host, port)| (host.to_string(), port));
        assert_eq!(split("a.example:443"), Ok(("a.example".to_owned(), Some(443))));
        assert_eq!(split("a.example"), Ok(("a.example".to_owned(), None)));
        assert_eq!(split("[::1]:80"), Ok(("::1".to_owned(), Some(80))));
        assert_eq!(split("[::1]"), Ok(("::1".to_owned(), None)));
        for bad in ["a:", "a:0", "a:00080", "a:65536", "a:+80", "a:80x", "a: 80", "a:١"] {
            assert_eq!(split(bad), Err(BadAuthority::Port), "{bad}");
        }
        assert_eq!(split("::1:80"), Err(BadAuthority::Host(BadHost::Ipv6)));
        assert_eq!(split("user@a:80"), Err(BadAuthority::Host(BadHost::Byte(b'@'))));
    }

    proptest! {
        /// Whatever is read reads as itself again, and holds nothing but the alphabet.
        #[test]
        fn reading_is_stable(text in proptest::collection::vec(any::<u8>(), 0..300)) {
            if let Ok(host) = Host::parse(&text) {
                let printed = host.to_string();
                prop_assert_eq!(Host::parse(printed.as_bytes()), Ok(host.clone()));
                if let Host::Name(name) = host {
                    prop_assert!(name.as_str().bytes().all(|b| is_name_byte(b) && !b.is_ascii_uppercase()));
                    prop_assert!(name.as_str().parse::<IpAddr>().is_err());
                }
            }
            let _ = split_authority(&text);
        }

        #[test]
        fn near_names_never_break_it(text in "[a-zA-Z0-9.:%\\[\\]_x-]{0,40}") {
            let _ = Host::parse(text.as_bytes());
            let _ = split_authority(text.as_bytes());
        }
    }
}
