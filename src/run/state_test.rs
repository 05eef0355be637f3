//! Random lives of a run against the machine's promises (requirements A1–A7, E1, E6, F1).

use std::collections::HashSet;
use std::time::Duration;

use proptest::prelude::*;
use serde_json::Value;

use super::event::{Call, Entry, Event, FORMAT_VERSION, Limit, Outcome, Submitted};
use super::session::Session;
use super::state::{self, CallStatus, Effect, Hold, Phase, State};
use crate::clock::Timestamp;
use crate::error::Fault;
use crate::ids::{ApprovalId, RunId};
use crate::model::{Assistant, Finish, Message, Reply, Usage};
use crate::policy::{Budgets, Decision, Verdict};
use crate::tool::world::Blame;
use crate::tool::{Effect as ToolEffect, ToolResult};
use crate::workspace::{Revision, TreeId};

pub(super) fn budgets() -> Budgets {
    Budgets {
        steps: Some(40),
        model_calls: Some(20),
        step_time: Duration::from_secs(30),
        total_time: Duration::from_secs(300),
        tokens: None,
        cost_micros: None,
        parallel_tools: 3,
    }
}

pub(super) fn submitted(budgets: Budgets, check: Option<&str>) -> Event {
    Event::Submitted(Submitted {
        prompt: "do it".into(),
        system: "you are".into(),
        model: "scripted:test".into(),
        policy_name: "default".into(),
        policy_hash: "0".repeat(64),
        budgets,
        check: check.map(str::to_owned),
        workspace: tree(0),
        labels: Default::default(),
    })
}

/// A journal under construction; an entry a second.
struct Life {
    entries: Vec<Entry>,
    state: State,
}

impl Life {
    fn new(budgets: Budgets, check: Option<&str>) -> Self {
        let first = Entry {
            format_version: FORMAT_VERSION,
            seq: 1,
            at: Timestamp(0),
            event: submitted(budgets, check),
        };
        let state = state::start(&first).unwrap();
        Self {
            entries: vec![first],
            state,
        }
    }

    fn entry(&self, event: Event) -> Entry {
        let seq = self.state.seq + 1;
        Entry {
            format_version: FORMAT_VERSION,
            seq,
            at: Timestamp(seq as i64 * 1000),
            event,
        }
    }

    fn try_push(&mut self, event: Event) -> Result<Vec<Effect>, state::Denied> {
        let entry = self.entry(event);
        let (next, effects) = state::step(&self.state, &entry)?;
        let before = state::due(&self.state);
        let fresh: Vec<Effect> = state::due(&next)
            .into_iter()
            .filter(|effect| !before.contains(effect))
            .collect();
        assert_eq!(effects, fresh, "step returns what became due");
        self.entries.push(entry);
        self.state = next;
        Ok(effects)
    }

    fn push(&mut self, event: Event) -> &mut Self {
        let shown = format!("{event:?} in {:?}", self.state.phase);
        self.try_push(event)
            .unwrap_or_else(|denied| panic!("{denied}: {shown}"));
        self
    }

    fn claimed() -> Event {
        Event::Claimed {
            worker: "w".into(),
            fence: 1,
            stale: None,
            grounds: None,
        }
    }

    fn replied(&self, calls: &[(&str, ToolEffect, &str)], content: Option<&str>) -> Event {
        let Phase::Reasoning { step, attempt, .. } = self.state.phase else {
            panic!("not reasoning")
        };
        let calls = calls.iter().enumerate().map(|(n, (tool, effect, arguments))| {
            let step = step + 1 + n as u32;
            Call {
                step,
                id: format!("c{step}"),
                tool: (*tool).into(),
                arguments: (*arguments).into(),
                effect: *effect,
            }
        });
        let message = Assistant {
            content: content.map(str::to_owned),
            ..Assistant::default()
        };
        let usage = Usage {
            input_tokens: 10,
            output_tokens: 5,
            ..Usage::default()
        };
        let reply = Reply {
            message,
            finish: Finish::Stop,
            usage,
            model: "m".into(),
        };
        Event::ModelReplied {
            step,
            attempt,
            reply,
            calls: calls.collect(),
            duration: Duration::ZERO,
            cost_micros: None,
        }
    }
}

