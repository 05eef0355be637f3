//! Snapshots with memory, and sandboxes that go on from them: real ones, under gVisor.

use exuvia::api::proto::create_sandbox_request::Workspace;
use exuvia::api::proto::{self, exec_ended::Cause, exec_event};
use exuvia::sandbox::backend::fake::Call;
use exuvia::sandbox::backend::gvisor::Runsc;
use tonic::Code;

use crate::bed::{Bed, why};
use crate::support::hand::{attach, create, get, kill, one, plain, run, shell, start};
use crate::support::server::Server;
use crate::support::{Sandboxes, has_sandboxes, skip};

/// Counts in memory alone, a line for each step.
const COUNTER: &str = "n=0; while :; do n=$((n + 1)); echo $n; sleep 0.05; done";

fn has_gvisor(test: &str) -> bool {
    match Runsc::find().and_then(|runsc| runsc.version()) {
        Ok(_) => has_sandboxes(test),
        Err(reason) => {
            skip(test, &reason);
            false
        }
    }
}

fn behind_gvisor() -> proto::CreateSandboxRequest {
    proto::CreateSandboxRequest {
        policy: "gvisor".into(),
        ..plain()
    }
}

fn of_memory(id: &str) -> proto::SnapshotRequest {
    proto::SnapshotRequest {
        sandbox_id: id.into(),
        memory: true,
        by: "tester".into(),
    }
}

fn from(snapshot: &str) -> proto::CreateSandboxRequest {
    proto::CreateSandboxRequest {
        workspace: Some(Workspace::Snapshot(snapshot.into())),
        ..plain()
    }
}

