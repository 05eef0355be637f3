//! How a child of the forge becomes a sandbox: it builds its walls as the host's root, gives that up, and runs the guest.
//!
//! All namespaces but the user's belong to the host's root: the sandbox's own root has no power over its mounts, network,
//! names and processes' numbers, and none to make more. The order is the safety: devices before the group forbids to make
//! them, sources before the host's mounts are left, walls before rights are given up, rights before the guest.

use std::convert::Infallible;
use std::ffi::{CStr, CString};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl, open, openat};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::prctl;
use nix::sys::stat::{Mode, SFlag, makedev, mkdirat, mknodat, umask};
use nix::unistd::{self, Gid, Uid, chdir, pivot_root, sethostname, symlinkat};

use super::runsc::Stage;
use super::step::{During, fault, name, shown};
use super::sys::{self, NODEV, NOEXEC, NOSUID, RDONLY};
use super::template::{self, BINDS, IMAGE, OURS, ROOT};
use super::walls::{BOOT_ID, DEVICES, EMPTY_DIRECTORY, EMPTY_FILE, LINKS};
use super::{Fault, Make, Ready, said, serve};
use crate::guest::sys as rights;

/// The descriptor on which the guest accepts.
pub(super) const LISTENER: RawFd = 3;
/// Descriptors that have a number for the next program are below.
const PLACED: RawFd = 8;
/// CAP_KILL, CAP_SETGID, CAP_SETUID, CAP_SETPCAP. The guest becomes each program's user, and ends what does not end. It
/// empties the bounding set first thing, which takes the fourth, and then has three and nothing that a program could inherit.
const POWERS: u64 = 1 << 5 | 1 << 6 | 1 << 7 | 1 << 8;
/// Where the new root is told its boot id from: a place that the pseudo terminals will cover.
const BOOT_ID_SOURCE: &CStr = c"/dev/pts/boot_id";

/// What a child needs to become a sandbox.
pub(super) struct Birth<'a> {
    pub make: &'a Make,
    /// The mount namespace to start from.
    pub template: &'a OwnedFd,
    /// The program.
    pub guest: &'a OwnedFd,
    pub listener: OwnedFd,
    /// With `runsc`: where its supervisor is asked.
    pub control: Option<OwnedFd>,
    /// To the forge, which alone may map user ids.
    pub forge: UnixStream,
    /// To the server; closes when the guest runs.
    pub answer: &'a OwnedFd,
}

