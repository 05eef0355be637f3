//! What sandboxes are compared with, and the table that all benchmarks print.
//!
//! `runc.rs` and `docker.rs` are what a host offers without us, used as their own users would: `runc` as a process, the
//! Docker engine through its HTTP interface.
#![allow(dead_code, reason = "each benchmark uses a part of it")]

mod docker;
mod runc;
mod table;

pub use docker::Engine;
pub use runc::Runc;
pub use table::Table;

use std::process::{Command, Stdio};

/// Any error: a benchmark only tells it and stops.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// A whole number from the environment.
pub fn setting(name: &str, default: usize) -> Result<usize> {
    Ok(std::env::var(name).map_or(Ok(default), |text| text.parse())?)
}

/// What was opened; told by name where that failed, and left out.
pub fn told<T>(name: &str, opened: Result<T>) -> Option<T> {
    opened.inspect_err(|error| eprintln!("SKIPPED {name}: {error}")).ok()
}

pub fn succeeds(command: &mut Command) -> Result<()> {
    let output = command.stdin(Stdio::null()).output()?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!(
        "{command:?}: {}, {}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    )
    .into())
}

/// An interpreter itself: what is found first along PATH may be a script that chooses one.
pub fn python() -> &'static str {
    const PLAIN: [&str; 2] = ["/usr/bin/python3", "/usr/local/bin/python3"];
    let there = PLAIN.into_iter().find(|path| std::path::Path::new(path).exists());
    there.unwrap_or("python3")
}
