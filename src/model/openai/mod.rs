//! Any endpoint that speaks OpenAI's Chat Completions, by its base URL.
//!
//! One call: `request_body` → POST → status and headers (`refusal` makes typed errors of them) → bytes (`events` cuts them
//! into server-sent events, bounded) → `answer` puts the fragments together → [`Reply`]. What compatible servers get
//! wrong is written where it is put right, in `answer`. An endpoint that answers a streaming request with one JSON
//! document is understood too.
//!
//! Time: 10 s to connect; a limit on silence (first byte, and between two reads); [`Request::timeout`] for all of it.
//! Redirects are not followed, or the key could go to a host that nobody named. The key is in one header, marked
//! sensitive; it is cut out of what an endpoint says before that becomes an error.

mod answer;
mod events;
mod refusal;
#[cfg(test)]
mod tests;

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::{Stream, StreamExt};
use reqwest::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue};
use reqwest::redirect::Policy;
use secrecy::{ExposeSecret, SecretString};
use serde_json::{Map, Value, json};
use tokio::time::{Instant, timeout_at};

use self::answer::{Answer, Progress};
use super::{Error, ModelClient, Reply, Request, TokenSink, chat};

const DEFAULT_BASE_URL: &str = "https://api.openai.com/v1";
const CONNECT: Duration = Duration::from_secs(10);
const IDLE: Duration = Duration::from_secs(300);
/// How long to wait for usage after the answer itself is whole.
const TAIL: Duration = Duration::from_secs(5);
const MAX_BODY: usize = 64 << 20;
const MAX_ERROR_BODY: usize = 64 << 10;

/// How to reach a model.
pub struct Settings {
    pub model: String,
    /// Without the trailing `/chat/completions`.
    pub base_url: String,
    pub key: Option<SecretString>,
    pub connect_timeout: Duration,
    /// The longest silence, before the first byte and between two reads. Keep-alives count as life.
    pub idle_timeout: Duration,
    /// Unset = the endpoint's own default; some models refuse the field.
    pub parallel_tool_calls: Option<bool>,
    /// Ask for usage (`stream_options`); to be turned off for a server that refuses the field.
    pub ask_for_usage: bool,
}

impl Settings {
    /// The usual settings; without `base_url` the vendor's own endpoint.
    pub fn new(model: &str, base_url: Option<&str>, key: Option<SecretString>) -> Self {
        Self {
            model: model.to_owned(),
            base_url: base_url.unwrap_or(DEFAULT_BASE_URL).to_owned(),
            key,
            connect_timeout: CONNECT,
            idle_timeout: IDLE,
            parallel_tool_calls: None,
            ask_for_usage: true,
        }
    }
}

/// Says why `url` cannot be a base URL.
pub(super) fn check_base_url(url: &str) -> Result<reqwest::Url, String> {
    let parsed = reqwest::Url::parse(url).map_err(|error| format!("the base URL is bad: {error}"))?;
    if !matches!(parsed.scheme(), "http" | "https") || parsed.host().is_none() {
        return Err("a base URL begins with `http://` or `https://` and a host".to_owned());
    }
    if !parsed.username().is_empty() || parsed.password().is_some() {
        return Err("a base URL holds no user or password; the key is a credential of its own".to_owned());
    }
    if parsed.query().is_some() || parsed.fragment().is_some() {
        return Err("a base URL holds no `?` or `#`".to_owned());
    }
    Ok(parsed)
}

/// A client of one model at one endpoint.
pub struct OpenAi {
    settings: Settings,
    label: String,
    url: String,
    http: reqwest::Client,
}

impl fmt::Debug for OpenAi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenAi")
            .field("label", &self.label)
            .field("url", &self.url)
            .finish_non_exhaustive()
    }
}

