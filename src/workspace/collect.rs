//! Collecting: blobs that nothing needs are removed, small ones are brought together.
//!
//! Nobody has to stop for it. What keeps a blob that a writer is about to name:
//!
//! - a writer that makes or finds a blob holds the sweep lock, shared, from then until its batch is committed or dropped;
//!   what it finds is dated anew (`batch.rs`). The sweep holds the lock alone;
//! - a blob is removed only when it was dated longer ago than the grace period. Between a batch's commit and the
//!   transaction that names its blobs there is the whole grace period;
//! - what is named was named before the sweep looked, or by a batch that dated it since.
//!
//! So a blob goes only when nothing named it at the time of the mark and no writer has touched it since, nor for the grace
//! period before.

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use super::batch::SMALL;
use super::blobs::Blobs;
use super::error::Error;
use super::folder::tick;
use super::id::{BlobId, TreeId};
use super::packs::Packing;
use super::tree::{Node, Tree};
use super::trees::{Revision, Trees};

/// A pack with so many bytes is large enough.
const FULL_PACK: usize = 8 << 20;

/// What a collection did, or would do.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Collected {
    /// Blobs that something needs.
    pub needed: u64,
    pub removed: u64,
    /// Bytes on the disk that they took.
    pub removed_bytes: u64,
    /// Blobs that nothing needs and that are younger than the grace period.
    pub young: u64,
    /// Small blobs that were brought together in packs.
    pub repacked: u64,
}

/// Whether a collection only says what it would do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sweep {
    Remove,
    OnlyTell,
}

impl Trees {
    /// Whether every tree and every record of times of a revision can be read.
    pub fn is_whole(&self, revision: Revision) -> bool {
        let mut mark = Mark {
            trees: self,
            needed: HashSet::new(),
            walked: HashSet::new(),
        };
        mark.revision(revision).is_ok()
    }

    /// Removes blobs that neither a revision nor an address needs and that are older than `grace`. An address may be a
    /// tree's: what it has below is then needed too.
    ///
    /// # Errors
    /// [`Error::Missing`], [`Error::Damaged`] for a tree of a revision that cannot be read: what is below it is not known,
    /// so nothing is removed. [`Error::Io`].
    pub fn collect(
        &self,
        revisions: &[Revision],
        addresses: &[BlobId],
        grace: Duration,
        sweep: Sweep,
    ) -> Result<Collected, Error> {
        let mut mark = Mark {
            trees: self,
            needed: HashSet::new(),
            walked: HashSet::new(),
        };
        // A running server counts on it without looking.
        mark.needed
            .insert(BlobId::from_bytes(*blake3::hash(&Tree::default().encode()).as_bytes()));
        for revision in revisions {
            mark.revision(*revision)?;
        }
        for address in addresses {
            mark.address(*address)?;
        }
        let now = tick().map_err(|e| Error::io("ask the time of", b"", e))?;
        let grace = i64::try_from(grace.as_nanos()).unwrap_or(i64::MAX);
        let is_old = |path: &Path| fs::metadata(path).is_ok_and(|meta| dated(&meta) <= now.saturating_sub(grace));
        let lock = self.blobs.sweep_lock()?;
        lock.lock().map_err(|e| Error::io("lock", b"sweep.lock", e))?;
        let swept = self.blobs.sweep(&mark.needed, &is_old, sweep);
        lock.unlock().map_err(|e| Error::io("unlock", b"sweep.lock", e))?;
        swept
    }
}

fn dated(meta: &fs::Metadata) -> i64 {
    meta.mtime()
        .saturating_mul(1_000_000_000)
        .saturating_add(meta.mtime_nsec())
}

/// Finds what is needed.
struct Mark<'a> {
    trees: &'a Trees,
    needed: HashSet<BlobId>,
    walked: HashSet<(TreeId, Option<BlobId>)>,
}

