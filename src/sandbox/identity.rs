//! Who gets which range of user ids: no two live sandboxes of this host share one, whatever their data directories. The
//! kernel's limits per user would be shared with it, and files that got out.
//!
//! A range is taken by the file `BASE` in a directory of the host (`/run/exuvia/identities`, which a reboot empties; where
//! there is no such, `DATA/identities`). It names the process that took the range and the data directory that it serves. The range is
//! free again when it was released, or when its taker is dead and no sandbox in that data directory uses it.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{LazyLock, Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use super::backend::{docker, oci};
use super::{Error, Identity, strays};
use crate::process::Process;

/// Where ranges begin: far above the ids of people and services, and of `/etc/subuid` as distributions fill it.
pub const FIRST_BASE: u32 = 16 * Identity::RANGE;
/// Ranges that there are; the last ends below the reserved ids at the top.
const RANGES: u32 = u32::MAX / Identity::RANGE - 17;
const OF_HOST: &str = "/run/exuvia/identities";

/// A taken range; given back when dropped. What a killed process held is free again once it is gone.
#[derive(Debug)]
pub struct Claim {
    ranges: Ranges,
    identity: Identity,
    /// Open, so that no later claim on the same range can have its inode.
    file: File,
}

impl Claim {
    /// Takes a free range for a sandbox of this data directory.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when all are taken.
    pub fn take(data_dir: &Path) -> Result<Self, Error> {
        let ranges = Ranges::of(data_dir)?;
        let (identity, file) = ranges.take(data_dir)?;
        Ok(Self { ranges, identity, file })
    }

    pub fn identity(&self) -> Identity {
        self.identity
    }
}

impl Drop for Claim {
    /// The end of the sandbox may have given it back already, and another may have taken it since.
    fn drop(&mut self) {
        let inode = |found: io::Result<fs::Metadata>| found.map(|found| (found.dev(), found.ino())).ok();
        let ours = inode(self.file.metadata());
        self.ranges.remove_if(self.identity, |claim| {
            ours.is_some() && inode(fs::metadata(claim)) == ours
        });
    }
}

/// Takes a free range for this process, until it is released.
///
/// # Errors
/// [`Error::Unsupported`] when all are taken.
pub fn allocate(data_dir: &Path) -> Result<Identity, Error> {
    Ok(Ranges::of(data_dir)?.take(data_dir)?.0)
}

/// Gives a range back that this data directory has. Fine when it was not taken.
pub fn release(data_dir: &Path, identity: Identity) {
    // What stays behind is taken over once its taker is gone.
    if let Ok(ranges) = Ranges::of(data_dir) {
        let served = whole(data_dir);
        ranges.remove_if(identity, |claim| {
            read(claim).is_ok_and(|taken| taken.is_some_and(|taken| taken.data_dir == served))
        });
    }
}

/// What a claim's file says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Taken {
    /// The process that took it.
    pub by: Process,
    pub data_dir: PathBuf,
}

/// All claims on this host, by the first id of their range.
pub fn claims() -> BTreeMap<u32, Taken> {
    let files = fs::read_dir(OF_HOST).into_iter().flatten().flatten();
    let claim = |file: fs::DirEntry| Some((file.file_name().to_str()?.parse().ok()?, read(&file.path()).ok()??));
    files.filter_map(claim).collect()
}

/// Removes the claims on ranges that are free again.
pub fn sweep() {
    for (base, taken) in claims() {
        let identity = Identity { base };
        if let Ok(ranges) = Ranges::of(&taken.data_dir)
            && !taken.by.is_alive()
            && ranges.is_free(identity).unwrap_or_default()
        {
            forget(identity, &taken);
        }
    }
}

/// Removes the claim on a range whose taker is dead.
pub fn forget(identity: Identity, of: &Taken) {
    if let Ok(ranges) = Ranges::of(&of.data_dir) {
        ranges.remove_if(identity, |claim| {
            read(claim).is_ok_and(|found| found.as_ref() == Some(of)) && !of.by.is_alive()
        });
    }
}

