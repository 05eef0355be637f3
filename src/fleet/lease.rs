//! `DATA/fleet/SANDBOX.json`: what the next server must know to go on with a sandbox of this one.
//!
//! Written before the sandbox is told to its client, and whenever its time changes before that is told; withdrawn before
//! its end begins. It is not synced: it need not outlive the kernel, since its sandbox does not. It may hold secrets in
//! `env`, so it is readable by the owner of the data directory alone.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::border::Placeholders;
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
    /// What it holds in the place of its credentials.
    #[serde(default, skip_serializing_if = "Placeholders::is_empty")]
    pub placeholders: Placeholders,
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

/// Where a lease is written before it takes the place of the one before. A killed server may leave it, secrets and all.
fn draft(lease: &Path) -> PathBuf {
    lease.with_extension("new")
}

impl Lease {
    /// Replaces the lease, whole or not at all.
    pub fn write(&self, data_dir: &Path) -> io::Result<()> {
        let path = file(data_dir, &self.spec.id);
        let fresh = draft(&path);
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
    let lease = file(data_dir, id);
    for path in [&draft(&lease), &lease] {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            Ok(()) | Err(_) => {}
        }
    }
    Ok(())
}

/// What is found where a lease may be.
#[derive(Debug, PartialEq)]
pub(super) enum Found {
    Lease(Box<Lease>),
    /// None, no more than a draft, or one that makes no sense to this build.
    None,
    /// It cannot be told now, and why.
    Unread(String),
}

/// All leases, and every sandbox that a file here speaks of.
pub(super) fn all(data_dir: &Path) -> Vec<(SandboxId, Found)> {
    let entries = fs::read_dir(directory(data_dir)).into_iter().flatten().flatten();
    let ids: BTreeSet<SandboxId> = entries
        .filter_map(|entry| Path::new(&entry.file_name()).file_stem()?.to_str()?.parse().ok())
        .collect();
    let lease = |id: SandboxId| {
        let lease = read(data_dir, &id);
        (id, lease)
    };
    ids.into_iter().map(lease).collect()
}

fn read(data_dir: &Path, id: &SandboxId) -> Found {
    let text = match fs::read(file(data_dir, id)) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Found::None,
        Err(error) => return Found::Unread(error.to_string()),
    };
    match serde_json::from_slice::<Lease>(&text) {
        Ok(lease) if lease.format_version == FORMAT_VERSION && lease.spec.id == *id => Found::Lease(Box::new(lease)),
        Ok(_) | Err(_) => Found::None,
    }
}

/// Whether a sandbox whose server is dead is to be left for the next server: until its time is over, and where that cannot
/// be told.
pub fn is_leased(data_dir: &Path, id: &SandboxId, now: Timestamp) -> bool {
    match read(data_dir, id) {
        Found::Lease(lease) => now < lease.expires_at,
        Found::None => false,
        Found::Unread(_) => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_killed_server_was_writing_is_found_and_removed() {
        let data = tempfile::tempdir().unwrap();
        let (half, whole) = (SandboxId::from_bits(1), SandboxId::from_bits(2));
        fs::create_dir(directory(data.path())).unwrap();
        for id in [&half, &whole] {
            fs::write(draft(&file(data.path(), id)), "{").unwrap();
        }
        fs::write(file(data.path(), &whole), "not a lease").unwrap();
        assert_eq!(
            all(data.path()),
            [(half.clone(), Found::None), (whole.clone(), Found::None)]
        );
        for id in [&half, &whole] {
            withdraw(data.path(), id).unwrap();
            withdraw(data.path(), id).unwrap();
        }
        assert_eq!(fs::read_dir(directory(data.path())).unwrap().count(), 0);
    }

    #[test]
    fn what_cannot_be_read_now_may_be_a_lease() {
        let data = tempfile::tempdir().unwrap();
        let id = SandboxId::from_bits(1);
        assert!(!is_leased(data.path(), &id, Timestamp(0)));
        // A directory in its place gives EISDIR to every reader.
        fs::create_dir_all(file(data.path(), &id)).unwrap();
        assert!(is_leased(data.path(), &id, Timestamp(0)));
        let found = all(data.path());
        assert!(matches!(found.as_slice(), [(_, Found::Unread(_))]), "{found:?}");
    }
}
