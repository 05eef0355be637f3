//! Puts the parts of a service together over one data directory, and guards that directory.
//!
//! ```text
//! DATA/exuvia.db       store        DATA/blobs/      trees, blobs, artifacts     DATA/sandboxes/  live sandboxes
//! DATA/audit/          log, heads   DATA/work/       working directories         DATA/keys/       audit signing key
//! DATA/server.lock     one server at a time; embedded runs share the directory with it
//! ```

mod lock;

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::audit::Mirror;
use crate::border::{self, Borders};
use crate::chaos::{self, Faults, Faulty, KillAt};
use crate::clock::Clock;
use crate::error::Kind;
use crate::fleet::{self, Fleet};
use crate::ids::SandboxId;
use crate::run::{self, Service, Shop, bench};
use crate::sandbox::backend::Backends;
use crate::sandbox::disk::Volumes;
use crate::sandbox::{self, BackendName, reconcile};
use crate::store::{self, sqlite::Sqlite};
use crate::workdir::{self, WorkDirs};
use crate::workspace::overlay::Bases;
use crate::workspace::{self, Pool, Trees};

pub use lock::ServerLock;

/// What a service is made with.
#[derive(Debug, Clone)]
pub struct Config {
    pub data_dir: PathBuf,
    /// Runs driven side by side.
    pub parallel_runs: usize,
    /// A run that stood still for longer looks again before it goes on.
    pub stale_after: Duration,
    /// How long another process may stand still before its runs are taken over.
    pub lease: Duration,
    /// What the operator says about the network of sandboxes.
    pub egress: border::Operator,
}

