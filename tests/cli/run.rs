//! `exuvia run`: the final object, the exit codes, `--apply`, `--resume`.

use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::desk::Desk;
use crate::support::host::{sandboxes, traces};
use crate::support::script::Script;
use crate::support::server::LONG;

fn greet() -> Script {
    Script::new()
        .call(
            "edit_file",
            json!({ "path": "greeting.txt", "old": "hello", "new": "good day" }),
        )
        .shell("rm sub/code.py; mkdir -p new; printf 'echo hi\\n' > new/run.sh; chmod +x new/run.sh; cat greeting.txt")
        .finish("greeted")
}

#[test]
fn the_last_line_tells_all_and_the_directory_is_untouched() {
    let Some(desk) = Desk::new("the_last_line_tells_all_and_the_directory_is_untouched") else {
        return;
    };
    let before = desk.files();
    let done = desk.run(
        &greet(),
        &["--label", "kind=test", "--check", "grep -q 'good day' greeting.txt"],
    );
    let object = done.ended(0);
    assert_eq!(done.stdout.lines().count(), 1, "{}", done.stdout);
    assert!(object["run_id"].as_str().unwrap().starts_with("run_"));
    assert_eq!(object["state"], "FINISHED");
    assert_eq!(
        (&object["scripted"], &object["model"]),
        (&json!(true), &json!("scripted:script.jsonl"))
    );
    assert_eq!(object["labels"], json!({ "kind": "test" }));
    assert_eq!(object["outcome"]["summary"], "greeted");
    let steps = object["steps"].as_array().unwrap();
    let told: Vec<(&str, &str, &str)> = steps
        .iter()
        .map(|step| {
            let text = |name: &str| step[name].as_str().unwrap();
            (text("state"), text("tool"), text("status"))
        })
        .collect();
    assert_eq!(
        told,
        [
            ("REASONING", "", "ok"),
            ("TOOL_CALLING", "edit_file", "ok"),
            ("REASONING", "", "ok"),
            ("TOOL_CALLING", "shell", "ok"),
            ("REASONING", "", "ok"),
            ("TOOL_CALLING", "finish", "ok"),
            ("CHECKING", "", "ok"),
        ]
    );
    let usage = &object["usage"];
    assert_eq!(
        (&usage["steps"], &usage["model_calls"], &usage["tool_calls"]),
        (&json!(6), &json!(3), &json!(3))
    );
    let diff = object["diff"].as_str().unwrap();
    for piece in [
        "-hello",
        "+good day",
        "-print(1)",
        "+echo hi",
        "new file mode 100755",
        "deleted file",
    ] {
        assert!(diff.contains(piece), "{piece}: {diff}");
    }
    assert_eq!(desk.files(), before);
    assert!(std::path::Path::new(object["audit_log"].as_str().unwrap()).is_file());
    assert_eq!(traces(&desk.data(), &[]), Vec::<String>::new());
}

#[test]
fn with_apply_the_directory_is_as_the_run_left_its_workspace() {
    let Some(desk) = Desk::new("with_apply_the_directory_is_as_the_run_left_its_workspace") else {
        return;
    };
    let object = desk.run(&greet(), &["--apply"]).ended(0);
    // Three files and a directory.
    assert_eq!(object["applied"], 4);
    let file = |name: &str, text: &str| (name.to_owned(), text.to_owned());
    assert_eq!(
        desk.files(),
        [file("greeting.txt", "good day\n"), file("new/run.sh", "echo hi\n")]
    );
    use std::os::unix::fs::PermissionsExt;
    let mode = std::fs::metadata(desk.project().join("new/run.sh"))
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o111, 0o111);
}

#[test]
fn a_run_that_does_not_finish_applies_nothing() {
    let Some(desk) = Desk::new("a_run_that_does_not_finish_applies_nothing") else {
        return;
    };
    let before = desk.files();
    let object = desk.run(&greet(), &["--apply", "--max-steps", "3"]).ended(3);
    assert_eq!(
        (&object["state"], &object["outcome"]["limit"]),
        (&json!("EXHAUSTED"), &json!("steps"))
    );
    assert!(
        object["diff"].as_str().unwrap().contains("+good day"),
        "what was done is shown"
    );
    assert!(object.get("applied").is_none());
    assert_eq!(desk.files(), before);
}

