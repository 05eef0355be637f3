//! The command line as a person or a script uses it: real processes, real sandboxes.
//!
//! A test that cannot run here says so by name on stderr, and fails when `EXUVIA_REQUIRE_ALL=1`.

#[path = "../support/mod.rs"]
mod support;

mod approve;
mod audit;
mod bad;
mod build;
mod desk;
mod run;
mod sandbox;
mod served;
mod task;
