//! `ask` policies: the run waits for a person, however long and wherever it is asked.

use std::time::Duration;

use exuvia::api::proto::event::Kind;
use exuvia::api::proto::{self, RunState};
use serde_json::json;
use tonic::Code;

use crate::bed::{Bed, why};
use crate::support::script::Script;
use crate::support::watch::{check_whole, ended, kind, until, until_end};
use crate::support::{Client, get, transcript};

const ASK: &str = r#"
[[tools.rules]]
name = "look-first"
tool = ["shell", "read_file"]
verdict = "ask"
reason = "a person looks first"
"#;

fn task() -> proto::Task {
    proto::Task {
        policy: "ask".into(),
        ..Script::new()
            .write("a", "1\n")
            .shell("cat a; echo 2 >> a")
            .finish("done")
            .task()
    }
}

/// A bed with a run that waits for approval.
async fn waiting(task: &proto::Task) -> (Bed, proto::Run) {
    let bed = Bed::new().await;
    bed.policy("ask", ASK);
    let mut client = bed.client().await;
    let run = bed.submit(task).await.run_id;
    until(&mut client, &run, 0, |event| event.state() == RunState::WaitingApproval).await;
    let run = client.get(get(&run)).await.unwrap().into_inner();
    (bed, run)
}

async fn decide(client: &mut Client, run: &proto::Run, approved: bool) -> proto::Run {
    let request = proto::DecideRequest {
        id: run.run_id.clone(),
        approval: run.approvals[0].approval_id.clone(),
        approved,
        by: "ada".into(),
        reason: "looked at it".into(),
    };
    client.decide(request).await.unwrap().into_inner()
}

fn decisions(events: &[proto::Event]) -> Vec<(bool, String)> {
    let decided = events.iter().filter_map(|event| match kind(event) {
        Kind::ApprovalDecided(decided) => Some((decided.approved, decided.by.clone())),
        _ => None,
    });
    decided.collect()
}

#[tokio::test]
async fn m1_an_approved_call_runs() {
    let (bed, run) = waiting(&task()).await;
    let mut client = bed.client().await;
    let [open] = run.approvals.as_slice() else {
        panic!("{run:?}")
    };
    assert_eq!(
        (open.tool.as_str(), open.step, open.rule.as_str()),
        ("shell", 4, "look-first")
    );
    assert!(open.reason.ends_with("a person looks first"), "{}", open.reason);
    assert!(open.arguments.contains("cat a"));
    // Nothing is kept up for it meanwhile.
    bed.empties().await;
    decide(&mut client, &run, true).await;
    let events = until_end(&mut client, &run.run_id, 0).await;
    check_whole(&events);
    assert_eq!(decisions(&events), [(true, "ada".to_owned())]);
    assert_eq!(ended(&mut client, &run.run_id).await.state(), RunState::Finished);
    let audit = bed.audit(&run.run_id).await;
    let decided = audit.iter().find(|record| record.action == "approval.decided").unwrap();
    assert_eq!(
        (decided.actor.as_str(), decided.outcome.as_str()),
        ("user:ada", "approved")
    );
    // Asked and answered: the second decision has nothing to decide.
    let request = proto::DecideRequest {
        id: run.run_id.clone(),
        approval: open.approval_id.clone(),
        approved: false,
        ..Default::default()
    };
    let refused = client.decide(request).await.unwrap_err();
    assert_eq!(why(&refused), (Code::FailedPrecondition, "NO_OPEN_APPROVAL".into()));
}

#[tokio::test]
async fn m2_a_denied_call_is_a_result_of_its_own_kind_and_the_run_goes_on() {
    let (bed, run) = waiting(&task()).await;
    let mut client = bed.client().await;
    decide(&mut client, &run, false).await;
    let done = ended(&mut client, &run.run_id).await;
    assert_eq!(done.state(), RunState::Finished);
    let said = transcript(&mut client, &run.run_id).await;
    let results: Vec<&str> = said
        .iter()
        .filter(|message| message["role"] == "tool")
        .map(|message| message["content"].as_str().unwrap())
        .collect();
    assert!(
        results[1].contains("approval_denied") && results[1].contains("looked at it"),
        "{results:?}"
    );
    let request = proto::DiffWorkspaceRequest {
        id: run.run_id,
        ..Default::default()
    };
    let diff = client.diff_workspace(request).await.unwrap().into_inner().diff;
    assert!(!String::from_utf8(diff).unwrap().contains("+2"), "it did not run");
}

