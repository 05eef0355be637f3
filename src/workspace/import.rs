//! Importing: a directory of the user's becomes the first tree of a workspace.

use std::io;
use std::path::Path;

use super::error::Error;
use super::folder::Folder;
use super::limits::Limits;
use super::snapshot::Snapshot;
use super::trees::Trees;

impl Trees {
    /// Stores the directory at `dir`; a link at the path itself is followed, for it is the user's. Nothing is written there.
    ///
    /// # Errors
    /// [`Error::NoDirectory`], [`Error::NotADirectory`], [`Error::Unreadable`] (of it or of anything in it),
    /// [`Error::Limit`], [`Error::Io`].
    pub fn import(&self, dir: &Path, limits: Limits) -> Result<Snapshot, Error> {
        self.snapshot(&open(dir)?, None, limits)
    }
}

pub(super) fn open(dir: &Path) -> Result<Folder, Error> {
    let path = dir.display().to_string();
    Folder::open_following(dir).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => Error::NoDirectory(path),
        io::ErrorKind::NotADirectory => Error::NotADirectory(path),
        _ => Error::io("enter", dir.as_os_str().as_encoded_bytes(), source),
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::super::testing::{Bench, everything};
    use super::*;

    #[test]
    fn a_bad_directory_is_told_apart() {
        let bench = Bench::new();
        let at = |name: &str| bench.dir.path().join(name);
        let import = |name: &str| bench.trees.import(&at(name), Limits::default());
        assert!(matches!(import("absent"), Err(Error::NoDirectory(path)) if path.ends_with("absent")));
        fs::write(at("file"), "").unwrap();
        assert!(matches!(import("file"), Err(Error::NotADirectory(path)) if path.ends_with("file")));

        let dir = bench.made("dir", &[].into());
        fs::write(dir.join("f"), "12345").unwrap();
        symlink("dir", at("link")).unwrap();
        let before = everything(&dir);
        assert_eq!(import("link").unwrap().revision, import("dir").unwrap().revision);
        assert_eq!(everything(&dir), before);

        let limits = Limits {
            total_bytes: 4,
            ..Limits::default()
        };
        let error = bench.trees.import(&dir, limits).unwrap_err();
        assert_eq!(error.to_string(), "`f` is beyond the limit of 4 bytes in all");
    }

    #[test]
    fn an_unreadable_file_is_named() {
        let denied = io::Error::from(io::ErrorKind::PermissionDenied);
        let error = Error::io("read", b"a/secret", denied);
        assert_eq!(error.to_string(), "may not read `a/secret`");
        assert_eq!(error.kind(), crate::error::Kind::Denied);
    }
}
