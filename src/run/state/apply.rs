//! What each entry does to a state. `None` means that it cannot happen there.
#![warn(clippy::wildcard_enum_match_arm)]

use super::{CallState, CallStatus, Hold, Phase, State};
use crate::clock::Timestamp;
use crate::error::Fault;
use crate::run::event::{Event, Limit, Outcome};
use crate::run::retry::Losses;
use crate::tool::Effect as ToolEffect;

impl State {
    /// `None` when the event cannot happen here.
    pub(super) fn apply(&mut self, event: &Event, at: Timestamp) -> Option<()> {
        match event {
            Event::Submitted(_) => None,
            Event::Claimed { grounds, .. } => {
                if let Some(grounds) = grounds {
                    self.grounds = Some(grounds.clone());
                }
                self.claimed(at)
            }
            Event::Withheld { mismatches } => {
                let may_be = self.grounds.is_some() && !mismatches.is_empty() && !self.is_ending();
                self.withheld.clone_from(mismatches);
                self.hold = Hold::Held;
                may_be.then_some(())
            }
            Event::Forked(fork) => self.forked(fork),
            Event::ModelReplied {
                step,
                attempt,
                reply,
                calls,
                cost_micros,
                ..
            } => {
                self.expect_reasoning(*step, *attempt)?;
                self.replied(*step, reply, calls, *cost_micros);
                self.settle()
            }
            Event::ModelFailed {
                step,
                attempt,
                fault,
                retry_in,
            } => {
                self.expect_reasoning(*step, *attempt)?;
                match retry_in {
                    Some(wait) => {
                        self.failures += 1;
                        let (step, attempt) = (*step, attempt + 1);
                        self.phase = Phase::Reasoning {
                            step,
                            attempt,
                            not_before: Some(at.plus(*wait)),
                        };
                    }
                    None => self.end(Outcome::Failed { fault: fault.clone() }),
                }
                self.settle()
            }
            Event::ToolRefused { step, .. } => {
                self.call(*step, CallState::is_new)?.status = CallStatus::Done;
                self.advance();
                self.settle()
            }
            Event::ApprovalRequested { step, approval, .. } => {
                let call = self.call(*step, |call| call.status == CallStatus::Pending)?;
                call.status = CallStatus::Awaiting {
                    approval: approval.clone(),
                };
                self.settle()
            }
            Event::ApprovalDecided {
                step,
                approval,
                approved,
                ..
            } => {
                let call = self.call(*step, |call| call.awaiting() == Some((*step, approval)))?;
                call.status = match (&call.status, approved) {
                    (_, false) => CallStatus::Done,
                    (CallStatus::Doubtful { attempt, .. }, true) => CallStatus::Running {
                        attempt: attempt + 1,
                        failures: 0,
                        own: 0,
                    },
                    (_, true) => CallStatus::Approved {
                        approval: approval.clone(),
                    },
                };
                self.advance();
                Some(())
            }
            Event::ToolStarted { step, attempt, .. } => {
                let call = self.call(*step, CallState::is_new)?;
                let claim = call.claim.clone();
                call.status = match claim {
                    // `finish` runs nothing: that it was let through is all of it.
                    Some(_) => CallStatus::Done,
                    None => CallStatus::Running {
                        attempt: *attempt,
                        failures: 0,
                        own: 0,
                    },
                };
                self.used.steps += 1;
                self.used.tool_calls += 1;
                if let Some(claim) = claim {
                    self.finish(claim);
                }
                (*attempt == 1).then_some(())
            }
            Event::ToolFinished {
                step,
                attempt,
                workspace,
                ..
            } => {
                self.call(*step, |call| call.attempt() == Some(*attempt))?.status = CallStatus::Done;
                self.workspace = *workspace;
                self.advance();
                self.settle()
            }
            Event::ToolLost {
                step,
                attempt,
                fault,
                retry,
                blame,
                ..
            } => {
                let losses = self.losses(*step).and(*blame);
                let call = self.call(*step, |call| call.is_running() && call.attempt() == Some(*attempt))?;
                if call.effect == ToolEffect::External {
                    call.status = CallStatus::Unsure { attempt: *attempt };
                    return self.settle();
                }
                call.status = CallStatus::Running {
                    attempt: attempt + 1,
                    failures: losses.all,
                    own: losses.own,
                };
                if !retry {
                    self.end(Outcome::Failed { fault: fault.clone() });
                }
                Some(())
            }
            Event::OutcomeUnknown {
                step,
                attempt,
                approval,
                ..
            } => {
                let unsure = CallStatus::Unsure { attempt: *attempt };
                self.call(*step, |call| call.status == unsure)?.status = CallStatus::Doubtful {
                    approval: approval.clone(),
                    attempt: *attempt,
                };
                self.settle()
            }
            Event::NotDone { step, attempt } => {
                let unsure = CallStatus::Unsure { attempt: *attempt };
                self.call(*step, |call| call.status == unsure)?.status = CallStatus::Running {
                    attempt: attempt + 1,
                    failures: 0,
                    own: 0,
                };
                Some(())
            }
            Event::CheckFinished {
                step,
                attempt,
                passed,
                workspace,
                ..
            } => {
                let claim = self.expect_checking(*step, *attempt)?;
                self.failures = 0;
                self.own_failures = 0;
                self.workspace = *workspace;
                match passed {
                    true => self.end(Outcome::Finished {
                        summary: claim.summary,
                        result: claim.result,
                    }),
                    false => self.reason_next(),
                }
                self.settle()
            }
            Event::CheckLost {
                step,
                attempt,
                fault,
                retry,
                blame,
                ..
            } => {
                let claim = self.expect_checking(*step, *attempt)?;
                Losses {
                    all: self.failures,
                    own: self.own_failures,
                } = self.losses(*step).and(*blame);
                self.phase = Phase::Checking {
                    step: *step,
                    attempt: attempt + 1,
                    claim,
                };
                if !retry {
                    self.end(Outcome::Failed { fault: fault.clone() });
                }
                Some(())
            }
            Event::PauseRequested { now, .. } => self.pause(*now),
            Event::Resumed { accepted, .. } => {
                if let Some(grounds) = &mut self.grounds {
                    accepted.iter().for_each(|mismatch| grounds.accept(mismatch));
                }
                self.withheld.clear();
                let was = std::mem::replace(&mut self.hold, Hold::Free);
                (was != Hold::Free && !self.is_terminal()).then_some(())
            }
            Event::CancelRequested { by, reason } => self.stop(Outcome::Cancelled {
                by: by.clone(),
                reason: reason.clone(),
            }),
            Event::DeadlineReached => {
                let fault = Fault::new("total_time", "the run used up its total time");
                self.stop(Outcome::Exhausted {
                    limit: Limit::TotalTime,
                    fault,
                })
            }
            Event::Ended { outcome } => match &self.phase {
                Phase::Ending { outcome: decided } if decided == outcome => {
                    self.phase = Phase::Ended {
                        outcome: outcome.clone(),
                    };
                    Some(())
                }
                Phase::Queued
                | Phase::Reasoning { .. }
                | Phase::Calling { .. }
                | Phase::Checking { .. }
                | Phase::Ending { .. }
                | Phase::Ended { .. } => None,
            },
        }
    }
}
