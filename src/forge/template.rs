//! Templates: mount namespaces that hold what all sandboxes of one shape share, read-only. A sandbox begins as a copy of one.
//!
//! A template is made by a child that ends at once; what keeps its namespace is the descriptor. Everything in it that was
//! named by a path was opened before anything of an image was in reach, and put in place by descriptor.
//!
//! ```text
//! no image:  /            ours: mount points, links, texts; the binds are in place: nothing is left to do
//! an image:  /ours /image /binds/N /root      laid over each other for each sandbox anew, by `birth`, so that no two of
//!                                             them see each other's open files and locks in one overlay
//! ```

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, open, openat2};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{Signal, kill};
use nix::sys::stat::{Mode, fstat, stat};
use nix::sys::wait::waitpid;
use nix::unistd::{Pid, chdir, pivot_root};

use super::step::{During, fault, name, path, shown};
use super::sys::{self, NODEV, NOSUID, RDONLY};
use super::walls::{EMPTY_DIRECTORY, EMPTY_FILE};
use super::{Bind, Fault, Ready, Said, Shape, said};
use crate::wire;

/// Templates that are kept: the ones used last.
const KEPT: usize = 16;
/// How long making one may take, as on a file system over a network.
const DEADLINE_MS: u16 = 20_000;
/// What all that comes from the host is mounted with.
const HARD: u64 = RDONLY | NOSUID | NODEV;

/// Where things are in a template with an image.
pub(super) const OURS: &str = "ours";
pub(super) const IMAGE: &str = "image";
pub(super) const ROOT: &str = "root";
pub(super) const BINDS: &str = "binds";

/// Templates by shape, the one used last in front.
#[derive(Default)]
pub(super) struct Templates(VecDeque<Template>);

struct Template {
    shape: Shape,
    sources: Vec<Identity>,
    namespace: OwnedFd,
}

/// Device and inode of a source: a file that was replaced is another.
type Identity = (u64, u64);

impl Templates {
    /// The mount namespace for sandboxes of this shape, found or made.
    pub fn find(&mut self, shape: &Shape) -> Result<&OwnedFd, Fault> {
        let sources = identities(shape)?;
        match self.0.iter().position(|template| template.shape == *shape) {
            Some(place) => {
                let found = self.0.remove(place).filter(|template| template.sources == sources);
                match found {
                    Some(template) => self.0.push_front(template),
                    None => self.add(shape, sources)?,
                }
            }
            None => self.add(shape, sources)?,
        }
        match self.0.front() {
            Some(template) => Ok(&template.namespace),
            None => Err(fault("keep a template".to_owned(), Errno::ENOMEM)),
        }
    }

    fn add(&mut self, shape: &Shape, sources: Vec<Identity>) -> Result<(), Fault> {
        let namespace = make(shape)?;
        self.0.truncate(KEPT - 1);
        self.0.push_front(Template {
            shape: shape.clone(),
            sources,
            namespace,
        });
        Ok(())
    }
}

fn identities(shape: &Shape) -> Result<Vec<Identity>, Fault> {
    let lower = Some(&shape.lower).filter(|lower| !lower.is_empty());
    let sources = shape.binds.iter().map(|bind| &bind.source).chain(lower);
    sources
        .map(|source| {
            let found = stat(path(source)).during(|| format!("find {}", shown(source)))?;
            Ok((found.st_dev, found.st_ino))
        })
        .collect()
}

/// Has a child build the template and takes its namespace.
fn make(shape: &Shape) -> Result<OwnedFd, Fault> {
    let (ours, theirs) = UnixStream::pair().during(|| "make a socket".to_owned())?;
    match sys::clone(0, None).during(|| "fork".to_owned())? {
        None => {
            drop(ours);
            tell_and_wait(theirs, build(shape))
        }
        Some(child) => {
            drop(theirs);
            let namespace = take(ours, child);
            if namespace.is_err() {
                // It may hang in some file system.
                let _ = kill(child, Signal::SIGKILL);
            }
            // Its socket is closed: it ends.
            waitpid(child, None).during(|| "await the maker of a template".to_owned())?;
            namespace
        }
    }
}

fn take(mut from: UnixStream, child: Pid) -> Result<OwnedFd, Fault> {
    let step = || "hear of the maker of a template".to_owned();
    let mut ready = [PollFd::new(from.as_fd(), PollFlags::POLLIN)];
    match poll(&mut ready, PollTimeout::from(DEADLINE_MS)) {
        Ok(0) => return Err(fault(step(), Errno::ETIMEDOUT)),
        result => result.during(step)?,
    };
    let said = wire::read::<Said>(&mut from).during(step)?;
    match said.and_then(|said| said.kind) {
        Some(said::Kind::Ready(Ready {})) => {
            let namespace = format!("/proc/{child}/ns/mnt");
            open(Path::new(&namespace), OFlag::O_RDONLY | OFlag::O_CLOEXEC, Mode::empty())
                .during(|| "keep a template".to_owned())
        }
        Some(said::Kind::Fault(fault)) => Err(fault),
        Some(said::Kind::Made(_)) | None => Err(fault(step(), Errno::EPIPE)),
    }
}

/// In the child. Its namespace must last until it was taken.
fn tell_and_wait(mut to: UnixStream, built: Result<(), Fault>) -> ! {
    let kind = match built {
        Ok(()) => said::Kind::Ready(Ready {}),
        Err(fault) => said::Kind::Fault(fault),
    };
    let told = wire::write(&mut to, &Said { kind: Some(kind) });
    if told.is_ok() {
        let _ = io::Read::read(&mut to, &mut [0]);
    }
    crate::guest::sys::exit(0)
}

