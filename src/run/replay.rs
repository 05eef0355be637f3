//! What today's machine makes of a recorded run (requirements T1, E5, E14).
//!
//! Recorded are what came from outside: the model's answers, the tools' results, what people wanted, when workers came and
//! went. Everything else is made anew, by the code that drives runs: which effects are due, the numbers, classes and ids of
//! calls, what the policy says, whether there is another attempt, costs, states, checkpoints. The first difference is told.
//!
//! Pure: nothing is executed, sent or charged.

use std::time::Duration;

use serde::Serialize;
use serde_json::{Value, json};

use super::decide::{self, Rules};
use super::event::{Entry, Event, FORMAT_VERSION};
use super::recording::Recording;
use super::retry::{self, has_another_model_call};
use super::session::Session;
use super::state::{self, Effect, State};
use super::{Error, driver};
use crate::ids::TaskId;
use crate::model::ToolCall;

/// Where today's machine goes another way.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Divergence {
    /// The entry at which it does.
    pub seq: u64,
    /// The recorded event's `type`.
    pub event: String,
    /// Which part of it: a path into the entry, `checkpoint`, or empty for the whole.
    pub at: String,
    /// As recorded.
    pub expected: Value,
    /// As made now.
    pub got: Value,
}

/// Replays a recording to its end, or to the first difference.
///
/// # Errors
/// A recording whose request or format this build cannot read.
pub fn replay(recording: &Recording) -> Result<Option<Divergence>, Error> {
    // What lies before a fork was decided under its parent's request: it is folded here, and judged with the parent.
    let own = recording
        .entries
        .iter()
        .rposition(|entry| matches!(entry.event, Event::Forked(_)));
    let own = own.unwrap_or_default();
    let mut at = Replay {
        rules: Rules::of(task_of(recording, own), recording.spec.clone())?,
        own: own as u64,
        state: None,
        session: Session::default(),
    };
    let mut checkpoints = recording.checkpoints.iter().peekable();
    for entry in &recording.entries {
        if entry.format_version != FORMAT_VERSION {
            return Err(Error::UnknownVersion {
                run: recording.run.clone(),
                found: entry.format_version,
            });
        }
        if let Some(found) = at.take(entry) {
            return Ok(Some(found));
        }
        let state = at.state.as_ref().expect("the entry was taken");
        while let Some(checkpoint) = checkpoints.next_if(|checkpoint| checkpoint.seq <= entry.seq) {
            let made = serde_json::to_value(state).expect("a state is plain data");
            if let Some((path, expected, got)) = first_difference("checkpoint", &checkpoint.state, &made) {
                return Ok(Some(divergence(entry, path, expected, got)));
            }
        }
    }
    Ok(None)
}

/// The task that the run's keys name. One that was imported has another id now.
fn task_of(recording: &Recording, own: usize) -> TaskId {
    let named = recording.entries[own..].iter().find_map(|entry| match &entry.event {
        Event::ToolStarted { key, .. } => key.rsplit_once('/').and_then(|(task, _)| task.parse().ok()),
        _ => None,
    });
    named.unwrap_or_else(|| recording.task.clone())
}

struct Replay {
    rules: Rules,
    /// Entries up to here are an ancestor's.
    own: u64,
    state: Option<State>,
    session: Session,
}

impl Replay {
    /// Makes the entry anew, compares, and goes on by it.
    fn take(&mut self, entry: &Entry) -> Option<Divergence> {
        if let Some(state) = &self.state
            && entry.seq > self.own
        {
            let made = self.make(state, entry);
            let recorded = serde_json::to_value(&entry.event).expect("an event is plain data");
            let found = match made {
                Ok(made) => {
                    let made = serde_json::to_value(&made).expect("an event is plain data");
                    first_difference("", &recorded, &made)
                }
                Err(instead) => Some((String::new(), recorded, instead)),
            };
            if let Some((path, expected, got)) = found {
                return Some(divergence(entry, path, expected, got));
            }
        }
        match state::next(self.state.as_ref(), entry) {
            Ok(next) => {
                self.session.apply(entry);
                self.state = Some(next);
                None
            }
            Err(denied) => {
                let recorded = serde_json::to_value(&entry.event).expect("an event is plain data");
                let got = json!({ "refused": denied.to_string() });
                Some(divergence(entry, String::new(), recorded, got))
            }
        }
    }

