//! Credentials as the border knows them: where each goes, for which requests, and where its value comes from at that moment.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use secrecy::SecretString;

use super::name::HostName;
use super::rules::{HostPattern, Path, PathPattern};
use crate::secret::{self, CredentialRef};

/// Gives the value for use now. It is asked at each use, so a new value holds from the next request on.
#[async_trait]
pub trait CredentialSource: Send + Sync + fmt::Debug {
    /// # Errors
    /// There is no value to be had: the request is refused.
    async fn fetch(&self) -> Result<Fetched, Unavailable>;
}

/// A value and, where the source keeps count, which one it is.
#[derive(Debug, Clone)]
pub struct Fetched {
    pub value: SecretString,
    pub version: Option<String>,
}

/// A source had no value.
#[derive(Debug, thiserror::Error)]
#[error("the credential is not to be had")]
pub struct Unavailable(#[source] pub Box<dyn std::error::Error + Send + Sync>);

#[async_trait]
impl CredentialSource for CredentialRef {
    /// Reads a small local file or a variable each time.
    async fn fetch(&self) -> Result<Fetched, Unavailable> {
        let value = self
            .resolve()
            .map_err(|error: secret::Error| Unavailable(error.into()))?;
        Ok(Fetched { value, version: None })
    }
}

/// Where the value goes. All that the client sent in that place is removed first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// `Authorization: Bearer VALUE`.
    Bearer,
    /// `Authorization: Basic base64(USER:VALUE)`, as git over HTTPS uses it.
    Basic { user: String },
    /// Any header; `{}` in `format` stands for the value.
    Header { name: http::HeaderName, format: String },
    /// One parameter of the query.
    Query { name: String },
    /// AWS Signature Version 4: the value is the secret key; what the client signed with the placeholder is signed anew.
    SigV4 {
        access_key: String,
        /// For temporary keys.
        session_token: Option<SessionToken>,
        region: String,
        service: String,
    },
}

/// Another source, for the token that goes with a temporary key.
#[derive(Debug, Clone)]
pub struct SessionToken(pub Arc<dyn CredentialSource>);

impl PartialEq for SessionToken {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for SessionToken {}

impl Place {
    /// The header that it owns on its hosts.
    pub fn header(&self) -> Option<http::HeaderName> {
        match self {
            Self::Bearer | Self::Basic { .. } | Self::SigV4 { .. } => Some(http::header::AUTHORIZATION),
            Self::Header { name, .. } => Some(name.clone()),
            Self::Query { .. } => None,
        }
    }
}

/// One credential: what it is called, what the guest holds in its stead, and the only requests that it goes into.
#[derive(Debug, Clone)]
pub struct Credential {
    pub name: String,
    /// What the guest sees. At least 16 bytes of `[a-z0-9-]`: it must survive a host name and a URL unchanged.
    pub placeholder: String,
    pub source: Arc<dyn CredentialSource>,
    pub place: Place,
    pub host: HostPattern,
    pub port: u16,
    /// Upper case; empty means all.
    pub methods: Vec<String>,
    /// Empty means all.
    pub paths: Vec<PathPattern>,
}

/// What is wrong with a credential.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadCredential {
    #[error("credential `{0}`: its placeholder needs 16 or more bytes of `a-z`, `0-9` and `-`")]
    Placeholder(String),
    #[error("credential `{0}`: another one has or holds its placeholder")]
    Shared(String),
    #[error("credential `{0}`: its format needs `{{}}` once, and no control bytes")]
    Format(String),
    #[error("credential `{0}`: this header belongs to the connection and cannot carry a credential")]
    Header(String),
    #[error("credential `{0}`: another one has the same place on the same host")]
    Place(String),
}

impl Credential {
    /// Whether it has a business with this host at all.
    pub fn is_about(&self, host: &HostName, port: u16) -> bool {
        self.host.matches(host) && self.port == port
    }

    /// Whether its value goes into this request.
    pub fn covers(&self, method: &str, path: &Path) -> bool {
        (self.methods.is_empty() || self.methods.iter().any(|known| known == method))
            && (self.paths.is_empty() || self.paths.iter().any(|pattern| pattern.allows(path)))
    }
}

/// Looks for what would let one credential pass for another.
pub(super) fn check(credentials: &[Credential]) -> Vec<BadCredential> {
    const OF_THE_CONNECTION: [&str; 10] = [
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    ];
    let mut problems = Vec::new();
    for (at, one) in credentials.iter().enumerate() {
        let name = || one.name.clone();
        let is_plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
        if one.placeholder.len() < 16 || !one.placeholder.bytes().all(is_plain) {
            problems.push(BadCredential::Placeholder(name()));
        }
        if credentials[..at]
            .iter()
            .any(|other| other.placeholder.contains(&one.placeholder) || one.placeholder.contains(&other.placeholder))
        {
            problems.push(BadCredential::Shared(name()));
        }
        if let Place::Header { name: header, format } = &one.place {
            if format.matches("{}").count() != 1 || format.chars().any(char::is_control) {
                problems.push(BadCredential::Format(name()));
            }
            if OF_THE_CONNECTION.contains(&header.as_str()) {
                problems.push(BadCredential::Header(name()));
            }
        }
        let same = |other: &&Credential| {
            other.host == one.host
                && other.port == one.port
                && other.place.header() == one.place.header()
                && other.methods == one.methods
                && other.paths == one.paths
                && one.place.header().is_some()
        };
        if credentials[..at].iter().any(|other| same(&other)) {
            problems.push(BadCredential::Place(name()));
        }
    }
    problems
}
