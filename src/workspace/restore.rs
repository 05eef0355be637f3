//! Restoring: a materialised directory is brought to a revision by touching only what differs.
//!
//! This rolls a half-done step back. No process may be at work in the directory (the sandbox is gone or frozen); what it
//! left is not trusted: all is by descriptor, and a file is kept only when the index proves it unchanged. A wholly fresh
//! directory is always a way out instead.

use std::collections::HashSet;

use super::clearing;
use super::error::Error;
use super::folder::{FileType, Folder, Meta, meta_of};
use super::id::{BlobId, TreeId};
use super::index::{Index, Item, Known, Seen, Stamp};
use super::limits::Limits;
use super::materialise::{Fill, Owner, ROOT_MODE};
use super::name::{push, shown};
use super::times::{Time, UNRECORDED};
use super::tree::{Entry, Node};
use super::trees::{Revision, Trees};

impl Trees {
    /// Brings `dir`, last seen as `index`, to a revision. `limits` bounds what somebody may have left in it.
    ///
    /// # Errors
    /// As [`Trees::materialise`], and [`Error::Limit`] for left-overs beyond `limits`. After an error the directory is in
    /// between: restore again or make a fresh one.
    pub fn restore(
        &self,
        dir: &Folder,
        index: &Index,
        revision: impl Into<Revision>,
        owner: Option<Owner>,
        limits: Limits,
    ) -> Result<Index, Error> {
        let revision = revision.into();
        let fill = Fill::new(self, owner, dir, revision.tree)?;
        let keeps_links = fill.links == index.root.links;
        let mut changed = self.links(fill.links)?.into_paths();
        changed.extend(self.links(index.root.links)?.into_paths());
        let relinked = if keeps_links { HashSet::new() } else { changed };
        let mut restore = Restore { fill, limits, relinked };
        let mut root = restore.folder(dir, Some(&*index.root), revision.tree, revision.times)?;
        restore.fill.dress(dir, ROOT_MODE, UNRECORDED)?;
        restore.fill.settle(&mut root)?;
        Ok(Index::new(root))
    }
}

struct Restore<'a> {
    fill: Fill<'a>,
    limits: Limits,
    /// Names that share their inode with others than before: their files are made anew.
    relinked: HashSet<Vec<u8>>,
}

