//! The caps of a group: written, and read back.

use std::path::Path;

use super::file::{read, set, write};
use super::{Controller, Error, Group, Version};
use crate::sandbox::Limits;

/// Length of the period, in microseconds, that a processor quota is a part of.
pub const PERIOD_US: u64 = 100_000;
/// Microseconds of processor in each period; the kernel takes no less than a millisecond.
pub fn quota_us(cpus: f64) -> u64 {
    ((cpus * PERIOD_US as f64).round() as u64).max(1000)
}

/// Whether a cap on memory is what was asked: the kernel rounds it down to whole pages.
pub fn within_a_page(found: u64, asked: u64) -> bool {
    const LARGEST_PAGE: u64 = 64 << 10;
    found <= asked && asked - found < LARGEST_PAGE
}

/// Whether this host swaps at all.
///
/// # Errors
/// When `/proc` cannot be read.
pub fn host_swaps() -> Result<bool, Error> {
    // The first line is a heading. proc_swaps(5).
    Ok(read(Path::new("/proc/swaps"))?.lines().count() > 1)
}

impl Group {
    pub(super) fn limit(&self, limits: &Limits) -> Result<(), Error> {
        match self.version() {
            Version::V1 => self.limit_v1(limits),
            Version::V2 => self.limit_v2(limits),
        }
    }

    fn limit_v1(&self, limits: &Limits) -> Result<(), Error> {
        let memory = |name| self.file(Controller::Memory, name);
        set_bytes(&memory("memory.limit_in_bytes"), limits.memory_bytes)?;
        let swap = memory("memory.memsw.limit_in_bytes");
        // Absent when the kernel does not account swap.
        if swap.exists() {
            set_bytes(&swap, limits.memory_bytes.saturating_add(limits.swap_bytes))?;
        } else {
            no_swap(&swap)?;
        }
        set(&self.file(Controller::Pids, "pids.max"), &limits.pids.to_string())?;
        set(&self.file(Controller::Cpu, "cpu.cfs_period_us"), &PERIOD_US.to_string())?;
        set(
            &self.file(Controller::Cpu, "cpu.cfs_quota_us"),
            &quota_us(limits.cpus).to_string(),
        )
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
            &format!("{} {PERIOD_US}", quota_us(limits.cpus)),
        )?;
        // Before Linux 6.5 pages may go there although swap is 0.
        let compressed = memory("memory.zswap.max");
        if compressed.exists() {
            set(&compressed, "0")?;
        }
        // One command that runs out of memory does not end the others. `memory.high` stays `max`: what goes beyond it is
        // slowed down until its time is up, and nothing says why; at `memory.max` the end is at once, and counted.
        set(&memory("memory.oom.group"), "0")?;
        set(&memory("cgroup.max.depth"), "0")?;
        set(&memory("cgroup.max.descendants"), "0")
    }
}

/// As `set`, for a number of bytes.
fn set_bytes(path: &Path, bytes: u64) -> Result<(), Error> {
    write(path, &bytes.to_string())?;
    let found = read(path)?;
    match found.trim().parse() {
        Ok(taken) if within_a_page(taken, bytes) => Ok(()),
        Ok(_) | Err(_) => Err(Error::NotTaken {
            path: path.to_owned(),
            wanted: bytes.to_string(),
            found: found.trim().to_owned(),
        }),
    }
}

/// Where swap cannot be capped there must be none.
fn no_swap(cap: &Path) -> Result<(), Error> {
    match host_swaps()? {
        false => Ok(()),
        true => Err(Error::NotTaken {
            path: cap.to_owned(),
            wanted: "a cap on swap".to_owned(),
            found: "no such file, and the host swaps".to_owned(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn memory_is_read_back_in_whole_pages() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("memory.max");
        fs::write(&file, "").unwrap();
        set_bytes(&file, 4097).unwrap();
        assert!(set_bytes(Path::new("/dev/null"), 4097).is_err());
        let near = [(4096, 4097), (4097, 4096), (1 << 20, 2 << 20)].map(|(found, asked)| within_a_page(found, asked));
        assert_eq!(near, [true, false, false]);
    }
}
