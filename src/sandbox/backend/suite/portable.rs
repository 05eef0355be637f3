//! Cases for every backend, the fake included.

use std::time::Duration;

use super::Case;
use crate::sandbox::exec::{Cause, EndReason, Stdin};
use crate::sandbox::{Command, Error, Output, Sandbox};

fn exited(code: i32) -> Cause {
    Cause::Exited { code }
}

fn code(result: Result<crate::sandbox::Exec, Error>) -> String {
    match result {
        Err(Error::NotStarted { code, .. }) => code,
        other => panic!("it should not start: {other:?}"),
    }
}

/// The promises of backend/mod.rs.
pub async fn life_cycle(case: &Case) {
    let backend = &case.subject.backend;
    let workspace = tempfile::TempDir::new().unwrap();
    let spec = case.subject.spec(&workspace);
    let handle = backend.create(&spec).await.unwrap();
    assert_eq!(
        backend.create(&spec).await.unwrap(),
        handle,
        "create is idempotent by id"
    );
    assert_ne!(handle.user, 0);
    let owned = backend.list_owned().await.unwrap();
    let owned = owned.iter().find(|owned| owned.id == spec.id).expect("it is listed");
    assert_eq!((owned.owner_alive, owned.identity), (true, spec.identity));
    backend.start(&handle).await.unwrap();
    backend.usage(&handle).await.unwrap();
    backend.destroy(&spec.id).await.unwrap();
    backend.destroy(&spec.id).await.expect("destroying again is fine");
    assert!(
        backend
            .list_owned()
            .await
            .unwrap()
            .iter()
            .all(|owned| owned.id != spec.id)
    );
    backend.connect(&handle).await.expect_err("nobody is there");
    // The other sandbox of this case has not suffered.
    assert!(case.sh("true").await.ended.is_success());
}

pub async fn exits_are_results(case: &Case) {
    for wanted in [0, 1, 7, 255] {
        let finished = case.sh(&format!("exit {wanted}")).await;
        assert_eq!(finished.ended.cause, exited(wanted));
    }
    let finished = case.sh("no-such-program").await;
    assert_eq!(finished.ended.cause, exited(127), "the shell's own word");
    assert_eq!(finished.ended.killed_descendants, 0);
}

/// T8.
pub async fn t8_output_is_bytes(case: &Case) {
    let finished = case.sh(r"printf '\377\0a\303'; printf '\251' ; echo err >&2").await;
    assert_eq!(finished.stdout.bytes(), b"\xff\0a\xc3\xa9");
    assert_eq!(finished.stderr.bytes(), b"err\n");
}

/// T5.
pub async fn t5_what_is_missing_is_named(case: &Case) {
    let sandbox = &case.sandbox;
    let result = sandbox.exec(Command::new(["no-such-program"])).await;
    assert!(
        result
            .as_ref()
            .is_err_and(|error| error.to_string().contains("no-such-program"))
    );
    assert_eq!(code(result), "program_not_found");
    assert_eq!(
        code(sandbox.exec(Command::new(["/workspace/none"])).await),
        "program_not_found"
    );
    // A name that is longer than a pipe is named by its beginning; it is looked for in every directory of the path.
    let long = "n".repeat(100 << 10);
    let result = sandbox.exec(Command::new([long.as_str()])).await;
    assert!(
        result
            .as_ref()
            .is_err_and(|error| error.to_string().contains(&long[..4000]))
    );
    assert!(code(result).starts_with("program_not_"));
    let result = sandbox.exec(Command::new(["true"]).cwd("nowhere")).await;
    assert!(
        result
            .as_ref()
            .is_err_and(|error| error.to_string().contains("/workspace/nowhere"))
    );
    assert_eq!(code(result), "cwd_not_found");
}

/// T4, a few; see `t4_fast_exits_lose_nothing`.
pub async fn fast_exits_lose_nothing(case: &Case) {
    for round in 0..200 {
        let mut exec = case.sandbox.exec(Command::new(["printf", "x"])).await.unwrap();
        let mut output = Vec::new();
        while let Some(piece) = exec.output.recv().await {
            output.push(piece);
        }
        assert_eq!(output, [Output::stdout(b"x".as_slice())], "round {round}");
        assert_eq!(exec.ended().await.cause, exited(0), "round {round}");
    }
}

pub async fn defaults_of_a_program(case: &Case) {
    assert_eq!(case.output("pwd").await, "/workspace\n");
    let finished = case
        .run(Command::new(["env"]).env("OWN", "1").env("USER", "else"))
        .await;
    let text = finished.stdout.text();
    let mut lines: Vec<_> = text.lines().collect();
    lines.sort_unstable();
    let path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    let rest = [
        "HOME=/tmp",
        "LANG=C.UTF-8",
        "LOGNAME=sandbox",
        "OWN=1",
        path,
        "PWD=/workspace",
        "SHELL=/bin/sh",
    ];
    assert_eq!(lines, [rest.as_slice(), &["TMPDIR=/tmp", "USER=else"]].concat());
}

