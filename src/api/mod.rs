//! The gRPC face: authenticate, convert, one domain call, convert back. No business decision is made here, and nothing
//! else sees a `tonic::Status`.
//!
//! `server.rs` listens; `tasks.rs` is TaskService; `convert.rs` is proto <-> domain; `status.rs` makes errors; `json.rs` is
//! for the command line, which shows what a server sends.

pub mod convert;
pub mod json;
pub mod server;
mod status;
mod tasks;

/// The generated messages, clients and servers of `proto/exuvia/v1`.
#[allow(clippy::all, clippy::disallowed_methods, missing_docs)]
pub mod proto {
    tonic::include_proto!("exuvia.v1");

    /// For reflection.
    pub const DESCRIPTORS: &[u8] = tonic::include_file_descriptor_set!("exuvia_descriptors");
}
