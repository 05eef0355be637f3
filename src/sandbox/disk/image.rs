//! A file system in a file: ext4, without a journal, made once for each size and copied.
//!
//! The image has no name and belongs to the loop device alone, which clears itself with its last use; the device belongs to the
//! mount. The guest writes files, never the image: what the kernel reads of the file system is always its own.
#![expect(unsafe_code, reason = "loop devices are set up by ioctl, which no crate here wraps")]

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::{During, Error, HARD, Quota};

/// Bytes of a block of the file system.
const BLOCK: u64 = 4096;
/// Blocks of a group: one bitmap of one block.
const GROUP: u64 = 8 * BLOCK;
/// Inodes of 256 bytes that fill a block; a group has a multiple of these.
const INODES_OF_A_BLOCK: u64 = 16;
/// Other processes take loop devices as well.
const TRIES: u32 = 100;

/// Changes with what a template holds.
const VERSION: u32 = 1;

pub(super) fn lacks() -> Result<(), String> {
    let control = File::options().read(true).write(true).open("/dev/loop-control");
    control.map_err(|error| format!("no loop devices (`/dev/loop-control`: {error})"))?;
    let known = fs::read_to_string("/proc/filesystems").unwrap_or_default();
    if !known.lines().any(|line| line.trim() == "ext4") {
        return Err("no ext4 in this kernel".to_owned());
    }
    match maker() {
        Some(_) => Ok(()),
        None => Err("no `mke2fs` (package e2fsprogs)".to_owned()),
    }
}

/// Programs of root are not always in the path.
fn maker() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let known = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    let mut places = std::env::split_paths(&path).chain(known);
    places.find_map(|place| Some(place.join("mke2fs")).filter(|file| file.is_file()))
}

/// Mounts a fresh file system of the quota's size.
pub(super) fn mount(data_dir: &Path, place: &Path, quota: Quota) -> Result<(), Error> {
    let template = template(data_dir, quota)?;
    let image = tempfile::tempfile_in(template_dir(data_dir)).during(|| "make a disk image".to_owned())?;
    copy(&template, &image).during(|| "copy a disk image".to_owned())?;
    let (device, path) = attach(&image).during(|| "attach a loop device".to_owned())?;
    // Inode tables stay unwritten until they are used. No flushes: after a crash the image is gone anyway.
    let options = Some("noinit_itable,nobarrier,errors=remount-ro");
    nix::mount::mount(
        Some(&path),
        place,
        Some("ext4"),
        HARD | nix::mount::MsFlags::MS_NOATIME,
        options,
    )
    .during(|| format!("mount `{}`", path.display()))?;
    // Open until here: it clears itself with its last use.
    drop(device);
    Ok(())
}

fn template_dir(data_dir: &Path) -> PathBuf {
    data_dir.join("disks")
}

/// The image that others of its size are copied from; made where it is missing.
fn template(data_dir: &Path, quota: Quota) -> Result<File, Error> {
    let dir = template_dir(data_dir);
    let path = dir.join(format!("ext4-{VERSION}-{}-{}", quota.bytes, quota.inodes));
    match File::open(&path) {
        Ok(file) => return Ok(file),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error).during(|| format!("open `{}`", path.display())),
    }
    let step = || format!("make `{}`", path.display());
    fs::create_dir_all(&dir).during(step)?;
    let fresh = tempfile::NamedTempFile::new_in(&dir).during(step)?;
    fresh.as_file().set_len(quota.bytes).during(step)?;
    format(fresh.path(), quota).during(step)?;
    // Several at once make the same.
    fresh.persist(&path).map_err(|error| error.error).during(step)?;
    File::open(&path).during(step)
}

/// Inodes that make no more than was asked: `mke2fs` would round up, group by group.
fn inodes(quota: Quota) -> u64 {
    let groups = (quota.bytes / BLOCK).div_ceil(GROUP).max(1);
    let of_a_group = quota.inodes / groups / INODES_OF_A_BLOCK * INODES_OF_A_BLOCK;
    of_a_group.max(INODES_OF_A_BLOCK) * groups
}

fn format(path: &Path, quota: Quota) -> io::Result<()> {
    let maker = maker().ok_or_else(|| io::Error::other("no `mke2fs`"))?;
    let made = Command::new(maker)
        .args(["-q", "-F", "-t", "ext4", "-m", "0", "-I", "256", "-b"])
        .arg(BLOCK.to_string())
        .arg("-N")
        .arg(inodes(quota).to_string())
        // No journal: nothing here outlives a crash. No room to grow. Nothing zeroed: the file is all holes.
        .args(["-O", "^has_journal,^resize_inode"])
        .args(["-E", "lazy_itable_init=1,nodiscard,root_owner=0:0"])
        .arg(path)
        .env_clear()
        .stdin(Stdio::null())
        .output()?;
    match made.status.success() {
        true => Ok(()),
        false => Err(io::Error::other(format!(
            "mke2fs: {}",
            String::from_utf8_lossy(&made.stderr).trim()
        ))),
    }
}

