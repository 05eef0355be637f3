//! Working directories made ahead: empty, their volume mounted, owned by nobody. Handed out by one rename, and put back only
//! where nothing was ever written: to mount a volume and to take it apart costs more than all else that a short sandbox costs.
//!
//! ```text
//! DATA/work/sbx_RANDOM   of no sandbox; owner.json names this process from the first, so after `kill -9` it is swept as any other
//!        │ given to its owner, renamed (what is mounted below moves along); marked when its sandbox gets it
//!        ▼
//! DATA/work/NAME ──▶ the mark is as it was: renamed again, and given to nobody. Else removed
//! ```
//!
//! What is asked for is what is kept: the volumes of the sizes that were asked for last. Who finds none ready makes one himself.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::{Error, OWNER, WorkDir};
use crate::ids::SandboxId;
use crate::sandbox::Limits;
use crate::sandbox::disk::{self, Blank, Mark, Volumes};

/// Kept of each size, unless more are [expected](WorkDirs::expect).
const USUAL: usize = 16;
/// Most that are kept of one size.
const MOST: usize = 64;
/// Sizes that are kept; of more, those asked for last.
const SIZES: usize = 4;
/// Made at a time: the kernel lets whoever makes one wait more than it works.
const MAKERS: usize = 8;
/// Before what was taken is made again, unless few are left: it may come back.
const BREATH: Duration = Duration::from_millis(500);
/// After one that could not be made.
const PAUSE: Duration = Duration::from_secs(2);

/// Working directories of one data directory, some made ahead; clones share them.
#[derive(Debug, Clone)]
pub struct WorkDirs(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    data_dir: PathBuf,
    volumes: Volumes,
    shelves: Mutex<Shelves>,
    /// Something is missing on a shelf.
    missing: Notify,
}

#[derive(Debug, Default)]
struct Shelves {
    /// Whether anybody fills them.
    is_kept: bool,
    /// The one asked for last is the last.
    all: Vec<Shelf>,
    /// Of sizes that are not kept any more.
    discarded: Vec<WorkDir>,
}

#[derive(Debug)]
struct Shelf {
    blank: Blank,
    target: usize,
    in_making: usize,
    ready: VecDeque<WorkDir>,
}

impl Shelves {
    /// The shelf of a size, from now on the last that goes.
    fn of(&mut self, blank: Blank) -> &mut Shelf {
        let found = self.all.iter().position(|shelf| shelf.blank == blank);
        let shelf = match found {
            Some(at) => self.all.remove(at),
            None => {
                if self.all.len() >= SIZES {
                    let oldest = self.all.remove(0);
                    self.discarded.extend(oldest.ready);
                }
                Shelf {
                    blank,
                    target: USUAL,
                    in_making: 0,
                    ready: VecDeque::new(),
                }
            }
        };
        self.all.push(shelf);
        self.all.last_mut().expect("it was pushed just now")
    }

    /// Where the most is missing; it counts as being made from now on.
    fn next(&mut self) -> Option<Blank> {
        let lack = |shelf: &Shelf| shelf.target.saturating_sub(shelf.in_making + shelf.ready.len());
        let shelf = self.all.iter_mut().max_by_key(|shelf| lack(shelf))?;
        if lack(shelf) == 0 {
            return None;
        }
        shelf.in_making += 1;
        Some(shelf.blank)
    }

    /// Whether half of any shelf is missing.
    fn is_low(&self) -> bool {
        let shelves = self.all.iter();
        let mut there = shelves.map(|shelf| (2 * (shelf.in_making + shelf.ready.len()), shelf.target));
        there.any(|(twice, target)| twice < target)
    }

    /// Whether one that was handed out is put back. Up to twice as many as are made: they come and go in waves.
    fn has_room(&self, blank: Blank) -> bool {
        let shelf = self.all.iter().find(|shelf| shelf.blank == blank);
        self.is_kept && shelf.is_some_and(|shelf| shelf.ready.len() < 2 * shelf.target)
    }

    /// What was begun for a shelf has come, or has not.
    fn put(&mut self, blank: Blank, made: Option<WorkDir>) {
        match self.all.iter_mut().find(|shelf| shelf.blank == blank) {
            Some(shelf) => {
                shelf.in_making = shelf.in_making.saturating_sub(1);
                shelf.ready.extend(made);
            }
            None => self.discarded.extend(made),
        }
    }
}

/// Where one that was handed out comes from, and what it was like when its sandbox got it.
#[derive(Debug)]
pub(super) struct Origin {
    stock: WorkDirs,
    blank: Blank,
    mark: OnceLock<Mark>,
}

