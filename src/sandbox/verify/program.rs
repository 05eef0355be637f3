//! What the kernel says of a program: of one that the guest started as it starts all, before the sandbox is handed out.

use super::process::{field, ids, powers};
use super::{Breach, SETS};
use crate::sandbox::cgroup::Group;

/// Compares the process that is `pid` inside with what every program is to be: `uid` and no other, without any power, with a
/// system-call filter.
///
/// # Errors
/// Everything that is weaker than asked; what cannot be read counts as that.
pub fn program(group: &Group, pid: u32, uid: u32) -> Result<(), Vec<Breach>> {
    let unknown = |found: String| vec![Breach::new("a program", "to be known", found)];
    let inside = group.pids().map_err(|error| unknown(crate::error::chain(&error)))?;
    let mut statuses = inside
        .into_iter()
        .filter_map(|pid| std::fs::read_to_string(format!("/proc/{pid}/status")).ok());
    let status = statuses.find(|status| is_inside(status, pid));
    let status = status.ok_or_else(|| unknown("it is not in the sandbox's group".to_owned()))?;
    let breaches = breaches(&status, uid);
    if breaches.is_empty() { Ok(()) } else { Err(breaches) }
}

/// Its number in the innermost namespace is the last.
fn is_inside(status: &str, pid: u32) -> bool {
    let numbers = field(status, "NSpid").unwrap_or_default();
    numbers.split_whitespace().next_back() == Some(&pid.to_string())
}

fn breaches(status: &str, uid: u32) -> Vec<Breach> {
    let mut found = ids(status, uid, &[uid]);
    found.extend(powers(status, [0; SETS], true));
    for breach in &mut found {
        breach.wall.insert_str(0, "of a program: ");
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: &str = "Name:\tguest\nUid:\t7000\t7000\t7000\t7000\nGid:\t7000\t7000\t7000\t7000\nGroups:\t \n\
        NSpid:\t812\t3\nCapInh:\t0000000000000000\nCapPrm:\t0000000000000000\nCapEff:\t0000000000000000\n\
        CapBnd:\t0000000000000000\nCapAmb:\t0000000000000000\nNoNewPrivs:\t1\nSeccomp:\t2\n";

    #[test]
    fn each_wall_that_a_program_lacks_is_named() {
        assert_eq!(breaches(STATUS, 7000), []);
        assert!(is_inside(STATUS, 3) && !is_inside(STATUS, 812));
        let walls = |from: &str, to: &str| {
            assert!(STATUS.contains(from));
            let found = breaches(&STATUS.replace(from, to), 7000);
            found.into_iter().map(|breach| breach.wall).collect::<Vec<_>>()
        };
        for (from, to, wall) in [
            ("Uid:\t7000", "Uid:\t0", "of a program: Uid"),
            ("Groups:\t", "Groups:\t0", "of a program: groups"),
            (
                "CapBnd:\t0000000000000000",
                "CapBnd:\t00000000000000c0",
                "of a program: capabilities CapBnd",
            ),
            ("NoNewPrivs:\t1", "NoNewPrivs:\t0", "of a program: no_new_privs"),
            ("Seccomp:\t2", "Seccomp:\t0", "of a program: system-call filter"),
        ] {
            assert_eq!(walls(from, to), [wall], "{to}");
        }
    }
}
