//! The bench of a run: one sandbox and one working directory, and the tools' door into them.
//!
//! A bench is made from a committed tree and thrown away whenever it may no longer be what the journal says; nothing in it
//! is ever the only copy of anything.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::json;

use super::event::Call;
use super::{trail, world};
use crate::audit::Record;
use crate::border::{self, Borders, Guard, Post, Whose};
use crate::clock::Clock;
use crate::error::Kind;
use crate::ids::SandboxId;
use crate::policy::Policy;
use crate::sandbox::backend::Backends;
use crate::sandbox::disk;
use crate::sandbox::{self, BackendName, Identity, ImageRef, Isolation, Limits, Sandbox, Spec, identity, seccomp};
use crate::store::{self, RunRecord, Store};
use crate::task::Task;
use crate::tool::registry::Registry;
use crate::tool::world::Blame;
use crate::tool::{self, ToolResult};
use crate::workdir::{self, WorkDir, WorkDirs};
use crate::workspace::overlay::{Look, Reading, Site};
use crate::workspace::{self, BlobId, Pool, Revision};

/// How long a sandbox's processes have to end by themselves when it is closed.
const GRACE: Duration = Duration::from_millis(200);

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Sandbox(#[from] sandbox::Error),
    #[error(transparent)]
    Workspace(#[from] workspace::Error),
    #[error(transparent)]
    Lost(#[from] tool::world::Lost),
    #[error(transparent)]
    Store(#[from] store::Error),
    #[error("no system-call filter for this host")]
    Filter(#[from] sandbox::seccomp::Error),
    #[error(transparent)]
    Border(#[from] border::Error),
    #[error("the policy `{policy}` asks for {wanted} isolation: {missing}")]
    Isolation {
        policy: String,
        wanted: Isolation,
        missing: String,
    },
    #[error(transparent)]
    Directory(#[from] workdir::Error),
    #[error("the disk of the data directory is full: {free} bytes are left")]
    Full { free: u64 },
}

impl Error {
    pub fn kind(&self) -> Kind {
        match self {
            Self::Sandbox(error) => error.kind(),
            Self::Workspace(error) => error.kind(),
            Self::Lost(_) | Self::Full { .. } => Kind::Unavailable,
            Self::Store(error) => error.kind(),
            Self::Filter(_) | Self::Isolation { .. } => Kind::WrongState,
            Self::Directory(error) => error.kind(),
            Self::Border(error) => error.kind(),
        }
    }

    /// Whose doing it is that a step was lost.
    pub fn blame(&self) -> Blame {
        match self {
            Self::Lost(lost) => lost.blame,
            Self::Sandbox(_)
            | Self::Workspace(_)
            | Self::Store(_)
            | Self::Filter(_)
            | Self::Border(_)
            | Self::Isolation { .. }
            | Self::Directory(_)
            | Self::Full { .. } => Blame::Host,
        }
    }

    /// Stable code for [`crate::error::Fault`].
    pub fn code(&self) -> &'static str {
        match self {
            Self::Sandbox(sandbox::Error::Unsupported { .. } | sandbox::Error::Breached(_))
            | Self::Filter(_)
            | Self::Isolation { .. }
            | Self::Border(border::Error::Unsupported { .. })
            | Self::Directory(workdir::Error::Disk(disk::Error::Unsupported { .. } | disk::Error::NotTaken(_))) => {
                "isolation_unavailable"
            }
            Self::Sandbox(sandbox::Error::Image { .. }) => "image",
            Self::Lost(lost) if lost.blame == Blame::Program => "sandbox_exhausted",
            Self::Border(border::Error::Doors(_) | border::Error::Sandbox(_)) | Self::Sandbox(_) | Self::Lost(_) => {
                "sandbox_lost"
            }
            Self::Border(_) => "network",
            Self::Workspace(workspace::Error::Limit { .. }) => "workspace_limit",
            Self::Workspace(_) | Self::Directory(_) => "workspace",
            Self::Store(_) => "store",
            Self::Full { .. } => "disk_full",
        }
    }
}

/// Less than this is full: nothing can be relied on to have been written.
const FULL: u64 = 4 << 20;
/// Where something already said that there was no room, what it wanted may have been large, and is gone again.
const TIGHT: u64 = 256 << 20;

/// Makes benches; clones share everything.
#[derive(Debug, Clone)]
pub struct Maker {
    data_dir: PathBuf,
    pool: Pool,
    backends: Backends,
    clock: Arc<dyn Clock>,
    store: Arc<dyn Store>,
    work_dirs: WorkDirs,
    filters: seccomp::Filters,
    borders: Option<Borders>,
    /// Sandboxes that could not be removed yet.
    stuck: Arc<tokio::sync::Mutex<Vec<Arc<Bench>>>>,
}

impl Maker {
    pub fn new(
        data_dir: &Path,
        pool: Pool,
        backends: Backends,
        clock: Arc<dyn Clock>,
        store: Arc<dyn Store>,
        work_dirs: WorkDirs,
    ) -> Result<Self, Error> {
        let filters = seccomp::Filters::compile()?;
        Ok(Self {
            data_dir: data_dir.to_owned(),
            work_dirs,
            pool,
            backends,
            clock,
            store,
            filters,
            borders: None,
            stuck: Arc::default(),
        })
    }

    /// With what gives a sandbox its way out. Without it a policy that names a network is refused.
    pub fn with_borders(self, borders: Borders) -> Self {
        Self {
            borders: Some(borders),
            ..self
        }
    }

    /// Closes a bench. One that cannot be removed is kept, with its directory and its user ids, and tried again later.
    pub async fn put_away(&self, bench: Arc<Bench>) {
        if let Err(error) = bench.close().await {
            tracing::error!(sandbox = %bench.id(), error = %crate::error::chain(&error), "sandbox not removed yet");
            self.stuck.lock().await.push(bench);
        }
    }

    /// Tries again to remove what could not be removed before.
    async fn clear(&self) {
        let stuck = std::mem::take(&mut *self.stuck.lock().await);
        for bench in stuck {
            self.put_away(bench).await;
        }
    }

    /// The backend that will make a task's sandboxes, or why this host cannot do what the policy asks.
    pub async fn choose(
        &self,
        wanted: Option<BackendName>,
        policy: &Policy,
        image: &ImageRef,
    ) -> Result<BackendName, Error> {
        let by_image = matches!(image, ImageRef::Docker(_)).then_some(BackendName::Docker);
        let name = wanted.or(by_image).unwrap_or(BackendName::Oci);
        let isolation = policy.isolation();
        let able = self.backends.get(name).await?.capabilities();
        if able.isolations.contains(&isolation) {
            border::check(policy, &able)?;
            return Ok(name);
        }
        let shown: Vec<String> = able.isolations.iter().map(ToString::to_string).collect();
        let missing = match shown.as_slice() {
            [] => format!("the `{name}` backend cannot be used here; see `exuvia doctor`"),
            able => format!(
                "the `{name}` backend gives {} here; see `exuvia doctor`",
                able.join(", ")
            ),
        };
        Err(Error::Isolation {
            policy: policy.name().to_owned(),
            wanted: isolation,
            missing,
        })
    }

    pub(super) fn data_dir(&self) -> &Path {
        &self.data_dir
    }

    /// The system-call filter that a policy asks for, as the kernel gets it.
    pub(super) fn filter(&self, policy: &Policy) -> Vec<u8> {
        self.filters.of(policy.seccomp()).to_vec()
    }

    /// What a backend can do here, in words that only comparing is for.
    pub(super) async fn capabilities(&self, backend: BackendName) -> String {
        match self.backends.get(backend).await {
            Ok(backend) => format!("{:?}", backend.capabilities()),
            Err(_) => "none".to_owned(),
        }
    }

    /// The image by what it is here; `none` where it is gone.
    pub(super) fn image(&self, image: &ImageRef) -> String {
        sandbox::image::pinned(image.clone(), &self.data_dir).map_or("none".to_owned(), |image| image.to_string())
    }

    /// A workspace by its content; what of it is gone is said.
    pub(super) async fn inputs(&self, workspace: Revision) -> String {
        let tree = workspace.tree;
        if self.pool.require(tree).await.is_err() {
            return format!("tree {tree} is gone");
        }
        match workspace.times {
            Some(times) if self.pool.artifact(times).await.is_err() => format!("file times {times} are gone"),
            Some(times) => format!("{tree} {times}"),
            None => tree.to_string(),
        }
    }

    /// Whether there is room on the data directory's disk to believe what was just done there, or why it failed.
    ///
    /// # Errors
    /// [`Error::Full`].
    pub fn room(&self, failed: Option<&Error>) -> Result<(), Error> {
        // Where it cannot be asked, the error that there is tells enough.
        let Ok(disk) = nix::sys::statvfs::statvfs(&self.data_dir) else {
            return Ok(());
        };
        let free = disk.blocks_available() * disk.fragment_size();
        let needed = if failed.is_some_and(says_full) { TIGHT } else { FULL };
        match free < needed.min(disk.blocks() * disk.fragment_size() / 2) {
            true => Err(Error::Full { free }),
            false => Ok(()),
        }
    }

    /// A working directory with the disk quota of `limits`.
    async fn work_dir(&self, id: &SandboxId, limits: &Limits, identity: Identity) -> Result<WorkDir, Error> {
        let work_dirs = self.work_dirs.clone();
        let (name, limits, owner) = (id.to_string(), limits.clone(), identity.host_uid());
        Ok(off_thread(move || work_dirs.open(&name, &limits, owner)).await?)
    }

    /// Makes a bench with the workspace as it is in `revision`; leaves nothing behind when it fails.
    pub async fn open(
        &self,
        record: &RunRecord,
        task: &Task,
        policy: &Policy,
        revision: Revision,
        known_artifacts: impl IntoIterator<Item = String>,
    ) -> Result<Bench, Error> {
        self.clear().await;
        let backend = self.backends.get(task.backend).await?;
        let guard = Guard::of(policy, &backend.capabilities(), self.borders.as_ref())?;
        let claim = identity::Claim::take(&self.data_dir)?;
        let id = SandboxId::random();
        let directory = self.work_dir(&id, policy.limits(), claim.identity()).await?;
        let owner = workspace::Owner {
            uid: claim.identity().host_uid(),
            gid: claim.identity().host_uid(),
        };
        let env = sandbox::image::environment(&task.image, &self.data_dir);
        let made = async {
            let env = env?;
            let site = self.pool.lay(directory.ground(), revision, Some(owner)).await?;
            let spec = Spec {
                id: id.clone(),
                image: task.image.clone(),
                isolation: policy.isolation(),
                limits: policy.limits().clone(),
                identity: claim.identity(),
                workspace: Some(site.path()),
                mounts: policy.mounts().to_vec(),
                labels: [("run".to_owned(), record.run.to_string())].into(),
            };
            let filter = self.filters.of(policy.seccomp()).to_vec();
            let sandbox = Sandbox::open(Arc::clone(&backend), spec, filter).await?;
            let whose = Whose {
                sandbox: id.clone(),
                run: Some(record.run.clone()),
                steps: border::Steps::default(),
            };
            match guard.stand(&*backend, sandbox.handle(), &whose).await {
                Ok(post) => Ok::<_, Error>((sandbox, site, env, post)),
                Err(error) => {
                    if let Err(left) = sandbox.destroy().await {
                        tracing::error!(sandbox = %id, error = %crate::error::chain(&left), "not removed; the next start does it");
                    }
                    Err(error.into())
                }
            }
        };
        let (sandbox, site, env, post) = match made.await {
            Ok(made) => made,
            Err(error) => {
                // Not before the last process that might write into it has ended: `Sandbox::open` sees to that.
                off_thread(move || directory.remove()).await;
                return Err(error);
            }
        };
        let mut env = env;
        env.extend(guard.variables().clone());
        let bench = Bench {
            sandbox,
            post,
            env,
            directory,
            _claim: claim,
            pool: self.pool.clone(),
            clock: Arc::clone(&self.clock),
            store: Arc::clone(&self.store),
            record: record.clone(),
            opened: self.clock.elapsed(),
            site: tokio::sync::Mutex::new(site),
            artifacts: Mutex::new(known_artifacts.into_iter().collect()),
        };
        let details = json!({ "backend": task.backend, "image": task.image, "isolation": policy.isolation(),
            "limits": policy.limits(), "tree": revision.tree });
        if let Err(error) = bench.on_record("sandbox.created", details).await {
            // What cannot be put on the record does not run.
            self.put_away(Arc::new(bench)).await;
            return Err(error);
        }
        Ok(bench)
    }
}

/// Whether there was no room for something, of the host's or of a quota of ours.
fn says_full(error: &Error) -> bool {
    let chain = std::iter::successors(Some(error as &dyn std::error::Error), |error| error.source());
    let kinds = chain
        .filter_map(|error| error.downcast_ref::<std::io::Error>())
        .map(std::io::Error::kind);
    kinds.into_iter().any(|kind| {
        matches!(
            kind,
            std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded
        )
    })
}

/// Blocking work, to its end.
async fn off_thread<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_) => unreachable!("blocking work that has begun is not cancelled"),
        },
    }
}

/// A sandbox and the directory that is its workspace.
#[derive(Debug)]
pub struct Bench {
    sandbox: Sandbox,
    /// Its way out, where the policy has one.
    post: Option<Post>,
    /// What commands get from the image and for the network, below what tools set.
    env: std::collections::BTreeMap<String, String>,
    directory: WorkDir,
    _claim: identity::Claim,
    pool: Pool,
    clock: Arc<dyn Clock>,
    store: Arc<dyn Store>,
    record: RunRecord,
    /// By the clock that nobody sets.
    opened: Duration,
    /// One snapshot is taken at a time.
    site: tokio::sync::Mutex<Site>,
    /// What this run has stored, and may read back.
    artifacts: Mutex<std::collections::BTreeSet<String>>,
}

/// How a tool call went.
#[derive(Debug)]
pub struct Ran {
    pub result: Result<ToolResult, Error>,
    /// The execs it made, for the audit record.
    pub audit: Vec<Record>,
}

impl Bench {
    pub fn id(&self) -> &SandboxId {
        self.sandbox.id()
    }

    pub fn env(&self) -> &std::collections::BTreeMap<String, String> {
        &self.env
    }

    /// Runs a tool call to its result.
    pub async fn run(&self, registry: &Registry, call: &Call, key: &str, limit: Duration) -> Ran {
        let _step = self.post.as_ref().map(|post| post.enter(call.step));
        let world = world::Inside::new(self, key, self.post.as_ref().map(Post::mark));
        let limits = tool::Limits { timeout: limit };
        let result = tool::run(registry, &call.tool, &call.arguments, &world, &limits).await;
        Ran {
            result: result.map_err(Error::from),
            audit: world.into_records(),
        }
    }

    /// What is left of the sandbox's wall time; no command gets more.
    pub fn time_left(&self) -> Duration {
        self.sandbox
            .limits()
            .wall_time
            .saturating_sub(self.clock.elapsed().saturating_sub(self.opened))
    }

    /// Takes the workspace as it is now; durable on return. Everything in the sandbox stands still while it is looked at.
    pub async fn snapshot(&self) -> Result<Revision, Error> {
        let site = self.site.lock().await;
        let mut looked = self.look(&site, Reading::Later).await?;
        let kept = loop {
            match self.pool.keep(&site, looked).await {
                Err(workspace::Error::Changed(path)) => {
                    tracing::debug!(run = %self.record.run, path, "changed after the look: another one");
                    looked = self.look(&site, Reading::Now).await?;
                }
                kept => break kept?,
            }
        };
        if kept.report.skipped_total > 0 {
            tracing::warn!(run = %self.record.run, skipped = kept.report.skipped_total, "special files are not kept");
        }
        Ok(kept.revision)
    }

    /// Looks at the workspace while everything stands still.
    async fn look(&self, site: &Site, reading: Reading) -> Result<Look, Error> {
        self.sandbox.freeze().await?;
        // Where nothing but the guest is there, nobody has a file open.
        let reading = match self.sandbox.is_alone().await {
            true => reading,
            false => Reading::Now,
        };
        let looked = self.pool.look(site, reading).await;
        let thawed = self.sandbox.thaw().await;
        let looked = looked?;
        thawed?;
        Ok(looked)
    }

    /// Ends the sandbox and removes the directory. May be called again.
    ///
    /// # Errors
    /// When the sandbox is still there: nothing of it may be given to another then.
    pub async fn close(&self) -> Result<(), sandbox::Error> {
        if let Some(post) = &self.post {
            post.close().await;
        }
        self.sandbox.close(GRACE).await?;
        let directory = self.directory.clone();
        off_thread(move || directory.remove()).await;
        if let Err(error) = self.on_record("sandbox.destroyed", serde_json::Value::Null).await {
            tracing::error!(sandbox = %self.id(), error = %crate::error::chain(&error), "not on the audit record");
        }
        Ok(())
    }

    async fn on_record(&self, action: &str, details: serde_json::Value) -> Result<(), Error> {
        let record = self.audit_record(action, "ok", details);
        Ok(self.store.audit(vec![record]).await?)
    }

    /// A record of this run and sandbox.
    pub(super) fn audit_record(&self, action: &str, outcome: &str, details: serde_json::Value) -> Record {
        let mut ids = trail::ids(&self.record);
        ids.insert("sandbox".to_owned(), self.id().to_string());
        Record {
            at: self.clock.now(),
            actor: format!("run:{}", self.record.run),
            action: action.to_owned(),
            outcome: outcome.to_owned(),
            ids,
            details,
        }
    }

    pub(super) fn post(&self) -> Option<&Post> {
        self.post.as_ref()
    }

    pub(super) fn sandbox(&self) -> &Sandbox {
        &self.sandbox
    }

    pub(super) async fn put_artifact(&self, bytes: &[u8]) -> Result<String, Error> {
        let id = self.pool.put_artifact(bytes.to_vec()).await?.to_string();
        self.artifacts
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(id.clone());
        Ok(id)
    }

    pub(super) async fn artifact(&self, id: &str) -> Result<Option<Vec<u8>>, Error> {
        let is_ours = self
            .artifacts
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .contains(id);
        match id.parse::<BlobId>() {
            Ok(blob) if is_ours => Ok(Some(self.pool.artifact(blob).await?)),
            Ok(_) | Err(_) => Ok(None),
        }
    }
}
