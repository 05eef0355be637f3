//! Kills at random instants, a sandbox that dies under its tool, and a drain.

use std::time::{Duration, Instant};

use exuvia::api::proto::RunState;
use exuvia::api::proto::event::Kind;
use exuvia::sandbox::disk::mounts_below;
use exuvia::sandbox::identity;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::journey::{self, KEY, nothing_is_left, task, travel};
use crate::random::Random;
use crate::support::host::{images, init_of, sandboxes};
use crate::support::script::Script;
use crate::support::server::{LONG, Server};
use crate::support::watch::{check_whole, kind, until, until_end};
use crate::support::{Scratch, get, has_sandboxes, keyed, transcript};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn x1_killed_at_random_again_and_again_the_run_ends_as_if_nothing_had_been() {
    if !has_sandboxes("x1_killed_at_random_again_and_again_the_run_ends_as_if_nothing_had_been") {
        return;
    }
    let mut random = Random::new();
    let started = Instant::now();
    let expected = journey::undisturbed().await;
    let whole = started.elapsed().as_millis() as u64;
    let mut kills = 0;
    while kills < 15 {
        let data = Scratch::new();
        let mut seen = Vec::new();
        // Three kills of one run.
        for _ in 0..3 {
            let wait = Duration::from_millis(random.below(whole));
            let mut server = Server::launch(data.path(), &[]);
            let working = async {
                server.ready().await.unwrap();
                let _ = server.client().await.submit(keyed(KEY, &task())).await;
                std::future::pending::<()>().await;
            };
            // Wherever it is by then: still starting, or well on its way.
            let _ = tokio::time::timeout(wait, working).await;
            server.kill().await;
            seen.extend(sandboxes(data.path()));
            kills += 1;
        }
        let server = Server::start(data.path()).await;
        let journey = travel(&mut server.client().await).await;
        assert_eq!(journey.result, expected.result);
        server.terminate().await;
        nothing_is_left(data.path(), &seen);
    }
}

/// Promise 7 for what lies outside of processes: mounts, images, control groups, claims.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_killed_with_several_sandboxes_leaves_the_next_a_clean_host() {
    const NAME: &str = "a_server_killed_with_several_sandboxes_leaves_the_next_a_clean_host";
    if !has_sandboxes(NAME) {
        return;
    }
    let data = Scratch::new();
    let data = std::fs::canonicalize(data.path()).unwrap();
    let server = Server::start(&data).await;
    let mut client = server.client().await;
    let mut runs = Vec::new();
    for n in 0..3 {
        let submitted = client.submit(keyed(&format!("several-{n}"), &slow().task())).await;
        runs.push(submitted.unwrap().into_inner().run_id);
    }
    for run in &runs {
        until(&mut client, run, 0, |event| matches!(kind(event), Kind::ToolStarted(_))).await;
    }
    let begun = Instant::now();
    while mounts_below(&data).unwrap().is_empty() {
        assert!(begun.elapsed() < LONG, "a sandbox has a disk");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let seen = sandboxes(&data);
    drop(client);
    server.kill().await;
    let left = mounts_below(&data).unwrap();
    assert!(!left.is_empty(), "what is killed cannot unmount");

    let server = Server::start(&data).await;
    let still = mounts_below(&data).unwrap();
    assert!(left.iter().all(|mount| !still.contains(mount)), "{left:?} {still:?}");
    let mut client = server.client().await;
    for run in &runs {
        until_end(&mut client, run, 0).await;
        let now = client.get(get(run)).await.unwrap().into_inner();
        assert_eq!(now.state(), RunState::Finished);
    }
    server.terminate().await;
    nothing_is_left(&data, &seen);
    let claims = identity::claims();
    assert!(claims.values().all(|taken| taken.data_dir != data), "{claims:?}");
    let begun = Instant::now();
    while !images(&data).is_empty() {
        assert!(begun.elapsed() < LONG, "{:?}", images(&data));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A run whose only tool call takes a while, and says when it has begun.
pub fn slow() -> Script {
    Script::new()
        .shell("echo once >> log; sleep 1; echo twice >> log; cat log")
        .finish("done")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sandbox_that_dies_under_its_tool_costs_an_attempt_and_nothing_else() {
    if !has_sandboxes("a_sandbox_that_dies_under_its_tool_costs_an_attempt_and_nothing_else") {
        return;
    }
    let data = Scratch::new();
    let server = Server::start(data.path()).await;
    let mut client = server.client().await;
    let run = client
        .submit(keyed("", &slow().task()))
        .await
        .unwrap()
        .into_inner()
        .run_id;
    until(&mut client, &run, 0, |event| {
        matches!(kind(event), Kind::ToolStarted(_))
    })
    .await;
    let begun = Instant::now();
    let (sandbox, init) = loop {
        assert!(begun.elapsed() < LONG, "the sandbox comes up");
        let found = sandboxes(data.path())
            .into_iter()
            .find_map(|name| init_of(&name).map(|init| (name, init)));
        match found {
            // The tool itself runs as well.
            Some((name, init)) if crate::support::host::processes(&name).len() > 2 => break (name, init),
            Some(_) | None => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    };
    kill(Pid::from_raw(init), Signal::SIGKILL).unwrap();
    let events = until_end(&mut client, &run, 0).await;
    check_whole(&events);
    let lost: Vec<_> = events
        .iter()
        .filter_map(|event| match kind(event) {
            Kind::ToolLost(lost) => Some((lost.step, lost.attempt, lost.fault.clone().unwrap().code, lost.retry)),
            _ => None,
        })
        .collect();
    assert_eq!(lost, [(2, 1, "sandbox_lost".to_owned(), true)]);
    let now = client.get(get(&run)).await.unwrap().into_inner();
    assert_eq!(now.state(), RunState::Finished);
    // The second attempt began from the committed tree: nothing of the first is in it.
    let said = transcript(&mut client, &run).await;
    let result = said.iter().find(|message| message["role"] == "tool").unwrap();
    assert!(
        result["content"].as_str().unwrap().contains(r"once\ntwice\n"),
        "{result}"
    );
    assert!(!result["content"].as_str().unwrap().contains(r"once\nonce"), "{result}");
    server.terminate().await;
    nothing_is_left(data.path(), &[sandbox]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn n4_a_drained_server_leaves_its_run_to_the_next() {
    if !has_sandboxes("n4_a_drained_server_leaves_its_run_to_the_next") {
        return;
    }
    let data = Scratch::new();
    let server = Server::start(data.path()).await;
    let mut client = server.client().await;
    let run = client
        .submit(keyed("", &slow().task()))
        .await
        .unwrap()
        .into_inner()
        .run_id;
    let before = until(&mut client, &run, 0, |event| {
        matches!(kind(event), Kind::ToolStarted(_))
    })
    .await;
    drop(client);
    let seen = sandboxes(data.path());
    server.terminate().await;
    // Nothing waits for the next start.
    nothing_is_left(data.path(), &seen);

    let server = Server::start(data.path()).await;
    assert_eq!(server.hello["resumed"], serde_json::json!([run]));
    let mut client = server.client().await;
    let after = until_end(&mut client, &run, before.len() as u64).await;
    let events = [before, after].concat();
    assert_eq!(check_whole(&events), 2);
    let now = client.get(get(&run)).await.unwrap().into_inner();
    assert_eq!((now.state(), now.run_id), (RunState::Finished, run));
    server.terminate().await;
    nothing_is_left(data.path(), &[]);
}
