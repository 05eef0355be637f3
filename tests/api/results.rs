//! What tools give: always a result for the model, never the end of the run; artifacts, diffs, the audit record.

use std::collections::BTreeMap;
use std::time::Duration;

use exuvia::api::proto::event::Kind;
use exuvia::api::proto::{self, Budgets, RunState};
use exuvia::sandbox::backend::fake::Call;
use serde_json::{Value, json};

use crate::bed::Bed;
use crate::support::script::Script;
use crate::support::watch::{check_whole, ended, kind, until_end};
use crate::support::{get, transcript};

/// The results of a run's calls, by step.
fn results(events: &[proto::Event]) -> BTreeMap<u32, Value> {
    let results = events.iter().filter_map(|event| match kind(event) {
        Kind::ToolFinished(done) => Some((done.step, done.result.as_ref().unwrap())),
        Kind::ToolRefused(refused) => Some((refused.step, refused.result.as_ref().unwrap())),
        _ => None,
    });
    results
        .map(|(step, result)| (step, exuvia::api::convert::struct_from_proto(result)))
        .collect()
}

#[tokio::test]
async fn h1_c2_c5_what_cannot_be_called_is_a_result_and_its_siblings_run() {
    let bed = Bed::new().await;
    bed.policy(
        "no-list",
        "[[tools.rules]]\nname = \"no-list\"\ntool = \"list_files\"\nverdict = \"deny\"\nreason = \"not here\"\n",
    );
    let mut client = bed.client().await;
    let script = Script::new()
        .write("a", "1\n")
        .calls(&[
            ("read_file", json!({ "path": "a" })),
            ("raed_file", json!({ "path": "a" })),
            ("read_file", json!({ "file": "a" })),
            ("list_files", json!({})),
            ("read_file", json!({ "path": "missing" })),
            ("shell", json!({ "command": "exit 3" })),
        ])
        .finish("done");
    let task = proto::Task {
        policy: "no-list".into(),
        ..script.task()
    };
    let run = bed.submit(&task).await.run_id;
    let events = until_end(&mut client, &run, 0).await;
    check_whole(&events);
    let results = results(&events);
    let types: Vec<(u32, &str, &Value)> = results
        .iter()
        .map(|(step, result)| (*step, result["status"].as_str().unwrap(), &result["error"]["type"]))
        .collect();
    let null = Value::Null;
    assert_eq!(
        types,
        [
            (2, "ok", &null),
            (4, "ok", &null),
            (5, "error", &"unknown_tool".into()),
            (6, "error", &"invalid_arguments".into()),
            (7, "error", &"denied".into()),
            (8, "error", &"not_found".into()),
            (9, "error", &"exit_status".into()),
        ]
    );
    // C6: each says what may be done about it.
    for result in results.values().filter(|result| result["status"] == "error") {
        let error = &result["error"];
        assert!(
            error["possible_cause"].as_str().is_some_and(|text| !text.is_empty()),
            "{result}"
        );
        assert!(
            error["suggestion"].as_str().is_some_and(|text| !text.is_empty()),
            "{result}"
        );
        assert!(error["retryable"].is_boolean(), "{result}");
    }
    assert!(results[&5].to_string().contains("read_file"), "the nearest name");
    let rules: Vec<&str> = events
        .iter()
        .filter_map(|event| match kind(event) {
            Kind::ToolRefused(refused) => Some(refused.rule.as_str()),
            _ => None,
        })
        .collect();
    assert_eq!(rules, ["tools", "arguments", "no-list"]);
    let done = client.get(get(&run)).await.unwrap().into_inner();
    assert_eq!(done.state(), RunState::Finished);
    // Refused calls are no steps.
    assert_eq!(done.used.unwrap().tool_calls, 5, "four and the `finish`");
}

