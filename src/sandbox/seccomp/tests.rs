use super::*;

const X86_64: u32 = AUDIT_ARCH_X86_64;
const I386: u32 = 0x4000_0003;

/// Runs a program as the kernel would: the few instructions that filters are made of.
fn run(program: &[sock_filter], architecture: u32, call: u32, arguments: [u64; 6]) -> u32 {
    let word = |offset: u32| match offset {
        0 => call,
        4 => architecture,
        n => {
            let argument = arguments[(n as usize - 16) / 8];
            if n % 8 == 0 {
                argument as u32
            } else {
                (argument >> 32) as u32
            }
        }
    };
    let (mut at, mut value) = (0, 0);
    loop {
        let step = &program[at];
        at += 1;
        match u32::from(step.code) {
            0x20 => value = word(step.k),
            0x54 => value &= step.k,
            0x05 => at += step.k as usize,
            0x06 => return step.k,
            code @ (0x15 | 0x25 | 0x35) => {
                let taken = match code {
                    0x15 => value == step.k,
                    0x25 => value > step.k,
                    _ => value >= step.k,
                };
                at += usize::from(if taken { step.jt } else { step.jf });
            }
            code => panic!("instruction {code:#x}"),
        }
    }
}

fn default_program() -> BpfProgram {
    assemble(&serde_json::from_str(DEFAULT).unwrap()).unwrap()
}

fn verdict(call: &str, arguments: [u64; 6]) -> u32 {
    run(
        &default_program(),
        X86_64,
        table::number(call).unwrap() as u32,
        arguments,
    )
}

const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;
const EPERM: u32 = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
const ENOSYS: u32 = libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32;
const KILL: u32 = libc::SECCOMP_RET_KILL_PROCESS;

#[test]
fn every_call_of_the_profile_gets_its_verdict() {
    let profile: Written = serde_json::from_str(DEFAULT).unwrap();
    let program = default_program();
    let conditional: Vec<i64> = profile
        .allow_when
        .iter()
        .map(|rule| number(&rule.call).unwrap())
        .collect();
    let allowed: Vec<i64> = profile.allow.iter().map(|name| number(name).unwrap()).collect();
    for call in (0..=table::highest()).filter(|call| !conditional.contains(call)) {
        let wanted = match call {
            _ if allowed.contains(&call) => ALLOW,
            libc::SYS_clone3 => ENOSYS,
            libc::SYS_io_setup..=libc::SYS_io_cancel => ENOSYS,
            _ => EPERM,
        };
        assert_eq!(run(&program, X86_64, call as u32, [0; 6]), wanted, "{call}");
    }
    assert_eq!(run(&program, X86_64, table::highest() as u32 + 1, [0; 6]), ENOSYS);
}

#[test]
fn strict_allows_nothing_that_default_does_not() {
    let read = |text: &str| -> Written { serde_json::from_str(text).unwrap() };
    let (default, strict) = (read(DEFAULT), read(STRICT));
    let rules = |profile: &Written| -> Vec<String> {
        let rules = profile.allow_when.iter();
        rules.map(|rule| format!("{} {:?}", rule.call, rule.when)).collect()
    };
    let wider: Vec<&String> = strict
        .allow
        .iter()
        .filter(|call| !default.allow.contains(call))
        .collect();
    assert_eq!(wider, Vec::<&String>::new());
    // A condition may narrow what `default` allows whole, or is one of its own.
    for (rule, text) in strict.allow_when.iter().zip(rules(&strict)) {
        assert!(
            default.allow.contains(&rule.call) || rules(&default).contains(&text),
            "{text}"
        );
    }
    let verdict = |call: &str, arguments| {
        let program = assemble(&strict).unwrap();
        run(&program, X86_64, table::number(call).unwrap() as u32, arguments)
    };
    for call in [
        "ptrace",
        "seccomp",
        "shmget",
        "mq_open",
        "splice",
        "tee",
        "mincore",
        "setuid",
        "pkey_alloc",
    ] {
        assert_eq!(verdict(call, [0; 6]), EPERM, "{call}");
    }
    let node = |mode| verdict("mknodat", [0, 0, mode, 0, 0, 0]);
    assert_eq!(
        (node(0o010_644), node(0o020_644), node(0o060_644)),
        (ALLOW, EPERM, EPERM)
    );
    let socket = |family, protocol| verdict("socket", [family, 0, protocol, 0, 0, 0]);
    assert_eq!(
        (socket(1, 0), socket(2, 6), socket(16, 0), socket(17, 3)),
        (ALLOW, ALLOW, EPERM, EPERM)
    );
    assert_eq!(run(&assemble(&strict).unwrap(), I386, 1, [0; 6]), KILL);
}

