//! Bases: workspaces that are laid out once, never changed again, and shared by all sandboxes that begin near to them.
//!
//! ```text
//! DATA/bases/NAME/files       what lies below the overlays of sandboxes; of revision NAME, without what is hard-linked
//!                 about.json  which revision, over which other base it lies, its size; its time is that of the last use
//!            .new-*, .gone-*  unfinished or half removed; held locked while somebody is at it
//!            lock             held alone to remove one, together to say that one is used
//! DATA/work/NAME/base.json    which base that sandbox uses
//! ```
//!
//! A base is a whole revision, or what differs from a whole one; never more than these two layers. It gets its name when it is
//! whole. Nothing of it is synced: one of an earlier boot is thrown away, for the store has it. Who uses one says so in its
//! own working directory before the mount, so that after `kill -9` of a server the sandboxes that live on keep theirs.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use serde::{Deserialize, Serialize};

use super::super::clearing;
use super::super::error::Error;
use super::super::folder::{Folder, date_now};
use super::super::materialise::Owner;
use super::super::trees::{Revision, Trees};
use super::below::Below;
use super::idmap::KEPT_AS;
use super::lay::{Laid, Linked, cost, lay};
use super::mount::{Ground, clear};
use crate::process::Process;

const FORMAT_VERSION: u32 = 1;
const NEW: &str = ".new-";
const GONE: &str = ".gone-";
/// What all bases of a data directory may take up, unless they are all in use.
pub const MOST_BYTES: u64 = 16 << 30;
/// Names that are laid into an upper layer in a few milliseconds.
pub(super) const FEW: u64 = 256;
/// Bases that are tried, those used last first.
const TRIED: usize = 8;

/// All bases of a data directory; clones share them.
#[derive(Debug, Clone)]
pub struct Bases(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    dir: PathBuf,
    work: PathBuf,
    most_bytes: u64,
    support: OnceLock<Result<(), String>>,
    /// Those that are being made, by name.
    making: Mutex<HashMap<String, Arc<Mutex<()>>>>,
}

/// One base, which is there as long as somebody says that it uses it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Base {
    pub name: String,
    pub about: About,
    /// Its layers, the topmost first.
    pub layers: Vec<PathBuf>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct About {
    format: u32,
    pub revision: Revision,
    /// The base that lies below this one.
    pub over: Option<String>,
    pub entries: u64,
    bytes: u64,
    boot: String,
}

/// What is in a working directory.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Pin {
    format: u32,
    base: String,
    revision: Revision,
}

impl Bases {
    /// The bases in `DATA/bases`, used by the sandboxes in `DATA/work`.
    pub fn new(data_dir: &Path) -> Self {
        Self::within(data_dir, MOST_BYTES)
    }

    pub(super) fn within(data_dir: &Path, most_bytes: u64) -> Self {
        Self(Arc::new(Inner {
            dir: data_dir.join("bases"),
            work: data_dir.join("work"),
            most_bytes,
            support: OnceLock::new(),
            making: Mutex::default(),
        }))
    }

    /// Whether workspaces can be laid over bases here, and if not, why: really tried, once.
    pub fn support(&self) -> &Result<(), String> {
        self.0.support.get_or_init(|| {
            if !nix::unistd::geteuid().is_root() {
                return Err("the process is not root".to_owned());
            }
            self.try_one().map_err(|error| error.to_string())
        })
    }

    /// One file of ours, seen through a mount as another user's.
    fn try_one(&self) -> io::Result<()> {
        use std::os::unix::fs::MetadataExt;
        let owner = Owner {
            uid: 65_534,
            gid: 65_533,
        };
        let scratch = self.scratch(NEW)?;
        let (layer, upper) = (scratch.path.join("layer"), scratch.path.join("upper"));
        fs::create_dir(&layer)?;
        fs::create_dir(&upper)?;
        fs::write(layer.join("file"), "")?;
        let ground = Ground::new(scratch.path.clone(), upper);
        let seen = ground
            .mount(&[layer], owner)
            .and_then(|()| fs::metadata(ground.files().join("file")));
        ground.unmount()?;
        let seen = seen?;
        match (seen.uid(), seen.gid()) == (owner.uid, owner.gid) {
            true => Ok(()),
            false => Err(io::Error::other(
                "a mount shows files as another user's than it was told",
            )),
        }
    }

