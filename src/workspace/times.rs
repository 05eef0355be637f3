//! Modification times, kept beside a tree and apart from its identity.
//!
//! Build tools compare times, so bringing back a workspace without them could make a stale output look fresh. In the
//! identity they would make no two runs equal. So each tree can have a *times* object of the same shape, found by its own
//! address: whoever keeps a [`Revision`](super::Revision) keeps both, whoever compares workspaces compares trees.
//!
//! Format version 1, little-endian: `"EXM" version:u8 count:u32`, then for each entry of the tree in its order
//! `mtime:i64` (nanoseconds since the epoch) and, for a directory, the address of that directory's times.

use super::id::BlobId;
use super::tree::{Input, Node, Tree, Undecodable};

pub(super) const FORMAT_VERSION: u8 = 1;
const MAGIC: &[u8; 3] = b"EXM";

/// The time of what has none recorded: 2000-01-01T00:00:00Z, which every archive format can say.
pub(super) const UNRECORDED: i64 = 946_684_800 * 1_000_000_000;

/// The times of one directory's entries, in the order of its tree.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Times(pub Vec<Time>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Time {
    pub mtime: i64,
    /// The times below a directory.
    pub inner: Option<BlobId>,
}

impl Times {
    /// The times of a tree of which none were recorded.
    pub fn unrecorded(tree: &Tree) -> Self {
        let unrecorded = Time {
            mtime: UNRECORDED,
            inner: None,
        };
        Self(vec![unrecorded; tree.entries().len()])
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(8 + self.0.len() * 8);
        out.extend_from_slice(MAGIC);
        out.push(FORMAT_VERSION);
        out.extend_from_slice(&(self.0.len() as u32).to_le_bytes());
        for time in &self.0 {
            out.extend_from_slice(&time.mtime.to_le_bytes());
            if let Some(inner) = &time.inner {
                out.extend_from_slice(inner.as_bytes());
            }
        }
        out
    }

    /// Reads the times of `tree`.
    pub fn decode(bytes: &[u8], tree: &Tree) -> Result<Self, Undecodable> {
        let mut input = Input(bytes);
        input.header(MAGIC, FORMAT_VERSION)?;
        if input.u32()? as usize != tree.entries().len() {
            return Err(Undecodable::Malformed("times of another tree"));
        }
        let mut times = Vec::with_capacity(tree.entries().len());
        for entry in tree.entries() {
            let mtime = i64::from_le_bytes(input.array()?);
            let inner = match &entry.node {
                Node::Directory { .. } => Some(BlobId::from_bytes(input.array()?)),
                Node::File { .. } | Node::Symlink { .. } => None,
            };
            times.push(Time { mtime, inner });
        }
        input.end()?;
        Ok(Self(times))
    }
}
