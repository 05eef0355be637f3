//! Workspaces laid over a base: an overlay whose upper layer holds what one sandbox changes, so that a snapshot and a new
//! sandbox cost what changed and not what exists.
//!
//! Owns: the bases of a data directory, the mount that a sandbox gets, what is taken of it at a snapshot. Must not know:
//! sandboxes, and when they stand still.
//!
//! ```text
//!   DATA/bases/NAME ── idmapped, read-only ──▶ lower ┐
//!   difference to the revision wanted ── lay ─▶ upper ┴▶ DIR/files: what the sandbox works in
//!                                                │
//!                   frozen:  look  ◀─────────────┘ names, stamps, what changed
//!                   thawed:  keep ──▶ blobs, trees ──▶ Revision, durable
//! ```
//!
//! Why it is so: `docs/adr/0020-overlay-workspaces.md`. Read next: `site.rs`, which holds it together.

mod bases;
mod below;
mod idmap;
mod keep;
mod lay;
mod look;
mod mount;
mod site;

pub use bases::{Bases, MOST_BYTES};
pub use look::{Look, Reading};
pub use mount::{Ground, clear};
pub use site::{Kept, Site};

#[cfg(test)]
mod tests;

use super::error::Error;
use super::folder::Folder;
use super::index::Index;
use super::limits::Limits;
use super::snapshot::Report;
use super::trees::Trees;

/// Takes a whole directory, which is an upper layer with nothing below; durable before it returns.
pub(super) fn take(
    trees: &Trees,
    dir: &Folder,
    known: Option<&Index>,
    limits: Limits,
) -> Result<(Index, Report), Error> {
    let plan = look::Plan {
        is_overlay: false,
        reading: Reading::Now,
        known: known.cloned(),
        limits,
    };
    let looked = look::look(dir, trees.blobs.batch(), plan)?;
    let (root, report) = keep::keep(trees, dir, None, looked)?;
    Ok((Index::new(root), report))
}
