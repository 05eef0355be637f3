//! What a client asks for when it wants a sandbox, and the plan that a policy makes of it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::maker::Maker;
use super::{Error, snapshot};
use crate::border::{self, Guard};
use crate::ids::SnapshotId;
use crate::policy::{Policies, Policy};
use crate::sandbox::backend::Backends;
use crate::sandbox::seccomp::Profile;
use crate::sandbox::{BackendName, ImageRef, Isolation, Limits, Mount, image};
use crate::task::check_labels;
use crate::workspace::{Pool, Revision};

/// Longest variable: the kernel takes 128 KiB for one, with its `=` and its NUL.
const MOST_VARIABLE: usize = (128 << 10) - 2;
/// Most of all variables: half of what a command can be given, its arguments included.
const MOST_ENVIRONMENT: usize = 1 << 20;

/// A wish for a sandbox.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Ask {
    /// The name of a policy; a client may not name files. Empty = the snapshot's.
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
    /// Memory to go on from; the workspace comes with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<SnapshotId>,
    /// How long to wait for a place. Not a part of what is asked for.
    #[serde(skip)]
    pub queue_timeout: Duration,
    #[serde(skip)]
    pub by: String,
}

/// What sandboxes have in common that can stand in for each other.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
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
    /// Where the memory to go on from is.
    pub memory: Option<PathBuf>,
    pub guard: Guard,
    /// What it cannot do, by name.
    pub lacks: Vec<String>,
}

impl Ask {
    /// Checks everything that can be known to be wrong.
    ///
    /// # Errors
    /// The first thing that is.
    pub(super) async fn plan(mut self, maker: &Maker) -> Result<Plan, Error> {
        let (data_dir, backends, trees) = (maker.data_dir(), maker.backends(), maker.trees());
        let kept = self
            .snapshot
            .as_ref()
            .map(|id| snapshot::find(data_dir, id))
            .transpose()?;
        if let Some((kept, _)) = &kept {
            if self.policy.is_empty() {
                self.policy.clone_from(&kept.policy);
            }
            self.image.get_or_insert_with(|| kept.shape.image.clone());
            self.backend.get_or_insert(kept.shape.backend);
            self.workspace = Some(kept.workspace);
        }
        let policy = Policies::named(&self.policy, data_dir)?;
        let shape = Shape::of(&policy, self.image.as_ref(), self.backend, backends, data_dir).await?;
        if let (Some(id), Some((kept, _))) = (&self.snapshot, &kept) {
            kept.shape.fits(&shape, id)?;
        }
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
        check_environment(&self.env)?;
        check_labels(&self.labels).map_err(Error::Invalid)?;
        // What the image sets lies below what the client does.
        let mut env = image::environment(&shape.image, data_dir)?;
        if let Some((kept, _)) = &kept {
            env.extend(kept.env.clone());
        }
        let able = backends.get(shape.backend).await?.capabilities();
        let guard = Guard::of(&policy, &able, maker.borders())?;
        let lacks = super::create::lacks(&able, shape.isolation);
        env.extend(guard.variables().clone());
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
            memory: kept.map(|(_, memory)| memory),
            guard,
            lacks,
        })
    }
}

/// # Errors
/// For what would keep every command from starting.
fn check_environment(env: &BTreeMap<String, String>) -> Result<(), Error> {
    for (name, value) in env {
        check_variable(name)?;
        if value.contains('\0') {
            return Err(Error::Invalid(format!("`env`: the value of {name:?} holds a NUL")));
        }
        if name.len() + value.len() > MOST_VARIABLE {
            return Err(Error::Invalid(format!(
                "`env`: {name:?} has more than {MOST_VARIABLE} bytes"
            )));
        }
    }
    let bytes: usize = env.iter().map(|(name, value)| name.len() + value.len() + 2).sum();
    match bytes > MOST_ENVIRONMENT {
        true => Err(Error::Invalid(format!(
            "`env`: all of it has {bytes} bytes, more than {MOST_ENVIRONMENT}"
        ))),
        false => Ok(()),
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
    /// Whether what ran in a sandbox of this shape may go on in one of another. Only in the same: its programs carry their
    /// limits and their filter along, and must not get round what the policy says by now.
    fn fits(&self, wanted: &Self, snapshot: &SnapshotId) -> Result<(), Error> {
        let parts = [
            ("image", self.image == wanted.image),
            ("backend", self.backend == wanted.backend),
            ("isolation", self.isolation == wanted.isolation),
            ("limits", self.limits == wanted.limits),
            ("mounts", self.mounts == wanted.mounts),
            ("system-call filter", self.seccomp == wanted.seccomp),
        ];
        let other: Vec<&str> = parts.iter().filter(|(_, same)| !same).map(|(name, _)| *name).collect();
        match other.is_empty() {
            true => Ok(()),
            false => Err(Error::SnapshotUnfit {
                snapshot: snapshot.clone(),
                reason: format!("what is asked for has another {}", other.join(", ")),
            }),
        }
    }

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
        let capabilities = backends.get(backend).await?.capabilities();
        let able = &capabilities.isolations;
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
        border::check(policy, &capabilities)?;
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
