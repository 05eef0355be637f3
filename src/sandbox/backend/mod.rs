//! The seam between a sandbox and what makes it.
//!
//! Promises every backend keeps, checked by `suite.rs` on all of them:
//! - `create` is idempotent by `spec.id` and leaves nothing behind when it fails;
//! - a sandbox that was created has no running program of the user's until `start`;
//! - `connect` may be called any number of times; each connection is one exec (see guest.proto);
//! - `destroy` ends every process in the sandbox and removes every trace; it is ok when already gone;
//! - `adopt` changes nothing inside: what ran goes on, and a frozen sandbox stays frozen;
//! - `list_owned` finds what an earlier process that used the same data directory left, also after `kill -9`.
//!
//! Exec, files and signals are guest protocol (`sandbox::exec`), not backend.

pub mod docker;
pub mod fake;
pub mod guest_file;
pub mod gvisor;
pub mod oci;
mod set;
#[cfg(test)]
pub mod suite;

pub use set::Backends;

use std::fmt::Debug;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use async_trait::async_trait;
use tokio::net::UnixStream;

use super::cgroup::Group;
use super::{BackendName, Error, Identity, Isolation, Life, Losses, Spec, Usage};
use crate::ids::SandboxId;
use crate::process::Process;

/// What a backend on this host can do; optional powers are data, not more methods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities {
    pub name: BackendName,
    /// The isolation levels that this host gives through this backend, each fully.
    pub isolations: Vec<Isolation>,
    /// Whether programs inside are other users to the host's kernel than any of the host's own.
    pub user_namespace: bool,
    pub freeze: bool,
    /// The isolation levels whose sandboxes can be checkpointed and restored with their memory.
    pub memory_snapshot: Vec<Isolation>,
    /// The isolation levels in whose sandboxes processes can be taken, and cast ([`Sandbox::cast`](super::Sandbox::cast)).
    pub moulds: Vec<Isolation>,
    /// The isolation levels whose sandboxes can be given a way out ([`Backend::doorway`]).
    pub borders: Vec<Isolation>,
    /// What sandboxes of an isolation level do not give that others do.
    pub lacks: Vec<(Isolation, Lack)>,
}

/// Something that a sandbox does not give, although its wall stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lack {
    /// Memory that runs out ends the whole sandbox, not one process of it.
    LifeAfterOutOfMemory,
    /// `Usage::pids_refused` stays 0: forks are refused by a limit inside.
    RefusedForksCounted,
    /// Programs can read the guest's environment (a `PATH`), its memory map and the numbers of its descriptors; not its memory,
    /// and they cannot use a descriptor.
    AgentHidden,
    /// `/proc/PID/status` has no lines `NoNewPrivs`, `CapAmb`, `SigBlk` and `SigIgn`.
    WholeStatusShown,
    /// File calls follow the magic links of `/proc`, within the sandbox and with no more rights than its programs have: there
    /// is no openat2.
    MagicLinksRefused,
    /// The isolation's own kernel keeps something of each process that was looked up in `/proc`, up to a thousand such looks, and
    /// it counts: commands whose trees had to be ended cost some 100 KiB each until then.
    CommandsWithoutEnd,
}

impl Lack {
    /// As clients are told of it.
    pub fn name(self) -> &'static str {
        match self {
            Self::LifeAfterOutOfMemory => "life_after_out_of_memory",
            Self::RefusedForksCounted => "refused_forks_counted",
            Self::AgentHidden => "agent_hidden",
            Self::WholeStatusShown => "whole_status_shown",
            Self::MagicLinksRefused => "magic_links_refused",
            Self::CommandsWithoutEnd => "commands_without_end",
        }
    }
}

/// The namespaces of a sandbox, for the host to enter. They last as long as this does.
#[derive(Debug)]
pub struct Doorway {
    pub network: OwnedFd,
    pub mounts: OwnedFd,
}

impl Doorway {
    /// Those of a process; `None` when it has ended.
    fn of(process: &Process) -> std::io::Result<Option<Self>> {
        let open = |name: &str| File::open(format!("/proc/{}/ns/{name}", process.pid)).map(OwnedFd::from);
        match (open("net"), open("mnt")) {
            // It was that very process while they were opened: its number is not given away before it is gone.
            (Ok(network), Ok(mounts)) if process.is_alive() => Ok(Some(Self { network, mounts })),
            _ if !process.is_alive() => Ok(None),
            (network, mounts) => Err(network.and(mounts).err().unwrap_or(std::io::ErrorKind::NotFound.into())),
        }
    }
}

/// A sandbox that was created: enough to find it again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Handle {
    pub id: SandboxId,
    pub identity: Identity,
    /// uid and gid of programs as the guest must set them: inside the user namespace where there is one.
    pub user: u32,
}

