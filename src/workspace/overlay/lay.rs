//! Laying: the difference of two revisions is written into the upper layer of an overlay, or into a layer of a base.
//!
//! What is below is never touched. A name that is not wanted is covered by a whiteout (a character device 0:0), a
//! directory of both holds what differs in it alone, and everything else is made anew. So this costs what differs.
//!
//! Names that share an inode are no part of a base: overlayfs would break their link at the first change. They are made in
//! the upper layer, always.

use std::collections::HashSet;
use std::io;

use nix::sys::stat::{Mode, SFlag, makedev, mknodat};

use super::super::error::Error;
use super::super::folder::Folder;
use super::super::index::{Item, Known, Seen};
use super::super::materialise::{Fill, Owner, ROOT_MODE};
use super::super::name::{join, push};
use super::super::times::{Time, UNRECORDED};
use super::super::tree::{Entry, Node};
use super::super::trees::{Revision, Trees};
use super::below::{Below, Content, Place};

/// What is done about names that share an inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Linked {
    /// In an upper layer.
    Made,
    /// In a layer of a base.
    LeftOut,
}

/// What was laid.
#[derive(Debug)]
pub(super) struct Laid {
    /// What is in the layer; trees and times are those of layer and base together.
    pub root: Known,
    /// Files, directories, links and whiteouts.
    pub entries: u64,
    pub bytes: u64,
}

/// Writes into the empty directory `folder` what makes `wanted` of what is below; `None` is nothing.
pub(super) fn lay(
    trees: &Trees,
    folder: &Folder,
    below: Option<&Below>,
    wanted: Revision,
    owner: Option<Owner>,
    linked: Linked,
) -> Result<Laid, Error> {
    let links = trees.tree(wanted.tree)?.links();
    let of_wanted = trees.links(links)?.into_paths();
    let of_below = below.iter().flat_map(|below| below.absent.iter());
    let above = of_wanted.iter().chain(of_below).flat_map(|path| above(path)).collect();
    let mut lay = Lay {
        fill: Fill::new(trees, owner, folder, wanted.tree)?,
        below,
        of_wanted,
        above,
        linked,
        entries: 0,
        bytes: 0,
    };
    let mut root = lay.folder(folder, below.map(Below::root).as_ref(), wanted)?;
    lay.fill.dress(folder, ROOT_MODE, UNRECORDED)?;
    lay.fill.settle(&mut root)?;
    let Lay { entries, bytes, .. } = lay;
    Ok(Laid { root, entries, bytes })
}

struct Lay<'a> {
    fill: Fill<'a>,
    below: Option<&'a Below>,
    /// Names that share an inode in what is wanted.
    of_wanted: HashSet<Vec<u8>>,
    /// Directories below which names share an inode, before or now.
    above: HashSet<Vec<u8>>,
    linked: Linked,
    entries: u64,
    bytes: u64,
}

