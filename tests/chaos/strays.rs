//! What outlives a killed server and no start of a server would find (promise 7): `exuvia doctor --fix`, run from anywhere, does.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use exuvia::api::proto::{self, event::Kind};
use exuvia::sandbox::backend::docker;
use exuvia::sandbox::identity;

use crate::outages::slow;
use crate::support::hand::{create, plain};
use crate::support::host::{init_of, sandboxes, traces};
use crate::support::server::{LONG, Server};
use crate::support::watch::{kind, until};
use crate::support::{EXUVIA, Scratch, has_sandboxes, keyed, skip};

/// These tests look at the whole host, one at a time.
fn alone() -> File {
    let lock = File::create(std::env::temp_dir().join("exuvia-tests-doctor.lock")).unwrap();
    lock.lock().unwrap();
    lock
}

/// What `exuvia doctor` says of strays, asked from a data directory of its own.
async fn doctor(flags: &[&str]) -> String {
    let elsewhere = tempfile::tempdir().unwrap();
    doctor_of(elsewhere.path(), flags).await
}

async fn doctor_of(data: &Path, flags: &[&str]) -> String {
    let output = tokio::process::Command::new(EXUVIA)
        .args(["doctor", "--json", "--data-dir"])
        .arg(data)
        .args(flags)
        .output()
        .await
        .unwrap();
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let mut findings = report["findings"].as_array().unwrap().iter();
    let strays = findings.find(|finding| finding["name"] == "strays").unwrap();
    strays["detail"].as_str().unwrap().to_owned()
}

