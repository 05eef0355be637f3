//! Changes below a directory, by inotify(7), until the host hangs up.
//!
//! In a recursive watch a directory that appears is watched too, and what is in it by then is told of as created: a name may
//! be told of twice, but none is missed. What the kernel could not keep is told of as `LOST`.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent, WatchDescriptor};
use nix::sys::stat::{Mode, fstat};

use super::walk::{self, Go};
use super::{Done, Fail, Plane, Replies, Stop, file_type};
use crate::wire::file_reply::{Change, Kind, change::Type};
use crate::wire::{FileReply, FileType, file_request};

const DIRECTORY: OFlag = OFlag::O_RDONLY
    .union(OFlag::O_DIRECTORY)
    .union(OFlag::O_NOFOLLOW)
    .union(OFlag::O_NONBLOCK)
    .union(OFlag::O_CLOEXEC);

/// Milliseconds that a directory which left its place may take to turn up elsewhere; the kernel tells of both together.
const ELSEWHERE: u8 = 20;

const ROOT: OFlag = OFlag::O_RDONLY.union(OFlag::O_DIRECTORY).union(OFlag::O_NONBLOCK);

fn identity(directory: &OwnedFd) -> nix::Result<(u64, u64)> {
    fstat(directory).map(|stat| (stat.st_dev, stat.st_ino))
}

struct Watching<'r, 'f> {
    inotify: Inotify,
    recursive: bool,
    plane: &'r Plane,
    /// The watched directory. It is not kept open: its end would not come then.
    path: &'r [u8],
    root: (u64, u64),
    root_watch: Option<WatchDescriptor>,
    /// The path of each watched directory, relative to the root.
    paths: HashMap<WatchDescriptor, Vec<u8>>,
    reply: &'r mut Replies<'f>,
    /// A directory that has just left its place, and the number that ties it to where it turns up.
    leaving: Option<(u32, Vec<u8>)>,
}

impl Plane {
    /// Replies with changes until `host` ends, or the directory does.
    pub(super) fn watch(
        &self,
        watch: &file_request::Watch,
        host: BorrowedFd<'_>,
        reply: &mut Replies<'_>,
    ) -> Result<Done, Stop> {
        let fail = |errno| Fail::of(&watch.path, errno);
        let root = self.open(&watch.path, ROOT)?;
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK).map_err(fail)?;
        let mut watching = Watching {
            inotify,
            recursive: watch.recursive,
            plane: self,
            path: &watch.path,
            root: identity(&root).map_err(fail)?,
            root_watch: None,
            paths: HashMap::new(),
            reply,
            leaving: None,
        };
        watching.root_watch = Some(watching.add(root.as_fd(), Vec::new()).map_err(fail)?);
        watching.add_below(&root, &[], None)?;
        drop(root);
        watching.tell(Type::Unspecified, Vec::new(), false)?;
        watching.go_on(host)?;
        Ok(Done::default())
    }
}

impl Watching<'_, '_> {
    fn tell(&mut self, kind: Type, path: Vec<u8>, directory: bool) -> io::Result<()> {
        let change = Change {
            r#type: kind as i32,
            path,
            directory,
        };
        (self.reply)(FileReply {
            kind: Some(Kind::Change(change)),
        })
    }

    /// Watches one directory, which goes by `path` from now on.
    fn add(&mut self, directory: BorrowedFd<'_>, path: Vec<u8>) -> nix::Result<WatchDescriptor> {
        let mask = AddWatchFlags::IN_CREATE
            | AddWatchFlags::IN_MODIFY
            | AddWatchFlags::IN_ATTRIB
            | AddWatchFlags::IN_DELETE
            | AddWatchFlags::IN_DELETE_SELF
            | AddWatchFlags::IN_MOVED_FROM
            | AddWatchFlags::IN_MOVED_TO
            | AddWatchFlags::IN_ONLYDIR;
        // By descriptor: a name may mean something else by now.
        let name = format!("/proc/self/fd/{}", directory.as_raw_fd());
        let watch = self.inotify.add_watch(name.as_str(), mask)?;
        self.paths.insert(watch, path);
        Ok(watch)
    }

    /// Watches all directories below `directory`, in a recursive watch; tells of all that is there as `found`.
    fn add_below(&mut self, directory: &OwnedFd, path: &[u8], found: Option<Type>) -> Result<(), Stop> {
        if !self.recursive {
            return Ok(());
        }
        let start = openat(directory, ".", DIRECTORY, Mode::empty());
        let Ok(start) = start else {
            // Not ours to read, or gone.
            return Ok(());
        };
        let walked = walk::all(start, path, &mut |entry| {
            let is_directory = file_type(entry.stat) == FileType::Directory;
            if let Some(kind) = found {
                self.tell(kind, entry.path.to_vec(), is_directory)?;
            }
            if !is_directory {
                return Ok(Go::Past);
            }
            let Ok(child) = openat(entry.directory, entry.name, DIRECTORY, Mode::empty()) else {
                return Ok(Go::Past);
            };
            match self.add(child.as_fd(), entry.path.to_vec()) {
                Ok(_) => Ok(Go::On),
                // The kernel has no room for more.
                Err(Errno::ENOSPC | Errno::ENOMEM) => {
                    self.tell(Type::Lost, entry.path.to_vec(), true)?;
                    Ok(Go::Past)
                }
                Err(_) => Ok(Go::Past),
            }
        });
        walked.map(drop)
    }

