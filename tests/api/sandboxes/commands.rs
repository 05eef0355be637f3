//! Commands: their streams, who may follow them, what ends them.

use std::time::Duration;

use exuvia::api::proto::{self, exec_ended::Cause, exec_event, exec_request};
use tonic::Code;

use crate::bed::{Bed, why};
use crate::support::hand::{attach, create, eventually, kill, plain, run, shell, span, start};

/// `echo` of so many numbered lines, and what they are.
fn lines(count: usize) -> (String, Vec<u8>) {
    let script = (0..count).map(|n| format!("echo {n:06}; sleep 0.002; ")).collect();
    let whole: String = (0..count).map(|n| format!("{n:06}\n")).collect();
    (script, whole.into_bytes())
}

#[tokio::test]
async fn t12_kill_in_the_middle_of_a_stream_is_told_as_such() {
    let bed = Bed::new().await;
    let mut client = bed.sandboxes().await;
    let made = create(&mut client, plain()).await;
    let mut running = start(&mut client, shell(&made.sandbox_id, "echo on; sleep 100"))
        .await
        .unwrap();
    running.until(b"on\n").await;
    kill(&mut client, &made.sandbox_id).await;
    let ended = running.finish().await.unwrap().ended;
    assert_eq!((ended.cause(), ended.exit_code), (Cause::SandboxKilled, None));
    assert_eq!((ended.by.as_str(), ended.reason.as_str()), ("tester", "done"));
}

#[tokio::test]
async fn t11_expiry_in_the_middle_of_a_stream_is_told_as_such() {
    let bed = Bed::new().await;
    let mut client = bed.sandboxes().await;
    let request = proto::CreateSandboxRequest {
        ttl: span(Duration::from_millis(300)),
        ..plain()
    };
    let made = create(&mut client, request).await;
    let running = start(&mut client, shell(&made.sandbox_id, "echo on; sleep 100"))
        .await
        .unwrap();
    let came = running.finish().await.unwrap();
    assert_eq!(
        (came.stdout.as_slice(), came.cause()),
        (b"on\n".as_slice(), Cause::SandboxExpired)
    );
    let renewal = proto::RenewRequest {
        sandbox_id: made.sandbox_id,
        ttl: span(Duration::from_secs(9)),
        by: String::new(),
    };
    let refused = client.renew(renewal).await.unwrap_err();
    assert_eq!(why(&refused), (Code::FailedPrecondition, "SANDBOX_EXPIRED".into()));
}

#[tokio::test]
async fn a_command_is_followed_by_several_each_from_where_it_wants() {
    let bed = Bed::new().await;
    let mut client = bed.sandboxes().await;
    let id = create(&mut client, plain()).await.sandbox_id;
    let (script, whole) = lines(100);
    let request = proto::ExecStart {
        on_disconnect: proto::OnDisconnect::Keep.into(),
        ..shell(&id, &script)
    };
    let mut first = start(&mut client, request).await.unwrap();
    first.until(b"000009\n").await;
    let exec = first.exec_id.clone();
    // The first goes away in the middle; the others miss nothing and get nothing twice.
    let middle = attach(&mut client, &id, &exec, (35, 0)).await.unwrap();
    drop(first);
    let again = attach(&mut client, &id, &exec, (70, 0)).await.unwrap();
    let (middle, again) = tokio::join!(middle.finish(), again.finish());
    let (middle, again) = (middle.unwrap(), again.unwrap());
    assert_eq!(
        (middle.stdout.as_slice(), again.stdout.as_slice()),
        (&whole[35..], &whole[70..])
    );
    assert_eq!((middle.cause(), middle.ended.exit_code), (Cause::Exited, Some(0)));
    // And once it has ended.
    let late = attach(&mut client, &id, &exec, (0, 0))
        .await
        .unwrap()
        .finish()
        .await
        .unwrap();
    assert_eq!((late.stdout, late.ended.stdout), (whole, middle.ended.stdout));

    let beyond = attach(&mut client, &id, &exec, (1_000_000, 0)).await.err().unwrap();
    assert_eq!(why(&beyond), (Code::OutOfRange, "OUTPUT_DROPPED".into()));
    let unknown = attach(&mut client, &id, "exe_none", (0, 0)).await.err().unwrap();
    assert_eq!(why(&unknown), (Code::NotFound, "EXEC_NOT_FOUND".into()));
}

#[tokio::test]
async fn a_client_that_goes_away_takes_its_command_along_unless_it_said_otherwise() {
    let bed = Bed::new().await;
    let mut client = bed.sandboxes().await;
    let id = create(&mut client, plain()).await.sandbox_id;
    let keep = proto::ExecStart {
        on_disconnect: proto::OnDisconnect::Keep.into(),
        ..shell(&id, "sleep 100")
    };
    let kept = start(&mut client, keep).await.unwrap();
    let killed = start(&mut client, shell(&id, "sleep 100")).await.unwrap();
    let ids = (kept.exec_id.clone(), killed.exec_id.clone());
    drop((kept, killed));
    let request = proto::ListExecsRequest { sandbox_id: id.clone() };
    let mut list = async || client.list_execs(request.clone()).await.unwrap().into_inner().execs;
    eventually("one of them has ended", async || {
        list().await.iter().any(|exec| exec.ended.is_some())
    })
    .await;
    let execs = list().await;
    let causes: Vec<_> = execs
        .iter()
        .map(|exec| exec.ended.as_ref().map(|ended| ended.cause()))
        .collect();
    assert_eq!(causes, [None, Some(Cause::Disconnected)]);
    assert_eq!((execs[0].exec_id.clone(), execs[1].exec_id.clone()), ids);
    assert!(!execs[0].attached);
}

