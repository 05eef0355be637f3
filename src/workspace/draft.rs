//! A tree that is being put together in memory from names in any order.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry as Slot;

use super::batch::Batch;
use super::error::Error;
use super::id::{BlobId, TreeId};
use super::limits::Meter;
use super::links::Links;
use super::name::Name;
use super::times::{Time, Times, UNRECORDED};
use super::tree::{Entry, Node, Tree};
use super::trees::Revision;
use super::unarchive::Refusal;

/// A directory that is being put together.
#[derive(Debug)]
pub(super) struct Draft {
    mode: u16,
    mtime: i64,
    attributes: Option<BlobId>,
    content: BTreeMap<Name, Leaf>,
}

#[derive(Debug)]
pub(super) enum Leaf {
    File(DraftFile),
    Symlink { target: Vec<u8>, mtime: i64 },
    Directory(Draft),
}

#[derive(Debug, Clone, Copy)]
pub(super) struct DraftFile {
    pub mode: u16,
    pub size: u64,
    pub blob: BlobId,
    pub attributes: Option<BlobId>,
    pub mtime: i64,
}

impl Draft {
    pub fn new(mode: u16, mtime: i64) -> Self {
        Self {
            mode,
            mtime,
            attributes: None,
            content: BTreeMap::new(),
        }
    }

    pub fn with_attributes(self, attributes: Option<BlobId>) -> Self {
        Self { attributes, ..self }
    }

    /// Puts a leaf at a path, making the directories on the way. A file or link replaces a file or link that is there; a
    /// directory that is there keeps its content and takes the new one's mode.
    pub fn place(&mut self, path: &[Name], leaf: Leaf, meter: &mut Meter) -> Result<(), PlaceError> {
        let Some((name, parents)) = path.split_last() else {
            return match leaf {
                Leaf::Directory(_) => Ok(()),
                Leaf::File(_) | Leaf::Symlink { .. } => Err(PlaceError::Refused(Refusal::NoName)),
            };
        };
        let mut folder = self;
        for parent in parents {
            let made = || Leaf::Directory(Self::new(0o755, UNRECORDED));
            let slot = match folder.content.entry(parent.clone()) {
                Slot::Occupied(slot) => slot.into_mut(),
                Slot::Vacant(slot) => {
                    meter.entry(parent)?;
                    slot.insert(made())
                }
            };
            folder = match slot {
                Leaf::Directory(inner) => inner,
                Leaf::File(_) | Leaf::Symlink { .. } => return Err(PlaceError::Refused(Refusal::ThroughFile)),
            };
        }
        match (folder.content.get_mut(name), leaf) {
            (None, leaf) => {
                meter.entry(name)?;
                folder.content.insert(name.clone(), leaf);
            }
            (Some(Leaf::Directory(old)), Leaf::Directory(new)) => {
                (old.mode, old.mtime, old.attributes) = (new.mode, new.mtime, new.attributes);
            }
            (Some(Leaf::Directory(_)), Leaf::File(_) | Leaf::Symlink { .. })
            | (Some(Leaf::File(_) | Leaf::Symlink { .. }), Leaf::Directory(_)) => {
                return Err(PlaceError::Refused(Refusal::Contradiction));
            }
            (Some(old), leaf) => *old = leaf,
        }
        Ok(())
    }

    pub fn file(&self, path: &[Name]) -> Option<DraftFile> {
        let (name, parents) = path.split_last()?;
        let mut folder = self;
        for parent in parents {
            folder = match folder.content.get(parent)? {
                Leaf::Directory(inner) => inner,
                Leaf::File(_) | Leaf::Symlink { .. } => return None,
            };
        }
        match folder.content.get(name)? {
            Leaf::File(file) => Some(*file),
            Leaf::Symlink { .. } | Leaf::Directory(_) => None,
        }
    }

    /// Adds its trees and times to a batch, as a whole workspace in which some names share an inode.
    pub fn store(self, links: &Links, batch: &mut Batch) -> Result<Revision, Error> {
        let links = links.store(batch)?;
        self.store_folder(links, batch)
    }

    fn store_folder(self, links: Option<BlobId>, batch: &mut Batch) -> Result<Revision, Error> {
        let mut entries = Vec::with_capacity(self.content.len());
        let mut times = Vec::with_capacity(self.content.len());
        for (name, leaf) in self.content {
            let (node, mtime, inner) = match leaf {
                Leaf::File(DraftFile {
                    mode,
                    size,
                    blob,
                    attributes,
                    mtime,
                }) => {
                    let node = Node::File {
                        mode,
                        size,
                        blob,
                        attributes,
                    };
                    (node, mtime, None)
                }
                Leaf::Symlink { target, mtime } => (Node::Symlink { target }, mtime, None),
                Leaf::Directory(draft) => {
                    let (mode, mtime, attributes) = (draft.mode, draft.mtime, draft.attributes);
                    let Revision { tree, times } = draft.store_folder(None, batch)?;
                    (Node::Directory { mode, tree, attributes }, mtime, times)
                }
            };
            entries.push(Entry { name, node });
            times.push(Time { mtime, inner });
        }
        let tree = Tree::new(entries).expect("names are unique, modes and targets were checked when placed");
        let tree = batch.put(&tree.with_links(links).encode())?;
        let times = batch.put(&Times(times).encode())?;
        Ok(Revision {
            tree: TreeId::from_bytes(*tree.as_bytes()),
            times: Some(times),
        })
    }
}

/// Why a leaf has no place.
#[derive(Debug)]
pub(super) enum PlaceError {
    Refused(Refusal),
    Limit(Error),
}

impl From<Error> for PlaceError {
    fn from(error: Error) -> Self {
        Self::Limit(error)
    }
}
