//! Sandboxes for real: on this machine's kernel, with its limits, as root.
//!
//! A test that cannot run here says so by name on stderr, and fails when `EXUVIA_REQUIRE_ALL=1`.

mod command;
mod disk;
mod kernel;
mod life;
mod limits;
mod ruins;
mod support;
mod walls;