    fn go_on(&mut self, host: BorrowedFd<'_>) -> Result<(), Stop> {
        loop {
            let mut fds = [
                PollFd::new(self.inotify.as_fd(), PollFlags::POLLIN),
                PollFd::new(host, PollFlags::POLLIN),
            ];
            let timeout = self.leaving.as_ref().map_or(PollTimeout::NONE, |_| ELSEWHERE.into());
            match poll(&mut fds, timeout) {
                Ok(0) => {
                    self.settle(None);
                    continue;
                }
                Ok(_) | Err(Errno::EINTR) => {}
                Err(errno) => return Err(io::Error::from(errno).into()),
            }
            // The host says nothing more; so this is its end.
            if fds[1].any().unwrap_or(true) {
                return Ok(());
            }
            let events = match self.inotify.read_events() {
                Err(Errno::EAGAIN | Errno::EINTR) => continue,
                result => result.map_err(io::Error::from)?,
            };
            for event in events {
                if event.mask.contains(AddWatchFlags::IN_DELETE_SELF) && Some(event.wd) == self.root_watch {
                    return Ok(());
                }
                self.hear(&event)?;
            }
        }
    }

    fn hear(&mut self, event: &InotifyEvent) -> Result<(), Stop> {
        let is = |flag| event.mask.contains(flag);
        let arrives =
            is(AddWatchFlags::IN_MOVED_TO) && self.leaving.as_ref().is_some_and(|(tie, _)| *tie == event.cookie);
        if !arrives {
            self.settle(None);
        }
        if is(AddWatchFlags::IN_Q_OVERFLOW) {
            self.tell(Type::Lost, Vec::new(), false)?;
            return Ok(());
        }
        if is(AddWatchFlags::IN_IGNORED) {
            self.paths.remove(&event.wd);
            return Ok(());
        }
        let (Some(directory), Some(name)) = (self.paths.get(&event.wd), &event.name) else {
            // About a watched directory itself: its parent tells.
            return Ok(());
        };
        let path = match directory.as_slice() {
            b"" => name.as_bytes().to_vec(),
            directory => [directory, b"/", name.as_bytes()].concat(),
        };
        let is_directory = is(AddWatchFlags::IN_ISDIR);
        let kinds = [
            (AddWatchFlags::IN_CREATE, Type::Created),
            (AddWatchFlags::IN_MODIFY, Type::Modified),
            (AddWatchFlags::IN_ATTRIB, Type::Attributes),
            (AddWatchFlags::IN_DELETE, Type::Removed),
            (AddWatchFlags::IN_MOVED_FROM, Type::MovedFrom),
            (AddWatchFlags::IN_MOVED_TO, Type::MovedTo),
        ];
        let Some((_, kind)) = kinds.into_iter().find(|(flag, _)| is(*flag)) else {
            return Ok(());
        };
        self.tell(kind, path.clone(), is_directory)?;
        if is_directory && self.recursive {
            match kind {
                Type::Created => self.appear(&path, Some(Type::Created))?,
                Type::MovedTo if arrives => self.settle(Some(&path)),
                Type::MovedTo => self.appear(&path, None)?,
                Type::MovedFrom => self.leaving = Some((event.cookie, path)),
                Type::Removed | Type::Modified | Type::Attributes | Type::Lost | Type::Unspecified => {}
            }
        }
        Ok(())
    }

    /// A directory is there that was not.
    fn appear(&mut self, path: &[u8], found: Option<Type>) -> Result<(), Stop> {
        let how = nix::fcntl::OpenHow::new()
            .flags(DIRECTORY)
            .resolve(nix::fcntl::ResolveFlag::RESOLVE_BENEATH | nix::fcntl::ResolveFlag::RESOLVE_NO_SYMLINKS);
        let name = std::ffi::OsStr::from_bytes(path);
        // By its name again, which must still mean the same directory.
        let root = self.plane.open(self.path, ROOT).ok();
        let Some(root) = root.filter(|root| identity(root) == Ok(self.root)) else {
            self.tell(Type::Lost, path.to_vec(), true)?;
            return Ok(());
        };
        let opened = match nix::fcntl::openat2(&root, name, how) {
            Err(Errno::ENOSYS) => openat(&root, name, DIRECTORY, Mode::empty()),
            result => result,
        };
        let Ok(directory) = opened else {
            // Gone again.
            return Ok(());
        };
        if self.add(directory.as_fd(), path.to_vec()).is_err() {
            self.tell(Type::Lost, path.to_vec(), true)?;
            return Ok(());
        }
        self.add_below(&directory, path, found)
    }

    /// The directory that left its place is at `new` now: its watches go on under that name. Or it is nowhere here, and
    /// nothing below it is told of any more.
    fn settle(&mut self, new: Option<&[u8]>) {
        let Some((_, old)) = self.leaving.take() else {
            return;
        };
        let below = |path: &[u8]| {
            let rest = path.strip_prefix(old.as_slice())?;
            (rest.is_empty() || rest[0] == b'/').then(|| rest.to_vec())
        };
        let moved: Vec<_> = self
            .paths
            .iter()
            .filter_map(|(watch, path)| Some((*watch, below(path)?)))
            .collect();
        for (watch, rest) in moved {
            match new {
                Some(new) => drop(self.paths.insert(watch, [new, &rest].concat())),
                None => {
                    self.paths.remove(&watch);
                    // The kernel may have dropped it already.
                    let _ = self.inotify.rm_watch(watch);
                }
            }
        }
    }
}
