//! `exec` and `attach`: bytes, exit codes, and a connection that breaks.

use std::io::Write;
use std::process::Stdio;

use exuvia::api::proto::exec_ended::Cause;
use exuvia::api::proto::exec_event::Kind;
use exuvia::api::proto::{AttachStart, ExecEnded, ExecEvent, ExecOutput, ExecStarted};
use serde_json::json;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use super::double::{Double, Events, Script};
use crate::desk::{Desk, Done};

fn event(kind: Kind) -> Result<ExecEvent, Status> {
    Ok(ExecEvent { kind: Some(kind) })
}

fn started() -> Result<ExecEvent, Status> {
    event(Kind::Started(ExecStarted {
        exec_id: "exe_x".into(),
        pid: 7,
    }))
}

fn out(offset: u64, data: &[u8]) -> Result<ExecEvent, Status> {
    let data = data.to_vec();
    event(Kind::Stdout(ExecOutput {
        offset,
        data: data.into(),
    }))
}

fn err(offset: u64, data: &[u8]) -> Result<ExecEvent, Status> {
    let data = data.to_vec();
    event(Kind::Stderr(ExecOutput {
        offset,
        data: data.into(),
    }))
}

fn ended(cause: Cause, edit: fn(&mut ExecEnded)) -> Result<ExecEvent, Status> {
    let mut ended = ExecEnded {
        cause: cause.into(),
        ..Default::default()
    };
    edit(&mut ended);
    event(Kind::Ended(ended))
}

fn exited(code: i32) -> Result<ExecEvent, Status> {
    let end = ExecEnded {
        cause: Cause::Exited.into(),
        exit_code: Some(code),
        ..Default::default()
    };
    event(Kind::Ended(end))
}

fn execs(events: Events) -> Double {
    Double::start(Script {
        execs: vec![events],
        ..Default::default()
    })
}

const EXEC: [&str; 5] = ["sandbox", "exec", "sbx_x", "--", "true"];

#[test]
fn output_and_exit_code_are_the_commands_own() {
    let desk = Desk::bare();
    let bytes: Vec<u8> = (0..=255).collect();
    let double = execs(vec![
        started(),
        out(0, &bytes),
        err(0, b"\xff\n"),
        out(256, b"\n"),
        exited(42),
    ]);
    let output = double.command(&desk, &EXEC).output().unwrap();
    assert_eq!(output.status.code(), Some(42));
    assert_eq!(output.stderr, b"\xff\n");
    assert_eq!(output.stdout[..257], [&bytes[..], b"\n"].concat());
    let object: serde_json::Value = serde_json::from_slice(&output.stdout[257..]).unwrap();
    assert_eq!(
        (&object["exec_id"], &object["cause"], &object["exit_code"]),
        (&json!("exe_x"), &json!({ "type": "exited", "code": 42 }), &json!(42))
    );
    let script = double.script.lock().unwrap();
    let start = &script.started[0];
    assert_eq!(
        (start.by.as_str(), start.argv[0].as_slice(), start.stdin),
        ("grace", &b"true"[..], false)
    );
}

#[test]
fn what_ended_it_is_said_and_has_its_code() {
    let desk = Desk::bare();
    let memory = |end: &mut ExecEnded| (end.limit, end.peak) = (Some(64 << 20), Some(64 << 20));
    for (end, code, said) in [
        (
            ended(Cause::TimedOut, |end| end.limit = Some(5_000)),
            124,
            "timed out after 5s",
        ),
        (
            ended(Cause::OutOfMemory, memory),
            137,
            "out of memory: limit 64 MiB, peak 64 MiB",
        ),
        (
            ended(Cause::Signalled, |end| end.signal = Some(15)),
            143,
            "died of signal 15 (SIGTERM)",
        ),
        (
            ended(Cause::SandboxExpired, |_| {}),
            125,
            "the sandbox is gone: its time to live was up",
        ),
    ] {
        let done = execs(vec![started(), end]).call(&desk, &EXEC);
        assert_eq!(
            (done.code, done.stderr.as_str()),
            (code, format!("exuvia: {said}\n").as_str())
        );
    }
    let refused = |code, reason: &str, message: &str| {
        Err(Status::with_error_details(
            code,
            message,
            ErrorDetails::with_error_info(reason, "exuvia", []),
        ))
    };
    for (refusal, code, said) in [
        (
            refused(Code::InvalidArgument, "PROGRAM_NOT_FOUND", "no program `x`"),
            127,
            "no program `x`",
        ),
        (
            refused(Code::InvalidArgument, "CWD_NOT_FOUND", "no directory"),
            126,
            "no directory",
        ),
        (
            refused(Code::NotFound, "SANDBOX_NOT_FOUND", "no sandbox `sbx_x`"),
            125,
            "no sandbox `sbx_x`",
        ),
    ] {
        let done = execs(vec![refusal]).call(&desk, &EXEC);
        assert_eq!(
            (done.code, done.stderr.as_str()),
            (code, format!("exuvia: {said}\n").as_str())
        );
        assert_eq!(done.json()["exit_code"], code);
    }
    // Nobody there at all.
    let gone = desk.call(&["sandbox", "exec", "sbx_x", "--server", "127.0.0.1:1", "--", "true"]);
    assert_eq!(gone.code, 125, "{gone:?}");
    let gone = desk.call(&["sandbox", "get", "sbx_x", "--server", "127.0.0.1:1"]);
    assert_eq!(gone.ended(7)["error"]["kind"], "unavailable");
}

