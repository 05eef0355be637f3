//! Disks: what a workspace can hold, in bytes and in files, enforced by the kernel.
//!
//! Owns: the kinds of quota that a host can give, making a [`Volume`] of one, what it holds now, and its end. Must not know:
//! whose workspace it is, nor what is written there.
//!
//! | kind | what it is | needs | costs |
//! |---|---|---|---|
//! | `project` | a project quota of the data directory's own file system | ext4 or xfs mounted with `prjquota` | nothing |
//! | `image` | an ext4 image of the quota's size behind a loop device, sparse, thrown away whole | root, `mke2fs`, loop devices | some ms to make, see `docs/performance.md` |
//! | `tmpfs` | memory | root | what is written counts as memory: of the sandbox what it writes, of the service what was there at first |
//!
//! The first of these that the host has is taken, or the one that a policy names; where that is not there, the answer is a
//! refusal and never a directory without a quota.
//!
//! ```text
//! DIR/disk            mount point (or a plain directory, kind `project`)       umount, detached
//! DIR/disk/workspace  the files, the sandbox's own; `lost+found` stays outside
//! DIR/disk.project    the id of a project quota                                limits lifted
//! ```
//!
//! An image has no name and its loop device ends with its last use, so that a mount below `DIR` is all that a killed process can
//! leave. [`clear`] ends that; whoever owns `DIR` calls it before removing the directory.

mod image;
mod project;

use std::fmt;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};

use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::stat::Mode;
use nix::sys::statvfs::{FsFlags, statvfs};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Limits;
use super::mountinfo;
use crate::error::Kind as Class;

/// How much a volume may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quota {
    pub bytes: u64,
    /// Files, directories and links together.
    pub inodes: u64,
}

impl Default for Quota {
    fn default() -> Self {
        Self {
            bytes: 4 << 30,
            inodes: 200_000,
        }
    }
}

/// How fast a volume may be read and written, in bytes a second. `None` = as fast as it goes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rates {
    pub read: Option<u64>,
    pub write: Option<u64>,
}

impl Rates {
    pub fn is_unlimited(&self) -> bool {
        *self == Self::default()
    }
}

/// What enforces a quota. In the order of preference.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    Project,
    Image,
    Tmpfs,
}

impl Kind {
    pub const ALL: [Self; 3] = [Self::Project, Self::Image, Self::Tmpfs];
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Project => "project",
            Self::Image => "image",
            Self::Tmpfs => "tmpfs",
        })
    }
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The host lacks what a quota needs.
    #[error("this host cannot give {wanted}: {missing}")]
    Unsupported { wanted: String, missing: String },
    #[error("could not {step}")]
    Step {
        step: String,
        #[source]
        source: io::Error,
    },
    /// The kernel holds something else than was asked.
    #[error("the disk quota did not take: {0}")]
    NotTaken(String),
}

impl Error {
    pub fn kind(&self) -> Class {
        match self {
            Self::Unsupported { .. } | Self::NotTaken(_) => Class::WrongState,
            Self::Step { .. } => Class::Unavailable,
        }
    }
}

/// Names the step that an error belongs to.
trait During<T> {
    fn during(self, step: impl FnOnce() -> String) -> Result<T, Error>;
}

impl<T, E: Into<io::Error>> During<T> for Result<T, E> {
    fn during(self, step: impl FnOnce() -> String) -> Result<T, Error> {
        self.map_err(|error| Error::Step {
            step: step(),
            source: error.into(),
        })
    }
}

/// Makes volumes of one data directory; clones are the same.
#[derive(Debug, Clone)]
pub struct Volumes {
    data_dir: Arc<Path>,
    quotas: Quotas,
    /// What the host can do, found out once: it takes a walk through the mount table, which has a line for each sandbox.
    known: Arc<[OnceLock<Result<(), String>>; 3]>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Quotas {
    Enforced,
    /// Plain directories.
    Off,
}

impl Volumes {
    pub fn new(data_dir: &Path) -> Self {
        Self {
            data_dir: data_dir.into(),
            quotas: Quotas::Enforced,
            known: Arc::default(),
        }
    }