/// The directory of all claims.
#[derive(Debug)]
struct Ranges {
    claims: PathBuf,
    /// The range to try first.
    first: u32,
}

/// Where this process looks on among the ranges of the host: most before it are taken, and one just freed rests.
static NEXT: AtomicU32 = AtomicU32::new(0);

impl Ranges {
    fn of(data_dir: &Path) -> Result<Self, Error> {
        let private = |path: &Path| fs::DirBuilder::new().recursive(true).mode(0o700).create(path);
        let of_host = Path::new(OF_HOST);
        if nix::unistd::geteuid().is_root() && private(of_host).is_ok() {
            return Ok(Self {
                claims: of_host.into(),
                first: NEXT.load(Ordering::Relaxed),
            });
        }
        let claims = data_dir.join("identities");
        match private(&claims) {
            Ok(()) => Ok(Self { claims, first: 0 }),
            Err(error) => Err(unsupported(format!("`{}`: {error}", claims.display()))),
        }
    }

    fn take(&self, data_dir: &Path) -> Result<(Identity, File), Error> {
        let data_dir = whole(data_dir);
        let taken = Taken {
            by: Process::current().map_err(|error| unsupported(error.to_string()))?,
            data_dir,
        };
        let cannot = |error: io::Error| unsupported(format!("`{}`: {error}", self.claims.display()));
        let _alone = self.lock().map_err(cannot)?;
        let used = used(&taken.data_dir);
        for range in (0..RANGES).map(|n| (self.first + n) % RANGES) {
            let identity = Identity {
                base: FIRST_BASE + range * Identity::RANGE,
            };
            if !used.contains(&identity.base) && self.is_free(identity).map_err(cannot)? {
                let file = self.write(identity, &taken).map_err(cannot)?;
                NEXT.store((range + 1) % RANGES, Ordering::Relaxed);
                return Ok((identity, file));
            }
        }
        Err(unsupported(format!("all {RANGES} are taken")))
    }

    fn is_free(&self, identity: Identity) -> io::Result<bool> {
        Ok(match read(&self.claim(identity))? {
            None => true,
            // Its data directory may be gone with the record of a sandbox that still runs.
            Some(taken) => {
                let is_of_host = self.claims == Path::new(OF_HOST);
                let is_held = taken.by.is_alive() || used(&taken.data_dir).contains(&identity.base);
                !is_held && (!is_of_host || !strays::is_inhabited(identity))
            }
        })
    }

    fn write(&self, identity: Identity, taken: &Taken) -> io::Result<File> {
        let fresh = tempfile::NamedTempFile::new_in(&self.claims)?;
        fs::write(fresh.path(), serde_json::to_vec(taken)?)?;
        Ok(fresh.persist(self.claim(identity))?)
    }

    fn remove_if(&self, identity: Identity, is_ours: impl FnOnce(&Path) -> bool) {
        let claim = self.claim(identity);
        // Without the lock it might be another's by the time it is removed.
        if let Ok(_alone) = self.lock()
            && is_ours(&claim)
        {
            let _ = fs::remove_file(claim);
        }
    }

    /// Until the answer is dropped, no other process or thread takes or gives back.
    fn lock(&self) -> io::Result<File> {
        let file = File::create(self.claims.join("lock"))?;
        file.lock()?;
        Ok(file)
    }

    fn claim(&self, identity: Identity) -> PathBuf {
        self.claims.join(identity.base.to_string())
    }
}

