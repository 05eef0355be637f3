//! Snapshots: a directory becomes a tree.
//!
//! The directory may belong to a guest that is at work in it: every name is opened by descriptor without following links,
//! and its type is what the descriptor says. Only files whose (mode, size, mtime, ctime, inode) differ from the last look
//! are read. A file that changed in the tick in which it was read is read again next time (as git does with "racily clean"
//! entries), because a second change within that tick would leave no trace.
//!
//! The walk is in `overlay/look.rs`, and what becomes of it in `overlay/keep.rs`: a directory is an upper layer with nothing below.

use super::BlobId;
use super::error::Error;
use super::folder::Folder;
use super::index::{Index, Seen};
use super::limits::Limits;
use super::name::shown;
use super::overlay;
use super::times::Time;
use super::tree::Node;
use super::trees::{Revision, Trees};

/// A directory's content, stored and durable.
#[derive(Debug)]
pub struct Snapshot {
    pub revision: Revision,
    /// For the next snapshot of the same directory.
    pub index: Index,
    pub report: Report,
}

/// What a snapshot met.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Names in what was walked, whatever they were.
    pub entries: u64,
    pub files: u64,
    pub directories: u64,
    /// The sizes of all files together.
    pub bytes: u64,
    pub read_files: u64,
    pub read_bytes: u64,
    /// Names of files with more than one name, be the others in the directory or not.
    pub hard_linked: u64,
    /// What is not in the tree: the first [`MOST_NAMED`] of them.
    pub skipped: Vec<Skipped>,
    pub skipped_total: u64,
}

impl Report {
    pub(super) fn skip(&mut self, path: &[u8], what: SpecialFile) {
        self.skipped_total += 1;
        if self.skipped.len() < MOST_NAMED {
            let path = shown(path);
            self.skipped.push(Skipped { path, what });
        }
    }
}

/// A name that is not in the tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Skipped {
    pub path: String,
    pub what: SpecialFile,
}

/// What a tree does not hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpecialFile {
    Fifo,
    Socket,
    CharDevice,
    BlockDevice,
}

/// How many skipped names a report lists.
pub const MOST_NAMED: usize = 100;

impl Trees {
    /// Stores what is in `dir`, durably before it returns. `base` is the index of the last look at this directory.
    ///
    /// Modes lose set-id and sticky bits; of extended attributes, those of `user.*` are kept. Sockets, FIFOs and devices are skipped and reported.
    ///
    /// # Errors
    /// [`Error::Limit`] for a tree beyond `limits`, [`Error::Unreadable`] for what may not be read, [`Error::Io`].
    pub fn snapshot(&self, dir: &Folder, base: Option<&Index>, limits: Limits) -> Result<Snapshot, Error> {
        let (index, report) = overlay::take(self, dir, base, limits)?;
        Ok(Snapshot {
            revision: index.revision(),
            index,
            report,
        })
    }
}

impl Seen {
    /// What of it has an identity, and what has none.
    pub(super) fn split(&self) -> (Node, Time) {
        match self {
            Self::File {
                stamp,
                blob,
                attributes,
            } => {
                let (mode, size, blob, attributes) = (stamp.mode, stamp.size, *blob, *attributes);
                let node = Node::File {
                    mode,
                    size,
                    blob,
                    attributes,
                };
                (node, at(stamp.mtime, None))
            }
            Self::Directory {
                mode,
                mtime,
                attributes,
                inner,
            } => {
                let (mode, tree, attributes) = (*mode, inner.tree, *attributes);
                let node = Node::Directory { mode, tree, attributes };
                (node, at(*mtime, inner.times))
            }
            Self::Symlink { mtime, target } => {
                let target = target.clone();
                (Node::Symlink { target }, at(*mtime, None))
            }
        }
    }
}

