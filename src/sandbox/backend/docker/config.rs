//! What a container is asked to be: one pure function from a [`Spec`] to the engine's create call.
//!
//! Everything that an image's own configuration could say (user, entry point, health check, volumes, working directory,
//! stop signal) is overridden: images are hostile.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use bollard::models::{
    ContainerCreateBody, HealthConfig, HostConfig, HostConfigCgroupnsModeEnum, HostConfigLogConfig, Mount as Bind,
    MountBindOptions, MountBindOptionsPropagationEnum, MountType, ResourcesUlimits,
};

use super::channel;
use super::gvisor;
use super::image::Ready;
use super::record::Record;
use crate::sandbox::backend::gvisor::{host_limits, most_commands};
use crate::sandbox::cgroup::{Group, PERIOD_US, quota_us};
use crate::sandbox::image::HOSTNAME;
use crate::sandbox::verify::{Expected, Mounts, Writable};
use crate::sandbox::{Error, Isolation, Limits, Mount, Spec, walls};

const GUEST: &str = "/.exuvia/guest";

/// The guest's own: become the sandbox's user, and end that user's processes. SETPCAP it uses once, to empty the bounding
/// set, and gives up.
const CAPABILITIES: [&str; 4] = ["SETUID", "SETGID", "KILL", "SETPCAP"];

/// Where a bind could undo what the sandbox is.
const NO_BINDS: [&str; 4] = ["/proc", "/sys", "/dev", "/.exuvia"];

/// Everything about a sandbox that is not in its spec.
#[derive(Debug)]
pub struct Parts<'a> {
    pub image: &'a Ready,
    /// Our own files for just this sandbox, read-only.
    pub files: Vec<Mount>,
    pub guest: &'a Path,
    /// The directory for the control socket.
    pub ctl: &'a Path,
    /// uid and gid of programs, as numbered inside.
    pub user: u32,
    pub labels: HashMap<String, String>,
}

/// # Errors
/// When a mount of the spec names a place that must stay the sandbox's own, or a path is not text.
pub fn container(spec: &Spec, parts: Parts<'_>) -> Result<ContainerCreateBody, Error> {
    let limits = &spec.limits;
    let is_gvisor = spec.isolation == Isolation::Gvisor;
    let mut binds = Vec::new();
    for mount in parts.image.binds.iter().chain(&parts.files) {
        binds.push(bind(&mount.source, &mount.target, Access::Read)?);
    }
    for mount in &spec.mounts {
        check_target(&mount.target)?;
        binds.push(bind(&mount.source, &mount.target, Access::Read)?);
    }
    binds.push(bind(parts.guest, Path::new(GUEST), Access::Read)?);
    // Under gVisor there is no socket in it: it tells whose the container is (see `stray`).
    let access = if is_gvisor { Access::Read } else { Access::Write };
    binds.push(bind(parts.ctl, Path::new(channel::INSIDE), access)?);

    let scratch = format!(
        "rw,nosuid,nodev,exec,size={},nr_inodes={}",
        limits.tmp_bytes, limits.tmp_inodes
    );
    let mut tmpfs = HashMap::new();
    for volume in &parts.image.volumes {
        tmpfs.insert(volume.clone(), "ro,nosuid,nodev,noexec,size=4096".to_owned());
    }
    // Where the host puts what belongs to the sandbox's border; not within a volume, which nothing can be made in.
    if !parts
        .image
        .volumes
        .iter()
        .any(|volume| Path::new(BORDER).starts_with(volume))
    {
        tmpfs.insert(BORDER.to_owned(), "ro,nosuid,nodev,noexec,size=4096".to_owned());
    }
    tmpfs.insert("/tmp".to_owned(), format!("{scratch},mode=1777"));
    // Not `ShmSize`, which caps bytes alone.
    tmpfs.insert(
        "/dev/shm".to_owned(),
        format!(
            "rw,nosuid,nodev,noexec,size={},nr_inodes={},mode=1777",
            limits.shm_bytes, limits.tmp_inodes
        ),
    );
    match &spec.workspace {
        Some(directory) => {
            tmpfs.remove("/workspace");
            binds.push(bind(directory, Path::new("/workspace"), Access::Write)?);
        }
        None => {
            let user = parts.user;
            tmpfs.insert(
                "/workspace".to_owned(),
                format!("{scratch},mode=0755,uid={user},gid={user}"),
            );
        }
    }
    let taken: Vec<&str> = binds.iter().filter_map(|bind| bind.target.as_deref()).collect();
    tmpfs.retain(|target, _| !taken.contains(&target.as_str()));

    let strings = |list: &[&str]| Some(list.iter().map(ToString::to_string).collect());
    Ok(ContainerCreateBody {
        hostname: Some(HOSTNAME.into()),
        user: Some("0:0".into()),
        image: Some(parts.image.id.clone()),
        entrypoint: strings(&[GUEST]),
        cmd: Some(match is_gvisor {
            true => vec!["--stdio-line".into(), most_commands(limits).to_string()],
            false => vec![
                "--listen-path".into(),
                format!("{}/{}", channel::INSIDE, channel::SOCKET),
            ],
        }),
        open_stdin: is_gvisor.then_some(true),
        // An image's health check would be an exec with more rights than its programs have.
        healthcheck: Some(HealthConfig {
            test: strings(&["NONE"]),
            ..HealthConfig::default()
        }),
        working_dir: Some("/".into()),
        stop_signal: Some("SIGTERM".into()),
        labels: Some(parts.labels),
        host_config: Some(HostConfig {
            memory: Some(limits.memory_bytes as i64),
            memory_swap: Some((limits.memory_bytes + limits.swap_bytes) as i64),
            // Not nano_cpus: the engine refuses more than the host has, and a policy is not written for one host.
            cpu_period: Some(PERIOD_US as i64),
            cpu_quota: Some(quota_us(limits.cpus) as i64),
            pids_limit: Some(i64::from(match is_gvisor {
                true => host_limits(limits).pids,
                false => limits.pids,
            })),
            runtime: is_gvisor.then(|| gvisor::RUNTIME.to_owned()),
            ulimits: Some(ulimits(limits)),
            mounts: Some(binds),
            tmpfs: Some(tmpfs),
            // Loopback only. Not `NetworkDisabled`, which leaves out /etc/hosts too.
            network_mode: Some("none".into()),
            // Else the host's own name servers would show in /etc/resolv.conf.
            dns: strings(&["127.0.0.1"]),
            dns_search: strings(&["."]),
            ipc_mode: Some("private".into()),
            cgroupns_mode: Some(HostConfigCgroupnsModeEnum::PRIVATE),
            privileged: Some(false),
            readonly_rootfs: Some(true),
            init: Some(false),
            cap_drop: strings(&["ALL"]),
            cap_add: strings(&CAPABILITIES),
            security_opt: strings(&["no-new-privileges"]),
            masked_paths: strings(&walls::MASKED),
            readonly_paths: strings(&walls::READ_ONLY),
            log_config: Some(HostConfigLogConfig {
                typ: Some("none".into()),
                config: None,
            }),
            ..HostConfig::default()
        }),
        ..ContainerCreateBody::default()
    })
}

