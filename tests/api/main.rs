//! The gRPC service over real HTTP/2 on the loopback. Most of it runs in this process over the fake backend (`bed`); what
//! needs the real program is in `program.rs`.
//!
//! A test that cannot run here says so by name on stderr, and fails when `EXUVIA_REQUIRE_ALL=1`.

#[path = "../support/mod.rs"]
mod support;

mod approvals;
mod bed;
mod budgets;
mod control;
mod forks;
mod program;
mod refusals;
mod results;
mod sandboxes;
mod submit;
mod watch;