    /// Without quotas: for tests whose sandboxes are not real.
    pub fn folders(data_dir: &Path) -> Self {
        Self {
            quotas: Quotas::Off,
            ..Self::new(data_dir)
        }
    }

    /// Each kind, and what this host lacks for it.
    pub fn kinds(&self) -> [(Kind, Result<(), String>); 3] {
        Kind::ALL.map(|kind| (kind, self.lacks(kind).clone()))
    }

    fn lacks(&self, kind: Kind) -> &Result<(), String> {
        self.known[kind as usize].get_or_init(|| self.find_lack(kind))
    }

    fn find_lack(&self, kind: Kind) -> Result<(), String> {
        if !nix::unistd::geteuid().is_root() {
            return Err("the process is not root".to_owned());
        }
        match kind {
            Kind::Project => project::lacks(&self.data_dir),
            Kind::Image => image::lacks(),
            Kind::Tmpfs => Ok(()),
        }
    }

    /// The kind that the limits ask for, else the best that there is.
    ///
    /// # Errors
    /// [`Error::Unsupported`], naming what is missing.
    pub fn choose(&self, limits: &Limits) -> Result<Kind, Error> {
        let mut missing = Vec::new();
        for kind in Kind::ALL {
            if limits.disk_kind.is_some_and(|named| named != kind) {
                continue;
            }
            match self.lacks(kind) {
                Ok(()) => return Ok(kind),
                Err(lack) => missing.push(format!("`{kind}`: {lack}")),
            }
        }
        Err(Error::Unsupported {
            wanted: "a disk quota".to_owned(),
            missing: missing.join("; "),
        })
    }

    /// Makes a volume in `dir`, which exists and is closed to guests. Its files belong to `owner`, uid and gid.
    ///
    /// # Errors
    /// [`Error::Unsupported`]; or what went wrong, with `dir` as it was.
    pub fn make(&self, dir: &Path, limits: &Limits, owner: u32) -> Result<Volume, Error> {
        self.make_one(dir, self.wanted(limits)?, owner)
    }

    /// What [`Volumes::make`] would make, where that can and should be made before there is an owner.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn blank(&self, limits: &Limits) -> Result<Option<Blank>, Error> {
        Ok(self.wanted(limits)?.and_then(|(kind, quota)| match kind {
            Kind::Image => Some(Blank { quota }),
            // The quota is its owner's; a tmpfs is made in no time.
            Kind::Project | Kind::Tmpfs => None,
        }))
    }

    /// Makes a volume ahead of its use, in `dir`. Its files are root's until it is [given](give).
    ///
    /// # Errors
    /// What went wrong, with `dir` as it was.
    pub fn make_blank(&self, dir: &Path, blank: Blank) -> Result<(), Error> {
        self.make_one(dir, Some((Kind::Image, blank.quota)), 0).map(drop)
    }

    /// The kind of quota that limits lead to, and what it is really given.
    fn wanted(&self, limits: &Limits) -> Result<Option<(Kind, Quota)>, Error> {
        match (limits.disk, self.quotas) {
            (Some(quota), Quotas::Enforced) => {
                let kind = self.choose(limits)?;
                Ok(Some((kind, effective(kind, quota, limits))))
            }
            (Some(_), Quotas::Off) | (None, Quotas::Enforced | Quotas::Off) => Ok(None),
        }
    }

    fn make_one(&self, dir: &Path, wanted: Option<(Kind, Quota)>, owner: u32) -> Result<Volume, Error> {
        let place = dir.join(DISK);
        fs::DirBuilder::new()
            .mode(0o700)
            .create(&place)
            .during(|| format!("make `{}`", place.display()))?;
        let made = (|| {
            if let Some((kind, quota)) = wanted {
                match kind {
                    Kind::Project => project::set(dir, &place, quota, owner)?,
                    Kind::Image => image::mount(&self.data_dir, &place, quota)?,
                    Kind::Tmpfs => tmpfs(&place, quota)?,
                }
                read_back(&place, kind, quota)?;
            }
            let volume = Volume {
                dir: dir.to_owned(),
                kind: wanted.map(|(kind, _)| kind),
            };
            let files = volume.workspace();
            fs::create_dir(&files)
                .and_then(|()| fs::set_permissions(&files, fs::Permissions::from_mode(0o755)))
                .and_then(|()| give(dir, owner))
                .during(|| format!("make `{}`", files.display()))?;
            Ok(volume)
        })();
        if made.is_err() {
            // Best effort: the first error is the one that matters.
            let _ = clear(dir);
            let _ = fs::remove_dir(place.join(WORKSPACE));
            let _ = fs::remove_dir(&place);
        }
        made
    }
}

