//! Cases for backends that cap and that wall off.

use super::Case;
use crate::error::Kind;
use crate::sandbox::backend::Lack;
use crate::sandbox::exec::Cause;
use crate::sandbox::{Command, Error};

/// T6.
pub async fn t6_memory_is_capped(case: &Case) {
    // tail(1) keeps the one endless line in memory. The shell lives on, and tells of its child's end by its own code.
    let finished = case.sh("head -c 400m /dev/zero | tail -n 1 | wc -c; exit 9").await;
    let limit = case.sandbox.limits().memory_bytes;
    match finished.ended.cause {
        Cause::OutOfMemory {
            limit_bytes,
            peak_bytes,
        }
        | Cause::SandboxOutOfMemory {
            limit_bytes,
            peak_bytes,
        } => {
            let alone = matches!(finished.ended.cause, Cause::OutOfMemory { .. });
            assert_ne!(alone, case.lacks(Lack::LifeAfterOutOfMemory));
            assert_eq!(limit_bytes, limit);
            assert!(
                peak_bytes > limit / 2 && peak_bytes <= limit + (1 << 20),
                "peak {peak_bytes}"
            );
        }
        other => panic!("{other:?}: {}", finished.stderr.text()),
    }
    if case.lacks(Lack::LifeAfterOutOfMemory) {
        return;
    }
    // A program that swallows it: its end is its own, and the kernel's word stands beside it.
    let ended = case
        .sh("head -c 400m /dev/zero | tail -n 1 | wc -c; exit 0")
        .await
        .ended;
    assert_eq!(ended.cause, Cause::Exited { code: 0 });
    assert!(ended.pressure.oom_kills > 0, "{ended:?}");
    assert_eq!(
        case.sh("exit 9").await.ended.cause,
        Cause::Exited { code: 9 },
        "an old kill explains no new end"
    );
}

/// T6, side by side: the kernel counts for the whole sandbox; the end of the one that memory ended says so, and that of the other is its own.
pub async fn t6_memory_ends_the_one_that_took_it(case: &Case) {
    if case.lacks(Lack::LifeAfterOutOfMemory) {
        return;
    }
    // It fails by itself, after the other's end, which it waits for.
    let honest = case.sh("until [ -e /workspace/over ]; do sleep 0.02; done; exit 3");
    let greedy = async {
        let finished = case.sh("exec tail -n 1 < /dev/zero").await;
        case.output("touch /workspace/over").await;
        finished
    };
    let (honest, greedy) = tokio::join!(honest, greedy);
    assert!(
        matches!(greedy.ended.cause, Cause::OutOfMemory { .. }),
        "{:?}",
        greedy.ended
    );
    assert_eq!(honest.ended.cause, Cause::Exited { code: 3 });
    assert!(honest.ended.pressure.oom_kills > 0, "it is told of: {:?}", honest.ended);
    // A shell whose child it was, beside another: its code is the shell's word for that.
    let (beside, shell) = tokio::join!(case.sh("sleep 2; exit 4"), case.sh("tail -n 1 < /dev/zero"));
    assert_eq!(beside.ended.cause, Cause::Exited { code: 4 });
    assert!(
        matches!(shell.ended.cause, Cause::OutOfMemory { .. }),
        "{:?}",
        shell.ended
    );
}

pub async fn processes_are_capped(case: &Case) {
    let before = case.sandbox.usage().await.unwrap();
    let script = "n=0; while [ $n -lt 200 ]; do sleep 300 & n=$((n + 1)); done; echo all";
    let finished = case.sh(script).await;
    assert!(
        !finished.ended.is_success(),
        "200 processes came to be: {}",
        finished.stdout.text()
    );
    let pressure = finished.ended.pressure;
    assert_eq!(pressure.pids_limit, u64::from(case.sandbox.limits().pids));
    assert!(
        case.lacks(Lack::RefusedForksCounted) || pressure.forks_refused > 0,
        "{pressure:?}"
    );
    let after = case.sandbox.usage().await.unwrap();
    assert!(
        case.lacks(Lack::RefusedForksCounted) || after.pids_refused > before.pids_refused,
        "{after:?}"
    );
    assert!(
        case.sh("true").await.ended.is_success(),
        "room again when they are gone"
    );
    // Many at once are started or refused for want of a process; for none is the guest lost.
    let asked = (0..200).map(|_| case.sandbox.exec(Command::new(["sleep", "300"])));
    let (running, refused): (Vec<_>, Vec<_>) = futures::future::join_all(asked)
        .await
        .into_iter()
        .partition(Result::is_ok);
    assert!(!running.is_empty() && !refused.is_empty(), "{} run", running.len());
    for error in refused.into_iter().filter_map(Result::err) {
        assert!(
            matches!(&error, Error::NotStarted { code, .. } if code == "limit"),
            "{error:?}"
        );
        assert_eq!(error.kind(), Kind::Exhausted);
    }
    drop(running);
    let mut last = None;
    for _ in 0..100 {
        match case.sandbox.run(Command::new(["true"]), 10).await {
            Ok(_) => return,
            Err(error) => last = Some(error),
        }
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
    panic!("it does not live on: {last:?}");
}

pub async fn files_are_capped(case: &Case) {
    let finished = case.sh("head -c 64m /dev/zero > /tmp/big").await;
    assert!(!finished.ended.is_success(), "/tmp held more than its size");
    case.output("rm -f /tmp/big").await;
    assert_eq!(case.output("ulimit -c; ulimit -n").await, "0\n256\n");
}

pub async fn the_root_is_read_only(case: &Case) {
    let script = "for d in / /usr /etc /dev /proc /sys; do (: > $d/exuvia-probe) 2>/dev/null && echo $d; done; true";
    assert_eq!(case.output(script).await, "");
    assert_eq!(
        case.output("echo x > /tmp/probe; echo x > /workspace/probe; cat /tmp/probe probe")
            .await,
        "x\nx\n"
    );
    assert_eq!(std::fs::read(case.workspace.path().join("probe")).unwrap(), b"x\n");
}

pub async fn there_is_no_network(case: &Case) {
    let interfaces = case.output("tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '").await;
    assert_eq!(interfaces, "lo\n");
    assert_eq!(case.output("tail -n +2 /proc/net/route").await, "", "no route");
}

/// Nothing of PID 1 can be read, stopped or killed by a program.
pub async fn the_agent_is_out_of_reach(case: &Case) {
    let probes = [
        "ls /proc/1/fd",
        "cat /proc/1/environ",
        "cat /proc/1/maps",
        "readlink /proc/1/exe",
        "readlink /proc/1/root",
        "head -c 1 /proc/1/mem",
        "kill -STOP 1",
        "kill -KILL 1",
        // The shim of this very exec.
        "kill -KILL $PPID",
        "ls /proc/$PPID/fd",
    ];
    let is_hidden = !case.lacks(Lack::AgentHidden);
    for probe in probes {
        if !is_hidden && ["/environ", "/maps"].iter().any(|end| probe.ends_with(end)) {
            continue;
        }
        if !is_hidden && probe.ends_with("/fd") {
            // What they stand for is out of reach all the same.
            let stolen = case
                .sh("for fd in /proc/1/fd/* /proc/$PPID/fd/*; do head -c 1 $fd; done")
                .await;
            assert_eq!(stolen.stdout.text(), "");
            continue;
        }
        let finished = case.run(Command::shell(probe)).await;
        assert!(
            matches!(finished.ended.cause, Cause::Exited { code: 1.. }),
            "`{probe}`: {:?}",
            finished.ended
        );
        assert_eq!(finished.stdout.text(), "", "`{probe}`");
    }
}
