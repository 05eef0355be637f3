//! The group of one sandbox: what is in it, freezing it, ending it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{fmt, fs, io, thread};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::detect::PARENT;
use super::file::{entry, read, write};
use super::{Controller, Error, Version};
use crate::sandbox::Limits;

/// How long a freeze, a kill or a removal may take.
const DEADLINE: Duration = Duration::from_secs(10);

/// The group of one sandbox: a directory in each hierarchy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    version: Version,
    dirs: BTreeMap<Controller, PathBuf>,
}

impl Group {
    pub(super) fn new(version: Version, dirs: BTreeMap<Controller, PathBuf>) -> Self {
        Self { version, dirs }
    }

    pub(super) fn version(&self) -> Version {
        self.version
    }

    pub(super) fn file(&self, controller: Controller, name: &str) -> PathBuf {
        // In version 2 every controller has the same directory.
        let dir = self.dirs.get(&controller).or_else(|| self.dirs.values().next());
        dir.map(|dir| dir.join(name)).unwrap_or_default()
    }

    /// Each directory once.
    fn distinct(&self) -> Vec<&Path> {
        let mut dirs: Vec<&Path> = self.dirs.values().map(PathBuf::as_path).collect();
        dirs.sort_unstable();
        dirs.dedup();
        dirs
    }

    /// Makes the group and sets its limits, each read back.
    ///
    /// # Errors
    /// A file that cannot be written, or a limit that did not take. What was made by then stays: see [`Self::remove`].
    pub fn create(&self, limits: &Limits) -> Result<(), Error> {
        self.make()?;
        self.limit(limits)?;
        self.limit_devices()
    }

    pub(super) fn make(&self) -> Result<(), Error> {
        for dir in self.distinct() {
            let parent = dir.parent().unwrap_or(dir);
            self.delegate(parent)?;
            make(parent)?;
            self.delegate(dir)?;
            make(dir)?;
        }
        Ok(())
    }

    /// Version 2: a group's controllers must be handed down by its parent.
    fn delegate(&self, dir: &Path) -> Result<(), Error> {
        match (self.version, dir.parent()) {
            (Version::V2, Some(parent)) => write(&parent.join("cgroup.subtree_control"), "+memory +pids +cpu"),
            (Version::V2, None) | (Version::V1, _) => Ok(()),
        }
    }

    /// Version 1: the files into which a single-threaded process writes `0` to enter.
    pub fn doors(&self) -> Vec<PathBuf> {
        match self.version {
            Version::V1 => self.distinct().into_iter().map(|dir| dir.join("tasks")).collect(),
            Version::V2 => Vec::new(),
        }
    }

    /// Version 2: the directory that a process can be born into.
    pub fn cradle(&self) -> Option<&Path> {
        match self.version {
            Version::V1 => None,
            Version::V2 => self.distinct().first().copied(),
        }
    }

    /// The processes inside, as the host numbers them.
    pub fn pids(&self) -> Result<Vec<i32>, Error> {
        let mut pids = Vec::new();
        for dir in self.distinct() {
            match read(&dir.join("cgroup.procs")) {
                Ok(text) => pids.extend(text.lines().filter_map(|line| line.parse::<i32>().ok())),
                Err(error) if error.is_gone() => {}
                Err(error) => return Err(error),
            }
        }
        pids.sort_unstable();
        pids.dedup();
        Ok(pids)
    }

