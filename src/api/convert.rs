//! Proto <-> domain. Total functions out, checked functions in.
#![warn(clippy::wildcard_enum_match_arm)]

use std::time::Duration;

use prost_types::value::Kind as Pb;
use prost_types::{ListValue, Struct, Timestamp as PbTimestamp, Value as PbValue};
use serde_json::Value;
use tonic::Status;

use super::proto;
use super::status::invalid;
use crate::clock::Timestamp;
use crate::error::Fault;
use crate::model::price::Price;
use crate::policy::BudgetOverrides;
use crate::run::event::{Call, Entry, Event, Limit, Outcome};
use crate::run::grounds::Mismatch;
use crate::run::service::{Submission, View};
use crate::run::state::Used;
use crate::sandbox::{BackendName, ImageRef};
use crate::task::Model;
use crate::workspace::{InvalidId, Revision};

pub(super) fn time(at: Timestamp) -> Option<PbTimestamp> {
    let (seconds, millis) = (at.0.div_euclid(1000), at.0.rem_euclid(1000));
    Some(PbTimestamp {
        seconds,
        nanos: millis as i32 * 1_000_000,
    })
}

pub(super) fn duration(value: Duration) -> Option<prost_types::Duration> {
    prost_types::Duration::try_from(value).ok()
}

/// Longest name of who asks for something, in bytes: it goes to the guest, and on the record.
const MAX_BY: usize = 256;

pub(super) fn person(by: String) -> Result<String, Status> {
    match by.len() <= MAX_BY {
        true => Ok(by),
        false => Err(invalid(format!("`by` is longer than {MAX_BY} bytes"))),
    }
}

/// Some 10,000 years: the most that the type is for (google/protobuf/duration.proto). In milliseconds it is a u64.
const LONGEST: Duration = Duration::from_secs(315_576_000_000);

pub(super) fn duration_in(value: Option<prost_types::Duration>, field: &str) -> Result<Option<Duration>, Status> {
    let refused = || {
        invalid(format!(
            "`{field}` is not a duration of zero to 315,576,000,000 seconds"
        ))
    };
    // The sign of both parts must be the same (google/protobuf/duration.proto), and the library lets this pass.
    if value.is_some_and(|value| !(0..1_000_000_000).contains(&value.nanos)) {
        return Err(refused());
    }
    let duration = value.map(Duration::try_from).transpose().map_err(|_| refused())?;
    match duration {
        Some(duration) if duration > LONGEST => Err(refused()),
        Some(_) | None => Ok(duration),
    }
}

/// JSON as `google.protobuf.Value`. Integers beyond 2^53 lose digits, as JSON numbers do there.
pub fn value_to_proto(value: &Value) -> PbValue {
    let kind = match value {
        Value::Null => Pb::NullValue(0),
        Value::Bool(flag) => Pb::BoolValue(*flag),
        Value::Number(number) => Pb::NumberValue(number.as_f64().unwrap_or_default()),
        Value::String(text) => Pb::StringValue(text.clone()),
        Value::Array(items) => Pb::ListValue(ListValue {
            values: items.iter().map(value_to_proto).collect(),
        }),
        Value::Object(fields) => Pb::StructValue(Struct {
            fields: fields
                .iter()
                .map(|(name, value)| (name.clone(), value_to_proto(value)))
                .collect(),
        }),
    };
    PbValue { kind: Some(kind) }
}

/// The reverse; whole numbers come back as integers.
pub fn value_from_proto(value: &PbValue) -> Value {
    match &value.kind {
        None | Some(Pb::NullValue(_)) => Value::Null,
        Some(Pb::BoolValue(flag)) => Value::Bool(*flag),
        Some(Pb::NumberValue(number)) if number.fract() == 0.0 && number.abs() < 9e15 => Value::from(*number as i64),
        Some(Pb::NumberValue(number)) => Value::from(*number),
        Some(Pb::StringValue(text)) => Value::String(text.clone()),
        Some(Pb::ListValue(list)) => list.values.iter().map(value_from_proto).collect(),
        Some(Pb::StructValue(object)) => struct_from_proto(object),
    }
}

/// A `google.protobuf.Struct` as JSON.
pub fn struct_from_proto(object: &Struct) -> Value {
    Value::Object(
        object
            .fields
            .iter()
            .map(|(name, value)| (name.clone(), value_from_proto(value)))
            .collect(),
    )
}

