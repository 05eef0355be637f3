//! Tells those who wait that a run has moved on: a level (the newest position), never the entries themselves, so a slow
//! watcher holds nobody up and can miss nothing.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use crate::ids::RunId;

/// The newest journal position of each run that somebody watches; clones share it.
#[derive(Debug, Clone, Default)]
pub struct Hub(Arc<Mutex<HashMap<RunId, watch::Sender<u64>>>>);

impl Hub {
    /// A run's journal is now durable up to `seq`.
    pub fn publish(&self, run: &RunId, seq: u64) {
        if let Some(sender) = self.lock().get(run) {
            sender.send_replace(seq);
        }
    }

    /// Changes whenever the run moves on from now.
    pub fn subscribe(&self, run: &RunId) -> watch::Receiver<u64> {
        let mut runs = self.lock();
        runs.retain(|_, sender| sender.receiver_count() > 0);
        runs.entry(run.clone())
            .or_insert_with(|| watch::channel(0).0)
            .subscribe()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<RunId, watch::Sender<u64>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
