//! The only way out of a sandbox: a border that knows names, not routes.
//!
//! Owns: the rules and how a destination is judged; the doors (HTTP proxy, SOCKS5, DNS, redirected connections); resolving,
//! checking and dialling; opening TLS where a rule or a credential needs to see requests; putting credentials in and masking
//! them on their way back; budgets; one record for each decision. Must not know: runs, sandboxes, policies' files, network
//! namespaces, gRPC. It is handed streams that are open already.
//!
//! ```text
//!  door ─▶ tunnel ─▶ reach: judge ─▶ resolve ─▶ check all ─▶ dial one ──────────▶ relay
//!    │        └─ hello: the name inside is the name outside          │
//!    └─ absolute form ─▶ inspect: request by request ◀── each request is judged ─┘
//! ```
//!
//! Next: `rules/mod.rs` (who may go where), `tunnel.rs` (one connection), `inspect/request.rs` (one request), `case.rs` (one
//! decision). Why it is so: `docs/adr/0021-egress-proxy.md`.

pub mod address;
pub mod ask;
mod border;
pub mod budget;
mod case;
pub mod credential;
pub mod dial;
mod dns;
mod door;
pub mod hello;
mod http1;
mod inspect;
pub mod journal;
mod leak;
pub mod name;
mod propose;
mod reach;
mod relay;
pub mod resolve;
pub mod roots;
pub mod rules;
pub mod socks;
pub mod stream;
#[cfg(test)]
mod tests;
mod tunnel;

pub use border::{Border, Door, Error, Limits, Settings};
pub use propose::propose;
