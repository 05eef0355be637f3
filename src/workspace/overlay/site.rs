//! A site: where the workspace of one sandbox is laid out, over a base or as a plain directory, and what is known of it.
//!
//! Both give the same trees. A plain directory is what there is where this host cannot lay one over a base, and where that
//! would be no gain; it is then an upper layer with nothing below.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use super::super::clearing;
use super::super::error::Error;
use super::super::folder::Folder;
use super::super::index::Index;
use super::super::limits::Limits;
use super::super::materialise::Owner;
use super::super::snapshot::Report;
use super::super::trees::{Revision, Trees};
use super::bases::{Bases, FEW};
use super::below::Below;
use super::keep::keep;
use super::lay::{Linked, cost, lay};
use super::look::{Look, Plan, Reading, look};
use super::mount::Ground;

/// A workspace of so few names is written out in less time than an overlay is mounted and unmounted.
const PLAIN: u64 = 48;

/// The workspace of one sandbox; clones are the same one.
#[derive(Debug, Clone)]
pub struct Site(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    ground: Ground,
    /// `None`: a plain directory.
    over: Option<Below>,
    /// What the walked directory was known to hold at the last look; `None` = nothing is known.
    known: Mutex<Option<Index>>,
}

/// A workspace as it was at a look, durable.
#[derive(Debug)]
pub struct Kept {
    pub revision: Revision,
    pub report: Report,
}

impl Kept {
    /// Whether a new sandbox would have noticeably much to write.
    pub(in super::super) fn is_much(&self) -> bool {
        self.report.entries > FEW
    }
}

impl Site {
    /// What a sandbox is given.
    pub fn path(&self) -> PathBuf {
        match self.0.over {
            Some(_) => self.0.ground.files(),
            None => self.0.ground.upper().to_owned(),
        }
    }

    pub fn is_overlay(&self) -> bool {
        self.0.over.is_some()
    }

    /// Of a sandbox that an earlier process made. Nothing is known of what was changed there.
    ///
    /// # Errors
    /// [`Error::Io`] when it cannot be told what it is laid over; [`Error::Missing`] when the store has that no more.
    pub(in super::super) fn adopt(trees: &Trees, ground: Ground) -> Result<Self, Error> {
        let pinned = Bases::pinned(&ground);
        let pinned = pinned.map_err(|e| Error::io("read", ground.pin().as_os_str().as_encoded_bytes(), e))?;
        let over = match pinned {
            Some(revision) => Some(Below::new(trees, revision)?),
            None => None,
        };
        Ok(Self::new(ground, over, None))
    }

    fn new(ground: Ground, over: Option<Below>, known: Option<Index>) -> Self {
        Self(Arc::new(Inner {
            ground,
            over,
            known: Mutex::new(known),
        }))
    }

    /// Lays a revision out on an empty ground, for a sandbox whose files are the owner's.
    ///
    /// # Errors
    /// [`Error::Missing`] or [`Error::Damaged`] for what the store cannot give; [`Error::Io`]. What is on the ground then is
    /// for whoever removes it.
    pub(in super::super) fn lay(
        trees: &Trees,
        bases: Option<&Bases>,
        ground: Ground,
        revision: Revision,
        owner: Option<Owner>,
    ) -> Result<Self, Error> {
        if let (Some(bases), Some(owner)) = (bases, owner)
            && bases.support().is_ok()
            && cost(trees, Revision::from(trees.empty()?), revision, PLAIN)?.is_none()
        {
            match Self::over(trees, bases, &ground, revision, owner) {
                Ok(Some(site)) => return Ok(site),
                Ok(None) => {}
                Err(error @ (Error::Missing(_) | Error::Damaged { .. } | Error::UnknownVersion { .. })) => {
                    return Err(error);
                }
                // A host's disk that is full, a mount that is refused: the plain way may go.
                Err(error) => {
                    tracing::warn!(error = %crate::error::chain(&error), "a workspace is not laid over a base");
                }
            }
            Self::empty(&ground)?;
        }
        let index = trees.materialise(revision, ground.upper(), owner)?;
        Ok(Self::new(ground, None, Some(index)))
    }

