//! The in-sandbox agent: PID 1 of every sandbox, a static binary that runs in enemy land.
//!
//! Owns: reaping (`init`), many connections over stdio where no socket reaches in (`mux`), one forked *shim* for each
//! connection (`shim`), which runs one exec (`session`, its output in `streams`) or passes on one TCP connection (`dial`); the
//! line between init and shims (`leash`, `register`), over which a later connection finds a detachable exec; what a program is
//! and has when it starts (`child`, `user`, `terminal`), and how a process goes on as another instead (`cast`, `maps`); finding
//! and ending whole process trees (`tree`), the file plane (`files`). Depends on `wire` and on nothing else of the crate. It holds no secret, and the host believes nothing it says
//! without a check.
//!
//! The agent is uid 0 of its (user) namespace with `CAP_SETUID`, `CAP_SETGID` and `CAP_KILL`; programs are another uid
//! with nothing. It is compiled for the host too, so that the host's tests and lints see it; the host itself uses `files`.

mod cast;
mod child;
mod dial;
pub mod files;
mod init;
mod leash;
pub(crate) mod maps;
mod mux;
mod outbox;
mod register;
mod session;
mod shim;
mod streams;
pub(crate) mod sys;
mod terminal;
mod tree;
mod user;

use std::os::fd::RawFd;
use std::path::PathBuf;
use std::process::ExitCode;

/// Where connections come from.
enum Source {
    /// An inherited, listening unix socket.
    ListenFd(RawFd),
    /// A unix socket to bind, mode 0600.
    ListenPath(PathBuf),
    /// One inherited, connected unix socket: one exec, then the end.
    ConnectFd(RawFd),
    /// Standard input and output, which carry all connections; so many commands at once.
    Stdio(mux::Breaks, usize),
}

/// Runs the agent; returns only to end the sandbox.
pub fn main() -> ExitCode {
    let result = source().and_then(|source| init::run(source).map_err(|error| error.to_string()));
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("exuvia-guest: {message}");
            ExitCode::FAILURE
        }
    }
}

fn source() -> Result<Source, String> {
    const USAGE: &str =
        "usage: exuvia-guest --listen-fd N | --listen-path PATH | --connect-fd N | --stdio MOST | --stdio-line MOST";
    let mut arguments = std::env::args_os().skip(1);
    let (Some(option), Some(value), None) = (arguments.next(), arguments.next(), arguments.next()) else {
        return Err(USAGE.to_owned());
    };
    let number = || {
        let parsed = value.to_str().and_then(|text| text.parse().ok());
        parsed
            .filter(|fd: &RawFd| *fd > 2)
            .ok_or("a descriptor is a number above 2")
    };
    let most = || {
        let parsed = value.to_str().and_then(|text| text.parse().ok());
        parsed.ok_or("the most commands at once are a number")
    };
    match option.to_str() {
        Some("--listen-fd") => Ok(Source::ListenFd(number()?)),
        Some("--listen-path") => Ok(Source::ListenPath(value.into())),
        Some("--connect-fd") => Ok(Source::ConnectFd(number()?)),
        Some("--stdio") => Ok(Source::Stdio(mux::Breaks::Never, most()?)),
        Some("--stdio-line") => Ok(Source::Stdio(mux::Breaks::Expected, most()?)),
        Some(_) | None => Err(USAGE.to_owned()),
    }
}
