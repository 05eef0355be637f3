//! What an endpoint says when it gives no answer, made a typed [`Error`].
//!
//! Decided by status, then by `code` and `type`, and by the text only where servers give nothing else: "longer than the
//! context" has no common code. Rate limits and overload can be tried again; a deterministic refusal never is.

use std::time::Duration;

use reqwest::header::{DATE, HeaderMap, RETRY_AFTER};
use serde_json::Value;

use crate::model::Error;

const MAX_MESSAGE: usize = 500;

/// The `error` object, however a server shapes it.
#[derive(Debug, Default)]
struct Told {
    message: String,
    /// `code` and `type`, lower case.
    names: Vec<String>,
    /// A `code` that is an HTTP status.
    status: Option<u16>,
    retry_after: Option<Duration>,
}

/// For a response with an error status.
pub(super) fn of_response(status: u16, headers: &HeaderMap, body: &str) -> Error {
    let mut told = match serde_json::from_str::<Value>(body) {
        Ok(value) => told(&value),
        Err(_) => Told {
            message: clean(body),
            ..Told::default()
        },
    };
    if told.message.is_empty() {
        told.message = match status {
            300..=399 => "the endpoint redirects, which is not followed: name its final address".to_owned(),
            _ => "it gave no reason".to_owned(),
        };
    }
    let retry_after = header_delay(headers).or(told.retry_after);
    classify(status, told, retry_after)
}

/// For an error object inside a stream that began with 200.
pub(super) fn in_stream(value: &Value) -> Error {
    let told = told(value);
    let retry_after = told.retry_after;
    match told.status {
        Some(status) => classify(status, told, retry_after),
        None if told.is("rate_limit") => Error::RateLimited { retry_after },
        None if told.is("overloaded") || told.is("server_error") || told.is("unavailable") || told.is("api_error") => {
            Error::Overloaded {
                status: 200,
                retry_after,
            }
        }
        None if told.is_quota() => Error::Quota { message: told.message },
        None if told.is_context() => Error::ContextLength { message: told.message },
        None if told.is("authentication") || told.is("permission") => Error::Auth {
            status: 200,
            message: told.message,
        },
        None if told.is("invalid_request") => Error::Refused {
            status: 200,
            message: told.message,
        },
        None => Error::Broken {
            reason: format!("the endpoint reports an error: {}", told.message),
        },
    }
}

fn classify(status: u16, told: Told, retry_after: Option<Duration>) -> Error {
    let message = told.message.clone();
    match status {
        402 => Error::Quota { message },
        429 | 403 | 400 if told.is_quota() => Error::Quota { message },
        401 | 403 => Error::Auth { status, message },
        429 => Error::RateLimited { retry_after },
        400 | 413 | 422 if told.is_context() => Error::ContextLength { message },
        501 | 505 => Error::Refused { status, message },
        408 | 409 | 425 | 500..=599 => Error::Overloaded { status, retry_after },
        _ => Error::Refused { status, message },
    }
}

impl Told {
    fn is(&self, name: &str) -> bool {
        self.names.iter().any(|known| known.contains(name))
    }

    fn is_quota(&self) -> bool {
        ["insufficient_quota", "billing", "insufficient_balance"]
            .iter()
            .any(|name| self.is(name))
    }

    fn is_context(&self) -> bool {
        let text = self.message.to_lowercase();
        let phrases = [
            "maximum context length",
            "context window",
            "context length",
            "context size",
            "prompt is too long",
            "too many tokens",
        ];
        self.is("context_length_exceeded")
            || self.is("exceed_context_size")
            || phrases.iter().any(|phrase| text.contains(phrase))
    }
}

/// Reads `{"error": {…}}`, `{"error": "text"}`, `[{"error": …}]`, `{"message": …}`, `{"detail": …}`.
fn told(value: &Value) -> Told {
    let value = value.get(0).unwrap_or(value);
    let error = value.get("error").unwrap_or(value);
    let text = |name: &str| error.get(name).and_then(Value::as_str).map(str::to_owned);
    let message = match error {
        Value::String(text) => text.clone(),
        _ => text("message")
            .or_else(|| text("detail"))
            .unwrap_or_else(|| error.to_string()),
    };
    let status = error
        .get("code")
        .and_then(Value::as_u64)
        .and_then(|code| u16::try_from(code).ok());
    let details = error.get("details").and_then(Value::as_array);
    let delay = details
        .into_iter()
        .flatten()
        .find_map(|detail| detail.get("retryDelay")?.as_str());
    Told {
        message: clean(&message),
        names: ["code", "type", "status"]
            .iter()
            .filter_map(|name| text(name))
            .map(|name| name.to_lowercase())
            .collect(),
        status: status.filter(|status| (400..=599).contains(status)),
        retry_after: delay.and_then(|delay| seconds(delay.strip_suffix('s')?)),
    }
}

/// One bounded line.
fn clean(text: &str) -> String {
    let line: String = text
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(MAX_MESSAGE)
        .collect();
    line.trim().to_owned()
}

