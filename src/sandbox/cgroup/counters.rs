//! What the kernel counts of a group, and what it holds it to.

use super::file::{cap, entry, number, optional, read};
use super::{Controller, Error, Group, Version};
use crate::sandbox::{Losses, Usage};

/// What the kernel will enforce. `None` = no limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Enforced {
    pub memory_bytes: Option<u64>,
    /// Beyond memory. Where the kernel has no swap accounting this is `None`.
    pub swap_bytes: Option<u64>,
    pub pids: Option<u64>,
    /// Microseconds of processor in each [`PERIOD_US`](super::PERIOD_US).
    pub cpu_quota_us: Option<u64>,
}

impl Group {
    /// What was refused, without the rest.
    pub fn losses(&self) -> Result<Losses, Error> {
        let events = match self.version() {
            Version::V1 => "memory.oom_control",
            Version::V2 => "memory.events",
        };
        Ok(Losses {
            oom_kills: entry(&self.file(Controller::Memory, events), "oom_kill")?,
            pids_refused: entry(&self.file(Controller::Pids, "pids.events"), "max")?,
        })
    }

    /// The kernel's counters.
    pub fn usage(&self) -> Result<Usage, Error> {
        use Controller::{Cpu, Cpuacct, Memory, Pids};
        let number = |controller, name| number(&self.file(controller, name));
        let entry = |controller, name, key| entry(&self.file(controller, name), key);
        let (now, peak) = match self.version() {
            Version::V1 => ("memory.usage_in_bytes", "memory.max_usage_in_bytes"),
            Version::V2 => ("memory.current", "memory.peak"),
        };
        let Losses {
            oom_kills,
            pids_refused,
        } = self.losses()?;
        let memory_bytes = number(Memory, now)?;
        Ok(Usage {
            memory_bytes,
            // `memory.peak` is missing before Linux 5.19: then the best known lower bound.
            memory_peak_bytes: optional(number(Memory, peak))?.unwrap_or(memory_bytes),
            oom_kills,
            pids: number(Pids, "pids.current")?,
            pids_refused,
            cpu_us: match self.version() {
                Version::V1 => number(Cpuacct, "cpuacct.usage")? / 1000,
                Version::V2 => entry(Cpu, "cpu.stat", "usage_usec")?,
            },
        })
    }

    /// The caps as the kernel has them.
    pub fn enforced(&self) -> Result<Enforced, Error> {
        use Controller::{Cpu, Memory, Pids};
        let cap = |controller, name| cap(&self.file(controller, name));
        let (memory_bytes, swap_bytes, cpu_quota_us) = match self.version() {
            Version::V1 => {
                let memory = cap(Memory, "memory.limit_in_bytes")?;
                let both = optional(cap(Memory, "memory.memsw.limit_in_bytes"))?.flatten();
                let swap = both.zip(memory).map(|(both, memory)| both.saturating_sub(memory));
                (memory, swap, cap(Cpu, "cpu.cfs_quota_us")?)
            }
            Version::V2 => {
                let quota = read(&self.file(Cpu, "cpu.max"))?;
                let quota = quota.split_ascii_whitespace().next().and_then(|word| word.parse().ok());
                let swap = optional(cap(Memory, "memory.swap.max"))?.flatten();
                (cap(Memory, "memory.max")?, swap, quota)
            }
        };
        Ok(Enforced {
            memory_bytes,
            swap_bytes,
            pids: cap(Pids, "pids.max")?,
            cpu_quota_us,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::sandbox::Limits;

    /// A directory in place of cgroup version 2, which this test need not have.
    fn fake_v2(dir: &Path) -> Group {
        let home = dir.join("exuvia/sbx_1");
        fs::create_dir_all(&home).unwrap();
        for name in [
            "memory.max",
            "memory.swap.max",
            "pids.max",
            "cpu.max",
            "cgroup.max.descendants",
            "cgroup.max.depth",
            "memory.oom.group",
            "memory.zswap.max",
            "cgroup.freeze",
        ] {
            fs::write(home.join(name), "").unwrap();
        }
        fs::write(dir.join("cgroup.subtree_control"), "").unwrap();
        fs::write(dir.join("exuvia/cgroup.subtree_control"), "").unwrap();
        let dirs = Controller::V2.map(|controller| (controller, home.clone()));
        Group::new(Version::V2, dirs.into())
    }

    #[test]
    fn version_2_limits_counters_and_freezer() {
        let dir = tempfile::tempdir().unwrap();
        let group = fake_v2(dir.path());
        let home = dir.path().join("exuvia/sbx_1");
        let limits = Limits {
            cpus: 0.5,
            ..Limits::default()
        };
        group.make().unwrap();
        group.limit(&limits).unwrap();
        let held = Enforced {
            memory_bytes: Some(1 << 30),
            swap_bytes: Some(0),
            pids: Some(256),
            cpu_quota_us: Some(50_000),
        };
        assert_eq!(group.enforced().unwrap(), held);
        let handed_down = dir.path().join("exuvia/cgroup.subtree_control");
        assert_eq!(fs::read_to_string(handed_down).unwrap(), "+memory +pids +cpu");

        let write = |name: &str, text: &str| fs::write(home.join(name), text).unwrap();
        for (name, text) in [
            ("memory.current", "4096\n"),
            ("memory.events", "low 0\noom 3\noom_kill 2\n"),
            ("pids.current", "5\n"),
            ("pids.events", "max 7\n"),
            ("pids.max", "max\n"),
            ("cpu.stat", "usage_usec 99\nuser_usec 9\n"),
            ("cgroup.events", "populated 1\nfrozen 1\n"),
        ] {
            write(name, text);
        }
        let wanted = Usage {
            memory_bytes: 4096,
            memory_peak_bytes: 4096,
            oom_kills: 2,
            pids: 5,
            pids_refused: 7,
            cpu_us: 99,
        };
        assert_eq!(group.usage().unwrap(), wanted);
        write("memory.peak", "8192\n");
        assert_eq!(group.usage().unwrap().memory_peak_bytes, 8192);
        assert_eq!(group.enforced().unwrap().pids, None);
        group.freeze(true).unwrap();
        assert_eq!(fs::read_to_string(home.join("cgroup.freeze")).unwrap(), "1");
    }
}
