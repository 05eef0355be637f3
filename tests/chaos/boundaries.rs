//! A kill at every event boundary: just before entry N becomes durable, and just after, for all N.

use futures::{StreamExt, stream};

use crate::journey::{self, Journey, KEY, nothing_is_left, task, travel};
use crate::support::host::sandboxes;
use crate::support::server::Server;
use crate::support::{Scratch, has_sandboxes, keyed};

/// Journeys that go on side by side.
const ABREAST: usize = 3;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e1_killed_before_any_event_the_run_ends_as_if_nothing_had_been() {
    everywhere("before").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e1_killed_after_any_event_the_run_ends_as_if_nothing_had_been() {
    everywhere("after").await;
}

async fn everywhere(side: &str) {
    if !has_sandboxes(&format!("killed {side} any event")) {
        return;
    }
    let expected = journey::undisturbed().await;
    let expected = &expected;
    let last = expected.events.len();
    // Submitted, Claimed, 10 answers, 10 tools started and finished, 2 `finish` let through, 2 checks, Ended.
    assert_eq!(last, 37);
    stream::iter(1..=last)
        .for_each_concurrent(ABREAST, |seq| async move {
            let at = format!("{side}:{seq}");
            eprintln!("{at}");
            killed_at(&at, seq as u64 - u64::from(side == "before"), expected).await;
        })
        .await;
}

/// `durable` is how many entries the killed server has left.
async fn killed_at(at: &str, durable: u64, expected: &Journey) {
    let data = Scratch::new();
    let server = Server::start_with(data.path(), &[("EXUVIA_KILL_AT", at)])
        .await
        .unwrap();
    let mut client = server.client().await;
    // The answer is lost where the kill was faster; the same key finds the run again.
    let answer = client.submit(keyed(KEY, &task())).await.ok();
    server.dies().await;
    let seen = sandboxes(data.path());

    let server = Server::start(data.path()).await;
    let is_unfinished = (1..expected.events.len() as u64).contains(&durable);
    assert_eq!(
        server.hello["resumed"].as_array().unwrap().len(),
        usize::from(is_unfinished),
        "{at}: E16"
    );
    let journey = travel(&mut server.client().await).await;
    if let Some(answer) = answer {
        assert_eq!(
            journey.run,
            answer.into_inner().run_id,
            "{at}: B2, a resume keeps the run's id"
        );
    }
    assert_eq!(journey.result, expected.result, "{at}");
    let claims = if (2..expected.events.len() as u64).contains(&durable) {
        2
    } else {
        1
    };
    assert_eq!(journey.claims, claims, "{at}");
    server.terminate().await;
    nothing_is_left(data.path(), &seen);
}
