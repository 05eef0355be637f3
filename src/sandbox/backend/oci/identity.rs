//! Who gets which range of user ids: no two live sandboxes of one data directory share one.
//!
//! A range is taken by making the file `DATA/identities/BASE`, which names the taker. It is free again when it was released,
//! or when its taker is dead and no sandbox uses it.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use super::record::{self, Record};
use crate::sandbox::{Error, Identity};

/// Where ranges begin: far above the ids of people and services, and of `/etc/subuid` as distributions fill it.
pub const FIRST_BASE: u32 = 16 * Identity::RANGE;
/// Ranges that there are; the last ends below the reserved ids at the top.
const RANGES: u32 = u32::MAX / Identity::RANGE - 17;

/// Takes a free range for this process.
///
/// # Errors
/// [`Error::Unsupported`] when all are taken or the data directory cannot be written.
pub fn allocate(data_dir: &Path) -> Result<Identity, Error> {
    let failed = |why: String| Error::Unsupported {
        wanted: "a range of user ids".to_owned(),
        missing: why,
    };
    let dir = data_dir.join("identities");
    // A data directory whose sandboxes are all another backend's has none yet.
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir);
    made.map_err(|error| failed(format!("`{}`: {error}", dir.display())))?;
    let in_use: Vec<u32> = record::list(&data_dir.join("sandboxes"))
        .into_iter()
        .filter_map(|(_, record)| Some(record?.identity.base))
        .collect();
    for range in 0..RANGES {
        let identity = Identity {
            base: FIRST_BASE + range * Identity::RANGE,
        };
        if in_use.contains(&identity.base) {
            continue;
        }
        match take(&dir, identity) {
            Ok(true) => return Ok(identity),
            Ok(false) => {}
            Err(error) => return Err(failed(format!("`{}`: {error}", dir.display()))),
        }
    }
    Err(failed(format!("all {RANGES} are taken")))
}

/// Gives a range back. Fine when it was not taken.
pub fn release(data_dir: &Path, identity: Identity) {
    // What stays behind is taken over once this process is gone.
    let _ = fs::remove_file(data_dir.join("identities").join(identity.base.to_string()));
}

fn take(dir: &Path, identity: Identity) -> io::Result<bool> {
    let claim = dir.join(identity.base.to_string());
    let fresh = tempfile::NamedTempFile::new_in(dir)?;
    fs::write(fresh.path(), serde_json::to_vec(&Record::new(identity))?)?;
    // Never over an existing claim.
    match fs::hard_link(fresh.path(), &claim) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            let taker = fs::read(&claim)
                .ok()
                .and_then(|text| serde_json::from_slice::<Record>(&text).ok());
            if taker.is_some_and(|taker| taker.owner_is_alive()) {
                return Ok(false);
            }
            // Of two that find it stale, one moves it away; then both are at the start again.
            let stale = fresh.path().with_extension("stale");
            fs::rename(&claim, &stale)?;
            fs::remove_file(stale)?;
            take(dir, identity)
        }
        Err(error) => Err(error),
    }
}
