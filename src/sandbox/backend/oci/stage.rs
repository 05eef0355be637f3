//! The launcher's own world: namespaces, and a root that holds the container's root and nothing else of the host.
//!
//! Everything is built in a tmpfs in a private mount namespace and then entered, so every mount ends with the container, and
//! `libcontainer`, which runs with mapped ids from then on, cannot see the host's files. Sources are opened first and
//! mounted by descriptor; targets are resolved below the new root, links in an image included.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};

use nix::fcntl::{OFlag, OpenHow, ResolveFlag, open, openat2};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::stat::{Mode, umask};
use nix::unistd::{chdir, pivot_root, sethostname};

use super::bundle;
use super::launch::Plan;
use crate::sandbox::Mount as Bind;
use crate::sandbox::image::HOSTNAME;

/// Where things are once the stage has been entered.
pub(in crate::sandbox::backend) const ROOT: &str = "/root";
pub(in crate::sandbox::backend) const BUNDLE: &str = "/bundle";
pub(in crate::sandbox::backend) const STATE: &str = "/state";
/// Shown in place of the host's boot id.
pub(super) const BOOT_ID: &str = "/boot_id";
/// Where the workspace is inside the sandbox.
pub(in crate::sandbox::backend) const WORKSPACE: &str = "/workspace";

/// Device files and their numbers; `libcontainer` binds them on.
const DEVICES: [(&str, u64, u64); 6] = [
    ("null", 1, 3),
    ("zero", 1, 5),
    ("full", 1, 7),
    ("random", 1, 8),
    ("urandom", 1, 9),
    ("tty", 5, 0),
];

/// A step that failed.
#[derive(Debug, thiserror::Error)]
#[error("could not {step}")]
pub(in crate::sandbox::backend) struct Error {
    step: String,
    #[source]
    source: io::Error,
}

/// Names the step that an error belongs to.
pub(in crate::sandbox::backend) trait During<T> {
    fn during(self, step: impl FnOnce() -> String) -> Result<T, Error>;
}

impl<T, E: Into<io::Error>> During<T> for Result<T, E> {
    fn during(self, step: impl FnOnce() -> String) -> Result<T, Error> {
        self.map_err(|error| Error {
            step: step(),
            source: error.into(),
        })
    }
}

/// Leaves the host's namespaces for fresh ones. The caller is in the sandbox's control group already.
pub(in crate::sandbox::backend) fn isolate() -> Result<(), Error> {
    let fresh = CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWNET
        | CloneFlags::CLONE_NEWIPC
        | CloneFlags::CLONE_NEWUTS
        | CloneFlags::CLONE_NEWCGROUP;
    unshare(fresh).during(|| "make namespaces".to_owned())?;
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(None::<&str>, "/", None::<&str>, private, None::<&str>)
        .during(|| "part from the host's mounts".to_owned())?;
    sethostname(HOSTNAME).during(|| "set the host name".to_owned())?;
    loopback_up()
        .map_err(io::Error::other)
        .during(|| "bring loopback up".to_owned())
}

fn loopback_up() -> Result<(), libcontainer::network::NetworkError> {
    use libcontainer::network::{link::LinkClient, wrapper::create_network_client};
    // The first interface of a network namespace, and the only one of this.
    const LOOPBACK: u32 = 1;
    LinkClient::new(create_network_client())?.set_up(LOOPBACK)
}

/// Where the workspace is to be seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::sandbox::backend) enum Workspace {
    InRoot,
    /// Its place in the root is an empty directory: whoever runs the container mounts it there.
    Apart,
}

/// Builds the stage and makes it the root of this process.
pub(super) fn enter(plan: &Plan) -> Result<(), Error> {
    build(plan, Workspace::InRoot)?;
    bundle::write(plan, &below(&plan.stage, Path::new(BUNDLE))).during(|| "write the bundle".to_owned())?;
    step_in(&plan.stage)?;
    show_processes()
}

