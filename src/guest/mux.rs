//! All connections over standard input and output: a process between the host and init, for a sandbox that no socket reaches
//! into.
//!
//! Each connection that the host opens becomes one end of a socket pair; the other end is handed to init, for which it is as
//! if accepted. A process of its own, so that init still reads no frame. It has nothing that an exec could use, and it ends
//! when the host's pipe does, or, once init wants the end, when the last connection has: what they still say gets out. Over a
//! line that can break (`wire::line`) the next host finds it as it is; connections of the one before go on without a peer.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, recvmsg, sendmsg, socketpair,
};
use nix::unistd::{ForkResult, Pid};

use super::sys;
use crate::wire::mux::{News, Side};
use crate::wire::pump::Pump;

/// Whether another host may come without a word from the one before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Breaks {
    Never,
    Expected,
}

/// Starts it; the answer is where connections come out, and who it is.
pub fn start(breaks: Breaks) -> io::Result<(OwnedFd, Pid)> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let (handoff, ours) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags)?;
    let null = std::fs::File::options().read(true).write(true).open("/dev/null")?;
    // The host's own file: programs could open it through /proc.
    nix::unistd::dup2_stderr(&null)?;
    match sys::fork()? {
        ForkResult::Child => {
            drop(handoff);
            sys::exit(i32::from(Carrier::new(ours, breaks).and_then(Carrier::run).is_err()))
        }
        ForkResult::Parent { child } => {
            // The pipes are the mux's alone; programs are given descriptors of their own.
            nix::unistd::dup2_stdin(&null)?;
            nix::unistd::dup2_stdout(&null)?;
            Ok((handoff, child))
        }
    }
}

/// The next connection; `None` when there will be none.
#[expect(unsafe_code, reason = "nix gives received descriptors as numbers")]
pub fn handed(handoff: &OwnedFd) -> nix::Result<Option<OwnedFd>> {
    let mut byte = [0];
    let mut parts = [IoSliceMut::new(&mut byte)];
    let mut space = nix::cmsg_space!([std::os::fd::RawFd; 1]);
    let flags = MsgFlags::MSG_CMSG_CLOEXEC | MsgFlags::MSG_DONTWAIT;
    let message = recvmsg::<()>(handoff.as_raw_fd(), &mut parts, Some(&mut space), flags)?;
    if message.bytes == 0 {
        return Ok(None);
    }
    for part in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(fds) = part
            && let Some(fd) = fds.first()
        {
            // SAFETY: the kernel has just made this descriptor for us, and each message is looked at once.
            return Ok(Some(unsafe { OwnedFd::from_raw_fd(*fd) }));
        }
    }
    Err(Errno::EAGAIN)
}

struct Carrier {
    pump: Pump,
    handoff: Option<OwnedFd>,
    /// Of a host that is gone: what they say is thrown away, so that they can go on.
    orphans: Vec<UnixStream>,
    /// The host waits for a word that there is quiet.
    is_pausing: bool,
}

impl Carrier {
    fn new(handoff: OwnedFd, breaks: Breaks) -> io::Result<Self> {
        let (from, to) = (
            io::stdin().as_fd().try_clone_to_owned()?,
            io::stdout().as_fd().try_clone_to_owned()?,
        );
        let mut pump = Pump::new(Side::Guest, from, to)?;
        if breaks == Breaks::Expected {
            pump.expect_breaks();
        }
        Ok(Self {
            pump,
            handoff: Some(handoff),
            orphans: Vec::new(),
            is_pausing: false,
        })
    }

    fn run(mut self) -> io::Result<()> {
        loop {
            let handoff = self.handoff.as_ref().map(AsFd::as_fd);
            let orphans = self.orphans.iter().map(AsFd::as_fd);
            let others: Vec<_> = handoff.into_iter().chain(orphans).collect();
            let turn = self.pump.turn(&others, PollTimeout::NONE)?;
            let mut ready = turn.ready.into_iter();
            if self.handoff.is_some() && ready.next() == Some(true) {
                // It says nothing: it hung up.
                self.handoff = None;
            }
            let ready: Vec<bool> = ready.collect();
            let mut ready = ready.iter();
            self.orphans
                .retain(|orphan| ready.next() != Some(&true) || still_speaks(orphan));
            self.orphans.extend(turn.orphans);
            for news in turn.news {
                self.hear(news)?;
            }
            if self.is_pausing && self.pump.mux.outbox().is_empty() {
                self.is_pausing = false;
                self.pump.mux.paused();
            }
            let is_over = self.handoff.is_none() && self.pump.is_idle() && self.pump.mux.outbox().is_empty();
            if is_over || self.pump.is_lost() {
                return Ok(());
            }
        }
    }

    fn hear(&mut self, news: News) -> io::Result<()> {
        match news {
            News::Opened(id) => self.open(id)?,
            // What is on its way out goes first; nothing is added to it.
            News::Pause => {
                self.is_pausing = true;
                self.pump.mux.hold();
            }
            News::Resume { is_new_host } => {
                for id in self.pump.mux.resumed(is_new_host) {
                    self.orphans.extend(self.pump.detach(id));
                }
            }
            // Init takes the end of this for its own.
            News::End => self.handoff = None,
            News::Paused | News::Deaf => {}
        }
        Ok(())
    }

    fn open(&mut self, id: u32) -> io::Result<()> {
        let Some(handoff) = &self.handoff else {
            self.pump.mux.close(id);
            return Ok(());
        };
        let (ours, theirs) = match UnixStream::pair() {
            Ok(pair) => pair,
            // Out of descriptors: the others go on.
            Err(_) => {
                self.pump.mux.close(id);
                return Ok(());
            }
        };
        match hand_over(handoff, &theirs) {
            Ok(()) => self.pump.attach(id, ours),
            Err(_) => {
                self.pump.mux.close(id);
                Ok(())
            }
        }
    }
}

/// Throws away what an orphan says; whether more may come.
fn still_speaks(orphan: &UnixStream) -> bool {
    let mut buffer = [0; 32 << 10];
    match io::Read::read(&mut &*orphan, &mut buffer) {
        Ok(got) => got > 0,
        Err(error) => matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted),
    }
}

fn hand_over(handoff: &OwnedFd, connection: &UnixStream) -> nix::Result<()> {
    let fds = [connection.as_raw_fd()];
    let rights = [ControlMessage::ScmRights(&fds)];
    loop {
        let sent = sendmsg::<()>(
            handoff.as_raw_fd(),
            &[IoSlice::new(&[0])],
            &rights,
            MsgFlags::empty(),
            None,
        );
        match sent {
            // Init is slow: it takes them one by one.
            Err(Errno::EAGAIN) => {
                poll(
                    &mut [PollFd::new(handoff.as_fd(), PollFlags::POLLOUT)],
                    PollTimeout::NONE,
                )?;
            }
            Err(Errno::EINTR) => {}
            other => return other.map(drop),
        }
    }
}
