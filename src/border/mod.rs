//! How a sandbox comes by its one way out: a policy and the operator's settings become an `egress` border, whose doors the host
//! opens inside of the sandbox's network namespace.
//!
//! Owns: what of a policy's network can be enforced here; the doors, the files of trust and the variables of a sandbox; the
//! values and placeholders of credentials; who is told of each decision. Must not know: runs and fleets (they hand a sandbox
//! in and hold the [`Post`]), gRPC, and how a request is judged.
//!
//! ```text
//!  policy ─▶ check.rs ─▶ refused by name, or ─▶ placeholder.rs, variables.rs ─▶ the environment of its commands
//!                                                        │
//!  sandbox up ─▶ Backend::doorway ─▶ namespace.rs: setns, listen; certificates and resolv.conf, read-only
//!                                                        ▼
//!  outside.rs (resolver, roots, dialler) ─▶ post.rs: egress::Border serves the doors until the post is closed
//!                                                        ▼
//!                                            log.rs: each decision, for the record and for who ran the command
//! ```
//!
//! No guest code and no route is in the way: the namespace has its loopback and nothing else, and what listens there is this
//! process. Why it is so: `docs/adr/0022-doors-in-the-namespace.md`; how it looks from inside: `docs/network.md`.

mod check;
mod credential;
mod guard;
mod log;
mod namespace;
mod on_audit;
mod outside;
mod placeholder;
mod post;
mod spent;
mod variables;

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};

pub use check::check;
pub use guard::Guard;
pub use log::{Denied, Mark, Steps, Whose};
pub use on_audit::{DECIDED, OnAudit, UNCOUNTED, decision_of};
pub use outside::{BadOutside, Operator};
pub use placeholder::Placeholders;
pub use post::{HOW_TO_ASK, Post};
pub use variables::variables;

use self::outside::Outside;
use self::spent::Spent;
use crate::clock::Clock;
use crate::error::Kind;
use crate::sandbox;

/// Where HTTP is proxied inside: `CONNECT` and absolute form.
pub const HTTP: SocketAddr = loopback(3128);
/// Where SOCKS5 is spoken inside.
pub const SOCKS: SocketAddr = loopback(1080);
/// The name server inside, over UDP and TCP.
pub const DNS: SocketAddr = loopback(53);

const fn loopback(port: u16) -> SocketAddr {
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), port)
}

/// Why a sandbox has no border.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("policy `{policy}`: {missing}")]
    Unsupported { policy: String, missing: String },
    #[error(transparent)]
    Outside(#[from] BadOutside),
    #[error("credential `{name}` is not to be had")]
    Credential {
        name: String,
        #[source]
        source: crate::secret::Error,
    },
    #[error("the border of the sandbox could not be made")]
    Border(#[source] crate::egress::Error),
    #[error("the doors of the border could not be opened in the sandbox")]
    Doors(#[source] std::io::Error),
    #[error(transparent)]
    Sandbox(#[from] sandbox::Error),
}

impl Error {
    pub fn kind(&self) -> Kind {
        match self {
            Self::Unsupported { .. } => Kind::WrongState,
            Self::Outside(_) | Self::Border(_) => Kind::Invalid,
            Self::Credential { source, .. } => source.kind(),
            Self::Doors(_) => Kind::Unavailable,
            Self::Sandbox(error) => error.kind(),
        }
    }
}

/// Makes borders for sandboxes; clones share everything.
#[derive(Debug, Clone)]
pub struct Borders {
    records: Arc<OnAudit>,
    operator: Arc<Operator>,
    /// Looked at when the first border is made: a server without networks needs no resolver.
    outside: Arc<OnceLock<Outside>>,
    spent: Spent,
    clock: Arc<dyn Clock>,
}

impl Borders {
    pub fn new(operator: Operator, records: Arc<OnAudit>, clock: Arc<dyn Clock>) -> Self {
        Self {
            records,
            operator: Arc::new(operator),
            outside: Arc::default(),
            spent: Spent::default(),
            clock,
        }
    }

    fn outside(&self) -> Result<&Outside, BadOutside> {
        if let Some(known) = self.outside.get() {
            return Ok(known);
        }
        let made = Outside::new(&self.operator)?;
        Ok(self.outside.get_or_init(|| made))
    }
}