    /// The event that today's machine would write in the place of `entry`, with what came from outside taken from there;
    /// `Err` says what it would do instead.
    fn make(&self, state: &State, entry: &Entry) -> Result<Event, Value> {
        let due = state::due(state);
        let instead = || json!({ "due": due.iter().map(|effect| format!("{effect:?}")).collect::<Vec<_>>() });
        let wanted = |effect: Effect| due.contains(&effect).then_some(()).ok_or_else(instead);
        let refused = |error: Error| json!({ "refused": crate::error::chain(&error) });
        match entry.event.clone() {
            // From outside; whether it may happen here the machine says.
            event @ (Event::Submitted(_)
            | Event::Forked(_)
            | Event::ApprovalDecided { .. }
            | Event::PauseRequested { .. }
            | Event::Resumed { .. }
            | Event::Withheld { .. }
            | Event::CancelRequested { .. }
            | Event::DeadlineReached) => Ok(event),
            Event::Claimed {
                worker,
                fence,
                stale,
                grounds,
            } => Ok(Event::Claimed {
                worker,
                fence,
                grounds,
                // How long is too long was that server's to say.
                stale: stale.and_then(|_| driver::stale(state, entry.at, Duration::ZERO)),
            }),
            Event::ModelReplied {
                step,
                attempt,
                reply,
                calls,
                duration,
                ..
            } => {
                self.due_call(&due, step, attempt).ok_or_else(instead)?;
                let asked = calls.into_iter().map(|call| ToolCall {
                    id: call.id,
                    name: call.tool,
                    arguments: call.arguments,
                });
                let calls = self.rules.number(step, asked.collect(), &self.session.messages());
                Ok(Event::ModelReplied {
                    step,
                    attempt,
                    calls,
                    duration,
                    cost_micros: self.rules.task.model.cost_micros(reply.usage),
                    reply,
                })
            }
            Event::ModelFailed {
                step,
                attempt,
                fault,
                retry_in,
            } => {
                self.due_call(&due, step, attempt).ok_or_else(instead)?;
                let again = has_another_model_call(fault.retryable, state.failures(step));
                Ok(Event::ModelFailed {
                    step,
                    attempt,
                    fault,
                    // How long is the provider's wish as well as ours.
                    retry_in: again.then(|| retry_in.unwrap_or_default()),
                })
            }
            Event::ToolRefused { step, .. }
            | Event::ApprovalRequested { step, .. }
            | Event::ToolStarted { step, .. } => {
                let approved = due.iter().find_map(|effect| match effect {
                    Effect::Start { step: due, approval } if *due == step => Some(approval),
                    Effect::Start { .. }
                    | Effect::CallModel { .. }
                    | Effect::Decide { .. }
                    | Effect::RunTool { .. }
                    | Effect::Probe { .. }
                    | Effect::RunCheck { .. }
                    | Effect::End { .. } => None,
                });
                let made = match approved {
                    Some(approval) => decide::start(&self.rules, state, &self.session, step, approval),
                    None => {
                        wanted(Effect::Decide { step })?;
                        decide::decide(&self.rules, state, &self.session, step)
                    }
                };
                Ok(same_id(made.map_err(refused)?, &entry.event))
            }
            Event::OutcomeUnknown { step, attempt, .. } => {
                wanted(Effect::Probe { step, attempt })?;
                let made = decide::unknown(&self.rules, state, &self.session, step, attempt);
                Ok(same_id(made.map_err(refused)?, &entry.event))
            }
            event @ Event::NotDone { step, attempt } => wanted(Effect::Probe { step, attempt }).map(|()| event),
            event @ Event::ToolFinished { step, attempt, .. } => {
                let probed = due.contains(&Effect::Probe { step, attempt });
                (probed || due.contains(&Effect::RunTool { step, attempt }))
                    .then_some(event)
                    .ok_or_else(instead)
            }
            Event::ToolLost {
                step,
                attempt,
                fault,
                blame,
                ..
            } => {
                wanted(Effect::RunTool { step, attempt })?;
                let (retry, retry_in) = retry::after(blame, fault.retryable, state.losses(step));
                Ok(Event::ToolLost {
                    step,
                    attempt,
                    fault,
                    retry,
                    blame,
                    retry_in,
                })
            }
            Event::CheckFinished {
                step,
                attempt,
                result,
                workspace,
                duration,
                ..
            } => {
                wanted(Effect::RunCheck { step, attempt })?;
                Ok(Event::CheckFinished {
                    step,
                    attempt,
                    passed: result.error.is_none(),
                    result,
                    workspace,
                    duration,
                })
            }
            Event::CheckLost {
                step,
                attempt,
                fault,
                blame,
                ..
            } => {
                wanted(Effect::RunCheck { step, attempt })?;
                let (retry, retry_in) = retry::after(blame, fault.retryable, state.losses(step));
                Ok(Event::CheckLost {
                    step,
                    attempt,
                    fault,
                    retry,
                    blame,
                    retry_in,
                })
            }
            Event::Ended { .. } => due
                .iter()
                .find_map(|effect| match effect {
                    Effect::End { outcome } => Some(Event::Ended {
                        outcome: outcome.clone(),
                    }),
                    Effect::CallModel { .. }
                    | Effect::Decide { .. }
                    | Effect::Start { .. }
                    | Effect::RunTool { .. }
                    | Effect::Probe { .. }
                    | Effect::RunCheck { .. } => None,
                })
                .ok_or_else(instead),
        }
    }

