//! The moves that entries are made of: a claim, an answer, the end of a turn, a pause, an end.
#![warn(clippy::wildcard_enum_match_arm)]

use super::budgets::exhausted;
use super::{CallState, CallStatus, Claim, Hold, IDLE_REPLIES, Phase, State};
use crate::clock::Timestamp;
use crate::error::Fault;
use crate::model::{Finish, Reply};
use crate::run::event::{Call, Limit, Outcome};
use crate::tool::Effect as ToolEffect;

impl State {
    pub(super) fn claimed(&mut self, at: Timestamp) -> Option<()> {
        if let (Some(deadline), None) = (self.deadline, self.parked_since) {
            // An outage costs nobody anything. How long the step that it cut off had worked is not known: no more than a
            // step may take, so that is not given back.
            let gap = at.since(self.at).saturating_sub(self.budgets.step_time);
            // Nor does a clock that was set back meanwhile give anybody anything.
            let deadline = if at < self.at {
                deadline.shifted(self.at, at)
            } else {
                deadline
            };
            self.deadline = Some(deadline.plus(gap));
        }
        match &mut self.phase {
            Phase::Queued => {
                self.deadline = Some(at.plus(self.budgets.total_time));
                match self.then.take() {
                    Some(phase) => self.phase = *phase,
                    None => self.reason_next(),
                }
            }
            Phase::Reasoning {
                attempt, not_before, ..
            } => {
                *attempt += 1;
                // A wait from before the clock was set back could last for as long as it was set back.
                *not_before = not_before.filter(|_| at >= self.at);
            }
            Phase::Checking { attempt, .. } => *attempt += 1,
            Phase::Calling { calls } => {
                for call in calls {
                    let CallStatus::Running { attempt, .. } = &mut call.status else {
                        continue;
                    };
                    match call.effect {
                        // Nobody saw how it ended, and twice is not the same as once.
                        ToolEffect::External => call.status = CallStatus::Unsure { attempt: *attempt },
                        ToolEffect::ReadOnly | ToolEffect::Workspace | ToolEffect::Idempotent | ToolEffect::Control => {
                            *attempt += 1
                        }
                    }
                }
            }
            Phase::Ending { .. } => {}
            Phase::Ended { .. } => return None,
        }
        Some(())
    }

    pub(super) fn replied(&mut self, step: u32, reply: &Reply, calls: &[Call], cost_micros: Option<u64>) {
        self.failures = 0;
        self.own_failures = 0;
        self.used.steps += 1;
        self.used.model_calls += 1;
        self.used.tokens = self.used.tokens.plus(reply.usage);
        self.used.cost_micros = self
            .used
            .cost_micros
            .zip(cost_micros)
            .map(|(sum, cost)| sum.saturating_add(cost));
        self.next_step = step + 1 + calls.len() as u32;
        if let Some(spent) = self.overspent() {
            return self.end(spent);
        }
        let text = reply.message.content.as_deref().unwrap_or_default().trim();
        match reply.finish {
            Finish::Filtered => self.end(Outcome::Failed {
                fault: Fault::new("provider_filtered", "the provider withheld the answer"),
            }),
            _ if !calls.is_empty() => {
                self.idle_replies = 0;
                self.phase = Phase::Calling {
                    calls: calls.iter().map(CallState::new).collect(),
                };
                self.advance();
            }
            Finish::Stop | Finish::ToolCalls if !text.is_empty() => {
                self.idle_replies = 0;
                self.finish(Claim {
                    summary: text.to_owned(),
                    result: None,
                });
            }
            Finish::Stop | Finish::ToolCalls | Finish::Length => {
                self.idle_replies += 1;
                match self.idle_replies < IDLE_REPLIES {
                    true => self.reason_next(),
                    false => self.end(Outcome::Failed {
                        fault: Fault::new(
                            "no_progress",
                            format!("the model gave {IDLE_REPLIES} empty answers in a row"),
                        ),
                    }),
                }
            }
        }
    }

