//! Keeping: what a look took becomes a tree, durably, while the sandbox goes on.
//!
//! A directory of the new tree is the directory below with what the upper layer says put over it. Nothing of the base is
//! walked: a subtree without changes is named by its id.

use std::collections::HashMap;
use std::io;

use super::super::batch::Batch;
use super::super::error::Error;
use super::super::folder::{Folder, Meta, meta_of};
use super::super::id::{BlobId, TreeId};
use super::super::index::{Item, Known, Seen, Stamp};
use super::super::links::Links;
use super::super::name::{Name, join, push, shown};
use super::super::snapshot::Report;
use super::super::times::{Time, Times};
use super::super::tree::{Entry, Tree};
use super::super::trees::Trees;
use super::below::{Below, Place};
use super::look::{Content, Folded, IN_MEMORY, Key, LONGEST_LIST, Look, Met, attributes, key, present, whole};

/// Stores a look, durably before it returns. `upper` is the directory that was looked at.
///
/// # Errors
/// [`Error::Changed`] for a file that was to be read later and is not as it was; [`Error::Io`].
pub(super) fn keep(trees: &Trees, upper: &Folder, below: Option<&Below>, look: Look) -> Result<(Known, Report), Error> {
    let Look {
        root,
        known,
        tick,
        batch,
        report,
    } = look;
    let mut keep = Keep {
        trees,
        below,
        batch,
        tick,
        path: Vec::new(),
        shared: HashMap::new(),
        list: vec![0; LONGEST_LIST],
        report,
    };
    let open = root.has_unread.then_some(upper);
    let place = below.map(Below::root);
    let root = keep.folder(root, open, known.as_ref().map(|known| &*known.root), place, 0)?;
    keep.batch.commit()?;
    Ok((root, keep.report))
}

struct Keep<'a> {
    trees: &'a Trees,
    below: Option<&'a Below>,
    batch: Batch,
    tick: i64,
    path: Vec<u8>,
    /// Files with several names.
    shared: HashMap<Key, Shared>,
    list: Vec<u8>,
    report: Report,
}

/// One file with several names.
struct Shared {
    seen: Seen,
    paths: Vec<Vec<u8>>,
}

