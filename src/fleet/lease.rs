//! `DATA/fleet/SANDBOX.json`: what the next server must know to go on with a sandbox of this one.
//!
//! Written before the sandbox is told to its client, and whenever its time changes before that is told; withdrawn before
//! its end begins. It is not synced: it need not outlive the kernel, since its sandbox does not. It may hold secrets in
//! `env`, so it is readable by the owner of the data directory alone.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::clock::Timestamp;
use crate::ids::SandboxId;
use crate::sandbox::seccomp::Profile;
use crate::sandbox::{BackendName, Spec};

/// What leases of this build are written in.
pub(super) const FORMAT_VERSION: u32 = 1;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Lease {
    pub format_version: u32,
    pub backend: BackendName,
    pub spec: Spec,
    /// The filter that its commands get.
    pub seccomp: Profile,
    pub policy_name: String,
    pub policy_hash: String,
    /// The policy as it was, canonical.
    pub policy: serde_json::Value,
    pub labels: BTreeMap<String, String>,
    pub env: BTreeMap<String, String>,
    pub created_at: Timestamp,
    pub expires_at: Timestamp,
    pub idle_timeout: Option<Duration>,
    pub paused: bool,
    pub from_pool: bool,
    pub key: Option<Key>,
}

/// A client's key, and the request that it stands for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Key {
    pub key: String,
    pub body_hash: String,
}

fn directory(data_dir: &Path) -> PathBuf {
    data_dir.join("fleet")
}

fn file(data_dir: &Path, id: &SandboxId) -> PathBuf {
    directory(data_dir).join(format!("{id}.json"))
}

impl Lease {
    /// Replaces the lease, whole or not at all.
    pub fn write(&self, data_dir: &Path) -> io::Result<()> {
        let path = file(data_dir, &self.spec.id);
        let fresh = path.with_extension("new");
        let text = serde_json::to_vec(self)?;
        let put = || {
            let mut file = fs::OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .open(&fresh)?;
            file.write_all(&text)
        };
        match put() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                fs::DirBuilder::new()
                    .recursive(true)
                    .mode(0o700)
                    .create(directory(data_dir))?;
                put()?;
            }
            other => other?,
        }
        fs::rename(fresh, path)
    }
}

/// Removes a lease; fine when there is none.
pub(super) fn withdraw(data_dir: &Path, id: &SandboxId) -> io::Result<()> {
    match fs::remove_file(file(data_dir, id)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// All leases; without one where it cannot be read.
pub(super) fn all(data_dir: &Path) -> Vec<(SandboxId, Option<Lease>)> {
    let entries = fs::read_dir(directory(data_dir)).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| {
            let name = entry.file_name();
            let id: SandboxId = name.to_str()?.strip_suffix(".json")?.parse().ok()?;
            let lease = read(data_dir, &id);
            Some((id, lease))
        })
        .collect()
}

fn read(data_dir: &Path, id: &SandboxId) -> Option<Lease> {
    let lease: Lease = serde_json::from_slice(&fs::read(file(data_dir, id)).ok()?).ok()?;
    (lease.format_version == FORMAT_VERSION && lease.spec.id == *id).then_some(lease)
}

/// Whether a sandbox whose server is dead is to be left for the next server: until its time is over.
pub fn is_leased(data_dir: &Path, id: &SandboxId, now: Timestamp) -> bool {
    read(data_dir, id).is_some_and(|lease| now < lease.expires_at)
}