    fn name_of(revision: Revision) -> String {
        let times = revision
            .times
            .map_or_else(|| "undated".to_owned(), |times| times.to_string());
        format!("{}-{}", revision.tree, &times[..times.len().min(16)])
    }

    fn load(&self, name: &str) -> io::Result<Option<Base>> {
        let Some(about) = self.about(name)? else {
            return Ok(None);
        };
        let mut layers = vec![self.files(name)];
        if let Some(over) = &about.over {
            match self.about(over)? {
                Some(below) if below.over.is_none() => layers.push(self.files(over)),
                Some(_) | None => return Ok(None),
            }
        }
        let name = name.to_owned();
        Ok(Some(Base { name, about, layers }))
    }

    fn files(&self, name: &str) -> PathBuf {
        self.0.dir.join(name).join("files")
    }

    fn about_file(&self, name: &str) -> PathBuf {
        self.0.dir.join(name).join("about.json")
    }

    /// What a base says of itself; `None` for none, or one that is of no use any more.
    fn about(&self, name: &str) -> io::Result<Option<About>> {
        let text = match fs::read(self.about_file(name)) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let about: Option<About> = serde_json::from_slice(&text).ok();
        let boot = Process::current()?.boot;
        Ok(about.filter(|about| about.format == FORMAT_VERSION && about.boot == boot))
    }

    /// The names of all, those used last first.
    fn names(&self) -> io::Result<Vec<String>> {
        let mut found = Vec::new();
        for name in listed(&self.0.dir)? {
            if name.starts_with('.') {
                continue;
            }
            if let Ok(about) = fs::metadata(self.about_file(&name)) {
                found.push((about.modified()?, name));
            }
        }
        found.sort_unstable_by(|(a, _), (b, _)| b.cmp(a));
        Ok(found.into_iter().map(|(_, name)| name).collect())
    }

    /// The revisions of all bases, which the store has to keep: what is laid over one is told by its trees.
    ///
    /// # Errors
    /// When they cannot be read.
    pub fn revisions(&self) -> io::Result<Vec<Revision>> {
        let mut found = Vec::new();
        for name in self.names()? {
            found.extend(self.about(&name)?.map(|about| about.revision));
        }
        Ok(found)
    }

    /// Says that what is laid in `ground` uses a base, from before that is so; `None` when it has gone.
    pub(super) fn pin(&self, ground: &Ground, name: &str) -> io::Result<Option<Base>> {
        let lock = self.lock()?;
        lock.lock_shared()?;
        let Some(base) = self.load(name)? else {
            return Ok(None);
        };
        let pin = Pin {
            format: FORMAT_VERSION,
            base: name.to_owned(),
            revision: base.about.revision,
        };
        let fresh = ground.pin().with_extension("new");
        fs::write(&fresh, serde_json::to_vec(&pin).map_err(io::Error::other)?)?;
        fs::rename(fresh, ground.pin())?;
        for used in base.about.over.iter().chain([&base.name]) {
            // By a removal at the same time it cannot be gone: the lock is held.
            date_now(&self.about_file(used))?;
        }
        Ok(Some(base))
    }

    /// What the workspace in `ground` is laid over, by what is written there.
    pub(super) fn pinned(ground: &Ground) -> io::Result<Option<Revision>> {
        Ok(read_pin(&ground.pin())?.map(|pin| pin.revision))
    }

    /// The base from which a revision takes least, if that is little enough.
    pub(super) fn near(&self, trees: &Trees, wanted: Revision) -> Result<Option<(Base, u64)>, Error> {
        if let Some(exact) = self.load(&Self::name_of(wanted)).map_err(|e| self.failed("read", e))? {
            return Ok(Some((exact, 0)));
        }
        let mut best: Option<(Base, u64)> = None;
        let names = self.names().map_err(|e| self.failed("list", e))?;
        for name in names.iter().take(TRIED) {
            let Some(base) = self.load(name).map_err(|e| self.failed("read", e))? else {
                continue;
            };
            // What takes as long as a new base would be no gain; of two, the nearer one.
            let most = match &best {
                Some((_, cost)) => cost.saturating_sub(1),
                None => FEW.max(base.about.entries / 2),
            };
            match cost(trees, base.about.revision, wanted, most) {
                Ok(Some(cost)) => best = Some((base, cost)),
                Ok(None) => {}
                // Its tree was collected: it is of no use.
                Err(Error::Missing(_)) => {}
                Err(error) => return Err(error),
            }
            if best.as_ref().is_some_and(|(_, cost)| *cost < FEW / 8) {
                break;
            }
        }
        Ok(best)
    }

