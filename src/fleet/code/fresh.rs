//! Processes that wait for one piece of code each, by language: started when first wanted, or made ahead with the sandbox.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::OnceCell;

use crate::sandbox::Sandbox;
use crate::sandbox::kernel::{Error, Fresh, Language, Warm, WarmOptions};

type Cell = Arc<OnceCell<Warm>>;

#[derive(Debug)]
pub(super) struct FreshProcesses {
    fresh: Fresh,
    /// Of the sandbox.
    env: BTreeMap<String, String>,
    cells: Mutex<BTreeMap<Language, Cell>>,
}

impl FreshProcesses {
    pub fn new(fresh: Fresh, env: BTreeMap<String, String>) -> Self {
        Self {
            fresh,
            env,
            cells: Mutex::default(),
        }
    }

    fn cells(&self) -> MutexGuard<'_, BTreeMap<Language, Cell>> {
        self.cells.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes one made ahead, unless the sandbox has variables that an interpreter reads when it starts.
    pub fn set(&self, warm: Warm) {
        if self.env.keys().any(|name| is_read_at_start(name)) {
            return;
        }
        let language = warm.language();
        self.cells().insert(language, Arc::new(OnceCell::new_with(Some(warm))));
    }

    /// Where fresh processes of a language come from.
    pub fn of(&self, language: Language) -> Cell {
        Arc::clone(self.cells().entry(language).or_default())
    }

    pub async fn started<'a>(
        &self,
        cell: &'a Cell,
        sandbox: &Arc<Sandbox>,
        language: Language,
    ) -> Result<&'a Warm, Error> {
        cell.get_or_try_init(|| warm(sandbox, language, self.fresh, self.env.clone(), Ahead::No))
            .await
    }

    /// Ends them all.
    pub fn clear(&self) {
        let cells = std::mem::take(&mut *self.cells());
        drop(cells);
    }
}

fn is_read_at_start(name: &str) -> bool {
    let by_prefix = ["PYTHON", "LD_", "LC_", "MALLOC_"];
    name == "PATH" || name == "LANG" || by_prefix.iter().any(|prefix| name.starts_with(prefix))
}

/// Whether code is there already when its process is started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::fleet) enum Ahead {
    Yes,
    No,
}

/// Starts what waits. It gets all variables again with each piece of code, as it may be made before anybody knows them.
pub(in crate::fleet) async fn warm(
    sandbox: &Arc<Sandbox>,
    language: Language,
    fresh: Fresh,
    env: BTreeMap<String, String>,
    ahead: Ahead,
) -> Result<Warm, Error> {
    let lanes = match language {
        Language::Python => 1,
        // An interpreter that waits costs memory of the sandbox, and these are not what agents write most.
        Language::Bash | Language::Node => 0,
    };
    let options = WarmOptions {
        fresh,
        lanes,
        ahead: ahead == Ahead::Yes,
        env,
        ..WarmOptions::default()
    };
    Warm::start(sandbox, language, options).await
}
