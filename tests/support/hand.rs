//! Sandboxes for direct use, by hand: requests in few words, and streams read to their end.

use std::time::Duration;

use exuvia::api::proto::{self, attach_request, exec_ended::Cause, exec_event, exec_request};
use futures::StreamExt;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use super::Sandboxes;

/// A request for a sandbox of the default policy.
pub fn plain() -> proto::CreateSandboxRequest {
    proto::CreateSandboxRequest {
        by: "tester".into(),
        ..Default::default()
    }
}

pub fn span(time: Duration) -> Option<prost_types::Duration> {
    prost_types::Duration::try_from(time).ok()
}

pub async fn create(client: &mut Sandboxes, request: proto::CreateSandboxRequest) -> proto::Sandbox {
    client.create(request).await.unwrap().into_inner()
}

pub async fn get(client: &mut Sandboxes, id: &str) -> proto::Sandbox {
    let request = proto::GetSandboxRequest { sandbox_id: id.into() };
    client.get(request).await.unwrap().into_inner()
}

pub async fn kill(client: &mut Sandboxes, id: &str) -> proto::Sandbox {
    let request = proto::KillRequest {
        sandbox_id: id.into(),
        by: "tester".into(),
        reason: "done".into(),
    };
    client.kill(request).await.unwrap().into_inner()
}

pub fn one(id: &str) -> proto::SandboxRequest {
    proto::SandboxRequest {
        sandbox_id: id.into(),
        by: "tester".into(),
    }
}

/// A shell command in a sandbox.
pub fn shell(id: &str, text: &str) -> proto::ExecStart {
    proto::ExecStart {
        sandbox_id: id.into(),
        argv: ["sh", "-c", text].map(|word| word.as_bytes().to_vec()).to_vec(),
        by: "tester".into(),
        ..Default::default()
    }
}

/// A command that runs, from the client's side.
pub struct Running {
    pub exec_id: String,
    words: Option<mpsc::Sender<proto::ExecRequest>>,
    events: Streaming<proto::ExecEvent>,
}

/// All that came of a command.
#[derive(Debug, Default, PartialEq)]
pub struct Came {
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    pub ended: proto::ExecEnded,
}

impl Came {
    pub fn cause(&self) -> Cause {
        self.ended.cause()
    }
}

/// Starts a command and waits for the first word about it.
pub async fn start(client: &mut Sandboxes, start: proto::ExecStart) -> Result<Running, Status> {
    let (words, receiver) = mpsc::channel(16);
    let first = proto::ExecRequest {
        kind: Some(exec_request::Kind::Start(start)),
    };
    words.send(first).await.unwrap();
    let mut events = client.exec(ReceiverStream::new(receiver)).await?.into_inner();
    let exec_id = started(&mut events).await?;
    Ok(Running {
        exec_id,
        words: Some(words),
        events,
    })
}

/// Goes on with a command from these offsets of its stdout and stderr.
pub async fn attach(
    client: &mut Sandboxes,
    sandbox: &str,
    exec: &str,
    (stdout_offset, stderr_offset): (u64, u64),
) -> Result<Running, Status> {
    let start = proto::AttachStart {
        sandbox_id: sandbox.into(),
        exec_id: exec.into(),
        stdout_offset,
        stderr_offset,
        pty_offset: 0,
    };
    let first = proto::AttachRequest {
        kind: Some(attach_request::Kind::Start(start)),
    };
    let words = tokio_stream::iter([first]).chain(tokio_stream::pending());
    let mut events = client.attach(words).await?.into_inner();
    let exec_id = started(&mut events).await?;
    Ok(Running {
        exec_id,
        words: None,
        events,
    })
}

async fn started(events: &mut Streaming<proto::ExecEvent>) -> Result<String, Status> {
    match events.message().await?.and_then(|event| event.kind) {
        Some(exec_event::Kind::Started(started)) => Ok(started.exec_id),
        other => panic!("the first word is {other:?}"),
    }
}

impl Running {
    pub async fn say(&self, word: exec_request::Kind) {
        let word = proto::ExecRequest { kind: Some(word) };
        // A command that has ended takes no more.
        let _ = self.words.as_ref().unwrap().send(word).await;
    }

    /// Says no more.
    pub fn hang_up(&mut self) {
        self.words = None;
    }

    pub async fn next(&mut self) -> Option<Result<exec_event::Kind, Status>> {
        let event = self.events.next().await?;
        Some(event.map(|event| event.kind.expect("an event is of a kind")))
    }

    /// Waits for this much of standard output.
    pub async fn until(&mut self, wanted: &[u8]) {
        let mut came = Vec::new();
        while !came.ends_with(wanted) {
            match self.next().await {
                Some(Ok(exec_event::Kind::Stdout(output))) => came.extend(output.data),
                other => panic!("{other:?} after {:?}", String::from_utf8_lossy(&came)),
            }
        }
    }

    /// Everything to the end, which must be last and one.
    pub async fn finish(mut self) -> Result<Came, Status> {
        let mut came = Came::default();
        let mut ends = 0;
        while let Some(event) = self.next().await {
            assert_eq!(ends, 0, "something came after the end");
            match event? {
                exec_event::Kind::Stdout(output) => came.stdout.extend(output.data),
                exec_event::Kind::Stderr(output) => came.stderr.extend(output.data),
                exec_event::Kind::Ended(ended) => {
                    came.ended = ended;
                    ends += 1;
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(ends, 1, "every stream ends with an end");
        Ok(came)
    }
}

/// Runs a shell command to its end.
pub async fn run(client: &mut Sandboxes, id: &str, text: &str) -> Came {
    let running = start(client, shell(id, text)).await.unwrap();
    running.finish().await.unwrap()
}

/// Looks until it is so; fails after a while.
pub async fn eventually(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    for _ in 0..1000 {
        if is_so().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("never: {what}");
}
