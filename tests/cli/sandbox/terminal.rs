//! `exec` at a terminal, and what signals do without one.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};

use exuvia::api::proto::exec_event::Kind;
use exuvia::api::proto::{ExecEnded, ExecEvent, ExecOutput, ExecStarted, TerminalSize, exec_ended::Cause};
use nix::pty::{OpenptyResult, Winsize, openpty};
use nix::sys::signal::{Signal, kill};
use nix::sys::termios::{LocalFlags, Termios, tcgetattr};
use nix::unistd::Pid;
use tonic::Status;

use super::double::{Double, Script};
use crate::desk::Desk;

fn event(kind: Kind) -> Result<ExecEvent, Status> {
    Ok(ExecEvent { kind: Some(kind) })
}

fn started() -> Result<ExecEvent, Status> {
    event(Kind::Started(ExecStarted {
        exec_id: "exe_x".into(),
        pid: 7,
    }))
}

fn output(data: &[u8]) -> ExecOutput {
    let data = data.to_vec();
    ExecOutput {
        offset: 0,
        data: data.into(),
    }
}

fn ended(cause: Cause, exit_code: Option<i32>) -> Result<ExecEvent, Status> {
    event(Kind::Ended(ExecEnded {
        cause: cause.into(),
        exit_code,
        ..Default::default()
    }))
}

/// A terminal of 33 lines and 101 columns, and a program that has it.
struct Seat {
    keyboard: File,
    terminal: OwnedFd,
    child: Child,
}

