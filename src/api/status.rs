//! The one place that turns a domain error into a `tonic::Status`: code, message and an ErrorInfo with a stable reason.
#![warn(clippy::wildcard_enum_match_arm)]

use std::collections::HashMap;
use std::time::Duration;

use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use crate::error::{self, Kind};
use crate::{fleet, run};

const DOMAIN: &str = "exuvia";

/// Longest message. It goes out twice, in a header and in the details, and a usual client takes 8 KiB of headers.
const MOST_MESSAGE: usize = 1024;

/// When whoever found no place may try again.
const PLACE: Duration = Duration::from_secs(1);

/// The status that stands for `error`. Internal errors are logged under an id and told by that id alone.
pub fn of(error: &run::Error) -> Status {
    let (kind, reason) = (error.kind(), error.reason());
    let (message, mut details) = told(kind, reason, error::chain(error));
    if let run::Error::Incompatible { mismatches, .. } = error {
        let both = mismatches.iter().flat_map(|mismatch| {
            let name = mismatch.ground.name();
            [
                (format!("{name}.recorded"), mismatch.recorded.clone()),
                (format!("{name}.found"), mismatch.found.clone()),
            ]
        });
        details.set_error_info(reason, DOMAIN, both.collect::<HashMap<_, _>>());
    }
    Status::with_error_details(code(kind), message, details)
}

/// The same for the fleet's errors.
pub fn of_fleet(error: &fleet::Error) -> Status {
    let (kind, reason) = (error.kind(), error.reason());
    let (message, mut details) = told(kind, reason, error::chain(error));
    let mut code = code(kind);
    if let fleet::Error::NoPlace { .. } | fleet::Error::QueueFull(_) = error {
        details.set_retry_info(Some(PLACE));
    }
    if let fleet::Error::OutputDropped {
        channel, first, end, ..
    } = error
    {
        code = Code::OutOfRange;
        let kept = [
            ("stream", channel.to_string()),
            ("first_offset", first.to_string()),
            ("end_offset", end.to_string()),
        ];
        let kept = kept.map(|(name, value)| (name.to_owned(), value));
        details.set_error_info(reason, DOMAIN, HashMap::from(kept));
    }
    Status::with_error_details(code, message, details)
}

/// The status of a request that makes no sense.
pub fn invalid(message: impl Into<String>) -> Status {
    make(Kind::Invalid, "INVALID", message.into())
}

fn make(kind: Kind, reason: &str, message: String) -> Status {
    let (message, details) = told(kind, reason, message);
    Status::with_error_details(code(kind), message, details)
}

fn told(kind: Kind, reason: &str, message: String) -> (String, ErrorDetails) {
    let mut metadata = HashMap::new();
    let message = match kind {
        Kind::Internal => {
            let id = crate::ids::TraceId::random().to_string();
            tracing::error!(%id, error = message, "internal error");
            metadata.insert("id".to_owned(), id.clone());
            format!("internal error {id}: see the server's log")
        }
        Kind::Invalid
        | Kind::Denied
        | Kind::NotFound
        | Kind::Exists
        | Kind::WrongState
        | Kind::Conflict
        | Kind::Exhausted
        | Kind::Deadline
        | Kind::Unavailable => shortened(message),
    };
    let mut details = ErrorDetails::with_error_info(reason, DOMAIN, metadata);
    if kind.is_retryable() {
        details.set_retry_info(Some(Duration::from_secs(1)));
    }
    (message, details)
}

/// Its beginning, and how much is left out: names and paths of a request may be as long as they like. A header has three
/// bytes for one that is not plain.
fn shortened(message: String) -> String {
    if message.len() <= MOST_MESSAGE {
        return message;
    }
    let kept = message.floor_char_boundary(MOST_MESSAGE);
    format!("{}… ({} bytes more)", &message[..kept], message.len() - kept)
}

fn code(kind: Kind) -> Code {
    match kind {
        Kind::Invalid => Code::InvalidArgument,
        Kind::Denied => Code::PermissionDenied,
        Kind::NotFound => Code::NotFound,
        Kind::Exists => Code::AlreadyExists,
        Kind::WrongState => Code::FailedPrecondition,
        Kind::Conflict => Code::Aborted,
        Kind::Exhausted => Code::ResourceExhausted,
        Kind::Deadline => Code::DeadlineExceeded,
        Kind::Unavailable => Code::Unavailable,
        Kind::Internal => Code::Internal,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_carries_a_stable_reason_and_an_internal_one_hides_its_text() {
        let status = of(&run::Error::NoApproval("any".into()));
        assert_eq!(status.code(), Code::FailedPrecondition);
        assert_eq!(status.get_details_error_info().unwrap().reason, "NO_OPEN_APPROVAL");
        let status = invalid("é".repeat(5000));
        let expected = format!("{}… (8976 bytes more)", "é".repeat(512));
        assert_eq!(status.message(), expected, "fits the headers that a client takes");
        let status = of(&run::Error::Broke("secret detail".into()));
        assert_eq!(status.code(), Code::Internal);
        assert!(!status.message().contains("secret detail"), "{}", status.message());
    }
}
