//! The `oci` backend: containers made by a small process of ours, the forge (`crate::forge`); no daemon. With isolation `gvisor`
//! the forge makes the place that `runsc` runs in (see `backend/gvisor/mod.rs`), while everything from `owner.json` to the end
//! of a sandbox stays the same.
//!
//! Owns `DATA/sandboxes/ID` (one directory per sandbox), `DATA/bin`, and the control group of each sandbox.
//! Must not know: policies, runs, what is said to the guest.
//!
//! How a sandbox comes to be, and what undoes each step:
//!
//! ```text
//! server    record.rs  directory + owner.json appear by one rename      removed last
//!           cgroup     group made, limits set and read back             killed, awaited, removed
//!           socket.rs  guest.sock bound, its listener handed on         goes with the directory
//! forge     clones a child, which enters the group                      from here it is killed with it
//!           and builds namespaces, mounts, a root of its own            end with the last process in them
//! guest     PID 1, accepts on descriptor 3
//! ```
//!
//! Nothing but the directory, the group and the processes in it exists outside the container's own namespaces, and all
//! three are found by the sandbox's id. So whoever finds the directory can end the sandbox (`ruin.rs`), at any point of the set-up and
//! from any process. A child of the forge that comes late cannot enter a group that is gone.

mod forge;
mod make;
mod record;
mod ruin;
pub(super) mod socket;
#[cfg(test)]
mod tests;

use std::fs;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::net::UnixStream;

pub use record::FILE as RECORD;

use super::{Backend, Capabilities, Doomed, Doorway, Handle, Owned, Still, guest_file, gvisor};
use crate::ids::SandboxId;
use crate::process::Process;
use crate::sandbox::cgroup::{self, Hierarchies};
use crate::sandbox::{BackendName, Error, Identity, Isolation, Life, Losses, Spec, Usage};

/// Containers by the forge. Cheap to clone; all state is on disk and in the kernel.
///
/// What waits for the kernel or the forge is done on a thread for that. Reading a record or a counter takes less than the way
/// to such a thread and back, and is done where it is asked for.
#[derive(Debug, Clone)]
pub struct Oci {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    data_dir: PathBuf,
    forge: forge::Forge,
    guest: PathBuf,
    hierarchies: Hierarchies,
    /// For isolation `gvisor`, or why there is none.
    runsc: Result<gvisor::Runsc, String>,
}

impl Oci {
    /// Prepares `data_dir`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when this process is not root, or the host lacks control groups.
    pub fn new(data_dir: &Path) -> Result<Self, Error> {
        Self::open(data_dir, None)
    }

    /// As [`Oci::new`], with another program in the forge's place: for tests of one that dies or lies.
    ///
    /// # Errors
    /// As [`Oci::new`].
    pub fn with_forge(data_dir: &Path, program: PathBuf) -> Result<Self, Error> {
        Self::open(data_dir, Some(program))
    }

    fn open(data_dir: &Path, forge: Option<PathBuf>) -> Result<Self, Error> {
        if !nix::unistd::geteuid().is_root() {
            return Err(unsupported(
                "the process is not root, which control groups and uid ranges need".to_owned(),
            ));
        }
        let hierarchies = Hierarchies::detect().map_err(|error| unsupported(crate::error::chain(&error)))?;
        let prepared = prepare(data_dir).and_then(|()| {
            let data_dir = fs::canonicalize(data_dir)?;
            let guest = guest_file::install(&data_dir)?;
            Ok(Shared {
                data_dir,
                forge: forge::Forge::new(forge.unwrap_or_else(|| guest.clone())),
                guest,
                hierarchies,
                runsc: gvisor::Runsc::find(),
            })
        });
        let shared = prepared.map_err(|error| {
            unsupported(format!(
                "the data directory `{}` is not usable: {error}",
                data_dir.display()
            ))
        })?;
        record::sweep(&shared.data_dir);
        Ok(Self {
            shared: Arc::new(shared),
        })
    }

    /// Runs blocking work to its end, also when the caller stops waiting: nothing is left half done.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Shared) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let shared = Arc::clone(&self.shared);
        match tokio::task::spawn_blocking(move || work(&shared)).await {
            Ok(result) => result,
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(error) => Err(unsupported(format!("the runtime is shutting down: {error}"))),
            },
        }
    }
}

impl Shared {
    fn sandboxes(&self) -> PathBuf {
        self.data_dir.join("sandboxes")
    }

