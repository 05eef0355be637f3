//! What a sandbox is to be: plain data, the same for every backend.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Component, Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::image::StoredRef;
use super::{Error, disk};
use crate::ids::SandboxId;

/// Everything a backend needs to make one sandbox.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Spec {
    pub id: SandboxId,
    pub image: ImageRef,
    pub isolation: Isolation,
    pub limits: Limits,
    pub identity: Identity,
    /// A directory of ours, bound read-write at `/workspace`. Its files belong to [`Identity::host_uid`].
    pub workspace: Option<PathBuf>,
    /// Further read-only binds.
    pub mounts: Vec<Mount>,
    pub labels: BTreeMap<String, String>,
}

/// Places inside that the sandbox itself fills: a bind there would be hidden by it, or hide it.
pub const RESERVED: [&str; 8] = [
    "/proc",
    "/sys",
    "/dev",
    "/.exuvia",
    "/workspace",
    "/tmp",
    "/var/tmp",
    "/run",
];

impl Spec {
    /// What no backend takes; each checks more of its own.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a bind that would not be seen, or that would take the place of something of the sandbox.
    pub fn check(&self) -> Result<(), Error> {
        for Mount { target, .. } in &self.mounts {
            let refused = |missing: String| {
                Err(Error::Unsupported {
                    wanted: format!("a mount at `{}`", target.display()),
                    missing,
                })
            };
            let is_clean = target
                .components()
                .all(|part| matches!(part, Component::RootDir | Component::Normal(_)))
                && target.components().collect::<PathBuf>().as_os_str() == target.as_os_str();
            if !target.is_absolute() || !is_clean {
                return refused("a target is an absolute path without `.`, `..` and `//`".to_owned());
            }
            let taken = RESERVED
                .iter()
                .find(|place| target.starts_with(place) || Path::new(place).starts_with(target));
            if let Some(place) = taken {
                return refused(format!(
                    "`{place}` belongs to the sandbox itself, which would hide what is mounted there; choose another TARGET"
                ));
            }
        }
        Ok(())
    }
}

/// Where the root file system comes from. Written `host`, `image:NAME[@sha256:…]` or just `NAME`, `rootfs:DIR`, `tar:FILE`
/// or `docker:NAME`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum ImageRef {
    /// A read-only view of the host's own `/usr` and what belongs to it.
    Host,
    /// An unpacked root file system, used read-only.
    Rootfs(PathBuf),
    /// An image of the store.
    Stored(StoredRef),
    /// A tar of a root file system (plain, gzip, zstd or xz), unpacked once by content.
    Tar(PathBuf),
    /// An image that the local Docker engine has.
    Docker(String),
}

impl fmt::Display for ImageRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Stored(image) => write!(f, "image:{image}"),
            Self::Rootfs(path) => write!(f, "rootfs:{}", path.display()),
            Self::Tar(path) => write!(f, "tar:{}", path.display()),
            Self::Docker(name) => write!(f, "docker:{name}"),
        }
    }
}

/// Text that names no image.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` names no image: use `host`, `image:NAME`, `rootfs:DIR`, `tar:FILE`, `docker:NAME`, or a path")]
pub struct InvalidImage(String);

impl FromStr for ImageRef {
    type Err = InvalidImage;

    /// A bare path is taken for what it is on disk: a directory is a root file system, a file is a tar. What else could be a
    /// name is one of the store's.
    fn from_str(text: &str) -> Result<Self, InvalidImage> {
        match text.split_once(':') {
            None if text == "host" => Ok(Self::Host),
            Some(("rootfs", path)) if !path.is_empty() => Ok(Self::Rootfs(path.into())),
            Some(("tar", path)) if !path.is_empty() => Ok(Self::Tar(path.into())),
            Some(("docker", name)) if !name.is_empty() => Ok(Self::Docker(name.to_owned())),
            Some(("image", name)) => name
                .parse()
                .map(Self::Stored)
                .map_err(|_| InvalidImage(text.to_owned())),
            _ if text.contains('/') && std::path::Path::new(text).is_dir() => Ok(Self::Rootfs(text.into())),
            _ if text.contains('/') && std::path::Path::new(text).is_file() => Ok(Self::Tar(text.into())),
            _ => text
                .parse()
                .map(Self::Stored)
                .map_err(|_| InvalidImage(text.to_owned())),
        }
    }
}

impl TryFrom<String> for ImageRef {
    type Error = InvalidImage;

    fn try_from(text: String) -> Result<Self, InvalidImage> {
        text.parse()
    }
}

impl From<ImageRef> for String {
    fn from(image: ImageRef) -> String {
        image.to_string()
    }
}

/// How strong the wall must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Isolation {
    /// Namespaces, cgroups, seccomp; one kernel with the host.
    Container,
    /// A user-space kernel (gVisor) between the program and the host's.
    Gvisor,
    /// A kernel of its own in a small virtual machine.
    Microvm,
}

impl fmt::Display for Isolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Container => "container",
            Self::Gvisor => "gvisor",
            Self::Microvm => "microvm",
        })
    }
}

/// Which backend makes the sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum BackendName {
    Oci,
    Docker,
}

impl fmt::Display for BackendName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Oci => "oci",
            Self::Docker => "docker",
        })
    }
}

