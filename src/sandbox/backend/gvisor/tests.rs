//! What every backend promises, under gVisor and the real system-call filter.

use std::path::Path;
use std::sync::Arc;

use std::time::Duration;

use tempfile::TempDir;

use super::Runsc;
use crate::sandbox::backend::oci::Oci;
use crate::sandbox::backend::suite::{self, Subject};
use crate::sandbox::exec::Cause;
use crate::sandbox::{Command, Error, ImageRef, Isolation, Sandbox, Spec, seccomp};

async fn setup() -> Result<Subject, String> {
    Runsc::find()?.version()?;
    // One for all cases, and for all runs: it holds nothing but the guest when they are over.
    let data = Path::new(concat!(env!("OUT_DIR"), "/gvisor-suite"));
    let oci = Oci::new(data).map_err(|error| error.to_string())?;
    Ok(Subject {
        backend: Arc::new(oci),
        image: ImageRef::Host,
        isolation: Isolation::Gvisor,
        filter: seccomp::default_filter().map_err(|error| error.to_string())?,
    })
}

suite::backend_suite!(portable, setup);
suite::backend_suite!(real, setup);
suite::backend_suite!(limits, setup);
suite::backend_suite!(walls, setup);

/// `setup`, or the word that this cannot run here.
async fn ready(name: &str) -> Option<Subject> {
    match setup().await {
        Ok(subject) => Some(subject),
        Err(reason) => {
            crate::skip::skipped(name, reason);
            None
        }
    }
}

/// Counts in memory, a number for each step, and shows the newest.
const COUNTER: &str = "n=0; while :; do n=$((n + 1)); echo $n > /tmp/n.new; mv /tmp/n.new /tmp/n; sleep 0.02; done";

async fn count(sandbox: &Sandbox) -> u64 {
    let finished = sandbox.run(Command::new(["cat", "/tmp/n"]), 100).await.unwrap();
    finished.stdout.text().trim().parse().unwrap_or(0)
}

async fn until(sandbox: &Sandbox, least: u64) -> u64 {
    for _ in 0..500 {
        match count(sandbox).await {
            found if found >= least => return found,
            _ => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
    panic!("the counter stands at {}, below {least}", count(sandbox).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_goes_on_after_a_restore_in_two_forks() {
    let Some(subject) = ready("memory_goes_on_after_a_restore_in_two_forks").await else {
        return;
    };
    let (workspace, snapshots) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let snapshot = snapshots.path().join("one");
    let sandbox = subject.open(&workspace).await;
    let counter = sandbox.exec(Command::shell(COUNTER)).await.unwrap();
    let before = until(&sandbox, 5).await;
    let still = sandbox.checkpoint(&snapshot).await.unwrap();
    drop(still);
    // The first goes on, and the connection of its command with it.
    let after = count(&sandbox).await;
    until(&sandbox, after + 3).await;
    counter.kill("erin").await.unwrap();
    let ended = counter.ended().await.cause;
    assert_eq!(ended, Cause::Killed { by: "erin".to_owned() });
    // And it can be asked again.
    drop(sandbox.checkpoint(&snapshots.path().join("two")).await.unwrap());
    assert!(count(&sandbox).await > 0);
    sandbox.close(Duration::ZERO).await.unwrap();

    let mut forks = Vec::new();
    for _ in 0..2 {
        let spec = subject.spec(&workspace);
        let fork = Sandbox::restore(subject.backend.clone(), spec, subject.filter.clone(), &snapshot).await;
        forks.push(fork.unwrap());
    }
    for fork in &forks {
        let at_first = until(fork, before).await;
        until(fork, at_first + 3).await;
    }
    // They go their own ways.
    forks[0].run(Command::shell("echo mine > /tmp/own"), 0).await.unwrap();
    let other = forks[1].run(Command::shell("cat /tmp/own"), 100).await.unwrap();
    assert_eq!(other.ended.cause, Cause::Exited { code: 1 });
    for fork in forks {
        fork.close(Duration::ZERO).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_snapshot_of_another_shape_is_refused() {
    let Some(subject) = ready("a_snapshot_of_another_shape_is_refused").await else {
        return;
    };
    let (workspace, snapshots) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let snapshot = snapshots.path().join("one");
    let sandbox = subject.open(&workspace).await;
    drop(sandbox.checkpoint(&snapshot).await.unwrap());
    sandbox.close(Duration::ZERO).await.unwrap();
    let restore = async |spec: Spec| subject.backend.restore(&spec, &snapshot).await.unwrap_err().to_string();
    let spec = subject.spec(&workspace);
    let bare = Spec {
        workspace: None,
        ..spec.clone()
    };
    assert!(
        restore(bare)
            .await
            .ends_with("with another image, other mounts or other limits of its files")
    );
    let container = Spec {
        isolation: Isolation::Container,
        ..spec.clone()
    };
    assert!(
        restore(container)
            .await
            .ends_with("only isolation `gvisor` can go on from one")
    );
    let facts = std::fs::read_to_string(snapshot.join("snapshot.json")).unwrap();
    let version = Runsc::find().unwrap().version().unwrap();
    std::fs::write(snapshot.join("snapshot.json"), facts.replace(&version, "release-1")).unwrap();
    assert!(restore(spec).await.contains("was made by runsc release-1"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn containers_have_no_memory_snapshots() {
    let Some(subject) = ready("containers_have_no_memory_snapshots").await else {
        return;
    };
    let subject = Subject {
        isolation: Isolation::Container,
        ..subject
    };
    let workspace = TempDir::new().unwrap();
    let sandbox = subject.open(&workspace).await;
    let refused = sandbox.checkpoint(&workspace.path().join("x")).await;
    assert!(matches!(refused, Err(Error::Unsupported { .. })), "{refused:?}");
    sandbox.close(Duration::ZERO).await.unwrap();
}

/// Promise 7: an ended supervisor takes everything along, and what is on disk goes with `destroy`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_supervisor_leaves_no_process() {
    let Some(subject) = ready("a_killed_supervisor_leaves_no_process").await else {
        return;
    };
    let workspace = TempDir::new().unwrap();
    let sandbox = subject.open(&workspace).await;
    let groups = crate::sandbox::cgroup::Hierarchies::detect().unwrap();
    let group = groups.group(sandbox.id().as_str());
    let pids = group.pids().unwrap();
    assert!(pids.len() > 3, "supervisor, gofer, sentry: {pids:?}");
    let supervisor = pids.iter().find(|pid| {
        let text = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        text.contains(crate::forge::runsc::WORD)
    });
    let supervisor = nix::unistd::Pid::from_raw(*supervisor.expect("it is in the group"));
    nix::sys::signal::kill(supervisor, nix::sys::signal::Signal::SIGKILL).unwrap();
    for _ in 0..500 {
        if group.pids().unwrap().is_empty() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(group.pids().unwrap(), Vec::<i32>::new());
    subject.backend.destroy(sandbox.id()).await.unwrap();
    assert!(!group.exists());
}
