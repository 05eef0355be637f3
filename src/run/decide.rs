//! What becomes of a tool call before anything runs: numbered, then refused, asked about, or started. Pure but for the new
//! id, so that replay decides by the same code.

use std::collections::HashSet;

use super::Error;
use super::event::{Call, Event};
use super::grounds::{Ground, Mismatch};
use super::session::Session;
use super::state::{self, Effect, State};
use crate::clock::Timestamp;
use crate::error::Fault;
use crate::ids::{ApprovalId, TaskId};
use crate::model::{self, Message};
use crate::policy::{self, Decision, Policy, Request, Verdict};
use crate::store::Signal;
use crate::task::Task;
use crate::tool::registry::{Builtin, Registry};
use crate::tool::{self, ToolResult};

/// Who decides when nobody did in time.
pub const EXPIRY: &str = "expiry";

/// What one run's calls are decided by; fixed from its first entry to its last.
#[derive(Debug)]
pub struct Rules {
    /// Names the run's steps to the outside.
    pub id: TaskId,
    pub task: Task,
    pub policy: Policy,
    pub registry: Registry,
}

impl Rules {
    /// # Errors
    /// A stored request, or a policy snapshot, that this build cannot read.
    pub fn of(id: TaskId, spec: serde_json::Value) -> Result<Self, Error> {
        let task = Task::from_value(spec)?;
        Ok(Self {
            id,
            policy: Policy::from_snapshot(&task.policy)?,
            task,
            registry: Registry::all(),
        })
    }

    /// The idempotency key of a step (requirement B5): the same over all attempts.
    pub fn key(&self, step: u32) -> String {
        format!("{}/{step}", self.id)
    }

    /// Gives each call of a turn its step, its class and an id that no earlier call has.
    pub fn number(&self, step: u32, asked: Vec<model::ToolCall>, messages: &[Message]) -> Vec<Call> {
        let mut taken: HashSet<String> = messages
            .iter()
            .filter_map(|message| match message {
                Message::Tool { tool_call_id, .. } => Some(tool_call_id.clone()),
                Message::System { .. } | Message::User { .. } | Message::Assistant(_) => None,
            })
            .collect();
        let number = |(n, call): (usize, model::ToolCall)| {
            let step = step + 1 + n as u32;
            let made_up = (0..).map(|n| {
                if n == 0 {
                    format!("call_{step}")
                } else {
                    format!("call_{step}_{n}")
                }
            });
            let asked = std::iter::once(call.id).filter(|id| !id.is_empty());
            let id = asked
                .chain(made_up)
                .find(|id| taken.insert(id.clone()))
                .unwrap_or_default();
            Call {
                step,
                id,
                effect: self.effect(&call.name, &call.arguments),
                tool: call.name,
                arguments: call.arguments,
            }
        };
        asked.into_iter().enumerate().map(number).collect()
    }

    /// What a call can touch: what its tool can by itself, and what the policy says that it reaches besides. A tool that is not
    /// there touches nothing.
    pub fn effect(&self, tool: &str, arguments: &str) -> tool::Effect {
        let own = self.registry.find(tool).map_or(tool::Effect::ReadOnly, Builtin::effect);
        if own == tool::Effect::Control {
            return own;
        }
        // Arguments that are no JSON run nothing.
        let arguments = serde_json::from_str(arguments).unwrap_or_default();
        let request = Request {
            tool,
            arguments: &arguments,
        };
        match policy::outside(&self.policy, &request) {
            Some(policy::Outside::Idempotent) => tool::Effect::Idempotent,
            Some(policy::Outside::External) => tool::Effect::External,
            None => own,
        }
    }
}

/// A person's decision, as it came in.
#[derive(Debug, Clone)]
struct Answer {
    /// `None` = the only open one.
    approval: Option<ApprovalId>,
    approved: bool,
    by: String,
    reason: String,
}

/// The entry that a signal makes; `None` when it answers no open approval. Whether it can happen now the machine says.
pub fn heard(
    rules: &Rules,
    state: &State,
    session: &Session,
    signal: Signal,
    now: Timestamp,
    mismatches: &[Mismatch],
) -> Option<Event> {
    match signal {
        Signal::Pause { by, reason, now } => Some(Event::PauseRequested { by, reason, now }),
        Signal::Resume { by, accept } => Some(resume(by, &accept, mismatches)),
        Signal::Cancel { by, reason } => Some(Event::CancelRequested { by, reason }),
        Signal::Decide {
            approval,
            approved,
            by,
            reason,
        } => {
            let given = Answer {
                approval,
                approved,
                by,
                reason,
            };
            answer(rules, state, session, given, now)
        }
    }
}

