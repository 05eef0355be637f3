//! The sockets of a sandbox, in its directory, which only the host can reach: `guest.sock`, and for gVisor `control.sock`.
//!
//! Addressed through a descriptor of the directory: a socket address holds 107 bytes, a data directory may be longer.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// Leads to the guest; each connection is one exec.
pub(in crate::sandbox::backend) const GUEST: &str = "guest.sock";
/// Leads to the supervisor of a gVisor sandbox.
pub(in crate::sandbox::backend) const CONTROL: &str = "control.sock";

fn address(dir: &File, name: &str) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}/{name}", dir.as_raw_fd()))
}

pub(in crate::sandbox::backend) fn bind(dir: &Path, name: &str) -> io::Result<UnixListener> {
    let dir = File::open(dir)?;
    UnixListener::bind(address(&dir, name))
}

/// # Errors
/// `WouldBlock` when the guest has not accepted for so long that the queue is full; connecting never waits.
pub(in crate::sandbox::backend) fn connect(dir: &File, name: &str) -> io::Result<UnixStream> {
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let stream = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    connect(stream.as_raw_fd(), &UnixAddr::new(&address(dir, name))?)?;
    Ok(stream.into())
}
