//! Looking: what a sandbox changed, taken while it stands still.
//!
//! Only the upper layer is walked, or the whole directory where there is no layer below. Of each name the kernel is asked
//! once; a file is read only when its stamp differs from the last look's (`index.rs`). Hashing, packing and storing come after
//! the sandbox goes on (`keep.rs`), and so does the reading of files whose change will show (see [`Reading`]).
//!
//! A guest writes here through the overlay alone. It cannot make whiteouts (overlayfs refuses them) nor `trusted.*`
//! attributes (it has no rights over the host), so these are overlayfs' own words. All else is not trusted: every name is opened
//! by descriptor, without following links.

use std::collections::HashSet;
use std::fs::File as Opened;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use nix::fcntl::AtFlags;
use nix::sys::stat::fstatat;
use rustix::fs::{fgetxattr, flistxattr};

use super::super::attributes::Attributes;
use super::super::batch::Batch;
use super::super::error::Error;
use super::super::folder::{FileType, Folder, Meta, tick};
use super::super::id::BlobId;
use super::super::index::{Index, Known, Seen};
use super::super::limits::{Limits, Meter};
use super::super::name::{push, shown};
use super::super::snapshot::{Report, SpecialFile};

/// Content up to this size is taken into memory; of more, what is read goes to the store at once.
pub(super) const IN_MEMORY: u64 = 1 << 20;
/// Most content that is held in memory, all files together.
const HELD: u64 = 64 << 20;
/// XATTR_LIST_MAX of Linux.
pub(super) const LONGEST_LIST: usize = 64 << 10;

/// When the content of changed files is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reading {
    /// Before the sandbox goes on.
    Now,
    /// After that, where a change in between would show: none of the sandbox's programs has a file open at the moment.
    /// What did change is found out; then it takes another look.
    Later,
}

/// What a sandbox changed, as it was at one moment.
pub struct Look {
    pub(super) root: Folded,
    pub(super) known: Option<Index>,
    pub(super) tick: i64,
    /// What was stored already.
    pub(super) batch: Batch,
    pub(super) report: Report,
}

/// A directory; names ascend by their bytes.
#[derive(Debug, Default)]
pub(super) struct Folded {
    pub names: Vec<(Box<[u8]>, Met)>,
    /// Nothing of what is below shows through it.
    pub is_opaque: bool,
    /// Where below it was before it was renamed.
    pub redirect: Option<Vec<u8>>,
    /// Whether files in it, or below it, are still to be read.
    pub has_unread: bool,
}

#[derive(Debug)]
pub(super) enum Met {
    /// What is below has been removed.
    Removed,
    File {
        meta: Meta,
        content: Content,
    },
    Directory {
        mode: u16,
        mtime: i64,
        attributes: Option<BlobId>,
        inner: Folded,
    },
    Symlink {
        mtime: i64,
        target: Vec<u8>,
    },
}

#[derive(Debug)]
pub(super) enum Content {
    /// As it was at the last look.
    Known {
        blob: BlobId,
        attributes: Option<BlobId>,
    },
    Held {
        bytes: Vec<u8>,
        attributes: Option<BlobId>,
    },
    Stored {
        blob: BlobId,
        size: u64,
        attributes: Option<BlobId>,
    },
    /// That of a name of the same inode which was met before.
    Twin,
    Unread,
}

/// What is looked at, and how.
pub(super) struct Plan {
    pub is_overlay: bool,
    pub reading: Reading,
    pub known: Option<Index>,
    pub limits: Limits,
}

/// Looks at an upper layer, or at a whole directory.
///
/// # Errors
/// [`Error::Limit`] for more than is taken, [`Error::Io`].
pub(super) fn look(upper: &Folder, batch: Batch, plan: Plan) -> Result<Look, Error> {
    let mut walk = Walk {
        is_overlay: plan.is_overlay,
        reading: plan.reading,
        entries: plan.limits.entries,
        meter: Meter::new(plan.limits),
        tick: tick().map_err(|e| Error::io("ask the time of", b"", e))?,
        path: Vec::new(),
        shared: HashSet::new(),
        held: 0,
        list: vec![0; LONGEST_LIST],
        batch,
        report: Report::default(),
    };
    let root = walk.folder(upper, plan.known.as_ref().map(|known| &*known.root), 0)?;
    Ok(Look {
        root,
        known: plan.known,
        tick: walk.tick,
        batch: walk.batch,
        report: walk.report,
    })
}

struct Walk {
    is_overlay: bool,
    reading: Reading,
    entries: u64,
    meter: Meter,
    tick: i64,
    path: Vec<u8>,
    /// Files with several names that were met.
    shared: HashSet<Key>,
    held: u64,
    list: Vec<u8>,
    batch: Batch,
    report: Report,
}

