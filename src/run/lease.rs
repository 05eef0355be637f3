//! Runs of a process that lives and does nothing: stopped by a signal, for longer than its lease (requirement E12).
//!
//! A process that has died is known at once (`process.rs`); one that is stopped may go on any moment. So nothing is taken from it
//! before it has stood still for the whole lease, by the watcher's own time; when it wakes up afterwards, the fence that the
//! take-over raised refuses what it had in hand.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

use super::{Error, Service};
use crate::store::{Owner, RunRecord};

/// How long another process may stand still before its runs are taken over.
pub const LEASE: Duration = Duration::from_secs(300);

impl Service {
    /// Looks again and again, until it is dropped.
    pub(super) async fn watch_owners(&self) {
        let lease = self.shop().lease;
        let mut still: HashMap<Owner, Instant> = HashMap::new();
        loop {
            tokio::time::sleep(lease / 4).await;
            if let Err(error) = self.look_at_owners(&mut still).await {
                tracing::warn!(error = %crate::error::chain(&error), "cannot look for processes that stand still");
            }
        }
    }

    async fn look_at_owners(&self, still: &mut HashMap<Owner, Instant>) -> Result<(), Error> {
        let stopped = |record: RunRecord| {
            let owner = record.owner.clone().filter(Owner::is_stopped)?;
            Some((owner, record))
        };
        let theirs: Vec<_> = self
            .shop()
            .store
            .unfinished()
            .await?
            .into_iter()
            .filter_map(stopped)
            .collect();
        still.retain(|owner, _| theirs.iter().any(|(stopped, _)| stopped == owner));
        for (owner, record) in theirs {
            let since = *still.entry(owner.clone()).or_insert_with(Instant::now);
            if since.elapsed() < self.shop().lease {
                continue;
            }
            tracing::warn!(run = %record.run, pid = owner.pid, "its process stands still: taken over");
            self.shop().store.claim(&record.run, self.owner(), Some(&owner)).await?;
            self.drive(&record.run);
        }
        Ok(())
    }
}
