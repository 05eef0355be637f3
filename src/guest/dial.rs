//! One TCP connection to a port inside, passed on byte by byte. Each half closes by itself.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::child::fault;
use super::session::answer;
use crate::wire::{Dial, Started, event};

/// How long one attempt to connect may take.
const ATTEMPT: Duration = Duration::from_secs(5);
/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(10);
const BUFFER: usize = 64 << 10;

pub fn serve(mut host: UnixStream, dial: &Dial) -> io::Result<()> {
    match connect(&host, dial) {
        Err(error) => {
            let errno = error.raw_os_error().map(Errno::from_raw);
            let why = errno.map_or_else(|| error.to_string(), |errno| errno.desc().to_owned());
            answer(&mut host, event::Kind::Fault(fault("refused", why, errno)))
        }
        Ok(inside) => {
            answer(&mut host, event::Kind::Started(Started::default()))?;
            // Small writes are a program's own choice.
            inside.set_nodelay(true)?;
            host.set_nonblocking(true)?;
            inside.set_nonblocking(true)?;
            pass(host, inside)
        }
    }
}

fn connect(host: &UnixStream, dial: &Dial) -> io::Result<TcpStream> {
    let port = u16::try_from(dial.port).ok().filter(|port| *port > 0);
    let port = port.ok_or_else(|| io::Error::other("a port is a number from 1 to 65535"))?;
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let until = Instant::now().checked_add(Duration::from_millis(dial.wait_ms));
    loop {
        match TcpStream::connect_timeout(&address, ATTEMPT) {
            Err(error)
                if error.kind() == ErrorKind::ConnectionRefused
                    && until.is_some_and(|until| Instant::now() < until)
                    && !has_hung_up(host) =>
            {
                sleep(PAUSE);
            }
            result => return result,
        }
    }
}

fn has_hung_up(host: &UnixStream) -> bool {
    let mut fds = [PollFd::new(host.as_fd(), PollFlags::empty())];
    !matches!(poll(&mut fds, PollTimeout::ZERO), Ok(0))
}

/// One direction: what was read and not yet written.
struct Way {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
    /// The reader has given its last.
    eof: bool,
    /// And the writer was told so.
    shut: bool,
}

impl Way {
    fn new() -> Self {
        Self {
            bytes: vec![0; BUFFER],
            start: 0,
            end: 0,
            eof: false,
            shut: false,
        }
    }

    fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Moves what can be moved now; an error is the end of both ways.
    fn go(&mut self, from: &mut impl Read, to: &mut impl Write) -> io::Result<()> {
        loop {
            if self.is_empty() && !self.eof {
                (self.start, self.end) = (0, 0);
                match from.read(&mut self.bytes) {
                    Ok(0) => self.eof = true,
                    Ok(length) => self.end = length,
                    Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
            if self.is_empty() {
                return Ok(());
            }
            match to.write(&self.bytes[self.start..self.end]) {
                Ok(length) => self.start += length,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Whether the writer is to be told of the end now.
    fn ends(&mut self) -> bool {
        let ends = self.eof && self.is_empty() && !self.shut;
        self.shut |= ends;
        ends
    }
}

fn pass(mut host: UnixStream, mut inside: TcpStream) -> io::Result<()> {
    let (mut inward, mut outward) = (Way::new(), Way::new());
    while !(inward.shut && outward.shut) {
        let flags = |reads: &Way, writes: &Way| {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::POLLIN, reads.is_empty() && !reads.eof);
            flags.set(PollFlags::POLLOUT, !writes.is_empty());
            flags
        };
        let mut fds = [
            PollFd::new(host.as_fd(), flags(&inward, &outward)),
            PollFd::new(inside.as_fd(), flags(&outward, &inward)),
        ];
        match poll(&mut fds, PollTimeout::NONE) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        let gone = PollFlags::POLLHUP | PollFlags::POLLERR;
        let host_gone = fds[0].revents().unwrap_or(gone).intersects(gone);
        let inside_gone = fds[1].revents().unwrap_or(gone).intersects(gone);
        inward.go(&mut host, &mut inside)?;
        outward.go(&mut inside, &mut host)?;
        if inward.ends() {
            // It may have closed by itself.
            let _ = inside.shutdown(Shutdown::Write);
        }
        if outward.ends() {
            let _ = host.shutdown(Shutdown::Write);
        }
        // Nobody is left to hear: what was on its way inward has arrived, or will never.
        if (host_gone && inward.is_empty()) || (inside_gone && outward.shut) {
            return Ok(());
        }
    }
    Ok(())
}
