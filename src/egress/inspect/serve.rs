//! The side to the client: TLS with the border's own certificate, HTTP/1 behind the strict reader, HTTP/2.

use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};

use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls::ServerConfig;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tokio_rustls::TlsAcceptor;

use super::outside::{H1, H2, Sender, Spawner};
use super::request::{Link, Site, Upgrade, serve};
use crate::egress::border::Inner;
use crate::egress::case::{Case, Stopped};
use crate::egress::door::refuse_framing;
use crate::egress::hello::Hello;
use crate::egress::http1::{Checked, Stop, Violation};
use crate::egress::name::Host;
use crate::egress::reach::{Metered, Passage};
use crate::egress::rules::builtin;
use crate::egress::stream::{Rewind, Stream};

/// Serves HTTP/1 until the stream ends, becomes something else, or holds what is refused. What is left then comes back.
pub(in crate::egress) async fn serve_http1<S: Stream>(
    site: Site,
    held: Vec<u8>,
    stream: S,
) -> Option<(Stop, Vec<u8>, S)> {
    let site = Arc::new(site);
    let checked = Checked::new(held, stream);
    let gate = checked.gate();
    let slot = Arc::new(Mutex::new(None));
    let service = service_fn(|request| {
        let upgrade = Upgrade {
            gate: gate.clone(),
            slot: Arc::clone(&slot),
        };
        let site = Arc::clone(&site);
        async move { Ok::<_, Infallible>(serve(site, request, Some(upgrade)).await) }
    });
    let served = hyper::server::conn::http1::Builder::new()
        .half_close(true)
        .auto_date_header(false)
        .max_buf_size(128 << 10)
        .timer(TokioTimer::new())
        .header_read_timeout(site.inner.limits.idle_time)
        .serve_connection(TokioIo::new(checked), service)
        .without_shutdown()
        .await;
    let parts = match served {
        Ok(parts) => parts,
        Err(error) => {
            tracing::debug!(%error, "a client's connection broke");
            return None;
        }
    };
    let (stop, held, stream) = parts.io.into_inner().into_parts();
    let upgraded = slot.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(upgraded) = upgraded {
        upgraded
            .relay(Rewind::new([&parts.read_buf[..], &held].concat(), stream))
            .await;
        return None;
    }
    Some((stop?, held, stream))
}

/// Serves plain HTTP to one host.
pub(in crate::egress) async fn serve_plain<S: Stream>(
    inner: &Arc<Inner>,
    case: Case,
    passage: Passage,
    outside: Metered,
    client: Rewind<S>,
) {
    let tally = Arc::clone(&outside.tally);
    let link = match Sender::greet(inner, outside, false).await {
        Ok(sender) => Ok(Link {
            passage: passage.clone(),
            sender,
            tally,
            address: case.decision.address,
        }),
        Err(error) => Err(error.to_string()),
    };
    serve_each(inner, case, passage, link, client, None).await;
}

