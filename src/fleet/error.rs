//! What can go wrong with the fleet. What a program in a sandbox does is never one of these.

use std::sync::Arc;
use std::time::Duration;

use super::execs::Channel;
use super::state::{Cause, Denied, End};
use crate::border;
use crate::error::Kind;
use crate::ids::{ExecId, SandboxId, SnapshotId};
use crate::sandbox::{BackendName, Isolation, kernel};
use crate::{policy, sandbox, workdir, workspace};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no sandbox `{0}`")]
    NotFound(String),
    #[error("no command `{exec}` in sandbox `{sandbox}`; ended ones are kept for a while only")]
    NoExec { sandbox: SandboxId, exec: String },
    #[error("{0}")]
    Invalid(String),
    #[error(transparent)]
    Policy(#[from] policy::Error),
    #[error("the policy `{policy}` asks for {wanted} isolation: {missing}")]
    Isolation {
        policy: String,
        wanted: Isolation,
        missing: String,
    },
    #[error("all {places} places are taken{}", after(.waited))]
    NoPlace { places: usize, waited: Duration },
    #[error("too many wait for a place already ({0})")]
    QueueFull(usize),
    #[error("the idempotency key `{key}` belongs to another request")]
    KeyReused { key: String },
    #[error("sandbox `{id}` {}", .denied)]
    Denied { id: SandboxId, denied: Denied },
    #[error("sandbox `{id}` runs {limit} commands already")]
    TooManyExecs { id: SandboxId, limit: usize },
    #[error("{channel} of command `{exec}` is kept from byte {first} to byte {end}, not from {wanted}")]
    OutputDropped {
        exec: ExecId,
        channel: Channel,
        wanted: u64,
        first: u64,
        end: u64,
    },
    #[error("no context `{context}` in sandbox `{sandbox}`; none outlives its server")]
    NoContext { sandbox: SandboxId, context: String },
    #[error("sandbox `{id}` has {limit} contexts already")]
    TooManyContexts { id: SandboxId, limit: usize },
    #[error(transparent)]
    Code(#[from] kernel::Error),
    #[error("the command `{0}` has ended")]
    ExecEnded(ExecId),
    #[error("the sandbox could not be made")]
    Create(#[source] Arc<Error>),
    #[error(transparent)]
    Sandbox(#[from] sandbox::Error),
    #[error(transparent)]
    Workspace(#[from] workspace::Error),
    #[error(transparent)]
    Directory(#[from] workdir::Error),
    #[error("no {what} `{id}`")]
    NoWorkspace { what: &'static str, id: String },
    #[error(transparent)]
    Border(#[from] border::Error),
    #[error("no system-call filter for this host")]
    Filter(#[from] sandbox::seccomp::Error),
    #[error("the audit log takes no more records, and nothing is done off the record")]
    OffRecord,
    #[error("the lease of sandbox `{sandbox}` could not be written")]
    Lease {
        sandbox: SandboxId,
        #[source]
        source: std::io::Error,
    },
    #[error(
        "sandbox `{id}` cannot be kept with its memory: the `{backend}` backend does not do that for isolation `{isolation}`"
    )]
    NoMemorySnapshots {
        id: SandboxId,
        backend: BackendName,
        isolation: Isolation,
    },
    #[error("no snapshot `{0}`")]
    NoSnapshot(String),
    #[error("snapshot `{snapshot}` cannot be gone on from: {reason}")]
    SnapshotUnfit { snapshot: SnapshotId, reason: String },
    #[error("there are {0} snapshots with memory already; delete one")]
    TooManySnapshots(usize),
    #[error("a snapshot could not be written or read")]
    Snapshot(#[source] std::io::Error),
    #[error("the server is stopping")]
    Stopping,
}

fn after(waited: &Duration) -> String {
    match waited.is_zero() {
        true => String::new(),
        false => format!(" and none came free within {waited:?}"),
    }
}

impl Error {
    pub fn kind(&self) -> Kind {
        match self {
            Self::NotFound(_)
            | Self::NoExec { .. }
            | Self::NoContext { .. }
            | Self::NoWorkspace { .. }
            | Self::NoSnapshot(_) => Kind::NotFound,
            Self::Invalid(_) | Self::OutputDropped { .. } => Kind::Invalid,
            Self::Policy(error) => error.kind(),
            Self::Isolation { .. }
            | Self::Denied { .. }
            | Self::ExecEnded(_)
            | Self::Filter(_)
            | Self::NoMemorySnapshots { .. }
            | Self::SnapshotUnfit { .. } => Kind::WrongState,
            Self::NoPlace { .. }
            | Self::QueueFull(_)
            | Self::TooManyExecs { .. }
            | Self::TooManyContexts { .. }
            | Self::TooManySnapshots(_) => Kind::Exhausted,
            Self::KeyReused { .. } => Kind::Exists,
            Self::Code(error) => error.kind(),
            Self::Create(error) => error.kind(),
            Self::Sandbox(sandbox::Error::File { code, .. }) => match code.as_str() {
                "not_found" => Kind::NotFound,
                "exists" => Kind::Exists,
                "permission" => Kind::Denied,
                "no_space" | "limit" => Kind::Exhausted,
                _ => Kind::Invalid,
            },
            Self::Sandbox(error) => error.kind(),
            Self::Workspace(error) => error.kind(),
            Self::Directory(error) => error.kind(),
            Self::Border(error) => error.kind(),
            Self::OffRecord | Self::Stopping => Kind::Unavailable,
            Self::Lease { .. } | Self::Snapshot(_) => Kind::Internal,
        }
    }

    /// Stable code for clients, upper snake case.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::NotFound(_) => "SANDBOX_NOT_FOUND",
            Self::NoExec { .. } => "EXEC_NOT_FOUND",
            Self::Invalid(_) => "INVALID",
            Self::Policy(_) => "POLICY",
            Self::Isolation { .. } | Self::Filter(_) => "ISOLATION_UNAVAILABLE",
            Self::NoPlace { .. } | Self::QueueFull(_) => "QUOTA",
            Self::KeyReused { .. } => "IDEMPOTENCY_KEY_REUSED",
            Self::Denied { denied, .. } => match denied {
                Denied::NotReady => "SANDBOX_NOT_READY",
                Denied::Paused => "SANDBOX_PAUSED",
                Denied::Impossible => "INTERNAL",
                Denied::Over(end) => over(end),
            },
            Self::TooManyExecs { .. } => "TOO_MANY_EXECS",
            Self::NoContext { .. } => "CONTEXT_NOT_FOUND",
            Self::TooManyContexts { .. } => "TOO_MANY_CONTEXTS",
            Self::Code(error) => of_kernel(error),
            Self::OutputDropped { .. } => "OUTPUT_DROPPED",
            Self::ExecEnded(_) => "EXEC_ENDED",
            Self::Create(error) => error.reason(),
            Self::Sandbox(error) => of_sandbox(error),
            Self::Workspace(_) => "WORKSPACE",
            Self::Border(border::Error::Unsupported { .. }) => "NETWORK_UNAVAILABLE",
            Self::Border(_) => "NETWORK",
            Self::Directory(workdir::Error::Disk(_)) => "DISK",
            Self::Directory(workdir::Error::Directory { .. }) => "INTERNAL",
            Self::NoWorkspace { .. } => "WORKSPACE_NOT_FOUND",
            Self::OffRecord => "OFF_RECORD",
            Self::Lease { .. } | Self::Snapshot(_) => "INTERNAL",
            Self::NoMemorySnapshots { .. } => "MEMORY_SNAPSHOT_UNAVAILABLE",
            Self::NoSnapshot(_) => "SNAPSHOT_NOT_FOUND",
            Self::SnapshotUnfit { .. } => "SNAPSHOT_UNFIT",
            Self::TooManySnapshots(_) => "TOO_MANY_SNAPSHOTS",
            Self::Stopping => "SERVER_STOPPING",
        }
    }
}

/// Why a sandbox is over, as the code of the refusal of everything after.
fn over(end: &End) -> &'static str {
    match end.cause {
        Cause::Killed => "SANDBOX_KILLED",
        Cause::Expired => "SANDBOX_EXPIRED",
        Cause::Idle => "SANDBOX_IDLE",
        Cause::OutOfMemory => "SANDBOX_OUT_OF_MEMORY",
        Cause::Lost => "SANDBOX_LOST",
        Cause::Shutdown => "SANDBOX_SHUTDOWN",
        Cause::CreateFailed => "SANDBOX_CREATE_FAILED",
    }
}

fn of_kernel(error: &kernel::Error) -> &'static str {
    match error {
        kernel::Error::NoInterpreter { .. } => "LANGUAGE_NOT_FOUND",
        kernel::Error::Unfit { .. } | kernel::Error::NotCast(_) => "LANGUAGE_UNFIT",
        kernel::Error::Busy { .. } => "CONTEXT_BUSY",
        kernel::Error::Ended(_) => "CONTEXT_ENDED",
        kernel::Error::TooLong(_) => "CODE_TOO_LARGE",
        kernel::Error::Nul(_) | kernel::Error::Variable(_) => "INVALID",
        kernel::Error::Sandbox(error) => of_sandbox(error),
    }
}

fn of_sandbox(error: &sandbox::Error) -> &'static str {
    match error {
        sandbox::Error::Unsupported { .. } | sandbox::Error::Breached(_) => "ISOLATION_UNAVAILABLE",
        sandbox::Error::Disk(_) => "DISK",
        sandbox::Error::Image { .. } => "IMAGE",
        sandbox::Error::NotFound(_) => "SANDBOX_NOT_FOUND",
        sandbox::Error::Backend { .. } => "BACKEND",
        sandbox::Error::GuestLost { .. } => "SANDBOX_LOST",
        // A guest is hostile: its words are known ones, or none.
        sandbox::Error::NotStarted { code, .. } => match code.as_str() {
            "program_not_found" => "PROGRAM_NOT_FOUND",
            "program_not_executable" => "PROGRAM_NOT_EXECUTABLE",
            "cwd_not_found" => "CWD_NOT_FOUND",
            "user_not_found" => "USER_NOT_FOUND",
            "user_refused" => "USER_REFUSED",
            "limit" => "LIMIT",
            "too_large" => "EXEC_TOO_LARGE",
            "no_terminal" => "NO_TERMINAL",
            _ => "EXEC_NOT_STARTED",
        },
        sandbox::Error::File { code, .. } => match code.as_str() {
            "not_found" => "FILE_NOT_FOUND",
            "is_directory" => "FILE_IS_DIRECTORY",
            "not_directory" => "FILE_NOT_DIRECTORY",
            "not_empty" => "DIRECTORY_NOT_EMPTY",
            "not_regular" => "FILE_NOT_REGULAR",
            "permission" => "FILE_PERMISSION",
            "exists" => "FILE_EXISTS",
            "no_space" => "DISK_FULL",
            "too_large" => "FILE_TOO_LARGE",
            _ => "FILE",
        },
        sandbox::Error::NoExec(_) => "EXEC_NOT_FOUND",
        sandbox::Error::OutputDropped { .. } => "OUTPUT_DROPPED",
        sandbox::Error::Refused { .. } => "PORT_REFUSED",
        sandbox::Error::CleanUp { cause, .. } => of_sandbox(cause),
    }
}
