//! Places: the quota, who waits, what gives one back; keys; lists; the pool.

use std::collections::BTreeSet;
use std::time::Duration;

use exuvia::api::proto::{self, SandboxState};
use exuvia::fleet::Config;
use exuvia::sandbox::backend::fake::Call;
use futures::future::join_all;
use tonic::{Code, Status};
use tonic_types::StatusExt;

use crate::bed::{Bed, why};
use crate::support::Sandboxes;
use crate::support::hand::{create, eventually, kill, plain, run, span};

async fn with_places(max_sandboxes: usize) -> Bed {
    let config = Config {
        max_sandboxes,
        on_shutdown: exuvia::fleet::OnShutdown::End,
        ..Config::default()
    };
    Bed::with_fleet(config).await
}

async fn storm(client: &Sandboxes, request: &proto::CreateSandboxRequest) -> Vec<Result<proto::Sandbox, Status>> {
    let one =
        |mut client: Sandboxes| async move { client.create(request.clone()).await.map(tonic::Response::into_inner) };
    join_all((0..200).map(|_| one(client.clone()))).await
}

async fn running(client: &mut Sandboxes) -> Vec<proto::Sandbox> {
    let request = proto::ListSandboxesRequest {
        page_size: 500,
        states: vec![SandboxState::Running.into()],
        ..Default::default()
    };
    client.list(request).await.unwrap().into_inner().sandboxes
}

#[tokio::test]
async fn t23_of_a_storm_of_200_fifty_run_and_the_rest_is_told_when_to_come_again() {
    let bed = with_places(50).await;
    let mut client = bed.sandboxes().await;
    let fates = storm(&client, &plain()).await;
    let made: BTreeSet<_> = fates.iter().flatten().map(|made| made.sandbox_id.clone()).collect();
    assert_eq!((made.len(), bed.fake.living().len()), (50, 50));
    for refused in fates.iter().filter_map(|fate| fate.as_ref().err()) {
        assert_eq!(why(refused), (Code::ResourceExhausted, "QUOTA".into()));
        assert!(refused.get_details_retry_info().unwrap().retry_delay.is_some());
    }
    assert_eq!(running(&mut client).await.len(), 50);
    // Every place comes back.
    for id in &made {
        kill(&mut client, id).await;
    }
    let again = storm(&client, &plain()).await;
    assert_eq!(again.iter().flatten().count(), 50);
}

