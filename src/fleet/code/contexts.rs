//! The contexts of a sandbox, in a bounded number.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{Over, end_with};
use crate::fleet::Error;
use crate::fleet::execs::{Finish, How};
use crate::fleet::state::End;
use crate::ids::{ContextId, SandboxId};
use crate::sandbox::kernel::{Kernel, Language};

/// Contexts of one sandbox.
const MOST: usize = 32;

/// A kernel under an id.
#[derive(Debug)]
pub(super) struct Context {
    pub id: ContextId,
    pub language: Language,
    pub cwd: Option<Vec<u8>>,
    pub over: Over,
    /// `None` once it is over.
    kernel: Mutex<Option<Arc<Kernel>>>,
    _slot: OwnedSemaphorePermit,
}

/// What can be told of a context.
#[derive(Debug, Clone, PartialEq)]
pub struct ContextView {
    pub id: ContextId,
    pub language: Language,
    /// `None` = the sandbox's own.
    pub cwd: Option<Vec<u8>>,
    pub is_busy: bool,
    /// Set when its kernel runs no more.
    pub ended: Option<Finish>,
}

impl Context {
    pub fn new(slot: OwnedSemaphorePermit, kernel: Kernel, cwd: Option<Vec<u8>>) -> Arc<Self> {
        Arc::new(Self {
            id: ContextId::random(),
            language: kernel.language(),
            cwd,
            over: Over::default(),
            kernel: Mutex::new(Some(Arc::new(kernel))),
            _slot: slot,
        })
    }

    fn held(&self) -> MutexGuard<'_, Option<Arc<Kernel>>> {
        self.kernel.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn kernel(&self) -> Option<Arc<Kernel>> {
        self.held().clone()
    }

    /// Ends it for good.
    pub fn end(&self, how: How) {
        end_with(&self.over, how);
        let kernel = self.held().take();
        drop(kernel);
    }

    pub fn view(&self) -> ContextView {
        let over = self.over.borrow().clone();
        let state = self.kernel().map(|kernel| kernel.state());
        let ended = match (over, &state) {
            (Some(how), _) => Some(Finish {
                how,
                ended: None,
                duration: Duration::ZERO,
            }),
            (None, Some(state)) => state.ended.clone().map(|ended| Finish::of(ended, None, None)),
            (None, None) => None,
        };
        ContextView {
            id: self.id.clone(),
            language: self.language,
            cwd: self.cwd.clone(),
            is_busy: ended.is_none() && state.is_some_and(|state| state.is_busy),
            ended,
        }
    }
}

/// Oldest first.
#[derive(Debug)]
pub(super) struct Contexts {
    kept: Mutex<Kept>,
    slots: Arc<Semaphore>,
}

#[derive(Debug, Default)]
struct Kept {
    contexts: Vec<Arc<Context>>,
    over: Option<End>,
}

impl Default for Contexts {
    fn default() -> Self {
        Self {
            kept: Mutex::default(),
            slots: Arc::new(Semaphore::new(MOST)),
        }
    }
}

impl Contexts {
    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for one more.
    ///
    /// # Errors
    /// [`Error::TooManyContexts`].
    pub fn slot(&self, sandbox: &SandboxId) -> Result<OwnedSemaphorePermit, Error> {
        let slot = Arc::clone(&self.slots).try_acquire_owned();
        slot.map_err(|_| Error::TooManyContexts {
            id: sandbox.clone(),
            limit: MOST,
        })
    }

    /// Keeps one. In a sandbox that is ending it has ended.
    pub fn add(&self, context: &Arc<Context>) {
        let mut kept = self.kept();
        kept.contexts.push(Arc::clone(context));
        if let Some(end) = &kept.over {
            context.end(How::Sandbox(end.clone()));
        }
    }

    pub fn find(&self, sandbox: &SandboxId, id: &str) -> Result<Arc<Context>, Error> {
        let kept = self.kept();
        let found = kept.contexts.iter().find(|context| context.id.as_str() == id);
        found.cloned().ok_or_else(|| no_context(sandbox, id))
    }

    /// Takes one out; it is then for the caller to end.
    pub fn remove(&self, sandbox: &SandboxId, id: &str) -> Result<Arc<Context>, Error> {
        let mut kept = self.kept();
        let at = kept.contexts.iter().position(|context| context.id.as_str() == id);
        at.map(|at| kept.contexts.remove(at))
            .ok_or_else(|| no_context(sandbox, id))
    }

    pub fn list(&self) -> Vec<ContextView> {
        self.kept().contexts.iter().map(|context| context.view()).collect()
    }

    pub fn end_all(&self, end: &End) {
        let contexts = {
            let mut kept = self.kept();
            kept.over.get_or_insert_with(|| end.clone());
            kept.contexts.clone()
        };
        for context in contexts {
            context.end(How::Sandbox(end.clone()));
        }
    }
}

fn no_context(sandbox: &SandboxId, id: &str) -> Error {
    Error::NoContext {
        sandbox: sandbox.clone(),
        context: crate::ids::shown(id),
    }
}
