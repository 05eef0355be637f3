//! Logins, as references: a variable, a file, or a Docker configuration. Read when a pull begins, never kept.

use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use secrecy::zeroize::Zeroizing;
use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;

use super::Error;
use super::auth::{self, Credentials};
use crate::secret::CredentialRef;

/// Where the login for a registry comes from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Login {
    #[default]
    Anonymous,
    /// `auths` of a Docker configuration. Its helpers are programs, which are not run.
    DockerConfig(PathBuf),
    Password {
        name: String,
        password: CredentialRef,
    },
    Token(CredentialRef),
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct DockerConfig {
    #[serde(default)]
    auths: HashMap<String, Entry>,
    #[serde(default)]
    cred_helpers: HashMap<String, String>,
    #[serde(default)]
    creds_store: Option<String>,
}

#[derive(Deserialize)]
struct Entry {
    #[serde(default, deserialize_with = "auth::secret")]
    auth: Option<SecretString>,
    username: Option<String>,
    #[serde(default, deserialize_with = "auth::secret")]
    password: Option<SecretString>,
    #[serde(default, deserialize_with = "auth::secret")]
    registrytoken: Option<SecretString>,
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Entry")
    }
}

impl Login {
    /// # Errors
    /// [`Error::Login`] when what was named is not there. A configuration that says nothing of the registry is no error.
    pub(super) fn credentials(&self, registry: &str) -> Result<Option<Credentials>, Error> {
        let failed = |why: String| Error::Login {
            registry: registry.to_owned(),
            why,
        };
        let resolved =
            |reference: &CredentialRef| reference.resolve().map_err(|error| failed(crate::error::chain(&error)));
        match self {
            Self::Anonymous => Ok(None),
            Self::Password { name, password } => Ok(Some(Credentials::Password(name.clone(), resolved(password)?))),
            Self::Token(token) => Ok(Some(Credentials::Token(resolved(token)?))),
            Self::DockerConfig(path) => {
                let text = resolved(&CredentialRef::File(path.clone()))?;
                of_config(text.expose_secret(), registry).map_err(failed)
            }
        }
    }
}

/// How configurations write a registry: bare, with a scheme, and for one of them a whole address.
fn is_of(key: &str, registry: &str) -> bool {
    let bare = key.trim_start_matches("https://").trim_start_matches("http://");
    let host = bare.split('/').next().unwrap_or_default();
    host == registry || registry == "docker.io" && host == "index.docker.io"
}

fn of_config(text: &str, registry: &str) -> Result<Option<Credentials>, String> {
    // Without what is wrong with it: that text would hold secrets.
    let config: DockerConfig =
        serde_json::from_str(text).map_err(|_| "the file is no Docker configuration".to_owned())?;
    let entry = config
        .auths
        .into_iter()
        .find(|(key, _)| is_of(key, registry))
        .map(|(_, entry)| entry);
    let helper = config
        .cred_helpers
        .iter()
        .find(|(key, _)| is_of(key, registry))
        .map(|(_, helper)| helper);
    let Some(entry) = entry else {
        return match helper {
            Some(helper) => Err(only_helper(helper)),
            None => Ok(None),
        };
    };
    if let Some(token) = entry.registrytoken {
        return Ok(Some(Credentials::Token(token)));
    }
    if let (Some(name), Some(password)) = (entry.username, entry.password) {
        return Ok(Some(Credentials::Password(name, password)));
    }
    let Some(auth) = entry.auth.filter(|auth| !auth.expose_secret().is_empty()) else {
        return match helper.or(config.creds_store.as_ref()) {
            Some(helper) => Err(only_helper(helper)),
            None => Ok(None),
        };
    };
    let nonsense = || "its `auth` is no `NAME:PASSWORD` in base64".to_owned();
    let bytes = Zeroizing::new(STANDARD.decode(auth.expose_secret()).map_err(|_| nonsense())?);
    let pair = std::str::from_utf8(&bytes).map_err(|_| nonsense())?;
    let (name, password) = pair.split_once(':').ok_or_else(nonsense)?;
    Ok(Some(Credentials::Password(
        name.to_owned(),
        SecretString::from(password),
    )))
}

fn only_helper(helper: &str) -> String {
    format!("it is kept by the program `docker-credential-{helper}`, which is not run: name a password instead")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn password(text: &str, registry: &str) -> Result<Option<(String, String)>, String> {
        Ok(of_config(text, registry)?.map(|credentials| match credentials {
            Credentials::Password(name, password) => (name, password.expose_secret().to_owned()),
            Credentials::Token(token) => ("token".to_owned(), token.expose_secret().to_owned()),
        }))
    }

    #[test]
    fn a_configuration_gives_the_login_of_one_registry_only() {
        let text = r#"{"auths":{"r.example":{"auth":"bWU6aHVudGVyMg=="},"https://index.docker.io/v1/":{"registrytoken":"t"}},
            "credHelpers":{"h.example":"pass"}}"#;
        let pair = |name: &str, secret: &str| Ok(Some((name.to_owned(), secret.to_owned())));
        assert_eq!(password(text, "r.example"), pair("me", "hunter2"));
        assert_eq!(password(text, "docker.io"), pair("token", "t"));
        assert_eq!(password(text, "other.r.example"), Ok(None));
        assert!(
            password(text, "h.example")
                .unwrap_err()
                .contains("docker-credential-pass")
        );
        let broken = r#"{"auths":{"r.example":{"auth":["hunter2"]}}}"#;
        assert!(!password(broken, "r.example").unwrap_err().contains("hunter2"));
    }
}