/// A volume that can be made ahead: those that are equal can stand for each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Blank {
    quota: Quota,
}

/// Gives the volume in `dir` to its owner, uid and gid: its workspace, which is still empty.
///
/// # Errors
/// When there is none.
pub fn give(dir: &Path, owner: u32) -> io::Result<()> {
    // Only root can give away; who is not root has no other users inside.
    match nix::unistd::geteuid().is_root() {
        true => chown(workspace(dir), Some(owner), Some(owner)),
        false => Ok(()),
    }
}

/// What a kind is really given: never more than asked.
fn effective(kind: Kind, quota: Quota, limits: &Limits) -> Quota {
    match kind {
        Kind::Project => quota,
        // An inode takes its place in the image, and a file its block: more than these fit none.
        Kind::Image => Quota {
            inodes: quota.inodes.min(quota.bytes / 8192),
            ..quota
        },
        // Pages of a tmpfs are memory: more than half of it, and programs would be killed before the disk is full.
        Kind::Tmpfs => Quota {
            bytes: quota.bytes.min(limits.memory_bytes / 2),
            ..quota
        },
    }
}

/// The mount point of a volume, in its directory.
pub const DISK: &str = "disk";
const WORKSPACE: &str = "workspace";

/// What holds for every file system that is mounted for a sandbox.
const HARD: MsFlags = MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV);

fn tmpfs(place: &Path, quota: Quota) -> Result<(), Error> {
    let options = format!("mode=0755,size={},nr_inodes={}", quota.bytes, quota.inodes);
    mount(Some("exuvia"), place, Some("tmpfs"), HARD, Some(options.as_str())).during(|| "mount a tmpfs".to_owned())
}

/// What the kernel says that a volume can hold is not more than was asked, and its flags are set.
fn read_back(place: &Path, kind: Kind, quota: Quota) -> Result<(), Error> {
    let (holds, flags) = capacity(place).during(|| format!("read back `{}`", place.display()))?;
    let over = |what: &str, found: u64, asked: u64| Error::NotTaken(format!("{what}: {found} in place of {asked}"));
    if holds.bytes > quota.bytes || holds.bytes == 0 {
        return Err(over("bytes", holds.bytes, quota.bytes));
    }
    if holds.inodes > quota.inodes || holds.inodes == 0 {
        return Err(over("inodes", holds.inodes, quota.inodes));
    }
    let hard = FsFlags::ST_NOSUID | FsFlags::ST_NODEV;
    match kind {
        Kind::Image | Kind::Tmpfs if !flags.contains(hard) => Err(Error::NotTaken(format!(
            "the mount has {flags:?}, and is to have {hard:?}"
        ))),
        // A plain directory: the sandbox's own mount of it has the flags.
        Kind::Project | Kind::Image | Kind::Tmpfs => Ok(()),
    }
}

fn capacity(place: &Path) -> io::Result<(Quota, FsFlags)> {
    let found = statvfs(place)?;
    let holds = Quota {
        bytes: found.blocks() * found.fragment_size(),
        inodes: found.files(),
    };
    Ok((holds, found.flags()))
}

/// A directory with a quota. Dropping it leaves it there: see [`clear`].
#[derive(Debug, Clone)]
pub struct Volume {
    dir: PathBuf,
    kind: Option<Kind>,
}

/// What a volume holds, and what it can.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Holds {
    pub used: Quota,
    pub most: Quota,
}

impl Volume {
    /// The directory that a sandbox is given.
    pub fn workspace(&self) -> PathBuf {
        workspace(&self.dir)
    }

    /// What enforces the quota; `None` where there is none.
    pub fn kind(&self) -> Option<Kind> {
        self.kind
    }

    /// # Errors
    /// When it is gone.
    pub fn holds(&self) -> io::Result<Holds> {
        holds(&self.dir)
    }
}

