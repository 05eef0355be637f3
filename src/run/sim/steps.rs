//! How single steps fail and are tried again, in virtual time.

use std::time::Duration;

use serde_json::json;

use super::{World, script, submission};
use crate::policy::BudgetOverrides;
use crate::run::driver::Rest;
use crate::run::event::{Event, Outcome};
use crate::run::service::Submission;
use crate::sandbox::backend::fake::Call;

#[tokio::test(start_paused = true)]
async fn c3_d4_a_model_that_does_not_answer_is_asked_again_with_growing_waits_and_then_given_up() {
    let world = World::new();
    let slow = json!({ "content": "late", "delay_ms": 3_600_000 }).to_string();
    let run = world
        .submit(Submission {
            budgets: BudgetOverrides {
                step_time: Some(Duration::from_secs(10)),
                ..Default::default()
            },
            ..submission(slow)
        })
        .await;
    assert_eq!(world.process().drive(&run).await.unwrap(), Rest::Ended);
    let entries = world.entries(&run).await;
    let tries: Vec<(u32, Option<u64>)> = entries
        .iter()
        .filter_map(|entry| match &entry.event {
            Event::ModelFailed { attempt, retry_in, .. } => Some((*attempt, retry_in.map(|wait| wait.as_secs()))),
            _ => None,
        })
        .collect();
    assert_eq!(
        tries,
        [(1, Some(1)), (2, Some(2)), (3, Some(4)), (4, Some(8)), (5, None)]
    );
    let Outcome::Failed { fault } = world.result(&run).await.outcome else {
        panic!("{entries:?}")
    };
    assert_eq!((fault.code.as_str(), fault.retryable), ("provider_timeout", true));
    // Five times ten seconds, and the waits between.
    let took = entries.last().unwrap().at.since(entries[1].at);
    assert_eq!(took.as_secs(), 5 * 10 + 1 + 2 + 4 + 8);
}

#[tokio::test(start_paused = true)]
async fn a_sandbox_that_cannot_be_had_is_asked_for_three_times() {
    for (failures, state) in [(1, "FINISHED"), (2, "FINISHED"), (3, "FAILED")] {
        for call in [Call::Create, Call::Start, Call::Connect, Call::Freeze, Call::Thaw] {
            let world = World::new();
            let turns = script(&[
                &[("write_file", json!({ "path": "a", "content": "1\n" }))],
                &[("finish", json!({ "summary": "done" }))],
            ]);
            let run = world.submit(submission(turns)).await;
            let process = world.process();
            (0..failures).for_each(|_| process.fake.fail_next(call, "no such luck"));
            assert_eq!(process.drive(&run).await.unwrap(), Rest::Ended);
            let lost: Vec<(u32, bool)> = world
                .entries(&run)
                .await
                .iter()
                .filter_map(|entry| match &entry.event {
                    Event::ToolLost { attempt, retry, .. } => Some((*attempt, *retry)),
                    _ => None,
                })
                .collect();
            let expected = [(1, true), (2, true), (3, false)];
            assert_eq!(lost, expected[..failures], "{call:?}");
            assert_eq!(world.state(&run).await.public(), state, "{call:?}");
            if let Outcome::Failed { fault } = world.result(&run).await.outcome {
                assert_eq!(fault.code, "sandbox_lost", "{call:?}");
            }
        }
    }
}
