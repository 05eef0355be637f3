//! What needs the real program: how it starts, what it refuses to start over, what it does to a real process tree.

use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use exuvia::api::proto::event::Kind;
use exuvia::api::proto::{self, RunState};
use rusqlite::Connection;
use tonic::Code;

use crate::bed::why;
use crate::support::host::{processes, sandboxes, traces};
use crate::support::script::Script;
use crate::support::server::{LONG, Server};
use crate::support::watch::{ended, kind, until};
use crate::support::{EXUVIA, Scratch, control, get, has_sandboxes, keyed};

/// `exuvia serve` that has to end by itself.
fn serve(data: &Path, listen: &str) -> Output {
    Command::new(EXUVIA)
        .args(["serve", "--json", "--listen", listen, "--data-dir"])
        .arg(data)
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[tokio::test]
async fn a_port_in_use_is_said_and_nothing_is_touched() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let parent = tempfile::tempdir().unwrap();
    let data = parent.path().join("data");
    let output = serve(&data, &address);
    assert_eq!(output.status.code(), Some(7));
    let said = text(&output.stderr);
    assert!(
        said.contains(&address) && said.contains("hint: ") && said.contains("--listen"),
        "{said}"
    );
    assert!(!data.exists());
    let output = serve(&data, "0.0.0.0:0");
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    assert!(!data.exists());
}

#[tokio::test]
async fn a_data_directory_in_use_by_another_server_is_refused_and_named() {
    let data = Scratch::new();
    let server = Server::start(data.path()).await;
    let output = serve(data.path(), "127.0.0.1:0");
    assert_eq!(output.status.code(), Some(6));
    let said = text(&output.stderr);
    let holder = format!(
        "pid {}, listening on {}",
        server.pid(),
        server.hello["listening"].as_str().unwrap()
    );
    assert!(said.contains(&holder), "{said}");
    // However the first one ends, the directory is free.
    server.kill().await;
    Server::start(data.path()).await.terminate().await;
}

#[tokio::test]
async fn f2_a_newer_data_directory_is_refused_and_left_as_it_is() {
    let data = Scratch::new();
    Server::start(data.path()).await.terminate().await;
    let path = data.path().join("exuvia.db");
    let database = Connection::open(&path).unwrap();
    database
        .execute("UPDATE meta SET value = 99 WHERE name = 'format_version'", [])
        .unwrap();
    database
        .pragma_update_and_check(None, "journal_mode", "DELETE", |_| Ok(()))
        .unwrap();
    drop(database);
    let before = std::fs::read(&path).unwrap();
    for command in [
        &["serve", "--listen", "127.0.0.1:0"][..],
        &["run", "--prompt", "x", "--model", "scripted:/dev/null"],
        &["approve", "run_aaaaaaaaaaaaaaaaaaaaaaaaaa"],
        &["audit", "query"],
    ] {
        let output = Command::new(EXUVIA)
            .args(command)
            .arg("--data-dir")
            .arg(data.path())
            .output()
            .unwrap();
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(6), "{command:?}: {said}");
        assert!(said.contains("99") && said.contains("version"), "{command:?}: {said}");
    }
    assert!(std::fs::read(&path).unwrap() == before);
}

#[tokio::test]
async fn f2_an_unknown_version_of_an_entry_is_refused_and_harms_no_other_run() {
    let data = Scratch::new();
    let server = Server::start(data.path()).await;
    let mut client = server.client().await;
    let slow = Script::new().finish("done").delayed(60_000).task();
    let broken = client.submit(keyed("", &slow)).await.unwrap().into_inner().run_id;
    until(&mut client, &broken, 0, |event| event.seq == 2).await;
    server.kill().await;
    let database = Connection::open(data.path().join("exuvia.db")).unwrap();
    database
        .execute_batch(
            "DROP TRIGGER entries_are_not_edited;
             UPDATE entries SET entry = replace(entry, '\"format_version\":1', '\"format_version\":7') WHERE seq = 2;",
        )
        .unwrap();
    drop(database);

    let server = Server::start(data.path()).await;
    let mut client = server.client().await;
    let refused = client.get(get(&broken)).await.unwrap_err();
    assert_eq!(
        why(&refused),
        (Code::FailedPrecondition, "UNKNOWN_FORMAT_VERSION".into())
    );
    assert!(refused.message().contains("version 7"), "{}", refused.message());
    for refused in [
        client.cancel(control(&broken)).await.unwrap_err(),
        client
            .get_transcript(proto::GetTranscriptRequest { id: broken.clone() })
            .await
            .unwrap_err(),
    ] {
        assert_eq!(
            why(&refused),
            (Code::FailedPrecondition, "UNKNOWN_FORMAT_VERSION".into())
        );
    }
    let listed = client.list(proto::ListRequest::default()).await.unwrap().into_inner();
    assert_eq!(listed.runs.len(), 1, "a list reads no journal");
    let quick = Script::new().finish("done").task();
    let other = client.submit(keyed("", &quick)).await.unwrap().into_inner().run_id;
    assert_eq!(ended(&mut client, &other).await.state(), RunState::Finished);
    server.terminate().await;
}