impl Mark<'_> {
    fn revision(&mut self, Revision { tree, times }: Revision) -> Result<(), Error> {
        if !self.walked.insert((tree, times)) {
            return Ok(());
        }
        let content = self.trees.tree(tree)?;
        let recorded = self.trees.times(times, &content)?;
        self.needed.insert(tree.blob());
        self.needed.extend(times);
        self.needed.extend(content.links());
        for (entry, time) in content.entries().iter().zip(&recorded.0) {
            match &entry.node {
                Node::File { blob, attributes, .. } => {
                    self.needed.insert(*blob);
                    self.needed.extend(*attributes);
                }
                Node::Directory { tree, attributes, .. } => {
                    self.needed.extend(*attributes);
                    let (tree, times) = (*tree, time.inner);
                    self.revision(Revision { tree, times })?;
                }
                Node::Symlink { .. } => {}
            }
        }
        Ok(())
    }

    /// Something that looks like an address: it may be none of ours, a blob, or a tree.
    fn address(&mut self, id: BlobId) -> Result<(), Error> {
        if self.needed.contains(&id) || !self.trees.blobs.contains(id)? {
            return Ok(());
        }
        self.needed.insert(id);
        let mut magic = [0; 3];
        let is_tree = matches!(self.trees.blobs.reader(id)?.next(&mut magic), Ok(3)) && magic == *b"EXT";
        let tree = TreeId::from_bytes(*id.as_bytes());
        // A file may begin like a tree and be none.
        if is_tree && self.trees.tree(tree).is_ok() {
            self.revision(tree.into())?;
        }
        Ok(())
    }
}

impl Blobs {
    fn sweep(
        &self,
        needed: &HashSet<BlobId>,
        is_old: &dyn Fn(&Path) -> bool,
        sweep: Sweep,
    ) -> Result<Collected, Error> {
        let mut done = Collected::default();
        let mut packing = Packing::default();
        // Files that go once what they hold that is needed is in a pack.
        let mut obsolete = Vec::new();
        for (id, path) in self.loose()? {
            let size = fs::metadata(&path).map_or(0, |meta| meta.len());
            if needed.contains(&id) {
                done.needed += 1;
                if size <= SMALL as u64 && is_old(&path) {
                    let bytes = fs::read(&path).map_err(|e| gone_wrong("read", &path, e))?;
                    packing.add(id, &bytes);
                    obsolete.push(path);
                }
            } else if is_old(&path) {
                done.removed += 1;
                done.removed_bytes += size;
                if sweep == Sweep::Remove {
                    fs::remove_file(&path).map_err(|e| gone_wrong("remove", &path, e))?;
                }
            } else {
                done.young += 1;
            }
        }
        for (path, places) in self.packs().all()? {
            let (live, dead): (Vec<_>, Vec<_>) = places.into_iter().partition(|(id, _)| needed.contains(id));
            done.needed += live.len() as u64;
            if !is_old(&path) {
                done.young += dead.len() as u64;
                continue;
            }
            done.removed += dead.len() as u64;
            done.removed_bytes += dead.iter().map(|(_, place)| u64::from(place.length)).sum::<u64>();
            let is_small = fs::metadata(&path).is_ok_and(|meta| (meta.len() as usize) < FULL_PACK / 2);
            if dead.is_empty() && !is_small {
                continue;
            }
            for (id, _) in live {
                if let Some(bytes) = self.packs().bytes(id)? {
                    packing.add(id, &bytes);
                }
            }
            obsolete.push(path);
        }
        if sweep == Sweep::OnlyTell || obsolete.is_empty() {
            return Ok(done);
        }
        if packing.len() > 0 {
            done.repacked = packing.len() as u64;
            let (name, bytes) = packing.finish();
            let path = self.packs().path(&name);
            // The one pack there is, as it should be.
            obsolete.retain(|old| *old != path);
            if !obsolete.is_empty() {
                let staged = self.staging().join(&name);
                fs::write(&staged, bytes).map_err(|e| gone_wrong("write", &staged, e))?;
                self.sync()?;
                fs::rename(&staged, &path).map_err(|e| gone_wrong("write", &path, e))?;
                self.sync()?;
            }
        }
        for path in obsolete {
            fs::remove_file(&path).map_err(|e| gone_wrong("remove", &path, e))?;
        }
        self.packs().forget();
        Ok(done)
    }
}

