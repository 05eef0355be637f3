//! `owner.json`: whose a sandbox is. Written before anything else of a sandbox exists, removed after everything else.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::ids::SandboxId;
use crate::process::Process;
use crate::sandbox::Identity;

/// The record's name in a sandbox's directory.
pub const FILE: &str = "owner.json";

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    pub owner: Process,
    pub identity: Identity,
    /// PID 1 of the sandbox, once it runs the guest.
    pub init: Option<Process>,
}

impl Record {
    /// A sandbox of this process.
    pub fn new(identity: Identity) -> io::Result<Self> {
        Ok(Self {
            owner: Process::current()?,
            identity,
            init: None,
        })
    }

    /// Replaces the record in `dir`, whole or not at all.
    pub fn write(&self, dir: &Path) -> io::Result<()> {
        let fresh = dir.join("owner.json.new");
        fs::write(&fresh, serde_json::to_vec(self)?)?;
        fs::rename(fresh, dir.join(FILE))
    }
}

pub(super) fn read(dir: &Path) -> Option<Record> {
    serde_json::from_slice(&fs::read(dir.join(FILE)).ok()?).ok()
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
    format!(".new-{}-{}-", owner.pid, owner.started)
}

/// Removes what [`found`] left when it was killed. Such a directory has nothing but a record in it.
pub(super) fn sweep(data_dir: &Path) {
    for entry in fs::read_dir(data_dir.join("sandboxes")).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let maker = name.to_str().and_then(|name| {
            let mut numbers = name.strip_prefix(".new-")?.split('-');
            Some((numbers.next()?.parse().ok()?, numbers.next()?.parse::<u64>().ok()?))
        });
        let Some((pid, started)) = maker else { continue };
        let is_gone = Process::find(pid).is_ok_and(|found| found.is_none_or(|found| found.started != started));
        if is_gone {
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
