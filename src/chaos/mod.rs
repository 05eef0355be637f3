//! Switches for proving durability on a real process. Unset, none of them does anything; they are for tests and for operators
//! who want to see it themselves: start the server with one, watch what happens, compare.
//!
//! | variable | what it does |
//! |---|---|
//! | `EXUVIA_KILL_AT=before:17`, `after:17` | SIGKILL just before, or just after, entry 17 of a run's journal becomes durable |
//! | `EXUVIA_KILL_AT=after-effect:7` | SIGKILL at a [`Moment`] of step 7, a tool call |
//! | `EXUVIA_CLOCK_JUMP=86400@1500` | the clock is set 86,400 s forward (or back, with a minus) 1.5 s after the start; `clock.rs` |
//! | `EXUVIA_STORE_FAULTS=7:50` | of 1,000 writes 50 come late, fail, or fail after they became durable; seed 7; `faults.rs` |
//! | `EXUVIA_STORE_BUSY_MS=300` | how long a write waits for another process's transaction |

mod clock;
mod faults;

use std::str::FromStr;
use std::time::Duration;

pub use clock::clock;
pub use faults::{Faults, Faulty};

/// Where to die.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KillAt {
    Never,
    Before(u64),
    After(u64),
    Moment(Moment, u32),
}

/// An instant in the life of a tool call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// It is decided, and nothing of it is stored.
    BeforeIntent,
    /// That it will run is durable; it does not run yet.
    AfterIntent,
    /// It has run, and nobody has heard of it.
    AfterEffect,
    /// Its outcome and its checkpoint are durable, in one transaction; the driver does not know yet.
    AfterOutcome,
    /// The driver has gone on from the checkpoint and told those who watch; nothing new has begun.
    AfterCheckpoint,
}

impl Moment {
    pub const ALL: [Self; 5] = [
        Self::BeforeIntent,
        Self::AfterIntent,
        Self::AfterEffect,
        Self::AfterOutcome,
        Self::AfterCheckpoint,
    ];

    /// As `EXUVIA_KILL_AT` names it.
    pub fn name(self) -> &'static str {
        match self {
            Self::BeforeIntent => "before-intent",
            Self::AfterIntent => "after-intent",
            Self::AfterEffect => "after-effect",
            Self::AfterOutcome => "after-outcome",
            Self::AfterCheckpoint => "after-checkpoint",
        }
    }
}

impl FromStr for KillAt {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        fn number<N: FromStr<Err: std::fmt::Display>>(digits: &str) -> Result<N, String> {
            digits.parse().map_err(|error| format!("`{digits}`: {error}"))
        }
        let moment = |name: &str| Moment::ALL.into_iter().find(|moment| moment.name() == name);
        match text.split_once(':') {
            Some(("before", digits)) => Ok(Self::Before(number(digits)?)),
            Some(("after", digits)) => Ok(Self::After(number(digits)?)),
            Some((name, digits)) if moment(name).is_some() => {
                let moment = moment(name).ok_or_else(String::new)?;
                Ok(Self::Moment(moment, number(digits)?))
            }
            _ => {
                let moments = Moment::ALL.map(|moment| format!("`{}:STEP`", moment.name()));
                Err(format!("`{text}` is not `before:N`, `after:N`, {}", moments.join(", ")))
            }
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

    /// A tool call is there.
    pub fn at(self, moment: Moment, step: u32) {
        if self == Self::Moment(moment, step) {
            die();
        }
    }
}

/// How long a write waits for another process's transaction: what `EXUVIA_STORE_BUSY_MS` says, or `usual`.
pub fn patience(usual: Duration) -> Duration {
    let told = std::env::var("EXUVIA_STORE_BUSY_MS").ok();
    let told = told.and_then(|text| text.parse().ok());
    told.map_or(usual, Duration::from_millis)
}

fn die() -> ! {
    let _ = nix::sys::signal::kill(nix::unistd::getpid(), nix::sys::signal::Signal::SIGKILL);
    std::process::abort()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_to_die_are_read_as_they_are_written() {
        let read = |text: &str| text.parse::<KillAt>();
        assert_eq!(read("before:17"), Ok(KillAt::Before(17)));
        assert_eq!(read("after:17"), Ok(KillAt::After(17)));
        for moment in Moment::ALL {
            assert_eq!(read(&format!("{}:3", moment.name())), Ok(KillAt::Moment(moment, 3)));
        }
        for wrong in ["", "before", "before:", "before:x", "after-lunch:3", "after-effect:-1"] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }
}