/// Builds the stage.
pub(in crate::sandbox::backend) fn build(plan: &Plan, workspace: Workspace) -> Result<(), Error> {
    let stage = &plan.stage;
    umask(Mode::from_bits_truncate(0o022));
    // With devices: those that are bound on from here must work.
    mount(
        Some("exuvia"),
        stage,
        Some("tmpfs"),
        MsFlags::MS_NOSUID,
        Some("mode=0755,size=16m,nr_inodes=4096"),
    )
    .during(|| "mount the stage".to_owned())?;
    // `sys/fs/cgroup` is empty: `libcontainer` then leaves control groups alone.
    for dir in [ROOT, BUNDLE, STATE, "/proc", "/dev", "/sys/fs/cgroup"] {
        make_dir(&below(stage, Path::new(dir)))?;
    }
    devices(&stage.join("dev"))?;
    let boot_id = fs::read("/proc/sys/kernel/random/uuid");
    boot_id
        .and_then(|id| fs::write(below(stage, Path::new(BOOT_ID)), id))
        .during(|| "make up a boot id".to_owned())?;
    root(plan, &below(stage, Path::new(ROOT)), workspace)
}

/// Makes the stage the root of this process.
pub(in crate::sandbox::backend) fn step_in(stage: &Path) -> Result<(), Error> {
    chdir(stage)
        .and_then(|()| pivot_root(".", "."))
        .during(|| "enter the stage".to_owned())?;
    // Both roots are at "." now, the host's on top.
    umount2(".", MntFlags::MNT_DETACH)
        .and_then(|()| chdir("/"))
        .during(|| "leave the host's root".to_owned())
}

/// Mounts `/proc`, of the PID namespace that this process is in.
pub(in crate::sandbox::backend) fn show_processes() -> Result<(), Error> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("proc"), "/proc", Some("proc"), flags, None::<&str>).during(|| "mount /proc".to_owned())
}

fn devices(dev: &Path) -> Result<(), Error> {
    for (name, major, minor) in DEVICES {
        let host = Path::new("/dev").join(name);
        let step = || format!("use the device `{}`", host.display());
        let source = source(&host).during(step)?;
        let found = File::from(source).metadata().during(step)?;
        if !found.file_type().is_char_device() || found.rdev() != nix::sys::stat::makedev(major, minor) {
            return Err(io::Error::other("it is not what it is called")).during(step);
        }
        let target = dev.join(name);
        make_file(&target)?;
        mount(Some(&host), &target, None::<&str>, MsFlags::MS_BIND, None::<&str>).during(step)?;
        // The file is the host's own: read-only keeps its times and modes from being written, not the device. Whatever
        // `libcontainer` binds from here, to hide a path with too, is as hard.
        let hard = MsFlags::MS_RDONLY | MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC;
        harden(&target, hard).during(step)?;
    }
    Ok(())
}

/// Builds the container's root at `root`.
fn root(plan: &Plan, root: &Path, workspace: Workspace) -> Result<(), Error> {
    // Ours lies over the image's: mount points are real directories, whatever an image has in their place.
    let ours = if plan.root.lower.is_some() {
        plan.stage.join("ours")
    } else {
        root.to_owned()
    };
    let binds = || plan.root.binds.iter();
    for dir in ["/proc", "/dev", "/sys", "/tmp", "/var/tmp", "/run"] {
        make_dir(&below(&ours, Path::new(dir)))?;
    }
    if plan.workspace.is_some() {
        make_dir(&below(&ours, Path::new(WORKSPACE)))?;
    }
    for bind in binds() {
        mount_point(&ours, &bind.source, &bind.target)?;
    }
    for mount in &plan.mounts {
        mount_point(&ours, &mount.source, &mount.target)?;
    }
    for (path, held) in &plan.root.links {
        let path = below(&ours, path);
        parent(&path)?;
        symlink(held, &path).during(|| format!("link `{}`", path.display()))?;
    }
    for (path, text) in &plan.root.files {
        let path = below(&ours, path);
        parent(&path)?;
        fs::write(&path, text).during(|| format!("write `{}`", path.display()))?;
    }
    let hard = MsFlags::MS_RDONLY | MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    match &plan.root.lower {
        None => bind(&source(root).during(|| "open the root".to_owned())?, root, hard)?,
        Some(lower) => {
            let image = source(lower).during(|| format!("open the image `{}`", lower.display()))?;
            let top = source(&ours).during(|| "open the root".to_owned())?;
            // By descriptor: no path of the host shows in the mount table, and no name is read as an option.
            let layers = format!(
                "lowerdir={}:{}",
                by_descriptor(&top).display(),
                by_descriptor(&image).display()
            );
            mount(Some("overlay"), root, Some("overlay"), hard, Some(layers.as_str()))
                .during(|| "lay the root over the image".to_owned())?;
        }
    }
    for at in binds() {
        place(root, at, hard)?;
    }
    if let Some(source) = plan.workspace.as_ref().filter(|_| workspace == Workspace::InRoot) {
        let at = Bind {
            source: source.clone(),
            target: WORKSPACE.into(),
        };
        place(root, &at, MsFlags::MS_NOSUID | MsFlags::MS_NODEV)?;
    }
    for mount in &plan.mounts {
        place(root, mount, hard)?;
    }
    Ok(())
}

