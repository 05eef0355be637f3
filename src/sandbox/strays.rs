//! Sandboxes that nobody will ever reap: their server is dead and their data directory, with the record of them, is gone.
//!
//! Owns: telling them from all others, and ending them. A control group below our own parent is a stray when no data directory that a
//! living process serves, or that still exists with a record of it, has it, and when who took its user ids is dead. What cannot be
//! told is left alone. Must not know: backends. Containers of an engine carry their owner on labels and are not looked for here.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::Identity;
use super::cgroup::{self, Hierarchies};
use super::identity::{self, Taken};
use crate::clock::Clock;

/// An empty group may be one that is being made.
const SETTLED: Duration = Duration::from_secs(60);

/// A sandbox without an owner.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stray {
    /// Of its control group.
    pub name: String,
    pub pids: Vec<i32>,
    /// Whose it was, where that is known.
    pub taken: Option<(Identity, Taken)>,
}

/// Finds them on this host, whichever data directories they had.
///
/// # Errors
/// When the control groups cannot be read.
pub fn find(hierarchies: &Hierarchies, clock: &dyn Clock) -> Result<Vec<Stray>, cgroup::Error> {
    let claims = identity::claims();
    let mut strays = Vec::new();
    for name in hierarchies.names() {
        let group = hierarchies.group(&name);
        let pids = group.pids()?;
        let made = group
            .made()
            .and_then(|made| made.duration_since(std::time::UNIX_EPOCH).ok());
        let now = Duration::from_millis(u64::try_from(clock.now().0).unwrap_or_default());
        let found = Found {
            bases: pids.iter().filter_map(|pid| base_of(*pid)).collect(),
            is_settled: made.is_some_and(|made| now.saturating_sub(made) > SETTLED),
            is_empty: pids.is_empty(),
        };
        if let Some(taken) = judge(&name, &found, &claims, &has_record) {
            strays.push(Stray { name, pids, taken });
        }
    }
    Ok(strays)
}

/// What is known of a group.
struct Found {
    /// First ids of its processes' ranges.
    bases: Vec<u32>,
    is_settled: bool,
    is_empty: bool,
}

fn has_record(data_dir: &Path, name: &str) -> bool {
    data_dir.join("sandboxes").join(name).exists()
}

/// `Some` for a stray, with its claim where there is one.
fn judge(
    name: &str,
    found: &Found,
    claims: &BTreeMap<u32, Taken>,
    has_record: &dyn Fn(&Path, &str) -> bool,
) -> Option<Option<(Identity, Taken)>> {
    if claims.values().any(|taken| has_record(&taken.data_dir, name)) {
        return None;
    }
    if found.is_empty {
        return found.is_settled.then_some(None);
    }
    let base = *found.bases.first()?;
    let taken = claims.get(&base)?;
    if found.bases.iter().any(|other| *other != base) || taken.by.is_alive() {
        return None;
    }
    Some(Some((Identity { base }, taken.clone())))
}

/// The first host id of a process's user namespace; `None` for the host's own.
fn base_of(pid: i32) -> Option<u32> {
    let map = fs::read_to_string(format!("/proc/{pid}/uid_map")).ok()?;
    let numbers: Vec<u32> = map.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    match numbers.as_slice() {
        [0, base, size] if *size == Identity::RANGE => Some(*base),
        _ => None,
    }
}

/// Whether any process of any sandbox has these ids.
pub(super) fn is_inhabited(identity: Identity) -> bool {
    let Ok(hierarchies) = Hierarchies::detect() else {
        return false;
    };
    hierarchies.names().iter().any(|name| {
        let pids = hierarchies.group(name).pids().unwrap_or_default();
        pids.iter().any(|pid| base_of(*pid) == Some(identity.base))
    })
}

/// Ends its processes and removes its group and its claim.
///
/// # Errors
/// When a process or a group stays.
pub fn end(hierarchies: &Hierarchies, stray: &Stray) -> Result<(), cgroup::Error> {
    hierarchies.group(&stray.name).remove()?;
    if let Some((identity, taken)) = &stray.taken {
        identity::forget(*identity, taken);
    }
    Ok(())
}

/// Data directories whose working directories are still mounted though they may have no server any more: found by where the
/// mounts are, `DATA/work/NAME/disk`. Who sweeps those removes only what the dead left.
///
/// # Errors
/// When the mount table cannot be read.
pub fn mounted() -> std::io::Result<Vec<PathBuf>> {
    let mut dirs: Vec<PathBuf> = super::disk::mounts_below(Path::new("/"))?
        .iter()
        .filter_map(|point| data_dir_of(point))
        .collect();
    dirs.sort();
    dirs.dedup();
    Ok(dirs)
}

fn data_dir_of(point: &Path) -> Option<PathBuf> {
    let name = point.parent()?;
    let work = name.parent()?;
    let is_one = point.ends_with("disk")
        && work.ends_with("work")
        && name.file_name()?.to_str()?.parse::<crate::ids::SandboxId>().is_ok();
    is_one.then(|| work.parent().map(Path::to_owned)).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::Process;

    fn taken(started: u64, data_dir: &str) -> Taken {
        let me = Process::current().unwrap();
        Taken {
            by: Process {
                started: me.started + started,
                ..me
            },
            data_dir: data_dir.into(),
        }
    }

    #[test]
    fn only_what_nobody_can_own_is_a_stray() {
        let (dead, living) = (taken(1, "/gone"), taken(0, "/served"));
        let claims = BTreeMap::from([(1 << 20, dead.clone()), (2 << 20, living)]);
        let judge = |bases: &[u32], is_settled, recorded: &str| {
            let found = Found {
                bases: bases.to_vec(),
                is_settled,
                is_empty: bases.is_empty(),
            };
            judge("sbx_1", &found, &claims, &|dir, _| dir == Path::new(recorded))
        };
        let stray = Some(Some((Identity { base: 1 << 20 }, dead.clone())));
        assert_eq!(judge(&[1 << 20, 1 << 20], false, ""), stray);
        // A record anywhere, a living taker, nobody's ids, ids of two: not ours to judge.
        assert_eq!(judge(&[1 << 20], true, "/gone"), None);
        assert_eq!(judge(&[1 << 20], true, "/served"), None);
        assert_eq!(judge(&[2 << 20], true, ""), None);
        assert_eq!(judge(&[3 << 20], true, ""), None);
        assert_eq!(judge(&[1 << 20, 2 << 20], true, ""), None);
        // Empty: only once it is not in the making.
        assert_eq!((judge(&[], true, ""), judge(&[], false, "")), (Some(None), None));
    }

    #[test]
    fn a_data_directory_is_known_by_its_mounts() {
        let id = crate::ids::SandboxId::random();
        let of = |path: String| data_dir_of(Path::new(&path));
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
    }
}
