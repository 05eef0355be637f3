//! A directory held by descriptor: the only way in which the host touches names that a guest can write.
//!
//! Each call takes one name (never a path) relative to the descriptor and follows no link. What a name stands for is
//! decided by the type of what was opened, not by what was seen before.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::Path;

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, RenameFlags};
use nix::sys::stat::{FileStat, Mode, SFlag, UtimensatFlags};
use nix::sys::time::TimeSpec;
use nix::unistd::{Gid, Uid, UnlinkatFlags};

/// A directory, open.
#[derive(Debug)]
pub struct Folder(OwnedFd);

/// What a name stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FileType {
    File,
    Directory,
    Symlink,
    Fifo,
    Socket,
    CharDevice,
    BlockDevice,
}

/// What `lstat` says, as far as it matters here. Times are nanoseconds since the epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Meta {
    pub file_type: FileType,
    /// The nine permission bits; set-id and sticky bits are dropped.
    pub mode: u16,
    pub size: u64,
    pub mtime: i64,
    pub ctime: i64,
    pub device: u64,
    pub inode: u64,
    /// A file with more than one name.
    pub is_shared: bool,
    pub uid: u32,
    pub gid: u32,
}

const DIRECTORY: OFlag = OFlag::O_RDONLY
    .union(OFlag::O_DIRECTORY)
    .union(OFlag::O_NOFOLLOW)
    .union(OFlag::O_CLOEXEC);
/// A FIFO does not block, a terminal does not become ours.
const FILE: OFlag = OFlag::O_RDONLY
    .union(OFlag::O_NOFOLLOW)
    .union(OFlag::O_NONBLOCK)
    .union(OFlag::O_NOCTTY)
    .union(OFlag::O_CLOEXEC);
const FRESH: OFlag = OFlag::O_WRONLY
    .union(OFlag::O_CREAT)
    .union(OFlag::O_EXCL)
    .union(OFlag::O_NOFOLLOW)
    .union(OFlag::O_CLOEXEC);

impl Folder {
    /// Opens a directory whose path is trusted. The last component must not be a link.
    ///
    /// # Errors
    /// Those of `open(2)`; `ENOTDIR` or `ELOOP` where it is something else.
    pub fn open(path: &Path) -> io::Result<Self> {
        Ok(Self(nix::fcntl::open(path, DIRECTORY, Mode::empty())?))
    }

    /// Opens a directory whose path is the user's own: links are followed.
    pub(super) fn open_following(path: &Path) -> io::Result<Self> {
        let flags = DIRECTORY.difference(OFlag::O_NOFOLLOW);
        Ok(Self(nix::fcntl::open(path, flags, Mode::empty())?))
    }

