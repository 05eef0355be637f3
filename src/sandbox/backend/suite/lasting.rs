//! Cases of execs that outlive something: their main process, their connection, their client.

use std::time::Duration;

use super::Case;
use super::real::{SLEEPERS, assert_no_sleepers};
use crate::ids::ExecId;
use crate::sandbox::exec::{Background, Cause, Counts, Offsets, Overflow, Stdin, Tell};
use crate::sandbox::{Command, Error, Exec, Output};
use crate::wire;

/// T2.
pub async fn t2_a_background_child_is_killed_or_kept(case: &Case) {
    let finished = case.sh("sleep 300 & setsid sleep 300 & echo done").await;
    assert_eq!(finished.stdout.bytes(), b"done\n");
    assert_eq!(finished.ended.cause, Cause::Exited { code: 0 });
    assert!(
        finished.ended.killed_descendants >= 1 && finished.ended.kept_descendants == 0,
        "they are counted: {:?}",
        finished.ended
    );
    assert_eq!(case.output(SLEEPERS).await, "");

    // It writes far more than any pipe holds, after the command's end, and is neither stopped nor killed by that.
    let script = "(sleep 0.3; head -c 4194304 /dev/zero; echo written > written; sleep 300) & echo done";
    let finished = case.run(Command::shell(script).background(Background::Keep)).await;
    assert_eq!(
        (finished.stdout.bytes(), finished.ended.cause.clone()),
        (b"done\n".to_vec(), Cause::Exited { code: 0 })
    );
    assert!(
        finished.ended.kept_descendants >= 1 && finished.ended.killed_descendants == 0,
        "{:?}",
        finished.ended
    );
    wait_for(case, "cat written 2>/dev/null", "written\n").await;
    assert_eq!(case.output("cat /proc/[0-9]*/comm | grep -c '^sleep$'").await, "1\n");
    // With a time limit that is over by then: it was the command's.
    let command = Command::shell("sleep 301 &").background(Background::Keep);
    case.run(command.timeout(Duration::from_millis(200))).await;
    tokio::time::sleep(Duration::from_millis(400)).await;
    assert_eq!(case.output("cat /proc/[0-9]*/comm | grep -c '^sleep$'").await, "2\n");
}

