//! The conversation of a run: a projection of its journal, apart from the execution state (requirement E8).
//!
//! Every tool call is paired with its result, in call order, before the next answer (requirement E6); a call that an ended
//! run left open is paired with a result that says so.

use std::collections::BTreeMap;
use std::time::Duration;

use super::event::{Call, Entry, Event, Outcome};
use crate::clock::Timestamp;
use crate::error::Fault;
use crate::ids::ApprovalId;
use crate::model::{Assistant, Finish, Message, ToolCall};
use crate::policy::Decision;
use crate::tool::ToolResult;

/// The messages so far, by turn.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Session {
    opening: Vec<Message>,
    turns: Vec<Turn>,
    approvals: BTreeMap<ApprovalId, Asked>,
}

/// An approval as it was asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct Asked {
    pub step: u32,
    pub at: Timestamp,
    pub decision: Decision,
    pub action_hash: String,
    /// The attempt whose outcome is not known, where that is the question.
    pub attempt: Option<u32>,
}

#[derive(Debug, Clone, PartialEq)]
struct Turn {
    message: Assistant,
    calls: Vec<Call>,
    /// By step.
    results: BTreeMap<u32, ToolResult>,
    /// What is said to the model after the results, in order.
    remarks: Vec<String>,
}

impl Session {
    /// The conversation that these entries make.
    pub fn of<'a>(entries: impl IntoIterator<Item = &'a Entry>) -> Self {
        let mut session = Self::default();
        entries.into_iter().for_each(|entry| session.apply(entry));
        session
    }

    /// Folds in one entry; entries come in order.
    pub fn apply(&mut self, entry: &Entry) {
        match &entry.event {
            Event::Submitted(task) => self.opening = task.opening().to_vec(),
            Event::ModelReplied { reply, calls, .. } => {
                let text = reply.message.content.as_deref().unwrap_or_default().trim();
                let remark = match reply.finish {
                    Finish::Length if calls.is_empty() => Some(CUT),
                    Finish::Stop | Finish::ToolCalls if calls.is_empty() && text.is_empty() => Some(EMPTY),
                    Finish::Stop | Finish::ToolCalls | Finish::Length | Finish::Filtered => None,
                };
                self.turns.push(Turn {
                    message: reply.message.clone(),
                    calls: calls.clone(),
                    results: BTreeMap::new(),
                    remarks: remark.map(str::to_owned).into_iter().collect(),
                });
            }
            Event::ToolRefused { step, result, .. } | Event::ToolFinished { step, result, .. } => {
                self.result(*step, result.clone());
            }
            Event::ApprovalDecided {
                step,
                approval,
                approved: false,
                by,
                reason,
            } => {
                let was_cut_off = self
                    .approvals
                    .get(approval)
                    .is_some_and(|asked| asked.attempt.is_some());
                let result = if was_cut_off {
                    let what = format!("the call was cut off, and it is not known whether it happened; {by}: {reason}");
                    ToolResult::refused(&Fault::new("side_effect_unknown", what), UNKNOWN)
                } else {
                    let fault = Fault::new("approval_denied", format!("{by} denied this call: {reason}"));
                    ToolResult::refused(&fault, "do not repeat it; find another way or finish")
                };
                self.result(*step, result);
            }
            Event::OutcomeUnknown {
                step,
                attempt,
                approval,
                decision,
                action_hash,
            } => {
                let asked = Asked {
                    step: *step,
                    at: entry.at,
                    decision: decision.clone(),
                    action_hash: action_hash.clone(),
                    attempt: Some(*attempt),
                };
                self.approvals.insert(approval.clone(), asked);
            }
            Event::Claimed { stale: Some(away), .. } => self.remark(stale(*away)),
            Event::Forked(fork) => fork.message.iter().for_each(|message| self.remark(message.clone())),
            Event::ApprovalRequested {
                step,
                approval,
                decision,
                action_hash,
            } => {
                let (decision, action_hash) = (decision.clone(), action_hash.clone());
                let asked = Asked {
                    step: *step,
                    at: entry.at,
                    decision,
                    action_hash,
                    attempt: None,
                };
                self.approvals.insert(approval.clone(), asked);
            }
            Event::CheckFinished {
                passed: false, result, ..
            } => self.check_failed(result),
            Event::CheckFinished { passed: true, .. }
            | Event::ApprovalDecided { approved: true, .. }
            | Event::Claimed { stale: None, .. }
            | Event::ModelFailed { .. }
            | Event::ToolStarted { .. }
            | Event::NotDone { .. }
            | Event::ToolLost { .. }
            | Event::CheckLost { .. }
            | Event::PauseRequested { .. }
            | Event::Resumed { .. }
            | Event::Withheld { .. }
            | Event::CancelRequested { .. }
            | Event::DeadlineReached => {}
            Event::Ended {
                outcome: Outcome::Finished { summary, .. },
            } => self.finished(summary),
            Event::Ended {
                outcome: Outcome::Failed { .. } | Outcome::Exhausted { .. } | Outcome::Cancelled { .. },
            } => {}
        }
    }

    /// The call with that step.
    pub fn call(&self, step: u32) -> Option<&Call> {
        self.turns
            .iter()
            .rev()
            .flat_map(|turn| &turn.calls)
            .find(|call| call.step == step)
    }

    /// The approval with that id, open or not.
    pub fn approval(&self, id: &ApprovalId) -> Option<&Asked> {
        self.approvals.get(id)
    }

    /// The artifacts that results name.
    pub fn artifacts(&self) -> impl Iterator<Item = &str> {
        let results = self.turns.iter().flat_map(|turn| turn.results.values());
        results.filter_map(|result| result.data.get("artifact").and_then(serde_json::Value::as_str))
    }

    /// The whole conversation, each call paired with a result.
    pub fn messages(&self) -> Vec<Message> {
        let turns = self.turns.iter().flat_map(Turn::messages);
        self.opening.iter().cloned().chain(turns).collect()
    }

    /// Says something to the model, after everything that was said so far.
    fn remark(&mut self, text: String) {
        match self.turns.last_mut() {
            Some(turn) => turn.remarks.push(text),
            None => self.opening.push(Message::User { content: text }),
        }
    }

    fn result(&mut self, step: u32, result: ToolResult) {
        let turn = self
            .turns
            .iter_mut()
            .rev()
            .find(|turn| turn.calls.iter().any(|call| call.step == step));
        if let Some(turn) = turn {
            turn.results.insert(step, result);
        }
    }

    /// The answer to the `finish` that was accepted.
    fn finished(&mut self, summary: &str) {
        if let Some((turn, step)) = self.open_call() {
            turn.results
                .insert(step, ToolResult::ok(summary, serde_json::Value::Null));
        }
    }

    /// The first call of the last turn that has no result.
    fn open_call(&mut self) -> Option<(&mut Turn, u32)> {
        let turn = self.turns.last_mut()?;
        let step = turn
            .calls
            .iter()
            .map(|call| call.step)
            .find(|step| !turn.results.contains_key(step))?;
        Some((turn, step))
    }

    /// The answer to a `finish` whose completion check failed, or to a last word without a call.
    fn check_failed(&mut self, result: &ToolResult) {
        if let Some((turn, step)) = self.open_call() {
            turn.results.insert(step, result.clone());
        } else if let Some(turn) = self.turns.last_mut() {
            turn.remarks
                .push(format!("The completion check failed. {}", result.to_message()));
        }
    }
}