fn gone_wrong(doing: &'static str, path: &Path, error: std::io::Error) -> Error {
    Error::io(doing, path.as_os_str().as_encoded_bytes(), error)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Bench, everything, snapshot};
    use super::*;

    fn filled(bench: &Bench, name: &str) -> Revision {
        let dir = bench.made(name, &[].into());
        for n in 0..30 {
            fs::write(dir.join(format!("{n}")), format!("{name} {n}")).unwrap();
        }
        fs::write(dir.join("shared"), "of all").unwrap();
        fs::write(dir.join("large"), name.repeat(100_000)).unwrap();
        snapshot(&bench.trees, &dir, None).revision
    }

    #[test]
    fn what_is_needed_stays_and_the_rest_goes() {
        let bench = Bench::new();
        let (kept, addressed, gone) = (
            filled(&bench, "kept"),
            filled(&bench, "addressed"),
            filled(&bench, "gone"),
        );
        let artifact = bench.trees.put_artifact(b"an output").unwrap();
        let lost = bench.trees.put_artifact(b"another output").unwrap();
        let addresses = [artifact, addressed.tree.blob(), BlobId::from_bytes([1; 32])];
        let collect = |grace, sweep| {
            bench
                .trees
                .collect(&[kept], &addresses, Duration::from_secs(grace), sweep)
                .unwrap()
        };

        let young = collect(3600, Sweep::Remove);
        assert_eq!((young.removed, young.repacked), (0, 0));
        // 30 files, the large one, the tree and the times; the address's times are not known to be any; one artifact.
        assert_eq!(young.young, 33 + 1 + 1);
        let told = collect(0, Sweep::OnlyTell);
        assert_eq!(told.removed, young.young);
        assert!(bench.trees.tree(gone.tree).is_ok());
        let swept = collect(0, Sweep::Remove);
        assert_eq!(swept.removed, told.removed);
        assert!(matches!(bench.trees.tree(gone.tree), Err(Error::Missing(_))));
        assert!(matches!(bench.trees.blobs.get(lost), Err(Error::Missing(_))));
        assert_eq!(bench.trees.blobs.get(artifact).unwrap(), b"an output");
        // With the memory of before, and with none.
        let opened = Trees::open(&bench.dir.path().join("data")).unwrap();
        for (number, trees) in [&bench.trees, &opened].into_iter().enumerate() {
            let copy = bench.dir.path().join(format!("copy-{number}"));
            trees.materialise(kept, &copy, None).unwrap();
            assert_eq!(everything(&copy), everything(&bench.dir.path().join("kept")));
            let copy = bench.dir.path().join(format!("addressed-{number}"));
            trees.materialise(addressed.tree, &copy, None).unwrap();
        }
        assert_eq!(collect(0, Sweep::Remove).removed, 0);
    }

    #[test]
    fn a_blob_that_a_writer_found_is_young_again() {
        let bench = Bench::new();
        let id = bench.trees.put_artifact(b"found").unwrap();
        let path = bench.trees.blobs.path(&id);
        let old = std::time::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
        fs::File::open(&path).unwrap().set_modified(old).unwrap();
        let collect = || {
            bench
                .trees
                .collect(&[], &[], Duration::from_secs(3600), Sweep::Remove)
                .unwrap()
                .removed
        };
        bench.trees.put_artifact(b"found").unwrap();
        assert_eq!(collect(), 0);
        fs::File::open(&path).unwrap().set_modified(old).unwrap();
        assert_eq!(collect(), 1);
    }

    #[test]
    fn nothing_goes_while_a_needed_tree_cannot_be_read() {
        let bench = Bench::new();
        let lost = bench.trees.put_artifact(b"unneeded").unwrap();
        let missing = Revision::from(TreeId::from_bytes([3; 32]));
        let refused = bench.trees.collect(&[missing], &[], Duration::ZERO, Sweep::Remove);
        assert!(matches!(refused, Err(Error::Missing(_))), "{refused:?}");
        assert!(bench.trees.blobs.contains(lost).unwrap());
    }

    /// Writers that make the same blobs again and again while a collector with no grace runs: what a writer has committed
    /// and still uses is there, because it marks it.
    #[test]
    fn writers_and_a_collector_do_not_disturb_each_other() {
        let bench = Bench::new();
        let kept = filled(&bench, "kept");
        std::thread::scope(|scope| {
            for writer in 0..2 {
                let bench = &bench;
                scope.spawn(move || {
                    for round in 0..20 {
                        let mut batch = bench.trees.blobs.batch();
                        let ids: Vec<_> = (0..20)
                            .map(|n| batch.put(format!("{} {n}", (round + writer) % 3).as_bytes()).unwrap())
                            .collect();
                        batch.commit().unwrap();
                        for id in ids {
                            bench.trees.blobs.get(id).unwrap();
                        }
                    }
                });
            }
            for _ in 0..20 {
                bench
                    .trees
                    .collect(&[kept], &[], Duration::from_secs(60), Sweep::Remove)
                    .unwrap();
            }
        });
        bench
            .trees
            .materialise(kept, &bench.dir.path().join("copy"), None)
            .unwrap();
    }
}
