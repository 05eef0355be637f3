//! The stage: a root that holds the sandbox's root, `runsc` and what the two need, and nothing else of the host.

use std::convert::Infallible;
use std::ffi::CStr;
use std::fs;
use std::os::fd::{OwnedFd, RawFd};

use nix::unistd::{chdir, pivot_root};

use super::super::birth::{Birth, LISTENER, high, no_streams, place};
use super::super::step::{During, fault, name, shown};
use super::super::sys::{self, NODEV, NOEXEC, NOSUID, RDONLY};
use super::super::{Fault, Runsc};
use super::{FRESH, RESTORED, WORD, place as at};
use crate::guest::sys as rights;

/// Descriptors of the supervisor, after [`LISTENER`]: where it is asked, and where it tells how the start went.
pub(super) const CONTROL: RawFd = LISTENER + 1;
pub(super) const ANSWER: RawFd = LISTENER + 2;
/// Where the stage is put together: a directory that every sandbox's root has.
const SCAFFOLD: &CStr = c"/tmp";

/// What comes from the host, opened while the host's names are in reach, attached nowhere yet.
pub(in crate::forge) struct Stage<'a> {
    runsc: &'a Runsc,
    program: OwnedFd,
    memory: OwnedFd,
    image: Option<OwnedFd>,
}

impl<'a> Stage<'a> {
    pub fn open(runsc: &'a Runsc) -> Result<Self, Fault> {
        let source = |path: &[u8], flags: u64| {
            let step = || format!("open {}", shown(path));
            let mount = sys::clone_mount(&name(path)?).during(step)?;
            sys::harden(&mount, NOSUID | NODEV | flags).during(step)?;
            Ok(mount)
        };
        let image = Some(runsc.image.as_slice()).filter(|image| !image.is_empty());
        Ok(Self {
            runsc,
            program: source(&runsc.program, RDONLY)?,
            memory: source(&runsc.memory, NOEXEC)?,
            image: image.map(|image| source(image, RDONLY | NOEXEC)).transpose()?,
        })
    }

    /// Makes the stage the root of this process, with what was the root below it.
    pub fn enter(&self, devices: &OwnedFd, workspace: Option<&OwnedFd>) -> Result<(), Fault> {
        let step = || "make the stage".to_owned();
        let options = [
            (c"mode", Some(c"0755")),
            (c"size", Some(c"16m")),
            (c"nr_inodes", Some(c"4096")),
        ];
        let stage = sys::file_system(c"tmpfs", &options, NOSUID | NODEV).during(step)?;
        sys::attach(&stage, SCAFFOLD).during(step)?;
        chdir(SCAFFOLD).during(step)?;
        let dirs = [
            at::ROOT,
            at::WORKSPACE,
            at::BUNDLE,
            at::STATE,
            at::MEMORY,
            at::IMAGE,
            "/proc",
            "/dev",
            "/sys",
            "/tmp",
        ];
        for dir in dirs {
            fs::create_dir(below(dir)).during(step)?;
        }
        fs::write(below(at::RUNSC), "").during(step)?;
        fs::write(below(at::BUNDLE) + "/config.json", &self.runsc.config).during(|| "write the bundle".to_owned())?;
        let step = || "enter the stage".to_owned();
        pivot_root(".", below(at::ROOT).as_str()).during(step)?;
        chdir("/").during(step)?;
        self.attach(devices, workspace)
    }

    fn attach(&self, devices: &OwnedFd, workspace: Option<&OwnedFd>) -> Result<(), Fault> {
        let mounts = [
            (Some(&self.program), at::RUNSC),
            (Some(&self.memory), at::MEMORY),
            (self.image.as_ref(), at::IMAGE),
            (workspace, at::WORKSPACE),
            (Some(devices), "/dev"),
        ];
        for (mount, target) in mounts {
            if let Some(mount) = mount {
                sys::attach(mount, &name(target.as_bytes())?).during(|| format!("mount `{target}` on the stage"))?;
            }
        }
        sys::harden(devices, RDONLY).during(|| "make /dev read-only".to_owned())?;
        place(c"proc", &[], NOSUID | NODEV | NOEXEC, c"/proc")
    }
}

/// `path`, which is absolute, in the working directory.
fn below(path: &str) -> String {
    format!(".{path}")
}

impl Birth<'_> {
    /// On the stage: runs this program anew, so that nothing of the forge is left in its memory.
    pub(in crate::forge) fn become_supervisor(self) -> Result<Infallible, Fault> {
        let step = || "set up descriptors".to_owned();
        sys::fresh_keyring().during(|| "leave the host's keys".to_owned())?;
        no_streams()?;
        let control = self
            .control
            .as_ref()
            .ok_or_else(|| fault("ask the supervisor: it has no socket".to_owned(), nix::Error::EINVAL))?;
        let program = high(self.guest).during(step)?;
        let placed = [
            (high(&self.listener).during(step)?, LISTENER),
            (high(control).during(step)?, CONTROL),
            (high(self.answer).during(step)?, ANSWER),
        ];
        for (fd, number) in &placed {
            sys::place(fd, *number).during(step)?;
        }
        rights::close_range(ANSWER + 1, u32::MAX, true).during(step)?;
        rights::reset_signals().during(|| "reset signals".to_owned())?;
        let image = self.make.runsc.as_ref().is_some_and(|runsc| !runsc.image.is_empty());
        let words = ["exuvia-runsc", WORD, if image { RESTORED } else { FRESH }];
        let words = words.map(|word| name(word.as_bytes()));
        let words = words.into_iter().collect::<Result<Vec<_>, _>>()?;
        Err(fault(
            "run the supervisor".to_owned(),
            sys::execute(program, &words, &[]),
        ))
    }
}
