//! Working directories: `DATA/work/SANDBOX`, each with the workspace of one sandbox, bound into it.
//!
//! Owns: whose such a directory is, and the removal of what dead processes left. Must not know: what a sandbox is.

use std::io;
use std::path::{Path, PathBuf};

use super::{Error, remove_all};
use crate::process::Process;

/// Names the process that made a working directory.
const OWNER: &str = "owner.json";
/// How the name of one begins that does not say yet whose it is.
const FRESH: &str = ".new-";

/// A directory that goes with its sandbox. What a killed process leaves, [`sweep`] removes.
#[derive(Debug, Clone)]
pub struct WorkDir(PathBuf);

impl WorkDir {
    /// Makes the one that is called `name`, without its workspace.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn make(data_dir: &Path, name: &str) -> Result<Self, Error> {
        let parent = data_dir.join("work");
        let path = parent.join(name);
        let made = || {
            let owner = Process::current()?;
            std::fs::create_dir_all(&parent)?;
            // It gets its name when it says whose it is.
            let fresh = tempfile::Builder::new()
                .prefix(&format!("{FRESH}{}-{}-", owner.pid, owner.started))
                .tempdir_in(&parent)?;
            write_owner(&fresh.path().join(OWNER), &owner)?;
            std::fs::rename(fresh.path(), &path)
        };
        match made() {
            Ok(()) => Ok(Self(path)),
            Err(error) => Err(Error::io("make", path.as_os_str().as_encoded_bytes(), error)),
        }
    }

    /// Takes over the one that a dead process had.
    ///
    /// # Errors
    /// [`Error::Io`], also when it is not there.
    pub fn adopt(data_dir: &Path, name: &str) -> Result<Self, Error> {
        let path = data_dir.join("work").join(name);
        let taken = std::fs::metadata(path.join("workspace"))
            .and_then(|_| Process::current())
            .and_then(|owner| {
                let fresh = path.join("owner.json.new");
                write_owner(&fresh, &owner)?;
                std::fs::rename(fresh, path.join(OWNER))
            });
        match taken {
            Ok(()) => Ok(Self(path)),
            Err(error) => Err(Error::io("take over", path.as_os_str().as_encoded_bytes(), error)),
        }
    }

    /// Where the workspace is, or is to be made.
    pub fn workspace(&self) -> PathBuf {
        self.0.join("workspace")
    }

    /// Removes it with all that it holds; blocking. What stays is swept later.
    pub fn remove(&self) {
        if let Err(error) = remove_all(&self.0) {
            let error = crate::error::chain(&error);
            tracing::warn!(path = %self.0.display(), error, "working directory not removed");
        }
    }
}

fn write_owner(file: &Path, owner: &Process) -> io::Result<()> {
    std::fs::write(file, serde_json::to_vec(owner).map_err(io::Error::other)?)
}

/// Whether the maker of a working directory is dead, or has begun to remove it.
fn is_left_behind(path: &Path) -> bool {
    let owner = std::fs::read(path.join(OWNER))
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

/// Removes working directories whose maker is dead, but for those whose names `is_kept`; gives how many.
///
/// # Errors
/// When the data directory cannot be listed.
pub fn sweep(data_dir: &Path, is_kept: impl Fn(&str) -> bool) -> io::Result<usize> {
    let entries = match std::fs::read_dir(data_dir.join("work")) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        Err(error) => return Err(error),
    };
    let mut gone = 0;
    for entry in entries {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if is_kept(&name) || !is_left_behind(&path) {
            continue;
        }
        match remove_all(&path) {
            Ok(()) => gone += 1,
            // One that cannot be removed does not keep the others.
            Err(error) => tracing::warn!(path = %path.display(), error = %crate::error::chain(&error), "not removed"),
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
        let living = WorkDir::make(data.path(), "living").unwrap();
        let me = Process::current().unwrap();
        let fresh = work.join(format!("{FRESH}{}-{}-x", me.pid, me.started));
        std::fs::create_dir(&fresh).unwrap();
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
            std::fs::create_dir_all(work.join(name).join("workspace/sub")).unwrap();
            if let Some(owner) = owner {
                std::fs::write(work.join(name).join(OWNER), serde_json::to_vec(owner).unwrap()).unwrap();
            }
        }
        assert_eq!(sweep(data.path(), |_| false).unwrap(), 4);
        assert!(fresh.is_dir() && living.0.is_dir());
        living.remove();
        std::fs::remove_dir(fresh).unwrap();
        assert_eq!(std::fs::read_dir(work).unwrap().count(), 0);
    }
}
