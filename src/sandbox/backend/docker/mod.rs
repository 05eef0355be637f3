//! Sandboxes as containers of a Docker engine on this host.
//!
//! For hosts that already run an engine: whoever may use its socket is root there (T14), which `oci` avoids. One container
//! a sandbox, PID 1 is our guest, and everything that happens inside goes through it; the engine only makes, freezes and
//! removes. The engine's word is not taken for what the wall is: `sandbox::verify` reads it back from the kernel.
//!
//! On disk, below `DATA/sandboxes/ID`: `docker.json` (who made it; written first, removed last), `ctl/` (the control socket),
//! `passwd` and `group` of a `host` sandbox. On the engine: the container `exuvia-ID`, with the same facts as labels.
//!
//! What the engine cannot do: a user namespace of its own for each sandbox (programs run under
//! [`Identity::host_uid`] directly, or inside the one range of a `userns-remap` engine), a rootless engine, `nosuid` on binds
//! (no_new_privs voids set-id bits all the same). What an image declares as a volume is empty and read-only here.
//!
//! With isolation `gvisor` the engine's runtime `runsc` makes the container (`gvisor`), and the guest is spoken to over its
//! standard streams (`line`) in place of the socket; everything else is the same.
//!
//! Read next: `config` for what a container is asked to be, and what is checked.

mod channel;
mod config;
mod engine;
mod gvisor;
mod image;
mod line;
mod record;
mod stray;
mod view;

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bollard::models::ContainerInspectResponse;
use serde::Serialize;
use tokio::net::UnixStream;
use tokio::time::Instant;
use tracing::{debug, instrument};

use self::config::Parts;
use self::engine::{Engine, Failure};
use self::image::Images;
use self::line::Line;
pub use self::record::FILE as RECORD;
use self::record::Record;
pub use self::stray::{Stray, Strays};
use super::{Backend, Capabilities, Doorway, Handle, Owned, guest_file, gvisor as runsc};
use crate::ids::SandboxId;
use crate::process::Process;
use crate::sandbox::cgroup::{self, Hierarchies};
use crate::sandbox::image::{self as images, accounts};
use crate::sandbox::{BackendName, Error, Identity, ImageRef, Isolation, Life, Mount, Spec, Usage, verify};

const LABEL_DATA: &str = "exuvia.data-dir";
const LABEL_SANDBOX: &str = "exuvia.sandbox";
const LABEL_SPEC: &str = "exuvia.spec";
const LABEL_RECORD: &str = "exuvia.record";

/// For the guest to answer after its container runs.
const GUEST_UP: Duration = Duration::from_secs(30);
/// For a removal that somebody else began.
const REMOVED: Duration = Duration::from_secs(60);
/// For the engine to see that a container has ended.
const END_KNOWN: Duration = Duration::from_secs(3);
/// How long the engine may take to know what it did.
const SETTLED: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(10);

/// The engine of this host, as used from one data directory.
#[derive(Debug)]
pub struct Docker {
    engine: Engine,
    images: Images,
    sandboxes: PathBuf,
    guest: PathBuf,
    hierarchies: Hierarchies,
    /// Names the data directory on labels.
    data_label: String,
    owner: Process,
    /// First host id of the engine's one user namespace (`userns-remap`).
    remap: Option<u32>,
    /// Whether there is isolation `gvisor`, or why not.
    gvisor: Result<(), String>,
    /// Of sandboxes of gVisor: taken up when first used, and again when lost.
    lines: Mutex<HashMap<SandboxId, Arc<tokio::sync::Mutex<Option<Line>>>>>,
}

