//! Places: how many sandboxes there may be at once, and who waits for one, first come first served.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, TryAcquireError};

use super::Error;

/// Requests that may wait for a place.
const MOST_WAITING: usize = 4096;
/// How long also those wait who do not want to, when a place is about to come back.
const SOON: Duration = Duration::from_secs(1);

/// The places of a fleet; clones share them.
#[derive(Debug, Clone)]
pub(super) struct Quota(Arc<Places>);

#[derive(Debug)]
struct Places {
    total: usize,
    free: Arc<Semaphore>,
    waiting: AtomicUsize,
    /// Held by what runs no more and is not gone yet.
    leaving: AtomicUsize,
    /// Sandboxes of an earlier server beyond the quota of this one.
    beyond: AtomicUsize,
}

/// A taken place; given back when dropped.
#[derive(Debug)]
pub(super) struct Place {
    places: Arc<Places>,
    /// `None`: beyond the quota, as far as was known when it was taken.
    permit: Option<OwnedSemaphorePermit>,
    is_leaving: bool,
}

impl Quota {
    pub fn new(total: usize) -> Self {
        Self(Arc::new(Places {
            total,
            free: Arc::new(Semaphore::new(total)),
            waiting: AtomicUsize::new(0),
            leaving: AtomicUsize::new(0),
            beyond: AtomicUsize::new(0),
        }))
    }

    /// Takes a place, waiting for it as long as `patience` says, behind those who wait already. Cancellation-safe: who
    /// stops waiting holds nothing.
    ///
    /// # Errors
    /// [`Error::NoPlace`], [`Error::QueueFull`].
    pub async fn take(&self, patience: Duration) -> Result<Place, Error> {
        let places = &self.0;
        let no_place = |waited| Error::NoPlace {
            places: places.total,
            waited,
        };
        // Asked first: what leaves afterwards has given its place back by then, or will.
        let patience = match places.leaving.load(Ordering::SeqCst) {
            0 => patience,
            _ => patience.max(SOON),
        };
        match Arc::clone(&places.free).try_acquire_owned() {
            Ok(permit) => return Ok(self.place(Some(permit))),
            Err(TryAcquireError::NoPermits) if patience.is_zero() => return Err(no_place(patience)),
            Err(TryAcquireError::NoPermits) => {}
            Err(TryAcquireError::Closed) => return Err(Error::Stopping),
        }
        let _waiting = Waiting::new(places)?;
        match tokio::time::timeout(patience, Arc::clone(&places.free).acquire_owned()).await {
            Ok(Ok(permit)) => Ok(self.place(Some(permit))),
            Ok(Err(_)) => Err(Error::Stopping),
            Err(_) => Err(no_place(patience)),
        }
    }

    /// Takes a place for a sandbox that is there already, also where there is none.
    pub fn take_over(&self) -> Place {
        match Arc::clone(&self.0.free).try_acquire_owned() {
            Ok(permit) => self.place(Some(permit)),
            Err(_) => {
                self.0.beyond.fetch_add(1, Ordering::SeqCst);
                self.place(None)
            }
        }
    }

    /// Whoever waits is told that the server stops.
    pub fn close(&self) {
        self.0.free.close();
    }

    fn place(&self, permit: Option<OwnedSemaphorePermit>) -> Place {
        Place {
            places: Arc::clone(&self.0),
            permit,
            is_leaving: false,
        }
    }
}

impl Place {
    /// What it was taken for runs no more: it comes back soon.
    pub fn leaving(&mut self) {
        if !std::mem::replace(&mut self.is_leaving, true) {
            self.places.leaving.fetch_add(1, Ordering::SeqCst);
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.is_leaving {
            self.places.leaving.fetch_sub(1, Ordering::SeqCst);
        }
        let less = |beyond: usize| beyond.checked_sub(1);
        let was_beyond = self
            .places
            .beyond
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, less)
            .is_ok();
        match (self.permit.take(), was_beyond) {
            // One of those beyond the quota has this place now.
            (Some(permit), true) => permit.forget(),
            (Some(permit), false) => drop(permit),
            (None, true) => {}
            // It got a place from one that ended before.
            (None, false) => self.places.free.add_permits(1),
        }
    }
}

/// One who waits.
struct Waiting<'a>(&'a Places);

impl<'a> Waiting<'a> {
    fn new(places: &'a Places) -> Result<Self, Error> {
        let waiting = Self(places);
        match places.waiting.fetch_add(1, Ordering::SeqCst) {
            before if before < MOST_WAITING => Ok(waiting),
            _ => Err(Error::QueueFull(MOST_WAITING)),
        }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn places_come_back_and_those_who_wait_get_them_in_order() {
        let quota = Quota::new(1);
        let first = quota.take(Duration::ZERO).await.unwrap();
        let refused = quota.take(Duration::ZERO).await.unwrap_err();
        assert_eq!(refused.reason(), "QUOTA");
        let patience = Duration::from_secs(60);
        let (second, third) = (quota.take(patience), quota.take(patience));
        tokio::pin!(second, third);
        assert!(futures::poll!(&mut second).is_pending());
        assert!(futures::poll!(&mut third).is_pending());
        drop(first);
        assert!(futures::poll!(&mut third).is_pending(), "it came later");
        drop(second.await.unwrap());
        drop(third.await.unwrap());
        // Who gives up waiting holds nothing.
        let held = quota.take(Duration::ZERO).await.unwrap();
        assert!(quota.take(Duration::from_secs(1)).await.is_err());
        drop(held);
        assert!(quota.take(Duration::ZERO).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn a_place_that_is_about_to_come_back_is_worth_a_moment() {
        let quota = Quota::new(1);
        let mut held = quota.take(Duration::ZERO).await.unwrap();
        assert_eq!(quota.take(Duration::ZERO).await.unwrap_err().reason(), "QUOTA");
        held.leaving();
        held.leaving();
        let next = quota.take(Duration::ZERO);
        tokio::pin!(next);
        assert!(futures::poll!(&mut next).is_pending());
        drop(held);
        let next = next.await.unwrap();
        // Nobody leaves any more.
        assert!(quota.take(Duration::ZERO).await.is_err());
        drop(next);
    }

    #[tokio::test]
    async fn those_beyond_the_quota_keep_others_out_until_they_are_gone() {
        let quota = Quota::new(2);
        let mut taken: Vec<Place> = (0..3).map(|_| quota.take_over()).collect();
        drop(taken.remove(0));
        assert!(
            quota.take(Duration::ZERO).await.is_err(),
            "two are left, and two is the quota"
        );
        drop(taken.pop());
        let fresh = quota.take(Duration::ZERO).await.unwrap();
        drop((taken, fresh));
        let all = (quota.take(Duration::ZERO).await, quota.take(Duration::ZERO).await);
        assert!(all.0.is_ok() && all.1.is_ok());
        assert!(quota.take(Duration::ZERO).await.is_err());
    }
}
