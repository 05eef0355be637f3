//! Each limit alone ends the run as EXHAUSTED, under its own name, and keeps what was done (A4, B7, D1).

use std::io::{Read, Write};
use std::net::TcpListener;
use std::time::Duration;

use exuvia::api::proto::event::Kind;
use exuvia::api::proto::{self, Budgets, RunState};

use crate::bed::Bed;
use crate::support::script::Script;
use crate::support::watch::{ended, kind, until_end};
use crate::support::{Client, get};

/// Two tool calls, then the end: five steps.
fn script() -> Script {
    Script::new()
        .write("a", "kept\n")
        .tokens(100, 10)
        .write("b", "also\n")
        .tokens(100, 10)
        .finish("done")
        .tokens(100, 10)
}

async fn with(bed: &Bed, client: &mut Client, budgets: Budgets) -> proto::Run {
    let task = proto::Task {
        budgets: Some(budgets),
        ..script().task()
    };
    let run = bed.submit(&task).await.run_id;
    ended(client, &run).await
}

/// The limit that a run ran into.
fn limit(run: &proto::Run) -> &str {
    let outcome = run.outcome.as_ref().unwrap();
    assert_eq!(
        (run.state(), outcome.state()),
        (RunState::Exhausted, RunState::Exhausted)
    );
    assert_eq!((outcome.summary.as_str(), &outcome.result), ("", &None), "no success");
    assert!(!outcome.fault.as_ref().unwrap().retryable);
    &outcome.limit
}

async fn diff(client: &mut Client, run: &str) -> String {
    let request = proto::DiffWorkspaceRequest {
        id: run.to_owned(),
        ..Default::default()
    };
    String::from_utf8(client.diff_workspace(request).await.unwrap().into_inner().diff).unwrap()
}

#[tokio::test]
async fn d1_each_count_ends_the_run_by_its_own_name() {
    let bed = Bed::new().await;
    let mut client = bed.client().await;
    let b = Budgets::default;

    let run = with(&bed, &mut client, Budgets { steps: Some(3), ..b() }).await;
    assert_eq!(limit(&run), "steps");
    assert_eq!(run.used.unwrap().steps, 3);
    let kept = diff(&mut client, &run.run_id).await;
    assert!(kept.contains("+kept") && !kept.contains("+also"), "{kept}");

    let run = with(
        &bed,
        &mut client,
        Budgets {
            model_calls: Some(2),
            ..b()
        },
    )
    .await;
    assert_eq!((limit(&run), run.used.unwrap().model_calls), ("model_calls", 2));
    assert_eq!(run.used.unwrap().tool_calls, 2);

    let run = with(
        &bed,
        &mut client,
        Budgets {
            tokens: Some(200),
            ..b()
        },
    )
    .await;
    assert_eq!((limit(&run), run.used.unwrap().model_calls), ("tokens", 2));

    // One more of each, and it is enough.
    for enough in [
        Budgets { steps: Some(6), ..b() },
        Budgets {
            model_calls: Some(3),
            ..b()
        },
        Budgets {
            tokens: Some(330),
            ..b()
        },
    ] {
        let run = with(&bed, &mut client, enough).await;
        assert_eq!(run.state(), RunState::Finished, "{enough:?}");
    }
}

#[tokio::test]
async fn d1_d2_the_total_time_ends_the_run_whatever_it_does() {
    let bed = Bed::new().await;
    let mut client = bed.client().await;
    let scripts = [
        Script::new().write("a", "kept\n").finish("late").delayed(60_000),
        Script::new().write("a", "kept\n").shell("sleep 60").finish("never"),
    ];
    for script in scripts {
        let task = proto::Task {
            budgets: Some(Budgets {
                total_time: Some(prost_types::Duration { seconds: 1, nanos: 0 }),
                ..Default::default()
            }),
            ..script.task()
        };
        let run = bed.submit(&task).await.run_id;
        let run = ended(&mut client, &run).await;
        assert_eq!(limit(&run), "total_time");
        assert!(diff(&mut client, &run.run_id).await.contains("+kept"));
        bed.empties().await;
    }
}

#[tokio::test]
async fn d2_a_step_gets_its_own_limit_and_no_more() {
    let bed = Bed::new().await;
    let mut client = bed.client().await;
    let task = proto::Task {
        budgets: Some(Budgets {
            step_time: Some(prost_types::Duration { seconds: 1, nanos: 0 }),
            ..Default::default()
        }),
        ..Script::new().shell("sleep 60").finish("went on").task()
    };
    let run = bed.submit(&task).await.run_id;
    let events = until_end(&mut client, &run, 0).await;
    let result = events.iter().find_map(|event| match kind(event) {
        Kind::ToolFinished(done) => done.result.clone(),
        _ => None,
    });
    let result = exuvia::api::convert::struct_from_proto(&result.unwrap());
    assert_eq!(
        (&result["error"]["type"], &result["data"]["after_ms"]),
        (&"timeout".into(), &1000.into())
    );
    let now = client.get(get(&run)).await.unwrap().into_inner();
    assert_eq!(now.state(), RunState::Finished, "a timeout of a tool is its result");
}

#[tokio::test]
async fn d1_the_cost_ends_the_run() {
    let bed = Bed::new().await;
    let mut client = bed.client().await;
    let model = proto::OpenAiModel {
        model: "priced".into(),
        base_url: provider(),
        credential: String::new(),
        // A dollar for a million tokens: a micro-dollar each.
        price: Some(proto::Price {
            input: 1_000_000,
            cached: None,
            output: 1_000_000,
        }),
    };
    let task = |cost| proto::Task {
        model: Some(proto::Model {
            kind: Some(proto::model::Kind::Openai(model.clone())),
        }),
        budgets: Some(Budgets {
            cost_micros: Some(cost),
            ..Default::default()
        }),
        ..script().task()
    };
    let run = bed.submit(&task(109)).await.run_id;
    let run = ended(&mut client, &run).await;
    assert_eq!((limit(&run), run.used.unwrap().cost_micros), ("cost", Some(110)));
    let run = bed.submit(&task(110)).await.run_id;
    let run = ended(&mut client, &run).await;
    assert_eq!(
        (run.state(), run.used.unwrap().cost_micros),
        (RunState::Finished, Some(110))
    );
}

/// An endpoint that gives one and the same answer, of 100 tokens in and 10 out.
fn provider() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/v1", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
            let (mut request, mut piece) = (Vec::new(), [0; 8192]);
            // Until the end of its JSON.
            while !request.ends_with(b"}") {
                match stream.read(&mut piece) {
                    Ok(0) | Err(_) => break,
                    Ok(bytes) => request.extend_from_slice(&piece[..bytes]),
                }
            }
            let events = [
                r#"{"choices":[{"index":0,"delta":{"role":"assistant","content":"all is well"},"finish_reason":null}]}"#,
                r#"{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}"#,
                r#"{"choices":[],"usage":{"prompt_tokens":100,"completion_tokens":10}}"#,
                "[DONE]",
            ];
            let body: String = events.iter().map(|event| format!("data: {event}\n\n")).collect();
            let answer = format!(
                "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
                body.len()
            );
            // A client that has gone is its own affair.
            let _gone = stream.write_all(answer.as_bytes());
        }
    });
    url
}
