//! Which hosts a rule is about: one name, or all names under one, label by label.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::egress::name::{BadHost, HostName};

/// `api.example.com`, or `*.example.com`: one or more labels under it, never `example.com` itself.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum HostPattern {
    Exact(HostName),
    Under(HostName),
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadPattern {
    #[error("`{0}` is no host")]
    Host(String, #[source] BadHost),
    #[error("`{0}` covers a public suffix: anybody can have a name under it")]
    PublicSuffix(String),
    #[error("`{0}` has a star elsewhere than in front, as `*.`")]
    Star(String),
}

impl HostPattern {
    /// Compares labels, never bytes: `notexample.com` is not under `example.com`.
    pub fn matches(&self, name: &HostName) -> bool {
        match self {
            Self::Exact(exact) => exact == name,
            Self::Under(apex) => {
                let (mut apex, mut name) = (apex.labels().rev(), name.labels().rev());
                apex.all(|label| name.next() == Some(label)) && name.next().is_some()
            }
        }
    }

    /// The more of the name it fixes, the more specific.
    pub fn specificity(&self) -> (bool, usize) {
        match self {
            Self::Exact(name) => (true, name.labels().count()),
            Self::Under(apex) => (false, apex.labels().count()),
        }
    }

    /// The name without its star.
    pub fn base(&self) -> &HostName {
        match self {
            Self::Exact(name) | Self::Under(name) => name,
        }
    }
}

impl FromStr for HostPattern {
    type Err = BadPattern;

    fn from_str(text: &str) -> Result<Self, BadPattern> {
        let read = |name: &str| HostName::parse(name.as_bytes()).map_err(|bad| BadPattern::Host(text.to_owned(), bad));
        match text.strip_prefix("*.") {
            Some(apex) if !apex.contains('*') => {
                let apex = read(apex)?;
                if is_public_suffix(&apex) {
                    return Err(BadPattern::PublicSuffix(text.to_owned()));
                }
                Ok(Self::Under(apex))
            }
            None if !text.contains('*') => Ok(Self::Exact(read(text)?)),
            Some(_) | None => Err(BadPattern::Star(text.to_owned())),
        }
    }
}

/// Whether strangers can register names right under this one, by the Public Suffix List; a lone label always counts.
fn is_public_suffix(name: &HostName) -> bool {
    psl::suffix(name.as_str().as_bytes()).is_none_or(|suffix| suffix.as_bytes().len() == name.as_str().len())
}

impl fmt::Display for HostPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exact(name) => name.fmt(f),
            Self::Under(apex) => write!(f, "*.{apex}"),
        }
    }
}

impl TryFrom<String> for HostPattern {
    type Error = BadPattern;

    fn try_from(text: String) -> Result<Self, BadPattern> {
        text.parse()
    }
}

impl From<HostPattern> for String {
    fn from(pattern: HostPattern) -> Self {
        pattern.to_string()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn matches(pattern: &str, name: &str) -> bool {
        let pattern: HostPattern = pattern.parse().unwrap();
        pattern.matches(&HostName::parse(name.as_bytes()).unwrap())
    }

    /// T20: wildcard against apex.
    #[test]
    fn a_star_is_one_or_more_labels_and_never_the_apex() {
        assert!(matches("*.cdn.example.com", "a.cdn.example.com"));
        assert!(matches("*.cdn.example.com", "a.b.CDN.example.com."));
        for other in [
            "cdn.example.com",
            "acdn.example.com",
            "a.cdn.example.com.evil.net",
            "example.com",
            "com",
        ] {
            assert!(!matches("*.cdn.example.com", other), "{other}");
        }
        assert!(matches("example.com", "example.com") && !matches("example.com", "a.example.com"));
    }

    #[test]
    fn a_pattern_that_covers_strangers_is_refused() {
        for text in ["*.com", "*.co.uk", "*.github.io", "*.localhost", "*.s3.amazonaws.com"] {
            let refused = text.parse::<HostPattern>();
            assert_eq!(refused, Err(BadPattern::PublicSuffix(text.to_owned())), "{text}");
        }
        for text in ["*.example.co.uk", "*.me.github.io", "com", "*.internal.example"] {
            assert_eq!(text.parse::<HostPattern>().unwrap().to_string(), text);
        }
        for text in ["*", "a.*.com", "*a.com", "*.*.com", "a*"] {
            assert_eq!(
                text.parse::<HostPattern>(),
                Err(BadPattern::Star(text.to_owned())),
                "{text}"
            );
        }
        assert!(matches!("*.1.2.3.4".parse::<HostPattern>(), Err(BadPattern::Host(..))));
        assert!(matches!("".parse::<HostPattern>(), Err(BadPattern::Host(..))));
    }

    proptest! {
        /// Against the plain reading of the same words, as text.
        #[test]
        fn labels_agree_with_a_dotted_suffix(name in "[ab]{1,2}(\\.[ab]{1,2}){0,4}", apex in "[ab]{1,2}(\\.[ab]{1,2}){1,2}") {
            let pattern = HostPattern::Under(HostName::parse(apex.as_bytes()).unwrap());
            let name = HostName::parse(name.as_bytes()).unwrap();
            prop_assert_eq!(pattern.matches(&name), name.as_str().ends_with(&format!(".{apex}")));
        }
    }
}
