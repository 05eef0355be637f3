//! The in-sandbox agent, PID 1 of every sandbox (`exuvia::guest`), the process that makes sandboxes (`exuvia::forge`), and the
//! one beside each sandbox of gVisor (`exuvia::forge::runsc`).

use exuvia::{forge, guest};

fn main() -> std::process::ExitCode {
    match std::env::args_os().nth(1) {
        Some(word) if word == forge::WORD => forge::main(),
        Some(word) if word == forge::runsc::WORD => forge::runsc::main(),
        Some(_) | None => guest::main(),
    }
}
