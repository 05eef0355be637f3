//! Kill anything, lose nothing (promises 1 and 7; requirements B2, E1, E6, E11, E16, N4): the real server, real sandboxes,
//! SIGKILL at every event boundary and at random instants, and a comparison with the run that nobody disturbed.
//!
//! A test that cannot run here says so by name on stderr, and fails when `EXUVIA_REQUIRE_ALL=1`.

#[path = "../support/mod.rs"]
mod support;

mod boundaries;
mod journey;
mod moments;
mod outages;
mod project;
mod random;
mod sandboxes;
mod stopped;
mod storm;
mod strays;
mod weather;
