//! The forge: the process that makes the sandboxes of the `oci` backend.
//!
//! It is the guest's own static program, started by the server under another word ([`WORD`]): long-lived, single-threaded,
//! and so small that a fork of it costs next to nothing. It runs as the host's root. So it holds no secret, runs nothing of
//! an image, and follows no name that a guest or an image can write but by descriptor, below a root, without magic links.
//!
//! ```text
//! server ──Make + pipe + listener──▶ serve.rs     forge: finds the shape's template, clones a child, maps its ids, reaps
//!                                    template.rs  a mount namespace that holds what sandboxes of one shape share; made once
//!                                    birth.rs     the child: mounts, walls, rights; then it *is* the guest, by exec
//!                                    runsc/       or, for gVisor: the stage that runsc runs on, and its supervisor
//!                                    walls.rs     which devices there are, and what hides a path
//!                                    sys.rs       system calls that nix lacks
//! ```
//!
//! The forge ends with its server: the socket between them closes. What it made goes on, and is found by its control group.
//! A forge that was killed is started anew; nothing of value is in it. Knows `wire` and the guest's system calls, and
//! nothing else of the crate; the server's half is `sandbox::backend::oci`.

mod birth;
pub mod runsc;
mod serve;
mod step;
pub(crate) mod sys;
mod template;
mod walls;

#[allow(clippy::all, missing_docs)]
mod proto {
    include!(env!("EXUVIA_FORGE_RS"));
}
pub use proto::*;
pub use walls::DEVICES;

use std::process::ExitCode;

/// The first argument of a forge. Its descriptor 0 is the socket.
pub const WORD: &str = "--forge";

/// Largest request, in bytes.
pub const MAX_REQUEST: usize = 128 << 10;

/// Largest answer frame, in bytes: a pipe takes so many at once, so frames of two processes never mix.
pub const MAX_ANSWER: usize = 4096;

/// Serves until the server is gone.
pub fn main() -> ExitCode {
    match serve::run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("exuvia-forge: {error}");
            ExitCode::FAILURE
        }
    }
}
