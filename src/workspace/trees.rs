//! The handle on all workspaces of a store, and how a revision is named.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use serde::{Deserialize, Serialize};

use super::attributes::{self, Attributes};
use super::blobs::Blobs;
use super::error::Error;
use super::id::{BlobId, TreeId};
use super::links::{self, Links};
use super::times::{self, Times};
use super::tree::{self, Tree, Undecodable};

/// All trees of one store; cheap to clone. Each operation on it has a file of its own in this folder.
#[derive(Debug, Clone)]
pub struct Trees {
    pub(super) blobs: Blobs,
    /// The tree with nothing in it, once it is known to be on the disk.
    empty: Arc<OnceLock<TreeId>>,
}

/// A workspace as it was: its tree, which is its identity, and the times that go with it where they are known.
///
/// Compare trees, not revisions: two runs that did the same have one tree and different times.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Revision {
    pub tree: TreeId,
    /// The recorded modification times; without them everything dates from 2000-01-01.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub times: Option<BlobId>,
}

impl From<TreeId> for Revision {
    fn from(tree: TreeId) -> Self {
        Self { tree, times: None }
    }
}

impl Trees {
    /// Opens the trees kept in the data directory `data`; their blobs are in `data/blobs`.
    ///
    /// # Errors
    /// [`Error::Io`] when that cannot be made or opened.
    pub fn open(data: &Path) -> Result<Self, Error> {
        let blobs = Blobs::open(&data.join("blobs"))?;
        Ok(Self {
            blobs,
            empty: Arc::default(),
        })
    }

    pub fn blobs(&self) -> &Blobs {
        &self.blobs
    }

    /// Stores the tree with nothing in it, where a workspace from no source begins. Once: to make it durable takes a sync
    /// of the file system, and every new sandbox begins with it.
    ///
    /// # Errors
    /// [`Error::Io`] when the disk refuses.
    pub fn empty(&self) -> Result<TreeId, Error> {
        if let Some(stored) = self.empty.get() {
            return Ok(*stored);
        }
        let id = self.blobs.put(&Tree::default().encode())?;
        Ok(*self.empty.get_or_init(|| TreeId::from_bytes(*id.as_bytes())))
    }

    /// Reads one directory of a tree.
    ///
    /// # Errors
    /// [`Error::Missing`], [`Error::Damaged`], [`Error::UnknownVersion`].
    pub fn tree(&self, id: TreeId) -> Result<Tree, Error> {
        let bytes = self.blobs.get(id.blob())?;
        Tree::decode(&bytes).map_err(|e| undecodable(id.blob(), "tree", tree::FORMAT_VERSION, e))
    }

    /// Reads extended attributes; none have no object.
    pub(super) fn attributes(&self, id: Option<BlobId>) -> Result<Attributes, Error> {
        let Some(id) = id else {
            return Ok(Attributes::default());
        };
        let bytes = self.blobs.get(id)?;
        Attributes::decode(&bytes).map_err(|e| undecodable(id, "attributes", attributes::FORMAT_VERSION, e))
    }

    /// Reads which names share an inode.
    pub(super) fn links(&self, id: Option<BlobId>) -> Result<Links, Error> {
        let Some(id) = id else {
            return Ok(Links::default());
        };
        let bytes = self.blobs.get(id)?;
        Links::decode(&bytes).map_err(|e| undecodable(id, "links", links::FORMAT_VERSION, e))
    }

    /// Reads the times of `tree`'s entries.
    pub(super) fn times(&self, id: Option<BlobId>, tree: &Tree) -> Result<Times, Error> {
        let Some(id) = id else {
            return Ok(Times::unrecorded(tree));
        };
        let bytes = self.blobs.get(id)?;
        Times::decode(&bytes, tree).map_err(|e| undecodable(id, "times", times::FORMAT_VERSION, e))
    }
}

fn undecodable(id: BlobId, what: &'static str, known: u8, error: Undecodable) -> Error {
    match error {
        Undecodable::Version(found) => Error::UnknownVersion { id, what, found, known },
        Undecodable::Malformed(reason) => Error::Damaged {
            id,
            reason: format!("as {what}: {reason}"),
        },
    }
}