#[tokio::test]
async fn m2_an_open_approval_survives_a_restart() {
    let (bed, run) = waiting(&task()).await;
    let bed = bed.restarted().await;
    let mut client = bed.client().await;
    let now = client.get(get(&run.run_id)).await.unwrap().into_inner();
    assert_eq!(
        (now.state(), &now.approvals),
        (RunState::WaitingApproval, &run.approvals)
    );
    decide(&mut client, &run, true).await;
    let events = until_end(&mut client, &run.run_id, 0).await;
    check_whole(&events);
    assert_eq!(ended(&mut client, &run.run_id).await.state(), RunState::Finished);
}

#[tokio::test]
async fn an_answer_that_comes_too_late_is_a_no() {
    let (bed, run) = waiting(&task()).await;
    let mut client = bed.client().await;
    bed.clock.advance(Duration::from_secs(3601));
    let late = proto::DecideRequest {
        id: run.run_id.clone(),
        approval: run.approvals[0].approval_id.clone(),
        approved: true,
        ..Default::default()
    };
    let refused = client.decide(late).await.unwrap_err();
    assert_eq!(why(&refused), (Code::FailedPrecondition, "ALREADY_DECIDED".into()));
    let events = until_end(&mut client, &run.run_id, 0).await;
    assert_eq!(decisions(&events), [(false, "expiry".to_owned())]);
    // The hour of waiting is not the run's: it goes on.
    assert_eq!(ended(&mut client, &run.run_id).await.state(), RunState::Finished);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_answers_at_once_are_one_decision() {
    for _ in 0..10 {
        let (bed, run) = waiting(&task()).await;
        let (mut yes, mut no) = (bed.client().await, bed.client().await);
        let request = |approved| proto::DecideRequest {
            id: run.run_id.clone(),
            approval: run.approvals[0].approval_id.clone(),
            approved,
            ..Default::default()
        };
        let (yes_said, no_said) = tokio::join!(yes.decide(request(true)), no.decide(request(false)));
        let events = until_end(&mut yes, &run.run_id, 0).await;
        check_whole(&events);
        let [(approved, _)] = decisions(&events).try_into().unwrap();
        // Who was not heard is told so.
        assert_eq!((yes_said.is_ok(), no_said.is_ok()), (approved, !approved));
    }
}

#[tokio::test]
async fn of_several_open_approvals_one_has_to_be_named() {
    let read = |path: &str| ("read_file", json!({ "path": path }));
    let script = Script::new()
        .write("a", "1\n")
        .calls(&[read("a"), read("b")])
        .finish("done");
    let task = proto::Task {
        policy: "ask".into(),
        ..script.task()
    };
    let (bed, run) = waiting(&task).await;
    let mut client = bed.client().await;
    assert_eq!(run.approvals.len(), 2);
    let unnamed = proto::DecideRequest {
        id: run.run_id.clone(),
        approved: true,
        ..Default::default()
    };
    let refused = client.decide(unnamed.clone()).await.unwrap_err();
    assert_eq!(why(&refused), (Code::InvalidArgument, "INVALID".into()));
    let left = decide(&mut client, &run, false).await;
    assert_eq!((left.state(), left.approvals.len()), (RunState::WaitingApproval, 1));
    // Now there is but one.
    client.decide(unnamed).await.unwrap();
    let events = until_end(&mut client, &run.run_id, 0).await;
    check_whole(&events);
    assert_eq!(
        decisions(&events).iter().map(|(yes, _)| *yes).collect::<Vec<_>>(),
        [false, true]
    );
}

#[tokio::test]
async fn a_run_that_waits_can_be_cancelled() {
    let (bed, run) = waiting(&task()).await;
    let mut client = bed.client().await;
    let now = client
        .cancel(crate::support::control(&run.run_id))
        .await
        .unwrap()
        .into_inner();
    assert_eq!((now.state(), now.approvals.len()), (RunState::Cancelled, 0));
}
