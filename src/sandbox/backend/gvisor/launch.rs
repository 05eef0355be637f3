//! The launcher: makes the world that `runsc` runs in, starts the supervisor in it, and ends.
//!
//! Like that of the `oci` backend: the program itself under a hidden name, single-threaded, with a plan on the command line,
//! the sandbox's listening socket as descriptor 0, and an answer on descriptor 1.

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use nix::mount::MsFlags;
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{ForkResult, pipe2, setsid};
use serde::{Deserialize, Serialize};

use super::{GUEST, Runsc, bundle, place, snapshot, supervise};
use crate::sandbox::backend::oci::launch::{self, Outcome};
use crate::sandbox::backend::oci::socket;
use crate::sandbox::backend::oci::stage::{self, During, Workspace};
use crate::sandbox::{Limits, Mount, Spec};

/// In a sandbox's directory: leads to the supervisor.
pub(super) const CONTROL: &str = "control.sock";
/// In a sandbox's directory: where a checkpoint is written.
pub(super) const MEMORY: &str = "memory";

/// In a sandbox's directory: what another must be like to go on from a checkpoint of this one.
pub(super) const SHAPE: &str = "shape";

/// Tasks that gVisor needs for itself, with all its threads.
const OVERHEAD_PIDS: u32 = 192;

/// What the host's kernel holds the whole to: each process inside is up to four of its tasks.
///
/// Programs have the lower limit as a resource limit inside, see `session.rs`; this one bounds gVisor itself.
pub(in crate::sandbox::backend) fn host_limits(limits: &Limits) -> Limits {
    Limits {
        pids: limits.pids.saturating_mul(4).saturating_add(OVERHEAD_PIDS),
        ..limits.clone()
    }
}

/// All that the launcher needs to know.
#[derive(Debug, Serialize, Deserialize)]
pub(in crate::sandbox::backend) struct Plan {
    base: launch::Plan,
    runsc: PathBuf,
    /// A checkpoint to go on from.
    image: Option<PathBuf>,
}

impl Plan {
    /// `base` is the plan of a container of the same shape.
    pub fn new(mut base: launch::Plan, spec: &Spec, runsc: &Runsc, image: Option<&Path>) -> io::Result<Self> {
        base.root.binds.push(Mount {
            source: base.guest.clone(),
            target: GUEST.into(),
        });
        let plan = Self {
            base,
            runsc: runsc.path.clone(),
            image: image.map(fs::canonicalize).transpose()?,
        };
        fs::DirBuilder::new().mode(0o700).create(plan.home().join(MEMORY))?;
        fs::write(plan.home().join(SHAPE), snapshot::shape(spec))?;
        Ok(plan)
    }

    /// The sandbox's directory.
    fn home(&self) -> &Path {
        self.base.stage.parent().unwrap_or(&self.base.stage)
    }
}

/// Runs the launcher. To be called first thing in `main`, before there are threads, when the first argument is
/// [`super::LAUNCH`].
pub fn launch_main() -> ExitCode {
    launch::answer(&run())
}

fn run() -> Outcome {
    launch::place_listener().map_err(|error| format!("the launcher was given no socket: {error}"))?;
    let plan: Plan = launch::given_plan()?;
    let listener = listener().map_err(|error| error.to_string())?;
    let control = socket::bind(plan.home(), CONTROL).map_err(|error| error.to_string())?;
    prepare(&plan).map_err(|error| crate::error::chain(&error))?;
    let (mut started, starting) = pipe2(nix::fcntl::OFlag::O_CLOEXEC)
        .map(|(read, write)| (fs::File::from(read), fs::File::from(write)))
        .map_err(|error| error.to_string())?;
    match fork().map_err(|error| error.to_string())? {
        ForkResult::Child => {
            drop(started);
            let begin = match plan.image {
                None => supervise::Begin::Fresh,
                Some(_) => supervise::Begin::Restored,
            };
            let served = alone()
                .and_then(|()| stage::show_processes().map_err(io::Error::other))
                .and_then(|()| supervise::run(begin, listener, control, starting));
            std::process::exit(i32::from(served.is_err()))
        }
        ForkResult::Parent { child } => {
            drop((listener, control, starting));
            let mut said = String::new();
            started.read_to_string(&mut said).map_err(|error| error.to_string())?;
            match said.as_str() {
                supervise::READY => Ok(child.as_raw()),
                "" => Err("the supervisor ended early".to_owned()),
                complaint => Err(complaint.to_owned()),
            }
        }
    }
}

fn prepare(plan: &Plan) -> Result<(), stage::Error> {
    launch::enter_group(&plan.base.doors)?;
    stage::isolate()?;
    unshare(CloneFlags::CLONE_NEWPID).during(|| "make a PID namespace".to_owned())?;
    stage::build(&plan.base, Workspace::Apart)?;
    let stage = &plan.base.stage;
    let show = |source: &Path, target: &str, flags: MsFlags| {
        let at = Mount {
            source: source.to_owned(),
            target: target.into(),
        };
        stage::place(stage, &at, MsFlags::MS_NOSUID | MsFlags::MS_NODEV | flags)
    };
    stage::make_dir(&stage::below(stage, Path::new("/tmp")))?;
    stage::make_file(&stage::below(stage, Path::new(place::RUNSC)))?;
    show(&plan.runsc, place::RUNSC, MsFlags::MS_RDONLY)?;
    let dirs = [
        (plan.base.workspace.as_deref(), place::WORKSPACE, MsFlags::empty()),
        (Some(&*plan.home().join(MEMORY)), place::MEMORY, MsFlags::empty()),
        (plan.image.as_deref(), place::IMAGE, MsFlags::MS_RDONLY),
    ];
    for (source, target, flags) in dirs {
        stage::make_dir(&stage::below(stage, Path::new(target)))?;
        if let Some(source) = source {
            show(source, target, flags)?;
        }
    }
    let spec = bundle::spec(plan.base.identity, &plan.base.limits, plan.base.workspace.is_some());
    let config = stage::below(stage, Path::new(stage::BUNDLE)).join("config.json");
    fs::write(config, spec.to_string()).during(|| "write the bundle".to_owned())?;
    stage::step_in(stage)
}

#[expect(
    unsafe_code,
    reason = "the listener is handed over as a descriptor, and fork is unsafe in general"
)]
fn listener() -> io::Result<UnixListener> {
    use std::os::fd::FromRawFd;
    // SAFETY: `place_listener` has just put it there, and nobody else owns it.
    let listener = unsafe { UnixListener::from_raw_fd(launch::LISTENER) };
    nix::fcntl::fcntl(&listener, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::FD_CLOEXEC))?;
    Ok(listener)
}

#[expect(unsafe_code, reason = "fork")]
fn fork() -> nix::Result<ForkResult> {
    // SAFETY: the launcher is single-threaded: the child inherits no lock in a held state.
    unsafe { nix::unistd::fork() }
}

/// Leaves the launcher's session and its standard streams, which the server reads to their end.
fn alone() -> io::Result<()> {
    setsid()?;
    let null = fs::File::options().read(true).write(true).open("/dev/null")?;
    nix::unistd::dup2_stdin(&null)?;
    nix::unistd::dup2_stdout(&null)?;
    nix::unistd::dup2_stderr(&null)?;
    // When memory runs out what is inside goes before whoever tells of it.
    fs::write("/proc/self/oom_score_adj", "100").or(Ok(()))
}

/// Says that the guest may be spoken to, or why not.
pub(super) fn report(mut to: impl Write, said: &str) -> io::Result<()> {
    to.write_all(said.as_bytes())
}
