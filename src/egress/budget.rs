//! How much a run may do at the border. Reaching an end is a denial with a name.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::rules::{RuleId, builtin};

/// What a run may do in all; `None` is without end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Budgets {
    /// Connections in all.
    pub connections: Option<u64>,
    /// Connections at one time.
    pub concurrent: usize,
    /// Bytes to the outside.
    pub sent: Option<u64>,
    /// Bytes from the outside.
    pub received: Option<u64>,
    /// Connections and requests, with bursts of one second's worth.
    pub requests_per_second: Option<u32>,
    pub queries_per_second: Option<u32>,
    /// The time in which at least one connection was open.
    pub time: Option<Duration>,
}

impl Default for Budgets {
    fn default() -> Self {
        Self {
            connections: None,
            concurrent: 2048,
            sent: None,
            received: None,
            requests_per_second: None,
            queries_per_second: Some(100),
            time: None,
        }
    }
}

/// What was used so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    pub connections: u64,
    pub open: usize,
    pub sent: u64,
    pub received: u64,
    pub time: Duration,
}

#[derive(Debug)]
pub(super) struct Meter {
    budgets: Budgets,
    connections: AtomicU64,
    open: AtomicUsize,
    sent: AtomicU64,
    received: AtomicU64,
    time: Mutex<Time>,
    requests: Bucket,
    queries: Bucket,
}

#[derive(Debug, Default)]
struct Time {
    open: usize,
    since: Option<Instant>,
    used: Duration,
}

/// One open connection; dropping it closes it.
#[derive(Debug)]
pub(super) struct Open(Arc<Meter>);

impl Meter {
    pub fn new(budgets: Budgets) -> Arc<Self> {
        Arc::new(Self {
            connections: AtomicU64::new(0),
            open: AtomicUsize::new(0),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
            time: Mutex::default(),
            requests: Bucket::new(budgets.requests_per_second),
            queries: Bucket::new(budgets.queries_per_second),
            budgets,
        })
    }

    /// Counts a connection of a client.
    pub fn open(self: &Arc<Self>) -> Result<Open, RuleId> {
        if self.open.fetch_add(1, Ordering::AcqRel) >= self.budgets.concurrent {
            self.open.fetch_sub(1, Ordering::AcqRel);
            return Err(builtin::BUDGET_CONCURRENCY);
        }
        let mut time = self.time.lock().unwrap_or_else(PoisonError::into_inner);
        time.open += 1;
        time.since.get_or_insert_with(Instant::now);
        drop(time);
        Ok(Open(Arc::clone(self)))
    }

    /// Counts a connection to the outside, and looks whether anything is used up.
    pub fn connect(&self) -> Result<(), RuleId> {
        self.left()?;
        let connections = self.connections.fetch_add(1, Ordering::AcqRel);
        if self.budgets.connections.is_some_and(|most| connections >= most) {
            self.connections.fetch_sub(1, Ordering::AcqRel);
            return Err(builtin::BUDGET_CONNECTIONS);
        }
        Ok(())
    }

    /// Counts a request or a connection as one of this second.
    pub fn request(&self) -> Result<(), RuleId> {
        self.left()?;
        if self.requests.take() {
            Ok(())
        } else {
            Err(builtin::BUDGET_REQUESTS)
        }
    }

    pub fn query(&self) -> Result<(), RuleId> {
        if self.queries.take() {
            Ok(())
        } else {
            Err(builtin::BUDGET_QUERIES)
        }
    }

    pub fn sent(&self, bytes: u64) -> Result<(), RuleId> {
        spend(&self.sent, self.budgets.sent, bytes)
            .then_some(())
            .ok_or(builtin::BUDGET_SENT)
    }

    pub fn received(&self, bytes: u64) -> Result<(), RuleId> {
        spend(&self.received, self.budgets.received, bytes)
            .then_some(())
            .ok_or(builtin::BUDGET_RECEIVED)
    }

    /// Whether bytes and time are left.
    pub fn left(&self) -> Result<(), RuleId> {
        let over = |used: &AtomicU64, most: Option<u64>| most.is_some_and(|most| used.load(Ordering::Acquire) >= most);
        match () {
            () if over(&self.sent, self.budgets.sent) => Err(builtin::BUDGET_SENT),
            () if over(&self.received, self.budgets.received) => Err(builtin::BUDGET_RECEIVED),
            () if self.time_left() == Some(Duration::ZERO) => Err(builtin::BUDGET_TIME),
            () => Ok(()),
        }
    }

