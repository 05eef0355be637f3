//! One sandbox of the fleet, as everybody but its driver sees it: facts that stay, a view that moves, a queue for orders.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};

use super::Error;
use super::activity::{Activity, Busy};
use super::code::Codes;
use super::execs::Execs;
use super::service::{OnShutdown, Taken, What};
use super::state::{Denied, End, State};
use crate::clock::{Clock, Timestamp};
use crate::ids::SandboxId;
use crate::sandbox::{BackendName, ImageRef, Isolation, Limits, Sandbox};
use crate::workdir::WorkDir;

/// What a sandbox is, from its first moment to its last.
#[derive(Debug, Clone, PartialEq)]
pub struct Facts {
    pub policy_name: String,
    pub policy_hash: String,
    pub image: ImageRef,
    pub backend: BackendName,
    pub isolation: Isolation,
    pub limits: Limits,
    pub labels: BTreeMap<String, String>,
    pub env: BTreeMap<String, String>,
    pub created_at: Timestamp,
    pub idle_timeout: Option<Duration>,
    pub from_pool: bool,
    /// What its backend cannot do for it.
    pub lacks: Vec<String>,
}

/// How it stands.
#[derive(Debug, Clone, PartialEq)]
pub struct View {
    /// Raised by every change.
    pub generation: u64,
    pub state: State,
    pub expires_at: Timestamp,
}

/// What a driver is told to do. A driver that ends drops the answers of what it did not come to.
#[derive(Debug)]
pub(super) enum Order {
    Pause {
        by: String,
        done: Done<()>,
    },
    Resume {
        by: String,
        done: Done<()>,
    },
    Renew {
        ttl: Duration,
        by: String,
        done: Done<()>,
    },
    Snapshot {
        what: What,
        by: String,
        done: Done<Taken>,
    },
    /// Answered by the view.
    End(End),
}

pub(super) type Done<T> = oneshot::Sender<Result<T, Error>>;

#[derive(Debug)]
pub(super) struct Member {
    pub id: SandboxId,
    pub facts: Facts,
    pub execs: Execs,
    pub codes: Codes,
    pub activity: Activity,
    pub clock: Arc<dyn Clock>,
    pub on_shutdown: OnShutdown,
    pub orders: mpsc::Sender<Order>,
    pub view: watch::Receiver<View>,
    /// Once it has been made.
    pub sandbox: OnceLock<Arc<Sandbox>>,
    pub directory: OnceLock<WorkDir>,
    /// Why it could not be.
    pub failure: OnceLock<Arc<Error>>,
}

impl Member {
    pub fn denied(&self, denied: Denied) -> Error {
        Error::Denied {
            id: self.id.clone(),
            denied,
        }
    }

    /// The sandbox, for something to be done in it; counts as activity until `Busy` is dropped.
    ///
    /// # Errors
    /// [`Error::Denied`] unless it runs.
    pub fn enter(&self) -> Result<(Arc<Sandbox>, Busy), Error> {
        // First: so that it does not become idle after the look.
        let busy = self.activity.begin();
        let denied = match &self.view.borrow().state {
            State::Running => None,
            State::Creating => Some(Denied::NotReady),
            State::Paused => Some(Denied::Paused),
            State::Ending(end) | State::Ended(end) => Some(Denied::Over(end.clone())),
        };
        match (denied, self.sandbox.get()) {
            (None, Some(sandbox)) => Ok((Arc::clone(sandbox), busy)),
            (Some(denied), _) => Err(self.denied(denied)),
            (None, None) => Err(self.denied(Denied::NotReady)),
        }
    }

    /// Gives an order and waits for what comes of it.
    pub async fn order<T>(&self, order: impl FnOnce(Done<T>) -> Order) -> Result<T, Error> {
        let (done, answer) = oneshot::channel();
        // An order that comes back unsent would hold on to `done`, and nobody would ever answer.
        let is_sent = self.orders.send(order(done)).await.is_ok();
        if is_sent && let Ok(answer) = answer.await {
            return answer;
        }
        Err(match self.view.borrow().state.end() {
            Some(end) => self.denied(Denied::Over(end.clone())),
            None => Error::Stopping,
        })
    }

    /// Asks for its end, and waits until nothing in it runs any more.
    pub async fn end(&self, end: End) -> Result<(), Error> {
        // A driver that takes no more orders has ended it, or leaves it to the next server.
        let _ = self.orders.send(Order::End(end)).await;
        let mut view = self.view.clone();
        let ended = view.wait_for(|view| matches!(view.state, State::Ended(_))).await;
        ended.map(drop).map_err(|_| Error::Stopping)
    }

    /// Waits until it has been made.
    ///
    /// # Errors
    /// Why it was not.
    pub async fn made(&self) -> Result<(), Error> {
        let mut view = self.view.clone();
        let moved = view.wait_for(|view| !matches!(view.state, State::Creating)).await;
        let end = moved.map_err(|_| Error::Stopping)?.state.end().cloned();
        match (self.failure.get(), end) {
            (Some(failure), _) => Err(Error::Create(Arc::clone(failure))),
            // Only an answer for who waited for this; who asks again sees how it ended.
            (None, Some(end)) if self.sandbox.get().is_none() => Err(self.denied(Denied::Over(end))),
            (None, _) => Ok(()),
        }
    }
}
