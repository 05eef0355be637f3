//! One request: does it agree with its connection, is it allowed, what goes in, where does it go, what comes back.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex as StdMutex, PoisonError};

use http::header::{HOST, UPGRADE};
use http::{HeaderValue, Method, Request, Response, StatusCode, Version, header};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Mutex;

use super::content::{Content, Outgoing, Returning, full};
use super::forward;
use super::inject::{self, Injection};
use super::mask::masked;
use super::outside::{H1, H2, Sender};
use crate::egress::border::Inner;
use crate::egress::case::{Case, Stopped, Tally};
use crate::egress::http1::Gate;
use crate::egress::journal::{Channel, recorded_path, shown};
use crate::egress::name::{Host, split_authority};
use crate::egress::reach::Passage;
use crate::egress::relay::relay;
use crate::egress::rules::{self, Http, Path, RuleId, Wire, builtin};
use crate::egress::stream::{Rewind, Stream};
use crate::secret::{Redacting, Redactor};

/// Where the requests of one client connection may go.
pub(in crate::egress) struct Site {
    pub(super) inner: Arc<Inner>,
    channel: Channel,
    /// Nothing on a proxy connection: each request names its own.
    fixed: Option<Passage>,
    tls: bool,
    link: Mutex<Option<Link>>,
    /// Why there is no link, where its first one failed.
    broken: Option<String>,
    seen: Arc<AtomicBool>,
}

/// A connection to the outside that is kept.
pub(super) struct Link {
    pub passage: Passage,
    pub sender: Sender,
    pub tally: Arc<Tally>,
    pub address: Option<IpAddr>,
}

/// The way out of HTTP for a request that asked for one.
#[derive(Clone)]
pub(super) struct Upgrade {
    pub gate: Gate,
    pub slot: Arc<StdMutex<Option<Upgraded>>>,
}

/// Both sides agreed to speak something else.
pub(super) struct Upgraded {
    outside: OnUpgrade,
    redactor: Option<Redactor>,
    link: Arc<Tally>,
    case: Case,
    idle: std::time::Duration,
}

impl Site {
    pub fn open(inner: &Arc<Inner>) -> Self {
        Self {
            inner: Arc::clone(inner),
            channel: Channel::Http,
            fixed: None,
            tls: false,
            link: Mutex::new(None),
            broken: None,
            seen: Arc::default(),
        }
    }

    pub(super) fn fixed(
        inner: &Arc<Inner>,
        channel: Channel,
        passage: Passage,
        tls: bool,
        link: Result<Link, String>,
    ) -> Self {
        let (link, broken) = match link {
            Ok(link) => (Some(link), None),
            Err(reason) => (None, Some(reason)),
        };
        Self {
            channel,
            fixed: Some(passage),
            tls,
            link: Mutex::new(link),
            broken,
            ..Self::open(inner)
        }
    }

    /// Becomes true with the first request.
    pub(super) fn seen(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.seen)
    }

    fn default_port(&self) -> u16 {
        if self.tls { 443 } else { 80 }
    }

    /// Where a request wants to go: everything in it that names a host has to name the same one.
    fn destination(&self, request: &Request<Incoming>) -> Result<(Vec<u8>, u16), (RuleId, String)> {
        let uri = request.uri();
        let hosts: Vec<&HeaderValue> = request.headers().get_all(HOST).iter().collect();
        let named = [uri.authority().map(|authority| authority.as_str().as_bytes())];
        let named: Vec<&[u8]> = named
            .into_iter()
            .flatten()
            .chain(hosts.iter().map(|host| host.as_bytes()))
            .collect();
        let differ = |reason: &str| (builtin::SAME_NAME, reason.to_owned());
        let (Some(first), true) = (named.first(), hosts.len() <= 1) else {
            return Err(differ("the request names no host, or several"));
        };
        let mut read = Vec::new();
        for text in &named {
            let (host, port) = split_authority(text).map_err(|bad| (builtin::HOST_FORM, bad.to_string()))?;
            read.push((host, port.unwrap_or(self.default_port())));
        }
        if read.windows(2).any(|pair| pair[0] != pair[1]) {
            return Err(differ("the request names two hosts"));
        }
        match &self.fixed {
            Some(passage) => {
                if read
                    .iter()
                    .any(|(host, port)| (host, *port) != (&passage.host, passage.port))
                {
                    return Err(differ(&format!("the request is for `{}`", shown(first, 255))));
                }
                if uri
                    .scheme()
                    .is_some_and(|scheme| (scheme.as_str() == "https") != self.tls)
                {
                    return Err(differ("the request is for another scheme"));
                }
            }
            None if uri.scheme_str() != Some("http") => {
                return Err((
                    builtin::FRAMING,
                    "a proxy request needs `http://` in front, or `CONNECT`".to_owned(),
                ));
            }
            None => {}
        }
        let colon = if first.ends_with(b"]") {
            None
        } else {
            first.iter().rposition(|b| *b == b':')
        };
        let port = read.first().map_or(self.default_port(), |(_, port)| *port);
        Ok((first[..colon.unwrap_or(first.len())].to_vec(), port))
    }
}

