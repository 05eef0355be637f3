//! Each wall is taken away once, and is named.

use std::collections::BTreeMap;

use super::*;
use crate::sandbox::cgroup::{Devices, Enforced};
use crate::sandbox::mountinfo;

const STATUS: &str = "Name:\tguest\nUid:\t1048576\t1048576\t1048576\t1048576\nGid:\t1048576\t1048576\t1048576\t1048576\n\
    Groups:\t \nCapInh:\t0000000000000000\nCapPrm:\t00000000000000e0\nCapEff:\t00000000000000e0\n\
    CapBnd:\t0000000000000000\nCapAmb:\t0000000000000000\nNoNewPrivs:\t1\nSeccomp:\t2\n";
const LIMITS: &str = "Limit                     Soft Limit           Hard Limit           Units     \n\
    Max file size             2147483648           2147483648           bytes     \n\
    Max core file size        0                    0                    bytes     \n\
    Max open files            1024                 4096                 files     \n";
const MOUNTS: &str = "1 0 0:40 /root / ro,nosuid,nodev,relatime - tmpfs exuvia rw,size=16384k\n\
    2 1 254:0 /usr /usr ro,nosuid,nodev,relatime - ext4 /dev/vda rw,discard\n\
    3 1 0:43 / /proc rw,nosuid,nodev,noexec,relatime - proc proc rw\n\
    4 1 0:44 / /dev rw,nosuid,noexec,relatime - tmpfs tmpfs rw,size=64k,nr_inodes=64\n\
    5 4 0:6 /null /dev/null rw,nosuid,noexec - devtmpfs devtmpfs rw\n\
    6 1 0:47 / /tmp rw,nosuid,nodev,relatime - tmpfs tmpfs rw,size=262144k,nr_inodes=10000\n\
    7 1 7:3 /workspace /workspace rw,nosuid,nodev,noatime - ext4 /dev/loop3 rw\n\
    8 3 0:43 /sys /proc/sys ro,nosuid,nodev,noexec,relatime - proc proc rw\n\
    9 3 0:49 / /proc/acpi ro,relatime - tmpfs tmpfs ro\n\
    10 3 0:6 /null /proc/keys ro,nosuid,noexec - devtmpfs devtmpfs rw\n";

fn group(name: &str) -> Group {
    Hierarchies::detect().unwrap().group(name)
}

fn facts() -> Facts {
    Facts {
        status: STATUS.to_owned(),
        uid_map: "         0    1048576      65536\n".to_owned(),
        gid_map: "         0    1048576      65536\n".to_owned(),
        limits: LIMITS.to_owned(),
        oom_score_adj: "200\n".to_owned(),
        mounts: mountinfo::parse(MOUNTS),
        shared: Vec::new(),
        hostname: "sandbox".to_owned(),
        group: group("sbx_1"),
        enforced: Enforced {
            memory_bytes: Some(1 << 30),
            swap_bytes: Some(0),
            pids: Some(256),
            cpu_quota_us: Some(100_000),
        },
        devices: Devices::List("c 1:3 rw\nc 136:* rw".to_owned()),
        host_swaps: true,
    }
}

fn expected() -> Expected {
    let writable = |point, tmpfs| Writable {
        point,
        flags: vec!["nosuid", "nodev"],
        tmpfs,
    };
    Expected {
        user_namespace: Some(Identity { base: 1 << 20 }),
        uid: 1 << 20,
        groups: Vec::new(),
        namespaces: vec!["net"],
        capabilities: [0, 0xe0, 0xe0, 0, 0],
        filtered: true,
        oom_score_adj: 200,
        rlimits: vec![
            ("Max core file size", 0),
            ("Max file size", 2 << 30),
            ("Max open files", 4096),
        ],
        hostname: Some("sandbox"),
        mounts: Some(Mounts {
            root: vec!["nosuid", "nodev"],
            may_follow: false,
            writable: vec![
                writable("/tmp", Some((256 << 20, 10_000))),
                writable("/workspace", None),
            ],
            system: vec!["/proc", "/dev"],
            masked: &["/proc/acpi", "/proc/keys", "/proc/nowhere", "/sys/firmware"],
            read_only: &["/proc/sys"],
            secret: Some("/var/lib/exuvia".into()),
        }),
        group: group("sbx_1"),
        limits: Limits::default(),
    }
}

/// One of the texts that the kernel gave.
type Field = fn(&mut Facts) -> &mut String;

/// The walls that are named.
fn named(facts: &Facts) -> Vec<String> {
    let found = breaches(facts, &expected(), &|path| path != "/proc/nowhere");
    found.into_iter().map(|breach| breach.wall).collect()
}

