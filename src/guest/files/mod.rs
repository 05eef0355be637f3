//! The file plane: one file request, answered with what the process itself may do.
//!
//! In a sandbox this runs in a forked process that has become the sandbox user, so a call can do exactly what the user's
//! own program could; names are resolved without following the kernel's magic links (`/proc/PID/root`, `/proc/PID/fd/N`).
//! Nothing is ever opened in a way that could block: a FIFO or a device is looked at and refused. The host uses the same
//! code for a directory of its own, confined to it ([`Plane::confined`]).

mod content;
mod walk;
mod watch;

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, OFlag, OpenHow, ResolveFlag, openat, openat2, readlinkat, renameat};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat, fstatat, mkdirat};
use nix::unistd::{UnlinkatFlags, unlinkat};
use prost::bytes::Bytes;

use crate::wire::{self, FileChunk, FileError, FileInfo, FileReply, FileRequest, FileType, file_reply, file_request};

/// Deepest tree that is listed or searched; each level holds one descriptor.
const MAX_DEPTH: usize = 512;

/// Why a request could not be done.
#[derive(Debug)]
pub struct Fail {
    code: &'static str,
    message: String,
    errno: i32,
}

impl Fail {
    fn new(code: &'static str, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            errno: 0,
        }
    }

    /// What the kernel said about `path`.
    fn of(path: &[u8], errno: Errno) -> Self {
        let (code, said) = match errno {
            Errno::ENOENT => ("not_found", "no such file or directory"),
            Errno::EISDIR => ("is_directory", "is a directory"),
            Errno::ENOTDIR => ("not_directory", "a part of it is not a directory"),
            Errno::ENOTEMPTY => ("not_empty", "the directory is not empty"),
            Errno::EACCES | Errno::EPERM | Errno::EROFS => ("permission", errno.desc()),
            Errno::EEXIST => ("exists", "is there already"),
            Errno::ENOSPC | Errno::EDQUOT => ("no_space", errno.desc()),
            Errno::EFBIG | Errno::ENAMETOOLONG => ("too_large", errno.desc()),
            Errno::ELOOP => (
                "other",
                "too many symbolic links, or one of the kernel's own under /proc",
            ),
            other => ("other", other.desc()),
        };
        let message = format!("`{}`: {said}", String::from_utf8_lossy(path));
        Self {
            code,
            message,
            errno: errno as i32,
        }
    }
}

type Done = file_reply::Done;

/// Where the content of a write comes from: the next chunk, empty at the end.
pub type Content<'a> = dyn FnMut() -> io::Result<Bytes> + 'a;
/// Where replies go.
pub type Replies<'a> = dyn FnMut(FileReply) -> io::Result<()> + 'a;

/// A failure of the request, or of the peer's stream.
enum Stop {
    Fail(Fail),
    Peer(io::Error),
}

impl From<Fail> for Stop {
    fn from(fail: Fail) -> Self {
        Self::Fail(fail)
    }
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        Self::Peer(error)
    }
}

/// A place to resolve names from.
#[derive(Debug)]
pub struct Plane {
    base: Option<OwnedFd>,
}

impl Plane {
    /// Names as this process sees them, relative ones from its working directory.
    pub fn of_process() -> Self {
        Self { base: None }
    }

    /// `directory` is the whole world: `/` is it, and nothing leads out.
    pub fn confined(directory: OwnedFd) -> Self {
        Self { base: Some(directory) }
    }

