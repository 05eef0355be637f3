//! Isolation `gvisor` of the `oci` backend: a kernel in user space, `runsc`, between the programs and the host's.
//!
//! Owns: finding `runsc` (`program`), its bundle (`bundle`), the launcher and the supervisor of a sandbox (`launch`,
//! `supervise`), and memory snapshots (`snapshot`). What makes a sandbox findable and ends it (record, control group,
//! sockets, stage) is the `oci` backend's, and the same for both.
//!
//! ```text
//! server ─ launcher   enters the control group, makes namespaces (mount, pid, net, ipc, uts, cgroup), builds the stage and
//!             │       steps into it: from here no file of the host is to be seen but the image, read-only, and the workspace
//!             └ supervisor   PID 1 of that PID namespace: whatever runsc leaves behind is its to reap, and ends with it
//!                 │ pipes, one pair: `wire::mux`           ▲ guest.sock: one connection, one exec
//!                 └ runsc gofer, sandbox (user namespace: the identity's range, no id of the host) ─ guest, PID 1 inside
//! ```
//!
//! gVisor lets no socket of the host in, and one that listens would stop a checkpoint. So the guest speaks over its standard
//! input and output, and the supervisor stands between: a client sees a unix socket like that of any sandbox. What the guest
//! sends is parsed there, in a process that sees nothing but this sandbox, and not in the server.
//!
//! `runsc` is called with `--network=none`, so that there is no packet path at all, inside a network namespace with nothing
//! but loopback. It makes no control group; ours has it from its first instruction on.
//!
//! Weaker than isolation `container`, and said so in docs/adr/0013-gvisor.md: memory that runs out ends the whole sandbox;
//! forks are refused by a limit inside, and the host does not count them; `/tmp` has a size but no cap on files.

mod bundle;
mod launch;
mod program;
pub(super) mod snapshot;
mod supervise;
#[cfg(test)]
mod tests;

use super::Lack;
pub use launch::launch_main;
pub(super) use launch::{Plan, host_limits};
pub use program::{Runsc, is_safe_with_devices};

/// The hidden sub-command under which a binary that uses this backend must call [`launch_main`].
pub const LAUNCH: &str = "internal-gvisor-launch";

/// What this isolation does not give.
pub(super) const LACKS: [Lack; 5] = [
    Lack::LifeAfterOutOfMemory,
    Lack::RefusedForksCounted,
    Lack::AgentHidden,
    Lack::WholeStatusShown,
    Lack::MagicLinksRefused,
];

/// Where the guest is inside. Programs may read it; it tells nothing.
const GUEST: &str = "/.exuvia/guest";

/// Places on the stage, besides those of the `oci` backend.
mod place {
    pub const RUNSC: &str = "/runsc";
    pub const WORKSPACE: &str = "/workspace";
    /// A checkpoint is written here.
    pub const MEMORY: &str = "/memory";
    /// A checkpoint is read from here.
    pub const IMAGE: &str = "/image";
    /// What runsc says.
    pub const LOG: &str = "/runsc.log";
}