/// Builds the template and makes it the root of this process.
fn build(shape: &Shape) -> Result<(), Fault> {
    // All that has a path is opened first, in the host's namespace.
    let lower = match shape.lower.as_slice() {
        [] => None,
        lower => Some(source(lower)?),
    };
    let binds = shape.binds.iter().map(|bind| source(&bind.source));
    let binds = binds.collect::<Result<Vec<_>, _>>()?;

    unshare(CloneFlags::CLONE_NEWNS).during(|| "make a mount namespace".to_owned())?;
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(None::<&str>, "/", None::<&str>, private, None::<&str>)
        .during(|| "part from the host's mounts".to_owned())?;
    let options = [
        (c"mode", Some(c"0755")),
        (c"size", Some(c"16m")),
        (c"nr_inodes", Some(c"4096")),
    ];
    let step = || "mount a template".to_owned();
    let root = sys::file_system(c"tmpfs", &options, NOSUID | NODEV).during(step)?;
    sys::attach(&root, &name(&shape.stage)?).during(step)?;
    chdir(path(&shape.stage)).during(step)?;

    match &lower {
        None => own(shape, &binds, Path::new("."))?,
        Some(image) => {
            own(shape, &binds, Path::new(OURS))?;
            for dir in [IMAGE, ROOT, BINDS] {
                make_dir(Path::new(dir))?;
            }
            sys::attach(image, c"image").during(|| format!("mount {}", shown(&shape.lower)))?;
        }
    }
    for (number, (bind, mount)) in shape.binds.iter().zip(&binds).enumerate() {
        let step = || placing(bind);
        if lower.is_none() {
            sys::attach_on(mount, below(&root, &bind.target).during(step)?).during(step)?;
        } else {
            let place = Path::new(BINDS).join(number.to_string());
            mount_point(&place, mount)?;
            sys::attach(mount, &name(place.as_os_str().as_encoded_bytes())?).during(step)?;
        }
    }
    pivot_root(".", ".").during(|| "enter the template".to_owned())?;
    // Both roots are at "." now, the host's on top.
    umount2(".", MntFlags::MNT_DETACH)
        .and_then(|()| chdir("/"))
        .during(|| "leave the host's root".to_owned())?;
    sys::harden(&root, HARD).during(|| "make the template read-only".to_owned())
}

/// A hard copy of the mount at a path of the host.
fn source(at: &[u8]) -> Result<OwnedFd, Fault> {
    let step = || format!("open {}", shown(at));
    let mount = sys::clone_mount(&name(at)?).during(step)?;
    sys::harden(&mount, HARD).during(step)?;
    Ok(mount)
}

pub(super) fn placing(bind: &Bind) -> String {
    format!("bind {} at {}", shown(&bind.source), shown(&bind.target))
}

/// What `target` is below `root`, links included, and never outside.
pub(super) fn below(root: impl AsFd, target: &[u8]) -> nix::Result<OwnedFd> {
    let how = OpenHow::new()
        .flags(OFlag::O_PATH | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    openat2(root, path(target), how)
}

/// Everything that is ours, in `top`: mount points are real directories, whatever an image has in their place.
fn own(shape: &Shape, binds: &[OwnedFd], top: &Path) -> Result<(), Fault> {
    let at = |absolute: &[u8]| -> PathBuf {
        let absolute = path(absolute);
        top.join(absolute.strip_prefix("/").unwrap_or(absolute))
    };
    // In the last the host puts what belongs to a sandbox's border.
    for dir in ["/proc", "/dev", "/sys", "/tmp", "/var/tmp", "/run/exuvia"] {
        make_dir(&at(dir.as_bytes()))?;
    }
    make_dir(&at(EMPTY_DIRECTORY.to_bytes()))?;
    make_file(&at(EMPTY_FILE.to_bytes()), b"")?;
    if shape.workspace {
        make_dir(&top.join("workspace"))?;
    }
    for (bind, source) in shape.binds.iter().zip(binds) {
        mount_point(&at(&bind.target), source)?;
    }
    for link in &shape.links {
        let at = at(&link.path);
        parent(&at)?;
        symlink(path(&link.holds), &at).during(|| format!("link {}", shown(&link.path)))?;
    }
    for text in &shape.texts {
        make_file(&at(&text.path), &text.text)?;
    }
    Ok(())
}

/// Makes what a mount goes on: a directory or a file, as it is itself.
fn mount_point(at: &Path, mount: &OwnedFd) -> Result<(), Fault> {
    let found = fstat(mount).during(|| format!("look at what goes on `{}`", at.display()))?;
    if found.st_mode & libc::S_IFMT == libc::S_IFDIR {
        make_dir(at)
    } else if at.exists() {
        Ok(())
    } else {
        make_file(at, b"")
    }
}

fn parent(at: &Path) -> Result<(), Fault> {
    at.parent().map_or(Ok(()), make_dir)
}

fn make_dir(at: &Path) -> Result<(), Fault> {
    fs::create_dir_all(at).during(|| format!("make `{}`", at.display()))
}

fn make_file(at: &Path, text: &[u8]) -> Result<(), Fault> {
    parent(at)?;
    let made = File::create(at).and_then(|mut file| io::Write::write_all(&mut file, text));
    made.during(|| format!("make `{}`", at.display()))
}