#[tokio::test]
async fn d8_of_eight_calls_one_hangs_and_each_has_its_result() {
    let bed = Bed::new().await;
    let mut client = bed.client().await;
    let read = ("read_file", json!({ "path": "a" }));
    let script = Script::new().write("a", "1\n").calls(&vec![read; 8]).finish("done");
    let task = proto::Task {
        budgets: Some(Budgets {
            parallel_tools: Some(3),
            step_time: Some(prost_types::Duration { seconds: 1, nanos: 0 }),
            ..Default::default()
        }),
        ..script.task()
    };
    // The guest's first word and the write come first; of the eight connections then one takes for ever.
    let run = bed.submit(&task).await.run_id;
    loop {
        let calls = bed.fake.calls();
        if calls.contains(&Call::Freeze) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    bed.fake.stall_next(Call::Connect, Duration::from_secs(3600));
    let events = until_end(&mut client, &run, 0).await;
    check_whole(&events);
    let (mut running, mut most) = (0_u32, 0);
    for event in &events {
        match kind(event) {
            Kind::ToolStarted(_) => running += 1,
            Kind::ToolFinished(_) => running -= 1,
            _ => {}
        }
        most = most.max(running);
    }
    assert_eq!(most, 3, "the cap");
    let results = results(&events);
    let of_turn: Vec<&Value> = (4..12).map(|step| &results[&step]).collect();
    let hung = of_turn
        .iter()
        .filter(|result| result["error"]["type"] == "timeout")
        .count();
    let fine = of_turn.iter().filter(|result| result["status"] == "ok").count();
    assert_eq!((hung, fine), (1, 7));
    assert_eq!(ended(&mut client, &run).await.state(), RunState::Finished);
}

#[tokio::test]
async fn a6_a_failed_check_is_told_and_the_run_goes_on() {
    let bed = Bed::new().await;
    let mut client = bed.client().await;
    let script = Script::new()
        .finish("I say it is done")
        .write("proof", "x")
        .say("now it is");
    let task = proto::Task {
        check: "test -f proof".into(),
        empty_workspace: true,
        ..script.task()
    };
    let run = bed.submit(&task).await.run_id;
    let events = until_end(&mut client, &run, 0).await;
    let checks: Vec<bool> = events
        .iter()
        .filter_map(|event| match kind(event) {
            Kind::CheckFinished(done) => Some(done.passed),
            _ => None,
        })
        .collect();
    assert_eq!(checks, [false, true]);
    let done = client.get(get(&run)).await.unwrap().into_inner();
    assert_eq!(
        (done.state(), done.outcome.unwrap().summary.as_str()),
        (RunState::Finished, "now it is")
    );
    let said = transcript(&mut client, &run).await;
    let answer = said.iter().find(|message| message["role"] == "tool").unwrap();
    assert!(answer["content"].as_str().unwrap().contains("exit code 1"), "{answer}");

    // One whose check never passes is never FINISHED.
    let task = proto::Task {
        check: "false".into(),
        empty_workspace: true,
        budgets: Some(Budgets {
            model_calls: Some(2),
            ..Default::default()
        }),
        ..Script::new().finish("done").finish("really").task()
    };
    let run = bed.submit(&task).await.run_id;
    assert_eq!(ended(&mut client, &run).await.state(), RunState::Exhausted);
}

#[tokio::test]
async fn a7_c2_empty_answers_and_a_script_that_ends_are_failures_with_their_codes() {
    let bed = Bed::new().await;
    let mut client = bed.client().await;
    let empty = Script::new().say("").say("").say("");
    let short = Script::new().write("a", "1");
    for (script, code) in [(empty, "no_progress"), (short, "script_ended")] {
        let run = bed.submit(&script.task()).await.run_id;
        let done = ended(&mut client, &run).await;
        let fault = done.outcome.as_ref().unwrap().fault.as_ref().unwrap();
        assert_eq!((done.state(), fault.code.as_str()), (RunState::Failed, code));
    }
}

#[tokio::test]
async fn h4_the_rest_of_a_long_output_is_an_artifact() {
    let bed = Bed::new().await;
    let mut client = bed.client().await;
    let long: String = (0..2000).map(|n| format!("line {n}\n")).collect();
    let script = Script::new().write("long", &long).shell("cat long").finish("done");
    let run = bed.submit(&script.task()).await.run_id;
    let events = until_end(&mut client, &run, 0).await;
    let result = &results(&events)[&4];
    assert_eq!(result["status"], "truncated");
    let artifact = result["data"]["artifact"].as_str().unwrap().to_owned();
    let request = |id: &str| proto::GetArtifactRequest {
        id: id.to_owned(),
        artifact: artifact.clone(),
    };
    let mut chunks = client.get_artifact(request(&run)).await.unwrap().into_inner();
    let mut bytes = Vec::new();
    while let Some(chunk) = chunks.message().await.unwrap() {
        bytes.extend(chunk.data);
    }
    assert!(String::from_utf8(bytes).unwrap().contains(&long));
    // It is this run's alone.
    let other = bed.submit(&Script::new().finish("x").task()).await.run_id;
    ended(&mut client, &other).await;
    let refused = client.get_artifact(request(&other)).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::NotFound);
}

