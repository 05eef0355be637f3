//! Finds a container's cgroups and reads their counters and limits: v1, v2, and hosts with both.
//!
//! The engine's stats call is not used: it is slow, leaves out the OOM count, and is the engine's word, not the kernel's.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::sandbox::Usage;

/// Where one controller of a container is counted.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Place {
    directory: PathBuf,
    unified: bool,
}

/// The cgroups of one container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cgroup {
    memory: Place,
    pids: Place,
    cpu: Place,
    cpuacct: Place,
}

/// What the kernel will enforce. `None` = no limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Enforced {
    pub memory_bytes: Option<u64>,
    /// Beyond memory. Where the kernel has no swap accounting this is `None`.
    pub swap_bytes: Option<u64>,
    pub pids: Option<u64>,
    /// Microseconds of processor in a period of 100 ms.
    pub cpu_quota_us: Option<u64>,
}

/// Length of the period that quotas are written for.
pub const PERIOD_US: i64 = 100_000;

impl Cgroup {
    /// The cgroups of the process `pid`, which must be those of the container `id`: a pid may have been reused.
    pub fn of(pid: i64, id: &str) -> io::Result<Self> {
        let table = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
        let mounts = fs::read_to_string("/proc/self/mountinfo")?;
        let place = |controller| {
            find(&table, &mounts, controller)
                .ok_or_else(|| io::Error::other(format!("no cgroup counts `{controller}` for it")))
        };
        let cgroup = Self {
            memory: place("memory")?,
            pids: place("pids")?,
            cpu: place("cpu")?,
            cpuacct: place("cpuacct").or_else(|_| place("cpu"))?,
        };
        if cgroup.memory.directory.to_string_lossy().contains(id) {
            Ok(cgroup)
        } else {
            Err(io::Error::other(
                "its processes are not visible here: does the engine run in another pid namespace?",
            ))
        }
    }

    pub fn usage(&self) -> io::Result<Usage> {
        let memory = &self.memory;
        let (now, peak, events) = match memory.unified {
            true => ("memory.current", "memory.peak", "memory.events"),
            false => (
                "memory.usage_in_bytes",
                "memory.max_usage_in_bytes",
                "memory.oom_control",
            ),
        };
        let memory_bytes = number(&memory.directory.join(now))?;
        Ok(Usage {
            memory_bytes,
            // memory.peak is missing before Linux 5.19: then the best known lower bound.
            memory_peak_bytes: optional(number(&memory.directory.join(peak)))?.unwrap_or(memory_bytes),
            oom_kills: entry(&memory.directory.join(events), "oom_kill")?,
            pids: number(&self.pids.directory.join("pids.current"))?,
            pids_refused: entry(&self.pids.directory.join("pids.events"), "max")?,
            cpu_us: match self.cpuacct.unified {
                true => entry(&self.cpuacct.directory.join("cpu.stat"), "usage_usec")?,
                false => number(&self.cpuacct.directory.join("cpuacct.usage"))? / 1000,
            },
        })
    }

    pub fn enforced(&self) -> io::Result<Enforced> {
        let memory = &self.memory.directory;
        let (memory_bytes, swap_bytes) = if self.memory.unified {
            (
                limit(&memory.join("memory.max"))?,
                optional(limit(&memory.join("memory.swap.max")))?.flatten(),
            )
        } else {
            let of_memory = limit(&memory.join("memory.limit_in_bytes"))?;
            let of_both = optional(limit(&memory.join("memory.memsw.limit_in_bytes")))?.flatten();
            let swap = of_both.zip(of_memory).map(|(both, memory)| both.saturating_sub(memory));
            (of_memory, swap)
        };
        let cpu = &self.cpu.directory;
        let cpu_quota_us = if self.cpu.unified {
            let text = fs::read_to_string(cpu.join("cpu.max"))?;
            text.split_ascii_whitespace().next().and_then(|word| word.parse().ok())
        } else {
            limit(&cpu.join("cpu.cfs_quota_us"))?
        };
        Ok(Enforced {
            memory_bytes,
            swap_bytes,
            pids: limit(&self.pids.directory.join("pids.max"))?,
            cpu_quota_us,
        })
    }
}

/// Where `controller` is mounted (v1) or else the v2 hierarchy, joined with the process's path in it.
fn find(table: &str, mounts: &str, controller: &str) -> Option<Place> {
    let lines = || {
        table.lines().filter_map(|line| {
            let mut parts = line.splitn(3, ':');
            Some((parts.next()?, parts.next()?, parts.next()?))
        })
    };
    let v1 = lines().find(|(_, names, _)| names.split(',').any(|name| name == controller));
    if let Some((_, _, path)) = v1 {
        let directory = mounted(mounts, path, |kind, options| {
            kind == "cgroup" && options.split(',').any(|option| option == controller)
        })?;
        return Some(Place {
            directory,
            unified: false,
        });
    }
    let (_, _, path) = lines().find(|(number, names, _)| *number == "0" && names.is_empty())?;
    let directory = mounted(mounts, path, |kind, _| kind == "cgroup2")?;
    Some(Place {
        directory,
        unified: true,
    })
}

