//! The way to a server.

use tonic::transport::{Channel, Endpoint};

use super::Error;
use crate::api::proto::task_service_client::TaskServiceClient;
use crate::error::Kind;

/// Where a server is looked for when nothing says otherwise.
pub const DEFAULT: &str = "http://127.0.0.1:7070";
/// Largest answer that is taken.
const MAX_MESSAGE: usize = 64 << 20;

/// Connects; `url` may leave out `http://`.
pub async fn connect(url: &str) -> Result<TaskServiceClient<Channel>, Error> {
    let full = if url.contains("://") {
        url.to_owned()
    } else {
        format!("http://{url}")
    };
    let endpoint = Endpoint::from_shared(full.clone())
        .map_err(|error| Error::new(Kind::Invalid, format!("`{url}` is not a server address: {error}")))?;
    let channel = endpoint
        .connect_timeout(std::time::Duration::from_secs(5))
        .connect()
        .await
        .map_err(|error| {
            Error::of(Kind::Unavailable, &error)
                .hint(format!("is a server running at {full}? start one with `exuvia serve`"))
        })?;
    Ok(TaskServiceClient::new(channel).max_decoding_message_size(MAX_MESSAGE))
}

impl From<tonic::Status> for Error {
    fn from(status: tonic::Status) -> Self {
        use tonic::Code;
        let kind = match status.code() {
            Code::InvalidArgument | Code::OutOfRange => Kind::Invalid,
            Code::PermissionDenied | Code::Unauthenticated => Kind::Denied,
            Code::NotFound => Kind::NotFound,
            Code::AlreadyExists => Kind::Exists,
            Code::FailedPrecondition => Kind::WrongState,
            Code::Aborted => Kind::Conflict,
            Code::ResourceExhausted => Kind::Exhausted,
            Code::DeadlineExceeded | Code::Cancelled => Kind::Deadline,
            Code::Unavailable => Kind::Unavailable,
            Code::Ok | Code::Unknown | Code::Unimplemented | Code::Internal | Code::DataLoss => Kind::Internal,
        };
        Self::new(kind, status.message())
    }
}
