//! Reading and writing what is in a file.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicU32, Ordering};

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, openat, readlinkat, renameat};
use nix::sys::stat::{Mode, fchmod, fstat, fstatat};
use nix::unistd::{AccessFlags, UnlinkatFlags, faccessat, unlinkat};
use prost::bytes::BytesMut;

use super::{Content, Done, Fail, Plane, Replies, Stop, file_type, info, reply_info, split};
use crate::wire::{CHUNK, FileReply, FileType, file_reply, file_request};

/// Symbolic links followed by a write, as the kernel does for an open.
const MAX_LINKS: usize = 40;

/// Tells apart the temporary files of one process.
static WRITES: AtomicU32 = AtomicU32::new(0);

impl Plane {
    /// Opens a regular file for reading, whatever is at `path`, without ever blocking.
    pub(super) fn open_regular(&self, path: &[u8]) -> Result<(File, u64), Fail> {
        let file = self.open(path, OFlag::O_RDONLY | OFlag::O_NONBLOCK)?;
        let stat = fstat(&file).map_err(|errno| Fail::of(path, errno))?;
        regular(path, file_type(&stat))?;
        Ok((File::from(file), stat.st_size.max(0) as u64))
    }

    pub(super) fn read(&self, read: &file_request::Read, reply: &mut Replies<'_>) -> Result<Done, Stop> {
        let fail = |error: io::Error| Fail::of(&read.path, errno(&error));
        let (mut file, size) = self.open_regular(&read.path)?;
        let stat = fstat(&file).map_err(|errno| Fail::of(&read.path, errno))?;
        reply(reply_info(info(read.path.clone(), &stat, Vec::new())))?;
        if read.offset > 0 {
            file.seek(SeekFrom::Start(read.offset)).map_err(fail)?;
        }
        let wanted = match read.length {
            0 => u64::MAX,
            length => length,
        };
        let mut from = file.take(wanted);
        let (mut sent, mut chunk) = (0, BytesMut::new());
        loop {
            chunk.resize(CHUNK, 0);
            let length = from.read(&mut chunk).map_err(fail)?;
            if length == 0 {
                break;
            }
            sent += length as u64;
            let data = chunk.split_to(length).freeze();
            reply(FileReply {
                kind: Some(file_reply::Kind::Data(data)),
            })?;
        }
        let truncated = read.offset.saturating_add(sent) < size;
        Ok(Done { truncated, total: size })
    }

    pub(super) fn write(
        &self,
        write: &file_request::Write,
        content: &mut Content<'_>,
        reply: &mut Replies<'_>,
    ) -> Result<Done, Stop> {
        if write.path.ends_with(b"/") {
            return Err(Fail::new("is_directory", "a path with `/` at its end is that of a directory").into());
        }
        let target = self.write_target(&write.path)?;
        let (directory, name) = split(&target)?;
        let parent = self.make_directories(directory)?;
        let fail = |errno| Fail::of(&write.path, errno);
        let mode = match fstatat(&parent, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
            Ok(stat) => {
                regular(&write.path, file_type(&stat))?;
                // Replacing it needs leave of the directory alone; a program that opened it to write would need the file's.
                faccessat(&parent, name, AccessFlags::W_OK, AtFlags::empty()).map_err(fail)?;
                stat.st_mode & 0o7777
            }
            Err(Errno::ENOENT) if write.mode == 0 => 0o644,
            Err(Errno::ENOENT) => write.mode & 0o777,
            Err(errno) => return Err(fail(errno).into()),
        };
        let temporary = Temporary::new(parent).map_err(fail)?;
        let mut file = &temporary.file;
        let mut total = 0;
        loop {
            let chunk = content()?;
            if chunk.is_empty() {
                break;
            }
            file.write_all(&chunk).map_err(|error| fail(errno(&error)))?;
            total += chunk.len() as u64;
        }
        // Last, as writing clears set-id bits.
        fchmod(file, Mode::from_bits_truncate(mode)).map_err(fail)?;
        let stat = fstat(file).map_err(fail)?;
        temporary.rename_to(name).map_err(fail)?;
        reply(reply_info(info(write.path.clone(), &stat, Vec::new())))?;
        Ok(Done {
            truncated: false,
            total,
        })
    }

    /// Where a write to `path` goes: the end of the chain where `path` is a symbolic link.
    fn write_target(&self, path: &[u8]) -> Result<Vec<u8>, Fail> {
        let mut target = path.to_vec();
        for _ in 0..MAX_LINKS {
            let (directory, name) = split(&target)?;
            let link = match self.open_directory(directory) {
                Ok(parent) => readlinkat(&parent, name),
                // It will be made.
                Err(fail) if fail.code == "not_found" => return Ok(target),
                Err(fail) => return Err(fail),
            };
            match link {
                Ok(link) if link.as_bytes().starts_with(b"/") => target = link.as_bytes().to_vec(),
                Ok(link) => target = [directory, link.as_bytes()].concat(),
                // Not a link (EINVAL), or not there.
                Err(_) => return Ok(target),
            }
        }
        Err(Fail::of(path, Errno::ELOOP))
    }
}

fn regular(path: &[u8], found: FileType) -> Result<(), Fail> {
    match found {
        FileType::Regular => Ok(()),
        FileType::Directory => Err(Fail::of(path, Errno::EISDIR)),
        FileType::Symlink | FileType::Other | FileType::Unspecified => {
            let message = format!("`{}`: not a regular file", String::from_utf8_lossy(path));
            Err(Fail::new("not_regular", message))
        }
    }
}

fn errno(error: &io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}

/// A file beside the one to be replaced; gone again unless it takes that one's place.
struct Temporary {
    file: File,
    parent: OwnedFd,
    name: String,
    renamed: bool,
}

impl Temporary {
    fn new(parent: OwnedFd) -> nix::Result<Self> {
        loop {
            let number = WRITES.fetch_add(1, Ordering::Relaxed);
            let name = format!(".exuvia-{}-{number}.tmp", std::process::id());
            let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
            match openat(parent.as_fd(), name.as_str(), flags, Mode::from_bits_truncate(0o600)) {
                Ok(file) => {
                    return Ok(Self {
                        file: file.into(),
                        parent,
                        name,
                        renamed: false,
                    });
                }
                // Left by a writer that was killed, whose pid we have now.
                Err(Errno::EEXIST) => {}
                Err(errno) => return Err(errno),
            }
        }
    }

    fn rename_to(mut self, name: &std::ffi::OsStr) -> nix::Result<()> {
        renameat(&self.parent, self.name.as_str(), &self.parent, name)?;
        self.renamed = true;
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.renamed {
            // Best effort: the failure that brought us here is the one to tell.
            let _ = unlinkat(&self.parent, self.name.as_str(), UnlinkatFlags::NoRemoveDir);
        }
    }
}
