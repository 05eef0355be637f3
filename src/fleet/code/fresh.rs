//! Processes that wait for one piece of code each, by language: started when first wanted, or made ahead with the sandbox.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::OnceCell;

use crate::fleet::maker::blocking;
use crate::fleet::nursery::Nursery;
use crate::sandbox::kernel::{Error, Fresh, Language, Warm, WarmOptions};
use crate::sandbox::mould::Mould;
use crate::sandbox::{BackendName, Sandbox, image};

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

    /// Takes one made ahead with the variables of the image, unless the sandbox has others that an interpreter reads when it
    /// starts.
    pub fn set(&self, warm: Warm, of_image: &BTreeMap<String, String>) {
        if !starts_alike(&self.env, of_image) {
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
        places: &Places<'_>,
    ) -> Result<&'a Warm, Error> {
        cell.get_or_try_init(|| async {
            let mould = match language {
                Language::Python => self.mould(sandbox, places).await,
                Language::Bash | Language::Node => None,
            };
            warm(sandbox, language, self.fresh, self.env.clone(), Ahead::No, mould).await
        })
        .await
    }

    /// What interpreters can be cast from now.
    async fn mould(&self, sandbox: &Sandbox, places: &Places<'_>) -> Option<Arc<Mould>> {
        let seed = places.nursery.seed(sandbox.spec(), places.backend, self.fresh).await?;
        let (image, data_dir) = (seed.image.clone(), places.data_dir.to_owned());
        let of_image = blocking(move || image::environment(&image, &data_dir)).await.ok()?;
        match starts_alike(&self.env, &of_image) {
            true => places.nursery.at_hand(seed),
            false => None,
        }
    }

    /// Ends them all.
    pub fn clear(&self) {
        let cells = std::mem::take(&mut *self.cells());
        drop(cells);
    }
}

/// Where interpreters that need not be started come from.
#[derive(Debug, Clone, Copy)]
pub struct Places<'a> {
    pub nursery: &'a Nursery,
    pub backend: BackendName,
    pub data_dir: &'a Path,
}

/// Whether an interpreter with the variables of the image is one that was started with `env`.
fn starts_alike(env: &BTreeMap<String, String>, of_image: &BTreeMap<String, String>) -> bool {
    let names = env.keys().chain(of_image.keys());
    names
        .filter(|name| is_read_at_start(name))
        .all(|name| env.get(name) == of_image.get(name))
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
    mould: Option<Arc<Mould>>,
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
        mould,
        ..WarmOptions::default()
    };
    Warm::start(sandbox, language, options).await
}
