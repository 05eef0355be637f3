//! Code kernels: Python, Bash and JavaScript run in a sandbox, with results that are more than text.
//!
//! Owns: the languages, the drivers that run inside (`kernels/`), the conversation with them, [`Kernel`] (state kept between
//! calls) and [`Warm`] (a fresh process for each piece of code). Must not know: clients, policies, who calls. A kernel is one
//! exec of the sandbox and can do nothing that another program in it could not; nothing is written into the image.
//!
//! The driver shares its process with the user's code, so whatever it says may be a lie of that code: it can say wrong things
//! about itself, never more than the caps of `outlet.rs` let through, and what is not understood ends the kernel. How a
//! kernel ended is what the exec says, not what the driver says.
//!
//! Read next: `frame.rs` for what goes over the wire, `carry.rs` for one piece of code from request to end. `docs/kernels.md`
//! tells what code finds and what callers get.

mod carry;
mod context;
mod frame;
mod language;
mod link;
mod message;
mod nursery;
mod outlet;
mod warm;

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::sync::mpsc;

pub use context::{Interrupted, Kernel, Options, State};
pub use language::{Interpreter, Language, UnknownLanguage};
pub use nursery::mould;
pub use warm::{Fresh, Warm, WarmOptions};

use super::exec;
use crate::error::Kind;

/// Largest piece of code, in bytes.
pub const MAX_CODE: usize = 4 << 20;

/// Why a kernel does not do what it is asked. What the code does is never one of these.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the sandbox has no {language}: no program {tried}")]
    NoInterpreter { language: Language, tried: String },
    /// It is there, and cannot serve: too old, or without what the driver needs.
    #[error("the sandbox's {language} cannot run code for us: {reason}")]
    Unfit { language: Language, reason: String },
    /// No process could be cast from a mould: start an interpreter instead.
    #[error("the sandbox's interpreter could not be cast: {0}")]
    NotCast(String),
    #[error("{waiting} calls wait for this kernel already")]
    Busy { waiting: usize },
    /// Restart it.
    #[error("the kernel has ended ({:?})", .0.cause)]
    Ended(Box<exec::Ended>),
    #[error("the code is {0} bytes long, more than {MAX_CODE}")]
    TooLong(usize),
    #[error("the code holds a NUL, which {0} cannot read")]
    Nul(Language),
    #[error("`{0}` cannot be the name of a variable")]
    Variable(String),
    #[error(transparent)]
    Sandbox(#[from] super::Error),
}

impl Error {
    pub fn kind(&self) -> Kind {
        match self {
            Self::NoInterpreter { .. } | Self::Unfit { .. } | Self::NotCast(_) | Self::Ended(_) => Kind::WrongState,
            Self::Busy { .. } => Kind::Exhausted,
            Self::TooLong(_) | Self::Nul(_) | Self::Variable(_) => Kind::Invalid,
            Self::Sandbox(error) => error.kind(),
        }
    }
}

/// How one piece of code is run.
#[derive(Debug, Clone, PartialEq)]
pub struct RunOptions {
    /// From its start. In a kernel the code is then interrupted, in a fresh process killed.
    pub timeout: Option<Duration>,
    /// How long interrupted code may go on. After a timeout, the kernel is then ended.
    pub grace: Duration,
    /// For this call only.
    pub env: BTreeMap<String, String>,
}

impl Default for RunOptions {
    fn default() -> Self {
        Self {
            timeout: None,
            grace: Duration::from_secs(5),
            env: BTreeMap::new(),
        }
    }
}

/// A piece of code that runs or waits for its turn. Dropping it ends the code as its time limit would.
#[derive(Debug)]
pub struct Run {
    /// Ends after [`Event::Ended`]. Bounded: code whose events are not taken waits.
    pub events: mpsc::Receiver<Event>,
}

/// What code does, in the order it does it. Output is bytes, never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    Stdout(Vec<u8>),
    Stderr(Vec<u8>),
    /// Something to show, by MIME type.
    Result {
        data: BTreeMap<String, Vec<u8>>,
        /// The value of the last expression.
        is_main: bool,
    },
    Error {
        name: String,
        value: String,
        /// The code's own frames alone; may be empty.
        traceback: String,
    },
    /// The last, exactly once.
    Ended(RunEnded),
}

/// How a piece of code ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunEnded {
    /// It came to its end without an error.
    pub ok: bool,
    /// Interrupted, or killed, for its time limit.
    pub timed_out: bool,
    /// Ended by an interrupt that was asked for.
    pub interrupted: bool,
    /// Set when the process that ran it has ended: always for a fresh one; for a kernel, its state is then lost.
    pub kernel: Option<exec::Ended>,
    /// Without the time it waited for its turn.
    pub duration: Duration,
    /// Which call of its kernel this was, from 1; 0 if it was never run.
    pub execution_count: u64,
    /// Results that were over the caps and were not passed on.
    pub dropped_results: u64,
}

impl RunEnded {
    /// Of code that was never run: its kernel had ended before its turn.
    fn without_a_kernel(kernel: exec::Ended) -> Self {
        Self {
            ok: false,
            timed_out: false,
            interrupted: false,
            kernel: Some(kernel),
            duration: Duration::ZERO,
            execution_count: 0,
            dropped_results: 0,
        }
    }
}