/// What serialises to a JSON object, as `google.protobuf.Struct`.
pub fn object(value: &impl serde::Serialize) -> Struct {
    let value = serde_json::to_value(value).expect("plain data serialises");
    match value_to_proto(&value).kind {
        Some(Pb::StructValue(object)) => object,
        Some(Pb::NullValue(_) | Pb::BoolValue(_) | Pb::NumberValue(_) | Pb::StringValue(_) | Pb::ListValue(_))
        | None => Struct::default(),
    }
}

/// The enum value of a public state's name.
pub fn state(name: &str) -> proto::RunState {
    proto::RunState::from_str_name(&format!("RUN_STATE_{name}")).unwrap_or_default()
}

/// The public name of an enum value: `FINISHED`.
pub fn state_name(state: proto::RunState) -> &'static str {
    state.as_str_name().trim_start_matches("RUN_STATE_")
}

/// The public name of a state as a request numbers it.
pub fn state_in(number: i32) -> Result<String, Status> {
    match proto::RunState::try_from(number) {
        Ok(proto::RunState::Unspecified) | Err(_) => Err(invalid(format!("`states`: {number} is no state of a run"))),
        Ok(state) => Ok(state_name(state).to_owned()),
    }
}

fn fault(fault: &Fault) -> proto::Fault {
    proto::Fault {
        code: fault.code.clone(),
        message: fault.message.clone(),
        retryable: fault.retryable,
        details: fault.details.clone().into_iter().collect(),
    }
}

fn limit(limit: Limit) -> &'static str {
    match limit {
        Limit::Steps => "steps",
        Limit::ModelCalls => "model_calls",
        Limit::TotalTime => "total_time",
        Limit::Tokens => "tokens",
        Limit::Cost => "cost",
    }
}

fn outcome(outcome: &Outcome) -> proto::Outcome {
    let base = proto::Outcome {
        state: state(outcome.public()).into(),
        ..Default::default()
    };
    match outcome {
        Outcome::Finished { summary, result } => proto::Outcome {
            summary: summary.clone(),
            result: result.as_ref().map(value_to_proto),
            ..base
        },
        Outcome::Failed { fault: why } => proto::Outcome {
            fault: Some(fault(why)),
            ..base
        },
        Outcome::Exhausted {
            limit: which,
            fault: why,
        } => proto::Outcome {
            fault: Some(fault(why)),
            limit: limit(*which).to_owned(),
            ..base
        },
        Outcome::Cancelled { by, reason } => proto::Outcome {
            by: by.clone(),
            reason: reason.clone(),
            ..base
        },
    }
}

fn used(used: &Used) -> proto::Used {
    proto::Used {
        steps: used.steps,
        model_calls: used.model_calls,
        tool_calls: used.tool_calls,
        input_tokens: used.tokens.input_tokens,
        cached_tokens: used.tokens.cached_tokens,
        output_tokens: used.tokens.output_tokens,
        cost_micros: used.cost_micros,
    }
}

/// A run as it stands.
pub fn run(view: &View) -> proto::Run {
    let (record, state_now) = (&view.record, &view.state);
    let approvals = state_now.open_approvals().into_iter().filter_map(|(step, id)| {
        let (asked, call) = (view.session.approval(id)?, view.session.call(step)?);
        Some(proto::Approval {
            approval_id: id.to_string(),
            step,
            tool: call.tool.clone(),
            arguments: call.arguments.clone(),
            rule: asked.decision.rule.clone(),
            reason: asked.decision.reason.clone(),
            requested_at: time(asked.at),
        })
    });
    proto::Run {
        state: state(state_now.public()).into(),
        seq: state_now.seq,
        tree: state_now.workspace.tree.to_string(),
        model: view.submitted.model.clone(),
        policy: view.submitted.policy_name.clone(),
        policy_hash: view.submitted.policy_hash.clone(),
        used: Some(used(&state_now.used)),
        outcome: view.outcome().map(outcome),
        approvals: approvals.collect(),
        deadline: state_now.deadline.and_then(time),
        step: state_now.next_step.saturating_sub(1),
        withheld: mismatches(&state_now.withheld),
        ..run_record(record)
    }
}

fn mismatches(which: &[Mismatch]) -> Vec<proto::Mismatch> {
    let one = |mismatch: &Mismatch| proto::Mismatch {
        what: mismatch.ground.name().to_owned(),
        recorded: mismatch.recorded.clone(),
        found: mismatch.found.clone(),
    };
    which.iter().map(one).collect()
}

/// A run as lists show it.
pub fn run_record(record: &crate::store::RunRecord) -> proto::Run {
    proto::Run {
        task_id: record.task.to_string(),
        run_id: record.run.to_string(),
        session_id: record.session.to_string(),
        trace_id: record.trace.to_string(),
        parent_run_id: record.parent.as_ref().map(ToString::to_string).unwrap_or_default(),
        parent_revision: record.base.map(|base| base.revision),
        state: state(&record.state).into(),
        seq: record.seq,
        revision: record.revision,
        created_at: time(record.created_at),
        updated_at: time(record.updated_at),
        labels: record.labels.clone().into_iter().collect(),
        ..Default::default()
    }
}

