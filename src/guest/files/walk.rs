//! Walking trees by descriptor: list, search, remove. Symbolic links are never followed.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use globset::{GlobBuilder, GlobMatcher};
use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, openat, readlinkat};
use nix::sys::stat::{FileStat, Mode, fstat, fstatat};
use nix::unistd::{UnlinkatFlags, unlinkat};
use regex::bytes::{Regex, RegexBuilder};

use super::{Done, Fail, MAX_DEPTH, Plane, Replies, Stop, file_type, info, reply_info};
use crate::wire::{FileReply, FileType, Match, file_reply, file_request};

/// Most entries that are read of one directory: bounds memory, as they are sorted.
const MAX_NAMES: usize = 100_000;
/// Most entries or matches that one call returns.
const MAX_RESULTS: u32 = 100_000;
/// Bytes of a line that are matched and, below, told of.
const MAX_LINE: usize = 1 << 20;
const SHOWN_LINE: usize = 400;
/// Bytes in which a NUL marks a binary file.
const SNIFFED: usize = 8 << 10;

/// What a visitor wants next.
#[derive(PartialEq)]
pub(super) enum Go {
    On,
    /// Not into this directory.
    Past,
    Stop,
}

/// One entry on a walk.
pub(super) struct Entry<'a> {
    pub directory: BorrowedFd<'a>,
    pub name: &'a OsStr,
    /// Below the start of the walk.
    pub path: &'a [u8],
    pub stat: &'a FileStat,
    /// 1 for the start's own entries.
    depth: usize,
}

pub(super) type Visitor<'a> = dyn FnMut(&Entry<'_>) -> Result<Go, Stop> + 'a;

impl Plane {
    pub(super) fn list(&self, list: &file_request::List, reply: &mut Replies<'_>) -> Result<Done, Stop> {
        let start = self.open(&list.path, OFlag::O_RDONLY | OFlag::O_DIRECTORY)?;
        let (mut left, mut total) = (limit(list.max_entries), 0);
        let depth = (list.depth.max(1)) as usize;
        let complete = walk(start, Vec::new(), 1, &mut |entry| {
            if left == 0 {
                return Ok(Go::Stop);
            }
            left -= 1;
            total += 1;
            let target = match file_type(entry.stat) {
                FileType::Symlink => readlinkat(entry.directory, entry.name)
                    .map(OsString::into_vec)
                    .unwrap_or_default(),
                FileType::Regular | FileType::Directory | FileType::Other | FileType::Unspecified => Vec::new(),
            };
            reply(reply_info(info(entry.path.to_vec(), entry.stat, target)))?;
            Ok(if entry.depth < depth { Go::On } else { Go::Past })
        });
        let truncated = !complete.map_err(|stop| at(&list.path, stop))?;
        Ok(Done { truncated, total })
    }

    pub(super) fn search(&self, search: &file_request::Search, reply: &mut Replies<'_>) -> Result<Done, Stop> {
        let mut query = Query::new(search)?;
        // Looked at before it is opened for reading: a FIFO must not be waited for.
        let found = fstat(self.open(&search.path, OFlag::O_PATH)?).map_err(|errno| Fail::of(&search.path, errno))?;
        let complete = if file_type(&found) == FileType::Directory {
            let start = self.open(&search.path, OFlag::O_RDONLY | OFlag::O_DIRECTORY)?;
            let result = walk(start, Vec::new(), 1, &mut |entry| query.visit(entry, reply));
            result.map_err(|stop| at(&search.path, stop))?
        } else {
            let (file, _) = self.open_regular(&search.path)?;
            let name = search.path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
            query.read(file, name, reply)? != Go::Stop
        };
        Ok(Done {
            truncated: !complete,
            total: query.files,
        })
    }
}

fn limit(asked: u32) -> u32 {
    if asked == 0 {
        MAX_RESULTS
    } else {
        asked.min(MAX_RESULTS)
    }
}

/// A kernel error of the walk's start, told with its name.
fn at(path: &[u8], stop: WalkStop) -> Stop {
    match stop {
        WalkStop::Start(errno) => Fail::of(path, errno).into(),
        WalkStop::Visitor(stop) => stop,
    }
}

enum WalkStop {
    Start(Errno),
    Visitor(Stop),
}

