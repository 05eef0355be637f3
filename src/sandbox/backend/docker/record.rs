//! `docker.json`: whose a sandbox is. Written before anything else of a sandbox exists, removed after everything else.

use std::fs;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::ids::SandboxId;
use crate::process::Process;
use crate::sandbox::{Identity, Isolation, Limits};

/// The record's name in a sandbox's directory.
pub const FILE: &str = "docker.json";

/// What is kept of a sandbox so that a later process can find and judge it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    pub owner: Process,
    pub identity: Identity,
    pub limits: Limits,
    /// Whether `/workspace` is a directory of the host.
    #[serde(default)]
    pub has_workspace: bool,
    #[serde(default = "container")]
    pub isolation: Isolation,
}

/// What a record without the field is of.
fn container() -> Isolation {
    Isolation::Container
}

impl Record {
    /// Replaces the record in `directory`, whole or not at all.
    pub fn write(&self, directory: &Path) -> io::Result<()> {
        let unfinished = directory.join("docker.new");
        fs::write(&unfinished, serde_json::to_vec(self)?)?;
        fs::rename(unfinished, directory.join(FILE))
    }
}

pub fn read(directory: &Path) -> io::Result<Record> {
    let bytes = fs::read(directory.join(FILE))?;
    serde_json::from_slice(&bytes).map_err(io::Error::other)
}

/// Sandboxes of this backend that have a directory, also when their container never came to be.
pub fn list(sandboxes: &Path) -> io::Result<Vec<(SandboxId, Record)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(sandboxes)? {
        let entry = entry?;
        let Some(id) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        match read(&entry.path()) {
            Ok(record) => found.push((id, record)),
            // Another backend's, or gone meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(found)
}
