//! Control groups: the caps of a sandbox, their read-back, and the kernel's counters. Version 1, version 2 and both at once.
//!
//! Owns: where each controller lives on this host, the group `exuvia/ID` of a sandbox, its limits, freezing, killing,
//! removal. Must not know: who runs in a group or why. Every limit is read back after it was written; one that did not
//! take is an error, so that a sandbox is never weaker than asked.
//!
//! A process enters a group by itself (see [`Group::doors`]): moving a whole process from outside waits for a grace period
//! of the kernel, a single thread that moves itself does not.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{fmt, fs, io, thread};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::{Limits, Usage};

/// What a sandbox needs counted or capped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Controller {
    Memory,
    Pids,
    Cpu,
    /// Version 1 only; part of `cpu` in version 2.
    Cpuacct,
    /// Version 1 only; part of the core in version 2.
    Freezer,
    /// Version 1 only. Under version 2 user namespaces and `nodev` mounts alone keep devices out.
    Devices,
}

impl Controller {
    /// All that a host with version 1 must have.
    pub const V1: [Self; 6] = [
        Self::Memory,
        Self::Pids,
        Self::Cpu,
        Self::Cpuacct,
        Self::Freezer,
        Self::Devices,
    ];
    /// All that a host with version 2 must have.
    pub const V2: [Self; 3] = [Self::Memory, Self::Pids, Self::Cpu];
}

impl fmt::Display for Controller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Memory => "memory",
            Self::Pids => "pids",
            Self::Cpu => "cpu",
            Self::Cpuacct => "cpuacct",
            Self::Freezer => "freezer",
            Self::Devices => "devices",
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    V1,
    V2,
}

/// What can go wrong with a control group.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("this host has no usable control groups: version 1 lacks {v1}, version 2 lacks {v2}")]
    Missing { v1: String, v2: String },
    #[error("`{}`", path.display())]
    File {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("`{}` holds `{found}` where `{wanted}` was set", path.display())]
    NotTaken {
        path: PathBuf,
        wanted: String,
        found: String,
    },
    #[error("`{}` did not {what} within {deadline:?}", path.display())]
    Late {
        path: PathBuf,
        what: &'static str,
        deadline: Duration,
    },
}

/// How long a freeze, a kill or a removal may take.
const DEADLINE: Duration = Duration::from_secs(10);
/// Length of a CPU period in microseconds.
const PERIOD_US: u64 = 100_000;
/// The group that holds the groups of all sandboxes.
const PARENT: &str = "exuvia";
/// Devices that may be opened: null, zero, full, random, urandom, tty, ptmx, and pseudo terminals.
const DEVICES: [&str; 8] = [
    "c 1:3 rw",
    "c 1:5 rw",
    "c 1:7 rw",
    "c 1:8 rw",
    "c 1:9 rw",
    "c 5:0 rw",
    "c 5:2 rw",
    "c 136:* rw",
];

/// The hierarchies of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hierarchies {
    version: Version,
    roots: BTreeMap<Controller, PathBuf>,
}

impl Hierarchies {
    /// Finds them in this process's mount table. Version 1 is used where it has all controllers, else version 2.
    pub fn detect() -> Result<Self, Error> {
        Self::of(&read(Path::new("/proc/self/mounts"))?, &|root| {
            fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default()
        })
    }