/// Copies what is not a hole.
fn copy(from: &File, to: &File) -> io::Result<()> {
    use nix::unistd::{Whence, lseek};
    let length = from.metadata()?.len();
    to.set_len(length)?;
    let mut buffer = vec![0; 64 << 10];
    let mut end = 0;
    loop {
        let start = match lseek(from, end, Whence::SeekData) {
            Ok(start) => start,
            // No more data.
            Err(nix::errno::Errno::ENXIO) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        end = lseek(from, start, Whence::SeekHole)?;
        let mut at = start as u64;
        while at < end as u64 {
            let part = buffer.len().min((end as u64 - at) as usize);
            from.read_exact_at(&mut buffer[..part], at)?;
            to.write_all_at(&buffer[..part], at)?;
            at += part as u64;
        }
    }
}

/// `struct loop_info64`, linux/loop.h.
#[repr(C)]
struct Info {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    sizelimit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

/// `struct loop_config`.
#[repr(C)]
struct Config {
    fd: u32,
    block_size: u32,
    info: Info,
    reserved: [u64; 8],
}

const LOOP_CTL_GET_FREE: libc::Ioctl = 0x4C82;
const LOOP_CONFIGURE: libc::Ioctl = 0x4C0A;
const LO_FLAGS_AUTOCLEAR: u32 = 4;
/// Shown by `losetup`, so that an operator sees whose it is.
const NAME: &[u8] = b"exuvia";

/// A loop device over the image. Not with direct I/O: what a short-lived sandbox writes need never reach the disk. It clears itself when the answer is closed and nothing else uses it.
fn attach(image: &File) -> io::Result<(File, PathBuf)> {
    let control = File::options().read(true).write(true).open("/dev/loop-control")?;
    let mut file_name = [0; 64];
    file_name[..NAME.len()].copy_from_slice(NAME);
    let config = Config {
        fd: image.as_raw_fd() as u32,
        block_size: BLOCK as u32,
        info: Info {
            device: 0,
            inode: 0,
            rdevice: 0,
            offset: 0,
            sizelimit: 0,
            number: 0,
            encrypt_type: 0,
            encrypt_key_size: 0,
            flags: LO_FLAGS_AUTOCLEAR,
            file_name,
            crypt_name: [0; 64],
            encrypt_key: [0; 32],
            init: [0; 2],
        },
        reserved: [0; 8],
    };
    for _ in 0..TRIES {
        // SAFETY: this call takes no argument.
        let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) };
        if number < 0 {
            return Err(io::Error::last_os_error());
        }
        let path = PathBuf::from(format!("/dev/loop{number}"));
        let device = File::options().read(true).write(true).open(&path)?;
        // SAFETY: `config` is a `struct loop_config`, which the kernel reads and does not keep; both descriptors are open.
        let done = unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE, &raw const config) };
        match io::Error::last_os_error() {
            _ if done == 0 => return Ok((device, path)),
            // Somebody else was quicker.
            error if error.raw_os_error() == Some(libc::EBUSY) => {}
            error => return Err(error),
        }
    }
    Err(io::Error::other("others took every loop device that was free"))
}

/// Tells the file system of an image that nothing of it is wanted any more: what was not written yet never is. Best effort.
///
/// `root` is its root, already detached; `around` is the device of the directory that it was mounted in. What is not on a loop
/// device of its own is left alone: it might be the host's.
pub(super) fn abandon(root: &File, around: u64) {
    const EXT4_IOC_SHUTDOWN: libc::Ioctl = 0x8004_587d;
    static NO_LOG_FLUSH: u32 = 2;
    const LOOP_MAJOR: u64 = 7;
    let Ok(device) = root.metadata().map(|found| found.dev()) else {
        return;
    };
    if nix::sys::stat::major(device) != LOOP_MAJOR || device == around {
        return;
    }
    // SAFETY: the kernel reads one `u32`; the descriptor is open.
    unsafe { libc::ioctl(root.as_raw_fd(), EXT4_IOC_SHUTDOWN, &raw const NO_LOG_FLUSH) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_inodes_than_asked() {
        let count = |bytes, inodes| super::inodes(Quota { bytes, inodes });
        // 16 groups of 128 MiB.
        assert_eq!(count(2 << 30, 200_000), 199_936);
        assert_eq!(count(2 << 30, 1), 256);
        assert_eq!(count(64 << 20, 1000), 992);
    }

    #[test]
    fn holes_are_not_copied() {
        let (from, to) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        from.set_len(64 << 20).unwrap();
        for (at, text) in [(0, "first"), (32 << 20, "middle")] {
            from.write_all_at(text.as_bytes(), at).unwrap();
        }
        copy(&from, &to).unwrap();
        let found = to.metadata().unwrap();
        assert_eq!(found.len(), 64 << 20);
        assert!(found.blocks() * 512 < 1 << 20, "{}", found.blocks());
        let mut text = [0; 6];
        to.read_exact_at(&mut text, 32 << 20).unwrap();
        assert_eq!(&text, b"middle");
    }
}
