//! The mount that a sandbox gets: an overlay of a base and of what the sandbox changes.
//!
//! Owns: the options of that mount and the directories of one sandbox that it is made of, and their end. Must not know: what
//! is in them.
//!
//! ```text
//! DIR/disk/workspace  the upper layer, on the sandbox's volume: all that it changes
//! DIR/disk/work       what overlayfs needs beside it
//! DIR/lower           where the layers below are while the overlay is being mounted
//! DIR/files           the overlay                                              umount, detached
//! DIR/base.json       what it is laid over
//! ```

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::mount::{MntFlags, umount2};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, fsconfig_create, fsconfig_set_flag, fsconfig_set_string,
    fsmount, fsopen, move_mount,
};

use super::super::materialise::Owner;
use super::idmap;

/// The directories of one sandbox that its workspace is laid in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ground {
    dir: PathBuf,
    upper: PathBuf,
}

impl Ground {
    /// `upper` is the directory on the sandbox's volume, and `dir` holds that volume; both are closed to guests.
    pub fn new(dir: PathBuf, upper: PathBuf) -> Self {
        Self { dir, upper }
    }

    /// Where the files are that are the sandbox's own.
    pub fn upper(&self) -> &Path {
        &self.upper
    }

    pub(super) fn files(&self) -> PathBuf {
        self.dir.join("files")
    }

    pub(super) fn pin(&self) -> PathBuf {
        self.dir.join("base.json")
    }

    fn work(&self) -> PathBuf {
        self.upper.with_file_name("work")
    }

    fn lower(&self) -> PathBuf {
        self.dir.join("lower")
    }

    /// Mounts it: the upper layer over `layers`, the topmost first, whose files are shown as the owner's.
    pub(super) fn mount(&self, layers: &[PathBuf], owner: Owner) -> io::Result<()> {
        let users = idmap::users(owner)?;
        let mut lower = Vec::new();
        for (number, layer) in layers.iter().enumerate() {
            let point = self.lower().join(number.to_string());
            fs::create_dir_all(&point)?;
            // The kernel takes layers by their names alone, so each has one for a moment.
            attach(&idmap::shown_as(layer, &users)?, &point)?;
            if number > 0 {
                lower.push(b':');
            }
            lower.extend(escaped(&point));
        }
        fs::create_dir(self.work())?;
        fs::create_dir(self.files())?;
        attach(&overlay(&lower, &self.upper, &self.work())?, &self.files())?;
        // The overlay has mounts of its own of its layers.
        detach_all(&self.lower())
    }

    /// Ends all that is mounted here, whoever mounted it. Fine when there is nothing.
    pub(super) fn unmount(&self) -> io::Result<()> {
        detach(&self.files())?;
        detach_all(&self.lower())
    }
}

/// Ends the mounts of the workspace in `dir`, whoever made them, so that the volume below can go. Fine when there are none.
///
/// # Errors
/// When a mount stays.
pub fn clear(dir: &Path) -> io::Result<()> {
    Ground::new(dir.to_owned(), dir.to_owned()).unmount()
}

/// - `redirect_dir`: a directory of a base is renamed in place; without, rename(2) of it fails with `EXDEV`, which many
///   programs do not expect. What it leaves is read back (`look.rs`).
/// - no `metacopy`: a file in the upper layer has its content there.
/// - no `index`: what it is for, hard links in a layer below, is kept out of bases (`lay.rs`).
/// - `xino`: a file keeps its inode number when it is changed for the first time.
/// - `volatile`: nothing here is the only copy of anything, so nobody waits for a disk.
fn overlay(lower: &[u8], upper: &Path, work: &Path) -> io::Result<OwnedFd> {
    let context = fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
    let set = |key: &str, value: &[u8]| fsconfig_set_string(context.as_fd(), key, value);
    set("source", b"exuvia")?;
    set("lowerdir", lower)?;
    set("upperdir", &escaped(upper))?;
    set("workdir", &escaped(work))?;
    for (key, value) in [
        ("redirect_dir", "on"),
        ("metacopy", "off"),
        ("index", "off"),
        ("xino", "on"),
    ] {
        set(key, value.as_bytes())?;
    }
    fsconfig_set_flag(context.as_fd(), "volatile")?;
    fsconfig_create(context.as_fd())?;
    let flags = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    Ok(fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, flags)?)
}

/// A path as overlayfs reads it.
fn escaped(path: &Path) -> Vec<u8> {
    let bytes = path.as_os_str().as_bytes().iter();
    bytes
        .flat_map(|byte| match byte {
            b'\\' | b':' => [Some(b'\\'), Some(*byte)],
            byte => [None, Some(*byte)],
        })
        .flatten()
        .collect()
}

fn attach(mount: &OwnedFd, point: &Path) -> io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    Ok(move_mount(mount.as_fd(), "", rustix::fs::CWD, point, flags)?)
}

/// Detaches what is mounted at the names in a directory, and removes it.
fn detach_all(dir: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    for entry in entries {
        let point = entry?.path();
        detach(&point)?;
        fs::remove_dir(point)?;
    }
    fs::remove_dir(dir)
}

fn detach(point: &Path) -> io::Result<()> {
    loop {
        match umount2(point, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
            Ok(()) => {}
            // Not, or no longer, a mount point.
            Err(Errno::EINVAL | Errno::ENOENT | Errno::ENOTDIR) => return Ok(()),
            // Who may not mount has mounted nothing.
            Err(Errno::EPERM) if !nix::unistd::geteuid().is_root() => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}
