//! Removing what a guest left behind, by descriptor.
//!
//! A guest may nest directories as deep as it likes, so nothing here recurses or holds a descriptor for each level:
//! directories that are not empty are moved up to the top of what is removed, and taken apart there.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::error::Error;
use super::folder::{FileType, Folder};
use super::name::push;

/// Removes the directory, or whatever it is, at a path of ours whose content is not trusted. Fine when it is not there.
///
/// # Errors
/// [`Error::Io`]; some may then be gone already.
pub fn remove_all(path: &Path) -> Result<(), Error> {
    let shown = path.as_os_str().as_bytes();
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(Error::io("remove", shown, io::Error::from(io::ErrorKind::InvalidInput)));
    };
    let folder = match Folder::open(parent) {
        Ok(folder) => folder,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(Error::io("open", parent.as_os_str().as_bytes(), error)),
    };
    remove(&folder, name.as_bytes(), &mut parent.as_os_str().as_bytes().to_vec())
}

/// Removes `name` from `folder` with all that is below it. `path` is for errors alone.
///
/// # Errors
/// [`Error::Io`]; some may then be gone already.
pub(super) fn remove(folder: &Folder, name: &[u8], path: &mut Vec<u8>) -> Result<(), Error> {
    let before = path.len();
    push(path, name);
    let done = take_apart(folder, name).map_err(|(doing, error)| Error::io(doing, path, error));
    path.truncate(before);
    done
}

type Failure = (&'static str, io::Error);

fn take_apart(folder: &Folder, name: &[u8]) -> Result<(), Failure> {
    if remove_simple(folder, name)? {
        return Ok(());
    }
    let top = folder.enter(name).map_err(|error| ("enter", error))?;
    let mut moved = 0;
    loop {
        let names = list(&top)?;
        if names.is_empty() {
            return gone(folder.remove_folder(name)).map_err(|error| ("remove", error));
        }
        for name in names {
            if !remove_simple(&top, &name)? {
                lift(&top, &name, &mut moved)?;
            }
        }
    }
}

/// Empties the directory `name` of `top`, its own directories moved up into `top`, and removes it.
fn lift(top: &Folder, name: &[u8], moved: &mut u64) -> Result<(), Failure> {
    let inner = top.enter(name).map_err(|error| ("enter", error))?;
    for child in list(&inner)? {
        while !remove_simple(&inner, &child)? {
            let place = format!(".moved-{moved}");
            *moved += 1;
            match inner.rename_to_new(&child, top, place.as_bytes()) {
                Ok(()) => break,
                // A name that the guest had taken: the next one.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(("move", error)),
            }
        }
    }
    gone(top.remove_folder(name)).map_err(|error| ("remove", error))
}

/// Removes a file or an empty directory; `false` when it is a directory that is not empty.
fn remove_simple(folder: &Folder, name: &[u8]) -> Result<bool, Failure> {
    let is_directory = match folder.look(name).map_err(|error| ("look at", error))? {
        None => return Ok(true),
        Some(meta) => meta.file_type == FileType::Directory,
    };
    let removed = if is_directory {
        folder.remove_folder(name)
    } else {
        folder.remove_file(name)
    };
    match gone(removed) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(false),
        Err(error) => Err(("remove", error)),
    }
}

fn list(folder: &Folder) -> Result<Vec<Box<[u8]>>, Failure> {
    Ok(folder
        .names(u64::MAX)
        .map_err(|error| ("list", error))?
        .unwrap_or_default())
}

fn gone(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A guest's `mkdir d; cd d` without end: deeper than any stack or descriptor limit.
    #[test]
    fn a_nest_of_twenty_thousand_directories_is_removed() {
        let scratch = tempfile::tempdir().unwrap();
        let top = scratch.path().join("work");
        std::fs::create_dir(&top).unwrap();
        let mut inner = Folder::open(&top).unwrap();
        for n in 0..20_000 {
            inner.create_file(b"file").unwrap();
            // A name that the remover would like to use itself.
            let name = if n == 7 { b".moved-0".as_slice() } else { b"d" };
            inner = inner.create_folder(name).unwrap();
        }
        drop(inner);
        remove_all(&top).unwrap();
        assert!(!top.exists());
        remove_all(&top).unwrap();
    }

    #[test]
    fn links_are_removed_and_never_followed() {
        let scratch = tempfile::tempdir().unwrap();
        let (top, kept) = (scratch.path().join("work"), scratch.path().join("kept"));
        std::fs::create_dir_all(top.join("a/b")).unwrap();
        std::fs::create_dir(&kept).unwrap();
        std::fs::write(kept.join("file"), "x").unwrap();
        std::os::unix::fs::symlink(&kept, top.join("a/link")).unwrap();
        std::os::unix::fs::symlink(&kept, top.join("a/b/link")).unwrap();
        remove_all(&top).unwrap();
        assert_eq!(std::fs::read(kept.join("file")).unwrap(), b"x");
        assert!(!top.exists());
    }
}
