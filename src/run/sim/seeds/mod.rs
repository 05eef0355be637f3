//! A hand-cranked scheduler over the pure machine and the memory store: no task, no timer, nothing that is not drawn from
//! the seed. Workers crash between any two things that they do, two of them believe that they have the run, results come
//! twice and in any order, the store answers late or fails around a commit.
//!
//! Invariants, for each seed:
//! - LOST_0: what a journal calls done has happened; an undisturbed run would have come to the same transcript, workspace
//!   and outcome;
//! - DOUBLED_0: a step with an effect outside that takes the step's key has one effect;
//! - FLAGGED: an effect that does not take a key happens more than once only where the journal asked about it first;
//! - ONE_WRITER: no worker that lost its lease commits anything.
//!
//! `EXUVIA_SIM_SEED=n` runs one seed alone, `EXUVIA_SIM_SEEDS=n` that many.

mod check;
mod outside;
mod plan;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use futures::FutureExt;
use serde_json::json;

use self::check::End;
use self::plan::{Dice, Plan};
use super::{World, submission};
use crate::clock::{Clock, Timestamp};
use crate::ids::RunId;
use crate::run::commit::{self, Position};
use crate::run::decide::{self, Rules};
use crate::run::event::{Entry, Event, FORMAT_VERSION};
use crate::run::session::Session;
use crate::run::state::{self, Effect, State};
use crate::run::{agree, fold};
use crate::store::memory::{Memory, When};
use crate::store::{self, Commit, NewTask, Owner, RunRecord, Signal, Store};

#[derive(Debug)]
struct Hand(AtomicI64);

impl Clock for Hand {
    fn now(&self) -> Timestamp {
        Timestamp(self.0.load(Ordering::SeqCst))
    }
}

/// The world outside of the sandbox: how often each key had an effect.
#[derive(Default)]
struct Outside {
    keyed: BTreeMap<String, u32>,
    unkeyed: BTreeMap<String, u32>,
}

/// Something that a worker has begun.
#[derive(Clone)]
struct Going {
    effect: Effect,
    /// Set once it has happened and not yet been told.
    told: Option<Event>,
}

struct Worker {
    record: RunRecord,
    state: State,
    session: Session,
    revision: u64,
    going: Vec<Going>,
    /// Sent to the store and not yet there.
    on_its_way: Option<(State, Commit)>,
}

struct Sim {
    dice: Dice,
    plan: Plan,
    rules: &'static Rules,
    store: Memory,
    clock: Arc<Hand>,
    run: RunId,
    outside: Outside,
    workers: Vec<Worker>,
    claims: u32,
}

/// Ready at once: the memory store waits for nothing.
fn now<T>(work: impl Future<Output = T>) -> T {
    work.now_or_never().expect("the memory store waits for nothing")
}

/// One task as the service makes it, for all seeds.
fn template() -> &'static (NewTask, Rules) {
    static TEMPLATE: OnceLock<(NewTask, Rules)> = OnceLock::new();
    TEMPLATE.get_or_init(|| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build()
            .unwrap();
        runtime.block_on(async {
            let world = World::new();
            let script = json!({ "content": "unused" }).to_string();
            let run = world.submit(submission(script)).await;
            let record = world.store.run(&run).await.unwrap();
            let spec = world.store.spec(&record.task).await.unwrap();
            let new = NewTask {
                spec: spec.clone(),
                idempotency: None,
                first: world.entries(&run).await.remove(0),
                checkpoint: world.store.checkpoint(&run, None).await.unwrap(),
                recorded: None,
                audit: Vec::new(),
                record: record.clone(),
            };
            (new, Rules::of(record.task, spec).unwrap())
        })
    })
}

