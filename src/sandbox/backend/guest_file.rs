//! The guest's one copy on disk, shared read-only by all sandboxes of a data directory.
//!
//! The bytes are inside this binary (see build.rs). Owns the file's name and how it gets there; knows no backend.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// The static guest, as an ELF file.
pub static GUEST: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/exuvia-guest"));

/// Puts the guest at `DATA/bin/guest-HASH` (mode 0555), unless it is there already with just these bytes, and tells where.
///
/// The name holds the content's hash, so servers of two versions can share a data directory. Several callers at once
/// are fine: each writes its own temporary file and the rename is atomic.
///
/// # Errors
/// When the data directory cannot be written.
pub fn install(data_dir: &Path) -> io::Result<PathBuf> {
    let bin = data_dir.join("bin");
    let path = bin.join(format!("guest-{}", &blake3::hash(GUEST).to_hex()[..16]));
    if fs::read(&path).is_ok_and(|found| found == GUEST) {
        return path.canonicalize();
    }
    fs::create_dir_all(&bin)?;
    let mut file = tempfile::NamedTempFile::new_in(&bin)?;
    file.write_all(GUEST)?;
    file.as_file().set_permissions(fs::Permissions::from_mode(0o555))?;
    file.as_file().sync_all()?;
    file.persist(&path).map_err(|error| error.error)?;
    path.canonicalize()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_copy_is_replaced() {
        let data = tempfile::tempdir().unwrap();
        let path = install(data.path()).unwrap();
        fs::remove_file(&path).unwrap();
        fs::write(&path, b"not the guest").unwrap();
        assert_eq!(install(data.path()).unwrap(), path);
        assert_eq!(fs::read(&path).unwrap(), GUEST);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o555);
        assert_eq!(fs::read_dir(data.path().join("bin")).unwrap().count(), 1);
    }
}
