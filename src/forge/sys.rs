//! System calls that nix does not wrap, each with its safety argument. Nothing here decides anything.
#![expect(unsafe_code, reason = "raw system calls that nix 0.32 lacks")]

use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::unistd::Pid;

use crate::mount_attr;
pub use crate::mount_attr::{NODEV, NOEXEC, NOSUID, RDONLY};

const OPEN_TREE_CLONE: libc::c_uint = 1;
const MOVE_MOUNT_F_EMPTY_PATH: libc::c_uint = 0x04;
const MOVE_MOUNT_T_EMPTY_PATH: libc::c_uint = 0x40;
const FSOPEN_CLOEXEC: libc::c_uint = 1;
const FSMOUNT_CLOEXEC: libc::c_uint = 1;
const FSCONFIG_SET_FLAG: libc::c_uint = 0;
const FSCONFIG_SET_STRING: libc::c_uint = 1;
const FSCONFIG_CMD_CREATE: libc::c_uint = 6;

/// A new child of this process, `None` in the child. Both sides may go on with any code.
pub fn clone(flags: libc::c_int, group: Option<BorrowedFd<'_>>) -> nix::Result<Option<Pid>> {
    // SAFETY: all zero is a valid value.
    let mut arguments: libc::clone_args = unsafe { std::mem::zeroed() };
    arguments.flags = flags as u32 as u64;
    arguments.exit_signal = libc::SIGCHLD as u64;
    if let Some(group) = group {
        arguments.flags |= INTO_CGROUP;
        arguments.cgroup = group.as_raw_fd() as u64;
    }
    // SAFETY: no CLONE_VM, so the child has memory of its own, and no stack is passed: this is a fork. The forge never starts
    // a thread, so the child inherits no lock in a held state. The kernel only reads `arguments`.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw const arguments, size_of::<libc::clone_args>()) };
    Ok(match Errno::result(pid)? {
        0 => None,
        pid => Some(Pid::from_raw(pid as libc::pid_t)),
    })
}

/// `CLONE_INTO_CGROUP` of clone3(2); the C library's constant is cut to 32 bits.
const INTO_CGROUP: u64 = 1 << 33;

fn descriptor(result: libc::c_long) -> nix::Result<OwnedFd> {
    let fd = Errno::result(result)?;
    // SAFETY: the kernel has just made it, for nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as libc::c_int) })
}

/// A copy of the mount at `path`, without those below it, attached nowhere.
pub fn clone_mount(path: &CStr) -> nix::Result<OwnedFd> {
    let flags = OPEN_TREE_CLONE | libc::O_CLOEXEC as libc::c_uint;
    // SAFETY: `path` outlives the call.
    descriptor(unsafe { libc::syscall(libc::SYS_open_tree, libc::AT_FDCWD, path.as_ptr(), flags) })
}

/// Attaches a detached mount at `target`.
pub fn attach(mount: impl AsFd, target: &CStr) -> nix::Result<()> {
    let (mount, flags) = (mount.as_fd().as_raw_fd(), MOVE_MOUNT_F_EMPTY_PATH);
    // SAFETY: both names outlive the call.
    let moved = unsafe {
        libc::syscall(
            libc::SYS_move_mount,
            mount,
            c"".as_ptr(),
            libc::AT_FDCWD,
            target.as_ptr(),
            flags,
        )
    };
    Errno::result(moved).map(drop)
}

/// Attaches a detached mount on what `target` is open on.
pub fn attach_on(mount: impl AsFd, target: impl AsFd) -> nix::Result<()> {
    let (mount, target) = (mount.as_fd().as_raw_fd(), target.as_fd().as_raw_fd());
    let flags = MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH;
    // SAFETY: both names outlive the call.
    let moved = unsafe { libc::syscall(libc::SYS_move_mount, mount, c"".as_ptr(), target, c"".as_ptr(), flags) };
    Errno::result(moved).map(drop)
}

