//! Cases with real programs: whole trees, descriptors, powers.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::{Case, is_full, resident_bytes};
use crate::sandbox::backend::Lack;
use crate::sandbox::exec::{Cause, EndReason, Stdin};
use crate::sandbox::{Command, Error, Output};

/// Marks processes of a case, so that leftovers can be told from others. `sleep` is the tree.
pub(super) const SLEEPERS: &str =
    "for p in /proc/[0-9]*/comm; do read -r name 2>/dev/null < $p && [ $name = sleep ] && echo $p; done; true";

pub(super) async fn assert_no_sleepers(case: &Case) {
    // What was killed may take a moment to be gone from /proc where nobody promised to wait for it.
    for _ in 0..100 {
        if case.output(SLEEPERS).await.is_empty() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("left running: {}", case.output(SLEEPERS).await);
}

/// T1: background, own session, double fork, and a program that ignores SIGTERM.
pub async fn t1_timeout_takes_every_descendant(case: &Case) {
    let script = "trap '' TERM; echo begun
        sleep 301 & setsid sleep 302 & (setsid sh -c 'trap \"\" TERM; sleep 303 & sleep 304' &) ; sleep 305; sleep 306";
    let finished = case
        .run(Command::shell(script).timeout(Duration::from_millis(400)))
        .await;
    assert_eq!(finished.ended.cause, Cause::TimedOut { after_ms: 400 });
    assert_eq!(finished.stdout.bytes(), b"begun\n");
    // Gone when the result is there, not some time after.
    assert_eq!(case.output(SLEEPERS).await, "");
}

/// T3.
pub async fn t3_timed_out_execs_leave_nothing(case: &Case) {
    const PROCESSES: &str = "ls -d /proc/[0-9]* | wc -l";
    let count = |text: String| text.trim().parse::<u32>().unwrap();
    let before = (case.output(PROCESSES).await, case.sandbox.usage().await.unwrap());
    let one = |_| async {
        let command = Command::shell("sleep 300 & sleep 300").grace(Duration::from_millis(50));
        let finished = case.run(command.timeout(Duration::from_millis(5))).await;
        assert_eq!(finished.ended.cause, Cause::TimedOut { after_ms: 5 });
    };
    let lacks = case.lacks(Lack::CommandsWithoutEnd);
    let rounds = if lacks && !is_full() { 200 } else { 1000 };
    for _ in 0..rounds / 8 {
        futures::future::join_all((0..8).map(one)).await;
    }
    // A shim may still be there for a moment after its last word, also that of the look before.
    let processes = count(before.0);
    let mut left = count(case.output(PROCESSES).await);
    for _ in 0..100 {
        if left <= processes {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
        left = count(case.output(PROCESSES).await);
    }
    assert!(left <= processes, "{left} processes, {processes} before");
    let after = case.sandbox.usage().await.unwrap();
    assert!(
        lacks || after.memory_bytes < before.1.memory_bytes + (8 << 20),
        "{:?}, then {after:?}",
        before.1
    );
    assert!(case.sh("date").await.ended.is_success());
}

/// T4.
pub async fn t4_fast_exits_lose_nothing(case: &Case) {
    let rounds = match (is_full(), case.lacks(Lack::CommandsWithoutEnd)) {
        (true, _) => 10_000,
        (false, true) => 200,
        (false, false) => 2000,
    };
    for round in 0..rounds {
        let mut exec = case.sandbox.exec(Command::new(["printf", "x"])).await.unwrap();
        assert_eq!(
            exec.output.recv().await,
            Some(Output::stdout(b"x".as_slice())),
            "round {round}"
        );
        assert_eq!(exec.output.recv().await, None, "round {round}");
        assert_eq!(exec.ended().await.cause, Cause::Exited { code: 0 }, "round {round}");
    }
}

/// T5, the user.
pub async fn t5_a_user_is_found_or_named(case: &Case) {
    let refused = |user: &str| {
        let command = Command::new(["true"]).user(user);
        async move {
            match case.sandbox.exec(command).await {
                Err(Error::NotStarted { code, message }) => (code, message),
                other => panic!("{other:?}"),
            }
        }
    };
    let (code, message) = refused("no-such-user").await;
    assert_eq!(code, "user_not_found");
    assert!(message.contains("no-such-user"), "{message}");
    for root in ["root", "0"] {
        assert_eq!(refused(root).await.0, "user_refused", "{root}");
    }
    assert_eq!(
        refused("4294967295").await.0,
        "user_refused",
        "nobody of another sandbox"
    );
    let other = (case.sandbox.handle().user + 1).to_string();
    let id = |user: &str| Command::shell("id -u; id -g; echo $USER").user(user);
    assert_eq!(
        case.run(id(&other)).await.stdout.text(),
        format!("{other}\n{other}\nsandbox\n")
    );
    let own = case.sandbox.handle().user;
    assert_eq!(
        case.run(id("sandbox")).await.stdout.text(),
        format!("{own}\n{own}\nsandbox\n")
    );
}

/// A guest that has always more to say is still heard to say that it is over.
pub async fn a_flood_holds_up_neither_kill_nor_time(case: &Case) {
    let flood = Command::shell("yes & yes >&2");
    let finished = case.run(flood.clone().timeout(Duration::from_millis(300))).await;
    assert_eq!(finished.ended.cause, Cause::TimedOut { after_ms: 300 });
    assert_eq!(finished.ended.stdout.bytes, finished.stdout.total_bytes());
    let mut exec = case.sandbox.exec(flood.clone()).await.unwrap();
    for _ in 0..10 {
        exec.output.recv().await.unwrap();
    }
    exec.kill("frank").await.unwrap();
    let finished = exec.finish(100).await;
    let by = "frank".to_owned();
    assert_eq!(finished.ended.cause, Cause::Killed { by: by.clone() });
    // SIGTERM first, which this one takes for a reason to say good-bye.
    let script = "trap 'echo bye; exit 0' TERM; echo ready; while :; do sleep 0.05; done";
    let mut exec = case.sandbox.exec(Command::shell(script)).await.unwrap();
    assert_eq!(exec.output.recv().await, Some(Output::stdout(b"ready\n".as_slice())));
    exec.control().terminate("frank").await.unwrap();
    let finished = exec.finish(100).await;
    assert_eq!(
        (finished.stdout.bytes(), finished.ended.cause),
        (b"bye\n".to_vec(), Cause::Killed { by })
    );
    let exec = case.sandbox.exec(flood).await.unwrap();
    exec.control().disconnected().await.unwrap();
    assert_eq!(exec.ended().await.cause, Cause::Disconnected);
}

pub async fn signals_reach_the_tree(case: &Case) {
    let inner = "trap 'echo inner' USR1; echo ready; while :; do sleep 0.05; done";
    let script = format!("trap 'echo outer' USR1; setsid sh -c \"{inner}\" & while :; do sleep 0.05; done");
    let mut exec = case.sandbox.exec(Command::shell(&script)).await.unwrap();
    assert_eq!(exec.output.recv().await, Some(Output::stdout(b"ready\n".as_slice())));
    exec.control().signal_tree(libc::SIGUSR1).await.unwrap();
    let mut said = Vec::new();
    while said.len() < 12 {
        // The shells tell of their children's end on the other stream.
        if let Output::Stdout(piece) = exec.output.recv().await.unwrap() {
            said.extend_from_slice(&piece);
        }
    }
    let mut lines: Vec<_> = said
        .split(|byte| *byte == b'\n')
        .filter(|line| !line.is_empty())
        .collect();
    lines.sort_unstable();
    assert_eq!(lines, [b"inner", b"outer"]);
    exec.kill("gus").await.unwrap();
    exec.ended().await;
}

/// T12: the sandbox is ended, and the program takes that for a reason to exit well.
pub async fn t12_a_good_end_is_no_excuse(case: &Case) {
    let script = "trap 'echo bye; exit 0' TERM; echo ready; while :; do sleep 0.05; done";
    let mut exec = case.sandbox.exec(Command::shell(script)).await.unwrap();
    assert_eq!(exec.output.recv().await, Some(Output::stdout(b"ready\n".as_slice())));
    case.sandbox.ending(EndReason::Expired);
    let (closed, finished) = tokio::join!(case.sandbox.close(Duration::from_secs(5)), exec.finish(100));
    closed.unwrap();
    assert_eq!(
        (finished.stdout.bytes(), finished.ended.cause),
        (b"bye\n".to_vec(), Cause::SandboxExpired)
    );
}

pub async fn hanging_up_kills_the_tree(case: &Case) {
    let mut exec = case
        .sandbox
        .exec(Command::shell("setsid sleep 300 & echo begun; sleep 300"))
        .await
        .unwrap();
    assert_eq!(exec.output.recv().await, Some(Output::stdout(b"begun\n".as_slice())));
    drop(exec);
    assert_no_sleepers(case).await;
}

pub async fn a_fork_bomb_ends(case: &Case) {
    // Bounded by itself too, for a backend without a cap on processes.
    let script = "f() { [ $1 -gt 0 ] || exec sleep 300; f $(($1 - 1)) & f $(($1 - 1)) & wait; }; f 4";
    let finished = case
        .run(Command::shell(script).timeout(Duration::from_millis(500)))
        .await;
    assert!(
        matches!(finished.ended.cause, Cause::TimedOut { .. } | Cause::Exited { .. }),
        "{:?}",
        finished.ended
    );
    assert_eq!(case.output(SLEEPERS).await, "");
}

/// T7 and T9, smaller: bounded memory, whatever there is.
pub async fn t7_large_output_and_slow_consumers(case: &Case) {
    let size: u64 = if is_full() { 1 << 30 } else { 256 << 20 };
    let before = resident_bytes();
    let script = format!("head -c {size} /dev/zero | tr '\\0' x; echo end");
    let command = Command::shell(&script).timeout(Duration::from_secs(600));
    let finished = case.sandbox.run(command, 1000).await.unwrap();
    assert_eq!(finished.ended.cause, Cause::Exited { code: 0 });
    assert_eq!(finished.stdout.total_bytes(), size + 4);
    let grown = resident_bytes().saturating_sub(before);
    assert!(grown < 64 << 20, "{grown} bytes more than before");
    assert!(finished.stdout.head().iter().all(|byte| *byte == b'x') && finished.stdout.tail().ends_with(b"xend\n"));
    // A consumer that stops reading stops the program, not the guest; and nothing is lost.
    let mut exec = case
        .sandbox
        .exec(Command::shell("head -c 8388608 /dev/zero"))
        .await
        .unwrap();
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(case.sh("true").await.ended.is_success());
    let mut length = 0;
    while let Some(output) = exec.output.recv().await {
        length += output.piece().len();
    }
    assert_eq!((length, exec.ended().await.cause), (8 << 20, Cause::Exited { code: 0 }));
}

/// T9.
pub async fn t9_large_input(case: &Case) {
    let bytes: Vec<u8> = (0..64_u32 << 20).map(|n| n as u8).collect();
    let command = Command::shell("cat > big; wc -c < big").stdin(Stdin::Bytes(bytes.clone()));
    assert_eq!(
        case.run(command.timeout(Duration::from_secs(60)))
            .await
            .stdout
            .text()
            .trim(),
        "67108864"
    );
    assert!(std::fs::read(case.workspace.path().join("big")).unwrap() == bytes);
    // Both ways at once.
    let command = Command::new(["cat"]).stdin(Stdin::Bytes(bytes[..1 << 20].to_vec()));
    assert!(case.run(command).await.stdout.bytes() == bytes[..1 << 20]);
    // A program that closes its input early still ends well.
    let command = Command::shell("exec <&-; sleep 0.2; exit 3").stdin(Stdin::Bytes(bytes));
    assert_eq!(case.run(command).await.ended.cause, Cause::Exited { code: 3 });
}

/// As many arguments as the kernel takes reach the program; more are refused by name.
pub async fn arguments_up_to_the_kernels_limit(case: &Case) {
    let argument = "x".repeat(64 << 10);
    let command = |count| {
        let words = std::iter::repeat_n(argument.as_str(), count);
        Command::new(["sh", "-c", "printf %s \"$@\" | wc -c", "sh"].into_iter().chain(words))
    };
    assert_eq!(
        case.run(command(30)).await.stdout.text().trim(),
        (30 * argument.len()).to_string()
    );
    for count in [40, 64] {
        match case.sandbox.exec(command(count)).await {
            Err(Error::NotStarted { code, .. }) => assert_eq!(code, "too_large"),
            other => panic!("it should not start: {other:?}"),
        }
    }
}

pub async fn unread_input_does_not_hold_a_kill(case: &Case) {
    let command = Command::new(["sleep", "300"]).stdin(Stdin::Bytes(vec![0; 4 << 20]));
    let exec = case.sandbox.exec(command).await.unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    exec.kill("bob").await.unwrap();
    assert_eq!(exec.ended().await.cause, Cause::Killed { by: "bob".to_owned() });
}

pub async fn signals_reach_the_group(case: &Case) {
    let script = "trap 'echo usr1; exit 5' USR1; echo ready; while :; do sleep 0.05; done";
    let mut exec = case.sandbox.exec(Command::shell(script)).await.unwrap();
    assert_eq!(exec.output.recv().await, Some(Output::stdout(b"ready\n".as_slice())));
    exec.control().signal(libc::SIGUSR1).await.unwrap();
    let finished = exec.finish(100).await;
    assert_eq!(finished.stdout.bytes(), b"usr1\n");
    assert_eq!(finished.ended.cause, Cause::Exited { code: 5 });
    // One of those for real time, which have numbers and no names.
    let exec = case.sandbox.exec(Command::new(["sleep", "300"])).await.unwrap();
    exec.control().signal(40).await.unwrap();
    assert_eq!(exec.ended().await.cause, Cause::Signalled { signal: 40 });
    let finished = case.sh("kill -9 $$").await;
    assert_eq!(
        finished.ended.cause,
        Cause::Signalled { signal: libc::SIGKILL },
        "its own doing, so no more than that"
    );
}

pub async fn nothing_is_inherited(case: &Case) {
    // The listing's own descriptor is the fourth.
    assert_eq!(case.output("ls /proc/self/fd | tr '\\n' ' '").await, "0 1 2 3 ");
    assert_eq!(case.output("umask; ulimit -c; ulimit -n").await, "0022\n0\n256\n");
    if !case.lacks(Lack::WholeStatusShown) {
        assert_eq!(
            case.output("grep -E '^Sig(Blk|Ign)' /proc/self/status").await,
            "SigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\n"
        );
    }
    assert_eq!(case.output("readlink /proc/self/fd/0").await, "/dev/null\n");
}

/// The five capability sets, no_new_privs, a filter, a user without groups.
pub async fn programs_have_no_power(case: &Case) {
    let status = case.output("cat /proc/self/status").await;
    let field = |name: &str| {
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.unwrap_or_else(|| panic!("no {name}")).trim().to_owned()
    };
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd"] {
        assert_eq!(field(set), "0000000000000000", "{set}");
    }
    assert_eq!((field("Seccomp"), field("Groups")), ("2".to_owned(), String::new()));
    if !case.lacks(Lack::WholeStatusShown) {
        assert_eq!(
            (field("NoNewPrivs"), field("CapAmb")),
            ("1".to_owned(), "0000000000000000".to_owned())
        );
    }
    let user = case.sandbox.handle().user.to_string();
    let four = [user.as_str(); 4].join("\t");
    assert_eq!((field("Uid"), field("Gid")), (four.clone(), four));
}

/// T10 of the threat list: the guest side of it.
pub async fn garbage_does_not_hurt_the_guest(case: &Case) {
    let handle = case.sandbox.handle();
    let garbage: [&[u8]; 4] = [b"", b"\xff\xff\xff\xff", b"\0\0\0\x04\xff\xff\xff\xff", b"\0\0\0\0"];
    for bytes in garbage {
        let mut stream = case.subject.backend.connect(handle).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        stream.shutdown().await.unwrap();
        // Some end the connection with a fault, some without; none leaves it open.
        let _ = stream.read_to_end(&mut Vec::new()).await;
    }
    assert!(case.sh("true").await.ended.is_success());
}

pub async fn many_at_once(case: &Case) {
    let run = |n: usize| async move {
        let finished = case.sh(&format!("sleep 0.1; echo {n}")).await;
        (finished.stdout.text(), finished.ended.cause)
    };
    let results = futures::future::join_all((0..12).map(run)).await;
    for (n, result) in results.into_iter().enumerate() {
        assert_eq!(result, (format!("{n}\n"), Cause::Exited { code: 0 }));
    }
    // The guest reaps what others leave: no zombie stays. A shim may be one for a moment after its last word.
    let zombies = "for p in /proc/[0-9]*/stat; do cat $p 2>/dev/null; done | grep -c ') Z ' || true";
    for _ in 0..50 {
        if case.output(zombies).await == "0\n" {
            return;
        }
    }
    panic!("zombies: {}", case.output(zombies).await);
}

pub async fn stop_ends_everything(case: &Case) {
    let script = "trap 'echo bye; exit 0' TERM; echo ready; while :; do sleep 0.05; done";
    let mut exec = case.sandbox.exec(Command::shell(script)).await.unwrap();
    assert_eq!(exec.output.recv().await, Some(Output::stdout(b"ready\n".as_slice())));
    let backend = &case.subject.backend;
    backend
        .stop(case.sandbox.handle(), Duration::from_secs(5))
        .await
        .unwrap();
    let finished = exec.finish(100).await;
    assert_eq!(
        (finished.stdout.bytes(), finished.ended.cause),
        (b"bye\n".to_vec(), Cause::Exited { code: 0 })
    );
    case.sandbox
        .exec(Command::new(["true"]))
        .await
        .expect_err("it is stopped");
}
