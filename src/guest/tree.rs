//! Whole process trees: finding all that descends from this process, signalling it, ending it.
//!
//! This process is a child subreaper (or init): a descendant whose parent died becomes its child. So double forks,
//! `setsid` and ignored signals hide nothing: who is not reachable over parent links from here is not of this tree.

use std::collections::{HashMap, HashSet};
use std::fs;

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::sys::{self, Reaped, Wait};

/// Rounds of stopping before killing begins all the same: a tree that forks faster than it is stopped.
const STOP_ROUNDS: usize = 64;

/// Signals every living descendant of this process that is outside of the trees of `except`.
pub fn signal_all(number: i32, except: &HashSet<Pid>) {
    for pid in descendants(except) {
        // Gone in the meantime is as good.
        let _ = sys::send_signal(pid, number);
    }
}

/// How many descendants live.
pub fn count() -> usize {
    descendants(&HashSet::new()).len()
}

/// Kills every descendant and reaps until none is left; each one reaped is handed to `ended`. Returns how many it killed.
///
/// All are stopped first: killing one by one would free process slots for a tree that forks.
pub fn kill_all(mut ended: impl FnMut(Reaped)) -> HashSet<Pid> {
    let mut killed = HashSet::new();
    for _ in 0..STOP_ROUNDS {
        if !reap_ended(&mut ended) {
            return killed;
        }
        let fresh: Vec<Pid> = descendants(&HashSet::new())
            .into_iter()
            .filter(|pid| killed.insert(*pid))
            .collect();
        if fresh.is_empty() {
            break;
        }
        for pid in fresh {
            let _ = kill(pid, Signal::SIGSTOP);
        }
    }
    loop {
        for pid in descendants(&HashSet::new()) {
            killed.insert(pid);
            let _ = kill(pid, Signal::SIGKILL);
        }
        match sys::reap(Wait::UntilOneEnds) {
            Ok(Some(reaped)) => ended(reaped),
            Ok(None) => {}
            Err(_) => return killed,
        }
        if !reap_ended(&mut ended) {
            return killed;
        }
    }
}

/// Kills children of this process that are not in `keep`, with all below them, without waiting for their end.
pub fn kill_strays(keep: &HashSet<Pid>) {
    signal_all(libc::SIGKILL, keep);
}

/// Reaps whatever has ended; whether any child is left.
pub fn reap_ended(mut ended: impl FnMut(Reaped)) -> bool {
    loop {
        match sys::reap(Wait::Now) {
            Ok(Some(reaped)) => ended(reaped),
            Ok(None) => return true,
            Err(Errno::ECHILD) => return false,
            Err(_) => return false,
        }
    }
}

/// Living descendants of this process, parents before children, without those in and below `except`.
fn descendants(except: &HashSet<Pid>) -> Vec<Pid> {
    let mut children: HashMap<Pid, Vec<Process>> = HashMap::new();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    for entry in entries {
        let name = entry.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        // Gone since the directory was read: skip.
        if let Some((parent, alive)) = fs::read(entry.path().join("stat")).ok().and_then(|stat| parse(&stat)) {
            let pid = Pid::from_raw(pid);
            children.entry(parent).or_default().push(Process { pid, alive });
        }
    }
    let (mut found, mut next) = (Vec::new(), vec![Pid::this()]);
    while let Some(parent) = next.pop() {
        for process in children.remove(&parent).into_iter().flatten() {
            if except.contains(&process.pid) {
                continue;
            }
            if process.alive {
                found.push(process.pid);
            }
            next.push(process.pid);
        }
    }
    found
}

struct Process {
    pid: Pid,
    /// Not yet a zombie.
    alive: bool,
}

/// Parent and whether it lives, from `/proc/PID/stat` (proc(5)). The name in parentheses may hold anything, so the last `)` counts.
fn parse(stat: &[u8]) -> Option<(Pid, bool)> {
    let end = stat.iter().rposition(|byte| *byte == b')')?;
    let rest = std::str::from_utf8(stat.get(end + 1..)?).ok()?;
    let mut fields = rest.split_ascii_whitespace();
    let alive = !matches!(fields.next()?, "Z" | "X");
    let parent = fields.next()?.parse().ok()?;
    Some((Pid::from_raw(parent), alive))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_cannot_forge_the_parent() {
        assert_eq!(
            parse(b"12 (a) Z 1 (b) S 7 7 7 0"),
            Some((Pid::from_raw(7), true)),
            "a program may call itself anything"
        );
        assert_eq!(parse(b"12 (\xff) Z 3 3"), Some((Pid::from_raw(3), false)));
        assert_eq!(parse(b"12 (sh"), None);
        assert_eq!(parse(b"12 (sh)"), None);
    }
}