/// It goes on if everything that is not what it was is accepted; else it stays where it is, and says why.
fn resume(by: String, accept: &[Ground], mismatches: &[Mismatch]) -> Event {
    let (accepted, open): (Vec<_>, Vec<_>) = mismatches
        .iter()
        .cloned()
        .partition(|mismatch| accept.contains(&mismatch.ground));
    match open.is_empty() {
        true => Event::Resumed { by, accepted },
        false => Event::Withheld { mismatches: open },
    }
}

/// The entry that an effect makes by itself; `None` for one that takes time.
///
/// # Errors
/// [`Error::NoCall`], which would be a defect of the machine.
pub fn at_once(rules: &Rules, state: &State, session: &Session, effect: &Effect) -> Result<Option<Event>, Error> {
    match effect {
        Effect::Decide { step } => decide(rules, state, session, *step).map(Some),
        Effect::Start { step, approval } => start(rules, state, session, *step, approval).map(Some),
        Effect::Probe { step, attempt } => unknown(rules, state, session, *step, *attempt).map(Some),
        Effect::End { outcome } => Ok(Some(Event::Ended {
            outcome: outcome.clone(),
        })),
        Effect::CallModel { .. } | Effect::RunTool { .. } | Effect::RunCheck { .. } => Ok(None),
    }
}

/// Asks the policy about a pending call.
pub fn decide(rules: &Rules, state: &State, session: &Session, step: u32) -> Result<Event, Error> {
    let call = find(session, step)?;
    if let Err(result) = rules.registry.check(&call.tool, &call.arguments) {
        let decision = match crate::tool::registry::Builtin::by_name(&call.tool) {
            Some(_) => not_a_call(call),
            None => no_such_tool(call),
        };
        return Ok(Event::ToolRefused {
            step,
            decision,
            result: *result,
        });
    }
    // What passed the check is a JSON object, or empty for one without fields.
    let arguments = serde_json::from_str(&call.arguments).unwrap_or_else(|_| serde_json::json!({}));
    if call.effect == tool::Effect::Control
        && arguments
            .get("result")
            .is_some_and(|result| state::depth(result) > state::RESULT_DEPTH)
    {
        let message = format!("`result` nests deeper than {} levels", state::RESULT_DEPTH);
        let result = ToolResult::refused(&Fault::new("invalid_arguments", message), "give a flatter result");
        return Ok(Event::ToolRefused {
            step,
            decision: not_a_call(call),
            result,
        });
    }
    let decision = policy::decide(
        &rules.policy,
        &Request {
            tool: &call.tool,
            arguments: &arguments,
        },
    );
    Ok(match decision.verdict {
        Verdict::Allow => started(rules, step, decision),
        Verdict::Deny => Event::ToolRefused {
            step,
            result: denied(&decision),
            decision,
        },
        Verdict::Ask => Event::ApprovalRequested {
            step,
            approval: ApprovalId::random(),
            action_hash: action_hash(rules, state, call),
            decision,
        },
    })
}

/// Starts an approved call, if it is still the one that was approved.
pub fn start(
    rules: &Rules,
    state: &State,
    session: &Session,
    step: u32,
    approval: &ApprovalId,
) -> Result<Event, Error> {
    let call = find(session, step)?;
    let asked = session
        .approval(approval)
        .ok_or_else(|| Error::NoApproval(approval.to_string()))?;
    if asked.action_hash == action_hash(rules, state, call) {
        return Ok(started(rules, step, asked.decision.clone()));
    }
    let fault = Fault::new("approval_stale", "what was approved is no longer what would run");
    let result = ToolResult::refused(&fault, "make the call again");
    Ok(Event::ToolRefused {
        step,
        decision: asked.decision.clone(),
        result,
    })
}

