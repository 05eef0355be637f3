//! The fleet over the fake backend, under paused time: its machine, its clock, its pool.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use proptest::prelude::*;

use super::execs::{Item, OnDisconnect, Overflow, Start};
use super::state::{Cause, Denied, Effect, End, Event, State, step};
use super::*;
use crate::clock::{Clock, Timestamp};
use crate::sandbox::Background;
use crate::sandbox::backend::Backends;
use crate::sandbox::backend::fake::{Call, Fake};
use crate::sandbox::disk::Volumes;
use crate::scratch::Scratch;
use crate::store::memory::Memory;
use crate::workdir::WorkDirs;
use crate::workspace::{Pool, Trees};

/// Goes with the runtime's own time.
#[derive(Debug)]
struct Paced(tokio::time::Instant);

impl Clock for Paced {
    fn now(&self) -> Timestamp {
        Timestamp(1_700_000_000_000 + self.0.elapsed().as_millis() as i64)
    }
}

struct Bed {
    fake: Arc<Fake>,
    fleet: Fleet,
}

impl Bed {
    async fn new(config: Config) -> Self {
        let data = Scratch::new();
        let fake = Fake::new();
        let clock: Arc<dyn Clock> = Arc::new(Paced(tokio::time::Instant::now()));
        let parts = Parts {
            data_dir: data.path().to_owned(),
            backends: Backends::only(Arc::clone(&fake) as Arc<_>),
            trees: Pool::new(Trees::open(data.path()).unwrap()),
            work_dirs: WorkDirs::new(data.path(), Volumes::folders(data.path())),
            store: Arc::new(Memory::new(Arc::clone(&clock))),
            clock,
            borders: None,
        };
        let fleet = Fleet::new(parts, config).await.unwrap();
        Self { fake, fleet }
    }

