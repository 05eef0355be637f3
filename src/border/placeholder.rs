//! What a sandbox holds in the place of its secrets.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::policy::Policy;

/// A placeholder for each credential, by its name. They are no secrets, but those of one sandbox: whoever sends one elsewhere
/// has told which sandbox it was.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Placeholders(BTreeMap<String, String>);

impl Placeholders {
    /// Fresh ones for all credentials that are put in at the border.
    pub fn fresh(policy: &Policy) -> Self {
        let injected = policy.credentials().iter().filter(|credential| !credential.exposed);
        let made = injected.map(|credential| (credential.name.clone(), placeholder()));
        Self(made.collect())
    }

    pub fn of(&self, credential: &str) -> Option<&str> {
        self.0.get(credential).map(String::as_str)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// 128 random bits in letters that survive a host name and a URL.
fn placeholder() -> String {
    format!("exuvia-{:032x}", crate::ids::random_bits())
}
