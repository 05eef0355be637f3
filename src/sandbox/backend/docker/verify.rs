//! Reads back from the kernel what was asked of the engine: a limit or a lock that did not take ends the sandbox.
//!
//! The engine leaves out what its host cannot do, with a warning at most; promise 3 wants no sandbox then.

use std::fs;
use std::io;

use crate::sandbox::Limits;
use crate::sandbox::cgroup::{Enforced, host_swaps, quota_us, within_a_page};

/// What the guest keeps once it serves, CAP_KILL, CAP_SETGID and CAP_SETUID (bits 5, 6, 7); programs can have what is in the
/// bounding set at most, which is nothing.
const ALLOWED: [(&str, u64); 5] = [
    ("CapInh", 0b1110_0000),
    ("CapPrm", 0b1110_0000),
    ("CapEff", 0b1110_0000),
    ("CapBnd", 0),
    ("CapAmb", 0),
];

/// What the kernel says of the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    pub status: String,
    pub enforced: Enforced,
    /// Names of namespaces that it shares with us.
    pub shared_namespaces: Vec<&'static str>,
    pub host_has_swap: bool,
}

impl Facts {
    pub fn read(pid: i32, enforced: Enforced) -> io::Result<Self> {
        let mut shared_namespaces = Vec::new();
        for name in ["cgroup", "ipc", "mnt", "net", "pid", "uts"] {
            if fs::read_link(format!("/proc/{pid}/ns/{name}"))? == fs::read_link(format!("/proc/self/ns/{name}"))? {
                shared_namespaces.push(name);
            }
        }
        Ok(Self {
            status: fs::read_to_string(format!("/proc/{pid}/status"))?,
            enforced,
            shared_namespaces,
            host_has_swap: host_swaps().map_err(io::Error::other)?,
        })
    }

    /// Everything that is weaker than asked, in words.
    pub fn gaps(&self, limits: &Limits) -> Vec<String> {
        let mut gaps: Vec<String> = self
            .shared_namespaces
            .iter()
            .map(|name| format!("no {name} namespace of its own"))
            .collect();
        for (name, allowed) in ALLOWED {
            let set = self.field(name).and_then(|hex| u64::from_str_radix(hex, 16).ok());
            match set {
                Some(set) if set & !allowed == 0 => {}
                Some(set) => gaps.push(format!("{name} is {set:x}")),
                None => gaps.push(format!("{name} is not known")),
            }
        }
        if self.field("NoNewPrivs") != Some("1") {
            gaps.push("no_new_privs is not set".into());
        }
        if self.field("Seccomp") != Some("2") {
            gaps.push("the guest has no system-call filter".into());
        }
        let Enforced {
            memory_bytes,
            swap_bytes,
            pids,
            cpu_quota_us,
        } = self.enforced;
        let is_held = |found: Option<u64>, asked| found.is_some_and(|found| within_a_page(found, asked));
        if !is_held(memory_bytes, limits.memory_bytes) {
            gaps.push(format!("the memory limit is {memory_bytes:?}"));
        }
        if self.host_has_swap && !is_held(swap_bytes, limits.swap_bytes) {
            gaps.push(format!("the swap limit is {swap_bytes:?}"));
        }
        if pids != Some(u64::from(limits.pids)) {
            gaps.push(format!("the pids limit is {pids:?}"));
        }
        if cpu_quota_us != Some(quota_us(limits.cpus)) {
            gaps.push(format!("the cpu quota is {cpu_quota_us:?}"));
        }
        gaps
    }

    fn field(&self, name: &str) -> Option<&str> {
        let value = |line: &'_ str| {
            line.strip_prefix(name)
                .and_then(|rest| rest.strip_prefix(':'))
                .is_some()
        };
        let line = self.status.lines().find(|line| value(line))?;
        line.split_once(':').map(|(_, value)| value.trim())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> Facts {
        Facts {
            status: "Name:\tguest\nCapInh:\t0000000000000000\nCapPrm:\t00000000000000e0\nCapEff:\t00000000000000e0\n\
                     CapBnd:\t0000000000000000\nCapAmb:\t0000000000000000\nNoNewPrivs:\t1\nSeccomp:\t2\nSeccomp_filters:\t1\n"
                .into(),
            enforced: Enforced {
                memory_bytes: Some(1 << 30),
                swap_bytes: Some(0),
                pids: Some(256),
                cpu_quota_us: Some(100_000),
            },
            shared_namespaces: Vec::new(),
            host_has_swap: true,
        }
    }

    #[test]
    fn each_gap_is_named() {
        let limits = Limits::default();
        assert_eq!(good().gaps(&limits), Vec::<String>::new());
        let weak = Facts {
            status: good()
                .status
                .replace("CapEff:\t00000000000000e0", "CapEff:\t00000000000000e1")
                .replace("NoNewPrivs:\t1", "NoNewPrivs:\t0"),
            enforced: Enforced {
                memory_bytes: None,
                swap_bytes: None,
                pids: None,
                cpu_quota_us: None,
            },
            shared_namespaces: vec!["cgroup"],
            host_has_swap: true,
        };
        assert_eq!(
            weak.gaps(&limits),
            [
                "no cgroup namespace of its own",
                "CapEff is e1",
                "no_new_privs is not set",
                "the memory limit is None",
                "the swap limit is None",
                "the pids limit is None",
                "the cpu quota is None",
            ]
        );
    }
}
