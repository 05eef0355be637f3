//! The border for real: sandboxes on this machine's kernel, the server in a network namespace of the test's own, and behind that
//! an internet that the test has made, which sees every packet that leaves.
//!
//! A test that cannot run here says so by name on stderr, and fails when `EXUVIA_REQUIRE_ALL=1`.

#[path = "../support/mod.rs"]
mod support;

mod attacks;
mod bed;
mod credentials;
mod internet;
mod lasting;
mod live;
mod runs;
