//! Switches of the host's kernel that make every sandbox's wall thicker. They belong to the operator: only looked at.

use super::checks::read;
use super::{Finding, State};

/// A switch: its name, whether a value will do, and what to set it to.
struct Switch {
    name: &'static str,
    path: &'static str,
    will_do: fn(&str) -> bool,
    wanted: &'static str,
}

fn at_least(value: &str, least: i64) -> bool {
    value.parse::<i64>().is_ok_and(|value| value >= least)
}

const SWITCHES: [Switch; 13] = [
    Switch {
        name: "fs.protected_symlinks",
        path: "fs/protected_symlinks",
        will_do: |v| at_least(v, 1),
        wanted: "1",
    },
    Switch {
        name: "fs.protected_hardlinks",
        path: "fs/protected_hardlinks",
        will_do: |v| at_least(v, 1),
        wanted: "1",
    },
    Switch {
        name: "fs.protected_regular",
        path: "fs/protected_regular",
        will_do: |v| at_least(v, 1),
        wanted: "2",
    },
    Switch {
        name: "fs.protected_fifos",
        path: "fs/protected_fifos",
        will_do: |v| at_least(v, 1),
        wanted: "2",
    },
    Switch {
        name: "kernel.unprivileged_bpf_disabled",
        path: "kernel/unprivileged_bpf_disabled",
        will_do: |v| at_least(v, 1),
        wanted: "1",
    },
    Switch {
        name: "kernel.io_uring_disabled",
        path: "kernel/io_uring_disabled",
        will_do: |v| at_least(v, 2),
        wanted: "2",
    },
    Switch {
        name: "vm.unprivileged_userfaultfd",
        path: "vm/unprivileged_userfaultfd",
        will_do: |v| v == "0",
        wanted: "0",
    },
    Switch {
        name: "kernel.dmesg_restrict",
        path: "kernel/dmesg_restrict",
        will_do: |v| at_least(v, 1),
        wanted: "1",
    },
    Switch {
        name: "kernel.kptr_restrict",
        path: "kernel/kptr_restrict",
        will_do: |v| at_least(v, 1),
        wanted: "1",
    },
    Switch {
        name: "kernel.yama.ptrace_scope",
        path: "kernel/yama/ptrace_scope",
        will_do: |v| at_least(v, 1),
        wanted: "1",
    },
    Switch {
        name: "kernel.perf_event_paranoid",
        path: "kernel/perf_event_paranoid",
        will_do: |v| at_least(v, 2),
        wanted: "3",
    },
    // A pipe is run by the kernel as root, on behalf of whoever crashes.
    Switch {
        name: "kernel.core_pattern",
        path: "kernel/core_pattern",
        will_do: |v| !v.starts_with('|'),
        wanted: "core",
    },
    // Equal pages of two sandboxes tell each other apart by time.
    Switch {
        name: "KSM",
        path: "",
        will_do: |v| v != "1",
        wanted: "0",
    },
];

pub(super) fn all() -> Vec<Finding> {
    let mut findings: Vec<Finding> = SWITCHES.iter().map(|switch| switch.look(switch.value())).collect();
    findings.push(swap(&read("/proc/swaps").unwrap_or_default()));
    findings
}

impl Switch {
    fn value(&self) -> Option<String> {
        match self.path {
            "" => read("/sys/kernel/mm/ksm/run"),
            path => read(&format!("/proc/sys/{path}")),
        }
    }

    fn look(&self, value: Option<String>) -> Finding {
        let remedy = match self.path {
            "" => format!("echo {} >/sys/kernel/mm/ksm/run", self.wanted),
            _ => format!("sysctl -w {}={}", self.name, self.wanted),
        };
        match value {
            Some(value) => {
                let state = if (self.will_do)(&value) { State::Ok } else { State::Weak };
                Finding::new(self.name, state, value, &remedy)
            }
            None => Finding::new(self.name, State::Absent, "not in this kernel", ""),
        }
    }
}

/// Memory limits cover swap; what was swapped out stays on a disk all the same.
fn swap(swaps: &str) -> Finding {
    let areas = swaps.lines().skip(1).count();
    let (state, detail) = match areas {
        0 => (State::Ok, "none".to_owned()),
        areas => (
            State::Weak,
            format!("{areas} areas: memory of sandboxes may be written to disk"),
        ),
    };
    Finding::new("swap", state, detail, "swapoff -a, or encrypt it")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weak_values_are_told_with_their_remedy() {
        let look = |name: &str, value: &str| {
            let switch = SWITCHES.iter().find(|switch| switch.name == name).unwrap();
            let finding = switch.look(Some(value.to_owned()));
            (finding.state, finding.remedy)
        };
        let weak = |remedy: &str| (State::Weak, remedy.to_owned());
        let ok = (State::Ok, String::new());
        assert_eq!(
            look("fs.protected_symlinks", "0"),
            weak("sysctl -w fs.protected_symlinks=1")
        );
        assert_eq!(look("fs.protected_symlinks", "1"), ok);
        assert_eq!(
            look("kernel.io_uring_disabled", "1"),
            weak("sysctl -w kernel.io_uring_disabled=2")
        );
        assert_eq!(
            look("kernel.core_pattern", "|/usr/bin/apport %p"),
            weak("sysctl -w kernel.core_pattern=core")
        );
        assert_eq!(look("kernel.core_pattern", "core"), ok);
        assert_eq!(look("KSM", "1"), weak("echo 0 >/sys/kernel/mm/ksm/run"));
        assert_eq!(SWITCHES[0].look(None).state, State::Absent);
    }

    #[test]
    fn swap_is_weak_when_there_is_any() {
        assert_eq!(swap("Filename Type\n").state, State::Ok);
        assert_eq!(swap("Filename Type\n/dev/sda2 partition 1 0 -2\n").state, State::Weak);
    }
}