/// A mount point, as the sandboxes of the `oci` backend have it.
const BORDER: &str = "/run/exuvia";

/// What is read back once the guest serves.
pub fn expected(record: &Record, group: Group, remap: Option<u32>) -> Expected {
    // CAP_KILL, CAP_SETGID, CAP_SETUID; programs can have what is in the bounding set at most, which is nothing.
    const POWERS: u64 = 0b1110_0000;
    let limits = &record.limits;
    let tmpfs = |point, flags: &[&'static str], bytes: u64| Writable {
        point,
        flags: [&["nosuid", "nodev"], flags].concat(),
        tmpfs: Some((bytes, limits.tmp_inodes)),
    };
    let workspace = match record.has_workspace {
        // The engine binds without flags; a volume has its own.
        true => Writable {
            point: "/workspace",
            flags: Vec::new(),
            tmpfs: None,
        },
        false => tmpfs("/workspace", &[], limits.tmp_bytes),
    };
    let mut namespaces = vec!["cgroup", "ipc", "mnt", "net", "pid", "uts"];
    namespaces.extend(remap.map(|_| "user"));
    let uid = remap.unwrap_or(0);
    Expected {
        // The engine's one range, as it stands in its own files: not a sandbox's.
        user_namespace: None,
        uid,
        groups: vec![uid],
        namespaces,
        capabilities: [POWERS, POWERS, POWERS, 0, 0],
        filtered: true,
        oom_score_adj: 0,
        rlimits: vec![
            ("Max core file size", 0),
            ("Max file size", limits.file_bytes),
            ("Max locked memory", 8 << 20),
            ("Max open files", limits.open_files.max(1024)),
            ("Max pending signals", 1024),
            ("Max msgqueue size", 0),
        ],
        hostname: Some(HOSTNAME),
        mounts: Some(Mounts {
            root: Vec::new(),
            may_follow: true,
            writable: vec![
                tmpfs("/tmp", &[], limits.tmp_bytes),
                tmpfs("/dev/shm", &["noexec"], limits.shm_bytes),
                workspace,
            ],
            system: vec![
                "/proc",
                "/dev",
                "/dev/pts",
                "/dev/mqueue",
                "/sys/fs/cgroup",
                channel::INSIDE,
            ],
            masked: &walls::MASKED,
            read_only: &walls::READ_ONLY,
            // The engine's own paths show.
            secret: None,
        }),
        group,
        limits: limits.clone(),
    }
}

