//! Durable runs: a pure core and an imperative shell.
//!
//! - `event.rs`: journal entries, the only truth about a run;
//! - `state.rs`: [`step`], the pure machine, and [`due`], what should be happening now; no IO, no clock, no randomness;
//! - `session.rs`: the conversation, another projection of the same journal;
//! - `driver.rs`: claims a run, commits first, acts second;
//! - `service.rs`: what the outside asks: submit, watch, cancel, approve, …
//!
//! Must not know: how a sandbox, a model or a store is made. Owns no file format but its own events and checkpoints.

pub mod event;

pub use event::{Entry, Event};