/// Opens TLS to one host: the outside first, so that the client is offered what the other side speaks.
pub(in crate::egress) async fn serve_tls<S: Stream>(
    inner: &Arc<Inner>,
    mut case: Case,
    passage: Passage,
    hello: Hello,
    outside: Metered,
    client: Rewind<S>,
) {
    let Host::Name(name) = passage.host.clone() else {
        case.deny(builtin::TLS_EXPECTED, "TLS to an address cannot be opened");
        return;
    };
    let offers = |protocol: &[u8]| hello.alpn.iter().any(|offered| offered == protocol);
    let alpn: Vec<&[u8]> = [H2, H1].into_iter().filter(|protocol| offers(protocol)).collect();
    let tally = Arc::clone(&outside.tally);
    let address = case.decision.address;
    let link = match tokio::time::timeout(inner.limits.dial_time, inner.outside.secure(&name, &alpn, outside)).await {
        Ok(Ok(stream)) => {
            let h2 = stream.get_ref().1.alpn_protocol() == Some(H2);
            match Sender::greet(inner, stream, h2).await {
                Ok(sender) => Ok(Link {
                    passage: passage.clone(),
                    sender,
                    tally,
                    address,
                }),
                Err(error) => Err(crate::error::chain(&error)),
            }
        }
        Ok(Err(error)) => Err(crate::error::chain(&error)),
        Err(_) => Err("TLS could not be agreed on in time".to_owned()),
    };
    // Where the outside is broken the client shall still hear why.
    let h2 = match &link {
        Ok(link) => link.sender.is_h2(),
        Err(_) => false,
    };
    let config = inner
        .authority
        .leaf(&name)
        .and_then(|leaf| server_config(leaf, if h2 { H2 } else { H1 }, !alpn.is_empty()));
    let config = match config {
        Ok(config) => config,
        Err(error) => {
            case.fail(crate::error::chain(&error));
            return;
        }
    };
    let accepted = TlsAcceptor::from(Arc::new(config)).accept(client);
    let stream = match tokio::time::timeout(inner.limits.head_time, accepted).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => {
            case.fail(format!("the client did not agree on TLS with the border: {error}"));
            return;
        }
        Err(_) => {
            case.fail("the client did not agree on TLS with the border in time");
            return;
        }
    };
    // Two readers of one hello: they have to have read the same.
    if stream.get_ref().1.server_name() != Some(name.as_str()) {
        case.deny(builtin::SAME_NAME, "the TLS hello reads in two ways");
        return;
    }
    serve_each(inner, case, passage, link, stream, Some(h2)).await;
}

/// `tls` tells whether HTTP/2 was agreed on; nothing where there is no TLS.
async fn serve_each<S: Stream>(
    inner: &Arc<Inner>,
    mut case: Case,
    passage: Passage,
    link: Result<Link, String>,
    client: S,
    tls: Option<bool>,
) {
    let channel = case.decision.channel;
    let host = passage.host.to_string();
    if let Err(reason) = &link {
        case.fail(reason.clone());
    }
    let site = Site::fixed(inner, channel, passage, tls.is_some(), link);
    let seen = site.seen();
    if tls == Some(true) {
        let site = Arc::new(site);
        let service = service_fn(move |request| {
            let site = Arc::clone(&site);
            async move { Ok::<_, Infallible>(serve(site, request, None).await) }
        });
        let served = hyper::server::conn::http2::Builder::new(Spawner::of(inner))
            .max_concurrent_streams(128)
            .max_header_list_size(48 << 10)
            .initial_stream_window_size(256 << 10)
            .initial_connection_window_size(1 << 20)
            .max_send_buf_size(256 << 10)
            .auto_date_header(false)
            .serve_connection(TokioIo::new(client), service)
            .await;
        if let Err(error) = served {
            tracing::debug!(%error, "a client's connection broke");
        }
    } else {
        match serve_http1(site, Vec::new(), client).await {
            Some((Stop::BadHead(bad), _, mut client)) => {
                refuse_framing(inner, channel, host.as_bytes(), &mut client, bad).await;
                return case.forget();
            }
            Some((Stop::Tunnel, _, mut client)) => {
                refuse_framing(inner, channel, host.as_bytes(), &mut client, Violation::Tls).await;
                return case.forget();
            }
            Some((Stop::End | Stop::BadBody(_), ..)) | None => {}
        }
    }
    if seen.load(std::sync::atomic::Ordering::Acquire) {
        case.forget();
    } else if case.decision.reason.is_empty() {
        let _: Stopped = case.fail("the client made no request");
    }
}

/// One certificate, whatever is asked for: the name was agreed on before.
#[derive(Debug)]
struct Always(Arc<CertifiedKey>);

impl ResolvesServerCert for Always {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.0))
    }
}

fn server_config(leaf: Arc<CertifiedKey>, alpn: &[u8], offered: bool) -> Result<ServerConfig, super::BadAuthority> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(Always(leaf)));
    if offered {
        config.alpn_protocols = vec![alpn.to_vec()];
    }
    Ok(config)
}
