//! A sandbox's plain life: made, looked at, used, ended; and what is on the record of it.

use exuvia::api::proto::{self, SandboxState, exec_ended::Cause, sandbox_end};
use tonic::Code;

use crate::bed::{Bed, why};
use crate::support::hand::{create, eventually, get, kill, plain, run, shell, start};

#[tokio::test]
async fn a_sandbox_is_made_used_and_ended() {
    let bed = Bed::new().await;
    let mut client = bed.sandboxes().await;
    let request = proto::CreateSandboxRequest {
        env: [("GREETING".to_owned(), "hello".to_owned())].into(),
        labels: [("team".to_owned(), "red".to_owned())].into(),
        ..plain()
    };
    let made = create(&mut client, request).await;
    assert_eq!(made.state(), SandboxState::Running);
    assert_eq!(
        (made.policy.as_str(), made.backend.as_str(), made.from_pool),
        ("default", "oci", false)
    );
    assert_eq!(get(&mut client, &made.sandbox_id).await, made);

    let id = made.sandbox_id.as_str();
    let came = run(&mut client, id, "echo $GREETING; echo oops >&2; exit 3").await;
    assert_eq!(
        (came.stdout.as_slice(), came.stderr.as_slice()),
        (b"hello\n".as_slice(), b"oops\n".as_slice())
    );
    assert_eq!((came.cause(), came.ended.exit_code), (Cause::Exited, Some(3)));
    assert_eq!(came.ended.stdout.unwrap().bytes, 6);

    let mut missing = shell(id, "");
    missing.argv = vec![b"no-such-program".to_vec()];
    let refused = start(&mut client, missing).await.err().unwrap();
    assert_eq!(why(&refused), (Code::InvalidArgument, "PROGRAM_NOT_FOUND".into()));

    let ended = kill(&mut client, id).await;
    let end = ended.end.clone().unwrap();
    assert_eq!(
        (ended.state(), end.cause()),
        (SandboxState::Ended, sandbox_end::Cause::Killed)
    );
    assert_eq!((end.by.as_str(), end.reason.as_str()), ("tester", "done"));
    assert_eq!(kill(&mut client, id).await, ended, "once more changes nothing");
    let refused = start(&mut client, shell(id, "true")).await.err().unwrap();
    assert_eq!(why(&refused), (Code::FailedPrecondition, "SANDBOX_KILLED".into()));
    eventually("its traces are gone, on the record", async || {
        let trail = bed.trail(id).await;
        trail.last().is_some_and(|record| record.action == "sandbox.destroyed")
    })
    .await;
    assert_eq!(bed.fake.living(), []);

    // T25: who did what, in order, and no secret.
    let trail = bed.trail(id).await;
    let told: Vec<_> = trail
        .iter()
        .map(|record| (record.actor.as_str(), record.action.as_str(), record.outcome.as_str()))
        .collect();
    assert_eq!(
        told,
        [
            ("user:tester", "sandbox.created", "ok"),
            ("user:tester", "exec.started", "ok"),
            ("user:tester", "exec.ended", "failed"),
            ("user:tester", "exec.started", "ok"),
            ("user:tester", "exec.ended", "not_started"),
            ("user:tester", "sandbox.ended", "ok"),
            ("server", "sandbox.destroyed", "ok"),
        ]
    );
    let text = serde_json::to_string(&trail).unwrap();
    assert!(text.contains("GREETING") && !text.contains("hello"), "{text}");
}
