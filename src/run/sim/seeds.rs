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

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures::FutureExt;
use serde_json::json;

use super::{World, submission};
use crate::clock::{Clock, Timestamp};
use crate::ids::RunId;
use crate::model::{Assistant, Finish, Message, Reply, ToolCall, Usage};
use crate::run::commit::{self, Position};
use crate::run::decide::{self, Rules};
use crate::run::event::{Entry, Event, FORMAT_VERSION, Outcome};
use crate::run::session::Session;
use crate::run::state::{self, Effect, State};
use crate::run::{agree, fold};
use crate::store::memory::{Memory, When};
use crate::store::{self, Commit, NewTask, Owner, RunRecord, Signal, Store};
use crate::tool::{Effect as ToolEffect, ToolResult};
use crate::workspace::{Revision, TreeId};

/// Splitmix64 (Steele, Lea, Flood 2014): a stream of numbers from a seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % sides
    }
}

#[derive(Debug)]
struct Hand(AtomicI64);

impl Clock for Hand {
    fn now(&self) -> Timestamp {
        Timestamp(self.0.load(Ordering::SeqCst))
    }
}

/// The tools of a plan: one of each class, and one whose effect can be looked up afterwards.
const TOOLS: [(&str, ToolEffect); 5] = [
    ("list_files", ToolEffect::ReadOnly),
    ("read_artifact", ToolEffect::ReadOnly),
    ("write_file", ToolEffect::Workspace),
    ("edit_file", ToolEffect::Idempotent),
    ("shell", ToolEffect::External),
];

fn arguments(tool: &str, n: usize) -> String {
    match tool {
        "list_files" => json!({ "path": format!("d{n}") }),
        "read_artifact" => json!({ "artifact": format!("a{n}") }),
        "write_file" => json!({ "path": format!("f{n}"), "content": "x" }),
        "edit_file" => json!({ "path": format!("f{n}"), "old": "x", "new": "y" }),
        "shell" => json!({ "command": format!("send {n}") }),
        other => panic!("{other}"),
    }
    .to_string()
}

/// What the model will do, turn by turn.
struct Plan(Vec<Vec<ToolCall>>);

impl Plan {
    fn draw(dice: &mut Dice) -> Self {
        // Half of the plans are without calls that only a person can settle: those must come to the same in every word.
        let tools = if dice.roll(2) == 0 { 4 } else { 5 };
        let mut n = 0;
        let mut turn = |dice: &mut Dice| {
            (0..=dice.roll(4))
                .map(|_| {
                    n += 1;
                    let name = TOOLS[dice.roll(tools) as usize].0.to_owned();
                    let arguments = arguments(&name, n);
                    let id = format!("c{n}");
                    ToolCall { id, name, arguments }
                })
                .collect()
        };
        let turns = 1 + dice.roll(4);
        let mut turns: Vec<Vec<ToolCall>> = (0..turns).map(|_| turn(dice)).collect();
        turns.push(vec![ToolCall {
            id: "end".into(),
            name: "finish".into(),
            arguments: json!({ "summary": "done" }).to_string(),
        }]);
        Self(turns)
    }

