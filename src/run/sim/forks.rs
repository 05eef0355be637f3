//! Forks, pauses at once, stand-stills: runs that go on elsewhere or later.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio::sync::Notify;

use super::{World, resume, script, submission};
use crate::audit::Mirror;
use crate::model::Message;
use crate::run::driver::{Rest, STALE_AFTER};
use crate::run::event::Event;
use crate::run::fork::Fork;
use crate::run::recording::Recording;
use crate::run::replay::replay;
use crate::run::service::{Service, Submission};
use crate::run::{Error, fold};
use crate::store::{RunRecord, Signal, Store};

impl World {
    pub(super) fn service(&self) -> Service {
        let mirror = Arc::new(Mirror::open(self.data.path(), Arc::clone(&self.clock)).unwrap());
        Service::new(self.process().shop, self.pool(), mirror, self.data.path().to_owned(), 1).unwrap()
    }

    async fn fork(&self, parent: &str, revision: u64, message: Option<&str>) -> Result<RunRecord, Error> {
        let fork = Fork {
            revision: Some(revision),
            message: message.map(str::to_owned),
            by: "ann".into(),
            accept_policy: false,
        };
        self.service().begin_fork(parent, fork).await
    }
}

fn task() -> Submission {
    submission(script(&[
        &[("write_file", json!({ "path": "a", "content": "1\n" }))],
        &[
            ("shell", json!({ "command": "echo 2 >> a" })),
            ("read_file", json!({ "path": "a" })),
        ],
        &[("finish", json!({ "summary": "done" }))],
    ]))
}

/// E18: from any checkpoint but the last, a child that goes on as it stood comes to what its parent came to.
#[tokio::test(start_paused = true)]
async fn e18_a_fork_of_each_revision_comes_to_the_same_and_leaves_its_parent_alone() {
    let world = World::new();
    let run = world.submit(task()).await;
    assert_eq!(world.process().drive(&run).await.unwrap(), Rest::Ended);
    let (expected, before) = (world.result(&run).await, world.entries(&run).await);
    let last = world.store.run(&run).await.unwrap().revision;
    for revision in 0..last - 1 {
        let child = world.fork(run.as_str(), revision, None).await.unwrap();
        assert_eq!((child.parent.as_ref(), child.state.as_str()), (Some(&run), "QUEUED"));
        assert_eq!(child.base.unwrap().revision, revision);
        assert_eq!(world.process().drive(&child.run).await.unwrap(), Rest::Ended);
        let found = world.result(&child.run).await;
        assert_eq!(
            (&found.outcome, found.tree, &found.messages),
            (&expected.outcome, expected.tree, &expected.messages)
        );
        // The parent's beginning is the child's, entry by entry; its own entries follow without a gap.
        let entries = world.entries(&child.run).await;
        let base = child.base.unwrap().seq as usize;
        assert_eq!(entries[..base], before[..base]);
        assert!((1..).zip(&entries).all(|(seq, entry)| entry.seq == seq));
        // Its steps have keys of their own: what the parent did outside was not done for it.
        let own = entries[base..].iter().filter_map(|entry| match &entry.event {
            Event::ToolStarted { key, .. } => Some(key.clone()),
            _ => None,
        });
        assert!(own.into_iter().all(|key| key.starts_with(child.task.as_str())));
        let recording = Recording::of(&world.store, &world.store.run(&child.run).await.unwrap())
            .await
            .unwrap();
        assert_eq!(replay(&recording).unwrap(), None);
    }
    assert_eq!(world.entries(&run).await, before);
}

#[tokio::test(start_paused = true)]
async fn e18_a_fork_of_a_fork_and_one_of_an_ended_run_with_something_to_do() {
    let world = World::new();
    let run = world.submit(task()).await;
    world.process().drive(&run).await.unwrap();
    let last = world.store.run(&run).await.unwrap().revision;
    let refused = world.fork(run.as_str(), last, None).await.unwrap_err();
    assert!(matches!(refused, Error::Invalid(_)), "{refused:?}");

    let child = world.fork(run.as_str(), 2, Some("try the other way")).await.unwrap();
    let grandchild = world.fork(child.run.as_str(), child.revision, None).await.unwrap();
    let from_before = world.fork(grandchild.run.as_str(), 1, None).await.unwrap();
    for fork in [&grandchild, &child, &from_before] {
        assert_eq!(world.process().drive(&fork.run).await.unwrap(), Rest::Ended);
        assert_eq!(world.state(&fork.run).await.public(), "FINISHED");
    }
    let said = world.result(&grandchild.run).await.messages;
    let asked = |message: &Message| matches!(message, Message::User { content } if content == "try the other way");
    assert_eq!(said.iter().filter(|message| asked(message)).count(), 1);
    assert_eq!(world.result(&child.run).await.messages, said);
    assert_eq!(grandchild.parent, Some(child.run));
    // The grandchild's own beginning is its grandparent's: nothing of its parent's message is in it.
    assert!(!world.result(&from_before.run).await.messages.iter().any(asked));
}