impl Docker {
    /// Connects to the engine at `socket`, or at `DOCKER_HOST` or the usual place, and puts the guest into `data_dir`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when there is no engine, or one that cannot hold a sandbox.
    pub async fn open(data_dir: &Path, socket: Option<&Path>) -> Result<Self, Error> {
        let socket = match socket {
            Some(socket) => socket.to_owned(),
            None => engine::default_socket().map_err(|host| {
                unsupported(format!(
                    "DOCKER_HOST is `{host}`, but an engine elsewhere cannot mount this host's directories: use unix://…"
                ))
            })?,
        };
        let no_engine = |reason: &dyn std::fmt::Display| {
            unsupported(format!(
                "no Docker engine answers at `{}` ({reason}): start it (`systemctl start docker`, or `make setup`), set \
                 DOCKER_HOST, or use the backend `oci`, which needs none",
                socket.display()
            ))
        };
        let engine = Engine::connect(&socket).await.map_err(|failure| no_engine(&failure))?;
        let info = engine.info().await.map_err(|failure| no_engine(&failure))?;
        let mut gvisor = gvisor::offered(&info);
        let options = info.security_options.unwrap_or_default();
        let has = |name: &str| options.iter().any(|option| option.split(',').any(|part| part == name));
        if has("name=rootless") {
            return Err(unsupported(
                "the engine is rootless, so the owners of a workspace cannot be kept: use the backend `oci`".into(),
            ));
        }
        let remap = match has("name=userns") {
            true => Some(remapped_base(info.docker_root_dir.as_deref()).ok_or_else(|| {
                unsupported("the engine remaps users to a range that its root directory does not name".into())
            })?),
            false => None,
        };
        if remap.is_some() {
            gvisor = Err(
                "the engine remaps users, which `runsc` under it was not seen to take: use the backend `oci`".into(),
            );
        }
        let prepared = prepare(data_dir).map_err(|error| Error::Unsupported {
            wanted: "a data directory for sandboxes".into(),
            missing: format!("`{}`: {error}", data_dir.display()),
        })?;
        let (data_dir, guest, owner) = prepared;
        let hierarchies = Hierarchies::detect().map_err(|error| unsupported(crate::error::chain(&error)))?;
        Ok(Self {
            engine,
            images: Images::default(),
            sandboxes: data_dir.join("sandboxes"),
            guest,
            hierarchies,
            data_label: data_label(&data_dir),
            owner,
            remap,
            gvisor,
            lines: Mutex::default(),
        })
    }

    /// Whether there is isolation `gvisor`.
    ///
    /// # Errors
    /// What it lacks.
    pub fn gvisor(&self) -> Result<(), &str> {
        self.gvisor.as_ref().copied().map_err(String::as_str)
    }

    fn data_dir(&self) -> &Path {
        self.sandboxes.parent().unwrap_or(&self.sandboxes)
    }

    fn directory(&self, id: &SandboxId) -> PathBuf {
        self.sandboxes.join(id.as_str())
    }

    fn ctl(&self, id: &SandboxId) -> PathBuf {
        self.directory(id).join("ctl")
    }

    /// uid and gid of programs, as numbered inside.
    fn user(&self, identity: Identity) -> Result<u32, Error> {
        let Some(base) = self.remap else {
            return Ok(identity.host_uid());
        };
        identity
            .host_uid()
            .checked_sub(base)
            .filter(|user| (1..Identity::RANGE).contains(user))
            .ok_or_else(|| {
                let last = base + Identity::RANGE - 1;
                let uid = identity.host_uid();
                unsupported(format!(
                    "the engine remaps all users to {base}..={last}, and this sandbox is to be {uid}: switch userns-remap off, \
                     or use the backend `oci`"
                ))
            })
    }

    async fn containers(&self, id: &SandboxId) -> Result<Vec<bollard::models::ContainerSummary>, Failure> {
        let labels = [(LABEL_DATA, self.data_label.as_str()), (LABEL_SANDBOX, id.as_str())];
        let found = self.engine.list(&labels).await?;
        Ok(found.into_iter().filter(|container| is_named(container, id)).collect())
    }