#[test]
fn what_attacks_need_is_refused() {
    for call in [
        "io_uring_setup",
        "bpf",
        "perf_event_open",
        "userfaultfd",
        "keyctl",
        "add_key",
        "request_key",
        "process_vm_readv",
        "pidfd_getfd",
        "kcmp",
        "mount",
        "umount2",
        "move_mount",
        "open_tree",
        "fsopen",
        "mount_setattr",
        "pivot_root",
        "open_by_handle_at",
        "kexec_load",
        "init_module",
        "finit_module",
        "modify_ldt",
        "quotactl",
        "fanotify_init",
        "vmsplice",
        "clock_settime",
        "settimeofday",
        "memfd_secret",
        "setns",
        "unshare",
        "chroot",
        "reboot",
        "swapon",
        "iopl",
        "ioperm",
        "acct",
        "syslog",
    ] {
        assert_eq!(verdict(call, [0; 6]), EPERM, "{call}");
    }
}

#[test]
fn other_abis_are_killed() {
    let program = default_program();
    let read = libc::SYS_read as u32;
    assert_eq!(run(&program, X86_64, read, [0; 6]), ALLOW);
    assert_eq!(run(&program, I386, read, [0; 6]), KILL);
    assert_eq!(run(&program, X86_64, read | 0x4000_0000, [0; 6]), KILL);
    assert_eq!(run(&program, X86_64, u32::MAX, [0; 6]), KILL);
}

#[test]
fn arguments_decide() {
    let with = |call, first: u64, third: u64| verdict(call, [first, 0, third, 0, 0, 0]);
    // A thread of glibc.
    assert_eq!(with("clone", 0x003d_0f00, 0), ALLOW);
    for namespace in [
        0x0002_0000,
        0x0200_0000,
        0x0400_0000,
        0x0800_0000,
        0x1000_0000,
        0x2000_0000,
        0x4000_0000,
    ] {
        assert_eq!(
            with("clone", namespace | libc::SIGCHLD as u64, 0),
            EPERM,
            "{namespace:#x}"
        );
    }
    for family in 0..64 {
        let wanted = if [1, 2, 10, 16].contains(&family) { ALLOW } else { EPERM };
        assert_eq!(with("socket", family, 0), wanted, "{family}");
    }
    // The kernel looks at the lower half only, so the filter must too: AF_VSOCK in disguise.
    assert_eq!(with("socket", 40 | 1 << 32, 0), EPERM);
    assert_eq!(with("socket", 16, 12), EPERM, "NETLINK_NETFILTER");
    for protocol in 0..300 {
        let wanted = if [0, 6, 17].contains(&protocol) { ALLOW } else { EPERM };
        for family in [2, 10] {
            assert_eq!(with("socket", family, protocol), wanted, "{family}, {protocol}");
        }
    }
    // TIOCSTI and TIOCLINUX, also with noise in the half that the kernel does not look at.
    for noise in [0, 1 << 32, u64::MAX << 32] {
        for (request, wanted) in [(0x5412, EPERM), (0x541c, EPERM), (0x5401, ALLOW), (0x5413, ALLOW)] {
            assert_eq!(
                verdict("ioctl", [0, request | noise, 0, 0, 0, 0]),
                wanted,
                "{request:#x}"
            );
        }
    }
    for (call, argument, huge) in [("mmap", 3, 0x40000), ("memfd_create", 1, 4), ("shmget", 2, 0o4000)] {
        let with = |flags: u64| {
            let mut arguments = [0; 6];
            arguments[argument] = flags;
            verdict(call, arguments)
        };
        assert_eq!(
            (with(0x22), with(huge), with(huge | 0x22)),
            (ALLOW, EPERM, EPERM),
            "{call}"
        );
    }
    for (personality, wanted) in [
        (0, ALLOW),
        (0x4_0000, ALLOW),
        (0xffff_ffff, ALLOW),
        (8, EPERM),
        (0x80_0000, EPERM),
    ] {
        assert_eq!(with("personality", personality, 0), wanted, "{personality:#x}");
    }
}

#[test]
fn mistakes_in_a_profile_are_errors() {
    let of = |allow: &str, errno: &str| {
        let profile = format!(r#"{{"default":"EPERM","errno":{errno},"allow":{allow},"allow_when":[]}}"#);
        compile(&profile).unwrap_err().to_string()
    };
    assert_eq!(
        of(r#"["raed"]"#, "{}"),
        "the system-call profile names `raed`, which is no system call"
    );
    assert_eq!(
        of(r#"["read","read"]"#, "{}"),
        "the system-call profile decides `read` twice"
    );
    assert_eq!(
        of(r#"["read"]"#, r#"{"ENOSYS":["read"]}"#),
        "the system-call profile decides `read` twice"
    );
    assert_eq!(
        of("[]", r#"{"EWHAT":["read"]}"#),
        "the system-call profile names `EWHAT`, which is no error it can give: use EPERM, EACCES or ENOSYS"
    );
    assert!(compile(r#"{"default":"EPERM","errno":{},"allow":[],"allow_when":[],"allowed":[]}"#).is_err());
}

#[test]
fn the_compiled_form_is_an_array_of_eight_byte_steps() {
    let bytes = compile(DEFAULT).unwrap();
    assert_eq!(bytes.len(), default_program().len() * 8);
    assert_eq!(&bytes[..8], [0x20, 0, 0, 0, 4, 0, 0, 0]);
}
