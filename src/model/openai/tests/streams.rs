//! Good answers, however they are written.

use proptest::prelude::*;

use super::server::{events, hanging, response};
use super::*;
use crate::model::{Finish, Usage};

fn call(id: &str, name: &str, arguments: &str) -> ToolCall {
    ToolCall {
        id: id.to_owned(),
        name: name.to_owned(),
        arguments: arguments.to_owned(),
    }
}

async fn reply(stream: &[&str]) -> Reply {
    let server = Server::start(vec![events(stream)]).await;
    ask(&server).await.unwrap()
}

/// One chunk of tool call fragments.
fn calls(calls: &str) -> String {
    format!(r#"{{"choices":[{{"index":0,"delta":{{"tool_calls":[{calls}]}}}}]}}"#)
}

const END: &str = r#"{"choices":[{"index":0,"delta":{},"finish_reason":"tool_calls"}]}"#;

async fn called(fragments: &[&str]) -> Vec<ToolCall> {
    let mut stream: Vec<String> = fragments.iter().map(|fragment| calls(fragment)).collect();
    stream.extend([END.to_owned(), "[DONE]".to_owned()]);
    let reply = reply(&stream.iter().map(String::as_str).collect::<Vec<_>>()).await;
    assert_eq!(reply.finish, Finish::ToolCalls);
    reply.message.tool_calls
}

/// A stream as the vendor writes it: role first, text, two parallel calls in fragments, usage in a chunk of its own.
const GOLDEN: &str = concat!(
    "data: {\"id\":\"x\",\"model\":\"m-2026\",\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}],\"usage\":null}\n\n",
    ": keep-alive\n\n",
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"Schön \"}}]}\n\n",
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"🦀.\"}}]}\n\n",
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"tool_calls\":[{\"index\":0,\"id\":\"a\",\"type\":\"function\",\"function\":{\"name\":\"shell\",\"arguments\":\"\"}}]}}]}\n\n",
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"tool_calls\":[{\"index\":0,\"function\":{\"arguments\":\"{\\\"comm\"}}]}}]}\n\n",
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"tool_calls\":[{\"index\":0,\"function\":{\"arguments\":\"and\\\":\\\"ls\\\"}\"}}]}}]}\n\n",
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"tool_calls\":[{\"index\":1,\"id\":\"b\",\"type\":\"function\",\"function\":{\"name\":\"list_files\",\"arguments\":\"{}\"}}]}}]}\n\n",
    "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"tool_calls\"}]}\n\n",
    "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":20,\"completion_tokens\":9,\"prompt_tokens_details\":{\"cached_tokens\":16}}}\n\n",
    "data: [DONE]\n\n",
);

fn golden() -> Reply {
    Reply {
        message: Assistant {
            content: Some("Schön 🦀.".to_owned()),
            tool_calls: vec![call("a", "shell", r#"{"command":"ls"}"#), call("b", "list_files", "{}")],
            opaque: None,
        },
        finish: Finish::ToolCalls,
        usage: Usage {
            input_tokens: 20,
            cached_tokens: 16,
            output_tokens: 9,
            estimated: false,
        },
        model: "m-2026".to_owned(),
    }
}

#[tokio::test]
async fn a_stream_becomes_one_reply_and_its_text_streams() {
    let server = Server::start(vec![response("200 OK\r\ncontent-type: text/event-stream", GOLDEN)]).await;
    let tokens = Tokens::default();
    let reply = OpenAi::new(settings(&server))
        .unwrap()
        .complete(&request(), &tokens)
        .await
        .unwrap();
    assert_eq!(reply, golden());
    assert_eq!(*tokens.0.lock().unwrap(), ["Schön ", "🦀."]);
}

/// Puts `bytes`, cut into chunks, through everything below HTTP.
fn read_in_chunks(bytes: &[u8], cuts: &[usize]) -> Reply {
    let mut chunks = Vec::new();
    let mut rest = bytes;
    for cut in cuts {
        let (chunk, after) = rest.split_at((*cut).min(rest.len()));
        chunks.push(Ok::<_, std::io::Error>(chunk.to_vec()));
        rest = after;
    }
    chunks.push(Ok(rest.to_vec()));
    let mut answer = Answer::default();
    futures::executor::block_on(async {
        let mut events = std::pin::pin!(super::super::events::events(futures::stream::iter(chunks), MAX_BODY));
        while let Some(event) = events.next().await {
            let event = event.unwrap();
            match event.data.as_str() {
                "[DONE]" => answer.done(),
                data => answer.push(&event.event, data, &crate::model::NoTokens).unwrap(),
            }
        }
    });
    answer.finish(&request(), "m", "openai:m").unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// However the network cuts a stream, the reply is the same; line ends and a byte order mark change nothing either.
    #[test]
    fn any_chunking_gives_the_same_reply(
        cuts in prop::collection::vec(0usize..40, 0..80),
        line_end in prop::sample::select(vec!["\n", "\r\n", "\r"]),
        mark in prop::sample::select(vec!["", "\u{feff}"]),
    ) {
        let bytes = format!("{mark}{}", GOLDEN.replace('\n', line_end));
        prop_assert_eq!(read_in_chunks(bytes.as_bytes(), &cuts), golden());
    }
}

#[tokio::test]
async fn an_index_that_is_missing_or_always_0_does_not_merge_calls() {
    let expected = [call("a", "shell", r#"{"x":1}"#), call("b", "search", r#"{"y":2}"#)];
    let always_0 = [
        r#"{"index":0,"id":"a","function":{"name":"shell","arguments":"{\"x\":1}"}}"#,
        r#"{"index":0,"id":"b","function":{"name":"search","arguments":"{\"y\":"}}"#,
        r#"{"index":0,"function":{"arguments":"2}"}}"#,
    ];
    assert_eq!(called(&always_0).await, expected);
    let missing = [
        r#"{"id":"a","function":{"name":"shell","arguments":"{\"x\""}},{"function":{"arguments":":1}"}}"#,
        r#"{"id":"b","function":{"name":"search","arguments":"{\"y\":2}"}}"#,
    ];
    assert_eq!(called(&missing).await, expected);
    let interleaved = [
        r#"{"index":0,"id":"a","function":{"name":"shell","arguments":"{\"x\""}}"#,
        r#"{"index":1,"id":"b","function":{"name":"search","arguments":"{\"y\""}}"#,
        r#"{"index":0,"function":{"arguments":":1}"}},{"index":1,"function":{"arguments":":2}"}}"#,
    ];
    assert_eq!(called(&interleaved).await, expected);
    let id_repeated = [
        r#"{"id":"a","function":{"name":"shell","arguments":"{\"x\""}}"#,
        r#"{"id":"b","function":{"name":"search","arguments":"{\"y\":2}"}}"#,
        r#"{"id":"a","function":{"name":"shell","arguments":":1}"}}"#,
    ];
    assert_eq!(called(&id_repeated).await, expected);
}

#[tokio::test]
async fn ids_that_come_late_never_or_twice_end_up_unique() {
    let late = [
        r#"{"index":0,"function":{"name":"shell","arguments":"{\"x\""}}"#,
        r#"{"index":0,"id":"a","function":{"arguments":":1}"}}"#,
    ];
    assert_eq!(called(&late).await, [call("a", "shell", r#"{"x":1}"#)]);
    let never = [
        r#"{"index":0,"function":{"name":"shell","arguments":"{\"x\":1}"}}"#,
        r#"{"index":0,"function":{"name":"shell","arguments":"{\"x\":2}"}}"#,
        r#"{"index":0,"id":null,"function":{"name":"search"}}"#,
    ];
    let expected = [
        call("call_0_0", "shell", r#"{"x":1}"#),
        call("call_0_1", "shell", r#"{"x":2}"#),
        call("call_0_2", "search", ""),
    ];
    assert_eq!(called(&never).await, expected);
    let twice = [
        r#"{"index":0,"id":"a","function":{"name":"shell","arguments":"{}"}}"#,
        r#"{"index":1,"id":"a","function":{"name":"search","arguments":"{}"}}"#,
    ];
    assert_eq!(
        called(&twice).await,
        [call("a", "shell", "{}"), call("call_0_1", "search", "{}")]
    );

    // An id that an earlier turn has would pair two calls with one result.
    let server = Server::start(vec![events(&[&calls(late[0]), &calls(late[1]), END, "[DONE]"])]).await;
    let mut request = request();
    request.messages.push(Message::Assistant(Assistant {
        tool_calls: vec![call("a", "shell", "{}")],
        ..Assistant::default()
    }));
    let reply = OpenAi::new(settings(&server))
        .unwrap()
        .complete(&request, &crate::model::NoTokens)
        .await
        .unwrap();
    assert_eq!(reply.message.tool_calls, [call("call_1_0", "shell", r#"{"x":1}"#)]);
}

#[tokio::test]
async fn arguments_are_kept_as_text_whatever_they_are() {
    let odd = [
        r#"{"index":0,"id":"a","function":{"name":"empty","arguments":""}}"#,
        r#"{"index":1,"id":"b","function":{"name":"null","arguments":null}}"#,
        r#"{"index":2,"id":"c","function":{"name":"object","arguments":{"x": [1]}}}"#,
        r#"{"index":3,"id":"d","function":{"name":"broken","arguments":"{\"x\": "}}"#,
        r#"{"index":4,"id":"e","function":{"name":"spaced","arguments":"{ \"x\" : 1.0 }"}}"#,
    ];
    let expected = [
        call("a", "empty", ""),
        call("b", "null", ""),
        call("c", "object", r#"{"x":[1]}"#),
        call("d", "broken", r#"{"x": "#),
        call("e", "spaced", r#"{ "x" : 1.0 }"#),
    ];
    assert_eq!(called(&odd).await, expected);
}

#[tokio::test]
async fn content_may_be_null_a_list_or_a_refusal() {
    let stop = r#"{"choices":[{"delta":{},"finish_reason":"stop"}]}"#;
    for (delta, content) in [
        (r#"{"content":null}"#, None),
        (r#"{"content":""}"#, None),
        (
            r#"{"content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}"#,
            Some("ab"),
        ),
        (r#"{"content":null,"refusal":"I will not."}"#, Some("I will not.")),
    ] {
        let chunk = format!(r#"{{"choices":[{{"delta":{delta}}}]}}"#);
        let reply = reply(&[&chunk, stop, "[DONE]"]).await;
        assert_eq!(
            (reply.message.content.as_deref(), reply.finish),
            (content, Finish::Stop),
            "{delta}"
        );
    }
}

#[tokio::test]
async fn finish_reasons_are_put_right() {
    let with_call = calls(r#"{"index":0,"id":"a","function":{"name":"shell","arguments":"{\"x"}}"#);
    for (reason, plain, calling) in [
        ("stop", Finish::Stop, Finish::ToolCalls),
        ("tool_calls", Finish::Stop, Finish::ToolCalls),
        ("eos", Finish::Stop, Finish::ToolCalls),
        ("length", Finish::Length, Finish::Length),
        ("content_filter", Finish::Filtered, Finish::Filtered),
    ] {
        let end = format!(r#"{{"choices":[{{"delta":{{"content":"x"}},"finish_reason":"{reason}"}}]}}"#);
        assert_eq!(reply(&[&end, "[DONE]"]).await.finish, plain, "{reason}");
        assert_eq!(reply(&[&with_call, &end, "[DONE]"]).await.finish, calling, "{reason}");
    }
    let unfinished = r#"{"choices":[{"delta":{"content":"x"}}]}"#;
    assert_eq!(reply(&[unfinished, "[DONE]"]).await.finish, Finish::Stop);
}

#[tokio::test]
async fn a_whole_answer_needs_neither_done_nor_an_end_nor_usage() {
    let end = r#"{"choices":[{"delta":{"content":"done!"},"finish_reason":"stop"}]}"#;
    let expected = Usage {
        input_tokens: 3,
        cached_tokens: 0,
        output_tokens: 2,
        estimated: true,
    };
    let closed = reply(&[end]).await;
    assert_eq!(
        (closed.message.content.as_deref(), closed.usage, closed.model.as_str()),
        (Some("done!"), expected, "m")
    );
    let server = Server::start(vec![hanging(&[end])]).await;
    let client = OpenAi::new(Settings {
        idle_timeout: Duration::from_millis(200),
        ..settings(&server)
    });
    let open = client
        .unwrap()
        .complete(&request(), &crate::model::NoTokens)
        .await
        .unwrap();
    assert_eq!(open, closed);
    // Cut inside what follows the answer.
    let cut = response(
        "200 OK\r\ncontent-type: text/event-stream",
        &format!("data: {end}\n\ndata: {{\"usage\": {{\"pro"),
    );
    assert_eq!(ask(&Server::start(vec![cut]).await).await.unwrap(), closed);
}

#[tokio::test]
async fn usage_is_found_where_vendors_put_it() {
    let end = r#"{"choices":[{"delta":{"content":"x"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":1}}"#;
    for (chunk, counts) in [
        (
            r#"{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3,"prompt_cache_hit_tokens":4}}"#,
            (9, 4, 3),
        ),
        (
            r#"{"choices":[],"x_groq":{"usage":{"prompt_tokens":9,"completion_tokens":3}}}"#,
            (9, 0, 3),
        ),
        (r#"{"choices":[],"usage":null}"#, (1, 0, 1)),
        (r#"{"choices":[],"usage":{}}"#, (1, 0, 1)),
    ] {
        let usage = reply(&[end, chunk, "[DONE]"]).await.usage;
        assert_eq!(
            (usage.input_tokens, usage.cached_tokens, usage.output_tokens),
            counts,
            "{chunk}"
        );
        assert!(!usage.estimated);
    }
}

#[tokio::test]
async fn what_the_provider_wants_back_is_kept_whole_and_other_vendor_fields_are_not() {
    let chunks = [
        r#"{"choices":[{"delta":{"reasoning_content":"I ","reasoning":"I ","reasoning_details":[{"i":0}]}}]}"#,
        r#"{"choices":[{"delta":{"reasoning_content":"think","reasoning_details":[{"i":1}],"content":null}}]}"#,
        &calls(
            r#"{"index":0,"function":{"name":"shell","arguments":"{}"},"extra_content":{"google":{"thought_signature":"c2ln"}}}"#,
        ),
        END,
        "[DONE]",
    ];
    let server = Server::start(vec![events(&chunks)]).await;
    let reply = ask(&server).await.unwrap();
    assert_eq!(reply.message.content, None);
    assert_eq!(
        reply.message.opaque,
        Some(json!({
            "provider": format!("openai:m@{}", server.base_url()),
            "message": {"reasoning_content": "I think", "reasoning_details": [{"i": 0}, {"i": 1}]},
            "calls": {"call_0_0": {"extra_content": {"google": {"thought_signature": "c2ln"}}}},
        }))
    );
}

#[tokio::test]
async fn a_server_that_does_not_stream_is_understood() {
    let body = r#"{"model":"m2","choices":[{"index":0,"message":{"role":"assistant","content":"hi","tool_calls":[{"id":"a","type":"function","function":{"name":"shell","arguments":"{}"}}]},"finish_reason":"tool_calls"}],"usage":{"prompt_tokens":5,"completion_tokens":1}}"#;
    let server = Server::start(vec![response("200 OK\r\ncontent-type: application/json", body)]).await;
    let tokens = Tokens::default();
    let reply = OpenAi::new(settings(&server))
        .unwrap()
        .complete(&request(), &tokens)
        .await
        .unwrap();
    assert_eq!(reply.message.tool_calls, [call("a", "shell", "{}")]);
    assert_eq!((reply.usage.total(), reply.model.as_str()), (6, "m2"));
    assert_eq!(*tokens.0.lock().unwrap(), ["hi"]);
}
