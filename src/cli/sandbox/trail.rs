//! What goes on the audit record, and when: an intent before the act, an end as soon as it is known.

use std::sync::Arc;

use serde_json::{Value, json};

use super::plan::{Plan, shown};
use crate::assembly::Parts;
use crate::audit::{Mirror, Record};
use crate::cli::Error;
use crate::clock::Clock;
use crate::ids::SandboxId;
use crate::sandbox::{self, Handle};
use crate::store::Store;

/// The record of one sandbox.
pub(super) struct Trail {
    store: Arc<dyn Store>,
    mirror: Arc<Mirror>,
    clock: Arc<dyn Clock>,
    sandbox: SandboxId,
    actor: String,
}

impl Trail {
    pub fn new(parts: &Parts, sandbox: &SandboxId) -> Self {
        Self {
            store: Arc::clone(&parts.store),
            mirror: Arc::clone(&parts.mirror),
            clock: Arc::clone(&parts.clock),
            sandbox: sandbox.clone(),
            actor: format!("user:{}", crate::cli::person()),
        }
    }

    /// The sandbox is up, and the command is about to start.
    ///
    /// # Errors
    /// Nothing was written: nothing may run.
    pub async fn starting(&self, plan: &Plan, handle: &Handle) -> Result<(), Error> {
        let policy = &plan.policy;
        let created = json!({ "backend": plan.backend, "image": plan.image, "isolation": policy.isolation(),
            "limits": policy.limits(), "mounts": plan.mounts, "policy": policy.name(), "policy_hash": policy.hash(),
            "first_uid": handle.identity.base });
        let mut started = command(plan);
        started["timeout_ms"] = plan.command.timeout.map(|timeout| timeout.as_millis() as u64).into();
        // Names alone: a value may be a secret.
        started["env"] = plan.command.env.keys().cloned().collect::<Vec<String>>().into();
        let records = vec![
            self.record("sandbox.created", "ok", created),
            self.record("exec.started", "ok", started),
        ];
        Ok(self.store.audit(records).await?)
    }

    pub async fn ended(&self, plan: &Plan, outcome: &str, mut details: Value) -> Result<(), Error> {
        if let (Value::Object(details), Value::Object(command)) = (&mut details, command(plan)) {
            details.extend(command);
        }
        let record = self.record("exec.ended", outcome, details);
        Ok(self.store.audit(vec![record]).await?)
    }

    /// The sandbox is gone, or could not be removed; the file of the record is brought up to it.
    pub async fn destroyed(&self, failure: Option<&sandbox::Error>) -> Result<(), Error> {
        let record = match failure {
            None => self.record("sandbox.destroyed", "ok", Value::Null),
            Some(error) => {
                let details = json!({ "reason": crate::error::chain(error) });
                self.record("sandbox.destroyed", "failed", details)
            }
        };
        self.store.audit(vec![record]).await?;
        self.mirror.catch_up(self.store.as_ref()).await?;
        Ok(())
    }

    fn record(&self, action: &str, outcome: &str, details: Value) -> Record {
        Record {
            at: self.clock.now(),
            actor: self.actor.clone(),
            action: action.to_owned(),
            outcome: outcome.to_owned(),
            ids: [("sandbox".to_owned(), self.sandbox.to_string())].into(),
            details,
        }
    }
}

fn command(plan: &Plan) -> Value {
    let argv: Vec<String> = plan.command.argv.iter().map(|word| shown(word)).collect();
    let cwd = plan.command.cwd.as_deref().map_or("/workspace".to_owned(), shown);
    json!({ "argv": argv, "cwd": cwd })
}
