//! A server that is stopped, not killed (requirement E12): it sleeps through its lease, another goes on with its run, and when it
//! wakes up it can write nothing. Or it only sleeps, and nobody notices.

use std::time::Duration;

use exuvia::api::proto::RunState;
use exuvia::api::proto::event::Kind;
use exuvia::assembly::{self, Config};
use nix::sys::signal::{Signal, kill};

use crate::journey::{Journey, nothing_is_left, travel_as};
use crate::outages::slow;
use crate::project;
use crate::support::host::sandboxes;
use crate::support::server::{LONG, Server};
use crate::support::watch::{kind, until, until_end};
use crate::support::{Scratch, get, has_sandboxes, keyed, skip, transcript};
use crate::weather::sleeper;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e12_a_server_that_slept_through_its_lease_is_fenced_off() {
    const NAME: &str = "e12_a_server_that_slept_through_its_lease_is_fenced_off";
    if !has_sandboxes(NAME) {
        return;
    }
    let undisturbed = Scratch::new();
    let server = Server::start(undisturbed.path()).await;
    let expected = travel_as(&mut server.client().await, "slow", &slow().task()).await;
    server.terminate().await;

    let data = Scratch::new();
    let first = Server::start(data.path()).await;
    let mut client = first.client().await;
    let submitted = client.submit(keyed("slow", &slow().task())).await.unwrap();
    let run = submitted.into_inner().run_id;
    let begun = until(&mut client, &run, 0, |event| {
        matches!(kind(event), Kind::ToolStarted(_))
    })
    .await;
    // While it makes a sandbox it may hold what all servers of a host share; now it only waits for its command.
    let (sandbox, _) = sleeper(data.path()).await;
    kill(first.pid(), Signal::SIGSTOP).unwrap();

    // The second worker: the same data directory, and a short lease.
    let config = Config {
        lease: Duration::from_millis(400),
        ..Config::of(data.path(), 4)
    };
    let (second, parts) = assembly::open(&config).await.unwrap();
    assert_eq!(second.recover().await.unwrap(), [], "its owner lives");
    let id = run.parse().unwrap();
    let waited = tokio::time::Instant::now();
    loop {
        let view = second.view(&run).await.unwrap();
        if view.state.is_terminal() {
            break;
        }
        assert!(waited.elapsed() < LONG, "{:?}", view.state);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let record = parts.store.run(&id).await.unwrap();
    assert_eq!(
        record.fence, 3,
        "claimed by the first, taken over, claimed by the second"
    );

    kill(first.pid(), Signal::SIGCONT).unwrap();
    // It has its answer, which nobody wants any more; it lets go of the run and of its sandbox, and works for others.
    let events = until_end(&mut client, &run, 0).await;
    assert_eq!(events[..begun.len()], begun[..]);
    let now = client.get(get(&run)).await.unwrap().into_inner();
    let journey = Journey::of(now, events, transcript(&mut client, &run).await);
    assert_eq!(journey.result, expected.result);
    assert_eq!(journey.claims, 2);
    let finished = journey.events.iter().filter_map(|event| match kind(event) {
        Kind::ToolFinished(done) => Some(done.attempt),
        _ => None,
    });
    assert_eq!(finished.collect::<Vec<_>>(), [2], "the first attempt came to nothing");
    let other = travel_as(&mut client, "other", &slow().task()).await;
    assert_eq!(other.result.state, RunState::Finished);
    let after = parts.store.run(&id).await.unwrap();
    assert_eq!((after.seq, after.fence), (record.seq, record.fence), "it wrote nothing");
    assert_eq!(second.shut_down(LONG).await, Vec::<String>::new());
    drop((second, parts));
    first.terminate().await;
    nothing_is_left(data.path(), &[sandbox]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn x1_a_server_that_only_slept_goes_on_as_if_nothing_had_been() {
    const NAME: &str = "x1_a_server_that_only_slept_goes_on_as_if_nothing_had_been";
    if !has_sandboxes(NAME) {
        return;
    }
    if !project::has_compiler() {
        return skip(NAME, &"no cc or make in /usr/bin");
    }
    let data = Scratch::new();
    let server = Server::start(data.path()).await;
    let mut client = server.client().await;
    let expected = travel_as(&mut client, "undisturbed", &project::task()).await;
    let pid = server.pid();
    let task = project::task();
    let traveller = travel_as(&mut client, "slept", &task);
    let naps = async {
        for _ in 0..3 {
            tokio::time::sleep(Duration::from_millis(350)).await;
            kill(pid, Signal::SIGSTOP).unwrap();
            tokio::time::sleep(Duration::from_millis(700)).await;
            kill(pid, Signal::SIGCONT).unwrap();
        }
    };
    let (journey, ()) = tokio::join!(traveller, naps);
    assert_eq!(journey.result, expected.result);
    assert_eq!(journey.claims, 1);
    let seen = sandboxes(data.path());
    server.terminate().await;
    nothing_is_left(data.path(), &seen);
}