pub async fn input_reaches_the_program(case: &Case) {
    let given = Command::new(["cat"]).stdin(Stdin::Bytes(b"given\n".to_vec()));
    assert_eq!(case.run(given).await.stdout.bytes(), b"given\n");
    let exec = case
        .sandbox
        .exec(Command::new(["cat"]).stdin(Stdin::Open))
        .await
        .unwrap();
    exec.input(b"one ").await.unwrap();
    exec.input(b"two").await.unwrap();
    exec.control().close_input().await.unwrap();
    let finished = exec.finish(100).await;
    assert_eq!(
        (finished.stdout.bytes(), finished.ended.cause),
        (b"one two".to_vec(), exited(0))
    );
    assert_eq!(
        case.run(Command::new(["cat"])).await.ended.cause,
        exited(0),
        "no input is an empty one"
    );
}

/// T1, the plain part.
pub async fn time_up_is_typed(case: &Case) {
    let command = Command::shell("echo begun; sleep 300").timeout(Duration::from_millis(300));
    let finished = case.run(command).await;
    assert_eq!(finished.ended.cause, Cause::TimedOut { after_ms: 300 });
    assert_eq!(finished.stdout.bytes(), b"begun\n", "what it wrote before is kept");
}

pub async fn killed_is_typed(case: &Case) {
    let mut exec = case
        .sandbox
        .exec(Command::shell("echo begun; sleep 300"))
        .await
        .unwrap();
    assert_eq!(exec.output.recv().await, Some(Output::stdout(b"begun\n".as_slice())));
    exec.kill("alice").await.unwrap();
    let by = "alice".to_owned();
    assert_eq!(exec.ended().await.cause, Cause::Killed { by });
}

/// T12: whoever destroys a sandbox says why, and that is the cause, once, and never an exit.
pub async fn t12_a_sandbox_that_is_ended_says_why(case: &Case) {
    let (by, reason) = ("alice".to_owned(), "enough".to_owned());
    let mut exec = case
        .sandbox
        .exec(Command::shell("echo begun; sleep 300"))
        .await
        .unwrap();
    assert_eq!(exec.output.recv().await, Some(Output::stdout(b"begun\n".as_slice())));
    case.sandbox.ending(EndReason::Killed {
        by: by.clone(),
        reason: reason.clone(),
    });
    case.sandbox.ending(EndReason::Expired);
    case.sandbox.close(Duration::ZERO).await.unwrap();
    assert_eq!(exec.ended().await.cause, Cause::SandboxKilled { by, reason });
}

/// T12, and nothing told why.
pub async fn a_destroyed_sandbox_is_lost(case: &Case) {
    let mut exec = case
        .sandbox
        .exec(Command::shell("echo begun; sleep 300"))
        .await
        .unwrap();
    assert_eq!(exec.output.recv().await, Some(Output::stdout(b"begun\n".as_slice())));
    case.sandbox.close(Duration::ZERO).await.unwrap();
    let cause = exec.ended().await.cause;
    assert!(
        matches!(cause, Cause::SandboxLost { .. } | Cause::Signalled { .. }),
        "never a success: {cause:?}"
    );
    case.sandbox.exec(Command::new(["true"])).await.expect_err("it is gone");
}

pub async fn t13_frozen_and_thawed(case: &Case) {
    if !case.subject.backend.capabilities().freeze {
        return;
    }
    let sandbox: &Sandbox = &case.sandbox;
    let script = "echo a; sleep 0.4; echo b; sleep 0.4; echo c > done";
    let exec = sandbox.exec(Command::shell(script)).await.unwrap();
    sandbox.freeze().await.unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(
        !case.workspace.path().join("done").exists(),
        "nothing runs in a frozen sandbox"
    );
    sandbox.thaw().await.unwrap();
    let finished = exec.finish(100).await;
    assert_eq!(
        (finished.stdout.bytes(), finished.ended.cause),
        (b"a\nb\n".to_vec(), exited(0))
    );
    // T13: twenty times, writing in between.
    for n in 0..20 {
        assert!(case.sh(&format!("echo {n} >> log")).await.ended.is_success());
        sandbox.freeze().await.unwrap();
        sandbox.thaw().await.unwrap();
    }
    let wanted: String = (0..20).map(|n| format!("{n}\n")).collect();
    assert_eq!(case.output("cat log").await, wanted);
}
