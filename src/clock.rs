//! Time as a value that is passed in, so that tests can hold it still.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A wall-clock instant: milliseconds since the Unix epoch, UTC. Prints as RFC 3339.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Timestamp(pub i64);

impl Timestamp {
    /// This instant moved forward, saturating.
    pub fn plus(self, by: Duration) -> Self {
        Self(self.0.saturating_add(i64::try_from(by.as_millis()).unwrap_or(i64::MAX)))
    }

    /// This instant moved back, saturating.
    pub fn minus(self, by: Duration) -> Self {
        Self(self.0.saturating_sub(i64::try_from(by.as_millis()).unwrap_or(i64::MAX)))
    }

    /// This instant moved by as much as `to` is after `from`; back where it is before.
    pub fn shifted(self, from: Self, to: Self) -> Self {
        Self(self.0.saturating_add(to.0.saturating_sub(from.0)))
    }

    /// How long after `earlier` this is; zero when it is not after.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0).max(0) as u64)
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = std::time::UNIX_EPOCH + Duration::from_millis(self.0.max(0) as u64);
        humantime::format_rfc3339_millis(time).fmt(f)
    }
}

/// Tells the time.
pub trait Clock: Send + Sync + fmt::Debug {
    fn now(&self) -> Timestamp;

    /// How long it has been since some instant that stays the same: never set, never back, and on while the host sleeps.
    /// By default that of a clock that nobody sets.
    fn elapsed(&self) -> Duration {
        self.now().since(Timestamp(0))
    }
}

/// The system's clock.
#[derive(Debug, Clone, Copy, Default)]
pub struct System;

impl Clock for System {
    #[expect(clippy::disallowed_methods, reason = "the one place that asks the system")]
    fn now(&self) -> Timestamp {
        let since = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap_or_default();
        Timestamp(since.as_millis() as i64)
    }

    fn elapsed(&self) -> Duration {
        // It cannot fail with this clock, which every kernel has that there is a sandbox for.
        nix::time::clock_gettime(nix::time::ClockId::CLOCK_BOOTTIME).map_or(Duration::ZERO, Duration::from)
    }
}

/// The time of another clock when this one was made, and from there what has really passed: whoever sets that clock meanwhile
/// changes nothing here.
#[derive(Debug, Clone)]
pub struct Steady {
    clock: Arc<dyn Clock>,
    base: Timestamp,
    begun: Duration,
}

impl Steady {
    pub fn over(clock: Arc<dyn Clock>) -> Self {
        Self {
            base: clock.now(),
            begun: clock.elapsed(),
            clock,
        }
    }
}

impl Clock for Steady {
    fn now(&self) -> Timestamp {
        self.base.plus(self.clock.elapsed().saturating_sub(self.begun))
    }
}

/// A clock that moves only when told to.
#[derive(Debug, Clone, Default)]
pub struct Manual(Arc<AtomicI64>);

impl Manual {
    pub fn at(start: Timestamp) -> Self {
        Self(Arc::new(AtomicI64::new(start.0)))
    }

    pub fn advance(&self, by: Duration) {
        self.0.fetch_add(by.as_millis() as i64, Ordering::SeqCst);
    }
}

impl Clock for Manual {
    fn now(&self) -> Timestamp {
        Timestamp(self.0.load(Ordering::SeqCst))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Set by hand, while its time goes on by itself.
    #[derive(Debug, Default)]
    struct Set {
        shown: AtomicI64,
        passed: AtomicI64,
    }

    impl Clock for Set {
        fn now(&self) -> Timestamp {
            Timestamp(self.shown.load(Ordering::SeqCst))
        }

        fn elapsed(&self) -> Duration {
            Duration::from_millis(self.passed.load(Ordering::SeqCst) as u64)
        }
    }

    #[test]
    fn a_steady_clock_does_not_follow_one_that_is_set() {
        let set = Arc::new(Set::default());
        set.shown.store(5_000, Ordering::SeqCst);
        let steady = Steady::over(Arc::clone(&set) as Arc<dyn Clock>);
        for shown in [86_400_000, -86_400_000] {
            set.shown.fetch_add(shown, Ordering::SeqCst);
            set.passed.fetch_add(100, Ordering::SeqCst);
        }
        assert_eq!(steady.now(), Timestamp(5_200));
        let begun = System.elapsed();
        assert!(begun > Duration::ZERO && System.elapsed() >= begun);
    }

    #[test]
    fn no_time_span_wraps_around() {
        let now = Timestamp(5_000);
        let spans = [Duration::from_secs(2), Duration::MAX, Duration::from_millis(u64::MAX)];
        assert_eq!(spans.map(|span| now.plus(span).0), [7_000, i64::MAX, i64::MAX]);
        assert_eq!(
            spans.map(|span| now.minus(span).0),
            [3_000, 5_000 - i64::MAX, 5_000 - i64::MAX]
        );
        assert_eq!(now.since(now.plus(Duration::MAX)), Duration::ZERO);
        assert_eq!(now.shifted(Timestamp(10), Timestamp(7)), Timestamp(4_997));
        assert_eq!(
            now.shifted(Timestamp(i64::MIN), Timestamp(i64::MAX)),
            Timestamp(i64::MAX)
        );
    }
}
