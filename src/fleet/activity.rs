//! Whether anything goes on in a sandbox, and since when nothing does.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};

use crate::clock::{Clock, Timestamp};

/// Counts what goes on; clones share it.
#[derive(Debug, Clone)]
pub(super) struct Activity(Arc<Counts>);

#[derive(Debug)]
struct Counts {
    going_on: AtomicUsize,
    /// When the last of them began or ended, in milliseconds.
    last: AtomicI64,
    clock: Arc<dyn Clock>,
}

/// One thing that goes on, until it is dropped.
#[derive(Debug)]
pub(super) struct Busy(Arc<Counts>);

impl Activity {
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        let last = AtomicI64::new(clock.now().0);
        Self(Arc::new(Counts {
            going_on: AtomicUsize::new(0),
            last,
            clock,
        }))
    }

    pub fn begin(&self) -> Busy {
        self.0.going_on.fetch_add(1, Ordering::SeqCst);
        self.touch();
        Busy(Arc::clone(&self.0))
    }

    /// As if something had begun and ended now.
    pub fn touch(&self) {
        self.0.last.fetch_max(self.0.clock.now().0, Ordering::SeqCst);
    }

    /// Since when nothing has gone on; `None` while something does.
    pub fn idle_since(&self) -> Option<Timestamp> {
        // In this order: what ends in between is seen as going on, or with its end.
        let is_busy = self.0.going_on.load(Ordering::SeqCst) > 0;
        (!is_busy).then(|| Timestamp(self.0.last.load(Ordering::SeqCst)))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.last.fetch_max(self.0.clock.now().0, Ordering::SeqCst);
        self.0.going_on.fetch_sub(1, Ordering::SeqCst);
    }
}
