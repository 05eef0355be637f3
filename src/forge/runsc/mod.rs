//! Sandboxes of gVisor: the place that `runsc` runs in (`stage`), and who starts it and speaks for it (`supervise`).
//!
//! A child of the forge does what it does for a container, up to the sandbox's root; then it puts that root on a stage, beside
//! what `runsc` needs, and becomes the supervisor: this program again, under the word [`WORD`]. Must not know: what is in
//! the bundle; the server writes it (`sandbox::backend::gvisor`).

mod stage;
mod supervise;

use std::process::{Command, ExitCode, Stdio};

pub(super) use stage::Stage;

/// The first argument of a supervisor; the second is [`FRESH`] or [`RESTORED`].
pub const WORD: &str = "--supervise-runsc";

/// How a sandbox comes to be.
const FRESH: &str = "fresh";
const RESTORED: &str = "restored";

/// Places on the stage.
pub mod place {
    /// The sandbox's root, read-only.
    pub const ROOT: &str = "/root";
    pub const WORKSPACE: &str = "/workspace";
    pub(super) const BUNDLE: &str = "/bundle";
    /// What `runsc` keeps.
    pub(super) const STATE: &str = "/state";
    pub(super) const RUNSC: &str = "/runsc";
    /// A checkpoint is written here.
    pub(super) const MEMORY: &str = "/memory";
    /// A checkpoint is read from here.
    pub(super) const IMAGE: &str = "/image";
    /// What `runsc` says.
    pub(super) const LOG: &str = "/runsc.log";
}

/// What every call has. The platform and what is off are named, so that a default of another release changes nothing.
const FLAGS: [&str; 12] = [
    "--platform=systrap",
    "--network=none",
    "--host-uds=none",
    "--host-fifo=none",
    "--net-raw=false",
    // All that is written is in the tmpfs mounts, which have sizes, and in the workspace.
    "--overlay2=none",
    "--directfs=true",
    // The host may write to the workspace too; nobody writes to the root.
    "--file-access=exclusive",
    "--file-access-mounts=shared",
    // It runs inside of our group, which it could not see.
    "--ignore-cgroups=true",
    "--allow-flag-override=false",
    "--watchdog-action=panic",
];

/// A call of `runsc` on the stage.
fn call(verb: &str) -> Command {
    let mut command = Command::new(place::RUNSC);
    command
        .arg(format!("--root={}", place::STATE))
        .arg(format!("--log={}", place::LOG))
        .args(FLAGS)
        .arg(verb)
        .env_clear()
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command
}

/// Supervises until the sandbox has ended.
pub fn main() -> ExitCode {
    match supervise::run() {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever waits has been told.
        Err(_) => ExitCode::FAILURE,
    }
}