    fn of(mounts: &str, controllers: &dyn Fn(&Path) -> String) -> Result<Self, Error> {
        let mut v1 = BTreeMap::new();
        let mut v2 = BTreeMap::new();
        for line in mounts.lines() {
            let mut words = line.split(' ').skip(1);
            let (Some(target), Some(kind), Some(options)) = (words.next(), words.next(), words.next()) else {
                continue;
            };
            let root = PathBuf::from(target);
            if kind == "cgroup" {
                for controller in Controller::V1 {
                    if options.split(',').any(|option| option == controller.to_string()) {
                        v1.entry(controller).or_insert_with(|| root.clone());
                    }
                }
            } else if kind == "cgroup2" {
                let names = controllers(&root);
                for controller in Controller::V2 {
                    if names.split_whitespace().any(|name| name == controller.to_string()) {
                        v2.entry(controller).or_insert_with(|| root.clone());
                    }
                }
            }
        }
        let lacks = |wanted: &[Controller], found: &BTreeMap<Controller, PathBuf>| {
            let missing = wanted.iter().filter(|controller| !found.contains_key(controller));
            missing.map(ToString::to_string).collect::<Vec<_>>().join(", ")
        };
        let (no_v1, no_v2) = (lacks(&Controller::V1, &v1), lacks(&Controller::V2, &v2));
        if no_v1.is_empty() {
            Ok(Self {
                version: Version::V1,
                roots: v1,
            })
        } else if no_v2.is_empty() {
            Ok(Self {
                version: Version::V2,
                roots: v2,
            })
        } else {
            Err(Error::Missing { v1: no_v1, v2: no_v2 })
        }
    }

    pub fn version(&self) -> Version {
        self.version
    }

    /// Where each controller is mounted.
    pub fn roots(&self) -> &BTreeMap<Controller, PathBuf> {
        &self.roots
    }

    /// The group of the sandbox `name`, whether it exists or not.
    pub fn group(&self, name: &str) -> Group {
        let dir = |root: &PathBuf| root.join(PARENT).join(name);
        Group {
            version: self.version,
            dirs: self
                .roots
                .iter()
                .map(|(controller, root)| (*controller, dir(root)))
                .collect(),
        }
    }
}

/// The group of one sandbox: a directory in each hierarchy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    version: Version,
    dirs: BTreeMap<Controller, PathBuf>,
}

impl Group {
    fn file(&self, controller: Controller, name: &str) -> PathBuf {
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
        for dir in self.distinct() {
            let parent = dir.parent().unwrap_or(dir);
            self.delegate(parent)?;
            make(parent)?;
            self.delegate(dir)?;
            make(dir)?;
        }
        match self.version {
            Version::V1 => self.limit_v1(limits),
            Version::V2 => self.limit_v2(limits),
        }
    }

    /// Version 2: a group's controllers must be handed down by its parent.
    fn delegate(&self, dir: &Path) -> Result<(), Error> {
        match (self.version, dir.parent()) {
            (Version::V2, Some(parent)) => write(&parent.join("cgroup.subtree_control"), "+memory +pids +cpu"),
            (Version::V2, None) | (Version::V1, _) => Ok(()),
        }
    }

    fn limit_v1(&self, limits: &Limits) -> Result<(), Error> {
        let memory = |name| self.file(Controller::Memory, name);
        set_bytes(&memory("memory.limit_in_bytes"), limits.memory_bytes)?;
        let swap = memory("memory.memsw.limit_in_bytes");
        // Absent when the kernel does not account swap: then there must be none.
        if swap.exists() {
            set_bytes(&swap, limits.memory_bytes.saturating_add(limits.swap_bytes))?;
        } else {
            no_swap(&swap)?;
        }
        set(&self.file(Controller::Pids, "pids.max"), &limits.pids.to_string())?;
        set(&self.file(Controller::Cpu, "cpu.cfs_period_us"), &PERIOD_US.to_string())?;
        set(
            &self.file(Controller::Cpu, "cpu.cfs_quota_us"),
            &quota(limits.cpus).to_string(),
        )?;
        write(&self.file(Controller::Devices, "devices.deny"), "a")?;
        for device in DEVICES {
            write(&self.file(Controller::Devices, "devices.allow"), device)?;
        }
        let list = self.file(Controller::Devices, "devices.list");
        let found = read(&list)?;
        if found.lines().collect::<Vec<_>>() == DEVICES {
            Ok(())
        } else {
            Err(Error::NotTaken {
                path: list,
                wanted: DEVICES.join(", "),
                found,
            })
        }
    }

