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

struct Watching<'r, 'f> {
    inotify: Inotify,
    recursive: bool,
    root: OwnedFd,
    root_watch: Option<WatchDescriptor>,
    /// The path of each watched directory, relative to the root.
    paths: HashMap<WatchDescriptor, Vec<u8>>,
    reply: &'r mut Replies<'f>,
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
        let root = self.open(&watch.path, OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NONBLOCK)?;
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK).map_err(fail)?;
        let mut watching = Watching {
            inotify,
            recursive: watch.recursive,
            root,
            root_watch: None,
            paths: HashMap::new(),
            reply,
        };
        let root = watching.root.try_clone()?;
        watching.root_watch = Some(watching.add(root.as_fd(), Vec::new()).map_err(fail)?);
        watching.add_below(&root, &[], None)?;
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
            match poll(&mut fds, PollTimeout::NONE) {
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
                // The kernel tells of a change of its attributes, as our own descriptor keeps the directory itself.
                let about_root = event.name.is_none() && Some(event.wd) == self.root_watch;
                if about_root && fstat(&self.root).is_ok_and(|stat| stat.st_nlink == 0) {
                    return Ok(());
                }
                self.hear(&event)?;
            }
        }
    }

    fn hear(&mut self, event: &InotifyEvent) -> Result<(), Stop> {
        let is = |flag| event.mask.contains(flag);
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
                Type::MovedTo => self.appear(&path, None)?,
                Type::MovedFrom => self.disappear(&path),
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
        let opened = match nix::fcntl::openat2(&self.root, name, how) {
            Err(Errno::ENOSYS) => openat(&self.root, name, DIRECTORY, Mode::empty()),
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

    /// A directory has left: nothing below it is told of any more.
    fn disappear(&mut self, path: &[u8]) {
        let below = |other: &[u8]| {
            other
                .strip_prefix(path)
                .is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
        };
        let gone: Vec<_> = self
            .paths
            .iter()
            .filter(|(_, path)| below(path))
            .map(|(watch, _)| *watch)
            .collect();
        for watch in gone {
            self.paths.remove(&watch);
            // The kernel may have dropped it already.
            let _ = self.inotify.rm_watch(watch);
        }
    }
}