/// Adds flags to a mount.
pub fn harden(mount: impl AsFd, flags: u64) -> nix::Result<()> {
    let set = mount_attr::Change {
        set: flags,
        ..mount_attr::Change::default()
    };
    mount_attr::change(mount, set)
}

/// A fresh file system, attached nowhere. `options` without a value are flags.
pub fn file_system(kind: &CStr, options: &[(&CStr, Option<&CStr>)], flags: u64) -> nix::Result<OwnedFd> {
    // SAFETY: `kind` outlives the call.
    let context = descriptor(unsafe { libc::syscall(libc::SYS_fsopen, kind.as_ptr(), FSOPEN_CLOEXEC) })?;
    let configure = |command: libc::c_uint, key: Option<&CStr>, value: Option<&CStr>| {
        let key = key.map_or(std::ptr::null(), CStr::as_ptr);
        let value = value.map_or(std::ptr::null(), CStr::as_ptr);
        // SAFETY: null where the command takes none, else strings that outlive the call.
        let set = unsafe { libc::syscall(libc::SYS_fsconfig, context.as_raw_fd(), command, key, value, 0) };
        Errno::result(set).map(drop)
    };
    configure(FSCONFIG_SET_STRING, Some(c"source"), Some(kind))?;
    for (key, value) in options {
        let command = match value {
            Some(_) => FSCONFIG_SET_STRING,
            None => FSCONFIG_SET_FLAG,
        };
        configure(command, Some(key), *value)?;
    }
    configure(FSCONFIG_CMD_CREATE, None, None)?;
    // SAFETY: no memory is passed.
    descriptor(unsafe { libc::syscall(libc::SYS_fsmount, context.as_raw_fd(), FSMOUNT_CLOEXEC, flags) })
}

/// Brings the loopback interface of this network namespace up.
pub fn loopback_up() -> nix::Result<()> {
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};
    let socket = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
    // SAFETY: all zero is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(*b"lo") {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    // SAFETY: the kernel reads one ifreq, whose name ends with a zero.
    Errno::result(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) }).map(drop)
}

/// Makes `number` mean what `fd` means, for the next program too. Nothing that this process still uses has that number.
pub fn place(fd: impl AsFd, number: RawFd) -> nix::Result<()> {
    // SAFETY: no memory is passed; see above for what the number was.
    Errno::result(unsafe { libc::dup2(fd.as_fd().as_raw_fd(), number) }).map(drop)
}

/// Leaves the keys of whoever started this process.
pub fn fresh_keyring() -> nix::Result<()> {
    const KEYCTL_JOIN_SESSION_KEYRING: libc::c_int = 1;
    let none = std::ptr::null::<libc::c_char>();
    // SAFETY: null stands for a keyring without a name.
    match Errno::result(unsafe { libc::syscall(libc::SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, none) }) {
        // A kernel without keys.
        Ok(_) | Err(Errno::ENOSYS) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Removes every capability but `keep` (a bit mask) from the bounding set.
pub fn limit_bounding_set(keep: u64) -> nix::Result<()> {
    for capability in (0..64).filter(|capability| keep & 1 << capability == 0) {
        // SAFETY: no memory is passed.
        match Errno::result(unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability as libc::c_ulong, 0, 0, 0) }) {
            Ok(_) => {}
            // The kernel knows no higher one.
            Err(Errno::EINVAL) => break,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Turns this process into the program that `file` is open on; returns only with the reason why it did not.
pub fn execute(file: impl AsFd, words: &[CString], variables: &[CString]) -> Errno {
    let pointers = |strings: &[CString]| -> Vec<*const libc::c_char> {
        let strings = strings.iter().map(|string| string.as_ptr());
        strings.chain([std::ptr::null()]).collect()
    };
    let (words, variables) = (pointers(words), pointers(variables));
    // SAFETY: both lists end with null; they and the strings outlive the call.
    unsafe {
        libc::syscall(
            libc::SYS_execveat,
            file.as_fd().as_raw_fd(),
            c"".as_ptr(),
            words.as_ptr(),
            variables.as_ptr(),
            libc::AT_EMPTY_PATH,
        );
    }
    Errno::last()
}
