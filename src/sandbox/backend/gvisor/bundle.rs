//! The OCI bundle that `runsc` is given.
//!
//! gVisor shows files and numbers of its own in `/proc` and `/sys`, and its own devices in `/dev`: there is nothing of the
//! host's to mask. What an image has in these places lies below; its device nodes cannot be opened by the gofer either, as
//! the whole root is mounted `nodev` on the stage.

use serde_json::{Value, json};

use super::{GUEST, most_commands};
use crate::forge::runsc::place;
use crate::sandbox::image::HOSTNAME;
use crate::sandbox::{Identity, Limits};

pub(super) fn spec(identity: Identity, limits: &Limits, has_workspace: bool) -> Value {
    // The guest becomes each program's user, and ends what does not end. It empties the bounding set first thing.
    let powers = json!(["CAP_SETUID", "CAP_SETGID", "CAP_KILL", "CAP_SETPCAP"]);
    let range = json!([{ "containerID": 0, "hostID": identity.base, "size": Identity::RANGE }]);
    json!({
        "ociVersion": "1.0.2",
        "hostname": HOSTNAME,
        "root": { "path": place::ROOT, "readonly": true },
        "process": {
            "terminal": false,
            "user": { "uid": 0, "gid": 0 },
            "args": [GUEST, "--stdio", most_commands(limits).to_string()],
            "env": ["PATH=/usr/local/bin:/usr/bin:/bin"],
            "cwd": "/",
            "capabilities": { "bounding": powers, "permitted": powers, "effective": powers, "inheritable": [], "ambient": [] },
            "rlimits": rlimits(limits),
            "noNewPrivileges": true,
            "oomScoreAdj": 500,
        },
        "mounts": mounts(limits, has_workspace),
        "linux": {
            "namespaces": (["pid", "mount", "ipc", "uts", "network", "user"].map(|kind| json!({ "type": kind }))),
            "uidMappings": range,
            "gidMappings": range,
        },
    })
}

fn mounts(limits: &Limits, has_workspace: bool) -> Vec<Value> {
    let mount = |target: &str, kind: &str, options: &str| {
        let options: Vec<&str> = options.split(',').collect();
        json!({ "destination": target, "type": kind, "source": kind, "options": options })
    };
    let size = limits.tmp_bytes;
    let mut mounts = vec![
        mount("/proc", "proc", "nosuid,noexec,nodev"),
        mount("/sys", "sysfs", "ro,nosuid,noexec,nodev"),
        mount("/dev", "tmpfs", "nosuid,noexec,mode=755,size=65536"),
        mount(
            "/dev/shm",
            "tmpfs",
            &format!("nosuid,nodev,noexec,mode=1777,size={}", limits.shm_bytes),
        ),
        mount("/tmp", "tmpfs", &format!("nosuid,nodev,mode=1777,size={size}")),
        mount("/var/tmp", "tmpfs", &format!("nosuid,nodev,mode=1777,size={size}")),
    ];
    if has_workspace {
        mounts.push(
            json!({ "destination": "/workspace", "type": "bind", "source": place::WORKSPACE,
            "options": ["rw", "nosuid", "nodev"] }),
        );
    }
    mounts
}

fn rlimits(limits: &Limits) -> Vec<Value> {
    let wanted = [
        ("RLIMIT_NOFILE", limits.open_files.max(1024)),
        ("RLIMIT_FSIZE", limits.file_bytes),
        ("RLIMIT_CORE", 0),
        ("RLIMIT_MEMLOCK", 8 << 20),
        ("RLIMIT_SIGPENDING", 4096),
        ("RLIMIT_MSGQUEUE", 64 << 10),
    ];
    let limit = |(kind, value): (&str, u64)| json!({ "type": kind, "soft": value, "hard": value });
    wanted.into_iter().map(limit).collect()
}
