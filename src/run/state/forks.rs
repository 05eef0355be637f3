//! How a child run begins in the state of its parent.
#![warn(clippy::wildcard_enum_match_arm)]

use super::{CallStatus, Hold, Phase, State, Used};
use crate::run::event::Forked;

impl State {
    /// A child starts from here, with budgets of its own and with nothing approved that has not run yet.
    pub(super) fn forked(&mut self, fork: &Forked) -> Option<()> {
        let then = match std::mem::replace(&mut self.phase, Phase::Queued) {
            Phase::Ending { .. } | Phase::Ended { .. } if fork.message.is_none() => return None,
            Phase::Calling { mut calls } if fork.message.is_none() => {
                let open = calls.iter_mut().filter(|call| call.status != CallStatus::Done);
                open.for_each(|call| call.status = CallStatus::Pending);
                Some(Phase::Calling { calls })
            }
            Phase::Checking { step, claim, .. } if fork.message.is_none() => Some(Phase::Checking {
                step,
                attempt: 1,
                claim,
            }),
            Phase::Queued if fork.message.is_none() => self.then.take().map(|then| *then),
            Phase::Queued
            | Phase::Reasoning { .. }
            | Phase::Calling { .. }
            | Phase::Checking { .. }
            | Phase::Ending { .. }
            | Phase::Ended { .. } => None,
        };
        self.then = then.map(Box::new);
        self.hold = Hold::Free;
        // The child's own first driver looks.
        self.grounds = None;
        self.withheld.clear();
        self.used = Used::nothing();
        self.budgets = fork.budgets.clone();
        self.deadline = None;
        self.parked_since = None;
        self.idle_replies = 0;
        self.failures = 0;
        self.own_failures = 0;
        Some(())
    }
}
