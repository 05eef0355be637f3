//! How single steps fail and are tried again, in virtual time.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use super::{World, script, submission};
use crate::ids::RunId;
use crate::policy::BudgetOverrides;
use crate::run::driver::Rest;
use crate::run::event::{Event, Outcome};
use crate::run::service::Submission;
use crate::sandbox::Usage;
use crate::sandbox::backend::fake::Call;
use crate::tool::world::Blame;

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

/// Tries that were lost, as the journal tells of them: attempt, whose doing, milliseconds until the next.
async fn lost(world: &World, run: &RunId) -> Vec<(u32, Option<Blame>, Option<u128>)> {
    let entries = world.entries(run).await;
    let lost = entries.iter().filter_map(|entry| match &entry.event {
        Event::ToolLost {
            attempt,
            retry,
            blame,
            retry_in,
            ..
        } => {
            assert_eq!(*retry, retry_in.is_some(), "{entry:?}");
            Some((*attempt, *blame, retry_in.map(|wait| wait.as_millis())))
        }
        _ => None,
    });
    lost.collect()
}

/// A host that is in trouble for minutes ends no run, in whatever part of making a sandbox the trouble is.
#[tokio::test(start_paused = true)]
async fn x1_a_sandbox_that_cannot_be_had_is_asked_for_with_growing_waits() {
    let waits = [
        0, 100, 200, 400, 800, 1_600, 3_200, 6_400, 12_800, 25_600, 30_000, 30_000, 30_000, 30_000, 30_000, 30_000,
        30_000, 30_000, 30_000,
    ];
    for (failures, state) in [(1, "FINISHED"), (3, "FINISHED"), (19, "FINISHED"), (20, "FAILED")] {
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
            let expected: Vec<_> = (1..=failures)
                .map(|n| (n as u32, Some(Blame::Host), waits.get(n - 1).copied()))
                .collect();
            assert_eq!(lost(&world, &run).await, expected, "{call:?}");
            assert_eq!(world.state(&run).await.public(), state, "{call:?}");
            let entries = world.entries(&run).await;
            let took = entries.last().unwrap().at.since(entries[1].at);
            let waited: u128 = waits.iter().take(failures).sum();
            assert_eq!(took.as_millis(), waited, "{call:?}");
            if let Outcome::Failed { fault } = world.result(&run).await.outcome {
                assert_eq!(fault.code, "sandbox_lost", "{call:?}");
            }
        }
    }
}

/// What makes its own sandbox end each time is told by the kernel's counters, and has three attempts, whatever the host lost
/// in between.
#[tokio::test(start_paused = true)]
async fn a_program_that_ends_its_sandbox_each_time_is_tried_three_times() {
    let world = World::new();
    let turns = script(&[
        &[("shell", json!({ "command": "sleep 100" }))],
        &[("finish", json!({ "summary": "done" }))],
    ]);
    let run = world.submit(submission(turns)).await;
    let process = world.process();
    let fake = Arc::clone(&process.fake);
    let storm = async {
        for is_own in [true, false, false, true, false, true] {
            tokio::time::sleep(Duration::from_secs(10)).await;
            let living = fake.living();
            assert_eq!(living.len(), 1);
            if is_own {
                let usage = Usage {
                    oom_kills: 1,
                    ..Usage::default()
                };
                fake.set_usage(&living[0], usage);
            }
            fake.crash(&living[0]);
        }
        std::future::pending::<()>().await;
    };
    let rest = tokio::select! {
        rest = process.drive(&run) => rest.unwrap(),
        () = storm => unreachable!("it waits for ever"),
    };
    assert_eq!(rest, Rest::Ended);
    assert_eq!(
        lost(&world, &run).await,
        [
            (1, Some(Blame::Program), Some(0)),
            (2, Some(Blame::Host), Some(0)),
            (3, Some(Blame::Host), Some(100)),
            (4, Some(Blame::Program), Some(100)),
            (5, Some(Blame::Host), Some(200)),
            (6, Some(Blame::Program), None),
        ]
    );
    let Outcome::Failed { fault } = world.result(&run).await.outcome else {
        panic!("it had its attempts")
    };
    assert_eq!(fault.code, "sandbox_exhausted");
}