#[test]
fn a_broken_stream_is_taken_up_where_it_broke() {
    let desk = Desk::bare();
    let lost = || Err(Status::unavailable("the line is dead"));
    let double = Double::start(Script {
        execs: vec![vec![started(), out(0, b"one "), err(0, b"e"), lost()]],
        attaches: vec![
            vec![lost()],
            // From an earlier place than was asked for, and broken again.
            vec![started(), out(0, b"one two "), lost()],
            vec![started(), err(1, b"rr"), out(8, b"three\n"), exited(0)],
        ],
        ..Default::default()
    });
    let done = double.call(&desk, &EXEC);
    let object = done.ended(0);
    assert_eq!(object["exit_code"], 0);
    assert!(done.stdout.starts_with("one two three\n{"), "{done:?}");
    assert_eq!(done.stderr, "err");
    let from = |stdout_offset, stderr_offset| AttachStart {
        sandbox_id: "sbx_x".into(),
        exec_id: "exe_x".into(),
        stdout_offset,
        stderr_offset,
        pty_offset: 0,
    };
    assert_eq!(
        double.script.lock().unwrap().attached,
        [from(4, 1), from(4, 1), from(8, 1)]
    );
}

#[test]
fn what_the_server_dropped_is_told_and_passed_over() {
    let desk = Desk::bare();
    let kept = [("stream", "stdout"), ("first_offset", "100"), ("end_offset", "120")];
    let kept = kept.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let details = ErrorDetails::with_error_info("OUTPUT_DROPPED", "exuvia", kept);
    let dropped = Status::with_error_details(Code::OutOfRange, "stdout is kept from byte 100", details);
    let double = Double::start(Script {
        execs: vec![vec![started(), out(0, b"start "), Err(Status::unavailable("gone"))]],
        attaches: vec![vec![Err(dropped.clone())], vec![out(100, b"end\n"), exited(3)]],
        ..Default::default()
    });
    let done = double.call(&desk, &EXEC);
    assert_eq!(done.code, 3, "{done:?}");
    assert!(done.stdout.starts_with("start end\n"), "{done:?}");
    assert_eq!(
        done.stderr,
        "exuvia: 94 bytes of output are lost: the server had dropped them\n"
    );
    assert_eq!(double.script.lock().unwrap().attached[1].stdout_offset, 100);
    // Asked for by a person, it is a refusal.
    let double = Double::start(Script {
        attaches: vec![vec![Err(dropped)]],
        ..Default::default()
    });
    let from = ["--from", "3", "--from-stderr", "5"];
    let done = double.call(&desk, &[&["sandbox", "attach", "sbx_x", "exe_x"][..], &from].concat());
    assert_eq!(
        (done.code, done.stderr.as_str()),
        (125, "exuvia: stdout is kept from byte 100\n")
    );
    let asked = double.script.lock().unwrap().attached[0].clone();
    assert_eq!((asked.stdout_offset, asked.stderr_offset, asked.pty_offset), (3, 5, 3));
}

#[test]
fn input_goes_in_whole_and_its_end_too() {
    let desk = Desk::bare();
    let double = execs(vec![started(), out(0, b"ok\n"), exited(0)]);
    let mut child = double
        .command(&desk, &["sandbox", "exec", "-i", "sbx_x", "--", "cat"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let input: Vec<u8> = (0..3_000_000u32).map(|n| (n % 251) as u8).collect();
    child.stdin.take().unwrap().write_all(&input).unwrap();
    let done: Done = child.wait_with_output().unwrap().into();
    done.ended(0);
    assert_eq!(double.script.lock().unwrap().stdin, input);
}

#[test]
fn a_detached_command_is_named_and_left_alone() {
    let desk = Desk::bare();
    let double = execs(vec![started()]);
    let done = double
        .call(&desk, &["sandbox", "exec", "-d", "sbx_x", "--", "server"])
        .ended(0);
    assert_eq!(done, json!({ "sandbox_id": "sbx_x", "exec_id": "exe_x", "pid": 7 }));
    let on_disconnect = double.script.lock().unwrap().started[0].on_disconnect();
    assert_eq!(on_disconnect, exuvia::api::proto::OnDisconnect::Keep);
}