#[test]
fn a_whole_sandbox_passes_and_each_missing_wall_is_named() {
    assert_eq!(breaches(&facts(), &expected(), &|path| path != "/proc/nowhere"), []);
    let texts: [(&str, Field, &str, &str); 24] = [
        ("Uid", |f| &mut f.status, "Uid:\t1048576\t1048576", "Uid:\t1048576\t0"),
        ("Gid", |f| &mut f.status, "Gid:\t1048576", "Gid:\t0"),
        ("groups", |f| &mut f.status, "Groups:\t ", "Groups:\t27 "),
        ("capabilities CapInh", |f| &mut f.status, "CapInh:\t0", "CapInh:\t8"),
        (
            "capabilities CapPrm",
            |f| &mut f.status,
            "CapPrm:\t00000000000000e0",
            "CapPrm:\t00000000000000e1",
        ),
        (
            "capabilities CapEff",
            |f| &mut f.status,
            "CapEff:\t00000000000000e0",
            "CapEff:\t000001ffffffffff",
        ),
        (
            "capabilities CapBnd",
            |f| &mut f.status,
            "CapBnd:\t0000000000000000",
            "CapBnd:\t0000000000000001",
        ),
        (
            "capabilities CapAmb",
            |f| &mut f.status,
            "CapAmb:\t0000000000000000",
            "CapAmb:\tlots",
        ),
        ("no_new_privs", |f| &mut f.status, "NoNewPrivs:\t1", "NoNewPrivs:\t0"),
        ("system-call filter", |f| &mut f.status, "Seccomp:\t2", "Seccomp:\t0"),
        ("uid_map", |f| &mut f.uid_map, "1048576", "0"),
        ("gid_map", |f| &mut f.gid_map, "65536", "4294967295"),
        (
            "Max core file size",
            |f| &mut f.limits,
            "core file size        0 ",
            "core file size        0 1",
        ),
        (
            "Max file size",
            |f| &mut f.limits,
            "2147483648           bytes",
            "unlimited            bytes",
        ),
        ("Max open files", |f| &mut f.limits, "Max open files", "Max other files"),
        ("oom_score_adj", |f| &mut f.oom_score_adj, "200", "-1000"),
        ("host name", |f| &mut f.hostname, "sandbox", "server7"),
        ("uid_map", |f| &mut f.uid_map, "         0", "         1"),
        ("no_new_privs", |f| &mut f.status, "NoNewPrivs", "Others"),
        ("system-call filter", |f| &mut f.status, "Seccomp:\t2", "Seccomp:\t1"),
        ("Uid", |f| &mut f.status, "Uid:", "Uids:"),
        (
            "Max open files",
            |f| &mut f.limits,
            "1024                 4096",
            "1024                 9096",
        ),
        ("oom_score_adj", |f| &mut f.oom_score_adj, "200", ""),
        ("gid_map", |f| &mut f.gid_map, "1048576", "1048577"),
    ];
    for (wall, field, from, to) in texts {
        let mut weak = facts();
        let text = field(&mut weak);
        assert!(text.contains(from), "{wall}: {from}");
        *text = text.replace(from, to);
        assert_eq!(named(&weak), [wall], "{from} -> {to}");
    }
}