impl OpenAi {
    /// Prepares the client; nothing is sent yet.
    ///
    /// # Errors
    /// [`Error::Config`] for a bad URL, a key that no header can hold, or a host without certificate roots.
    pub fn new(settings: Settings) -> Result<Self, Error> {
        let base = check_base_url(&settings.base_url).map_err(Error::Config)?;
        // Once for the whole process; a second client finds the provider in place.
        if rustls::crypto::CryptoProvider::get_default().is_none() {
            let _ = rustls::crypto::ring::default_provider().install_default();
        }
        let mut builder = reqwest::Client::builder()
            .user_agent(concat!("exuvia/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(settings.connect_timeout)
            .redirect(Policy::none())
            .default_headers(headers(settings.key.as_ref())?);
        if base.scheme() == "http" {
            // No TLS will be spoken, so a host without certificate roots will do.
            builder = builder.tls_certs_only([]);
        }
        if is_loopback(&base) {
            builder = builder.no_proxy();
        }
        let http = builder
            .build()
            .map_err(|error| Error::Config(format!("cannot make an HTTP client: {}", crate::error::chain(&error))))?;
        let at = match settings.base_url.trim_end_matches('/') {
            DEFAULT_BASE_URL => String::new(),
            other => format!("@{other}"),
        };
        Ok(Self {
            label: format!("openai:{}{at}", settings.model),
            url: format!("{}/chat/completions", settings.base_url.trim_end_matches('/')),
            settings,
            http,
        })
    }

    fn request_body(&self, request: &Request) -> Value {
        let mut body = Map::new();
        body.insert("model".to_owned(), json!(self.settings.model));
        // Tools before messages: what changes least comes first, which is what provider caches live by.
        if !request.tools.is_empty() {
            body.insert("tools".to_owned(), request.tools.iter().map(chat::tool).collect());
            if let Some(parallel) = self.settings.parallel_tool_calls {
                body.insert("parallel_tool_calls".to_owned(), json!(parallel));
            }
        }
        let messages = request
            .messages
            .iter()
            .map(|message| chat::message(message, &self.label));
        body.insert("messages".to_owned(), messages.collect());
        body.insert("stream".to_owned(), json!(true));
        if self.settings.ask_for_usage {
            body.insert("stream_options".to_owned(), json!({"include_usage": true}));
        }
        Value::Object(body)
    }

    async fn ask(&self, request: &Request, tokens: &dyn TokenSink, clock: &Deadlines) -> Result<Reply, Error> {
        let sent = self.http.post(&self.url).json(&self.request_body(request)).send();
        let response = clock.wait(sent).await?.map_err(|error| self.transport(error, clock))?;
        let status = response.status();
        let headers = response.headers().clone();
        if let Some(id) = headers.get("x-request-id").and_then(|id| id.to_str().ok()) {
            tracing::debug!(model = %self.label, status = status.as_u16(), request_id = id, "the endpoint answered");
        }
        if !status.is_success() {
            let body = self.error_body(response, clock).await;
            return Err(refusal::of_response(
                status.as_u16(),
                &headers,
                &self.without_key(&body),
            ));
        }
        let is_document = content_type(&headers).is_some_and(|kind| kind.eq_ignore_ascii_case("application/json"));
        let answer = match is_document {
            true => self.read_document(response, clock).await?,
            false => self.read_events(response, tokens, clock).await?,
        };
        let reply = answer.finish(request, &self.settings.model, &self.label)?;
        if let (true, Some(text)) = (is_document, &reply.message.content) {
            tokens.token(text);
        }
        Ok(reply)
    }

    async fn read_events(
        &self,
        response: reqwest::Response,
        tokens: &dyn TokenSink,
        clock: &Deadlines,
    ) -> Result<Answer, Error> {
        let mut events = std::pin::pin!(events::events(response.bytes_stream(), MAX_BODY));
        let mut answer = Answer::default();
        loop {
            let limit = match answer.progress() {
                Progress::Open => clock.settings_idle,
                Progress::Whole => TAIL.min(clock.settings_idle),
            };
            let event = match (clock.wait_for(limit, events.next()).await, answer.progress()) {
                (Ok(event), _) => event,
                // The answer is whole; only the end of the stream is missing, which some servers never send.
                (Err(_), Progress::Whole) => return Ok(answer),
                (Err(error), Progress::Open) => return Err(error),
            };
            match event {
                None => return Ok(answer),
                Some(Ok(event)) if event.data.trim() == "[DONE]" => {
                    answer.done();
                    return Ok(answer);
                }
                Some(Ok(event)) => {
                    let pushed = answer.push(&event.event, &event.data, tokens);
                    pushed.map_err(|error| self.redacted(error))?;
                }
                Some(Err(_)) if answer.progress() == Progress::Whole => return Ok(answer),
                Some(Err(reason)) => return Err(Error::Broken { reason }),
            }
        }
    }

    async fn read_document(&self, response: reqwest::Response, clock: &Deadlines) -> Result<Answer, Error> {
        let body = collect(response.bytes_stream(), MAX_BODY, clock).await?;
        let mut answer = Answer::default();
        let text = String::from_utf8_lossy(&body);
        answer
            .push("message", &text, &super::NoTokens)
            .map_err(|error| self.redacted(error))?;
        answer.done();
        Ok(answer)
    }

    /// What the endpoint says about its refusal; an unreadable body is an empty one, the status says enough.
    async fn error_body(&self, response: reqwest::Response, clock: &Deadlines) -> String {
        let mut stream = response.bytes_stream();
        let mut body = Vec::new();
        while let Ok(Some(Ok(bytes))) = clock.wait(stream.next()).await {
            body.extend_from_slice(&bytes);
            if body.len() >= MAX_ERROR_BODY {
                body.truncate(MAX_ERROR_BODY);
                break;
            }
        }
        String::from_utf8_lossy(&body).into_owned()
    }

    fn transport(&self, error: reqwest::Error, clock: &Deadlines) -> Error {
        // The connect limit is reqwest's; all other limits are ours and do not come this way.
        match error.is_timeout() && !error.is_connect() {
            true => Error::Timeout { after: clock.total },
            false => Error::Unreachable {
                url: self.url.clone(),
                source: Box::new(error.without_url()),
            },
        }
    }

    fn without_key(&self, text: &str) -> String {
        match &self.settings.key {
            Some(key) if !key.expose_secret().is_empty() => text.replace(key.expose_secret(), "[key]"),
            Some(_) | None => text.to_owned(),
        }
    }

    fn redacted(&self, error: Error) -> Error {
        match error {
            Error::Broken { reason } => Error::Broken {
                reason: self.without_key(&reason),
            },
            Error::Auth { status, message } => Error::Auth {
                status,
                message: self.without_key(&message),
            },
            Error::Quota { message } => Error::Quota {
                message: self.without_key(&message),
            },
            Error::ContextLength { message } => Error::ContextLength {
                message: self.without_key(&message),
            },
            Error::Refused { status, message } => Error::Refused {
                status,
                message: self.without_key(&message),
            },
            other @ (Error::RateLimited { .. }
            | Error::Overloaded { .. }
            | Error::Unreachable { .. }
            | Error::Timeout { .. }
            | Error::ScriptEnded { .. }
            | Error::Config(_)) => other,
        }
    }
}

#[async_trait]
impl ModelClient for OpenAi {
    fn label(&self) -> String {
        self.label.clone()
    }

    fn is_scripted(&self) -> bool {
        false
    }

    async fn complete(&self, request: &Request, tokens: &dyn TokenSink) -> Result<Reply, Error> {
        let clock = Deadlines::new(request.timeout, self.settings.idle_timeout);
        self.ask(request, tokens, &clock).await
    }
}

/// The time limits of one call.
struct Deadlines {
    total: Duration,
    end: Instant,
    settings_idle: Duration,
}

impl Deadlines {
    fn new(total: Duration, settings_idle: Duration) -> Self {
        // A day is longer than any call; a larger number could not be added to an instant.
        let end = Instant::now() + total.min(Duration::from_secs(86_400));
        Self {
            total,
            end,
            settings_idle,
        }
    }

    /// Waits within the idle limit and the total.
    async fn wait<T>(&self, future: impl Future<Output = T>) -> Result<T, Error> {
        self.wait_for(self.settings_idle, future).await
    }

    async fn wait_for<T>(&self, limit: Duration, future: impl Future<Output = T>) -> Result<T, Error> {
        let silence = Instant::now() + limit.min(Duration::from_secs(86_400));
        let (until, after) = match silence < self.end {
            true => (silence, limit),
            false => (self.end, self.total),
        };
        timeout_at(until, future).await.map_err(|_| Error::Timeout { after })
    }
}

fn headers(key: Option<&SecretString>) -> Result<HeaderMap, Error> {
    let mut headers = HeaderMap::new();
    headers.insert(ACCEPT, HeaderValue::from_static("text/event-stream, application/json"));
    if let Some(key) = key {
        let mut value = HeaderValue::from_str(&format!("Bearer {}", key.expose_secret()))
            .map_err(|_| Error::Config("the key holds characters that no HTTP header can carry".to_owned()))?;
        value.set_sensitive(true);
        headers.insert(AUTHORIZATION, value);
    }
    Ok(headers)
}

fn content_type(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(CONTENT_TYPE)?.to_str().ok()?;
    value.split(';').next().map(str::trim)
}

fn is_loopback(url: &reqwest::Url) -> bool {
    let host = url.host_str().unwrap_or_default();
    let address = host
        .trim_start_matches('[')
        .trim_end_matches(']')
        .parse::<std::net::IpAddr>();
    host == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

async fn collect(
    stream: impl Stream<Item = reqwest::Result<Bytes>>,
    limit: usize,
    clock: &Deadlines,
) -> Result<Vec<u8>, Error> {
    let mut stream = std::pin::pin!(stream);
    let mut body = Vec::new();
    while let Some(bytes) = clock.wait(stream.next()).await? {
        let bytes = bytes.map_err(|error| Error::Broken {
            reason: crate::error::chain(&error.without_url()),
        })?;
        if body.len() + bytes.len() > limit {
            return Err(Error::Broken {
                reason: format!("the answer is longer than {limit} bytes"),
            });
        }
        body.extend_from_slice(&bytes);
    }
    Ok(body)
}
