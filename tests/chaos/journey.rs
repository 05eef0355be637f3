//! The run that is disturbed: ten model calls and ten tool calls over a small workspace, and what it comes to undisturbed.

use std::path::Path;
use std::process::Command;

use exuvia::api::proto;
use serde_json::{Value, json};

use crate::support::host::{sandboxes, traces};
use crate::support::script::Script;
use crate::support::server::Server;
use crate::support::watch::{check_whole, until_end};
use crate::support::{Client, EXUVIA, Scratch, get, keyed, transcript};

/// The same for every submission, so that a client that heard no answer can ask again.
pub const KEY: &str = "journey";

/// Writes, edits, shells that append (twice done is seen), readers side by side, a command that fails, a completion check
/// that fails once.
pub fn task() -> proto::Task {
    let script = Script::new()
        .write("a.txt", "alpha\n")
        .write("src/b.txt", "beta\ngamma\n")
        .calls(&[
            ("read_file", json!({ "path": "a.txt" })),
            ("read_file", json!({ "path": "src/b.txt" })),
            ("list_files", json!({})),
        ])
        .call(
            "edit_file",
            json!({ "path": "src/b.txt", "old": "beta", "new": "delta" }),
        )
        .shell("echo line >> log; ln -s src/b.txt link; chmod 755 a.txt; echo $EXUVIA_IDEMPOTENCY_KEY | wc -l")
        .call("search", json!({ "pattern": "delta" }))
        .shell("echo more >> log; echo no good >&2; exit 3")
        .finish("too early")
        .shell("cat log src/b.txt > done")
        .finish("all done");
    proto::Task {
        check: "test -f done".into(),
        empty_workspace: true,
        ..script.task()
    }
}

/// What a run came to, apart from how it got there.
#[derive(Debug, PartialEq)]
pub struct Result {
    pub state: proto::RunState,
    pub transcript: Vec<Value>,
    pub tree: String,
    pub steps: u32,
    pub summary: String,
}

/// The run as it went.
pub struct Journey {
    pub run: String,
    pub result: Result,
    pub events: Vec<proto::Event>,
    pub claims: usize,
}

/// Submits (or finds, by its key) the run on a server, and waits for its end.
pub async fn travel(client: &mut Client) -> Journey {
    travel_as(client, KEY, &task()).await
}

/// The same for any task under any key.
pub async fn travel_as(client: &mut Client, key: &str, task: &proto::Task) -> Journey {
    let run = client.submit(keyed(key, task)).await.unwrap().into_inner().run_id;
    let events = until_end(client, &run, 0).await;
    let now = client.get(get(&run)).await.unwrap().into_inner();
    let transcript = transcript(client, &run).await;
    Journey::of(now, events, transcript)
}

impl Journey {
    /// Of a run that has ended, with all of its events.
    pub fn of(now: proto::Run, events: Vec<proto::Event>, transcript: Vec<Value>) -> Self {
        let claims = check_whole(&events);
        let outcome = now.outcome.clone().unwrap();
        let result = Result {
            state: now.state(),
            transcript,
            tree: now.tree.clone(),
            steps: now.used.unwrap().steps,
            summary: outcome.fault.map_or(outcome.summary, |fault| fault.message),
        };
        Self {
            run: now.run_id,
            result,
            events,
            claims,
        }
    }
}

/// The journey that nobody disturbs, and its files.
pub async fn undisturbed() -> Journey {
    let data = Scratch::new();
    let server = Server::start(data.path()).await;
    let mut client = server.client().await;
    let journey = travel(&mut client).await;
    assert_eq!(journey.claims, 1);
    assert_eq!(
        (journey.result.state, journey.result.steps),
        (proto::RunState::Finished, 22),
        "20 steps of work, a `finish` that the check refuses, and the last one"
    );
    assert_eq!(journey.result.summary, "all done");
    let mut chunks = client
        .get_workspace(proto::GetWorkspaceRequest {
            id: journey.run.clone(),
            revision: None,
        })
        .await
        .unwrap()
        .into_inner();
    let mut tar = Vec::new();
    while let Some(chunk) = chunks.message().await.unwrap() {
        tar.extend(chunk.data);
    }
    let files = tempfile::tempdir().unwrap();
    tar::Archive::new(tar.as_slice()).unpack(files.path()).unwrap();
    let read = |name: &str| std::fs::read_to_string(files.path().join(name)).unwrap();
    assert_eq!(read("a.txt"), "alpha\n");
    assert_eq!(read("log"), "line\nmore\n");
    assert_eq!(read("done"), "line\nmore\ndelta\ngamma\n");
    assert_eq!(read("link"), "delta\ngamma\n");
    server.terminate().await;
    nothing_is_left(data.path(), &[]);
    journey
}

/// No sandbox, control group, mount, directory or process stays (promise 7), and the audit chain holds.
pub fn nothing_is_left(data: &Path, seen: &[String]) {
    assert_eq!(traces(data, seen), Vec::<String>::new());
    assert_eq!(sandboxes(data), Vec::<String>::new());
    let audit = Command::new(EXUVIA)
        .args(["audit", "verify", "--json", "--data-dir"])
        .arg(data)
        .output()
        .unwrap();
    assert!(audit.status.success(), "{}", String::from_utf8_lossy(&audit.stdout));
}
