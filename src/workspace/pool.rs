//! Workspaces for async callers: the one place where their blocking work is done, with a limit.

use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, StreamExt};
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, mpsc};
use tokio::time::timeout;
use tokio_util::io::{StreamReader, SyncIoBridge};

use super::apply::Applied;
use super::limits::Limits;
use super::materialise::Owner;
use super::overlay::{Bases, Ground, Kept, Look, Reading, Site};
use super::patch::{Patch, PatchLimits};
use super::snapshot::Snapshot;
use super::trees::{Revision, Trees};
use super::{BlobId, Error, TreeId};

/// Jobs that may block at the same time.
const SIDE_BY_SIDE: usize = 8;
/// How long the other side of a stream may do nothing.
const IDLE: Duration = Duration::from_secs(120);
/// Bytes of one piece of an archive, and pieces that may wait for a slow reader.
const PIECE: usize = 256 << 10;
const PIECES: usize = 8;

/// Trees, for async callers; clones share the limit.
///
/// A dropped future lets its job run to its end; every job leaves whole objects only.
#[derive(Debug, Clone)]
pub struct Pool {
    trees: Trees,
    permits: Arc<Semaphore>,
    /// Apart from the rest: who is slow to send or to read holds no run up.
    streams: Arc<Semaphore>,
    /// Apart from the rest: sandboxes stand still meanwhile.
    looks: Arc<Semaphore>,
    /// Where workspaces are laid over bases; `None`: they are plain directories.
    bases: Option<Bases>,
    /// One base is made at a time for the sandboxes that may come.
    rebasing: Arc<Semaphore>,
}

impl Pool {
    pub fn new(trees: Trees) -> Self {
        Self {
            trees,
            permits: Arc::new(Semaphore::new(SIDE_BY_SIDE)),
            streams: Arc::new(Semaphore::new(SIDE_BY_SIDE)),
            looks: Arc::new(Semaphore::new(SIDE_BY_SIDE)),
            bases: None,
            rebasing: Arc::new(Semaphore::new(1)),
        }
    }

    /// The same, with workspaces that are laid over bases where this host can do that.
    pub fn over(self, bases: Bases) -> Self {
        let bases = Some(bases);
        Self { bases, ..self }
    }