    fn base(&self) -> BorrowedFd<'_> {
        self.base.as_ref().map_or(AT_FDCWD, |base| base.as_fd())
    }

    /// Opens by name.
    fn open(&self, path: &[u8], flags: OFlag) -> Result<OwnedFd, Fail> {
        if path.contains(&0) {
            return Err(Fail::new("bad_request", "a path holds a NUL"));
        }
        let mut resolve = ResolveFlag::RESOLVE_NO_MAGICLINKS;
        resolve.set(ResolveFlag::RESOLVE_IN_ROOT, self.base.is_some());
        let mut flags = flags | OFlag::O_CLOEXEC;
        // The call is strict about flags that have no meaning.
        flags.set(OFlag::O_NOCTTY, !flags.contains(OFlag::O_PATH));
        let how = OpenHow::new().flags(flags).resolve(resolve);
        let name = if path.is_empty() { b"." } else { path };
        let name = OsStr::from_bytes(name);
        match openat2(self.base(), name, how) {
            // A kernel without the call (gVisor): the sandbox's own wall is all there is, as for the user's programs.
            Err(Errno::ENOSYS) if self.base.is_none() => openat(self.base(), name, flags, Mode::empty()),
            result => result,
        }
        .map_err(|errno| Fail::of(path, errno))
    }

    fn open_directory(&self, path: &[u8]) -> Result<OwnedFd, Fail> {
        self.open(path, OFlag::O_PATH | OFlag::O_DIRECTORY)
    }

    /// The directory that holds `path`, and its name there.
    fn parent<'p>(&self, path: &'p [u8]) -> Result<(OwnedFd, &'p OsStr), Fail> {
        let (directory, name) = split(path)?;
        Ok((self.open_directory(directory)?, name))
    }

    /// Makes `path` a directory, parents too; fine when it is one already.
    fn make_directories(&self, path: &[u8]) -> Result<OwnedFd, Fail> {
        match self.open_directory(path) {
            Err(fail) if fail.code == "not_found" => {}
            result => return result,
        }
        let (directory, name) = split(path)?;
        let parent = self.make_directories(directory)?;
        match mkdirat(&parent, name, Mode::from_bits_truncate(0o777)) {
            Ok(()) | Err(Errno::EEXIST) => self.open_directory(path),
            Err(errno) => Err(Fail::of(path, errno)),
        }
    }

    /// Does one request. The last reply is `done` or `error`.
    ///
    /// # Errors
    /// Only when the peer's stream fails.
    pub fn serve(&self, request: FileRequest, content: &mut Content<'_>, reply: &mut Replies<'_>) -> io::Result<()> {
        use file_request::Kind;
        let result = match request.kind {
            None => Err(Fail::new("bad_request", "an empty request").into()),
            Some(Kind::Stat(stat)) => self.stat(&stat.path, reply),
            Some(Kind::Read(read)) => self.read(&read, reply),
            Some(Kind::Write(write)) => self.write(&write, content, reply),
            Some(Kind::List(list)) => self.list(&list, reply),
            Some(Kind::Search(search)) => self.search(&search, reply),
            Some(Kind::Mkdir(mkdir)) => self.mkdir(&mkdir),
            Some(Kind::Remove(remove)) => self.remove(&remove),
            Some(Kind::Rename(rename)) => self.rename(&rename),
            Some(Kind::Watch(_)) => Err(Fail::new("bad_request", "a watch needs a host that can hang up").into()),
        };
        conclude(result, reply)
    }

    fn stat(&self, path: &[u8], reply: &mut Replies<'_>) -> Result<Done, Stop> {
        let file = self.open(path, OFlag::O_PATH | OFlag::O_NOFOLLOW)?;
        let stat = fstat(&file).map_err(|errno| Fail::of(path, errno))?;
        let target = readlinkat(&file, "").map(|target| target.as_bytes().to_vec());
        reply(reply_info(info(path.to_vec(), &stat, target.unwrap_or_default())))?;
        Ok(Done::default())
    }

    fn mkdir(&self, mkdir: &file_request::Mkdir) -> Result<Done, Stop> {
        if mkdir.parents {
            self.make_directories(&mkdir.path)?;
        } else {
            let (parent, name) = self.parent(&mkdir.path)?;
            let made = mkdirat(&parent, name, Mode::from_bits_truncate(0o777));
            made.map_err(|errno| Fail::of(&mkdir.path, errno))?;
        }
        Ok(Done::default())
    }

    fn rename(&self, rename: &file_request::Rename) -> Result<Done, Stop> {
        let (from, old) = self.parent(&rename.from)?;
        let (to, new) = self.parent(&rename.to)?;
        renameat(&from, old, &to, new).map_err(|errno| Fail::of(&rename.from, errno))?;
        Ok(Done::default())
    }

    fn remove(&self, remove: &file_request::Remove) -> Result<Done, Stop> {
        let (parent, name) = self.parent(&remove.path)?;
        let fail = |errno| Fail::of(&remove.path, errno);
        let stat = fstatat(&parent, name, AtFlags::AT_SYMLINK_NOFOLLOW).map_err(fail)?;
        if file_type(&stat) != FileType::Directory {
            unlinkat(&parent, name, UnlinkatFlags::NoRemoveDir).map_err(fail)?;
            return Ok(Done::default());
        }
        if remove.recursive {
            walk::empty(parent.as_fd(), name).map_err(fail)?;
        }
        unlinkat(&parent, name, UnlinkatFlags::RemoveDir).map_err(fail)?;
        Ok(Done::default())
    }
}

