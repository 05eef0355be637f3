//! The forge's loop: takes requests, clones children, maps their user ids, reaps.
//!
//! It waits in one place and never for one sandbox: what takes time is done by the children. (A template is the exception:
//! it is made once, with a deadline.)

use std::fs;
use std::io::{self, ErrorKind, IoSliceMut, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl, open};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};
use nix::sys::stat::{Mode, umask};
use nix::unistd::{self, Pid};
use prost::Message;

use super::birth::Birth;
use super::step::{During, fault, name};
use super::template::Templates;
use super::{Fault, MAX_ANSWER, MAX_REQUEST, Made, Make, Said, said, sys};
use crate::guest::sys as processes;
use crate::wire;

/// Most descriptors that come with a request.
const DESCRIPTORS: usize = 3;

struct Forge {
    server: OwnedFd,
    signals: SignalFd,
    /// This program, which is the guest's too.
    guest: OwnedFd,
    templates: Templates,
    expecting: Vec<Expecting>,
}

/// A child that will ask for its user ids.
struct Expecting {
    pid: Pid,
    socket: UnixStream,
    base: u32,
    range: u32,
}

struct Request {
    make: Make,
    answer: OwnedFd,
    listener: OwnedFd,
    control: Option<OwnedFd>,
}

/// Serves the socket that is descriptor 0, until its other end closes.
pub(super) fn run() -> io::Result<()> {
    let mut forge = Forge::new()?;
    let mut buffer = vec![0; MAX_REQUEST];
    loop {
        let ready = forge.wait()?;
        // In this order: a number is free for another process only once it was reaped.
        forge.map_ids(&ready.children);
        if ready.signals {
            forge.reap();
        }
        if ready.server {
            match receive(&forge.server, &mut buffer) {
                Ok(Some(request)) => forge.make(request),
                Ok(None) => return Ok(()),
                // What makes no sense is dropped, and with it the pipe for the answer: that is the answer.
                Err(error) if error.kind() == ErrorKind::InvalidData => {}
                Err(error) => return Err(error),
            }
        }
    }
}

struct Awake {
    server: bool,
    signals: bool,
    /// For each expected child.
    children: Vec<bool>,
}