#[test]
fn each_state_has_its_exit_code() {
    let Some(desk) = Desk::new("each_state_has_its_exit_code") else {
        return;
    };
    desk.policy(
        "ask",
        "extends = \"default\"\n[[tools.rules]]\nname = \"ask\"\ntool = \"shell\"\nverdict = \"ask\"\nreason = \"look\"\n",
    );
    let cases: [(&str, Script, &[&str], i32, &str); 5] = [
        ("said", Script::new().say("nothing to do"), &[], 0, "FINISHED"),
        ("empty", Script::new().say("").say("").say(""), &[], 1, "FAILED"),
        (
            "steps",
            Script::new().write("a", "1").finish("x"),
            &["--max-steps", "1"],
            3,
            "EXHAUSTED",
        ),
        (
            "time",
            Script::new().finish("x").delayed(60_000),
            &["--max-time", "1s"],
            3,
            "EXHAUSTED",
        ),
        (
            "ask",
            Script::new().shell("true").finish("x"),
            &["--policy", "ask"],
            5,
            "WAITING_APPROVAL",
        ),
    ];
    for (name, script, more, code, state) in cases {
        let object = desk.run(&script, more).ended(code);
        assert_eq!(object["state"], state, "{name}");
    }
}

#[test]
fn a_cancelled_run_ends_with_its_code() {
    let Some(desk) = Desk::new("a_cancelled_run_ends_with_its_code") else {
        return;
    };
    // The run of another process: a server on the same data directory cancels it.
    let model = desk.script(&Script::new().finish("x").delayed(60_000));
    let child = desk
        .command(&["run", "--prompt", "x", "--model", &model])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut server = desk
        .command(&["serve", "--listen", "127.0.0.1:0"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut hello = String::new();
    BufReader::new(server.stdout.take().unwrap())
        .read_line(&mut hello)
        .unwrap();
    let hello: serde_json::Value = serde_json::from_str(&hello).unwrap();
    let url = format!("http://{}", hello["listening"].as_str().unwrap());
    let begun = Instant::now();
    let run = loop {
        assert!(begun.elapsed() < LONG);
        let listed = desk
            .call(&["task", "list", "--server", &url, "--state", "REASONING"])
            .json();
        match listed["runs"][0]["run_id"].as_str() {
            Some(run) => break run.to_owned(),
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    let cancelled = desk.call(&["task", "cancel", &run, "--server", &url, "--reason", "enough"]);
    assert_eq!(cancelled.ended(0)["state"], "CANCELLED");
    let done: crate::desk::Done = child.wait_with_output().unwrap().into();
    let object = done.ended(4);
    assert_eq!(
        (&object["state"], &object["outcome"]["by"]),
        (&json!("CANCELLED"), &json!("grace"))
    );
    server.kill().unwrap();
    server.wait().unwrap();
}

#[test]
fn a_killed_run_is_resumed_and_ends_as_if_nothing_had_been() {
    let Some(desk) = Desk::new("a_killed_run_is_resumed_and_ends_as_if_nothing_had_been") else {
        return;
    };
    let script = Script::new()
        .write("log", "1\n")
        .shell("echo 2 >> log; sleep 1; echo 3 >> log")
        .finish("done");
    let model = desk.script(&script);
    let project = desk.project();
    let words = [
        "run",
        "--prompt",
        "x",
        "--model",
        &model,
        "--workspace",
        project.to_str().unwrap(),
    ];
    let mut child = desk
        .command(&words)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    // The second answer is in: the shell is about to run, or runs.
    while !lines.next().unwrap().unwrap().contains("calls: shell") {}
    std::thread::sleep(Duration::from_millis(300));
    child.kill().unwrap();
    child.wait().unwrap();
    let seen = sandboxes(&desk.data());
    let query = desk.call(&["audit", "query", "--action", "task.submitted"]).ended(0);
    let run = query["entries"][0]["record"]["ids"]["run"]
        .as_str()
        .or_else(|| query["entries"][0]["ids"]["run"].as_str())
        .unwrap()
        .to_owned();

    let object = desk.call(&["run", "--resume", &run]).ended(0);
    assert_eq!((&object["run_id"], &object["state"]), (&json!(run), &json!("FINISHED")));
    let shell = &object["steps"][3];
    assert_eq!((&shell["tool"], &shell["attempts"]), (&json!("shell"), &json!(2)));
    assert!(
        object["diff"].as_str().unwrap().contains("+1\n+2\n+3\n"),
        "{}",
        object["diff"]
    );
    assert_eq!(traces(&desk.data(), &seen), Vec::<String>::new());
    // Once more: it has ended, and is shown as it ended.
    let again = desk.call(&["run", "--resume", &run]).ended(0);
    assert_eq!((&again["diff"], &again["seq"]), (&object["diff"], &object["seq"]));
}
