//! `exuvia sandbox run`, as a person calls it.

use std::fs;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::support::{Bench, PROGRAM, no_zombies_stay, traces};

/// A call with a data directory of its own.
struct Shell {
    bench: Bench,
}

impl Shell {
    fn new(test: &str) -> Option<Self> {
        Bench::new(test).map(|bench| Self { bench })
    }

    fn data(&self) -> &Path {
        self.bench.data.path()
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(PROGRAM);
        command.args(["--data-dir", self.data().to_str().unwrap()]).args(words);
        command.env("USER", "tester").env_remove("SUDO_USER");
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    fn run(&self, words: &[&str]) -> Output {
        self.command(&[&["sandbox", "run"], words].concat()).output().unwrap()
    }

    fn policy(&self, name: &str, text: &str) -> String {
        let path = self.data().join(format!("{name}.toml"));
        let text = format!("format_version = 1\nname = \"{name}\"\nextends = \"default\"\n{text}");
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    }

    /// Starts a command and waits until it has written a line.
    fn started(&self, text: &str) -> Child {
        let mut child = self
            .command(&["sandbox", "run", "--", "sh", "-c", text])
            .spawn()
            .unwrap();
        let mut first = [0; 1];
        child.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
        child
    }

    fn sandboxes(&self) -> Vec<String> {
        let entries = fs::read_dir(self.data().join("sandboxes")).unwrap().flatten();
        entries.map(|entry| entry.file_name().into_string().unwrap()).collect()
    }

    /// What is left anywhere on the host of whatever ran here.
    fn assert_clean(&self) {
        assert_eq!(self.sandboxes(), Vec::<String>::new());
        for id in self
            .on_record("sandbox.created")
            .iter()
            .map(|entry| &entry["ids"]["sandbox"])
        {
            assert_eq!(traces(id.as_str().unwrap()), Vec::<String>::new());
        }
        let mine = self.data().canonicalize().unwrap();
        let mine = mine.to_str().unwrap();
        let claims = fs::read_dir("/run/exuvia/identities").unwrap();
        let taken = |claim: &fs::DirEntry| fs::read_to_string(claim.path()).is_ok_and(|text| text.contains(mine));
        assert_eq!(
            claims.filter_map(Result::ok).filter(taken).count(),
            0,
            "user ids are still taken"
        );
    }

    fn log(&self) -> Vec<serde_json::Value> {
        let lines = fs::read_to_string(self.data().join("audit/audit.jsonl")).unwrap_or_default();
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    fn on_record(&self, action: &str) -> Vec<serde_json::Value> {
        self.log()
            .into_iter()
            .filter(|entry| entry["action"] == action)
            .collect()
    }
}

fn code_and_stderr(output: &Output) -> (i32, String) {
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.code().unwrap(), stderr)
}

#[test]
fn bytes_and_exit_code_pass_unchanged() {
    let Some(shell) = Shell::new("bytes_and_exit_code_pass_unchanged") else {
        return;
    };
    let mut child = shell
        .command(&[
            "sandbox",
            "run",
            "--stdin",
            "--",
            "sh",
            "-c",
            "tee /dev/stderr; exit 42",
        ])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    // No UTF-8, more than any buffer on the way.
    let sent: Vec<u8> = (0..3_000_000_u32).map(|n| (n.wrapping_mul(n) >> 7) as u8).collect();
    let mut stdin = child.stdin.take().unwrap();
    let input = sent.clone();
    let feeding = std::thread::spawn(move || stdin.write_all(&input));
    let output = child.wait_with_output().unwrap();
    feeding.join().unwrap().unwrap();
    assert_eq!(output.status.code(), Some(42));
    assert!(output.stdout == sent && output.stderr == sent);
    // Without --stdin there is nothing to read.
    let output = shell.run(&[
        "--env",
        "A=b c",
        "--workdir",
        "/usr",
        "--",
        "sh",
        "-c",
        "cat; pwd; echo \"$A\"",
    ]);
    assert_eq!(
        (output.status.code(), &output.stdout[..]),
        (Some(0), &b"/usr\nb c\n"[..])
    );
    shell.assert_clean();
}

#[test]
fn each_other_end_has_its_code_and_its_word() {
    let Some(shell) = Shell::new("each_other_end_has_its_code_and_its_word") else {
        return;
    };
    let small = shell.policy("small", "[limits]\nmemory = \"64MiB\"\n");
    let microvm = shell.policy("microvm", "isolation = \"microvm\"\n");
    let run = |words: &[&str]| code_and_stderr(&shell.run(words));
    let said = |code: i32, text: &str| (code, format!("exuvia: {text}\n"));
    assert_eq!(
        run(&["--timeout", "200ms", "--", "sleep", "1000"]),
        said(124, "timed out after 200ms")
    );
    let (code, stderr) = run(&["--policy", &small, "--", "python3", "-c", "bytearray(1 << 30)"]);
    assert_eq!(code, 137);
    assert!(
        stderr.contains("exuvia: out of memory: limit 64 MiB, peak "),
        "{stderr}"
    );
    assert_eq!(
        run(&["--", "no-such-program"]),
        said(127, "no program `no-such-program`")
    );
    assert_eq!(run(&["--", "/etc/passwd"]).0, 126);
    assert_eq!(run(&["--workdir", "/nowhere", "--", "true"]).0, 126);
    assert_eq!(
        run(&["--", "sh", "-c", "kill -SEGV $$"]),
        said(139, "died of signal 11 (SIGSEGV)")
    );
    let (code, stderr) = run(&["--policy", &microvm, "--", "true"]);
    assert_eq!(code, 125);
    assert!(stderr.contains("demands isolation `microvm`"), "{stderr}");
    assert_eq!(run(&["--policy", "nowhere", "--", "true"]).0, 125);
    shell.assert_clean();
}

#[test]
fn json_is_the_last_line_and_the_record_tells_the_same() {
    let Some(shell) = Shell::new("json_is_the_last_line_and_the_record_tells_the_same") else {
        return;
    };
    let output = shell
        .command(&[
            "--json",
            "sandbox",
            "run",
            "--env",
            "KEY=secret-value",
            "--",
            "printf",
            "no end",
        ])
        .output()
        .unwrap();
    let stdout = String::from_utf8(output.stdout).unwrap();
    let (before, last) = stdout.trim_end().rsplit_once('\n').unwrap();
    assert_eq!(before, "no end");
    let object: serde_json::Value = serde_json::from_str(last).unwrap();
    assert_eq!(object["cause"], serde_json::json!({ "type": "exited", "code": 0 }));
    assert_eq!((&object["exit_code"], &object["stdout_bytes"]), (&0.into(), &6.into()));

    let log = shell.log();
    let told: Vec<(&str, &str, &str)> = log
        .iter()
        .map(|entry| {
            ["actor", "action", "outcome"]
                .map(|field| entry[field].as_str().unwrap())
                .into()
        })
        .collect();
    let wanted = ["sandbox.created", "exec.started", "exec.ended", "sandbox.destroyed"];
    assert_eq!(told, wanted.map(|action| ("user:tester", action, "ok")));
    assert!(log.iter().all(|entry| entry["ids"]["sandbox"] == object["sandbox_id"]));
    assert_eq!(log[0]["details"]["policy_hash"], object["policy_hash"]);
    assert_eq!(log[1]["details"]["argv"], serde_json::json!(["printf", "no end"]));
    assert_eq!(log[2]["details"]["duration_ms"], object["duration_ms"]);
    assert!(!serde_json::to_string(&log).unwrap().contains("secret-value"));
    let verified = shell.command(&["audit", "verify"]).output().unwrap();
    assert!(verified.status.success(), "{verified:?}");
    shell.assert_clean();
}

#[test]
fn a_signal_ends_the_tree_and_cleans_up() {
    let Some(shell) = Shell::new("a_signal_ends_the_tree_and_cleans_up") else {
        return;
    };
    for (number, name) in [
        (libc::SIGTERM, "SIGTERM"),
        (libc::SIGINT, "SIGINT"),
        (libc::SIGHUP, "SIGHUP"),
    ] {
        let child = shell.started("sleep 1000 & trap '' TERM INT HUP; echo; sleep 1000");
        let pid = nix::unistd::Pid::from_raw(child.id() as i32);
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::try_from(number).unwrap()).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(code_and_stderr(&output), (137, format!("exuvia: killed by {name}\n")));
    }
    shell.assert_clean();
}

