//! `DATA/snapshots/SNAPSHOT/`: a sandbox with all that ran in it, to make others from.
//!
//! The directory holds what the backend wrote of its memory, and `kept.json`: the files that belong to it and what a sandbox
//! must be like to go on from it. It appears whole, by one rename, and is there until it is deleted. It is as confidential as
//! that memory, and is readable by the owner of the data directory alone.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::Error;
use super::ask::Shape;
use crate::clock::Timestamp;
use crate::ids::{SandboxId, SnapshotId};
use crate::workspace::Revision;

const FORMAT_VERSION: u32 = 1;
const FACTS: &str = "kept.json";
/// Of one that is not whole yet.
const UNFINISHED: &str = "new";
/// Snapshots that there may be: each takes as much disk as its sandbox had memory in use.
const MOST: usize = 64;

/// What is known of a snapshot beside its memory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Kept {
    format_version: u32,
    pub sandbox: SandboxId,
    pub created_at: Timestamp,
    pub policy: String,
    pub shape: Shape,
    /// Of every command; may hold secrets.
    pub env: BTreeMap<String, String>,
    /// The files as they were in the same moment.
    pub workspace: Revision,
}

impl Kept {
    pub fn new(
        (sandbox, created_at): (SandboxId, Timestamp),
        policy: String,
        shape: Shape,
        env: BTreeMap<String, String>,
        workspace: Revision,
    ) -> Self {
        Self {
            format_version: FORMAT_VERSION,
            sandbox,
            created_at,
            policy,
            shape,
            env,
            workspace,
        }
    }
}

/// A snapshot as clients see it.
#[derive(Debug, Clone, PartialEq)]
pub struct SnapshotInfo {
    pub id: SnapshotId,
    pub sandbox: SandboxId,
    pub created_at: Timestamp,
    pub policy: String,
    pub workspace: Revision,
    /// On disk.
    pub bytes: u64,
}

/// A snapshot in the making; removed when it is dropped before it is whole.
#[derive(Debug)]
pub(super) struct Draft {
    id: SnapshotId,
    dir: PathBuf,
}

impl Drop for Draft {
    fn drop(&mut self) {
        // Finished, it has gone from here.
        let _ = fs::remove_dir_all(&self.dir);
    }
}

impl Draft {
    /// # Errors
    /// [`Error::TooManySnapshots`].
    pub fn begin(data_dir: &Path) -> Result<Self, Error> {
        if list(data_dir)?.len() >= MOST {
            return Err(Error::TooManySnapshots(MOST));
        }
        let id = SnapshotId::random();
        let dir = place(data_dir, &id).with_extension(UNFINISHED);
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir);
        made.map_err(Error::Snapshot)?;
        Ok(Self { id, dir })
    }

    /// Where the backend writes.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Makes it whole; durable on return.
    pub fn finish(self, kept: &Kept) -> Result<SnapshotId, Error> {
        let finish = || {
            let mut facts = fs::OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(self.dir.join(FACTS))?;
            serde_json::to_writer(&mut facts, kept)?;
            for file in fs::read_dir(&self.dir)? {
                fs::File::open(file?.path())?.sync_all()?;
            }
            fs::File::open(&self.dir)?.sync_all()?;
            fs::rename(&self.dir, self.dir.with_extension(""))?;
            match self.dir.parent() {
                Some(all) => fs::File::open(all)?.sync_all(),
                None => Ok(()),
            }
        };
        finish().map_err(Error::Snapshot)?;
        Ok(self.id.clone())
    }
}

fn all(data_dir: &Path) -> PathBuf {
    data_dir.join("snapshots")
}

fn place(data_dir: &Path, id: &SnapshotId) -> PathBuf {
    all(data_dir).join(id.as_str())
}

/// What is known of a snapshot, and where its memory is.
///
/// # Errors
/// [`Error::NoSnapshot`].
pub(super) fn find(data_dir: &Path, id: &SnapshotId) -> Result<(Kept, PathBuf), Error> {
    let dir = place(data_dir, id);
    let text = match fs::read(dir.join(FACTS)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(Error::NoSnapshot(id.to_string())),
        text => text.map_err(Error::Snapshot)?,
    };
    let kept: Kept = serde_json::from_slice(&text).map_err(|error| Error::Snapshot(error.into()))?;
    match kept.format_version {
        FORMAT_VERSION => Ok((kept, dir)),
        other => Err(Error::SnapshotUnfit {
            snapshot: id.clone(),
            reason: format!("it is of format {other}, and this server reads {FORMAT_VERSION}"),
        }),
    }
}

