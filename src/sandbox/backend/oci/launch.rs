//! The launcher: a short-lived, single-threaded process that makes one container and ends.
//!
//! It is the program itself, called again under a hidden name ([`super::LAUNCH`]) with the path of a [`Plan`]; descriptor 0 is the
//! sandbox's listening socket. It answers with one JSON [`Outcome`] on descriptor 1. Single-threaded because namespaces belong to
//! threads and a thread that moves itself enters a control group without waiting.

use std::convert::Infallible;
use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use libcontainer::container::builder::ContainerBuilder;
use libcontainer::oci_spec::runtime::Spec;
use libcontainer::syscall::syscall::SyscallType;
use libcontainer::workload::{Executor, ExecutorError, ExecutorSetEnvsError, ExecutorValidationError};
use nix::fcntl::OFlag;
use serde::{Deserialize, Serialize};

use super::bundle;
use super::stage::{self, During};
use crate::sandbox::{Identity, Limits, Mount, image};

/// All that the launcher needs to know.
#[derive(Debug, Serialize, Deserialize)]
pub(in crate::sandbox::backend) struct Plan {
    pub id: String,
    /// An empty directory to build in.
    pub stage: PathBuf,
    /// Files through which to enter the control group.
    pub doors: Vec<PathBuf>,
    pub root: image::Root,
    pub guest: PathBuf,
    pub workspace: Option<PathBuf>,
    pub mounts: Vec<Mount>,
    pub identity: Identity,
    pub limits: Limits,
}

/// The process number of the guest, or why there is none.
pub(in crate::sandbox::backend) type Outcome = Result<i32, String>;

/// The descriptor on which the guest accepts.
pub(in crate::sandbox::backend) const LISTENER: RawFd = 3;

/// Runs the launcher. To be called first thing in `main`, before there are threads, when the first argument is
/// [`super::LAUNCH`].
pub fn launch_main() -> ExitCode {
    answer(&run())
}

/// Tells the server how it went.
pub(in crate::sandbox::backend) fn answer(outcome: &Outcome) -> ExitCode {
    let answer = serde_json::to_string(outcome).unwrap_or_default();
    let told = io::stdout()
        .write_all(answer.as_bytes())
        .and_then(|()| io::stdout().flush());
    match (outcome, told) {
        (Ok(_), Ok(())) => ExitCode::SUCCESS,
        (Err(_), _) | (_, Err(_)) => ExitCode::FAILURE,
    }
}

fn run() -> Outcome {
    place_listener().map_err(|error| format!("the launcher was given no socket: {error}"))?;
    let plan: Plan = given_plan()?;
    let guest = guest(&plan.guest).map_err(|error| format!("the guest cannot be opened: {error}"))?;
    prepare(&plan).map_err(|error| crate::error::chain(&error))?;
    contain(&plan, guest)
}

/// Reads the plan that the command line names.
pub(in crate::sandbox::backend) fn given_plan<T: serde::de::DeserializeOwned>() -> Result<T, String> {
    let Some(path) = std::env::args_os().nth(2) else {
        return Err("the launcher was given no plan".to_owned());
    };
    fs::read(&path)
        .map_err(|error| error.to_string())
        .and_then(|text| serde_json::from_slice(&text).map_err(|error| error.to_string()))
        .map_err(|error| format!("the launcher's plan cannot be read: {error}"))
}

fn prepare(plan: &Plan) -> Result<(), stage::Error> {
    enter_group(&plan.doors)?;
    stage::isolate()?;
    stage::enter(plan)
}

/// Enters the control group: from here this process is killed with it.
pub(in crate::sandbox::backend) fn enter_group(doors: &[PathBuf]) -> Result<(), stage::Error> {
    for door in doors {
        let step = || format!("enter `{}`", door.display());
        // Not created: a group that is gone must stay gone.
        let mut door = File::options().write(true).open(door).during(step)?;
        door.write_all(b"0").during(step)?;
    }
    Ok(())
}

