//! The gRPC face: authenticate, convert, one domain call, convert back. No business decision is made here, and nothing
//! else sees a `tonic::Status`.
//!
//! `server.rs` listens; `tasks.rs` is TaskService, with `convert.rs`; `sandboxes.rs` is SandboxService, with `execs.rs`,
//! `code.rs`, `files.rs`, `convert_sandbox.rs` and `convert_exec.rs`; `status.rs` makes errors; `json.rs` is for the command line,
//! which shows what a server sends.

mod code;
pub mod convert;
mod convert_exec;
mod convert_sandbox;
mod execs;
mod files;
pub mod json;
mod ports;
mod sandboxes;
pub mod server;
mod status;
mod tasks;

use std::pin::Pin;
use std::str::FromStr;

use futures::Stream;
use tonic::{Response, Status};

use crate::clock::Timestamp;

type Answer<T> = Result<Response<T>, Status>;
type Out<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// `MILLIS.ID`: the last thing of the page before.
fn page_token<T: FromStr>(text: &str) -> Result<Option<(Timestamp, T)>, Status> {
    if text.is_empty() {
        return Ok(None);
    }
    let parse = || {
        let (at, id) = text.split_once('.')?;
        Some((Timestamp(at.parse().ok()?), id.parse().ok()?))
    };
    parse()
        .map(Some)
        .ok_or_else(|| status::invalid("`page_token` is not one of ours"))
}

/// The generated messages, clients and servers of `proto/exuvia/v1`.
#[allow(clippy::all, clippy::disallowed_methods, missing_docs)]
pub mod proto {
    tonic::include_proto!("exuvia.v1");

    /// For reflection.
    pub const DESCRIPTORS: &[u8] = tonic::include_file_descriptor_set!("exuvia_descriptors");
}
