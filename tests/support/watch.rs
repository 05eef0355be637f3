//! Events of a run, as a client gets them, and what must hold for every journal.

use std::collections::{BTreeMap, BTreeSet};

use exuvia::api::proto;
use exuvia::api::proto::event::Kind;
use tokio::time::timeout;

use super::Client;
use super::server::LONG;

/// Every event after `after_seq`, until the run has ended.
pub async fn until_end(client: &mut Client, id: &str, after_seq: u64) -> Vec<proto::Event> {
    until(client, id, after_seq, |_| false).await
}

/// Every event after `after_seq` up to and with the first that `is_last` says, or to the run's end.
pub async fn until(
    client: &mut Client,
    id: &str,
    after_seq: u64,
    is_last: impl Fn(&proto::Event) -> bool,
) -> Vec<proto::Event> {
    let request = proto::WatchRequest {
        id: id.to_owned(),
        after_seq,
    };
    let watching = async {
        let mut stream = client.watch(request).await.unwrap().into_inner();
        let mut events = Vec::new();
        while let Some(event) = stream.message().await.unwrap() {
            let stop = is_last(&event);
            events.push(event);
            if stop {
                break;
            }
        }
        events
    };
    timeout(LONG, watching).await.expect("the run gets there")
}

pub fn kind(event: &proto::Event) -> &Kind {
    event.kind.as_ref().expect("every event has a kind")
}

/// Waits for the run's end and gives the run.
pub async fn ended(client: &mut Client, id: &str) -> proto::Run {
    until_end(client, id, 0).await;
    client.get(super::get(id)).await.unwrap().into_inner()
}

/// What holds for each whole journal: numbers without gap or duplicate, one result for each call (E6), attempts that rise
/// with each claim (E11), one end and nothing after it (A5). Gives how often the run was claimed.
pub fn check_whole(events: &[proto::Event]) -> usize {
    let seqs: Vec<u64> = events.iter().map(|event| event.seq).collect();
    let expected: Vec<u64> = (1..=events.len() as u64).collect();
    assert_eq!(seqs, expected, "a gap or a duplicate");
    // Attempts of what is going on: the model call or check, and the tools, by step.
    let (mut alone, mut running) = (1, BTreeMap::new());
    let (mut asked, mut answered) = (BTreeSet::new(), BTreeSet::new());
    let mut finishes = BTreeSet::new();
    // Calls with an effect outside that were cut off: a claim does not try them again.
    let mut doubtful = BTreeMap::new();
    let in_doubt: BTreeSet<u32> = events
        .iter()
        .filter_map(|event| match kind(event) {
            Kind::OutcomeUnknown(unknown) => Some(unknown.step),
            _ => None,
        })
        .collect();
    let (mut claims, mut fence) = (0, 0);
    for event in events {
        match kind(event) {
            Kind::Submitted(_) => assert_eq!(event.seq, 1),
            Kind::Claimed(claimed) => {
                claims += 1;
                // A claim that died before its entry has raised it as well.
                assert!(claimed.fence > fence, "each claim raises the fence");
                fence = claimed.fence;
                if claims > 1 {
                    alone += 1;
                    let again = running.iter_mut().filter(|(step, _)| !in_doubt.contains(step));
                    again.for_each(|(_, attempt)| *attempt += 1);
                }
                continue;
            }
            Kind::ModelReplied(reply) => {
                assert_eq!(reply.attempt, alone, "event {}", event.seq);
                for call in &reply.calls {
                    assert!(asked.insert(call.step), "step {} twice", call.step);
                    if call.tool == "finish" {
                        finishes.insert(call.step);
                    }
                }
            }
            // What comes of a `finish` is the check, or the end.
            Kind::ToolStarted(started) if finishes.contains(&started.step) => assert_eq!(started.attempt, 1),
            Kind::ToolStarted(started) => {
                assert_eq!(running.insert(started.step, started.attempt), None, "{started:?}");
            }
            Kind::ToolFinished(done) => {
                assert_eq!(running.remove(&done.step), Some(done.attempt), "{done:?}");
                assert!(answered.insert(done.step), "step {} has two results", done.step);
            }
            Kind::ToolRefused(refused) => {
                assert!(answered.insert(refused.step), "step {} has two results", refused.step);
            }
            Kind::ToolLost(lost) => {
                assert_eq!(running.insert(lost.step, lost.attempt + 1), Some(lost.attempt));
                if !lost.retry {
                    // It is what ends the run.
                    running.remove(&lost.step);
                }
            }
            Kind::OutcomeUnknown(unknown) => {
                assert_eq!(running.remove(&unknown.step), Some(unknown.attempt), "{unknown:?}");
                doubtful.insert(unknown.step, unknown.attempt);
            }
            Kind::ApprovalDecided(decided) => {
                if let (Some(attempt), true) = (doubtful.remove(&decided.step), decided.approved) {
                    running.insert(decided.step, attempt + 1);
                }
            }
            Kind::CheckFinished(done) => assert_eq!(done.attempt, alone, "event {}", event.seq),
            Kind::ModelFailed(_)
            | Kind::CheckLost(_)
            | Kind::ApprovalRequested(_)
            | Kind::Forked(_)
            | Kind::Withheld(_)
            | Kind::NotDone(_)
            | Kind::PauseRequested(_)
            | Kind::Resumed(_)
            | Kind::CancelRequested(_)
            | Kind::DeadlineReached(_) => {}
            Kind::Ended(_) => assert_eq!(event.seq, events.len() as u64, "nothing follows the end"),
        }
        alone = match kind(event) {
            Kind::ModelFailed(failed) => failed.attempt + 1,
            Kind::CheckLost(lost) => lost.attempt + 1,
            _ => 1,
        };
    }
    assert!(running.is_empty(), "started and never ended: {running:?}");
    assert!(answered.is_subset(&asked));
    claims
}
