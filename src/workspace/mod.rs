//! Workspaces: the files that outlive a sandbox, as content-addressed trees.
//!
//! Owns: blobs and trees (blake3), their store on disk, snapshots of a directory, materialising a tree, diffs, archives,
//! artifacts. Must not know: runs, sandboxes, tools. Directories that a guest could write are walked by descriptor
//! (`openat`, `O_NOFOLLOW`), never by path.
//!
//! All of it hangs on one handle, [`Trees`]; each operation has a file of its own:
//!
//! ```text
//!   directory ──snapshot──▶ Revision (tree + times) ──materialise──▶ fresh directory
//!   user's dir ──import───▶      │   │   │          ──restore──────▶ the same directory, differences only
//!   tar stream ──unarchive▶      │   │   └─archive──▶ tar stream
//!   user's dir ◀──apply── changes┘   └─patch──▶ text that `git apply` takes
//! ```
//!
//! Everything here blocks (disk, hashing); async callers go through [`Pool`].
//!
//! Read next: `tree.rs` for what has an identity, `times.rs` for what has none, `blobs.rs` and `batch.rs` for what is
//! durable when, `folder.rs` for how the host touches names that it does not trust.

mod apply;
mod archive;
mod artifact;
mod attributes;
mod batch;
mod blobs;
mod clearing;
mod collect;
mod diff;
mod draft;
mod error;
mod examine;
mod folder;
#[cfg(test)]
mod golden_test;
#[cfg(test)]
mod history_test;
mod id;
mod import;
mod index;
mod limits;
mod links;
mod materialise;
mod name;
pub mod overlay;
mod packs;
mod patch;
mod pool;
mod restore;
mod snapshot;
mod sparse;
#[cfg(test)]
mod testing;
mod times;
mod tree;
mod trees;
mod unarchive;
mod unpack;
mod unzip;

pub use apply::{Applied, Conflict, Reason};
pub use batch::Batch;
pub use blobs::{Blobs, Reader};
pub use clearing::remove_all;
pub use collect::{Collected, Sweep};
pub use diff::{Change, ChangeKind};
pub use error::Error;
pub use examine::{Examined, Fault, Hurt};
pub use folder::Folder;
pub use id::{BlobId, InvalidId, TreeId};
pub use index::Index;
pub use limits::Limits;
pub use materialise::Owner;
pub use name::{InvalidName, Name};
pub use patch::{Patch, PatchLimits, Unshown};
pub use pool::{Pool, pack};
pub use snapshot::{MOST_NAMED, Report, Skipped, Snapshot, SpecialFile};
pub use tree::{Entry, Node, Tree};
pub use trees::{Revision, Trees};
pub use unarchive::Refusal;