    fn limit_v2(&self, limits: &Limits) -> Result<(), Error> {
        let memory = |name| self.file(Controller::Memory, name);
        set_bytes(&memory("memory.max"), limits.memory_bytes)?;
        let swap = memory("memory.swap.max");
        if swap.exists() {
            set_bytes(&swap, limits.swap_bytes)?;
        } else {
            no_swap(&swap)?;
        }
        set(&self.file(Controller::Pids, "pids.max"), &limits.pids.to_string())?;
        set(
            &self.file(Controller::Cpu, "cpu.max"),
            &format!("{} {PERIOD_US}", quota(limits.cpus)),
        )?;
        set(&memory("cgroup.max.descendants"), "0")
    }

    /// The files into which a single-threaded process writes `0` to enter.
    pub fn doors(&self) -> Vec<PathBuf> {
        let name = match self.version {
            Version::V1 => "tasks",
            Version::V2 => "cgroup.procs",
        };
        self.distinct().into_iter().map(|dir| dir.join(name)).collect()
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

    /// Kills everything inside, waits until it is empty, and removes it. Fine when there is none.
    pub fn remove(&self) -> Result<(), Error> {
        let started = Instant::now();
        let mut nap = Duration::from_micros(200);
        loop {
            self.kill()?;
            match self.remove_dirs() {
                Ok(()) => return Ok(()),
                Err(error) if started.elapsed() > DEADLINE || !error.is_busy() => return Err(error),
                Err(_) => {}
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
                    return Err(Error::File {
                        path: dir.to_owned(),
                        source,
                    });
                }
            }
        }
        Ok(())
    }

    /// Sends SIGKILL to everything inside, frozen or not. Does not wait.
    pub fn kill(&self) -> Result<(), Error> {
        let inside = self.pids()?;
        if inside.is_empty() {
            return Ok(());
        }
        for pid in inside {
            self.kill_one(pid);
        }
        // What is frozen dies once it is thawed.
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
        let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        groups
            .lines()
            .any(|line| line.splitn(3, ':').nth(2).is_some_and(|path| path.ends_with(&name)))
    }

    fn name(&self) -> Option<String> {
        let name = self.dirs.values().next()?.file_name()?.to_str()?;
        Some(format!("/{PARENT}/{name}"))
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
    fn is_frozen(&self) -> Result<Option<bool>, Error> {
        Ok(match self.version {
            Version::V1 => match read(&self.file(Controller::Freezer, "freezer.state"))?.trim() {
                "THAWED" => Some(false),
                "FROZEN" => Some(true),
                _ => None,
            },
            Version::V2 => Some(field(&read(&self.file(Controller::Freezer, "cgroup.events"))?, "frozen") == 1),
        })
    }

    /// The kernel's counters.
    pub fn usage(&self) -> Result<Usage, Error> {
        let number = |controller, name: &str| Ok::<_, Error>(parse(&read(&self.file(controller, name))?));
        let counter =
            |controller, name: &str, key: &str| Ok::<_, Error>(field(&read(&self.file(controller, name))?, key));
        use Controller::{Cpu, Cpuacct, Memory, Pids};
        Ok(match self.version {
            Version::V1 => Usage {
                memory_bytes: number(Memory, "memory.usage_in_bytes")?,
                memory_peak_bytes: number(Memory, "memory.max_usage_in_bytes")?,
                oom_kills: counter(Memory, "memory.oom_control", "oom_kill")?,
                pids: number(Pids, "pids.current")?,
                pids_refused: counter(Pids, "pids.events", "max")?,
                cpu_us: number(Cpuacct, "cpuacct.usage")? / 1000,
            },
            Version::V2 => Usage {
                memory_bytes: number(Memory, "memory.current")?,
                // Since Linux 5.19.
                memory_peak_bytes: number(Memory, "memory.peak").unwrap_or_default(),
                oom_kills: counter(Memory, "memory.events", "oom_kill")?,
                pids: number(Pids, "pids.current")?,
                pids_refused: counter(Pids, "pids.events", "max")?,
                cpu_us: counter(Cpu, "cpu.stat", "usage_usec")?,
            },
        })
    }
}

impl Error {
    /// The group, or the process that was asked about, is no more.
    fn is_gone(&self) -> bool {
        match self {
            Self::File { source, .. } => {
                source.kind() == io::ErrorKind::NotFound || source.raw_os_error() == Some(libc::ENODEV)
            }
            Self::Missing { .. } | Self::NotTaken { .. } | Self::Late { .. } => false,
        }
    }