/// `retry-after-ms`, else `retry-after` in seconds or as a date. A date is measured against the `date` that the same
/// server sent, so that neither clock needs to be right.
fn header_delay(headers: &HeaderMap) -> Option<Duration> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).map(str::trim);
    if let Some(delay) = text("retry-after-ms").and_then(|text| text.parse::<f64>().ok()) {
        return Duration::try_from_secs_f64(delay / 1000.0).ok();
    }
    let value = text(RETRY_AFTER.as_str())?;
    seconds(value).or_else(|| {
        let until = httpdate::parse_http_date(value).ok()?;
        let now = httpdate::parse_http_date(text(DATE.as_str())?).ok()?;
        Some(until.duration_since(now).unwrap_or_default())
    })
}

fn seconds(text: &str) -> Option<Duration> {
    Duration::try_from_secs_f64(text.trim().parse().ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(status: u16, headers: &[(&str, &str)], body: &str) -> String {
        let headers = headers
            .iter()
            .map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()))
            .collect();
        format!("{:?}", of_response(status, &headers, body))
    }

    #[test]
    fn each_status_and_body_has_its_class() {
        let quota = r#"{"error": {"message": "You exceeded your current quota", "type": "insufficient_quota", "code": "insufficient_quota"}}"#;
        let context =
            r#"{"error": {"message": "too long", "type": "invalid_request_error", "code": "context_length_exceeded"}}"#;
        let vllm = r#"{"object": "error", "message": "This model's maximum context length is 10 tokens", "type": "BadRequestError", "code": 400}"#;
        let gemini = r#"[{"error": {"code": 429, "message": "slow down", "status": "RESOURCE_EXHAUSTED", "details": [{"@type": "x"}, {"retryDelay": "17s"}]}}]"#;
        let lines = [
            error(
                429,
                &[("retry-after", "3")],
                r#"{"error": {"message": "slow", "type": "requests"}}"#,
            ),
            error(429, &[], quota),
            error(429, &[], gemini),
            error(402, &[], ""),
            error(400, &[], context),
            error(400, &[], vllm),
            error(400, &[], r#"{"error": "bad\nthing"}"#),
            error(
                401,
                &[],
                r#"{"error": {"message": "Incorrect API key provided", "code": "invalid_api_key"}}"#,
            ),
            error(403, &[], r#"{"detail": "no"}"#),
            error(
                404,
                &[],
                r#"{"error": {"message": "The model `m` does not exist", "code": "model_not_found"}}"#,
            ),
            error(408, &[], ""),
            error(500, &[], "<html>oops</html>"),
            error(501, &[], ""),
            error(503, &[("retry-after", "1")], ""),
            error(
                529,
                &[],
                r#"{"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}"#,
            ),
            error(307, &[("location", "http://elsewhere/?k=secret")], ""),
        ];
        insta::assert_snapshot!(lines.join("\n"));
    }

    #[test]
    fn the_servers_delay_is_read_in_all_its_forms() {
        let delay = |headers: &[(&str, &str)]| {
            let headers = headers
                .iter()
                .map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()))
                .collect();
            header_delay(&headers)
        };
        let date = ("date", "Mon, 30 Nov 2026 10:00:00 GMT");
        assert_eq!(delay(&[("retry-after", "2")]), Some(Duration::from_secs(2)));
        assert_eq!(delay(&[("retry-after", "0.5")]), Some(Duration::from_millis(500)));
        assert_eq!(
            delay(&[("retry-after", "9"), ("retry-after-ms", "1500")]),
            Some(Duration::from_millis(1500))
        );
        assert_eq!(
            delay(&[("retry-after", "Mon, 30 Nov 2026 10:00:30 GMT"), date]),
            Some(Duration::from_secs(30))
        );
        assert_eq!(
            delay(&[("retry-after", "Mon, 30 Nov 2026 09:00:00 GMT"), date]),
            Some(Duration::ZERO)
        );
        for bad in ["-1", "soon", "nan", "inf", ""] {
            assert_eq!(delay(&[("retry-after", bad), date]), None, "{bad}");
        }
        assert_eq!(delay(&[]), None);
    }

    #[test]
    fn errors_inside_a_good_stream_have_their_class_too() {
        let of = |text: &str| format!("{:?}", in_stream(&serde_json::from_str(text).unwrap()));
        let lines = [
            of(r#"{"error": {"message": "slow", "code": 429}}"#),
            of(r#"{"error": {"message": "x", "type": "overloaded_error"}}"#),
            of(r#"{"error": {"message": "The server had an error", "type": "server_error"}}"#),
            of(r#"{"error": {"message": "x", "type": "rate_limit_exceeded"}}"#),
            of(r#"{"error": {"message": "x", "type": "insufficient_quota"}}"#),
            of(r#"{"error": {"message": "x", "type": "invalid_request_error", "code": "context_length_exceeded"}}"#),
            of(r#"{"error": {"message": "x", "type": "invalid_request_error"}}"#),
            of(r#"{"error": "out of cheese"}"#),
            of(r#"{"error": {}}"#),
        ];
        insta::assert_snapshot!(lines.join("\n"));
    }
}
