//! Bad input gets a clear error and its exit code, and changes nothing.

use serde_json::json;

use crate::desk::{Desk, Done};
use crate::support::script::Script;

/// The refusal that a call has to give: exit code, kind, and words that its message has.
fn refused(done: &Done, code: i32, kind: &str, words: &[&str]) {
    let object = done.ended(code);
    assert_eq!(object["error"]["kind"], kind, "{done:?}");
    let message = object["error"]["message"].as_str().unwrap();
    for word in words {
        assert!(message.contains(word), "`{word}`: {message}");
        assert!(done.stderr.contains(word), "`{word}`: {}", done.stderr);
    }
}

/// Nothing was submitted.
fn nothing_is_stored(desk: &Desk) {
    let audit = desk.call(&["audit", "query"]);
    match audit.code {
        // There is no data at all.
        6 => {}
        _ => assert_eq!(audit.ended(0)["entries"], json!([])),
    }
}

#[test]
fn what_is_wrong_with_a_call_is_said() {
    let desk = Desk::bare();
    let model = desk.script(&Script::new().finish("x"));
    let ok = ["run", "--prompt", "x", "--model", &model];
    let with = |more: &[&str]| desk.call(&[&ok, more].concat());
    refused(&desk.call(&["run", "--model", &model]), 2, "invalid", &["no prompt"]);
    refused(&desk.call(&["run", "--prompt", "x"]), 2, "invalid", &["no model"]);
    refused(
        &desk.call(&["run", "--prompt", " ", "--model", &model]),
        2,
        "invalid",
        &["prompt", "empty"],
    );
    refused(
        &desk.call(&["run", "--prompt", "x", "--model", "scripted:missing.jsonl"]),
        2,
        "invalid",
        &["missing.jsonl"],
    );
    refused(
        &desk.call(&["run", "--prompt", "x", "--model", "nonsense"]),
        2,
        "invalid",
        &["nonsense"],
    );
    refused(&with(&["--workspace", "nowhere"]), 2, "invalid", &["nowhere"]);
    refused(&with(&["--workspace", "script.jsonl"]), 2, "invalid", &["script.jsonl"]);
    refused(&with(&["--policy", "nobody"]), 6, "not_found", &["nobody"]);
    refused(&with(&["--apply"]), 2, "invalid", &["--workspace"]);
    // A check that finds no tests may pass: nothing is FINISHED on nothing.
    let unmeant = with(&["--check", "true"]);
    refused(&unmeant, 2, "invalid", &["check", "no workspace"]);
    assert!(
        unmeant.stderr.contains("--workspace DIR, or --empty-workspace"),
        "{unmeant:?}"
    );
    let unmeant = desk.file("task.toml", "prompt = \"x\"\ncheck = \"true\"\n");
    refused(
        &desk.call(&["run", &unmeant, "--model", &model]),
        2,
        "invalid",
        &["check", "no workspace"],
    );
    refused(&with(&["--label", "a=b\nc"]), 2, "invalid", &["label `a`"]);
    refused(
        &with(&["--max-steps", "1000"]),
        2,
        "invalid",
        &["1000", "100", "budgets.steps"],
    );
    refused(&with(&["--image", "nonsense"]), 2, "invalid", &["nonsense"]);
    refused(&desk.call(&["run", "--resume", "run_x"]), 2, "invalid", &["run_x"]);
    let unknown = format!("run_{}", "a".repeat(26));
    refused(&desk.call(&["run", "--resume", &unknown]), 6, "not_found", &[&unknown]);
    refused(&desk.call(&["approve", &unknown]), 6, "not_found", &[&unknown]);
    let long = desk.call(&["approve", &"x".repeat(5000)]);
    refused(&long, 2, "invalid", &["neither a run id nor a task id"]);
    assert!(long.stderr.len() < 200, "{long:?}");
    refused(
        &desk.call(&["audit", "query", "--run", &unknown]),
        6,
        "not_found",
        &[&unknown],
    );
    for usage in [
        &["run", "--frobnicate"][..],
        &["run", "--max-time", "soon"],
        &["nonsense"],
        &["run", "--label", "x"],
    ] {
        let done = desk.call(usage);
        assert_eq!((done.code, done.stdout.as_str()), (2, ""), "{done:?}");
        assert!(
            done.stderr.contains("Usage") || done.stderr.contains("help"),
            "{}",
            done.stderr
        );
    }
    nothing_is_stored(&desk);
}

