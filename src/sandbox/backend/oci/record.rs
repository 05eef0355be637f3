//! `owner.json`: whose a sandbox is. Written before anything else of a sandbox exists, removed after everything else.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::ids::SandboxId;
use crate::sandbox::Identity;

/// A process that cannot be mistaken for a later one with the same number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Process {
    pub pid: i32,
    /// Clock ticks after boot.
    start: u64,
}

impl Process {
    pub fn this() -> Self {
        let pid = std::process::id() as i32;
        // /proc/self cannot vanish under the process that reads it.
        Self::find(pid).unwrap_or(Self { pid, start: 0 })
    }

    /// The process that has this number now; `None` for none, or one that has ended and was not awaited yet.
    pub fn find(pid: i32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name, in parentheses, may hold anything.
        let mut fields = stat.rsplit_once(") ")?.1.split(' ');
        let state = fields.next()?;
        // Field 22 of proc_pid_stat(5); the state is field 3.
        let start = fields.nth(18)?.parse().ok()?;
        (!matches!(state, "Z" | "X")).then_some(Self { pid, start })
    }

    pub fn is_alive(&self) -> bool {
        Self::find(self.pid).as_ref() == Some(self)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    owner: Process,
    /// Process numbers mean something within one boot only.
    boot: String,
    pub identity: Identity,
    /// PID 1 of the sandbox, once it runs the guest.
    pub init: Option<Process>,
}

impl Record {
    /// A sandbox of this process.
    pub fn new(identity: Identity) -> Self {
        Self {
            owner: Process::this(),
            boot: boot_id(),
            identity,
            init: None,
        }
    }

    pub fn owner_is_alive(&self) -> bool {
        self.boot == boot_id() && self.owner.is_alive()
    }

    /// Replaces the record in `dir`, whole or not at all.
    pub fn write(&self, dir: &Path) -> io::Result<()> {
        let fresh = dir.join("owner.json.new");
        fs::write(&fresh, serde_json::to_vec(self)?)?;
        fs::rename(fresh, dir.join("owner.json"))
    }
}

fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .unwrap_or_default()
        .trim()
        .to_owned()
}

pub(super) fn read(dir: &Path) -> Option<Record> {
    serde_json::from_slice(&fs::read(dir.join("owner.json")).ok()?).ok()
}

/// Makes `dir` with the record in it, both at once. `AlreadyExists` when there is one.
pub(super) fn found(dir: &Path, record: &Record) -> io::Result<()> {
    let parent = dir.parent().unwrap_or(dir);
    let fresh = tempfile::Builder::new()
        .prefix(&prefix(&record.owner))
        .tempdir_in(parent)?;
    record.write(fresh.path())?;
    match fs::rename(fresh.path(), dir) {
        Ok(()) => {
            // It bears another name now; nothing is left to remove.
            let _ = fresh.keep();
            Ok(())
        }
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::AlreadyExists
            ) =>
        {
            Err(io::ErrorKind::AlreadyExists.into())
        }
        Err(error) => Err(error),
    }
}

fn prefix(owner: &Process) -> String {
    format!(".new-{}-{}-", owner.pid, owner.start)
}

/// Removes what [`found`] left when it was killed. Such a directory has nothing but a record in it.
pub(super) fn sweep(data_dir: &Path) {
    for entry in fs::read_dir(data_dir.join("sandboxes")).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let maker = name.to_str().and_then(|name| {
            let mut numbers = name.strip_prefix(".new-")?.split('-');
            Some(Process {
                pid: numbers.next()?.parse().ok()?,
                start: numbers.next()?.parse().ok()?,
            })
        });
        if maker.is_some_and(|maker| !maker.is_alive()) {
            // Tried again at the next start.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// All sandboxes in a directory, sorted; without a record where that cannot be read.
pub(super) fn list(sandboxes: &Path) -> Vec<(SandboxId, Option<Record>)> {
    let entries = fs::read_dir(sandboxes).into_iter().flatten().flatten();
    let mut found: Vec<(SandboxId, PathBuf)> = entries
        .filter_map(|entry| Some((entry.file_name().to_str()?.parse().ok()?, entry.path())))
        .collect();
    found.sort();
    found.into_iter().map(|(id, dir)| (id, read(&dir))).collect()
}
