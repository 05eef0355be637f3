//! What a client asks for when it wants a sandbox, and the plan that a policy makes of it.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Error;
use crate::policy::{Policies, Policy};
use crate::sandbox::backend::Backends;
use crate::sandbox::seccomp::Profile;
use crate::sandbox::{BackendName, ImageRef, Isolation, Limits, Mount, image};
use crate::workspace::{Pool, Revision};

/// A wish for a sandbox.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Ask {
    /// The name of a policy; a client may not name files.
    pub policy: String,
    /// `None` = the policy's.
    pub image: Option<ImageRef>,
    pub backend: Option<BackendName>,
    pub env: BTreeMap<String, String>,
    pub labels: BTreeMap<String, String>,
    /// `None` = the policy's wall time, which is also the most.
    pub ttl: Option<Duration>,
    pub idle_timeout: Option<Duration>,
    /// `None` = an empty workspace.
    pub workspace: Option<Revision>,
    /// How long to wait for a place. Not a part of what is asked for.
    #[serde(skip)]
    pub queue_timeout: Duration,
    #[serde(skip)]
    pub by: String,
}

/// What sandboxes have in common that can stand in for each other.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Shape {
    pub backend: BackendName,
    pub image: ImageRef,
    pub isolation: Isolation,
    pub limits: Limits,
    pub mounts: Vec<Mount>,
    pub seccomp: Profile,
}

/// An [`Ask`] that the policy agrees to.
#[derive(Debug)]
pub(super) struct Plan {
    pub shape: Shape,
    pub policy: Policy,
    pub ttl: Duration,
    pub ask: Ask,
}

impl Ask {
    /// Checks everything that can be known to be wrong.
    ///
    /// # Errors
    /// The first thing that is.
    pub(super) async fn plan(mut self, data_dir: &Path, backends: &Backends, trees: &Pool) -> Result<Plan, Error> {
        let policy = Policies::named(&self.policy, data_dir)?;
        let shape = Shape::of(&policy, self.image.as_ref(), self.backend, backends, data_dir).await?;
        let most = shape.limits.wall_time;
        let ttl = self.ttl.unwrap_or(most);
        if ttl.is_zero() || ttl > most {
            return Err(Error::Invalid(format!(
                "`ttl` is more than nothing and at most the `wall_time` of policy `{}`, {}",
                self.policy,
                humantime::format_duration(most)
            )));
        }
        if self.idle_timeout.is_some_and(|idle| idle.is_zero()) {
            return Err(Error::Invalid("`idle_timeout` is longer than nothing".into()));
        }
        for name in self.env.keys() {
            check_variable(name)?;
        }
        // What the image sets lies below what the client does.
        let mut env = image::environment(&shape.image, data_dir)?;
        env.append(&mut self.env);
        self.env = env;
        if let Some(workspace) = self.workspace {
            require(trees, workspace).await?;
        }
        Ok(Plan {
            shape,
            policy,
            ttl,
            ask: self,
        })
    }
}

/// # Errors
/// For a name that no environment can hold.
pub(super) fn check_variable(name: &str) -> Result<(), Error> {
    match name.is_empty() || name.contains(['=', '\0']) {
        true => Err(Error::Invalid(format!("`env`: {name:?} is no name of a variable"))),
        false => Ok(()),
    }
}

/// Refuses a workspace that is not all here.
async fn require(trees: &Pool, workspace: Revision) -> Result<(), Error> {
    let missing = |what, id: String| {
        move |error| match error {
            crate::workspace::Error::Missing(_) => Error::NoWorkspace { what, id },
            error => Error::from(error),
        }
    };
    let tree = workspace.tree;
    trees.require(tree).await.map_err(missing("tree", tree.to_string()))?;
    if let Some(times) = workspace.times {
        let found = trees.artifact(times).await;
        found.map_err(missing("file times", times.to_string()))?;
    }
    Ok(())
}

impl Shape {
    /// What a policy makes of these wishes on this host.
    ///
    /// # Errors
    /// [`Error::Isolation`] when no backend here gives what the policy asks for.
    pub async fn of(
        policy: &Policy,
        image: Option<&ImageRef>,
        backend: Option<BackendName>,
        backends: &Backends,
        data_dir: &Path,
    ) -> Result<Self, Error> {
        // The same content to the end, whatever the name means later.
        let image = image::pinned(image.unwrap_or(policy.image()).clone(), data_dir)?;
        let by_image = matches!(image, ImageRef::Docker(_)).then_some(BackendName::Docker);
        let backend = backend.or(policy.backend()).or(by_image).unwrap_or(BackendName::Oci);
        let isolation = policy.isolation();
        let able = backends.get(backend).await?.capabilities().isolations;
        if !able.contains(&isolation) {
            let shown: Vec<String> = able.iter().map(ToString::to_string).collect();
            let missing = match shown.is_empty() {
                true => format!("the `{backend}` backend cannot be used here; see `exuvia doctor`"),
                false => format!(
                    "the `{backend}` backend gives {} here; see `exuvia doctor`",
                    shown.join(", ")
                ),
            };
            return Err(Error::Isolation {
                policy: policy.name().to_owned(),
                wanted: isolation,
                missing,
            });
        }
        Ok(Self {
            backend,
            image,
            isolation,
            limits: policy.limits().clone(),
            mounts: policy.mounts().to_vec(),
            seccomp: policy.seccomp(),
        })
    }
}
