//! The audit log after everything that a run can do: the chain holds, and the questions of a reviewer have answers.

use serde_json::{Value, json};

use crate::desk::Desk;
use crate::support::script::Script;

const ASK: &str = "extends = \"default\"\n[[tools.rules]]\nname = \"look-first\"\ntool = \"shell\"\nverdict = \"ask\"\nreason = \"look\"\nmatch = { command = 'touch .*' }\n[[tools.rules]]\nname = \"no-list\"\ntool = \"list_files\"\nverdict = \"deny\"\nreason = \"no\"\n";

#[test]
fn the_record_answers_what_was_done_refused_and_approved_and_by_whom() {
    let Some(desk) = Desk::new("the_record_answers_what_was_done_refused_and_approved_and_by_whom") else {
        return;
    };
    desk.policy("ask", ASK);
    let script = Script::new()
        .call("shell", json!({ "command": "cat code.py; exit 3", "cwd": "sub" }))
        .call("list_files", json!({}))
        .shell("touch a")
        .shell("touch b")
        .shell("sleep 100")
        .finish("done");
    let parked = desk.run(&script, &["--policy", "ask", "--max-time", "8s"]).ended(5);
    let run = parked["run_id"].as_str().unwrap().to_owned();
    desk.call(&["approve", &run, "--by", "ada", "--reason", "harmless"])
        .ended(5);
    // The last command runs until the time is up.
    desk.call(&["deny", &run, "--by", "bob"]).ended(3);

    let verified = desk.call(&["audit", "verify"]).ended(0);
    assert_eq!(verified["ok"], true);
    let query = |more: &[&str]| {
        let found = desk.call(&[&["audit", "query", "--run", &run], more].concat()).ended(0);
        found["entries"].as_array().unwrap().clone()
    };
    let text = |entry: &Value, name: &str| entry[name].as_str().unwrap().to_owned();
    let actors = |entries: &[Value]| {
        entries
            .iter()
            .map(|entry| (text(entry, "actor"), text(entry, "outcome")))
            .collect::<Vec<_>>()
    };
    let pair = |actor: &str, outcome: &str| (actor.to_owned(), outcome.to_owned());

    assert_eq!(
        actors(&query(&["--action", "approval.decided"])),
        [pair("user:ada", "approved"), pair("user:bob", "denied")]
    );
    let execs = query(&["--action", "exec"]);
    let told: Vec<(&Value, &Value, &Value)> = execs
        .iter()
        .map(|exec| {
            (
                &exec["details"]["argv"][2],
                &exec["details"]["cwd"],
                &exec["details"]["cause"],
            )
        })
        .collect();
    let exited = |code| json!({ "type": "exited", "code": code });
    assert_eq!(
        told[..2],
        [
            (&json!("cat code.py; exit 3"), &json!("/workspace/sub"), &exited(3)),
            (&json!("touch a"), &json!("/workspace"), &exited(0)),
        ]
    );
    for exec in &execs {
        assert!(exec["details"]["duration_ms"].is_u64(), "{exec}");
        assert!(exec["ids"]["sandbox"].as_str().unwrap().starts_with("sb"), "{exec}");
    }
    let decided: Vec<(String, String, String)> = query(&["--action", "policy.decided"])
        .iter()
        .map(|entry| {
            let rule = entry["details"]["rule"].as_str().unwrap().to_owned();
            (
                text(entry, "outcome"),
                rule,
                entry["details"]["tool"].as_str().unwrap().to_owned(),
            )
        })
        .collect();
    for expected in [
        ("allow", "inside-the-sandbox", "shell"),
        ("deny", "no-list", "list_files"),
        ("ask", "look-first", "shell"),
    ] {
        let found = decided
            .iter()
            .any(|(verdict, rule, tool)| (verdict.as_str(), rule.as_str(), tool.as_str()) == expected);
        assert!(found, "{expected:?}: {decided:?}");
    }
    let of = |action: &str| actors(&query(&["--action", action])).len();
    assert_eq!(of("task.submitted"), 1);
    assert!(of("sandbox.created") >= 1);
    assert_eq!(of("sandbox.created"), of("sandbox.destroyed"));
    let ended = query(&["--action", "run.ended"]);
    assert_eq!(actors(&ended), [pair(&format!("run:{run}"), "exhausted")]);
    // What nothing fits is an empty answer, not an error.
    assert_eq!(query(&["--actor", "user:eve"]), Vec::<Value>::new());
}