/// Binds one host path below `root`, without what is mounted below it.
pub(in crate::sandbox::backend) fn place(root: &Path, at: &Bind, flags: MsFlags) -> Result<(), Error> {
    let step = || format!("bind `{}` at `{}`", at.source.display(), at.target.display());
    let from = source(&at.source).during(step)?;
    let top = open(
        root,
        OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC,
        Mode::empty(),
    )
    .during(step)?;
    let how = OpenHow::new()
        .flags(OFlag::O_PATH | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    let target = openat2(&top, &at.target, how).during(step)?;
    bind_to(&from, &by_descriptor(&target)).during(step)?;
    // The descriptor still means what lies below the new mount: resolved again for the flags.
    let target = openat2(&top, &at.target, how).during(step)?;
    harden(&by_descriptor(&target), flags).during(step)
}

fn bind(from: &OwnedFd, target: &Path, flags: MsFlags) -> Result<(), Error> {
    let step = || format!("bind `{}`", target.display());
    bind_to(from, target).during(step)?;
    harden(target, flags).during(step)
}

fn bind_to(from: &OwnedFd, target: &Path) -> nix::Result<()> {
    mount(
        Some(&by_descriptor(from)),
        target,
        None::<&str>,
        MsFlags::MS_BIND,
        None::<&str>,
    )
}

/// The kernel takes flags of a bind in a second step only.
fn harden(target: &Path, flags: MsFlags) -> nix::Result<()> {
    mount(
        None::<&str>,
        target,
        None::<&str>,
        MsFlags::MS_REMOUNT | MsFlags::MS_BIND | flags,
        None::<&str>,
    )
}

fn source(path: &Path) -> nix::Result<OwnedFd> {
    open(path, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())
}

fn by_descriptor(file: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// `path`, which is absolute, below `dir`.
pub(in crate::sandbox::backend) fn below(dir: &Path, path: &Path) -> PathBuf {
    dir.join(path.strip_prefix("/").unwrap_or(path))
}

/// Makes what a bind is mounted on: a directory or a file, as its source is.
fn mount_point(ours: &Path, source: &Path, target: &Path) -> Result<(), Error> {
    let found = fs::metadata(source).during(|| format!("find `{}`", source.display()))?;
    let target = below(ours, target);
    if found.is_dir() {
        make_dir(&target)
    } else {
        make_file(&target)
    }
}

fn parent(path: &Path) -> Result<(), Error> {
    path.parent().map_or(Ok(()), make_dir)
}

pub(in crate::sandbox::backend) fn make_dir(path: &Path) -> Result<(), Error> {
    fs::create_dir_all(path).during(|| format!("make `{}`", path.display()))
}

pub(in crate::sandbox::backend) fn make_file(path: &Path) -> Result<(), Error> {
    parent(path)?;
    fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(path)
        .map(drop)
        .during(|| format!("make `{}`", path.display()))
}