#[tokio::test]
async fn reflection_and_health_answer() {
    use tonic_health::pb::HealthCheckRequest;
    use tonic_health::pb::health_client::HealthClient;
    use tonic_reflection::pb::v1::ServerReflectionRequest;
    use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
    use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
    use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;

    let data = Scratch::new();
    let server = Server::start(data.path()).await;
    let channel = tonic::transport::Endpoint::from_shared(server.url())
        .unwrap()
        .connect()
        .await
        .unwrap();
    let mut health = HealthClient::new(channel.clone());
    for service in ["", "exuvia.v1.TaskService"] {
        let request = HealthCheckRequest {
            service: service.into(),
        };
        let status = health.check(request).await.unwrap().into_inner().status();
        assert_eq!(status.as_str_name(), "SERVING", "{service}");
    }
    let ask = |message| ServerReflectionRequest {
        host: String::new(),
        message_request: Some(message),
    };
    let asked = futures::stream::iter([
        ask(MessageRequest::ListServices(String::new())),
        ask(MessageRequest::FileContainingSymbol("exuvia.v1.TaskService".into())),
    ]);
    let mut answers = ServerReflectionClient::new(channel)
        .server_reflection_info(asked)
        .await
        .unwrap()
        .into_inner();
    let first = answers.message().await.unwrap().unwrap().message_response.unwrap();
    let MessageResponse::ListServicesResponse(list) = first else {
        panic!("{first:?}")
    };
    let names: Vec<String> = list.service.into_iter().map(|service| service.name).collect();
    assert!(names.contains(&"exuvia.v1.TaskService".to_owned()), "{names:?}");
    assert!(names.contains(&"grpc.health.v1.Health".to_owned()), "{names:?}");
    let second = answers.message().await.unwrap().unwrap().message_response.unwrap();
    assert!(
        matches!(second, MessageResponse::FileDescriptorResponse(_)),
        "{second:?}"
    );
    drop(answers);
    server.terminate().await;
}

#[tokio::test]
async fn a9_a_cancel_ends_the_whole_process_tree() {
    if !has_sandboxes("a9_a_cancel_ends_the_whole_process_tree") {
        return;
    }
    let data = Scratch::new();
    let server = Server::start(data.path()).await;
    let mut client = server.client().await;
    let task = Script::new()
        .write("a", "kept\n")
        .shell("trap '' TERM; for n in 1 2 3; do (trap '' TERM; setsid sleep 600 & sleep 600) & done; wait")
        .finish("never")
        .task();
    let run = client.submit(keyed("", &task)).await.unwrap().into_inner().run_id;
    until(
        &mut client,
        &run,
        0,
        |event| matches!(kind(event), Kind::ToolStarted(started) if started.step == 4),
    )
    .await;
    let seen = sandboxes(data.path());
    let begun = Instant::now();
    // Init, shim, shell, and six sleeps.
    while processes(&seen[0]).len() < 9 {
        assert!(begun.elapsed() < LONG, "{:?}", processes(&seen[0]));
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let now = client.cancel(control(&run)).await.unwrap().into_inner();
    assert_eq!(now.state(), RunState::Cancelled);
    let begun = Instant::now();
    // The server has more than this run's sandbox: working directories made ahead.
    let of_the_run = || -> Vec<String> {
        let all = traces(data.path(), &seen).into_iter();
        all.filter(|trace| seen.iter().any(|id| trace.contains(id))).collect()
    };
    while !of_the_run().is_empty() || !processes(&seen[0]).is_empty() {
        assert!(begun.elapsed() < LONG, "{:?}", of_the_run());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let request = proto::DiffWorkspaceRequest {
        id: run,
        ..Default::default()
    };
    let diff = client.diff_workspace(request).await.unwrap().into_inner().diff;
    assert!(text(&diff).contains("+kept"), "the checkpoint is there");
    server.terminate().await;
    assert_eq!(traces(data.path(), &seen), Vec::<String>::new());
}
