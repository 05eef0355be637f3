//! Failures at every step, and what is left: nothing (promise 7).

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use exuvia::ids::SandboxId;
use exuvia::sandbox::backend::oci::Oci;
use exuvia::sandbox::{Backend, ImageRef, Limits, Mount, Spec, reconcile};
use exuvia::workdir;

use crate::support::{Bench, PROGRAM, no_zombies_stay, sh, traces};

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
    // The kernel ends or refuses what the forge forks, each time a little later.
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
async fn a_forge_that_dies_or_lies_leaves_nothing() {
    const NAME: &str = "a_forge_that_dies_or_lies_leaves_nothing";
    let Some(good) = Bench::new(NAME) else { return };
    let forge = forge(&good);
    let bin = tempfile::tempdir().unwrap();
    let script = |name: &str, text: &str| {
        let path = bin.path().join(name);
        fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    };
    // Says that a process of somebody else is the guest: `Made { pid: 1 }`, `Ready`.
    let lies = "import array, os, socket\n\
        server = socket.socket(fileno=0)\n\
        while (got := server.recvmsg(1 << 17, 64))[0]:\n\
        \x20   answer, listener = array.array('i', got[1][0][2])\n\
        \x20   os.write(answer, b'\\0\\0\\0\\4\\x0a\\2\\x08\\2\\0\\0\\0\\2\\x12\\0')\n\
        \x20   os.close(answer); os.close(listener)\n";
    fs::write(bin.path().join("lies.py"), lies).unwrap();
    let lies = format!("exec python3 '{}'", bin.path().join("lies.py").display());
    let mut forges = vec![
        script("false", "exit 1"),
        script("garbage", "head -c 100 /dev/urandom >&0; sleep 0.1"),
        script("lies", &lies),
        bin.path().join("missing"),
    ];
    // The real one, killed after ever more of its work.
    for ms in 0..15 {
        let text = format!("exec 3<&0; '{forge}' \"$@\" <&3 & sleep 0.0{ms:02}; kill -9 $!; wait $! 2>/dev/null");
        forges.push(script(&format!("killed-{ms}"), &text));
    }
    for forge in forges {
        let Some(bench) = Bench::with_forge(NAME, forge.clone()) else {
            return;
        };
        let spec = bench.spec();
        if bench.backend.create(&spec).await.is_ok() {
            // It was done before it was killed.
            bench.backend.destroy(&spec.id).await.unwrap();
        }
        assert_eq!(bench.traces(&spec.id), Vec::<String>::new(), "{}", forge.display());
    }
}

/// The program of a data directory's forge.
fn forge(bench: &Bench) -> String {
    let mut programs = fs::read_dir(bench.data.path().join("bin")).unwrap();
    programs.next().unwrap().unwrap().path().to_str().unwrap().to_owned()
}

/// The forges that this process has started for a data directory.
fn forges(bench: &Bench) -> Vec<i32> {
    let (program, me) = (forge(bench), std::process::id());
    let is_ours = |pid: &i32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let is_child = stat
            .rsplit_once(") ")
            .is_some_and(|(_, rest)| rest.starts_with(&format!("S {me} ")));
        is_child && fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe == Path::new(&program))
    };
    let entries = fs::read_dir("/proc").unwrap().flatten();
    entries
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(is_ours)
        .collect()
}

#[tokio::test]
async fn a_forge_that_was_killed_is_replaced_and_what_it_made_lives_on() {
    let Some(bench) = Bench::new("a_forge_that_was_killed_is_replaced_and_what_it_made_lives_on") else {
        return;
    };
    assert_eq!(forges(&bench), Vec::<i32>::new(), "none is started before it is needed");
    let first = bench.open(bench.spec()).await;
    let [forge] = forges(&bench)[..] else {
        panic!("{:?}", forges(&bench))
    };
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(forge), nix::sys::signal::Signal::SIGKILL).unwrap();
    let second = bench.open(bench.spec()).await;
    assert_ne!(forges(&bench), [forge]);
    assert_eq!(forges(&bench).len(), 1);
    for sandbox in [&first, &second] {
        assert_eq!(sh(sandbox, "echo alive").await, "alive\n");
        sandbox.close(Duration::ZERO).await.unwrap();
        assert_eq!(bench.traces(sandbox.id()), Vec::<String>::new());
    }
    // The forge ends with its server.
    let last = forges(&bench)[0];
    drop(first);
    drop(second);
    drop(bench);
    assert!(!Path::new(&format!("/proc/{last}")).exists());
}

#[tokio::test]
async fn many_are_made_at_once() {
    let Some(bench) = Bench::new("many_are_made_at_once") else {
        return;
    };
    let mut making = tokio::task::JoinSet::new();
    for spec in (0..24).map(|_| bench.spec()) {
        let backend = bench.backend.clone();
        making.spawn(async move {
            let handle = backend.create(&spec).await.unwrap();
            backend.destroy(&handle.id).await.unwrap();
            handle.id
        });
    }
    let made = making.join_all().await;
    assert_eq!(made.len(), 24);
    for id in made {
        assert_eq!(bench.traces(&id), Vec::<String>::new());
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
        let mut server = Command::new(PROGRAM)
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
        let backend = Oci::new(data.path()).unwrap();
        reconcile::reap(&backend, |_| false).await.unwrap();
        workdir::sweep(data.path(), |_| false).unwrap();
        // A child of the forge that was still starting may look for its group only now.
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
