//! The side to the outside: TLS that is always verified, and one HTTP connection.

use std::io;
use std::sync::Arc;

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::{TrySendError, http1, http2};
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::authority::BadAuthority;
use super::content::Content;
use crate::egress::border::Inner;
use crate::egress::name::HostName;
use crate::egress::stream::Stream;

#[derive(Debug)]
pub(in crate::egress) struct Outside(Arc<ClientConfig>);

pub(super) const H2: &[u8] = b"h2";
pub(super) const H1: &[u8] = b"http/1.1";

impl Outside {
    pub fn new(roots: &Arc<rustls::RootCertStore>) -> Result<Self, BadAuthority> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(Arc::clone(roots))
            .with_no_client_auth();
        Ok(Self(Arc::new(config)))
    }

    /// Speaks TLS to `name`, offering `alpn`.
    pub async fn secure<S: Stream>(&self, name: &HostName, alpn: &[&[u8]], stream: S) -> io::Result<TlsStream<S>> {
        let mut config = ClientConfig::clone(&self.0);
        config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
        let name = ServerName::try_from(name.as_str().to_owned()).map_err(io::Error::other)?;
        TlsConnector::from(Arc::new(config)).connect(name, stream).await
    }
}

/// A connection that requests can be sent on.
pub(super) enum Sender {
    H1(http1::SendRequest<Content>),
    H2(http2::SendRequest<Content>),
}

impl Sender {
    /// Greets, and keeps the connection going among the border's tasks.
    pub async fn greet(inner: &Inner, stream: impl Stream, h2: bool) -> hyper::Result<Self> {
        let stop = inner.stop.clone();
        let stream = TokioIo::new(stream);
        if h2 {
            let (sender, connection) = http2::Builder::new(Spawner::of(inner))
                .initial_stream_window_size(512 << 10)
                .initial_connection_window_size(1 << 20)
                .max_header_list_size(64 << 10)
                .handshake(stream)
                .await?;
            inner.tasks.spawn(run(connection, stop));
            return Ok(Self::H2(sender));
        }
        let mut builder = http1::Builder::new();
        builder.max_buf_size(128 << 10);
        let (sender, connection) = builder.handshake(stream).await?;
        inner.tasks.spawn(run(connection.with_upgrades(), stop));
        Ok(Self::H1(sender))
    }

    pub fn is_h2(&self) -> bool {
        matches!(self, Self::H2(_))
    }

    /// Whether the other side still holds it.
    pub async fn is_ready(&mut self) -> bool {
        match self {
            Self::H1(sender) => sender.ready().await.is_ok(),
            Self::H2(sender) => sender.ready().await.is_ok(),
        }
    }

    pub async fn send(
        &mut self,
        request: Request<Content>,
    ) -> Result<Response<Incoming>, TrySendError<Request<Content>>> {
        match self {
            Self::H1(sender) => sender.try_send_request(request).await,
            Self::H2(sender) => sender.try_send_request(request).await,
        }
    }
}

async fn run(connection: impl Future<Output = hyper::Result<()>>, stop: CancellationToken) {
    tokio::select! {
        ended = connection => if let Err(error) = ended {
            tracing::debug!(%error, "a connection to the outside broke");
        },
        () = stop.cancelled() => {}
    }
}

/// Puts what hyper spawns among the border's tasks.
#[derive(Clone)]
pub(super) struct Spawner {
    tasks: TaskTracker,
    stop: CancellationToken,
}

impl Spawner {
    pub fn of(inner: &Inner) -> Self {
        Self {
            tasks: inner.tasks.clone(),
            stop: inner.stop.clone(),
        }
    }
}

impl<F> hyper::rt::Executor<F> for Spawner
where
    F: Future<Output: Send> + Send + 'static,
{
    fn execute(&self, future: F) {
        let stop = self.stop.clone();
        self.tasks.spawn(async move {
            tokio::select! {
                _ = future => {}
                () = stop.cancelled() => {}
            }
        });
    }
}