impl Sim {
    fn new(seed: u64) -> Self {
        let (new, rules) = template();
        let clock = Arc::new(Hand(AtomicI64::new(new.record.created_at.0)));
        let store = Memory::new(Arc::clone(&clock) as Arc<dyn Clock>);
        now(store.create(new.clone())).unwrap();
        let mut dice = Dice(seed);
        Self {
            plan: Plan::draw(&mut dice),
            dice,
            rules,
            store,
            clock,
            run: new.record.run.clone(),
            outside: Outside::default(),
            workers: Vec::new(),
            claims: 0,
        }
    }

    /// No crash, one worker: what all others must come to.
    fn undisturbed(mut self) -> End {
        self.claim();
        for _ in 0..1000 {
            if let Some(end) = self.ended() {
                return end;
            }
            self.settle();
        }
        panic!("it never ends");
    }

    fn disturbed(&mut self) -> End {
        for _ in 0..self.dice.roll(6) {
            let when = if self.dice.roll(2) == 0 {
                When::Before
            } else {
                When::After
            };
            self.store.fail_at(1 + self.dice.roll(60), when);
        }
        for _ in 0..600 {
            if let Some(end) = self.ended() {
                return end;
            }
            self.clock.0.fetch_add(1 + self.dice.roll(50) as i64, Ordering::SeqCst);
            self.crank();
        }
        // Nobody interferes any more: it must come to its end.
        self.workers.clear();
        for _ in 0..1000 {
            if let Some(end) = self.ended() {
                return end;
            }
            if self.workers.is_empty() {
                self.claim();
            }
            self.person();
            if self.public() == "PAUSED" {
                self.signal(Signal::Resume {
                    by: "sim".into(),
                    accept: Vec::new(),
                });
            }
            self.settle();
        }
        panic!("it never ends: {:#?}", self.entries());
    }

    /// One thing, to one worker.
    fn crank(&mut self) {
        let which = self.dice.roll(self.workers.len().max(1) as u64) as usize;
        match self.dice.roll(100) {
            _ if self.workers.is_empty() => self.claim(),
            // The lease ran out, or so the new one thinks; the old one knows nothing of it.
            0..=1 => self.claim(),
            // Crash: whatever it had begun is cut off where it stands.
            2..=4 => drop(self.workers.swap_remove(which)),
            5..=6 => {
                let now = self.dice.roll(2) == 0;
                self.signal(Signal::Pause {
                    by: "sim".into(),
                    reason: String::new(),
                    now,
                });
            }
            7..=12 => self.signal(Signal::Resume {
                by: "sim".into(),
                accept: Vec::new(),
            }),
            13..=18 => self.person(),
            19..=40 => self.happen(which),
            41..=58 => self.deliver(which),
            59..=79 => self.arrive(which),
            _ => self.turn(which),
        }
    }

    /// Everything that one worker would do next, in order.
    fn settle(&mut self) {
        self.turn(0);
        self.arrive(0);
        self.happen(0);
        self.deliver(0);
        self.arrive(0);
    }

    fn claim(&mut self) {
        self.claims += 1;
        let owner = Owner {
            pid: self.claims,
            started: 0,
            boot: "sim".into(),
        };
        let holder = now(self.store.run(&self.run)).unwrap().owner;
        let Ok(record) = now(self.store.claim(&self.run, &owner, holder.as_ref())) else {
            return;
        };
        let entries = self.entries();
        let checkpoint = now(self.store.checkpoint(&self.run, None)).unwrap();
        agree(&self.run, &entries, &checkpoint).unwrap();
        self.workers.push(Worker {
            state: fold(&self.run, &entries).unwrap(),
            session: Session::of(&entries),
            revision: checkpoint.revision,
            record,
            going: Vec::new(),
            on_its_way: None,
        });
        let which = self.workers.len() - 1;
        let fence = self.workers[which].record.fence;
        let worker = format!("worker {}", self.claims);
        self.send(
            which,
            Event::Claimed {
                worker,
                fence,
                stale: None,
                grounds: None,
            },
            Vec::new(),
        );
    }

