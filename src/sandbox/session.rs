//! The life of one sandbox: `open` (create, start, first word from the guest), work, `close` (stop, destroy).
//!
//! Knows the order of things and how to undo them; how each is done is the backend's.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;

use super::exec::{self, Counters, GRACE, Place, Stdin};
use super::files::Files;
use super::{Backend, Command, Error, Exec, Finished, Handle, Isolation, Limits, Spec, Usage};
use crate::ids::SandboxId;
use crate::wire::{self, EnvVar, Rlimit};

/// How long the guest may take to say its first word.
const FIRST_WORD: Duration = Duration::from_secs(30);

/// Locked memory that a program may have.
const MEMLOCK_BYTES: u64 = 64 << 10;

/// A sandbox that is up. Dropping it leaves it running: call [`Sandbox::close`].
#[derive(Debug)]
pub struct Sandbox {
    place: Place,
    spec: Spec,
    /// Compiled seccomp filter that each program gets.
    filter: Vec<u8>,
}

impl Sandbox {
    /// Makes a sandbox and waits until its guest answers. `filter` is the seccomp filter of every program in it.
    ///
    /// Not cancellation-safe: let it run to its end. What a killed server leaves is found by `list_owned`.
    ///
    /// # Errors
    /// The first failure, after everything before it was undone; [`Error::CleanUp`] when the undoing failed too.
    pub async fn open(backend: Arc<dyn Backend>, spec: Spec, filter: Vec<u8>) -> Result<Self, Error> {
        let sandbox = backend.create(&spec).await?;
        Self::up(backend, sandbox, spec, filter).await
    }

    /// As [`Self::open`], going on from the checkpoint in `dir` (see [`Backend::restore`]).
    ///
    /// # Errors
    /// As there; [`Error::Unsupported`] where sandboxes of this kind cannot be restored.
    pub async fn restore(backend: Arc<dyn Backend>, spec: Spec, filter: Vec<u8>, dir: &Path) -> Result<Self, Error> {
        let sandbox = backend.restore(&spec, dir).await?;
        Self::up(backend, sandbox, spec, filter).await
    }

    async fn up(backend: Arc<dyn Backend>, sandbox: Handle, spec: Spec, filter: Vec<u8>) -> Result<Self, Error> {
        let place = Place {
            backend,
            sandbox,
            memory_limit_bytes: spec.limits.memory_bytes,
            isolation: spec.isolation,
        };
        let up = async {
            place.backend.start(&place.sandbox).await?;
            first_word(&place).await
        };
        match up.await {
            Ok(()) => Ok(Self { place, spec, filter }),
            Err(cause) => Err(cause.after(place.backend.destroy(&place.sandbox.id).await)),
        }
    }

    pub fn id(&self) -> &SandboxId {
        &self.spec.id
    }

    pub fn limits(&self) -> &Limits {
        &self.spec.limits
    }

    pub fn handle(&self) -> &Handle {
        &self.place.sandbox
    }

    /// Counters of the whole sandbox.
    pub async fn usage(&self) -> Result<Usage, Error> {
        self.place.backend.usage(&self.place.sandbox).await
    }

    /// Starts a command.
    ///
    /// # Errors
    /// [`Error::NotStarted`] when there is no such program or directory, and the like. Whatever the command does is not an
    /// error but an end.
    pub async fn exec(&self, command: Command) -> Result<Exec, Error> {
        let cwd = self.directory(command.cwd.as_deref());
        let exec = wire::Exec {
            env: self.environment(&cwd, &command.env),
            stdin: command.stdin != Stdin::Null,
            timeout_ms: command.timeout.map_or(0, |timeout| (timeout.as_millis() as u64).max(1)),
            argv: command.argv,
            ..self.bare_exec(cwd)
        };
        exec::start(self.place.clone(), exec, command.stdin, Counters::Read).await
    }

    /// Runs a command to its end and keeps at most `max_output_bytes` of each stream.
    pub async fn run(&self, command: Command, max_output_bytes: usize) -> Result<Finished, Error> {
        Ok(self.exec(command).await?.finish(max_output_bytes).await)
    }