    fn dir(&self, id: &SandboxId) -> PathBuf {
        self.sandboxes().join(id.as_str())
    }

    fn group(&self, id: &SandboxId) -> cgroup::Group {
        self.hierarchies.group(id.as_str())
    }

    /// Why its counters cannot be read. Only where something is wrong is it asked whether there is such a sandbox.
    fn uncounted(&self, id: &SandboxId, error: &cgroup::Error) -> Error {
        match self.record(id) {
            Ok(_) => Error::caused("read the counters of", id, error),
            Err(gone) => gone,
        }
    }

    /// The record of a sandbox that exists.
    fn record(&self, id: &SandboxId) -> Result<record::Record, Error> {
        record::read(&self.dir(id)).ok_or_else(|| Error::NotFound(id.clone()))
    }
}

#[async_trait]
impl Backend for Oci {
    fn capabilities(&self) -> Capabilities {
        let gvisor = self.shared.runsc.is_ok().then_some(Isolation::Gvisor);
        Capabilities {
            name: BackendName::Oci,
            isolations: [Isolation::Container].into_iter().chain(gvisor).collect(),
            user_namespace: true,
            freeze: true,
            memory_snapshot: gvisor.into_iter().collect(),
            moulds: vec![Isolation::Container],
            borders: vec![Isolation::Container],
            lacks: gvisor::LACKS.map(|lack| (Isolation::Gvisor, lack)).into(),
        }
    }

    async fn create(&self, spec: &Spec) -> Result<Handle, Error> {
        spec.check()?;
        let spec = spec.clone();
        self.blocking(move |shared| make::create(shared, &spec, None)).await
    }

    async fn checkpoint(&self, sandbox: &Handle, dir: &Path) -> Result<Still, Error> {
        let (id, dir) = (sandbox.id.clone(), dir.to_owned());
        self.blocking(move |shared| {
            shared.record(&id)?;
            gvisor::snapshot::take(&shared.dir(&id), &dir, shared.runsc.as_ref().ok()).map_err(|error| error.of(&id))
        })
        .await
    }

    async fn restore(&self, spec: &Spec, dir: &Path) -> Result<Handle, Error> {
        spec.check()?;
        let (spec, dir) = (spec.clone(), dir.to_owned());
        self.blocking(move |shared| {
            gvisor::snapshot::check(&dir, &spec, shared.runsc.as_ref().ok()).map_err(|error| error.of(&spec.id))?;
            make::create(shared, &spec, Some(&dir))
        })
        .await
    }

    /// The guest is up since `create` and runs nothing by itself: this checks that it still is.
    async fn start(&self, sandbox: &Handle) -> Result<(), Error> {
        let id = &sandbox.id;
        match self.shared.record(id)?.init {
            Some(init) if init.is_alive() => Ok(()),
            Some(_) | None => Err(Error::failed("start", id, "its first process has ended")),
        }
    }

    /// Never waits: a queue that is full is an error.
    async fn connect(&self, sandbox: &Handle) -> Result<UnixStream, Error> {
        let id = &sandbox.id;
        let lost = |error: std::io::Error| Error::GuestLost {
            sandbox: id.clone(),
            reason: error.to_string(),
        };
        let dir = match fs::File::open(self.shared.dir(id)) {
            Ok(dir) => dir,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Err(Error::NotFound(id.clone())),
            Err(error) => return Err(lost(error)),
        };
        socket::connect(&dir, socket::GUEST)
            .and_then(UnixStream::from_std)
            .map_err(lost)
    }

    async fn freeze(&self, sandbox: &Handle, frozen: bool) -> Result<(), Error> {
        let id = sandbox.id.clone();
        self.blocking(move |shared| {
            shared.record(&id)?;
            shared
                .group(&id)
                .freeze(frozen)
                .map_err(|error| Error::caused("freeze", &id, &error))
        })
        .await
    }

    async fn usage(&self, sandbox: &Handle) -> Result<Usage, Error> {
        let id = &sandbox.id;
        self.shared
            .group(id)
            .usage()
            .map_err(|error| self.shared.uncounted(id, &error))
    }

    async fn losses(&self, sandbox: &Handle) -> Result<Losses, Error> {
        let id = &sandbox.id;
        self.shared
            .group(id)
            .losses()
            .map_err(|error| self.shared.uncounted(id, &error))
    }

