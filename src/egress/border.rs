//! The border of one run: what it is made of, and the doors that it has.

use std::collections::HashSet;
use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ipnet::IpNet;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::ask::Ask;
use super::budget::{Budgets, Meter, Usage};
use super::credential::{self, BadCredential, Credential};
use super::dial::Dial;
use super::dns::Names;
use super::inspect::{Authority, BadAuthority, Mask, Outside};
use super::journal::Journal;
use super::leak::Leaks;
use super::resolve::{Cache, Resolve};
use super::rules::{RuleId, Rules};
use crate::clock::Clock;

/// All that a border needs.
#[derive(Debug)]
pub struct Settings {
    pub rules: Rules,
    pub credentials: Vec<Credential>,
    pub resolver: Arc<dyn Resolve>,
    pub dialer: Arc<dyn Dial>,
    /// Whom the border trusts outside, where it opens TLS.
    pub roots: Arc<rustls::RootCertStore>,
    pub budgets: Budgets,
    pub limits: Limits,
    pub journal: Arc<dyn Journal>,
    pub asker: Arc<dyn Ask>,
    pub clock: Arc<dyn Clock>,
    /// Opens TLS to every allowed name, so that the record shows methods and paths. Allows nothing more.
    pub learn: bool,
    /// Never dialled, whatever a rule says: the host's own addresses, the service, its store.
    pub off_limits: Vec<IpNet>,
    /// The end of each denial: what the reader can do.
    pub how_to_ask: String,
}

/// Bounds on one connection.
#[derive(Debug, Clone)]
pub struct Limits {
    /// For a request's head, a SOCKS greeting, a TLS hello.
    pub head_time: Duration,
    /// For looking up, dialling and greeting the other side.
    pub dial_time: Duration,
    /// A connection on which nothing moves for so long is closed.
    pub idle_time: Duration,
    /// How long a person may take, and how many questions may wait.
    pub ask_time: Duration,
    pub asks: usize,
    /// So much of each request's body is searched for placeholders.
    pub searched_body: u64,
    /// How long the certificates of the border are valid.
    pub authority_time: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            head_time: Duration::from_secs(30),
            dial_time: Duration::from_secs(15),
            idle_time: Duration::from_secs(15 * 60),
            ask_time: Duration::from_secs(10 * 60),
            asks: 32,
            searched_body: 1 << 20,
            authority_time: Duration::from_secs(24 * 60 * 60),
        }
    }
}

/// Why there is no border.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{} of the credentials cannot be used", .0.len())]
    Credentials(Vec<BadCredential>),
    #[error("the border could not make its authority")]
    Authority(#[source] BadAuthority),
}

/// What a stream speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Door {
    /// HTTP: `CONNECT` and absolute form.
    Http,
    /// SOCKS5.
    Socks,
    /// Redirected here on its way to this address.
    Transparent(SocketAddr),
}

/// The border of one run or sandbox; clones are the same one.
#[derive(Clone)]
pub struct Border(pub(super) Arc<Inner>);

pub(super) struct Inner {
    pub rules: Rules,
    pub credentials: Vec<Credential>,
    pub leaks: Leaks,
    pub mask: Mask,
    pub names: Names,
    pub cache: Cache,
    pub dialer: Arc<dyn Dial>,
    pub meter: Arc<Meter>,
    pub limits: Limits,
    pub journal: Arc<dyn Journal>,
    pub asker: Arc<dyn Ask>,
    pub asks: Semaphore,
    pub granted: Mutex<HashSet<(RuleId, String, u16)>>,
    pub clock: Arc<dyn Clock>,
    pub learn: bool,
    pub off_limits: Vec<IpNet>,
    pub how_to_ask: String,
    pub authority: Authority,
    pub outside: Outside,
    pub next: AtomicU64,
    pub tasks: TaskTracker,
    pub stop: CancellationToken,
}

impl Border {
    /// # Errors
    /// The credentials contradict each other, or no certificate could be made.
    pub fn new(settings: Settings) -> Result<Self, Error> {
        let problems = credential::check(&settings.credentials);
        if !problems.is_empty() {
            return Err(Error::Credentials(problems));
        }
        let authority = Authority::new(&settings).map_err(Error::Authority)?;
        let outside = Outside::new(&settings.roots).map_err(Error::Authority)?;
        Ok(Self(Arc::new(Inner {
            rules: settings.rules,
            leaks: Leaks::new(&settings.credentials),
            mask: Mask::default(),
            credentials: settings.credentials,
            names: Names::default(),
            cache: Cache::new(settings.resolver),
            dialer: settings.dialer,
            meter: Meter::new(settings.budgets),
            asks: Semaphore::new(settings.limits.asks),
            limits: settings.limits,
            journal: settings.journal,
            asker: settings.asker,
            granted: Mutex::default(),
            clock: settings.clock,
            learn: settings.learn,
            off_limits: settings.off_limits,
            how_to_ask: settings.how_to_ask,
            authority,
            outside,
            next: AtomicU64::new(0),
            tasks: TaskTracker::new(),
            stop: CancellationToken::new(),
        })))
    }

    /// The certificate that a sandbox has to trust where TLS is opened, as PEM. Its key never leaves this value.
    pub fn certificate(&self) -> &str {
        self.0.authority.pem()
    }

    pub fn usage(&self) -> Usage {
        self.0.meter.usage()
    }

    /// Cuts everything that is open and lets nothing more in; waits until all decisions are recorded.
    pub async fn close(&self) {
        self.0.stop.cancel();
        self.0.tasks.close();
        self.0.tasks.wait().await;
    }
}

impl Inner {
    pub fn next_id(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed) + 1
    }
}

impl fmt::Debug for Border {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Border")
            .field("usage", &self.usage())
            .finish_non_exhaustive()
    }
}
