//! What the `oci` backend does otherwise for this isolation when it makes a sandbox: limits, request, walls.

use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use super::snapshot::{self, MEMORY, SHAPE};
use super::{GUEST, Runsc, bundle};
use crate::forge::{self, Bind};
use crate::sandbox::cgroup::Group;
use crate::sandbox::verify::{Breach, Expected};
use crate::sandbox::{Identity, Limits, Spec, image};

/// Tasks that gVisor needs for itself, with all its threads.
const OVERHEAD_PIDS: u32 = 192;
/// When memory runs out what is inside goes before whoever tells of it.
const OOM_SCORE_ADJ: i32 = 100;

/// What the host's kernel holds the whole to: each process inside is up to four of its tasks.
///
/// Programs have the lower limit as a resource limit inside, see `session.rs`; this one bounds gVisor itself.
pub(in crate::sandbox::backend) fn host_limits(limits: &Limits) -> Limits {
    Limits {
        pids: limits.pids.saturating_mul(4).saturating_add(OVERHEAD_PIDS),
        ..limits.clone()
    }
}

/// Commands at once, so that what is asked for at once does not end the whole: each has a process of the guest's beside its own,
/// with two of the host's tasks and some 0.7 MiB of gVisor's memory each (measured).
pub(in crate::sandbox::backend) fn most_commands(limits: &Limits) -> u32 {
    const MEMORY_EACH: u64 = 3 << 20;
    let by_memory = u32::try_from(limits.memory_bytes / MEMORY_EACH).unwrap_or(u32::MAX);
    limits.pids.min(by_memory).max(8)
}

/// A sandbox to be made.
#[derive(Debug)]
pub(in crate::sandbox::backend) struct Wanted<'a> {
    pub spec: &'a Spec,
    pub runsc: &'a Runsc,
    pub guest: &'a Path,
    /// The sandbox's directory.
    pub dir: &'a Path,
    /// A snapshot to go on from.
    pub memory: Option<&'a Path>,
}

/// Turns the request for a container of the same shape into one for this isolation.
pub(in crate::sandbox::backend) fn ask_for(request: &mut forge::Make, wanted: &Wanted<'_>) -> io::Result<()> {
    let bytes = |path: &Path| path.as_os_str().as_bytes().to_vec();
    let Wanted { spec, runsc, dir, .. } = wanted;
    let memory = dir.join(MEMORY);
    fs::DirBuilder::new().mode(0o700).create(&memory)?;
    fs::write(dir.join(SHAPE), snapshot::shape(spec))?;
    if let Some(shape) = &mut request.shape {
        shape.binds.push(Bind {
            source: bytes(wanted.guest),
            target: GUEST.as_bytes().to_vec(),
        });
    }
    // The inside's, by the bundle; here they would hold gVisor itself.
    request.rlimits.clear();
    request.oom_score_adj = OOM_SCORE_ADJ;
    let image = wanted.memory.map(fs::canonicalize).transpose()?;
    request.runsc = Some(forge::Runsc {
        program: bytes(&runsc.path),
        config: bundle::spec(spec.identity, &spec.limits, spec.workspace.is_some())
            .to_string()
            .into_bytes(),
        memory: bytes(&memory),
        image: image.as_deref().map(bytes).unwrap_or_default(),
    });
    Ok(())
}

/// What is read back of the supervisor. It has the host's uid 0, for its files on the stage, and no power of it.
pub(in crate::sandbox::backend) fn expected(spec: &Spec, group: Group) -> Expected {
    Expected {
        user_namespace: None,
        uid: 0,
        groups: Vec::new(),
        namespaces: vec!["cgroup", "ipc", "mnt", "net", "pid", "time", "uts"],
        capabilities: [0; 5],
        filtered: false,
        oom_score_adj: OOM_SCORE_ADJ,
        rlimits: Vec::new(),
        hostname: Some(image::HOSTNAME),
        mounts: None,
        group,
        limits: host_limits(&spec.limits),
    }
}

/// Reads back that everything but the supervisor is mapped to the sandbox's own ids and to no other of the host. What programs
/// see and may do is gVisor's to hold, and cannot be read from outside.
pub(in crate::sandbox::backend) fn verify_inside(
    group: &Group,
    supervisor: i32,
    identity: Identity,
) -> io::Result<Result<(), Vec<Breach>>> {
    let wanted = ["0".to_owned(), identity.base.to_string(), Identity::RANGE.to_string()];
    let pids = group.pids().map_err(io::Error::other)?;
    let mut breaches = Vec::new();
    let mut inside = 0;
    for pid in pids.into_iter().filter(|pid| *pid != supervisor) {
        // Ended since.
        let Ok(map) = fs::read_to_string(format!("/proc/{pid}/uid_map")) else {
            continue;
        };
        inside += 1;
        let found: Vec<&str> = map.split_whitespace().collect();
        if found != wanted {
            breaches.push(Breach::new("uid_map of runsc", wanted.join(" "), found.join(" ")));
        }
    }
    if inside == 0 {
        breaches.push(Breach::new("processes of runsc", "one or more", "none"));
    }
    Ok(if breaches.is_empty() { Ok(()) } else { Err(breaches) })
}
