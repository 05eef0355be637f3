//! Materialising: a tree becomes a fresh directory.
//!
//! The directory's parent must be the host's own, closed to guests; what is below is made by descriptor all the same.
//! Runs of zeros become holes (`sparse.rs`). Nothing is synced: the store has it.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::clearing;
use super::error::Error;
use super::folder::{Folder, Meta, dress, meta_of, tick};
use super::id::{BlobId, TreeId};
use super::index::{Index, Item, Known, Seen, Stamp};
use super::name::push;
use super::sparse::Sparse;
use super::times::{Time, UNRECORDED};
use super::tree::Node;
use super::trees::{Revision, Trees};

/// To whom all files of a directory belong, as the host counts users.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    pub uid: u32,
    pub gid: u32,
}

/// The root of a workspace has no entry anywhere, so its mode is always this.
pub(super) const ROOT_MODE: u16 = 0o755;

impl Trees {
    /// Writes a revision into the directory `into`, which must be absent or empty. Without an owner, files belong to
    /// whoever runs this.
    ///
    /// # Errors
    /// [`Error::NotEmpty`]; [`Error::Missing`] or [`Error::Damaged`] for what the store cannot give; [`Error::Io`].
    /// After an error the directory is as it was.
    pub fn materialise(
        &self,
        revision: impl Into<Revision>,
        into: &Path,
        owner: Option<Owner>,
    ) -> Result<Index, Error> {
        let revision = revision.into();
        let shown = into.as_os_str().as_bytes();
        let made = match fs::create_dir(into) {
            Ok(()) => true,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
            Err(error) => return Err(Error::io("make", shown, error)),
        };
        let folder = Folder::open(into).map_err(|e| Error::io("open", shown, e))?;
        let present = folder.names(u64::MAX).map_err(|e| Error::io("list", shown, e))?;
        if present.is_none_or(|names| !names.is_empty()) {
            return Err(Error::NotEmpty(into.display().to_string()));
        }
        let filled = Fill::new(self, owner, &folder, revision.tree).and_then(|mut fill| fill.root(&folder, revision));
        match filled {
            Ok(index) => Ok(index),
            Err(error) => {
                // Best effort: the first error is the one that matters, and the caller sees that the directory is bad.
                if made {
                    let _ = clearing::remove_all(into);
                } else {
                    for name in folder.names(u64::MAX).ok().flatten().unwrap_or_default() {
                        let _ = clearing::remove(&folder, &name, &mut Vec::new());
                    }
                }
                Err(error)
            }
        }
    }
}

/// Writes nodes of trees into folders.
pub(super) struct Fill<'a> {
    pub trees: &'a Trees,
    pub owner: Option<Owner>,
    /// Where it is, from the root.
    pub path: Vec<u8>,
    buffer: Vec<u8>,
    root: Folder,
    pub links: Option<BlobId>,
    /// The group of each path that shares its inode with others.
    groups: HashMap<Vec<u8>, usize>,
    /// What of each group is there already.
    first: HashMap<usize, First>,
    /// Inodes that were given another name, as they then were.
    relinked: HashMap<u64, Meta>,
}

/// The first name of a file that has several.
struct First {
    path: Vec<u8>,
    node: Node,
    seen: Seen,
}

impl<'a> Fill<'a> {
    /// For filling `root` with the workspace `tree`.
    pub fn new(trees: &'a Trees, owner: Option<Owner>, root: &Folder, tree: TreeId) -> Result<Self, Error> {
        let links = trees.tree(tree)?.links();
        let recorded = trees.links(links)?;
        let groups = recorded.by_path().into_iter();
        let root = root.try_clone().map_err(|e| Error::io("open", b"", e))?;
        Ok(Self {
            trees,
            owner,
            path: Vec::new(),
            buffer: vec![0; 256 << 10],
            root,
            links,
            groups: groups.map(|(path, group)| (path.to_vec(), group)).collect(),
            first: HashMap::new(),
            relinked: HashMap::new(),
        })
    }

    fn root(&mut self, folder: &Folder, revision: Revision) -> Result<Index, Error> {
        let mut root = self.folder(folder, revision.tree, revision.times)?;
        self.dress(folder, ROOT_MODE, UNRECORDED)?;
        self.settle(&mut root)?;
        Ok(Index::new(root))
    }

