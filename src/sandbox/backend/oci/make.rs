//! The server's side of making a sandbox. Blocking, and run to its end.

use std::fs;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::launch::{Outcome, Plan};
use super::record::{self, Record};
use super::{LAUNCH, Shared, ruin, socket};
use crate::process::Process;
use crate::sandbox::backend::{Handle, gvisor};
use crate::sandbox::{Error, Identity, Isolation, Spec, image};

/// How long the launcher may take; it needs some milliseconds.
const DEADLINE: Duration = Duration::from_secs(30);
/// Longest report of a launcher that is read, in bytes.
const LONGEST_REPORT: usize = 64 << 10;
/// Places inside that are ours; nothing may be mounted at, above or below them.
const OURS: [&str; 4] = ["/proc", "/dev", "/sys", "/.exuvia"];

/// Makes the sandbox; `memory` is a snapshot that it goes on from.
pub(super) fn create(shared: &Shared, spec: &Spec, memory: Option<&Path>) -> Result<Handle, Error> {
    check(shared, spec)?;
    let handle = Handle {
        id: spec.id.clone(),
        identity: spec.identity,
        user: Identity::USER,
    };
    let dir = shared.dir(&spec.id);
    // Resolved first: an image that is no good leaves no trace.
    let root = image::resolve(&spec.image, &shared.data_dir)?;
    let record = Record::new(spec.identity).map_err(|error| Error::failed("create", &spec.id, error))?;
    match record::found(&dir, &record) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return existing(shared, handle),
        Err(error) => return Err(Error::failed("create", &spec.id, error)),
    }
    match build(shared, spec, root, memory, record) {
        Ok(()) => Ok(handle),
        Err(cause) => Err(cause.after(ruin::destroy(shared, &spec.id))),
    }
}

/// `create` was called before with this id.
fn existing(shared: &Shared, handle: Handle) -> Result<Handle, Error> {
    let record = shared.record(&handle.id)?;
    match record.init {
        Some(init) if init.is_alive() && record.identity == handle.identity => Ok(handle),
        Some(_) => Err(Error::failed(
            "create",
            &handle.id,
            "there is one with this id, which has ended or is another's",
        )),
        None => Err(Error::failed("create", &handle.id, "it is being created already")),
    }
}

fn check(shared: &Shared, spec: &Spec) -> Result<(), Error> {
    let refuse = |wanted: String, missing: &str| {
        Err(Error::Unsupported {
            wanted,
            missing: missing.to_owned(),
        })
    };
    match spec.isolation {
        Isolation::Container => {}
        Isolation::Gvisor => {
            if let Err(missing) = &shared.runsc {
                return refuse("isolation `gvisor`".to_owned(), missing);
            }
        }
        Isolation::Microvm => {
            let wanted = format!("isolation `{}`", spec.isolation);
            return refuse(wanted, "the `oci` backend shares the host's kernel with its containers");
        }
    }
    let base = spec.identity.base;
    if base < Identity::RANGE || base.checked_add(Identity::RANGE).is_none() {
        return refuse(
            format!("user ids from {base}"),
            "ids that overlap the host's own are never given to a sandbox",
        );
    }
    for mount in &spec.mounts {
        let target = &mount.target;
        let clean = target
            .components()
            .all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
        let free = |ours: &&str| !target.starts_with(ours) && !Path::new(ours).starts_with(target);
        if !target.is_absolute() || !clean || !OURS.iter().all(free) {
            return refuse(
                format!("a mount at `{}`", target.display()),
                "that place belongs to the sandbox itself",
            );
        }
    }
    Ok(())
}

