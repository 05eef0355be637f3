//! What lies below an upper layer, as the store knows it: nobody has to look at the directory for that.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};

use super::super::error::Error;
use super::super::id::{BlobId, TreeId};
use super::super::name::join;
use super::super::times::{Time, Times};
use super::super::tree::{Node, Tree};
use super::super::trees::{Revision, Trees};

/// The files of a base: a revision without the names that share an inode with others.
#[derive(Debug, Clone)]
pub(super) struct Below {
    pub revision: Revision,
    /// Names that share an inode: they are in the upper layer, where links between files can be made and broken.
    pub absent: Arc<HashSet<Vec<u8>>>,
    seen: Arc<Mutex<Contents>>,
}

type Contents = HashMap<(TreeId, Option<BlobId>), Arc<Content>>;

/// One directory of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    pub tree: TreeId,
    pub times: Option<BlobId>,
    /// Where it lies below, which after a rename is not where it is seen.
    pub path: Vec<u8>,
}

#[derive(Debug, Default)]
pub(super) struct Content {
    pub tree: Tree,
    pub times: Times,
}

impl Content {
    pub fn of(trees: &Trees, tree: TreeId, times: Option<BlobId>) -> Result<Self, Error> {
        let tree = trees.tree(tree)?;
        let times = trees.times(times, &tree)?;
        Ok(Self { tree, times })
    }

    pub fn get(&self, name: &[u8]) -> Option<(&Node, &Time)> {
        let entries = self.tree.entries();
        let at = entries.binary_search_by(|entry| (*entry.name).cmp(name)).ok()?;
        Some((&entries[at].node, &self.times.0[at]))
    }

    pub fn iter(&self) -> impl Iterator<Item = (&super::super::tree::Entry, &Time)> {
        self.tree.entries().iter().zip(&self.times.0)
    }
}

impl Below {
    pub fn new(trees: &Trees, revision: Revision) -> Result<Self, Error> {
        let links = trees.tree(revision.tree)?.links();
        Ok(Self {
            revision,
            absent: Arc::new(trees.links(links)?.into_paths()),
            seen: Arc::default(),
        })
    }

    pub fn root(&self) -> Place {
        Place {
            tree: self.revision.tree,
            times: self.revision.times,
            path: Vec::new(),
        }
    }

    /// What the store says of a directory; read once.
    pub fn content(&self, trees: &Trees, place: &Place) -> Result<Arc<Content>, Error> {
        let key = (place.tree, place.times);
        let known = |seen: &Mutex<Contents>| {
            let seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
            seen.get(&key).cloned()
        };
        if let Some(content) = known(&self.seen) {
            return Ok(content);
        }
        let content = Arc::new(Content::of(trees, place.tree, place.times)?);
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(Arc::clone(seen.entry(key).or_insert(content)))
    }

    /// The directory `name` of one of its directories.
    pub fn inner(&self, trees: &Trees, place: &Place, name: &[u8]) -> Result<Option<Place>, Error> {
        let content = self.content(trees, place)?;
        Ok(match content.get(name) {
            Some((Node::Directory { tree, .. }, time)) => Some(Place {
                tree: *tree,
                times: time.inner,
                path: join(&place.path, name),
            }),
            Some((Node::File { .. } | Node::Symlink { .. }, _)) | None => None,
        })
    }

    /// The directory that an absolute path leads to. The path is overlayfs' own, and is followed in trees alone.
    pub fn at(&self, trees: &Trees, path: &[u8]) -> Result<Option<Place>, Error> {
        let mut place = self.root();
        for name in path.split(|byte| *byte == b'/').filter(|name| !name.is_empty()) {
            match self.inner(trees, &place, name)? {
                Some(inner) => place = inner,
                None => return Ok(None),
            }
        }
        Ok(Some(place))
    }
}
