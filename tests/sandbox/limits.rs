//! Limits hold, are counted by the kernel, and are never silently weaker (requirement: refuse, do not weaken).

use std::fs;

use exuvia::sandbox::disk::{Kind, Quota, Rates, Volumes};
use exuvia::sandbox::{Backend, Cause, Error, Limits, Spec};
use exuvia::workdir::WorkDir;

use crate::support::{Bench, groups, run, sh, skip};

#[tokio::test]
async fn the_kernel_holds_what_was_asked() {
    let Some(bench) = Bench::new("the_kernel_holds_what_was_asked") else {
        return;
    };
    let spec = bench.spec();
    bench.up(&spec).await;
    let mut found = Vec::new();
    for group in groups(spec.id.as_str()) {
        for name in [
            "memory.limit_in_bytes",
            "memory.memsw.limit_in_bytes",
            "memory.max",
            "pids.max",
            "cpu.cfs_quota_us",
            "cpu.max",
        ] {
            found.extend(
                fs::read_to_string(group.join(name))
                    .ok()
                    .map(|value| format!("{name} {}", value.trim())),
            );
        }
    }
    found.sort();
    let v1 = [
        "cpu.cfs_quota_us 50000",
        "memory.limit_in_bytes 134217728",
        "memory.memsw.limit_in_bytes 134217728",
        "pids.max 64",
    ];
    let v2 = ["cpu.max 50000 100000", "memory.max 134217728", "pids.max 64"];
    assert!(found == v1 || found == v2, "{found:?}");
    bench.backend.destroy(&spec.id).await.unwrap();
}

#[tokio::test]
async fn running_out_of_memory_is_told_as_that() {
    let Some(bench) = Bench::new("running_out_of_memory_is_told_as_that") else {
        return;
    };
    let spec = bench.spec();
    let limit = spec.limits.memory_bytes;
    let sandbox = bench.open(spec).await;
    let finished = run(&sandbox, "exec python3 -c 'x = bytearray(1 << 30)'").await;
    match finished.ended.cause {
        Cause::OutOfMemory {
            limit_bytes,
            peak_bytes,
        } => {
            assert_eq!(limit_bytes, limit);
            assert!(peak_bytes > limit / 2 && peak_bytes <= limit, "{peak_bytes}");
        }
        other => panic!("{other:?}"),
    }
    assert!(sandbox.usage().await.unwrap().oom_kills >= 1);
    // The guest lives on.
    assert_eq!(sh(&sandbox, "echo alive").await, "alive\n");
    sandbox.close(std::time::Duration::ZERO).await.unwrap();
}

#[tokio::test]
async fn a_flood_of_processes_is_refused_and_ends_with_its_command() {
    let Some(bench) = Bench::new("a_flood_of_processes_is_refused_and_ends_with_its_command") else {
        return;
    };
    let sandbox = bench.open(bench.spec()).await;
    run(&sandbox, "for i in $(seq 200); do sleep 1000 & done").await;
    let usage = sandbox.usage().await.unwrap();
    assert!(usage.pids_refused >= 1, "{usage:?}");
    assert!(usage.pids <= 4, "{usage:?}");
    assert_eq!(sh(&sandbox, "echo alive").await, "alive\n");
    sandbox.close(std::time::Duration::ZERO).await.unwrap();
}

#[tokio::test]
async fn places_to_write_are_capped() {
    let Some(bench) = Bench::new("places_to_write_are_capped") else {
        return;
    };
    let mut spec = bench.spec();
    spec.limits.file_bytes = 1 << 20;
    spec.limits.shm_bytes = spec.limits.tmp_bytes;
    let sandbox = bench.open(spec).await;
    for place in ["/tmp", "/var/tmp", "/dev/shm"] {
        let text = format!("for i in 1 2 3 4 5 6 7 8 9; do head -c 1000000 /dev/zero >{place}/$i || exit 9; done");
        assert_eq!(
            run(&sandbox, &text).await.ended.cause,
            Cause::Exited { code: 9 },
            "{place}"
        );
        sh(&sandbox, &format!("rm -f {place}/*")).await;
    }
    // One file over its own limit: SIGXFSZ.
    let finished = run(&sandbox, "exec head -c 2000000 /dev/zero >/tmp/large").await;
    assert!(!finished.ended.is_success(), "{:?}", finished.ended);
    assert_eq!(sh(&sandbox, "stat -c %s /tmp/large").await, "1048576\n");
    sandbox.close(std::time::Duration::ZERO).await.unwrap();
}