/// Caps that hold for the sandbox as a whole, enforced by cgroups, mounts and rlimits.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// Processors' worth of time, `0.5` = half of one.
    pub cpus: f64,
    pub memory_bytes: u64,
    /// Swap beyond memory; 0 = none.
    pub swap_bytes: u64,
    pub pids: u32,
    pub open_files: u64,
    /// Size of the tmpfs at `/tmp`, and of that at `/var/tmp` where there is one.
    pub tmp_bytes: u64,
    /// Files, directories and links that each of these can hold; each costs kernel memory.
    pub tmp_inodes: u64,
    /// Size of the tmpfs at `/dev/shm`, which holds as many files as `/tmp`.
    pub shm_bytes: u64,
    /// What `/workspace` can hold. `None` only for runs that began before there were disk quotas.
    pub disk: Option<disk::Quota>,
    /// What must enforce that; `None`: whatever this host has.
    pub disk_kind: Option<disk::Kind>,
    /// How fast `/workspace` is; where it is memory, as fast as that.
    #[serde(default, skip_serializing_if = "disk::Rates::is_unlimited")]
    pub disk_rates: disk::Rates,
    /// Largest single file that can be written (RLIMIT_FSIZE).
    pub file_bytes: u64,
    /// Life of the whole sandbox.
    pub wall_time: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            cpus: 1.0,
            memory_bytes: 1 << 30,
            swap_bytes: 0,
            pids: 256,
            open_files: 4096,
            tmp_bytes: 256 << 20,
            tmp_inodes: 10_000,
            shm_bytes: 64 << 20,
            disk: Some(disk::Quota::default()),
            disk_kind: None,
            disk_rates: disk::Rates::default(),
            file_bytes: 2 << 30,
            wall_time: Duration::from_secs(3600),
        }
    }
}

/// Who the programs in a sandbox are, to the host's kernel: a range of ids that no other live sandbox has.
///
/// Inside, the guest is uid 0 of its user namespace (`oci`) and programs are [`Identity::USER`]. Without a user namespace
/// (`docker`) programs run under [`Identity::host_uid`] directly.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Identity {
    /// First id of a range of 65,536.
    pub base: u32,
}

impl Identity {
    /// uid and gid of programs inside a user namespace.
    pub const USER: u32 = 1000;
    /// Ids in a range.
    pub const RANGE: u32 = 1 << 16;

    /// uid and gid that the host's kernel sees on a program of this sandbox, and that its workspace files belong to.
    pub fn host_uid(self) -> u32 {
        self.base + Self::USER
    }
}

/// A read-only bind of a host path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mount {
    pub source: PathBuf,
    /// Absolute, inside.
    pub target: PathBuf,
}

/// What the kernel counted; read from cgroup files, never from exit codes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    pub memory_bytes: u64,
    pub memory_peak_bytes: u64,
    /// Processes that the OOM killer ended so far.
    pub oom_kills: u64,
    pub pids: u64,
    /// Forks refused by the pids limit so far.
    pub pids_refused: u64,
    pub cpu_us: u64,
}

/// The part of [`Usage`] that every command is judged by. Both only grow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Losses {
    pub oom_kills: u64,
    pub pids_refused: u64,
}

impl From<Usage> for Losses {
    fn from(usage: Usage) -> Self {
        Self {
            oom_kills: usage.oom_kills,
            pids_refused: usage.pids_refused,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bind_that_the_sandbox_would_hide_is_refused_by_name() {
        let check = |target: &str| {
            let spec = Spec {
                id: SandboxId::from_bits(1),
                image: ImageRef::Host,
                isolation: Isolation::Container,
                limits: Limits::default(),
                identity: Identity { base: 1 << 20 },
                workspace: None,
                mounts: vec![Mount {
                    source: "/srv".into(),
                    target: target.into(),
                }],
                labels: BTreeMap::new(),
            };
            spec.check().map_err(|error| error.to_string())
        };
        for fine in [
            "/src",
            "/usr/share/data",
            "/var/lib/x",
            "/tmpfiles",
            "/srv/run",
            "/etc/app",
        ] {
            assert_eq!(check(fine), Ok(()), "{fine}");
        }
        for (target, place) in [
            ("/tmp", "/tmp"),
            ("/tmp/x", "/tmp"),
            ("/var/tmp/x", "/var/tmp"),
            ("/var", "/var/tmp"),
            ("/run/x", "/run"),
            ("/dev/shm/x", "/dev"),
            ("/workspace/x", "/workspace"),
            ("/.exuvia", "/.exuvia"),
            ("/proc/self", "/proc"),
            ("/", "/proc"),
        ] {
            let error = check(target).unwrap_err();
            let wanted =
                format!("this host cannot give a mount at `{target}`: `{place}` belongs to the sandbox itself");
            assert!(error.starts_with(&wanted), "{error}");
        }
        for target in ["src", "/a/../proc", "/a/./b", "/a//b", "/a/"] {
            assert!(check(target).unwrap_err().contains("absolute path"), "{target}");
        }
    }

    #[test]
    fn what_is_no_other_image_and_could_be_a_name_is_one_of_the_store() {
        let shown = |text: &str| text.parse::<ImageRef>().map(|image| image.to_string()).ok();
        for (text, image) in [
            ("host", "host"),
            ("python", "image:python"),
            ("image:python", "image:python"),
            ("team/tools:1.2", "image:team/tools:1.2"),
            ("docker:python", "docker:python"),
            ("tar:/x", "tar:/x"),
            ("/usr", "rootfs:/usr"),
        ] {
            assert_eq!(shown(text).as_deref(), Some(image), "{text}");
        }
        for bad in [
            "",
            "image:",
            "docker:",
            "rootfs:",
            "/no/such",
            "../x",
            "image:host",
            "Python",
            "python@sha256:12",
        ] {
            assert_eq!(shown(bad), None, "{bad}");
        }
    }
}
