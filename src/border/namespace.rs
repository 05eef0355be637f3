//! What is done inside of a sandbox's namespaces: its doors are opened, and the files that its programs trust are put in place.
//!
//! A thread of its own enters them, as the host's root, and ends; no process of the sandbox takes part. Its files lie in a small
//! read-only file system of their own. Names of the sandbox's root are the sandbox's: they are followed as its own programs
//! would, below its root, by descriptor, and what is found is only ever covered.

use std::fs::File;
use std::io::{self, Write};
use std::net::{TcpListener, UdpSocket};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;

use nix::fcntl::{OFlag, OpenHow, ResolveFlag, open, openat, openat2};
use nix::mount::{MntFlags, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::stat::Mode;

use super::{DNS, HTTP, SOCKS};
use crate::forge::sys::{self, NODEV, NOEXEC, NOSUID, RDONLY};
use crate::sandbox::Doorway;

/// Where our files are inside. The template of every sandbox has this directory.
const PLACE: &std::ffi::CStr = c"/run/exuvia";
/// The certificate of the border.
pub(super) const CERTIFICATE: &str = "/run/exuvia/ca.pem";
/// The same, and the roots that the border itself trusts.
pub(super) const BUNDLE: &str = "/run/exuvia/bundle.pem";
/// Where systems have their bundle: those that are there are covered.
const SYSTEM: [&std::ffi::CStr; 4] = [
    c"/etc/ssl/certs/ca-certificates.crt",
    c"/etc/pki/tls/certs/ca-bundle.crt",
    c"/etc/ssl/ca-bundle.pem",
    c"/etc/ssl/cert.pem",
];
const RESOLVER: &std::ffi::CStr = c"/etc/resolv.conf";
const RESOLVER_TEXT: &str = "# The border answers for the names that the policy allows.\nnameserver 127.0.0.1\n";

/// The doors, as the host holds them.
#[derive(Debug)]
pub(super) struct Doors {
    pub http: TcpListener,
    pub socks: TcpListener,
    pub dns: UdpSocket,
    pub dns_stream: TcpListener,
}

/// What programs in the sandbox trust, as PEM.
#[derive(Debug)]
pub(super) struct Trust {
    pub certificate: String,
    pub roots: String,
}

/// Opens the doors and puts the files in place; takes those of an earlier border away first. Blocking, and run to its end.
///
/// # Errors
/// When one of them cannot be: as when a program of the sandbox has taken the port of a door meanwhile.
pub(super) fn furnish(doorway: Doorway, trust: Trust) -> io::Result<Doors> {
    let work = move || inside(&doorway, &trust);
    let thread = std::thread::Builder::new().name("border".to_owned()).spawn(work)?;
    match thread.join() {
        Ok(done) => done,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

/// On a thread that ends after this.
fn inside(doorway: &Doorway, trust: &Trust) -> io::Result<Doors> {
    let of = |fd: &OwnedFd| io::Result::Ok(File::from(fd.try_clone()?).metadata()?.ino());
    let own = |name: &str| io::Result::Ok(std::fs::metadata(format!("/proc/thread-self/ns/{name}"))?.ino());
    if of(&doorway.network)? == own("net")? || of(&doorway.mounts)? == own("mnt")? {
        return Err(io::Error::other("the sandbox has no namespaces of its own"));
    }
    // Root and working directory of a process are shared by its threads, until one leaves them.
    unshare(CloneFlags::CLONE_FS)?;
    setns(&doorway.network, CloneFlags::CLONE_NEWNET)?;
    let doors = Doors {
        http: TcpListener::bind(HTTP)?,
        socks: TcpListener::bind(SOCKS)?,
        dns: UdpSocket::bind(DNS)?,
        dns_stream: TcpListener::bind(DNS)?,
    };
    setns(&doorway.mounts, CloneFlags::CLONE_NEWNS)?;
    clear();
    put(trust)?;
    for listener in [&doors.http, &doors.socks, &doors.dns_stream] {
        listener.set_nonblocking(true)?;
    }
    doors.dns.set_nonblocking(true)?;
    Ok(doors)
}

/// Takes away what an earlier border has put in place, if there was one.
fn clear() {
    for name in SYSTEM.into_iter().chain([RESOLVER, PLACE]) {
        if is_ours(name) {
            let _ = umount2(name, MntFlags::MNT_DETACH);
        }
    }
}

/// Whether a name leads into the file system that an earlier border made: it holds [`PLACE`]'s own device.
fn is_ours(name: &std::ffi::CStr) -> bool {
    let device = |name: &std::ffi::CStr| nix::sys::stat::stat(name).ok().map(|found| found.st_dev);
    let (place, above) = (device(PLACE), device(c"/run"));
    place != above && device(name) == place
}

fn put(trust: &Trust) -> io::Result<()> {
    let options = [
        (c"mode", Some(c"0755")),
        (c"size", Some(c"4m")),
        (c"nr_inodes", Some(c"16")),
    ];
    let own = sys::file_system(c"tmpfs", &options, NOSUID | NODEV | NOEXEC)?;
    let write = |name: &std::ffi::CStr, parts: &[&str]| {
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_CLOEXEC;
        let mut file = File::from(openat(&own, name, flags, Mode::from_bits_truncate(0o444))?);
        parts.iter().try_for_each(|part| file.write_all(part.as_bytes()))
    };
    write(c"ca.pem", &[&trust.certificate])?;
    write(c"bundle.pem", &[&trust.certificate, &trust.roots])?;
    write(c"resolv.conf", &[RESOLVER_TEXT])?;
    sys::harden(&own, RDONLY)?;
    sys::attach(&own, PLACE)?;
    cover(RESOLVER, c"/run/exuvia/resolv.conf")?;
    for bundle in SYSTEM {
        cover(bundle, c"/run/exuvia/bundle.pem")?;
    }
    Ok(())
}

/// Covers a file with one of ours, where it is there and a file.
fn cover(file: &std::ffi::CStr, with: &std::ffi::CStr) -> io::Result<()> {
    let root = open(c"/", OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())?;
    let how = OpenHow::new()
        .flags(OFlag::O_PATH | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    let found = match openat2(&root, file, how) {
        Ok(found) => found,
        // An image without one.
        Err(nix::errno::Errno::ENOENT | nix::errno::Errno::ENOTDIR | nix::errno::Errno::ELOOP) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    let found = File::from(found);
    if !found.metadata()?.is_file() {
        return Ok(());
    }
    let ours = sys::clone_mount(with)?;
    Ok(sys::attach_on(ours, found)?)
}