    /// How long what is open may go on.
    pub fn time_left(&self) -> Option<Duration> {
        Some(self.budgets.time?.saturating_sub(self.usage().time))
    }

    pub fn usage(&self) -> Usage {
        let time = self.time.lock().unwrap_or_else(PoisonError::into_inner);
        let running = time.since.map(|since| since.elapsed()).unwrap_or_default();
        Usage {
            connections: self.connections.load(Ordering::Acquire),
            open: self.open.load(Ordering::Acquire),
            sent: self.sent.load(Ordering::Acquire),
            received: self.received.load(Ordering::Acquire),
            time: time.used + running,
        }
    }
}

/// Adds, and tells whether that was still within.
fn spend(used: &AtomicU64, most: Option<u64>, bytes: u64) -> bool {
    let before = used.fetch_add(bytes, Ordering::AcqRel);
    most.is_none_or(|most| before.saturating_add(bytes) <= most)
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::AcqRel);
        let mut time = self.0.time.lock().unwrap_or_else(PoisonError::into_inner);
        time.open -= 1;
        if time.open == 0
            && let Some(since) = time.since.take()
        {
            time.used += since.elapsed();
        }
    }
}

/// Lets `rate` through in a second, and as many at once.
#[derive(Debug)]
struct Bucket {
    rate: Option<u32>,
    level: Mutex<Option<(f64, Instant)>>,
}

impl Bucket {
    fn new(rate: Option<u32>) -> Self {
        let level = Mutex::new(None);
        Self { rate, level }
    }

    fn take(&self) -> bool {
        let Some(rate) = self.rate.map(f64::from) else {
            return true;
        };
        let now = Instant::now();
        let mut level = self.level.lock().unwrap_or_else(PoisonError::into_inner);
        let (left, then) = level.unwrap_or((rate, now));
        let left = (left + now.duration_since(then).as_secs_f64() * rate).min(rate);
        let taken = left >= 1.0;
        *level = Some((if taken { left - 1.0 } else { left }, now));
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn each_end_has_its_name() {
        let meter = Meter::new(Budgets {
            connections: Some(2),
            concurrent: 2,
            sent: Some(10),
            received: Some(10),
            requests_per_second: Some(2),
            queries_per_second: Some(1),
            time: Some(Duration::from_secs(60)),
        });
        let (first, second) = (meter.open().unwrap(), meter.open().unwrap());
        assert_eq!(meter.open().unwrap_err(), builtin::BUDGET_CONCURRENCY);
        drop(first);
        assert!(meter.open().is_ok());
        assert_eq!([meter.connect(), meter.connect()], [Ok(()), Ok(())]);
        assert_eq!(meter.connect(), Err(builtin::BUDGET_CONNECTIONS));
        assert_eq!([meter.request(), meter.request()], [Ok(()), Ok(())]);
        assert_eq!(meter.request(), Err(builtin::BUDGET_REQUESTS));
        tokio::time::advance(Duration::from_millis(500)).await;
        assert_eq!(
            [meter.request(), meter.request()],
            [Ok(()), Err(builtin::BUDGET_REQUESTS)]
        );
        assert_eq!([meter.query(), meter.query()], [Ok(()), Err(builtin::BUDGET_QUERIES)]);
        tokio::time::advance(Duration::from_secs(60)).await;
        assert_eq!(meter.request(), Err(builtin::BUDGET_TIME));
        drop(second);
        assert_eq!([meter.sent(10), meter.sent(1)], [Ok(()), Err(builtin::BUDGET_SENT)]);
        assert_eq!(
            [meter.received(11), meter.connect()],
            [Err(builtin::BUDGET_RECEIVED), Err(builtin::BUDGET_SENT)]
        );
    }

    #[tokio::test(start_paused = true)]
    async fn time_runs_while_something_is_open() {
        let meter = Meter::new(Budgets::default());
        let seconds = |n: u64| tokio::time::advance(Duration::from_secs(n));
        let (one, two) = (meter.open().unwrap(), meter.open().unwrap());
        seconds(5).await;
        drop(one);
        seconds(5).await;
        drop(two);
        seconds(100).await;
        assert_eq!((meter.usage().time, meter.usage().open), (Duration::from_secs(10), 0));
    }
}