    /// Everything of `create` that leaves traces.
    async fn make(&self, spec: &Spec, handle: &Handle, fingerprint: &str) -> Result<(), Error> {
        let image = self.images.ready(&self.engine, &spec.image, self.data_dir()).await?;
        let record = Record {
            owner: self.owner.clone(),
            identity: spec.identity,
            limits: spec.limits.clone(),
            has_workspace: spec.workspace.is_some(),
            isolation: spec.isolation,
        };
        let files = self
            .lay_out(spec, handle, &record)
            .map_err(|error| Error::failed("create", &spec.id, error))?;
        let mut labels: HashMap<String, String> = HashMap::new();
        for (name, value) in &spec.labels {
            labels.insert(format!("exuvia.label.{name}"), value.clone());
        }
        labels.insert(LABEL_DATA.into(), self.data_label.clone());
        labels.insert(LABEL_SANDBOX.into(), spec.id.to_string());
        labels.insert(LABEL_SPEC.into(), fingerprint.into());
        labels.insert(LABEL_RECORD.into(), json(&record));
        let body = config::container(
            spec,
            Parts {
                image: &image,
                files,
                guest: &self.guest,
                ctl: &self.ctl(&spec.id),
                user: handle.user,
                labels,
            },
        )?;
        let made = self.engine.create(&name(&spec.id), body).await;
        let (container, warnings) = made.map_err(|failure| Error::failed("create", &spec.id, failure))?;
        debug!(container, ?warnings, "created");
        Ok(())
    }

    /// The sandbox's own directory; the answer is what of it is mounted besides the control socket.
    fn lay_out(&self, spec: &Spec, handle: &Handle, record: &Record) -> io::Result<Vec<Mount>> {
        let directory = self.directory(&spec.id);
        private_directory(&directory)?;
        record.write(&directory)?;
        let ctl = self.ctl(&spec.id);
        private_directory(&ctl)?;
        chown(&ctl, self.remap, self.remap)?;
        if spec.isolation == Isolation::Gvisor {
            line::make_secret(&directory)?;
        }
        if let ImageRef::Stored(_) = spec.image {
            let root = images::resolve(&spec.image, self.data_dir()).map_err(io::Error::other)?;
            images::hold(&root, &directory)?;
        }
        if spec.image != ImageRef::Host {
            return Ok(Vec::new());
        }
        let mut mounts = Vec::new();
        for (target, text) in accounts(handle.user) {
            let target = PathBuf::from(target);
            let source = directory.join(target.file_name().unwrap_or_default());
            fs::write(&source, text)?;
            fs::set_permissions(&source, fs::Permissions::from_mode(0o444))?;
            mounts.push(Mount { source, target });
        }
        Ok(mounts)
    }