    async fn run<T: Send + 'static>(
        &self,
        job: impl FnOnce(&Trees) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        self.run_under(&self.permits, job).await
    }

    async fn run_under<T: Send + 'static>(
        &self,
        permits: &Arc<Semaphore>,
        job: impl FnOnce(&Trees) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let permit = Arc::clone(permits)
            .acquire_owned()
            .await
            .expect("the semaphore is never closed");
        let trees = self.trees.clone();
        let joined = tokio::task::spawn_blocking(move || {
            let result = job(&trees);
            drop(permit);
            result
        });
        match joined.await {
            Ok(result) => result,
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        }
    }

    /// The tree with nothing in it.
    pub async fn empty(&self) -> Result<TreeId, Error> {
        self.run(Trees::empty).await
    }

    /// # Errors
    /// [`Error::Missing`] when the store does not have the root of that tree.
    pub async fn require(&self, tree: TreeId) -> Result<TreeId, Error> {
        self.run(move |trees| trees.tree(tree).map(|_| tree)).await
    }

    /// Takes in a directory of the user's.
    pub async fn import(&self, directory: &Path) -> Result<Snapshot, Error> {
        let directory = directory.to_owned();
        self.run(move |trees| trees.import(&directory, Limits::default())).await
    }

    /// Lays a revision out on an empty ground, for a sandbox whose files are the owner's.
    ///
    /// # Errors
    /// What was laid then is for whoever removes the ground.
    pub async fn lay(&self, ground: Ground, revision: Revision, owner: Option<Owner>) -> Result<Site, Error> {
        let bases = self.bases.clone();
        self.run(move |trees| Site::lay(trees, bases.as_ref(), ground, revision, owner))
            .await
    }

    /// The site of a sandbox that an earlier process made.
    pub async fn adopt(&self, ground: Ground) -> Result<Site, Error> {
        self.run(move |trees| Site::adopt(trees, ground)).await
    }

    /// Writes a revision into a site that nothing was laid on yet, be its sandbox up or not.
    pub async fn furnish(&self, site: &Site, revision: Revision, owner: Option<Owner>) -> Result<(), Error> {
        let site = site.clone();
        self.run(move |trees| site.furnish(trees, revision, owner)).await
    }

    /// Takes what a sandbox changed, which has to stand still meanwhile.
    ///
    /// # Errors
    /// [`Error::Limit`] for more than is taken.
    pub async fn look(&self, site: &Site, reading: Reading) -> Result<Look, Error> {
        let site = site.clone();
        self.run_under(&self.looks, move |trees| site.look(trees, reading))
            .await
    }

    /// Stores what a look took, durably before it returns; the sandbox may go on meanwhile.
    ///
    /// # Errors
    /// [`Error::Changed`] after [`Reading::Later`]: another look has to be taken.
    pub async fn keep(&self, site: &Site, look: Look) -> Result<Kept, Error> {
        let laid = site.clone();
        let kept = self.run(move |trees| laid.keep(trees, look)).await?;
        if let Some(bases) = &self.bases
            && kept.is_much()
            && let Ok(turn) = Arc::clone(&self.rebasing).try_acquire_owned()
        {
            let (trees, bases, revision) = (self.trees.clone(), bases.clone(), kept.revision);
            // Nobody waits for it; what is left unfinished is swept.
            drop(tokio::task::spawn_blocking(move || {
                if let Err(error) = bases.ahead(&trees, revision) {
                    tracing::warn!(error = %crate::error::chain(&error), "no base was made ahead");
                }
                drop(turn);
            }));
        }
        Ok(kept)
    }

    /// The difference of two trees as a patch.
    pub async fn patch(&self, old: TreeId, new: TreeId) -> Result<Patch, Error> {
        self.run(move |trees| trees.patch(old, new, &PatchLimits::default()))
            .await
    }

    /// Writes what changed from `base` to `new` into a directory of the user's.
    pub async fn apply(&self, directory: &Path, base: TreeId, new: TreeId) -> Result<Applied, Error> {
        let directory = directory.to_owned();
        self.run(move |trees| trees.apply(&directory, base, new)).await
    }

    pub async fn put_artifact(&self, bytes: Vec<u8>) -> Result<BlobId, Error> {
        self.run(move |trees| trees.put_artifact(&bytes)).await
    }

    /// A whole artifact.
    pub async fn artifact(&self, id: BlobId) -> Result<Vec<u8>, Error> {
        self.run(move |trees| trees.artifact(id, 0..u64::MAX)).await
    }

    /// Takes in an archive as it comes.
    pub async fn take_archive(
        &self,
        pieces: impl Stream<Item = io::Result<Vec<u8>>> + Send + Unpin + 'static,
    ) -> Result<Revision, Error> {
        let late = |_| io::Error::new(io::ErrorKind::TimedOut, format!("nothing came for {IDLE:?}"));
        let pieces = tokio_stream::StreamExt::timeout(pieces, IDLE)
            .map(move |piece| piece.map_err(late).flatten().map(io::Cursor::new));
        let mut reader = SyncIoBridge::new(StreamReader::new(Box::pin(pieces)));
        let job = move |trees: &Trees| trees.read_archive(&mut reader as &mut dyn Read, Limits::default());
        self.run_under(&self.streams, job).await
    }

    /// A revision as a tar stream; a reader that goes away ends it.
    pub fn archive(&self, revision: Revision) -> impl Stream<Item = Result<Vec<u8>, Error>> + Send + use<> {
        let (send, receive) = mpsc::channel(PIECES);
        let pool = self.clone();
        let writer = async move {
            let pipe = send.clone();
            let job = move |trees: &Trees| write_tar(trees, revision, pipe);
            let done = pool.run_under(&pool.streams, job).await;
            if let Err(error) = done {
                let _ = send.send(Err(error)).await;
            }
        };
        // The job runs while the stream is polled; both end together.
        let pieces = tokio_stream::wrappers::ReceiverStream::new(receive);
        futures::stream::select(pieces.map(Some), futures::stream::once(writer).map(|()| None))
            .filter_map(std::future::ready)
    }
}

/// Packs a directory of the user's as a tar stream, as [`Pool::take_archive`] takes it.
pub async fn pack(directory: &Path) -> Result<impl Stream<Item = Result<Vec<u8>, Error>> + Send + 'static, Error> {
    let scratch = tempfile::tempdir().map_err(Error::Sink)?;
    let pool = Pool::new(Trees::open(scratch.path())?);
    let revision = pool.import(directory).await?.revision;
    let pieces = pool.archive(revision);
    // The scratch store lives as long as somebody reads from it.
    Ok(pieces.map(move |piece| {
        let _keep = &scratch;
        piece
    }))
}

fn write_tar(trees: &Trees, revision: Revision, pipe: mpsc::Sender<Result<Vec<u8>, Error>>) -> Result<(), Error> {
    let mut out = io::BufWriter::with_capacity(PIECE, Pipe(pipe));
    trees.write_tar(revision, &mut out)?;
    out.flush().map_err(Error::Sink)
}

struct Pipe(mpsc::Sender<Result<Vec<u8>, Error>>);

impl Write for Pipe {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let sent = Handle::current().block_on(timeout(IDLE, self.0.send(Ok(bytes.to_vec()))));
        match sent {
            Ok(Ok(())) => Ok(bytes.len()),
            Ok(Err(_)) => Err(io::Error::from(io::ErrorKind::BrokenPipe)),
            Err(_) => Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!("nobody read for {IDLE:?}"),
            )),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
