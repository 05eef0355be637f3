//! What is known of a sandbox's border before there is the sandbox: whether it can be enforced, and the environment.

use std::collections::BTreeMap;

use super::post::Post;
use super::{Borders, Error, Placeholders, Whose, check, variables};
use crate::policy::Policy;
use crate::policy::network::Mode;
use crate::sandbox::{Backend, Capabilities, Handle};

/// The border that a sandbox is to have; none, where its policy has no network.
#[derive(Debug, Clone)]
pub struct Guard {
    way: Option<(Policy, Borders)>,
    placeholders: Placeholders,
    variables: BTreeMap<String, String>,
}

impl Guard {
    /// A new one.
    ///
    /// # Errors
    /// [`Error::Unsupported`]: nothing is made then.
    pub fn of(policy: &Policy, able: &Capabilities, borders: Option<&Borders>) -> Result<Self, Error> {
        Self::with(policy, able, borders, Placeholders::fresh(policy))
    }

    /// One whose sandbox holds these already.
    ///
    /// # Errors
    /// As [`Self::of`].
    pub fn with(
        policy: &Policy,
        able: &Capabilities,
        borders: Option<&Borders>,
        placeholders: Placeholders,
    ) -> Result<Self, Error> {
        check(policy, able)?;
        let way = match (policy.network().mode(), borders) {
            (Mode::None, _) => None,
            (Mode::Proxy | Mode::Learn, Some(borders)) => Some((policy.clone(), borders.clone())),
            (Mode::Proxy | Mode::Learn, None) => {
                return Err(Error::Unsupported {
                    policy: policy.name().to_owned(),
                    missing: "nothing here gives sandboxes a network".to_owned(),
                });
            }
        };
        Ok(Self {
            way,
            variables: variables(policy, &placeholders),
            placeholders,
        })
    }

    /// What its commands find in their environment.
    pub fn variables(&self) -> &BTreeMap<String, String> {
        &self.variables
    }

    pub fn placeholders(&self) -> &Placeholders {
        &self.placeholders
    }

    /// Opens the doors of the sandbox, before any program of the user's runs in it.
    ///
    /// # Errors
    /// The sandbox has no way out then, and is to be destroyed.
    pub async fn stand(&self, backend: &dyn Backend, sandbox: &Handle, whose: &Whose) -> Result<Option<Post>, Error> {
        let Some((policy, borders)) = &self.way else {
            return Ok(None);
        };
        let doorway = backend.doorway(sandbox).await?;
        let post = borders.open(policy, &self.placeholders, doorway, whose);
        Ok(Some(post.await?))
    }
}