    /// By the conversation alone, as a scripted model answers.
    fn answer(&self, session: &Session) -> Reply {
        let said = session.messages();
        let turn = said
            .iter()
            .filter(|message| matches!(message, Message::Assistant(_)))
            .count();
        Reply {
            message: Assistant {
                tool_calls: self.0[turn].clone(),
                ..Assistant::default()
            },
            finish: Finish::ToolCalls,
            usage: Usage::default(),
            model: "sim".into(),
        }
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

/// What a run came to.
#[derive(Debug, PartialEq)]
struct End {
    outcome: Outcome,
    tree: TreeId,
    messages: Vec<Message>,
    steps: u32,
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
            let held = fold(&self.run, &self.entries()).unwrap().hold != state::Hold::Free;
            if held {
                self.signal(Signal::Resume { by: "sim".into() });
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
            7..=12 => self.signal(Signal::Resume { by: "sim".into() }),
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

    /// Something that was begun happens; nobody has heard of it yet.
    fn happen(&mut self, which: usize) {
        let Some(worker) = self.workers.get(which) else { return };
        let silent: Vec<usize> = (0..worker.going.len())
            .filter(|n| worker.going[*n].told.is_none())
            .collect();
        if silent.is_empty() {
            return;
        }
        let nth = silent[self.dice.roll(silent.len() as u64) as usize];
        let told = match worker.going[nth].effect.clone() {
            Effect::CallModel { step, attempt, .. } => {
                let mut reply = self.plan.answer(&worker.session);
                let asked = std::mem::take(&mut reply.message.tool_calls);
                let mut calls = self.rules.number(step, asked, &worker.session.messages());
                for call in &mut calls {
                    let class = TOOLS.iter().find(|(name, _)| *name == call.tool);
                    call.effect = class.map_or(call.effect, |(_, effect)| *effect);
                }
                Event::ModelReplied {
                    step,
                    attempt,
                    reply,
                    calls,
                    duration: Duration::ZERO,
                    cost_micros: Some(0),
                }
            }
            Effect::RunTool { step, attempt } => {
                let (class, key) = (worker.session.call(step).unwrap().effect, self.rules.key(step));
                let workspace = worker.state.workspace;
                let workspace = match class {
                    ToolEffect::ReadOnly | ToolEffect::Control => workspace,
                    ToolEffect::Workspace => grown(workspace, &key),
                    ToolEffect::Idempotent => {
                        // The other side knows the key.
                        self.outside.keyed.entry(key.clone()).or_insert(1);
                        grown(workspace, &key)
                    }
                    ToolEffect::External => {
                        *self.outside.unkeyed.entry(key.clone()).or_default() += 1;
                        grown(workspace, &key)
                    }
                };
                finished(step, attempt, workspace)
            }
            Effect::Probe { step, attempt } => {
                let key = self.rules.key(step);
                let happened = self.outside.unkeyed.contains_key(&key);
                match (step % 3, happened) {
                    // The tool has a status check, and it is sure.
                    (0, true) => finished(step, attempt, grown(worker.state.workspace, &key)),
                    (0, false) => Event::NotDone { step, attempt },
                    _ => decide::unknown(self.rules, &worker.state, &worker.session, step, attempt).unwrap(),
                }
            }
            effect @ (Effect::RunCheck { .. } | Effect::Decide { .. } | Effect::Start { .. } | Effect::End { .. }) => {
                panic!("{effect:?} is not begun here")
            }
        };
        self.workers[which].going[nth].told = Some(told);
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
        let sent = commit::prepare(&at, entry, Vec::new(), consumed).unwrap();
        self.workers[which].on_its_way = Some(sent);
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

    fn entries(&self) -> Vec<Entry> {
        now(self.store.journal(&self.run, 0, usize::MAX)).unwrap()
    }

    fn ended(&self) -> Option<End> {
        now(self.store.run(&self.run)).unwrap().is_terminal.then_some(())?;
        let entries = self.entries();
        let state = fold(&self.run, &entries).unwrap();
        agree(
            &self.run,
            &entries,
            &now(self.store.checkpoint(&self.run, None)).unwrap(),
        )
        .unwrap();
        let Some(Event::Ended { outcome }) = entries.last().map(|entry| entry.event.clone()) else {
            panic!("the last entry is not the end");
        };
        Some(End {
            outcome,
            tree: state.workspace.tree,
            messages: Session::of(&entries).messages(),
            steps: state.used.steps,
        })
    }

    /// LOST_0, DOUBLED_0, FLAGGED.
    fn check(&self) {
        let entries = self.entries();
        let session = Session::of(&entries);
        let mut asked: BTreeMap<u32, u32> = BTreeMap::new();
        let mut done = BTreeSet::new();
        for entry in &entries {
            match &entry.event {
                Event::ToolFinished { step, .. } => assert!(done.insert(*step), "step {step} has two outcomes"),
                Event::OutcomeUnknown { step, .. } | Event::NotDone { step, .. } => {
                    *asked.entry(*step).or_default() += 1
                }
                _ => {}
            }
        }
        for step in &done {
            let key = self.rules.key(*step);
            let happened = match session.call(*step).unwrap().effect {
                ToolEffect::Idempotent => self.outside.keyed.contains_key(&key),
                ToolEffect::External => self.outside.unkeyed.contains_key(&key),
                ToolEffect::ReadOnly | ToolEffect::Workspace | ToolEffect::Control => true,
            };
            assert!(happened, "LOST_0: step {step} is called done");
        }
        assert!(self.outside.keyed.values().all(|times| *times == 1), "DOUBLED_0");
        for (key, times) in &self.outside.unkeyed {
            let step: u32 = key.rsplit_once('/').unwrap().1.parse().unwrap();
            let flags = asked.get(&step).copied().unwrap_or_default();
            assert!(
                *times <= 1 + flags,
                "FLAGGED: {key} happened {times} times, asked {flags} times"
            );
        }
    }
}

/// The workspace after that step: what came before and what was done, in order.
fn grown(before: Revision, key: &str) -> Revision {
    let mut hasher = blake3::Hasher::new();
    hasher.update(before.tree.to_string().as_bytes());
    hasher.update(key.as_bytes());
    TreeId::from_bytes(*hasher.finalize().as_bytes()).into()
}

fn finished(step: u32, attempt: u32, workspace: Revision) -> Event {
    Event::ToolFinished {
        step,
        attempt,
        result: ToolResult::ok(format!("did step {step}"), serde_json::Value::Null),
        workspace,
        duration: Duration::ZERO,
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
    let (mut recovered, mut asked) = (0, 0);
    for seed in seeds {
        let run = std::panic::catch_unwind(|| one(seed));
        let (claims, person) = run.unwrap_or_else(|_| panic!("seed {seed} failed; again: EXUVIA_SIM_SEED={seed}"));
        recovered += u32::from(claims > 1);
        asked += u32::from(person);
    }
    // The scheduler does disturb, and does not only ever ask.
    if all > 100 {
        assert!(
            recovered * 2 > all && asked * 50 > all && asked * 2 < all,
            "{recovered} recovered, {asked} asked"
        );
    }
}
