//! The data directories that dead servers had on this host, whether they are still there or not.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::ids::SandboxId;
use crate::process::Process;
use crate::sandbox::backend::{docker, oci};
use crate::sandbox::cgroup::Hierarchies;
use crate::sandbox::{BackendName, disk, identity};

/// A data directory that is there.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place(PathBuf);

/// `known`, and those that a dead process took user ids for, that have volumes mounted, or whose guest runs.
///
/// # Errors
/// When the mount table cannot be read.
pub fn places(known: &Path, hierarchies: &Hierarchies) -> io::Result<Vec<Place>> {
    let of_dead = identity::claims()
        .into_values()
        .filter(|taken| !taken.by.is_alive())
        .map(|taken| taken.data_dir);
    let mounts = disk::mounts_below(Path::new("/"))?;
    let mounted = mounts.iter().filter_map(|point| of_mount(point));
    let groups = hierarchies.names().into_iter();
    let guests = groups
        .flat_map(|name| hierarchies.group(&name).pids().unwrap_or_default())
        .filter_map(of_guest);
    let known = fs::canonicalize(known);
    let all: BTreeSet<PathBuf> = of_dead.chain(mounted).chain(guests).chain(known).collect();
    Ok(all.into_iter().filter(|dir| dir.is_dir()).map(Place).collect())
}

impl Place {
    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn is(&self, data_dir: &Path) -> bool {
        fs::canonicalize(data_dir).is_ok_and(|data_dir| data_dir == self.0)
    }

    /// Whether nothing but what is mounted was left of it when it was removed.
    pub fn is_ruin(&self) -> bool {
        !self.0.join("sandboxes").exists()
    }

    /// The sandboxes of `backend` here whose maker is dead: the next server ends them, or goes on with them.
    pub fn left_behind(&self, backend: BackendName) -> Vec<SandboxId> {
        let file = match backend {
            BackendName::Oci => oci::RECORD,
            BackendName::Docker => docker::RECORD,
        };
        let sandboxes = fs::read_dir(self.0.join("sandboxes")).into_iter().flatten().flatten();
        sandboxes
            .filter(|sandbox| owner(&sandbox.path().join(file)).is_some_and(|owner| !owner.is_alive()))
            .filter_map(|sandbox| sandbox.file_name().to_str()?.parse().ok())
            .collect()
    }
}

/// Who made a sandbox, as its record says in every backend.
fn owner(record: &Path) -> Option<Process> {
    #[derive(Deserialize)]
    struct Owned {
        owner: Process,
    }
    serde_json::from_slice::<Owned>(&fs::read(record).ok()?)
        .ok()
        .map(|owned| owned.owner)
}

/// The data directory of a volume, which is mounted at `DATA/work/NAME/disk`.
fn of_mount(point: &Path) -> Option<PathBuf> {
    let name = point.parent()?;
    let work = name.parent()?;
    let is_one =
        point.ends_with("disk") && work.ends_with("work") && name.file_name()?.to_str()?.parse::<SandboxId>().is_ok();
    is_one.then(|| work.parent().map(Path::to_owned)).flatten()
}

/// The data directory that a guest's program is from, which is `DATA/bin/guest-HASH`; `None` too where it may be one of another
/// mount namespace, as of a server in a container.
pub(super) fn of_guest(pid: i32) -> Option<PathBuf> {
    let link = format!("/proc/{pid}/exe");
    let shown = fs::read_link(&link).ok()?;
    let (program, is_gone) = match shown.to_str()?.strip_suffix(" (deleted)") {
        Some(program) => (PathBuf::from(program), true),
        None => (shown, false),
    };
    let file = |path: &Path| fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
    let is_here = match is_gone {
        // Where its place is still there, the program was replaced, not the directory removed.
        true => !program.parent()?.exists(),
        false => file(&program).is_some_and(|found| file(Path::new(&link)) == Some(found)),
    };
    is_here.then(|| of_program(&program)).flatten()
}

fn of_program(program: &Path) -> Option<PathBuf> {
    let bin = program.parent()?;
    let is_one = bin.ends_with("bin") && program.file_name()?.to_str()?.starts_with("guest-");
    is_one.then(|| bin.parent().map(Path::to_owned)).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_data_directory_is_known_by_its_mounts_and_its_guest() {
        let id = SandboxId::random();
        let of = |path: String| of_mount(Path::new(&path));
        assert_eq!(of(format!("/srv/x/work/{id}/disk")), Some("/srv/x".into()));
        for other in [
            format!("/srv/x/work/{id}"),
            format!("/srv/x/work/{id}/disks"),
            format!("/srv/x/home/{id}/disk"),
            "/srv/x/work/mine/disk".to_owned(),
            "/disk".to_owned(),
        ] {
            assert_eq!(of(other), None);
        }
        assert_eq!(of_program(Path::new("/srv/x/bin/guest-0123")), Some("/srv/x".into()));
        for other in ["/srv/x/guest-0123", "/srv/bin/guest", "/guest-0123"] {
            assert_eq!(of_program(Path::new(other)), None);
        }
        // This process is no guest.
        assert_eq!(of_guest(std::process::id() as i32), None);
    }

    #[test]
    fn only_what_the_dead_made_is_left_behind() {
        let data = tempfile::tempdir().unwrap();
        let me = Process::current().unwrap();
        let dead = Process {
            started: me.started + 1,
            ..me.clone()
        };
        let make = |owner: &Process, file: &str| {
            let id = SandboxId::random();
            let dir = data.path().join("sandboxes").join(id.as_str());
            fs::create_dir_all(&dir).unwrap();
            fs::write(
                dir.join(file),
                serde_json::json!({ "owner": owner, "more": 1 }).to_string(),
            )
            .unwrap();
            id
        };
        let of_oci = make(&dead, oci::RECORD);
        let of_docker = make(&dead, docker::RECORD);
        make(&me, oci::RECORD);
        let place = Place(data.path().to_owned());
        assert_eq!(place.left_behind(BackendName::Oci), [of_oci]);
        assert_eq!(place.left_behind(BackendName::Docker), [of_docker]);
    }
}
