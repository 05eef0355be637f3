//! The command line: one file a sub-command. Parses, calls the domain, prints; decides nothing.
//!
//! With `--json` the last line of stdout is one JSON object; everything for people goes to stderr then. Exit codes are in
//! `exit.rs`.

/// A line on stdout. A reader that has gone away ends nothing: the run goes on.
macro_rules! out {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stdout(), $($text)*);
    }};
}

/// A line on stderr, in the same way.
macro_rules! err {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($text)*);
    }};
}

mod approve;
mod audit;
mod doctor;
pub mod exit;
mod image;
mod policy;
mod progress;
mod remote;
mod replay;
mod report;
mod run;
mod sandbox;
mod serve;
mod task;
mod workspace;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
pub use exit::{Error, Exit};
use serde_json::json;

/// With the commit it was built from, and whether there were changes on top.
const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("EXUVIA_SOURCE"), ")");

/// Runs AI agents nobody trusts on machines somebody cares about.
#[derive(Debug, Parser)]
#[command(name = "exuvia", version = VERSION, about, propagate_version = true, after_help = exit::HELP)]
struct Cli {
    /// Print one JSON object as the last line of stdout; everything else goes to stderr.
    #[arg(long, global = true)]
    json: bool,
    /// Where runs, workspaces and the audit log are kept [default: $XDG_DATA_HOME/exuvia or ~/.local/share/exuvia].
    #[arg(long, global = true, env = "EXUVIA_DATA_DIR", value_name = "DIR")]
    data_dir: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve the gRPC API.
    Serve(serve::Args),
    /// Run one task here, with an embedded service.
    Run(Box<run::Args>),
    /// Work with the tasks of a server.
    Task(task::Args),
    /// Replay recorded runs on this build, and tell where it would go another way; executes nothing.
    Replay(replay::Args),
    /// Use a sandbox directly.
    Sandbox(sandbox::Args),
    /// Bring images for sandboxes in, look at them, take them out.
    Image(image::Args),
    /// Check, show and explain policies.
    Policy(policy::Args),
    /// Say yes to a call that waits for a person, and let its run go on.
    Approve(approve::Args),
    /// Say no to a call that waits for a person, and let its run go on.
    Deny(approve::Args),
    /// Verify and query the audit log.
    Audit(audit::Args),
    /// Look after the store of workspaces and artifacts.
    Workspace(workspace::Args),
    /// Tell what this host can enforce, and what to do about each gap.
    Doctor(doctor::Args),
}

/// What every sub-command is given.
#[derive(Debug, Clone)]
pub struct Context {
    /// `--json`: one final object on the last line of stdout.
    pub json: bool,
    /// `--data-dir`, `EXUVIA_DATA_DIR`, else `$XDG_DATA_HOME/exuvia`, else `~/.local/share/exuvia`.
    pub data_dir: PathBuf,
}

impl Context {
    /// What a command that is proposed needs to find the same data: nothing, or ` --data-dir DIR`.
    pub fn data_flag(&self) -> String {
        let found = std::env::var_os("EXUVIA_DATA_DIR").filter(|dir| !dir.is_empty());
        let found = absolute(found.map_or_else(default_data_dir, PathBuf::from));
        match found == self.data_dir {
            true => String::new(),
            false => format!(" --data-dir {}", quoted(&self.data_dir.to_string_lossy())),
        }
    }

    /// Prints the final object (with `--json`) or the text for people.
    pub fn finish(&self, object: &serde_json::Value, text: &str) {
        if self.json {
            out!("{object}");
        } else if !text.is_empty() {
            out!("{}", text.trim_end_matches('\n'));
        }
    }
}

/// The command line's main: parses, runs, prints an error if there is one.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let context = Context {
        json: cli.json,
        data_dir: absolute(cli.data_dir.unwrap_or_else(default_data_dir)),
    };
    log_to_stderr();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            err!("error: cannot start: {error}");
            return Exit::Internal.into();
        }
    };
    let result = runtime.block_on(dispatch(cli.command, &context));
    runtime.shutdown_timeout(std::time::Duration::from_secs(2));
    match result {
        Ok(exit) => exit.into(),
        Err(error) => {
            err!("error: {error}");
            if let Some(hint) = &error.hint {
                err!("hint: {hint}");
            }
            if context.json {
                out!(
                    "{}",
                    json!({ "error": { "kind": error.kind, "message": error.message, "hint": error.hint } })
                );
            }
            error.exit().into()
        }
    }
}

async fn dispatch(command: Command, context: &Context) -> Result<Exit, Error> {
    match command {
        Command::Serve(args) => serve::run(args, context).await,
        Command::Run(args) => run::run(*args, context).await,
        Command::Task(args) => task::run(args, context).await,
        Command::Replay(args) => replay::run(args, context).await,
        Command::Sandbox(args) => sandbox::run(args, context).await,
        Command::Image(args) => image::run(args, context).await,
        Command::Policy(args) => policy::run(args, context).await,
        Command::Approve(args) => approve::run(args, approve::Verdict::Approve, context).await,
        Command::Deny(args) => approve::run(args, approve::Verdict::Deny, context).await,
        Command::Audit(args) => audit::run(args, context).await,
        Command::Workspace(args) => workspace::run(args, context).await,
        Command::Doctor(args) => doctor::run(args, context).await,
    }
}

/// As a word of a shell.
fn quoted(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-+:,@%=".contains(c);
    match !text.is_empty() && text.chars().all(is_plain) {
        true => text.to_owned(),
        false => format!("'{}'", text.replace('\'', "'\\''")),
    }
}

/// A time as people write it: `30s`, `1h 30m`; a number alone counts seconds.
fn duration(text: &str) -> Result<std::time::Duration, String> {
    if let Ok(seconds) = text.parse::<u64>() {
        return Ok(std::time::Duration::from_secs(seconds));
    }
    humantime::parse_duration(text).map_err(|error| format!("{error}; write it like `30s`, `5m`, `1h 30m`"))
}

/// Sandboxes are made by processes of their own, with other working directories.
fn absolute(path: PathBuf) -> PathBuf {
    std::path::absolute(&path).unwrap_or(path)
}

fn default_data_dir() -> PathBuf {
    let from = |name| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    from("XDG_DATA_HOME")
        .or_else(|| from("HOME").map(|home| home.join(".local/share")))
        .unwrap_or_else(|| PathBuf::from("/var/lib"))
        .join("exuvia")
}

/// `EXUVIA_LOG` (as `RUST_LOG`: `info`, `exuvia=debug`) chooses; the default is `warn`.
fn log_to_stderr() {
    let filter = tracing_subscriber::EnvFilter::try_from_env("EXUVIA_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .init();
}

/// Who acts, for the record: the person behind sudo, else the user, else the uid.
fn person() -> String {
    let named = |name| std::env::var(name).ok().filter(|name| !name.is_empty());
    named("SUDO_USER")
        .or_else(|| named("USER"))
        .unwrap_or_else(|| format!("uid-{}", nix::unistd::getuid()))
}
