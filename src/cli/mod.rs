//! The command line: one file a sub-command. Parses, calls the domain, prints; decides nothing.
//!
//! With `--json` the last line of stdout is one JSON object; everything for people goes to stderr then. Exit codes are in
//! `exit.rs`.

pub mod exit;

use std::path::PathBuf;

pub use exit::{Error, Exit};

/// What every sub-command is given.
#[derive(Debug, Clone)]
pub struct Context {
    /// `--json`: one final object on the last line of stdout.
    pub json: bool,
    /// `--data-dir`, `EXUVIA_DATA_DIR`, else `$XDG_DATA_HOME/exuvia`, else `~/.local/share/exuvia`.
    pub data_dir: PathBuf,
}

impl Context {
    /// Prints the final object (with `--json`) or the text for people.
    pub fn finish(&self, object: &serde_json::Value, text: &str) {
        if self.json {
            println!("{object}");
        } else if !text.is_empty() {
            println!("{}", text.trim_end_matches('\n'));
        }
    }
}