impl Restore<'_> {
    fn folder(
        &mut self,
        folder: &Folder,
        known: Option<&Known>,
        tree: TreeId,
        times: Option<BlobId>,
    ) -> Result<Known, Error> {
        let wanted = self.fill.trees.tree(tree)?;
        let recorded = self.fill.trees.times(times, &wanted)?;
        let listed = folder
            .names(self.limits.entries)
            .map_err(|e| self.fill.failed("list", e))?;
        let names = listed.ok_or_else(|| Error::Limit {
            what: "entries",
            limit: self.limits.entries,
            path: shown(&self.fill.path),
        })?;
        for name in names.iter().filter(|name| wanted.get(name).is_none()) {
            clearing::remove(folder, name, &mut self.fill.path)?;
        }
        let mut items = Vec::with_capacity(wanted.entries().len());
        for (entry, time) in wanted.entries().iter().zip(&recorded.0) {
            let before = self.fill.path.len();
            push(&mut self.fill.path, &entry.name);
            let known = known.and_then(|known| known.get(&entry.name));
            let seen = self.entry(folder, known, entry, time)?;
            self.fill.path.truncate(before);
            let name = (*entry.name).into();
            items.push(Item { name, seen });
        }
        Ok(Known {
            tree,
            times,
            links: None,
            items,
        })
    }

    fn entry(&mut self, folder: &Folder, known: Option<&Seen>, entry: &Entry, time: &Time) -> Result<Seen, Error> {
        let name = &entry.name;
        if let Some(meta) = folder.look(name).map_err(|e| self.fill.failed("look at", e))? {
            if let Some(seen) = self.keep(folder, known, entry, time, &meta)? {
                return Ok(seen);
            }
            // The path has the name already; removing appends it.
            let whole = self.fill.path.clone();
            self.fill
                .path
                .truncate(whole.len().saturating_sub(name.len()).saturating_sub(1));
            clearing::remove(folder, name, &mut self.fill.path)?;
            self.fill.path = whole;
        }
        self.fill.entry(folder, name, &entry.node, time)
    }

    /// Keeps what is there, put right where that is possible; `None` when it must be made anew.
    fn keep(
        &mut self,
        folder: &Folder,
        known: Option<&Seen>,
        entry: &Entry,
        time: &Time,
        meta: &Meta,
    ) -> Result<Option<Seen>, Error> {
        let (name, mtime) = (&entry.name, time.mtime);
        let owned = self.fill.owner.is_none_or(|o| (o.uid, o.gid) == (meta.uid, meta.gid));
        match &entry.node {
            Node::File {
                mode, blob, attributes, ..
            } => {
                let Some(Seen::File {
                    stamp,
                    blob: was,
                    attributes: had,
                }) = known
                else {
                    return Ok(None);
                };
                let alike = (was, stamp.mode, had) == (blob, *mode, attributes);
                if !(owned && stamp.covers(meta) && alike)
                    || self.relinked.contains(&self.fill.path)
                    || !self.fill.may_stay(meta)
                {
                    return Ok(None);
                }
                let stamp = if meta.mtime == mtime {
                    *stamp
                } else {
                    folder.set_mtime(name, mtime).map_err(|e| self.fill.failed("date", e))?;
                    let meta = folder.lstat(name).map_err(|e| self.fill.failed("look at", e))?;
                    Stamp::new(&meta, i64::MIN)
                };
                let seen = Seen::File {
                    stamp,
                    blob: *blob,
                    attributes: *attributes,
                };
                self.fill.met(&entry.node, &seen);
                Ok(Some(seen))
            }
            Node::Directory { mode, tree, attributes } => {
                if meta.file_type != FileType::Directory {
                    return Ok(None);
                }
                let inside = folder.enter(name).map_err(|e| self.fill.failed("enter", e))?;
                let known = match known {
                    Some(Seen::Directory { inner, .. }) => Some(inner),
                    Some(Seen::File { .. } | Seen::Symlink { .. }) | None => None,
                };
                let inner = self.folder(&inside, known, *tree, time.inner)?;
                let wanted = self.fill.trees.attributes(*attributes)?;
                wanted
                    .set(&inside)
                    .map_err(|e| self.fill.failed("set attributes of", e))?;
                let now = meta_of(&inside).map_err(|e| self.fill.failed("look at", e))?;
                if !(owned && now.mode == *mode && now.mtime == mtime) {
                    self.fill.dress(&inside, *mode, mtime)?;
                }
                Ok(Some(Seen::Directory {
                    mode: *mode,
                    mtime,
                    attributes: *attributes,
                    inner,
                }))
            }
            Node::Symlink { target } => {
                let is_link = meta.file_type == FileType::Symlink;
                if !(is_link && owned && folder.read_link(name).is_ok_and(|found| found == *target)) {
                    return Ok(None);
                }
                if meta.mtime != mtime {
                    folder.set_mtime(name, mtime).map_err(|e| self.fill.failed("date", e))?;
                }
                let target = target.clone();
                Ok(Some(Seen::Symlink { mtime, target }))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt;

    use proptest::prelude::*;

    use super::super::testing::{Bench, cases, everything, past_this_tick, plan, rebuild, snapshot};
    use super::*;

    proptest! {
        #![proptest_config(cases(24))]

        /// A half-done step is rolled back (`before` again), or the directory moves on to another tree.
        #[test]
        fn a_restored_directory_equals_a_fresh_one(before in plan(), mess in plan(), other in plan()) {
            let bench = Bench::new();
            let start = snapshot(&bench.trees, &bench.made("start", &before), None).revision;
            let aim = snapshot(&bench.trees, &bench.made("aim", &other), None).revision;
            let dir = bench.dir.path().join("dir");
            let index = bench.trees.materialise(start, &dir, None).unwrap();
            for wanted in [start, aim, Revision::from(aim.tree)] {
                rebuild(&dir, &before, &mess);
                let folder = Folder::open(&dir).unwrap();
                let restored = bench.trees.restore(&folder, &index, wanted, None, Limits::default()).unwrap();
                prop_assert_eq!(restored.revision(), wanted);

                let fresh = tempfile::tempdir_in(bench.dir.path()).unwrap();
                bench.trees.materialise(wanted, fresh.path(), None).unwrap();
                prop_assert_eq!(everything(&dir), everything(fresh.path()));
                prop_assert_eq!(snapshot(&bench.trees, &dir, Some(&restored)).revision.tree, wanted.tree);
                // Back to where the next round begins.
                fs::remove_dir_all(&dir).unwrap();
                bench.trees.materialise(start, &dir, None).unwrap();
            }
        }
    }

    #[test]
    fn what_did_not_change_is_not_written_again() {
        let bench = Bench::new();
        let start = bench.made("start", &[].into());
        for name in ["kept", "edited"] {
            fs::write(start.join(name), name).unwrap();
        }
        let revision = snapshot(&bench.trees, &start, None).revision;
        let dir = bench.dir.path().join("dir");
        let index = bench.trees.materialise(revision, &dir, None).unwrap();
        past_this_tick();
        // A look after the tick, for files of the tick of their making are never trusted.
        let index = snapshot(&bench.trees, &dir, Some(&index)).index;
        let inode = |name: &str| fs::metadata(dir.join(name)).unwrap().ino();
        let kept = inode("kept");
        fs::write(dir.join("edited"), "EDITED").unwrap();
        fs::hard_link(dir.join("edited"), dir.join("left-over")).unwrap();
        let folder = Folder::open(&dir).unwrap();
        bench
            .trees
            .restore(&folder, &index, revision, None, Limits::default())
            .unwrap();
        assert_eq!(inode("kept"), kept);
        assert_eq!(fs::read_to_string(dir.join("edited")).unwrap(), "edited");
        assert!(!dir.join("left-over").exists());
    }

    #[test]
    fn a_link_in_the_way_is_removed_not_followed() {
        let bench = Bench::new();
        let start = bench.made("start", &[].into());
        fs::create_dir(start.join("d")).unwrap();
        fs::write(start.join("d/file"), "guest").unwrap();
        let revision = snapshot(&bench.trees, &start, None).revision;
        let outside = bench.made("outside", &[].into());
        fs::write(outside.join("precious"), "host").unwrap();
        let dir = bench.dir.path().join("dir");
        let index = bench.trees.materialise(revision, &dir, None).unwrap();
        fs::remove_dir_all(dir.join("d")).unwrap();
        std::os::unix::fs::symlink(&outside, dir.join("d")).unwrap();
        std::os::unix::fs::symlink(&outside, dir.join("extra")).unwrap();
        let before = everything(&outside);
        let folder = Folder::open(&dir).unwrap();
        bench
            .trees
            .restore(&folder, &index, revision, None, Limits::default())
            .unwrap();
        assert_eq!(everything(&outside), before);
        assert_eq!(everything(&dir), everything(&start));
    }
}
