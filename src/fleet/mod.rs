//! The fleet: all sandboxes of one server that clients use directly, without an agent loop.
//!
//! Owns: which there are, their life cycle, their quota, time and idleness, the warm pool, the commands in them and their
//! output, and the leases by which the next server takes them over. Must not know: gRPC, runs, tools, models.
//!
//! - `state.rs`: the pure machine of one sandbox; `driver.rs`: the one task that owns it, orders in, effects done;
//! - `member.rs`: what everybody else sees of it; `registry.rs`: all members, by id and by idempotency key;
//! - `ask.rs`: a wish, and the plan that a policy makes of it; `create.rs`: from a plan to a member, place and all;
//! - `quota.rs`: places and who waits for one; `maker.rs`: a sandbox with its directory; `pool.rs`: those made ahead;
//! - `execs/`: commands, running and lately ended, each with a log that any number of readers follow at their own pace;
//! - `nursery.rs`: moulds, from which interpreters are cast that need not be started;
//! - `code/`: contexts and fresh processes, for code of a language;
//! - `snapshot.rs`: sandboxes that are kept with their memory;
//! - `lease.rs`: what is written down of a sandbox; `recover.rs`: how the next server goes on with it;
//! - `trail.rs`: what goes on the audit record; `service.rs`: [`Fleet`], what every face calls.
//!
//! Words: a *member* is a sandbox of the fleet; a *place* is what the quota counts; a *lease* is a member on disk.

mod activity;
mod ask;
pub mod code;
mod create;
mod driver;
mod error;
pub mod execs;
mod lease;
mod maker;
mod member;
mod nursery;
mod pool;
mod quota;
mod recover;
mod registry;
mod service;
mod snapshot;
pub mod state;
#[cfg(test)]
mod tests;
mod trail;

pub use ask::Ask;
pub use error::Error;
pub use lease::is_leased;
pub use member::{Facts, View};
pub use pool::{Stock, StockError};
pub use recover::Recovered;
pub use registry::Query;
pub use service::{Aim, Config, Fleet, Info, OnShutdown, Parts, Taken, Visit, What};
pub use snapshot::SnapshotInfo;
