//! The line between init and each shim: one message a datagram, bytes that init moves and never reads.
//!
//! A shim with a detachable exec registers the exec's id with init, together with a description. Whoever asks for that exec
//! arrives at a shim of its own, which reads the request and hands it over, with the connection, through init to the shim
//! that has the exec. So init still reads no frame of the host's.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::cmsg_space;
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, recvmsg, sendmsg, socketpair,
};

/// Longest message.
pub const MAX: usize = 8 << 10;
/// Longest id.
pub const MAX_ID: usize = 64;

/// What a message is about; its first byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Tag {
    /// To init: this id is mine. Answered with `Yes` or, when it is taken, `No`.
    Register = b'R',
    /// To init: another description of my id.
    Describe = b'D',
    /// To init: the last description of my id.
    Ended = b'E',
    /// To init: a request for an id, with its connection. Answered with `Yes` or, when there is no such id, `No`.
    /// From init: the same, to the shim whose id it is.
    HandOver = b'H',
    /// To init: the next id after this. Answered with `Found` or, at the end, `No`.
    Next = b'L',
    Found = b'F',
    Yes = b'Y',
    No = b'N',
    /// From init: forget an exec that ended, there are too many.
    Forget = b'X',
    /// To init: my id is nobody's any more. Answered with `Yes`, after which nothing is handed over.
    Leave = b'G',
    /// To init: I have a connection, look for the next yourself.
    Busy = b'B',
    /// To init: I have done what there was, and could take the next connection. Answered with `Yes` or, when another shim
    /// waits for it already, `No`.
    Free = b'W',
}

impl Tag {
    fn of(byte: u8) -> Option<Self> {
        [
            Self::Register,
            Self::Describe,
            Self::Ended,
            Self::HandOver,
            Self::Next,
            Self::Found,
            Self::Yes,
            Self::No,
            Self::Forget,
            Self::Leave,
            Self::Busy,
            Self::Free,
        ]
        .into_iter()
        .find(|tag| *tag as u8 == byte)
    }
}

/// One message.
#[derive(Debug)]
pub struct Message {
    pub tag: Tag,
    pub id: Vec<u8>,
    pub body: Vec<u8>,
    pub connection: Option<OwnedFd>,
}

/// One end of the line.
#[derive(Debug)]
pub struct Leash(OwnedFd);

impl AsFd for Leash {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Leash {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Whether a call waits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Patience {
    Wait,
    Now,
}

impl Patience {
    fn flags(self) -> MsgFlags {
        match self {
            Self::Wait => MsgFlags::MSG_NOSIGNAL,
            Self::Now => MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT,
        }
    }
}

impl Leash {
    pub fn pair() -> nix::Result<(Self, Self)> {
        let flags = SockFlag::SOCK_CLOEXEC;
        let (one, other) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags)?;
        Ok((Self(one), Self(other)))
    }

    pub fn send(
        &self,
        tag: Tag,
        id: &[u8],
        body: &[u8],
        connection: Option<BorrowedFd<'_>>,
        patience: Patience,
    ) -> io::Result<()> {
        let length = u8::try_from(id.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let head = [tag as u8, length];
        let parts = [IoSlice::new(&head), IoSlice::new(id), IoSlice::new(body)];
        let fds: Vec<RawFd> = connection.iter().map(|fd| fd.as_raw_fd()).collect();
        let rights = [ControlMessage::ScmRights(&fds)];
        let rights = if fds.is_empty() { &[] } else { rights.as_slice() };
        loop {
            match sendmsg::<()>(self.0.as_raw_fd(), &parts, rights, patience.flags(), None) {
                Ok(_) => return Ok(()),
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// The next message; `None` when the other end is gone.
    #[expect(unsafe_code, reason = "nix gives received descriptors as numbers")]
    pub fn receive(&self, patience: Patience) -> io::Result<Option<Message>> {
        let mut buffer = vec![0; MAX + MAX_ID + 2];
        let mut space = cmsg_space!([RawFd; 1]);
        let (length, connection) = {
            let mut parts = [IoSliceMut::new(&mut buffer)];
            let flags = patience.flags() | MsgFlags::MSG_CMSG_CLOEXEC;
            let received = loop {
                match recvmsg::<()>(self.0.as_raw_fd(), &mut parts, Some(&mut space), flags) {
                    Err(Errno::EINTR) => {}
                    result => break result?,
                }
            };
            let mut connection = None;
            for control in received.cmsgs()? {
                if let ControlMessageOwned::ScmRights(fds) = control {
                    for fd in fds {
                        // SAFETY: the kernel has just made this descriptor for us, and nobody else knows its number.
                        connection = Some(unsafe { OwnedFd::from_raw_fd(fd) });
                    }
                }
            }
            (received.bytes, connection)
        };
        let [tag, id_length, rest @ ..] = &buffer[..length] else {
            return Ok(None);
        };
        let tag = Tag::of(*tag).ok_or(io::ErrorKind::InvalidData)?;
        let (id, body) = rest
            .split_at_checked(usize::from(*id_length))
            .ok_or(io::ErrorKind::InvalidData)?;
        Ok(Some(Message {
            tag,
            id: id.to_vec(),
            body: body.to_vec(),
            connection,
        }))
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_message_carries_an_id_a_body_and_a_connection() {
        let (one, other) = Leash::pair().unwrap();
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        one.send(Tag::HandOver, b"id", b"body", Some(theirs.as_fd()), Patience::Now)
            .unwrap();
        drop(theirs);
        let message = other.receive(Patience::Now).unwrap().unwrap();
        assert_eq!(
            (message.tag, message.id.as_slice(), message.body.as_slice()),
            (Tag::HandOver, b"id".as_slice(), b"body".as_slice())
        );
        ours.write_all(b"x").unwrap();
        let mut byte = [0];
        UnixStream::from(message.connection.unwrap())
            .read_exact(&mut byte)
            .unwrap();
        assert_eq!(&byte, b"x");
        let error = other.receive(Patience::Now).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        drop(one);
        assert!(other.receive(Patience::Now).unwrap().is_none());
    }
}