/// Where control groups are version 2; elsewhere it is refused, and nothing is left.
#[tokio::test]
async fn a_disk_is_no_faster_than_asked() {
    let Some(bench) = Bench::new("a_disk_is_no_faster_than_asked") else {
        return;
    };
    let volumes = Volumes::new(bench.data.path());
    if let Err(lack) = volumes.kinds()[Kind::Image as usize].1.clone() {
        return skip("a_disk_is_no_faster_than_asked", &lack);
    }
    let mut spec = bench.spec();
    spec.limits.disk_kind = Some(Kind::Image);
    spec.limits.disk = Some(Quota {
        bytes: 64 << 20,
        inodes: 1000,
    });
    spec.limits.disk_rates = Rates {
        read: Some(4 << 20),
        write: Some(2 << 20),
    };
    let owner = spec.identity.host_uid();
    let dir = WorkDir::open(bench.data.path(), spec.id.as_str(), &volumes, &spec.limits, owner).unwrap();
    spec.workspace = Some(dir.workspace());
    match bench.backend.create(&spec).await {
        Err(Error::Unsupported { missing, .. }) => {
            assert!(missing.contains("version 1"), "{missing}");
            assert!(!std::path::Path::new("/sys/fs/cgroup/cgroup.controllers").exists());
            eprintln!("refused here: {missing}");
        }
        Err(error) => panic!("{error}"),
        Ok(_) => {
            bench.backend.destroy(&spec.id).await.unwrap();
            let sandbox = bench.open(spec.clone()).await;
            let held = fs::read_to_string(groups(spec.id.as_str())[0].join("io.max")).unwrap();
            assert!(held.contains(" rbps=4194304 wbps=2097152 "), "{held}");
            let time = |text: &'static str| async {
                let begun = std::time::Instant::now();
                sh(&sandbox, text).await;
                begun.elapsed().as_secs_f64()
            };
            // No faster than that, however slow the host is: what is written, and what is read without the page cache.
            let wrote =
                time("dd if=/dev/zero of=/workspace/a bs=1M count=8 conv=fsync 2>/tmp/said || cat /tmp/said").await;
            assert!(wrote > 3.0, "8 MiB in {wrote} s");
            let read = time("dd if=/workspace/a of=/dev/null bs=1M iflag=direct 2>/tmp/said || cat /tmp/said").await;
            assert!(read > 1.5, "8 MiB in {read} s");
            sandbox.close(std::time::Duration::ZERO).await.unwrap();
        }
    }
    dir.remove();
    assert_eq!(bench.traces(&spec.id), Vec::<String>::new());
}

#[tokio::test]
async fn what_cannot_be_enforced_is_refused_without_a_trace() {
    let Some(bench) = Bench::new("what_cannot_be_enforced_is_refused_without_a_trace") else {
        return;
    };
    let refused = |change: fn(&mut Spec)| {
        let mut spec = bench.spec();
        change(&mut spec);
        let backend = bench.backend.clone();
        async move { (backend.create(&spec).await.unwrap_err(), spec.id) }
    };
    for change in [
        (|spec| spec.isolation = exuvia::sandbox::Isolation::Microvm) as fn(&mut Spec),
        |spec| spec.identity.base = 0,
        |spec| spec.identity.base = u32::MAX - 5,
        |spec| spec.image = exuvia::sandbox::ImageRef::Docker("python:3".to_owned()),
        // The kernel keeps processor shares above a thousandth: 1 ms in 100.
        |spec| {
            spec.limits = Limits {
                pids: u32::MAX,
                ..spec.limits.clone()
            }
        },
    ] {
        let (error, id) = refused(change).await;
        assert!(
            matches!(error, Error::Unsupported { .. } | Error::Backend { .. }),
            "{error}"
        );
        assert_eq!(bench.traces(&id), Vec::<String>::new());
    }
}