    /// The sandbox's files, as its programs see them.
    pub fn files(&self) -> Files<'_> {
        Files::new(self)
    }

    /// Stops every process in it, until [`Sandbox::thaw`]. No command should be running: its time goes on.
    pub async fn freeze(&self) -> Result<(), Error> {
        self.place.backend.freeze(&self.place.sandbox, true).await
    }

    pub async fn thaw(&self) -> Result<(), Error> {
        self.place.backend.freeze(&self.place.sandbox, false).await
    }

    /// Writes its memory to `dir`; it has ended then and is to be closed (see [`Backend::checkpoint`]).
    pub async fn checkpoint(&self, dir: &Path) -> Result<(), Error> {
        self.place.backend.checkpoint(&self.place.sandbox, dir).await
    }

    /// Ends every process, asking first where `grace` allows, and removes every trace. May be called again.
    pub async fn close(&self, grace: Duration) -> Result<(), Error> {
        // Destroy ends what stop could not; so it comes in any case, and its word is the one that counts.
        let stopped = self.place.backend.stop(&self.place.sandbox, grace).await;
        if let Err(error) = stopped {
            tracing::debug!(sandbox = %self.id(), %error, "stopping failed, destroying all the same");
        }
        self.place.backend.destroy(self.id()).await
    }

    /// Starts the file plane.
    pub(super) async fn file_exec(&self, limit: Duration) -> Result<Exec, Error> {
        let exec = wire::Exec {
            files: true,
            stdin: true,
            timeout_ms: limit.as_millis() as u64,
            ..self.bare_exec(self.directory(None))
        };
        exec::start(self.place.clone(), exec, Stdin::Open, Counters::Spare).await
    }

    /// What every exec has: user, filter, limits.
    fn bare_exec(&self, cwd: Vec<u8>) -> wire::Exec {
        let limit = |resource: libc::__rlimit_resource_t, value| Rlimit { resource, value };
        let processes = match self.spec.isolation {
            // It would count over all sandboxes of a uid; the pids cgroup counts this one.
            Isolation::Container | Isolation::Microvm => None,
            // A user of gVisor's kernel is in one sandbox alone, and the host's does not see its processes.
            Isolation::Gvisor => Some(limit(libc::RLIMIT_NPROC, u64::from(self.spec.limits.pids))),
        };
        wire::Exec {
            cwd,
            uid: self.place.sandbox.user,
            gid: self.place.sandbox.user,
            grace_ms: GRACE.as_millis() as u64,
            seccomp: self.filter.clone(),
            rlimits: [
                limit(libc::RLIMIT_CORE, 0),
                limit(libc::RLIMIT_NOFILE, self.spec.limits.open_files),
                limit(libc::RLIMIT_FSIZE, self.spec.limits.file_bytes),
                limit(libc::RLIMIT_MEMLOCK, MEMLOCK_BYTES),
            ]
            .into_iter()
            .chain(processes)
            .collect(),
            ..wire::Exec::default()
        }
    }

    /// An absolute working directory.
    fn directory(&self, asked: Option<&[u8]>) -> Vec<u8> {
        let default: &[u8] = match self.spec.workspace {
            Some(_) => b"/workspace",
            None => b"/tmp",
        };
        match asked {
            None | Some(b"") => default.to_vec(),
            Some(absolute) if absolute.starts_with(b"/") => absolute.to_vec(),
            Some(relative) => [default, b"/", relative].concat(),
        }
    }

    fn environment(&self, cwd: &[u8], own: &BTreeMap<String, String>) -> Vec<EnvVar> {
        let mut variables: BTreeMap<&[u8], &[u8]> = BTreeMap::from([
            (
                b"PATH".as_slice(),
                b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".as_slice(),
            ),
            (b"HOME", b"/tmp"),
            (b"LANG", b"C.UTF-8"),
            (b"TMPDIR", b"/tmp"),
            (b"USER", b"sandbox"),
            (b"LOGNAME", b"sandbox"),
            (b"SHELL", b"/bin/sh"),
            (b"PWD", cwd),
        ]);
        variables.extend(own.iter().map(|(name, value)| (name.as_bytes(), value.as_bytes())));
        let var = |(name, value): (&[u8], &[u8])| EnvVar {
            name: name.to_vec(),
            value: value.to_vec(),
        };
        variables.into_iter().map(var).collect()
    }
}

async fn first_word(place: &Place) -> Result<(), Error> {
    let lost = |reason: String| Error::GuestLost {
        sandbox: place.sandbox.id.clone(),
        reason,
    };
    match timeout(FIRST_WORD, exec::ping(place)).await {
        Ok(result) => result,
        Err(_) => Err(lost(format!("it said nothing within {FIRST_WORD:?}"))),
    }
}