    /// Signals alone: less than the way to a thread that may wait, and back.
    async fn doom(&self, sandbox: &Handle) -> Result<Doomed, Error> {
        ruin::doom(&self.shared, &sandbox.id)
    }

    async fn process(&self, sandbox: &Handle, pid: u32) -> Result<i32, Error> {
        let id = sandbox.id.clone();
        self.blocking(move |shared| {
            let doing = "find a process of";
            shared.record(&id)?;
            let pids = shared
                .group(&id)
                .pids()
                .map_err(|error| Error::caused(doing, &id, &error))?;
            let is_it = |of_host: &i32| {
                let status = fs::read_to_string(format!("/proc/{of_host}/status")).unwrap_or_default();
                let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
                line.and_then(|line| line.split_whitespace().last()?.parse().ok()) == Some(pid)
            };
            let found = pids.into_iter().find(is_it);
            found.ok_or_else(|| Error::failed(doing, &id, format!("there is no process {pid}")))
        })
        .await
    }

    async fn stop(&self, sandbox: &Handle, grace: Duration) -> Result<(), Error> {
        let id = sandbox.id.clone();
        self.blocking(move |shared| ruin::stop(shared, &id, grace)).await
    }

    async fn destroy(&self, sandbox: &SandboxId) -> Result<(), Error> {
        let id = sandbox.clone();
        self.blocking(move |shared| ruin::destroy(shared, &id)).await
    }

    async fn doorway(&self, sandbox: &Handle) -> Result<Doorway, Error> {
        let id = sandbox.id.clone();
        self.blocking(move |shared| {
            let failed = |reason: String| Error::failed("enter", &id, reason);
            let init = shared.record(&id)?.init;
            let init = init.ok_or_else(|| failed("it is being created".to_owned()))?;
            let found = Doorway::of(&init).map_err(|error| failed(error.to_string()))?;
            found.ok_or_else(|| failed("its first process has ended".to_owned()))
        })
        .await
    }

    async fn list_owned(&self) -> Result<Vec<Owned>, Error> {
        self.blocking(|shared| {
            let found = record::list(&shared.sandboxes());
            Ok(found
                .into_iter()
                .map(|(id, record)| match record {
                    Some(record) => Owned {
                        id,
                        owner_alive: record.owner.is_alive(),
                        identity: record.identity,
                    },
                    // Unreadable, as after a power cut: nobody can be using it.
                    None => Owned {
                        id,
                        owner_alive: false,
                        identity: Identity { base: 0 },
                    },
                })
                .collect())
        })
        .await
    }

    async fn adopt(&self, sandbox: &SandboxId) -> Result<Handle, Error> {
        let id = sandbox.clone();
        self.blocking(move |shared| {
            let doing = "take over";
            let mut record = shared.record(&id)?;
            let me = Process::current().map_err(|error| Error::failed(doing, &id, error))?;
            if record.owner != me && record.owner.is_alive() {
                let reason = format!("process {} has it", record.owner.pid);
                return Err(Error::failed(doing, &id, reason));
            }
            if !record.init.as_ref().is_some_and(Process::is_alive) {
                return Err(Error::failed(doing, &id, "its first process has ended"));
            }
            record.owner = me;
            let identity = record.identity;
            record
                .write(&shared.dir(&id))
                .map_err(|error| Error::failed(doing, &id, error))?;
            Ok(Handle {
                id,
                identity,
                user: Identity::USER,
            })
        })
        .await
    }

    async fn programs(&self, sandbox: &Handle) -> Result<Option<cgroup::Group>, Error> {
        Ok(Some(self.shared.group(&sandbox.id)))
    }

    async fn life(&self, sandbox: &Handle) -> Result<Life, Error> {
        let init = self.shared.record(&sandbox.id)?.init;
        let init = init.ok_or_else(|| Error::failed("watch", &sandbox.id, "it is being created"))?;
        Life::of(&init).map_err(|error| Error::failed("watch", &sandbox.id, error))
    }
}

fn prepare(data_dir: &Path) -> std::io::Result<()> {
    // Guests' ids have no business below here; root alone walks through.
    let private = |dir: PathBuf| {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o700))
    };
    fs::DirBuilder::new().recursive(true).mode(0o700).create(data_dir)?;
    private(data_dir.join("sandboxes"))?;
    private(data_dir.join("bin"))
}

fn unsupported(missing: String) -> Error {
    Error::Unsupported {
        wanted: "a sandbox of the `oci` backend".to_owned(),
        missing,
    }
}
