//! The unpacked root file systems: each made once, by content, and shared read-only by all sandboxes.
//!
//! ```text
//!  DATA/images/root-HEX, tar-HEX   one each; whole, or not there
//!              locks/KEY           held alone by who makes or removes it, together by who looks it up; its time is that of
//!                                  the last look-up
//!              lock                guards names, records and the making of scratch directories
//!              .scratch-*          unfinished or half removed; held locked while somebody is at it
//! ```
//!
//! Locks are the kernel's (flock), so a killed process holds none, and what it left is swept by the next one.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::fcntl::{Flock, FlockArg};
use nix::sys::stat::futimens;
use nix::sys::time::TimeSpec;

use super::job::{Job, Progress};
use super::{Digest, Error};
use crate::clock::Timestamp;

/// How often a lock is tried that another has.
const POLL: Duration = Duration::from_millis(50);
const SCRATCH: &str = ".scratch-";

/// What a root is kept under.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Key(String);

impl Key {
    const PREFIXES: [&str; 2] = ["root-", "tar-"];

    /// Of layers, by their chain.
    pub fn of_chain(chain: &Digest) -> Self {
        Self(format!("root-{}", chain.hex()))
    }

    /// Of a tar that is used as it is.
    pub fn of_tar(hash: &blake3::Hash) -> Self {
        Self(format!("tar-{}", hash.to_hex()))
    }

