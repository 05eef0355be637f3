use tempfile::TempDir;

use super::*;
use crate::sandbox::backend::suite::{self, Subject, allow_all};
use crate::sandbox::exec::{Cause, Stdin};
use crate::sandbox::{Command, ImageRef, Sandbox};
use crate::wire::{Ended, Event, Started, event};

async fn setup() -> Result<Subject, String> {
    Ok(subject(Fake::new()))
}

fn subject(fake: Arc<Fake>) -> Subject {
    Subject {
        backend: fake,
        image: ImageRef::Host,
        isolation: Isolation::Container,
        filter: allow_all(),
    }
}

suite::backend_suite!(portable, setup);

async fn open() -> (Arc<Fake>, TempDir, Sandbox) {
    let (fake, workspace) = (Fake::new(), TempDir::new().unwrap());
    let sandbox = subject(fake.clone()).open(&workspace).await;
    (fake, workspace, sandbox)
}

async fn cause(sandbox: &Sandbox, command: Command) -> Cause {
    sandbox.run(command, 1000).await.unwrap().ended.cause
}

#[tokio::test]
async fn each_failure_of_opening_leaves_a_clean_slate() {
    for call in [Call::Create, Call::Start, Call::Connect] {
        let (fake, workspace) = (Fake::new(), TempDir::new().unwrap());
        let subject = subject(fake.clone());
        fake.fail_next(call, "told to");
        let opened = Sandbox::open(fake.clone(), subject.spec(&workspace), allow_all()).await;
        let error = opened.unwrap_err();
        assert!(
            matches!(&error, Error::Backend { reason, .. } if reason == "told to"),
            "{error:?}"
        );
        assert_eq!(fake.living(), [], "{call:?}");
        fake.fail_next(call, "told to");
        fake.fail_next(Call::Destroy, "told to as well");
        let opened = Sandbox::open(fake.clone(), subject.spec(&workspace), allow_all()).await;
        match (call, opened.unwrap_err()) {
            (Call::Create, Error::Backend { .. }) => {}
            (_, Error::CleanUp { cause, cleanup }) => {
                assert!(cause.to_string().contains("told to") && cleanup.to_string().contains("told to as well"));
            }
            (_, other) => panic!("{call:?}: {other:?}"),
        }
    }
}

#[tokio::test]
async fn calls_out_of_order_are_refused() {
    let (fake, workspace) = (Fake::new(), TempDir::new().unwrap());
    let spec = subject(fake.clone()).spec(&workspace);
    let handle = fake.create(&spec).await.unwrap();
    fake.connect(&handle).await.expect_err("not started");
    fake.freeze(&handle, true).await.expect_err("not started");
    fake.start(&handle).await.unwrap();
    fake.start(&handle).await.expect_err("started already");
    fake.freeze(&handle, true).await.unwrap();
    fake.connect(&handle).await.expect_err("frozen");
    fake.destroy(&spec.id).await.unwrap();
    fake.start(&handle).await.expect_err("destroyed");
    let mut other = spec.clone();
    fake.create(&spec).await.unwrap();
    other.limits.pids += 1;
    fake.create(&other).await.expect_err("the id is taken");
}

#[tokio::test(start_paused = true)]
async fn paused_time_passes_only_in_sleep() {
    let (_fake, _workspace, sandbox) = open().await;
    let begun = tokio::time::Instant::now();
    for _ in 0..50 {
        let command = Command::shell("echo x; cat").stdin(Stdin::Bytes(vec![b'y'; 100_000]));
        assert_eq!(
            cause(&sandbox, command.timeout(Duration::from_secs(1))).await,
            Cause::Exited { code: 0 }
        );
    }
    assert_eq!(begun.elapsed(), Duration::ZERO);
    let timed = Command::shell("sleep 500").timeout(Duration::from_secs(60));
    assert_eq!(cause(&sandbox, timed).await, Cause::TimedOut { after_ms: 60_000 });
    // Timers count in whole milliseconds.
    assert!(
        (60_000..60_010).contains(&begun.elapsed().as_millis()),
        "{:?}",
        begun.elapsed()
    );
    assert_eq!(
        cause(&sandbox, Command::shell("sleep 500")).await,
        Cause::Exited { code: 0 }
    );
    sandbox.files().write("f", &[b'z'; 500_000], None).await.unwrap();
    assert!(
        (560_000..560_020).contains(&begun.elapsed().as_millis()),
        "{:?}",
        begun.elapsed()
    );
}

