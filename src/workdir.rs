//! Working directories: `DATA/work/NAME`, one for each sandbox that has a workspace, with the volume that holds its files.
//!
//! Owns: whose a directory is (`owner.json` in it), and its end, also after `kill -9`; those that a server makes ahead
//! (`stock.rs`). Must not know what is in the workspace.

mod stock;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::process::Process;
use crate::sandbox::Limits;
use crate::sandbox::disk::{self, Volumes};
use crate::workspace;
use crate::workspace::overlay::{self, Ground};

use stock::Origin;
pub use stock::WorkDirs;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot use the working directory `{path}`")]
    Directory {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Disk(#[from] disk::Error),
}

impl Error {
    pub fn kind(&self) -> crate::error::Kind {
        match self {
            Self::Directory { .. } => crate::error::Kind::Internal,
            Self::Disk(error) => error.kind(),
        }
    }
}

/// Names the process that made a working directory.
const OWNER: &str = "owner.json";
/// How the name of one begins that does not say yet whose it is.
const FRESH: &str = ".new-";

/// A directory of ours with a volume in it. What a killed process leaves, [`sweep`] removes.
#[derive(Debug, Clone)]
pub struct WorkDir {
    path: PathBuf,
    /// Where it was made ahead, and is put back should nobody touch it.
    origin: Option<Arc<Origin>>,
}

impl WorkDir {
    /// Makes `DATA/work/NAME`, and in it a volume within the limits whose files belong to `owner`. Blocks for some ten ms
    /// where the volume is an image: a server takes one from its [`WorkDirs`].
    ///
    /// # Errors
    /// With nothing left behind. [`disk::Error::Unsupported`] where this host cannot enforce the limits.
    pub fn open(data_dir: &Path, name: &str, volumes: &Volumes, limits: &Limits, owner: u32) -> Result<Self, Error> {
        let work = Self::make(&data_dir.join("work").join(name))?;
        match volumes.make(&work.path, limits, owner) {
            Ok(_) => Ok(work),
            Err(error) => {
                work.remove();
                Err(error.into())
            }
        }
    }

    fn make(path: &Path) -> Result<Self, Error> {
        let fail = |source| Error::Directory {
            path: path.to_owned(),
            source,
        };
        let owner = Process::current().map_err(fail)?;
        let parent = path.parent().unwrap_or(path);
        fs::create_dir_all(parent).map_err(fail)?;
        // It gets its name when it says whose it is.
        let fresh = tempfile::Builder::new()
            .prefix(&format!("{FRESH}{}-{}-", owner.pid, owner.started))
            .tempdir_in(parent)
            .map_err(fail)?;
        let text = serde_json::to_vec(&owner).expect("an owner is plain data");
        fs::write(fresh.path().join(OWNER), text).map_err(fail)?;
        fs::rename(fresh.path(), path).map_err(fail)?;
        Ok(Self::at(path.to_owned()))
    }

    fn at(path: PathBuf) -> Self {
        Self { path, origin: None }
    }

    /// Takes over the one that a dead process had.
    ///
    /// # Errors
    /// [`Error::Directory`], also when it is not there.
    pub fn adopt(data_dir: &Path, name: &str) -> Result<Self, Error> {
        let path = data_dir.join("work").join(name);
        let taken = fs::metadata(disk::workspace(&path))
            .and_then(|_| Process::current())
            .and_then(|owner| {
                let fresh = path.join("owner.json.new");
                fs::write(&fresh, serde_json::to_vec(&owner).map_err(io::Error::other)?)?;
                fs::rename(fresh, path.join(OWNER))
            });
        match taken {
            Ok(()) => Ok(Self::at(path)),
            Err(source) => Err(Error::Directory { path, source }),
        }
    }

    /// The empty directory on its volume, for a sandbox without a workspace that is laid out.
    pub fn workspace(&self) -> PathBuf {
        disk::workspace(&self.path)
    }

    /// Where a workspace is laid out.
    pub fn ground(&self) -> Ground {
        Ground::new(self.path.clone(), disk::workspace(&self.path))
    }

    /// Its sandbox gets it, empty as it is now: should it be just so at the end, nothing was ever written there, and it may be put
    /// back to where it came from.
    pub fn mark(&self) {
        if let Some(origin) = &self.origin {
            origin.mark(&self.path);
        }
    }

    /// What its files take up. Blocks.
    ///
    /// # Errors
    /// When it is gone.
    pub fn holds(&self) -> io::Result<disk::Holds> {
        disk::holds(&self.path)
    }

    /// Removes it with all that is in it; one that was made ahead and in which nothing was ever written is put back. What
    /// cannot be removed is told, and is swept by the next start. Nothing runs there any more.
    pub fn remove(&self) {
        if self.origin.as_ref().is_some_and(|origin| origin.put_back(&self.path)) {
            return;
        }
        if let Err(error) = remove(&self.path) {
            tracing::warn!(path = %self.path.display(), error, "working directory not removed");
        }
    }
}

/// What is mounted over the volume, then the volume: what is removed then is not walked file by file.
fn remove(path: &Path) -> Result<(), String> {
    overlay::clear(path).map_err(|error| format!("its overlay: {error}"))?;
    disk::clear(path).map_err(|error| format!("its disk: {error}"))?;
    workspace::remove_all(path).map_err(|error| crate::error::chain(&error))
}

/// Whether the maker of a working directory is dead, or has begun to remove it.
fn is_left_behind(path: &Path) -> bool {
    let owner = fs::read(path.join(OWNER))
        .ok()
        .and_then(|text| serde_json::from_slice::<Process>(&text).ok());
    if let Some(owner) = owner {
        return !owner.is_alive();
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    match name.strip_prefix(FRESH) {
        Some(maker) => !is_made_by_the_living(maker),
        // It got its name when it said whose it is: without that it is half removed.
        None => true,
    }
}

/// Reads `PID-STARTED-…`, the rest of a fresh directory's name.
fn is_made_by_the_living(maker: &str) -> bool {
    let mut parts = maker.split('-');
    let mut number = || parts.next()?.parse::<u64>().ok();
    let (Some(pid), Some(started), Ok(me)) = (number(), number(), Process::current()) else {
        return false;
    };
    let maker = Process {
        pid: u32::try_from(pid).unwrap_or(u32::MAX),
        started,
        boot: me.boot,
    };
    maker.is_alive()
}

/// Working directories whose maker is dead.
///
/// # Errors
/// When the data directory cannot be listed.
pub fn left_behind(data_dir: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(data_dir.join("work")) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut left = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if is_left_behind(&path) {
            left.push(path);
        }
    }
    Ok(left)
}

/// Removes working directories whose maker is dead, but for those whose names `is_kept`; gives how many.
///
/// # Errors
/// When the data directory cannot be listed.
pub fn sweep(data_dir: &Path, is_kept: impl Fn(&str) -> bool) -> io::Result<usize> {
    let mut gone = 0;
    for path in left_behind(data_dir)? {
        if is_kept(&path.file_name().unwrap_or_default().to_string_lossy()) {
            continue;
        }
        match remove(&path) {
            Ok(()) => gone += 1,
            // One that cannot be removed does not keep the others.
            Err(error) => tracing::warn!(path = %path.display(), error, "not removed"),
        }
    }
    Ok(gone)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_killed_process_leaves_is_swept_and_what_a_living_one_uses_stays() {
        let data = tempfile::tempdir().unwrap();
        let work = data.path().join("work");
        assert_eq!(sweep(data.path(), |_| false).unwrap(), 0);
        let living = WorkDir::make(&work.join("living")).unwrap();
        let me = Process::current().unwrap();
        let fresh = work.join(format!("{FRESH}{}-{}-x", me.pid, me.started));
        fs::create_dir(&fresh).unwrap();
        let dead = Process {
            started: me.started + 1,
            ..me.clone()
        };
        let left = [
            ("dead", Some(&dead)),
            // Killed while it removed, or while it made.
            ("half-removed", None),
            (&format!("{FRESH}{}-{}-y", dead.pid, dead.started), None),
            (".new-z", None),
        ];
        for (name, owner) in left {
            fs::create_dir_all(work.join(name).join("disk/workspace/sub")).unwrap();
            if let Some(owner) = owner {
                fs::write(work.join(name).join(OWNER), serde_json::to_vec(owner).unwrap()).unwrap();
            }
        }
        assert_eq!(sweep(data.path(), |_| false).unwrap(), 4);
        assert!(fresh.is_dir() && living.path.is_dir());
        living.remove();
        fs::remove_dir(fresh).unwrap();
        assert_eq!(fs::read_dir(work).unwrap().count(), 0);
    }
}