    fn due_call(&self, due: &[Effect], step: u32, attempt: u32) -> Option<()> {
        let is_it = |effect: &Effect| matches!(effect, Effect::CallModel { step: s, attempt: a, .. } if (*s, *a) == (step, attempt));
        due.iter().any(is_it).then_some(())
    }
}

/// Ids are made up when they are needed: those of the record stand.
fn same_id(made: Event, recorded: &Event) -> Event {
    match (made, recorded) {
        (
            Event::ApprovalRequested {
                step,
                decision,
                action_hash,
                ..
            },
            Event::ApprovalRequested { approval, .. },
        ) => Event::ApprovalRequested {
            step,
            approval: approval.clone(),
            decision,
            action_hash,
        },
        (
            Event::OutcomeUnknown {
                step,
                attempt,
                decision,
                action_hash,
                ..
            },
            Event::OutcomeUnknown { approval, .. },
        ) => Event::OutcomeUnknown {
            step,
            attempt,
            approval: approval.clone(),
            decision,
            action_hash,
        },
        (made, _) => made,
    }
}

fn divergence(entry: &Entry, at: String, expected: Value, got: Value) -> Divergence {
    Divergence {
        seq: entry.seq,
        event: entry.event.name().to_owned(),
        at,
        expected,
        got,
    }
}

/// The first place where two values differ, depth first, and what stands there in each.
fn first_difference(path: &str, recorded: &Value, made: &Value) -> Option<(String, Value, Value)> {
    let below = |name: &str| {
        if path.is_empty() {
            name.to_owned()
        } else {
            format!("{path}.{name}")
        }
    };
    match (recorded, made) {
        (Value::Object(a), Value::Object(b)) => {
            let names: std::collections::BTreeSet<&String> = a.keys().chain(b.keys()).collect();
            let at =
                |fields: &serde_json::Map<String, Value>, name: &String| fields.get(name).cloned().unwrap_or_default();
            // Another kind of event: the rest could only confuse.
            if path.is_empty() && a.get("type") != b.get("type") {
                return Some((String::new(), recorded.clone(), made.clone()));
            }
            names
                .into_iter()
                .find_map(|name| first_difference(&below(name), &at(a, name), &at(b, name)))
        }
        (Value::Array(a), Value::Array(b)) if a.len() == b.len() => a
            .iter()
            .zip(b)
            .enumerate()
            .find_map(|(n, (a, b))| first_difference(&below(&n.to_string()), a, b)),
        (a, b) if a == b => None,
        (a, b) => Some((path.to_owned(), a.clone(), b.clone())),
    }
}