    fn is_busy(&self) -> bool {
        match self {
            Self::File { source, .. } => source.raw_os_error() == Some(libc::EBUSY),
            Self::Missing { .. } | Self::NotTaken { .. } | Self::Late { .. } => false,
        }
    }
}

fn quota(cpus: f64) -> u64 {
    // The kernel refuses less than a millisecond.
    ((cpus * PERIOD_US as f64).round() as u64).max(1000)
}

fn make(dir: &Path) -> Result<(), Error> {
    match fs::create_dir(dir) {
        Err(source) if source.kind() != io::ErrorKind::AlreadyExists => Err(Error::File {
            path: dir.to_owned(),
            source,
        }),
        Ok(()) | Err(_) => Ok(()),
    }
}

fn read(path: &Path) -> Result<String, Error> {
    fs::read_to_string(path).map_err(|source| Error::File {
        path: path.to_owned(),
        source,
    })
}

fn write(path: &Path, value: &str) -> Result<(), Error> {
    // Opened without O_CREAT: on a removed group this must fail.
    let file = fs::OpenOptions::new().write(true).open(path);
    file.and_then(|mut file| io::Write::write_all(&mut file, value.as_bytes()))
        .map_err(|source| Error::File {
            path: path.to_owned(),
            source,
        })
}

/// Writes and reads back.
fn set(path: &Path, value: &str) -> Result<(), Error> {
    write(path, value)?;
    match read(path)?.trim() {
        found if found == value => Ok(()),
        found => Err(Error::NotTaken {
            path: path.to_owned(),
            wanted: value.to_owned(),
            found: found.to_owned(),
        }),
    }
}

/// Like [`set`]; the kernel rounds down to whole pages.
fn set_bytes(path: &Path, bytes: u64) -> Result<(), Error> {
    const LARGEST_PAGE: u64 = 64 << 10;
    write(path, &bytes.to_string())?;
    let found = read(path)?;
    let taken = parse(&found);
    if taken <= bytes && bytes - taken < LARGEST_PAGE {
        return Ok(());
    }
    let found = found.trim().to_owned();
    Err(Error::NotTaken {
        path: path.to_owned(),
        wanted: bytes.to_string(),
        found,
    })
}

fn no_swap(limit: &Path) -> Result<(), Error> {
    let swaps = read(Path::new("/proc/swaps"))?;
    if swaps.lines().count() <= 1 {
        return Ok(());
    }
    Err(Error::NotTaken {
        path: limit.to_owned(),
        wanted: "a cap on swap".to_owned(),
        found: "no such file, and the host swaps".to_owned(),
    })
}

fn parse(text: &str) -> u64 {
    text.trim().parse().unwrap_or(u64::MAX)
}

/// The value of `key` in a file of `key value` lines; 0 when it has none.
fn field(text: &str, key: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' '));
    line.map(parse).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn detect(mounts: &str, v2: &str) -> Result<Hierarchies, Error> {
        Hierarchies::of(mounts, &|_| v2.to_owned())
    }

    const V1_MOUNTS: &str = "tmpfs /sys/fs/cgroup tmpfs rw 0 0\n\
        cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,relatime,cpu,cpuacct 0 0\n\
        cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n\
        cgroup /sys/fs/cgroup/devices cgroup rw,devices 0 0\n\
        cgroup /sys/fs/cgroup/freezer cgroup rw,freezer 0 0\n\
        cgroup /sys/fs/cgroup/pids cgroup rw,pids 0 0\n\
        cgroup /sys/fs/cgroup/systemd cgroup rw,name=systemd 0 0\n\
        cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n";

    #[test]
    fn each_controller_is_found_where_it_is_mounted() {
        let hybrid = detect(V1_MOUNTS, "hugetlb").unwrap();
        assert_eq!(hybrid.version(), Version::V1);
        let group = hybrid.group("sbx_1");
        assert_eq!(
            group.file(Controller::Cpuacct, "tasks"),
            Path::new("/sys/fs/cgroup/cpu,cpuacct/exuvia/sbx_1/tasks")
        );
        // cpu and cpuacct are one hierarchy here: one door.
        assert_eq!(group.doors().len(), 5);

        let unified = detect("cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n", "cpuset cpu io memory pids").unwrap();
        assert_eq!(unified.version(), Version::V2);
        let doors = unified.group("sbx_1").doors();
        assert_eq!(doors, [Path::new("/sys/fs/cgroup/exuvia/sbx_1/cgroup.procs")]);
    }

    #[test]
    fn what_is_missing_is_named() {
        let mounts = V1_MOUNTS
            .replace("rw,pids", "rw,other")
            .replace("rw,memory", "rw,other");
        assert_eq!(
            detect(&mounts, "cpu").unwrap_err().to_string(),
            "this host has no usable control groups: version 1 lacks memory, pids, version 2 lacks memory, pids"
        );
    }

    /// A directory in place of cgroup version 2, which this test need not have.
    fn fake_v2(dir: &Path) -> Group {
        let roots = Controller::V2
            .into_iter()
            .map(|controller| (controller, dir.to_owned()))
            .collect();
        let group = Hierarchies {
            version: Version::V2,
            roots,
        }
        .group("sbx_1");
        let home = dir.join("exuvia/sbx_1");
        fs::create_dir_all(&home).unwrap();
        for name in [
            "memory.max",
            "memory.swap.max",
            "pids.max",
            "cpu.max",
            "cgroup.max.descendants",
            "cgroup.freeze",
        ] {
            fs::write(home.join(name), "").unwrap();
        }
        fs::write(dir.join("cgroup.subtree_control"), "").unwrap();
        fs::write(dir.join("exuvia/cgroup.subtree_control"), "").unwrap();
        group
    }

    #[test]
    fn version_2_limits_counters_and_freezer() {
        let dir = tempfile::tempdir().unwrap();
        let group = fake_v2(dir.path());
        let home = dir.path().join("exuvia/sbx_1");
        group
            .create(&Limits {
                cpus: 0.5,
                ..Limits::default()
            })
            .unwrap();
        let limits =
            ["memory.max", "memory.swap.max", "pids.max", "cpu.max"].map(|name| read(&home.join(name)).unwrap());
        assert_eq!(limits, ["1073741824", "0", "256", "50000 100000"]);
        assert_eq!(
            read(&dir.path().join("exuvia/cgroup.subtree_control")).unwrap(),
            "+memory +pids +cpu"
        );

        for (name, text) in [
            ("memory.current", "4096\n"),
            ("memory.peak", "8192\n"),
            ("memory.events", "low 0\noom 3\noom_kill 2\n"),
            ("pids.current", "5\n"),
            ("pids.events", "max 7\n"),
            ("cpu.stat", "usage_usec 99\nuser_usec 9\n"),
            ("cgroup.events", "populated 1\nfrozen 1\n"),
        ] {
            fs::write(home.join(name), text).unwrap();
        }
        let wanted = Usage {
            memory_bytes: 4096,
            memory_peak_bytes: 8192,
            oom_kills: 2,
            pids: 5,
            pids_refused: 7,
            cpu_us: 99,
        };
        assert_eq!(group.usage().unwrap(), wanted);
        group.freeze(true).unwrap();
        assert_eq!(read(&home.join("cgroup.freeze")).unwrap(), "1");
    }

    #[test]
    fn a_limit_that_does_not_take_is_an_error() {
        let error = set(Path::new("/dev/null"), "5").unwrap_err();
        assert_eq!(error.to_string(), "`/dev/null` holds `` where `5` was set");
        let dir = tempfile::tempdir().unwrap();
        // A file that is not there is not made.
        assert!(write(&dir.path().join("pids.max"), "5").is_err());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn memory_is_read_back_in_whole_pages() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("memory.max");
        fs::write(&file, "").unwrap();
        set_bytes(&file, 4097).unwrap();
        assert!(set_bytes(Path::new("/dev/null"), 4097).is_err());
    }
}
