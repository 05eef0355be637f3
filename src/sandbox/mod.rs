//! Sandboxes: ephemeral containers with a guest inside, and all that the host does to them.
//!
//! Owns: the [`Backend`] seam and its implementations (`backend/`), images (`image/`), limits and their counters
//! (`cgroup`), disk quotas (`disk`), the system-call filter (`seccomp`), the host's half of the guest protocol (`exec`, `files`) and
//! [`Sandbox`], which ties them together. Must not know: runs, tools, models. A caller says what is to be isolated and how
//! in a [`Spec`]; where the host cannot give that, the answer is [`Error::Unsupported`], never something weaker.
//!
//! Read next: `backend/mod.rs` for the promises of a backend, `session.rs` for the life of one sandbox.

pub mod backend;
pub mod cgroup;
pub mod disk;
pub mod exec;
pub mod files;
pub mod identity;
pub mod image;
pub mod kernel;
mod life;
pub mod mould;
mod mountinfo;
pub mod reconcile;
pub mod seccomp;
pub mod session;
mod spec;
pub mod strays;
pub mod verify;
pub mod walls;

pub use backend::{Backend, Capabilities, Doomed, Doorway, Handle, Owned};
pub use exec::{
    Background, Captured, Cause, Command, Control, EndReason, Ended, Exec, ExecInfo, Finished, Offsets, Output,
    Overflow, Piece, Stdin, Tell, TerminalSize,
};
pub use files::Files;
pub use life::Life;
pub use session::Sandbox;
pub use spec::{
    BackendName, Identity, ImageRef, InvalidImage, Isolation, Limits, Losses, Mount, RESERVED, Spec, Usage,
};

use crate::error::Kind;
use crate::ids::{ExecId, SandboxId};

/// What can go wrong with a sandbox itself. What a user's program does is never one of these: see [`Ended`].
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The host, or this backend, lacks an enforcement mechanism that the spec demands.
    #[error("this host cannot give {wanted}: {missing}")]
    Unsupported { wanted: String, missing: String },
    #[error("image `{image}`: {reason}")]
    Image { image: String, reason: String },
    #[error("no sandbox `{0}`")]
    NotFound(SandboxId),
    #[error("could not {doing} sandbox `{sandbox}`: {reason}")]
    Backend {
        doing: &'static str,
        sandbox: SandboxId,
        reason: String,
    },
    /// The connection to the guest broke, or what came over it made no sense.
    #[error("lost the guest of sandbox `{sandbox}`: {reason}")]
    GuestLost { sandbox: SandboxId, reason: String },
    /// The guest could not start the command; `code` as in guest.proto (`program_not_found`, `cwd_not_found`, …).
    #[error("could not start the command: {message}")]
    NotStarted { code: String, message: String },
    #[error("no exec `{0}`")]
    NoExec(ExecId),
    /// Output that was asked for is not kept any more; `kept` is the first byte of each stream that is.
    #[error("output of exec `{exec}` was dropped: it is kept from {} (stdout), {} (stderr), {} (terminal) on", kept.stdout, kept.stderr, kept.pty)]
    OutputDropped { exec: ExecId, kept: Offsets },
    #[error("port {port} of the sandbox: {reason}")]
    Refused { port: u16, reason: String },
    /// A file call failed; `code` as in guest.proto (`not_found`, `permission`, …).
    #[error("{message}")]
    File { code: String, message: String },
    /// A wall did not take: the sandbox was destroyed.
    #[error("the sandbox does not have all its walls: {}", verify::told(.0))]
    Breached(Vec<verify::Breach>),
    #[error(transparent)]
    Disk(#[from] disk::Error),
    #[error("sandbox set-up failed ({cause}), and so did its clean-up ({cleanup})")]
    CleanUp { cause: Box<Error>, cleanup: Box<Error> },
}

impl Error {
    /// What a backend could not do to one sandbox.
    pub(crate) fn failed(doing: &'static str, sandbox: &SandboxId, reason: impl ToString) -> Self {
        Self::Backend {
            doing,
            sandbox: sandbox.clone(),
            reason: reason.to_string(),
        }
    }

    /// As [`Error::failed`], with the whole chain of causes as the reason.
    pub(crate) fn caused(doing: &'static str, sandbox: &SandboxId, cause: &dyn std::error::Error) -> Self {
        Self::failed(doing, sandbox, crate::error::chain(cause))
    }

    /// This failure, and with it that of the clean-up after it.
    pub(crate) fn after(self, cleanup: Result<(), Self>) -> Self {
        match cleanup {
            Ok(()) => self,
            Err(cleanup) => Self::CleanUp {
                cause: Box::new(self),
                cleanup: Box::new(cleanup),
            },
        }
    }

    pub fn kind(&self) -> Kind {
        match self {
            Self::Unsupported { .. } | Self::Breached(_) => Kind::WrongState,
            // No process, no descriptor or no memory was left for it: nothing is wrong with what was asked.
            Self::NotStarted { code, .. } | Self::File { code, .. } if code == "limit" => Kind::Exhausted,
            Self::Image { .. } | Self::NotStarted { .. } | Self::File { .. } => Kind::Invalid,
            Self::NotFound(_) | Self::NoExec(_) => Kind::NotFound,
            Self::OutputDropped { .. } => Kind::WrongState,
            Self::Backend { .. } | Self::GuestLost { .. } | Self::Refused { .. } => Kind::Unavailable,
            Self::Disk(error) => error.kind(),
            Self::CleanUp { cause, .. } => cause.kind(),
        }
    }
}
