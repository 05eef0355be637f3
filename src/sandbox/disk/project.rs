//! Project quotas: a directory whose files all count against one number, in the data directory's own file system.
//!
//! The number is the sandbox's user id, which no other live sandbox of the host has. Programs cannot leave the project:
//! the kernel lets nobody inside a user namespace change it, and what is moved in from elsewhere is refused (EXDEV).
#![expect(
    unsafe_code,
    reason = "project ids and quotas are set by calls that no crate here wraps"
)]

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use super::{During, Error, Quota};
use crate::sandbox::mountinfo::{self, Entry};

const RECORD: &str = "disk.project";
/// What file systems call it in a mount table.
const OPTIONS: [&str; 2] = ["prjquota", "pquota"];

pub(super) fn lacks(data_dir: &Path) -> Result<(), String> {
    let table = fs::read_to_string("/proc/self/mountinfo").map_err(|error| error.to_string())?;
    let data_dir = fs::canonicalize(data_dir).unwrap_or_else(|_| data_dir.to_owned());
    counts(&mountinfo::parse(&table), &data_dir)
}

/// Whether the file system that holds a directory counts projects.
fn counts(table: &[Entry], dir: &Path) -> Result<(), String> {
    let holds = table.iter().filter(|entry| dir.starts_with(&entry.point));
    // Of mounts at one point the last is on top.
    let Some(found) = holds.max_by_key(|entry| entry.point.components().count()) else {
        return Err(format!("`{}` is on no mount", dir.display()));
    };
    let on = found
        .super_options
        .iter()
        .any(|option| OPTIONS.contains(&option.as_str()));
    match found.kind.as_str() {
        "ext4" | "xfs" if on => Ok(()),
        "ext4" | "xfs" => Err(format!(
            "`{}` ({}) is mounted without `prjquota`",
            found.point.display(),
            found.kind
        )),
        kind => Err(format!("`{}` is {kind}, not ext4 or xfs", found.point.display())),
    }
}

/// `struct fsxattr`, linux/fs.h.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    xflags: u32,
    extent_size: u32,
    extents: u32,
    project: u32,
    cow_extent_size: u32,
    padding: [u8; 8],
}

const FS_IOC_FSGETXATTR: libc::Ioctl = 0x801c_581f;
const FS_IOC_FSSETXATTR: libc::Ioctl = 0x401c_5820;
const FS_XFLAG_PROJINHERIT: u32 = 0x200;

/// Gives the empty directory `place` a project of its own with a quota.
pub(super) fn set(dir: &Path, place: &Path, quota: Quota, project: u32) -> Result<(), Error> {
    let step = || format!("give `{}` a project quota", place.display());
    let folder = File::open(place).during(step)?;
    // Before there is anything to lift.
    fs::write(dir.join(RECORD), project.to_string()).during(step)?;
    limit(&folder, project, quota).during(step)?;
    let mut attributes = Attributes::default();
    // SAFETY: the kernel fills a `struct fsxattr`.
    check(unsafe { libc::ioctl(folder.as_raw_fd(), FS_IOC_FSGETXATTR, &raw mut attributes) }).during(step)?;
    attributes.project = project;
    attributes.xflags |= FS_XFLAG_PROJINHERIT;
    // SAFETY: the kernel reads a `struct fsxattr`.
    check(unsafe { libc::ioctl(folder.as_raw_fd(), FS_IOC_FSSETXATTR, &raw const attributes) }).during(step)
}

/// Lifts the quota that a record in `dir` tells of, so that the number is as it was.
pub(super) fn lift(dir: &Path) -> io::Result<()> {
    let record = dir.join(RECORD);
    let project = match fs::read_to_string(&record) {
        Ok(text) => text.parse().ok(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    if let Some(project) = project {
        limit(&File::open(dir)?, project, Quota { bytes: 0, inodes: 0 })?;
    }
    fs::remove_file(record)
}

/// Sets the hard limits of a project in the file system of `file`; 0 is none. quotactl_fd(2).
fn limit(file: &File, project: u32, quota: Quota) -> io::Result<()> {
    const Q_SETQUOTA: libc::c_int = 0x0080_0008;
    const PRJQUOTA: libc::c_int = 2;
    const QIF_BLIMITS: u32 = 1;
    const QIF_ILIMITS: u32 = 4;
    // SAFETY: `dqblk` is plain numbers.
    let mut limits: libc::dqblk = unsafe { std::mem::zeroed() };
    // In KiB, rounded down: never more than asked.
    limits.dqb_bhardlimit = quota.bytes >> 10;
    limits.dqb_bsoftlimit = limits.dqb_bhardlimit;
    limits.dqb_ihardlimit = quota.inodes;
    limits.dqb_isoftlimit = quota.inodes;
    limits.dqb_valid = QIF_BLIMITS | QIF_ILIMITS;
    let command = Q_SETQUOTA << 8 | PRJQUOTA;
    // SAFETY: the kernel reads one `struct if_dqblk`, which begins as `struct dqblk` does; the descriptor is open.
    let done = unsafe {
        libc::syscall(
            libc::SYS_quotactl_fd,
            file.as_raw_fd(),
            command,
            project,
            &raw const limits,
        )
    };
    check(done as libc::c_int)
}

fn check(result: libc::c_int) -> io::Result<()> {
    match result {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_system_of_the_directory_says_whether_it_counts() {
        let table = "1 0 8:1 / / rw - ext4 /dev/sda1 rw,discard\n\
                     2 1 8:2 / /data rw - xfs /dev/sdb rw,attr2,prjquota\n\
                     3 2 0:9 / /data/memory rw - tmpfs tmpfs rw\n";
        let counts = |dir: &str| counts(&mountinfo::parse(table), Path::new(dir));
        assert_eq!(counts("/data/exuvia"), Ok(()));
        assert_eq!(
            counts("/var/lib/exuvia"),
            Err("`/` (ext4) is mounted without `prjquota`".to_owned())
        );
        assert_eq!(
            counts("/data/memory/x"),
            Err("`/data/memory` is tmpfs, not ext4 or xfs".to_owned())
        );
        // Names are compared by parts.
        assert!(counts("/data2").is_err());
    }
}