#[tokio::test]
async fn t23_those_who_wait_get_the_places_that_come_free() {
    let bed = with_places(50).await;
    let mut client = bed.sandboxes().await;
    let patient = proto::CreateSandboxRequest {
        queue_timeout: span(Duration::from_secs(60)),
        ..plain()
    };
    let storm = storm(&client, &patient);
    let mut other = bed.sandboxes().await;
    let turnover = async {
        let mut killed = 0;
        while killed < 150 {
            let running = running(&mut other).await;
            assert!(running.len() <= 50 && bed.fake.living().len() <= 50 + 64);
            for sandbox in running {
                kill(&mut other, &sandbox.sandbox_id).await;
                killed += 1;
                if killed == 150 {
                    break;
                }
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let (fates, ()) = tokio::join!(storm, turnover);
    let made: BTreeSet<_> = fates.into_iter().map(|fate| fate.unwrap().sandbox_id).collect();
    assert_eq!(made.len(), 200);
    assert_eq!(running(&mut client).await.len(), 50);
}

#[tokio::test]
async fn what_fails_or_is_given_up_gives_its_place_back() {
    let bed = with_places(1).await;
    let mut client = bed.sandboxes().await;
    for call in [Call::Create, Call::Start] {
        bed.fake.fail_next(call, "broken");
        let refused = client.create(plain()).await.unwrap_err();
        assert_eq!(why(&refused), (Code::Unavailable, "BACKEND".into()), "{call:?}");
    }
    // A client that goes away while it is being made.
    bed.fake.stall_next(Call::Create, Duration::from_millis(300));
    let given_up = tokio::time::timeout(Duration::from_millis(100), client.create(plain())).await;
    assert!(given_up.is_err());
    let patient = proto::CreateSandboxRequest {
        queue_timeout: span(Duration::from_secs(60)),
        ..plain()
    };
    let made = create(&mut client, patient.clone()).await;
    eventually("one is left", async || bed.fake.living().len() == 1).await;
    // One that goes away while it waits.
    let given_up = tokio::time::timeout(Duration::from_millis(50), client.create(patient)).await;
    assert!(given_up.is_err());
    kill(&mut client, &made.sandbox_id).await;
    create(&mut client, plain()).await;
    let work = std::fs::read_dir(bed.data.path().join("work")).unwrap();
    eventually("one directory is left", async || {
        std::fs::read_dir(bed.data.path().join("work")).unwrap().count() == 1
    })
    .await;
    drop(work);
}

#[tokio::test]
async fn a_key_stands_for_one_sandbox() {
    let bed = with_places(10).await;
    let mut client = bed.sandboxes().await;
    let keyed = |label: &str| proto::CreateSandboxRequest {
        idempotency_key: "key".into(),
        labels: [("of".to_owned(), label.to_owned())].into(),
        ..plain()
    };
    bed.fake.stall_next(Call::Create, Duration::from_millis(100));
    // The first gives up; it is made all the same, and the others find it.
    let given_up = tokio::time::timeout(Duration::from_millis(30), client.create(keyed("a"))).await;
    assert!(given_up.is_err());
    let (mut a, mut b) = (client.clone(), client.clone());
    let (a, b) = tokio::join!(create(&mut a, keyed("a")), create(&mut b, keyed("a")));
    assert_eq!(a, b);
    assert_eq!(bed.fake.living().len(), 1);
    let refused = client.create(keyed("b")).await.unwrap_err();
    assert_eq!(why(&refused), (Code::AlreadyExists, "KEY_REUSED".into()));
    // One that could not be made leaves its key free.
    bed.fake.fail_next(Call::Create, "broken");
    let other = proto::CreateSandboxRequest {
        idempotency_key: "other".into(),
        ..plain()
    };
    client.create(other.clone()).await.unwrap_err();
    assert_ne!(create(&mut client, other).await.sandbox_id, a.sandbox_id);
}

#[tokio::test]
async fn lists_are_paged_newest_first_and_fit_their_labels() {
    let bed = with_places(10).await;
    let mut client = bed.sandboxes().await;
    let mut made = Vec::new();
    for n in 0..5 {
        let request = proto::CreateSandboxRequest {
            labels: [("odd".to_owned(), (n % 2).to_string())].into(),
            ..plain()
        };
        made.insert(0, create(&mut client, request).await.sandbox_id);
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    kill(&mut client, &made[4]).await;
    let (mut pages, mut page_token) = (Vec::new(), String::new());
    loop {
        let request = proto::ListSandboxesRequest {
            page_size: 3,
            page_token,
            ..Default::default()
        };
        let page = client.list(request).await.unwrap().into_inner();
        pages.push(
            page.sandboxes
                .into_iter()
                .map(|sandbox| sandbox.sandbox_id)
                .collect::<Vec<_>>(),
        );
        page_token = page.next_page_token;
        if page_token.is_empty() {
            break;
        }
    }
    assert_eq!(pages, [made[..3].to_vec(), made[3..4].to_vec()]);
    let request = proto::ListSandboxesRequest {
        states: vec![SandboxState::Ended.into(), SandboxState::Running.into()],
        labels: [("odd".to_owned(), "0".to_owned())].into(),
        ..Default::default()
    };
    let even = client.list(request).await.unwrap().into_inner().sandboxes;
    let even: Vec<_> = even.into_iter().map(|sandbox| sandbox.sandbox_id).collect();
    assert_eq!(even, [made[0].clone(), made[2].clone(), made[4].clone()]);
}

#[tokio::test]
async fn a_sandbox_from_the_pool_is_as_good_as_a_fresh_one() {
    let config = Config {
        stocks: vec!["default=1..1".parse().unwrap()],
        on_shutdown: exuvia::fleet::OnShutdown::End,
        ..Config::default()
    };
    let bed = Bed::with_fleet(config).await;
    let mut client = bed.sandboxes().await;
    eventually("one is parked", async || bed.fleet.parked() == [1]).await;
    let id = create(&mut client, plain()).await.sandbox_id;
    run(&mut client, &id, "echo kept > file").await;
    let snapshot = proto::SnapshotRequest {
        sandbox_id: id,
        memory: false,
        by: String::new(),
    };
    let taken = client.snapshot(snapshot).await.unwrap().into_inner();
    eventually("another is parked", async || bed.fleet.parked() == [1]).await;
    let request = proto::CreateSandboxRequest {
        workspace: Some(proto::create_sandbox_request::Workspace::Tree(taken.tree)),
        env: [("NAME".to_owned(), "value".to_owned())].into(),
        ..plain()
    };
    let made = create(&mut client, request).await;
    assert!(made.from_pool);
    assert_eq!(
        run(&mut client, &made.sandbox_id, "cat file; echo $NAME").await.stdout,
        b"kept\nvalue\n"
    );
    let bed = bed.restarted().await;
    eventually("the new server fills its own pool", async || bed.fleet.parked() == [1]).await;
}