/// The path below the mount that fits. Fields as in proc_pid_mountinfo(5).
fn mounted(mounts: &str, path: &str, fits: impl Fn(&str, &str) -> bool) -> Option<PathBuf> {
    mounts.lines().find_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        let mut left = left.split(' ').skip(3);
        let (root, point) = (left.next()?, left.next()?);
        let mut right = right.split(' ');
        let (kind, options) = (right.next()?, right.nth(1)?);
        let below = Path::new(path).strip_prefix(root).ok()?;
        fits(kind, options).then(|| Path::new(point).join(below))
    })
}

fn number(path: &Path) -> io::Result<u64> {
    let text = fs::read_to_string(path)?;
    text.trim()
        .parse()
        .map_err(|_| io::Error::other(format!("`{}` holds no number", path.display())))
}

/// One value of a file with a `name value` pair a line; 0 when the name is missing.
fn entry(path: &Path, name: &str) -> io::Result<u64> {
    let text = fs::read_to_string(path)?;
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value.map_or(Ok(0), |value| value.trim().parse().map_err(io::Error::other))
}

/// A limit. `max`, `-1`, and the huge number by which v1 says "none" are none.
fn limit(path: &Path) -> io::Result<Option<u64>> {
    let text = fs::read_to_string(path)?;
    let value: Option<u64> = text.trim().parse().ok();
    Ok(value.filter(|bytes| *bytes < 1 << 62))
}

fn optional<T>(read: io::Result<T>) -> io::Result<Option<T>> {
    match read {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
30 25 0:26 / /sys/fs/cgroup/cpu rw,relatime shared:8 - cgroup cgroup rw,cpu
31 25 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
32 25 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
33 25 0:29 /outer /mnt/pids rw - cgroup cgroup rw,pids
";

    #[test]
    fn each_controller_is_found_where_this_host_has_it() {
        let table = "9:memory:/docker/abc\n5:pids:/outer/docker/abc\n3:cpu:/docker/abc\n0::/docker/abc\n";
        let v1 = |directory: &str| {
            Some(Place {
                directory: directory.into(),
                unified: false,
            })
        };
        assert_eq!(find(table, MOUNTS, "memory"), v1("/sys/fs/cgroup/memory/docker/abc"));
        assert_eq!(find(table, MOUNTS, "pids"), v1("/mnt/pids/docker/abc"));
        assert_eq!(find(table, MOUNTS, "cpu"), v1("/sys/fs/cgroup/cpu/docker/abc"));
        let unified = Place {
            directory: "/sys/fs/cgroup/unified/system.slice/docker-abc.scope".into(),
            unified: true,
        };
        let table = "0::/system.slice/docker-abc.scope\n";
        assert_eq!(find(table, MOUNTS, "memory"), Some(unified));
    }

    #[test]
    fn limits_and_counters_of_v2_are_read() {
        let directory = tempfile::tempdir().unwrap();
        for (name, text) in [
            ("memory.current", "4096\n"),
            ("memory.peak", "8192\n"),
            (
                "memory.events",
                "low 0\nhigh 0\nmax 3\noom 2\noom_kill 1\noom_group_kill 0\n",
            ),
            ("memory.max", "1048576\n"),
            ("memory.swap.max", "0\n"),
            ("pids.current", "3\n"),
            ("pids.events", "max 7\n"),
            ("pids.max", "max\n"),
            ("cpu.stat", "usage_usec 55\nuser_usec 50\n"),
            ("cpu.max", "50000 100000\n"),
        ] {
            fs::write(directory.path().join(name), text).unwrap();
        }
        let place = Place {
            directory: directory.path().into(),
            unified: true,
        };
        let cgroup = Cgroup {
            memory: place.clone(),
            pids: place.clone(),
            cpu: place.clone(),
            cpuacct: place,
        };
        assert_eq!(
            cgroup.usage().unwrap(),
            Usage {
                memory_bytes: 4096,
                memory_peak_bytes: 8192,
                oom_kills: 1,
                pids: 3,
                pids_refused: 7,
                cpu_us: 55,
            }
        );
        assert_eq!(
            cgroup.enforced().unwrap(),
            Enforced {
                memory_bytes: Some(1 << 20),
                swap_bytes: Some(0),
                pids: None,
                cpu_quota_us: Some(50_000),
            }
        );
    }
}
