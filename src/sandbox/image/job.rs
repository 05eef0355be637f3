//! What every long piece of work is given: its bounds, a way to stop it, and somebody who watches.

use std::fmt;
use std::io::{self, Read};
use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use super::Error;

/// Bounds on one image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Headers of tars, over all layers.
    pub entries: u64,
    /// Bytes of files when unpacked, over all layers; and of what is fetched or spooled.
    pub bytes: u64,
    /// How many times its size a packed layer may unpack to, beyond [`Bounds::SMALL`].
    pub ratio: u64,
}

impl Bounds {
    /// Whatever unpacks to less is no bomb, in bytes.
    pub const SMALL: u64 = 256 << 20;
    /// Layers in an image.
    pub const LAYERS: usize = 512;
    /// A manifest, an index, a config, in bytes.
    pub const DOCUMENT: u64 = 4 << 20;
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            entries: 2_000_000,
            bytes: 64 << 30,
            ratio: 250,
        }
    }
}

/// How far it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Progress {
    /// Another import of the same is at it.
    Waiting,
    /// Of layer `layer` (from 1) of `layers`: bytes fetched, and how many there are.
    Fetching {
        layer: usize,
        layers: usize,
        bytes: u64,
        of: u64,
    },
    /// Something went wrong on the way and is tried again.
    Retrying { what: String, why: String },
    /// A line of a builder's.
    Said(String),
    /// Begins with layer `layer` (from 1) of `layers`.
    Unpacking { layer: usize, layers: usize },
}

type Watcher = dyn Fn(Progress) + Send + Sync;

/// See the module.
#[derive(Clone, Default)]
pub struct Job {
    pub bounds: Bounds,
    pub cancel: CancellationToken,
    pub(super) watcher: Option<Arc<Watcher>>,
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job")
            .field("bounds", &self.bounds)
            .finish_non_exhaustive()
    }
}

impl Job {
    pub fn bounded(bounds: Bounds) -> Self {
        Self {
            bounds,
            ..Self::default()
        }
    }

    /// With somebody who is told how far it is. Called often, and from any thread.
    pub fn watched(self, watcher: impl Fn(Progress) + Send + Sync + 'static) -> Self {
        Self {
            watcher: Some(Arc::new(watcher)),
            ..self
        }
    }

    pub(super) fn tell(&self, progress: Progress) {
        if let Some(watcher) = &self.watcher {
            watcher(progress);
        }
    }

    pub(super) fn go_on(&self) -> Result<(), Error> {
        if self.cancel.is_cancelled() {
            Err(Error::Cancelled)
        } else {
            Ok(())
        }
    }

    /// A reader that stops when the job is cancelled.
    pub(super) fn reader<R: Read>(&self, from: R) -> impl Read + use<R> {
        Cancellable {
            from,
            job: self.clone(),
        }
    }
}

struct Cancellable<R> {
    from: R,
    job: Job,
}

impl<R: Read> Read for Cancellable<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.job.go_on().map_err(io::Error::other)?;
        self.from.read(into)
    }
}