    /// As the driver: the inbox, then what needs no time, then what is due and not yet going on.
    fn turn(&mut self, which: usize) {
        let Some(worker) = self.workers.get(which) else { return };
        if worker.on_its_way.is_some() {
            return;
        }
        if let Some(pending) = now(self.store.inbox(&self.run)).unwrap().into_iter().next() {
            let event = decide::heard(
                self.rules,
                &worker.state,
                &worker.session,
                pending.signal,
                self.clock.now(),
                &[],
            );
            let event = event.filter(|event| state::step(&worker.state, &self.entry(worker, event.clone())).is_ok());
            match event {
                Some(event) => self.send(which, event, vec![pending.id]),
                None => {
                    if now(self.store.discard(&self.run, worker.record.fence, pending.id)).is_err() {
                        self.workers.swap_remove(which);
                    }
                }
            }
            return;
        }
        if worker.state.is_parked() {
            // As the driver: it lets go of everything, and whoever goes on claims the run again.
            drop(self.workers.swap_remove(which));
            return;
        }
        let due = state::due(&worker.state);
        for effect in &due {
            // A probe is let take its time here.
            let is_slow = matches!(effect, Effect::Probe { .. });
            let made = decide::at_once(self.rules, &worker.state, &worker.session, effect).unwrap();
            let Some(instant) = made.filter(|_| !is_slow) else {
                continue;
            };
            return self.send(which, instant, Vec::new());
        }
        let worker = &mut self.workers[which];
        worker.going.retain(|going| due.contains(&going.effect));
        for effect in due {
            if !worker.going.iter().any(|going| going.effect == effect) {
                worker.going.push(Going { effect, told: None });
            }
        }
    }

    /// A result comes in; some come twice, and in any order.
    fn deliver(&mut self, which: usize) {
        let Some(worker) = self.workers.get(which) else { return };
        let told: Vec<usize> = (0..worker.going.len())
            .filter(|n| worker.going[*n].told.is_some())
            .collect();
        if told.is_empty() || worker.on_its_way.is_some() {
            return;
        }
        let nth = told[self.dice.roll(told.len() as u64) as usize];
        let twice = self.dice.roll(5) == 0;
        let worker = &mut self.workers[which];
        let going = match twice {
            true => worker.going[nth].clone(),
            false => worker.going.swap_remove(nth),
        };
        if state::due(&worker.state).contains(&going.effect) {
            self.send(which, going.told.expect("it was told"), Vec::new());
        }
    }

    fn entry(&self, worker: &Worker, event: Event) -> Entry {
        Entry {
            format_version: FORMAT_VERSION,
            seq: worker.state.seq + 1,
            at: self.clock.now(),
            event,
        }
    }

    /// Towards the store; it is there when it [`arrive`](Self::arrive)s.
    fn send(&mut self, which: usize, event: Event, consumed: Vec<u64>) {
        let worker = &self.workers[which];
        let entry = self.entry(worker, event);
        let at = Position {
            record: &worker.record,
            state: &worker.state,
            session: &worker.session,
            revision: worker.revision,
            policy_hash: &self.rules.task.policy_hash,
        };
        let (next, mut commit) = commit::prepare(&at, entry, Vec::new(), consumed).unwrap();
        // The chain is not what is simulated, and hashing it would be most of the work.
        commit.audit.clear();
        self.workers[which].on_its_way = Some((next, commit));
    }

    /// The store takes what is on its way to it, or does not; a worker that is refused, or hears nothing, is gone.
    fn arrive(&mut self, which: usize) {
        let Some(worker) = self.workers.get_mut(which) else {
            return;
        };
        let Some((next, commit)) = worker.on_its_way.take() else {
            return;
        };
        let found = now(self.store.run(&self.run)).unwrap();
        let answer = now(self.store.commit(commit.clone()));
        if found.fence != worker.record.fence {
            let refused = matches!(
                answer,
                Err(store::Error::StaleFence { .. } | store::Error::Ended { .. } | store::Error::Backend { .. })
            );
            let after = now(self.store.run(&self.run)).unwrap();
            assert!(refused && after == found, "ONE_WRITER: {answer:?}");
        }
        if answer.is_err() {
            drop(self.workers.swap_remove(which));
            return;
        }
        worker.session.apply(&commit.entries[0]);
        worker.revision = commit
            .checkpoint
            .map_or(worker.revision, |checkpoint| checkpoint.revision);
        worker.state = next;
    }

