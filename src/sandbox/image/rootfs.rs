//! Root file systems from a directory, or from a tar that is unpacked once and kept by the hash of its bytes.
//!
//! A tar is hostile. Every entry is made by descriptor: its parent is resolved below the new root (links in the tar cannot
//! lead out), its own name is never followed. Device nodes, FIFOs and sockets are dropped, so are set-id bits, owners and
//! extended attributes; count and size are bounded.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read, Seek};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf};

use nix::fcntl::{AtFlags, OFlag, OpenHow, ResolveFlag, openat, openat2};
use nix::sys::stat::{FchmodatFlags, Mode, fchmodat, mkdirat};
use nix::unistd::{UnlinkatFlags, linkat, symlinkat, unlinkat};
use tar::EntryType;

/// Why an image is not used.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refused {
    #[error("`{}` is no directory", .0.display())]
    NoDirectory(PathBuf),
    #[error("cannot read `{}`", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("entry `{name}` {why}")]
    Entry { name: String, why: &'static str },
    #[error("cannot unpack `{name}`")]
    Unpack {
        name: String,
        #[source]
        source: io::Error,
    },
    #[error("it holds more than {limit} {what}")]
    TooLarge { what: &'static str, limit: u64 },
}

/// Bounds on one unpacked tar.
struct Bounds {
    entries: u64,
    bytes: u64,
}

const BOUNDS: Bounds = Bounds {
    entries: 2_000_000,
    bytes: 64 << 30,
};

pub(super) fn directory(path: &Path) -> Result<PathBuf, Refused> {
    let path = fs::canonicalize(path).map_err(|source| Refused::Read {
        path: path.to_owned(),
        source,
    })?;
    if path.is_dir() {
        Ok(path)
    } else {
        Err(Refused::NoDirectory(path))
    }
}

/// The directory that the tar is unpacked in, under `data_dir/images`; made when there is none yet.
pub(super) fn unpacked(path: &Path, data_dir: &Path) -> Result<PathBuf, Refused> {
    let failed = |source| Refused::Read {
        path: path.to_owned(),
        source,
    };
    let mut file = File::open(path).map_err(failed)?;
    let mut hasher = blake3::Hasher::new();
    io::copy(&mut file, &mut hasher).map_err(failed)?;
    let images = data_dir.join("images");
    let home = images.join(format!("tar-{}", hasher.finalize().to_hex()));
    if home.is_dir() {
        return Ok(home);
    }
    fs::create_dir_all(&images).map_err(failed)?;
    // Unpacked beside and renamed: what bears the name is whole.
    let fresh = tempfile::Builder::new()
        .prefix(".unpacking-")
        .tempdir_in(&images)
        .map_err(failed)?;
    file.rewind().map_err(failed)?;
    unpack(decoded(file).map_err(failed)?, fresh.path(), &BOUNDS)?;
    fs::set_permissions(fresh.path(), fs::Permissions::from_mode(0o755)).map_err(failed)?;
    match fs::rename(fresh.path(), &home) {
        Ok(()) => {
            // It bears another name now; nothing is left to remove.
            let _ = fresh.keep();
            Ok(home)
        }
        // Another process was faster.
        Err(_) if home.is_dir() => Ok(home),
        Err(source) => Err(failed(source)),
    }
}

/// Undoes the compression, told by the first bytes.
fn decoded(mut file: File) -> io::Result<Box<dyn Read>> {
    let mut magic = [0; 4];
    let got = file.read(&mut magic)?;
    file.rewind()?;
    let file = io::BufReader::with_capacity(256 << 10, file);
    Ok(match magic {
        [0x28, 0xb5, 0x2f, 0xfd] if got == 4 => Box::new(zstd::Decoder::with_buffer(file)?),
        [0x1f, 0x8b, _, _] if got >= 2 => Box::new(flate2::bufread::MultiGzDecoder::new(file)),
        _ => Box::new(file),
    })
}

fn unpack(from: impl Read, root: &Path, bounds: &Bounds) -> Result<(), Refused> {
    let top = File::open(root).map_err(|source| Refused::Read {
        path: root.to_owned(),
        source,
    })?;
    let mut archive = tar::Archive::new(from);
    let read = |source| Refused::Read {
        path: root.to_owned(),
        source,
    };
    let mut bytes = 0;
    for (count, entry) in (1..).zip(archive.entries().map_err(read)?) {
        let mut entry = entry.map_err(read)?;
        if count > bounds.entries {
            return Err(Refused::TooLarge {
                what: "entries",
                limit: bounds.entries,
            });
        }
        bytes += entry.size();
        if bytes > bounds.bytes {
            return Err(Refused::TooLarge {
                what: "bytes",
                limit: bounds.bytes,
            });
        }
        let name = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
        let refuse = |why| Refused::Entry {
            name: name.clone(),
            why,
        };
        let parts = parts(&entry.path_bytes()).ok_or_else(|| refuse("leads out of the image"))?;
        let Some((leaf, parents)) = parts.split_last() else {
            continue;
        };
        let failed = |source: nix::Error| Refused::Unpack {
            name: name.clone(),
            source: source.into(),
        };
        let parent = ensure(&top, parents).map_err(failed)?;
        let mode = entry.header().mode().unwrap_or(0o644) & 0o777;
        match entry.header().entry_type() {
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                clear(&parent, leaf).map_err(failed)?;
                let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
                let file = openat(&parent, leaf.as_os_str(), flags, Mode::from_bits_truncate(mode)).map_err(failed)?;
                let mut file = File::from(file);
                let written = io::copy(&mut entry, &mut file)
                    .and_then(|_| file.set_permissions(fs::Permissions::from_mode(mode)));
                written.map_err(|source| Refused::Unpack {
                    name: name.clone(),
                    source,
                })?;
            }
            EntryType::Directory => {
                ensure(&parent, std::slice::from_ref(leaf)).map_err(failed)?;
                // Ours to enter and fill, whatever it says.
                let mode = Mode::from_bits_truncate(mode | 0o700);
                match fchmodat(&parent, leaf.as_os_str(), mode, FchmodatFlags::NoFollowSymlink) {
                    // It is a link that leads to a directory inside: left as it is.
                    Ok(()) | Err(nix::Error::EOPNOTSUPP) => {}
                    Err(error) => return Err(failed(error)),
                }
            }
            EntryType::Symlink => {
                let held = entry
                    .link_name_bytes()
                    .ok_or_else(|| refuse("is a link that holds nothing"))?;
                clear(&parent, leaf).map_err(failed)?;
                symlinkat(OsStr::from_bytes(&held), &parent, leaf.as_os_str()).map_err(failed)?;
            }
            EntryType::Link => {
                let held = entry
                    .link_name_bytes()
                    .ok_or_else(|| refuse("is a link that holds nothing"))?;
                let others = self::parts(&held).ok_or_else(|| refuse("is a hard link out of the image"))?;
                let (other, above) = others
                    .split_last()
                    .ok_or_else(|| refuse("is a hard link to a directory"))?;
                let from = resolve(&top, above).map_err(failed)?;
                clear(&parent, leaf).map_err(failed)?;
                linkat(&from, other.as_os_str(), &parent, leaf.as_os_str(), AtFlags::empty()).map_err(failed)?;
            }
            // Devices, FIFOs, sockets, and headers without a file.
            _ => {}
        }
    }
    Ok(())
}

/// The names of a path; `None` when it climbs. A leading `/` or `./` counts for nothing.
fn parts(path: &[u8]) -> Option<Vec<PathBuf>> {
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

/// Opens a directory below `top`; links on the way stay below it too.
fn resolve(top: impl AsFd, parts: &[PathBuf]) -> nix::Result<OwnedFd> {
    let path: PathBuf = std::iter::once(Path::new("."))
        .chain(parts.iter().map(PathBuf::as_path))
        .collect();
    let how = OpenHow::new()
        .flags(OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS | ResolveFlag::RESOLVE_NO_XDEV);
    openat2(top, &path, how)
}

/// Like [`resolve`]; makes what is missing, mode 0755.
fn ensure(top: impl AsFd, parts: &[PathBuf]) -> nix::Result<OwnedFd> {
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

/// Makes room for an entry: a later one replaces an earlier one, but never a directory.
fn clear(parent: &OwnedFd, leaf: &Path) -> nix::Result<()> {
    match unlinkat(parent, leaf, UnlinkatFlags::NoRemoveDir) {
        Ok(()) | Err(nix::Error::ENOENT) => Ok(()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests;
