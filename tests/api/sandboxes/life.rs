//! Pause and resume, counters, what a client may not ask for.

use exuvia::api::proto::{self, SandboxState, exec_ended::Cause};
use exuvia::sandbox::backend::fake::Call;
use futures::StreamExt;
use tonic::Code;

use crate::bed::{Bed, why};
use crate::support::hand::{create, get, one, plain, shell, start};

#[tokio::test]
async fn t13_pause_and_resume_twenty_times_lose_no_byte() {
    let bed = Bed::new().await;
    let mut client = bed.sandboxes().await;
    let id = create(&mut client, plain()).await.sandbox_id;
    let script: String = (0..300)
        .map(|n| format!("echo {n}; echo {n} >> all; sleep 0.002; "))
        .collect();
    let whole: String = (0..300).map(|n| format!("{n}\n")).collect();
    let running = start(&mut client, shell(&id, &script)).await.unwrap();
    let mut other = bed.sandboxes().await;
    let cycles = async {
        for _ in 0..20 {
            let paused = other.pause(one(&id)).await.unwrap().into_inner();
            assert_eq!(paused.state(), SandboxState::Paused);
            let refused = start(&mut other, shell(&id, "true")).await.err().unwrap();
            assert_eq!(why(&refused), (Code::FailedPrecondition, "SANDBOX_PAUSED".into()));
            let resumed = other.resume(one(&id)).await.unwrap().into_inner();
            assert_eq!(resumed.state(), SandboxState::Running);
        }
    };
    let (came, ()) = tokio::join!(running.finish(), cycles);
    let came = came.unwrap();
    assert_eq!(
        (String::from_utf8(came.stdout).unwrap(), came.ended.cause()),
        (whole.clone(), Cause::Exited)
    );
    assert_eq!(
        crate::support::hand::run(&mut client, &id, "cat all").await.stdout,
        whole.as_bytes()
    );
    let calls = bed.fake.calls();
    let count = |wanted| calls.iter().filter(|call| **call == wanted).count();
    assert_eq!((count(Call::Freeze), count(Call::Thaw)), (20, 20));
}

#[tokio::test]
async fn t14_two_resumes_at_once_thaw_once() {
    let bed = Bed::new().await;
    let mut client = bed.sandboxes().await;
    let id = create(&mut client, plain()).await.sandbox_id;
    client.pause(one(&id)).await.unwrap();
    let (mut a, mut b) = (client.clone(), client.clone());
    let (a, b) = tokio::join!(a.resume(one(&id)), b.resume(one(&id)));
    assert_eq!(a.unwrap().into_inner(), b.unwrap().into_inner());
    let thaws = bed.fake.calls().into_iter().filter(|call| *call == Call::Thaw).count();
    assert_eq!(thaws, 1);
}

#[tokio::test]
async fn a_sandbox_that_does_not_freeze_goes_on() {
    let bed = Bed::new().await;
    let mut client = bed.sandboxes().await;
    let id = create(&mut client, plain()).await.sandbox_id;
    bed.fake.fail_next(Call::Freeze, "it will not");
    let refused = client.pause(one(&id)).await.unwrap_err();
    assert_eq!(why(&refused), (Code::Unavailable, "BACKEND".into()));
    assert_eq!(get(&mut client, &id).await.state(), SandboxState::Running);
    assert_eq!(
        crate::support::hand::run(&mut client, &id, "echo on").await.stdout,
        b"on\n"
    );
}

#[tokio::test]
async fn a_sandbox_that_stands_still_after_its_snapshot_is_shown_paused_and_can_be_resumed() {
    let bed = Bed::new().await;
    let mut client = bed.sandboxes().await;
    let id = create(&mut client, plain()).await.sandbox_id;
    bed.fake.fail_next(Call::Thaw, "it will not");
    let snapshot = proto::SnapshotRequest {
        sandbox_id: id.clone(),
        memory: false,
        by: "tester".into(),
    };
    let refused = client.snapshot(snapshot.clone()).await.unwrap_err();
    assert_eq!(why(&refused), (Code::Unavailable, "BACKEND".into()));
    assert_eq!(get(&mut client, &id).await.state(), SandboxState::Paused);
    client.resume(one(&id)).await.unwrap();
    assert_eq!(
        crate::support::hand::run(&mut client, &id, "echo on").await.stdout,
        b"on\n"
    );
    client.snapshot(snapshot).await.unwrap();
    assert_eq!(get(&mut client, &id).await.state(), SandboxState::Running);
}