fn at(mtime: i64, inner: Option<BlobId>) -> Time {
    Time { mtime, inner }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::path::Path;
    use std::sync::atomic::{AtomicBool, Ordering};

    use proptest::prelude::*;

    use super::super::testing::{Bench, build, cases, everything, past_this_tick, plan, rebuild, snapshot, timeless};
    use super::*;

    proptest! {
        #![proptest_config(cases(24))]

        /// T17, and "identical content gives the identical id".
        #[test]
        fn what_is_materialised_is_what_was_there(plan in plan()) {
            let bench = Bench::new();
            let dir = bench.made("dir", &plan);
            let taken = snapshot(&bench.trees, &dir, None);
            prop_assert!(taken.report.skipped.is_empty());

            let copy = bench.dir.path().join("copy");
            let index = bench.trees.materialise(taken.revision, &copy, None).unwrap();
            prop_assert_eq!(everything(&copy), everything(&dir));
            prop_assert_eq!(index.revision(), taken.revision);

            let undated = bench.dir.path().join("undated");
            bench.trees.materialise(taken.revision.tree, &undated, None).unwrap();
            prop_assert_eq!(timeless(&undated), timeless(&dir));
            let again = snapshot(&bench.trees, &undated, None).revision;
            prop_assert_eq!(again.tree, taken.revision.tree);
            prop_assert!(plan.is_empty() || again.times != taken.revision.times);
        }

        #[test]
        fn a_snapshot_from_an_index_equals_a_full_one(before in plan(), after in plan()) {
            let bench = Bench::new();
            let dir = bench.made("dir", &before);
            let first = snapshot(&bench.trees, &dir, None);
            prop_assert_eq!(snapshot(&bench.trees, &dir, Some(&first.index)).revision, first.revision);
            rebuild(&dir, &before, &after);
            let incremental = snapshot(&bench.trees, &dir, Some(&first.index));
            let full = snapshot(&bench.trees, &dir, None);
            prop_assert_eq!(incremental.revision, full.revision);
            let fresh = bench.made("fresh", &after);
            prop_assert_eq!(snapshot(&bench.trees, &fresh, None).revision.tree, full.revision.tree);
        }
    }

    #[test]
    fn only_what_changed_is_read_of_ten_thousand_files() {
        let bench = Bench::new();
        let dir = bench.made("dir", &[].into());
        for folder in 0..100 {
            let at = dir.join(folder.to_string());
            fs::create_dir(&at).unwrap();
            for file in 0..100 {
                fs::write(at.join(file.to_string()), format!("{folder} {file}")).unwrap();
            }
        }
        past_this_tick();
        let first = snapshot(&bench.trees, &dir, None);
        assert_eq!((first.report.files, first.report.directories), (10_000, 100));
        assert_eq!(first.report.read_files, 10_000);

        for folder in 0..10 {
            fs::write(dir.join(format!("{folder}/7")), "other").unwrap();
        }
        let second = snapshot(&bench.trees, &dir, Some(&first.index));
        assert_eq!((second.report.files, second.report.read_files), (10_000, 10));
        assert_eq!(second.report.read_bytes, 50);
        assert_eq!(second.revision, snapshot(&bench.trees, &dir, None).revision);
        assert_ne!(second.revision.tree, first.revision.tree);
    }

    #[test]
    fn special_files_are_reported_and_do_not_block() {
        let bench = Bench::new();
        let dir = bench.made("dir", &[].into());
        nix::unistd::mkfifo(&dir.join("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(dir.join("socket")).unwrap();
        fs::write(dir.join("file"), "").unwrap();
        fs::hard_link(dir.join("file"), dir.join("twin")).unwrap();
        let mut skipped = vec![
            Skipped {
                path: "fifo".to_owned(),
                what: SpecialFile::Fifo,
            },
            Skipped {
                path: "socket".to_owned(),
                what: SpecialFile::Socket,
            },
        ];
        if nix::unistd::geteuid().is_root() {
            let (kind, mode) = (nix::sys::stat::SFlag::S_IFCHR, nix::sys::stat::Mode::S_IRUSR);
            let null = nix::sys::stat::makedev(1, 3);
            nix::sys::stat::mknod(&dir.join("device"), kind, mode, null).unwrap();
            skipped.insert(
                0,
                Skipped {
                    path: "device".to_owned(),
                    what: SpecialFile::CharDevice,
                },
            );
        } else {
            eprintln!("SKIPPED special_files_are_reported (device): not root");
            assert!(std::env::var_os("EXUVIA_REQUIRE_ALL").is_none());
        }
        let report = snapshot(&bench.trees, &dir, None).report;
        assert_eq!(
            (report.files, report.hard_linked, report.skipped_total),
            (2, 2, skipped.len() as u64)
        );
        assert_eq!(report.skipped, skipped);
    }

    #[test]
    fn set_id_bits_do_not_get_in() {
        let bench = Bench::new();
        let dir = bench.made("dir", &[].into());
        fs::write(dir.join("su"), "x").unwrap();
        fs::set_permissions(dir.join("su"), fs::Permissions::from_mode(0o6755)).unwrap();
        let taken = snapshot(&bench.trees, &dir, None);
        let tree = bench.trees.tree(taken.revision.tree).unwrap();
        assert!(matches!(
            tree.get(b"su"),
            Some(Node::File {
                mode: 0o755,
                size: 1,
                ..
            })
        ));
    }

    #[test]
    fn what_is_beyond_a_limit_is_refused_by_name() {
        let bench = Bench::new();
        let limits = Limits {
            entries: 20,
            depth: 5,
            file_bytes: 1000,
            total_bytes: 1500,
        };
        let refusal = |name: &str, make: &dyn Fn(&Path)| {
            let dir = bench.made(name, &[].into());
            make(&dir);
            let folder = Folder::open(&dir).unwrap();
            match bench.trees.snapshot(&folder, None, limits) {
                Err(Error::Limit { what, limit, path }) => (what, limit, path),
                other => panic!("{name}: {other:?}"),
            }
        };
        let sparse = |dir: &Path| fs::File::create(dir.join("hole")).unwrap().set_len(1 << 40).unwrap();
        assert_eq!(refusal("sparse", &sparse), ("bytes a file", 1000, "hole".to_owned()));
        let many = |dir: &Path| (0..21).for_each(|n| fs::write(dir.join(n.to_string()), "").unwrap());
        assert_eq!(refusal("many", &many), ("entries", 20, String::new()));
        let deep = |dir: &Path| fs::create_dir_all(dir.join("a/b/c/d/e/f")).unwrap();
        assert_eq!(
            refusal("deep", &deep),
            ("nested directories", 5, "a/b/c/d/e/f".to_owned())
        );
        let large = |dir: &Path| {
            ["a", "b"]
                .iter()
                .for_each(|n| fs::write(dir.join(n), [0; 800]).unwrap())
        };
        assert_eq!(refusal("large", &large), ("bytes in all", 1500, "b".to_owned()));
    }

    /// T16: a guest swaps a directory for a link to the host while the host walks.
    #[test]
    fn a_walk_never_leaves_the_directory() {
        let bench = Bench::new();
        let secret = bench.made("secret", &[].into());
        fs::write(secret.join("inner"), "the host's own").unwrap();
        let dir = bench.made("dir", &[].into());
        symlink(&secret, dir.join("z")).unwrap();
        for n in 0..20 {
            fs::create_dir(dir.join(format!("d{n}"))).unwrap();
            fs::write(dir.join(format!("d{n}/inner")), "guest").unwrap();
            symlink(&secret, dir.join(format!("l{n}"))).unwrap();
        }
        let stop = AtomicBool::new(false);
        let mut seen = HashSet::new();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    for n in 0..20 {
                        let (d, l) = (dir.join(format!("d{n}")), dir.join(format!("l{n}")));
                        nix::fcntl::renameat2(
                            nix::fcntl::AT_FDCWD,
                            &d,
                            nix::fcntl::AT_FDCWD,
                            &l,
                            nix::fcntl::RenameFlags::RENAME_EXCHANGE,
                        )
                        .unwrap();
                    }
                }
            });
            let mut base = None;
            for _ in 0..200 {
                let taken = snapshot(&bench.trees, &dir, base.as_ref());
                let changes = bench
                    .trees
                    .changes(bench.trees.empty().unwrap(), taken.revision.tree)
                    .unwrap();
                seen.extend(changes.into_iter().filter_map(|change| match change.after {
                    Some(Node::File { blob, .. }) => Some(blob),
                    _ => None,
                }));
                base = Some(taken.index);
            }
            stop.store(true, Ordering::Relaxed);
        });
        let guest = BlobId::from_bytes(*blake3::hash(b"guest").as_bytes());
        assert_eq!(seen, HashSet::from([guest]));
    }

    #[test]
    fn a_directory_beyond_path_max_is_walked() {
        let bench = Bench::new();
        let dir = bench.made("dir", &[].into());
        let mut folder = Folder::open(&dir).unwrap();
        for _ in 0..40 {
            folder = folder.create_folder(&[b'd'; 255]).unwrap();
        }
        folder.create_file(b"bottom").unwrap();
        let taken = snapshot(&bench.trees, &dir, None);
        assert_eq!((taken.report.directories, taken.report.files), (40, 1));
        let copy = bench.dir.path().join("copy");
        bench.trees.materialise(taken.revision, &copy, None).unwrap();
        assert_eq!(snapshot(&bench.trees, &copy, None).revision, taken.revision);
    }

    #[test]
    fn nothing_is_written_for_a_directory_that_did_not_change() {
        let bench = Bench::new();
        let dir = bench.made("dir", &[].into());
        build(&dir, &proptest_sample());
        past_this_tick();
        let first = snapshot(&bench.trees, &dir, None);
        let store = bench.dir.path().join("data/blobs");
        let before = everything(&store);
        let second = snapshot(&bench.trees, &dir, Some(&first.index));
        assert_eq!((second.revision, second.report.read_files), (first.revision, 0));
        assert_eq!(everything(&store), before);
    }

    fn proptest_sample() -> super::super::testing::Plan {
        use super::super::testing::Thing;
        let file = Thing::File {
            content: b"x".to_vec(),
            mode: 0o644,
        };
        let inner = [(b"f".to_vec(), file.clone())].into();
        [
            (
                b"d".to_vec(),
                Thing::Directory {
                    mode: 0o755,
                    content: inner,
                },
            ),
            (b"f".to_vec(), file),
        ]
        .into()
    }
}
