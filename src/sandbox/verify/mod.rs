//! Reads every wall back: what the kernel says of a sandbox's first process, against what was asked. Promise 3.
//!
//! Owns: what can be known from outside, by the number of that process: its identity, powers, namespaces, mounts, limits and
//! control group. Must not know: how a backend makes any of it, nor what to do about a [`Breach`] (the backend destroys the
//! sandbox). Reading (`facts`) and judging (`process`, `mounts`: pure functions of text) are apart, so that each wall has a test in
//! which it is missing.
//!
//! The walls of programs the guest sets for each: they are read back on the first that it starts (`program`), which does nothing.
//!
//! What cannot be known from outside: whether the process can be dumped (its files in `/proc` have the same owner either
//! way when it is root of its namespace). The suite of all backends tests that from inside.

mod facts;
mod mounts;
mod process;
mod program;
#[cfg(test)]
mod tests;

use std::fmt;
use std::path::{Path, PathBuf};

use self::facts::Facts;
pub use self::program::program;
use super::cgroup::{Group, Hierarchies};
use super::{Identity, Limits};

/// Sets of capabilities: inheritable, permitted, effective, bounding, ambient.
const SETS: usize = 5;

/// A wall that is not as it was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Breach {
    /// Which: `capabilities CapEff`, `mount /tmp`.
    pub wall: String,
    pub expected: String,
    pub found: String,
}

impl Breach {
    /// `expected` and `found` as they are told.
    pub fn new(wall: impl Into<String>, expected: impl fmt::Display, found: impl fmt::Display) -> Self {
        Self {
            wall: wall.into(),
            expected: expected.to_string(),
            found: found.to_string(),
        }
    }
}

impl fmt::Display for Breach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} in place of {}", self.wall, self.found, self.expected)
    }
}

/// All of them in one line.
pub fn told(breaches: &[Breach]) -> String {
    let told: Vec<String> = breaches.iter().map(ToString::to_string).collect();
    told.join("; ")
}

/// What a sandbox is to be.
#[derive(Debug, Clone, PartialEq)]
pub struct Expected {
    /// Its user namespace; `None` where it has the host's.
    pub user_namespace: Option<Identity>,
    /// uid and gid of the first process, as the host counts.
    pub uid: u32,
    /// Further groups that it may be in.
    pub groups: Vec<u32>,
    /// Namespaces that must not be the host's, by their names in `/proc/PID/ns`.
    pub namespaces: Vec<&'static str>,
    /// The most that each set may hold: inheritable, permitted, effective, bounding, ambient.
    pub capabilities: [u64; SETS],
    /// Whether the first process itself has a system-call filter.
    pub filtered: bool,
    pub oom_score_adj: i32,
    /// The most of each, hard and soft, by its name in `/proc/PID/limits`.
    pub rlimits: Vec<(&'static str, u64)>,
    /// `None` where it is not the kernel that tells programs.
    pub hostname: Option<&'static str>,
    /// `None` where what programs see is not what the first process sees.
    pub mounts: Option<Mounts>,
    pub group: Group,
    pub limits: Limits,
}

/// What is mounted, and how. Everything that is not named is read-only.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mounts {
    /// Of the root, beside `ro`.
    pub root: Vec<&'static str>,
    /// Whether mounts of the host may come through; those of the sandbox never get out.
    pub may_follow: bool,
    /// Places that programs can write to.
    pub writable: Vec<Writable>,
    /// Places that are the kernel's own view, or only the guest's to write to.
    pub system: Vec<&'static str>,
    /// Shown empty, where the kernel has them.
    pub masked: &'static [&'static str],
    pub read_only: &'static [&'static str],
    /// Not to be read in any mount's description.
    pub secret: Option<PathBuf>,
}

/// A place that can be written to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Writable {
    pub point: &'static str,
    pub flags: Vec<&'static str>,
    /// A tmpfs of at most that many bytes and inodes; `None` for a bind.
    pub tmpfs: Option<(u64, u64)>,
}

/// Compares the sandbox whose first process is `pid` with what it is to be. Takes some hundred microseconds.
///
/// # Errors
/// Everything that is weaker than asked; what cannot be read counts as that.
pub fn sandbox(pid: i32, hierarchies: &Hierarchies, expected: &Expected) -> Result<(), Vec<Breach>> {
    let facts = Facts::read(pid, hierarchies, expected).map_err(|breach| vec![breach])?;
    let breaches = breaches(&facts, expected, &|path| Path::new(path).exists());
    if breaches.is_empty() { Ok(()) } else { Err(breaches) }
}

/// `exists`: whether the kernel has a path of `/proc` or `/sys`.
fn breaches(facts: &Facts, expected: &Expected, exists: &dyn Fn(&str) -> bool) -> Vec<Breach> {
    let mut breaches = process::breaches(facts, expected);
    if let Some(expected) = &expected.mounts {
        breaches.extend(mounts::breaches(&facts.mounts, expected, exists));
    }
    breaches
}
