//! The way to a server.

use std::time::Duration;

use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};
use tonic_types::StatusExt;

use super::Error;
use crate::api::proto::sandbox_service_client::SandboxServiceClient;
use crate::api::proto::task_service_client::TaskServiceClient;
use crate::error::Kind;

/// Where a server is looked for when nothing says otherwise.
pub const DEFAULT: &str = "http://127.0.0.1:7070";
/// Largest answer that is taken.
const MAX_MESSAGE: usize = 64 << 20;

/// How soon a connection is found to be dead on which nothing comes.
const ALIVE: (Duration, Duration) = (Duration::from_secs(20), Duration::from_secs(20));

/// The tasks of a server.
pub async fn connect(url: &str) -> Result<TaskServiceClient<Channel>, Error> {
    Ok(TaskServiceClient::new(channel(url).await?).max_decoding_message_size(MAX_MESSAGE))
}

/// The sandboxes of a server.
pub async fn sandboxes(url: &str) -> Result<SandboxServiceClient<Channel>, Error> {
    Ok(SandboxServiceClient::new(channel(url).await?).max_decoding_message_size(MAX_MESSAGE))
}

/// Connects; `url` may leave out `http://`.
async fn channel(url: &str) -> Result<Channel, Error> {
    let full = if url.contains("://") {
        url.to_owned()
    } else {
        format!("http://{url}")
    };
    let endpoint = Endpoint::from_shared(full.clone())
        .map_err(|error| Error::new(Kind::Invalid, format!("`{url}` is not a server address: {error}")))?;
    endpoint
        .connect_timeout(Duration::from_secs(5))
        .http2_keep_alive_interval(ALIVE.0)
        .keep_alive_timeout(ALIVE.1)
        .connect()
        .await
        .map_err(|error| {
            Error::new(
                Kind::Unavailable,
                format!("no server answers at {full}: {}", root(&error)),
            )
            .hint("start one with `exuvia serve`, or name another with --server or EXUVIA_SERVER")
        })
}

/// What is at the bottom of it: the layers above say the same again.
fn root(error: &dyn std::error::Error) -> String {
    std::iter::successors(Some(error), |error| error.source())
        .last()
        .unwrap_or(error)
        .to_string()
}

/// The stable reason of a refusal, where the server gave one.
pub fn reason(status: &Status) -> Option<String> {
    status.get_details_error_info().map(|info| info.reason)
}

/// What may help against a refusal.
fn hint(status: &Status) -> Option<String> {
    if let Some(wait) = status.get_details_retry_info().and_then(|info| info.retry_delay) {
        return Some(format!("try again in {}", humantime::format_duration(wait)));
    }
    // A server that knows the call says itself what it lacks; the one that does not know it says nothing.
    (status.code() == Code::Unimplemented && status.message().is_empty())
        .then(|| "the server is of another version, and does not know this call".to_owned())
}

impl From<Status> for Error {
    fn from(status: Status) -> Self {
        let kind = match status.code() {
            Code::InvalidArgument | Code::OutOfRange => Kind::Invalid,
            Code::PermissionDenied | Code::Unauthenticated => Kind::Denied,
            Code::NotFound => Kind::NotFound,
            Code::AlreadyExists => Kind::Exists,
            Code::FailedPrecondition => Kind::WrongState,
            Code::Aborted => Kind::Conflict,
            Code::ResourceExhausted => Kind::Exhausted,
            Code::DeadlineExceeded | Code::Cancelled => Kind::Deadline,
            Code::Unavailable | Code::Unimplemented => Kind::Unavailable,
            Code::Ok | Code::Unknown | Code::Internal | Code::DataLoss => Kind::Internal,
        };
        Self {
            kind,
            message: super::report::clean(status.message()),
            hint: hint(&status),
            reason: reason(&status),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_server_that_is_not_there_is_named_once_and_plainly() {
        let free = std::net::TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap();
        let error = channel(&free.to_string()).await.unwrap_err();
        assert_eq!(
            (error.exit(), error.message),
            (
                crate::cli::Exit::Unavailable,
                format!("no server answers at http://{free}: Connection refused (os error 111)")
            )
        );
    }

    #[test]
    fn only_a_call_that_the_server_does_not_know_hints_at_its_version() {
        assert_eq!(
            hint(&Status::unimplemented("")).as_deref(),
            Some("the server is of another version, and does not know this call")
        );
        assert_eq!(
            hint(&Status::unimplemented("this server has no snapshot of memory yet")),
            None
        );
    }
}