/// Answers one request; it never fails.
pub(super) async fn serve(site: Arc<Site>, request: Request<Incoming>, upgrade: Option<Upgrade>) -> Response<Content> {
    site.seen.store(true, Ordering::Release);
    let answered = carry(&site, request, upgrade.as_ref()).await;
    let response = match answered {
        Ok(response) => response,
        Err(stopped) => told(&stopped),
    };
    if let Some(upgrade) = upgrade
        && response.status() != StatusCode::SWITCHING_PROTOCOLS
    {
        upgrade.gate.decline();
    }
    response
}

fn told(stopped: &Stopped) -> Response<Content> {
    let (status, rule, body) = match stopped {
        Stopped::Denied(denial) => (StatusCode::FORBIDDEN, Some(denial.rule.as_str()), denial.body()),
        Stopped::Unreachable(reason) => {
            let body = serde_json::json!({ "error": "unreachable", "reason": reason });
            (StatusCode::BAD_GATEWAY, None, format!("{body}\n"))
        }
    };
    let mut response = Response::new(full(body));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if let Some(rule) = rule.and_then(|rule| HeaderValue::from_str(rule).ok()) {
        headers.insert("x-exuvia-rule", rule);
    }
    response
}

async fn carry(
    site: &Arc<Site>,
    mut request: Request<Incoming>,
    upgrade: Option<&Upgrade>,
) -> Result<Response<Content>, Stopped> {
    let inner = &site.inner;
    let target = request
        .uri()
        .path_and_query()
        .map_or("/", |target| target.as_str())
        .to_owned();
    let method = request.method().clone();
    let named = site
        .fixed
        .as_ref()
        .map(|passage| (passage.host.to_string().into_bytes(), passage.port));
    let destination = site.destination(&request);
    let (host, port) = match (&destination, named) {
        (_, Some(named)) => named,
        (Ok(destination), None) => destination.clone(),
        (Err(_), None) => (
            request
                .uri()
                .authority()
                .map_or("", |authority| authority.as_str())
                .into(),
            0,
        ),
    };
    let mut case = Case::new(inner, site.channel, &host, port);
    case.decision.method = Some(shown(method.as_str().as_bytes(), 32));
    case.decision.path = Some(recorded_path(&target));
    if let Err((rule, reason)) = destination {
        return Err(Stopped::Denied(case.deny(rule, reason)));
    }
    // What a proxy has no business with: `TRACE` gives back what was put in, `CONNECT` here is a tunnel in a tunnel.
    if [Method::TRACE, Method::CONNECT].contains(&method) || method.as_str().eq_ignore_ascii_case("TRACK") {
        return Err(Stopped::Denied(
            case.deny(builtin::METHOD, format!("`{method}` is not carried")),
        ));
    }
    let passage = match &site.fixed {
        Some(passage) => {
            if let Err(rule) = inner.meter.request() {
                return Err(Stopped::Denied(case.deny(rule, "")));
            }
            passage.clone()
        }
        None => inner.judge(&mut case, &host, port).await?,
    };
    if passage.wire == Wire::Tls && !site.tls {
        return Err(Stopped::Denied(
            case.deny(builtin::TLS_EXPECTED, "the rule wants TLS, this is plain HTTP"),
        ));
    }
    let path = Path::of(&target);
    let covering = inject::covering(inner, &passage, method.as_str(), &path);
    if let Some(leak) = inject::leak(inner, &request, &target, &covering) {
        case.decision.credential = Some(leak);
        let reason = "a placeholder stands where it has no business";
        return Err(Stopped::Denied(case.deny(builtin::PLACEHOLDER_LEAK, reason)));
    }
    let verdict = inner.rules.decide(rules::Request {
        host: &passage.host,
        port: passage.port,
        http: Some(Http {
            method: method.as_str(),
            path: &path,
        }),
    });
    case.meet(verdict).await?;

    let wants_upgrade = upgrade.is_some() && forward::wants_websocket(request.headers());
    let spoken = request.version();
    forward::strip(request.headers_mut(), spoken);
    let secretive = inject::strip(inner, &passage, &mut request);
    let Injection { names, version } = match inject::put(inner, &covering, &passage, &mut request).await {
        Ok(injection) => injection,
        Err(reason) => return Err(Stopped::Denied(case.deny(builtin::CREDENTIAL, reason))),
    };
    case.decision.credential = names;
    case.decision.credential_version = version;
    case.intend().await?;

    let tally = Arc::new(Tally::default());
    let (parts, body) = request.into_parts();
    let body = Outgoing {
        body,
        search: inner.leaks.search(inner.limits.searched_body),
        inner: Arc::clone(inner),
        tally: Arc::clone(&tally),
    };
    let request = Request::from_parts(parts, body.boxed_unsync());
    let sent = send(site, &mut case, &passage, request, wants_upgrade).await;
    case.count_by(&tally);
    let (response, link) = match sent {
        Ok(sent) => sent,
        Err(Stopped::Unreachable(_)) if tally.cut.get().is_some() => {
            let rule = tally.cut.get().cloned().unwrap_or(builtin::PLACEHOLDER_LEAK);
            case.decision.credential = tally.leaked.get().cloned().or(case.decision.credential.take());
            return Err(Stopped::Denied(case.cut(rule, "a placeholder stands in the body")));
        }
        Err(stopped) => return Err(stopped),
    };
    case.decision.status = Some(response.status().as_u16());
    answer(
        inner,
        response,
        case,
        tally,
        link,
        secretive,
        wants_upgrade.then_some(upgrade).flatten(),
    )
}