impl Forge {
    fn new() -> io::Result<Self> {
        let server = fcntl(io::stdin(), FcntlArg::F_DUPFD_CLOEXEC(3))?;
        let server = processes::adopt(server)?;
        let null = open(c"/dev/null", OFlag::O_RDWR | OFlag::O_CLOEXEC, Mode::empty())?;
        unistd::dup2_stdin(&null)?;
        // Out of reach of the keys and hang-ups of a terminal. Fails for a leader of a group, which is out of reach already.
        let _ = unistd::setsid();
        std::env::set_current_dir("/")?;
        umask(Mode::from_bits_truncate(0o022));
        prctl::set_name(c"exuvia-forge")?;
        // What a child leaves behind in its set-up comes here.
        prctl::set_child_subreaper(true)?;
        let mut mask = SigSet::empty();
        mask.add(Signal::SIGCHLD);
        mask.thread_block()?;
        Ok(Self {
            server,
            signals: SignalFd::with_flags(&mask, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?,
            guest: open(c"/proc/self/exe", OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())?,
            templates: Templates::default(),
            expecting: Vec::new(),
        })
    }

    fn wait(&self) -> io::Result<Awake> {
        let sources = [self.server.as_fd(), self.signals.as_fd()];
        let children = self.expecting.iter().map(|child| child.socket.as_fd());
        let mut fds: Vec<PollFd<'_>> = sources
            .into_iter()
            .chain(children)
            .map(|fd| PollFd::new(fd, PollFlags::POLLIN))
            .collect();
        loop {
            match poll(&mut fds, PollTimeout::NONE) {
                Ok(_) => break,
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let mut ready = fds.iter().map(|fd| fd.any().unwrap_or(true));
        Ok(Awake {
            server: ready.next().unwrap_or(true),
            signals: ready.next().unwrap_or(true),
            children: ready.collect(),
        })
    }

    /// Gives each child that asks its user ids; whatever goes wrong, the child sees its socket close.
    fn map_ids(&mut self, asked: &[bool]) {
        let mut asked = asked.iter();
        self.expecting.retain_mut(|child| {
            if !asked.next().is_some_and(|asked| *asked) {
                return true;
            }
            if matches!(child.socket.read(&mut [0]), Ok(1)) && child.map().is_ok() {
                let _ = child.socket.write(&[1]);
            }
            false
        });
    }

    fn reap(&mut self) {
        while let Ok(Some(_)) = self.signals.read_signal() {}
        while let Ok(Some(ended)) = processes::reap(processes::Wait::Now) {
            self.expecting.retain(|child| child.pid != ended.pid);
        }
    }

    fn make(&mut self, request: Request) {
        let Request {
            make,
            answer,
            listener,
            control,
        } = request;
        if let Err(fault) = self.clone_child(&make, &answer, listener, control) {
            // The server may have given up.
            let _ = say(&answer, said::Kind::Fault(fault));
        }
    }

    fn clone_child(
        &mut self,
        make: &Make,
        answer: &OwnedFd,
        listener: OwnedFd,
        control: Option<OwnedFd>,
    ) -> Result<(), Fault> {
        let shape = make.shape.as_ref();
        let shape = shape.ok_or_else(|| fault("make a sandbox without a shape".to_owned(), Errno::EINVAL))?;
        let template = self.templates.find(shape)?;
        let group = match make.group.as_slice() {
            [] => None,
            path => {
                let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
                let group = open(name(path)?.as_c_str(), flags, Mode::empty());
                Some(group.during(|| "open the control group".to_owned())?)
            }
        };
        let (ours, theirs) = UnixStream::pair().during(|| "make a socket".to_owned())?;
        let apart = libc::CLONE_NEWPID | libc::CLONE_NEWTIME;
        let group = group.as_ref().map(AsFd::as_fd);
        match sys::clone(apart, group).during(|| "fork".to_owned())? {
            None => {
                drop(ours);
                // Nothing of other sandboxes is needed here, nor may it be held.
                self.expecting.clear();
                let _ = unistd::close(self.server.as_raw_fd());
                let birth = Birth {
                    make,
                    template,
                    guest: &self.guest,
                    listener,
                    control,
                    forge: theirs,
                    answer,
                };
                let _ = say(answer, said::Kind::Fault(birth.go()));
                processes::exit(1)
            }
            Some(pid) => {
                self.expecting.push(Expecting {
                    pid,
                    socket: ours,
                    base: make.base,
                    range: make.range,
                });
                // Unheard, the server learns by the end of the pipe that there is nobody.
                let _ = say(answer, said::Kind::Made(Made { pid: pid.as_raw() }));
                Ok(())
            }
        }
    }
}

impl Expecting {
    fn map(&self) -> io::Result<()> {
        let map = format!("0 {} {}", self.base, self.range);
        for file in ["gid_map", "uid_map"] {
            fs::write(format!("/proc/{}/{file}", self.pid), &map)?;
        }
        Ok(())
    }
}

/// The next request; `None` when the server is gone.
fn receive(server: &OwnedFd, buffer: &mut [u8]) -> io::Result<Option<Request>> {
    let invalid = || io::Error::from(ErrorKind::InvalidData);
    let mut space = nix::cmsg_space!([libc::c_int; DESCRIPTORS]);
    let mut slices = [IoSliceMut::new(buffer)];
    let message = loop {
        match recvmsg::<()>(
            server.as_raw_fd(),
            &mut slices,
            Some(&mut space),
            MsgFlags::MSG_CMSG_CLOEXEC,
        ) {
            Err(Errno::EINTR) => {}
            Err(Errno::ECONNRESET) => return Ok(None),
            other => break other?,
        }
    };
    let (length, flags) = (message.bytes, message.flags);
    let mut descriptors = Vec::new();
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(numbers) = control {
            for number in numbers {
                descriptors.push(processes::adopt(number)?);
            }
        }
    }
    if length == 0 {
        return Ok(None);
    }
    if flags.intersects(MsgFlags::MSG_TRUNC | MsgFlags::MSG_CTRUNC) {
        return Err(invalid());
    }
    let make = Make::decode(&buffer[..length]).map_err(|_| invalid())?;
    let mut descriptors = descriptors.into_iter();
    let (Some(answer), Some(listener), control, None) = (
        descriptors.next(),
        descriptors.next(),
        descriptors.next(),
        descriptors.next(),
    ) else {
        return Err(invalid());
    };
    Ok(Some(Request {
        make,
        answer,
        listener,
        control,
    }))
}

/// Writes one frame of an answer, at once.
pub(super) fn say(to: impl AsFd, kind: said::Kind) -> io::Result<()> {
    let mut frame = Vec::new();
    wire::encode(&Said { kind: Some(kind) }, &mut frame)?;
    debug_assert!(frame.len() <= MAX_ANSWER, "a step's name is cut");
    let written = unistd::write(to, &frame)?;
    if written == frame.len() {
        Ok(())
    } else {
        Err(ErrorKind::WriteZero.into())
    }
}