impl Origin {
    pub fn mark(&self, path: &Path) {
        // One without a mark is not put back.
        if let Ok(mark) = Mark::of(path) {
            let _ = self.mark.set(mark);
        }
    }

    /// Puts the directory at `path` back where nobody has touched it; `false`, and it is to be removed, otherwise.
    pub fn put_back(&self, path: &Path) -> bool {
        if !self.stock.shelves().has_room(self.blank) || !self.is_untouched(path).unwrap_or(false) {
            return false;
        }
        let name = SandboxId::random();
        let place = self.stock.0.data_dir.join("work").join(name.as_str());
        let back = WorkDir::at(place);
        if std::fs::rename(path, &back.path).is_err() {
            return false;
        }
        match disk::give(&back.path, 0) {
            Ok(()) => {
                let mut shelves = self.stock.shelves();
                match shelves.has_room(self.blank) {
                    true => shelves.of(self.blank).ready.push_back(back),
                    false => shelves.discarded.push(back),
                }
            }
            // A file system that is broken takes no more changes.
            Err(_) => back.remove(),
        }
        true
    }

    fn is_untouched(&self, path: &Path) -> std::io::Result<bool> {
        if self.mark.get() != Some(&Mark::of(path)?) {
            return Ok(false);
        }
        let ours = [OWNER, disk::DISK];
        for entry in std::fs::read_dir(path)? {
            if !ours
                .iter()
                .any(|name| entry.as_ref().is_ok_and(|entry| entry.file_name() == *name))
            {
                return Ok(false);
            }
        }
        Ok(std::fs::read_dir(disk::workspace(path))?.next().is_none())
    }
}

impl WorkDirs {
    /// Nothing is made ahead before [`WorkDirs::keep`] runs.
    pub fn new(data_dir: &Path, volumes: Volumes) -> Self {
        Self(Arc::new(Inner {
            data_dir: data_dir.to_owned(),
            volumes,
            shelves: Mutex::default(),
            missing: Notify::new(),
        }))
    }

    fn shelves(&self) -> MutexGuard<'_, Shelves> {
        self.0.shelves.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells that sandboxes with these limits will be made, up to `count` in quick succession.
    ///
    /// # Errors
    /// [`disk::Error::Unsupported`] where this host cannot enforce the limits.
    pub fn expect(&self, limits: &Limits, count: usize) -> Result<(), Error> {
        if let Some(blank) = self.0.volumes.blank(limits)? {
            let mut shelves = self.shelves();
            let shelf = shelves.of(blank);
            shelf.target = (shelf.target + count).min(MOST);
            drop(shelves);
            self.0.missing.notify_one();
        }
        Ok(())
    }

    /// `DATA/work/NAME` as [`WorkDir::open`] makes it, from what was made ahead where there is such. May block.
    ///
    /// # Errors
    /// As [`WorkDir::open`].
    pub fn open(&self, name: &str, limits: &Limits, owner: u32) -> Result<WorkDir, Error> {
        let Inner { data_dir, volumes, .. } = &*self.0;
        let Some(blank) = volumes.blank(limits)? else {
            return WorkDir::open(data_dir, name, volumes, limits, owner);
        };
        let work = match self.take(blank) {
            Some(ahead) => ahead.hand_out(&data_dir.join("work").join(name), owner)?,
            None => WorkDir::open(data_dir, name, volumes, limits, owner)?,
        };
        let origin = Origin {
            stock: self.clone(),
            blank,
            mark: OnceLock::new(),
        };
        Ok(WorkDir {
            origin: Some(Arc::new(origin)),
            ..work
        })
    }

    fn take(&self, blank: Blank) -> Option<WorkDir> {
        let mut shelves = self.shelves();
        if !shelves.is_kept {
            return None;
        }
        let taken = shelves.of(blank).ready.pop_front();
        drop(shelves);
        self.0.missing.notify_one();
        taken
    }

    /// How many are ready, of all sizes.
    pub fn ready(&self) -> usize {
        self.shelves().all.iter().map(|shelf| shelf.ready.len()).sum()
    }

    fn make(&self, blank: Blank) -> Result<WorkDir, Error> {
        let name = SandboxId::random();
        let made = WorkDir::make(&self.0.data_dir.join("work").join(name.as_str()))?;
        match self.0.volumes.make_blank(&made.path, blank) {
            Ok(()) => Ok(made),
            Err(error) => {
                made.remove();
                Err(error.into())
            }
        }
    }