#[test]
fn each_mount_that_is_weaker_is_named() {
    let cases = [
        ("mount /", "/ ro,nosuid,nodev", "/ ro,nosuid"),
        ("mount /usr", "/usr ro,", "/usr rw,"),
        ("mount /tmp", "/tmp rw,nosuid,nodev", "/tmp rw,nosuid"),
        ("mount /tmp size", "rw,size=262144k", "rw,size=262148k"),
        ("mount /tmp size", "rw,size=262144k,", "rw,"),
        ("mount /tmp inodes", "nr_inodes=10000", "nr_inodes=10001"),
        ("mount /tmp inodes", ",nr_inodes=10000", ""),
        ("mount /workspace", "/workspace rw,nosuid,nodev", "/workspace rw,nodev"),
        ("read-only /proc/sys", "/proc/sys ro,", "/proc/sys rw,"),
        (
            "masked /proc/acpi",
            "9 3 0:49 / /proc/acpi ro,relatime - tmpfs tmpfs ro",
            "9 3 0:43 /acpi /proc/acpi ro - proc proc rw",
        ),
        ("masked /proc/keys", "10 3 0:6 /null", "10 3 0:6 /kmsg"),
        ("propagation of /usr", "relatime - ext4", "relatime shared:1 - ext4"),
        ("propagation of /usr", "relatime - ext4", "relatime master:1 - ext4"),
        ("mount /usr", "/usr /usr", "/var/lib/exuvia/images/1/usr /usr"),
        (
            "mount /",
            "tmpfs exuvia rw",
            "tmpfs exuvia rw,lowerdir=/var/lib/exuvia/images/1",
        ),
    ];
    for (wall, from, to) in cases {
        assert!(MOUNTS.contains(from), "{wall}: {from}");
        let weak = Facts {
            mounts: mountinfo::parse(&MOUNTS.replace(from, to)),
            ..facts()
        };
        // A mask that is not one may be open to writing as well: it comes first or last, and is there.
        assert!(
            named(&weak).contains(&wall.to_owned()),
            "{from} -> {to}: {:?}",
            named(&weak)
        );
    }
    // What lies over a place counts, not what is below it; a place that is gone is none.
    for (wall, line) in [
        ("mount /tmp", "20 1 254:0 /tmp /tmp rw,relatime - ext4 /dev/vda rw\n"),
        ("read-only /proc/sys", "20 3 0:43 /sys /proc/sys rw - proc proc rw\n"),
        (
            "mount /opt",
            "20 1 254:0 /opt /opt rw,nosuid,nodev - ext4 /dev/vda rw\n",
        ),
        (
            "masked /sys/firmware",
            "20 1 0:21 / /sys ro,nosuid,nodev,noexec - sysfs sysfs ro\n",
        ),
    ] {
        let weak = Facts {
            mounts: mountinfo::parse(&format!("{MOUNTS}{line}")),
            ..facts()
        };
        assert!(named(&weak).contains(&wall.to_owned()), "{line}: {:?}", named(&weak));
    }
    let bare = Facts {
        mounts: Vec::new(),
        ..facts()
    };
    let walls = named(&bare);
    for wall in [
        "mount /",
        "mount /tmp",
        "mount /workspace",
        "masked /proc/keys",
        "read-only /proc/sys",
    ] {
        assert!(walls.contains(&wall.to_owned()), "{wall}: {walls:?}");
    }
}

#[test]
fn each_limit_that_did_not_take_is_named() {
    let weak = |change: fn(&mut Facts)| {
        let mut facts = facts();
        change(&mut facts);
        named(&facts)
    };
    assert_eq!(weak(|f| f.shared = vec!["net"]), ["namespace net"]);
    assert_eq!(weak(|f| f.group = group("sbx_2")), ["control group"]);
    assert_eq!(weak(|f| f.enforced.memory_bytes = None), ["memory"]);
    assert_eq!(weak(|f| f.enforced.memory_bytes = Some(2 << 30)), ["memory"]);
    assert_eq!(weak(|f| f.enforced.swap_bytes = None), ["swap"]);
    assert_eq!(weak(|f| f.enforced.pids = None), ["processes"]);
    assert_eq!(weak(|f| f.enforced.cpu_quota_us = Some(200_000)), ["cpu"]);
    assert_eq!(weak(|f| f.devices = Devices::List("a *:* rwm".to_owned())), ["devices"]);
    assert_eq!(
        weak(|f| f.devices = Devices::List("c 1:3 rw\nb *:* rw".to_owned())),
        ["devices"]
    );
    assert_eq!(weak(|f| f.devices = Devices::Programs(0)), ["devices"]);
    assert_eq!(weak(|f| f.devices = Devices::Programs(1)), Vec::<String>::new());
    let no_swap_here = weak(|f| {
        f.enforced.swap_bytes = None;
        f.host_swaps = false;
    });
    assert_eq!(no_swap_here, Vec::<String>::new());
    assert_eq!(
        told(&breaches(
            &Facts {
                shared: vec!["net"],
                hostname: "h".to_owned(),
                ..facts()
            },
            &expected(),
            &|_| false
        )),
        "namespace net: the host's in place of its own; host name: h in place of sandbox"
    );
}

/// The real thing, with every wall missing: a child of this process.
#[test]
fn an_ordinary_process_has_none_of_the_walls() {
    let hierarchies = Hierarchies::detect().unwrap();
    let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    let found = sandbox(child.id() as i32, &hierarchies, &expected());
    child.kill().unwrap();
    child.wait().unwrap();
    let walls: BTreeMap<String, String> = found
        .unwrap_err()
        .into_iter()
        .map(|breach| (breach.wall, breach.found))
        .collect();
    let wanted = [
        "namespace net",
        "uid_map",
        "no_new_privs",
        "system-call filter",
        "oom_score_adj",
        "mount /",
        "mount /workspace",
        "read-only /proc/sys",
        "masked /proc/keys",
        "control group",
        "memory",
        "processes",
    ];
    // A test run by nobody has no powers either, and some kernels have no such files.
    let missed: Vec<&str> = wanted.into_iter().filter(|wall| !walls.contains_key(*wall)).collect();
    assert_eq!(missed, Vec::<&str>::new(), "{walls:?}");

    // And one that is gone.
    let gone = sandbox(child.id() as i32, &hierarchies, &expected()).unwrap_err();
    assert_eq!(gone.len(), 1, "{gone:?}");
}