#[tokio::test]
async fn diffs_and_archives_are_of_the_checkpoint_that_is_asked_for() {
    let bed = Bed::new().await;
    let mut client = bed.client().await;
    let mut archive = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_size(4);
    header.set_mode(0o644);
    archive.append_data(&mut header, "given", &b"old\n"[..]).unwrap();
    let data = archive.into_inner().unwrap();
    let pieces: Vec<_> = data
        .chunks(100)
        .map(|data| proto::UploadWorkspaceRequest { data: data.to_vec() })
        .collect();
    let files = client
        .upload_workspace(futures::stream::iter(pieces))
        .await
        .unwrap()
        .into_inner();
    let script = Script::new().write("a", "1\n").write("given", "new\n").finish("done");
    let task = proto::Task {
        tree: files.tree.clone(),
        times: files.times,
        ..script.task()
    };
    let run = bed.submit(&task).await.run_id;
    let done = ended(&mut client, &run).await;
    let mut diff = async |from, to| {
        let request = proto::DiffWorkspaceRequest {
            id: run.clone(),
            from_revision: from,
            to_revision: to,
        };
        let answer = client.diff_workspace(request).await.unwrap().into_inner();
        (
            String::from_utf8(answer.diff).unwrap(),
            answer.from_tree,
            answer.to_tree,
        )
    };
    let (whole, from, to) = diff(None, None).await;
    assert!(
        whole.contains("+1") && whole.contains("-old") && whole.contains("+new"),
        "{whole}"
    );
    assert_eq!((from, to), (files.tree.clone(), done.tree.clone()));
    // Revision 2 is the first write, after its model call.
    let (first, from, _) = diff(Some(0), Some(2)).await;
    assert!(first.contains("+1") && !first.contains("+new"), "{first}");
    assert_eq!(from, files.tree);
    let (back, ..) = diff(Some(done.revision), Some(0)).await;
    assert!(back.contains("-new") && back.contains("+old"), "{back}");
    let (none, from, to) = diff(Some(2), Some(2)).await;
    assert_eq!((none.as_str(), from), ("", to));
}

#[tokio::test]
async fn b1_every_audit_row_of_a_run_carries_its_ids() {
    let bed = Bed::new().await;
    let mut client = bed.client().await;
    let script = Script::new()
        .shell("echo x > a")
        .calls(&[("nonsense", json!({}))])
        .finish("done");
    let run = bed.submit(&script.task()).await.run_id;
    let done = ended(&mut client, &run).await;
    bed.empties().await;
    let audit = loop {
        let audit = bed.audit(&run).await;
        // The last record comes once the directory is gone too.
        match audit.iter().any(|record| record.action == "sandbox.destroyed") {
            true => break audit,
            false => tokio::time::sleep(std::time::Duration::from_millis(10)).await,
        }
    };
    let expected = [
        ("task", done.task_id),
        ("run", done.run_id),
        ("session", done.session_id),
        ("trace", done.trace_id),
    ];
    for record in &audit {
        for (name, id) in &expected {
            assert_eq!(record.ids.get(*name), Some(id), "{record:?}");
        }
        let in_sandbox = record.action.starts_with("exec.") || record.action.starts_with("sandbox.");
        assert_eq!(record.ids.contains_key("sandbox"), in_sandbox, "{record:?}");
    }
    let actions: Vec<&str> = audit.iter().map(|record| record.action.as_str()).collect();
    assert_eq!(
        actions,
        [
            "task.submitted",
            "run.claimed",
            "model.replied",
            "policy.decided",
            "tool.started",
            "sandbox.created",
            "exec.ended",
            "tool.finished",
            "model.replied",
            "policy.decided",
            "model.replied",
            "policy.decided",
            "tool.started",
            "run.ended",
            "sandbox.destroyed",
        ]
    );
    let exec = audit.iter().find(|record| record.action == "exec.ended").unwrap();
    assert_eq!(exec.details["argv"], json!(["sh", "-c", "echo x > a"]));
    assert_eq!(exec.details["cwd"], "/workspace");
    assert_eq!(exec.details["cause"], json!({ "type": "exited", "code": 0 }));
}