    /// Makes directories ahead until `stop`, then removes those that nobody took, and waits for the end of all volumes.
    pub async fn keep(self, stop: CancellationToken) {
        self.shelves().is_kept = true;
        let mut making = JoinSet::new();
        while !stop.is_cancelled() {
            let discarded = std::mem::take(&mut self.shelves().discarded);
            for directory in discarded {
                making.spawn_blocking(move || {
                    directory.remove();
                    true
                });
            }
            while making.len() < MAKERS
                && let Some(blank) = self.next()
            {
                let dirs = self.clone();
                making.spawn_blocking(move || dirs.fill(blank));
            }
            let is_fine = tokio::select! {
                () = stop.cancelled() => true,
                () = self.0.missing.notified() => {
                    tokio::select! {
                        () = stop.cancelled() => {}
                        () = self.breathe() => {}
                    }
                    true
                }
                Some(done) = making.join_next() => done.unwrap_or(false),
            };
            if !is_fine {
                tokio::select! {
                    () = stop.cancelled() => {}
                    () = tokio::time::sleep(PAUSE) => {}
                }
            }
        }
        while making.join_next().await.is_some() {}
        let left = {
            let mut shelves = self.shelves();
            shelves.is_kept = false;
            let kept = std::mem::take(&mut shelves.all);
            let mut left = std::mem::take(&mut shelves.discarded);
            left.extend(kept.into_iter().flat_map(|shelf| shelf.ready));
            left
        };
        making.spawn_blocking(move || {
            left.iter().for_each(WorkDir::remove);
            disk::settle();
            true
        });
        while making.join_next().await.is_some() {}
    }

    /// For a while, or until a shelf is low.
    async fn breathe(&self) {
        let quiet = tokio::time::sleep(BREATH);
        tokio::pin!(quiet);
        while !self.shelves().is_low() {
            tokio::select! {
                () = &mut quiet => return,
                () = self.0.missing.notified() => {}
            }
        }
    }

    fn next(&self) -> Option<Blank> {
        self.shelves().next()
    }

    /// Whether one could be made.
    fn fill(&self, blank: Blank) -> bool {
        let made = self.make(blank);
        if let Err(error) = &made {
            tracing::warn!(error = %crate::error::chain(error), "no working directory could be made ahead");
        }
        let is_fine = made.is_ok();
        self.shelves().put(blank, made.ok());
        is_fine
    }
}

