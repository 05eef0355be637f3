//! Where the decisions of one sandbox's border go: to the record, and to whoever ran the command that was refused something.

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use serde::Serialize;

use crate::egress::journal::{Channel, Decision, Journal, Outcome, Unwritable};
use crate::ids::{RunId, SandboxId};

/// Refusals that are remembered for whoever asks; the record has them all.
const MOST: usize = 1000;

/// The steps that run in a sandbox now; clones share them.
#[derive(Debug, Clone, Default)]
pub struct Steps(Arc<Mutex<BTreeSet<u32>>>);

impl Steps {
    /// One begins; it has ended when this is dropped.
    pub fn enter(&self, step: u32) -> Entered {
        self.lock().insert(step);
        Entered {
            steps: self.clone(),
            step,
        }
    }

    pub(super) fn now(&self) -> BTreeSet<u32> {
        self.lock().clone()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeSet<u32>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A step that runs.
#[derive(Debug)]
pub struct Entered {
    steps: Steps,
    step: u32,
}

impl Drop for Entered {
    fn drop(&mut self) {
        self.steps.lock().remove(&self.step);
    }
}

/// Whom a border belongs to.
#[derive(Debug, Clone)]
pub struct Whose {
    pub sandbox: SandboxId,
    /// `None` for a sandbox that is used directly.
    pub run: Option<RunId>,
    pub steps: Steps,
}

impl Whose {
    /// Of a sandbox that is used directly.
    pub fn sandbox(id: &SandboxId) -> Self {
        Self {
            sandbox: id.clone(),
            run: None,
            steps: Steps::default(),
        }
    }
}

/// Something that was refused, or cut off.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Denied {
    pub rule: String,
    pub host: String,
    pub port: u16,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub method: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// How often, in a row or not.
    pub times: u32,
}

/// A moment in a log, to ask for what came after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mark(u64);

#[derive(Debug)]
pub(super) struct Log {
    record: Arc<dyn Journal>,
    refused: Mutex<Refused>,
}

#[derive(Debug, Default)]
struct Refused {
    last: VecDeque<Denied>,
    /// Of all that ever came.
    count: u64,
}

impl Log {
    pub fn new(record: Arc<dyn Journal>) -> Self {
        Self {
            record,
            refused: Mutex::default(),
        }
    }

    pub fn mark(&self) -> Mark {
        Mark(self.refused.lock().unwrap_or_else(PoisonError::into_inner).count)
    }

    /// What was refused since, each thing once, in the order in which it first came.
    pub fn since(&self, mark: Mark) -> Vec<Denied> {
        let refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        let fresh = usize::try_from(refused.count - mark.0).unwrap_or(usize::MAX);
        let skipped = refused.last.len().saturating_sub(fresh);
        let mut found: Vec<Denied> = Vec::new();
        for one in refused.last.iter().skip(skipped) {
            match found.iter_mut().find(|known| {
                Denied {
                    times: 1,
                    ..(**known).clone()
                } == *one
            }) {
                Some(known) => known.times += 1,
                None => found.push(one.clone()),
            }
        }
        found
    }

    fn note(&self, decision: &Decision) {
        match decision.outcome {
            Outcome::Denied | Outcome::Cut => {}
            Outcome::Allowed | Outcome::Failed => return,
        }
        let method = decision.method.clone().filter(|_| decision.channel != Channel::Dns);
        let denied = Denied {
            rule: decision.rule.to_string(),
            host: decision.host.clone(),
            port: decision.port,
            method,
            path: decision.path.clone(),
            reason: decision.reason.clone(),
            times: 1,
        };
        let mut refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        refused.count += 1;
        refused.last.push_back(denied);
        if refused.last.len() > MOST {
            refused.last.pop_front();
        }
    }
}

#[async_trait]
impl Journal for Log {
    async fn intend(&self, decision: &Decision) -> Result<(), Unwritable> {
        self.record.intend(decision).await
    }

    fn record(&self, decision: Decision) {
        self.note(&decision);
        self.record.record(decision);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Timestamp;
    use crate::egress::rules::RuleId;

    #[derive(Debug, Default)]
    struct Kept(Mutex<Vec<u64>>);

    impl Journal for Kept {
        fn record(&self, decision: Decision) {
            self.0.lock().unwrap().push(decision.id);
        }
    }

    fn decision(id: u64, host: &str, outcome: Outcome) -> Decision {
        Decision {
            outcome,
            rule: RuleId::from("r"),
            ..Decision::undecided(id, Timestamp(0), Channel::Connect, host.to_owned(), 443)
        }
    }

    #[test]
    fn what_was_refused_is_told_once_to_whom_it_concerns_and_all_of_it_goes_on_record() {
        let kept = Arc::new(Kept::default());
        let log = Log::new(kept.clone());
        log.record(decision(1, "before.example", Outcome::Denied));
        let mark = log.mark();
        log.record(decision(2, "a.example", Outcome::Denied));
        log.record(decision(3, "good.example", Outcome::Allowed));
        log.record(decision(4, "b.example", Outcome::Cut));
        log.record(decision(5, "a.example", Outcome::Denied));
        let told: Vec<(String, u32)> = log.since(mark).into_iter().map(|one| (one.host, one.times)).collect();
        assert_eq!(told, [("a.example".to_owned(), 2), ("b.example".to_owned(), 1)]);
        assert_eq!(log.since(log.mark()), []);
        assert_eq!(*kept.0.lock().unwrap(), [1, 2, 3, 4, 5]);
        for id in 0..2 * MOST as u64 {
            log.record(decision(id, "c.example", Outcome::Denied));
        }
        let all: u32 = log.since(mark).iter().map(|one| one.times).sum();
        assert_eq!(all as usize, MOST);
    }
}