/// Moves the listener from descriptor 0 to 3, and the null device to 0. The first thing done: nothing of ours is open yet.
pub(in crate::sandbox::backend) fn place_listener() -> io::Result<()> {
    use nix::fcntl::{FcntlArg, fcntl};
    match nix::unistd::close(LISTENER) {
        // What a careless ancestor left open is of no use here.
        Ok(()) | Err(nix::Error::EBADF) => {}
        Err(error) => return Err(error.into()),
    }
    let placed = fcntl(io::stdin(), FcntlArg::F_DUPFD(LISTENER))?;
    if placed != LISTENER {
        return Err(io::Error::other(format!("descriptor {placed} in place of {LISTENER}")));
    }
    let null = File::open("/dev/null")?;
    Ok(nix::unistd::dup2_stdin(&null)?)
}

/// Opened while the host's files are in reach. It is run by descriptor: no file of it, and so no path of the host, is in the
/// sandbox.
fn guest(path: &Path) -> nix::Result<Arc<OwnedFd>> {
    use nix::fcntl::open;
    open(path, OFlag::O_PATH | OFlag::O_CLOEXEC, nix::sys::stat::Mode::empty()).map(Arc::new)
}

/// Makes a container of the stage and starts the guest in it.
fn contain(plan: &Plan, guest: Arc<OwnedFd>) -> Outcome {
    let (mut started, starting) = pipe().map_err(|error| error.to_string())?;
    let null = || {
        File::options()
            .read(true)
            .write(true)
            .open("/dev/null")
            .map_err(|error| error.to_string())
    };
    let builder = ContainerBuilder::new(plan.id.clone(), SyscallType::default())
        .with_root_path(stage::STATE)
        .map_err(|error| crate::error::chain(&error))?
        .with_preserved_fds(1)
        .with_executor(Guest {
            file: guest,
            starting: Arc::clone(&starting),
        })
        .with_stdin(null()?)
        .with_stdout(null()?)
        .with_stderr(null()?);
    let mut container = builder
        .as_init(stage::BUNDLE)
        .with_systemd(false)
        .with_detach(true)
        .build()
        .map_err(|error| crate::error::chain(&error))?;
    container.start().map_err(|error| crate::error::chain(&error))?;
    // The other end closes when the guest runs: what comes before is why it does not.
    drop(starting);
    let mut complaint = String::new();
    started
        .read_to_string(&mut complaint)
        .map_err(|error| error.to_string())?;
    match container.pid() {
        Some(pid) if complaint.is_empty() => Ok(pid.as_raw()),
        Some(_) | None => Err(format!("the guest did not start: {complaint}")),
    }
}

fn pipe() -> io::Result<(File, Arc<File>)> {
    let (read, write) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
    Ok((read.into(), Arc::new(write.into())))
}

/// Turns the container's first process into the guest.
#[derive(Clone)]
struct Guest {
    file: Arc<OwnedFd>,
    /// Closes when the guest runs.
    starting: Arc<File>,
}

impl Executor for Guest {
    fn exec(&self, _: &Spec) -> Result<(), ExecutorError> {
        let failed = match become_guest(&self.file) {
            Ok(never) => match never {},
            Err(error) => error,
        };
        // There is nobody else to tell.
        let _ = (&*self.starting).write_all(failed.to_string().as_bytes());
        Err(ExecutorError::Other(failed.to_string()))
    }

    fn validate(&self, _: &Spec) -> Result<(), ExecutorValidationError> {
        Ok(())
    }

    /// The guest is given an environment of its own.
    fn setup_envs(&self, _: std::collections::HashMap<String, String>) -> Result<(), ExecutorSetEnvsError> {
        Ok(())
    }
}

fn become_guest(file: &OwnedFd) -> io::Result<Infallible> {
    // `libcontainer` links it to the kernel's memory, which is hidden anyway.
    match fs::remove_file("/dev/kcore") {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        Ok(()) | Err(_) => {}
    }
    let words = [bundle::GUEST, "--listen-fd", "3"].map(CString::new);
    let words = words.into_iter().collect::<Result<Vec<_>, _>>()?;
    Ok(nix::unistd::fexecve(
        file,
        &words,
        &[c"PATH=/usr/local/bin:/usr/bin:/bin"],
    )?)
}