const EMPTY: &str = "Your answer was empty. Call a tool, or call `finish` when the task is done.";
const UNKNOWN: &str = "find out by looking whether it happened before you call it again";
const CUT: &str = "Your answer was cut at the output limit. Go on in smaller pieces.";

impl Turn {
    fn messages(&self) -> Vec<Message> {
        let results = self.calls.iter().map(|call| Message::Tool {
            tool_call_id: call.id.clone(),
            content: self
                .results
                .get(&call.step)
                .cloned()
                .unwrap_or_else(not_run)
                .to_message(),
        });
        let remarks = self.remarks.iter().map(|content| Message::User {
            content: content.clone(),
        });
        let tool_calls = self.calls.iter().map(|call| ToolCall {
            id: call.id.clone(),
            name: call.tool.clone(),
            arguments: call.arguments.clone(),
        });
        let said = Assistant {
            tool_calls: tool_calls.collect(),
            ..self.message.clone()
        };
        std::iter::once(Message::Assistant(said))
            .chain(results)
            .chain(remarks)
            .collect()
    }
}

/// What a model is told after a long stand-still (requirement E7).
fn stale(away: Duration) -> String {
    let minutes = away.as_secs() / 60;
    format!(
        "This task stood still for {} h {} min. What you know of the outside may be out of date: look again before you rely \
         on it.",
        minutes / 60,
        minutes % 60
    )
}

fn not_run() -> ToolResult {
    let fault = Fault::new("not_run", "the run ended, or moved on, before this call was made");
    ToolResult::refused(&fault, "call it again if it is still needed")
}
