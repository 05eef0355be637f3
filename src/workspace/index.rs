//! What is known of a directory on this machine, so that the next look at it reads only what changed.
//!
//! An index is never needed for a right answer: without one, everything is read. It lives in memory, belongs to one
//! directory and one store, and is made by a snapshot, a materialise or a restore.

use std::collections::HashMap;
use std::sync::Arc;

use super::folder::{FileType, Meta};
use super::id::{BlobId, TreeId};
use super::trees::Revision;

/// What was seen in a directory, and which blobs it was; clones share it.
#[derive(Debug, Clone)]
pub struct Index {
    pub(super) root: Arc<Known>,
}

impl Index {
    pub(super) fn new(root: Known) -> Self {
        Self { root: Arc::new(root) }
    }

    /// The revision that the directory was at.
    pub fn revision(&self) -> Revision {
        Revision {
            tree: self.root.tree,
            times: self.root.times,
        }
    }
}

/// A directory as it was seen; items ascend by the bytes of their names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Known {
    pub tree: TreeId,
    pub times: Option<BlobId>,
    /// Which names below share an inode; of a root alone.
    pub links: Option<BlobId>,
    pub items: Vec<Item>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Item {
    pub name: Box<[u8]>,
    pub seen: Seen,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Seen {
    File {
        stamp: Stamp,
        blob: BlobId,
        attributes: Option<BlobId>,
    },
    Directory {
        mode: u16,
        mtime: i64,
        attributes: Option<BlobId>,
        inner: Known,
    },
    Symlink {
        mtime: i64,
        target: Vec<u8>,
    },
}

/// By what a file is taken for unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stamp {
    pub mode: u16,
    pub size: u64,
    pub mtime: i64,
    pub ctime: i64,
    pub inode: u64,
    /// Changed in the very tick in which it was read: it may change again and look the same, so it proves nothing.
    pub racy: bool,
}

impl Stamp {
    /// The stamp of a file seen as `meta`, by a look that began (or an own write that ended) at `tick`.
    pub fn new(meta: &Meta, tick: i64) -> Self {
        Self {
            mode: meta.mode,
            size: meta.size,
            mtime: meta.mtime,
            ctime: meta.ctime,
            inode: meta.inode,
            racy: meta.ctime >= tick,
        }
    }

    /// Whether `meta` is certainly the same content.
    pub fn covers(&self, meta: &Meta) -> bool {
        self.is_of(meta) && !self.racy
    }

    /// Whether `meta` looks as it did.
    pub fn is_of(&self, meta: &Meta) -> bool {
        let Self {
            mode,
            size,
            mtime,
            ctime,
            inode,
            racy: _,
        } = *self;
        let same = (mode, size, mtime, ctime, inode) == (meta.mode, meta.size, meta.mtime, meta.ctime, meta.inode);
        same && meta.file_type == FileType::File
    }
}

impl Known {
    pub fn get(&self, name: &[u8]) -> Option<&Seen> {
        let at = self.items.binary_search_by(|item| (*item.name).cmp(name)).ok()?;
        Some(&self.items[at].seen)
    }

    /// Brings the stamps of inodes up to date that were given further names after they had been looked at.
    pub fn restamp(&mut self, changed: &HashMap<u64, Meta>) {
        for item in &mut self.items {
            match &mut item.seen {
                Seen::File { stamp, .. } => {
                    if let Some(meta) = changed.get(&stamp.inode) {
                        *stamp = Stamp::new(meta, i64::MIN);
                    }
                }
                Seen::Directory { inner, .. } => inner.restamp(changed),
                Seen::Symlink { .. } => {}
            }
        }
    }

    /// Marks the files that changed at or after `tick` as racy, after own writes whose end was not yet known.
    pub fn settle(&mut self, tick: i64) {
        for item in &mut self.items {
            match &mut item.seen {
                Seen::File { stamp, .. } => stamp.racy = stamp.ctime >= tick,
                Seen::Directory { inner, .. } => inner.settle(tick),
                Seen::Symlink { .. } => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;

    use super::super::folder::{meta_of, tick};
    use super::*;

    fn meta() -> Meta {
        Meta {
            file_type: FileType::File,
            mode: 0o644,
            size: 5,
            mtime: 70,
            ctime: 100,
            device: 1,
            inode: 9,
            is_shared: false,
            uid: 0,
            gid: 0,
        }
    }

    #[test]
    fn a_file_is_unchanged_only_when_nothing_says_otherwise() {
        let stamp = Stamp::new(&meta(), 101);
        assert!(stamp.covers(&meta()));
        let others = [
            Meta {
                file_type: FileType::Symlink,
                ..meta()
            },
            Meta { mode: 0o645, ..meta() },
            Meta { size: 6, ..meta() },
            Meta { mtime: 71, ..meta() },
            Meta { ctime: 101, ..meta() },
            Meta { inode: 8, ..meta() },
        ];
        for other in others {
            assert!(!stamp.covers(&other), "{other:?}");
        }
        for tick in [100, 99] {
            assert!(
                !Stamp::new(&meta(), tick).covers(&meta()),
                "changed at 100, looked at {tick}"
            );
        }
    }

    #[test]
    fn settling_trusts_what_is_older_than_the_tick() {
        let seen = |ctime| Seen::File {
            stamp: Stamp::new(&Meta { ctime, ..meta() }, i64::MIN),
            blob: BlobId::from_bytes([0; 32]),
            attributes: None,
        };
        let item = |name: &[u8], seen| Item {
            name: name.into(),
            seen,
        };
        let known = |items| Known {
            tree: TreeId::from_bytes([0; 32]),
            times: None,
            links: None,
            items,
        };
        let inner = known(vec![item(b"new", seen(100)), item(b"old", seen(99))]);
        let mut root = known(vec![item(
            b"d",
            Seen::Directory {
                mode: 0o755,
                mtime: 0,
                attributes: None,
                inner,
            },
        )]);
        root.settle(100);
        let Some(Seen::Directory { inner, .. }) = root.get(b"d") else {
            panic!("no directory");
        };
        let racy = |name: &[u8]| match inner.get(name) {
            Some(Seen::File { stamp, .. }) => stamp.racy,
            other => panic!("{other:?}"),
        };
        assert_eq!((racy(b"new"), racy(b"old")), (true, false));
    }

    /// On a real file: two writes of one size in one tick, with the time set back as a build tool might.
    #[test]
    fn a_second_change_in_one_tick_is_never_taken_for_none() {
        let dir = tempfile::tempdir().unwrap();
        let mut file = fs::File::create(dir.path().join("f")).unwrap();
        for _ in 0..2000 {
            let looked = tick().unwrap();
            let stamp = Stamp::new(&meta_of(&file).unwrap(), looked);
            let modified = file.metadata().unwrap().modified().unwrap();
            file.write_all(b"x").unwrap();
            file.set_len(0).unwrap();
            file.set_modified(modified).unwrap();
            assert!(!stamp.covers(&meta_of(&file).unwrap()));
        }
    }
}