    /// Somebody who has looked outside answers what is asked: call it again only if it did not happen.
    fn person(&mut self) {
        // Only where there can be one: to read a whole journal is most of what this costs.
        if !matches!(self.public().as_str(), "WAITING_APPROVAL" | "PAUSED") {
            return;
        }
        let state = fold(&self.run, &self.entries()).unwrap();
        let Some((step, approval)) = state.open_approvals().first().copied() else {
            return;
        };
        let happened = self.outside.unkeyed.contains_key(&self.rules.key(step));
        let approval = Some(approval.clone());
        self.signal(Signal::Decide {
            approval,
            approved: !happened,
            by: "somebody".into(),
            reason: String::new(),
        });
    }

    /// One at a time: who asks waits for the answer.
    fn signal(&mut self, signal: Signal) {
        if !now(self.store.inbox(&self.run)).unwrap().is_empty() {
            return;
        }
        match now(self.store.signal(&self.run, signal)) {
            Ok(()) | Err(store::Error::Ended { .. }) => {}
            Err(error) => panic!("{error:?}"),
        }
    }

    fn public(&self) -> String {
        now(self.store.run(&self.run)).unwrap().state
    }

    fn entries(&self) -> Vec<Entry> {
        now(self.store.journal(&self.run, 0, usize::MAX)).unwrap()
    }
}

fn one(seed: u64) -> (u32, bool) {
    let expected = Sim::new(seed).undisturbed();
    let mut sim = Sim::new(seed);
    let found = sim.disturbed();
    sim.check();
    let asked_a_person = sim
        .entries()
        .iter()
        .any(|entry| matches!(entry.event, Event::OutcomeUnknown { .. }));
    if !asked_a_person {
        assert_eq!(found, expected, "LOST_0");
    }
    (sim.claims, asked_a_person)
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect("a number"))
}

#[test]
fn x1_e12_s1_whatever_a_seed_does_to_a_run_nothing_is_lost_and_nothing_doubled_in_silence() {
    let seeds = match number("EXUVIA_SIM_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("EXUVIA_SIM_SEEDS").unwrap_or(1000),
    };
    let all = (seeds.end - seeds.start) as u32;
    let (recovered, asked) = (AtomicU32::new(0), AtomicU32::new(0));
    // One after the other, by as many hands as there are processors: no seed knows of another.
    let next = AtomicU64::new(seeds.start);
    let hand = || {
        loop {
            let seed = next.fetch_add(1, Ordering::SeqCst);
            if seed >= seeds.end {
                return;
            }
            let run = std::panic::catch_unwind(|| one(seed));
            let (claims, person) = run.unwrap_or_else(|_| panic!("seed {seed} failed; again: EXUVIA_SIM_SEED={seed}"));
            recovered.fetch_add(u32::from(claims > 1), Ordering::SeqCst);
            asked.fetch_add(u32::from(person), Ordering::SeqCst);
        }
    };
    let hands = std::thread::available_parallelism().map_or(1, usize::from);
    // A hand that panics panics here, too.
    std::thread::scope(|scope| (0..hands).for_each(|_| drop(scope.spawn(hand))));
    let (recovered, asked) = (recovered.into_inner(), asked.into_inner());
    // The scheduler does disturb, and does not only ever ask.
    if all > 100 {
        assert!(
            recovered * 2 > all && asked * 50 > all && asked * 2 < all,
            "{recovered} recovered, {asked} asked"
        );
    }
}
