//! Where requests are seen one by one: opened TLS and plain HTTP. Hyper speaks on both sides; what it must not be trusted
//! with (heads that read in two ways, whose certificate, which headers go on) is here and in `http1`.

mod authority;
mod content;
mod forward;
mod inject;
mod mask;
mod outside;
mod request;
mod serve;
mod sigv4;

pub(super) use authority::Authority;
pub use authority::BadAuthority;
pub(super) use mask::Mask;
pub(super) use outside::Outside;
pub(super) use request::Site;
pub(super) use serve::{serve_http1, serve_plain, serve_tls};
