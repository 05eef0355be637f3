//! Requirements that one run shows each: identities, what is stored of a step, what stands apart from what.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::json;

use super::{Process, World, script, submission};
use crate::error::Fault;
use crate::ids::RunId;
use crate::run::commit::{Position, prepare};
use crate::run::driver::Rest;
use crate::run::event::{Entry, FORMAT_VERSION};
use crate::run::service::Submission;
use crate::run::session::Session;
use crate::run::{Error, Event};
use crate::sandbox::backend::fake::Call;
use crate::store::Store;
use crate::store::memory::When;

fn task() -> Submission {
    submission(script(&[
        &[("shell", json!({ "command": "echo same >> a" }))],
        &[("shell", json!({ "command": "echo same >> a" }))],
        &[("read_file", json!({ "path": "a" }))],
        &[("finish", json!({ "summary": "done" }))],
    ]))
}

/// The same call twice is two calls; another attempt at one is not.
#[tokio::test(start_paused = true)]
async fn b4_b5_two_equal_calls_both_happen_and_another_attempt_has_the_same_key() {
    let world = World::new();
    let run = world.submit(task()).await;
    let process = world.process();
    // The first command's sandbox is lost after it ran: its snapshot cannot be taken.
    process.fake.fail_next(Call::Freeze, "no such luck");
    assert_eq!(process.drive(&run).await.unwrap(), Rest::Ended);
    let entries = world.entries(&run).await;
    let keys: Vec<&String> = entries
        .iter()
        .filter_map(|entry| match &entry.event {
            Event::ToolStarted { key, .. } => Some(key),
            _ => None,
        })
        .collect();
    let task_id = world.store.run(&run).await.unwrap().task;
    assert_eq!(
        keys[..3],
        [
            &format!("{task_id}/2"),
            &format!("{task_id}/4"),
            &format!("{task_id}/6")
        ]
    );
    let lost = entries.iter().any(|entry| {
        matches!(
            &entry.event,
            Event::ToolLost {
                step: 2,
                attempt: 1,
                ..
            }
        )
    });
    assert!(lost, "{entries:#?}");
    let read = entries.iter().rev().find_map(|entry| match &entry.event {
        Event::ToolFinished { step: 6, result, .. } => Some(result.to_message()),
        _ => None,
    });
    assert_eq!(read.unwrap().matches("same").count(), 2);
}

/// E2: what is kept of each step; E8: the conversation is none of the state's business, and the state does not grow with it.
#[tokio::test(start_paused = true)]
async fn e2_e8_a_step_is_whole_and_the_dialogue_stands_apart_from_the_progress() {
    let mut sizes = BTreeSet::new();
    for words in [1, 2000] {
        let world = World::new();
        let prompt = "needle ".repeat(words);
        let run = world.submit(Submission { prompt, ..task() }).await;
        assert_eq!(world.process().drive(&run).await.unwrap(), Rest::Ended);
        let (entries, record) = (world.entries(&run).await, world.store.run(&run).await.unwrap());
        let completed = entries.iter().filter(|entry| entry.event.completes_step());
        assert_eq!(
            completed.count() as u64,
            record.revision,
            "a checkpoint for each step that is over"
        );
        for entry in &entries {
            match &entry.event {
                Event::ModelReplied { reply, calls, .. } => assert!(reply.usage.total() > 0 && calls.len() == 1),
                Event::ToolFinished { result, workspace, .. } => {
                    assert!(result.error.is_none());
                    world.pool().require(workspace.tree).await.unwrap();
                }
                _ => {}
            }
        }
        // What went into each model call is the journal before it, folded.
        let asked = Session::of(&entries).messages();
        assert_eq!(serde_json::to_string(&asked).unwrap().matches("needle").count(), words);
        let checkpoint = world.store.checkpoint(&run, None).await.unwrap();
        let state = checkpoint.state.to_string();
        assert!(!state.contains("needle") && !state.contains("echo same"), "{state}");
        sizes.insert(state.len() / 64);
    }
    assert!(sizes.len() <= 2, "{sizes:?}");
}