impl Walk {
    fn folder(&mut self, folder: &Folder, known: Option<&Known>, depth: u32) -> Result<Folded, Error> {
        self.meter.depth(depth, &self.path)?;
        let listed = folder
            .names(self.entries)
            .map_err(|e| Error::io("list", &self.path, e))?;
        let names = listed.ok_or_else(|| Error::Limit {
            what: "entries",
            limit: self.entries,
            path: shown(&self.path),
        })?;
        let mut folded = Folded::default();
        folded.names.reserve_exact(names.len());
        for name in names {
            let before = self.path.len();
            push(&mut self.path, &name);
            let met = self.name(folder, &name, known.and_then(|known| known.get(&name)), depth)?;
            self.path.truncate(before);
            folded.has_unread |= match &met {
                Some(Met::File { content, .. }) => matches!(content, Content::Unread),
                Some(Met::Directory { inner, .. }) => inner.has_unread,
                Some(Met::Removed | Met::Symlink { .. }) | None => false,
            };
            folded.names.extend(met.map(|met| (name, met)));
        }
        Ok(folded)
    }

    /// Looks at one name; `None` when it is gone or has no place in a tree.
    fn name(&mut self, folder: &Folder, name: &[u8], known: Option<&Seen>, depth: u32) -> Result<Option<Met>, Error> {
        self.meter.entry(&self.path)?;
        self.report.entries += 1;
        let Some(meta) = folder.look(name).map_err(|e| Error::io("look at", &self.path, e))? else {
            return Ok(None);
        };
        let special = match meta.file_type {
            FileType::File => return self.file(folder, name, meta, known),
            FileType::Directory => return self.directory(folder, name, known, depth),
            FileType::Symlink => {
                let Some(target) = self.present(folder.read_link(name), "read")? else {
                    return Ok(None);
                };
                let mtime = meta.mtime;
                return Ok(Some(Met::Symlink { mtime, target }));
            }
            FileType::CharDevice if self.is_overlay && is_whiteout(folder, name)? => return Ok(Some(Met::Removed)),
            FileType::CharDevice => SpecialFile::CharDevice,
            FileType::Fifo => SpecialFile::Fifo,
            FileType::Socket => SpecialFile::Socket,
            FileType::BlockDevice => SpecialFile::BlockDevice,
        };
        self.report.skip(&self.path, special);
        // Whatever it hides below stays hidden.
        Ok(Some(Met::Removed))
    }

    fn directory(
        &mut self,
        folder: &Folder,
        name: &[u8],
        known: Option<&Seen>,
        depth: u32,
    ) -> Result<Option<Met>, Error> {
        let Some(inside) = self.present(folder.enter(name), "enter")? else {
            return Ok(None);
        };
        let meta = inside.meta().map_err(|e| Error::io("look at", &self.path, e))?;
        let known = match known {
            Some(Seen::Directory { inner, .. }) => Some(inner),
            Some(Seen::File { .. } | Seen::Symlink { .. }) | None => None,
        };
        let (attributes, of_overlay) = self.attributes(&inside)?;
        self.report.directories += 1;
        let mut inner = self.folder(&inside, known, depth + 1)?;
        if of_overlay {
            let read = |name: &str| overlay_attribute(&inside, name).map_err(|e| Error::io("ask", &self.path, e));
            inner.is_opaque = read("trusted.overlay.opaque")?.as_deref() == Some(b"y");
            inner.redirect = read("trusted.overlay.redirect")?;
        }
        let Meta { mode, mtime, .. } = meta;
        Ok(Some(Met::Directory {
            mode,
            mtime,
            attributes,
            inner,
        }))
    }

    fn file(&mut self, folder: &Folder, name: &[u8], meta: Meta, known: Option<&Seen>) -> Result<Option<Met>, Error> {
        if let Some(Seen::File {
            stamp,
            blob,
            attributes,
        }) = known
            && stamp.covers(&meta)
        {
            let content = Content::Known {
                blob: *blob,
                attributes: *attributes,
            };
            return self.met(meta, content).map(Some);
        }
        if self.shared.contains(&key(&meta)) {
            return self.met(meta, Content::Twin).map(Some);
        }
        if self.reading == Reading::Later && meta.ctime < self.tick {
            return self.met(meta, Content::Unread).map(Some);
        }
        let Some((file, meta)) = self.present(folder.open_file(name), "read")? else {
            return Ok(None);
        };
        if meta.file_type != FileType::File {
            // Swapped since it was looked at: the next look takes it for what it then is.
            return Ok(None);
        }
        let (attributes, _) = self.attributes(&file)?;
        let allowance = self.meter.file_allowance();
        if meta.size > allowance {
            self.meter.file(meta.size, &self.path)?;
        }
        let (content, size) = if meta.size <= IN_MEMORY && self.held + meta.size <= HELD {
            let bytes = whole(&file, meta.size, allowance).map_err(|e| Error::io("read", &self.path, e))?;
            let size = bytes.len() as u64;
            self.held += size;
            (Content::Held { bytes, attributes }, size)
        } else {
            let stored = self.batch.put_reader(&mut &file, allowance);
            let (blob, size) = stored.map_err(|e| e.at(&self.path))?;
            let content = Content::Stored { blob, size, attributes };
            (content, size)
        };
        self.report.read_files += 1;
        self.report.read_bytes += size;
        // Written to while it was read: what was read is kept, and the stamp (of before) will not cover it again.
        self.met(Meta { size, ..meta }, content).map(Some)
    }

