//! A read-only copy of a directory's mount on which the files of one user belong to another: what lets one directory be
//! the lower layer of sandboxes that each have user ids of their own. mount_setattr(2), `MOUNT_ATTR_IDMAP`.
#![expect(unsafe_code, reason = "a user namespace needs a process to be mapped")]

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;
use rustix::mount::{OpenTreeFlags, open_tree};

use super::super::materialise::Owner;
use crate::mount_attr::{self, Change};

/// As whom files of a base are on the disk.
pub(super) const KEPT_AS: Owner = Owner { uid: 0, gid: 0 };

/// The mount of `directory`, attached nowhere, read-only, its files the owner's.
pub(super) fn shown_as(directory: &Path, owner: &OwnedFd) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let mount = open_tree(rustix::fs::CWD, directory, flags)?;
    let change = Change {
        set: mount_attr::RDONLY | mount_attr::NOSUID | mount_attr::NODEV | mount_attr::NOATIME,
        clear: mount_attr::ATIME,
        users: Some(owner.as_fd()),
    };
    mount_attr::change(&mount, change)?;
    Ok(mount)
}

/// A user namespace in which [`KEPT_AS`] is that owner, and nobody else is anybody.
pub(super) fn users(owner: Owner) -> io::Result<OwnedFd> {
    let sleeper = Sleeper::start()?;
    let of = |name: &str| format!("/proc/{}/{name}", sleeper.pid);
    let map = |inside: u32, outside: u32| format!("{inside} {outside} 1");
    fs::write(of("uid_map"), map(KEPT_AS.uid, owner.uid))?;
    fs::write(of("gid_map"), map(KEPT_AS.gid, owner.gid))?;
    Ok(File::open(of("ns/user"))?.into())
}

/// A process that does nothing, in a user namespace of its own. It ends when this is dropped, and with the thread that made it.
struct Sleeper {
    pid: Pid,
    _stack: Vec<u128>,
}

impl Sleeper {
    fn start() -> io::Result<Self> {
        const STACK: usize = 16 << 10;
        let mut stack = vec![0_u128; STACK / size_of::<u128>()];
        let flags = libc::CLONE_NEWUSER | libc::CLONE_VM | libc::SIGCHLD;
        let top = stack.as_mut_ptr_range().end;
        // SAFETY: the child runs on `stack`, which is freed only after it has been waited for. It shares this memory, calls
        // nothing but the kernel, and never returns; of what the C library keeps for a thread it could touch `errno` alone,
        // and none of its calls fails.
        let pid = unsafe { libc::clone(sleep, top.cast(), flags, std::ptr::null_mut()) };
        if pid < 0 {
            return Err(io::Error::last_os_error());
        }
        let pid = Pid::from_raw(pid);
        Ok(Self { pid, _stack: stack })
    }
}

extern "C" fn sleep(_: *mut libc::c_void) -> libc::c_int {
    loop {
        // SAFETY: these calls take no memory of ours.
        unsafe {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            libc::pause();
        }
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        // Nobody else can have ended or waited for it.
        let _ = kill(self.pid, Signal::SIGKILL);
        while waitpid(self.pid, None::<WaitPidFlag>) == Err(nix::errno::Errno::EINTR) {}
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn a_namespace_maps_one_user_and_leaves_no_process() {
        if !nix::unistd::geteuid().is_root() {
            return crate::skip::skipped("a_namespace_maps_one_user_and_leaves_no_process", "not root".to_owned());
        }
        let owner = Owner {
            uid: 70_000,
            gid: 70_001,
        };
        let one = users(owner).unwrap();
        let own = fs::read_link("/proc/self/ns/user").unwrap();
        let other = fs::read_link(format!("/proc/self/fd/{}", one.as_raw_fd())).unwrap();
        assert_ne!(own, other);
        let sleeper = Sleeper::start().unwrap();
        let pid = sleeper.pid;
        assert!(kill(pid, None).is_ok());
        drop(sleeper);
        assert_eq!(kill(pid, None), Err(nix::errno::Errno::ESRCH));
    }
}
