//! Below one directory: finding, making and removing by descriptor, so that nothing that lies there can lead out of it.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

use nix::dir::Dir;
use nix::fcntl::{AtFlags, OFlag, OpenHow, ResolveFlag, openat, openat2};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat, fstatat, mkdirat};
use nix::unistd::{UnlinkatFlags, unlinkat};

/// The names of a path; `None` when it climbs. A leading `/` or `./` counts for nothing.
pub(super) fn parts(path: &[u8]) -> Option<Vec<PathBuf>> {
    let mut parts = Vec::new();
    for component in Path::new(OsStr::from_bytes(path)).components() {
        match component {
            Component::Normal(name) => parts.push(PathBuf::from(name)),
            Component::RootDir | Component::CurDir => {}
            Component::ParentDir | Component::Prefix(_) => return None,
        }
    }
    Some(parts)
}

/// Opens a directory below `top`; links on the way stay below it too, as if it were the root.
pub(super) fn resolve(top: impl AsFd, parts: &[PathBuf]) -> nix::Result<OwnedFd> {
    let path: PathBuf = std::iter::once(Path::new("."))
        .chain(parts.iter().map(PathBuf::as_path))
        .collect();
    let how = OpenHow::new()
        .flags(OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS | ResolveFlag::RESOLVE_NO_XDEV);
    openat2(top, &path, how)
}

/// Like [`resolve`]; makes what is missing, mode 0755.
pub(super) fn ensure(top: impl AsFd, parts: &[PathBuf]) -> nix::Result<OwnedFd> {
    match resolve(&top, parts) {
        Err(nix::Error::ENOENT) => {}
        other => return other,
    }
    for end in 1..=parts.len() {
        let (leaf, above) = (&parts[end - 1], &parts[..end - 1]);
        match resolve(&top, &parts[..end]) {
            Ok(_) => {}
            Err(nix::Error::ENOENT) => {
                let parent = resolve(&top, above)?;
                mkdirat(&parent, leaf.as_path(), Mode::from_bits_truncate(0o755))?;
            }
            Err(error) => return Err(error),
        }
    }
    resolve(&top, parts)
}

/// Opens a directory that is no link.
fn enter(parent: &OwnedFd, leaf: &Path) -> nix::Result<OwnedFd> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    openat(parent, leaf, flags, Mode::empty())
}

/// What is there itself, not what it leads to.
pub(super) fn kind(parent: &OwnedFd, leaf: &Path) -> nix::Result<Option<SFlag>> {
    match fstatat(parent, leaf, AtFlags::AT_SYMLINK_NOFOLLOW) {
        Ok(found) => Ok(Some(type_of(&found))),
        Err(nix::Error::ENOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

fn type_of(found: &FileStat) -> SFlag {
    SFlag::from_bits_truncate(found.st_mode) & SFlag::S_IFMT
}

fn names(directory: &OwnedFd) -> nix::Result<Vec<PathBuf>> {
    let mut names = Vec::new();
    for entry in Dir::from_fd(directory.try_clone().map_err(|_| nix::Error::EMFILE)?)?.iter() {
        let name = entry?.file_name().to_bytes().to_vec();
        if name != b"." && name != b".." {
            names.push(PathBuf::from(std::ffi::OsString::from_vec(name)));
        }
    }
    Ok(names)
}

/// Places that were filled since it was made: a directory and a name in it, whatever path led there.
#[derive(Debug, Default)]
pub(super) struct Places(HashSet<[u8; 16]>);

impl Places {
    pub fn add(&mut self, directory: &OwnedFd, leaf: &Path) -> nix::Result<()> {
        self.0.insert(place(directory, leaf)?);
        Ok(())
    }
}

/// Hashed, so that millions of long names cost little memory.
fn place(directory: &OwnedFd, leaf: &Path) -> nix::Result<[u8; 16]> {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&fstat(directory)?.st_ino.to_le_bytes());
    hasher.update(leaf.as_os_str().as_bytes());
    let mut short = [0; 16];
    short.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    Ok(short)
}

/// Removes `leaf` and all in it, except what `kept` has and the directories that lead there. Fine when there is nothing.
/// Answers whether it is gone.
pub(super) fn remove(parent: &OwnedFd, leaf: &Path, kept: &Places) -> nix::Result<bool> {
    let is_kept = !kept.0.is_empty() && kept.0.contains(&place(parent, leaf)?);
    match kind(parent, leaf)? {
        None => Ok(true),
        Some(SFlag::S_IFDIR) => {
            let is_empty = purge(&enter(parent, leaf)?, kept)?;
            if is_empty && !is_kept {
                unlinkat(parent, leaf, UnlinkatFlags::RemoveDir)?;
            }
            Ok(is_empty && !is_kept)
        }
        Some(_) if is_kept => Ok(false),
        Some(_) => unlinkat(parent, leaf, UnlinkatFlags::NoRemoveDir).map(|()| true),
    }
}

/// Removes what is in a directory, as [`remove`] does. Answers whether it is empty.
pub(super) fn purge(directory: &OwnedFd, kept: &Places) -> nix::Result<bool> {
    let mut is_empty = true;
    for name in names(directory)? {
        is_empty &= remove(directory, &name, kept)?;
    }
    Ok(is_empty)
}
