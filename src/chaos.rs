//! The kill switch for proving promise 1 on a real process: `EXUVIA_KILL_AT=before:17` or `after:17` makes the process kill
//! itself with SIGKILL just before, or just after, entry 17 of a run's journal becomes durable. Unset, it does nothing.
//!
//! Operators may use it too: start the server with it, watch it die, start it again, compare.

use std::str::FromStr;

/// Where to die.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KillAt {
    Never,
    Before(u64),
    After(u64),
}

impl FromStr for KillAt {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |digits: &str| digits.parse::<u64>().map_err(|error| format!("`{digits}`: {error}"));
        match text.split_once(':') {
            Some(("before", digits)) => Ok(Self::Before(number(digits)?)),
            Some(("after", digits)) => Ok(Self::After(number(digits)?)),
            _ => Err(format!("`{text}` is neither `before:N` nor `after:N`")),
        }
    }
}

impl KillAt {
    /// What `EXUVIA_KILL_AT` says.
    ///
    /// # Errors
    /// When it is set to something else.
    pub fn from_env() -> Result<Self, String> {
        std::env::var("EXUVIA_KILL_AT").map_or(Ok(Self::Never), |text| text.parse())
    }

    /// Entries `first..=last` are about to be committed.
    pub fn before(self, first: u64, last: u64) {
        if matches!(self, Self::Before(seq) if (first..=last).contains(&seq)) {
            die();
        }
    }

    /// They are durable, and nothing has been done about them yet.
    pub fn after(self, first: u64, last: u64) {
        if matches!(self, Self::After(seq) if (first..=last).contains(&seq)) {
            die();
        }
    }
}

fn die() -> ! {
    let _ = nix::sys::signal::kill(nix::unistd::getpid(), nix::sys::signal::Signal::SIGKILL);
    std::process::abort()
}