/// Visits all below `start`, whose own path is `path`. A start that cannot be read is empty.
pub(super) fn all(start: OwnedFd, path: &[u8], visit: &mut Visitor<'_>) -> Result<bool, Stop> {
    let prefix = match path {
        b"" => Vec::new(),
        path => [path, b"/"].concat(),
    };
    match walk(start, prefix, 1, visit) {
        Ok(complete) => Ok(complete),
        Err(WalkStop::Start(_)) => Ok(false),
        Err(WalkStop::Visitor(stop)) => Err(stop),
    }
}

/// Visits all below `directory`, sorted by name, each directory before what it holds; whether it came to the end of it all.
/// Directories that may not be read, or went away, count as empty, save the start.
fn walk(directory: OwnedFd, prefix: Vec<u8>, depth: usize, visit: &mut Visitor<'_>) -> Result<bool, WalkStop> {
    let (entries, mut complete) = entries(directory.as_fd()).map_err(WalkStop::Start)?;
    for (name, stat) in &entries {
        let path = [&prefix, name.as_bytes()].concat();
        let entry = Entry {
            directory: directory.as_fd(),
            name,
            path: &path,
            stat,
            depth,
        };
        match visit(&entry).map_err(WalkStop::Visitor)? {
            Go::Stop => return Ok(false),
            Go::Past => continue,
            Go::On if file_type(stat) != FileType::Directory => continue,
            Go::On if depth >= MAX_DEPTH => {
                complete = false;
                continue;
            }
            Go::On => {}
        }
        let Ok(inner) = open_directory(directory.as_fd(), name) else {
            continue;
        };
        match walk(inner, [&path, b"/".as_slice()].concat(), depth + 1, visit) {
            Ok(whole) if whole => {}
            // Whether the visitor stopped or the depth did is told by asking it again: it stops at once.
            Ok(_) => complete = false,
            Err(WalkStop::Start(_)) => {}
            Err(stop) => return Err(stop),
        }
    }
    Ok(complete)
}

fn open_directory(parent: BorrowedFd<'_>, name: &OsStr) -> nix::Result<OwnedFd> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    openat(parent, name, flags, Mode::empty())
}

/// The entries of a directory by name, and whether that is all of them.
fn entries(directory: BorrowedFd<'_>) -> nix::Result<(BTreeMap<OsString, FileStat>, bool)> {
    // A second descriptor, as reading moves the position.
    let mut reader = Dir::from_fd(open_directory(directory, OsStr::new("."))?)?;
    let mut found = BTreeMap::new();
    for entry in reader.iter() {
        let entry = entry?;
        let name = OsStr::from_bytes(entry.file_name().to_bytes());
        if name == "." || name == ".." {
            continue;
        }
        if found.len() == MAX_NAMES {
            return Ok((found, false));
        }
        // Gone since: not there.
        if let Ok(stat) = fstatat(directory, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
            found.insert(name.to_owned(), stat);
        }
    }
    Ok((found, true))
}

/// A directory on the way down.
struct Level {
    /// Device and inode: by these it is known again on the way up.
    identity: (libc::dev_t, libc::ino_t),
    /// Directories in it that are not empty yet; the last is gone into next.
    left: Vec<OsString>,
    /// Whether nothing else is in it.
    all: bool,
}

impl Level {
    /// Removes what can be removed at once.
    fn begin(directory: &OwnedFd) -> nix::Result<Self> {
        let stat = fstat(directory)?;
        let (entries, all) = entries(directory.as_fd())?;
        let mut left = Vec::new();
        for (name, stat) in entries {
            if file_type(&stat) != FileType::Directory {
                unlinkat(directory, name.as_os_str(), UnlinkatFlags::NoRemoveDir)?;
                continue;
            }
            match unlinkat(directory, name.as_os_str(), UnlinkatFlags::RemoveDir) {
                Err(Errno::ENOTEMPTY | Errno::EEXIST) => left.push(name),
                result => result?,
            }
        }
        Ok(Self {
            identity: (stat.st_dev, stat.st_ino),
            left,
            all,
        })
    }
}

