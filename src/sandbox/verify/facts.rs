//! What the kernel says of a process. Read once, by number: should the process end meanwhile, something is missing, which is a
//! breach.

use std::fs::{self, File};
use std::io;

use nix::sched::{CloneFlags, setns};

use super::{Breach, Expected};
use crate::sandbox::cgroup::{Devices, Enforced, Group, Hierarchies, host_swaps};
use crate::sandbox::mountinfo::{self, Entry};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Facts {
    pub status: String,
    pub uid_map: String,
    pub gid_map: String,
    pub limits: String,
    pub oom_score_adj: String,
    pub mounts: Vec<Entry>,
    /// Names of the namespaces that it shares with this process.
    pub shared: Vec<&'static str>,
    pub hostname: String,
    pub group: Group,
    pub enforced: Enforced,
    pub devices: Devices,
    pub host_swaps: bool,
}

impl Facts {
    /// # Errors
    /// What cannot be known.
    pub fn read(pid: i32, hierarchies: &Hierarchies, expected: &Expected) -> Result<Self, Breach> {
        let unknown =
            |what: &str, error: &dyn std::error::Error| Breach::new(what, "to be known", crate::error::chain(error));
        let text = |name: &str| {
            crate::process::read_made(format!("/proc/{pid}/{name}"))
                .map_err(|error| unknown(&format!("/proc/PID/{name}"), &error))
        };
        let mut shared = Vec::new();
        for name in &expected.namespaces {
            let of = |who: &str| {
                fs::read_link(format!("/proc/{who}/ns/{name}"))
                    .map_err(|error| unknown(&format!("namespace {name}"), &error))
            };
            if of(&pid.to_string())? == of("self")? {
                shared.push(*name);
            }
        }
        let group = hierarchies
            .group_of(pid)
            .map_err(|error| unknown("control group", &error))?;
        let enforced = match group.enforced() {
            Ok(enforced) => enforced,
            // A group that is not the sandbox's, as the root, need not have all the files. It holds to nothing then.
            Err(_) if group != expected.group => Enforced {
                memory_bytes: None,
                swap_bytes: None,
                pids: None,
                cpu_quota_us: None,
            },
            Err(error) => return Err(unknown("limits", &error)),
        };
        Ok(Self {
            status: text("status")?,
            uid_map: text("uid_map")?,
            gid_map: text("gid_map")?,
            limits: text("limits")?,
            oom_score_adj: text("oom_score_adj")?,
            mounts: mountinfo::parse(&text("mountinfo")?),
            shared,
            hostname: hostname(pid).map_err(|error| unknown("host name", &error))?,
            enforced,
            devices: group.devices().map_err(|error| unknown("devices", &error))?,
            group,
            host_swaps: host_swaps().map_err(|error| unknown("swap", &error))?,
        })
    }
}

/// The host name that a process sees: asked from within its namespace, by a thread that ends with it.
fn hostname(pid: i32) -> io::Result<String> {
    let namespace = File::open(format!("/proc/{pid}/ns/uts"))?;
    let asked = std::thread::scope(|scope| {
        scope
            .spawn(|| {
                setns(&namespace, CloneFlags::CLONE_NEWUTS)?;
                nix::unistd::gethostname()
            })
            .join()
    });
    match asked {
        Ok(name) => Ok(name?.to_string_lossy().into_owned()),
        Err(panic) => std::panic::resume_unwind(panic),
    }
}
