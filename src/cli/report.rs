//! A run for people and for scripts: the final JSON object, the table of steps, the outcome.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde_json::{Value, json};

use super::Exit;
use crate::api::{convert, proto};

/// One line of the table of steps.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    pub step: u32,
    /// What the run was doing: `REASONING`, `TOOL_CALLING`, `CHECKING`.
    pub state: &'static str,
    pub tool: String,
    /// `ok`, `error`, `truncated`, `refused`, `failed`.
    pub status: String,
    pub attempts: u32,
    pub seconds: f64,
    pub input_tokens: u64,
    pub output_tokens: u64,
    pub summary: String,
}

impl Step {
    fn to_json(&self) -> Value {
        json!({ "step": self.step, "state": self.state, "tool": self.tool, "status": self.status,
            "attempts": self.attempts, "seconds": self.seconds, "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens, "summary": self.summary })
    }
}

/// The steps that these events tell of, in order.
pub fn steps(events: &[proto::Event]) -> Vec<Step> {
    use proto::event::Kind;
    let mut tools: BTreeMap<u32, String> = BTreeMap::new();
    let mut steps: Vec<Step> = Vec::new();
    // By step, the attempt that was begun last.
    let mut open: BTreeMap<u32, u32> = BTreeMap::new();
    for event in events {
        match &event.kind {
            Some(Kind::ModelReplied(reply)) => {
                tools.extend(reply.calls.iter().map(|call| (call.step, call.tool.clone())));
                let used = reply.used.unwrap_or_default();
                steps.push(Step {
                    step: reply.step,
                    state: "REASONING",
                    tool: String::new(),
                    status: "ok".into(),
                    attempts: reply.attempt,
                    seconds: seconds(reply.duration),
                    input_tokens: used.input_tokens,
                    output_tokens: used.output_tokens,
                    summary: first_line(&reply.content),
                });
            }
            Some(Kind::ModelFailed(failed)) if failed.retry_in.is_none() => {
                let message = failed
                    .fault
                    .as_ref()
                    .map(|fault| fault.message.as_str())
                    .unwrap_or_default();
                steps.push(plain(
                    failed.step,
                    "REASONING",
                    "",
                    "failed",
                    failed.attempt,
                    0.0,
                    message,
                ));
            }
            Some(Kind::ToolRefused(refused)) => {
                let tool = tools.get(&refused.step).map_or("", String::as_str);
                steps.push(plain(
                    refused.step,
                    "TOOL_CALLING",
                    tool,
                    "refused",
                    1,
                    0.0,
                    &refused.reason,
                ));
            }
            Some(Kind::ToolFinished(done)) => {
                let tool = tools.get(&done.step).map_or("", String::as_str);
                let (status, summary) = result(done.result.as_ref());
                let took = seconds(done.duration);
                steps.push(plain(
                    done.step,
                    "TOOL_CALLING",
                    tool,
                    &status,
                    done.attempt,
                    took,
                    &summary,
                ));
            }
            Some(Kind::ApprovalDecided(decided)) if !decided.approved => {
                let tool = tools.get(&decided.step).map_or("", String::as_str);
                let why = format!("{}: {}", decided.by, decided.reason);
                steps.push(plain(decided.step, "WAITING_APPROVAL", tool, "denied", 1, 0.0, &why));
            }
            Some(Kind::ToolStarted(started)) => {
                // `finish` runs nothing: what comes of it is the check, or the end.
                match tools.get(&started.step).map(String::as_str) {
                    Some("finish") => steps.push(plain(started.step, "TOOL_CALLING", "finish", "ok", 1, 0.0, "")),
                    Some(_) | None => drop(open.insert(started.step, started.attempt)),
                }
            }
            Some(Kind::Ended(outcome)) if outcome.state() == proto::RunState::Finished => {
                if let Some(last) = steps.iter_mut().rev().find(|step| step.tool == "finish") {
                    last.summary = first_line(&outcome.summary);
                }
            }
            Some(Kind::CheckFinished(done)) => {
                let status = if done.passed { "ok" } else { "failed" };
                let (_, summary) = result(done.result.as_ref());
                steps.push(plain(
                    done.step,
                    "CHECKING",
                    "",
                    status,
                    done.attempt,
                    seconds(done.duration),
                    &summary,
                ));
            }
            _ => {}
        }
    }
    for (step, attempt) in open {
        if !steps.iter().any(|done| done.step == step) {
            let tool = tools.get(&step).map_or("", String::as_str);
            steps.push(plain(
                step,
                "WAITING_RESULT",
                tool,
                "cut off",
                attempt,
                0.0,
                "no result",
            ));
        }
    }
    steps.sort_by_key(|step| step.step);
    steps
}

fn plain(step: u32, state: &'static str, tool: &str, status: &str, attempts: u32, seconds: f64, summary: &str) -> Step {
    Step {
        step,
        state,
        tool: tool.to_owned(),
        status: status.to_owned(),
        attempts,
        seconds,
        input_tokens: 0,
        output_tokens: 0,
        summary: first_line(summary),
    }
}

/// Status and summary of a tool's result.
pub fn result(result: Option<&prost_types::Struct>) -> (String, String) {
    let text = |name: &str| match result
        .and_then(|result| result.fields.get(name))
        .and_then(|value| value.kind.as_ref())
    {
        Some(prost_types::value::Kind::StringValue(text)) => text.clone(),
        _ => String::new(),
    };
    (text("status"), text("summary"))
}

fn seconds(duration: Option<prost_types::Duration>) -> f64 {
    duration.map_or(0.0, |duration| {
        duration.seconds as f64 + f64::from(duration.nanos) / 1e9
    })
}

fn first_line(text: &str) -> String {
    clean(text.lines().next().unwrap_or_default())
        .chars()
        .take(100)
        .collect()
}

/// Text that a guest or a model made, safe for a terminal: no control characters but line end and tab, and nothing that
/// hides or reorders what is shown (bidirectional controls, zero-width characters, tags).
pub fn clean(text: &str) -> String {
    text.chars()
        .map(|c| {
            if is_treacherous(c) && c != '\n' && c != '\t' {
                '\u{fffd}'
            } else {
                c
            }
        })
        .collect()
}

/// The same on one line, for a question that somebody answers.
pub fn clean_line(text: &str) -> String {
    clean(text).replace(['\n', '\t'], "\u{2424}")
}

fn is_treacherous(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

/// The table for people.
pub fn table(steps: &[Step]) -> String {
    let mut out = String::from("step  state         tool           status     seconds     tokens  what\n");
    for step in steps {
        let tokens = match step.input_tokens.saturating_add(step.output_tokens) {
            0 => "-".to_owned(),
            tokens => tokens.to_string(),
        };
        let tool = if step.tool.is_empty() { "-" } else { &step.tool };
        let _ = writeln!(
            out,
            "{:>4}  {:<12}  {:<13}  {:<9}  {:>8.3}  {:>9}  {}",
            step.step,
            step.state,
            clean(tool),
            step.status,
            step.seconds,
            tokens,
            step.summary
        );
    }
    out
}

/// A run as JSON, the same from a server and embedded.
pub fn run(run: &proto::Run) -> Value {
    let used = run.used.unwrap_or_default();
    let time = |at: &Option<prost_types::Timestamp>| {
        at.as_ref()
            .map(|at| crate::clock::Timestamp(at.seconds * 1000 + i64::from(at.nanos) / 1_000_000).to_string())
    };
    let approvals: Vec<Value> = run
        .approvals
        .iter()
        .map(|ask| {
            json!({ "approval_id": ask.approval_id, "step": ask.step, "tool": ask.tool, "arguments": ask.arguments,
                "rule": ask.rule, "reason": ask.reason, "requested_at": time(&ask.requested_at) })
        })
        .collect();
    json!({
        "run_id": run.run_id, "task_id": run.task_id, "session_id": run.session_id, "trace_id": run.trace_id,
        "state": convert::state_name(run.state()), "seq": run.seq, "revision": run.revision, "tree": run.tree,
        "model": run.model, "scripted": run.model.starts_with("scripted:"),
        "policy": run.policy, "policy_hash": run.policy_hash, "labels": run.labels.clone().into_iter().collect::<BTreeMap<_, _>>(),
        "created_at": time(&run.created_at), "updated_at": time(&run.updated_at),
        "usage": { "steps": used.steps, "model_calls": used.model_calls, "tool_calls": used.tool_calls,
            "input_tokens": used.input_tokens, "cached_tokens": used.cached_tokens,
            "output_tokens": used.output_tokens, "cost_micros": used.cost_micros },
        "outcome": run.outcome.as_ref().map(outcome),
        "approvals": approvals,
    })
}

fn outcome(outcome: &proto::Outcome) -> Value {
    let fault = outcome.fault.as_ref().map(|fault| {
        json!({ "code": fault.code, "message": fault.message, "retryable": fault.retryable,
            "details": fault.details.clone().into_iter().collect::<BTreeMap<_, _>>() })
    });
    json!({ "state": convert::state_name(outcome.state()), "summary": outcome.summary,
        "result": outcome.result.as_ref().map(convert::value_from_proto), "fault": fault, "limit": outcome.limit,
        "by": outcome.by, "reason": outcome.reason })
}

/// The final object of `run`: the run, its steps and its diff.
pub fn whole(run_now: &proto::Run, steps: &[Step], diff: &[u8]) -> Value {
    let mut object = run(run_now);
    object["steps"] = steps.iter().map(Step::to_json).collect();
    object["diff"] = String::from_utf8_lossy(diff).into_owned().into();
    object
}

/// How it ended, in a few lines for people.
pub fn ending(run: &proto::Run) -> String {
    let mut out = format!("{} {}", run.run_id, convert::state_name(run.state()));
    if run.model.starts_with("scripted:") {
        let _ = write!(
            out,
            "  (model: {}, a recorded script, not a live model)",
            clean(&run.model)
        );
    } else {
        let _ = write!(out, "  (model: {})", clean(&run.model));
    }
    out.push('\n');
    if let Some(outcome) = &run.outcome {
        let fault = outcome
            .fault
            .as_ref()
            .map(|fault| format!("{}: {}", fault.code, fault.message));
        for line in [
            outcome.summary.clone(),
            fault.unwrap_or_default(),
            outcome.reason.clone(),
        ] {
            if !line.is_empty() {
                let _ = writeln!(out, "{}", clean(&line));
            }
        }
    }
    for ask in &run.approvals {
        let _ = writeln!(
            out,
            "waits for approval {} of step {}: {} {}\n  rule `{}`: {}\n  exuvia approve {run_id}   or   exuvia deny {run_id}",
            ask.approval_id,
            ask.step,
            clean_line(&ask.tool),
            clean_line(&ask.arguments),
            clean(&ask.rule),
            clean(&ask.reason),
            run_id = run.run_id,
        );
    }
    out
}

/// One message of a conversation: its text, then each call on a line of its own.
pub fn message(message: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut out = format!("[{}] {}", text(&message["role"]), clean(&text(&message["content"])));
    for call in message["tool_calls"].as_array().into_iter().flatten() {
        let (name, arguments) = (text(&call["function"]["name"]), text(&call["function"]["arguments"]));
        let _ = write!(out, "\n  call {} {}", clean_line(&name), clean_line(&arguments));
    }
    out
}

/// The exit code that stands for how a run is.
pub fn exit(run: &proto::Run) -> Exit {
    let fault = run.outcome.as_ref().and_then(|outcome| outcome.fault.as_ref());
    match run.state() {
        proto::RunState::Finished => Exit::Ok,
        proto::RunState::Failed if fault.is_some_and(|fault| fault.code == "provider_unreachable") => Exit::Unavailable,
        proto::RunState::Failed => Exit::Failed,
        proto::RunState::Exhausted => Exit::Exhausted,
        proto::RunState::Cancelled => Exit::Cancelled,
        proto::RunState::WaitingApproval | proto::RunState::WaitingInput | proto::RunState::Paused => Exit::Parked,
        proto::RunState::Unspecified
        | proto::RunState::Queued
        | proto::RunState::Reasoning
        | proto::RunState::ToolCalling
        | proto::RunState::WaitingResult => Exit::Ok,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_shows_its_calls_on_lines_of_their_own() {
        let call = |arguments: &str| json!({ "function": { "name": "shell", "arguments": arguments } });
        let said =
            json!({ "role": "assistant", "content": "look\u{1b}[2J", "tool_calls": [call("{\"a\":1}"), call("x\ny")] });
        assert_eq!(
            message(&said),
            "[assistant] look\u{fffd}[2J\n  call shell {\"a\":1}\n  call shell x\u{2424}y"
        );
        assert_eq!(message(&json!({ "role": "user", "content": "do it" })), "[user] do it");
    }

    #[test]
    fn each_way_to_end_has_its_exit_code() {
        let ended = |state: proto::RunState, code: &str| proto::Run {
            state: state.into(),
            outcome: Some(proto::Outcome {
                fault: Some(proto::Fault {
                    code: code.into(),
                    ..Default::default()
                }),
                ..Default::default()
            }),
            ..Default::default()
        };
        for (state, code, expected) in [
            (proto::RunState::Finished, "", Exit::Ok),
            (proto::RunState::Failed, "no_progress", Exit::Failed),
            (proto::RunState::Failed, "provider_unreachable", Exit::Unavailable),
            (proto::RunState::Exhausted, "total_time", Exit::Exhausted),
            (proto::RunState::Cancelled, "", Exit::Cancelled),
            (proto::RunState::WaitingApproval, "", Exit::Parked),
            (proto::RunState::Paused, "", Exit::Parked),
        ] {
            assert_eq!(exit(&ended(state, code)), expected, "{state:?} {code}");
        }
    }
}