async fn wait_for(case: &Case, script: &str, wanted: &str) {
    for _ in 0..250 {
        if case.sh(script).await.stdout.text() == wanted {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("`{script}` never said {wanted:?}");
}

/// Takes at least `most` bytes of standard output.
async fn take(exec: &mut Exec, most: usize, into: &mut Vec<u8>) {
    let until = into.len() + most;
    while into.len() < until
        && let Some(output) = exec.output.recv().await
    {
        let Output::Stdout(piece) = output else {
            panic!("{output:?}");
        };
        assert_eq!(piece.offset, into.len() as u64, "nothing lost, nothing twice");
        into.extend_from_slice(&piece);
    }
}

fn from(stdout: usize) -> Offsets {
    Offsets {
        stdout: stdout as u64,
        ..Offsets::default()
    }
}

/// T10, the guest's part: the connection breaks off at any place, and whoever comes next goes on from just there.
pub async fn t10_an_exec_goes_on_from_an_exact_offset(case: &Case) {
    let id = ExecId::random();
    let command = Command::shell("seq 1 1000000; exit 7").id(id.clone()).detachable();
    let mut exec = case.sandbox.exec(command).await.unwrap();
    let mut got = Vec::new();
    let mut rounds = 0;
    for most in [1, 100_000, 700_000, 1, 2_000_000, 64 << 10].into_iter().cycle() {
        take(&mut exec, most, &mut got).await;
        drop(exec);
        exec = case.sandbox.attach(&id, from(got.len())).await.unwrap();
        rounds += 1;
        if rounds == 12 {
            break;
        }
    }
    take(&mut exec, usize::MAX / 2, &mut got).await;
    let ended = exec.ended().await;
    assert_eq!(ended.cause, Cause::Exited { code: 7 });
    let wanted: String = (1..=1_000_000).map(|n| format!("{n}\n")).collect();
    assert!(got == wanted.as_bytes(), "{} of {} bytes", got.len(), wanted.len());
    let whole = Counts {
        bytes: wanted.len() as u64,
        dropped: 0,
    };
    assert_eq!(ended.stdout, whole);

    // It has ended, and can still be asked for; what was taken long ago is gone, and the refusal says from where on it is not.
    let mut again = case.sandbox.attach(&id, from(got.len() - 1000)).await.unwrap();
    let last = again.output.recv().await.unwrap();
    assert_eq!(&last.piece()[..], &got[got.len() - 1000..]);
    assert_eq!(again.ended().await.cause, Cause::Exited { code: 7 });
    match case.sandbox.attach(&id, from(0)).await {
        Err(Error::OutputDropped { exec, kept }) => {
            assert_eq!((exec, kept.stdout), (id.clone(), (got.len() - wire::RING) as u64));
        }
        other => panic!("{other:?}"),
    }
    case.sandbox
        .attach(&id, from(got.len() + 1))
        .await
        .expect_err("not made");
    case.sandbox.release(&id).await.unwrap();
    case.sandbox.release(&id).await.expect("again is fine");
    wait_for_no_exec(case).await;
    assert!(matches!(case.sandbox.attach(&id, from(0)).await, Err(Error::NoExec(_))));
}

async fn wait_for_no_exec(case: &Case) {
    for _ in 0..250 {
        if case.sandbox.list_execs().await.unwrap().is_empty() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("{:?}", case.sandbox.list_execs().await);
}

/// Input, signals and the time limit find an exec that somebody else began.
pub async fn an_exec_is_found_and_told(case: &Case) {
    let id = ExecId::random();
    let script =
        "exec 2>&-; trap 'echo usr1' USR1; while read line; do echo \"<$line>\"; done; while :; do sleep 0.05; done";
    let command = Command::shell(script).stdin(Stdin::Open).id(id.clone()).detachable();
    let mut exec = case
        .sandbox
        .exec(command.timeout(Duration::from_secs(60)))
        .await
        .unwrap();
    let pid = exec.pid();
    exec.input(b"one\n").await.unwrap();
    let mut got = Vec::new();
    take(&mut exec, 6, &mut got).await;
    assert_eq!(got, b"<one>\n");
    drop(exec);
    // The loss of a connection is noticed a moment later.
    let mut infos = Vec::new();
    for _ in 0..100 {
        infos = case.sandbox.list_execs().await.unwrap();
        if !infos[0].attached {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let [info] = infos.as_slice() else {
        panic!("{infos:?}");
    };
    assert_eq!(
        (&info.id, info.pid, info.ended.as_ref(), info.attached),
        (&id, pid, None, false)
    );
    assert_eq!(info.argv, ["sh", "-c", script].map(|word| word.as_bytes().to_vec()));
    let duplicate = Command::new(["true"]).id(id.clone()).detachable();
    case.sandbox.exec(duplicate).await.expect_err("the id is taken");

    let mut exec = case.sandbox.attach(&id, from(6)).await.unwrap();
    exec.input(b"two\n").await.unwrap();
    exec.control().close_input().await.unwrap();
    take(&mut exec, 6, &mut got).await;
    assert_eq!(got, b"<one>\n<two>\n");
    let mut second = case.sandbox.attach(&id, from(got.len())).await.unwrap();
    assert_eq!(exec.ended().await.cause, Cause::Superseded, "one at a time");
    assert!(case.sandbox.tell(&id, Tell::Signal(0)).await.unwrap(), "it runs");
    case.sandbox.tell(&id, Tell::Signal(libc::SIGUSR1)).await.unwrap();
    take(&mut second, 5, &mut got).await;
    assert_eq!(got, b"<one>\n<two>\nusr1\n");
    let by = "carol".to_owned();
    case.sandbox.tell(&id, Tell::Kill { by: by.clone() }).await.unwrap();
    assert_eq!(second.ended().await.cause, Cause::Killed { by });
    let infos = case.sandbox.list_execs().await.unwrap();
    assert!(infos[0].ended.is_some(), "{infos:?}");
    assert!(!case.sandbox.tell(&id, Tell::Signal(0)).await.unwrap(), "it has ended");
    assert_no_sleepers(case).await;
    case.sandbox.release(&id).await.unwrap();
    wait_for_no_exec(case).await;
}

/// Nobody takes its output: it waits, or drops the oldest and says how much.
pub async fn output_that_nobody_takes_waits_or_is_dropped(case: &Case) {
    let id = ExecId::random();
    let script = "head -c 8388608 /dev/zero; echo over > over";
    let command = Command::shell(script).id(id.clone()).detachable();
    drop(case.sandbox.exec(command).await.unwrap());
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(
        case.sh("cat over 2>&1 >/dev/null | wc -l").await.stdout.text().trim(),
        "1"
    );
    let mut exec = case.sandbox.attach(&id, Offsets::default()).await.unwrap();
    let mut got = Vec::new();
    take(&mut exec, usize::MAX / 2, &mut got).await;
    assert_eq!(
        (got.len(), exec.ended().await.cause),
        (8 << 20, Cause::Exited { code: 0 })
    );
    case.sandbox.release(&id).await.unwrap();

    let id = ExecId::random();
    let script = "head -c 8388608 /dev/zero; echo end; echo all > all";
    let command = Command::shell(script)
        .id(id.clone())
        .overflow(Overflow::Drop)
        .detachable();
    drop(case.sandbox.exec(command).await.unwrap());
    wait_for(case, "cat all 2>/dev/null", "all\n").await;
    let infos = case.sandbox.list_execs().await.unwrap();
    let info = infos.iter().find(|info| info.id == id).unwrap();
    let kept = (8 << 20) + 4 - wire::RING as u64;
    match case.sandbox.attach(&id, Offsets::default()).await {
        Err(Error::OutputDropped { kept: first, .. }) => assert_eq!(first, from(kept as usize)),
        other => panic!("{other:?} ({info:?})"),
    }
    let mut exec = case.sandbox.attach(&id, from(kept as usize)).await.unwrap();
    let mut last = Vec::new();
    let mut offset = kept;
    while let Some(output) = exec.output.recv().await {
        assert_eq!(output.piece().offset, offset);
        offset = output.piece().end();
        last = output.piece().to_vec();
    }
    assert!(last.ends_with(b"end\n"));
    let ended = exec.ended().await;
    assert_eq!(ended.cause, Cause::Exited { code: 0 });
    assert_eq!(ended.stdout.bytes, (8 << 20) + 4);
    assert!(
        ended.stdout.dropped > 0 && ended.stdout.dropped <= kept,
        "{:?}",
        ended.stdout
    );
    case.sandbox.release(&id).await.unwrap();
    wait_for_no_exec(case).await;
}