/// What the volume in `dir` holds.
///
/// # Errors
/// When it is gone.
pub fn holds(dir: &Path) -> io::Result<Holds> {
    // Of the directory that carries the project, where that is what counts.
    let found = statvfs(&dir.join(DISK))?;
    let size = found.fragment_size();
    Ok(Holds {
        used: Quota {
            bytes: (found.blocks() - found.blocks_free()) * size,
            inodes: found.files() - found.files_free(),
        },
        most: Quota {
            bytes: found.blocks() * size,
            inodes: found.files(),
        },
    })
}

/// What tells that nothing was written in a volume: its root directory as it was at first, and all that was free is free. A
/// file that came and went changes the directory's `st_ctime`, which nobody can set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mark {
    file: (u64, u64),
    changed: (i64, i64),
    size: u64,
    mode: u32,
    used: Quota,
}

impl Mark {
    /// # Errors
    /// When the volume in `dir` is gone.
    pub fn of(dir: &Path) -> io::Result<Self> {
        let root = fs::metadata(workspace(dir))?;
        Ok(Self {
            file: (root.dev(), root.ino()),
            changed: (root.ctime(), root.ctime_nsec()),
            size: root.size(),
            mode: root.mode(),
            used: holds(dir)?.used,
        })
    }
}

/// Where the files of the volume in `dir` are.
pub fn workspace(dir: &Path) -> PathBuf {
    dir.join(DISK).join(WORKSPACE)
}

/// Ends the volume in `dir`, whoever made it: what is mounted there is gone with all its files. Fine when there is none. The
/// files of a project quota stay for whoever removes `dir`.
///
/// The kernel takes tens of milliseconds to take a file system apart. Nobody waits for that: a thread holds the last
/// reference, and with it the end of the loop device. Should the process end, so does that reference.
///
/// # Errors
/// When the mount stays.
pub fn clear(dir: &Path) -> io::Result<()> {
    project::lift(dir)?;
    let place = dir.join(DISK);
    loop {
        let last = open(
            &place,
            OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC,
            Mode::empty(),
        );
        match umount2(&place, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
            Ok(()) => {
                let held = File::from(last?);
                let around = fs::metadata(dir)?.dev();
                let turn = Turn::wait();
                // Without a thread it is let go here.
                let _ = std::thread::Builder::new().name("disk-end".to_owned()).spawn(move || {
                    image::abandon(&held, around);
                    drop(held);
                    drop(turn);
                });
            }
            // Not, or no longer, a mount point.
            Err(Errno::EINVAL | Errno::ENOENT | Errno::ENOTDIR) => return Ok(()),
            // Who may not mount has mounted nothing.
            Err(Errno::EPERM) if !nix::unistd::geteuid().is_root() => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Volumes that are being taken apart at a time; more wait.
const MOST_ENDING: usize = 64;

static ENDING: Mutex<usize> = Mutex::new(0);
static ENDED: Condvar = Condvar::new();

/// One of the [`MOST_ENDING`] places.
struct Turn;

impl Turn {
    /// Blocks until there is one.
    fn wait() -> Self {
        let ending = ENDING.lock().unwrap_or_else(PoisonError::into_inner);
        let free = ENDED.wait_while(ending, |ending| *ending >= MOST_ENDING);
        *free.unwrap_or_else(PoisonError::into_inner) += 1;
        Self
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        *ENDING.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        ENDED.notify_all();
    }
}

/// Waits until the kernel has taken apart every volume that was [cleared](clear). Blocks.
pub fn settle() {
    let ending = ENDING.lock().unwrap_or_else(PoisonError::into_inner);
    drop(ENDED.wait_while(ending, |ending| *ending > 0));
}

/// The mounts of this process's table that are below a directory, the deepest first.
///
/// # Errors
/// When the table cannot be read.
pub fn mounts_below(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let table = mountinfo::parse(&fs::read_to_string("/proc/self/mountinfo")?);
    let mut found: Vec<PathBuf> = table.into_iter().map(|entry| entry.point).collect();
    found.retain(|point| point.starts_with(dir) && point != dir);
    found.reverse();
    Ok(found)
}

#[cfg(test)]
mod tests;
