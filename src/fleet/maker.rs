//! A sandbox together with its working directory: made, taken over, removed.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::Error;
use super::ask::Shape;
use super::lease::Lease;
use crate::border::{Borders, Guard, Post, Whose};
use crate::ids::SandboxId;
use crate::policy::Policy;
use crate::sandbox::backend::Backends;
use crate::sandbox::kernel::Warm;
use crate::sandbox::{self, BackendName, Life, Sandbox, Spec, identity, seccomp};
use crate::workdir::{WorkDir, WorkDirs};
use crate::workspace::overlay::Site;
use crate::workspace::{self, Pool, Revision};

/// How long the guest of an earlier server's sandbox may take to answer.
const ANSWER: Duration = Duration::from_secs(2);

/// Makes sandboxes; clones share everything.
#[derive(Debug, Clone)]
pub(super) struct Maker {
    data_dir: PathBuf,
    backends: Backends,
    trees: Pool,
    work_dirs: WorkDirs,
    filters: seccomp::Filters,
    borders: Option<Borders>,
}

/// A sandbox that is up, and its directory.
#[derive(Debug)]
pub(super) struct Made {
    pub sandbox: Arc<Sandbox>,
    pub life: Life,
    pub directory: WorkDir,
    /// Its workspace in the directory.
    pub site: Site,
    /// Its way out, where its policy has one: opened when it is handed out.
    pub post: Option<Post>,
    /// Processes that wait for code, where they were made ahead, and with which variables.
    pub warm: Option<(Warm, BTreeMap<String, String>)>,
    /// `None`: the range belongs to the sandbox itself, which an earlier server made.
    _claim: Option<identity::Claim>,
}

impl Maker {
    pub fn new(
        data_dir: &Path,
        backends: Backends,
        trees: Pool,
        work_dirs: WorkDirs,
        borders: Option<Borders>,
    ) -> Result<Self, Error> {
        Ok(Self {
            data_dir: data_dir.to_owned(),
            backends,
            trees,
            work_dirs,
            filters: seccomp::Filters::compile()?,
            borders,
        })
    }

    pub fn backends(&self) -> &Backends {
        &self.backends
    }

    pub fn borders(&self) -> Option<&Borders> {
        self.borders.as_ref()
    }

    pub fn trees(&self) -> &Pool {
        &self.trees
    }

    pub fn work_dirs(&self) -> &WorkDirs {
        &self.work_dirs
    }

    /// What an interpreter grows up under: whoever is cast from it has a filter of their own.
    pub fn filter_of_nursery(&self) -> Vec<u8> {
        self.filters.of(seccomp::Profile::Default).to_vec()
    }

    pub fn data_dir(&self) -> &Path {
        &self.data_dir
    }

    /// Makes one; without a workspace it has an empty one. Leaves nothing behind when it fails. Not cancellation-safe: let it
    /// run to its end.
    pub async fn make(&self, id: SandboxId, shape: &Shape, files: Option<Revision>) -> Result<Made, Error> {
        self.begin(id, shape, files, None).await
    }

    /// As [`Self::make`], with what ran in another going on in it; its files are there first.
    pub async fn restore(&self, id: SandboxId, shape: &Shape, files: Revision, memory: &Path) -> Result<Made, Error> {
        self.begin(id, shape, Some(files), Some(memory)).await
    }

    async fn begin(
        &self,
        id: SandboxId,
        shape: &Shape,
        files: Option<Revision>,
        memory: Option<&Path>,
    ) -> Result<Made, Error> {
        let backend = self.backends.get(shape.backend).await?;
        let (data_dir, work_dirs) = (self.data_dir.clone(), self.work_dirs.clone());
        let (name, limits) = (id.to_string(), shape.limits.clone());
        let taken = blocking(move || {
            let claim = identity::Claim::take(&data_dir)?;
            let owner = claim.identity().host_uid();
            let directory = work_dirs.open(&name, &limits, owner)?;
            Ok::<_, Error>((claim, directory))
        });
        let (claim, directory) = taken.await?;
        let made = async {
            let owner = owner(claim.identity());
            let revision = match files {
                None => self.trees.empty().await?.into(),
                Some(revision) => revision,
            };
            let site = self.trees.lay(directory.ground(), revision, Some(owner)).await?;
            directory.mark();
            let spec = Spec {
                id,
                image: shape.image.clone(),
                isolation: shape.isolation,
                limits: shape.limits.clone(),
                identity: claim.identity(),
                workspace: Some(site.path()),
                mounts: shape.mounts.clone(),
                labels: [("fleet".to_owned(), "direct".to_owned())].into(),
            };
            let filter = self.filters.of(shape.seccomp).to_vec();
            let sandbox = match memory {
                None => Sandbox::open(backend, spec, filter).await?,
                Some(memory) => Sandbox::restore(backend, spec, filter, memory).await?,
            };
            match sandbox.life().await {
                Ok(life) => Ok((sandbox, life, site)),
                Err(cause) => {
                    let cleaned = sandbox.destroy().await;
                    Err(Error::from(cause.after(cleaned)))
                }
            }
        };
        match made.await {
            Ok((sandbox, life, site)) => Ok(Made {
                sandbox: Arc::new(sandbox),
                life,
                directory,
                site,
                post: None,
                warm: None,
                _claim: Some(claim),
            }),
            Err(error) => {
                remove(directory).await;
                Err(error)
            }
        }
    }

