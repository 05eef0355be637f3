//! Forks, exports, imports and pauses at once, as clients ask for them.

use exuvia::api::proto::{self, RunState};
use futures::{StreamExt, stream};
use tonic::Code;
use tonic_types::StatusExt;

use crate::bed::{Bed, why};
use crate::support::script::Script;
use crate::support::watch::{until, until_end};
use crate::support::{Client, control, get, transcript};

fn task() -> proto::Task {
    Script::new()
        .write("a", "kept\n")
        .shell("echo more >> a")
        .finish("done")
        .task()
}

#[tokio::test]
async fn e18_a_fork_shows_where_it_comes_from_and_runs_to_its_own_end() {
    let bed = Bed::new().await;
    let mut client = bed.client().await;
    let parent = bed.submit(&task()).await.run_id;
    until_end(&mut client, &parent, 0).await;
    let request = proto::ForkRequest {
        id: parent.clone(),
        revision: Some(2),
        by: "tester".into(),
        ..Default::default()
    };
    let child = client.fork(request.clone()).await.unwrap().into_inner();
    assert_eq!(
        (child.parent_run_id.as_str(), child.parent_revision),
        (parent.as_str(), Some(2))
    );
    until_end(&mut client, &child.run_id, 0).await;
    let ended = client.get(get(&child.run_id)).await.unwrap().into_inner();
    assert_eq!(ended.state(), RunState::Finished);
    assert_eq!(
        transcript(&mut client, &child.run_id).await,
        transcript(&mut client, &parent).await
    );
    let actions: Vec<String> = bed
        .audit(&child.run_id)
        .await
        .into_iter()
        .map(|record| record.action)
        .collect();
    assert_eq!(actions.first().map(String::as_str), Some("run.forked"));

    let missing = proto::ForkRequest {
        revision: Some(99),
        ..request
    };
    assert_eq!(client.fork(missing).await.unwrap_err().code(), Code::NotFound);
}

#[tokio::test]
async fn an_exported_run_comes_in_again_whole_and_under_ids_of_its_own() {
    let bed = Bed::new().await;
    let mut client = bed.client().await;
    let run = bed.submit(&task()).await.run_id;
    until_end(&mut client, &run, 0).await;
    let chunks = exported(&mut client, &run, false).await;
    let other = Bed::new().await;
    let mut there = other.client().await;
    let imported = there.import(stream::iter(chunks.clone())).await.unwrap().into_inner();
    assert_ne!(imported.run_id, run);
    assert_eq!(imported.state(), RunState::Finished);
    assert_eq!(
        transcript(&mut there, &imported.run_id).await,
        transcript(&mut client, &run).await
    );
    let (mut expected, mut found) = (
        until_end(&mut client, &run, 0).await,
        until_end(&mut there, &imported.run_id, 0).await,
    );
    expected
        .iter_mut()
        .chain(&mut found)
        .for_each(|event| event.run_id.clear());
    assert_eq!(found, expected);
    // Where the workspace is, it can be forked; where it is not, that is said.
    let fork = |id: &str| proto::ForkRequest {
        id: id.to_owned(),
        message: "once more".into(),
        ..Default::default()
    };
    let refused = there.fork(fork(&imported.run_id)).await.unwrap_err();
    assert_eq!(refused.code(), Code::NotFound, "{refused:?}");
    let here = client.import(stream::iter(chunks.clone())).await.unwrap().into_inner();
    let child = client.fork(fork(&here.run_id)).await.unwrap().into_inner();
    assert_eq!(child.parent_run_id, here.run_id);
    let broken = stream::iter([proto::RecordingChunk { data: b"{}".to_vec() }]);
    let refused = client.import(broken).await.unwrap_err();
    assert_eq!(why(&refused), (Code::FailedPrecondition, "RECORDING".to_owned()));
    // Whole but for its checkpoints, without which nothing says where it stood.
    let whole: Vec<u8> = chunks.into_iter().flat_map(|chunk| chunk.data).collect();
    let whole = String::from_utf8(whole).unwrap();
    let lines = whole
        .split_inclusive('\n')
        .filter(|line| !line.contains("\"line\":\"checkpoint\""));
    let data: String = lines.collect();
    assert!(data.len() < whole.len());
    let bare = stream::iter([proto::RecordingChunk {
        data: data.into_bytes(),
    }]);
    let refused = client.import(bare).await.unwrap_err();
    assert_eq!(why(&refused), (Code::InvalidArgument, "RECORDING".to_owned()));
}

async fn exported(client: &mut Client, run: &str, with_workspace: bool) -> Vec<proto::RecordingChunk> {
    let request = proto::ExportRequest {
        id: run.to_owned(),
        with_workspace,
    };
    let chunks = client.export(request).await.unwrap().into_inner();
    chunks.map(|chunk| chunk.unwrap()).collect().await
}