#[test]
fn a_reader_that_goes_away_ends_the_command() {
    let Some(shell) = Shell::new("a_reader_that_goes_away_ends_the_command") else {
        return;
    };
    let mut child = shell.started("while :; do echo more; done");
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(code_and_stderr(&output), (141, String::new()));
    shell.assert_clean();
}

#[test]
fn what_a_killed_one_leaves_is_removed_by_the_next() {
    let Some(shell) = Shell::new("what_a_killed_one_leaves_is_removed_by_the_next") else {
        return;
    };
    let living = shell.started("echo; sleep 1000");
    let mut killed = shell.started("echo; sleep 1000");
    let others: Vec<String> = shell.sandboxes();
    assert_eq!(others.len(), 2);
    killed.kill().unwrap();
    killed.wait().unwrap();
    let output = shell.run(&["--", "true"]);
    assert_eq!(code_and_stderr(&output), (0, String::new()));
    // The living one's is its own.
    let left = shell.sandboxes();
    assert_eq!(left.len(), 1);
    let gone = others.iter().find(|id| !left.contains(id)).unwrap();
    assert_eq!(traces(gone), Vec::<String>::new());
    let pid = nix::unistd::Pid::from_raw(living.id() as i32);
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
    assert_eq!(living.wait_with_output().unwrap().status.code(), Some(137));
    shell.assert_clean();
}