/// The guest's own limits, and the most that a program can have.
fn ulimits(limits: &Limits) -> Vec<ResourcesUlimits> {
    let both = |name: &str, value: u64| ResourcesUlimits {
        name: Some(name.into()),
        soft: Some(value as i64),
        hard: Some(value as i64),
    };
    vec![
        both("core", 0),
        both("fsize", limits.file_bytes),
        both("memlock", 8 << 20),
        both("msgqueue", 0),
        // The guest holds several descriptors for each exec; programs get their own, lower limit from it.
        both("nofile", limits.open_files.max(1024)),
        both("sigpending", 1024),
    ]
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Access {
    Read,
    Write,
}

fn bind(source: &Path, target: &Path, access: Access) -> Result<Bind, Error> {
    let text = |path: &Path| {
        path.to_str().map(str::to_owned).ok_or_else(|| Error::Unsupported {
            wanted: format!("a mount of `{}`", path.display()),
            missing: "the engine takes only paths that are UTF-8".into(),
        })
    };
    Ok(Bind {
        typ: Some(MountType::BIND),
        source: Some(text(source)?),
        target: Some(text(target)?),
        read_only: Some(access == Access::Read),
        bind_options: Some(MountBindOptions {
            propagation: Some(MountBindOptionsPropagationEnum::RPRIVATE),
            non_recursive: Some(true),
            ..MountBindOptions::default()
        }),
        ..Bind::default()
    })
}

fn check_target(target: &Path) -> Result<(), Error> {
    // By bytes: `Path` compares equal with and without `.` and doubled slashes.
    let normal = target.components().collect::<PathBuf>().as_os_str() == target.as_os_str()
        && !target.components().any(|part| part == std::path::Component::ParentDir);
    let reserved = NO_BINDS.iter().any(|ours| target.starts_with(ours)) || target == Path::new("/");
    if target.is_absolute() && normal && !reserved {
        return Ok(());
    }
    Err(Error::Unsupported {
        wanted: format!("a mount at `{}`", target.display()),
        missing: "it must be an absolute path without `..`, and outside /proc, /sys, /dev and /.exuvia".into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::SandboxId;
    use crate::sandbox::{Identity, ImageRef, Isolation};

    fn spec() -> Spec {
        Spec {
            id: SandboxId::from_bits(1),
            image: ImageRef::Docker("x".into()),
            isolation: Isolation::Container,
            limits: Limits::default(),
            identity: Identity { base: 1 << 20 },
            workspace: None,
            mounts: Vec::new(),
            labels: Default::default(),
        }
    }

    fn made(spec: &Spec, image: &Ready) -> Result<ContainerCreateBody, Error> {
        let parts = Parts {
            image,
            files: Vec::new(),
            guest: Path::new("/data/bin/guest-0"),
            ctl: Path::new("/data/sandboxes/x/ctl"),
            user: spec.identity.host_uid(),
            labels: HashMap::new(),
        };
        container(spec, parts)
    }

    fn ready() -> Ready {
        Ready {
            id: "sha256:0".into(),
            volumes: vec!["/var/lib/data".into(), "/tmp".into()],
            binds: Vec::new(),
        }
    }

    /// H: what we ask of the engine, whole; a change here is a change of the wall.
    #[test]
    fn the_wall_is_asked_for_in_full() {
        insta::with_settings!({ sort_maps => true }, {
            insta::assert_json_snapshot!(made(&spec(), &ready()).unwrap());
        });
    }

    #[test]
    fn a_mount_cannot_land_on_what_the_sandbox_is_made_of() {
        for target in [
            "/",
            "/proc/self",
            "/sys",
            "/dev/shm",
            "/.exuvia/ctl",
            "relative",
            "/a/../proc",
            "/a/./b",
        ] {
            let spec = Spec {
                mounts: vec![Mount {
                    source: "/srv".into(),
                    target: target.into(),
                }],
                ..spec()
            };
            assert!(
                matches!(made(&spec, &ready()), Err(Error::Unsupported { .. })),
                "{target}"
            );
        }
    }
}