impl Keep<'_> {
    fn folder(
        &mut self,
        folded: Folded,
        open: Option<&Folder>,
        known: Option<&Known>,
        place: Option<Place>,
        depth: u32,
    ) -> Result<Known, Error> {
        let mut items = Vec::with_capacity(folded.names.len());
        let mut removed = Vec::new();
        for (name, met) in folded.names {
            let before = self.path.len();
            push(&mut self.path, &name);
            let of_known = known.and_then(|known| known.get(&name));
            let seen = self.name(&name, met, open, of_known, place.as_ref(), depth)?;
            self.path.truncate(before);
            match seen {
                Some(seen) => items.push(Item { name, seen }),
                None => removed.push(name),
            }
        }
        let links = if depth == 0 { self.links()? } else { None };
        self.store(items, &removed, known, place, links)
    }

    fn name(
        &mut self,
        name: &[u8],
        met: Met,
        open: Option<&Folder>,
        known: Option<&Seen>,
        place: Option<&Place>,
        depth: u32,
    ) -> Result<Option<Seen>, Error> {
        match met {
            Met::Removed => Ok(None),
            Met::Symlink { mtime, target } => Ok(Some(Seen::Symlink { mtime, target })),
            Met::File { meta, content } => self.file(name, meta, content, open),
            Met::Directory {
                mode,
                mtime,
                attributes,
                inner,
            } => {
                let place = match (self.below, place) {
                    (Some(below), Some(place)) => self.through(below, place, name, &inner)?,
                    (Some(_) | None, _) => None,
                };
                let known = match known {
                    Some(Seen::Directory { inner, .. }) => Some(inner),
                    Some(Seen::File { .. } | Seen::Symlink { .. }) | None => None,
                };
                let open = match open.filter(|_| inner.has_unread) {
                    Some(folder) => Some(self.still(folder.enter(name), "enter")?),
                    None => None,
                };
                let inner = self.folder(inner, open.as_ref(), known, place, depth + 1)?;
                Ok(Some(Seen::Directory {
                    mode,
                    mtime,
                    attributes,
                    inner,
                }))
            }
        }
    }

    /// The directory below that shows through the directory `name`.
    fn through(&self, below: &Below, place: &Place, name: &[u8], inner: &Folded) -> Result<Option<Place>, Error> {
        if inner.is_opaque {
            return Ok(None);
        }
        match inner.redirect.as_deref() {
            Some(path) if path.starts_with(b"/") => below.at(self.trees, path),
            Some(name) => below.inner(self.trees, place, name),
            None => below.inner(self.trees, place, name),
        }
    }

    fn file(
        &mut self,
        name: &[u8],
        meta: Meta,
        content: Content,
        open: Option<&Folder>,
    ) -> Result<Option<Seen>, Error> {
        let key = key(&meta);
        let (blob, size, attributes) = match content {
            Content::Known { blob, attributes } => (blob, meta.size, attributes),
            Content::Held { bytes, attributes } => {
                let blob = self.batch.put(&bytes)?;
                (blob, bytes.len() as u64, attributes)
            }
            Content::Stored { blob, size, attributes } => (blob, size, attributes),
            Content::Twin => match self.shared.get(&key) {
                Some(Shared {
                    seen: Seen::File { blob, attributes, .. },
                    ..
                }) => (*blob, meta.size, *attributes),
                // Its first name was met, and had no place in the tree.
                Some(_) | None => return Ok(None),
            },
            Content::Unread => self.read(name, &meta, open)?,
        };
        let seen = Seen::File {
            stamp: Stamp::new(&Meta { size, ..meta }, self.tick),
            blob,
            attributes,
        };
        if meta.is_shared {
            let shared = self.shared.entry(key).or_insert_with(|| Shared {
                seen: seen.clone(),
                paths: Vec::new(),
            });
            shared.paths.push(self.path.clone());
        }
        Ok(Some(seen))
    }

    /// Reads a file that has to be still as it was looked at.
    fn read(
        &mut self,
        name: &[u8],
        meta: &Meta,
        open: Option<&Folder>,
    ) -> Result<(BlobId, u64, Option<BlobId>), Error> {
        let folder = open.ok_or_else(|| self.changed())?;
        let (file, before) = self.still(folder.open_file(name), "open")?;
        if before != *meta {
            return Err(self.changed());
        }
        let failed = |e| Error::io("read", &self.path, e);
        let (found, _) = attributes(&file, &mut self.list).map_err(failed)?;
        let (blob, size) = match meta.size <= IN_MEMORY {
            true => {
                let bytes = whole(&file, meta.size, meta.size).map_err(failed)?;
                (self.batch.put(&bytes)?, bytes.len() as u64)
            }
            false => {
                let stored = self.batch.put_reader(&mut &file, meta.size);
                stored.map_err(|error| match error {
                    // It grew.
                    Error::Limit { .. } => self.changed(),
                    error => error.at(&self.path),
                })?
            }
        };
        let after = meta_of(&file).map_err(|e| Error::io("look at", &self.path, e))?;
        if after != *meta || size != meta.size {
            return Err(self.changed());
        }
        self.report.read_files += 1;
        self.report.read_bytes += size;
        let attributes = match found.encoded() {
            Some(bytes) => Some(self.batch.put(&bytes)?),
            None => None,
        };
        Ok((blob, size, attributes))
    }

    /// What has to be there as it was.
    fn still<T>(&self, result: io::Result<T>, doing: &'static str) -> Result<T, Error> {
        match present(result) {
            Ok(Some(value)) => Ok(value),
            Ok(None) => Err(self.changed()),
            Err(error) => Err(Error::io(doing, &self.path, error)),
        }
    }

    fn changed(&self) -> Error {
        Error::Changed(shown(&self.path))
    }

    /// Stores which names share an inode, once all have been met.
    fn links(&mut self) -> Result<Option<BlobId>, Error> {
        let groups = std::mem::take(&mut self.shared);
        Links::new(groups.into_values().map(|shared| shared.paths)).store(&mut self.batch)
    }

    /// Puts the items of a directory over what shows through it.
    fn store(
        &mut self,
        items: Vec<Item>,
        removed: &[Box<[u8]>],
        known: Option<&Known>,
        place: Option<Place>,
        links: Option<BlobId>,
    ) -> Result<Known, Error> {
        let mut all: Vec<(Entry, Time)> = Vec::with_capacity(items.len());
        if let (Some(below), Some(place)) = (self.below, &place) {
            let content = below.content(self.trees, place)?;
            let is_covered = |name: &[u8]| {
                items.binary_search_by(|item| (*item.name).cmp(name)).is_ok()
                    || removed.binary_search_by(|removed| (**removed).cmp(name)).is_ok()
            };
            let shows = |entry: &Entry| {
                !is_covered(&entry.name)
                    && (below.absent.is_empty() || !below.absent.contains(&join(&place.path, &entry.name)))
            };
            let through = content.iter().filter(|(entry, _)| shows(entry));
            all.extend(through.map(|(entry, time)| (entry.clone(), *time)));
        }
        for Item { name, seen } in &items {
            let (node, time) = seen.split();
            let name = Name::new(name).map_err(|e| {
                let invalid = io::Error::new(io::ErrorKind::InvalidFilename, e);
                Error::io("keep a name in", &self.path, invalid)
            })?;
            all.push((Entry { name, node }, time));
        }
        all.sort_unstable_by(|(a, _), (b, _)| a.name.cmp(&b.name));
        let (entries, times): (Vec<Entry>, Vec<Time>) = all.into_iter().unzip();
        let unsound = || Error::io("keep", &self.path, io::Error::from(io::ErrorKind::InvalidData));
        let tree = Tree::new(entries).ok_or_else(unsound)?.with_links(links);
        let tree = self.put(&tree.encode(), known.map(|known| known.tree.blob()))?;
        let times = self.put(&Times(times).encode(), known.and_then(|known| known.times))?;
        Ok(Known {
            tree: TreeId::from_bytes(*tree.as_bytes()),
            times: Some(times),
            links,
            items,
        })
    }

    /// Stores what is not stored since the last look.
    fn put(&mut self, bytes: &[u8], known: Option<BlobId>) -> Result<BlobId, Error> {
        let id = BlobId::from_bytes(*blake3::hash(bytes).as_bytes());
        match known == Some(id) {
            true => Ok(id),
            false => self.batch.put(bytes),
        }
    }
}