#[tokio::test]
async fn input_reaches_a_command_and_its_end_too() {
    let bed = Bed::new().await;
    let mut client = bed.sandboxes().await;
    let id = create(&mut client, plain()).await.sandbox_id;
    let request = proto::ExecStart {
        stdin: true,
        ..shell(&id, "cat")
    };
    let mut running = start(&mut client, request.clone()).await.unwrap();
    running.say(exec_request::Kind::Stdin(b"one\n".to_vec())).await;
    running.until(b"one\n").await;
    running.say(exec_request::Kind::Stdin(b"two".to_vec())).await;
    running.say(exec_request::Kind::StdinEof(true)).await;
    let came = running.finish().await.unwrap();
    assert_eq!(
        (came.stdout.as_slice(), came.ended.exit_code),
        (b"two".as_slice(), Some(0))
    );

    // A half-closed call is an end of input as well.
    let mut running = start(&mut client, request.clone()).await.unwrap();
    running.hang_up();
    assert_eq!(running.finish().await.unwrap().cause(), Cause::Exited);

    let running = start(&mut client, request).await.unwrap();
    running.say(exec_request::Kind::Kill(true)).await;
    let ended = running.finish().await.unwrap().ended;
    assert_eq!((ended.cause(), ended.by.as_str()), (Cause::Killed, "tester"));
}

/// A file of this many numbered bytes in the workspace, as `big`.
async fn big(client: &mut crate::support::Sandboxes, id: &str, size: usize) -> Vec<u8> {
    let whole: Vec<u8> = (0..size).map(|n| (n / 7) as u8).collect();
    super::files::write(client, id, b"big", &whole).await;
    whole
}

#[tokio::test]
async fn output_waits_for_its_reader_or_is_dropped_and_counted() {
    const SIZE: usize = 8 << 20;
    let bed = Bed::new().await;
    let mut client = bed.sandboxes().await;
    let id = create(&mut client, plain()).await.sandbox_id;
    let whole = big(&mut client, &id, SIZE).await;

    let waiting = start(&mut client, shell(&id, "cat big")).await.unwrap();
    let dropping = proto::ExecStart {
        overflow: proto::Overflow::Drop.into(),
        ..shell(&id, "cat big")
    };
    let mut dropping = start(&mut client, dropping).await.unwrap();
    let request = proto::ListExecsRequest { sandbox_id: id.clone() };
    let mut other = bed.sandboxes().await;
    let mut ended = async || {
        let execs = other.list_execs(request.clone()).await.unwrap().into_inner().execs;
        execs.iter().map(|exec| exec.ended.is_some()).collect::<Vec<_>>()
    };
    eventually("it ends though nobody reads", async || ended().await == [false, true]).await;

    let (mut received, mut next, mut gap) = (0_u64, 0_u64, 0_u64);
    let end = loop {
        match dropping.next().await.unwrap().unwrap() {
            exec_event::Kind::Stdout(output) => {
                gap += output.offset - next;
                let at = output.offset as usize;
                assert!(output.data == whole[at..at + output.data.len()]);
                received += output.data.len() as u64;
                next = output.offset + output.data.len() as u64;
            }
            exec_event::Kind::Ended(ended) => break ended,
            other => panic!("{other:?}"),
        }
    };
    let counts = end.stdout.unwrap();
    assert!(gap > 0, "the oldest was thrown away");
    assert_eq!((counts.bytes, counts.dropped_bytes), (SIZE as u64, gap));
    assert_eq!(received + gap, SIZE as u64);

    let came = waiting.finish().await.unwrap();
    assert!(came.stdout == whole, "nothing is lost where it waits");
    assert_eq!(came.ended.stdout.unwrap().dropped_bytes, 0);
}

#[tokio::test]
async fn a_timeout_is_told_with_its_limit() {
    let bed = Bed::new().await;
    let mut client = bed.sandboxes().await;
    let id = create(&mut client, plain()).await.sandbox_id;
    let request = proto::ExecStart {
        timeout: span(Duration::from_millis(50)),
        ..shell(&id, "echo early; sleep 100")
    };
    let came = start(&mut client, request).await.unwrap().finish().await.unwrap();
    assert_eq!(came.stdout, b"early\n");
    assert_eq!((came.cause(), came.ended.limit), (Cause::TimedOut, Some(50)));
    assert_eq!(run(&mut client, &id, "echo next").await.stdout, b"next\n");
}
