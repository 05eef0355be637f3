//! The life of a sandbox: created, reached, frozen, stopped, destroyed.

use std::os::unix::fs::{MetadataExt, chown};
use std::path::Path;
use std::time::Duration;

use exuvia::sandbox::identity::FIRST_BASE;
use exuvia::sandbox::{Backend, Command, Error, Identity, Owned};

use crate::support::{Bench, groups, no_zombies_stay, sh};

#[tokio::test]
async fn a_sandbox_is_created_reached_and_leaves_no_trace() {
    let Some(bench) = Bench::new("a_sandbox_is_created_reached_and_leaves_no_trace") else {
        return;
    };
    for _ in 0..5 {
        let spec = bench.spec();
        let handle = bench.up(&spec).await;
        let init = bench.init(&spec.id);
        drop(bench.backend.connect(&handle).await.unwrap());
        assert!(!groups(spec.id.as_str()).is_empty());
        bench.backend.destroy(&spec.id).await.unwrap();
        assert_eq!(bench.traces(&spec.id), Vec::<String>::new());
        assert!(!Path::new(&format!("/proc/{init}/root/")).exists());
        // Gone already is fine.
        bench.backend.destroy(&spec.id).await.unwrap();
        assert!(matches!(bench.backend.connect(&handle).await, Err(Error::NotFound(_))));
        assert!(matches!(bench.backend.usage(&handle).await, Err(Error::NotFound(_))));
    }
    no_zombies_stay();
}

#[tokio::test]
async fn a_guest_is_alone_when_none_of_its_programs_runs() {
    let Some(bench) = Bench::new("a_guest_is_alone_when_none_of_its_programs_runs") else {
        return;
    };
    let sandbox = bench.open(bench.spec()).await;
    sh(&sandbox, "true").await;
    assert!(sandbox.is_alone().await, "agents that wait are the guest's");
    let mut exec = sandbox.exec(Command::shell("echo here; sleep 60")).await.unwrap();
    assert!(exec.output.recv().await.is_some());
    assert!(!sandbox.is_alone().await);
    drop(exec);
    sandbox.close(Duration::ZERO).await.unwrap();
}

#[tokio::test]
async fn create_is_idempotent_by_id() {
    let Some(bench) = Bench::new("create_is_idempotent_by_id") else {
        return;
    };
    let spec = bench.spec();
    let first = bench.backend.create(&spec).await.unwrap();
    let init = bench.init(&spec.id);
    assert_eq!(bench.backend.create(&spec).await.unwrap(), first);
    assert_eq!(bench.init(&spec.id), init);
    // Another's ids under the same name are not the same sandbox.
    let other = exuvia::sandbox::Spec {
        identity: Identity { base: FIRST_BASE * 2 },
        ..spec.clone()
    };
    assert!(bench.backend.create(&other).await.is_err());
    bench.backend.destroy(&spec.id).await.unwrap();
}

#[tokio::test]
async fn live_sandboxes_share_no_ids() {
    let Some(bench) = Bench::new("live_sandboxes_share_no_ids") else {
        return;
    };
    let (first, second) = (bench.spec(), bench.spec());
    assert_ne!(first.identity, second.identity);
    bench.up(&first).await;
    bench.up(&second).await;
    let owned = bench.backend.list_owned().await.unwrap();
    let mut wanted = [&first, &second].map(|spec| Owned {
        id: spec.id.clone(),
        owner_alive: true,
        identity: spec.identity,
    });
    wanted.sort_by(|a, b| a.id.cmp(&b.id));
    assert_eq!(owned, wanted);
    bench.backend.destroy(&first.id).await.unwrap();
    bench.backend.destroy(&second.id).await.unwrap();
}

#[tokio::test]
async fn programs_work_in_the_workspace_as_its_owner() {
    let Some(bench) = Bench::new("programs_work_in_the_workspace_as_its_owner") else {
        return;
    };
    let workspace = tempfile::tempdir().unwrap();
    let mut spec = bench.spec();
    let uid = spec.identity.host_uid();
    chown(workspace.path(), Some(uid), Some(uid)).unwrap();
    spec.workspace = Some(workspace.path().to_owned());
    let sandbox = bench.open(spec).await;
    assert_eq!(
        sh(&sandbox, "pwd; id -un; umask; echo hello >made; stat -c %U:%u made").await,
        "/workspace\nsandbox\n0022\nsandbox:1000\n"
    );
    let made = std::fs::metadata(workspace.path().join("made")).unwrap();
    assert_eq!((made.uid(), made.gid(), made.len()), (uid, uid, 6));
    sandbox.close(Duration::ZERO).await.unwrap();
    assert!(workspace.path().join("made").exists());
}

#[tokio::test]
async fn a_frozen_sandbox_stands_still_and_dies_all_the_same() {
    let Some(bench) = Bench::new("a_frozen_sandbox_stands_still_and_dies_all_the_same") else {
        return;
    };
    let sandbox = bench.open(bench.spec()).await;
    let id = sandbox.id().clone();
    let counting = sandbox
        .exec(exuvia::sandbox::Command::shell("i=0; while :; do i=$((i+1)); done"))
        .await
        .unwrap();
    sandbox.freeze().await.unwrap();
    let before = sandbox.usage().await.unwrap().cpu_us;
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(sandbox.usage().await.unwrap().cpu_us, before);
    sandbox.thaw().await.unwrap();
    while sandbox.usage().await.unwrap().cpu_us == before {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    sandbox.freeze().await.unwrap();
    bench.backend.destroy(&id).await.unwrap();
    assert_eq!(bench.traces(&id), Vec::<String>::new());
    drop(counting);
}

#[tokio::test]
async fn stop_ends_everything_and_leaves_the_record() {
    let Some(bench) = Bench::new("stop_ends_everything_and_leaves_the_record") else {
        return;
    };
    for grace in [Duration::ZERO, Duration::from_secs(5)] {
        let sandbox = bench.open(bench.spec()).await;
        let id = sandbox.id().clone();
        let _running = sandbox
            .exec(exuvia::sandbox::Command::shell("sleep 1000"))
            .await
            .unwrap();
        bench.backend.stop(sandbox.handle(), grace).await.unwrap();
        let left = groups(id.as_str())
            .into_iter()
            .map(|group| std::fs::read_to_string(group.join("cgroup.procs")).unwrap());
        assert_eq!(left.collect::<String>(), "");
        assert!(
            bench.backend.start(sandbox.handle()).await.is_err(),
            "its first process has ended"
        );
        assert_eq!(bench.backend.list_owned().await.unwrap().len(), 1);
        bench.backend.destroy(&id).await.unwrap();
        assert_eq!(bench.traces(&id), Vec::<String>::new());
    }
}