fn call(call: &Call) -> proto::ToolCall {
    let Call {
        step,
        id,
        tool,
        arguments,
        effect: _,
    } = call.clone();
    proto::ToolCall {
        step,
        id,
        tool,
        arguments,
    }
}

/// A journal entry as watchers see it.
pub fn event(run: &crate::ids::RunId, entry: &Entry, public: &str) -> proto::Event {
    proto::Event {
        seq: entry.seq,
        at: time(entry.at),
        run_id: run.to_string(),
        state: state(public).into(),
        kind: Some(kind(&entry.event)),
    }
}

fn kind(event: &Event) -> proto::event::Kind {
    use proto::event::Kind;
    match event.clone() {
        Event::Submitted(task) => Kind::Submitted(proto::Submitted {
            prompt: task.prompt,
            model: task.model,
            policy: task.policy_name,
            policy_hash: task.policy_hash,
            check: task.check.unwrap_or_default(),
            tree: task.workspace.tree.to_string(),
        }),
        Event::Claimed {
            worker,
            fence,
            stale,
            grounds: _,
        } => Kind::Claimed(proto::Claimed {
            worker,
            fence,
            stale: stale.and_then(duration),
        }),
        Event::Forked(fork) => Kind::Forked(proto::Forked {
            run_id: fork.run.to_string(),
            revision: fork.revision,
            by: fork.by,
            message: fork.message.unwrap_or_default(),
            policy: fork.policy_name,
            policy_hash: fork.policy_hash,
        }),
        Event::OutcomeUnknown {
            step,
            attempt,
            approval,
            decision,
            action_hash: _,
        } => Kind::OutcomeUnknown(proto::OutcomeUnknown {
            step,
            attempt,
            approval_id: approval.to_string(),
            reason: decision.reason,
        }),
        Event::NotDone { step, attempt } => Kind::NotDone(proto::NotDone { step, attempt }),
        Event::ModelReplied {
            step,
            attempt,
            reply,
            calls,
            duration: took,
            cost_micros,
        } => Kind::ModelReplied(proto::ModelReplied {
            step,
            attempt,
            content: reply.message.content.unwrap_or_default(),
            calls: calls.iter().map(call).collect(),
            used: Some(proto::Used {
                steps: 1,
                model_calls: 1,
                tool_calls: 0,
                input_tokens: reply.usage.input_tokens,
                cached_tokens: reply.usage.cached_tokens,
                output_tokens: reply.usage.output_tokens,
                cost_micros,
            }),
            duration: duration(took),
        }),
        Event::ModelFailed {
            step,
            attempt,
            fault: why,
            retry_in,
        } => Kind::ModelFailed(proto::ModelFailed {
            step,
            attempt,
            fault: Some(fault(&why)),
            retry_in: retry_in.and_then(duration),
        }),
        Event::ToolRefused { step, decision, result } => Kind::ToolRefused(proto::ToolRefused {
            step,
            rule: decision.rule,
            source: decision.source,
            reason: decision.reason,
            result: Some(object(&result)),
        }),
        Event::ApprovalRequested {
            step,
            approval,
            decision,
            action_hash: _,
        } => Kind::ApprovalRequested(proto::ApprovalRequested {
            step,
            approval_id: approval.to_string(),
            rule: decision.rule,
            reason: decision.reason,
        }),
        Event::ApprovalDecided {
            step,
            approval,
            approved,
            by,
            reason,
        } => Kind::ApprovalDecided(proto::ApprovalDecided {
            step,
            approval_id: approval.to_string(),
            approved,
            by,
            reason,
        }),
        Event::ToolStarted {
            step,
            attempt,
            key,
            decision: _,
        } => Kind::ToolStarted(proto::ToolStarted {
            step,
            attempt,
            idempotency_key: key,
        }),
        Event::ToolFinished {
            step,
            attempt,
            result,
            workspace,
            duration: took,
        } => Kind::ToolFinished(proto::ToolFinished {
            step,
            attempt,
            result: Some(object(&result)),
            tree: workspace.tree.to_string(),
            duration: duration(took),
        }),
        Event::ToolLost {
            step,
            attempt,
            fault: why,
            retry,
            blame: _,
            retry_in,
        } => Kind::ToolLost(proto::StepLost {
            step,
            attempt,
            fault: Some(fault(&why)),
            retry,
            retry_in: retry_in.and_then(duration),
        }),
        Event::CheckFinished {
            step,
            attempt,
            passed,
            result,
            workspace: _,
            duration: took,
        } => Kind::CheckFinished(proto::CheckFinished {
            step,
            attempt,
            passed,
            result: Some(object(&result)),
            duration: duration(took),
        }),
        Event::CheckLost {
            step,
            attempt,
            fault: why,
            retry,
            blame: _,
            retry_in,
        } => Kind::CheckLost(proto::StepLost {
            step,
            attempt,
            fault: Some(fault(&why)),
            retry,
            retry_in: retry_in.and_then(duration),
        }),
        Event::PauseRequested { by, reason, now } => Kind::PauseRequested(proto::Control {
            by,
            reason,
            now,
            accepted: Vec::new(),
        }),
        Event::Withheld { mismatches: which } => Kind::Withheld(proto::Withheld {
            mismatches: mismatches(&which),
        }),
        Event::Resumed { by, accepted } => Kind::Resumed(proto::Control {
            by,
            accepted: mismatches(&accepted),
            ..proto::Control::default()
        }),
        Event::CancelRequested { by, reason } => Kind::CancelRequested(proto::Control {
            by,
            reason,
            ..proto::Control::default()
        }),
        Event::DeadlineReached => Kind::DeadlineReached(proto::DeadlineReached {}),
        Event::Ended { outcome: how } => Kind::Ended(outcome(&how)),
    }
}

