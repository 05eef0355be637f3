//! Isolation `gvisor` of the `oci` backend: a kernel in user space, `runsc`, between the programs and the host's.
//!
//! Owns: finding `runsc` (`program`), its bundle (`bundle`), what is asked of the forge and read back (`make`), and memory
//! snapshots (`snapshot`). The stage and the supervisor of a sandbox are the forge's (`forge::runsc`). What makes a sandbox
//! findable and ends it (record, control group, sockets) is the `oci` backend's, and the same for both.
//!
//! ```text
//! server ─ forge     clones a child that enters the control group, leaves the host's namespaces for its own (mount, pid, net,
//!            │       ipc, uts, cgroup, time), and puts the sandbox's root on a stage: no file of the host is to be seen from
//!            │       there but the image, read-only, runsc, and the workspace
//!            └ supervisor   the child: PID 1 of that PID namespace: whatever runsc leaves behind is its to reap, and ends with it.
//!                │          It outlives the server, which finds it again by its sockets
//!                │ pipes, one pair: `wire::mux`           ▲ guest.sock: one connection, one exec
//!                └ runsc gofer, sandbox (user namespace: the identity's range, no id of the host) ─ guest, PID 1 inside
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
mod make;
mod program;
pub(super) mod snapshot;
#[cfg(test)]
mod tests;

use super::Lack;
pub(super) use make::{Wanted, ask_for, expected, host_limits, most_commands, verify_inside};
pub use program::{Runsc, is_safe_with_devices};

/// What this isolation does not give.
pub(super) const LACKS: [Lack; 6] = [
    Lack::LifeAfterOutOfMemory,
    Lack::RefusedForksCounted,
    Lack::AgentHidden,
    Lack::WholeStatusShown,
    Lack::MagicLinksRefused,
    Lack::CommandsWithoutEnd,
];

/// Where the guest is inside. Programs may read it; it tells nothing.
const GUEST: &str = "/.exuvia/guest";
