//! What becomes of a tool call before anything runs: refused, asked about, or started. Pure but for the new id.

use super::Error;
use super::effects::Job;
use super::event::{Call, Event};
use super::session::Session;
use super::state::{self, State};
use crate::clock::Timestamp;
use crate::error::Fault;
use crate::ids::ApprovalId;
use crate::policy::{self, Decision, Request, Verdict};
use crate::tool::{self, ToolResult};

/// Who decides when nobody did in time.
pub const EXPIRY: &str = "expiry";

/// A person's decision, as it came in.
#[derive(Debug, Clone)]
pub struct Answer {
    /// `None` = the only open one.
    pub approval: Option<ApprovalId>,
    pub approved: bool,
    pub by: String,
    pub reason: String,
}

/// Asks the policy about a pending call.
pub fn decide(job: &Job, state: &State, session: &Session, step: u32) -> Result<Event, Error> {
    let call = find(session, step)?;
    if let Err(result) = job.registry.check(&call.tool, &call.arguments) {
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
        &job.policy,
        &Request {
            tool: &call.tool,
            arguments: &arguments,
        },
    );
    Ok(match decision.verdict {
        Verdict::Allow => started(job, step, decision),
        Verdict::Deny => Event::ToolRefused {
            step,
            result: denied(&decision),
            decision,
        },
        Verdict::Ask => Event::ApprovalRequested {
            step,
            approval: ApprovalId::random(),
            action_hash: action_hash(job, state, call),
            decision,
        },
    })
}

/// Starts an approved call, if it is still the one that was approved.
pub fn start(job: &Job, state: &State, session: &Session, step: u32, approval: &ApprovalId) -> Result<Event, Error> {
    let call = find(session, step)?;
    let asked = session
        .approval(approval)
        .ok_or_else(|| Error::NoApproval(approval.to_string()))?;
    if asked.action_hash == action_hash(job, state, call) {
        return Ok(started(job, step, asked.decision.clone()));
    }
    let fault = Fault::new("approval_stale", "what was approved is no longer what would run");
    let result = ToolResult::refused(&fault, "make the call again");
    Ok(Event::ToolRefused {
        step,
        decision: asked.decision.clone(),
        result,
    })
}

/// The entry that a decision makes; `None` when there is no such open approval.
pub fn answer(job: &Job, state: &State, session: &Session, answer: Answer, now: Timestamp) -> Option<Event> {
    let open = state.open_approvals();
    let (step, approval) = match &answer.approval {
        Some(wanted) => open.into_iter().find(|(_, approval)| *approval == wanted)?,
        None => open.first().filter(|_| open.len() == 1).copied()?,
    };
    let asked_at = session.approval(approval)?.at;
    let approval = approval.clone();
    if now > asked_at.plus(job.policy.approvals_expire()) {
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

fn started(job: &Job, step: u32, decision: Decision) -> Event {
    Event::ToolStarted {
        step,
        attempt: 1,
        key: job.key(step),
        decision,
    }
}

/// Binds a decision to one exact action: argument bytes, tool, workspace, policy, image.
fn action_hash(job: &Job, state: &State, call: &Call) -> String {
    let mut hasher = blake3::Hasher::new();
    let image = job.task.image.to_string();
    for part in [
        &call.tool,
        &call.arguments,
        &state.workspace.tree.to_string(),
        &job.task.policy_hash,
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