/// The newest number that a counter has shown, once it is above `least`.
async fn count(client: &mut Sandboxes, sandbox: &str, exec: &str, least: u64) -> u64 {
    let mut running = attach(client, sandbox, exec, (0, 0)).await.unwrap();
    let (mut came, mut newest) = (Vec::new(), 0);
    while newest <= least {
        match running.next().await {
            Some(Ok(exec_event::Kind::Stdout(output))) => came.extend(output.data),
            other => panic!("{other:?} after {:?}", String::from_utf8_lossy(&came)),
        }
        let text = String::from_utf8(came.clone()).unwrap();
        let mut numbers = text.lines().map(|line| line.parse::<u64>().unwrap_or(0));
        assert!(
            numbers
                .clone()
                .zip(1..)
                .all(|(found, wanted)| found == wanted || found == 0),
            "{text}"
        );
        newest = numbers.next_back().unwrap_or(0);
    }
    newest
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_goes_on_in_the_original_and_in_two_forks() {
    if !has_gvisor("a_process_goes_on_in_the_original_and_in_two_forks") {
        return;
    }
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path()).await;
    let mut client = server.sandboxes().await;
    let request = proto::CreateSandboxRequest {
        env: [("NAME".to_owned(), "value".to_owned())].into(),
        ..behind_gvisor()
    };
    let original = create(&mut client, request).await;
    assert!(
        !original.lacks.iter().any(|lack| lack == "memory_snapshot"),
        "{original:?}"
    );
    let original = original.sandbox_id;
    let kept = proto::ExecStart {
        on_disconnect: proto::OnDisconnect::Keep.into(),
        ..shell(&original, COUNTER)
    };
    let counter = start(&mut client, kept).await.unwrap().exec_id;
    // Writes the same number to memory and to a file, so that the two must agree.
    let twin = "exec 3>>log; n=0; while :; do n=$((n + 1)); echo $n >&3; echo $n > /tmp/n; done";
    let twin = proto::ExecStart {
        on_disconnect: proto::OnDisconnect::Keep.into(),
        ..shell(&original, twin)
    };
    start(&mut client, twin).await.unwrap();
    let before = count(&mut client, &original, &counter, 5).await;

    let taken = client.snapshot(of_memory(&original)).await.unwrap().into_inner();
    assert!(
        taken.snapshot.starts_with("snap_") && !taken.tree.is_empty(),
        "{taken:?}"
    );
    let after = count(&mut client, &original, &counter, before).await;
    count(&mut client, &original, &counter, after + 3).await;

    for _ in 0..2 {
        let fork = create(&mut client, from(&taken.snapshot)).await;
        assert_eq!((fork.policy.as_str(), fork.isolation.as_str()), ("gvisor", "gvisor"));
        let fork = fork.sandbox_id;
        count(&mut client, &fork, &counter, after + 3).await;
        // Not one line is lost, and none is there twice: memory and files are of one moment.
        let came = run(
            &mut client,
            &fork,
            "tail -n +1 log | awk '$1 != NR { print \"gap at\", NR; exit }'; echo $NAME",
        )
        .await;
        assert_eq!(String::from_utf8(came.stdout).unwrap(), "value\n");
        // It goes its own way.
        run(&mut client, &fork, "echo mine > own; touch /tmp/own").await;
        let there = run(&mut client, &original, "ls own /tmp/own").await;
        assert_ne!(there.ended.exit_code, Some(0));
        kill(&mut client, &fork).await;
    }
    // From one that was itself made so, and by a server that has not taken it.
    let second = client.snapshot(of_memory(&original)).await.unwrap().into_inner();
    server.kill().await;
    let server = Server::start(data.path()).await;
    let mut client = server.sandboxes().await;
    let listed = client
        .list_snapshots(proto::ListSnapshotsRequest {})
        .await
        .unwrap()
        .into_inner();
    let ids: Vec<_> = listed
        .snapshots
        .iter()
        .map(|snapshot| snapshot.snapshot.as_str())
        .collect();
    assert_eq!(ids, [second.snapshot.as_str(), taken.snapshot.as_str()]);
    assert!(
        listed
            .snapshots
            .iter()
            .all(|snapshot| snapshot.bytes > 1 << 20 && snapshot.sandbox_id == original)
    );
    let fork = create(&mut client, from(&second.snapshot)).await.sandbox_id;
    let grown = count(&mut client, &fork, &counter, after).await;
    let again = client.snapshot(of_memory(&fork)).await.unwrap().into_inner();
    kill(&mut client, &fork).await;
    kill(&mut client, &original).await;
    let fork = create(&mut client, from(&again.snapshot)).await.sandbox_id;
    count(&mut client, &fork, &counter, grown).await;
    let signal = proto::SignalRequest {
        sandbox_id: fork.clone(),
        exec_id: counter.clone(),
        signal: libc::SIGKILL,
        ..Default::default()
    };
    client.signal(signal).await.unwrap();
    let ended = attach(&mut client, &fork, &counter, (0, 0))
        .await
        .unwrap()
        .finish()
        .await
        .unwrap();
    assert_eq!(ended.cause(), Cause::Signalled);
    kill(&mut client, &fork).await;

    for snapshot in [&taken.snapshot, &second.snapshot, &again.snapshot] {
        let request = proto::DeleteSnapshotRequest {
            snapshot: snapshot.clone(),
            by: "tester".into(),
        };
        client.delete_snapshot(request.clone()).await.unwrap();
        let gone = client.delete_snapshot(request).await.unwrap_err();
        assert_eq!(why(&gone), (Code::NotFound, "SNAPSHOT_NOT_FOUND".into()));
    }
    let gone = client.create(from(&taken.snapshot)).await.unwrap_err();
    assert_eq!(why(&gone), (Code::NotFound, "SNAPSHOT_NOT_FOUND".into()));
    assert_eq!(
        crate::support::host::names(data.path(), "snapshots"),
        Vec::<String>::new()
    );
    server.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_with_memory_is_refused_by_name_where_it_cannot_be() {
    if !has_gvisor("a_snapshot_with_memory_is_refused_by_name_where_it_cannot_be") {
        return;
    }
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path()).await;
    let mut client = server.sandboxes().await;
    // Another kernel, but none of its own.
    let container = create(&mut client, plain()).await;
    assert!(
        container.lacks.iter().any(|lack| lack == "memory_snapshot"),
        "{container:?}"
    );
    let refused = client.snapshot(of_memory(&container.sandbox_id)).await.unwrap_err();
    assert_eq!(
        why(&refused),
        (Code::FailedPrecondition, "MEMORY_SNAPSHOT_UNAVAILABLE".into())
    );
    assert!(refused.message().contains("`oci` backend"), "{}", refused.message());

    let sandbox = create(&mut client, behind_gvisor()).await.sandbox_id;
    client.pause(one(&sandbox)).await.unwrap();
    let refused = client.snapshot(of_memory(&sandbox)).await.unwrap_err();
    assert_eq!(why(&refused), (Code::FailedPrecondition, "SANDBOX_PAUSED".into()));
    client.resume(one(&sandbox)).await.unwrap();
    let taken = client.snapshot(of_memory(&sandbox)).await.unwrap().into_inner();
    // What ran under one policy does not go on under another.
    let other = proto::CreateSandboxRequest {
        policy: "default".into(),
        ..from(&taken.snapshot)
    };
    let refused = client.create(other).await.unwrap_err();
    assert_eq!(why(&refused), (Code::FailedPrecondition, "SNAPSHOT_UNFIT".into()));
    assert!(refused.message().contains("isolation, limits"), "{}", refused.message());
    assert_eq!(get(&mut client, &sandbox).await.state(), proto::SandboxState::Running);
    for sandbox in [&container.sandbox_id, &sandbox] {
        kill(&mut client, sandbox).await;
    }
    server.terminate().await;
}

#[tokio::test]
async fn what_is_no_snapshot_is_told() {
    let bed = Bed::new().await;
    let mut client = bed.sandboxes().await;
    let refused = client.create(from("sbx_x")).await.unwrap_err();
    assert_eq!(why(&refused), (Code::InvalidArgument, "INVALID".into()));
    let unknown = client
        .create(from("snap_aaaaaaaaaaaaaaaaaaaaaaaaaa"))
        .await
        .unwrap_err();
    assert_eq!(why(&unknown), (Code::NotFound, "SNAPSHOT_NOT_FOUND".into()));
    let made = create(&mut client, plain()).await.sandbox_id;
    let refused = client.snapshot(of_memory(&made)).await.unwrap_err();
    assert_eq!(
        why(&refused),
        (Code::FailedPrecondition, "MEMORY_SNAPSHOT_UNAVAILABLE".into())
    );
    assert_eq!(bed.fake.calls(), [Call::Create, Call::Start, Call::Connect]);
}
