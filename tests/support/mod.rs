//! What the tests of the real program share: data directories, servers, clients, scripts, and a look at the host.
#![allow(dead_code, reason = "each test program uses its own part")]

pub mod hand;
pub mod host;
#[path = "../../src/scratch.rs"]
mod scratch;
pub mod script;
pub mod server;
pub mod watch;

use exuvia::api::proto;
use exuvia::api::proto::sandbox_service_client::SandboxServiceClient;
use exuvia::api::proto::task_service_client::TaskServiceClient;
use tonic::transport::Channel;

pub use scratch::Scratch;

pub const EXUVIA: &str = env!("CARGO_BIN_EXE_exuvia");

pub type Client = TaskServiceClient<Channel>;
pub type Sandboxes = SandboxServiceClient<Channel>;

/// Says that a test cannot run here, and fails it where it must.
pub fn skip(test: &str, reason: &dyn std::fmt::Display) {
    eprintln!("SKIPPED {test}: {reason}");
    assert!(
        std::env::var_os("EXUVIA_REQUIRE_ALL").is_none_or(|all| all != "1"),
        "{test} must run"
    );
}

/// Whether real sandboxes can be made here; says so where they cannot.
pub fn has_sandboxes(test: &str) -> bool {
    let data = tempfile::tempdir().unwrap();
    match exuvia::sandbox::backend::oci::Oci::new(data.path()) {
        Ok(_) => true,
        Err(error) => {
            skip(test, &error);
            false
        }
    }
}

/// A submission of `task` under `key`.
pub fn keyed(key: &str, task: &proto::Task) -> proto::SubmitRequest {
    proto::SubmitRequest {
        idempotency_key: key.to_owned(),
        task: Some(task.clone()),
    }
}

pub fn get(id: &str) -> proto::GetRequest {
    proto::GetRequest { id: id.to_owned() }
}

/// A pause, resume or cancel by a tester.
pub fn control(id: &str) -> proto::ControlRequest {
    proto::ControlRequest {
        id: id.to_owned(),
        by: "tester".into(),
        reason: "to see".into(),
        now: false,
        accept: Vec::new(),
    }
}

/// The conversation as JSON.
pub async fn transcript(client: &mut Client, id: &str) -> Vec<serde_json::Value> {
    let request = proto::GetTranscriptRequest { id: id.to_owned() };
    let messages = client.get_transcript(request).await.unwrap().into_inner().messages;
    messages.iter().map(exuvia::api::convert::struct_from_proto).collect()
}