    /// Another handle on the same directory.
    pub(super) fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }

    pub(super) fn enter(&self, name: &[u8]) -> io::Result<Self> {
        Ok(Self(nix::fcntl::openat(&self.0, name, DIRECTORY, Mode::empty())?))
    }

    /// The names in it, sorted by bytes, without `.` and `..`; no more than `most`, else `None`.
    pub(super) fn names(&self, most: u64) -> io::Result<Option<Vec<Box<[u8]>>>> {
        let mut names = Vec::new();
        // An own descriptor: the position of a directory stream belongs to the open file.
        let mut stream = Dir::openat(&self.0, ".", DIRECTORY, Mode::empty())?;
        for entry in stream.iter() {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if matches!(name, b"." | b"..") {
                continue;
            }
            if names.len() as u64 >= most {
                return Ok(None);
            }
            names.push(name.into());
        }
        names.sort_unstable();
        Ok(Some(names))
    }

    pub(super) fn meta(&self) -> io::Result<Meta> {
        Ok(Meta::of(&nix::sys::stat::fstat(&self.0)?)?)
    }

    pub(super) fn lstat(&self, name: &[u8]) -> io::Result<Meta> {
        let stat = nix::sys::stat::fstatat(&self.0, name, AtFlags::AT_SYMLINK_NOFOLLOW)?;
        Ok(Meta::of(&stat)?)
    }

    /// `lstat`, with `None` for a name that is not there.
    pub(super) fn look(&self, name: &[u8]) -> io::Result<Option<Meta>> {
        match self.lstat(name) {
            Ok(meta) => Ok(Some(meta)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Opens a name for reading and says what it really is. Nothing was read yet: check the type first.
    pub(super) fn open_file(&self, name: &[u8]) -> io::Result<(File, Meta)> {
        let file = File::from(nix::fcntl::openat(&self.0, name, FILE, Mode::empty())?);
        let meta = meta_of(&file)?;
        Ok((file, meta))
    }

    /// Makes a file that did not exist, for writing, 0600.
    pub(super) fn create_file(&self, name: &[u8]) -> io::Result<File> {
        let mode = Mode::S_IRUSR | Mode::S_IWUSR;
        Ok(File::from(nix::fcntl::openat(&self.0, name, FRESH, mode)?))
    }

    /// Makes a directory that did not exist, 0700, and enters it.
    pub(super) fn create_folder(&self, name: &[u8]) -> io::Result<Self> {
        nix::sys::stat::mkdirat(&self.0, name, Mode::S_IRWXU)?;
        self.enter(name)
    }

    pub(super) fn create_symlink(&self, name: &[u8], target: &[u8]) -> io::Result<()> {
        Ok(nix::unistd::symlinkat(target, &self.0, name)?)
    }

    /// Gives the file `from` of `at` another name in this directory, which must not be there.
    pub(super) fn create_link(&self, name: &[u8], at: &Self, from: &[u8]) -> io::Result<()> {
        Ok(nix::unistd::linkat(&at.0, from, &self.0, name, AtFlags::empty())?)
    }

    /// The directory in which the last component of a relative path lies, and that component.
    pub(super) fn parent_of<'a>(&self, path: &'a [u8]) -> io::Result<(Self, &'a [u8])> {
        let mut components = path.split(|byte| *byte == b'/');
        let last = components.next_back().unwrap_or_default();
        let mut folder = self.try_clone()?;
        for name in components {
            folder = folder.enter(name)?;
        }
        Ok((folder, last))
    }

    pub(super) fn read_link(&self, name: &[u8]) -> io::Result<Vec<u8>> {
        Ok(nix::fcntl::readlinkat(&self.0, name)?.into_vec())
    }

    pub(super) fn remove_file(&self, name: &[u8]) -> io::Result<()> {
        Ok(nix::unistd::unlinkat(&self.0, name, UnlinkatFlags::NoRemoveDir)?)
    }

    pub(super) fn remove_folder(&self, name: &[u8]) -> io::Result<()> {
        Ok(nix::unistd::unlinkat(&self.0, name, UnlinkatFlags::RemoveDir)?)
    }

    /// Moves `from` to `name` in `to`, replacing a file that is there.
    pub(super) fn rename_to(&self, from: &[u8], to: &Self, name: &[u8]) -> io::Result<()> {
        Ok(nix::fcntl::renameat(&self.0, from, &to.0, name)?)
    }

    /// Moves `from` to `name` in `to`; `EEXIST` when something is there.
    pub(super) fn rename_to_new(&self, from: &[u8], to: &Self, name: &[u8]) -> io::Result<()> {
        let flags = RenameFlags::RENAME_NOREPLACE;
        match nix::fcntl::renameat2(&self.0, from, &to.0, name, flags) {
            // A file system without the flag: the caller has looked, so replacing is what is left.
            Err(Errno::EINVAL) => self.rename_to(from, to, name),
            done => Ok(done?),
        }
    }

    pub(super) fn chown(&self, name: &[u8], uid: u32, gid: u32) -> io::Result<()> {
        let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
        let flags = AtFlags::AT_SYMLINK_NOFOLLOW;
        Ok(nix::unistd::fchownat(&self.0, name, Some(uid), Some(gid), flags)?)
    }

    pub(super) fn set_mtime(&self, name: &[u8], mtime: i64) -> io::Result<()> {
        let time = timespec(mtime);
        let flag = UtimensatFlags::NoFollowSymlink;
        Ok(nix::sys::stat::utimensat(&self.0, name, &time, &time, flag)?)
    }

    /// Writes all of its file system to the disk, and says so when that failed.
    pub(super) fn sync_file_system(&self) -> io::Result<()> {
        Ok(nix::unistd::syncfs(&self.0)?)
    }
}

impl From<Folder> for OwnedFd {
    fn from(folder: Folder) -> Self {
        folder.0
    }
}

impl From<OwnedFd> for Folder {
    fn from(descriptor: OwnedFd) -> Self {
        Self(descriptor)
    }
}

impl AsFd for Folder {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Meta {
    fn of(stat: &FileStat) -> Result<Self, Errno> {
        let kind = SFlag::from_bits_truncate(stat.st_mode & SFlag::S_IFMT.bits());
        let file_type = match kind {
            SFlag::S_IFREG => FileType::File,
            SFlag::S_IFDIR => FileType::Directory,
            SFlag::S_IFLNK => FileType::Symlink,
            SFlag::S_IFIFO => FileType::Fifo,
            SFlag::S_IFSOCK => FileType::Socket,
            SFlag::S_IFCHR => FileType::CharDevice,
            SFlag::S_IFBLK => FileType::BlockDevice,
            _ => return Err(Errno::EINVAL),
        };
        Ok(Self {
            file_type,
            mode: (stat.st_mode & 0o777) as u16,
            size: u64::try_from(stat.st_size).unwrap_or(0),
            mtime: nanoseconds(stat.st_mtime, stat.st_mtime_nsec),
            ctime: nanoseconds(stat.st_ctime, stat.st_ctime_nsec),
            device: stat.st_dev,
            inode: stat.st_ino,
            is_shared: stat.st_nlink > 1,
            uid: stat.st_uid,
            gid: stat.st_gid,
        })
    }
}

pub(super) fn meta_of(file: impl AsFd) -> io::Result<Meta> {
    Ok(Meta::of(&nix::sys::stat::fstat(file)?)?)
}

/// Sets owner, mode and time of an open file or directory, in the one order that works.
pub(super) fn dress(file: impl AsFd, owner: Option<(u32, u32)>, mode: u16, mtime: i64) -> io::Result<()> {
    if let Some((uid, gid)) = owner {
        nix::unistd::fchown(&file, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))?;
    }
    nix::sys::stat::fchmod(&file, Mode::from_bits_truncate(u32::from(mode & 0o777)))?;
    let time = timespec(mtime);
    Ok(nix::sys::stat::futimens(&file, &time, &time)?)
}

/// Dates a file of ours to this moment.
pub(super) fn date_now(path: &Path) -> io::Result<()> {
    let now = TimeSpec::UTIME_NOW;
    let flag = UtimensatFlags::NoFollowSymlink;
    Ok(nix::sys::stat::utimensat(nix::fcntl::AT_FDCWD, path, &now, &now, flag)?)
}

/// The kernel's present idea of a file's change time. A file whose ctime is earlier cannot change again without its
/// ctime changing too, however coarse the ticks are.
pub(super) fn tick() -> io::Result<i64> {
    let probe = nix::sys::memfd::memfd_create("tick", nix::sys::memfd::MFdFlags::MFD_CLOEXEC)?;
    Ok(meta_of(&probe)?.ctime)
}

fn nanoseconds(seconds: i64, nanoseconds: i64) -> i64 {
    seconds.saturating_mul(1_000_000_000).saturating_add(nanoseconds)
}

fn timespec(nanoseconds: i64) -> TimeSpec {
    TimeSpec::new(
        nanoseconds.div_euclid(1_000_000_000),
        nanoseconds.rem_euclid(1_000_000_000),
    )
}
