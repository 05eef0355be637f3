//! Sandboxes that nobody will ever reap: their server is dead and their data directory, with the record of them, is gone.
//!
//! Owns: telling them from all others, and ending them. A record is the first thing of a sandbox and the last, so a control group
//! below our own parent is a stray when no data directory has a record of it: none of those that user ids were taken for, and not
//! the one that its guest's program is from. Who took its user ids must be dead. What cannot be told is left alone. `places` knows
//! the data directories that dead servers had. Must not know: backends. Containers of an engine carry their owner on labels and are
//! not looked for here.

mod places;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::Identity;
use super::cgroup::{self, Hierarchies};
use super::identity::{self, Taken};
use crate::clock::Clock;

pub use places::{Place, places};

/// An empty group may be one that is being made.
const SETTLED: Duration = Duration::from_secs(5);

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
    // The groups first: of one that is there by now, so are the claim and the record.
    let names = hierarchies.names();
    let claims = identity::claims();
    let mut strays = Vec::new();
    for name in names {
        let group = hierarchies.group(&name);
        let pids = group.pids()?;
        let made = group
            .made()
            .and_then(|made| made.duration_since(std::time::UNIX_EPOCH).ok());
        let now = Duration::from_millis(u64::try_from(clock.now().0).unwrap_or_default());
        let found = Found {
            bases: pids.iter().filter_map(|pid| base_of(*pid)).collect(),
            guests_of: pids.iter().filter_map(|pid| places::of_guest(*pid)).collect(),
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
    /// The data directories that its guest's program is from.
    guests_of: Vec<PathBuf>,
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
    let mut known = claims.values().map(|taken| &taken.data_dir).chain(&found.guests_of);
    if known.any(|dir| has_record(dir, name)) {
        return None;
    }
    if found.is_empty {
        return found.is_settled.then_some(None);
    }
    let base = *found.bases.first()?;
    if found.bases.iter().any(|other| *other != base) {
        return None;
    }
    match claims.get(&base) {
        Some(taken) => (!taken.by.is_alive()).then(|| Some((Identity { base }, taken.clone()))),
        // The claim is lost, and the guest alone tells.
        None => (!found.guests_of.is_empty() && found.is_settled).then_some(None),
    }
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
        let judge_of = |bases: &[u32], guest_of: Option<&str>, is_settled, recorded: &str| {
            let found = Found {
                bases: bases.to_vec(),
                guests_of: guest_of.map(PathBuf::from).into_iter().collect(),
                is_settled,
                is_empty: bases.is_empty(),
            };
            judge("sbx_1", &found, &claims, &|dir, _| dir == Path::new(recorded))
        };
        let judge = |bases: &[u32], is_settled, recorded: &str| judge_of(bases, None, is_settled, recorded);
        let stray = Some(Some((Identity { base: 1 << 20 }, dead.clone())));
        assert_eq!(judge(&[1 << 20, 1 << 20], false, ""), stray);
        // A record anywhere, a living taker, nobody's ids, ids of two: not ours to judge.
        assert_eq!(judge(&[1 << 20], true, "/gone"), None);
        assert_eq!(judge(&[1 << 20], true, "/served"), None);
        assert_eq!(judge(&[2 << 20], true, ""), None);
        assert_eq!(judge(&[3 << 20], true, ""), None);
        assert_eq!(judge(&[1 << 20, 2 << 20], true, ""), None);
        // A lost claim: its guest tells, once it is not in the making.
        assert_eq!(judge_of(&[3 << 20], Some("/lost"), true, ""), Some(None));
        assert_eq!(judge_of(&[3 << 20], Some("/lost"), false, ""), None);
        assert_eq!(judge_of(&[3 << 20], Some("/lost"), true, "/lost"), None);
        assert_eq!(judge_of(&[2 << 20], Some("/lost"), true, ""), None);
        // Empty: only once it is not in the making.
        assert_eq!((judge(&[], true, ""), judge(&[], false, "")), (Some(None), None));
    }
}