/// E4: new authorisation. A policy that has changed since is not taken silently.
#[tokio::test(start_paused = true)]
async fn e4_a_fork_under_a_changed_policy_is_refused_until_it_is_accepted() {
    let world = World::new();
    let folder = world.data.path().join("policies");
    std::fs::create_dir_all(&folder).unwrap();
    let head = "format_version = 1\nname = \"house\"\nextends = \"default\"\n";
    std::fs::write(folder.join("house.toml"), head).unwrap();
    let policy = "house".into();
    let run = world.submit(Submission { policy, ..task() }).await;
    world.process().drive(&run).await.unwrap();
    let rule = "[[tools.rules]]\nname = \"no-shell\"\ntool = \"shell\"\nverdict = \"deny\"\n";
    std::fs::write(folder.join("house.toml"), format!("{head}{rule}")).unwrap();
    let refused = world.fork(run.as_str(), 1, None).await.unwrap_err();
    assert_eq!(refused.reason(), "POLICY_CHANGED");
    let accepted = Fork {
        revision: Some(1),
        by: "ann".into(),
        accept_policy: true,
        ..Fork::default()
    };
    let child = world.service().begin_fork(run.as_str(), accepted).await.unwrap();
    assert_eq!(world.process().drive(&child.run).await.unwrap(), Rest::Ended);
    let denied = |event: &Event| matches!(event, Event::ToolRefused { decision, .. } if decision.rule == "no-shell");
    assert!(world.entries(&child.run).await.iter().any(|entry| denied(&entry.event)));
}

/// Pause at once: what runs is stopped, its half-done work is rolled back, nothing is held, and it is done once in the end.
#[tokio::test(start_paused = true)]
async fn a_pause_at_once_stops_the_tool_and_holds_no_sandbox() {
    let world = World::new();
    let turns = script(&[
        &[("shell", json!({ "command": "echo 1 >> a; sleep 100; echo 2 >> a" }))],
        &[("read_file", json!({ "path": "a" }))],
        &[("finish", json!({ "summary": "done" }))],
    ]);
    let run = world.submit(submission(turns.clone())).await;
    let process = world.process();
    let wake = Arc::new(Notify::new());
    let meddle = async {
        tokio::time::sleep(Duration::from_secs(20)).await;
        let now = Signal::Pause {
            by: "ann".into(),
            reason: String::new(),
            now: true,
        };
        world.store.signal(&run, now).await.unwrap();
        wake.notify_one();
        std::future::pending::<()>().await;
    };
    let rest = tokio::select! {
        // It looks itself that no sandbox is left.
        rest = process.drive_with(&run, Arc::clone(&wake)) => rest.unwrap(),
        () = meddle => unreachable!("it waits for ever"),
    };
    assert_eq!((rest, world.state(&run).await.public()), (Rest::Parked, "PAUSED"));
    world.store.signal(&run, resume()).await.unwrap();
    assert_eq!(world.process().drive(&run).await.unwrap(), Rest::Ended);

    let other = World::new();
    let undisturbed = other.submit(submission(turns)).await;
    other.process().drive(&undisturbed).await.unwrap();
    assert_eq!(world.result(&run).await, other.result(&undisturbed).await);
}

/// E7: after a long stand-still the model is told, once, before it decides.
#[tokio::test(start_paused = true)]
async fn e7_a_model_is_told_of_a_long_stand_still() {
    for (away, told) in [(STALE_AFTER + Duration::from_secs(60), 1), (STALE_AFTER / 2, 0)] {
        let world = World::new();
        let run = world.submit(task()).await;
        world.store.fail_at(5, crate::store::memory::When::After);
        world.process().drive(&run).await.unwrap_err();
        tokio::time::sleep(away).await;
        assert_eq!(world.process().drive(&run).await.unwrap(), Rest::Ended);
        let said = world.result(&run).await.messages;
        let about =
            |message: &&Message| matches!(message, Message::User { content } if content.contains("stood still"));
        assert_eq!(said.iter().filter(about).count(), told);
        // E6: it stands after the results of the turn, never between a call and its result.
        fold(&run, &world.entries(&run).await).unwrap();
        let pairs = said.windows(2).all(|pair| match pair {
            [Message::Assistant(said), next] if !said.tool_calls.is_empty() => matches!(next, Message::Tool { .. }),
            _ => true,
        });
        assert!(pairs, "{said:#?}");
    }
}