/// Removes all that is in directory `name` of `parent`, however deep: one descriptor at a time, and up again by `..`, which must be the
/// directory that was come from.
pub(super) fn empty(parent: BorrowedFd<'_>, name: &OsStr) -> nix::Result<()> {
    let mut directory = open_directory(parent, name)?;
    let mut level = Level::begin(&directory)?;
    let mut above: Vec<Level> = Vec::new();
    loop {
        if let Some(below) = level.left.last() {
            directory = open_directory(directory.as_fd(), below)?;
            above.push(std::mem::replace(&mut level, Level::begin(&directory)?));
        } else if !level.all {
            level = Level::begin(&directory)?;
        } else {
            let Some(up) = above.pop() else { return Ok(()) };
            let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
            directory = openat(&directory, "..", flags, Mode::empty())?;
            let stat = fstat(&directory)?;
            if (stat.st_dev, stat.st_ino) != up.identity {
                // Somebody moved what is being removed.
                return Err(Errno::ESTALE);
            }
            level = up;
            if let Some(below) = level.left.pop() {
                unlinkat(&directory, below.as_os_str(), UnlinkatFlags::RemoveDir)?;
            }
        }
    }
}

/// A search under way.
struct Query {
    pattern: Regex,
    glob: Option<GlobMatcher>,
    /// Whether the glob is for names alone.
    by_name: bool,
    left: u32,
    files: u64,
}

impl Query {
    fn new(search: &file_request::Search) -> Result<Self, Fail> {
        let invalid = |error: &dyn std::fmt::Display| Fail::new("invalid_pattern", error.to_string());
        let pattern = RegexBuilder::new(&search.pattern)
            .size_limit(1 << 20)
            .dfa_size_limit(1 << 20)
            .build()
            .map_err(|error| invalid(&error))?;
        let glob = match search.glob.as_str() {
            "" => None,
            text => {
                let glob = GlobBuilder::new(text).literal_separator(true).build();
                Some(glob.map_err(|error| invalid(&error))?.compile_matcher())
            }
        };
        Ok(Self {
            pattern,
            glob,
            by_name: !search.glob.contains('/'),
            left: limit(search.max_matches),
            files: 0,
        })
    }

    fn visit(&mut self, entry: &Entry<'_>, reply: &mut Replies<'_>) -> Result<Go, Stop> {
        if self.left == 0 {
            return Ok(Go::Stop);
        }
        match file_type(entry.stat) {
            FileType::Directory if entry.name == ".git" => return Ok(Go::Past),
            FileType::Directory => return Ok(Go::On),
            FileType::Regular => {}
            FileType::Symlink | FileType::Other | FileType::Unspecified => return Ok(Go::Past),
        }
        let subject = if self.by_name {
            entry.name
        } else {
            OsStr::from_bytes(entry.path)
        };
        if self
            .glob
            .as_ref()
            .is_some_and(|glob| !glob.is_match(Path::new(subject)))
        {
            return Ok(Go::Past);
        }
        let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
        match openat(entry.directory, entry.name, flags, Mode::empty()) {
            Ok(file) => self.read(File::from(file), entry.path, reply),
            // Not ours to read, or gone: nothing to find in it.
            Err(_) => Ok(Go::Past),
        }
    }

    /// Tells of the lines of one file that match.
    fn read(&mut self, file: File, path: &[u8], reply: &mut Replies<'_>) -> Result<Go, Stop> {
        let mut reader = BufReader::with_capacity(SNIFFED, file);
        match reader.fill_buf() {
            Ok(head) if head.contains(&0) => return Ok(Go::Past),
            Ok(_) => {}
            Err(_) => return Ok(Go::Past),
        }
        self.files += 1;
        let (mut line, mut number) = (Vec::new(), 0);
        let mut within = false;
        loop {
            line.clear();
            match reader.by_ref().take(MAX_LINE as u64).read_until(b'\n', &mut line) {
                Ok(0) | Err(_) => return Ok(Go::Past),
                Ok(_) => {}
            }
            // The rest of an overlong line is a piece of the same line.
            number += u64::from(!within);
            within = !line.ends_with(b"\n");
            let text = line.strip_suffix(b"\n").unwrap_or(&line);
            let text = text.strip_suffix(b"\r").unwrap_or(text);
            if !self.pattern.is_match(text) {
                continue;
            }
            if self.left == 0 {
                return Ok(Go::Stop);
            }
            self.left -= 1;
            let found = Match {
                path: path.to_vec(),
                line: number,
                text: text[..text.len().min(SHOWN_LINE)].to_vec(),
            };
            reply(FileReply {
                kind: Some(file_reply::Kind::Match(found)),
            })?;
        }
    }
}
