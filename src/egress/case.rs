//! One decision while it is being made: whatever becomes of it, it is recorded once, when it is dropped at the latest.

use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::json;
use tokio::time::Instant;

use super::ask::{Answer, Question};
use super::border::Inner;
use super::journal::{Channel, Decision, Outcome, shown};
use super::rules::{Action, RuleId, Verdict, builtin};

/// A denial, as the program hears it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Denial {
    pub rule: RuleId,
    pub reason: String,
    pub host: String,
    pub port: u16,
    pub how_to_ask: String,
}

/// Why something does not go on.
#[derive(Debug)]
pub(super) enum Stopped {
    Denied(Denial),
    /// Allowed, but the other side could not be had.
    Unreachable(String),
}

/// Bytes of one connection to the outside, and why it was cut.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub sent: AtomicU64,
    pub received: AtomicU64,
    pub cut: OnceLock<RuleId>,
    /// The credential whose placeholder was found in a body.
    pub leaked: OnceLock<String>,
}

pub(super) struct Case {
    pub decision: Decision,
    inner: Arc<Inner>,
    started: Instant,
    tally: Option<Arc<Tally>>,
    open: bool,
}

impl Case {
    pub fn new(inner: &Arc<Inner>, channel: Channel, host: &[u8], port: u16) -> Self {
        Self {
            decision: Decision::undecided(inner.next_id(), inner.clock.now(), channel, shown(host, 255), port),
            inner: Arc::clone(inner),
            started: Instant::now(),
            tally: None,
            open: true,
        }
    }

    pub fn deny(&mut self, rule: RuleId, reason: impl Into<String>) -> Denial {
        self.decision.outcome = Outcome::Denied;
        self.stop_at(rule, reason.into())
    }

    /// It was allowed, and something came up inside.
    pub fn cut(&mut self, rule: RuleId, reason: impl Into<String>) -> Denial {
        self.decision.outcome = Outcome::Cut;
        self.stop_at(rule, reason.into())
    }

    fn stop_at(&mut self, rule: RuleId, reason: String) -> Denial {
        self.decision.rule = rule.clone();
        self.decision.reason.clone_from(&reason);
        Denial {
            rule,
            reason,
            host: self.decision.host.clone(),
            port: self.decision.port,
            how_to_ask: self.inner.how_to_ask.clone(),
        }
    }

    pub fn fail(&mut self, reason: impl Into<String>) -> Stopped {
        self.decision.outcome = Outcome::Failed;
        self.decision.reason = reason.into();
        Stopped::Unreachable(self.decision.reason.clone())
    }

    /// Takes the bytes from there when it is over.
    pub fn count_by(&mut self, tally: &Arc<Tally>) {
        self.tally = Some(Arc::clone(tally));
    }

    /// Meets a verdict: an answer is waited for where one is needed.
    pub async fn meet(&mut self, verdict: Verdict) -> Result<(), Stopped> {
        self.decision.rule = verdict.rule.clone();
        match verdict.action {
            Action::Allow => Ok(()),
            Action::Deny => Err(Stopped::Denied(self.deny(verdict.rule, ""))),
            Action::Ask => match self.ask(&verdict.rule).await {
                Ok(()) => Ok(()),
                Err(reason) => Err(Stopped::Denied(self.deny(verdict.rule, reason))),
            },
        }
    }

    async fn ask(&mut self, rule: &RuleId) -> Result<(), &'static str> {
        let inner = Arc::clone(&self.inner);
        let granted = (rule.clone(), self.decision.host.clone(), self.decision.port);
        let known = || inner.granted.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if known().contains(&granted) {
            return Ok(());
        }
        let Ok(_place) = inner.asks.try_acquire() else {
            return Err("too many questions wait for a person already");
        };
        let question = Question {
            channel: self.decision.channel,
            host: self.decision.host.clone(),
            port: self.decision.port,
            method: self.decision.method.clone(),
            path: self.decision.path.clone(),
            rule: rule.clone(),
        };
        match tokio::time::timeout(inner.limits.ask_time, inner.asker.ask(question)).await {
            Ok(Answer::Once) => Ok(()),
            Ok(Answer::Always) => {
                known().insert(granted);
                Ok(())
            }
            Ok(Answer::No) => Err("a person was asked and said no"),
            Err(_) => Err("a person was asked and did not answer in time"),
        }
    }

    /// Writes the intent; from here on it counts as allowed.
    pub async fn intend(&mut self) -> Result<(), Stopped> {
        self.decision.outcome = Outcome::Allowed;
        let journal = Arc::clone(&self.inner.journal);
        match journal.intend(&self.decision).await {
            Ok(()) => Ok(()),
            Err(error) => {
                tracing::error!(error = %crate::error::chain(&error), "an egress decision could not be recorded");
                Err(Stopped::Denied(self.deny(builtin::JOURNAL, error.to_string())))
            }
        }
    }

    /// It turned out to be no decision: each request is one of its own.
    pub fn forget(mut self) {
        self.open = false;
    }
}

impl Drop for Case {
    fn drop(&mut self) {
        if !self.open {
            return;
        }
        if let Some(tally) = &self.tally {
            self.decision.sent = tally.sent.load(Ordering::Acquire);
            self.decision.received = tally.received.load(Ordering::Acquire);
            if let (Some(rule), Outcome::Allowed | Outcome::Failed) = (tally.cut.get(), self.decision.outcome) {
                (self.decision.rule, self.decision.outcome) = (rule.clone(), Outcome::Cut);
            }
        }
        self.decision.duration = self.started.elapsed();
        self.inner.journal.record(self.decision.clone());
    }
}

impl Denial {
    /// For programs and for the model that reads their output.
    pub fn body(&self) -> String {
        let reason = match self.reason.as_str() {
            "" => "no rule allows it",
            reason => reason,
        };
        let body = json!({
            "error": "egress_denied",
            "rule": self.rule,
            "reason": reason,
            "host": self.host,
            "port": self.port,
            "how_to_ask": self.how_to_ask,
        });
        format!("{body}\n")
    }
}
