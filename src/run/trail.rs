//! What an entry puts on the audit record. Pure: the records are committed together with the entry.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::event::{Entry, Event, Outcome};
use super::session::Session;
use crate::audit::Record;
use crate::policy::{Decision, Verdict};
use crate::store::RunRecord;

/// Longest argument text that goes on the record, in bytes; the journal has all of it.
const ARGUMENTS: usize = 4096;

/// The records of `entry`, in order.
pub fn records(run: &RunRecord, session: &Session, entry: &Entry) -> Vec<Record> {
    let maker = Maker { run, entry };
    let actor = format!("run:{}", run.run);
    match &entry.event {
        Event::Submitted(task) => {
            let details = json!({ "prompt": cut(&task.prompt), "model": task.model, "policy": task.policy_name,
                "policy_hash": task.policy_hash, "tree": task.workspace.tree, "check": task.check });
            vec![maker.record("client", "task.submitted", "ok", details)]
        }
        Event::Claimed {
            worker,
            fence,
            stale: _,
            grounds: _,
        } => {
            vec![maker.record(
                "server",
                "run.claimed",
                "ok",
                json!({ "worker": worker, "fence": fence }),
            )]
        }
        Event::ModelReplied {
            step,
            reply,
            calls,
            duration,
            ..
        } => {
            let details = json!({ "step": step, "model": reply.model, "calls": calls.len(), "usage": reply.usage,
                "duration_ms": duration.as_millis() as u64 });
            vec![maker.record(&actor, "model.replied", "ok", details)]
        }
        Event::ModelFailed {
            step, attempt, fault, ..
        } => {
            let details = json!({ "step": step, "attempt": attempt, "fault": fault });
            vec![maker.record(&actor, "model.replied", "failed", details)]
        }
        Event::ToolRefused { step, decision, .. } => vec![maker.decided(session, *step, decision)],
        Event::ApprovalRequested {
            step,
            approval,
            decision,
            action_hash,
        } => {
            let details = json!({ "step": step, "approval": approval, "action_hash": action_hash });
            vec![
                maker.decided(session, *step, decision),
                maker.record(&actor, "approval.requested", "ok", details),
            ]
        }
        Event::ApprovalDecided {
            step,
            approval,
            approved,
            by,
            reason,
        } => {
            let outcome = if *approved { "approved" } else { "denied" };
            let details = json!({ "step": step, "approval": approval, "reason": reason });
            vec![maker.record(&person(by), "approval.decided", outcome, details)]
        }
        Event::ToolStarted {
            step,
            attempt,
            key,
            decision,
        } => {
            let (tool, arguments) = maker.call(session, *step);
            let details = json!({ "step": step, "attempt": attempt, "key": key, "tool": tool, "arguments": arguments });
            vec![
                maker.decided(session, *step, decision),
                maker.record(&actor, "tool.started", "ok", details),
            ]
        }
        Event::ToolFinished {
            step,
            attempt,
            result,
            workspace,
            duration,
        } => {
            let (tool, _) = maker.call(session, *step);
            let details = json!({ "step": step, "attempt": attempt, "tool": tool, "status": result.status,
                "error": result.error.as_ref().map(|error| &error.r#type), "tree": workspace.tree,
                "duration_ms": duration.as_millis() as u64 });
            vec![maker.record(&actor, "tool.finished", "ok", details)]
        }
        Event::ToolLost {
            step,
            attempt,
            fault,
            retry,
            blame,
            ..
        }
        | Event::CheckLost {
            step,
            attempt,
            fault,
            retry,
            blame,
            ..
        } => {
            let details = json!({ "step": step, "attempt": attempt, "fault": fault, "retry": retry, "blame": blame });
            vec![maker.record(&actor, "step.lost", "failed", details)]
        }
        Event::CheckFinished {
            step,
            passed,
            workspace,
            duration,
            ..
        } => {
            let details = json!({ "step": step, "tree": workspace.tree, "duration_ms": duration.as_millis() as u64 });
            vec![maker.record(&actor, "check.finished", if *passed { "ok" } else { "failed" }, details)]
        }
        Event::PauseRequested { by, reason, now } => {
            let details = json!({ "reason": reason, "now": now });
            vec![maker.record(&person(by), "run.paused", "ok", details)]
        }
        Event::Forked(fork) => {
            let details = json!({ "parent": fork.run, "revision": fork.revision, "after": fork.after,
                "policy": fork.policy_name, "policy_hash": fork.policy_hash,
                "message": fork.message.as_deref().map(cut) });
            vec![maker.record(&person(&fork.by), "run.forked", "ok", details)]
        }
        Event::OutcomeUnknown {
            step,
            attempt,
            approval,
            decision,
            action_hash,
        } => {
            let details = json!({ "step": step, "attempt": attempt, "approval": approval, "action_hash": action_hash });
            vec![
                maker.decided(session, *step, decision),
                maker.record(&actor, "outcome.unknown", "ok", details),
            ]
        }
        Event::NotDone { step, attempt } => {
            let details = json!({ "step": step, "attempt": attempt });
            vec![maker.record(&actor, "outcome.not_done", "ok", details)]
        }
        Event::Withheld { mismatches } => {
            let details = json!({ "mismatches": mismatches });
            vec![maker.record("server", "run.withheld", "refused", details)]
        }
        Event::Resumed { by, accepted } => {
            let details = match accepted.is_empty() {
                true => Value::Null,
                false => json!({ "accepted": accepted }),
            };
            vec![maker.record(&person(by), "run.resumed", "ok", details)]
        }
        Event::CancelRequested { by, reason } => {
            vec![maker.record(&person(by), "run.cancelled", "ok", json!({ "reason": reason }))]
        }
        Event::DeadlineReached => vec![maker.record("server", "run.deadline", "ok", Value::Null)],
        Event::Ended { outcome } => {
            let details = match outcome {
                Outcome::Finished { summary, .. } => json!({ "summary": cut(summary) }),
                Outcome::Failed { fault } | Outcome::Exhausted { fault, .. } => json!({ "fault": fault }),
                Outcome::Cancelled { by, reason } => json!({ "by": by, "reason": reason }),
            };
            vec![maker.record(&actor, "run.ended", &outcome.public().to_lowercase(), details)]
        }
    }
}

struct Maker<'a> {
    run: &'a RunRecord,
    entry: &'a Entry,
}

