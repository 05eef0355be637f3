//! Moulds of interpreters: one for each image, from which sandboxes get interpreters that have loaded everything already.
//!
//! A mould is taken in a sandbox that is made for it and removed at once; nobody's code ever runs there. So there is no process
//! between sandboxes that could die, or be asked for anything: what is kept is a sealed file of pages. Nobody waits for a mould
//! but the pool, and where there is none an interpreter is started, as everywhere else.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::OnceCell;
use tokio::time::{Instant, sleep};

use super::Error;
use super::maker::{Maker, blocking};
use crate::ids::SandboxId;
use crate::sandbox::kernel::{self, Fresh};
use crate::sandbox::mould::Mould;
use crate::sandbox::{BackendName, ImageRef, Isolation, Limits, Mount, Sandbox, Spec, identity};
use crate::tasks::Tasks;

/// Moulds that are kept: those used last.
const KEPT: usize = 8;
/// How old one may become: whoever is cast has the hash seed and the addresses of all others of the same mould, and the files that an
/// image had then.
const OLDEST: Duration = Duration::from_secs(15 * 60);
/// The making of one waits so long, so that whoever runs the first code in an image does not share the processor with it.
const LATER: Duration = Duration::from_millis(200);

/// What interpreters must have in common to be of one mould.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Seed {
    pub backend: BackendName,
    pub image: ImageRef,
    pub mounts: Vec<Mount>,
}

/// All moulds of one server; clones share them.
#[derive(Debug, Clone)]
pub(super) struct Nursery {
    beds: Arc<Mutex<VecDeque<Bed>>>,
    maker: Maker,
    tasks: Tasks,
}

#[derive(Debug, Clone)]
struct Bed {
    seed: Seed,
    sown: Instant,
    /// `None` = no mould can be taken of what this image has.
    mould: Arc<OnceCell<Option<Arc<Mould>>>>,
    /// The one before, while this is made.
    before: Option<Arc<Mould>>,
}

impl Nursery {
    pub fn new(maker: Maker, tasks: Tasks) -> Self {
        Self {
            beds: Arc::default(),
            maker,
            tasks,
        }
    }

    /// What interpreters of this sandbox would be cast from; `None` where they cannot be, or are not to.
    pub async fn seed(&self, spec: &Spec, backend: BackendName, fresh: Fresh) -> Option<Seed> {
        let able = self.maker.backends().get(backend).await.ok()?.capabilities();
        let is_able = able.moulds.contains(&spec.isolation) && fresh == Fresh::Forked;
        is_able.then(|| Seed {
            backend,
            image: spec.image.clone(),
            mounts: spec.mounts.clone(),
        })
    }

    /// The mould for these interpreters, which is made if there is none.
    pub async fn wait_for(&self, seed: Seed) -> Option<Arc<Mould>> {
        let (bed, is_new) = self.bed(&seed);
        match is_new && bed.before.is_some() {
            true => {
                self.make_later(&bed);
                bed.before
            }
            false => self.grown(&bed).await,
        }
    }

    /// The mould for these interpreters if there is one; else it is made for those who come after.
    pub fn at_hand(&self, seed: Seed) -> Option<Arc<Mould>> {
        let (bed, is_new) = self.bed(&seed);
        if is_new {
            self.make_later(&bed);
        }
        match bed.mould.get() {
            Some(mould) => mould.clone(),
            None => bed.before,
        }
    }

    fn make_later(&self, bed: &Bed) {
        let (nursery, bed) = (self.clone(), bed.clone());
        self.tasks.spawn("mould", |stop| async move {
            tokio::select! {
                () = stop.cancelled() => return,
                () = sleep(LATER) => {}
            }
            // Runs to its end: nothing is left half made.
            nursery.grown(&bed).await;
        });
    }

    /// Where the mould is or will be; whether that is new.
    fn bed(&self, seed: &Seed) -> (Bed, bool) {
        let mut beds = self.beds.lock().unwrap_or_else(PoisonError::into_inner);
        let found = beds
            .iter()
            .position(|bed| bed.seed == *seed)
            .and_then(|at| beds.remove(at));
        let before = match found {
            Some(bed) if bed.sown.elapsed() < OLDEST => {
                beds.push_front(bed.clone());
                return (bed, false);
            }
            Some(bed) => bed.mould.get().cloned().flatten(),
            None => None,
        };
        let bed = Bed {
            seed: seed.clone(),
            sown: Instant::now(),
            mould: Arc::default(),
            before,
        };
        beds.truncate(KEPT - 1);
        beds.push_front(bed.clone());
        (bed, true)
    }

    async fn grown(&self, bed: &Bed) -> Option<Arc<Mould>> {
        let grown = bed.mould.get_or_init(|| async {
            match grow(&self.maker, &bed.seed).await {
                Ok(mould) => {
                    tracing::info!(image = %bed.seed.image, bytes = mould.bytes(), "interpreters are cast from a mould from now on");
                    Some(Arc::new(mould))
                }
                Err(error) => {
                    let error = crate::error::chain(&error);
                    tracing::info!(image = %bed.seed.image, error, "no mould could be made; interpreters are started one by one");
                    None
                }
            }
        });
        grown.await.clone()
    }
}

/// Makes a sandbox, lets an interpreter grow up in it, takes it, and removes the sandbox.
async fn grow(maker: &Maker, seed: &Seed) -> Result<Mould, Error> {
    let backend = maker.backends().get(seed.backend).await?;
    let (data_dir, image) = (maker.data_dir().to_owned(), seed.image.clone());
    let (claim, env) = blocking(move || {
        let env = crate::sandbox::image::environment(&image, &data_dir)?;
        Ok::<_, Error>((identity::Claim::take(&data_dir)?, env))
    })
    .await?;
    let spec = Spec {
        id: SandboxId::random(),
        image: seed.image.clone(),
        isolation: Isolation::Container,
        limits: Limits::default(),
        identity: claim.identity(),
        workspace: None,
        mounts: seed.mounts.clone(),
        labels: [("fleet".to_owned(), "nursery".to_owned())].into(),
    };
    let sandbox = Sandbox::open(backend, spec, maker.filter_of_nursery()).await?;
    let mould = kernel::mould(&sandbox, env).await;
    let removed = sandbox.destroy().await;
    if let Err(error) = removed {
        let error = crate::error::chain(&error);
        tracing::error!(sandbox = %sandbox.id(), error, "a nursery was not removed; the next start does it");
    }
    Ok(mould?)
}
