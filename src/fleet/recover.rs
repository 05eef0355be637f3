//! How a server goes on with the sandboxes of the one before it: each is taken over, or removed.

use std::sync::Arc;

use futures::StreamExt;
use serde_json::json;

use super::create::{driver, lacks};
use super::execs::take_over;
use super::lease::{self, Found, Lease};
use super::maker::{Made, blocking, remove};
use super::service::Fleet;
use super::state::State;
use super::trail::Ids;
use super::{Error, snapshot};
use crate::error::chain;
use crate::ids::SandboxId;
use crate::sandbox::BackendName;
use crate::workdir::WorkDir;

/// Sandboxes that are looked at side by side.
const SIDE_BY_SIDE: usize = 16;

/// What became of an earlier server's sandboxes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recovered {
    pub adopted: Vec<SandboxId>,
    /// They could not be taken over, or their time was over.
    pub reaped: Vec<SandboxId>,
}

impl Fleet {
    /// Takes over every leased sandbox that lives and has time left, and removes the others. To be called once, before
    /// strays are removed.
    pub async fn recover(&self) -> Recovered {
        let inner = self.inner();
        let data_dir = inner.maker.data_dir().to_owned();
        let look = move || {
            snapshot::sweep(&data_dir);
            lease::all(&data_dir)
        };
        let leases = blocking(look).await;
        let fates = futures::stream::iter(leases)
            .map(|(id, lease)| async move {
                let is_adopted = match lease {
                    Found::Lease(lease) => self.adopt_or_reap(*lease).await,
                    Found::Unread(error) => {
                        tracing::error!(sandbox = %id, error, "its lease cannot be read now: it is left for the next start");
                        return None;
                    }
                    // Unreadable, or of another version: the sandbox is found by its owner, who is dead.
                    Found::None => {
                        tracing::warn!(sandbox = %id, "its lease cannot be read: it is removed");
                        self.withdraw(&id).await;
                        false
                    }
                };
                Some((id, is_adopted))
            })
            .buffer_unordered(SIDE_BY_SIDE);
        let mut recovered = Recovered::default();
        for (id, is_adopted) in fates.collect::<Vec<_>>().await.into_iter().flatten() {
            match is_adopted {
                true => recovered.adopted.push(id),
                false => recovered.reaped.push(id),
            }
        }
        recovered
    }

    async fn adopt_or_reap(&self, lease: Lease) -> bool {
        let inner = self.inner();
        let (id, backend) = (lease.spec.id.clone(), lease.backend);
        let adopted = match inner.clock.now() >= lease.expires_at {
            true => Err("its time was over".to_owned()),
            false => inner.maker.adopt(&lease).await.map_err(|error| chain(&error)),
        };
        let went_on = match adopted {
            Ok(made) => self.go_on(lease, made).await.map_err(|error| chain(&error)),
            Err(reason) => Err(reason),
        };
        let Err(reason) = went_on else { return true };
        tracing::warn!(sandbox = %id, reason, "a sandbox of an earlier server is removed");
        let details = json!({ "cause": "not_adopted", "reason": reason });
        self.record(&id, "sandbox.ended", details).await;
        self.remove(&id, backend).await;
        false
    }

    /// Drives a sandbox that was taken over.
    async fn go_on(&self, lease: Lease, made: Made) -> Result<(), Error> {
        let inner = self.inner();
        let able = inner.maker.backends().get(lease.backend).await?.capabilities();
        let lacks = lacks(&able, lease.spec.isolation);
        let state = if lease.paused { State::Paused } else { State::Running };
        let (key, id, expires_at) = (lease.key.clone(), lease.spec.id.clone(), lease.expires_at);
        let mut driver = driver(inner, lease, lacks, state, inner.quota.take_over());
        driver.has_execs = false;
        let _ = driver.member.sandbox.set(Arc::clone(&made.sandbox));
        let _ = driver.member.directory.set(made.directory.clone());
        let mut execs = 0;
        if !driver.lease.paused {
            execs = take_over(&driver.member, &made.sandbox, &inner.trail, &inner.tasks).await?;
            driver.has_execs = true;
        }
        if let Some(key) = key {
            inner.registry.remember(&key, &id);
        }
        inner.registry.add(Arc::clone(&driver.member));
        let details = json!({ "expires_at": expires_at, "execs": execs });
        self.record(&id, "sandbox.adopted", details).await;
        inner
            .tasks
            .spawn("sandbox", move |stop| async move { driver.drive(made, &stop).await });
        Ok(())
    }

    /// Removes every trace of a sandbox that could not be taken over.
    async fn remove(&self, id: &SandboxId, backend: BackendName) {
        let inner = self.inner();
        self.withdraw(id).await;
        let destroyed = async { inner.maker.backends().get(backend).await?.destroy(id).await };
        if let Err(error) = destroyed.await {
            tracing::error!(sandbox = %id, error = %chain(&error), "not removed; the next start tries again");
            return;
        }
        let (data_dir, name) = (inner.maker.data_dir().to_owned(), id.to_string());
        if let Ok(directory) = blocking(move || WorkDir::adopt(&data_dir, &name)).await {
            remove(directory).await;
        }
        self.record(id, "sandbox.destroyed", serde_json::Value::Null).await;
    }

    async fn withdraw(&self, id: &SandboxId) {
        let (data_dir, of) = (self.inner().maker.data_dir().to_owned(), id.clone());
        if let Err(error) = blocking(move || lease::withdraw(&data_dir, &of)).await {
            tracing::error!(sandbox = %id, %error, "its lease was not withdrawn");
        }
    }

    async fn record(&self, sandbox: &SandboxId, action: &str, details: serde_json::Value) {
        let ids = Ids { sandbox, exec: None };
        self.inner().trail.put("server", action, "ok", ids, details).await;
    }
}
