//! Child runs from a checkpoint of another run (requirement E18).
//!
//! A fork is a task of its own, so that its steps have idempotency keys of their own: what the parent did outside was not
//! done for the child. It reads what lies before it from its parent (`store::Base`), so it costs the same whatever that is.
//! Nothing that the parent was allowed carries over: the policy is read anew, and calls that waited are decided anew.

use super::event::{Entry, Event, FORMAT_VERSION, Forked};
use super::{Error, Service, commit, state};
use crate::policy::Policies;
use crate::store::{Base, Created, RunRecord};
use crate::task::Task;

/// What a fork is to be.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Fork {
    /// `None` = the newest.
    pub revision: Option<u64>,
    /// For the model. Needed where the parent had ended.
    pub message: Option<String>,
    pub by: String,
    /// Take the policy as it is now, although it is not what the parent had.
    pub accept_policy: bool,
}

impl Service {
    /// Begins a child run and drives it.
    ///
    /// # Errors
    /// [`Error::PolicyChanged`]; a workspace that is no longer here; a parent that had ended, and no message.
    pub async fn fork(&self, id: &str, fork: Fork) -> Result<RunRecord, Error> {
        let child = self.begin_fork(id, fork).await?;
        self.keep_record().await;
        self.drive(&child.run);
        Ok(child)
    }

    pub(super) async fn begin_fork(&self, id: &str, fork: Fork) -> Result<RunRecord, Error> {
        let parent = self.find(id).await?;
        let store = &self.shop().store;
        let checkpoint = store.checkpoint(&parent.run, fork.revision).await?;
        let before = state::of_checkpoint(&parent.run, &checkpoint)?;
        self.require(before.workspace).await?;
        if fork.message.as_ref().is_some_and(|message| message.trim().is_empty()) {
            return Err(Error::Invalid("the message is empty".into()));
        }
        let task = self.authorise(&parent, &fork).await?;
        let at = self.shop().clock.now();
        let first = Entry {
            format_version: FORMAT_VERSION,
            seq: checkpoint.seq + 1,
            at,
            event: Event::Forked(Forked {
                run: parent.run.clone(),
                after: checkpoint.seq,
                revision: checkpoint.revision,
                by: fork.by,
                message: fork.message,
                policy_name: task.policy_name.clone(),
                policy_hash: task.policy_hash.clone(),
                budgets: task.budgets.clone(),
            }),
        };
        let Ok((next, _)) = state::step(&before, &first) else {
            return Err(Error::Invalid(format!(
                "run `{}` had ended at revision {}: a fork from there needs a message that says what to do",
                parent.run, checkpoint.revision
            )));
        };
        let base = Base {
            seq: checkpoint.seq,
            revision: checkpoint.revision,
        };
        let new = commit::beginning(
            &task,
            first,
            &next,
            parent.trace.clone(),
            Some((parent.run.clone(), base)),
        );
        match store.create(new).await? {
            Created::New(record) | Created::Known(record) => Ok(record),
        }
    }

    /// The parent's request under the policy as it is now.
    async fn authorise(&self, parent: &RunRecord, fork: &Fork) -> Result<Task, Error> {
        let task = Task::from_value(self.shop().store.spec(&parent.task).await?)?;
        let policy = Policies::load(&task.policy_name, self.data_dir())?;
        if policy.hash() == task.policy_hash {
            return Ok(task);
        }
        if !fork.accept_policy {
            return Err(Error::PolicyChanged {
                run: parent.run.clone(),
                name: task.policy_name,
                recorded: task.policy_hash,
                found: policy.hash().to_owned(),
            });
        }
        self.shop()
            .benches
            .choose(Some(task.backend), &policy, &task.image)
            .await?;
        Ok(Task {
            policy_hash: policy.hash().to_owned(),
            policy: policy.snapshot(),
            budgets: policy.budgets().clone(),
            ..task
        })
    }
}
