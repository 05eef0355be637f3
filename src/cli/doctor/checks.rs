//! What the kernel and the machine offer.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Finding, State};
use crate::cli::Error;
use crate::error::Kind;
use crate::sandbox::backend::docker::Docker;
use crate::sandbox::backend::gvisor::{Runsc, is_safe_with_devices};
use crate::sandbox::backend::oci::Oci;
use crate::sandbox::cgroup::{Controller, Hierarchies, Version};
use crate::sandbox::identity::Claim;
use crate::sandbox::{Backend, Command as SandboxCommand, ImageRef, Isolation, Limits, Sandbox, Spec, seccomp};

/// What every sandbox of the `oci` backend stands on.
pub(super) fn host() -> Vec<Finding> {
    let mut findings = vec![privilege(), user_namespaces()];
    findings.extend(control_groups());
    findings.extend([
        system_call_filter(),
        file_system("overlay", State::Weak),
        file_system("tmpfs", State::Missing),
    ]);
    findings
}

fn privilege() -> Finding {
    let root = nix::unistd::geteuid().is_root();
    let state = if root { State::Ok } else { State::Missing };
    let detail = if root { "root" } else { "not root" };
    Finding::new(
        "privilege",
        state,
        detail,
        "run as root; the `oci` backend has no rootless mode yet",
    )
}

fn user_namespaces() -> Finding {
    let limit = read("/proc/sys/user/max_user_namespaces").and_then(|text| text.parse::<u64>().ok());
    let (state, detail) = match limit {
        Some(0) => (State::Missing, "forbidden: user.max_user_namespaces is 0".to_owned()),
        Some(limit) => (State::Ok, format!("up to {limit}")),
        None => (State::Missing, "not in this kernel".to_owned()),
    };
    Finding::new(
        "user namespaces",
        state,
        detail,
        "sysctl -w user.max_user_namespaces=65536",
    )
}

fn control_groups() -> Vec<Finding> {
    let hierarchies = match Hierarchies::detect() {
        Ok(hierarchies) => hierarchies,
        Err(error) => {
            let remedy = "boot with cgroup v2 (systemd.unified_cgroup_hierarchy=1), or mount the controllers named";
            return vec![Finding::new(
                "control groups",
                State::Missing,
                crate::error::chain(&error),
                remedy,
            )];
        }
    };
    let version = match hierarchies.version() {
        Version::V1 => "version 1",
        Version::V2 => "version 2",
    };
    let mut findings = Vec::new();
    let mut writable = Vec::new();
    for (controller, root) in hierarchies.roots() {
        let name = match controller {
            Controller::Memory => "memory",
            Controller::Pids => "pids",
            Controller::Cpu => "cpu",
            Controller::Cpuacct => "cpuacct",
            Controller::Freezer => "freezer",
            Controller::Devices => "devices",
            Controller::Io => "io",
        };
        if nix::unistd::access(root, nix::unistd::AccessFlags::W_OK).is_ok() {
            writable.push(name);
        } else {
            let detail = format!("{name}: `{}` is read-only", root.display());
            let remedy = "give the service write access to the control groups";
            findings.push(Finding::new("control group", State::Missing, detail, remedy));
        }
    }
    if findings.is_empty() {
        let detail = format!("{version}: {}", writable.join(", "));
        findings.push(Finding::new("control groups", State::Ok, detail, ""));
    }
    findings
}

fn system_call_filter() -> Finding {
    let actions = read("/proc/sys/kernel/seccomp/actions_avail").unwrap_or_default();
    let kernel = ["kill_process", "errno", "allow"]
        .iter()
        .all(|action| actions.split(' ').any(|a| a == *action));
    let compiled = seccomp::default_filter();
    let (state, detail) = match compiled {
        Ok(program) if kernel => (State::Ok, format!("{} instructions", program.len() / 8)),
        Ok(_) => (State::Missing, "this kernel lacks the actions needed".to_owned()),
        Err(error) => (State::Missing, crate::error::chain(&error)),
    };
    Finding::new(
        "system-call filter",
        state,
        detail,
        "use a kernel with CONFIG_SECCOMP_FILTER on x86-64",
    )
}