fn allow() -> Decision {
    Decision {
        verdict: Verdict::Allow,
        rule: "r".into(),
        source: "s".into(),
        reason: String::new(),
    }
}

fn ok() -> ToolResult {
    ToolResult::ok("done", Value::Null)
}

fn tree(n: u8) -> Revision {
    TreeId::from_bytes([n; 32]).into()
}

fn started(step: u32) -> Event {
    Event::ToolStarted {
        step,
        attempt: 1,
        key: format!("task/{step}"),
        decision: allow(),
    }
}

fn finished(step: u32, attempt: u32, workspace: Revision) -> Event {
    Event::ToolFinished {
        step,
        attempt,
        result: ok(),
        workspace,
        duration: Duration::ZERO,
    }
}

const WRITE: ToolEffect = ToolEffect::Workspace;
const READ: ToolEffect = ToolEffect::ReadOnly;
const CONTROL: ToolEffect = ToolEffect::Control;
const DONE: (&str, ToolEffect, &str) = ("finish", CONTROL, r#"{"summary":"all done"}"#);

#[test]
fn a2_the_states_of_a_three_tool_run() {
    let mut life = Life::new(budgets(), None);
    let mut seen = vec![life.state.public()];
    life.push(Life::claimed());
    seen.push(life.state.public());
    for _ in 0..3 {
        let reply = life.replied(&[("shell", WRITE, "{}")], None);
        life.push(reply);
        seen.push(life.state.public());
        let step = life.state.next_step - 1;
        life.push(started(step));
        seen.push(life.state.public());
        life.push(finished(step, 1, tree(1)));
        seen.push(life.state.public());
    }
    let reply = life.replied(&[DONE], None);
    life.push(reply);
    let step = life.state.next_step - 1;
    life.push(started(step));
    let Phase::Ending { outcome } = life.state.phase.clone() else {
        panic!("{:?}", life.state.phase)
    };
    life.push(Event::Ended { outcome });
    seen.push(life.state.public());
    let round = ["TOOL_CALLING", "WAITING_RESULT", "REASONING"];
    let expected: Vec<&str> = ["QUEUED", "REASONING"]
        .into_iter()
        .chain(round.into_iter().cycle().take(9))
        .chain(["FINISHED"])
        .collect();
    assert_eq!(seen, expected);
}

#[test]
fn a4_a_limit_is_exhausted_and_never_finished() {
    let mut life = Life::new(
        Budgets {
            steps: Some(3),
            ..budgets()
        },
        None,
    );
    life.push(Life::claimed());
    let reply = life.replied(
        &[("shell", WRITE, "{}"), ("shell", WRITE, "{}"), ("shell", WRITE, "{}")],
        None,
    );
    life.push(reply)
        .push(started(2))
        .push(finished(2, 1, tree(1)))
        .push(started(3))
        .push(finished(3, 1, tree(2)));
    let Phase::Ending {
        outcome: Outcome::Exhausted { limit, fault },
    } = &life.state.phase
    else {
        panic!("{:?}", life.state.phase)
    };
    assert_eq!((*limit, fault.code.as_str()), (Limit::Steps, "budget_exhausted"));
    assert_eq!(life.state.workspace, tree(2), "what was done is kept");
}

#[test]
fn a4_tokens_spent_by_the_last_answer_exhaust_even_a_finish() {
    let mut life = Life::new(
        Budgets {
            tokens: Some(14),
            ..budgets()
        },
        None,
    );
    life.push(Life::claimed());
    let reply = life.replied(&[DONE], None);
    life.push(reply);
    assert!(matches!(
        &life.state.phase,
        Phase::Ending {
            outcome: Outcome::Exhausted {
                limit: Limit::Tokens,
                ..
            }
        }
    ));
}

#[test]
fn d1_an_unknown_price_exhausts_a_cost_budget() {
    let mut life = Life::new(
        Budgets {
            cost_micros: Some(1_000_000),
            ..budgets()
        },
        None,
    );
    life.push(Life::claimed());
    let reply = life.replied(&[], Some("hello"));
    life.push(reply);
    assert!(matches!(
        &life.state.phase,
        Phase::Ending {
            outcome: Outcome::Exhausted { limit: Limit::Cost, .. }
        }
    ));
}

#[test]
fn a6_the_check_has_the_last_word() {
    let mut life = Life::new(budgets(), Some("make test"));
    life.push(Life::claimed());
    let reply = life.replied(&[DONE], None);
    life.push(reply);
    assert_eq!(
        state::due(&life.state),
        [Effect::Decide { step: 2 }],
        "`finish` goes by the policy too"
    );
    life.push(started(2));
    assert_eq!(state::due(&life.state), [Effect::RunCheck { step: 3, attempt: 1 }]);
    let check = |passed, step| Event::CheckFinished {
        step,
        attempt: 1,
        passed,
        result: ok(),
        workspace: tree(3),
        duration: Duration::ZERO,
    };
    life.push(check(false, 3));
    assert_eq!(life.state.public(), "REASONING");
    let reply = life.replied(&[], Some("now it is done"));
    life.push(reply).push(check(true, 5));
    assert!(
        matches!(&life.state.phase, Phase::Ending { outcome: Outcome::Finished { summary, .. } } if summary == "now it is done")
    );
    pairs_hold(&life.entries);
}

#[test]
fn a7_empty_answers_end_in_no_progress() {
    let mut life = Life::new(budgets(), None);
    life.push(Life::claimed());
    for _ in 0..state::IDLE_REPLIES {
        let reply = life.replied(&[], Some("  "));
        life.push(reply);
    }
    let Phase::Ending {
        outcome: Outcome::Failed { fault },
    } = &life.state.phase
    else {
        panic!()
    };
    assert_eq!(fault.code, "no_progress");
}

#[test]
fn d8_readers_run_side_by_side_up_to_the_cap_and_writers_alone() {
    let mut life = Life::new(budgets(), None);
    life.push(Life::claimed());
    let calls = [READ, READ, READ, READ, WRITE, READ].map(|effect| ("t", effect, "{}"));
    let reply = life.replied(&calls, None);
    life.push(reply);
    let decide = |steps: &[u32]| steps.iter().map(|&step| Effect::Decide { step }).collect::<Vec<_>>();
    assert_eq!(state::due(&life.state), decide(&[2, 3, 4]));
    assert!(life.try_push(started(6)).is_err(), "a writer does not overtake");
    for step in [2, 3, 4] {
        life.push(started(step));
    }
    life.push(finished(3, 1, tree(0)));
    let due = state::due(&life.state);
    assert_eq!(due.len(), 3);
    assert!(
        due.contains(&Effect::Decide { step: 5 }),
        "the next reader takes the free place: {due:?}"
    );
    life.push(started(5))
        .push(finished(2, 1, tree(0)))
        .push(finished(4, 1, tree(0)))
        .push(finished(5, 1, tree(0)));
    assert_eq!(state::due(&life.state), decide(&[6]));
    life.push(started(6)).push(finished(6, 1, tree(1)));
    assert_eq!(state::due(&life.state), decide(&[7]));
}

#[test]
fn d1_readers_side_by_side_do_not_overshoot_the_steps() {
    let mut life = Life::new(
        Budgets {
            steps: Some(3),
            ..budgets()
        },
        None,
    );
    life.push(Life::claimed());
    let reply = life.replied(&[("t", READ, "{}"), ("t", READ, "{}"), ("t", READ, "{}")], None);
    life.push(reply);
    assert_eq!(
        state::due(&life.state),
        [Effect::Decide { step: 2 }, Effect::Decide { step: 3 }]
    );
    life.push(started(2)).push(started(3));
    life.push(finished(2, 1, tree(0)));
    assert_eq!(life.state.public(), "WAITING_RESULT", "what runs is let run");
    life.push(finished(3, 1, tree(0)));
    assert!(matches!(
        &life.state.phase,
        Phase::Ending {
            outcome: Outcome::Exhausted {
                limit: Limit::Steps,
                ..
            }
        }
    ));
    assert_eq!(life.state.used.steps, 3);
}

#[test]
fn outages_do_not_use_up_the_attempts_that_failures_have() {
    let mut life = Life::new(budgets(), None);
    life.push(Life::claimed());
    let reply = life.replied(&[("shell", WRITE, "{}")], None);
    life.push(reply).push(started(2));
    for _ in 0..5 {
        life.push(Life::claimed());
    }
    assert_eq!(life.state.failures(2), 0);
    let fault = Fault::new("sandbox_lost", "x");
    life.push(Event::ToolLost {
        step: 2,
        attempt: 6,
        fault,
        retry: true,
        blame: None,
        retry_in: None,
    });
    assert_eq!(
        (life.state.failures(2), state::due(&life.state)),
        (1, vec![Effect::RunTool { step: 2, attempt: 7 }])
    );
}

#[test]
fn a_crash_gives_back_no_more_than_the_outage() {
    let mut life = Life::new(budgets(), None);
    life.push(Life::claimed());
    let deadline = life.state.deadline.unwrap();
    let mut entry = life.entry(Life::claimed());
    entry.at = life.state.at.plus(Duration::from_secs(20));
    assert_eq!(
        state::step(&life.state, &entry).unwrap().0.deadline,
        Some(deadline),
        "a step may have worked as long"
    );
    entry.at = life.state.at.plus(Duration::from_secs(3600));
    let expected = deadline.plus(Duration::from_secs(3600) - budgets().step_time);
    assert_eq!(state::step(&life.state, &entry).unwrap().0.deadline, Some(expected));
}

#[test]
fn a_claim_of_a_running_run_starts_what_was_in_flight_again_under_the_next_attempt() {
    let mut life = Life::new(budgets(), None);
    life.push(Life::claimed());
    let reply = life.replied(&[("shell", WRITE, "{}")], None);
    life.push(reply).push(started(2)).push(Life::claimed());
    assert_eq!(state::due(&life.state), [Effect::RunTool { step: 2, attempt: 2 }]);
    assert!(
        life.try_push(finished(2, 1, tree(9))).is_err(),
        "the lost attempt can no longer report (E12)"
    );
    life.push(finished(2, 2, tree(1)));
    assert_eq!(life.state.used.tool_calls, 1, "attempts are one step");
}

#[test]
fn waiting_for_a_person_and_outages_do_not_use_up_the_total_time() {
    let mut life = Life::new(budgets(), None);
    life.push(Life::claimed());
    let deadline = life.state.deadline.unwrap();
    let reply = life.replied(&[("shell", WRITE, "{}")], None);
    let approval = ApprovalId::from_bits(1);
    life.push(reply).push(Event::ApprovalRequested {
        step: 2,
        approval: approval.clone(),
        decision: Decision {
            verdict: Verdict::Ask,
            ..allow()
        },
        action_hash: "h".into(),
    });
    assert_eq!(life.state.public(), "WAITING_APPROVAL");
    let decided = Event::ApprovalDecided {
        step: 2,
        approval,
        approved: true,
        by: "p".into(),
        reason: String::new(),
    };
    let mut entry = life.entry(decided);
    entry.at = entry.at.plus(Duration::from_secs(3600));
    let (state, _) = state::step(&life.state, &entry).unwrap();
    assert_eq!(state.deadline.unwrap(), deadline.plus(Duration::from_secs(3601)));
}

#[test]
fn a5_an_ended_run_takes_nothing_more() {
    let mut life = Life::new(budgets(), None);
    life.push(Life::claimed());
    life.push(Event::CancelRequested {
        by: "p".into(),
        reason: String::new(),
    });
    let Phase::Ending { outcome } = life.state.phase.clone() else {
        panic!()
    };
    life.push(Event::CancelRequested {
        by: "q".into(),
        reason: "again".into(),
    });
    life.push(Event::Ended {
        outcome: outcome.clone(),
    });
    for event in [
        Life::claimed(),
        Event::CancelRequested {
            by: "p".into(),
            reason: String::new(),
        },
        Event::PauseRequested {
            now: false,
            by: "p".into(),
            reason: String::new(),
        },
        Event::Resumed {
            by: "p".into(),
            accepted: Vec::new(),
        },
        Event::DeadlineReached,
        Event::Ended { outcome },
    ] {
        assert!(life.try_push(event.clone()).is_err(), "{event:?}");
    }
}

fn unknown(step: u32, attempt: u32) -> Event {
    Event::OutcomeUnknown {
        step,
        attempt,
        approval: ApprovalId::from_bits(u128::from(step) * 100 + u128::from(attempt)),
        decision: allow(),
        action_hash: "hash".into(),
    }
}

/// Every event that may come next, given what is due and who may interfere.
fn options(life: &Life, choice: u8) -> Vec<Event> {
    let mut events = vec![
        Life::claimed(),
        Event::PauseRequested {
            now: choice.is_multiple_of(2),
            by: "p".into(),
            reason: String::new(),
        },
        Event::Resumed {
            by: "p".into(),
            accepted: Vec::new(),
        },
    ];
    if choice == 255 {
        events.push(Event::CancelRequested {
            by: "p".into(),
            reason: String::new(),
        });
        events.push(Event::DeadlineReached);
    }
    for (step, approval) in life.state.open_approvals() {
        for approved in [true, false] {
            let (approval, by, reason) = (approval.clone(), "p".to_owned(), String::new());
            events.push(Event::ApprovalDecided {
                step,
                approval,
                approved,
                by,
                reason,
            });
        }
    }
    for effect in state::due(&life.state) {
        let fault = Fault::new("x", "y");
        match effect {
            Effect::CallModel { step, attempt, .. } => {
                let calls = [
                    vec![("shell", WRITE, "{}")],
                    vec![
                        ("send", ToolEffect::External, "{}"),
                        ("send", ToolEffect::Idempotent, "{}"),
                    ],
                    vec![
                        ("read_file", READ, "{}"),
                        ("search", READ, "{}"),
                        ("shell", WRITE, "{}"),
                    ],
                    vec![("read_file", READ, "{}"), DONE, ("shell", WRITE, "{}")],
                    vec![("finish", CONTROL, "not json")],
                    vec![],
                ];
                events.extend(calls.iter().map(|calls| life.replied(calls, None)));
                events.push(life.replied(&[], Some("that is all")));
                let retry_in = Some(Duration::from_secs(1));
                events.push(Event::ModelFailed {
                    step,
                    attempt,
                    fault: fault.clone(),
                    retry_in,
                });
                events.push(Event::ModelFailed {
                    step,
                    attempt,
                    fault,
                    retry_in: None,
                });
            }
            Effect::Decide { step } => {
                events.push(started(step));
                events.push(Event::ToolRefused {
                    step,
                    decision: allow(),
                    result: ok(),
                });
                let (approval, action_hash) = (ApprovalId::from_bits(step.into()), String::new());
                events.push(Event::ApprovalRequested {
                    step,
                    approval,
                    decision: allow(),
                    action_hash,
                });
            }
            Effect::Start { step, .. } => events.push(started(step)),
            Effect::RunTool { step, attempt } => {
                events.push(finished(step, attempt, tree(choice)));
                events.push(Event::ToolLost {
                    step,
                    attempt,
                    fault: fault.clone(),
                    retry: true,
                    blame: Some(Blame::Host),
                    retry_in: None,
                });
                events.push(Event::ToolLost {
                    step,
                    attempt,
                    fault,
                    retry: false,
                    blame: None,
                    retry_in: None,
                });
            }
            Effect::RunCheck { step, attempt } => {
                for passed in [true, false] {
                    let (result, workspace, duration) = (ok(), tree(choice), Duration::ZERO);
                    events.push(Event::CheckFinished {
                        step,
                        attempt,
                        passed,
                        result,
                        workspace,
                        duration,
                    });
                }
                events.push(Event::CheckLost {
                    step,
                    attempt,
                    fault,
                    retry: choice.is_multiple_of(2),
                    blame: Some(Blame::Program),
                    retry_in: None,
                });
            }
            Effect::Probe { step, attempt } => {
                events.push(Event::NotDone { step, attempt });
                events.push(unknown(step, attempt));
            }
            Effect::End { outcome } => events.push(Event::Ended { outcome }),
        }
    }
    events
}

/// Requirement E6: between an answer and the next one, each of its calls has exactly one result, in order.
fn pairs_hold(entries: &[Entry]) {
    let mut open: Vec<String> = Vec::new();
    for message in Session::of(entries).messages() {
        match message {
            Message::Assistant(said) => {
                assert!(open.is_empty(), "calls without a result: {open:?}");
                open = said.tool_calls.iter().map(|call| call.id.clone()).collect();
            }
            Message::Tool { tool_call_id, .. } => assert_eq!(open.remove(0), tool_call_id),
            Message::System { .. } | Message::User { .. } => assert!(open.is_empty()),
        }
    }
    assert!(open.is_empty());
}

fn invariants(life: &Life) {
    let state = &life.state;
    assert_eq!(state.seq, life.entries.len() as u64);
    assert_eq!(
        super::fold(&RunId::from_bits(0), &life.entries).unwrap(),
        *state,
        "F1: fold equals the live state"
    );
    let stored: State = serde_json::from_value(serde_json::to_value(state).unwrap()).unwrap();
    assert_eq!(stored, *state, "a checkpoint reads back as it was");
    assert!(state.used.steps <= state.budgets.steps.unwrap());
    let due = state::due(state);
    let keys: HashSet<String> = due.iter().map(|effect| format!("{effect:?}")).collect();
    assert_eq!(keys.len(), due.len(), "no effect is due twice");
    if let Phase::Calling { calls } = &state.phase {
        let running: Vec<_> = calls
            .iter()
            .filter(|call| matches!(call.status, CallStatus::Running { .. }))
            .collect();
        assert!(running.len() <= state.budgets.parallel_tools as usize);
        assert!(
            running.len() < 2 || running.iter().all(|call| call.effect == READ),
            "writers run alone"
        );
    }
    assert_eq!(
        due.is_empty(),
        state.is_terminal() || state.is_parked() || state.phase == Phase::Queued
    );
    if state.hold == Hold::Held && !state.is_terminal() {
        assert!(
            due.iter().all(|effect| matches!(effect, Effect::End { .. })),
            "nothing starts while held"
        );
    }
    pairs_hold(&life.entries);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn a1_random_lives_keep_every_promise(
        choices in prop::collection::vec(any::<u8>(), 1..120),
        check in any::<bool>(),
        steps in 1..30u32,
    ) {
        let budgets = Budgets { steps: Some(steps), ..budgets() };
        let mut life = Life::new(budgets, check.then_some("make test"));
        for choice in choices {
            let events = options(&life, choice);
            let before = life.state.clone();
            let event = events[choice as usize % events.len()].clone();
            let from_due = !matches!(event, Event::Claimed { .. } | Event::PauseRequested { .. } | Event::Resumed { .. }
                | Event::CancelRequested { .. } | Event::DeadlineReached);
            match life.try_push(event.clone()) {
                Ok(_) => invariants(&life),
                Err(denied) => {
                    prop_assert!(!from_due, "{} although it was due: {:?}", denied, event);
                    prop_assert_eq!(&before, &life.state);
                }
            }
        }
        // Left alone from here, with every effect succeeding, it ends: nothing is stuck.
        for _ in 0..400 {
            if life.state.is_terminal() {
                break;
            }
            let events = options(&life, 0);
            let next = events.into_iter().skip(3).find(|event| !matches!(event,
                Event::ToolLost { .. } | Event::ModelFailed { retry_in: Some(_), .. } | Event::ApprovalRequested { .. }));
            life.push(next.unwrap_or_else(|| match life.state.phase {
                Phase::Queued if life.state.hold == Hold::Free => Life::claimed(),
                _ => Event::Resumed { by: "p".into(), accepted: Vec::new() },
            }));
        }
        prop_assert!(life.state.is_terminal(), "stuck in {:?}", life.state);
    }
}

#[test]
fn d2_a_step_gets_the_shorter_of_its_limit_and_what_is_left() {
    let mut life = Life::new(budgets(), None);
    assert_eq!(
        life.state.step_limit(Timestamp(0)),
        Duration::from_secs(30),
        "not begun"
    );
    life.try_push(Event::Claimed {
        worker: "w".into(),
        fence: 1,
        stale: None,
        grounds: None,
    })
    .unwrap();
    // Claimed at second 2; there are 300 seconds.
    for (at, expected) in [(2, 30), (272, 30), (273, 29), (301, 1), (302, 0), (999, 0)] {
        assert_eq!(
            life.state.step_limit(Timestamp(at * 1000)),
            Duration::from_secs(expected),
            "{at}"
        );
    }
}
