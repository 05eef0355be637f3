//! Random scripts, crashed, paused and resumed at random: none of it changes what the run comes to (promise 1).

use std::collections::BTreeSet;
use std::sync::Arc;

use proptest::prelude::*;
use serde_json::{Value, json};
use tokio::sync::Notify;

use super::{Process, Result, World, pause, resume, script, submission};
use crate::ids::RunId;
use crate::run::Error;
use crate::run::driver::Rest;
use crate::run::service::Submission;
use crate::store::memory::When;
use crate::store::{self, Signal, Store};

type Turn = Vec<(&'static str, Value)>;

fn call() -> impl Strategy<Value = (&'static str, Value)> {
    let path = prop::sample::select(vec!["a", "b", "c/d"]);
    prop_oneof![
        (path.clone(), 0..9_u8)
            .prop_map(|(path, n)| ("write_file", json!({ "path": path, "content": format!("{n}\n") }))),
        path.clone().prop_map(|path| ("read_file", json!({ "path": path }))),
        path.prop_map(|path| ("edit_file", json!({ "path": path, "old": "1", "new": "one" }))),
        (0..9_u8).prop_map(|n| (
            "shell",
            json!({ "command": format!("echo {n} >> log; cat log; exit {}", n % 2) })
        )),
        Just(("shell", json!({ "command": "sleep 3; echo slow >> log" }))),
        Just(("list_files", json!({}))),
        Just(("search", json!({ "pattern": "1" }))),
        Just(("nonsense", json!({}))),
        Just(("finish", json!({ "summary": "early" }))),
    ]
}

#[derive(Debug, Clone)]
struct Plan {
    turns: Vec<Turn>,
    checked: bool,
    crashes: Vec<(u64, bool)>,
    /// At which entry somebody pauses the run.
    pauses: BTreeSet<u64>,
}

fn plan() -> impl Strategy<Value = Plan> {
    let turns = prop::collection::vec(prop::collection::vec(call(), 1..4), 1..5);
    let crashes = prop::collection::vec((1..60_u64, any::<bool>()), 0..5);
    let pauses = prop::collection::btree_set(1..40_u64, 0..3);
    (turns, any::<bool>(), crashes, pauses).prop_map(|(turns, checked, crashes, pauses)| Plan {
        turns,
        checked,
        crashes,
        pauses,
    })
}

impl Plan {
    fn submission(&self) -> Submission {
        let last: Turn = vec![("finish", json!({ "summary": "done" }))];
        let turns: Vec<&[(&str, Value)]> = self.turns.iter().chain([&last]).map(Vec::as_slice).collect();
        Submission {
            check: self.checked.then(|| "test -f log".to_owned()),
            ..submission(script(&turns))
        }
    }

    async fn undisturbed(&self) -> Result {
        let world = World::new();
        let run = world.submit(self.submission()).await;
        assert_eq!(world.process().drive(&run).await.unwrap(), Rest::Ended);
        world.result(&run).await
    }

    async fn disturbed(&self) -> Result {
        let world = World::new();
        let run = world.submit(self.submission()).await;
        for (nth, before) in &self.crashes {
            world
                .store
                .fail_at(*nth, if *before { When::Before } else { When::After });
        }
        let mut pauses = self.pauses.clone();
        for _ in 0..100 {
            let process = world.process();
            let wake = Arc::new(Notify::new());
            let driven = tokio::select! {
                driven = process.drive_with(&run, Arc::clone(&wake)) => driven,
                () = meddle(&world, &process, &run, &mut pauses, &wake) => unreachable!("it waits for ever"),
            };
            match driven {
                Ok(Rest::Ended) => return world.result(&run).await,
                // Somebody lets it go on.
                Ok(Rest::Parked) => send(&world, &run, resume()).await,
                Ok(rest @ (Rest::Released | Rest::Waiting(_))) => panic!("{rest:?}: nobody stopped it"),
                Err(Error::Store(store::Error::Backend { .. })) => {}
                // The crash came after the last commit.
                Err(Error::Store(store::Error::Ended { .. })) => return world.result(&run).await,
                Err(error) => panic!("{error:?}"),
            }
        }
        panic!("it never ends: {:#?}", world.entries(&run).await);
    }
}

async fn send(world: &World, run: &RunId, signal: Signal) {
    match world.store.signal(run, signal).await {
        Ok(()) | Err(store::Error::Ended { .. }) => {}
        Err(error) => panic!("{error:?}"),
    }
}

/// Pauses the run when its journal gets to where the plan says.
async fn meddle(world: &World, process: &Process, run: &RunId, pauses: &mut BTreeSet<u64>, wake: &Notify) {
    let mut moved = process.shop.hub.subscribe(run);
    while let Some(first) = pauses.first().copied() {
        if first <= world.store.run(run).await.unwrap().seq {
            pauses.remove(&first);
            send(world, run, pause()).await;
            wake.notify_one();
        } else if moved.changed().await.is_err() {
            break;
        }
    }
    std::future::pending().await
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, max_shrink_iters: 200, ..ProptestConfig::default() })]

    #[test]
    fn whatever_happens_to_a_run_it_comes_to_the_same(plan in plan()) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        let (expected, found) = runtime.block_on(async { (plan.undisturbed().await, plan.disturbed().await) });
        prop_assert_eq!(expected, found);
    }
}
