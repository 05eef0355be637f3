//! Cases on a pseudo-terminal, and over a dialled connection.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::Case;
use super::real::assert_no_sleepers;
use crate::sandbox::exec::{Cause, TerminalSize};
use crate::sandbox::{Command, Error, Exec, Output};

const SIZE: TerminalSize = TerminalSize { rows: 30, columns: 90 };

/// Reads what the terminal shows until it holds `wanted`; all of it so far.
async fn until(exec: &mut Exec, shown: &mut String, wanted: &str) {
    let seen = async {
        while !shown.contains(wanted) {
            match exec.output.recv().await {
                Some(Output::Pty(piece)) => shown.push_str(&String::from_utf8_lossy(&piece)),
                other => panic!("{other:?} after {shown:?}"),
            }
        }
    };
    if tokio::time::timeout(Duration::from_secs(10), seen).await.is_err() {
        panic!("no {wanted:?} in {shown:?}");
    }
    let after = shown.find(wanted).unwrap_or(0) + wanted.len();
    shown.drain(..after);
}

pub async fn a_terminal_is_one(case: &Case) {
    let script = "test -t 0 && test -t 1 && test -t 2 && tty && stty size && echo $TERM; trap 'stty size' WINCH
        echo ready; while :; do sleep 0.05; done";
    let mut exec = case.sandbox.exec(Command::shell(script).terminal(SIZE)).await.unwrap();
    let mut shown = String::new();
    until(&mut exec, &mut shown, "/dev/pts/").await;
    until(&mut exec, &mut shown, "30 90\r\nxterm-256color\r\n").await;
    until(&mut exec, &mut shown, "ready").await;
    exec.control()
        .resize(TerminalSize { rows: 5, columns: 7 })
        .await
        .unwrap();
    until(&mut exec, &mut shown, "5 7").await;
    exec.input(b"\x03").await.unwrap();
    let ended = exec.ended().await;
    assert_eq!(ended.cause, Cause::Signalled { signal: libc::SIGINT });
    assert!(ended.pty.bytes > 0 && ended.stdout.bytes == 0, "{ended:?}");
}

/// Ctrl-Z, fg, Ctrl-C, Ctrl-D, as at any terminal; and all of it goes at the end.
pub async fn a_terminal_has_job_control(case: &Case) {
    let command = Command::new(["sh", "-i"]).env("PS1", "> ").terminal(SIZE);
    stop_and_go_on(case, command.clone()).await;
    let mut exec = case.sandbox.exec(command).await.unwrap();
    let mut shown = String::new();
    until(&mut exec, &mut shown, "> ").await;
    exec.input(b"sleep 300 & echo be''gun\n").await.unwrap();
    shown.clear();
    until(&mut exec, &mut shown, "begun").await;
    exec.kill("dave").await.unwrap();
    assert_eq!(exec.ended().await.cause, Cause::Killed { by: "dave".to_owned() });
    assert_no_sleepers(case).await;
}

async fn stop_and_go_on(case: &Case, command: Command) {
    let mut exec = case.sandbox.exec(command).await.unwrap();
    let mut shown = String::new();
    until(&mut exec, &mut shown, "> ").await;
    exec.input(b"echo be''gun; sleep 300\n").await.unwrap();
    until(&mut exec, &mut shown, "begun").await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    exec.input(b"\x1a").await.unwrap();
    until(&mut exec, &mut shown, "Stopped").await;
    exec.input(b"fg\n").await.unwrap();
    until(&mut exec, &mut shown, "sleep 300").await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    exec.input(b"\x03").await.unwrap();
    exec.input(b"echo co''de $?\n").await.unwrap();
    until(&mut exec, &mut shown, "code 130").await;
    exec.control().close_input().await.unwrap();
    assert!(matches!(exec.ended().await.cause, Cause::Exited { .. }));
}