    /// Ends the making of a whole workspace.
    pub fn settle(&self, root: &mut Known) -> Result<(), Error> {
        root.links = self.links;
        if !self.relinked.is_empty() {
            root.restamp(&self.relinked);
        }
        root.settle(tick().map_err(|e| self.failed("date", e))?);
        Ok(())
    }

    /// Fills an empty folder.
    pub fn folder(&mut self, folder: &Folder, tree: TreeId, times: Option<BlobId>) -> Result<Known, Error> {
        let content = self.trees.tree(tree)?;
        let recorded = self.trees.times(times, &content)?;
        let mut items = Vec::with_capacity(content.entries().len());
        for (entry, time) in content.entries().iter().zip(&recorded.0) {
            let before = self.path.len();
            push(&mut self.path, &entry.name);
            let seen = self.entry(folder, &entry.name, &entry.node, time)?;
            self.path.truncate(before);
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

    /// Notes that the name it is at is there; if it is the first of its group, further ones will be linked to it.
    pub fn met(&mut self, node: &Node, seen: &Seen) {
        if let Some(group) = self.groups.get(&self.path) {
            let first = || First {
                path: self.path.clone(),
                node: node.clone(),
                seen: seen.clone(),
            };
            self.first.entry(*group).or_insert_with(first);
        }
    }

    /// Whether the file at hand may stay, as far as its other names are concerned.
    pub fn may_stay(&self, meta: &Meta) -> bool {
        let first = self.groups.get(&self.path).and_then(|group| self.first.get(group));
        match first.map(|first| &first.seen) {
            Some(Seen::File { stamp, .. }) => stamp.inode == meta.inode,
            Some(Seen::Directory { .. } | Seen::Symlink { .. }) | None => true,
        }
    }

    /// Makes a name of a file that is there under another; `None` when there is no such file.
    fn link(&mut self, folder: &Folder, name: &[u8], node: &Node) -> Result<Option<Seen>, Error> {
        let first = self.groups.get(&self.path).and_then(|group| self.first.get(group));
        let Some(first) = first.filter(|first| first.node == *node) else {
            return Ok(None);
        };
        let linked = || {
            let (at, from) = self.root.parent_of(&first.path)?;
            folder.create_link(name, &at, from)?;
            folder.lstat(name)
        };
        let meta = linked().map_err(|e| self.failed("link", e))?;
        let seen = first.seen.clone();
        self.relinked.insert(meta.inode, meta);
        Ok(Some(seen))
    }

    /// Makes one name, which must not be there.
    pub fn entry(&mut self, folder: &Folder, name: &[u8], node: &Node, time: &Time) -> Result<Seen, Error> {
        let mtime = time.mtime;
        match node {
            Node::File {
                mode, blob, attributes, ..
            } => {
                if let Some(seen) = self.link(folder, name, node)? {
                    return Ok(seen);
                }
                let mut file = folder.create_file(name).map_err(|e| self.failed("make", e))?;
                self.pour(*blob, &mut file)?;
                self.mark(&file, *attributes)?;
                self.dress(&file, *mode, mtime)?;
                let meta = meta_of(&file).map_err(|e| self.failed("look at", e))?;
                let seen = Seen::File {
                    stamp: Stamp::new(&meta, i64::MIN),
                    blob: *blob,
                    attributes: *attributes,
                };
                self.met(node, &seen);
                Ok(seen)
            }
            Node::Directory { mode, tree, attributes } => {
                let made = folder.create_folder(name).map_err(|e| self.failed("make", e))?;
                let inner = self.folder(&made, *tree, time.inner)?;
                self.mark(&made, *attributes)?;
                self.dress(&made, *mode, mtime)?;
                Ok(Seen::Directory {
                    mode: *mode,
                    mtime,
                    attributes: *attributes,
                    inner,
                })
            }
            Node::Symlink { target } => {
                folder
                    .create_symlink(name, target)
                    .and_then(|()| match self.owner {
                        Some(Owner { uid, gid }) => folder.chown(name, uid, gid),
                        None => Ok(()),
                    })
                    .and_then(|()| folder.set_mtime(name, mtime))
                    .map_err(|e| self.failed("make", e))?;
                let target = target.clone();
                Ok(Seen::Symlink { mtime, target })
            }
        }
    }

    /// Writes a blob's content, and fails before its last bytes when it is not what its address says.
    pub fn pour(&mut self, blob: BlobId, file: &mut fs::File) -> Result<(), Error> {
        let mut reader = self.trees.blobs.reader(blob)?;
        let mut out = Sparse::new(file);
        while reader.left() > 0 {
            let read = reader.next(&mut self.buffer)?;
            let written = out.write(&self.buffer[..read]);
            written.map_err(|e| Error::io("write", &self.path, e))?;
        }
        out.finish().map_err(|e| self.failed("write", e))
    }

    /// Gives a fresh file or directory its extended attributes.
    pub fn mark(&self, made: impl std::os::fd::AsFd, attributes: Option<BlobId>) -> Result<(), Error> {
        if attributes.is_none() {
            return Ok(());
        }
        let wanted = self.trees.attributes(attributes)?;
        wanted.set(made).map_err(|e| self.failed("set attributes of", e))
    }

    pub fn dress(&self, made: impl std::os::fd::AsFd, mode: u16, mtime: i64) -> Result<(), Error> {
        let owner = self.owner.map(|Owner { uid, gid }| (uid, gid));
        dress(made, owner, mode, mtime).map_err(|e| self.failed("set owner, mode and time of", e))
    }

    pub fn failed(&self, doing: &'static str, error: io::Error) -> Error {
        Error::io(doing, &self.path, error)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::super::testing::{Bench, Plan, Thing, everything, snapshot};
    use super::*;

    fn sample() -> Plan {
        let file = |content: &[u8]| Thing::File {
            content: content.to_vec(),
            mode: 0o644,
        };
        let inner = [(b"deep".to_vec(), file(b"deep content"))].into();
        [
            (
                b"dir".to_vec(),
                Thing::Directory {
                    mode: 0o700,
                    content: inner,
                },
            ),
            (b"file".to_vec(), file(b"content")),
            (b"link".to_vec(), Thing::Link(b"/etc/shadow".to_vec())),
        ]
        .into()
    }

    #[test]
    fn files_and_links_get_the_owner() {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("SKIPPED files_and_links_get_the_owner: not root");
            assert!(std::env::var_os("EXUVIA_REQUIRE_ALL").is_none());
            return;
        }
        let bench = Bench::new();
        let taken = snapshot(&bench.trees, &bench.made("dir", &sample()), None);
        let copy = bench.dir.path().join("copy");
        let before = fs::metadata("/etc/shadow").ok().map(|meta| meta.uid());
        let owner = Owner {
            uid: 54_321,
            gid: 12_345,
        };
        bench.trees.materialise(taken.revision, &copy, Some(owner)).unwrap();
        for path in ["", "dir", "dir/deep", "file", "link"] {
            let meta = fs::symlink_metadata(copy.join(path)).unwrap();
            assert_eq!((meta.uid(), meta.gid()), (54_321, 12_345), "{path}");
        }
        assert_eq!(fs::metadata("/etc/shadow").ok().map(|meta| meta.uid()), before);
    }

    #[test]
    fn what_is_there_is_not_written_over() {
        let bench = Bench::new();
        let dir = bench.made("dir", &sample());
        let taken = snapshot(&bench.trees, &dir, None);
        let before = everything(&dir);
        let refused = bench.trees.materialise(taken.revision, &dir, None).unwrap_err();
        assert!(matches!(refused, Error::NotEmpty(_)), "{refused}");
        assert_eq!(everything(&dir), before);
    }

    #[test]
    fn a_damaged_store_leaves_no_half_directory() {
        let bench = Bench::new();
        let taken = snapshot(&bench.trees, &bench.made("dir", &sample()), None);
        let blob = BlobId::from_bytes(*blake3::hash(b"content").as_bytes());
        let path = bench.trees.blobs.path(&blob);
        let mut bytes = fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&path, bytes).unwrap();
        let copy = bench.dir.path().join("copy");
        let given = bench.made("given", &Plan::new());
        for into in [&copy, &given] {
            let error = bench.trees.materialise(taken.revision, into, None).unwrap_err();
            assert!(matches!(error, Error::Damaged { id, .. } if id == blob), "{error}");
        }
        assert!(!copy.exists());
        assert_eq!(everything(&given), Default::default());

        fs::remove_file(path).unwrap();
        let error = bench.trees.materialise(taken.revision, &copy, None).unwrap_err();
        assert_eq!(error.to_string(), format!("blob `{blob}` is missing from the store"));
    }
}
