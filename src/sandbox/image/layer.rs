//! Applying the tars of an image, one over the other.
//!
//! A layer is hostile. Every entry is made by descriptor: its parent is resolved below the new root (links cannot lead out),
//! its own name is never followed. Device nodes, FIFOs and sockets are dropped, so are set-id bits, owners and extended
//! attributes (file capabilities among them); count, size and depth are bounded.
//!
//! What is where an entry goes gives way to it, a directory to a file too; only a directory over a directory is filled up.
//! A whiteout hides what the layers below have and nothing of its own layer, wherever in the layer it stands.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use nix::fcntl::{AtFlags, OFlag, openat};
use nix::sys::stat::{FchmodatFlags, Mode, SFlag, fchmodat, mkdirat};
use nix::sys::time::TimeSpec;
use nix::unistd::{linkat, symlinkat};
use tar::EntryType;

use super::place::{self, Places};
use super::tape::{self, Head, Tally};
use super::{Error, Job};

/// Directories above one another. Removing goes down with one descriptor a level.
const DEEPEST: usize = 256;
/// The kernel's own bounds.
const LONGEST_NAME: usize = 255;
const LONGEST_PATH: usize = 4095;
/// 2242: later times are taken for nonsense.
const LATEST: u64 = 1 << 33;

/// What names that begin with `.wh.` mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Whiteouts {
    /// What the image format says.
    Apply,
    /// Nothing: a tar of a whole root file system has no layer below it.
    Keep,
}

/// A root file system in the making.
#[derive(Debug)]
pub(super) struct Unpacking {
    top: OwnedFd,
    tally: Tally,
    job: Job,
}

impl Unpacking {
    /// In an empty directory.
    pub fn new(root: &Path, job: &Job) -> Result<Self, Error> {
        let top = File::open(root).map_err(|source| Error::Read {
            path: root.to_owned(),
            source,
        })?;
        Ok(Self {
            top: top.into(),
            tally: Tally::new(job.bounds),
            job: job.clone(),
        })
    }

    /// Applies the next layer. The tar is read up to its end marker.
    pub fn layer(&mut self, from: impl Read, whiteouts: Whiteouts) -> Result<(), Error> {
        let mut layer = Layer {
            top: &self.top,
            fresh: Places::default(),
            whiteouts,
        };
        tape::each(from, &mut self.tally, &self.job, |head, file| layer.entry(&head, file))
    }

    /// Everything is there: makes it last, and tells how many entries and bytes went by.
    pub fn finish(self) -> Result<(u64, u64), Error> {
        let done = fs::set_permissions(
            format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&self.top)),
            fs::Permissions::from_mode(0o755),
        );
        // What bears the final name is whole, also after a power cut.
        done.and_then(|()| nix::unistd::syncfs(&self.top).map_err(io::Error::from))
            .map_err(Error::store("write an image"))?;
        Ok((self.tally.entries, self.tally.bytes))
    }
}

struct Layer<'a> {
    top: &'a OwnedFd,
    /// What this layer has put where.
    fresh: Places,
    whiteouts: Whiteouts,
}