impl Maker<'_> {
    fn record(&self, actor: &str, action: &str, outcome: &str, details: Value) -> Record {
        Record {
            at: self.entry.at,
            actor: actor.to_owned(),
            action: action.to_owned(),
            outcome: outcome.to_owned(),
            ids: ids(self.run),
            details,
        }
    }

    fn decided(&self, session: &Session, step: u32, decision: &Decision) -> Record {
        let (tool, arguments) = self.call(session, step);
        let outcome = match decision.verdict {
            Verdict::Allow => "allow",
            Verdict::Ask => "ask",
            Verdict::Deny => "deny",
        };
        let details = json!({ "step": step, "tool": tool, "arguments": arguments, "rule": decision.rule,
            "source": decision.source, "reason": decision.reason });
        self.record("policy", "policy.decided", outcome, details)
    }

    fn call<'a>(&self, session: &'a Session, step: u32) -> (&'a str, &'a str) {
        session
            .call(step)
            .map_or(("", ""), |call| (&call.tool, cut(&call.arguments)))
    }
}

/// The ids that every record of a run carries (requirement B1).
pub fn ids(run: &RunRecord) -> BTreeMap<String, String> {
    [
        ("task", run.task.to_string()),
        ("run", run.run.to_string()),
        ("session", run.session.to_string()),
        ("trace", run.trace.to_string()),
    ]
    .map(|(name, id)| (name.to_owned(), id))
    .into()
}

fn person(by: &str) -> String {
    if by == super::decide::EXPIRY {
        return "server".to_owned();
    }
    if by.is_empty() {
        "user:unknown".to_owned()
    } else {
        format!("user:{by}")
    }
}

fn cut(text: &str) -> &str {
    &text[..text.floor_char_boundary(ARGUMENTS)]
}
