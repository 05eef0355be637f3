//! From what a client asked for to a stream that leads there: judge the name, look it up, check every address, dial one.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::border::{Border, Inner};
use super::budget::Meter;
use super::case::{Case, Stopped, Tally};
use super::name::{Host, HostName};
use super::rules::{BadAddress, Reach, RuleId, Wire, builtin};
use super::stream::BoxStream;

/// A destination that may be gone to.
#[derive(Debug, Clone)]
pub(super) struct Passage {
    pub host: Host,
    pub port: u16,
    pub wire: Wire,
    /// Each request on it is judged by itself.
    pub each: bool,
}

impl Border {
    /// Whether TLS to this host is opened, so that the sandbox has to trust [`Border::certificate`].
    pub fn opens(&self, host: &HostName, port: u16) -> bool {
        let host = Host::Name(host.clone());
        let reach = self.0.rules.reach(&host, port, self.0.must_see(&host, port));
        matches!(reach, Reach::EachRequest { wire: Wire::Tls, .. })
    }

    /// The name that an address of the DNS responder stands for.
    pub fn name_of(&self, address: IpAddr) -> Option<HostName> {
        self.0.names.name_of(address)
    }
}

impl Inner {
    fn must_see(&self, host: &Host, port: u16) -> bool {
        host.name()
            .is_some_and(|name| self.learn || self.credentials.iter().any(|one| one.is_about(name, port)))
    }

    /// Judges a destination, as it was sent.
    pub async fn judge(&self, case: &mut Case, host: &[u8], port: u16) -> Result<Passage, Stopped> {
        if let Err(rule) = self.meter.request() {
            return Err(Stopped::Denied(case.deny(rule, "")));
        }
        if let Some(leak) = self.leaks.find(host) {
            case.decision.credential = Some(leak.to_owned());
            return Err(Stopped::Denied(
                case.deny(builtin::PLACEHOLDER_LEAK, "a placeholder stands in the name"),
            ));
        }
        let host = match Host::parse(host) {
            // One of our own answers: the name that it was given for is meant.
            Ok(Host::Address(address)) => match self.names.name_of(address) {
                Some(name) => Host::Name(name),
                None => Host::Address(address.to_canonical()),
            },
            Ok(host @ Host::Name(_)) => host,
            Err(bad) => return Err(Stopped::Denied(case.deny(builtin::HOST_FORM, bad.to_string()))),
        };
        case.decision.host = host.to_string();
        match self.rules.reach(&host, port, self.must_see(&host, port)) {
            Reach::Closed(rule) => Err(Stopped::Denied(case.deny(rule, ""))),
            Reach::EachRequest { rule, wire } => {
                case.decision.rule = rule;
                let each = true;
                Ok(Passage { host, port, wire, each })
            }
            Reach::Whole { verdict, wire } => {
                case.meet(verdict).await?;
                case.intend().await?;
                let each = false;
                Ok(Passage { host, port, wire, each })
            }
        }
    }

    /// Opens a stream to exactly one of the addresses that were checked.
    pub async fn reach_out(&self, case: &mut Case, host: &Host, port: u16) -> Result<Metered, Stopped> {
        if let Err(rule) = self.meter.connect() {
            return Err(Stopped::Denied(case.deny(rule, "")));
        }
        match tokio::time::timeout(self.limits.dial_time, self.open(case, host, port)).await {
            Ok(opened) => opened,
            Err(_) => Err(case.fail("it could not be reached in time")),
        }
    }

    async fn open(&self, case: &mut Case, host: &Host, port: u16) -> Result<Metered, Stopped> {
        let mut addresses: Vec<IpAddr> = match host {
            Host::Address(address) => vec![*address],
            Host::Name(name) => match self.cache.resolve(name).await {
                Ok(addresses) => addresses.to_vec(),
                Err(error) => return Err(case.fail(crate::error::chain(&error))),
            },
        };
        // All of them, and not only the one that would be dialled: a mixed answer is an attack.
        for address in &addresses {
            if let Err((rule, reason)) = self.check(*address, port) {
                case.decision.address = Some(*address);
                return Err(Stopped::Denied(case.deny(rule, reason)));
            }
        }
        addresses.sort_by_key(IpAddr::is_ipv6);
        let mut last = None;
        for address in addresses {
            case.decision.address = Some(address);
            match self.dialer.dial(host, SocketAddr::new(address, port)).await {
                Ok(inner) => {
                    let tally = Arc::new(Tally::default());
                    case.count_by(&tally);
                    let meter = Arc::clone(&self.meter);
                    return Ok(Metered { inner, tally, meter });
                }
                Err(error) => last = Some(error),
            }
        }
        Err(case.fail(last.map_or_else(|| "it has no address".to_owned(), |error| error.to_string())))
    }

    fn check(&self, address: IpAddr, port: u16) -> Result<(), (RuleId, String)> {
        let plain = address.to_canonical();
        if self
            .off_limits
            .iter()
            .any(|net| net.contains(&address) || net.contains(&plain))
        {
            return Err((builtin::OFF_LIMITS, format!("`{address}` is off limits on this host")));
        }
        match self.rules.check_address(address, port) {
            Ok(()) => Ok(()),
            Err(BadAddress::Denied(rule)) => Err((rule, format!("`{address}` is denied"))),
            Err(BadAddress::Closed(block)) => {
                let reason = format!("`{address}` is in a closed block ({} {})", block.name, block.net);
                Err((builtin::CLOSED_ADDRESS, reason))
            }
        }
    }
}

/// A stream to the outside that counts, and breaks where a budget ends.
pub(super) struct Metered {
    inner: BoxStream,
    pub tally: Arc<Tally>,
    meter: Arc<Meter>,
}

impl Metered {
    fn cut(&self, rule: RuleId) -> io::Error {
        let error = io::Error::other(rule.to_string());
        let _ = self.tally.cut.set(rule);
        error
    }
}

impl AsyncRead for Metered {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.inner).poll_read(cx, buf))?;
        let read = (buf.filled().len() - before) as u64;
        self.tally.received.fetch_add(read, Ordering::AcqRel);
        Poll::Ready(self.meter.received(read).map_err(|rule| self.cut(rule)))
    }
}

impl AsyncWrite for Metered {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if let Err(rule) = self.meter.sent(0) {
            return Poll::Ready(Err(self.cut(rule)));
        }
        let written = ready!(Pin::new(&mut self.inner).poll_write(cx, bytes))?;
        self.tally.sent.fetch_add(written as u64, Ordering::AcqRel);
        Poll::Ready(
            self.meter
                .sent(written as u64)
                .map(|()| written)
                .map_err(|rule| self.cut(rule)),
        )
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}