    /// Puts a workspace into one that is still empty.
    pub async fn furnish(&self, made: &Made, revision: Revision) -> Result<(), Error> {
        let owner = owner(made.sandbox.spec().identity);
        Ok(self.trees.furnish(&made.site, revision, Some(owner)).await?)
    }

    /// Takes over what an earlier server made.
    ///
    /// # Errors
    /// When that cannot be; it is left as it was.
    pub async fn adopt(&self, lease: &Lease) -> Result<Made, Error> {
        let backend = self.backends.get(lease.backend).await?;
        let policy = Policy::from_snapshot(&lease.policy)?;
        let placeholders = lease.placeholders.clone();
        let guard = Guard::with(&policy, &backend.capabilities(), self.borders.as_ref(), placeholders)?;
        let (data_dir, name) = (self.data_dir.clone(), lease.spec.id.to_string());
        let directory = blocking(move || Ok::<_, Error>(WorkDir::adopt(&data_dir, &name)?)).await?;
        let site = self.trees.adopt(directory.ground()).await?;
        let handle = backend.adopt(&lease.spec.id).await?;
        let whose = Whose::sandbox(&lease.spec.id);
        // First: nothing that ran before is to find its doors closed once it is told that all goes on.
        let post = guard.stand(&*backend, &handle, &whose).await?;
        let sandbox = Sandbox::known(
            backend,
            handle,
            lease.spec.clone(),
            self.filters.of(lease.seccomp).to_vec(),
        );
        let life = sandbox.life().await?;
        match lease.paused {
            // It cannot answer. Frozen again, should that have come half way.
            true => sandbox.freeze().await?,
            // A snapshot may have been interrupted.
            false => {
                sandbox.thaw().await?;
                match tokio::time::timeout(ANSWER, sandbox.ping()).await {
                    Ok(answer) => answer?,
                    Err(_) => {
                        return Err(Error::Sandbox(sandbox::Error::GuestLost {
                            sandbox: lease.spec.id.clone(),
                            reason: format!("it said nothing within {ANSWER:?}"),
                        }));
                    }
                }
            }
        }
        Ok(Made {
            sandbox: Arc::new(sandbox),
            life,
            directory,
            site,
            post,
            warm: None,
            _claim: None,
        })
    }

    /// Opens a sandbox's way out, where its policy has one.
    pub async fn stand(&self, made: &Made, backend: BackendName, guard: &Guard) -> Result<Option<Post>, Error> {
        let backend = self.backends.get(backend).await?;
        let whose = Whose::sandbox(made.sandbox.id());
        Ok(guard.stand(&*backend, made.sandbox.handle(), &whose).await?)
    }
}

impl Made {
    /// Removes every trace of one in which nothing runs any more, or which nobody has used.
    ///
    /// # Errors
    /// When the sandbox is still there: its directory stays as well.
    pub async fn clear(&self) -> Result<(), sandbox::Error> {
        if let Some(post) = &self.post {
            post.close().await;
        }
        self.sandbox.destroy().await?;
        remove(self.directory.clone()).await;
        Ok(())
    }
}

fn owner(identity: sandbox::Identity) -> workspace::Owner {
    workspace::Owner {
        uid: identity.host_uid(),
        gid: identity.host_uid(),
    }
}

/// Removes a working directory; what cannot be removed now is swept at a later start.
pub(super) async fn remove(directory: WorkDir) {
    let removed = tokio::task::spawn_blocking(move || directory.remove()).await;
    if let Err(error) = removed {
        tracing::error!(%error, "working directory not removed");
    }
}

pub(super) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}