    pub fn read(text: &str) -> Option<Self> {
        let is_key = Self::PREFIXES.iter().any(|prefix| {
            text.strip_prefix(prefix)
                .is_some_and(|hex| hex.len() == 64 && hex.bytes().all(|byte| byte.is_ascii_hexdigit()))
        });
        is_key.then(|| Self(text.to_owned()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The directory of all.
#[derive(Debug, Clone)]
pub(super) struct Roots {
    images: PathBuf,
}

/// A directory for unfinished work; removed when dropped, or swept when its maker was killed.
#[derive(Debug)]
pub(super) struct Scratch {
    path: PathBuf,
    _held: Flock<File>,
}

impl Scratch {
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What stays behind is swept by the next one.
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// The right to make or to remove one root.
#[derive(Debug)]
pub(super) struct Claim {
    roots: Roots,
    key: Key,
    held: Flock<File>,
}

impl Roots {
    pub fn open(data_dir: &Path) -> Result<Self, Error> {
        let images = data_dir.join("images");
        let make = || {
            fs::create_dir_all(&images)?;
            fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(images.join("locks"))
        };
        make().map_err(Error::store("make a directory"))?;
        Ok(Self { images })
    }

    pub fn images(&self) -> &Path {
        &self.images
    }

    fn home(&self, key: &Key) -> PathBuf {
        self.images.join(key.as_str())
    }

    /// Where the root is; marks it as used just now.
    pub fn find(&self, key: &Key) -> Result<Option<PathBuf>, Error> {
        let home = self.home(key);
        if !home.is_dir() {
            return Ok(None);
        }
        let held = wait(self.lock_file(key)?, FlockArg::LockSharedNonblock, &Job::default())?;
        mark(&held, TimeSpec::UTIME_NOW)?;
        // It may have been removed before the lock was ours.
        Ok(home.is_dir().then_some(home))
    }

    fn lock_file(&self, key: &Key) -> Result<File, Error> {
        open_lock(&self.images.join("locks").join(key.as_str()))
    }

    /// Waits until nobody else makes or removes it.
    pub fn claim(&self, key: &Key, job: &Job) -> Result<Claim, Error> {
        Ok(Claim {
            roots: self.clone(),
            key: key.clone(),
            held: wait(self.lock_file(key)?, FlockArg::LockExclusiveNonblock, job)?,
        })
    }

    /// The right to remove it, if nobody is at it and it was last used before `before`.
    pub fn claim_unused(&self, key: &Key, before: Timestamp) -> Result<Option<Claim>, Error> {
        let Ok(held) = Flock::lock(self.lock_file(key)?, FlockArg::LockExclusiveNonblock) else {
            return Ok(None);
        };
        let used = held
            .metadata()
            .and_then(|about| about.modified())
            .map_err(Error::store("read a lock"))?;
        let used = used.duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let claim = Claim {
            roots: self.clone(),
            key: key.clone(),
            held,
        };
        Ok((Timestamp(used.as_millis() as i64) < before).then_some(claim))
    }

    /// Every root there is.
    pub fn keys(&self) -> Result<Vec<Key>, Error> {
        let names = super::names(&self.images).map_err(Error::store("list the roots"))?;
        Ok(names.iter().filter_map(|name| Key::read(name)).collect())
    }

    /// Guards names and records. Held for moments only.
    pub fn lock(&self) -> Result<Flock<File>, Error> {
        wait(
            open_lock(&self.images.join("lock"))?,
            FlockArg::LockExclusiveNonblock,
            &Job::default(),
        )
    }

    pub fn scratch(&self) -> Result<Scratch, Error> {
        let _alone = self.lock()?;
        self.sweep().map_err(Error::store("sweep"))?;
        let make = || {
            let path = tempfile::Builder::new()
                .prefix(SCRATCH)
                .tempdir_in(&self.images)?
                .keep();
            let held = Flock::lock(File::open(&path)?, FlockArg::LockExclusiveNonblock).map_err(|(_, error)| error)?;
            Ok(Scratch { path, _held: held })
        };
        make().map_err(Error::store("make a directory"))
    }

    /// What killed ones left and nobody has swept yet.
    pub fn left(&self) -> Result<Vec<PathBuf>, Error> {
        let _alone = self.lock()?;
        let left = self.ruins().map_err(Error::store("list what was left"))?;
        Ok(left.into_iter().map(|(path, _)| path).collect())
    }

    /// Removes what killed ones left. The lock is held.
    fn sweep(&self) -> io::Result<()> {
        for (path, held) in self.ruins()? {
            fs::remove_dir_all(path)?;
            drop(held);
        }
        Ok(())
    }

    /// What killed ones left, held. The lock is held: no scratch directory is between being made and being locked.
    fn ruins(&self) -> io::Result<Vec<(PathBuf, Flock<File>)>> {
        let mut ruins = Vec::new();
        for entry in fs::read_dir(&self.images)? {
            let entry = entry?;
            let name = entry.file_name();
            // The second is how scratch directories were called before.
            let is_ours = |prefix| name.to_str().is_some_and(|name| name.starts_with(prefix));
            if !is_ours(SCRATCH) && !is_ours(".unpacking-") {
                continue;
            }
            if let Ok(held) = Flock::lock(File::open(entry.path())?, FlockArg::LockExclusiveNonblock) {
                ruins.push((entry.path(), held));
            }
        }
        Ok(ruins)
    }
}

impl Claim {
    pub fn is_made(&self) -> bool {
        self.roots.home(&self.key).is_dir()
    }

    /// Makes the root in a directory of its own, and shows it once it is whole.
    pub fn make<T>(&self, fill: impl FnOnce(&Path) -> Result<T, Error>) -> Result<T, Error> {
        let scratch = self.roots.scratch()?;
        let root = scratch.path().join("root");
        fs::create_dir(&root).map_err(Error::store("make a directory"))?;
        let filled = fill(&root)?;
        fs::rename(&root, self.roots.home(&self.key))
            .and_then(|()| File::open(&self.roots.images)?.sync_all())
            .map_err(Error::store("show an image"))?;
        // Made, and not looked up yet.
        mark(&self.held, TimeSpec::new(0, 0))?;
        Ok(filled)
    }

    /// Where the root is; marks it as used just now.
    pub fn used(self) -> Result<PathBuf, Error> {
        mark(&self.held, TimeSpec::UTIME_NOW)?;
        Ok(self.roots.home(&self.key))
    }

    /// Removes the root; out of sight in one step.
    pub fn remove(self) -> Result<(), Error> {
        let scratch = self.roots.scratch()?;
        let home = self.roots.home(&self.key);
        match fs::rename(home, scratch.path().join("removed")) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Error::store("remove an image")(error)),
            Ok(()) | Err(_) => Ok(()),
        }?;
        drop(self.held);
        Ok(())
    }
}

/// The time of a lock is that of the last look-up.
fn mark(lock: &File, time: TimeSpec) -> Result<(), Error> {
    futimens(lock, &time, &time).map_err(|error| Error::store("mark an image as used")(error.into()))
}

fn open_lock(path: &Path) -> Result<File, Error> {
    let mut options = File::options();
    let file = options.read(true).write(true).create(true).truncate(false).open(path);
    file.map_err(Error::store("open a lock"))
}

/// Tried again and again, so that a cancelled job stops waiting.
fn wait(mut file: File, how: FlockArg, job: &Job) -> Result<Flock<File>, Error> {
    let mut told = false;
    loop {
        match Flock::lock(file, how) {
            Ok(held) => return Ok(held),
            Err((back, nix::Error::EWOULDBLOCK | nix::Error::EINTR)) => file = back,
            Err((_, error)) => return Err(Error::store("take a lock")(error.into())),
        }
        job.go_on()?;
        if !std::mem::replace(&mut told, true) {
            job.tell(Progress::Waiting);
        }
        std::thread::sleep(POLL);
    }
}
