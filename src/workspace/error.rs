//! What can go wrong with a workspace.

use std::io;

use super::apply::Conflict;
use super::id::BlobId;
use super::name::shown;
use super::unarchive::Refusal;
use crate::error::Kind;

/// A failure of the workspace store, of a walk, or of what a caller handed in. Paths are escaped for display.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("blob `{0}` is missing from the store")]
    Missing(BlobId),
    #[error("blob `{id}` is damaged: {reason}")]
    Damaged { id: BlobId, reason: String },
    /// Written by a newer build; nothing is guessed.
    #[error("blob `{id}` has {what} format version {found}, and this build reads version {known}")]
    UnknownVersion {
        id: BlobId,
        what: &'static str,
        found: u8,
        known: u8,
    },
    #[error("could not {doing} `{path}`")]
    Io {
        doing: &'static str,
        path: String,
        #[source]
        source: io::Error,
    },
    /// The reader that was handed in failed.
    #[error("could not read the content to be stored")]
    Source(#[source] io::Error),
    /// The writer that was handed in failed.
    #[error("could not write the content out")]
    Sink(#[source] io::Error),
    #[error("there is no directory `{0}`")]
    NoDirectory(String),
    #[error("`{0}` is not a directory")]
    NotADirectory(String),
    #[error("`{0}` is not empty")]
    NotEmpty(String),
    /// Nothing was kept; a look that reads everything at once does not meet this.
    #[error("`{0}` changed before it was read")]
    Changed(String),
    #[error("may not read `{path}`")]
    Unreadable {
        path: String,
        #[source]
        source: io::Error,
    },
    #[error("`{path}` is beyond the limit of {limit} {what}")]
    Limit {
        what: &'static str,
        limit: u64,
        path: String,
    },
    #[error("the archive is refused at `{entry}`: {refusal}")]
    Archive { entry: String, refusal: Refusal },
    #[error("{} {} changed in the meantime, so nothing was written", .0.len(), if .0.len() == 1 { "path has" } else { "paths have" })]
    Conflict(Vec<Conflict>),
    /// Applying stopped half-way: the paths in `done` are written, each of them whole.
    #[error("stopped at `{path}` after {done} changes were written")]
    HalfApplied {
        path: String,
        done: usize,
        #[source]
        source: Box<Error>,
    },
}

impl Error {
    pub fn kind(&self) -> Kind {
        match self {
            Self::Missing(_) | Self::Damaged { .. } | Self::Io { .. } | Self::Sink(_) => Kind::Internal,
            Self::UnknownVersion { .. } => Kind::WrongState,
            Self::Source(_) | Self::Changed(_) => Kind::Unavailable,
            Self::NoDirectory(_) => Kind::NotFound,
            Self::NotADirectory(_) | Self::NotEmpty(_) | Self::Archive { .. } => Kind::Invalid,
            Self::Unreadable { .. } => Kind::Denied,
            Self::Limit { .. } => Kind::Exhausted,
            Self::Conflict(_) => Kind::Conflict,
            Self::HalfApplied { source, .. } => source.kind(),
        }
    }

    pub(super) fn io(doing: &'static str, path: &[u8], source: impl Into<io::Error>) -> Self {
        let source = source.into();
        let path = shown(path);
        if source.kind() == io::ErrorKind::PermissionDenied && matches!(doing, "read" | "list" | "enter") {
            return Self::Unreadable { path, source };
        }
        Self::Io { doing, path, source }
    }

    /// Names the path where content that was being stored came from.
    pub(super) fn at(self, path: &[u8]) -> Self {
        match self {
            Self::Source(source) => Self::io("read", path, source),
            Self::Limit { what, limit, path: _ } => Self::Limit {
                what,
                limit,
                path: shown(path),
            },
            other @ (Self::Missing(_)
            | Self::Damaged { .. }
            | Self::UnknownVersion { .. }
            | Self::Io { .. }
            | Self::Sink(_)
            | Self::NoDirectory(_)
            | Self::NotADirectory(_)
            | Self::NotEmpty(_)
            | Self::Unreadable { .. }
            | Self::Changed(_)
            | Self::Archive { .. }
            | Self::Conflict(_)
            | Self::HalfApplied { .. }) => other,
        }
    }
}