#[test]
fn a_bad_task_file_is_refused_with_its_place() {
    let desk = Desk::bare();
    let model = desk.script(&Script::new().finish("x"));
    for (text, words) in [
        ("prompt = \"x\"\nworkspce = \"project\"\n", ["workspce", "line 2"]),
        ("prompt = \"x\"\n[budgets]\nsteps = \"many\"\n", ["line 3", "many"]),
        (
            "prompt = \"x\"\n[budgets]\ntotal_time = \"soon\"\n",
            ["soon", "duration"],
        ),
        ("prompt = \"x\"\n[budgets]\nstepps = 4\n", ["stepps", "line 3"]),
        ("prompt = \n", ["line 1", "task.toml"]),
    ] {
        let task = desk.file("task.toml", text);
        refused(&desk.call(&["run", &task, "--model", &model]), 2, "invalid", &words);
    }
    refused(
        &desk.call(&["run", "gone.toml", "--model", &model]),
        2,
        "invalid",
        &["gone.toml"],
    );
    nothing_is_stored(&desk);
}

#[test]
fn a_policy_that_asks_for_a_wall_this_host_lacks_is_refused() {
    let Some(desk) = Desk::new("a_policy_that_asks_for_a_wall_this_host_lacks_is_refused") else {
        return;
    };
    desk.policy("walled", "extends = \"default\"\nisolation = \"microvm\"\n");
    let before = desk.files();
    let done = desk.run(&Script::new().finish("x"), &["--policy", "walled", "--apply"]);
    refused(&done, 6, "wrong_state", &["walled", "microvm", "exuvia doctor"]);
    let direct = desk.call(&["sandbox", "run", "--policy", "walled", "--", "true"]);
    assert_ne!(direct.code, 0, "{direct:?}");
    assert_eq!(desk.files(), before);
    nothing_is_stored(&desk);
}

#[test]
fn a_model_endpoint_that_is_down_is_a_failure_that_says_so() {
    let desk = Desk::bare();
    // Nobody listens there: the port was free a moment ago, and is ours to keep closed.
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = closed.local_addr().unwrap();
    drop(closed);
    let model = format!("openai:m@http://{address}/v1");
    let done = desk.call(&["run", "--prompt", "x", "--model", &model, "--max-time", "2s"]);
    // It is tried again until the time is up; without a limit it is given up after five attempts, with exit code 7.
    assert_eq!(done.ended(3)["outcome"]["limit"], "total_time");
    let said = &done.stderr;
    assert!(
        said.contains(&address.to_string()) && said.contains("cannot be reached"),
        "{said}"
    );
}

#[test]
fn a_server_that_is_not_there_is_said_with_what_to_do() {
    let desk = Desk::bare();
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", closed.local_addr().unwrap());
    drop(closed);
    for words in [
        &["task", "list", "--server", &url][..],
        &["approve", "run_x", "--server", &url],
    ] {
        let done = desk.call(words);
        let object = done.ended(7);
        assert_eq!(object["error"]["kind"], "unavailable");
        assert!(
            object["error"]["hint"].as_str().unwrap().contains("exuvia serve"),
            "{object}"
        );
    }
    let done = desk.call(&["task", "list", "--server", "not a url"]);
    assert_eq!(done.ended(2)["error"]["kind"], "invalid");
    assert!(!desk.data().exists());
}
