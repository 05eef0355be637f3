//! One tool call of a turn, and which calls of a turn may go on at once.
#![warn(clippy::wildcard_enum_match_arm)]

use serde::Deserialize;
use serde_json::Value;

use super::{CallState, CallStatus, Claim, Effect, Phase, State};
use crate::ids::ApprovalId;
use crate::run::event::Call;
use crate::tool::Effect as ToolEffect;

impl State {
    /// The calls that may go on now: in call order, readers side by side up to the cap, anything else alone, and no more
    /// new ones than there are steps left.
    pub(super) fn window<'a>(&self, calls: &'a [CallState]) -> impl Iterator<Item = &'a CallState> + use<'a> {
        let open: Vec<&CallState> = calls.iter().filter(|call| call.status != CallStatus::Done).collect();
        let readers = open
            .iter()
            .take_while(|call| call.effect == ToolEffect::ReadOnly)
            .count();
        let side_by_side = readers.clamp(1, self.budgets.parallel_tools.max(1) as usize);
        let mut left = self
            .budgets
            .steps
            .map_or(u32::MAX, |limit| limit.saturating_sub(self.used.steps));
        open.into_iter().take(side_by_side).filter(move |call| {
            let is_new = call.is_new();
            let fits = !is_new || left > 0;
            left -= u32::from(is_new && fits);
            fits
        })
    }

    /// The call with that step, if it may go on now and `wanted` holds for it.
    pub(super) fn call(&mut self, step: u32, wanted: impl Fn(&CallState) -> bool) -> Option<&mut CallState> {
        let Phase::Calling { calls } = &self.phase else {
            return None;
        };
        let index = calls.iter().position(|call| call.step == step)?;
        let allowed = self.window(calls).any(|call| call.step == step && wanted(call));
        let Phase::Calling { calls } = &mut self.phase else {
            return None;
        };
        calls.get_mut(index).filter(|_| allowed)
    }
}

impl CallState {
    pub(super) fn due(&self) -> Option<Effect> {
        let step = self.step;
        match &self.status {
            CallStatus::Pending => Some(Effect::Decide { step }),
            CallStatus::Approved { approval } => Some(Effect::Start {
                step,
                approval: approval.clone(),
            }),
            CallStatus::Running { attempt, .. } => Some(Effect::RunTool {
                step,
                attempt: *attempt,
            }),
            CallStatus::Unsure { attempt } => Some(Effect::Probe {
                step,
                attempt: *attempt,
            }),
            CallStatus::Awaiting { .. } | CallStatus::Doubtful { .. } | CallStatus::Done => None,
        }
    }

    pub(super) fn new(call: &Call) -> Self {
        let claim = (call.effect == ToolEffect::Control)
            .then(|| Claim::parse(&call.arguments))
            .flatten();
        Self {
            step: call.step,
            effect: call.effect,
            claim,
            status: CallStatus::Pending,
        }
    }

    pub(super) fn is_running(&self) -> bool {
        matches!(self.status, CallStatus::Running { .. })
    }

    /// Whether it is still to be begun.
    pub(super) fn is_new(&self) -> bool {
        matches!(self.status, CallStatus::Pending | CallStatus::Approved { .. })
    }

    pub(super) fn attempt(&self) -> Option<u32> {
        match &self.status {
            CallStatus::Running { attempt, .. } | CallStatus::Unsure { attempt } => Some(*attempt),
            CallStatus::Pending
            | CallStatus::Awaiting { .. }
            | CallStatus::Approved { .. }
            | CallStatus::Doubtful { .. }
            | CallStatus::Done => None,
        }
    }

    pub(super) fn awaiting(&self) -> Option<(u32, &ApprovalId)> {
        match &self.status {
            CallStatus::Awaiting { approval } | CallStatus::Doubtful { approval, .. } => Some((self.step, approval)),
            CallStatus::Pending
            | CallStatus::Approved { .. }
            | CallStatus::Running { .. }
            | CallStatus::Unsure { .. }
            | CallStatus::Done => None,
        }
    }
}

impl Claim {
    /// `finish {summary, result?}`; `None` when the arguments are not that.
    pub(super) fn parse(arguments: &str) -> Option<Self> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Arguments {
            summary: String,
            #[serde(default)]
            result: Option<Value>,
        }
        let Arguments { summary, result } = serde_json::from_str(arguments).ok()?;
        if result.as_ref().is_some_and(|result| depth(result) > RESULT_DEPTH) {
            return None;
        }
        Some(Self { summary, result })
    }
}

/// How deep the result of a `finish` may nest. Readers of journals and of protobuf have limits of their own, and what is
/// stored must be readable by all of them.
pub const RESULT_DEPTH: u32 = 32;

/// How deep a value nests; a plain one is 0.
pub fn depth(value: &Value) -> u32 {
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => 0,
        Value::Array(items) => 1 + items.iter().map(depth).max().unwrap_or(0),
        Value::Object(fields) => 1 + fields.values().map(depth).max().unwrap_or(0),
    }
}