    /// Whose the processes inside are: real, effective, saved and file system user of each, as `/proc/PID/status` has them.
    pub fn users(&self) -> Result<BTreeSet<String>, Error> {
        let mut users = BTreeSet::new();
        for pid in self.pids()? {
            match read(Path::new(&format!("/proc/{pid}/status"))) {
                Ok(status) => users.extend(
                    status
                        .lines()
                        .filter_map(|line| line.strip_prefix("Uid:").map(str::to_owned)),
                ),
                Err(error) if error.is_gone() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(users)
    }

    /// Kills everything inside, waits until it is empty, and removes it. Fine when there is none.
    pub fn remove(&self) -> Result<(), Error> {
        let started = Instant::now();
        let mut nap = Duration::from_micros(100);
        loop {
            // An empty group can be removed, any other cannot: there is no need to look first.
            match self.remove_dirs() {
                Ok(()) => return Ok(()),
                Err(error) if started.elapsed() > DEADLINE || !error.is_busy() => return Err(error),
                Err(_) => self.kill()?,
            }
            thread::sleep(nap);
            nap = (nap * 2).min(Duration::from_millis(20));
        }
    }

    fn remove_dirs(&self) -> Result<(), Error> {
        for dir in self.distinct() {
            match fs::remove_dir(dir) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(source) => {
                    return Err(Error::file(dir, source));
                }
            }
        }
        Ok(())
    }

    /// Sends SIGKILL to everything inside, frozen or not. Does not wait.
    pub fn kill(&self) -> Result<(), Error> {
        if self.version == Version::V2 {
            // All at once, forks in flight and frozen ones included. Linux 5.14 and later.
            match write(&self.file(Controller::Memory, "cgroup.kill"), "1") {
                Err(error) if error.is_gone() => {}
                result => return result,
            }
        }
        let inside = self.pids()?;
        if inside.is_empty() {
            return Ok(());
        }
        for pid in inside {
            self.kill_one(pid);
        }
        self.thaw()
    }

    /// Sends SIGKILL to everything inside, until nothing is left that has not got it. What has got it runs no further
    /// instruction of its own and forks no more, so nothing begins either; frozen, it dies once it is thawed. Does not wait.
    pub fn doom(&self) -> Result<(), Error> {
        if self.version == Version::V2 {
            return self.kill();
        }
        let started = Instant::now();
        let mut killed = BTreeSet::new();
        loop {
            let fresh: Vec<i32> = self
                .pids_of_one()?
                .into_iter()
                .filter(|pid| killed.insert(*pid))
                .collect();
            if fresh.is_empty() {
                return self.thaw();
            }
            for pid in fresh {
                self.kill_one(pid);
            }
            if started.elapsed() > DEADLINE {
                return Err(Error::Late {
                    path: self.file(Controller::Pids, ""),
                    what: "kill",
                    deadline: DEADLINE,
                });
            }
        }
    }

    /// As [`Self::pids`], from one hierarchy alone: of what has entered all of them.
    fn pids_of_one(&self) -> Result<Vec<i32>, Error> {
        match read(&self.file(Controller::Pids, "cgroup.procs")) {
            Ok(text) => Ok(text.lines().filter_map(|line| line.parse().ok()).collect()),
            Err(error) if error.is_gone() => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    /// Lets what was killed while it was frozen die. Does not wait.
    pub fn thaw(&self) -> Result<(), Error> {
        match self.set_frozen(false) {
            Err(error) if !error.is_gone() => Err(error),
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// By descriptor, and only if it still is in this group: the number may have a new owner by now.
    fn kill_one(&self, pid: i32) {
        let Some(number) = Pid::from_raw(pid) else { return };
        let Ok(process) = pidfd_open(number, PidfdFlags::empty()) else {
            return;
        };
        if self.holds(pid) {
            // It may be gone already, which is what was wanted.
            let _ = pidfd_send_signal(process, Signal::KILL);
        }
    }

    /// Whether the process is in this group, in any hierarchy.
    pub fn holds(&self, pid: i32) -> bool {
        let Some(name) = self.name() else { return false };
        let groups = crate::process::read_made(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        groups
            .lines()
            .any(|line| line.splitn(3, ':').nth(2).is_some_and(|path| path.ends_with(&name)))
    }

    /// Whether its path speaks of `id`, as those do that an engine makes for its containers.
    pub fn speaks_of(&self, id: &str) -> bool {
        self.distinct().iter().all(|dir| dir.to_string_lossy().contains(id))
    }

    fn name(&self) -> Option<String> {
        let name = self.dirs.values().next()?.file_name()?.to_str()?;
        Some(format!("/{PARENT}/{name}"))
    }

    /// When it was made; `None` where there is none.
    pub fn made(&self) -> Option<std::time::SystemTime> {
        let dirs = self.distinct().into_iter();
        dirs.filter_map(|dir| fs::metadata(dir).ok()?.modified().ok()).max()
    }

    /// Whether any part of it exists.
    pub fn exists(&self) -> bool {
        self.distinct().iter().any(|dir| dir.exists())
    }

    /// Freezes or thaws everything inside and waits until that has taken.
    pub fn freeze(&self, frozen: bool) -> Result<(), Error> {
        self.set_frozen(frozen)?;
        let started = Instant::now();
        let mut nap = Duration::from_micros(100);
        while self.is_frozen()? != Some(frozen) {
            if started.elapsed() > DEADLINE {
                return Err(Error::Late {
                    path: self.file(Controller::Freezer, ""),
                    what: if frozen { "freeze" } else { "thaw" },
                    deadline: DEADLINE,
                });
            }
            thread::sleep(nap);
            nap = (nap * 2).min(Duration::from_millis(10));
            // Version 1 may stay at FREEZING until it is told again.
            self.set_frozen(frozen)?;
        }
        Ok(())
    }

    fn set_frozen(&self, frozen: bool) -> Result<(), Error> {
        match self.version {
            Version::V1 => {
                let state = if frozen { "FROZEN" } else { "THAWED" };
                write(&self.file(Controller::Freezer, "freezer.state"), state)
            }
            Version::V2 => write(
                &self.file(Controller::Freezer, "cgroup.freeze"),
                if frozen { "1" } else { "0" },
            ),
        }
    }

    /// `None` while on the way.
    pub fn is_frozen(&self) -> Result<Option<bool>, Error> {
        Ok(match self.version {
            Version::V1 => match read(&self.file(Controller::Freezer, "freezer.state"))?.trim() {
                "THAWED" => Some(false),
                "FROZEN" => Some(true),
                _ => None,
            },
            Version::V2 => Some(entry(&self.file(Controller::Freezer, "cgroup.events"), "frozen")? == 1),
        })
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dirs: Vec<String> = self.distinct().iter().map(|dir| dir.display().to_string()).collect();
        f.write_str(&dirs.join(" "))
    }
}

fn make(dir: &Path) -> Result<(), Error> {
    match fs::create_dir(dir) {
        Err(source) if source.kind() != io::ErrorKind::AlreadyExists => Err(Error::file(dir, source)),
        Ok(()) | Err(_) => Ok(()),
    }
}
