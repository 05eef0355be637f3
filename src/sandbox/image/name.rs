//! What stored images are called.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::{Digest, Error};

/// A name in the store: `python`, `team/tools:1.2`. Taken as written: no tag is implied.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Name(String);

/// Words that begin another way of naming an image.
const RESERVED: [&str; 8] = [
    "host", "rootfs", "tar", "docker", "image", "layout", "archive", "registry",
];
const LONGEST: usize = 255;

impl Name {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

fn is_name(text: &str) -> bool {
    let (path, tag) = match text.split_once(':') {
        Some((path, tag)) => (path, Some(tag)),
        None => (text, None),
    };
    text.len() <= LONGEST && !RESERVED.contains(&path) && path.split('/').all(is_part) && tag.is_none_or(is_tag)
}

/// Lower-case words, apart by one or more of `.`, `_`, `-`.
fn is_part(part: &str) -> bool {
    let is_word = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let bytes = part.as_bytes();
    bytes.first().copied().is_some_and(is_word)
        && bytes.last().copied().is_some_and(is_word)
        && bytes.iter().all(|&byte| is_word(byte) || b"._-".contains(&byte))
        && !part.contains("..")
}

fn is_tag(tag: &str) -> bool {
    tag.len() <= 128
        && tag.starts_with(|first: char| first.is_ascii_alphanumeric() || first == '_')
        && tag
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for Name {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        if is_name(text) {
            Ok(Self(text.to_owned()))
        } else {
            Err(Error::Name(text.to_owned()))
        }
    }
}

impl TryFrom<String> for Name {
    type Error = Error;

    fn try_from(text: String) -> Result<Self, Error> {
        text.parse()
    }
}

impl From<Name> for String {
    fn from(name: Name) -> String {
        name.0
    }
}

/// An image of the store: `NAME`, or `NAME@sha256:…` for exactly that content, wherever the name points today.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct StoredRef {
    pub name: Name,
    pub digest: Option<Digest>,
}

impl fmt::Display for StoredRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.name)?;
        match &self.digest {
            Some(digest) => write!(f, "@{digest}"),
            None => Ok(()),
        }
    }
}

impl FromStr for StoredRef {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let (name, digest) = match text.split_once('@') {
            Some((name, digest)) => (name, Some(digest.parse()?)),
            None => (text, None),
        };
        Ok(Self {
            name: name.parse()?,
            digest,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_words_and_never_paths() {
        for good in ["python", "team/tools:1.2", "a.b-c__d/e:Latest_1", "images/docker"] {
            assert_eq!(good.parse::<Name>().unwrap().as_str(), good);
        }
        let long = "a".repeat(256);
        for bad in [
            "", "/abs", "a//b", "../a", "a/..", ".", "a..b", "-a", "a-", "A", "a:", "a:-x", "a:b:c", "host",
            "docker:x", "tar:x", "a b", "a\n", "ä", &long,
        ] {
            assert!(bad.parse::<Name>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_digest_may_be_named_too() {
        let digest = Digest::of(b"x");
        let text = format!("team/tools:1.2@{digest}");
        let parsed: StoredRef = text.parse().unwrap();
        assert_eq!(parsed.digest, Some(digest));
        assert_eq!(parsed.to_string(), text);
        assert!("python@sha256:12".parse::<StoredRef>().is_err());
        assert!("@sha256:12".parse::<StoredRef>().is_err());
    }
}