/// `None` where there is none, or what is there makes no sense.
fn read(claim: &Path) -> io::Result<Option<Taken>> {
    match fs::read(claim) {
        Ok(text) => Ok(serde_json::from_slice(&text).ok()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The ranges of all sandboxes in a data directory, whichever backend made them.
fn used(data_dir: &Path) -> Vec<u32> {
    /// By data directory and sandbox: a sandbox never changes its range, and there may be thousands.
    static SEEN: LazyLock<Mutex<HashMap<PathBuf, HashMap<OsString, u32>>>> = LazyLock::new(Mutex::default);
    let mut seen = SEEN.lock().unwrap_or_else(PoisonError::into_inner);
    let before = seen.remove(data_dir).unwrap_or_default();
    let mut now = HashMap::new();
    for sandbox in fs::read_dir(data_dir.join("sandboxes")).into_iter().flatten().flatten() {
        let name = sandbox.file_name();
        if let Some(base) = before.get(&name).copied().or_else(|| recorded(&sandbox.path())) {
            now.insert(name, base);
        }
    }
    let bases = now.values().copied().collect();
    seen.insert(data_dir.to_owned(), now);
    bases
}

fn recorded(sandbox: &Path) -> Option<u32> {
    #[derive(Deserialize)]
    struct Record {
        identity: Identity,
    }
    let record = |name| serde_json::from_slice::<Record>(&fs::read(sandbox.join(name)).ok()?).ok();
    [oci::RECORD, docker::RECORD]
        .into_iter()
        .find_map(record)
        .map(|record| record.identity.base)
}

/// One name for one directory.
fn whole(data_dir: &Path) -> PathBuf {
    fs::canonicalize(data_dir).unwrap_or_else(|_| data_dir.to_owned())
}

fn unsupported(missing: String) -> Error {
    Error::Unsupported {
        wanted: "a range of user ids".to_owned(),
        missing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u32 = FIRST_BASE + Identity::RANGE;

    #[test]
    fn data_directories_share_no_range_and_freed_ones_come_back() {
        let dir = tempfile::tempdir().unwrap();
        let ranges = Ranges {
            claims: dir.path().join("claims"),
            first: 0,
        };
        let data = ["claims", "a", "b"].map(|name| {
            fs::create_dir(dir.path().join(name)).unwrap();
            dir.path().join(name)
        });
        let [_, a, b] = &data;
        let take = |data_dir: &Path| ranges.take(data_dir).unwrap().0;
        let (first, second) = (take(a), take(b));
        assert_eq!((first.base, second.base), (FIRST_BASE, SECOND));
        ranges.remove_if(first, |_| true);
        assert_eq!(take(b), first);

        // Its taker is dead: free, but for a sandbox that still uses it.
        let taken = Taken {
            by: Process {
                boot: "another".to_owned(),
                ..Process::current().unwrap()
            },
            data_dir: a.clone(),
        };
        ranges.write(second, &taken).unwrap();
        for record in [oci::RECORD, docker::RECORD] {
            let sandbox = a.join("sandboxes/sbx_1");
            fs::create_dir_all(&sandbox).unwrap();
            fs::write(sandbox.join(record), format!(r#"{{"identity": {{"base": {SECOND}}}}}"#)).unwrap();
            assert!(!ranges.is_free(second).unwrap(), "{record}");
            fs::remove_dir_all(sandbox).unwrap();
        }
        assert_eq!(take(b), second);
    }

    #[test]
    fn a_claim_gives_back_its_own_range_alone() {
        let dir = tempfile::tempdir().unwrap();
        let ranges = || Ranges {
            claims: dir.path().to_owned(),
            first: 0,
        };
        let (identity, file) = ranges().take(dir.path()).unwrap();
        let claim = Claim {
            ranges: ranges(),
            identity,
            file,
        };
        // Given back early, and taken by another.
        ranges().remove_if(identity, |_| true);
        let (again, file) = ranges().take(dir.path()).unwrap();
        assert_eq!(again, identity);
        drop(claim);
        assert!(ranges().claim(identity).exists());
        drop(Claim {
            ranges: ranges(),
            identity,
            file,
        });
        assert!(!ranges().claim(identity).exists());
    }
}