#[test]
fn many_at_once_do_not_meet() {
    let Some(shell) = Shell::new("many_at_once_do_not_meet") else {
        return;
    };
    let text = "for i in 1 2 3; do echo $1 >/tmp/$i; done; cat /tmp/*; ls /proc | grep -c '^[0-9]'; exit $1";
    let children: Vec<(i32, Child)> = (1..=8)
        .map(|n| {
            let words = ["sandbox", "run", "--", "sh", "-c", text, "sh", &n.to_string()];
            (n, shell.command(&words).spawn().unwrap())
        })
        .collect();
    for (n, child) in children {
        let output = child.wait_with_output().unwrap();
        assert_eq!(code_and_stderr(&output), (n, String::new()));
        let stdout = String::from_utf8(output.stdout).unwrap();
        assert!(stdout.starts_with(&format!("{n}\n{n}\n{n}\n")), "{stdout}");
    }
    assert_eq!(shell.on_record("exec.ended").len(), 8);
    let verified = shell.command(&["audit", "verify"]).output().unwrap();
    assert!(verified.status.success(), "{verified:?}");
    shell.assert_clean();
    no_zombies_stay();
}

/// Standard input that never ends must not hold the end of the command up.
#[test]
fn an_open_input_holds_nothing_up() {
    let Some(shell) = Shell::new("an_open_input_holds_nothing_up") else {
        return;
    };
    let mut child = shell
        .command(&["sandbox", "run", "--stdin", "--", "true"])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let started = Instant::now();
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status,
            None => std::thread::sleep(Duration::from_millis(5)),
        }
        assert!(started.elapsed() < Duration::from_secs(60));
    };
    assert!(status.success());
    drop(child.stdin.take());
    shell.assert_clean();
}
