//! The life of one sandbox: `open` (create, start, first word from the guest), work, `close` (stop, destroy).
//!
//! Knows the order of things and how to undo them; how each is done is the backend's.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::net::UnixStream;
use tokio::time::timeout;

use super::backend::{Doomed, Still};
use super::exec::{self, Background, Counters, EndReason, ExecInfo, GRACE, Offsets, Overflow, Place, Stdin, Tell};
use super::files::Files;
use super::mould::Mould;
use super::{Backend, Command, Error, Exec, Finished, Handle, Identity, Isolation, Life, Limits, Spec, Usage, verify};
use crate::ids::{ExecId, SandboxId};
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
        spec.check()?;
        let sandbox = backend.create(&spec).await?;
        Self::up(backend, sandbox, spec, filter).await
    }

    /// As [`Self::open`], going on from the checkpoint in `dir` (see [`Backend::restore`]).
    ///
    /// # Errors
    /// As there; [`Error::Unsupported`] where sandboxes of this kind cannot be restored.
    pub async fn restore(backend: Arc<dyn Backend>, spec: Spec, filter: Vec<u8>, dir: &Path) -> Result<Self, Error> {
        spec.check()?;
        let sandbox = backend.restore(&spec, dir).await?;
        Self::up(backend, sandbox, spec, filter).await
    }

    async fn up(backend: Arc<dyn Backend>, sandbox: Handle, spec: Spec, filter: Vec<u8>) -> Result<Self, Error> {
        let place = place(backend, sandbox, &spec);
        let sandbox = Self { place, spec, filter };
        let up = async {
            sandbox.place.backend.start(&sandbox.place.sandbox).await?;
            sandbox.look_at_a_program().await
        };
        match up.await {
            Ok(()) => Ok(sandbox),
            Err(cause) => {
                // Of one that has ended meanwhile nothing can be read back: that is no wall that did not take.
                let cause = match cause {
                    Error::Breached(breaches) => sandbox.ping().await.err().unwrap_or(Error::Breached(breaches)),
                    other => other,
                };
                Err(cause.after(sandbox.destroy().await))
            }
        }
    }

    /// The guest's first word; where the host sees programs, in the form of one that does nothing (the file plane, for which no image need
    /// have a file), whose walls are read back. Promise 3.
    async fn look_at_a_program(&self) -> Result<(), Error> {
        let backend = &self.place.backend;
        let programs = match self.spec.isolation {
            Isolation::Container => backend.programs(&self.place.sandbox).await?,
            // The host sees their kernel, and its walls the backend has read back.
            Isolation::Gvisor | Isolation::Microvm => None,
        };
        let Some(group) = programs else {
            return self.ping().await;
        };
        let exec = match timeout(FIRST_WORD, self.file_exec(None)).await {
            Ok(exec) => exec?,
            Err(_) => return Err(self.place.lost(format!("it said nothing within {FIRST_WORD:?}"))),
        };
        verify::program(&group, exec.pid(), self.spec.identity.host_uid()).map_err(Error::Breached)
    }

    /// Takes over a sandbox that an earlier process made and that is still up: `handle` as its backend gave it then.
    ///
    /// # Errors
    /// [`Error::GuestLost`] when its guest does not answer. Nothing is undone then.
    pub async fn adopt(backend: Arc<dyn Backend>, handle: Handle, spec: Spec, filter: Vec<u8>) -> Result<Self, Error> {
        let sandbox = Self::known(backend, handle, spec, filter);
        sandbox.ping().await?;
        Ok(sandbox)
    }

    /// As [`Sandbox::adopt`], of one that may be frozen and could not answer.
    pub fn known(backend: Arc<dyn Backend>, handle: Handle, spec: Spec, filter: Vec<u8>) -> Self {
        let place = Place {
            company: exec::Company::unknown(),
            ..place(backend, handle, &spec)
        };
        Self { place, spec, filter }
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
    /// [`Error::NotStarted`] when there is no such program, directory or user, and the like. Whatever the command does is not
    /// an error but an end.
    pub async fn exec(&self, command: Command) -> Result<Exec, Error> {
        self.begin(command, None).await
    }

    /// As [`Self::exec`], but what runs is no program: the process goes on as the one that `mould` was taken of, with the
    /// rights, limits and filter of any command. `command.argv` is but told of, and its variables are not seen.
    ///
    /// # Errors
    /// [`Error::NotStarted`] with `not_cast` where that cannot be.
    pub async fn cast(&self, command: Command, mould: &Mould) -> Result<Exec, Error> {
        self.begin(command, Some(mould)).await
    }

    async fn begin(&self, command: Command, mould: Option<&Mould>) -> Result<Exec, Error> {
        let cwd = self.directory(command.cwd.as_deref());
        let exec = wire::Exec {
            env: self.environment(&cwd, &command),
            stdin: command.stdin != Stdin::Null || command.terminal.is_some(),
            timeout_ms: command.timeout.map_or(0, |timeout| (timeout.as_millis() as u64).max(1)),
            grace_ms: command.grace.as_millis() as u64,
            argv: command.argv,
            terminal: command.terminal.map(Into::into),
            user: command.user.unwrap_or_default(),
            user_base: self.user_base(),
            keep_background: command.background == Background::Keep,
            drop_oldest: command.overflow == Overflow::Drop,
            detachable: command.detachable,
            mould: mould.map(|mould| mould.plan().clone()),
            ..self.bare_exec(cwd)
        };
        let id = command.id.unwrap_or_else(ExecId::random);
        let memory = mould.map(AsFd::as_fd);
        exec::start(self.place.clone(), id, exec, command.stdin, Counters::Read, memory).await
    }

    /// Goes on with a detachable exec that runs, or that ended and was not released: its output from just these offsets, its
    /// input and its end. Whoever was attached before gets [`Cause::Superseded`](exec::Cause::Superseded).
    ///
    /// # Errors
    /// [`Error::NoExec`]; [`Error::OutputDropped`] when a wanted byte is not kept any more, with the first that is.
    pub async fn attach(&self, id: &ExecId, from: Offsets) -> Result<Exec, Error> {
        exec::attach(self.place.clone(), id.clone(), from).await
    }

    /// The detachable execs that the guest has: those that run, and those that ended and were not released. Oldest first.
    pub async fn list_execs(&self) -> Result<Vec<ExecInfo>, Error> {
        exec::list(&self.place).await
    }

    /// Says one word to a detachable exec, attached or not; whether it runs.
    pub async fn tell(&self, id: &ExecId, word: Tell) -> Result<bool, Error> {
        exec::tell(&self.place, id, word).await
    }

    /// The number that the host has for a process, which is `pid` inside.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where the host does not see the sandbox's processes.
    pub(super) async fn process(&self, pid: u32) -> Result<i32, Error> {
        self.place.backend.process(&self.place.sandbox, pid).await
    }

    /// Lets the guest forget a detachable exec that ended: its end was heard. It forgets by itself after some minutes.
    pub async fn release(&self, id: &ExecId) -> Result<(), Error> {
        exec::release(&self.place, id).await
    }

    /// Connects to a TCP port of the sandbox's 127.0.0.1, waiting up to `wait` for something to listen there. What comes back
    /// carries the connection's bytes; each half can be closed by itself.
    ///
    /// # Errors
    /// [`Error::Refused`] when nothing listens.
    pub async fn dial(&self, port: u16, wait: Duration) -> Result<UnixStream, Error> {
        exec::dial(&self.place, port, wait).await
    }

    /// Says why this sandbox is about to be ended on purpose: execs that are running end with that as their cause, however
    /// they end. The first reason stays. Call [`Sandbox::close`] next.
    pub fn ending(&self, reason: EndReason) {
        let _ = self.place.ending.set(reason);
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

    /// Whether there is certainly no process in it but its guest's. To be asked while it stands still.
    pub async fn is_alone(&self) -> bool {
        let group = self.place.backend.programs(&self.place.sandbox).await;
        match group {
            // No program has the guest's user, and the guest is always there.
            Ok(Some(group)) => group.users().is_ok_and(|users| users.len() == 1),
            Ok(None) => self.usage().await.is_ok_and(|usage| usage.pids == 1),
            Err(_) => false,
        }
    }

    /// Asks the guest whether it is there.
    ///
    /// # Errors
    /// [`Error::GuestLost`].
    pub async fn ping(&self) -> Result<(), Error> {
        first_word(&self.place).await
    }

    /// What tells when its first process has ended.
    pub async fn life(&self) -> Result<Life, Error> {
        self.place.backend.life(&self.place.sandbox).await
    }

    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    /// Sees to it that nothing in it runs on (see [`Backend::doom`]).
    pub async fn doom(&self) -> Result<Doomed, Error> {
        self.place.backend.doom(&self.place.sandbox).await
    }

    /// Ends every process, asking first where `grace` allows; its files stay until [`Sandbox::destroy`].
    pub async fn stop(&self, grace: Duration) -> Result<(), Error> {
        self.place.backend.stop(&self.place.sandbox, grace).await
    }

    /// Ends every process and removes every trace. May be called again.
    pub async fn destroy(&self) -> Result<(), Error> {
        self.place.backend.destroy(self.id()).await
    }

    /// Writes its memory to `dir`; it stands still until what this gives is dropped (see [`Backend::checkpoint`]).
    pub async fn checkpoint(&self, dir: &Path) -> Result<Still, Error> {
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
    pub(super) async fn file_exec(&self, limit: Option<Duration>) -> Result<Exec, Error> {
        let exec = wire::Exec {
            files: true,
            stdin: true,
            timeout_ms: limit.map_or(0, |limit| limit.as_millis() as u64),
            ..self.bare_exec(self.directory(None))
        };
        exec::start(
            self.place.clone(),
            ExecId::random(),
            exec,
            Stdin::Open,
            Counters::Spare,
            None,
        )
        .await
    }

    /// Where the range of users that programs may be begins.
    fn user_base(&self) -> u32 {
        match self.place.sandbox.user {
            // Inside a user namespace it begins at 0.
            Identity::USER => 0,
            _ => self.place.sandbox.identity.base,
        }
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
            no_oom_score: self.spec.isolation == Isolation::Gvisor,
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

    fn environment(&self, cwd: &[u8], command: &Command) -> Vec<EnvVar> {
        let user = match command.user.as_deref() {
            Some(name) if name.parse::<u32>().is_err() => name.as_bytes(),
            Some(_) | None => b"sandbox",
        };
        let mut variables: BTreeMap<&[u8], &[u8]> = BTreeMap::from([
            (
                b"PATH".as_slice(),
                b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".as_slice(),
            ),
            (b"HOME", b"/tmp"),
            (b"LANG", b"C.UTF-8"),
            (b"TMPDIR", b"/tmp"),
            (b"USER", user),
            (b"LOGNAME", user),
            (b"SHELL", b"/bin/sh"),
            (b"PWD", cwd),
        ]);
        if command.terminal.is_some() {
            variables.insert(b"TERM", b"xterm-256color");
        }
        variables.extend(
            command
                .env
                .iter()
                .map(|(name, value)| (name.as_bytes(), value.as_bytes())),
        );
        let var = |(name, value): (&[u8], &[u8])| EnvVar {
            name: name.to_vec(),
            value: value.to_vec(),
        };
        variables.into_iter().map(var).collect()
    }
}

fn place(backend: Arc<dyn Backend>, sandbox: Handle, spec: &Spec) -> Place {
    Place {
        backend,
        sandbox,
        memory_limit_bytes: spec.limits.memory_bytes,
        pids_limit: spec.limits.pids.into(),
        ending: Arc::new(OnceLock::new()),
        company: exec::Company::default(),
    }
}

async fn first_word(place: &Place) -> Result<(), Error> {
    match timeout(FIRST_WORD, exec::ping(place)).await {
        Ok(result) => result,
        Err(_) => Err(place.lost(format!("it said nothing within {FIRST_WORD:?}"))),
    }
}
