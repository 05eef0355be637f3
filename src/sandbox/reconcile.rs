//! Finds what dead servers left behind and removes it (promise 7).
//!
//! Owns: which sandboxes may be removed. Must not know: how. Run once when a server starts, before it takes work.

use super::{Backend, Error};
use crate::ids::SandboxId;

/// Destroys the sandboxes of this data directory whose owner is dead, never another's, but for those that `is_kept` names.
/// Returns those destroyed.
///
/// One that cannot be destroyed does not keep the others: all are tried.
///
/// # Errors
/// The first failure, once all were tried.
pub async fn reap(backend: &dyn Backend, is_kept: impl Fn(&SandboxId) -> bool) -> Result<Vec<SandboxId>, Error> {
    let mut reaped = Vec::new();
    let mut failure = None;
    for owned in backend.list_owned().await? {
        if owned.owner_alive || is_kept(&owned.id) {
            continue;
        }
        match backend.destroy(&owned.id).await {
            Ok(()) => {
                tracing::info!(sandbox = %owned.id, "removed a sandbox whose server is gone");
                reaped.push(owned.id);
            }
            Err(error) => failure = failure.or(Some(error)),
        }
    }
    failure.map_or(Ok(reaped), Err)
}
