//! `exuvia task …` against a server.

use serde_json::{Value, json};

use crate::desk::Desk;
use crate::served::Served;
use crate::support::script::Script;

#[test]
fn a_task_file_goes_to_a_server_and_its_results_come_back() {
    let Some(desk) = Desk::new("a_task_file_goes_to_a_server_and_its_results_come_back") else {
        return;
    };
    let served = Served::tidy(&desk);
    let script = Script::new()
        .shell("cat greeting.txt; echo bye > greeting.txt")
        .finish("said");
    desk.script(&script);
    let task = desk.file(
        "task.toml",
        "prompt = \"say bye\"\nworkspace = \"project\"\nmodel = \"scripted:script.jsonl\"\ncheck = \"grep -q bye greeting.txt\"\n[labels]\nkind = \"file\"\n[budgets]\ntotal_time = \"5m\"\nsteps = 9\n",
    );
    let call = |words: &[&str]| desk.call(&[words, &["--server", &served.url]].concat());
    let watched = call(&["task", "submit", &task, "--key", "k", "--watch"]);
    let object = watched.ended(0);
    assert_eq!(
        (&object["state"], &object["labels"]),
        (&json!("FINISHED"), &json!({ "kind": "file" }))
    );
    // One event a line, without a gap, then the run.
    let lines: Vec<Value> = watched
        .stdout
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let seqs: Vec<u64> = lines[..lines.len() - 1]
        .iter()
        .map(|event| event["seq"].as_u64().unwrap())
        .collect();
    assert_eq!(seqs, (1..=object["seq"].as_u64().unwrap()).collect::<Vec<_>>());
    let run = object["run_id"].as_str().unwrap();
    let again = call(&["task", "submit", &task, "--key", "k"]).ended(0);
    assert_eq!(again["run_id"], run);
    let other = call(&["task", "submit", &task, "--key", "k", "--max-steps", "8"]);
    assert_eq!(other.ended(6)["error"]["kind"], "exists");

    assert_eq!(call(&["task", "get", run]).ended(0)["outcome"]["summary"], "said");
    let listed = call(&["task", "list", "--label", "kind=file", "--state", "FINISHED"]).ended(0);
    assert_eq!(listed["runs"].as_array().unwrap().len(), 1);
    let said = call(&["task", "transcript", run]).ended(0);
    assert_eq!(said["messages"][1]["content"], "say bye");
    let diff = call(&["task", "diff", run]).ended(0);
    assert!(diff["diff"].as_str().unwrap().contains("-hello\n+bye"), "{diff}");
    let file = desk.path().join("out.tar");
    let pulled = call(&["task", "pull", run, "--output", file.to_str().unwrap()]).ended(0);
    assert_eq!(pulled["bytes"].as_u64(), Some(std::fs::metadata(&file).unwrap().len()));
    let mut archive = tar::Archive::new(std::fs::File::open(&file).unwrap());
    let out = desk.path().join("out");
    archive.unpack(&out).unwrap();
    assert_eq!(std::fs::read_to_string(out.join("greeting.txt")).unwrap(), "bye\n");
    assert_eq!(std::fs::read_to_string(out.join("sub/code.py")).unwrap(), "print(1)\n");
}

#[test]
fn a_run_on_a_server_is_paused_resumed_and_cancelled() {
    let Some(desk) = Desk::new("a_run_on_a_server_is_paused_resumed_and_cancelled") else {
        return;
    };
    let served = Served::tidy(&desk);
    let call = |words: &[&str]| desk.call(&[words, &["--server", &served.url]].concat());
    let model = desk.script(&Script::new().say("").delayed(400).finish("x").delayed(60_000));
    let run = call(&["task", "submit", "--prompt", "x", "--model", &model]).ended(0)["run_id"].clone();
    let run = run.as_str().unwrap();
    call(&["task", "pause", run]).ended(0);
    let begun = std::time::Instant::now();
    while call(&["task", "get", run]).ended(0)["state"] != "PAUSED" {
        assert!(begun.elapsed() < crate::support::server::LONG);
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    assert_eq!(call(&["task", "resume", run]).ended(0)["state"], "REASONING");
    assert_eq!(call(&["task", "resume", run]).ended(6)["error"]["kind"], "wrong_state");
    assert_eq!(call(&["task", "cancel", run]).ended(0)["state"], "CANCELLED");
    assert_eq!(call(&["task", "watch", run]).ended(4)["state"], "CANCELLED");
}