/// Credentials that a client may name; which others a host has is not for clients to choose.
const CLIENT_CREDENTIALS: [&str; 2] = ["env:EXUVIA_MODEL_KEY", "env:OPENAI_API_KEY"];

/// An image that a client may name, by what it says and never by what is on the server's disk: a name of the store that is
/// also a path there stays a name.
pub(super) fn image(field: &str, text: &str) -> Result<ImageRef, Status> {
    let stored = |name: &str| name.parse().ok().map(ImageRef::Stored);
    let named = match text.split_once(':') {
        None if text == "host" => Some(ImageRef::Host),
        Some(("docker", name)) if !name.is_empty() => Some(ImageRef::Docker(name.to_owned())),
        Some(("image", name)) => stored(name),
        Some(_) | None => stored(text),
    };
    named.ok_or_else(|| {
        invalid(format!(
            "`{field}` is `host`, `image:NAME` or `docker:NAME`; a path of the host can only stand in a policy"
        ))
    })
}

/// Which backend is meant; `field` is what the client wrote it in.
pub(super) fn backend(field: &str, name: &str) -> Result<BackendName, Status> {
    clap::ValueEnum::from_str(name, false)
        .map_err(|_| invalid(format!("`{field}`: `{name}` is no backend: it is `oci` or `docker`")))
}

/// What a client may not choose, since it would reach with the server's rights where the client's do not: files of the
/// host as image, policy or key, and an address of its own for the server's key.
fn check_reach(task: &proto::Task) -> Result<(), Status> {
    if task.policy.contains(['/', '.']) {
        return Err(invalid(
            "`task.policy` is the name of a policy that the server knows, not a path",
        ));
    }
    if !task.image.is_empty() {
        image("task.image", &task.image)?;
    }
    if let Some(proto::model::Kind::Openai(model)) = task.model.as_ref().and_then(|model| model.kind.as_ref())
        && !model.credential.is_empty()
    {
        if !CLIENT_CREDENTIALS.contains(&model.credential.as_str()) {
            let known = CLIENT_CREDENTIALS.join(" and ");
            return Err(invalid(format!(
                "`task.model.openai.credential`: clients may name {known}"
            )));
        }
        if !model.base_url.is_empty() {
            return Err(invalid(
                "the server's key goes only to the server's own endpoint: leave out `base_url`",
            ));
        }
    }
    Ok(())
}