    /// The end of a sandbox, once it has one.
    async fn end(&self, id: &str) -> End {
        loop {
            if let State::Ended(end) = self.fleet.get(id).unwrap().view.state {
                return end;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

fn ask() -> Ask {
    Ask {
        policy: "default".into(),
        image: None,
        backend: None,
        env: Default::default(),
        labels: Default::default(),
        ttl: None,
        idle_timeout: None,
        workspace: None,
        snapshot: None,
        queue_timeout: Duration::ZERO,
        by: "tester".into(),
    }
}

fn shell(text: &str) -> Start {
    Start {
        argv: ["sh", "-c", text].map(|word| word.as_bytes().to_vec()).to_vec(),
        env: Default::default(),
        cwd: None,
        timeout: None,
        stdin: false,
        terminal: None,
        on_disconnect: OnDisconnect::Keep,
        background: Background::Kill,
        overflow: Overflow::Wait,
        user: None,
        grace: Duration::from_millis(500),
        by: "tester".into(),
    }
}

/// T11: a renewed sandbox lives until its new time and not beyond, and one that was not renewed in time ends.
#[tokio::test(start_paused = true)]
async fn t11_a_renewal_that_races_the_expiry_is_honoured_or_refused() {
    let bed = Bed::new(Config {
        max_sandboxes: 1000,
        ..Config::default()
    })
    .await;
    let ttl = Duration::from_secs(10);
    let race = async |n: u64| {
        let made = bed
            .fleet
            .create(
                Ask {
                    ttl: Some(ttl),
                    ..ask()
                },
                None,
            )
            .await
            .unwrap();
        let id = made.id.to_string();
        // From 4 ms before its end to 4 ms after.
        let left = made.view.expires_at.since(bed.fleet.now());
        tokio::time::sleep(left - Duration::from_millis(4) + Duration::from_micros(n % 9 * 1000 + n)).await;
        match bed.fleet.renew(&id, Duration::from_secs(5), "tester".into()).await {
            Ok(renewed) => {
                let until = renewed.view.expires_at;
                let left = until.since(bed.fleet.now());
                tokio::time::sleep(left - Duration::from_millis(2)).await;
                let state = bed.fleet.get(&id).unwrap().view.state;
                let end = bed.end(&id).await;
                (
                    state == State::Running && end.cause == Cause::Expired && end.at >= until,
                    true,
                )
            }
            Err(error) => {
                let end = bed.end(&id).await;
                (
                    error.reason() == "SANDBOX_EXPIRED" && end.cause == Cause::Expired,
                    false,
                )
            }
        }
    };
    let fates = join_all((0..1000).map(race)).await;
    assert!(fates.iter().all(|(is_right, _)| *is_right));
    let renewed = fates.iter().filter(|(_, renewed)| *renewed).count();
    assert!(
        (100..900).contains(&renewed),
        "both ends of the race are run: {renewed}"
    );
    // Nothing is immortal, and every place came back.
    assert_eq!(
        bed.fleet.list(&Query {
            limit: 2000,
            ..Query::default()
        }),
        []
    );
    assert_eq!(bed.fleet.shut_down(Duration::from_secs(60)).await, Vec::<String>::new());
    assert_eq!(bed.fake.living(), []);
}

#[tokio::test(start_paused = true)]
async fn renewals_end_with_the_wall_time_of_the_policy() {
    let bed = Bed::new(Config::default()).await;
    let made = bed.fleet.create(ask(), None).await.unwrap();
    let (id, wall_time) = (made.id.to_string(), made.facts.limits.wall_time);
    assert_eq!(made.view.expires_at, made.facts.created_at.plus(wall_time));
    let renewed = bed.fleet.renew(&id, wall_time * 2, String::new()).await.unwrap();
    assert_eq!(renewed.view.expires_at, made.view.expires_at);
    let shorter = bed
        .fleet
        .renew(&id, Duration::from_secs(1), String::new())
        .await
        .unwrap();
    assert!(shorter.view.expires_at < made.view.expires_at);
    assert_eq!(bed.end(&id).await.cause, Cause::Expired);
    let too_long = Ask {
        ttl: Some(wall_time + Duration::from_secs(1)),
        ..ask()
    };
    assert_eq!(bed.fleet.create(too_long, None).await.unwrap_err().reason(), "INVALID");
}

#[tokio::test(start_paused = true)]
async fn idle_is_when_nothing_goes_on_in_it() {
    let bed = Bed::new(Config::default()).await;
    let idle_timeout = Some(Duration::from_secs(10));
    let made = bed.fleet.create(Ask { idle_timeout, ..ask() }, None).await.unwrap();
    let id = made.id.to_string();
    // A command that runs keeps it, with nobody attached too.
    let attached = bed.fleet.exec(&id, shell("sleep 60")).await.unwrap();
    let entry = Arc::clone(&attached.entry);
    drop(attached);
    entry.log.ended().await;
    let ended_at = bed.fleet.now();
    assert_eq!(bed.fleet.get(&id).unwrap().view.state, State::Running);
    // So does a file call.
    tokio::time::sleep(Duration::from_secs(9)).await;
    drop(bed.fleet.visit(&id, "").unwrap());
    tokio::time::sleep(Duration::from_secs(9)).await;
    assert_eq!(bed.fleet.get(&id).unwrap().view.state, State::Running);
    let end = bed.end(&id).await;
    assert_eq!(end.cause, Cause::Idle);
    let after = end.at.since(ended_at);
    assert!((19_000..19_100).contains(&after.as_millis()), "{after:?}");
}

/// T11: what runs when the time is over is told so.
#[tokio::test(start_paused = true)]
async fn t11_expiry_during_a_command_ends_its_stream() {
    let bed = Bed::new(Config::default()).await;
    let ttl = Some(Duration::from_secs(3));
    let made = bed.fleet.create(Ask { ttl, ..ask() }, None).await.unwrap();
    let mut attached = bed
        .fleet
        .exec(made.id.as_str(), shell("echo on; sleep 100"))
        .await
        .unwrap();
    let mut words = Vec::new();
    while let Some(item) = attached.next().await {
        words.push(match item {
            Item::Output { bytes, .. } => String::from_utf8(bytes.to_vec()).unwrap(),
            Item::Ended { finish, .. } => finish.word().to_owned(),
        });
    }
    assert_eq!(words, ["on\n", "sandbox_expired"]);
}

/// T12: a file call that its sandbox's end cuts short tells of that end, and one that lost its guest otherwise of that.
#[tokio::test(start_paused = true)]
async fn t12_a_call_that_lost_its_guest_tells_how_the_sandbox_ended() {
    let bed = Bed::new(Config::default()).await;
    let made = bed.fleet.create(ask(), None).await.unwrap();
    let visit = bed.fleet.visit(made.id.as_str(), "").unwrap();
    let lost = || crate::sandbox::Error::GuestLost {
        sandbox: made.id.clone(),
        reason: "it hung up".into(),
    };
    assert!(visit.over().is_none());
    assert_eq!(visit.failed(lost()).await.reason(), "SANDBOX_LOST");
    let kill = bed.fleet.kill(made.id.as_str(), "carol".into(), String::new());
    let (told, killed) = tokio::join!(visit.failed(lost()), kill);
    killed.unwrap();
    assert_eq!(told.reason(), "SANDBOX_KILLED");
    assert_eq!(visit.over().unwrap().reason(), "SANDBOX_KILLED");
}

#[tokio::test(start_paused = true)]
async fn a_sandbox_that_goes_away_by_itself_is_lost_or_was_out_of_memory() {
    let bed = Bed::new(Config::default()).await;
    for (oom_kills, cause) in [(0, Cause::Lost), (1, Cause::OutOfMemory)] {
        let made = bed.fleet.create(ask(), None).await.unwrap();
        let mut attached = bed.fleet.exec(made.id.as_str(), shell("sleep 100")).await.unwrap();
        let usage = crate::sandbox::Usage {
            oom_kills,
            ..Default::default()
        };
        bed.fake.set_usage(&made.id, usage);
        bed.fake.crash(&made.id);
        assert_eq!(bed.end(made.id.as_str()).await.cause, cause);
        let word = match attached.next().await {
            Some(Item::Ended { finish, .. }) => finish.word(),
            other => panic!("{other:?}"),
        };
        let wanted = if oom_kills > 0 {
            "sandbox_out_of_memory"
        } else {
            "sandbox_lost"
        };
        assert_eq!(word, wanted);
    }
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_ended_is_tried_again_and_keeps_its_place_until_then() {
    let config = Config {
        max_sandboxes: 1,
        ..Config::default()
    };
    let bed = Bed::new(config).await;
    let made = bed.fleet.create(ask(), None).await.unwrap();
    bed.fake.fail_next(Call::Stop, "stuck");
    bed.fake.fail_next(Call::Destroy, "stuck");
    let (killed, refused) = tokio::join!(
        bed.fleet.kill(made.id.as_str(), "tester".into(), String::new()),
        async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            bed.fleet.create(ask(), None).await
        }
    );
    assert_eq!(refused.unwrap_err().reason(), "QUOTA");
    assert!(matches!(killed.unwrap().view.state, State::Ended(_)));
    bed.fleet.create(ask(), None).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_shape_that_cannot_be_made_holds_up_no_other() {
    let config = Config {
        stocks: vec!["default=4".parse().unwrap(), "strict=1".parse().unwrap()],
        ..Config::default()
    };
    let bed = Bed::new(config).await;
    // As many as are made at once, of the first shape.
    bed.fake.fail_of_memory(1 << 30, 2);
    let begun = tokio::time::Instant::now();
    bed.fleet.fill_pool();
    let mut order = Vec::new();
    while order.len() < 2 {
        tokio::time::sleep(Duration::from_millis(5)).await;
        for (shelf, parked) in bed.fleet.parked().into_iter().enumerate() {
            if parked > 0 && !order.iter().any(|(seen, _)| *seen == shelf) {
                order.push((shelf, begun.elapsed() < Duration::from_secs(1)));
            }
        }
    }
    // The first waits for its pause, the second for nothing. (The clock stands still but for what sleeps.)
    assert_eq!(order, [(1, true), (0, false)]);
}

#[tokio::test(start_paused = true)]
async fn a_pool_is_filled_ahead_and_hands_out_what_lives_once() {
    let config = Config {
        stocks: vec!["default=2..4".parse().unwrap()],
        ..Config::default()
    };
    let bed = Bed::new(config).await;
    bed.fleet.fill_pool();
    let filled = async |count| {
        while bed.fleet.parked() != [count] {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    filled(4).await;
    let parked = bed.fake.living();
    // Two of them die while they are parked.
    bed.fake.crash(&parked[0]);
    bed.fake.crash(&parked[1]);
    let mut handed = BTreeSet::new();
    for _ in 0..3 {
        let made = bed.fleet.create(ask(), None).await.unwrap();
        assert!(!parked[..2].contains(&made.id) && handed.insert(made.id.clone()));
        let mut ran = bed.fleet.exec(made.id.as_str(), shell("true")).await.unwrap();
        assert!(matches!(ran.next().await, Some(Item::Ended { finish, .. }) if finish.word() == "ok"));
    }
    // Another shape gets none of them.
    let other = Ask {
        policy: "strict".into(),
        ..ask()
    };
    assert!(!bed.fleet.create(other, None).await.unwrap().facts.from_pool);
    filled(4).await;
    assert!(bed.fleet.create(ask(), None).await.unwrap().facts.from_pool);
    let running: Vec<_> = bed.fleet.list(&Query {
        limit: 10,
        ..Query::default()
    });
    assert_eq!(running.len(), 5);
    bed.fleet.shut_down(Duration::from_secs(60)).await;
    let kept: BTreeSet<_> = bed.fake.living().into_iter().collect();
    assert_eq!(
        kept,
        running.into_iter().map(|info| info.id).collect(),
        "what is parked goes, what is used stays"
    );
}

fn an_end(n: u8) -> End {
    let causes = [Cause::Killed, Cause::Expired, Cause::Idle, Cause::Lost];
    End {
        cause: causes[usize::from(n) % causes.len()],
        by: String::new(),
        reason: String::new(),
        at: Timestamp(i64::from(n)),
    }
}

fn any_event() -> impl Strategy<Value = Event> {
    prop_oneof![
        Just(Event::Created),
        any::<u8>().prop_map(|n| Event::CreateFailed(an_end(n))),
        Just(Event::PauseAsked),
        Just(Event::FreezeFailed),
        Just(Event::ResumeAsked),
        Just(Event::ThawFailed),
        Just(Event::RenewAsked),
        Just(Event::SnapshotAsked),
        Just(Event::MemorySnapshotAsked),
        any::<u8>().prop_map(|n| Event::EndAsked(an_end(n))),
        Just(Event::StopFailed),
        Just(Event::Stopped),
    ]
}

proptest! {
    /// Whatever comes in whatever order: an end once asked for stays the end, and nothing lives after it.
    #[test]
    fn the_machine_ends_once_and_for_the_first_reason(events in prop::collection::vec(any_event(), 0..60)) {
        let mut state = State::Creating;
        let mut first_end = None;
        for event in events {
            let before = state.clone();
            match step(&state, event.clone()) {
                Ok((next, effect)) => {
                    if let Some(end) = next.end() {
                        let first = first_end.get_or_insert_with(|| end.clone());
                        prop_assert_eq!(&*first, end);
                    }
                    prop_assert!(before.end().is_none() || next.end().is_some(), "nothing comes back to life");
                    prop_assert!(matches!(next, State::Ended(_)) == (matches!(before, State::Ended(_)) || effect == Some(Effect::CleanUp)));
                    state = next;
                }
                Err(Denied::Over(end)) => prop_assert_eq!(before.end(), Some(&end)),
                Err(Denied::NotReady) => prop_assert_eq!(before, State::Creating),
                Err(Denied::Paused | Denied::Impossible) => {}
            }
        }
    }
}

#[test]
fn two_resumes_find_one_answer() {
    // T14.
    let paused = State::Paused;
    let (running, effect) = step(&paused, Event::ResumeAsked).unwrap();
    assert_eq!((&running, effect), (&State::Running, Some(Effect::Thaw)));
    assert_eq!(step(&running, Event::ResumeAsked), Ok((State::Running, None)));
}
