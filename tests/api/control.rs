//! Cancel, Pause and Resume, at every moment of a run.

use std::time::Duration;

use exuvia::api::proto::event::Kind;
use exuvia::api::proto::{self, RunState};
use exuvia::sandbox::backend::fake::Call;
use futures::future::join_all;
use futures::{FutureExt, StreamExt, stream};
use tonic::Code;

use crate::bed::{Bed, why};
use crate::support::script::Script;
use crate::support::watch::{check_whole, ended, kind, until, until_end};
use crate::support::{Client, control, get, transcript};

/// Waits until the run is in `state`.
async fn reaches(client: &mut Client, run: &str, state: RunState) {
    let events = until(client, run, 0, |event| event.state() == state).await;
    assert_eq!(events.last().unwrap().state(), state);
}

/// Cancels, and checks what has to hold of every cancelled run.
async fn cancel(bed: &Bed, run: &str) -> Vec<proto::Event> {
    let mut client = bed.client().await;
    let now = client.cancel(control(run)).await.unwrap().into_inner();
    assert_eq!(now.state(), RunState::Cancelled);
    let outcome = now.outcome.unwrap();
    assert_eq!((outcome.by.as_str(), outcome.reason.as_str()), ("tester", "to see"));
    let events = until_end(&mut client, run, 0).await;
    assert!(matches!(kind(events.last().unwrap()), Kind::Ended(_)));
    // Again: the same answer, and nothing new.
    let again = client.cancel(control(run)).await.unwrap().into_inner();
    assert_eq!((again.state(), again.seq), (RunState::Cancelled, events.len() as u64));
    // Each call of the conversation has its result (E6).
    let said = transcript(&mut client, run).await;
    let calls = said
        .iter()
        .filter_map(|message| message["tool_calls"].as_array())
        .flatten();
    let results = said.iter().filter(|message| message["role"] == "tool");
    let ids = |values: Vec<&serde_json::Value>| values.into_iter().cloned().collect::<Vec<_>>();
    assert_eq!(
        ids(calls.map(|call| &call["id"]).collect()),
        ids(results.map(|result| &result["tool_call_id"]).collect())
    );
    bed.empties().await;
    events
}

#[tokio::test]
async fn a9_cancel_while_the_model_answers() {
    let bed = Bed::new().await;
    let mut client = bed.client().await;
    let script = Script::new().write("a", "kept").finish("never").delayed(60_000);
    let run = bed.submit(&script.task()).await.run_id;
    until(&mut client, &run, 0, |event| {
        matches!(kind(event), Kind::ToolFinished(_))
    })
    .await;
    cancel(&bed, &run).await;
    // The last checkpoint is there, with the workspace as the last step left it.
    let request = proto::DiffWorkspaceRequest {
        id: run,
        ..Default::default()
    };
    let diff = client.diff_workspace(request).await.unwrap().into_inner().diff;
    assert!(String::from_utf8(diff).unwrap().contains("+kept"));
}

#[tokio::test]
async fn a9_cancel_while_a_tool_runs() {
    let bed = Bed::new().await;
    let mut client = bed.client().await;
    let script = Script::new()
        .write("a", "kept\n")
        .shell("echo lost > b; sleep 600")
        .finish("never");
    let run = bed.submit(&script.task()).await.run_id;
    until(
        &mut client,
        &run,
        0,
        |event| matches!(kind(event), Kind::ToolStarted(started) if started.step == 4),
    )
    .await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    cancel(&bed, &run).await;
    let request = proto::DiffWorkspaceRequest {
        id: run.clone(),
        ..Default::default()
    };
    let diff = client.diff_workspace(request).await.unwrap().into_inner().diff;
    let diff = String::from_utf8(diff).unwrap();
    assert!(diff.contains("+kept") && !diff.contains("lost"), "{diff}");
    let said = transcript(&mut client, &run).await;
    assert!(
        said.last().unwrap()["content"].as_str().unwrap().contains("not_run"),
        "{said:?}"
    );
}

#[tokio::test]
async fn a9_cancel_while_the_sandbox_is_made_leaves_none() {
    for call in [Call::Create, Call::Start, Call::Connect, Call::Freeze, Call::Thaw] {
        let bed = Bed::new().await;
        let mut client = bed.client().await;
        bed.fake.stall_next(call, Duration::from_millis(400));
        let run = bed
            .submit(&Script::new().write("a", "x").finish("never").task())
            .await
            .run_id;
        while !bed.fake.calls().contains(&call) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        cancel(&bed, &run).await;
        ended(&mut client, &run).await;
    }
}

