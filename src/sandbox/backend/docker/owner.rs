//! Who made a sandbox, and whether that process still lives: what recovery after `kill -9` goes by.
//!
//! A pid alone is reused, so it is kept with the process's start time and the boot it belongs to.

use std::fs;
use std::io;

use serde::{Deserialize, Serialize};

/// One process of one boot of this host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    pub pid: u32,
    /// Clock ticks between boot and the start of the process.
    pub started: u64,
    pub boot: String,
}

impl Owner {
    /// This process.
    pub fn current() -> io::Result<Self> {
        let pid = std::process::id();
        Ok(Self {
            pid,
            started: start_of(pid)?.ok_or(io::ErrorKind::NotFound)?,
            boot: fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned(),
        })
    }

    /// Whether that very process still runs.
    pub fn is_alive(&self) -> io::Result<bool> {
        let here = Self::current()?;
        Ok(here.boot == self.boot && start_of(self.pid)? == Some(self.started))
    }
}

/// When the process began; `None` when there is none, or only its zombie.
fn start_of(pid: u32) -> io::Result<Option<u64>> {
    let stat = match fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => stat,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        // ESRCH: it ended between open and read.
        Err(error) if error.raw_os_error() == Some(nix::libc::ESRCH) => return Ok(None),
        Err(error) => return Err(error),
    };
    // The name (field 2) may hold spaces and brackets; what follows its last bracket may not. proc_pid_stat(5).
    let rest = stat.rsplit_once(')').map(|(_, rest)| rest).unwrap_or_default();
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    match (fields.first(), fields.get(19)) {
        (Some(&"Z" | &"X"), _) => Ok(None),
        (Some(_), Some(start)) => start.parse().map(Some).map_err(io::Error::other),
        (_, _) => Err(io::Error::other(format!("/proc/{pid}/stat makes no sense"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_same_process_of_the_same_boot_is_alive() {
        let here = Owner::current().unwrap();
        assert!(here.is_alive().unwrap());
        let reused = Owner {
            started: here.started + 1,
            ..here.clone()
        };
        let rebooted = Owner {
            boot: "another".into(),
            ..here.clone()
        };
        assert!(!reused.is_alive().unwrap());
        assert!(!rebooted.is_alive().unwrap());

        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let owner = Owner {
            pid: child.id(),
            started: start_of(child.id()).unwrap().unwrap(),
            ..here
        };
        assert!(owner.is_alive().unwrap());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!owner.is_alive().unwrap());
    }
}