impl Birth<'_> {
    /// Returns only with the reason why there is no sandbox.
    pub fn go(self) -> Fault {
        match self.all() {
            Ok(never) => match never {},
            Err(fault) => fault,
        }
    }

    fn all(mut self) -> Result<Infallible, Fault> {
        unistd::setsid().during(|| "make a session".to_owned())?;
        let devices = self.devices()?;
        let workspace = self.workspace()?;
        let stage = self.make.runsc.as_ref().map(Stage::open).transpose()?;
        self.enter_group()?;

        let step = || "leave the host's namespaces".to_owned();
        setns(self.template, CloneFlags::CLONE_NEWNS).during(step)?;
        let own = CloneFlags::CLONE_NEWNS
            | CloneFlags::CLONE_NEWNET
            | CloneFlags::CLONE_NEWIPC
            | CloneFlags::CLONE_NEWUTS
            | CloneFlags::CLONE_NEWCGROUP;
        unshare(own).during(step)?;
        sys::loopback_up().during(|| "bring loopback up".to_owned())?;
        sethostname(std::str::from_utf8(&self.make.hostname).unwrap_or_default())
            .during(|| "set the host name".to_owned())?;

        if let Some(shape) = self.make.shape.as_ref().filter(|shape| !shape.lower.is_empty()) {
            lay_over_image(&shape.binds)?;
        }
        if let Some(stage) = stage {
            stage.enter(&devices, workspace.as_ref())?;
            drop((devices, workspace));
            self.limits()?;
            return self.become_supervisor();
        }
        self.proc()?;
        self.mounts(&devices, workspace.as_ref())?;
        drop((devices, workspace));
        self.limits()?;
        self.give_up_rights()?;
        self.become_guest()
    }

    /// `/dev`, attached nowhere yet. Made before the control group is entered, which forbids to make devices.
    fn devices(&self) -> Result<OwnedFd, Fault> {
        let step = || "make /dev".to_owned();
        let owner = number(self.make.base)?;
        let options = [
            (c"mode", Some(c"0755")),
            (c"size", Some(c"65536")),
            (c"nr_inodes", Some(c"64")),
            (c"uid", Some(owner.as_c_str())),
            (c"gid", Some(owner.as_c_str())),
        ];
        let dev = sys::file_system(c"tmpfs", &options, NOSUID | NOEXEC).during(step)?;
        let before = umask(Mode::empty());
        for (device, major, minor) in DEVICES {
            let all = Mode::from_bits_truncate(0o666);
            mknodat(&dev, device, SFlag::S_IFCHR, all, makedev(major, minor)).during(step)?;
        }
        umask(before);
        for (link, holds) in LINKS {
            symlinkat(holds, &dev, link).during(step)?;
        }
        for dir in [c"pts", c"shm"] {
            mkdirat(&dev, dir, Mode::from_bits_truncate(0o755)).during(step)?;
        }
        let step = || "make up a boot id".to_owned();
        let id = fs::read("/proc/sys/kernel/random/uuid").during(step)?;
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_CLOEXEC;
        let file = openat(&dev, c"pts/boot_id", flags, Mode::from_bits_truncate(0o444)).during(step)?;
        File::from(file).write_all(&id).during(step)?;
        Ok(dev)
    }

    /// The workspace, attached nowhere yet.
    fn workspace(&self) -> Result<Option<OwnedFd>, Fault> {
        if self.make.workspace.is_empty() {
            return Ok(None);
        }
        let step = || format!("open the workspace {}", shown(&self.make.workspace));
        let mount = sys::clone_mount(&name(&self.make.workspace)?).during(step)?;
        sys::harden(&mount, NOSUID | NODEV).during(step)?;
        Ok(Some(mount))
    }

    /// From here on this process is found and killed with its group.
    fn enter_group(&self) -> Result<(), Fault> {
        for door in &self.make.doors {
            let step = || format!("enter {}", shown(door));
            // Not created: a group that is gone must stay gone.
            let file = open(
                name(door)?.as_c_str(),
                OFlag::O_WRONLY | OFlag::O_CLOEXEC,
                Mode::empty(),
            );
            File::from(file.during(step)?).write_all(b"0").during(step)?;
        }
        Ok(())
    }

    fn mounts(&self, devices: &OwnedFd, workspace: Option<&OwnedFd>) -> Result<(), Fault> {
        sys::attach(devices, c"/dev").during(|| "mount /dev".to_owned())?;
        let step = || "show the boot id".to_owned();
        let boot_id = sys::clone_mount(BOOT_ID_SOURCE).during(step)?;
        sys::harden(&boot_id, RDONLY | NOSUID | NODEV | NOEXEC).during(step)?;
        sys::attach(boot_id, BOOT_ID).during(step)?;

        let tty = number(self.make.base + 5)?;
        let terminals = [
            (c"newinstance", None),
            (c"ptmxmode", Some(c"0666")),
            (c"mode", Some(c"0620")),
            (c"gid", Some(tty.as_c_str())),
            // The kernel has a few thousand for everyone.
            (c"max", Some(c"64")),
        ];
        place(c"devpts", &terminals, NOSUID | NOEXEC, c"/dev/pts")?;
        self.scratch(self.make.shm_bytes, NOSUID | NODEV | NOEXEC, c"/dev/shm")?;
        // Tools run what they unpack there.
        self.scratch(self.make.tmp_bytes, NOSUID | NODEV, c"/tmp")?;
        self.scratch(self.make.tmp_bytes, NOSUID | NODEV, c"/var/tmp")?;
        // Devices work all the same; nobody keeps files among them, or their times.
        sys::harden(devices, RDONLY).during(|| "make /dev read-only".to_owned())?;
        match workspace {
            None => Ok(()),
            Some(workspace) => {
                let step = || format!("mount the workspace {}", shown(&self.make.workspace));
                sys::attach(workspace, c"/workspace").during(step)
            }
        }
    }

    /// A tmpfs where everyone may write.
    fn scratch(&self, bytes: u64, flags: u64, target: &CStr) -> Result<(), Fault> {
        let (owner, size, inodes) = (number(self.make.base)?, number(bytes)?, number(self.make.tmp_inodes)?);
        let options = [
            (c"mode", Some(c"1777")),
            (c"size", Some(size.as_c_str())),
            (c"nr_inodes", Some(inodes.as_c_str())),
            (c"uid", Some(owner.as_c_str())),
            (c"gid", Some(owner.as_c_str())),
        ];
        place(c"tmpfs", &options, flags, target)
    }

    /// Mounts `/proc` and hides what is to be hidden. Before `/dev`, which covers what hides.
    fn proc(&self) -> Result<(), Fault> {
        place(c"proc", &[], NOSUID | NODEV | NOEXEC, c"/proc")?;
        let hide = |what: &CStr, with: &CStr| mount(Some(with), what, None::<&str>, MsFlags::MS_BIND, None::<&str>);
        for path in &self.make.masked {
            let path = name(path)?;
            let hidden = match hide(&path, EMPTY_FILE) {
                Err(Errno::ENOTDIR) => hide(&path, EMPTY_DIRECTORY),
                other => other,
            };
            match hidden {
                // This kernel has none.
                Ok(()) | Err(Errno::ENOENT) => {}
                Err(error) => return Err(fault(format!("hide {}", shown(path.to_bytes())), error)),
            }
        }
        for path in &self.make.read_only {
            let step = || format!("make {} read-only", shown(path));
            let path = name(path)?;
            match sys::clone_mount(&path) {
                Err(Errno::ENOENT) => {}
                mount => {
                    let mount = mount.during(step)?;
                    sys::harden(&mount, RDONLY).during(step)?;
                    sys::attach(mount, &path).during(step)?;
                }
            }
        }
        Ok(())
    }

    fn limits(&self) -> Result<(), Fault> {
        fs::write("/proc/self/oom_score_adj", self.make.oom_score_adj.to_string())
            .during(|| "set the order of ending when memory runs out".to_owned())?;
        for limit in &self.make.rlimits {
            rights::limit(limit.resource, limit.value).during(|| format!("set the limit {}", limit.resource))?;
        }
        Ok(())
    }

    fn give_up_rights(&mut self) -> Result<(), Fault> {
        unshare(CloneFlags::CLONE_NEWUSER).during(|| "make a user namespace".to_owned())?;
        let step = || "be given user ids".to_owned();
        self.forge.write_all(&[1]).during(step)?;
        self.forge.read_exact(&mut [0]).during(step)?;
        let step = || "become the sandbox's root".to_owned();
        let (root, group) = (Uid::from_raw(0), Gid::from_raw(0));
        unistd::setgroups(&[]).during(step)?;
        unistd::setresgid(group, group, group).during(step)?;
        unistd::setresuid(root, root, root).during(step)?;
        sys::fresh_keyring().during(|| "leave the host's keys".to_owned())?;
        prctl::set_no_new_privs().during(|| "set no_new_privs".to_owned())?;
        let step = || "drop capabilities".to_owned();
        sys::limit_bounding_set(POWERS).during(step)?;
        rights::limit_capabilities(POWERS).during(step)
    }

    fn become_guest(self) -> Result<Infallible, Fault> {
        let step = || "set up descriptors".to_owned();
        no_streams()?;
        // Out of the way of the listener's number; they close when the guest runs.
        let (guest, answer) = (high(self.guest).during(step)?, high(self.answer).during(step)?);
        sys::place(&self.listener, LISTENER).during(step)?;
        rights::close_range(LISTENER + 1, u32::MAX, true).during(step)?;
        rights::reset_signals().during(|| "reset signals".to_owned())?;
        let words = [c"exuvia-guest", c"--listen-fd", c"3"].map(CStr::to_owned);
        let variables = [
            c"PATH=/usr/local/bin:/usr/bin:/bin".to_owned(),
            // A process that is cast has none but those of its mould (`guest::cast`).
            c"GLIBC_TUNABLES=glibc.pthread.rseq=0".to_owned(),
        ];
        serve::say(&answer, said::Kind::Ready(Ready {})).during(|| "answer".to_owned())?;
        Err(fault(
            "run the guest".to_owned(),
            sys::execute(guest, &words, &variables),
        ))
    }
}

