//! The one rule for unit tests that need something this machine may lack.

use std::fmt::Display;

/// Says on stderr that `test` cannot run here, and why.
///
/// # Panics
/// With `EXUVIA_REQUIRE_ALL=1`: then every test must run.
pub fn skipped(test: &str, reason: impl Display) {
    eprintln!("SKIPPED {test}: {reason}");
    assert_ne!(
        std::env::var("EXUVIA_REQUIRE_ALL").as_deref(),
        Ok("1"),
        "{test} must run: {reason}"
    );
}