fn build(
    shared: &Shared,
    spec: &Spec,
    root: image::Root,
    memory: Option<&Path>,
    mut record: Record,
) -> Result<(), Error> {
    let id = &spec.id;
    let dir = shared.dir(id);
    let io = |error: io::Error| Error::failed("create", id, error);
    let group = shared.group(id);
    let runsc = shared
        .runsc
        .as_ref()
        .ok()
        .filter(|_| spec.isolation == Isolation::Gvisor);
    let limits = match runsc {
        Some(_) => gvisor::host_limits(&spec.limits),
        None => spec.limits.clone(),
    };
    group.create(&limits).map_err(|error| match error {
        crate::sandbox::cgroup::Error::NotTaken { .. } => Error::Unsupported {
            wanted: "the limits of the sandbox".to_owned(),
            missing: crate::error::chain(&error),
        },
        _ => Error::caused("create", id, &error),
    })?;
    let listener = socket::bind(&dir, socket::GUEST).map_err(io)?;
    fs::create_dir(dir.join("stage")).map_err(io)?;
    let plan = Plan {
        id: id.to_string(),
        stage: dir.join("stage"),
        doors: group.doors(),
        root,
        guest: shared.guest.clone(),
        workspace: spec.workspace.clone(),
        mounts: spec.mounts.clone(),
        identity: spec.identity,
        limits: spec.limits.clone(),
    };
    let (launcher, plan) = match runsc {
        None => (LAUNCH, serde_json::to_vec(&plan)),
        Some(runsc) => {
            let plan = gvisor::Plan::new(plan, spec, runsc, memory).map_err(io)?;
            (gvisor::LAUNCH, serde_json::to_vec(&plan))
        }
    };
    let plan = plan.map_err(|error| Error::failed("create", id, error))?;
    fs::write(dir.join("plan.json"), plan).map_err(io)?;
    let outcome = launch(shared, launcher, &dir, listener.into()).map_err(io)?;
    let pid = outcome.map_err(|reason| Error::failed("create", id, reason))?;
    let init = Process::find(pid as u32).map_err(io)?.filter(|_| group.holds(pid));
    let init = init.ok_or_else(|| Error::failed("create", id, "the guest ended at once"))?;
    record.init = Some(init);
    record.write(&dir).map_err(io)
}

/// Runs the launcher to its end.
fn launch(shared: &Shared, name: &str, dir: &Path, listener: OwnedFd) -> io::Result<Outcome> {
    let mut launcher = Command::new(&shared.launcher)
        .arg(name)
        .arg(dir.join("plan.json"))
        .env_clear()
        .current_dir("/")
        .stdin(listener)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let mut report = Vec::new();
    let read = match launcher.stdout.take() {
        Some(stdout) => hear(&launcher, stdout.into(), &mut report),
        None => Ok(()),
    };
    // It has ended, or is late, or said too much: either way it has nothing to add.
    if read.is_err() {
        launcher.kill()?;
    }
    let status = launcher.wait()?;
    read?;
    Ok(serde_json::from_slice(&report).unwrap_or_else(|_| Err(format!("the launcher ended early ({status})"))))
}

/// Reads what the launcher says until it has ended. Not until its pipe has: what it forked may hold that open when it was
/// killed itself.
fn hear(launcher: &Child, from: OwnedFd, into: &mut Vec<u8>) -> io::Result<()> {
    let pid = rustix::process::Pid::from_child(launcher);
    let process = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty())?;
    nix::fcntl::fcntl(&from, nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::O_NONBLOCK))?;
    let mut from = fs::File::from(from);
    let started = Instant::now();
    loop {
        let left = DEADLINE.saturating_sub(started.elapsed());
        let mut ready = [
            PollFd::new(process.as_fd(), PollFlags::POLLIN),
            PollFd::new(from.as_fd(), PollFlags::POLLIN),
        ];
        match poll(&mut ready, PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO)) {
            Ok(0) => {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "the launcher did not answer in time",
                ));
            }
            Ok(_) => {}
            Err(nix::Error::EINTR) => continue,
            Err(error) => return Err(error.into()),
        }
        // Asked before the pipe is emptied: what it said before it ended is in there.
        let has_ended = ready[0].any().unwrap_or(true);
        let mut chunk = [0; 4096];
        loop {
            match from.read(&mut chunk) {
                Ok(0) => return Ok(()),
                Ok(_) if into.len() > LONGEST_REPORT => return Err(io::ErrorKind::FileTooLarge.into()),
                Ok(got) => into.extend_from_slice(&chunk[..got]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        if has_ended {
            return Ok(());
        }
    }
}
