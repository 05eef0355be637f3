//! Who the first process is, what it may do, and what it is held to.

use super::facts::Facts;
use super::{Breach, Expected, SETS};
use crate::sandbox::Identity;
use crate::sandbox::cgroup::{Devices, quota_us, within_a_page};

const NAMES: [&str; SETS] = ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"];

pub(super) fn breaches(facts: &Facts, expected: &Expected) -> Vec<Breach> {
    let mut found = identity(facts, expected);
    for name in &facts.shared {
        found.push(Breach::new(format!("namespace {name}"), "its own", "the host's"));
    }
    found.extend(powers(&facts.status, expected.capabilities, expected.filtered));
    for (name, most) in &expected.rlimits {
        found.extend(rlimit(&facts.limits, name, *most));
    }
    match facts.oom_score_adj.trim().parse::<i32>() {
        Ok(score) if score >= expected.oom_score_adj => {}
        _ => found.push(Breach::new(
            "oom_score_adj",
            format!("{} or more", expected.oom_score_adj),
            facts.oom_score_adj.trim(),
        )),
    }
    if let Some(wanted) = expected.hostname.filter(|wanted| facts.hostname != *wanted) {
        found.push(Breach::new("host name", wanted, &facts.hostname));
    }
    found.extend(group(facts, expected));
    found
}

/// A field of `/proc/PID/status`.
pub(super) fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    let rest = |line: &'a str| line.strip_prefix(name)?.strip_prefix(':');
    status.lines().find_map(rest).map(str::trim)
}

/// uid and gid, and groups among those that are known.
pub(super) fn ids(status: &str, uid: u32, known: &[u32]) -> Vec<Breach> {
    let mut breaches = Vec::new();
    let wanted = uid.to_string();
    for name in ["Uid", "Gid"] {
        // Real, effective, saved and of the file system.
        let found = field(status, name).unwrap_or("unknown");
        let ids: Vec<&str> = found.split_whitespace().collect();
        if ids.len() != 4 || ids.iter().any(|id| *id != wanted) {
            breaches.push(Breach::new(name, &wanted, found));
        }
    }
    let groups = field(status, "Groups").unwrap_or("unknown");
    let is_known = |group: &str| group.parse().is_ok_and(|group| known.contains(&group));
    if !groups.split_whitespace().all(is_known) {
        breaches.push(Breach::new("groups", format!("{known:?} at most"), groups));
    }
    breaches
}

fn identity(facts: &Facts, expected: &Expected) -> Vec<Breach> {
    let mut breaches = ids(&facts.status, expected.uid, &expected.groups);
    if let Some(identity) = expected.user_namespace {
        let wanted = ["0".to_owned(), identity.base.to_string(), Identity::RANGE.to_string()];
        for (name, map) in [("uid_map", &facts.uid_map), ("gid_map", &facts.gid_map)] {
            let numbers: Vec<&str> = map.split_whitespace().collect();
            if numbers != wanted {
                breaches.push(Breach::new(name, wanted.join(" "), numbers.join(" ")));
            }
        }
    }
    breaches
}

pub(super) fn powers(status: &str, capabilities: [u64; SETS], filtered: bool) -> Vec<Breach> {
    let mut breaches = Vec::new();
    for (name, most) in NAMES.into_iter().zip(capabilities) {
        let text = field(status, name).unwrap_or("unknown");
        match u64::from_str_radix(text, 16) {
            Ok(set) if set & !most == 0 => {}
            Ok(_) | Err(_) => breaches.push(Breach::new(
                format!("capabilities {name}"),
                format!("{most:x} at most"),
                text,
            )),
        }
    }
    if field(status, "NoNewPrivs") != Some("1") {
        let found = field(status, "NoNewPrivs").unwrap_or("unknown");
        breaches.push(Breach::new("no_new_privs", "1", found));
    }
    if filtered && field(status, "Seccomp") != Some("2") {
        let found = field(status, "Seccomp").unwrap_or("unknown");
        breaches.push(Breach::new("system-call filter", "2", found));
    }
    breaches
}

/// `limits` as in proc_pid_limits(5): the name, then the soft and the hard limit.
fn rlimit(limits: &str, name: &str, most: u64) -> Option<Breach> {
    let line = limits.lines().find_map(|line| line.strip_prefix(name));
    let values: Vec<&str> = line.unwrap_or_default().split_whitespace().take(2).collect();
    let held = |value: &&str| value.parse::<u64>().is_ok_and(|value| value <= most);
    match values.as_slice() {
        [_, _] if values.iter().all(held) => None,
        _ => Some(Breach::new(name, format!("{most} at most"), values.join(" "))),
    }
}

fn group(facts: &Facts, expected: &Expected) -> Vec<Breach> {
    let mut breaches = Vec::new();
    if facts.group != expected.group {
        breaches.push(Breach::new("control group", &expected.group, &facts.group));
    }
    let (limits, enforced) = (&expected.limits, &facts.enforced);
    let mut check = |wall: &str, is_held: bool, asked: u64, found: Option<u64>| {
        if !is_held {
            let found = found.map_or("no limit".to_owned(), |found| found.to_string());
            breaches.push(Breach::new(wall, asked, found));
        }
    };
    let is_held = |found: Option<u64>, asked| found.is_some_and(|found| within_a_page(found, asked));
    let memory = enforced.memory_bytes;
    check(
        "memory",
        is_held(memory, limits.memory_bytes),
        limits.memory_bytes,
        memory,
    );
    let swap = enforced.swap_bytes;
    // Where the host has none and does not count it there is nothing to hold.
    let is_swap_held = is_held(swap, limits.swap_bytes) || (!facts.host_swaps && swap.is_none());
    check("swap", is_swap_held, limits.swap_bytes, swap);
    let pids = u64::from(limits.pids);
    check("processes", enforced.pids == Some(pids), pids, enforced.pids);
    let quota = quota_us(limits.cpus);
    check(
        "cpu",
        enforced.cpu_quota_us == Some(quota),
        quota,
        enforced.cpu_quota_us,
    );
    // `a *:* rwm` is every device there is.
    let is_open = |line: &str| {
        let mut words = line.split(' ');
        words.next() == Some("a") || (words.next() == Some("*:*") && words.next() != Some("m"))
    };
    match &facts.devices {
        Devices::List(list) if list.lines().any(is_open) => {
            breaches.push(Breach::new("devices", "a list", list.replace('\n', ", ")));
        }
        Devices::Programs(0) => breaches.push(Breach::new("devices", "a program that judges", "none")),
        Devices::List(_) | Devices::Programs(_) => {}
    }
    breaches
}