impl Seat {
    fn take(mut command: Command) -> Self {
        let size = Winsize {
            ws_row: 33,
            ws_col: 101,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        let OpenptyResult { master, slave } = openpty(&size, None).unwrap();
        let again = || Stdio::from(slave.try_clone().unwrap());
        let child = command.stdin(again()).stdout(again()).stderr(again()).spawn().unwrap();
        Self {
            keyboard: File::from(master),
            terminal: slave,
            child,
        }
    }

    fn mode(&self) -> Termios {
        tcgetattr(&self.terminal).unwrap()
    }

    fn is_raw(&self) -> bool {
        !self
            .mode()
            .local_flags
            .intersects(LocalFlags::ICANON | LocalFlags::ECHO | LocalFlags::ISIG)
    }

    fn wait_until_raw(&self) {
        until("the terminal is raw", || self.is_raw());
    }
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = std::time::Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < crate::support::server::LONG, "{what}");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

#[test]
fn keys_go_through_raw_and_the_terminal_is_given_back() {
    let desk = Desk::bare();
    let double = Double::start(Script {
        execs: vec![vec![
            started(),
            event(Kind::Pty(output(b"bye\r\n"))),
            ended(Cause::Exited, Some(5)),
        ]],
        ..Default::default()
    });
    let mut seat = Seat::take(double.plain(&desk, &["sandbox", "exec", "-it", "sbx_x", "--", "sh"]));
    let before = seat.mode();
    assert!(!seat.is_raw());
    seat.wait_until_raw();
    // Ctrl-C is a key like others; Ctrl-D is what the double ends at.
    seat.keyboard.write_all(b"ls\r\x03\x1d\x04").unwrap();
    assert_eq!(seat.child.wait().unwrap().code(), Some(5));
    assert_eq!(seat.mode(), before);
    let mut shown = [0; 5];
    seat.keyboard.read_exact(&mut shown).unwrap();
    assert_eq!(&shown, b"bye\r\n");
    let script = double.script.lock().unwrap();
    assert_eq!(script.stdin, b"ls\r\x03\x1d\x04");
    let size = TerminalSize { rows: 33, columns: 101 };
    assert_eq!(script.started[0].terminal, Some(size));
    assert_eq!(script.started[0].env["TERM"], "dumb");
    assert!(script.sizes.iter().all(|told| *told == size) && !script.sizes.is_empty());
}

#[test]
fn a_real_sandbox_has_this_terminals_size_and_takes_its_keys() {
    let Some(desk) = Desk::new("a_real_sandbox_has_this_terminals_size_and_takes_its_keys") else {
        return;
    };
    let served = crate::served::Served::tidy(&desk);
    let made = served.sandbox(&desk, &["create"]);
    let id = made.stdout.trim_end();
    let mut command = desk.plain(&[
        "sandbox",
        "exec",
        "-it",
        id,
        "--",
        "sh",
        "-c",
        "stty size; read line; echo got $line; exit 4",
    ]);
    command.env("EXUVIA_SERVER", &served.url);
    let mut seat = Seat::take(command);
    let before = seat.mode();
    seat.wait_until_raw();
    seat.keyboard.write_all(b"abc\r").unwrap();
    assert_eq!(seat.child.wait().unwrap().code(), Some(4));
    assert_eq!(seat.mode(), before);
    let mut shown = String::new();
    until("what it wrote is there", || {
        let mut some = [0; 256];
        let got = seat.keyboard.read(&mut some).unwrap();
        shown += &String::from_utf8_lossy(&some[..got]);
        shown.ends_with("got abc\r\n")
    });
    assert!(shown.contains("33 101\r\n"), "{shown:?}");
    // Killed over the line, the whole tree goes: Ctrl-C is a key that the terminal inside makes a signal of.
    let mut command = desk.plain(&["sandbox", "exec", "-it", id, "--", "sleep", "1000"]);
    command.env("EXUVIA_SERVER", &served.url);
    let mut seat = Seat::take(command);
    seat.wait_until_raw();
    seat.keyboard.write_all(b"\x03").unwrap();
    assert_eq!(seat.child.wait().unwrap().code(), Some(130));
}

/// Leaves by `keys` a command that was started apart, and comes back to it.
#[test]
fn the_detach_keys_leave_a_command_running() {
    let Some(desk) = Desk::new("the_detach_keys_leave_a_command_running") else {
        return;
    };
    let served = crate::served::Served::tidy(&desk);
    let made = served.sandbox(&desk, &["create"]);
    let id = made.stdout.trim_end();
    let words = [
        "sandbox",
        "exec",
        "-it",
        "--on-disconnect",
        "keep",
        id,
        "--",
        "sh",
        "-c",
        "read line; echo got $line; exit 4",
    ];
    let seated = |words: &[&str]| {
        let mut command = desk.plain(words);
        command.env("EXUVIA_SERVER", &served.url);
        let seat = Seat::take(command);
        seat.wait_until_raw();
        seat
    };
    let mut seat = seated(&words);
    seat.keyboard.write_all(b"\x10\x11").unwrap();
    assert_eq!(seat.child.wait().unwrap().code(), Some(130));
    let listed = served.sandbox(&desk, &["ps", id, "--json"]);
    let listed: serde_json::Value = serde_json::from_str(&listed.stdout).unwrap();
    let exec = &listed["execs"][0];
    assert_eq!(
        (&exec["attached"], &exec["ended"]),
        (&false.into(), &serde_json::Value::Null),
        "{listed}"
    );
    let exec = exec["exec_id"].as_str().unwrap();
    // By keys of one's own; the usual ones are then input like any other.
    let mut seat = seated(&["sandbox", "attach", "-it", "--detach-keys", "ctrl-x,d", id, exec]);
    seat.keyboard.write_all(b"\x18d").unwrap();
    assert_eq!(seat.child.wait().unwrap().code(), Some(130));
    let mut seat = seated(&["sandbox", "attach", "-it", id, exec]);
    seat.keyboard.write_all(b"abc\r").unwrap();
    assert_eq!(seat.child.wait().unwrap().code(), Some(4));
}

#[test]
fn however_it_ends_the_terminal_is_given_back() {
    for way in ["keys", "other keys", "SIGTERM", "SIGHUP", "the stream"] {
        let desk = Desk::bare();
        let refused = Err(Status::permission_denied("no more"));
        let double = Double::start(Script {
            execs: vec![vec![started(), refused]],
            ..Default::default()
        });
        let mut seat = Seat::take(double.plain(&desk, &["sandbox", "exec", "-it", "sbx_x", "--", "sh"]));
        let before = seat.mode();
        seat.wait_until_raw();
        let pid = Pid::from_raw(seat.child.id() as i32);
        let code = match way {
            "keys" => {
                seat.keyboard.write_all(b"\x1d.").unwrap();
                130
            }
            "other keys" => {
                seat.keyboard.write_all(b"\x10\x11").unwrap();
                130
            }
            // The first ones go to the command; it is the fourth that leaves.
            "SIGTERM" => {
                for sent in 1..=4 {
                    kill(pid, Signal::SIGTERM).unwrap();
                    if sent < 4 {
                        until("the signal is passed on", || {
                            double.script.lock().unwrap().signals.len() == sent
                        });
                    }
                }
                let script = double.script.lock().unwrap();
                let told: Vec<_> = script
                    .signals
                    .iter()
                    .map(|signal| (signal.signal, signal.tree))
                    .collect();
                assert_eq!(told, [(15, false), (15, true), (9, true)]);
                130
            }
            "SIGHUP" => {
                kill(pid, Signal::SIGHUP).unwrap();
                130
            }
            _ => {
                seat.keyboard.write_all(b"\x04").unwrap();
                125
            }
        };
        assert_eq!(seat.child.wait().unwrap().code(), Some(code), "{way}");
        assert_eq!(seat.mode(), before, "{way}");
    }
}

#[test]
fn without_a_terminal_ctrl_c_is_a_signal_for_the_command() {
    let desk = Desk::bare();
    let double = Double::start(Script {
        execs: vec![vec![
            started(),
            event(Kind::Stdout(output(b"ready\n"))),
            ended(Cause::Exited, Some(9)),
        ]],
        holds_after: Some(1),
        ..Default::default()
    });
    let mut child = double
        .plain(&desk, &["sandbox", "exec", "sbx_x", "--", "sh"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut ready = [0; 6];
    child.stdout.as_mut().unwrap().read_exact(&mut ready).unwrap();
    kill(Pid::from_raw(child.id() as i32), Signal::SIGINT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(9));
    let script = double.script.lock().unwrap();
    let [signal] = script.signals.as_slice() else {
        panic!("{:?}", script.signals);
    };
    assert_eq!(
        (signal.exec_id.as_str(), signal.signal, signal.tree, signal.by.as_str()),
        ("exe_x", 2, false, "grace")
    );
}

#[test]
fn a_command_whose_output_nobody_reads_is_killed() {
    let desk = Desk::bare();
    let pieces = (0..64u64).map(|n| {
        event(Kind::Stdout(ExecOutput {
            offset: n << 16,
            data: vec![b'x'; 1 << 16].into(),
        }))
    });
    let events = [started()]
        .into_iter()
        .chain(pieces)
        .chain([ended(Cause::Exited, Some(0))]);
    let double = Double::start(Script {
        execs: vec![events.collect()],
        holds_after: Some(64),
        ..Default::default()
    });
    let mut child = double
        .plain(&desk, &["sandbox", "exec", "sbx_x", "--", "yes"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut some = [0; 1000];
    child.stdout.as_mut().unwrap().read_exact(&mut some).unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(141), &b""[..]));
    let signals = &double.script.lock().unwrap().signals;
    assert_eq!((signals[0].signal, signals[0].tree), (9, true));
}