/// A sandbox found on the host that this data directory owns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owned {
    pub id: SandboxId,
    /// The process that made it, as pid and start time, is still alive.
    pub owner_alive: bool,
    pub identity: Identity,
}

#[async_trait]
pub trait Backend: Send + Sync + Debug {
    fn capabilities(&self) -> Capabilities;
    async fn create(&self, spec: &Spec) -> Result<Handle, Error>;
    async fn start(&self, sandbox: &Handle) -> Result<(), Error>;
    /// A fresh connection to the guest. The host sends the first frame.
    async fn connect(&self, sandbox: &Handle) -> Result<UnixStream, Error>;
    /// Stops (`true`) or lets go on (`false`) every process in the sandbox; returns when it has taken.
    async fn freeze(&self, sandbox: &Handle, frozen: bool) -> Result<(), Error>;
    /// Counters of the whole sandbox.
    async fn usage(&self, sandbox: &Handle) -> Result<Usage, Error>;
    /// What its processes were refused so far: asked for before and after each command, so it is to cost little.
    async fn losses(&self, sandbox: &Handle) -> Result<Losses, Error> {
        Ok(self.usage(sandbox).await?.into())
    }
    /// Sees to it that nothing in it runs on, nor begins to; whether all have ended by then. Where they have not, [`Self::stop`]
    /// waits for that.
    async fn doom(&self, sandbox: &Handle) -> Result<Doomed, Error> {
        self.stop(sandbox, Duration::ZERO).await.map(|()| Doomed::Ended)
    }
    /// Asks the guest to end everything, and ends it after `grace`. The sandbox's files stay until `destroy`.
    async fn stop(&self, sandbox: &Handle, grace: Duration) -> Result<(), Error>;
    async fn destroy(&self, sandbox: &SandboxId) -> Result<(), Error>;
    /// Writes the memory of a sandbox, with all that runs in it, to `dir`, which is made. Its workspace is not part of it: the
    /// sandbox stands still until [`Still`] is dropped, so that it can be taken as it is; then it goes on, its connections
    /// too. What is there when this fails: a sandbox as before, or an ended one.
    async fn checkpoint(&self, sandbox: &Handle, _dir: &Path) -> Result<Still, Error> {
        Err(no_snapshots(&sandbox.id))
    }
    /// As `create` and `start`, going on from a checkpoint, as often as wanted. `spec` must have the image and mounts that the
    /// checkpoint was made with. Commands that ran then go on, without those who had started them: their output is dropped.
    async fn restore(&self, spec: &Spec, _dir: &Path) -> Result<Handle, Error> {
        Err(no_snapshots(&spec.id))
    }
    /// The number that the host has for a process of the sandbox, which is `pid` inside.
    async fn process(&self, sandbox: &Handle, _pid: u32) -> Result<i32, Error> {
        Err(Error::Unsupported {
            wanted: format!("a process of sandbox `{}`", sandbox.id),
            missing: "only containers of the `oci` backend have processes that the host can read".to_owned(),
        })
    }
    /// The namespaces of a sandbox that runs or stands still, in which the host can open sockets and place files. Nothing in it
    /// takes part, or can keep that from being done.
    async fn doorway(&self, sandbox: &Handle) -> Result<Doorway, Error> {
        Err(Error::Unsupported {
            wanted: format!("a network for sandbox `{}`", sandbox.id),
            missing: "the host cannot enter its network namespace".to_owned(),
        })
    }
    async fn list_owned(&self) -> Result<Vec<Owned>, Error>;
    /// Takes over a sandbox of this data directory whose owner is dead: from now on this process owns it.
    ///
    /// # Errors
    /// When it is gone, has ended, or a living process has it. It is left as it was then.
    async fn adopt(&self, sandbox: &SandboxId) -> Result<Handle, Error>;
    /// The group whose processes are the sandbox's programs, as the host sees them. `None` where it does not: under another kernel, or
    /// when there are none.
    async fn programs(&self, _sandbox: &Handle) -> Result<Option<Group>, Error> {
        Ok(None)
    }
    /// What tells when the sandbox's first process has ended, and with it all others.
    async fn life(&self, sandbox: &Handle) -> Result<Life, Error>;
}

/// How far the end of a sandbox in which nothing runs any more has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Doomed {
    /// Every process has been killed; the kernel still takes some of them apart.
    Dying,
    Ended,
}

/// A sandbox that stands still since its checkpoint, and goes on when this is dropped.
#[derive(Debug)]
#[must_use]
pub struct Still {
    /// Its other end is whoever holds the sandbox.
    pub(in crate::sandbox::backend) _line: std::os::unix::net::UnixStream,
}

fn no_snapshots(sandbox: &SandboxId) -> Error {
    Error::Unsupported {
        wanted: format!("a memory snapshot of sandbox `{sandbox}`"),
        missing: "only sandboxes with isolation `gvisor` of the `oci` backend can be checkpointed".to_owned(),
    }
}