#[tokio::test]
async fn counters_are_told_beside_their_limits() {
    let bed = Bed::new().await;
    let mut client = bed.sandboxes().await;
    let id = create(&mut client, plain()).await.sandbox_id;
    let usage = exuvia::sandbox::Usage {
        memory_bytes: 5,
        memory_peak_bytes: 9,
        oom_kills: 1,
        pids: 3,
        pids_refused: 2,
        cpu_us: 77,
    };
    bed.fake.set_usage(&id.parse().unwrap(), usage);
    let request = proto::StatsRequest {
        sandbox_id: id,
        interval: None,
        once: true,
    };
    let told: Vec<_> = client.stats(request).await.unwrap().into_inner().collect().await;
    let told = told[0].as_ref().unwrap();
    assert_eq!((told.memory_bytes, told.memory_peak_bytes, told.pids), (5, 9, 3));
    assert_eq!((told.oom_kills, told.forks_refused, told.cpu_us), (1, 2, 77));
    assert!(told.memory_limit_bytes > 0 && told.pids_limit > 0 && told.cpus_limit > 0.0);
}

#[tokio::test]
async fn what_a_client_may_not_name_is_refused_before_anything_is_made() {
    let bed = Bed::new().await;
    let mut client = bed.sandboxes().await;
    let refused = [
        proto::CreateSandboxRequest {
            policy: "/etc/shadow".into(),
            ..plain()
        },
        proto::CreateSandboxRequest {
            image: "rootfs:/".into(),
            ..plain()
        },
        proto::CreateSandboxRequest {
            image: "/".into(),
            ..plain()
        },
        proto::CreateSandboxRequest {
            backend: "none".into(),
            ..plain()
        },
        proto::CreateSandboxRequest {
            env: [("A=B".to_owned(), String::new())].into(),
            ..plain()
        },
        proto::CreateSandboxRequest {
            env: [("A".to_owned(), "b\0c".to_owned())].into(),
            ..plain()
        },
        proto::CreateSandboxRequest {
            env: [("A".to_owned(), "b".repeat(128 << 10))].into(),
            ..plain()
        },
        proto::CreateSandboxRequest {
            env: (0..100)
                .map(|number| (format!("A{number}"), "b".repeat(100 << 10)))
                .collect(),
            ..plain()
        },
        proto::CreateSandboxRequest {
            labels: (0..5000).map(|number| (number.to_string(), String::new())).collect(),
            ..plain()
        },
        proto::CreateSandboxRequest {
            labels: [("a".to_owned(), "b".repeat(1 << 20))].into(),
            ..plain()
        },
        proto::CreateSandboxRequest {
            times: "of no tree".into(),
            ..plain()
        },
        proto::CreateSandboxRequest {
            ttl: crate::support::hand::span(std::time::Duration::from_secs(1 << 40)),
            ..plain()
        },
        // Longer than the type is for.
        proto::CreateSandboxRequest {
            idle_timeout: crate::support::hand::span(std::time::Duration::from_secs(1 << 50)),
            ..plain()
        },
        proto::CreateSandboxRequest {
            by: "x".repeat(257),
            ..plain()
        },
        proto::CreateSandboxRequest {
            labels: [("key".to_owned(), "x".repeat(513))].into(),
            ..plain()
        },
    ];
    for request in refused {
        let status = client.create(request.clone()).await.unwrap_err();
        assert_eq!(why(&status), (Code::InvalidArgument, "INVALID".into()), "{request:?}");
    }
    let unknown = proto::CreateSandboxRequest {
        policy: "nobody-knows-it".into(),
        ..plain()
    };
    assert_eq!(client.create(unknown).await.unwrap_err().code(), Code::NotFound);
    for id in ["sbx_x", "", "../../etc", "sbx_aaaaaaaaaaaaaaaaaaaaaaaaaa"] {
        let request = proto::GetSandboxRequest { sandbox_id: id.into() };
        let status = client.get(request).await.unwrap_err();
        assert_eq!(why(&status), (Code::NotFound, "SANDBOX_NOT_FOUND".into()), "{id}");
    }
    assert_eq!(bed.fake.calls(), []);
}

#[tokio::test]
async fn a_command_gets_no_more_grace_and_no_longer_name_than_can_be_kept_of_it() {
    let bed = Bed::new().await;
    let mut client = bed.sandboxes().await;
    let id = create(&mut client, plain()).await.sandbox_id;
    let asked = |seconds| proto::ExecStart {
        grace: crate::support::hand::span(std::time::Duration::from_secs(seconds)),
        ..shell(&id, "true")
    };
    let refused = start(&mut client, asked(61)).await.err().unwrap();
    assert_eq!(why(&refused), (Code::InvalidArgument, "INVALID".into()));
    start(&mut client, asked(60)).await.unwrap();
    // Who asks is told to the guest, which has no room for more.
    let asked = proto::ExecStart {
        by: "x".repeat(257),
        ..shell(&id, "true")
    };
    let refused = start(&mut client, asked).await.err().unwrap();
    assert_eq!(why(&refused), (Code::InvalidArgument, "INVALID".into()));
}
