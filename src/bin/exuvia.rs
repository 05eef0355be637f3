//! The one binary: command line and server.

fn main() -> std::process::ExitCode {
    exuvia::cli::main()
}
