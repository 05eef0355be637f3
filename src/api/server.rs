//! Listens, serves, drains.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;

use super::proto::DESCRIPTORS;
use super::proto::sandbox_service_server::SandboxServiceServer;
use super::proto::task_service_server::TaskServiceServer;
use super::sandboxes::Sandboxes;
use super::tasks::Tasks;
use crate::error::Kind;
use crate::fleet::Fleet;
use crate::run::Service;

/// Largest message that is taken, inflated.
const MAX_MESSAGE: usize = 16 << 20;
/// Streams of one connection.
const MAX_STREAMS: u32 = 256;

/// The server cannot start, or broke.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot listen on `{address}`")]
    Listen {
        address: SocketAddr,
        #[source]
        source: std::io::Error,
    },
    /// There is no authentication yet, so only this machine may reach the server.
    #[error("`{0}` is not a loopback address, and the server has no authentication yet")]
    NotLoopback(SocketAddr),
    #[error("the server broke")]
    Broke(#[source] Box<dyn std::error::Error + Send + Sync>),
}

impl Error {
    pub fn kind(&self) -> Kind {
        match self {
            Self::Listen { .. } => Kind::Unavailable,
            Self::NotLoopback(_) => Kind::Invalid,
            Self::Broke(_) => Kind::Internal,
        }
    }
}

/// Takes the address; a port of 0 is chosen by the kernel.
pub async fn bind(address: SocketAddr) -> Result<TcpListener, Error> {
    if !address.ip().is_loopback() {
        return Err(Error::NotLoopback(address));
    }
    TcpListener::bind(address)
        .await
        .map_err(|source| Error::Listen { address, source })
}

/// Serves until `stop` is cancelled, then lets calls end.
pub async fn serve(
    service: Service,
    fleet: Fleet,
    listener: TcpListener,
    stop: CancellationToken,
) -> Result<(), Error> {
    let (health, health_service) = tonic_health::server::health_reporter();
    health.set_serving::<TaskServiceServer<Tasks>>().await;
    health.set_serving::<SandboxServiceServer<Sandboxes>>().await;
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(DESCRIPTORS)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()
        .map_err(|error| Error::Broke(error.into()))?;
    let tasks = TaskServiceServer::new(Tasks::new(service)).max_decoding_message_size(MAX_MESSAGE);
    let sandboxes = SandboxServiceServer::new(Sandboxes::new(fleet)).max_decoding_message_size(MAX_MESSAGE);
    // Answers are small and many: none waits for the acknowledgement of the one before.
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    Server::builder()
        .http2_keepalive_interval(Some(Duration::from_secs(30)))
        .http2_max_header_list_size(16 << 10)
        .max_concurrent_streams(MAX_STREAMS)
        .add_service(health_service)
        .add_service(reflection)
        .add_service(tasks)
        .add_service(sandboxes)
        .serve_with_incoming_shutdown(incoming, stop.cancelled_owned())
        .await
        .map_err(|error| Error::Broke(error.into()))
}
