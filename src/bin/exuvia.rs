//! The one binary: command line, server, and (re-executed by itself) the launcher of sandboxes.

use std::process::ExitCode;

use exuvia::sandbox::backend::{gvisor, oci};

fn main() -> ExitCode {
    // Before any thread or runtime exists: the launcher makes namespaces and must be single-threaded.
    match std::env::args_os().nth(1) {
        Some(word) if word == oci::LAUNCH => oci::launch::launch_main(),
        Some(word) if word == gvisor::LAUNCH => gvisor::launch_main(),
        Some(_) | None => exuvia::cli::main(),
    }
}