/// The sandbox of a run whose server was killed while it worked.
async fn of_killed_server(data: &Path) -> String {
    let server = Server::start(data).await;
    let mut client = server.client().await;
    let submitted = client.submit(keyed("", &slow().task())).await.unwrap();
    let run = submitted.into_inner().run_id;
    until(&mut client, &run, 0, |event| {
        matches!(kind(event), Kind::ToolStarted(_))
    })
    .await;
    let begun = Instant::now();
    let id = loop {
        assert!(begun.elapsed() < LONG, "the sandbox comes up");
        match sandboxes(data).into_iter().find(|name| init_of(name).is_some()) {
            Some(id) => break id,
            None => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    };
    drop(client);
    server.kill().await;
    id
}

/// A data directory that went under a running sandbox whose server is dead, and that sandbox.
async fn of_gone_directory(scratch: &Scratch) -> (PathBuf, String) {
    let data = std::fs::canonicalize(scratch.path()).unwrap().join("data");
    let id = of_killed_server(&data).await;
    removed(&data);
    assert!(init_of(&id).is_some(), "it runs on");
    (data, id)
}

/// As somebody cleans up a folder for temporary files: all goes but what is mounted.
fn removed(data: &Path) {
    let mut rm = Command::new("rm");
    rm.args(["-rf", "--one-file-system"]).arg(data);
    rm.stderr(Stdio::null()).status().unwrap();
    assert!(!data.join("sandboxes").exists());
}

fn claims_of(data: &Path) -> Vec<u32> {
    let claims = identity::claims().into_iter();
    claims
        .filter(|(_, taken)| taken.data_dir == data)
        .map(|(base, _)| base)
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_outlives_its_data_directory_is_found_and_ended_by_doctor() {
    if !has_sandboxes("what_outlives_its_data_directory_is_found_and_ended_by_doctor") {
        return;
    }
    let _alone = alone();
    let scratch = Scratch::new();
    let (data, id) = of_gone_directory(&scratch).await;
    let told = doctor(&[]).await;
    assert!(told.contains(&id) && told.contains(data.to_str().unwrap()), "{told}");
    assert!(init_of(&id).is_some(), "looking ends nothing");
    let told = doctor(&["--fix"]).await;
    assert!(!told.contains(&id) && !told.contains(data.to_str().unwrap()), "{told}");
    assert_eq!(traces(&data, &[id]), Vec::<String>::new());
    assert_eq!(claims_of(&data), Vec::<u32>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sandbox_whose_claim_is_lost_too_is_known_by_its_guest() {
    if !has_sandboxes("a_sandbox_whose_claim_is_lost_too_is_known_by_its_guest") {
        return;
    }
    let _alone = alone();
    let scratch = Scratch::new();
    let (data, id) = of_gone_directory(&scratch).await;
    for base in claims_of(&data) {
        // A server that starts meanwhile, another test's, may have done it.
        if let Err(error) = std::fs::remove_file(format!("/run/exuvia/identities/{base}")) {
            assert_eq!(error.kind(), std::io::ErrorKind::NotFound, "{error}");
        }
    }
    let begun = Instant::now();
    // One that is in the making is left alone, so not at once.
    while init_of(&id).is_some() {
        assert!(begun.elapsed() < LONG, "it is found");
        doctor(&["--fix"]).await;
    }
    assert_eq!(traces(&data, &[id]), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_data_directory_holds_is_ended_as_its_next_server_would() {
    if !has_sandboxes("what_a_data_directory_holds_is_ended_as_its_next_server_would") {
        return;
    }
    let _alone = alone();
    let scratch = Scratch::new();
    let data = std::fs::canonicalize(scratch.path()).unwrap().join("data");
    let id = of_killed_server(&data).await;
    // Another server's is not touched, nor one that a next server goes on with.
    let (served, leased) = (Scratch::new(), Scratch::new());
    let server = Server::start(served.path()).await;
    let living = create(&mut server.sandboxes().await, plain()).await.sandbox_id;
    let other = Server::start(leased.path()).await;
    let kept = create(&mut other.sandboxes().await, plain()).await.sandbox_id;
    other.kill().await;

    let told = doctor(&[]).await;
    assert!(told.contains(&id) && told.contains(data.to_str().unwrap()), "{told}");
    assert!(!told.contains(&living) && !told.contains(&kept), "{told}");
    doctor(&["--fix"]).await;
    assert!(sandboxes(&data).contains(&id), "nothing is ended from elsewhere");
    for data in [&data, served.path(), leased.path()] {
        doctor_of(data, &["--fix"]).await;
    }
    assert_eq!(traces(&data, &[id]), Vec::<String>::new());
    assert!(init_of(&living).is_some() && init_of(&kept).is_some());
    server.terminate().await;
    Server::start_as(leased.path(), &["--on-shutdown", "end"])
        .await
        .terminate()
        .await;
    Server::start_as(served.path(), &["--on-shutdown", "end"])
        .await
        .terminate()
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_of_an_engine_is_found_without_its_data_directory() {
    const NAME: &str = "a_container_of_an_engine_is_found_without_its_data_directory";
    let Some(engine) = docker::Strays::open().await else {
        return skip(NAME, &"no Docker engine answers");
    };
    if !has_sandboxes(NAME) {
        return;
    }
    let _alone = alone();
    let scratch = Scratch::new();
    let data = std::fs::canonicalize(scratch.path()).unwrap().join("data");
    let server = Server::start(&data).await;
    let request = proto::CreateSandboxRequest {
        backend: "docker".into(),
        ..plain()
    };
    let id = create(&mut server.sandboxes().await, request).await.sandbox_id;
    let is_there = async || {
        let found = engine.find().await.unwrap();
        found.iter().any(|stray| stray.id.as_str() == id)
    };
    assert!(!is_there().await, "its maker lives");
    server.kill().await;
    assert!(is_there().await);
    doctor(&["--fix"]).await;
    assert!(is_there().await, "a next server goes on with it");
    removed(&data);
    let told = doctor(&[]).await;
    assert!(told.contains(&id), "{told}");
    doctor(&["--fix"]).await;
    assert!(!is_there().await);
    assert_eq!(
        (traces(&data, std::slice::from_ref(&id)), claims_of(&data)),
        (Vec::new(), Vec::new())
    );
}