impl WorkDir {
    /// Gives one that was made ahead to its owner, under its own name.
    fn hand_out(self, path: &Path, owner: u32) -> Result<Self, Error> {
        let given = disk::give(&self.path, owner).and_then(|()| std::fs::rename(&self.path, path));
        match given {
            Ok(()) => Ok(Self::at(path.to_owned())),
            Err(source) => {
                self.remove();
                Err(Error::Directory {
                    path: path.to_owned(),
                    source,
                })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt;

    use super::*;
    use crate::sandbox::disk::{Kind, Quota};

    fn limits(inodes: u64) -> Limits {
        Limits {
            disk: Some(Quota {
                bytes: 32 << 20,
                inodes,
            }),
            disk_kind: Some(Kind::Image),
            ..Limits::default()
        }
    }

    /// Says so, where it cannot be tried here.
    fn can(test: &str, volumes: &Volumes) -> bool {
        match volumes.choose(&limits(500)) {
            Ok(_) => true,
            Err(lack) => {
                crate::skip::skipped(test, lack);
                false
            }
        }
    }

    async fn until(is_so: impl Fn() -> bool) {
        let waited = tokio::time::timeout(Duration::from_secs(60), async {
            while !is_so() {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        });
        waited.await.expect("it comes to that within a minute");
    }

    #[tokio::test]
    async fn what_is_made_ahead_is_handed_out_once_and_the_rest_goes_at_the_end() {
        let data = tempfile::tempdir().unwrap();
        let data = fs::canonicalize(data.path()).unwrap();
        let dirs = WorkDirs::new(&data, Volumes::new(&data));
        let test = "what_is_made_ahead_is_handed_out_once_and_the_rest_goes_at_the_end";
        if !can(test, &dirs.0.volumes) {
            return;
        }
        // Nobody makes any yet.
        let own = dirs.open("own", &limits(500), 70_000).unwrap();
        assert_eq!((dirs.ready(), own.holds().unwrap().used.bytes > 0), (0, true));
        dirs.expect(&limits(500), 2).unwrap();
        let stop = CancellationToken::new();
        let mut keeping = JoinSet::new();
        keeping.spawn(dirs.clone().keep(stop.clone()));
        until(|| dirs.ready() == USUAL + 2).await;

        let work = data.join("work");
        let there = || fs::read_dir(&work).unwrap().count();
        // With the one that was made for itself.
        assert_eq!(there(), USUAL + 3);
        let taken = dirs.open("taken", &limits(500), 80_000).unwrap();
        assert_eq!(taken.path, work.join("taken"));
        let (files, most) = (taken.workspace(), taken.holds().unwrap().most);
        let found = fs::metadata(&files).unwrap();
        assert_eq!(
            (found.uid(), found.gid(), found.mode() & 0o7777),
            (80_000, 80_000, 0o755)
        );
        assert_eq!(fs::read_dir(&files).unwrap().count(), 0);
        assert!(most.bytes <= 32 << 20 && most.inodes <= 500, "{most:?}");
        assert_ne!(
            fs::metadata(&files).unwrap().dev(),
            fs::metadata(own.workspace()).unwrap().dev()
        );
        fs::write(files.join("mark"), "").unwrap();
        // What was used never comes back.
        taken.remove();
        until(|| dirs.ready() == USUAL + 2).await;
        let again = dirs.open("taken", &limits(500), 80_000).unwrap();
        assert!(!again.workspace().join("mark").exists());
        // What nobody touched does, and is as it was.
        let device = |dir: &WorkDir| fs::metadata(dir.workspace()).unwrap().dev();
        let volume = device(&again);
        again.mark();
        let before = dirs.ready();
        again.remove();
        assert_eq!((dirs.ready(), work.join("taken").exists()), (before + 1, false));
        let mut others = Vec::new();
        let again = loop {
            let next = dirs
                .open(&format!("next-{}", others.len()), &limits(500), 90_000)
                .unwrap();
            match device(&next) == volume {
                true => break next,
                false => others.push(next),
            }
        };
        assert_eq!(fs::metadata(again.workspace()).unwrap().uid(), 90_000);
        for other in others {
            other.remove();
        }
        // Even where what was written is gone again.
        let gone = dirs.open("gone", &limits(500), 80_000).unwrap();
        gone.mark();
        let trace = gone.workspace().join("trace");
        fs::write(&trace, "x").unwrap();
        fs::remove_file(trace).unwrap();
        let volume = device(&gone);
        gone.remove();
        assert!(
            dirs.shelves()
                .all
                .iter()
                .all(|shelf| shelf.ready.iter().all(|dir| device(dir) != volume))
        );
        // Of another size there is none, and then there are.
        dirs.open("other", &limits(600), 80_000).unwrap().remove();
        until(|| dirs.ready() == 2 * USUAL + 2).await;

        stop.cancel();
        while keeping.join_next().await.is_some() {}
        assert_eq!((there(), dirs.ready()), (2, 0));
        let late = dirs.open("late", &limits(500), 70_000).unwrap();
        for left in [own, again, late] {
            left.remove();
        }
        disk::settle();
        assert_eq!(disk::mounts_below(&data).unwrap(), Vec::<PathBuf>::new());
        assert_eq!(there(), 0);
    }

    #[test]
    fn sizes_that_nobody_asks_for_any_more_give_way() {
        let mut shelves = Shelves::default();
        let data = tempfile::tempdir().unwrap();
        let volumes = Volumes::new(data.path());
        if !can("sizes_that_nobody_asks_for_any_more_give_way", &volumes) {
            return;
        }
        let sizes: Vec<Blank> = (0..=SIZES as u64)
            .map(|n| volumes.blank(&limits(500 + n)).unwrap().unwrap())
            .collect();
        for size in &sizes[..SIZES] {
            shelves.of(*size);
        }
        let made = WorkDir::make(&data.path().join("work/sbx_x")).unwrap();
        shelves.put(sizes[0], Some(made));
        // The first was asked for again, so the second is the one that goes.
        shelves.of(sizes[0]);
        shelves.of(sizes[SIZES]);
        let kept: Vec<Blank> = shelves.all.iter().map(|shelf| shelf.blank).collect();
        let mut expected = sizes[2..SIZES].to_vec();
        expected.extend([sizes[0], sizes[SIZES]]);
        assert_eq!((kept, shelves.discarded.len()), (expected, 0));
        for size in &sizes[2..] {
            shelves.of(*size);
        }
        shelves.of(sizes[1]);
        assert_eq!(shelves.discarded.len(), 1);
        // What comes too late is not kept.
        shelves.put(sizes[0], shelves.discarded[0].clone().into());
        assert_eq!(shelves.discarded.len(), 2);
    }
}