/// Within a line, where one Ctrl-D would only hand the line over, as well as at its beginning.
pub async fn a_terminal_has_an_end_of_input(case: &Case) {
    for text in ["a line\n", "half of one"] {
        let exec = case.sandbox.exec(Command::new(["cat"]).terminal(SIZE)).await.unwrap();
        exec.input(text.as_bytes()).await.unwrap();
        exec.control().close_input().await.unwrap();
        let ended = tokio::time::timeout(Duration::from_secs(10), exec.finish(100)).await;
        let ended = ended.unwrap_or_else(|_| panic!("no end after {text:?}")).ended;
        assert_eq!(ended.cause, Cause::Exited { code: 0 }, "{text:?}");
    }
}

/// Whoever edits lines by itself has the terminal raw, and lines only while a command of its own runs: the end of input
/// reaches it whatever is going on when it comes, and the command too.
pub async fn a_raw_terminal_has_an_end_of_input(case: &Case) {
    if !case.sh("command -v bash").await.ended.is_success() {
        eprintln!(
            "SKIPPED {}::a_raw_terminal_has_an_end_of_input: no bash in it",
            module_path!()
        );
        return;
    }
    for text in ["", "sleep 0.4\n", "cat\nfirst\n", "cat\nhalf"] {
        let command = Command::new(["bash", "--norc", "-i"]).env("PS1", "> ").terminal(SIZE);
        let exec = case.sandbox.exec(command).await.unwrap();
        exec.input(text.as_bytes()).await.unwrap();
        exec.control().close_input().await.unwrap();
        let ended = tokio::time::timeout(Duration::from_secs(10), exec.finish(10_000)).await;
        let ended = ended.unwrap_or_else(|_| panic!("no end after {text:?}")).ended;
        assert_eq!(ended.cause, Cause::Exited { code: 0 }, "{text:?}");
    }
    // Of a program that reads keys it is one, and the terminal stays what it was.
    let script = "stty raw -echo; echo ready; head -c 1 | od -An -tx1; stty sane; echo still here";
    let mut exec = case.sandbox.exec(Command::shell(script).terminal(SIZE)).await.unwrap();
    let mut shown = String::new();
    until(&mut exec, &mut shown, "ready").await;
    exec.control().close_input().await.unwrap();
    until(&mut exec, &mut shown, "04").await;
    until(&mut exec, &mut shown, "still here").await;
    assert_eq!(exec.ended().await.cause, Cause::Exited { code: 0 });
}

/// One that listens on a port and sends everything back, twice.
const ECHO: &str = r#"use IO::Socket::INET; my $s = IO::Socket::INET->new(LocalAddr => "127.0.0.1", LocalPort => 8123,
    Listen => 5, ReuseAddr => 1) or die; while (my $c = $s->accept) { my $all = ""; while (sysread $c, my $b, 65536) { $all .= $b }
    print $c $all, $all; close $c }"#;

pub async fn a_port_inside_can_be_dialled(case: &Case) {
    let refused = case.sandbox.dial(8123, Duration::ZERO).await;
    assert!(matches!(refused, Err(Error::Refused { port: 8123, .. })), "{refused:?}");
    if !case.sh("perl -MIO::Socket::INET -e 1").await.ended.is_success() {
        eprintln!(
            "SKIPPED {}::a_port_inside_can_be_dialled (the echo): no perl in it",
            module_path!()
        );
        return;
    }
    let server = case.sandbox.exec(Command::new(["perl", "-e", ECHO])).await.unwrap();
    let sent: Vec<u8> = (0..3_000_000_u32).map(|n| (n % 253) as u8).collect();
    for _ in 0..3 {
        let mut stream = case.sandbox.dial(8123, Duration::from_secs(10)).await.unwrap();
        stream.write_all(&sent).await.unwrap();
        stream.shutdown().await.unwrap();
        let mut got = Vec::new();
        stream.read_to_end(&mut got).await.unwrap();
        assert!(got.len() == 2 * sent.len() && got[..sent.len()] == sent && got[sent.len()..] == sent);
    }
    server.kill("erin").await.unwrap();
    server.ended().await;
}
