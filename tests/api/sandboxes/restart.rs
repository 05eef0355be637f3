//! Sandboxes outlive their server. (That they outlive one that is killed, with real ones: `tests/chaos`.)

use std::time::Duration;

use exuvia::api::proto::{self, SandboxState};
use exuvia::fleet::{Config, OnShutdown};
use exuvia::sandbox::backend::fake::Call;
use tonic::Code;

use crate::bed::{Bed, why};
use crate::support::hand::{create, get, kill, one, plain, run, span};

async fn bed(max_sandboxes: usize) -> Bed {
    let config = Config {
        max_sandboxes,
        on_shutdown: OnShutdown::Keep,
        ..Config::default()
    };
    Bed::with_fleet(config).await
}

#[tokio::test]
async fn t10_a_server_goes_on_with_the_sandboxes_of_the_one_before() {
    let bed = bed(2).await;
    let mut client = bed.sandboxes().await;
    let request = proto::CreateSandboxRequest {
        idempotency_key: "key".into(),
        env: [("NAME".to_owned(), "value".to_owned())].into(),
        labels: [("team".to_owned(), "red".to_owned())].into(),
        idle_timeout: span(Duration::from_secs(1000)),
        ..plain()
    };
    let made = create(&mut client, request.clone()).await;
    let paused = create(&mut client, plain()).await;
    run(&mut client, &made.sandbox_id, "echo kept > file").await;
    client.pause(one(&paused.sandbox_id)).await.unwrap();
    let renewal = proto::RenewRequest {
        sandbox_id: made.sandbox_id.clone(),
        ttl: span(Duration::from_secs(500)),
        by: String::new(),
    };
    let renewed = client.renew(renewal).await.unwrap().into_inner();

    let bed = bed.restarted().await;
    assert_eq!((bed.recovered.adopted.len(), bed.recovered.reaped.len()), (2, 0));
    let mut client = bed.sandboxes().await;
    assert_eq!(get(&mut client, &made.sandbox_id).await, renewed);
    assert_eq!(
        run(&mut client, &made.sandbox_id, "cat file; echo $NAME").await.stdout,
        b"kept\nvalue\n"
    );
    // The key still stands for it.
    assert_eq!(create(&mut client, request).await, renewed);
    assert_eq!(get(&mut client, &paused.sandbox_id).await.state(), SandboxState::Paused);
    let resumed = client.resume(one(&paused.sandbox_id)).await.unwrap().into_inner();
    assert_eq!(resumed.state(), SandboxState::Running);
    // They take their places.
    let refused = client.create(plain()).await.unwrap_err();
    assert_eq!(why(&refused), (Code::ResourceExhausted, "QUOTA".into()));
    // What the new server does not know of the directory, it reads.
    let snapshot = proto::SnapshotRequest {
        sandbox_id: made.sandbox_id.clone(),
        memory: false,
        by: String::new(),
    };
    client.snapshot(snapshot).await.unwrap();
    kill(&mut client, &made.sandbox_id).await;
    kill(&mut client, &paused.sandbox_id).await;
    bed.empties().await;
    let actions: Vec<_> = loop {
        let trail = bed.trail(&made.sandbox_id).await;
        let actions: Vec<_> = trail.into_iter().map(|record| record.action).collect();
        // The last record comes once the directory is gone too.
        match actions.iter().any(|action| action == "sandbox.destroyed") {
            true => break actions,
            false => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    };
    let life = [
        "sandbox.created",
        "sandbox.adopted",
        "sandbox.ended",
        "sandbox.destroyed",
    ];
    assert_eq!(
        actions
            .iter()
            .filter(|action| life.contains(&action.as_str()))
            .collect::<Vec<_>>(),
        life
    );
}

#[tokio::test]
async fn t10_what_cannot_be_taken_over_is_removed() {
    let bed = bed(10).await;
    let mut client = bed.sandboxes().await;
    let expired = proto::CreateSandboxRequest {
        ttl: span(Duration::from_secs(100)),
        ..plain()
    };
    let expired = create(&mut client, expired).await.sandbox_id;
    let crashed = create(&mut client, plain()).await.sandbox_id;
    let whole = create(&mut client, plain()).await.sandbox_id;
    bed.clock.advance(Duration::from_secs(99));
    let restarting = bed.stopped().await;
    restarting.fake.crash(&crashed.parse().unwrap());
    restarting.clock.advance(Duration::from_secs(1));
    let bed = restarting.started().await;
    let ids = |ids: &[exuvia::ids::SandboxId]| ids.iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(ids(&bed.recovered.adopted), std::slice::from_ref(&whole));
    let mut reaped = ids(&bed.recovered.reaped);
    reaped.sort();
    let mut gone = vec![expired, crashed];
    gone.sort();
    assert_eq!(reaped, gone);
    assert_eq!(ids(&bed.fake.living()), std::slice::from_ref(&whole));
    let names = |folder: &str| {
        let entries = std::fs::read_dir(bed.data.path().join(folder)).unwrap();
        entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect::<Vec<_>>()
    };
    assert_eq!(
        (names("work"), names("fleet")),
        (vec![whole.clone()], vec![format!("{whole}.json")])
    );
    assert!(bed.fake.calls().contains(&Call::Adopt));
}

#[tokio::test]
async fn a_server_that_is_told_so_takes_its_sandboxes_along() {
    let config = Config {
        on_shutdown: OnShutdown::End,
        ..Config::default()
    };
    let bed = Bed::with_fleet(config).await;
    let mut client = bed.sandboxes().await;
    let id = create(&mut client, plain()).await.sandbox_id;
    let running = crate::support::hand::start(&mut client, crate::support::hand::shell(&id, "sleep 100"))
        .await
        .unwrap();
    let (bed, came) = tokio::join!(bed.restarted(), running.finish());
    // Its last word, or that of a server that is going away.
    match came {
        Ok(came) => assert_eq!(came.cause(), proto::exec_ended::Cause::SandboxShutdown),
        Err(status) => assert_eq!(status.code(), Code::Unavailable, "{status:?}"),
    }
    assert_eq!(bed.recovered, Default::default());
    let mut client = bed.sandboxes().await;
    let request = proto::GetSandboxRequest { sandbox_id: id };
    assert_eq!(client.get(request).await.unwrap_err().code(), Code::NotFound);
}
