//! Failures at every step, and what is left: nothing (promise 7).

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use exuvia::ids::SandboxId;
use exuvia::sandbox::backend::oci::Oci;
use exuvia::sandbox::{Backend, ImageRef, Limits, Mount, Spec, reconcile};

use crate::support::{Bench, LAUNCHER, no_zombies_stay, traces};

type Break = fn(&mut Spec);

/// Each of these breaks another step of the set-up.
const BREAKS: [(&str, Break); 5] = [
    ("the image", |spec| spec.image = ImageRef::Rootfs("/nowhere".into())),
    ("a mount's source", |spec| {
        spec.mounts = vec![Mount {
            source: "/nowhere".into(),
            target: "/data".into(),
        }];
    }),
    ("a mount's target", |spec| {
        // Below the read-only /usr, where there is no such directory.
        spec.mounts = vec![Mount {
            source: "/usr/share".into(),
            target: "/usr/nowhere/at/all".into(),
        }];
    }),
    ("the workspace", |spec| spec.workspace = Some("/nowhere".into())),
    ("a file in the workspace's place", |spec| {
        spec.workspace = Some("/etc/hostname".into())
    }),
];

#[tokio::test]
async fn a_step_that_fails_leaves_nothing() {
    let Some(bench) = Bench::new("a_step_that_fails_leaves_nothing") else {
        return;
    };
    for (what, broken) in BREAKS {
        let mut spec = bench.spec();
        broken(&mut spec);
        let error = bench.backend.create(&spec).await.expect_err(what);
        assert_eq!(bench.traces(&spec.id), Vec::<String>::new(), "{what}: {error}");
    }
    // The kernel ends or refuses the launcher and what it forks, each time a little later.
    let mut made = 0;
    for (memory_bytes, pids) in (0..24)
        .map(|n| (64 << 10 << (n / 2), 64))
        .chain((1..6).map(|pids| (64 << 20, pids)))
    {
        let mut spec = bench.spec();
        spec.limits = Limits {
            memory_bytes,
            pids,
            ..spec.limits
        };
        match bench.backend.create(&spec).await {
            Ok(_) => {
                made += 1;
                bench.backend.destroy(&spec.id).await.unwrap();
            }
            Err(error) => assert!(!error.to_string().contains("clean-up"), "{error}"),
        }
        assert_eq!(
            bench.traces(&spec.id),
            Vec::<String>::new(),
            "{memory_bytes} bytes, {pids} processes"
        );
    }
    assert!(made > 0, "with enough of both there is a sandbox");
    assert_eq!(bench.backend.list_owned().await.unwrap(), []);
    no_zombies_stay();
}

#[tokio::test]
async fn a_launcher_that_dies_or_lies_leaves_nothing() {
    let bin = tempfile::tempdir().unwrap();
    let script = |name: &str, text: &str| {
        let path = bin.path().join(name);
        fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    };
    let mut launchers = vec![
        script("false", "exit 1"),
        script("garbage", "echo '{\"Ok\":'"),
        script("lies", "echo '{\"Ok\":1}'"),
        bin.path().join("missing"),
    ];
    // The real one, killed after ever more of its work.
    for ms in 0..15 {
        let text = format!("exec 3<&0; '{LAUNCHER}' \"$@\" <&3 & sleep 0.0{ms:02}; kill -9 $!; wait $! 2>/dev/null");
        launchers.push(script(&format!("killed-{ms}"), &text));
    }
    for launcher in launchers {
        let Some(bench) = Bench::with_launcher("a_launcher_that_dies_or_lies_leaves_nothing", launcher.clone()) else {
            return;
        };
        let spec = bench.spec();
        if bench.backend.create(&spec).await.is_ok() {
            // It was done before it was killed.
            bench.backend.destroy(&spec.id).await.unwrap();
        }
        assert_eq!(bench.traces(&spec.id), Vec::<String>::new(), "{}", launcher.display());
    }
}

/// The sandboxes that a data directory has, whole or in the making.
fn sandboxes(data: &Path) -> Vec<String> {
    let entries = fs::read_dir(data.join("sandboxes")).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().into_string().unwrap()).collect()
}

#[tokio::test]
async fn what_a_killed_server_leaves_is_reaped_by_the_next() {
    const NAME: &str = "what_a_killed_server_leaves_is_reaped_by_the_next";
    if Bench::new(NAME).is_none() {
        return;
    }
    let mut seen = 0;
    for ms in (0..45).step_by(3) {
        let data = tempfile::tempdir().unwrap();
        let mut server = Command::new(LAUNCHER)
            .env("EXUVIA_DATA_DIR", data.path())
            .args(["sandbox", "run", "--", "sleep", "1000"])
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let started = Instant::now();
        while sandboxes(data.path()).is_empty() && started.elapsed() < Duration::from_secs(30) {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(ms));
        server.kill().unwrap();
        server.wait().unwrap();
        let left = sandboxes(data.path());
        seen += left.len();
        let backend = Oci::new(data.path(), LAUNCHER.into()).unwrap();
        reconcile::reap(&backend, |_| false).await.unwrap();
        // A launcher that was still starting may look for its group only now.
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(sandboxes(data.path()), Vec::<String>::new(), "killed after {ms} ms");
        for id in left {
            assert_eq!(traces(&id), Vec::<String>::new(), "killed after {ms} ms");
        }
    }
    assert!(seen > 0, "no server was killed while it had a sandbox");
}

#[tokio::test]
async fn only_the_dead_are_reaped() {
    let Some(bench) = Bench::new("only_the_dead_are_reaped") else {
        return;
    };
    let spec = bench.spec();
    let handle = bench.up(&spec).await;
    assert_eq!(
        reconcile::reap(&bench.backend, |_| false).await.unwrap(),
        Vec::<SandboxId>::new()
    );
    bench.backend.start(&handle).await.unwrap();

    // The same sandbox, had its server been another process that is gone.
    let record = bench
        .data
        .path()
        .join("sandboxes")
        .join(spec.id.as_str())
        .join("owner.json");
    let text = fs::read_to_string(&record).unwrap();
    let mut value: serde_json::Value = serde_json::from_str(&text).unwrap();
    value["owner"]["started"] = 1.into();
    fs::write(&record, value.to_string()).unwrap();
    assert_eq!(
        reconcile::reap(&bench.backend, |_| false).await.unwrap(),
        std::slice::from_ref(&spec.id)
    );
    assert_eq!(bench.traces(&spec.id), Vec::<String>::new());

    // Or had the record been cut by a power failure.
    let spec = bench.spec();
    bench.up(&spec).await;
    fs::write(
        bench
            .data
            .path()
            .join("sandboxes")
            .join(spec.id.as_str())
            .join("owner.json"),
        "{",
    )
    .unwrap();
    assert_eq!(
        reconcile::reap(&bench.backend, |_| false).await.unwrap(),
        std::slice::from_ref(&spec.id)
    );
    assert_eq!(bench.traces(&spec.id), Vec::<String>::new());
}
