//! The server's end of the forge (`crate::forge`): starts it when it is first needed, and again when it has died; asks it for
//! sandboxes, any number at once.

use std::fs::File;
use std::io::{self, IoSlice, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, sendmsg, setsockopt, socketpair, sockopt,
};
use nix::sys::time::TimeVal;
use prost::Message;

use crate::forge::{Fault, MAX_ANSWER, MAX_REQUEST, Made, Make, Ready, Said, WORD, said};
use crate::wire;

/// How long it may take to make a sandbox; it needs some milliseconds, and seconds for the first of a slow image.
const DEADLINE: Duration = Duration::from_secs(30);
/// Frames of one answer.
const MAX_FRAMES: usize = 3;

/// Why there is no sandbox.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("the forge does not start")]
    Start(#[source] io::Error),
    #[error("the forge takes no request")]
    Ask(#[source] io::Error),
    #[error("the request is too large: it has {0} bytes")]
    TooLarge(usize),
    #[error("the forge does not answer")]
    Hear(#[source] io::Error),
    #[error("could not {step}")]
    Step {
        step: String,
        #[source]
        source: io::Error,
    },
    #[error("the forge, or what it made, ended too early")]
    Ended,
}

/// A forge that runs, or will.
#[derive(Debug)]
pub(super) struct Forge {
    program: PathBuf,
    running: Mutex<Option<Running>>,
}

#[derive(Debug)]
struct Running {
    process: Child,
    socket: Arc<OwnedFd>,
}

impl Drop for Running {
    fn drop(&mut self) {
        // There is nothing in it to lose. Both fail only when it is gone.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Forge {
    pub fn new(program: PathBuf) -> Self {
        Self {
            program,
            running: Mutex::new(None),
        }
    }

    /// Makes a sandbox whose guest accepts on the first of `listeners`, and tells the number of its first process. With
    /// `request.runsc` its supervisor accepts on the second.
    ///
    /// # Errors
    /// Whatever the error, processes may be left in the sandbox's control group, and nothing anywhere else.
    pub fn make(&self, request: &Make, listeners: &[BorrowedFd<'_>]) -> Result<i32, Error> {
        let request = request.encode_to_vec();
        if request.len() > MAX_REQUEST {
            return Err(Error::TooLarge(request.len()));
        }
        let socket = self.socket(None)?;
        let heard = match ask(&socket, &request, listeners) {
            // It has died since; what it made goes on. Silence is the same: a request that it took and never looked at. Whoever
            // could have said something has ended, or it would still hold the pipe.
            Ok(heard) if heard.is_empty() => ask(&*self.socket(Some(&socket))?, &request, listeners)?,
            Err(Error::Ask(error)) if is_gone(&error) => ask(&*self.socket(Some(&socket))?, &request, listeners)?,
            other => other?,
        };
        understand(&heard)
    }

    /// The socket of a forge that runs, and is not `dead`.
    fn socket(&self, dead: Option<&Arc<OwnedFd>>) -> Result<Arc<OwnedFd>, Error> {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if let (Some(now), Some(dead)) = (&*running, dead)
            && Arc::ptr_eq(&now.socket, dead)
        {
            *running = None;
        }
        let running = match &mut *running {
            Some(running) => running,
            none => none.insert(self.start().map_err(Error::Start)?),
        };
        Ok(Arc::clone(&running.socket))
    }

    fn start(&self) -> io::Result<Running> {
        let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
        setsockopt(&ours, sockopt::SndBuf, &(4 * MAX_REQUEST))?;
        setsockopt(&ours, sockopt::SendTimeout, &TimeVal::new(DEADLINE.as_secs() as i64, 0))?;
        let process = Command::new(&self.program)
            .arg0("exuvia-forge")
            .arg(WORD)
            .env_clear()
            .current_dir("/")
            .stdin(theirs)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        Ok(Running {
            process,
            socket: Arc::new(ours),
        })
    }
}

/// One request, and everything that is said to it.
fn ask(socket: &OwnedFd, request: &[u8], listeners: &[BorrowedFd<'_>]) -> Result<Vec<u8>, Error> {
    let (answer, theirs) =
        nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC).map_err(|error| Error::Ask(error.into()))?;
    let descriptors = [theirs.as_fd()].into_iter().chain(listeners.iter().copied());
    let descriptors: Vec<i32> = descriptors.map(|fd| fd.as_raw_fd()).collect();
    send(socket, request, &descriptors).map_err(|error| Error::Ask(error.into()))?;
    drop(theirs);
    hear(answer).map_err(Error::Hear)
}

fn is_gone(error: &io::Error) -> bool {
    let gone = [Errno::EPIPE, Errno::ECONNRESET, Errno::ENOTCONN, Errno::ECONNREFUSED];
    error
        .raw_os_error()
        .is_some_and(|raw| gone.contains(&Errno::from_raw(raw)))
}

fn send(socket: &OwnedFd, request: &[u8], descriptors: &[i32]) -> nix::Result<()> {
    let control = [ControlMessage::ScmRights(descriptors)];
    loop {
        let flags = MsgFlags::MSG_NOSIGNAL;
        match sendmsg::<()>(socket.as_raw_fd(), &[IoSlice::new(request)], &control, flags, None) {
            Err(Errno::EINTR) => {}
            result => return result.map(drop),
        }
    }
}

/// Everything that is said, until the last of those who could say more has ended or runs the guest.
fn hear(from: OwnedFd) -> io::Result<Vec<u8>> {
    let mut from = File::from(from);
    let started = Instant::now();
    let mut heard = Vec::new();
    loop {
        let left = DEADLINE.saturating_sub(started.elapsed());
        let mut ready = [PollFd::new(from.as_fd(), PollFlags::POLLIN)];
        match poll(&mut ready, PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO)) {
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            Ok(_) => {}
            Err(Errno::EINTR) => continue,
            Err(error) => return Err(error.into()),
        }
        let mut chunk = [0; MAX_ANSWER];
        match from.read(&mut chunk)? {
            0 => return Ok(heard),
            _ if heard.len() > MAX_FRAMES * MAX_ANSWER => return Err(io::ErrorKind::FileTooLarge.into()),
            got => heard.extend_from_slice(&chunk[..got]),
        }
    }
}

fn understand(mut heard: &[u8]) -> Result<i32, Error> {
    let (mut made, mut is_ready) = (None, false);
    while let Some(said) = wire::read::<Said>(&mut heard).map_err(Error::Hear)? {
        match said.kind {
            Some(said::Kind::Made(Made { pid })) => made = Some(pid),
            Some(said::Kind::Ready(Ready {})) => is_ready = true,
            Some(said::Kind::Fault(Fault { step, errno })) => {
                let source = io::Error::from_raw_os_error(errno);
                return Err(Error::Step { step, source });
            }
            None => return Err(Error::Hear(io::ErrorKind::InvalidData.into())),
        }
    }
    made.filter(|_| is_ready).ok_or(Error::Ended)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_process_that_became_the_guest_counts() {
        let heard = |kinds: &[said::Kind]| {
            let mut bytes = Vec::new();
            for kind in kinds {
                let kind = Some(kind.clone());
                wire::encode(&Said { kind }, &mut bytes).unwrap();
            }
            understand(&bytes).map_err(|error| error.to_string())
        };
        let made = said::Kind::Made(Made { pid: 7 });
        let ready = said::Kind::Ready(Ready {});
        let fault = said::Kind::Fault(Fault {
            step: "mount /tmp".to_owned(),
            errno: libc::ENOMEM,
        });
        let ended = Err("the forge, or what it made, ended too early".to_owned());
        assert_eq!(heard(&[]), ended);
        assert_eq!(heard(std::slice::from_ref(&made)), ended);
        // Two processes write: the order is not theirs to choose.
        assert_eq!(heard(&[made.clone(), ready.clone()]), Ok(7));
        assert_eq!(heard(&[ready.clone(), made.clone()]), Ok(7));
        assert_eq!(heard(&[made, ready, fault]), Err("could not mount /tmp".to_owned()));
    }
}