    /// Until the guest serves. Its container may die first.
    async fn guest_up(&self, id: &SandboxId) -> Result<(), Error> {
        let deadline = Instant::now() + GUEST_UP;
        loop {
            let missing = match self.reach(id).await {
                Ok(stream) => match channel::ping(stream).await {
                    Ok(()) => return Ok(()),
                    Err(error) => error,
                },
                Err(error) => error,
            };
            let inspected = self.engine.inspect(&name(id)).await;
            let state = inspected
                .map_err(|failure| Error::failed("start", id, failure))?
                .state
                .unwrap_or_default();
            if state.running != Some(true) {
                let code = state.exit_code.unwrap_or_default();
                let why = state.error.filter(|why| !why.is_empty()).unwrap_or_default();
                return Err(Error::failed(
                    "start",
                    id,
                    format!("the guest ended at once with exit code {code} {why}"),
                ));
            }
            if Instant::now() >= deadline {
                return Err(Error::failed(
                    "start",
                    id,
                    format!("the guest does not answer: {missing}"),
                ));
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// A connection to the guest, by its socket or over its line.
    async fn reach(&self, id: &SandboxId) -> io::Result<UnixStream> {
        let directory = self.directory(id);
        match record::read(&directory)?.isolation {
            Isolation::Container | Isolation::Microvm => channel::connect(&self.ctl(id)).await,
            Isolation::Gvisor => {
                let line = Arc::clone(self.lines().entry(id.clone()).or_default());
                let mut line = line.lock().await;
                if let Some(line) = line.as_ref().filter(|line| !line.is_lost()) {
                    return line.open();
                }
                let secret = line::secret(&directory)?;
                let taken = Line::take_up(&self.engine, &name(id), &secret).await;
                line.insert(taken.map_err(io::Error::other)?).open()
            }
        }
    }

    fn lines(&self) -> std::sync::MutexGuard<'_, HashMap<SandboxId, Arc<tokio::sync::Mutex<Option<Line>>>>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the sandbox stands still by the kernel's word, which the engine's follows late. `None` where the kernel has none: under
    /// gVisor, while nothing runs, or on the way.
    fn observed_frozen(&self, id: &SandboxId, inspected: &ContainerInspectResponse) -> Option<bool> {
        let record = record::read(&self.directory(id)).ok()?;
        if record.isolation == Isolation::Gvisor {
            return None;
        }
        let (group, _) = self.group_of("look at", id, inspected).ok()?;
        group.is_frozen().ok()?
    }

    async fn inspect(&self, doing: &'static str, id: &SandboxId) -> Result<ContainerInspectResponse, Error> {
        match self.engine.inspect(&name(id)).await {
            Ok(inspected) => Ok(inspected),
            Err(Failure::NotFound(_)) => Err(Error::NotFound(id.clone())),
            Err(failure) => Err(Error::failed(doing, id, failure)),
        }
    }

    /// The running container's group and its init, as numbered on the host.
    ///
    /// The engine's stats call is not used: it is slow, leaves out the OOM count, and is the engine's word, not the kernel's.
    async fn group(&self, doing: &'static str, id: &SandboxId) -> Result<(cgroup::Group, i32), Error> {
        self.group_of(doing, id, &self.inspect(doing, id).await?)
    }

    fn group_of(
        &self,
        doing: &'static str,
        id: &SandboxId,
        inspected: &ContainerInspectResponse,
    ) -> Result<(cgroup::Group, i32), Error> {
        let pid = inspected.state.as_ref().and_then(|state| state.pid).unwrap_or_default();
        let container = inspected.id.as_deref().unwrap_or_default();
        if pid == 0 || container.is_empty() {
            return Err(Error::failed(doing, id, "it does not run"));
        }
        let pid = i32::try_from(pid).map_err(|error| Error::failed(doing, id, error))?;
        let group = self
            .hierarchies
            .group_of(pid)
            .map_err(|error| Error::caused(doing, id, &error))?;
        // The number may have been another's.
        if !group.speaks_of(container) {
            let reason = "its processes are not visible here: does the engine run in another pid namespace?";
            return Err(Error::failed(doing, id, reason));
        }
        Ok((group, pid))
    }

    /// Of a sandbox of gVisor that memory ended as a whole: the engine removes its group, and keeps what the kernel told it of that.
    async fn ended_usage(&self, id: &SandboxId, record: &Record) -> Option<Usage> {
        let deadline = Instant::now() + END_KNOWN;
        loop {
            let state = self.engine.inspect(&name(id)).await.ok()?.state?;
            if state.running == Some(false) {
                return (state.oom_killed == Some(true)).then(|| Usage {
                    oom_kills: 1,
                    // It stood at its limit when it was ended.
                    memory_peak_bytes: record.limits.memory_bytes,
                    ..Usage::default()
                });
            }
            if Instant::now() >= deadline {
                return None;
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// Promise 3: what was asked is what the kernel does, or there is no sandbox.
    async fn verify(&self, id: &SandboxId) -> Result<(), Error> {
        let record = record::read(&self.directory(id)).map_err(|error| Error::failed("start", id, error))?;
        let (group, pid) = self.group("start", id).await?;
        match record.isolation {
            Isolation::Container | Isolation::Microvm => {
                let expected = config::expected(&record, group, self.remap);
                verify::sandbox(pid, &self.hierarchies, &expected).map_err(Error::Breached)
            }
            Isolation::Gvisor => {
                // The engine's runtime leaves this wall out.
                group
                    .limit_devices()
                    .map_err(|error| Error::caused("start", id, &error))?;
                let expected = gvisor::expected(&record, group.clone());
                let read = verify::sandbox(pid, &self.hierarchies, &expected);
                let mut breaches = read.err().unwrap_or_default();
                breaches.extend(gvisor::breaches(pid, &group));
                if breaches.is_empty() {
                    Ok(())
                } else {
                    Err(Error::Breached(breaches))
                }
            }
        }
    }
}

#[async_trait]
impl Backend for Docker {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            name: BackendName::Docker,
            isolations: [Isolation::Container]
                .into_iter()
                .chain(self.gvisor.is_ok().then_some(Isolation::Gvisor))
                .collect(),
            user_namespace: self.remap.is_some(),
            freeze: true,
            memory_snapshot: Vec::new(),
            moulds: Vec::new(),
            borders: vec![Isolation::Container],
            lacks: runsc::LACKS.map(|lack| (Isolation::Gvisor, lack)).into(),
        }
    }

    #[instrument(skip_all, fields(sandbox = %spec.id))]
    async fn create(&self, spec: &Spec) -> Result<Handle, Error> {
        spec.check()?;
        let missing = match (spec.isolation, &self.gvisor) {
            (Isolation::Container, _) | (Isolation::Gvisor, Ok(())) => None,
            (Isolation::Gvisor, Err(missing)) => Some(missing.clone()),
            (Isolation::Microvm, _) => Some("the backend `docker` gives `container` and `gvisor`".to_owned()),
        };
        if let Some(missing) = missing {
            return Err(Error::Unsupported {
                wanted: format!("isolation `{}`", spec.isolation),
                missing,
            });
        }
        if !spec.limits.disk_rates.is_unlimited() {
            return Err(Error::Unsupported {
                wanted: "limits on how fast a disk is".to_owned(),
                missing: "only the backend `oci` has them".to_owned(),
            });
        }
        let handle = Handle {
            id: spec.id.clone(),
            identity: spec.identity,
            user: self.user(spec.identity)?,
        };
        let fingerprint = blake3::hash(json(spec).as_bytes()).to_hex()[..32].to_owned();
        let existing = self
            .containers(&spec.id)
            .await
            .map_err(|failure| Error::failed("create", &spec.id, failure))?;
        if let Some(container) = existing.first() {
            return match label(container, LABEL_SPEC) == Some(fingerprint.as_str()) {
                true => Ok(handle),
                false => Err(Error::failed("create", &spec.id, "it exists with another spec")),
            };
        }
        let Err(cause) = self.make(spec, &handle, &fingerprint).await else {
            return Ok(handle);
        };
        Err(cause.after(self.destroy(&spec.id).await))
    }

    #[instrument(skip_all, fields(sandbox = %sandbox.id))]
    async fn start(&self, sandbox: &Handle) -> Result<(), Error> {
        let id = &sandbox.id;
        match self.engine.start(&name(id)).await {
            Ok(()) => {}
            Err(Failure::NotFound(_)) => return Err(Error::NotFound(id.clone())),
            Err(failure) => return Err(Error::failed("start", id, failure)),
        }
        self.guest_up(id).await?;
        let Err(cause) = self.verify(id).await else {
            return Ok(());
        };
        Err(cause.after(self.destroy(id).await))
    }

    async fn connect(&self, sandbox: &Handle) -> Result<UnixStream, Error> {
        let id = &sandbox.id;
        match self.reach(id).await {
            Ok(stream) => Ok(stream),
            Err(_) if !self.directory(id).exists() => Err(Error::NotFound(id.clone())),
            Err(error) => Err(Error::GuestLost {
                sandbox: id.clone(),
                reason: error.to_string(),
            }),
        }
    }

    async fn freeze(&self, sandbox: &Handle, frozen: bool) -> Result<(), Error> {
        let (id, doing) = (&sandbox.id, if frozen { "freeze" } else { "thaw" });
        let begun = Instant::now();
        loop {
            let inspected = self.inspect(doing, id).await?;
            let said = inspected.state.as_ref().and_then(|state| state.paused) == Some(true);
            let observed = self.observed_frozen(id, &inspected);
            if observed.unwrap_or(said) == frozen {
                return Ok(());
            }
            let done = match frozen {
                true => self.engine.pause(&name(id)).await,
                false => self.engine.unpause(&name(id)).await,
            };
            match done {
                Ok(()) if observed.is_none() => return Ok(()),
                Ok(()) if begun.elapsed() < SETTLED => {}
                Ok(()) => return Err(Error::failed(doing, id, "the kernel does not do as the engine says")),
                // An event of its own, on its way, still makes it think otherwise.
                Err(Failure::Conflict(_) | Failure::Refused(_)) if begun.elapsed() < SETTLED => {
                    tokio::time::sleep(POLL).await;
                }
                Err(failure) => return Err(Error::failed(doing, id, failure)),
            }
        }
    }

    async fn usage(&self, sandbox: &Handle) -> Result<Usage, Error> {
        let (doing, id) = ("count the usage of", &sandbox.id);
        let counted = self.group(doing, id).await.and_then(|(group, _)| {
            let counted = group.usage();
            counted.map_err(|error| Error::caused(doing, id, &error))
        });
        match counted {
            Ok(usage) => Ok(usage),
            Err(error) => match record::read(&self.directory(id)) {
                Ok(record) if record.isolation == Isolation::Gvisor => self.ended_usage(id, &record).await.ok_or(error),
                Ok(_) | Err(_) => Err(error),
            },
        }
    }

    #[instrument(skip_all, fields(sandbox = %sandbox.id))]
    async fn stop(&self, sandbox: &Handle, grace: Duration) -> Result<(), Error> {
        let id = &sandbox.id;
        // A frozen process takes no signal.
        self.freeze(sandbox, false).await?;
        match self.engine.stop(&name(id), grace).await {
            Ok(()) => Ok(()),
            Err(Failure::NotFound(_)) => Err(Error::NotFound(id.clone())),
            Err(failure) => Err(Error::failed("stop", id, failure)),
        }
    }

    #[instrument(skip_all, fields(sandbox = %sandbox))]
    async fn destroy(&self, sandbox: &SandboxId) -> Result<(), Error> {
        let failure = |failure| Error::failed("destroy", sandbox, failure);
        let deadline = Instant::now() + REMOVED;
        loop {
            let containers = self.containers(sandbox).await.map_err(failure)?;
            let Some(container) = containers.first().and_then(|container| container.id.as_deref()) else {
                break;
            };
            match self.engine.remove(container).await {
                Ok(()) | Err(Failure::NotFound(_)) => {}
                // Frozen, or a removal is under way.
                Err(Failure::Conflict(_) | Failure::Refused(_)) if Instant::now() < deadline => {
                    let thawed = self.engine.unpause(container).await;
                    debug!(container, ?thawed, "not removed yet");
                    tokio::time::sleep(POLL).await;
                }
                Err(other) => return Err(failure(other)),
            }
        }
        self.lines().remove(sandbox);
        remove_tree(&self.directory(sandbox)).map_err(|error| Error::failed("destroy", sandbox, error))
    }

    async fn list_owned(&self) -> Result<Vec<Owned>, Error> {
        let cannot = |reason: String| {
            unsupported(format!(
                "the sandboxes of this data directory cannot be listed: {reason}"
            ))
        };
        let mut records: BTreeMap<SandboxId, Record> = BTreeMap::new();
        for (id, record) in record::list(&self.sandboxes).map_err(|error| cannot(error.to_string()))? {
            records.insert(id, record);
        }
        let labels = [(LABEL_DATA, self.data_label.as_str())];
        let containers = self.engine.list(&labels).await;
        for container in containers.map_err(|failure| cannot(failure.to_string()))? {
            let id = label(&container, LABEL_SANDBOX).and_then(|id| id.parse::<SandboxId>().ok());
            let record = label(&container, LABEL_RECORD).and_then(|text| serde_json::from_str(text).ok());
            // Labels come from images too; the name does not.
            if let (Some(id), Some(record)) = (id.filter(|id| is_named(&container, id)), record) {
                records.insert(id, record);
            }
        }
        let mut owned = Vec::new();
        for (id, record) in records {
            owned.push(Owned {
                id,
                owner_alive: record.owner.is_alive(),
                identity: record.identity,
            });
        }
        Ok(owned)
    }

    #[instrument(skip_all, fields(sandbox = %sandbox))]
    async fn adopt(&self, sandbox: &SandboxId) -> Result<Handle, Error> {
        let doing = "take over";
        let failed = |error: std::io::Error| match error.kind() {
            std::io::ErrorKind::NotFound => Error::NotFound(sandbox.clone()),
            _ => Error::failed(doing, sandbox, error),
        };
        let directory = self.directory(sandbox);
        let mut record = record::read(&directory).map_err(failed)?;
        let me = Process::current().map_err(failed)?;
        if record.owner != me && record.owner.is_alive() {
            let reason = format!("process {} has it", record.owner.pid);
            return Err(Error::failed(doing, sandbox, reason));
        }
        // It runs, and is what it is called.
        self.group(doing, sandbox).await?;
        record.owner = me;
        // Another process may have had it since.
        self.lines().remove(sandbox);
        record.write(&directory).map_err(failed)?;
        Ok(Handle {
            id: sandbox.clone(),
            identity: record.identity,
            user: self.user(record.identity)?,
        })
    }

    async fn doorway(&self, sandbox: &Handle) -> Result<Doorway, Error> {
        let (doing, id) = ("enter", &sandbox.id);
        let (_, pid) = self.group(doing, id).await?;
        let failed = |error| Error::failed(doing, id, error);
        let init = Process::find(pid.unsigned_abs()).map_err(failed)?;
        // Whose it is was told before it was found.
        self.group(doing, id).await?;
        let doorway = init
            .map(|init| Doorway::of(&init))
            .transpose()
            .map_err(failed)?
            .flatten();
        doorway.ok_or_else(|| Error::failed(doing, id, "it has ended"))
    }

    async fn programs(&self, sandbox: &Handle) -> Result<Option<cgroup::Group>, Error> {
        self.group("look into", &sandbox.id).await.map(|(group, _)| Some(group))
    }

    async fn life(&self, sandbox: &Handle) -> Result<Life, Error> {
        let (_, pid) = self.group("watch", &sandbox.id).await?;
        let failed = |error| Error::failed("watch", &sandbox.id, error);
        let init = Process::find(pid.unsigned_abs()).map_err(failed)?;
        let init = init.ok_or_else(|| Error::failed("watch", &sandbox.id, "it has ended"))?;
        Life::of(&init).map_err(failed)
    }
}

fn data_label(data_dir: &Path) -> String {
    blake3::hash(data_dir.as_os_str().as_encoded_bytes()).to_hex()[..32].to_owned()
}

fn name(id: &SandboxId) -> String {
    format!("exuvia-{id}")
}

fn is_named(container: &bollard::models::ContainerSummary, id: &SandboxId) -> bool {
    let wanted = format!("/{}", name(id));
    container.names.iter().flatten().any(|name| *name == wanted)
}

fn label<'a>(container: &'a bollard::models::ContainerSummary, name: &str) -> Option<&'a str> {
    container.labels.as_ref()?.get(name).map(String::as_str)
}

fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("plain data with text keys")
}

fn unsupported(missing: String) -> Error {
    Error::Unsupported {
        wanted: "a sandbox of the backend `docker`".into(),
        missing,
    }
}

/// The engine keeps a remapped world in a folder that is named for its first ids, `…/100000.100000`.
fn remapped_base(root: Option<&str>) -> Option<u32> {
    let (uid, gid) = Path::new(root?).file_name()?.to_str()?.split_once('.')?;
    let (uid, gid): (u32, u32) = (uid.parse().ok()?, gid.parse().ok()?);
    (uid == gid).then_some(uid)
}

fn prepare(data_dir: &Path) -> io::Result<(PathBuf, PathBuf, Process)> {
    fs::create_dir_all(data_dir)?;
    let data_dir = data_dir.canonicalize()?;
    private_directory(&data_dir.join("sandboxes"))?;
    let guest = guest_file::install(&data_dir)?;
    Ok((data_dir, guest, Process::current()?))
}

fn private_directory(path: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Removes a directory and all in it, following no link.
fn remove_tree(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests;
