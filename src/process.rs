//! Which process is which, for ever: what tells, after `kill -9`, whether the maker of something still lives.
//!
//! A pid alone is reused, so it is kept with the start time of its process and the boot it belongs to.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

/// One process of one boot of this host.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Process {
    pub pid: u32,
    /// Field 22 of `/proc/PID/stat`, proc_pid_stat(5): clock ticks between boot and the start of the process.
    pub started: u64,
    /// `/proc/sys/kernel/random/boot_id`, so that a reboot ends every process.
    pub boot: String,
}

impl Process {
    /// This process.
    ///
    /// # Errors
    /// When `/proc` cannot be read.
    pub fn current() -> io::Result<Self> {
        /// It does not change, and is asked for with every sandbox.
        static CURRENT: OnceLock<Process> = OnceLock::new();
        if let Some(known) = CURRENT.get() {
            return Ok(known.clone());
        }
        let found = Self::find(std::process::id())?.ok_or(io::ErrorKind::NotFound)?;
        Ok(CURRENT.get_or_init(|| found).clone())
    }

    /// The process that has this number now; `None` for none, or only its zombie.
    ///
    /// # Errors
    /// When `/proc` cannot be read.
    pub fn find(pid: u32) -> io::Result<Option<Self>> {
        let Some(started) = started(pid)? else { return Ok(None) };
        Ok(Some(Self {
            pid,
            started,
            boot: boot_id()?.to_owned(),
        }))
    }

    /// Whether that very process lives and is stopped by a signal: it may go on any moment, and does nothing until then.
    pub fn is_stopped(&self) -> bool {
        let is_it = boot_id().is_ok_and(|boot| boot == self.boot);
        is_it && matches!(look(self.pid), Ok(Some(Look { state: 'T', started })) if started == self.started)
    }

    /// Whether that very process still lives; a zombie does not. What cannot be found out counts as alive: to wait for a
    /// dead process does less harm than to take over from a living one.
    pub fn is_alive(&self) -> bool {
        match boot_id() {
            Ok(boot) if boot != self.boot => false,
            Ok(_) | Err(_) => started(self.pid).map_or(true, |started| started == Some(self.started)),
        }
    }
}

fn boot_id() -> io::Result<&'static str> {
    /// No process lives through a boot.
    static BOOT: OnceLock<String> = OnceLock::new();
    if let Some(known) = BOOT.get() {
        return Ok(known);
    }
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    Ok(BOOT.get_or_init(|| text.trim().to_owned()))
}

/// When the process began; `None` when there is none, or only its zombie.
fn started(pid: u32) -> io::Result<Option<u64>> {
    Ok(look(pid)?.map(|look| look.started))
}

/// What the kernel tells of a process that lives.
struct Look {
    /// Field 3 of proc_pid_stat(5).
    state: char,
    started: u64,
}

fn look(pid: u32) -> io::Result<Option<Look>> {
    let stat = match read_made(format!("/proc/{pid}/stat")) {
        Ok(stat) => stat,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        // It ended between open and read.
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return Ok(None),
        Err(error) => return Err(error),
    };
    // The name (field 2) may hold spaces and brackets; what follows its last bracket may not.
    let rest = stat.rsplit_once(')').map(|(_, rest)| rest).unwrap_or_default();
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    match (fields.first().and_then(|state| state.chars().next()), fields.get(19)) {
        (Some('Z' | 'X'), _) => Ok(None),
        (Some(state), Some(start)) => {
            let started = start.parse().map_err(io::Error::other)?;
            Ok(Some(Look { state, started }))
        }
        (_, _) => Err(io::Error::other(format!("/proc/{pid}/stat makes no sense"))),
    }
}

/// Reads a file that the kernel makes up as it is read, in one go. It has no size beforehand, so `std` would read it in
/// pieces, of 32 bytes at first.
///
/// # Errors
/// As for any file; text that is not UTF-8.
pub fn read_made(path: impl AsRef<Path>) -> io::Result<String> {
    let mut text = String::with_capacity(16 << 10);
    // Without the limit the file would be asked for its size.
    File::open(path)?.take(u64::MAX).read_to_string(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_same_process_of_the_same_boot_is_alive() {
        let me = Process::current().unwrap();
        assert!(me.is_alive());
        let reused = Process {
            started: me.started + 1,
            ..me.clone()
        };
        let rebooted = Process {
            boot: "another".into(),
            ..me.clone()
        };
        assert_eq!((reused.is_alive(), rebooted.is_alive()), (false, false));

        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let other = Process::find(child.id()).unwrap().unwrap();
        assert!(other.is_alive() && !other.is_stopped());
        let pid = nix::unistd::Pid::from_raw(child.id() as i32);
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGSTOP).unwrap();
        while !other.is_stopped() {
            std::thread::yield_now();
        }
        assert!(other.is_alive());
        child.kill().unwrap();
        // A zombie until it is awaited.
        while other.is_alive() {
            std::thread::yield_now();
        }
        assert_eq!(Process::find(child.id()).unwrap(), None);
        child.wait().unwrap();
    }
}