/// What an entry is for, by its name.
enum Role<'a> {
    File { parents: &'a [PathBuf], leaf: &'a PathBuf },
    Hide { parents: &'a [PathBuf], hidden: PathBuf },
    HideAll { parents: &'a [PathBuf] },
    Nothing,
}

const WHITEOUT: &[u8] = b".wh.";
/// Notes of the union file system that the format comes from.
const NOTES: &[u8] = b".wh..wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";

fn role(parts: &[PathBuf], whiteouts: Whiteouts) -> Result<Role<'_>, &'static str> {
    let Some((leaf, parents)) = parts.split_last() else {
        // The root itself.
        return Ok(Role::Nothing);
    };
    if whiteouts == Whiteouts::Keep {
        return Ok(Role::File { parents, leaf });
    }
    for above in parents {
        match above.as_os_str().as_bytes() {
            name if name.starts_with(NOTES) => return Ok(Role::Nothing),
            name if name.starts_with(WHITEOUT) => return Err("lies below a whiteout"),
            _ => {}
        }
    }
    match leaf.as_os_str().as_bytes() {
        OPAQUE => Ok(Role::HideAll { parents }),
        name if name.starts_with(NOTES) => Ok(Role::Nothing),
        name => match name.strip_prefix(WHITEOUT) {
            None => Ok(Role::File { parents, leaf }),
            Some(b"" | b"." | b"..") => Err("is a whiteout of no name"),
            Some(hidden) => Ok(Role::Hide {
                parents,
                hidden: OsStr::from_bytes(hidden).into(),
            }),
        },
    }
}

impl Layer<'_> {
    fn entry(&mut self, head: &Head, file: &mut dyn Read) -> Result<(), Error> {
        let refuse = |why| Error::Entry { name: head.name(), why };
        let failed = |source: nix::Error| Error::Unpack {
            name: head.name(),
            source: source.into(),
        };
        let parts = place::parts(&head.path).ok_or_else(|| refuse("leads out of the image"))?;
        let is_long = |part: &PathBuf| part.as_os_str().len() > LONGEST_NAME;
        if head.path.len() > LONGEST_PATH || parts.iter().any(is_long) {
            return Err(refuse("has a name that is too long"));
        }
        if parts.len() > DEEPEST {
            return Err(refuse("lies too deep"));
        }
        match role(&parts, self.whiteouts).map_err(refuse)? {
            Role::File { parents, leaf } => self.make(head, file, parents, leaf),
            Role::Hide { parents, hidden } => self.hide(parents, Some(&hidden)).map_err(failed),
            Role::HideAll { parents } => self.hide(parents, None).map_err(failed),
            Role::Nothing => Ok(()),
        }
    }

    /// Removes what lower layers have there; all in the directory without a name.
    fn hide(&self, parents: &[PathBuf], hidden: Option<&Path>) -> nix::Result<()> {
        let parent = match place::resolve(self.top, parents) {
            Ok(parent) => parent,
            // Nothing is there to hide.
            Err(nix::Error::ENOENT | nix::Error::ENOTDIR | nix::Error::ELOOP) => return Ok(()),
            Err(error) => return Err(error),
        };
        match hidden {
            Some(leaf) => place::remove(&parent, leaf, &self.fresh).map(drop),
            None => place::purge(&parent, &self.fresh).map(drop),
        }
    }

    fn make(&mut self, head: &Head, file: &mut dyn Read, parents: &[PathBuf], leaf: &Path) -> Result<(), Error> {
        let refuse = |why| Error::Entry { name: head.name(), why };
        let failed = |source: nix::Error| Error::Unpack {
            name: head.name(),
            source: source.into(),
        };
        match head.kind {
            EntryType::Regular | EntryType::Continuous => {
                let parent = self.room(parents, leaf).map_err(failed)?;
                let mut made = create(&parent, leaf, head.mode).map_err(failed)?;
                copy(file, &mut made, head)?;
                finish(&made, head).map_err(failed)?;
                self.fresh.add(&parent, leaf).map_err(failed)
            }
            EntryType::Directory => self.directory(head, parents, leaf).map_err(failed),
            EntryType::Symlink => {
                let held = head.link.as_deref().filter(|held| !held.is_empty());
                let held = held.ok_or_else(|| refuse("is a link that holds nothing"))?;
                let parent = self.room(parents, leaf).map_err(failed)?;
                symlinkat(OsStr::from_bytes(held), &parent, leaf).map_err(failed)?;
                self.fresh.add(&parent, leaf).map_err(failed)
            }
            EntryType::Link => {
                let held = head.link.as_deref().unwrap_or_default();
                let others = place::parts(held).ok_or_else(|| refuse("is a hard link out of the image"))?;
                let (other, above) = others
                    .split_last()
                    .ok_or_else(|| refuse("is a hard link to a directory"))?;
                let from = place::resolve(self.top, above).map_err(failed)?;
                // A link to itself would be lost by making room for it.
                place::kind(&from, other)
                    .and_then(|kind| kind.ok_or(nix::Error::ENOENT))
                    .map_err(failed)?;
                let parent = self.room(parents, leaf).map_err(failed)?;
                linkat(&from, other.as_path(), &parent, leaf, AtFlags::empty()).map_err(failed)?;
                self.fresh.add(&parent, leaf).map_err(failed)
            }
            // Devices, FIFOs, sockets, and headers without a file.
            _ => Ok(()),
        }
    }

    /// The directory for an entry, with nothing of that name in it.
    fn room(&self, parents: &[PathBuf], leaf: &Path) -> nix::Result<OwnedFd> {
        let parent = place::ensure(self.top, parents)?;
        place::remove(&parent, leaf, &Places::default())?;
        Ok(parent)
    }

    fn directory(&mut self, head: &Head, parents: &[PathBuf], leaf: &Path) -> nix::Result<()> {
        let parent = place::ensure(self.top, parents)?;
        match place::kind(&parent, leaf)? {
            Some(SFlag::S_IFDIR) => {}
            Some(_) | None => {
                place::remove(&parent, leaf, &Places::default())?;
                mkdirat(&parent, leaf, Mode::from_bits_truncate(0o755))?;
            }
        }
        // Ours to enter and fill, whatever it says.
        let mode = Mode::from_bits_truncate(head.mode | 0o700);
        fchmodat(&parent, leaf, mode, FchmodatFlags::NoFollowSymlink)?;
        self.fresh.add(&parent, leaf)
    }
}

fn create(parent: &OwnedFd, leaf: &Path, mode: u32) -> nix::Result<File> {
    let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    openat(parent, leaf, flags, Mode::from_bits_truncate(mode)).map(File::from)
}

/// Tells a tar that breaks off from a disk that is full.
fn copy(from: &mut dyn Read, into: &mut File, head: &Head) -> Result<(), Error> {
    let mut chunk = vec![0; 128 << 10];
    let mut left = head.size;
    loop {
        let got = from.read(&mut chunk).map_err(Error::tar)?;
        if got == 0 {
            break;
        }
        left = left.saturating_sub(got as u64);
        io::Write::write_all(into, &chunk[..got]).map_err(|source| Error::Unpack {
            name: head.name(),
            source,
        })?;
    }
    if left == 0 {
        return Ok(());
    }
    Err(Error::Entry {
        name: head.name(),
        why: "breaks off",
    })
}

fn finish(made: &File, head: &Head) -> nix::Result<()> {
    nix::sys::stat::fchmod(made, Mode::from_bits_truncate(head.mode))?;
    // Programs compare times, as compiled Python with its source.
    let modified = TimeSpec::new(head.modified.min(LATEST) as i64, 0);
    nix::sys::stat::futimens(made, &modified, &modified)
}

#[cfg(test)]
mod tests;
