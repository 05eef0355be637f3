//! `exuvia serve` over a desk's data directory.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::desk::{Desk, Done};

pub struct Served {
    child: Child,
    pub url: String,
}

impl Served {
    /// One whose sandboxes for direct use end with it.
    pub fn tidy(desk: &Desk) -> Self {
        Self::start(desk, &["--on-shutdown", "end"])
    }

    /// A tidy one that makes sandboxes ahead.
    pub fn with_pool(desk: &Desk, stock: &str) -> Self {
        Self::start(desk, &["--on-shutdown", "end", "--pool", stock])
    }

    fn start(desk: &Desk, more: &[&str]) -> Self {
        let mut child = desk
            .command(&[&["serve", "--listen", "127.0.0.1:0"], more].concat())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut hello = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut hello)
            .unwrap();
        let hello: Value = serde_json::from_str(&hello).unwrap();
        let url = format!("http://{}", hello["listening"].as_str().unwrap());
        Self { child, url }
    }

    /// Calls `exuvia sandbox …` on it, with or without --json.
    pub fn sandbox(&self, desk: &Desk, words: &[&str]) -> Done {
        desk.plain(&[&["sandbox"], words].concat())
            .env("EXUVIA_SERVER", &self.url)
            .output()
            .unwrap()
            .into()
    }
}

impl Drop for Served {
    /// Asked to end, not killed: what it made ahead goes with it.
    fn drop(&mut self) {
        kill(Pid::from_raw(self.child.id() as i32), Signal::SIGTERM).unwrap();
        self.child.wait().unwrap();
    }
}