    /// Makes the base of a revision: whole, or what differs from another.
    pub(super) fn make(&self, trees: &Trees, revision: Revision, over: Option<&Base>) -> Result<Base, Error> {
        let name = Self::name_of(revision);
        let turn = {
            let mut making = self.0.making.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(making.entry(name.clone()).or_default())
        };
        let made = {
            let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
            self.make_one(trees, revision, &name, over)
        };
        let mut making = self.0.making.lock().unwrap_or_else(PoisonError::into_inner);
        making.remove(&name);
        drop(making);
        let made = made?;
        if let Err(error) = self.trim(&name) {
            tracing::warn!(%error, "bases that are not used stay");
        }
        Ok(made)
    }

    fn make_one(&self, trees: &Trees, revision: Revision, name: &str, over: Option<&Base>) -> Result<Base, Error> {
        if let Some(there) = self.load(name).map_err(|e| self.failed("read", e))? {
            return Ok(there);
        }
        // Over a whole one always: what lies over something itself is passed over.
        let over = match over.map(|base| base.about.over.as_deref().unwrap_or(&base.name)) {
            Some(name) => self.load(name).map_err(|e| self.failed("read", e))?,
            None => None,
        };
        let below = over
            .as_ref()
            .map(|base| Below::new(trees, base.about.revision))
            .transpose()?;
        let failed = |e| self.failed("make", e);
        let scratch = self.scratch(NEW).map_err(failed)?;
        let files = scratch.path.join("files");
        fs::create_dir(&files).map_err(failed)?;
        let folder = Folder::open(&files).map_err(failed)?;
        let Laid { entries, bytes, .. } =
            lay(trees, &folder, below.as_ref(), revision, Some(KEPT_AS), Linked::LeftOut)?;
        let about = About {
            format: FORMAT_VERSION,
            revision,
            entries: entries + over.as_ref().map_or(0, |base| base.about.entries),
            over: over.map(|base| base.name),
            bytes: bytes + entries * 4096,
            boot: Process::current().map_err(failed)?.boot,
        };
        let text = serde_json::to_vec(&about).map_err(|e| failed(io::Error::other(e)))?;
        fs::write(scratch.path.join("about.json"), text).map_err(failed)?;
        let home = self.0.dir.join(name);
        let lock = self.lock().map_err(failed)?;
        lock.lock().map_err(failed)?;
        if home.exists() {
            match self.load(name).map_err(failed)? {
                // Another process was quicker.
                Some(there) => return Ok(there),
                None => self.hide(name).map_err(failed)?,
            }
        }
        fs::rename(&scratch.path, &home).map_err(failed)?;
        drop(lock);
        let made = self.load(name).map_err(failed)?;
        made.ok_or_else(|| failed(io::Error::from(io::ErrorKind::NotFound)))
    }

    /// Makes a base near to a revision, if there is none, so that a sandbox which goes on from there has little to write. Takes its time.
    pub(in super::super) fn ahead(&self, trees: &Trees, revision: Revision) -> Result<(), Error> {
        if self.support().is_err() {
            return Ok(());
        }
        let near = self.near(trees, revision)?;
        let (base, cost) = match near {
            Some((_, cost)) if cost <= FEW => return Ok(()),
            Some((base, cost)) => (Some(base), cost),
            None => (None, u64::MAX),
        };
        // A layer of nearly everything is one too many.
        let over = base.filter(|base| cost <= base.about.entries / 4);
        self.make(trees, revision, over.as_ref()).map(drop)
    }

