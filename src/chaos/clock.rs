//! A clock that somebody sets while the service runs.

use std::sync::Arc;
use std::time::Duration;

use crate::clock::{Clock, System, Timestamp};

/// The system's clock, or what `EXUVIA_CLOCK_JUMP` makes of it.
///
/// # Errors
/// When it is set to something else than `SECONDS@MILLISECONDS`.
pub fn clock() -> Result<Arc<dyn Clock>, String> {
    match std::env::var("EXUVIA_CLOCK_JUMP") {
        Err(_) => Ok(Arc::new(System)),
        Ok(text) => {
            let (by, after) = parse(&text).ok_or_else(|| format!("`{text}` is not `SECONDS@MILLISECONDS`"))?;
            Ok(Arc::new(Jumping {
                by_ms: by,
                at: System.elapsed() + after,
            }))
        }
    }
}

fn parse(text: &str) -> Option<(i64, Duration)> {
    let (by, after) = text.split_once('@')?;
    let by_ms = by.parse::<i64>().ok()?.checked_mul(1000)?;
    Some((by_ms, Duration::from_millis(after.parse().ok()?)))
}

#[derive(Debug)]
struct Jumping {
    by_ms: i64,
    /// By the time that nobody can set.
    at: Duration,
}

impl Clock for Jumping {
    fn now(&self) -> Timestamp {
        let by_ms = if System.elapsed() < self.at { 0 } else { self.by_ms };
        Timestamp(System.now().0.saturating_add(by_ms))
    }

    fn elapsed(&self) -> Duration {
        System.elapsed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_jump_goes_both_ways() {
        assert_eq!(parse("86400@1500"), Some((86_400_000, Duration::from_millis(1500))));
        assert_eq!(parse("-86400@0"), Some((-86_400_000, Duration::ZERO)));
        for wrong in ["", "1", "@1", "1@", "x@1", "1@-1"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
        let back = Jumping {
            by_ms: -86_400_000,
            at: Duration::ZERO,
        };
        let day = Duration::from_secs(86_400);
        assert!(System.now().since(back.now()) >= day - Duration::from_secs(60));
        assert!(back.elapsed() <= System.elapsed());
    }
}
