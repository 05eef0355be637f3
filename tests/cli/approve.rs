//! A run that waits for a person: exit code 5, then `exuvia approve` or `exuvia deny` goes on with it.

use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::desk::{Desk, Done};
use crate::support::host::traces;
use crate::support::script::Script;
use crate::support::server::LONG;

const ASK: &str = "extends = \"default\"\n[[tools.rules]]\nname = \"look-first\"\ntool = \"shell\"\nverdict = \"ask\"\nreason = \"a person looks first\"\n";

fn script() -> Script {
    Script::new()
        .shell("echo one > a")
        .shell("echo two >> a")
        .finish("done")
}

/// A run that waits at its first call.
fn parked(desk: &Desk) -> Value {
    desk.policy("ask", ASK);
    let done = desk.run(&script(), &["--policy", "ask"]);
    let object = done.ended(5);
    assert_eq!(object["state"], "WAITING_APPROVAL");
    let open = &object["approvals"][0];
    assert_eq!((&open["tool"], &open["rule"]), (&json!("shell"), &json!("look-first")));
    assert!(open["arguments"].as_str().unwrap().contains("echo one"));
    object
}

#[test]
fn an_approved_run_goes_on_in_the_approving_process() {
    let Some(desk) = Desk::new("an_approved_run_goes_on_in_the_approving_process") else {
        return;
    };
    let run = parked(&desk)["run_id"].as_str().unwrap().to_owned();
    assert_eq!(
        traces(&desk.data(), &[]),
        Vec::<String>::new(),
        "nothing is kept up for it"
    );
    // To the second question, and then to the end.
    let next = desk.call(&["approve", &run, "--reason", "fine"]).ended(5);
    assert_eq!(
        (&next["run_id"], &next["state"]),
        (&json!(run), &json!("WAITING_APPROVAL"))
    );
    assert!(next["approvals"][0]["arguments"].as_str().unwrap().contains("echo two"));
    let end = desk.call(&["approve", &run, "--by", "ada"]).ended(0);
    assert_eq!(end["state"], "FINISHED");
    assert!(
        end["diff"].as_str().unwrap().contains("+one\n+two\n"),
        "{}",
        end["diff"]
    );
    let late = desk.call(&["approve", &run]);
    assert_eq!(late.ended(6)["error"]["kind"], "wrong_state");
}

#[test]
fn a_denied_call_is_told_to_the_model_and_the_run_goes_on() {
    let Some(desk) = Desk::new("a_denied_call_is_told_to_the_model_and_the_run_goes_on") else {
        return;
    };
    let run = parked(&desk)["run_id"].as_str().unwrap().to_owned();
    desk.call(&["deny", &run, "--reason", "not that"]).ended(5);
    let end = desk.call(&["approve", &run]).ended(0);
    assert_eq!(end["state"], "FINISHED");
    let diff = end["diff"].as_str().unwrap();
    assert!(diff.contains("+two") && !diff.contains("+one"), "{diff}");
}

#[test]
fn a_run_that_stays_hears_the_answer_of_another_process() {
    let Some(desk) = Desk::new("a_run_that_stays_hears_the_answer_of_another_process") else {
        return;
    };
    desk.policy("ask", ASK);
    let model = desk.script(&script());
    let child = desk
        .command(&["run", "--prompt", "x", "--model", &model, "--policy", "ask", "--wait"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    for _ in 0..2 {
        let begun = Instant::now();
        // The newest question that nobody has answered.
        let run = loop {
            assert!(begun.elapsed() < LONG);
            let asked = count(&desk, "approval.requested");
            if asked.0 > count(&desk, "approval.decided").0 {
                break asked.1;
            }
            std::thread::sleep(Duration::from_millis(50));
        };
        let answered = desk.call(&["approve", &run]);
        assert_eq!(answered.code, 0, "{answered:?}");
        assert_eq!(answered.json()["run_id"], json!(run));
    }
    let done: Done = child.wait_with_output().unwrap().into();
    assert_eq!(done.ended(0)["state"], "FINISHED");
}

/// How many audit entries of that kind there are, and the run of the last.
fn count(desk: &Desk, action: &str) -> (usize, String) {
    let found = desk.call(&["audit", "query", "--action", action]);
    if found.code != 0 {
        return (0, String::new());
    }
    let entries = found.json()["entries"].as_array().unwrap().clone();
    let run = entries
        .last()
        .map(|entry| entry["ids"]["run"].as_str().unwrap().to_owned());
    (entries.len(), run.unwrap_or_default())
}