#[tokio::test]
async fn a9_cancel_and_pause_before_the_first_event() {
    let bed = Bed::with_slots(1).await;
    let mut client = bed.client().await;
    let hog = bed
        .submit(&Script::new().finish("later").delayed(60_000).task())
        .await
        .run_id;
    reaches(&mut client, &hog, RunState::Reasoning).await;
    let task = Script::new().finish("done").task();
    let first = bed.submit(&task).await;
    assert_eq!(first.state(), RunState::Queued);
    let events = cancel(&bed, &first.run_id).await;
    let kinds: Vec<_> = events.iter().map(|event| event.state()).collect();
    assert_eq!(kinds.last(), Some(&RunState::Cancelled));

    // A pause of one that waits for its turn holds it, and a resume puts it back in the queue.
    let second = bed.submit(&task).await.run_id;
    let held = client.pause(control(&second)).await.unwrap().into_inner();
    assert_eq!(held.state(), RunState::Paused);
    let back = client.resume(control(&second)).await.unwrap().into_inner();
    assert_eq!(back.state(), RunState::Queued);
    cancel(&bed, &hog).await;
    let done = ended(&mut client, &second).await;
    assert_eq!(done.state(), RunState::Finished);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a5_a_cancel_that_races_the_finish_has_one_winner() {
    const RACES: u64 = 200;
    let bed = Bed::with_slots(4).await;
    let client = bed.client().await;
    let task = Script::new().say("thinking").finish("done").task();
    let task = proto::Task {
        check: String::new(),
        ..task
    };
    let race = |n: u64| {
        let (mut client, task, bed) = (client.clone(), task.clone(), &bed);
        async move {
            let run = bed.submit(&task).await.run_id;
            // From at once to after its end.
            tokio::time::sleep(Duration::from_micros(n * 97 % 12_000)).await;
            let cancelled = client.cancel(control(&run)).await;
            let events = until_end(&mut client, &run, 0).await;
            check_whole(&events);
            let ends = events
                .iter()
                .filter(|event| matches!(kind(event), Kind::Ended(_)))
                .count();
            let now = client.get(get(&run)).await.unwrap().into_inner();
            assert_eq!((ends, events.last().unwrap().state()), (1, now.state()));
            match cancelled {
                Ok(run) => assert_eq!(run.into_inner().state(), now.state()),
                Err(status) => {
                    assert_eq!(why(&status), (Code::FailedPrecondition, "WRONG_STATE".into()));
                    assert_eq!(now.state(), RunState::Finished);
                }
            }
            now.state()
        }
    };
    let states: Vec<RunState> = stream::iter(0..RACES).map(race).buffer_unordered(4).collect().await;
    let finished = states.iter().filter(|state| **state == RunState::Finished).count();
    let cancelled = states.iter().filter(|state| **state == RunState::Cancelled).count();
    assert_eq!(finished + cancelled, RACES as usize);
    eprintln!("{finished} finished, {cancelled} cancelled");
}

#[tokio::test]
async fn a8_a_paused_run_is_resumed_by_another_process() {
    let bed = Bed::new().await;
    let mut client = bed.client().await;
    let script = Script::new().write("a", "1").delayed(200).shell("cat a").finish("done");
    let run = bed.submit(&script.task()).await.run_id;
    reaches(&mut client, &run, RunState::Reasoning).await;
    client.pause(control(&run)).await.unwrap();
    reaches(&mut client, &run, RunState::Paused).await;
    let before = client.get(get(&run)).await.unwrap().into_inner();
    // Twice is as once.
    let again = client.pause(control(&run)).await.unwrap().into_inner();
    assert_eq!(again.state(), RunState::Paused);

    let bed = bed.restarted().await;
    let mut client = bed.client().await;
    let now = client.get(get(&run)).await.unwrap().into_inner();
    assert_eq!((now.state(), now.revision), (RunState::Paused, before.revision));
    client.resume(control(&run)).await.unwrap();
    let events = until_end(&mut client, &run, 0).await;
    // The first worker, the one that heard the second pause, and another one after the restart.
    assert_eq!(check_whole(&events), 3);
    let done = client.get(get(&run)).await.unwrap().into_inner();
    assert_eq!(done.state(), RunState::Finished);
    assert!(done.revision > before.revision);
}

#[tokio::test]
async fn a_pause_lets_what_runs_end_and_starts_nothing_new() {
    let bed = Bed::new().await;
    let mut client = bed.client().await;
    let script = Script::new().shell("sleep 0.3; echo x > a").finish("done");
    let run = bed.submit(&script.task()).await.run_id;
    until(&mut client, &run, 0, |event| {
        matches!(kind(event), Kind::ToolStarted(_))
    })
    .await;
    let asked = client.pause(control(&run)).await.unwrap().into_inner();
    assert_eq!(asked.state(), RunState::WaitingResult);
    let events = until(&mut client, &run, 0, |event| event.state() == RunState::Paused).await;
    assert!(matches!(kind(events.last().unwrap()), Kind::ToolFinished(_)));
    bed.empties().await;
    client.resume(control(&run)).await.unwrap();
    assert_eq!(ended(&mut client, &run).await.state(), RunState::Finished);
}

#[tokio::test]
async fn what_a_state_does_not_allow_is_refused() {
    let bed = Bed::new().await;
    let mut client = bed.client().await;
    let running = bed
        .submit(&Script::new().finish("x").delayed(60_000).task())
        .await
        .run_id;
    let refused = client.resume(control(&running)).await.unwrap_err();
    assert_eq!(why(&refused), (Code::FailedPrecondition, "WRONG_STATE".into()));
    cancel(&bed, &running).await;

    let done = bed.submit(&Script::new().finish("done").task()).await.run_id;
    ended(&mut client, &done).await;
    let refusals = join_all([
        async { client.clone().cancel(control(&done)).await.unwrap_err() }.boxed_local(),
        async { client.clone().pause(control(&done)).await.unwrap_err() }.boxed_local(),
        async { client.clone().resume(control(&done)).await.unwrap_err() }.boxed_local(),
    ]);
    for refused in refusals.await {
        assert_eq!(why(&refused), (Code::FailedPrecondition, "WRONG_STATE".into()));
    }
}
