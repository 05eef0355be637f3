//! What a run may use up, and what is left of it.
#![warn(clippy::wildcard_enum_match_arm)]

use std::time::Duration;

use super::{CallStatus, Phase, State, Used};
use crate::clock::Timestamp;
use crate::error::Fault;
use crate::model::Usage;
use crate::run::event::{Limit, Outcome};
use crate::run::retry::Losses;

impl Used {
    pub(super) fn nothing() -> Self {
        Self {
            steps: 0,
            model_calls: 0,
            tool_calls: 0,
            tokens: Usage::default(),
            cost_micros: Some(0),
        }
    }
}

impl State {
    /// How long a step that starts now may take: the shorter of its own limit and what is left of the run (requirement D2).
    pub fn step_limit(&self, now: Timestamp) -> Duration {
        let left = self.deadline.map_or(Duration::MAX, |deadline| deadline.since(now));
        self.budgets.step_time.min(left)
    }

    /// Failed attempts at the model call that is going on; decides whether there is another.
    pub fn failures(&self, step: u32) -> u32 {
        self.losses(step).all
    }

    /// Lost attempts of what is going on in that step; decides whether there is another.
    pub fn losses(&self, step: u32) -> Losses {
        match &self.phase {
            Phase::Reasoning { .. } | Phase::Checking { .. } => Losses {
                all: self.failures,
                own: self.own_failures,
            },
            Phase::Calling { calls } => {
                let status = calls.iter().find(|call| call.step == step).map(|call| &call.status);
                match status {
                    Some(CallStatus::Running { failures, own, .. }) => Losses {
                        all: *failures,
                        own: *own,
                    },
                    Some(
                        CallStatus::Pending
                        | CallStatus::Awaiting { .. }
                        | CallStatus::Approved { .. }
                        | CallStatus::Unsure { .. }
                        | CallStatus::Doubtful { .. }
                        | CallStatus::Done,
                    )
                    | None => Losses::default(),
                }
            }
            Phase::Queued | Phase::Ending { .. } | Phase::Ended { .. } => Losses::default(),
        }
    }

    pub(super) fn out_of_steps(&self) -> Option<Outcome> {
        let limit = self.budgets.steps.filter(|limit| self.used.steps >= *limit)?;
        Some(exhausted(Limit::Steps, "steps", limit.into()))
    }

    pub(super) fn overspent(&self) -> Option<Outcome> {
        let tokens = self.budgets.tokens.filter(|limit| self.used.tokens.total() > *limit);
        let cost = self
            .budgets
            .cost_micros
            .filter(|limit| self.used.cost_micros.is_none_or(|cost| cost > *limit));
        tokens
            .map(|limit| exhausted(Limit::Tokens, "tokens", limit))
            .or_else(|| cost.map(|limit| exhausted(Limit::Cost, "cost_micros", limit)))
    }

    /// Time in which the run waits for a person does not count.
    pub(super) fn keep_deadline(&mut self, at: Timestamp) {
        match (self.is_parked(), self.parked_since) {
            (true, None) => self.parked_since = Some(at),
            (false, Some(since)) => {
                self.deadline = self.deadline.map(|deadline| deadline.shifted(since, at));
                self.parked_since = None;
            }
            (true, Some(_)) | (false, None) => {}
        }
    }
}

pub(super) fn exhausted(limit: Limit, name: &str, value: u64) -> Outcome {
    let fault = Fault::new(
        "budget_exhausted",
        format!("the run reached its limit of {value} {name}"),
    );
    Outcome::Exhausted {
        limit,
        fault: fault.with("limit", name).with("value", value.to_string()),
    }
}