/// A submitted task, checked for shape; what it means is the service's to check.
pub fn submission(task: proto::Task) -> Result<Submission, Status> {
    check_reach(&task)?;
    let some = |text: String| (!text.is_empty()).then_some(text);
    let model = match task.model.and_then(|model| model.kind) {
        Some(proto::model::Kind::Scripted(script)) => Model::Scripted {
            name: script.name,
            jsonl: script.jsonl,
        },
        Some(proto::model::Kind::Openai(model)) => Model::Openai {
            model: model.model,
            base_url: some(model.base_url),
            credential: some(model.credential),
            price: model
                .price
                .map(|proto::Price { input, cached, output }| Price { input, cached, output }),
        },
        None => return Err(invalid("`task.model` is missing")),
    };
    let parsed = |field: &str, error: String| invalid(format!("`task.{field}`: {error}"));
    Ok(Submission {
        prompt: task.prompt,
        model,
        policy: some(task.policy).unwrap_or_else(|| "default".into()),
        workspace: workspace(some(task.tree), some(task.times)).map_err(|error| parsed("tree", error.to_string()))?,
        empty_workspace: task.empty_workspace,
        check: some(task.check),
        budgets: budgets(task.budgets.unwrap_or_default())?,
        labels: task.labels.into_iter().collect(),
        image: some(task.image).map(|text| image("task.image", &text)).transpose()?,
        backend: some(task.backend)
            .map(|name| backend("task.backend", &name))
            .transpose()?,
        trace: some(task.trace_id)
            .map(|trace| trace.parse())
            .transpose()
            .map_err(|error: crate::ids::Invalid| parsed("trace_id", error.to_string()))?,
    })
}

/// A submission for a server; the workspace goes beside it.
pub fn submission_to_proto(submission: Submission) -> proto::Task {
    let kind = match submission.model {
        Model::Scripted { name, jsonl } => proto::model::Kind::Scripted(proto::ScriptedModel { name, jsonl }),
        Model::Openai {
            model,
            base_url,
            credential,
            price,
        } => proto::model::Kind::Openai(proto::OpenAiModel {
            model,
            base_url: base_url.unwrap_or_default(),
            credential: credential.unwrap_or_default(),
            price: price.map(|Price { input, cached, output }| proto::Price { input, cached, output }),
        }),
    };
    let budgets = submission.budgets;
    proto::Task {
        prompt: submission.prompt,
        model: Some(proto::Model { kind: Some(kind) }),
        policy: submission.policy,
        tree: submission
            .workspace
            .map(|workspace| workspace.tree.to_string())
            .unwrap_or_default(),
        times: submission
            .workspace
            .and_then(|workspace| workspace.times)
            .map(|times| times.to_string())
            .unwrap_or_default(),
        check: submission.check.unwrap_or_default(),
        budgets: Some(proto::Budgets {
            steps: budgets.steps,
            model_calls: budgets.model_calls,
            step_time: budgets.step_time.and_then(duration),
            total_time: budgets.total_time.and_then(duration),
            tokens: budgets.tokens,
            cost_micros: budgets.cost_micros,
            parallel_tools: budgets.parallel_tools,
        }),
        labels: submission.labels.into_iter().collect(),
        image: submission.image.map(|image| image.to_string()).unwrap_or_default(),
        backend: submission
            .backend
            .map(|backend| backend.to_string())
            .unwrap_or_default(),
        trace_id: submission.trace.map(|trace| trace.to_string()).unwrap_or_default(),
        empty_workspace: submission.empty_workspace,
    }
}

pub(super) fn workspace(tree: Option<String>, times: Option<String>) -> Result<Option<Revision>, InvalidId> {
    let times = times.map(|times| times.parse()).transpose()?;
    tree.map(|tree| {
        Ok(Revision {
            tree: tree.parse()?,
            times,
        })
    })
    .transpose()
}

fn budgets(budgets: proto::Budgets) -> Result<BudgetOverrides, Status> {
    Ok(BudgetOverrides {
        steps: budgets.steps,
        model_calls: budgets.model_calls,
        step_time: duration_in(budgets.step_time, "task.budgets.step_time")?,
        total_time: duration_in(budgets.total_time, "task.budgets.total_time")?,
        tokens: budgets.tokens,
        cost_micros: budgets.cost_micros,
        parallel_tools: budgets.parallel_tools,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_that_a_client_names_is_never_a_path_of_the_host() {
        // `usr/lib` is there, seen from the root directory; it is a name all the same.
        for (text, named) in [
            ("host", "host"),
            ("docker:x", "docker:x"),
            ("usr/lib", "image:usr/lib"),
            ("python:3", "image:python:3"),
        ] {
            assert_eq!(image("image", text).unwrap().to_string(), named);
        }
        for bad in [
            "rootfs:/",
            "tar:/etc/shadow",
            "/usr",
            "./x",
            "image:/usr",
            "docker:",
            "layout:x",
        ] {
            assert!(image("image", bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_backend_that_is_none_is_told_with_those_that_are() {
        assert_eq!(backend("backend", "docker").unwrap(), BackendName::Docker);
        let refused = backend("task.backend", "kata").unwrap_err();
        assert_eq!(
            (refused.code(), refused.message()),
            (
                tonic::Code::InvalidArgument,
                "`task.backend`: `kata` is no backend: it is `oci` or `docker`"
            )
        );
    }
}
