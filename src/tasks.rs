//! Background tasks with an owner: nothing is detached.
//!
//! Shutdown is: cancel, close, wait with a deadline, name who still runs. A panic is logged as an error.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// The background tasks of one service; clones share them.
#[derive(Debug, Clone, Default)]
pub struct Tasks {
    tracker: TaskTracker,
    stop: CancellationToken,
    names: Arc<Mutex<BTreeMap<u64, String>>>,
}

impl Tasks {
    /// Starts `task`, which should end soon after the token it is given is cancelled.
    #[expect(clippy::disallowed_methods, reason = "the one place that spawns")]
    pub fn spawn<F>(&self, name: impl Into<String>, task: impl FnOnce(CancellationToken) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let name = name.into();
        let future = self.tracker.track_future(task(self.stop.child_token()));
        let names = Arc::clone(&self.names);
        let key = {
            let mut names = lock(&names);
            let key = names.last_key_value().map_or(0, |(key, _)| key + 1);
            names.insert(key, name.clone());
            key
        };
        tokio::spawn(async move {
            let (on_end, watched) = (OnEnd { names, key }, tokio::spawn(future));
            if let Err(error) = watched.await {
                tracing::error!(task = %name, %error, "a background task broke");
            }
            drop(on_end);
        });
    }

    /// Is cancelled when the service stops.
    pub fn stopping(&self) -> CancellationToken {
        self.stop.clone()
    }

    /// Stops everything; gives the names of what still ran after `deadline`.
    pub async fn shut_down(&self, deadline: Duration) -> Vec<String> {
        self.stop.cancel();
        self.tracker.close();
        match tokio::time::timeout(deadline, self.tracker.wait()).await {
            Ok(()) => Vec::new(),
            Err(_) => lock(&self.names).values().cloned().collect(),
        }
    }
}

struct OnEnd {
    names: Arc<Mutex<BTreeMap<u64, String>>>,
    key: u64,
}

impl Drop for OnEnd {
    fn drop(&mut self) {
        lock(&self.names).remove(&self.key);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
