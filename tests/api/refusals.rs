//! Bad requests: each with its code and its stable reason, and nothing stored.

use exuvia::api::proto;
use tonic::Code::{self, FailedPrecondition, InvalidArgument, NotFound};
use tonic::Status;

use crate::bed::{Bed, why};
use crate::support::script::Script;
use crate::support::watch::ended;
use crate::support::{control, get, keyed};

fn seconds(seconds: i64) -> prost_types::Duration {
    prost_types::Duration { seconds, nanos: 0 }
}

fn budgets(budgets: proto::Budgets) -> proto::Task {
    proto::Task {
        budgets: Some(budgets),
        ..Script::new().finish("x").task()
    }
}

fn openai(model: proto::OpenAiModel) -> proto::Task {
    proto::Task {
        model: Some(proto::Model {
            kind: Some(proto::model::Kind::Openai(model)),
        }),
        ..Script::new().finish("x").task()
    }
}

fn scripted(jsonl: &str) -> proto::Task {
    let script = proto::ScriptedModel {
        name: "s".into(),
        jsonl: jsonl.into(),
    };
    proto::Task {
        model: Some(proto::Model {
            kind: Some(proto::model::Kind::Scripted(script)),
        }),
        ..Script::new().finish("x").task()
    }
}

/// What is wrong, the task, the code, the reason, and a word that the message has to have.
fn bad_tasks() -> Vec<(proto::Task, Code, &'static str, &'static str)> {
    let good = || Script::new().finish("x").task();
    let with = |edit: fn(&mut proto::Task)| {
        let mut task = good();
        edit(&mut task);
        task
    };
    let b = proto::Budgets::default;
    vec![
        (
            with(|task| task.check = "true".into()),
            InvalidArgument,
            "INVALID",
            "empty_workspace",
        ),
        (
            with(|task| task.labels = [("a".into(), "b\u{1b}".into())].into()),
            InvalidArgument,
            "INVALID",
            "label `a`",
        ),
        (
            with(|task| task.prompt = " \n".into()),
            InvalidArgument,
            "INVALID",
            "prompt",
        ),
        (with(|task| task.model = None), InvalidArgument, "INVALID", "task.model"),
        (scripted("{}"), InvalidArgument, "MODEL", "line 1"),
        (scripted(""), InvalidArgument, "MODEL", "no message"),
        (
            with(|task| task.tree = "zz".into()),
            InvalidArgument,
            "INVALID",
            "task.tree",
        ),
        (
            with(|task| task.tree = "0".repeat(64)),
            NotFound,
            "NOT_FOUND",
            "no tree `0000",
        ),
        (
            with(|task| task.times = "zz".into()),
            InvalidArgument,
            "INVALID",
            "task.t",
        ),
        (with(|task| task.policy = "nobody".into()), NotFound, "POLICY", "nobody"),
        (
            with(|task| task.policy = "/etc/passwd".into()),
            InvalidArgument,
            "INVALID",
            "task.policy",
        ),
        (
            with(|task| task.policy = "../x".into()),
            InvalidArgument,
            "INVALID",
            "task.policy",
        ),
        (
            with(|task| task.image = "rootfs:/".into()),
            InvalidArgument,
            "INVALID",
            "task.image",
        ),
        (
            with(|task| task.image = "Nonsense".into()),
            InvalidArgument,
            "INVALID",
            "task.image",
        ),
        // A name of the store, though it is also a directory of the host.
        (
            with(|task| task.image = "usr/lib".into()),
            InvalidArgument,
            "SANDBOX",
            "the store has no image `usr/lib`",
        ),
        (
            with(|task| task.backend = "qemu".into()),
            InvalidArgument,
            "INVALID",
            "task.backend",
        ),
        (
            with(|task| task.trace_id = "trc_1".into()),
            InvalidArgument,
            "INVALID",
            "task.trace_id",
        ),
        (
            budgets(proto::Budgets {
                steps: Some(101),
                ..b()
            }),
            InvalidArgument,
            "BUDGETS",
            "budgets.steps",
        ),
        (
            budgets(proto::Budgets { steps: Some(0), ..b() }),
            InvalidArgument,
            "BUDGETS",
            "more than 0",
        ),
        (
            budgets(proto::Budgets { tokens: Some(0), ..b() }),
            InvalidArgument,
            "BUDGETS",
            "budgets.tokens",
        ),
        (
            budgets(proto::Budgets {
                total_time: Some(seconds(-1)),
                ..b()
            }),
            InvalidArgument,
            "INVALID",
            "total_time",
        ),
        (
            budgets(proto::Budgets {
                step_time: Some(seconds(121)),
                ..b()
            }),
            InvalidArgument,
            "BUDGETS",
            "budgets.step_time",
        ),
        (
            openai(proto::OpenAiModel {
                model: "m".into(),
                credential: "env:HOME".into(),
                ..Default::default()
            }),
            InvalidArgument,
            "INVALID",
            "credential",
        ),
        (
            openai(proto::OpenAiModel {
                model: "m".into(),
                credential: "file:/etc/shadow".into(),
                ..Default::default()
            }),
            InvalidArgument,
            "INVALID",
            "credential",
        ),
        (
            openai(proto::OpenAiModel {
                model: "m".into(),
                base_url: "no url".into(),
                ..Default::default()
            }),
            InvalidArgument,
            "MODEL",
            "base URL",
        ),
        (
            proto::Task {
                budgets: Some(proto::Budgets {
                    cost_micros: Some(5),
                    ..b()
                }),
                ..openai(proto::OpenAiModel {
                    model: "m".into(),
                    base_url: "http://127.0.0.1:9/v1".into(),
                    ..Default::default()
                })
            },
            InvalidArgument,
            "INVALID",
            "price",
        ),
    ]
}

