//! The way to the guest: a socket that it makes in a directory of ours, which is mounted into the container.
//!
//! The guest can put anything under that name, so the host goes by descriptor: it opens the name without following a link,
//! looks at what it got, and connects to that.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use nix::fcntl::{OFlag, open, openat};
use nix::sys::stat::{Mode, SFlag, fstat};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use crate::wire;

/// The directory's place inside.
pub const INSIDE: &str = "/.exuvia/ctl";
/// The socket's name in it.
pub const SOCKET: &str = "guest.sock";

const DEADLINE: Duration = Duration::from_secs(10);

/// The socket itself, by descriptor.
fn find(directory: &Path) -> io::Result<OwnedFd> {
    let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let directory = open(directory, flags | OFlag::O_DIRECTORY, Mode::empty())?;
    let socket = openat(&directory, SOCKET, flags, Mode::empty())?;
    if fstat(&socket)?.st_mode & SFlag::S_IFMT.bits() == SFlag::S_IFSOCK.bits() {
        Ok(socket)
    } else {
        Err(io::Error::other("what the guest left there is no socket"))
    }
}

/// Connects to the guest whose directory this is.
pub async fn connect(directory: &Path) -> io::Result<UnixStream> {
    let socket = find(directory)?;
    // The magic link leads to what the descriptor is, whatever the name means by now.
    let path = format!("/proc/self/fd/{}", socket.as_raw_fd());
    match tokio::time::timeout(DEADLINE, UnixStream::connect(path)).await {
        Ok(connected) => connected,
        Err(_) => Err(io::ErrorKind::TimedOut.into()),
    }
}

/// Asks the guest whether it serves: it has given up all that it does not need by then.
pub async fn ping(mut stream: UnixStream) -> io::Result<()> {
    let request = wire::Request {
        generation: wire::GENERATION,
        kind: Some(wire::request::Kind::Ping(wire::Ping {})),
    };
    let answer = match tokio::time::timeout(DEADLINE, ask(&mut stream, &request)).await {
        Ok(answer) => answer?,
        Err(_) => return Err(io::ErrorKind::TimedOut.into()),
    };
    let pong = wire::event::Kind::Pong(wire::Pong {
        generation: wire::GENERATION,
    });
    match answer {
        Some(kind) if kind == pong => Ok(()),
        other => Err(io::Error::other(format!("it answers a ping with {other:?}"))),
    }
}

/// One frame out, one frame back.
async fn ask(stream: &mut UnixStream, request: &wire::Request) -> io::Result<Option<wire::event::Kind>> {
    let mut buffer = Vec::new();
    wire::encode(request, &mut buffer)?;
    stream.write_all(&buffer).await?;
    buffer.clear();
    loop {
        if let Some(event) = wire::decode::<wire::Event>(&mut buffer)? {
            return Ok(event.kind);
        }
        if stream.read_buf(&mut buffer).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// T5, T10: a name that the guest writes leads the host nowhere.
    #[tokio::test]
    async fn only_a_socket_in_the_directory_itself_is_connected_to() {
        let outside = tempfile::tempdir().unwrap();
        let elsewhere = outside.path().join("host.sock");
        let _host = tokio::net::UnixListener::bind(&elsewhere).unwrap();

        let ctl = tempfile::tempdir().unwrap();
        let name = ctl.path().join(SOCKET);
        symlink(&elsewhere, &name).unwrap();
        assert!(connect(ctl.path()).await.is_err());

        std::fs::remove_file(&name).unwrap();
        std::fs::write(&name, b"").unwrap();
        assert!(connect(ctl.path()).await.is_err());

        std::fs::remove_file(&name).unwrap();
        let _guest = tokio::net::UnixListener::bind(&name).unwrap();
        assert!(connect(ctl.path()).await.is_ok());

        let link = outside.path().join("ctl");
        symlink(ctl.path(), &link).unwrap();
        assert!(connect(&link).await.is_err());
    }
}
