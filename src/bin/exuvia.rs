//! The one binary: command line, server, and (re-executed by itself) the launcher of sandboxes.

use std::process::ExitCode;

use exuvia::sandbox::backend::oci;

fn main() -> ExitCode {
    // Before any thread or runtime exists: the launcher makes namespaces and must be single-threaded.
    if std::env::args_os().nth(1).is_some_and(|word| word == oci::LAUNCH) {
        return oci::launch::launch_main();
    }
    exuvia::cli::main()
}
