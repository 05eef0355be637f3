//! `port-forward`, `run-code` and `watch`.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::process::Stdio;

use exuvia::api::proto::code_event::Kind;
use exuvia::api::proto::{CodeEnded, CodeError, CodeEvent, CodeResult, ExecOutput, FileChange, file_change::Type};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use super::double::{Double, Script};
use crate::desk::{Desk, Done};

#[test]
fn connections_here_become_connections_inside() {
    let desk = Desk::bare();
    let double = Double::start(Script::default());
    let mut child = double
        .command(&desk, &["sandbox", "port-forward", "sbx_x", "0:8080", "0:80"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut told = String::new();
    BufReader::new(child.stdout.as_mut().unwrap())
        .read_line(&mut told)
        .unwrap();
    let told: Value = serde_json::from_str(&told).unwrap();
    let forwarding = told["forwarding"].as_array().unwrap();
    assert_eq!(
        (&forwarding[0]["port"], &forwarding[1]["port"]),
        (&json!(8080), &json!(80))
    );
    let address = forwarding[0]["listening"].as_str().unwrap();
    assert!(address.starts_with("127.0.0.1:"), "{address}");
    // Two at once, each with its own bytes; the half-close goes through, and what is said after it comes back.
    let mut two = [(); 2].map(|()| TcpStream::connect(address).unwrap());
    for (n, stream) in two.iter_mut().enumerate() {
        stream.write_all(format!("hello {n}").as_bytes()).unwrap();
    }
    for (n, stream) in two.iter_mut().enumerate() {
        stream.shutdown(Shutdown::Write).unwrap();
        let mut got = String::new();
        stream.read_to_string(&mut got).unwrap();
        assert_eq!(got, format!("HELLO {n}!"));
    }
    kill(Pid::from_raw(child.id() as i32), Signal::SIGINT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let dialled = &double.script.lock().unwrap().dialled;
    assert_eq!(dialled.len(), 2);
    assert!(
        dialled
            .iter()
            .all(|start| start.port == 8080 && start.sandbox_id == "sbx_x")
    );
}

fn code(events: Vec<Kind>) -> Double {
    Double::start(Script {
        code: events.into_iter().map(|kind| CodeEvent { kind: Some(kind) }).collect(),
        ..Default::default()
    })
}

#[test]
fn code_shows_its_output_its_values_and_its_errors() {
    let desk = Desk::bare();
    let data = [
        ("text/plain".to_owned(), b"<Figure>".to_vec()),
        ("image/png".to_owned(), b"\x89PNG".to_vec()),
    ];
    let value = |is_main| {
        Kind::Result(CodeResult {
            data: data.clone().into(),
            is_main,
        })
    };
    let printed = || {
        Kind::Stdout(ExecOutput {
            offset: 0,
            data: b"6 * 7".to_vec().into(),
        })
    };
    let well = || {
        Kind::Ended(CodeEnded {
            ok: true,
            ..Default::default()
        })
    };
    let words = ["sandbox", "run-code", "sbx_x", "--code", "6*7", "--save", "."];
    let done: Done = code(vec![printed(), value(true), well()])
        .plain(&desk, &words)
        .output()
        .unwrap()
        .into();
    assert_eq!((done.code, done.stdout.as_str()), (0, "6 * 7\n<Figure>\n"));
    assert_eq!(std::fs::read(desk.path().join("result-1.png")).unwrap(), b"\x89PNG");

    let error = || {
        Kind::Error(CodeError {
            name: "ValueError".into(),
            value: "no\u{1b}[2J".into(),
            traceback: String::new(),
        })
    };
    let bad = || Kind::Ended(CodeEnded::default());
    let done: Done = code(vec![printed(), error(), bad()])
        .plain(&desk, &["sandbox", "run-code", "sbx_x", "-c", "x"])
        .output()
        .unwrap()
        .into();
    assert_eq!(
        (done.code, done.stdout.as_str(), done.stderr.as_str()),
        (1, "6 * 7\n", "ValueError: no\u{fffd}[2J\n")
    );
    let done = code(vec![printed(), value(false), well()]).call(&desk, &["sandbox", "run-code", "sbx_x", "-c", "x"]);
    let lines: Vec<Value> = done
        .stdout
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(lines[0], json!({ "stdout": "6 * 7" }));
    assert_eq!(
        lines[1],
        json!({ "result": { "data": { "image/png": "iVBORw==", "text/plain": "<Figure>" }, "is_main": false, "files": [] } })
    );
    assert_eq!((&lines[2]["ended"]["ok"], lines.len()), (&json!(true), 3));
}

#[test]
fn changes_are_told_line_by_line() {
    let desk = Desk::bare();
    let change = |kind: Type, path: &[u8], directory| FileChange {
        r#type: kind.into(),
        path: path.to_vec(),
        directory,
    };
    let changes = || {
        vec![
            change(Type::Unspecified, b"", false),
            change(Type::Created, b"src", true),
            change(Type::MovedTo, b"a\x1bb", false),
            change(Type::Lost, b"", false),
        ]
    };
    let double = Double::start(Script {
        changes: changes(),
        ..Default::default()
    });
    let done: Done = double
        .plain(&desk, &["sandbox", "watch", "sbx_x"])
        .output()
        .unwrap()
        .into();
    assert_eq!(
        (done.code, done.stdout.as_str(), done.stderr.as_str()),
        (0, "created    src/\nmoved_to   a\u{fffd}b\nlost\n", "watching\n")
    );
    double.script.lock().unwrap().changes = changes();
    let done = double.call(&desk, &["sandbox", "watch", "sbx_x"]);
    let first = done.stdout.lines().next().unwrap();
    assert_eq!(first, r#"{"change":"created","directory":true,"path":"src"}"#);
}
