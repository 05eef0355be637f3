//! The socket of a sandbox: `guest.sock` in its directory, which only the host can reach.
//!
//! Addressed through a descriptor of the directory: a socket address holds 107 bytes, a data directory may be longer.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

const NAME: &str = "guest.sock";

fn address(dir: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}/{NAME}", dir.as_raw_fd()))
}

pub(super) fn bind(dir: &Path) -> io::Result<UnixListener> {
    let dir = File::open(dir)?;
    UnixListener::bind(address(&dir))
}

/// # Errors
/// `WouldBlock` when the guest has not accepted for so long that the queue is full; connecting never waits.
pub(super) fn connect(dir: &File) -> io::Result<UnixStream> {
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let stream = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    connect(stream.as_raw_fd(), &UnixAddr::new(&address(dir))?)?;
    Ok(stream.into())
}