/// Asks a person about a call that was cut off (requirement D6). No tool that is built in touches the outside, so none has
/// a status check of its own that could be asked first.
pub fn unknown(rules: &Rules, state: &State, session: &Session, step: u32, attempt: u32) -> Result<Event, Error> {
    let call = find(session, step)?;
    let decision = Decision {
        verdict: Verdict::Ask,
        rule: "unknown_outcome".into(),
        source: "built in".into(),
        reason: format!(
            "attempt {attempt} at `{}` was cut off, and what it did outside is not known; say yes to call it again with \
             the key {}, no to leave it",
            call.tool,
            rules.key(step)
        ),
    };
    Ok(Event::OutcomeUnknown {
        step,
        attempt,
        approval: ApprovalId::random(),
        action_hash: action_hash(rules, state, call),
        decision,
    })
}

/// The entry that a decision makes; `None` when there is no such open approval.
fn answer(rules: &Rules, state: &State, session: &Session, answer: Answer, now: Timestamp) -> Option<Event> {
    let open = state.open_approvals();
    let (step, approval) = match &answer.approval {
        Some(wanted) => open.into_iter().find(|(_, approval)| *approval == wanted)?,
        None => open.first().filter(|_| open.len() == 1).copied()?,
    };
    let asked_at = session.approval(approval)?.at;
    let approval = approval.clone();
    if now > asked_at.plus(rules.policy.approvals_expire()) {
        let reason = format!("the approval had expired when {} answered", answer.by);
        return Some(Event::ApprovalDecided {
            step,
            approval,
            approved: false,
            by: EXPIRY.into(),
            reason,
        });
    }
    let Answer {
        approved, by, reason, ..
    } = answer;
    Some(Event::ApprovalDecided {
        step,
        approval,
        approved,
        by,
        reason,
    })
}

fn find(session: &Session, step: u32) -> Result<&Call, Error> {
    session.call(step).ok_or(Error::NoCall(step))
}

fn started(rules: &Rules, step: u32, decision: Decision) -> Event {
    Event::ToolStarted {
        step,
        attempt: 1,
        key: rules.key(step),
        decision,
    }
}

/// Binds a decision to one exact action: argument bytes, tool, workspace, policy, image.
fn action_hash(rules: &Rules, state: &State, call: &Call) -> String {
    let mut hasher = blake3::Hasher::new();
    let image = rules.task.image.to_string();
    for part in [
        &call.tool,
        &call.arguments,
        &state.workspace.tree.to_string(),
        &rules.task.policy_hash,
        &image,
    ] {
        hasher.update(&(part.len() as u64).to_be_bytes());
        hasher.update(part.as_bytes());
    }
    hasher.finalize().to_hex().to_string()
}

fn no_such_tool(call: &Call) -> Decision {
    Decision {
        verdict: Verdict::Deny,
        rule: "tools".into(),
        source: "built in".into(),
        reason: format!("there is no tool `{}`", crate::ids::shown(&call.tool)),
    }
}

fn not_a_call(call: &Call) -> Decision {
    Decision {
        verdict: Verdict::Deny,
        rule: "arguments".into(),
        source: "built in".into(),
        reason: format!("the arguments of `{}` do not fit its schema", call.tool),
    }
}

fn denied(decision: &Decision) -> ToolResult {
    let fault = Fault::new("denied", decision.reason.clone()).with("rule", &decision.rule);
    ToolResult::refused(&fault, "do not repeat it; find another way or finish")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use crate::policy::tools;
    use crate::tool::registry::Registry;

    /// Policies are written in their own list of tools; a tool or an argument that it lacks could not be ruled on (H6).
    #[test]
    fn the_tools_that_policies_know_are_the_tools_that_there_are() {
        let written: Vec<(String, BTreeSet<String>)> = tools::ALL
            .iter()
            .map(|tool| {
                (
                    tool.name.to_owned(),
                    tool.arguments.iter().map(|argument| argument.name.to_owned()).collect(),
                )
            })
            .collect();
        let mut known: Vec<(String, BTreeSet<String>)> = Registry::all()
            .definitions()
            .into_iter()
            .map(|tool| {
                let fields = tool.parameters["properties"]
                    .as_object()
                    .unwrap()
                    .keys()
                    .cloned()
                    .collect();
                (tool.name, fields)
            })
            .collect();
        let mut written = written;
        written.sort();
        known.sort();
        assert_eq!(written, known);
    }
}