#[tokio::test]
async fn memory_is_blamed_on_counters_alone() {
    let (fake, _workspace, sandbox) = open().await;
    let usage = Usage {
        oom_kills: 1,
        memory_peak_bytes: 42,
        ..Usage::default()
    };
    assert_eq!(
        cause(&sandbox, Command::shell("exit 137")).await,
        Cause::Exited { code: 137 },
        "no code says so"
    );
    let mut exec = sandbox
        .exec(Command::shell("echo x; cat; exit 1").stdin(Stdin::Open))
        .await
        .unwrap();
    exec.output.recv().await.unwrap();
    fake.set_usage(sandbox.id(), usage);
    exec.control().close_input().await.unwrap();
    let limit_bytes = sandbox.limits().memory_bytes;
    assert_eq!(
        exec.ended().await.cause,
        Cause::OutOfMemory {
            limit_bytes,
            peak_bytes: 42
        }
    );
    assert_eq!(
        cause(&sandbox, Command::shell("exit 1")).await,
        Cause::Exited { code: 1 },
        "an old kill"
    );
    fake.fail_next(Call::Usage, "told to");
    let ended = sandbox.run(Command::shell("exit 1"), 10).await.unwrap().ended;
    assert_eq!(ended.cause, Cause::Exited { code: 1 });
    assert!(
        ended.unknown.is_some_and(|why| why.contains("told to")),
        "what was not read is not guessed"
    );
}

#[tokio::test]
async fn a_crashed_guest_is_a_lost_sandbox() {
    let (fake, _workspace, sandbox) = open().await;
    let mut exec = sandbox
        .exec(Command::shell("echo x; cat").stdin(Stdin::Open))
        .await
        .unwrap();
    exec.output.recv().await.unwrap();
    fake.crash(sandbox.id());
    assert!(matches!(exec.ended().await.cause, Cause::SandboxLost { .. }));
}

/// T10 of the threat list, the host side of it: what a lying guest says never becomes a good end.
#[tokio::test(start_paused = true)]
async fn a_lying_guest_is_not_believed() {
    let started = event::Kind::Started(Started {
        pid: 2,
        ..Started::default()
    });
    let output = |stream, data: &[u8]| {
        event::Kind::Output(wire::Output {
            stream,
            data: data.to_vec().into(),
            offset: 0,
        })
    };
    let ended = |status, flags: bool| {
        event::Kind::Ended(Ended {
            status,
            timed_out: flags,
            killed: flags,
            ..Ended::default()
        })
    };
    let code = |code| Some(wire::ended::Status::ExitCode(code));
    let lies: Vec<Vec<event::Kind>> = vec![
        vec![started.clone()],
        vec![started.clone(), started.clone(), ended(code(0), false)],
        vec![started.clone(), output(0, b"x"), ended(code(0), false)],
        vec![started.clone(), output(1, b""), ended(code(0), false)],
        vec![started.clone(), output(1, &[0; wire::CHUNK + 1]), ended(code(0), false)],
        vec![started.clone(), event::Kind::Credit(1), ended(code(0), false)],
        vec![started.clone(), ended(code(256), false)],
        vec![started.clone(), ended(Some(wire::ended::Status::Signal(0)), false)],
        vec![started.clone(), ended(None, true)],
    ];
    let (fake, _workspace, sandbox) = open().await;
    let events = |kinds: Vec<event::Kind>| kinds.into_iter().map(|kind| Event { kind: Some(kind) }).collect();
    for (n, lie) in lies.into_iter().enumerate() {
        fake.answer_next(events(lie));
        let cause = cause(&sandbox, Command::new(["true"])).await;
        assert!(matches!(cause, Cause::SandboxLost { .. }), "lie {n}: {cause:?}");
    }
    // Flags that nobody gave occasion for.
    fake.answer_next(events(vec![started.clone(), ended(code(0), true)]));
    assert_eq!(cause(&sandbox, Command::new(["true"])).await, Cause::Exited { code: 0 });
    for first in [vec![], vec![ended(code(0), false)], vec![output(1, b"x")]] {
        fake.answer_next(events(first));
        let error = sandbox.exec(Command::new(["true"])).await.unwrap_err();
        assert!(matches!(error, Error::GuestLost { .. }), "{error:?}");
    }
}
