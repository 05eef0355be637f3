//! The code of one sandbox: contexts, which keep state between calls, and processes that wait for one piece of code each.
//!
//! `contexts.rs`: the contexts; `fresh.rs`: the processes that wait; `run.rs`: one piece of code, from its caller's side;
//! `calls.rs`: what the faces ask. This file keeps them, and ends them all with their sandbox.
//!
//! Nothing of it outlives the server: kernels end when the server's connection to them does, and the next server takes over
//! the sandbox without them.

mod calls;
mod contexts;
mod fresh;
mod run;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::watch;

pub use calls::{Code, NewContext};
pub use contexts::ContextView;
pub(super) use fresh::{Ahead, warm};
pub use run::{Item, RunEnd, Running};

use super::execs::How;
use super::state::End;
use crate::sandbox::kernel::{Fresh, Warm};
use crate::sandbox::seccomp::Profile;

/// What ends code from outside: `None` until it does.
type Over = watch::Sender<Option<How>>;

/// All code of one sandbox.
#[derive(Debug)]
pub(super) struct Codes {
    contexts: contexts::Contexts,
    fresh: fresh::FreshProcesses,
    /// Pieces of code so far: what the record calls them by.
    count: AtomicU64,
    over: Over,
}

impl Codes {
    pub fn new(seccomp: Profile, env: BTreeMap<String, String>) -> Self {
        Self {
            contexts: contexts::Contexts::default(),
            fresh: fresh::FreshProcesses::new(fresh_by(seccomp), env),
            count: AtomicU64::new(0),
            over: Over::default(),
        }
    }

    /// Takes what was made ahead with the sandbox.
    pub fn set_warm(&self, warm: Warm, of_image: &BTreeMap<String, String>) {
        self.fresh.set(warm, of_image);
    }

    fn next_number(&self) -> u64 {
        self.count.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Ends all code with its sandbox.
    pub fn end_all(&self, end: &End) {
        end_with(&self.over, How::Sandbox(end.clone()));
        self.contexts.end_all(end);
        self.fresh.clear();
    }
}

/// The first end is the end.
fn end_with(over: &Over, how: How) {
    over.send_if_modified(|over| {
        let is_first = over.is_none();
        over.get_or_insert(how);
        is_first
    });
}

/// Forks of one process share its memory layout and hash seed, which a strict policy does not want.
pub(super) fn fresh_by(seccomp: Profile) -> Fresh {
    match seccomp {
        Profile::Default => Fresh::Forked,
        Profile::Strict => Fresh::Executed,
    }
}
