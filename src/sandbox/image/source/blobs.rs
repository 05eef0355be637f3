//! Files of a layout, by name: in a directory, or in a tar that is read where it lies.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};
use tar::EntryType;

use crate::sandbox::image::packing::Packing;
use crate::sandbox::image::roots::Scratch;
use crate::sandbox::image::tape::{self, Tally};
use crate::sandbox::image::{Bounds, Error, Job, place, rootfs};

/// See the module.
#[derive(Debug)]
pub(in crate::sandbox::image) enum Blobs {
    Directory(OwnedFd),
    Archive {
        file: Arc<File>,
        members: HashMap<String, Member>,
    },
    /// One file, whatever it is called.
    Single(PathBuf),
}

#[derive(Debug, Clone)]
pub(in crate::sandbox::image) enum Member {
    At {
        offset: u64,
        size: u64,
    },
    /// Of the same archive.
    Link(String),
}

/// The bytes of a file, and how many there are.
pub(in crate::sandbox::image) type Opened = (Box<dyn Read>, u64);

/// Links that are followed in an archive, one after the other.
const LINKS: usize = 8;

impl Blobs {
    pub fn directory(path: &Path) -> Result<Self, Error> {
        let directory = File::open(path).map_err(|source| Error::Read {
            path: path.to_owned(),
            source,
        })?;
        Ok(Self::Directory(directory.into()))
    }

    /// A packed one is unpacked into `scratch`, since layers are read out of order.
    pub fn archive(path: &Path, scratch: &Scratch, job: &Job) -> Result<Self, Error> {
        let failed = |source| Error::Read {
            path: path.to_owned(),
            source,
        };
        let mut file = File::open(path).map_err(failed)?;
        let mut first = [0; 6];
        let got = file.read_at(&mut first, 0).map_err(failed)?;
        if Packing::of_bytes(&first[..got]) != Packing::Plain {
            let spool = scratch.path().join("archive.tar");
            let mut options = File::options();
            let mut into = options
                .read(true)
                .write(true)
                .create_new(true)
                .open(spool)
                .map_err(failed)?;
            let mut from = job.reader(rootfs::decoded(file, job)?).take(job.bounds.bytes + 1);
            if io::copy(&mut from, &mut into).map_err(Error::tar)? > job.bounds.bytes {
                return Err(Error::TooLarge {
                    what: "bytes",
                    limit: job.bounds.bytes,
                });
            }
            file = into;
        }
        let file = Arc::new(file);
        let members = members(&file, job)?;
        Ok(Self::Archive { file, members })
    }

    pub fn has(&self, name: &str) -> bool {
        matches!(self.open(name), Ok(Some(_)))
    }

    /// Opens a file, and tells its length.
    pub fn open(&self, name: &str) -> Result<Option<Opened>, Error> {
        let failed = |source: io::Error| Error::Read {
            path: name.into(),
            source,
        };
        match self {
            Self::Directory(top) => {
                let how = OpenHow::new()
                    .flags(OFlag::O_RDONLY | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK)
                    .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS);
                let file = match openat2(top, name, how) {
                    Ok(file) => File::from(file),
                    Err(nix::Error::ENOENT) => return Ok(None),
                    Err(error) => return Err(failed(error.into())),
                };
                let about = file.metadata().map_err(failed)?;
                if !about.is_file() {
                    return Err(Error::format(format!("`{name}`"), "it is no file"));
                }
                Ok(Some((Box::new(file), about.len())))
            }
            Self::Archive { file, members } => {
                let mut name = name.to_owned();
                for _ in 0..LINKS {
                    match members.get(&name) {
                        None => return Ok(None),
                        Some(Member::Link(other)) => name.clone_from(other),
                        Some(&Member::At { offset, size }) => {
                            let part = Part {
                                file: Arc::clone(file),
                                offset,
                                left: size,
                            };
                            return Ok(Some((Box::new(part), size)));
                        }
                    }
                }
                Err(Error::format(format!("`{name}`"), "its links lead in a circle"))
            }
            Self::Single(path) => {
                let file = File::open(path).map_err(failed)?;
                let size = file.metadata().map_err(failed)?.len();
                Ok(Some((Box::new(file), size)))
            }
        }
    }

    /// Reads a whole document.
    pub fn document(&self, name: &str) -> Result<Vec<u8>, Error> {
        let missing = || Error::format("the image", format!("`{name}` is missing"));
        let (from, size) = self.open(name)?.ok_or_else(missing)?;
        let too_large = Error::TooLarge {
            what: "bytes in one document",
            limit: Bounds::DOCUMENT,
        };
        if size > Bounds::DOCUMENT {
            return Err(too_large);
        }
        let mut bytes = Vec::new();
        from.take(Bounds::DOCUMENT)
            .read_to_end(&mut bytes)
            .map_err(|source| Error::Read {
                path: name.into(),
                source,
            })?;
        Ok(bytes)
    }
}