/// Sends on the kept connection, or on a new one where there is none that lives.
async fn send(
    site: &Site,
    case: &mut Case,
    passage: &Passage,
    mut request: Request<Content>,
    websocket: bool,
) -> Result<(Response<Incoming>, Arc<Tally>), Stopped> {
    let inner = &site.inner;
    let mut kept = site.link.lock().await;
    for again in [true, false] {
        let live = match kept.as_mut() {
            Some(link) => {
                link.passage.host == passage.host && link.passage.port == passage.port && link.sender.is_ready().await
            }
            None => false,
        };
        if !live {
            if let Some(reason) = &site.broken {
                return Err(case.fail(reason.clone()));
            }
            let h2 = kept.take().is_some_and(|link| link.sender.is_h2());
            *kept = Some(connect(site, case, passage, h2).await?);
        }
        let Some(link) = kept.as_mut() else {
            return Err(case.fail("there is no connection"));
        };
        case.decision.address = link.address;
        let tally = Arc::clone(&link.tally);
        forward::address(
            &mut request,
            &passage.host,
            passage.port,
            site.tls,
            link.sender.is_h2(),
            websocket,
        );
        let sent = match &mut link.sender {
            Sender::H2(sender) => {
                // Others may send meanwhile.
                let mut sender = Sender::H2(sender.clone());
                drop(kept);
                let sent = tokio::time::timeout(inner.limits.idle_time, sender.send(request)).await;
                kept = site.link.lock().await;
                sent
            }
            sender @ Sender::H1(_) => tokio::time::timeout(inner.limits.idle_time, sender.send(request)).await,
        };
        match sent {
            Ok(Ok(response)) => return Ok((response, tally)),
            Ok(Err(mut error)) => match error.take_message() {
                // It closed before it took the request: nothing was sent.
                Some(unsent) if again => {
                    *kept = None;
                    request = unsent;
                }
                Some(_) | None => {
                    *kept = None;
                    if let Some(rule) = tally.cut.get() {
                        return Err(Stopped::Denied(case.cut(rule.clone(), "")));
                    }
                    return Err(case.fail(crate::error::chain(error.error())));
                }
            },
            Err(_) => return Err(case.fail("there was no answer in time")),
        }
    }
    Err(case.fail("the other side closes every connection"))
}

async fn connect(site: &Site, case: &mut Case, passage: &Passage, h2: bool) -> Result<Link, Stopped> {
    let inner = &site.inner;
    let outside = inner.reach_out(case, &passage.host, passage.port).await?;
    let tally = Arc::clone(&outside.tally);
    let sender = match (&passage.host, site.tls) {
        (Host::Name(name), true) => {
            let alpn = [if h2 { H2 } else { H1 }];
            match inner.outside.secure(name, &alpn, outside).await {
                Ok(stream) => Sender::greet(inner, stream, h2).await,
                Err(error) => return Err(case.fail(crate::error::chain(&error))),
            }
        }
        (Host::Name(_) | Host::Address(_), _) => Sender::greet(inner, outside, false).await,
    };
    match sender {
        Ok(sender) => Ok(Link {
            passage: passage.clone(),
            sender,
            tally,
            address: case.decision.address,
        }),
        Err(error) => Err(case.fail(crate::error::chain(&error))),
    }
}

