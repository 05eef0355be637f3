//! Watch: the backlog, then live, never a gap and never a duplicate.

use std::time::Duration;

use exuvia::api::proto::{self, RunState};
use serde_json::json;

use crate::bed::Bed;
use crate::support::get;
use crate::support::script::Script;
use crate::support::watch::{check_whole, ended, until, until_end};

fn busy() -> proto::Task {
    Script::new()
        .write("a", "1")
        .calls(&[("read_file", json!({ "path": "a" })), ("list_files", json!({}))])
        .shell("echo x >> a")
        .finish("done")
        .task()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reconnecting_at_every_position_gives_exactly_the_rest() {
    let bed = Bed::new().await;
    let mut client = bed.client().await;
    let run = bed.submit(&busy()).await.run_id;
    // Live, from before most of it has happened.
    let live = until_end(&mut client, &run, 0).await;
    check_whole(&live);
    for after in 0..=live.len() {
        assert_eq!(until_end(&mut client, &run, after as u64).await, live[after..]);
    }
    assert_eq!(until_end(&mut client, &run, u64::MAX).await, []);
    // The last event's state is the run's.
    let now = client.get(get(&run)).await.unwrap().into_inner();
    assert_eq!(
        (now.state(), now.seq),
        (live.last().unwrap().state(), live.len() as u64)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watcher_that_breaks_off_after_each_event_misses_nothing() {
    let bed = Bed::new().await;
    let mut client = bed.client().await;
    let run = bed.submit(&busy()).await.run_id;
    let mut pieces = Vec::new();
    loop {
        let piece = until(&mut client, &run, pieces.len() as u64, |_| true).await;
        if piece.is_empty() {
            break;
        }
        pieces.extend(piece);
    }
    assert_eq!(pieces, until_end(&mut client, &run, 0).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_reader_holds_nobody_up_and_gets_everything() {
    let bed = Bed::new().await;
    let mut client = bed.client().await;
    // Results that are large enough to fill every window between the two.
    let long = "x".repeat(2000);
    let mut script = Script::new().write("long", &long);
    for _ in 0..40 {
        script = script.call("read_file", json!({ "path": "long" }));
    }
    let run = bed.submit(&script.finish("done").task()).await.run_id;
    let request = proto::WatchRequest {
        id: run.clone(),
        after_seq: 0,
    };
    let mut slow = client.watch(request).await.unwrap().into_inner();
    let mut events = vec![slow.message().await.unwrap().unwrap()];
    // It reads nothing more until the run is over.
    assert_eq!(ended(&mut client, &run).await.state(), RunState::Finished);
    while let Some(event) = slow.message().await.unwrap() {
        events.push(event);
    }
    check_whole(&events);
    assert_eq!(events, until_end(&mut client, &run, 0).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a15_a_client_that_goes_away_cancels_nothing() {
    let bed = Bed::new().await;
    let mut client = bed.client().await;
    let task = Script::new().shell("sleep 0.3; echo x > a").finish("done").task();
    let run = bed.submit(&task).await.run_id;
    until(&mut client, &run, 0, |event| event.seq == 2).await;
    drop(client);
    tokio::time::sleep(Duration::from_millis(50)).await;
    let mut client = bed.client().await;
    assert_eq!(ended(&mut client, &run).await.state(), RunState::Finished);
}
