//! gVisor under an engine: which runtime is asked for, what it must be started with, and what is read back of it.
//!
//! The engine starts `runsc` by the options that its operator registered, so the wall that these make is not asked for here but
//! looked at: before a sandbox is promised, in what the engine says; before it is handed out, in what runs.

use std::collections::BTreeSet;
use std::fs;

use bollard::models::SystemInfo;

use super::record::Record;
use crate::sandbox::backend::gvisor::host_limits;
use crate::sandbox::cgroup::Group;
use crate::sandbox::verify::{Breach, Expected};

/// The name under which the engine must know it.
pub const RUNTIME: &str = "runsc";

/// No packet path; no socket of the host; files through the gofer, so that gVisor's kernel itself is nobody on the host; what is
/// written goes where it is counted.
const OPTIONS: [&str; 4] = [
    "--network=none",
    "--host-uds=none",
    "--directfs=false",
    "--overlay2=none",
];
/// What gVisor's kernel runs as on the host.
const NOBODY: u32 = 65_534;
/// CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER, CAP_FSETID, CAP_SYS_CHROOT: the gofer's, which opens files
/// for the kernel, in a root of nothing but what is mounted inside.
const GOFER: u64 = 0b1_1111 | 1 << 18;

/// Whether this engine gives isolation `gvisor`.
///
/// # Errors
/// What it lacks for that, and what to do.
pub fn offered(info: &SystemInfo) -> Result<(), String> {
    let runtimes = info.runtimes.as_ref();
    let Some(runtime) = runtimes.and_then(|runtimes| runtimes.get(RUNTIME)) else {
        return Err(format!(
            "the engine has no runtime `{RUNTIME}`: register it (`make setup` does, for an engine that it starts), or use the \
             backend `oci`"
        ));
    };
    let arguments = runtime.runtime_args.as_deref().unwrap_or_default();
    let missing: Vec<&str> = OPTIONS
        .into_iter()
        .filter(|option| !arguments.iter().any(|argument| argument == option))
        .collect();
    match missing.is_empty() {
        true => Ok(()),
        false => Err(format!(
            "the engine's runtime `{RUNTIME}` is registered without {}: add it to its `runtimeArgs`",
            missing.join(" ")
        )),
    }
}

/// What is read back of gVisor's kernel, the container's first process on the host. What programs see and may do is its to
/// hold, and cannot be read from outside.
pub fn expected(record: &Record, group: Group) -> Expected {
    Expected {
        user_namespace: None,
        uid: NOBODY,
        groups: vec![NOBODY],
        // It sees no other process, as it sees no `/proc` of the host's: the engine's runtime leaves it in the host's pid namespace.
        namespaces: vec!["ipc", "mnt", "net", "user", "uts"],
        capabilities: [0; 5],
        filtered: true,
        oom_score_adj: 0,
        rlimits: Vec::new(),
        // Told to programs by gVisor.
        hostname: None,
        mounts: None,
        group,
        limits: host_limits(&record.limits),
    }
}

/// What else is of the sandbox: every process in its group is held, and its kernel runs by the options that make the wall.
pub fn breaches(kernel: i32, group: &Group) -> Vec<Breach> {
    let pids = match group.pids() {
        Ok(pids) => pids,
        Err(error) => {
            return vec![Breach::new(
                "processes of runsc",
                "to be known",
                crate::error::chain(&error),
            )];
        }
    };
    let mut found = options(&fs::read(format!("/proc/{kernel}/cmdline")).unwrap_or_default());
    for pid in pids {
        // Ended since.
        if let Ok(status) = fs::read_to_string(format!("/proc/{pid}/status")) {
            found.extend(held(&status));
        }
    }
    found
}

fn options(cmdline: &[u8]) -> Vec<Breach> {
    let words: BTreeSet<&[u8]> = cmdline.split(|byte| *byte == 0).collect();
    OPTIONS
        .into_iter()
        .filter(|option| !words.contains(option.as_bytes()))
        .map(|option| Breach::new("options of runsc", option, "another or none"))
        .collect()
}

fn held(status: &str) -> Vec<Breach> {
    let field = |name: &str| {
        let rest = |line| str::strip_prefix(line, name)?.strip_prefix(':');
        status.lines().find_map(rest).map_or("unknown", str::trim)
    };
    let mut breaches = Vec::new();
    let powers = field("CapEff");
    if !u64::from_str_radix(powers, 16).is_ok_and(|set| set & !GOFER == 0) {
        breaches.push(Breach::new(
            "capabilities of runsc",
            format!("{GOFER:x} at most"),
            powers,
        ));
    }
    for (name, wanted) in [("NoNewPrivs", "1"), ("Seccomp", "2")] {
        if field(name) != wanted {
            breaches.push(Breach::new(format!("{name} of runsc"), wanted, field(name)));
        }
    }
    breaches
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use bollard::models::Runtime;

    use super::*;

    fn engine(arguments: &[&str]) -> SystemInfo {
        let runtime = Runtime {
            path: Some("/usr/bin/runsc".to_owned()),
            runtime_args: Some(arguments.iter().map(ToString::to_string).collect()),
            status: None,
        };
        SystemInfo {
            runtimes: Some(HashMap::from([(RUNTIME.to_owned(), runtime)])),
            ..SystemInfo::default()
        }
    }

    #[test]
    fn an_engine_that_would_start_a_weaker_one_is_told_what_it_lacks() {
        assert_eq!(offered(&engine(&OPTIONS)), Ok(()));
        let missing = |info: &SystemInfo| offered(info).unwrap_err();
        assert!(missing(&SystemInfo::default()).starts_with("the engine has no runtime `runsc`"));
        assert_eq!(
            missing(&engine(&["--network=host", "--host-uds=none", "--overlay2=none"])),
            "the engine's runtime `runsc` is registered without --network=none --directfs=false: add it to its `runtimeArgs`"
        );
    }

    #[test]
    fn what_runs_weaker_than_asked_is_a_breach() {
        let walls = |breaches: Vec<Breach>| {
            breaches
                .into_iter()
                .map(|breach| breach.to_string())
                .collect::<Vec<_>>()
        };
        let cmdline = format!("runsc-sandbox\0{}\0boot\0", OPTIONS.join("\0"));
        assert_eq!(walls(options(cmdline.as_bytes())), Vec::<String>::new());
        assert_eq!(
            walls(options(
                cmdline.replace("=none\0--host-uds", "=sandbox\0--host-uds").as_bytes()
            )),
            ["options of runsc: another or none in place of --network=none"]
        );
        let status = "Name:\texe\nCapEff:\t000000000004001f\nNoNewPrivs:\t1\nSeccomp:\t2\n";
        assert_eq!(walls(held(status)), Vec::<String>::new());
        let weak = "CapEff:\t00000000a80c25ff\nNoNewPrivs:\t0\nSeccomp:\t0\n";
        assert_eq!(
            walls(held(weak)),
            [
                "capabilities of runsc: 00000000a80c25ff in place of 4001f at most",
                "NoNewPrivs of runsc: 0 in place of 1",
                "Seccomp of runsc: 0 in place of 2"
            ]
        );
    }
}