/// E18: with its files a run can be forked anywhere, from each revision, to the same end.
#[tokio::test]
async fn e18_a_run_that_was_exported_with_its_workspace_is_forked_elsewhere() {
    let bed = Bed::new().await;
    let mut client = bed.client().await;
    let run = bed.submit(&task()).await.run_id;
    until_end(&mut client, &run, 0).await;
    let chunks = exported(&mut client, &run, true).await;
    let other = Bed::new().await;
    let mut there = other.client().await;
    let imported = there.import(stream::iter(chunks.clone())).await.unwrap().into_inner();
    for revision in 0..4 {
        let fork = proto::ForkRequest {
            id: imported.run_id.clone(),
            revision: Some(revision),
            ..Default::default()
        };
        let child = there.fork(fork).await.unwrap().into_inner();
        until_end(&mut there, &child.run_id, 0).await;
        let ended = there.get(get(&child.run_id)).await.unwrap().into_inner();
        assert_eq!((ended.state(), ended.tree), (RunState::Finished, imported.tree.clone()));
    }
    // A file that is not what its address says comes to nothing.
    let whole: Vec<u8> = chunks.into_iter().flat_map(|chunk| chunk.data).collect();
    let whole = String::from_utf8(whole).unwrap();
    let trees: Vec<&str> = whole
        .lines()
        .filter(|line| line.contains("\"line\":\"tree\""))
        .collect();
    let tar = |line: &str| {
        serde_json::from_str::<serde_json::Value>(line).unwrap()["tar"]
            .clone()
            .to_string()
    };
    let forged = whole.replace(&tar(trees[0]), &tar(trees[1]));
    assert_ne!(forged, whole);
    let forged = stream::iter([proto::RecordingChunk {
        data: forged.into_bytes(),
    }]);
    let refused = other.client().await.import(forged).await.unwrap_err();
    assert_eq!(why(&refused), (Code::InvalidArgument, "RECORDING".to_owned()));
}

/// E4 as a client meets it: refused with what was recorded and found, and let go on with a word.
#[tokio::test]
async fn e4_a_run_whose_policy_has_changed_goes_on_when_that_is_accepted() {
    let bed = Bed::new().await;
    let mut client = bed.client().await;
    let folder = bed.data.path().join("policies");
    std::fs::create_dir_all(&folder).unwrap();
    let head = "format_version = 1\nname = \"house\"\nextends = \"default\"\n";
    std::fs::write(folder.join("house.toml"), head).unwrap();
    let script = Script::new().shell("sleep 600").finish("done");
    let task = proto::Task {
        policy: "house".into(),
        ..script.task()
    };
    let run = bed.submit(&task).await.run_id;
    until(&mut client, &run, 0, |event| event.state() == RunState::WaitingResult).await;
    let now = proto::ControlRequest {
        now: true,
        ..control(&run)
    };
    let paused = client.pause(now).await.unwrap().into_inner();
    assert_eq!((paused.state(), paused.withheld.len()), (RunState::Paused, 0));
    let rule = "[[tools.rules]]\nname = \"no-shell\"\ntool = \"shell\"\nverdict = \"deny\"\n";
    std::fs::write(folder.join("house.toml"), format!("{head}{rule}")).unwrap();

    let refused = client.resume(control(&run)).await.unwrap_err();
    assert_eq!(why(&refused), (Code::FailedPrecondition, "POLICY_CHANGED".to_owned()));
    let told = refused.get_details_error_info().unwrap().metadata;
    assert_eq!(told["policy.recorded"], paused.policy_hash);
    assert!(
        told["policy.found"].len() == 64 && told["policy.found"] != paused.policy_hash,
        "{told:?}"
    );
    let unknown = proto::ControlRequest {
        accept: vec!["weather".into()],
        ..control(&run)
    };
    assert_eq!(client.resume(unknown).await.unwrap_err().code(), Code::InvalidArgument);
    let accepting = proto::ControlRequest {
        accept: vec!["policy".into()],
        ..control(&run)
    };
    client.resume(accepting).await.unwrap();
    // The policy that it started with: its command runs.
    until(&mut client, &run, paused.seq, |event| {
        event.state() == RunState::WaitingResult
    })
    .await;
    client.cancel(control(&run)).await.unwrap();
    let records = bed.audit(&run).await;
    let resumed = records.iter().find(|record| record.action == "run.resumed").unwrap();
    assert_eq!(resumed.details["accepted"][0]["ground"], "policy");
}

/// A pause at once: no sandbox is held by a run that stands still, and it goes on when it is let.
#[tokio::test]
async fn a_paused_run_holds_nothing_even_when_it_was_in_a_command() {
    let bed = Bed::new().await;
    let mut client = bed.client().await;
    let script = Script::new().shell("echo lost > b; sleep 600").finish("never");
    let run = bed.submit(&script.task()).await.run_id;
    until(&mut client, &run, 0, |event| event.state() == RunState::WaitingResult).await;
    let now = proto::ControlRequest {
        now: true,
        ..control(&run)
    };
    let paused = client.pause(now).await.unwrap().into_inner();
    assert_eq!(paused.state(), RunState::Paused);
    bed.empties().await;
    client.resume(control(&run)).await.unwrap();
    until(&mut client, &run, paused.seq, |event| {
        event.state() == RunState::WaitingResult
    })
    .await;
    let cancelled = client.cancel(control(&run)).await.unwrap().into_inner();
    assert_eq!(cancelled.state(), RunState::Cancelled);
}
