//! A crash on either side of each commit, and a worker that wakes up too late.

use std::time::Duration;

use serde_json::json;
use tokio::task::JoinSet;

use super::{Process, Result, World, script, submission};
use crate::ids::RunId;
use crate::run::driver::Rest;
use crate::run::service::Submission;
use crate::run::{Error, Event};
use crate::store::memory::When;
use crate::store::{self, Owner, Store};

fn task() -> Submission {
    let turns = script(&[
        &[("write_file", json!({ "path": "a", "content": "1\n" }))],
        &[
            ("read_file", json!({ "path": "a" })),
            ("list_files", json!({})),
            ("nonsense", json!({})),
        ],
        &[("shell", json!({ "command": "echo 2 >> a; exit 3" }))],
        &[("finish", json!({ "summary": "too early" }))],
        &[("shell", json!({ "command": "echo 3 >> a; echo x > done" }))],
        &[("finish", json!({ "summary": "done" }))],
    ]);
    Submission {
        check: Some("test -f done".into()),
        ..submission(turns)
    }
}

async fn undisturbed() -> (Result, u64) {
    let world = World::new();
    let run = world.submit(task()).await;
    assert_eq!(world.process().drive(&run).await.unwrap(), Rest::Ended);
    (world.result(&run).await, world.store.commits())
}

/// One process after the other, until the run rests. Gives how many there were.
async fn persist(world: &World, run: &RunId) -> usize {
    for processes in 1..100 {
        match world.process().drive(run).await {
            Ok(Rest::Ended) => return processes,
            // The crash came after the last commit.
            Err(Error::Store(store::Error::Ended { .. })) => return processes,
            Ok(rest) => panic!("{rest:?}"),
            Err(Error::Store(store::Error::Backend { .. })) => {}
            Err(error) => panic!("{error:?}"),
        }
    }
    panic!("it never ends");
}

#[tokio::test(start_paused = true)]
async fn e1_e12_a_crash_on_either_side_of_each_commit_changes_nothing() {
    let (expected, commits) = undisturbed().await;
    for nth in 1..=commits {
        for when in [When::Before, When::After] {
            let world = World::new();
            let run = world.submit(task()).await;
            world.store.fail_at(nth, when);
            let processes = persist(&world, &run).await;
            assert_eq!(world.result(&run).await, expected, "{when:?} commit {nth}");
            assert_eq!(processes, 2, "{when:?} commit {nth}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_crash_at_every_second_commit_only_takes_longer() {
    let (expected, _) = undisturbed().await;
    for when in [When::Before, When::After] {
        let world = World::new();
        let run = world.submit(task()).await;
        // Each process gets as far as its claim and one more.
        (1..200)
            .filter(|nth| nth % 3 == 0)
            .for_each(|nth| world.store.fail_at(nth, when));
        assert!(persist(&world, &run).await > 5);
        assert_eq!(world.result(&run).await, expected, "{when:?}");
    }
}

/// Waits until the run's journal has a tool that runs.
async fn tool_started(world: &World, run: &RunId) {
    let started = |event: &Event| matches!(event, Event::ToolStarted { .. });
    while !world.entries(run).await.iter().any(|entry| started(&entry.event)) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn e12_a_worker_that_wakes_up_after_a_take_over_can_write_nothing() {
    let turns = script(&[
        &[("shell", json!({ "command": "sleep 100; echo x >> a" }))],
        &[("finish", json!({ "summary": "done" }))],
    ]);
    let world = World::new();
    let run = world.submit(submission(turns)).await;
    // To everybody else its process is dead; it only sleeps.
    let dead = Owner {
        pid: u32::MAX,
        started: 0,
        boot: "another".into(),
    };
    let old: Process = world.process_of(dead);
    let mut olds = JoinSet::new();
    olds.spawn({
        let run = run.clone();
        async move { old.drive(&run).await }
    });
    tool_started(&world, &run).await;
    tokio::time::sleep(Duration::from_secs(50)).await;

    let new = world.process();
    let (rest, refused) = tokio::join!(new.drive(&run), olds.join_next());
    assert_eq!(rest.unwrap(), Rest::Ended);
    let refused = refused.unwrap().unwrap();
    assert!(
        matches!(
            refused,
            Err(Error::Store(store::Error::StaleFence { fence: 1, found: 2, .. }))
        ),
        "{refused:?}"
    );
    let record = world.store.run(&run).await.unwrap();
    assert_eq!((record.state.as_str(), record.fence), ("FINISHED", 2));
    let finished: Vec<u32> = world
        .entries(&run)
        .await
        .iter()
        .filter_map(|entry| match entry.event {
            Event::ToolFinished { attempt, .. } => Some(attempt),
            _ => None,
        })
        .collect();
    assert_eq!(finished, [2], "the first attempt's outcome came too late");
}

#[tokio::test(start_paused = true)]
async fn a_run_that_a_living_process_has_is_not_taken() {
    let world = World::new();
    let run = world.submit(task()).await;
    let mut other = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", other.id())).unwrap();
    let started = stat
        .rsplit_once(')')
        .unwrap()
        .1
        .split_ascii_whitespace()
        .nth(19)
        .unwrap();
    let owner = Owner {
        pid: other.id(),
        started: started.parse().unwrap(),
        ..Owner::current().unwrap()
    };
    world.store.claim(&run, &owner, None).await.unwrap();
    let refused = world.process().drive(&run).await.unwrap_err();
    assert!(
        matches!(refused, Error::Store(store::Error::Owned { .. })),
        "{refused:?}"
    );
    other.kill().unwrap();
    other.wait().unwrap();
    assert_eq!(world.process().drive(&run).await.unwrap(), Rest::Ended);
}