fn file_system(name: &'static str, otherwise: State) -> Finding {
    let known = read("/proc/filesystems").unwrap_or_default();
    let found = known.lines().any(|line| line.split_whitespace().last() == Some(name));
    let state = if found { State::Ok } else { otherwise };
    let detail = if found {
        "in this kernel"
    } else {
        "not in this kernel, or its module is not loaded"
    };
    let remedy = "modprobe overlay; without it only the `host` image works";
    Finding::new(name, state, detail, remedy)
}

/// The proof of all the others: really makes a sandbox with everything that it gets, runs a program in it, and removes it.
pub(super) async fn sandbox(data_dir: &Path) -> Finding {
    const NAME: &str = "a sandbox, really made";
    let remedy = "see what else is missing; then this message";
    match try_one(data_dir).await {
        Ok(detail) => Finding::new(NAME, State::Ok, detail, remedy),
        Err(error) => Finding::new(NAME, State::Missing, error.message, remedy),
    }
}

async fn try_one(data_dir: &Path) -> Result<String, Error> {
    let begun = Instant::now();
    let backend: Arc<dyn Backend> = Arc::new(Oci::new(data_dir)?);
    let claim = Claim::take(data_dir)?;
    let spec = Spec {
        id: crate::ids::SandboxId::random(),
        image: ImageRef::Host,
        isolation: Isolation::Container,
        limits: Limits::default(),
        identity: claim.identity(),
        workspace: None,
        mounts: Vec::new(),
        labels: std::collections::BTreeMap::new(),
    };
    let filter = seccomp::default_filter().map_err(|error| Error::of(Kind::WrongState, &error))?;
    let sandbox = Sandbox::open(backend, spec, filter).await?;
    let ran = sandbox.run(SandboxCommand::new(["true"]), 0).await;
    sandbox.close(Duration::ZERO).await?;
    let ended = ran?.ended;
    if !ended.is_success() {
        return Err(Error::new(
            Kind::Unavailable,
            format!("`true` in it ended so: {:?}", ended.cause),
        ));
    }
    let took = begun.elapsed().as_millis();
    Ok(format!(
        "one was made by the `oci` backend, ran a program and was removed, in {took} ms"
    ))
}

/// What other backends and stronger isolation would need.
pub(super) async fn more(data_dir: &Path) -> Vec<Finding> {
    vec![docker(data_dir).await, gvisor(), microvm()]
}

async fn docker(data_dir: &Path) -> Finding {
    const NAME: &str = "backend `docker`";
    match Docker::open(data_dir, None).await {
        Ok(docker) => {
            let gvisor = match docker.gvisor() {
                Ok(()) => "isolation `gvisor` too, by its runtime `runsc`".to_owned(),
                Err(missing) => format!("no isolation `gvisor`: {missing}"),
            };
            let detail = format!("the engine answers; whoever may use its socket is root here; {gvisor}");
            Finding::new(NAME, State::Ok, detail, "")
        }
        Err(crate::sandbox::Error::Unsupported { missing, .. }) => Finding::new(NAME, State::Absent, missing, ""),
        Err(error) => Finding::new(NAME, State::Absent, crate::error::chain(&error), ""),
    }
}

/// Of the `oci` backend. Looks at the program only: a sandbox with it takes longer than one wants to wait here.
fn gvisor() -> Finding {
    const NAME: &str = "isolation `gvisor`";
    let found = Runsc::find().and_then(|runsc| Ok((runsc.version()?, runsc.path)));
    let (version, path) = match found {
        Ok(found) => found,
        Err(missing) => {
            return Finding::new(
                NAME,
                State::Absent,
                missing,
                "policies that demand it are refused until then",
            );
        }
    };
    let found = format!("runsc {version} at `{}`, with the `oci` backend", path.display());
    if is_safe_with_devices(&version) {
        return Finding::new(NAME, State::Ok, found, "");
    }
    Finding::new(
        NAME,
        State::Weak,
        format!("{found}; older than the fix for CVE-2026-96812 (a device node in an image reaches the host's device)"),
        "no device is passed and images are mounted `nodev`, which closes that way; a newer runsc on the PATH closes it twice",
    )
}

fn microvm() -> Finding {
    let host = match fs::File::options().read(true).write(true).open("/dev/kvm") {
        Ok(_) => "/dev/kvm opens, but".to_owned(),
        Err(error) => format!("/dev/kvm does not open ({error}), and"),
    };
    let detail = format!("{host} no backend of this version uses it: policies that demand it are refused");
    Finding::new("isolation `microvm`", State::Absent, detail, "")
}

pub(super) fn read(path: &str) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}