/// Lays what is ours over the image and makes that the root.
fn lay_over_image(binds: &[super::Bind]) -> Result<(), Fault> {
    let step = || "lay the root over the image".to_owned();
    let layers = name(format!("/{OURS}:/{IMAGE}").as_bytes())?;
    let root = sys::file_system(
        c"overlay",
        &[(c"lowerdir", Some(layers.as_c_str()))],
        RDONLY | NOSUID | NODEV,
    )
    .during(step)?;
    sys::attach(&root, &name(format!("/{ROOT}").as_bytes())?).during(step)?;
    for (number, bind) in binds.iter().enumerate() {
        let step = || template::placing(bind);
        let mount = sys::clone_mount(&name(format!("/{BINDS}/{number}").as_bytes())?).during(step)?;
        sys::attach_on(mount, template::below(&root, &bind.target).during(step)?).during(step)?;
    }
    chdir(format!("/{ROOT}").as_str())
        .and_then(|()| pivot_root(".", "."))
        .during(|| "enter the root".to_owned())?;
    // Both roots are at "." now, the template's on top.
    umount2(".", MntFlags::MNT_DETACH)
        .and_then(|()| chdir("/"))
        .during(|| "leave the template".to_owned())
}

/// Makes a file system and attaches it.
pub(super) fn place(kind: &CStr, options: &[(&CStr, Option<&CStr>)], flags: u64, target: &CStr) -> Result<(), Fault> {
    let step = || format!("mount {}", shown(target.to_bytes()));
    let mount = sys::file_system(kind, options, flags).during(step)?;
    sys::attach(mount, target).during(step)
}

fn number(number: impl Into<u64>) -> Result<CString, Fault> {
    name(number.into().to_string().as_bytes())
}

/// The null device in place of the standard streams.
pub(super) fn no_streams() -> Result<(), Fault> {
    let step = || "set up descriptors".to_owned();
    let null = open(c"/dev/null", OFlag::O_RDWR | OFlag::O_CLOEXEC, Mode::empty()).during(step)?;
    unistd::dup2_stdin(&null)
        .and_then(|()| unistd::dup2_stdout(&null))
        .and_then(|()| unistd::dup2_stderr(&null))
        .during(step)
}

/// Out of the way of numbers that mean something to the next program.
pub(super) fn high(fd: impl AsFd) -> nix::Result<OwnedFd> {
    let placed = fcntl(fd, FcntlArg::F_DUPFD_CLOEXEC(PLACED))?;
    rights::adopt(placed)
}
