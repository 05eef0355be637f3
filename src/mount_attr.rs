//! mount_setattr(2): what holds of a mount that is there. No crate here wraps it. Decides nothing.
#![expect(unsafe_code, reason = "a raw system call that nix 0.32 and rustix 1 lack")]

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use nix::errno::Errno;

/// `MOUNT_ATTR_*`, linux/mount.h.
pub const RDONLY: u64 = 0x1;
pub const NOSUID: u64 = 0x2;
pub const NODEV: u64 = 0x4;
pub const NOEXEC: u64 = 0x8;
pub const NOATIME: u64 = 0x10;
/// All that is said of access times, to be cleared.
pub const ATIME: u64 = 0x70;
const IDMAP: u64 = 0x0010_0000;

/// What is changed.
#[derive(Debug, Clone, Copy, Default)]
pub struct Change<'a> {
    pub set: u64,
    pub clear: u64,
    /// A user namespace by whose maps the owners of files are shown.
    pub users: Option<BorrowedFd<'a>>,
}

/// Changes the mount that a descriptor is the root of.
///
/// # Errors
/// The kernel's; nothing has changed then.
pub fn change(mount: impl AsFd, change: Change<'_>) -> nix::Result<()> {
    /// `struct mount_attr`, linux/mount.h.
    #[repr(C)]
    struct Attributes {
        set: u64,
        clear: u64,
        propagation: u64,
        user_namespace: u64,
    }
    let attributes = Attributes {
        set: change.set | change.users.map_or(0, |_| IDMAP),
        clear: change.clear,
        propagation: 0,
        user_namespace: change.users.map_or(0, |users| users.as_raw_fd() as u64),
    };
    // SAFETY: the name and the attributes, which have the kernel's layout, outlive the call; it only reads them.
    let set = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_fd().as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attributes,
            size_of::<Attributes>(),
        )
    };
    Errno::result(set).map(drop)
}
