//! A clock that is set, a store that answers late or loses its answers, how long is too long.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use serde_json::json;
use tokio::time::Instant;

use super::{World, pause, resume, script, submission};
use crate::chaos::{Faults, Faulty};
use crate::clock::{Clock, Timestamp};
use crate::policy::BudgetOverrides;
use crate::run::driver::Rest;
use crate::run::effects::Shop;
use crate::run::service::Submission;
use crate::run::{Error, Event};
use crate::store::memory::Memory;
use crate::store::{self, Store};

const DAY: i64 = 24 * 3600 * 1000;

/// Goes with the runtime's time, and is set by hand.
#[derive(Debug)]
struct Set {
    begun: Instant,
    by: AtomicI64,
}

impl Clock for Set {
    fn now(&self) -> Timestamp {
        Timestamp(10 * DAY + self.begun.elapsed().as_millis() as i64 + self.by.load(Ordering::SeqCst))
    }

    fn elapsed(&self) -> Duration {
        self.begun.elapsed()
    }
}

impl World {
    fn with_clock(clock: Arc<dyn Clock>) -> Self {
        Self {
            store: Memory::new(Arc::clone(&clock)),
            clock,
            ..Self::new()
        }
    }
}

fn slow() -> Submission {
    let turns = script(&[
        &[("shell", json!({ "command": "sleep 20; echo 1 >> a" }))],
        &[("shell", json!({ "command": "sleep 20; echo 2 >> a" }))],
        &[("finish", json!({ "summary": "done" }))],
    ]);
    Submission {
        budgets: BudgetOverrides {
            step_time: Some(Duration::from_secs(30)),
            total_time: Some(Duration::from_secs(120)),
            ..BudgetOverrides::default()
        },
        ..submission(turns)
    }
}

/// While it works, and between two workers; forward and back: the budget of time is about work.
#[tokio::test(start_paused = true)]
async fn x1_d1_a_clock_that_is_set_by_a_day_neither_ends_a_run_nor_gives_it_time() {
    for by in [DAY, -DAY] {
        for is_between in [false, true] {
            let set = Arc::new(Set {
                begun: Instant::now(),
                by: AtomicI64::new(0),
            });
            let world = World::with_clock(Arc::clone(&set) as Arc<dyn Clock>);
            let run = world.submit(slow()).await;
            if is_between {
                world.store.fail_at(4, crate::store::memory::When::After);
                world.process().drive(&run).await.unwrap_err();
                set.by.store(by, Ordering::SeqCst);
                assert_eq!(world.process().drive(&run).await.unwrap(), Rest::Ended);
            } else {
                let process = world.process();
                let jump = async {
                    tokio::time::sleep(Duration::from_secs(10)).await;
                    set.by.store(by, Ordering::SeqCst);
                };
                let (rest, ()) = tokio::join!(process.drive(&run), jump);
                assert_eq!(rest.unwrap(), Rest::Ended);
            }
            let state = world.state(&run).await;
            assert_eq!(state.public(), "FINISHED", "{by} {is_between}");
            // Of two minutes: forty seconds of work, and where it was cut off no more than what a step may take.
            let left = state.deadline.unwrap().since(state.at).as_secs();
            assert!((50..=80).contains(&left), "{by} {is_between}: {left} s");
        }
    }
}

fn quick() -> Submission {
    submission(script(&[
        &[("shell", json!({ "command": "echo 1 >> a" }))],
        &[("shell", json!({ "command": "echo 2 >> a" }))],
        &[("read_file", json!({ "path": "a" }))],
        &[("finish", json!({ "summary": "done" }))],
    ]))
}

/// E12, S1: whatever the store does with its answers, each run comes to the same.
#[tokio::test(start_paused = true)]
async fn e12_a_store_that_loses_answers_only_costs_time() {
    let world = World::new();
    let run = world.submit(quick()).await;
    world.process().drive(&run).await.unwrap();
    let expected = world.result(&run).await;
    let mut hurt = 0;
    for seed in 0..20 {
        let world = World::new();
        let run = world.submit(quick()).await;
        let faults = Faults { seed, per_mille: 200 };
        let faulty = Arc::new(Faulty::new(Arc::new(world.store.another()), faults));
        for _ in 0..200 {
            let mut process = world.process();
            let shop = Arc::get_mut(&mut process.shop).unwrap();
            shop.store = Arc::clone(&faulty) as Arc<dyn Store>;
            match process.drive(&run).await {
                Ok(Rest::Ended) | Err(Error::Store(store::Error::Ended { .. })) => break,
                Ok(rest) => panic!("{rest:?}"),
                Err(Error::Store(store::Error::Backend { .. })) => {}
                Err(error) => panic!("{error:?}"),
            }
        }
        assert_eq!(world.result(&run).await, expected, "seed {seed}");
        hurt += faulty.hurt();
    }
    assert!(hurt > 20, "{hurt}");
}

/// E7: how long is too long is the server's setting.
#[tokio::test(start_paused = true)]
async fn e7_a_server_says_how_long_is_too_long() {
    for (after, told) in [(60, true), (3600, false)] {
        let world = World::new();
        let run = world.submit(slow()).await;
        world.store.signal(&run, pause()).await.unwrap();
        world.process().drive(&run).await.unwrap();
        tokio::time::sleep(Duration::from_secs(600)).await;
        world.store.signal(&run, resume()).await.unwrap();
        let mut process = world.process();
        let shop: &mut Shop = Arc::get_mut(&mut process.shop).unwrap();
        shop.stale_after = Duration::from_secs(after);
        assert_eq!(process.drive(&run).await.unwrap(), Rest::Ended);
        let entries = world.entries(&run).await.into_iter();
        let stale: Vec<u64> = entries
            .filter_map(|entry| match entry.event {
                Event::Claimed { stale, .. } => stale.map(|away| away.as_secs()),
                _ => None,
            })
            .collect();
        assert_eq!(stale, if told { vec![600] } else { Vec::new() });
    }
}
