//! The in-sandbox agent, PID 1 of every sandbox. See `exuvia::guest`.

fn main() -> std::process::ExitCode {
    exuvia::guest::main()
}