/// Whether a file is an archive of an image, and no tar of a root file system.
pub(super) fn is_archive(path: &Path) -> bool {
    let seen = || {
        let mut tally = Tally::new(Bounds::default());
        let file = File::open(path).map_err(Error::tar)?;
        let mut is_archive = false;
        let job = Job::default();
        // Both writers put one of these at the top; a root file system has neither.
        tape::each(rootfs::decoded(file, &job)?, &mut tally, &job, |head, _| {
            is_archive |= head.path == b"oci-layout" || head.path == b"manifest.json";
            if is_archive { Err(Error::Cancelled) } else { Ok(()) }
        })
        .or_else(|error| if is_archive { Ok(()) } else { Err(error) })?;
        Ok::<_, Error>(is_archive)
    };
    seen().unwrap_or(false)
}

fn members(file: &Arc<File>, job: &Job) -> Result<HashMap<String, Member>, Error> {
    let whole = Part {
        file: Arc::clone(file),
        offset: 0,
        left: file.metadata().map_err(Error::tar)?.len(),
    };
    let mut members = HashMap::new();
    let mut tally = Tally::new(job.bounds);
    tape::each(io::BufReader::new(whole), &mut tally, job, |head, _| {
        let refuse = |why| Error::Entry { name: head.name(), why };
        let parts = place::parts(&head.path).ok_or_else(|| refuse("leads out of the archive"))?;
        let name = joined(&parts);
        let member = match head.kind {
            EntryType::Regular | EntryType::Continuous => Member::At {
                offset: head.offset,
                size: head.size,
            },
            EntryType::Link => {
                let other = head.link.as_deref().and_then(place::parts);
                Member::Link(joined(&other.ok_or_else(|| refuse("leads out of the archive"))?))
            }
            EntryType::Symlink => {
                let above = parts.split_last().map_or(&[][..], |(_, above)| above);
                let held = head.link.as_deref().unwrap_or_default();
                Member::Link(beside(above, held).ok_or_else(|| refuse("leads out of the archive"))?)
            }
            _ => return Ok(()),
        };
        members.insert(name, member);
        Ok(())
    })?;
    Ok(members)
}

fn joined(parts: &[PathBuf]) -> String {
    let shown: Vec<_> = parts.iter().map(|part| part.to_string_lossy()).collect();
    shown.join("/")
}

/// What a link in the directory `above` leads to. Only a name: nothing of it is ever looked up on the host.
fn beside(above: &[PathBuf], held: &[u8]) -> Option<String> {
    let mut parts: Vec<String> = above.iter().map(|part| part.to_string_lossy().into_owned()).collect();
    for part in std::str::from_utf8(held).ok()?.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()?),
            name => parts.push(name.to_owned()),
        }
    }
    Some(parts.join("/"))
}

/// A stretch of a file.
struct Part {
    file: Arc<File>,
    offset: u64,
    left: u64,
}

impl Read for Part {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let most = into.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let got = self.file.read_at(&mut into[..most], self.offset)?;
        self.offset += got as u64;
        self.left -= got as u64;
        Ok(got)
    }
}
