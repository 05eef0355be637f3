//! Submit, Get, List.

use std::collections::{BTreeSet, HashMap};

use exuvia::api::proto::{self, RunState};
use futures::future::join_all;
use tonic::Code;

use crate::bed::{Bed, why};
use crate::support::script::Script;
use crate::support::watch::ended;
use crate::support::{get, keyed};

#[tokio::test]
async fn the_same_key_and_body_is_the_same_task_and_another_body_is_refused() {
    let bed = Bed::new().await;
    let mut client = bed.client().await;
    let task = Script::new().finish("done").task();
    let first = client.submit(keyed("k", &task)).await.unwrap().into_inner();
    let again = client.submit(keyed("k", &task)).await.unwrap().into_inner();
    assert_eq!((&again.task_id, &again.run_id), (&first.task_id, &first.run_id));
    // Also when it has long ended.
    ended(&mut client, &first.run_id).await;
    let again = client.submit(keyed("k", &task)).await.unwrap().into_inner();
    assert_eq!((&again.run_id, again.state()), (&first.run_id, RunState::Finished));

    let others = [
        proto::Task {
            prompt: "do something else".into(),
            ..task.clone()
        },
        proto::Task {
            check: "true".into(),
            ..task.clone()
        },
        proto::Task {
            labels: HashMap::from([("a".into(), "b".into())]),
            ..task.clone()
        },
        Script::new().finish("other").task(),
    ];
    for other in others {
        let refused = client.submit(keyed("k", &other)).await.unwrap_err();
        assert_eq!(why(&refused), (Code::AlreadyExists, "IDEMPOTENCY_KEY_REUSED".into()));
    }
    let unkeyed = client.submit(keyed("", &task)).await.unwrap().into_inner();
    let other_key = client.submit(keyed("l", &task)).await.unwrap().into_inner();
    let runs = BTreeSet::from([first.run_id, unkeyed.run_id, other_key.run_id]);
    assert_eq!(runs.len(), 3);
    let all = client.list(proto::ListRequest::default()).await.unwrap().into_inner();
    assert_eq!(all.runs.len(), 3, "what was refused is not stored");
}

/// What was accepted once is answered with its run, also when it would be refused today.
#[tokio::test]
async fn a_known_key_is_looked_up_before_the_task_is_judged() {
    let bed = Bed::new().await;
    let mut client = bed.client().await;
    bed.policy("brief", "");
    let task = proto::Task {
        policy: "brief".into(),
        ..Script::new().finish("done").task()
    };
    let first = client.submit(keyed("k", &task)).await.unwrap().into_inner();
    std::fs::remove_file(bed.data.path().join("policies/brief.toml")).unwrap();
    let again = client.submit(keyed("k", &task)).await.unwrap().into_inner();
    assert_eq!(again.run_id, first.run_id);
    let new = client.submit(keyed("l", &task)).await.unwrap_err();
    assert_eq!(why(&new), (Code::NotFound, "POLICY".into()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_same_key_at_the_same_moment_makes_one_task() {
    let bed = Bed::new().await;
    let client = bed.client().await;
    let task = Script::new().finish("done").task();
    let submissions = (0..16).map(|_| {
        let (mut client, task) = (client.clone(), task.clone());
        async move { client.submit(keyed("k", &task)).await.unwrap().into_inner().run_id }
    });
    let runs: BTreeSet<String> = join_all(submissions).await.into_iter().collect();
    assert_eq!(runs.len(), 1);
}

#[tokio::test]
async fn a_run_is_found_by_its_id_and_its_tasks() {
    let bed = Bed::new().await;
    let mut client = bed.client().await;
    let task = proto::Task {
        trace_id: format!("trc_{}", "a".repeat(26)),
        ..Script::new().finish("done").task()
    };
    let submitted = client.submit(keyed("", &task)).await;
    let submitted = submitted
        .map(tonic::Response::into_inner)
        .unwrap_or_else(|status| panic!("{status}"));
    let by_run = ended(&mut client, &submitted.run_id).await;
    let by_task = client.get(get(&submitted.task_id)).await.unwrap().into_inner();
    assert_eq!(by_run, by_task);
    assert_eq!(by_run.trace_id, task.trace_id);
    assert_eq!(by_run.outcome.unwrap().summary, "done");
    assert!(by_run.session_id.starts_with("ses"), "{}", by_run.session_id);
    assert_eq!(by_run.policy_hash.len(), 64);
}

#[tokio::test]
async fn lists_are_paged_newest_first_and_filtered() {
    let bed = Bed::new().await;
    let mut client = bed.client().await;
    let mut submitted = Vec::new();
    for n in 0..7 {
        let script = if n == 3 {
            Script::new().say("").say("").say("")
        } else {
            Script::new().finish("done")
        };
        let task = proto::Task {
            labels: HashMap::from([("parity".into(), (n % 2).to_string()), ("n".into(), n.to_string())]),
            ..script.task()
        };
        submitted.push(bed.submit(&task).await.run_id);
        ended(&mut client, &submitted[n]).await;
    }
    submitted.reverse();

    let (mut token, mut pages) = (String::new(), Vec::new());
    loop {
        let request = proto::ListRequest {
            page_size: 3,
            page_token: token,
            ..Default::default()
        };
        let page = client.list(request).await.unwrap().into_inner();
        pages.push(page.runs.iter().map(|run| run.run_id.clone()).collect::<Vec<_>>());
        token = page.next_page_token;
        if token.is_empty() {
            break;
        }
    }
    assert_eq!(pages.iter().map(Vec::len).collect::<Vec<_>>(), [3, 3, 1]);
    // What was created within the same millisecond has an order too, though not the one it was asked for in.
    let listed: BTreeSet<String> = pages.concat().into_iter().collect();
    assert_eq!(listed, submitted.iter().cloned().collect());

    let mut find = async |states: &[RunState], labels: &[(&str, &str)]| {
        let request = proto::ListRequest {
            states: states.iter().map(|state| i32::from(*state)).collect(),
            labels: labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
            ..Default::default()
        };
        let page = client.list(request).await.unwrap().into_inner();
        page.runs
            .into_iter()
            .map(|run| run.labels["n"].clone())
            .collect::<BTreeSet<_>>()
    };
    let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
    assert_eq!(find(&[], &[("parity", "1")]).await, set(&["1", "3", "5"]));
    assert_eq!(find(&[], &[("parity", "1"), ("n", "2")]).await, set(&[]));
    assert_eq!(find(&[RunState::Failed], &[]).await, set(&["3"]));
    assert_eq!(
        find(&[RunState::Failed, RunState::Finished], &[("parity", "1")]).await,
        set(&["1", "3", "5"])
    );
    assert_eq!(find(&[RunState::Paused], &[]).await, set(&[]));
}