#[tokio::test]
async fn a_bad_task_is_refused_with_its_reason_and_nothing_is_stored() {
    let bed = Bed::new().await;
    let mut client = bed.client().await;
    let mut wrong = Vec::new();
    for (task, code, reason, word) in bad_tasks() {
        let shown = format!("{task:?}");
        match client.submit(keyed("", &task)).await {
            Ok(_) => wrong.push(format!("taken: {shown}")),
            Err(status) => {
                if why(&status) != (code, reason.to_owned()) || !status.message().contains(word) {
                    wrong.push(format!(
                        "{:?}, {}, not {code:?}, {reason}, {word}: {shown}",
                        why(&status),
                        status.message()
                    ));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    let refused = client.submit(proto::SubmitRequest::default()).await.unwrap_err();
    assert_eq!(why(&refused), (InvalidArgument, "INVALID".into()));
    let task = Script::new().finish("x").task();
    let refused = client.submit(keyed(&"k".repeat(257), &task)).await.unwrap_err();
    assert_eq!(why(&refused), (InvalidArgument, "INVALID".into()));
    let all = client.list(proto::ListRequest::default()).await.unwrap().into_inner();
    assert_eq!(all.runs, []);
    assert_eq!(bed.store.audit_log(0, 10).await.unwrap(), []);
}

#[tokio::test]
async fn what_is_not_there_is_said_to_be_not_there() {
    let bed = Bed::new().await;
    let mut client = bed.client().await;
    let id = format!("run_{}", "a".repeat(26));
    for (id, expected) in [
        (id.as_str(), (NotFound, "NOT_FOUND".to_owned())),
        (&format!("task_{}", "a".repeat(26)), (NotFound, "NOT_FOUND".to_owned())),
        ("run_1", (InvalidArgument, "INVALID".to_owned())),
        ("", (InvalidArgument, "INVALID".to_owned())),
    ] {
        for (call, status) in everything(&mut client, id).await {
            assert_eq!(why(&status), expected, "{call} {id}");
        }
    }

    let run = bed.submit(&Script::new().finish("x").task()).await.run_id;
    let last = ended(&mut client, &run).await.revision;
    let request = proto::GetWorkspaceRequest {
        id: run.clone(),
        revision: Some(last + 1),
    };
    let status = client.get_workspace(request).await.unwrap_err();
    assert_eq!(why(&status), (NotFound, "NOT_FOUND".into()));
    let request = proto::DiffWorkspaceRequest {
        id: run.clone(),
        to_revision: Some(last + 1),
        ..Default::default()
    };
    let status = client.diff_workspace(request).await.unwrap_err();
    assert_eq!(why(&status), (NotFound, "NOT_FOUND".into()));
    for artifact in ["", "nonsense", &"0".repeat(64)] {
        let request = proto::GetArtifactRequest {
            id: run.clone(),
            artifact: artifact.into(),
        };
        let status = client.get_artifact(request).await.unwrap_err();
        assert_eq!(why(&status), (NotFound, "NOT_FOUND".into()), "{artifact}");
    }
    let decide = proto::DecideRequest {
        id: run.clone(),
        approval: format!("apr_{}", "a".repeat(26)),
        ..Default::default()
    };
    let status = client.decide(decide.clone()).await.unwrap_err();
    assert_eq!(why(&status).0, FailedPrecondition, "{status}");
    let status = client
        .decide(proto::DecideRequest {
            approval: "x".into(),
            ..decide
        })
        .await
        .unwrap_err();
    assert_eq!(why(&status), (InvalidArgument, "INVALID".into()));

    for token in ["x", "1.run_x", &format!("x.{run}"), "1."] {
        let request = proto::ListRequest {
            page_token: token.into(),
            ..Default::default()
        };
        let status = client.list(request).await.unwrap_err();
        assert_eq!(why(&status), (InvalidArgument, "INVALID".into()), "{token}");
    }
    let request = proto::ListRequest {
        states: vec![99],
        ..Default::default()
    };
    let status = client.list(request).await.unwrap_err();
    assert_eq!(why(&status), (InvalidArgument, "INVALID".into()));
}

/// The answer of every call that names a run.
async fn everything(client: &mut crate::support::Client, id: &str) -> Vec<(&'static str, Status)> {
    let own = || id.to_owned();
    vec![
        ("get", client.get(get(id)).await.unwrap_err()),
        ("cancel", client.cancel(control(id)).await.unwrap_err()),
        ("pause", client.pause(control(id)).await.unwrap_err()),
        ("resume", client.resume(control(id)).await.unwrap_err()),
        (
            "decide",
            client
                .decide(proto::DecideRequest {
                    id: own(),
                    ..Default::default()
                })
                .await
                .unwrap_err(),
        ),
        (
            "watch",
            client
                .watch(proto::WatchRequest {
                    id: own(),
                    after_seq: 0,
                })
                .await
                .unwrap_err(),
        ),
        (
            "transcript",
            client
                .get_transcript(proto::GetTranscriptRequest { id: own() })
                .await
                .unwrap_err(),
        ),
        (
            "workspace",
            client
                .get_workspace(proto::GetWorkspaceRequest {
                    id: own(),
                    revision: None,
                })
                .await
                .unwrap_err(),
        ),
        (
            "diff",
            client
                .diff_workspace(proto::DiffWorkspaceRequest {
                    id: own(),
                    ..Default::default()
                })
                .await
                .unwrap_err(),
        ),
        (
            "artifact",
            client
                .get_artifact(proto::GetArtifactRequest {
                    id: own(),
                    artifact: "x".into(),
                })
                .await
                .unwrap_err(),
        ),
    ]
}

#[tokio::test]
async fn an_upload_that_is_no_archive_is_refused() {
    let bed = Bed::new().await;
    let mut client = bed.client().await;
    let part = proto::UploadWorkspaceRequest {
        data: b"this is no tar archive at all, and too short to be one".to_vec(),
    };
    let status = client
        .upload_workspace(futures::stream::iter([part]))
        .await
        .unwrap_err();
    assert_eq!(why(&status), (InvalidArgument, "WORKSPACE".into()));
}
