//! What a tool can do: the one door between tools and wherever they act.
//!
//! Behind it stands a sandbox ([`crate::run`] wires it up) or, in tests, [`super::memory::MemoryWorld`]. Tools say absolute
//! paths in text; nothing here protects anything, the sandbox does.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::time::Duration;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};

use crate::sandbox::{Captured, Cause};

/// One command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Command {
    pub argv: Vec<String>,
    /// On top of the world's own.
    pub env: BTreeMap<String, String>,
    /// Absolute.
    pub cwd: String,
    /// At its end the whole process tree is killed and the cause is [`Cause::TimedOut`].
    pub timeout: Duration,
}

/// How it ended, and what it wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    pub stdout: Captured,
    pub stderr: Captured,
    pub cause: Cause,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileKind {
    Regular,
    Directory,
    Symlink,
    /// Sockets, pipes, devices.
    Other,
}

/// What is at a path; a symbolic link is not followed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stat {
    pub kind: FileKind,
    pub size: u64,
}

/// One entry of a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Relative to the listed directory.
    pub path: String,
    pub stat: Stat,
    pub link_target: Option<String>,
}

/// Entries sorted by path.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Listing {
    pub entries: Vec<Entry>,
    /// There were more than asked for.
    pub truncated: bool,
}

/// One line that fits a pattern.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Match {
    /// Relative to the searched directory.
    pub path: String,
    /// From 1.
    pub line: u64,
    /// Without its end; may be cut.
    pub text: String,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Found {
    pub matches: Vec<Match>,
    pub files_read: u64,
    /// There were more than asked for.
    pub truncated: bool,
}

/// Where a tool acts.
///
/// Promises: each call may be made again; a dropped call leaves no process behind; `write` is atomic, makes missing parents and
/// keeps the mode of a file that exists; `search` reads lines by the syntax of the crate `regex`, and skips binary files and
/// `.git`; artifacts are addressed by content, so that storing one twice gives one id.
#[async_trait]
pub trait World: Send + Sync + Debug {
    /// Runs a command to its end. How it ends is an [`Outcome`], whatever it is; that it could not begin is
    /// [`Error::Refused`].
    async fn exec(&self, command: &Command) -> Result<Outcome, Error>;
    /// A whole file; more than 64 MiB is [`Refusal::TooLarge`].
    async fn read(&self, path: &str) -> Result<Vec<u8>, Error>;
    async fn write(&self, path: &str, content: &[u8]) -> Result<(), Error>;
    async fn stat(&self, path: &str) -> Result<Stat, Error>;
    /// Depth 1 = the directory's own entries.
    async fn list(&self, path: &str, depth: u32, max_entries: u32) -> Result<Listing, Error>;
    /// Searches a file, or all files below a directory whose path fits `glob`.
    async fn search(&self, path: &str, pattern: &str, glob: Option<&str>, max_matches: u32) -> Result<Found, Error>;
    /// What else there is to know about what happened in it: a field of the result's data, and what it holds.
    fn aside(&self) -> Option<(&'static str, serde_json::Value)> {
        None
    }
    async fn put_artifact(&self, content: &[u8]) -> Result<String, Lost>;
    /// None for an id that this run did not store.
    async fn get_artifact(&self, id: &str) -> Result<Option<Vec<u8>>, Lost>;
}

/// The world itself failed, not the tool: the call may be made again in another one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the sandbox was lost: {reason}")]
pub struct Lost {
    pub reason: String,
    pub blame: Blame,
}

/// Who ended a world: by the kernel's counters and typed causes, never by an exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Blame {
    /// The host, or somebody on it: nothing that ran inside.
    Host,
    /// What ran inside: it took more than the world may have.
    Program,
}

impl Lost {
    /// By the host.
    pub fn new(reason: impl Into<String>) -> Self {
        Self {
            reason: reason.into(),
            blame: Blame::Host,
        }
    }
}

/// Why a call did nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// An answer for the model.
    #[error("{message}")]
    Refused { code: Refusal, message: String },
    #[error(transparent)]
    Lost(#[from] Lost),
}

impl Error {
    pub fn refused(code: Refusal, message: impl Into<String>) -> Self {
        Self::Refused {
            code,
            message: message.into(),
        }
    }

    /// Says what the refusal is about.
    pub(super) fn about(self, subject: &str) -> Self {
        match self {
            Self::Refused { code, message } => {
                Self::refused(code, format!("`{}`: {message}", super::result::brief(subject)))
            }
            Self::Lost(lost) => Self::Lost(lost),
        }
    }
}

/// What kind of refusal; the guest's codes for files and for commands that never ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    NotFound,
    IsDirectory,
    NotDirectory,
    Permission,
    Exists,
    NoSpace,
    InvalidPattern,
    TooLarge,
    ProgramNotFound,
    ProgramNotExecutable,
    CwdNotFound,
    /// A limit of the sandbox (processes, open files) was in the way.
    Limit,
    Other,
}

impl Refusal {
    /// Reads a code of the guest; one that is not known here is [`Self::Other`].
    pub fn from_code(code: &str) -> Self {
        match code {
            "not_found" => Self::NotFound,
            "is_directory" => Self::IsDirectory,
            "not_directory" => Self::NotDirectory,
            "permission" => Self::Permission,
            "exists" => Self::Exists,
            "no_space" => Self::NoSpace,
            "invalid_pattern" => Self::InvalidPattern,
            "too_large" => Self::TooLarge,
            "program_not_found" => Self::ProgramNotFound,
            "program_not_executable" => Self::ProgramNotExecutable,
            "cwd_not_found" => Self::CwdNotFound,
            "limit" => Self::Limit,
            _ => Self::Other,
        }
    }
}