    /// `None` when the base went while it was being looked for.
    pub(super) fn over(
        trees: &Trees,
        bases: &Bases,
        ground: &Ground,
        revision: Revision,
        owner: Owner,
    ) -> Result<Option<Self>, Error> {
        let base = match bases.near(trees, revision)? {
            Some((base, _)) => base,
            None => bases.make(trees, revision, None)?,
        };
        let failed = |doing| move |e| Error::io(doing, ground.upper().as_os_str().as_encoded_bytes(), e);
        let Some(base) = bases.pin(ground, &base.name).map_err(failed("lay"))? else {
            return Ok(None);
        };
        let below = Below::new(trees, base.about.revision)?;
        let folder = Folder::open(ground.upper()).map_err(failed("open"))?;
        let laid = lay(trees, &folder, Some(&below), revision, Some(owner), Linked::Made)?;
        ground
            .mount(&base.layers, owner)
            .map_err(failed("mount an overlay of"))?;
        let known = Index::new(laid.root);
        Ok(Some(Self::new(ground.clone(), Some(below), Some(known))))
    }

    /// Takes away what an attempt left on a ground.
    fn empty(ground: &Ground) -> Result<(), Error> {
        let failed = |e| Error::io("clear", ground.upper().as_os_str().as_encoded_bytes(), e);
        ground.unmount().map_err(failed)?;
        match std::fs::remove_file(ground.pin()) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(failed(error)),
            Ok(()) | Err(_) => {}
        }
        let folder = Folder::open(ground.upper()).map_err(failed)?;
        let names = folder.names(u64::MAX).map_err(failed)?.unwrap_or_default();
        names
            .iter()
            .try_for_each(|name| clearing::remove(&folder, name, &mut Vec::new()))
    }

    /// Writes a revision into a plain site that is still empty, be its sandbox up or not.
    ///
    /// # Errors
    /// As [`Trees::materialise`].
    pub(in super::super) fn furnish(
        &self,
        trees: &Trees,
        revision: Revision,
        owner: Option<Owner>,
    ) -> Result<(), Error> {
        let index = trees.materialise(revision, &self.path(), owner)?;
        self.learn(index);
        Ok(())
    }

    fn learn(&self, known: Index) {
        *self.0.known.lock().unwrap_or_else(PoisonError::into_inner) = Some(known);
    }

    fn upper(&self) -> Result<Folder, Error> {
        let upper = self.0.ground.upper();
        Folder::open(upper).map_err(|e| Error::io("open", upper.as_os_str().as_encoded_bytes(), e))
    }

    /// Takes what was changed. Its sandbox stands still until this returns.
    ///
    /// # Errors
    /// [`Error::Limit`] for more than is taken, [`Error::Io`].
    pub(in super::super) fn look(&self, trees: &Trees, reading: Reading) -> Result<Look, Error> {
        let upper = self.upper()?;
        // What changes a file that is mapped shows in its times on a disk, and not in memory.
        let is_memory = rustix::fs::fstatfs(&upper).map_or(true, |found| found.f_type == libc::TMPFS_MAGIC);
        let known = self.0.known.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let plan = Plan {
            is_overlay: self.is_overlay(),
            reading: if is_memory { Reading::Now } else { reading },
            known: known.filter(|_| !is_memory),
            limits: Limits::default(),
        };
        look(&upper, trees.blobs.batch(), plan)
    }

    /// Stores what a look took, durably before it returns.
    ///
    /// # Errors
    /// [`Error::Changed`] after [`Reading::Later`], when another look has to be taken; [`Error::Io`].
    pub(in super::super) fn keep(&self, trees: &Trees, look: Look) -> Result<Kept, Error> {
        let (root, report) = keep(trees, &self.upper()?, self.0.over.as_ref(), look)?;
        let known = Index::new(root);
        let revision = known.revision();
        self.learn(known);
        Ok(Kept { revision, report })
    }
}