    /// Moves a turn on: to the next model call, or into a limit.
    pub(super) fn advance(&mut self) {
        let Phase::Calling { calls } = &self.phase else { return };
        let waits_for_nobody = !calls.iter().any(|call| call.is_running() || call.awaiting().is_some());
        match calls.iter().find(|call| call.status != CallStatus::Done) {
            None => self.reason_next(),
            Some(call) if call.is_new() && waits_for_nobody => {
                if let Some(outcome) = self.out_of_steps() {
                    self.end(outcome);
                }
            }
            Some(_) => {}
        }
    }

    pub(super) fn finish(&mut self, claim: Claim) {
        if self.check.is_some() {
            self.phase = Phase::Checking {
                step: self.next_step,
                attempt: 1,
                claim,
            };
            self.next_step += 1;
        } else {
            self.end(Outcome::Finished {
                summary: claim.summary,
                result: claim.result,
            });
        }
    }

    pub(super) fn reason_next(&mut self) {
        let model_calls = self.budgets.model_calls.filter(|limit| self.used.model_calls >= *limit);
        let spent = model_calls
            .map(|limit| exhausted(Limit::ModelCalls, "model_calls", limit.into()))
            .or_else(|| self.out_of_steps());
        match spent {
            Some(outcome) => self.end(outcome),
            None => {
                self.phase = Phase::Reasoning {
                    step: self.next_step,
                    attempt: 1,
                    not_before: None,
                }
            }
        }
    }

    pub(super) fn end(&mut self, outcome: Outcome) {
        self.phase = Phase::Ending { outcome };
    }

    /// Ends a run from outside; whatever is in flight is dropped. Idempotent once the run is ending.
    pub(super) fn stop(&mut self, outcome: Outcome) -> Option<()> {
        match &self.phase {
            Phase::Queued | Phase::Reasoning { .. } | Phase::Calling { .. } | Phase::Checking { .. } => {
                self.end(outcome);
                Some(())
            }
            Phase::Ending { .. } => Some(()),
            Phase::Ended { .. } => None,
        }
    }

    pub(super) fn pause(&mut self, now: bool) -> Option<()> {
        let still = match &self.phase {
            Phase::Queued => true,
            Phase::Calling { calls } => !calls.iter().any(CallState::is_running),
            Phase::Reasoning { .. } | Phase::Checking { .. } => false,
            Phase::Ending { .. } => return Some(()),
            Phase::Ended { .. } => return None,
        };
        if self.hold == Hold::Free {
            self.hold = if still { Hold::Held } else { Hold::Asked };
        }
        if now {
            self.hold = Hold::Held;
        }
        Some(())
    }

    /// An outcome came in: a pause that was asked for takes hold where nothing else runs.
    pub(super) fn settle(&mut self) -> Option<()> {
        let running = match &self.phase {
            Phase::Calling { calls } => calls.iter().any(CallState::is_running),
            Phase::Queued | Phase::Reasoning { .. } | Phase::Checking { .. } => false,
            Phase::Ending { .. } | Phase::Ended { .. } => true,
        };
        if self.hold == Hold::Asked && !running {
            self.hold = Hold::Held;
        }
        Some(())
    }

    pub(super) fn expect_reasoning(&self, step: u32, attempt: u32) -> Option<()> {
        match &self.phase {
            Phase::Reasoning {
                step: s, attempt: a, ..
            } if (*s, *a) == (step, attempt) => Some(()),
            Phase::Queued
            | Phase::Reasoning { .. }
            | Phase::Calling { .. }
            | Phase::Checking { .. }
            | Phase::Ending { .. }
            | Phase::Ended { .. } => None,
        }
    }

    pub(super) fn expect_checking(&self, step: u32, attempt: u32) -> Option<Claim> {
        match &self.phase {
            Phase::Checking {
                step: s,
                attempt: a,
                claim,
            } if (*s, *a) == (step, attempt) => Some(claim.clone()),
            Phase::Queued
            | Phase::Reasoning { .. }
            | Phase::Calling { .. }
            | Phase::Checking { .. }
            | Phase::Ending { .. }
            | Phase::Ended { .. } => None,
        }
    }
}
