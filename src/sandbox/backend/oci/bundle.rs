//! The OCI bundle that `libcontainer` is given, and what it is not left to do.
//!
//! `libcontainer` makes the user, PID, time and mount namespaces, the id maps, `/proc`, `/dev` and the tmpfs mounts, hides
//! paths, drops capabilities and enters the new root. The launcher has done the rest by hand before:
//! - control groups, because `libcontainer` moves whole processes by `cgroup.procs` (a grace period of the kernel for each
//!   hierarchy) and always allows `mknod` and `/dev/net/tun`;
//! - network, IPC, UTS and cgroup namespaces: made by real root, they give the sandbox's own root no power over them;
//! - all mounts that come from the host, because mapped ids cannot reach their sources.

use std::fs;
use std::io;
use std::path::Path;

use libcontainer::oci_spec::OciSpecError;
use libcontainer::oci_spec::runtime::{
    Capabilities, Capability, LinuxBuilder, LinuxCapabilitiesBuilder, LinuxIdMappingBuilder, LinuxNamespaceBuilder,
    LinuxNamespaceType, Mount, MountBuilder, PosixRlimit, PosixRlimitBuilder, PosixRlimitType, ProcessBuilder,
    RootBuilder, Spec, SpecBuilder, UserBuilder,
};
use nix::sys::resource::{Resource, getrlimit};

use super::launch::Plan;
use super::stage;
use crate::sandbox::{Identity, Limits, walls};

/// What the guest is called inside. There is no such file: it is run by descriptor.
pub(super) const GUEST: &str = "exuvia-guest";

/// Writes `config.json`.
pub(super) fn write(plan: &Plan, dir: &Path) -> Result<(), io::Error> {
    let spec = spec(plan).map_err(io::Error::other)?;
    fs::write(dir.join("config.json"), serde_json::to_vec(&spec)?)
}

fn spec(plan: &Plan) -> Result<Spec, OciSpecError> {
    // The guest becomes each program's user, and ends what does not end. It empties the bounding set first thing, which
    // takes the fourth, and then has these three and nothing that a program could inherit.
    let powers = || {
        Capabilities::from([
            Capability::Setuid,
            Capability::Setgid,
            Capability::Kill,
            Capability::Setpcap,
        ])
    };
    let capabilities = LinuxCapabilitiesBuilder::default()
        .bounding(powers())
        .permitted(powers())
        .effective(powers())
        .inheritable(Capabilities::new())
        .ambient(Capabilities::new())
        .build()?;
    let process = ProcessBuilder::default()
        .terminal(false)
        .user(UserBuilder::default().uid(0u32).gid(0u32).build()?)
        .args([GUEST, "--listen-fd", "3"].map(str::to_owned))
        .env(["PATH=/usr/local/bin:/usr/bin:/bin".to_owned()])
        .cwd("/")
        .capabilities(capabilities)
        .rlimits(rlimits(&plan.limits)?)
        .no_new_privileges(true)
        // When memory runs out a sandbox goes before the server, and its programs (500, the guest sees to that) before it.
        .oom_score_adj(200)
        .build()?;
    let range = LinuxIdMappingBuilder::default()
        .container_id(0u32)
        .host_id(plan.identity.base)
        .size(Identity::RANGE)
        .build()?;
    let namespaces = [
        LinuxNamespaceType::User,
        LinuxNamespaceType::Pid,
        LinuxNamespaceType::Time,
        LinuxNamespaceType::Mount,
    ];
    let namespaces = namespaces.map(|kind| LinuxNamespaceBuilder::default().typ(kind).build());
    let mut linux = LinuxBuilder::default()
        .namespaces(namespaces.into_iter().collect::<Result<Vec<_>, _>>()?)
        .uid_mappings([range])
        .gid_mappings([range])
        .rootfs_propagation("private")
        .masked_paths(walls::MASKED.map(str::to_owned))
        .readonly_paths(walls::READ_ONLY.map(str::to_owned))
        .build()?;
    // Absent, not default: the group has its limits already.
    linux.set_resources(None).set_devices(None);
    let mut spec = SpecBuilder::default()
        .version("1.0.2")
        .root(RootBuilder::default().path(stage::ROOT).readonly(true).build()?)
        .process(process)
        .mounts(mounts(plan)?)
        .linux(linux)
        .build()?;
    // Set already, and the namespace is not made here.
    spec.set_hostname(None);
    Ok(spec)
}

fn mounts(plan: &Plan) -> Result<Vec<Mount>, OciSpecError> {
    let limits = &plan.limits;
    let cap = |bytes: u64| format!("mode=1777,size={bytes},nr_inodes={}", limits.tmp_inodes);
    let (tmp, shm) = (cap(limits.tmp_bytes), cap(limits.shm_bytes));
    Ok(vec![
        mount("/proc", "proc", "nosuid,noexec,nodev")?,
        // The host's would tell which sandboxes share it, over all their lives.
        MountBuilder::default()
            .destination("/proc/sys/kernel/random/boot_id")
            .typ("bind")
            .source(stage::BOOT_ID)
            .options(["bind", "ro", "nosuid", "noexec", "nodev"].map(str::to_owned))
            .build()?,
        mount("/dev", "tmpfs", "nosuid,noexec,mode=755,size=65536,nr_inodes=64")?,
        mount(
            "/dev/pts",
            "devpts",
            // The kernel has a few thousand for everyone.
            "nosuid,noexec,newinstance,ptmxmode=0666,mode=0620,gid=5,max=64",
        )?,
        mount("/dev/shm", "tmpfs", &format!("nosuid,nodev,noexec,{shm}"))?,
        // Tools run what they unpack there.
        mount("/tmp", "tmpfs", &format!("nosuid,nodev,{tmp}"))?,
        mount("/var/tmp", "tmpfs", &format!("nosuid,nodev,{tmp}"))?,
    ])
}

fn mount(target: &str, kind: &str, options: &str) -> Result<Mount, OciSpecError> {
    MountBuilder::default()
        .destination(target)
        .typ(kind)
        .source(kind)
        .options(options.split(',').map(str::to_owned).collect::<Vec<_>>())
        .build()
}

fn rlimits(limits: &Limits) -> Result<Vec<PosixRlimit>, OciSpecError> {
    let wanted = [
        (
            PosixRlimitType::RlimitNofile,
            Resource::RLIMIT_NOFILE,
            limits.open_files,
        ),
        (PosixRlimitType::RlimitFsize, Resource::RLIMIT_FSIZE, limits.file_bytes),
        (PosixRlimitType::RlimitCore, Resource::RLIMIT_CORE, 0),
        (PosixRlimitType::RlimitMemlock, Resource::RLIMIT_MEMLOCK, 8 << 20),
        (PosixRlimitType::RlimitSigpending, Resource::RLIMIT_SIGPENDING, 4096),
        (PosixRlimitType::RlimitMsgqueue, Resource::RLIMIT_MSGQUEUE, 64 << 10),
        (PosixRlimitType::RlimitRtprio, Resource::RLIMIT_RTPRIO, 0),
        (PosixRlimitType::RlimitNice, Resource::RLIMIT_NICE, 0),
    ];
    let limit = |(kind, resource, wanted): (PosixRlimitType, Resource, u64)| {
        // Inside its user namespace a process can lower a hard limit but not raise it.
        let most = getrlimit(resource).map_or(u64::MAX, |(_, hard)| hard);
        let value = wanted.min(most);
        PosixRlimitBuilder::default().typ(kind).soft(value).hard(value).build()
    };
    wanted.into_iter().map(limit).collect()
}