    /// Counts a file.
    fn met(&mut self, meta: Meta, content: Content) -> Result<Met, Error> {
        self.meter.file(meta.size, &self.path)?;
        self.report.files += 1;
        self.report.bytes += meta.size;
        if meta.is_shared {
            self.report.hard_linked += 1;
            self.shared.insert(key(&meta));
        }
        Ok(Met::File { meta, content })
    }

    /// Stores the attributes of an open file or directory, and tells whether overlayfs has some of its own on it.
    fn attributes(&mut self, file: impl AsFd) -> Result<(Option<BlobId>, bool), Error> {
        let failed = |e| Error::io("read the attributes of", &self.path, e);
        let (found, of_overlay) = attributes(file, &mut self.list).map_err(failed)?;
        let Some(bytes) = found.encoded() else {
            return Ok((None, of_overlay));
        };
        self.meter.file(bytes.len() as u64, &self.path)?;
        Ok((Some(self.batch.put(&bytes)?), of_overlay))
    }

    /// Takes a name that vanished, or became something else, between two calls for one that is not there.
    fn present<T>(&self, result: io::Result<T>, doing: &'static str) -> Result<Option<T>, Error> {
        present(result).map_err(|error| Error::io(doing, &self.path, error))
    }
}

/// What tells one file with several names from another, and from itself before a change.
pub(super) type Key = (u64, u64, i64);

pub(super) fn key(meta: &Meta) -> Key {
    (meta.device, meta.inode, meta.ctime)
}

pub(super) fn present<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    const GONE: [i32; 5] = [libc::ENOENT, libc::ENOTDIR, libc::ELOOP, libc::ENXIO, libc::EINVAL];
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.raw_os_error().is_some_and(|code| GONE.contains(&code)) => Ok(None),
        Err(error) => Err(error),
    }
}

/// A file's whole content, which is expected to be `size` bytes, and may be `most`.
pub(super) fn whole(mut file: &Opened, size: u64, most: u64) -> io::Result<Vec<u8>> {
    // One byte more: a short read is the end.
    let mut bytes = vec![0; size as usize + 1];
    let read = file.read_at(&mut bytes, 0)?;
    let is_whole = read < bytes.len();
    bytes.truncate(read);
    if !is_whole {
        io::Seek::seek(&mut file, io::SeekFrom::Start(read as u64))?;
        Read::take(file, most.saturating_sub(read as u64)).read_to_end(&mut bytes)?;
    }
    Ok(bytes)
}

/// As [`Walk::attributes`]; `list` is room for their names.
pub(super) fn attributes(file: impl AsFd, list: &mut [u8]) -> io::Result<(Attributes, bool)> {
    let length = match flistxattr(&file, &mut *list) {
        Ok(length) => length,
        Err(rustix::io::Errno::OPNOTSUPP) => 0,
        Err(error) => return Err(error.into()),
    };
    let mut names = list[..length].split(|byte| *byte == 0);
    let of_overlay = names.clone().any(|name| name.starts_with(b"trusted.overlay."));
    let found = match names.any(|name| name.starts_with(b"user.")) {
        true => Attributes::of(file)?,
        false => Attributes::default(),
    };
    Ok((found, of_overlay))
}

fn overlay_attribute(folder: &Folder, name: &str) -> io::Result<Option<Vec<u8>>> {
    let mut value = vec![0; 4096];
    match fgetxattr(folder, name, &mut value[..]) {
        Ok(length) => {
            value.truncate(length);
            Ok(Some(value))
        }
        Err(rustix::io::Errno::NODATA) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn is_whiteout(folder: &Folder, name: &[u8]) -> Result<bool, Error> {
    let stat = fstatat(folder, name, AtFlags::AT_SYMLINK_NOFOLLOW);
    let stat = stat.map_err(|e| Error::io("look at", name, io::Error::from(e)))?;
    Ok(stat.st_rdev == 0)
}