/// Makes the answer fit to go in.
fn answer(
    inner: &Arc<Inner>,
    mut response: Response<Incoming>,
    mut case: Case,
    tally: Arc<Tally>,
    link: Arc<Tally>,
    secretive: bool,
    upgrade: Option<&Upgrade>,
) -> Result<Response<Content>, Stopped> {
    if secretive && let Some(encoding) = forward::hiding_encoding(response.headers()) {
        return Err(Stopped::Denied(case.cut(
            builtin::ENCODED_ANSWER,
            format!("the answer is encoded as `{encoding}`"),
        )));
    }
    let redactor = secretive.then(|| inner.mask.redactor());
    let switching = response.status() == StatusCode::SWITCHING_PROTOCOLS;
    if switching {
        let websocket = response
            .headers()
            .get(UPGRADE)
            .is_some_and(|to| to.as_bytes().eq_ignore_ascii_case(b"websocket"));
        let (Some(upgrade), true) = (upgrade, websocket) else {
            return Err(Stopped::Denied(case.cut(
                builtin::FRAMING,
                "the other side speaks something that nobody asked for",
            )));
        };
        let upgraded = Upgraded {
            outside: hyper::upgrade::on(&mut response),
            redactor: redactor.clone(),
            link: Arc::clone(&link),
            case,
            idle: inner.limits.idle_time,
        };
        *upgrade.slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(upgraded);
        let (mut parts, _) = response.into_parts();
        forward::strip_answer(&mut parts.headers);
        parts.headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
        parts
            .headers
            .insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        return Ok(rebuilt(parts, full(""), redactor.as_ref()));
    }
    let (mut parts, body) = response.into_parts();
    forward::strip_answer(&mut parts.headers);
    let body = Returning::new(body, redactor.clone(), tally, link, case);
    Ok(rebuilt(parts, body.boxed_unsync(), redactor.as_ref()))
}

/// Takes over status and headers alone: reason phrases and other extras stay outside.
fn rebuilt(parts: http::response::Parts, body: Content, redactor: Option<&Redactor>) -> Response<Content> {
    let mut response = Response::new(body);
    *response.status_mut() = parts.status;
    *response.version_mut() = Version::default();
    *response.headers_mut() = parts.headers;
    if let Some(redactor) = redactor {
        for value in response.headers_mut().values_mut() {
            *value = masked(redactor, value);
        }
    }
    response
}

impl Upgraded {
    /// Passes on what both say until they are done.
    pub async fn relay(mut self, client: Rewind<impl Stream>) {
        let outside = match self.outside.await {
            Ok(outside) => outside,
            Err(error) => {
                self.case.fail(crate::error::chain(&error));
                return;
            }
        };
        self.case.count_by(&self.link);
        let outside = Masked {
            inner: TokioIo::new(outside),
            stream: self.redactor.map(|redactor| redactor.stream()),
            ready: Vec::new(),
        };
        if let Err(error) = relay(client, outside, self.idle).await {
            self.case.decision.reason = error.to_string();
        }
    }
}

/// A stream from the outside in which secrets are masked; they keep their length, so frames stay whole.
struct Masked<S> {
    inner: S,
    stream: Option<Redacting>,
    ready: Vec<u8>,
}

impl<S: AsyncRead + Unpin> AsyncRead for Masked<S> {
    fn poll_read(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> std::task::Poll<std::io::Result<()>> {
        let this = &mut *self;
        let Some(stream) = &mut this.stream else {
            return std::pin::Pin::new(&mut this.inner).poll_read(cx, buf);
        };
        while this.ready.is_empty() {
            let mut bytes = [0; 8 << 10];
            let mut part = ReadBuf::new(&mut bytes);
            std::task::ready!(std::pin::Pin::new(&mut this.inner).poll_read(cx, &mut part))?;
            // At the end what is held back is dropped: nothing whole was in it, and a part may be the beginning of a secret.
            if part.filled().is_empty() {
                return std::task::Poll::Ready(Ok(()));
            }
            this.ready = stream.push(part.filled());
        }
        let piece = this.ready.len().min(buf.remaining());
        buf.put_slice(&this.ready[..piece]);
        this.ready.drain(..piece);
        std::task::Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Masked<S> {
    fn poll_write(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
        bytes: &[u8],
    ) -> std::task::Poll<std::io::Result<usize>> {
        std::pin::Pin::new(&mut self.inner).poll_write(cx, bytes)
    }

    fn poll_flush(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<std::io::Result<()>> {
        std::pin::Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<std::io::Result<()>> {
        std::pin::Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}