impl Config {
    /// The usual one.
    pub fn of(data_dir: &Path, parallel_runs: usize) -> Self {
        Self {
            data_dir: data_dir.to_owned(),
            parallel_runs,
            stale_after: run::STALE_AFTER,
            lease: run::lease::LEASE,
            egress: border::Operator::default(),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot use the data directory `{path}`")]
    DataDir {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the data directory `{path}` belongs to uid {owner}, not to this user")]
    Foreign { path: PathBuf, owner: u32 },
    #[error("the data directory `{path}` is in use by another server ({holder})")]
    InUse { path: PathBuf, holder: String },
    /// A switch of `chaos`.
    #[error("{variable}: {reason}")]
    Switch { variable: &'static str, reason: String },
    #[error(transparent)]
    Store(#[from] store::Error),
    #[error(transparent)]
    Sandbox(#[from] sandbox::Error),
    #[error(transparent)]
    Workspace(#[from] workspace::Error),
    #[error(transparent)]
    Audit(#[from] crate::audit::Error),
    #[error(transparent)]
    Run(#[from] run::Error),
    #[error(transparent)]
    Bench(#[from] bench::Error),
    #[error(transparent)]
    Fleet(#[from] fleet::Error),
}

impl Error {
    pub fn kind(&self) -> Kind {
        match self {
            Self::DataDir { .. } | Self::Switch { .. } => Kind::Invalid,
            Self::Foreign { .. } => Kind::Denied,
            Self::InUse { .. } => Kind::WrongState,
            Self::Store(error) => error.kind(),
            Self::Sandbox(error) => error.kind(),
            Self::Workspace(error) => error.kind(),
            Self::Audit(error) => error.kind(),
            Self::Run(error) => error.kind(),
            Self::Bench(error) => error.kind(),
            Self::Fleet(error) => error.kind(),
        }
    }
}

/// The parts that sandboxes alone need: no run is driven with these.
#[derive(Debug, Clone)]
pub struct Parts {
    data_dir: PathBuf,
    pub store: Arc<dyn store::Store>,
    pub mirror: Arc<Mirror>,
    pub backends: Backends,
    pub clock: Arc<dyn Clock>,
    work_dirs: WorkDirs,
    /// What gives sandboxes their network.
    pub borders: Borders,
}

impl Parts {
    /// Opens the data directory, making it where it is missing.
    pub async fn open(data_dir: &Path, egress: border::Operator) -> Result<Self, Error> {
        secure_dir(data_dir)?;
        let clock = chaos::clock().map_err(switch("EXUVIA_CLOCK_JUMP"))?;
        let store: Arc<dyn store::Store> = Arc::new(Sqlite::open(data_dir, Arc::clone(&clock))?);
        let store = match Faults::from_env().map_err(switch("EXUVIA_STORE_FAULTS"))? {
            None => store,
            Some(faults) => Arc::new(Faulty::new(store, faults)),
        };
        let backends = Backends::new(data_dir);
        let mirror = Arc::new(Mirror::open(data_dir, Arc::clone(&clock))?);
        let records = Arc::new(border::OnAudit::new(Arc::clone(&store)));
        Ok(Self {
            data_dir: data_dir.to_owned(),
            store,
            mirror,
            backends,
            borders: Borders::new(egress, records, Arc::clone(&clock)),
            clock,
            work_dirs: WorkDirs::new(data_dir, Volumes::new(data_dir)),
        })
    }

    /// The fleet of a server, which drives nothing yet.
    pub async fn fleet(&self, trees: Pool, config: fleet::Config) -> Result<Fleet, Error> {
        let parts = fleet::Parts {
            data_dir: self.data_dir.clone(),
            backends: self.backends.clone(),
            trees,
            work_dirs: self.work_dirs.clone(),
            store: Arc::clone(&self.store),
            clock: Arc::clone(&self.clock),
            borders: Some(self.borders.clone()),
        };
        Ok(Fleet::new(parts, config).await?)
    }

    /// Removes what dead processes left (promise 7): sandboxes, and working directories of runs that nobody drives.
    pub async fn reap(&self, backends: &[BackendName]) -> Vec<SandboxId> {
        let mut gone = Vec::new();
        // Those of the fleet wait for the next server, which goes on with them.
        let now = self.clock.now();
        let is_kept = |id: &SandboxId| fleet::is_leased(&self.data_dir, id, now);
        for name in backends {
            let reaped = async { reconcile::reap(self.backends.get(*name).await?.as_ref(), is_kept).await };
            match reaped.await {
                Ok(ids) => gone.extend(ids),
                // An engine that is not there holds nothing that could be removed now.
                Err(error) => tracing::debug!(error = %crate::error::chain(&error), "nothing reaped"),
            }
        }
        let is_kept = |name: &str| name.parse().is_ok_and(|id| is_kept(&id));
        if let Err(error) = workdir::sweep(&self.data_dir, is_kept) {
            tracing::warn!(%error, "working directories not swept");
        }
        if let Err(error) = Bases::new(&self.data_dir).sweep() {
            tracing::warn!(%error, "unfinished bases not swept");
        }
        gone
    }
}

/// Opens everything and makes a service that drives nothing yet.
pub async fn open(config: &Config) -> Result<(Service, Parts), Error> {
    let parts = Parts::open(&config.data_dir, config.egress.clone()).await?;
    let pool = Pool::new(Trees::open(&config.data_dir)?).over(Bases::new(&config.data_dir));
    let shop = Shop {
        store: Arc::clone(&parts.store),
        benches: bench::Maker::new(
            &config.data_dir,
            pool.clone(),
            parts.backends.clone(),
            Arc::clone(&parts.clock),
            Arc::clone(&parts.store),
            parts.work_dirs.clone(),
        )?
        .with_borders(parts.borders.clone()),
        clock: Arc::clone(&parts.clock),
        hub: run::hub::Hub::default(),
        host: nix::unistd::gethostname()
            .ok()
            .and_then(|name| name.into_string().ok())
            .unwrap_or_default(),
        kill_at: KillAt::from_env().map_err(switch("EXUVIA_KILL_AT"))?,
        stale_after: config.stale_after,
        lease: config.lease.max(Duration::from_millis(100)),
    };
    let (data_dir, mirror) = (config.data_dir.clone(), parts.mirror.clone());
    let service = Service::new(Arc::new(shop), pool, mirror, data_dir, config.parallel_runs)?;
    Ok((service, parts))
}

/// A directory of ours: made 0700 where it is missing, refused when it is somebody else's.
fn secure_dir(path: &Path) -> Result<(), Error> {
    let fail = |source| data_dir_error(path, source);
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(fail)?;
    let metadata = fs::metadata(path).map_err(fail)?;
    if metadata.uid() != nix::unistd::geteuid().as_raw() {
        return Err(Error::Foreign {
            path: path.to_owned(),
            owner: metadata.uid(),
        });
    }
    if metadata.permissions().mode() & 0o077 != 0 {
        fs::set_permissions(path, fs::Permissions::from_mode(0o700)).map_err(fail)?;
    }
    Ok(())
}

fn switch(variable: &'static str) -> impl FnOnce(String) -> Error {
    move |reason| Error::Switch { variable, reason }
}

fn data_dir_error(path: &Path, source: io::Error) -> Error {
    Error::DataDir {
        path: path.to_owned(),
        source,
    }
}
