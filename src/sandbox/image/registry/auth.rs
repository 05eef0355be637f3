//! Ways in: what a registry asks for, and what it is given.

use http_auth::ChallengeParser;
use reqwest::RequestBuilder;
use secrecy::{ExposeSecret, SecretString};
use serde::{Deserialize, Deserializer};

/// What we have for a registry.
#[derive(Debug, Clone)]
pub(super) enum Credentials {
    Password(String, SecretString),
    Token(SecretString),
}

/// What goes with a request.
#[derive(Debug, Clone, Default)]
pub(super) enum Grant {
    #[default]
    Nothing,
    Basic(String, SecretString),
    Bearer(SecretString),
}

impl PartialEq for Grant {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Nothing, Self::Nothing) => true,
            (Self::Basic(name, secret), Self::Basic(other_name, other)) => {
                name == other_name && secret.expose_secret() == other.expose_secret()
            }
            (Self::Bearer(secret), Self::Bearer(other)) => secret.expose_secret() == other.expose_secret(),
            (Self::Nothing | Self::Basic(..) | Self::Bearer(_), _) => false,
        }
    }
}

impl Grant {
    pub fn apply(&self, request: RequestBuilder) -> RequestBuilder {
        match self {
            Self::Nothing => request,
            Self::Basic(name, password) => request.basic_auth(name, Some(password.expose_secret())),
            Self::Bearer(token) => request.bearer_auth(token.expose_secret()),
        }
    }
}

/// What a challenge asks for.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    Basic,
    Bearer(Service),
}

/// Where tokens come from.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Service {
    pub realm: String,
    pub service: Option<String>,
}

/// The best of what a registry offers: a token where it gives any.
pub(super) fn wanted(challenges: &[&str]) -> Result<Wanted, String> {
    let mut is_basic = false;
    for challenge in challenges.iter().flat_map(|text| ChallengeParser::new(text)) {
        let challenge = challenge.map_err(|error| error.to_string())?;
        if challenge.scheme.eq_ignore_ascii_case("bearer") {
            let value = |wanted: &str| {
                let mut found = challenge
                    .params
                    .iter()
                    .filter(|(name, _)| name.eq_ignore_ascii_case(wanted));
                found.next().map(|(_, value)| value.to_unescaped())
            };
            let realm = value("realm").ok_or("it names no token service")?;
            return Ok(Wanted::Bearer(Service {
                realm,
                service: value("service"),
            }));
        }
        is_basic |= challenge.scheme.eq_ignore_ascii_case("basic");
    }
    if is_basic {
        Ok(Wanted::Basic)
    } else {
        Err("it asks for neither a password nor a token".to_owned())
    }
}

/// A secret as it stands in a document.
pub(super) fn secret<'de, D: Deserializer<'de>>(from: D) -> Result<Option<SecretString>, D::Error> {
    Ok(Option::<String>::deserialize(from)?.map(SecretString::from))
}

/// What a token service answered.
pub(super) fn token(bytes: &[u8]) -> Result<Grant, String> {
    #[derive(Deserialize)]
    struct Answer {
        #[serde(default, deserialize_with = "secret")]
        token: Option<SecretString>,
        #[serde(default, deserialize_with = "secret")]
        access_token: Option<SecretString>,
    }
    // Without what is wrong with it: that text would hold the token.
    let answer: Answer = serde_json::from_slice(bytes).map_err(|_| "its token service answers no token".to_owned())?;
    let token = answer.token.or(answer.access_token);
    token
        .map(Grant::Bearer)
        .ok_or_else(|| "its token service answers no token".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_preferred_to_a_password() {
        let bearer = r#"Bearer realm="https://auth.example/token",service="registry.example",scope="x""#;
        let service = Service {
            realm: "https://auth.example/token".to_owned(),
            service: Some("registry.example".to_owned()),
        };
        assert_eq!(wanted(&["Basic realm=\"x\"", bearer]), Ok(Wanted::Bearer(service)));
        assert_eq!(wanted(&["Basic realm=\"x\""]), Ok(Wanted::Basic));
        assert!(wanted(&["Bearer service=\"x\""]).is_err());
        assert!(wanted(&["Negotiate"]).is_err() && wanted(&[]).is_err());
    }

    #[test]
    fn a_token_never_shows() {
        let grant = token(br#"{"token":"hunter2"}"#).unwrap();
        assert!(!format!("{grant:?}").contains("hunter2"));
        assert!(!token(br#"{"token":["hunter2"]}"#).unwrap_err().contains("hunter2"));
    }
}