    /// Removes what is over the bound and not in use, those first that were used the longest ago; and what is of no use any
    /// more. Never `newest`.
    fn trim(&self, newest: &str) -> io::Result<()> {
        let hidden = {
            let lock = self.lock()?;
            lock.lock()?;
            let mut used = self.used()?;
            used.insert(newest.to_owned());
            let mut all = Vec::new();
            for name in self.names()? {
                let base = self.load(&name)?;
                // The base below is used where this one is.
                if let Some(base) = base.as_ref().filter(|_| used.contains(&name)) {
                    used.extend(base.about.over.clone());
                }
                all.push((name, base.map(|base| base.about.bytes)));
            }
            let in_use = all.iter().filter(|(name, _)| used.contains(name));
            let mut bytes: u64 = in_use.filter_map(|(_, size)| *size).sum();
            let mut hidden = false;
            for (name, size) in all.into_iter().filter(|(name, _)| !used.contains(name)) {
                match size.filter(|size| bytes + size <= self.0.most_bytes) {
                    Some(size) => bytes += size,
                    None => {
                        self.hide(&name)?;
                        hidden = true;
                    }
                }
            }
            hidden
        };
        match hidden {
            true => self.sweep().map(drop),
            false => Ok(()),
        }
    }

    /// The names that working directories say they use.
    fn used(&self) -> io::Result<HashSet<String>> {
        let mut used = HashSet::new();
        for name in listed(&self.0.work)? {
            let pin = Ground::new(self.0.work.join(name), PathBuf::new()).pin();
            used.extend(read_pin(&pin)?.map(|pin| pin.base));
        }
        Ok(used)
    }

    /// Takes away a name; what is under it is removed by [`Self::sweep`]. The lock is held alone.
    fn hide(&self, name: &str) -> io::Result<()> {
        let hidden = tempfile::Builder::new().prefix(GONE).tempdir_in(&self.0.dir)?.keep();
        fs::rename(self.0.dir.join(name), hidden.join("base"))
    }

    /// Removes what killed processes left unfinished, and what was taken out of sight; gives how many.
    ///
    /// # Errors
    /// When the directory cannot be read, or something cannot be removed.
    pub fn sweep(&self) -> io::Result<usize> {
        let mut gone = 0;
        for path in self.left_behind()? {
            let Ok(held) = File::open(&path) else { continue };
            if held.try_lock().is_err() {
                continue;
            }
            clear(&path)?;
            clearing::remove_all(&path).map_err(io::Error::other)?;
            gone += 1;
        }
        Ok(gone)
    }

    /// What [`Self::sweep`] would remove.
    ///
    /// # Errors
    /// When the directory cannot be read.
    pub fn left_behind(&self) -> io::Result<Vec<PathBuf>> {
        let names = listed(&self.0.dir)?;
        if names.is_empty() {
            return Ok(Vec::new());
        }
        // None is between being made and being locked.
        let lock = self.lock()?;
        lock.lock()?;
        let mut left = Vec::new();
        for name in names {
            let path = self.0.dir.join(&name);
            let is_ours = name.starts_with(NEW) || name.starts_with(GONE);
            if is_ours && File::open(&path).is_ok_and(|held| held.try_lock().is_ok()) {
                left.push(path);
            }
        }
        Ok(left)
    }

    fn lock(&self) -> io::Result<File> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.0.dir)?;
        let mut options = File::options();
        options.create(true).truncate(false).write(true);
        options.open(self.0.dir.join("lock"))
    }

    fn scratch(&self, prefix: &str) -> io::Result<Scratch> {
        let lock = self.lock()?;
        lock.lock_shared()?;
        let path = tempfile::Builder::new().prefix(prefix).tempdir_in(&self.0.dir)?.keep();
        let held = File::open(&path)?;
        held.lock()?;
        Ok(Scratch { path, _held: held })
    }

    fn failed(&self, doing: &'static str, error: io::Error) -> Error {
        Error::io(doing, self.0.dir.as_os_str().as_encoded_bytes(), error)
    }
}

/// A directory for unfinished work; removed when dropped, unless it has got another name.
struct Scratch {
    path: PathBuf,
    _held: File,
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What stays is swept.
        let _ = clear(&self.path).map(|()| clearing::remove_all(&self.path));
    }
}

fn read_pin(path: &Path) -> io::Result<Option<Pin>> {
    let text = match fs::read(path) {
        Ok(text) => text,
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    let pin: Pin = serde_json::from_slice(&text)?;
    match pin.format {
        FORMAT_VERSION => Ok(Some(pin)),
        other => Err(io::Error::other(format!("`{}` has format {other}", path.display()))),
    }
}

fn listed(dir: &Path) -> io::Result<Vec<String>> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut names = Vec::new();
    for entry in entries {
        names.extend(entry?.file_name().into_string().ok());
    }
    Ok(names)
}