/// E9, E10, E15: after each step all that counts is in the store, and another process with a new sandbox goes on from there.
#[tokio::test(start_paused = true)]
async fn e9_e10_e15_each_step_may_be_the_last_of_its_process_and_its_sandbox() {
    let world = World::new();
    let run = world.submit(task()).await;
    world.process().drive(&run).await.unwrap();
    let (expected, commits) = (world.result(&run).await, world.store.commits());
    let world = World::new();
    let run = world.submit(task()).await;
    (1..3 * commits)
        .filter(|nth| nth % 4 == 0)
        .for_each(|nth| world.store.fail_at(nth, When::After));
    let mut processes = 0;
    loop {
        processes += 1;
        let process = world.process();
        let rest = process.drive(&run).await;
        let tree = world.state(&run).await.workspace.tree;
        world.pool().require(tree).await.unwrap();
        assert_eq!(process.fake.living(), []);
        match rest {
            Ok(Rest::Ended) | Err(Error::Store(crate::store::Error::Ended { .. })) => break,
            Ok(rest) => panic!("{rest:?}"),
            Err(_) => assert!(processes < 50),
        }
    }
    assert!(processes > 3);
    assert_eq!(world.result(&run).await, expected);
}

/// E13, E19: a checkpoint that is not what this build makes of the journal is not gone on from; nor is another, older one.
#[tokio::test(start_paused = true)]
async fn e13_e19_a_checkpoint_that_does_not_fit_its_journal_is_refused_by_name() {
    let world = World::new();
    let run = world.submit(task()).await;
    world.store.fail_at(8, When::After);
    world.process().drive(&run).await.unwrap_err();
    let revision = world.store.run(&run).await.unwrap().revision;
    world.store.tamper(|runs, _| {
        let newest = runs[0].checkpoints.get_mut(&revision).unwrap();
        *newest = newest.replace("\"idle_replies\":0", "\"idle_replies\":1");
    });
    let refused = world.process().drive(&run).await.unwrap_err();
    assert_eq!(refused.reason(), "CHECKPOINT_DIVERGED");
    assert!(
        matches!(refused, Error::Diverged { revision: found, .. } if found == revision),
        "{refused:?}"
    );
}

impl World {
    /// The provider of the run's model says: not for that long.
    async fn told_to_wait(&self, run: &RunId, process: &Process, wait: Duration) {
        let record = self.store.claim(run, &process.owner, None).await.unwrap();
        for event in [
            Event::Claimed {
                worker: "sim".into(),
                fence: record.fence,
                stale: None,
                grounds: None,
            },
            Event::ModelFailed {
                step: 1,
                attempt: 1,
                fault: Fault::new("provider_rate_limited", "later").retryable(true),
                retry_in: Some(wait),
            },
        ] {
            let (entries, record) = (self.entries(run).await, self.store.run(run).await.unwrap());
            let (state, session) = (self.state(run).await, Session::of(&entries));
            let at = Position {
                record: &record,
                state: &state,
                session: &session,
                revision: record.revision,
                policy_hash: "",
            };
            let entry = Entry {
                format_version: FORMAT_VERSION,
                seq: state.seq + 1,
                at: self.clock.now(),
                event,
            };
            let (_, commit) = prepare(&at, entry, Vec::new(), Vec::new()).unwrap();
            self.store.commit(commit).await.unwrap();
        }
    }
}

/// N6: one that waits for a timer holds no sandbox and no worker; one for which somebody asks is heard meanwhile.
#[tokio::test(start_paused = true)]
async fn n6_a_run_that_is_told_to_come_back_later_holds_nothing_until_then() {
    let world = World::new();
    let run = world.submit(task()).await;
    let process = world.process();
    world.told_to_wait(&run, &process, Duration::from_secs(1800)).await;
    let Rest::Waiting(until) = process.drive(&run).await.unwrap() else {
        panic!("{:?}", world.state(&run).await)
    };
    assert_eq!(until.since(world.clock.now()).as_secs(), 1800);
    assert_eq!(process.fake.living(), []);
    // One worker for all: another run gets it, and ends long before.
    let service = world.service();
    service.drive(&run);
    let other = world.submit(task()).await;
    service.drive(&other);
    service.settled(&other).await.unwrap();
    assert!(until > world.clock.now());
    let ended = service.settled(&run).await.unwrap();
    assert_eq!(ended.state.public(), "FINISHED");
    assert!(until <= world.clock.now());
    service.shut_down(Duration::from_secs(10)).await;
}