/// Gives the last reply.
fn conclude(result: Result<Done, Stop>, reply: &mut Replies<'_>) -> io::Result<()> {
    let last = match result {
        Ok(done) => file_reply::Kind::Done(done),
        Err(Stop::Fail(fail)) => file_reply::Kind::Error(FileError {
            code: fail.code.to_owned(),
            message: fail.message,
            errno: fail.errno,
        }),
        Err(Stop::Peer(error)) => return Err(error),
    };
    reply(FileReply { kind: Some(last) })
}

/// Directory and name of a path; the directory is empty for the base itself.
fn split(path: &[u8]) -> Result<(&[u8], &OsStr), Fail> {
    let end = path.iter().rposition(|byte| *byte != b'/').map_or(0, |at| at + 1);
    let trimmed = &path[..end];
    let start = trimmed.iter().rposition(|byte| *byte == b'/').map_or(0, |at| at + 1);
    match &trimmed[start..] {
        b"" | b"." | b".." => Err(Fail::new("bad_request", "the path names no entry of a directory")),
        name if name.contains(&0) => Err(Fail::new("bad_request", "a path holds a NUL")),
        name => Ok((&trimmed[..start], OsStr::from_bytes(name))),
    }
}

fn file_type(stat: &FileStat) -> FileType {
    match SFlag::from_bits_truncate(stat.st_mode & SFlag::S_IFMT.bits()) {
        SFlag::S_IFREG => FileType::Regular,
        SFlag::S_IFDIR => FileType::Directory,
        SFlag::S_IFLNK => FileType::Symlink,
        _ => FileType::Other,
    }
}

fn info(path: Vec<u8>, stat: &FileStat, link_target: Vec<u8>) -> FileInfo {
    FileInfo {
        path,
        r#type: file_type(stat) as i32,
        size: stat.st_size.max(0) as u64,
        mode: stat.st_mode & 0o7777,
        mtime_ns: stat
            .st_mtime
            .saturating_mul(1_000_000_000)
            .saturating_add(stat.st_mtime_nsec),
        link_target,
    }
}

fn reply_info(info: FileInfo) -> FileReply {
    FileReply {
        kind: Some(file_reply::Kind::Info(info)),
    }
}

/// Serves one request on standard input and output, the way an `Exec.files` process does; gives the exit code.
pub fn serve_stdio() -> i32 {
    // Past the largest size of a file a write fails, as one past the end of a disk does.
    super::sys::ignore_signal(nix::sys::signal::Signal::SIGXFSZ);
    match serve_streams(&mut io::stdin().lock(), &mut io::stdout().lock()) {
        Ok(()) => 0,
        Err(_) => 1,
    }
}

fn serve_streams(input: &mut (impl Read + AsFd), output: &mut impl Write) -> io::Result<()> {
    let Some(request) = wire::read::<FileRequest>(input)? else {
        return Ok(());
    };
    let plane = Plane::of_process();
    if let Some(file_request::Kind::Watch(watch)) = &request.kind {
        let host = input.as_fd();
        let mut reply = |reply: FileReply| -> io::Result<()> {
            wire::write(output, &reply)?;
            output.flush()
        };
        let result = plane.watch(watch, host, &mut reply);
        return conclude(result, &mut reply);
    }
    let mut content = || -> io::Result<Bytes> {
        let chunk = wire::read::<FileChunk>(input)?.ok_or(io::ErrorKind::UnexpectedEof)?;
        Ok(chunk.data)
    };
    // Small replies (list, search) leave together.
    let mut output = io::BufWriter::with_capacity(wire::CHUNK, output);
    let mut reply = |reply: FileReply| wire::write(&mut output, &reply);
    plane.serve(request, &mut content, &mut reply)?;
    output.flush()
}

/// Opens a directory of this process's own for [`Plane::confined`].
pub fn directory(path: &std::path::Path) -> io::Result<OwnedFd> {
    Ok(File::open(path)?.into())
}

#[cfg(test)]
mod tests;