/// All that are whole, newest first.
pub(super) fn list(data_dir: &Path) -> Result<Vec<SnapshotInfo>, Error> {
    let mut found = Vec::new();
    for id in names(data_dir)?
        .iter()
        .filter_map(|name| name.parse::<SnapshotId>().ok())
    {
        // One that cannot be read is there all the same, and can be deleted.
        let Ok((kept, dir)) = find(data_dir, &id) else { continue };
        found.push(SnapshotInfo {
            id,
            sandbox: kept.sandbox,
            created_at: kept.created_at,
            policy: kept.policy,
            workspace: kept.workspace,
            bytes: size(&dir),
        });
    }
    found.sort_by(|a, b| (b.created_at, &b.id).cmp(&(a.created_at, &a.id)));
    Ok(found)
}

fn names(data_dir: &Path) -> Result<Vec<String>, Error> {
    match fs::read_dir(all(data_dir)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(Error::Snapshot(error)),
        Ok(entries) => {
            let names = entries.flatten().map(|entry| entry.file_name().into_string());
            Ok(names.flatten().collect())
        }
    }
}

fn size(dir: &Path) -> u64 {
    let files = fs::read_dir(dir).into_iter().flatten().flatten();
    files
        .filter_map(|file| file.metadata().ok())
        .map(|file| file.len())
        .sum()
}

/// Removes one; whether there was one. Sandboxes that were made from it stay.
pub(super) fn delete(data_dir: &Path, id: &SnapshotId) -> Result<bool, Error> {
    let (dir, gone) = (place(data_dir, id), place(data_dir, id).with_extension(UNFINISHED));
    // By a rename first: half of one is none.
    match fs::rename(&dir, &gone).and_then(|()| fs::remove_dir_all(&gone)) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(Error::Snapshot(error)),
    }
}

/// Removes what an earlier server did not finish.
pub(super) fn sweep(data_dir: &Path) {
    for name in names(data_dir).unwrap_or_default() {
        let path = all(data_dir).join(name);
        if path.extension().is_some_and(|extension| extension == UNFINISHED)
            && let Err(error) = fs::remove_dir_all(&path)
        {
            tracing::warn!(path = %path.display(), %error, "an unfinished snapshot stays");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Policies;
    use crate::sandbox::{BackendName, ImageRef};

    fn kept(data_dir: &Path) -> Kept {
        let policy = Policies::named("default", data_dir).unwrap();
        let shape = Shape {
            backend: BackendName::Oci,
            image: ImageRef::Host,
            isolation: policy.isolation(),
            limits: policy.limits().clone(),
            mounts: Vec::new(),
            seccomp: policy.seccomp(),
        };
        let tree: crate::workspace::TreeId = "0".repeat(64).parse().unwrap();
        Kept::new(
            (SandboxId::random(), Timestamp(7)),
            "default".into(),
            shape,
            [("NAME".to_owned(), "value".to_owned())].into(),
            tree.into(),
        )
    }

    #[test]
    fn a_snapshot_is_there_whole_until_it_is_deleted() {
        let data = tempfile::tempdir().unwrap();
        let unfinished = Draft::begin(data.path()).unwrap();
        let draft = Draft::begin(data.path()).unwrap();
        fs::write(draft.dir().join("pages"), [0; 1000]).unwrap();
        assert_eq!(list(data.path()).unwrap(), []);
        let kept = kept(data.path());
        let id = draft.finish(&kept).unwrap();
        let (found, dir) = find(data.path(), &id).unwrap();
        assert_eq!((found, dir.join("pages").exists()), (kept, true));
        let listed = list(data.path()).unwrap();
        assert!(
            listed.len() == 1 && listed[0].id == id && listed[0].bytes > 1000,
            "{listed:?}"
        );

        // As after `kill -9`.
        std::mem::forget(unfinished);
        assert_eq!(names(data.path()).unwrap().len(), 2);
        sweep(data.path());
        assert_eq!(names(data.path()).unwrap(), [id.to_string()]);

        assert!(delete(data.path(), &id).unwrap());
        assert!(!delete(data.path(), &id).unwrap());
        assert!(matches!(find(data.path(), &id), Err(Error::NoSnapshot(_))));
    }
}