impl Lay<'_> {
    /// Fills an empty folder; `under` is what of the base is seen through it.
    fn folder(&mut self, folder: &Folder, under: Option<&Place>, wanted: Revision) -> Result<Known, Error> {
        let Revision { tree, times } = wanted;
        let wanted = Content::of(self.fill.trees, tree, times)?;
        let under = match (self.below, under) {
            (Some(below), Some(place)) => Some((below, place, below.content(self.fill.trees, place)?)),
            (Some(_) | None, _) => None,
        };
        if let Some((below, place, content)) = &under {
            for (entry, _) in content.iter() {
                if below.absent.contains(&join(&place.path, &entry.name)) {
                    continue;
                }
                let is_wanted = wanted.tree.get(&entry.name).is_some() && !self.is_left_out(&entry.name);
                if !is_wanted {
                    self.cover(folder, &entry.name)?;
                }
            }
        }
        let mut items = Vec::new();
        for (entry, time) in wanted.iter() {
            if self.is_left_out(&entry.name) {
                continue;
            }
            let there = under.as_ref().and_then(|(below, place, content)| {
                let is_there = !below.absent.contains(&join(&place.path, &entry.name));
                content.get(&entry.name).filter(|_| is_there)
            });
            let before = self.fill.path.len();
            push(&mut self.fill.path, &entry.name);
            let stays = there == Some((&entry.node, time))
                && !self.above.contains(&self.fill.path)
                && !self.of_wanted.contains(&self.fill.path);
            if !stays {
                let inner = match (there, &under) {
                    (Some((Node::Directory { tree, .. }, time)), Some((_, place, _))) => Some(Place {
                        tree: *tree,
                        times: time.inner,
                        path: join(&place.path, &entry.name),
                    }),
                    (Some(_) | None, _) => None,
                };
                let seen = self.entry(folder, inner.as_ref(), entry, time)?;
                let name = (*entry.name).into();
                items.push(Item { name, seen });
            }
            self.fill.path.truncate(before);
        }
        Ok(Known {
            tree,
            times,
            links: None,
            items,
        })
    }

    fn entry(&mut self, folder: &Folder, inner: Option<&Place>, entry: &Entry, time: &Time) -> Result<Seen, Error> {
        self.entries += 1;
        match &entry.node {
            Node::Directory { mode, tree, attributes } => {
                let made = folder
                    .create_folder(&entry.name)
                    .map_err(|e| self.fill.failed("make", e))?;
                let wanted = Revision {
                    tree: *tree,
                    times: time.inner,
                };
                let (mode, mtime, attributes) = (*mode, time.mtime, *attributes);
                let inner = self.folder(&made, inner, wanted)?;
                self.fill.mark(&made, attributes)?;
                self.fill.dress(&made, mode, mtime)?;
                Ok(Seen::Directory {
                    mode,
                    mtime,
                    attributes,
                    inner,
                })
            }
            Node::File { size, .. } => {
                self.bytes += size;
                self.fill.entry(folder, &entry.name, &entry.node, time)
            }
            Node::Symlink { .. } => self.fill.entry(folder, &entry.name, &entry.node, time),
        }
    }

    fn is_left_out(&self, name: &[u8]) -> bool {
        self.linked == Linked::LeftOut && self.of_wanted.contains(&join(&self.fill.path, name))
    }

    /// Makes a name that hides one of below.
    fn cover(&mut self, folder: &Folder, name: &[u8]) -> Result<(), Error> {
        self.entries += 1;
        let made = mknodat(folder, name, SFlag::S_IFCHR, Mode::empty(), makedev(0, 0));
        made.map_err(|e| Error::io("cover", &join(&self.fill.path, name), io::Error::from(e)))
    }
}

/// The directories that a path goes through.
fn above(path: &[u8]) -> impl Iterator<Item = Vec<u8>> {
    let slashes = path.iter().enumerate().filter(|(_, byte)| **byte == b'/');
    slashes.map(|(at, _)| path[..at].to_vec())
}

/// How many names [`lay`] would make, as far as they are at most `most`; `None` for more.
pub(super) fn cost(trees: &Trees, below: Revision, wanted: Revision, most: u64) -> Result<Option<u64>, Error> {
    let linked = trees.links(trees.tree(wanted.tree)?.links())?.into_paths().len() as u64;
    let mut count = Count { trees, left: most };
    let is_within = count.take(linked) && count.folder(Some(below), wanted)?;
    Ok(is_within.then(|| most - count.left))
}

struct Count<'a> {
    trees: &'a Trees,
    left: u64,
}

impl Count<'_> {
    fn take(&mut self, entries: u64) -> bool {
        let left = self.left.checked_sub(entries);
        self.left = left.unwrap_or_default();
        left.is_some()
    }

    fn folder(&mut self, below: Option<Revision>, wanted: Revision) -> Result<bool, Error> {
        let below = match below {
            Some(below) if below == wanted => return Ok(true),
            Some(Revision { tree, times }) => Content::of(self.trees, tree, times)?,
            None => Content::default(),
        };
        let wanted = Content::of(self.trees, wanted.tree, wanted.times)?;
        let covered = below.iter().filter(|(entry, _)| wanted.tree.get(&entry.name).is_none());
        if !self.take(covered.count() as u64) {
            return Ok(false);
        }
        for (entry, time) in wanted.iter() {
            let there = below.get(&entry.name);
            if there == Some((&entry.node, time)) {
                continue;
            }
            if !self.take(1) {
                return Ok(false);
            }
            if let Node::Directory { tree, .. } = &entry.node {
                let of = |tree, time: &Time| Revision {
                    tree,
                    times: time.inner,
                };
                let there = match there {
                    Some((Node::Directory { tree, .. }, time)) => Some(of(*tree, time)),
                    Some((Node::File { .. } | Node::Symlink { .. }, _)) | None => None,
                };
                if !self.folder(there, of(*tree, time))? {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }
}
