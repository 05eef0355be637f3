//! Calls that give no answer: each has its own error, and none shows the key.

use super::server::{Piece, events, hanging, response};
use super::*;

const START: &str = r#"{"choices":[{"delta":{"content":"half"}}]}"#;

async fn failure(answer: Vec<Piece>) -> String {
    let server = Server::start(vec![answer]).await;
    let error = ask(&server).await.unwrap_err();
    format!("{} {:?}: {error}", error.code(), error.kind())
}

#[tokio::test]
async fn statuses_become_typed_errors_without_the_key() {
    let told = r#"{"error":{"message":"Incorrect API key provided: sk-secret-1","code":"invalid_api_key"}}"#;
    assert_eq!(
        failure(response("401 Unauthorized", told)).await,
        "provider_auth Denied: the provider refused the credential (HTTP 401): Incorrect API key provided: [key]"
    );
    let server = Server::start(vec![response("429 Too Many Requests\r\nretry-after: 7", "{}")]).await;
    let error = ask(&server).await.unwrap_err();
    assert_eq!(
        (error.code(), error.retry_after()),
        ("provider_rate_limited", Some(Duration::from_secs(7)))
    );
    let context = r#"{"error":{"message":"too long","code":"context_length_exceeded"}}"#;
    assert_eq!(
        failure(response("400 Bad Request", context)).await,
        "context_length_exceeded Invalid: the conversation is longer than the model's context: too long"
    );
    assert_eq!(
        failure(response("404 Not Found", r#"{"error":{"message":"no model `m`"}}"#)).await,
        "provider_refused Invalid: the provider refused the request (HTTP 404): no model `m`"
    );
}

#[tokio::test]
async fn a_redirect_is_not_followed() {
    let elsewhere = Server::start(vec![events(&["[DONE]"])]).await;
    let location = format!(
        "307 Temporary Redirect\r\nlocation: {}/chat/completions",
        elsewhere.base_url()
    );
    let told = failure(response(&location, "")).await;
    assert!(told.contains("redirects, which is not followed"), "{told}");
    assert_eq!(elsewhere.requests(), Vec::<String>::new());
}

#[tokio::test]
async fn an_error_inside_a_good_stream_ends_the_call() {
    let overloaded = r#"{"error":{"message":"busy sk-secret-1","type":"overloaded_error"}}"#;
    assert_eq!(
        failure(events(&[START, overloaded, "[DONE]"])).await,
        "provider_overloaded Unavailable: the provider is overloaded (HTTP 200)"
    );
    assert_eq!(
        failure(events(&[START, r#"{"error":"sk-secret-1 broke"}"#])).await,
        "provider_stream_broken Unavailable: the stream broke: the endpoint reports an error: [key] broke"
    );
    let named = "200 OK\r\ncontent-type: text/event-stream";
    assert_eq!(
        failure(response(named, "event: error\ndata: {\"message\": \"gone\"}\n\n")).await,
        "provider_stream_broken Unavailable: the stream broke: the endpoint reports an error: gone"
    );
    let ended = r#"{"choices":[{"delta":{},"finish_reason":"error"}]}"#;
    assert_eq!(
        failure(events(&[START, ended, "[DONE]"])).await,
        "provider_stream_broken Unavailable: the stream broke: the endpoint ended it with an error"
    );
}

#[tokio::test]
async fn a_broken_stream_leaves_nothing_and_says_how_it_broke() {
    assert_eq!(
        failure(events(&[START])).await,
        "provider_stream_broken Unavailable: the stream broke: it ended before the answer was whole"
    );
    assert!(
        failure(events(&[START, "{\"choices\": [", "[DONE]"]))
            .await
            .contains("a chunk is not JSON")
    );
    let short = "200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 1000";
    assert!(
        failure(response(short, &format!("data: {START}\n\n")))
            .await
            .starts_with("provider_stream_broken")
    );
    let nameless = r#"{"choices":[{"delta":{"tool_calls":[{"index":0,"id":"a","function":{"arguments":"{}"}}]},"finish_reason":"tool_calls"}]}"#;
    assert!(
        failure(events(&[nameless, "[DONE]"]))
            .await
            .ends_with("a tool call has no name")
    );
}

#[tokio::test]
async fn silence_and_slowness_are_timeouts() {
    let idle = Duration::from_millis(150);
    for answer in [vec![Piece::Hang], hanging(&[START])] {
        let server = Server::start(vec![answer]).await;
        let client = OpenAi::new(Settings {
            idle_timeout: idle,
            ..settings(&server)
        });
        let error = client
            .unwrap()
            .complete(&request(), &crate::model::NoTokens)
            .await
            .unwrap_err();
        assert!(matches!(error, Error::Timeout { after } if after == idle), "{error}");
    }
    let server = Server::start(vec![hanging(&[START])]).await;
    let total = Duration::from_millis(120);
    let request = Request {
        timeout: total,
        ..request()
    };
    let error = OpenAi::new(settings(&server))
        .unwrap()
        .complete(&request, &crate::model::NoTokens)
        .await
        .unwrap_err();
    assert!(matches!(error, Error::Timeout { after } if after == total), "{error}");
}

#[tokio::test]
async fn an_endpoint_that_is_down_is_unreachable_and_named() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let base_url = format!("http://{}/v1", listener.local_addr().unwrap());
    drop(listener);
    let client = OpenAi::new(Settings::new("m", Some(&base_url), None)).unwrap();
    let error = client.complete(&request(), &crate::model::NoTokens).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("the provider cannot be reached at `{base_url}/chat/completions`")
    );
    assert_eq!(error.code(), "provider_unreachable");
}
