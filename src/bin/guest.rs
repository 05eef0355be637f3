//! The in-sandbox agent, PID 1 of every sandbox (`exuvia::guest`), and the process that makes sandboxes (`exuvia::forge`).

use exuvia::{forge, guest};

fn main() -> std::process::ExitCode {
    match std::env::args_os().nth(1) {
        Some(word) if word == forge::WORD => forge::main(),
        Some(_) | None => guest::main(),
    }
}
