//! From an [`ImageRef`] to an image that the engine has.
//!
//! Nothing is ever pulled. Tars and skeletons are imported once, under a tag that is the hash of their content.

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use futures::{Stream, stream};
use tokio::sync::{Mutex, mpsc};
use tokio_stream::wrappers::ReceiverStream;

use super::engine::{Engine, Failure};
use super::view;
use crate::sandbox::image::{self, Root};
use crate::sandbox::{Error, ImageRef, Mount};

/// An image that is ready.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ready {
    /// The engine's id of it, a digest.
    pub id: String,
    /// Places that the image declares as volumes, which the engine would otherwise make writable.
    pub volumes: Vec<String>,
    /// What else makes up the root file system.
    pub binds: Vec<Mount>,
}

/// Finds and imports images, one import at a time: two of the same content would leave one of them without a name.
#[derive(Debug, Default)]
pub struct Images {
    importing: Mutex<()>,
}

impl Images {
    /// # Errors
    /// [`Error::Image`] when there is no such image, or the engine does not take it.
    pub async fn ready(&self, engine: &Engine, image: &ImageRef, data_dir: &Path) -> Result<Ready, Error> {
        match image {
            ImageRef::Docker(name) => found(engine, image, name).await?.ok_or_else(|| {
                refuse(
                    image,
                    format!(
                        "the local engine has no such image, and it is not pulled by itself: `docker pull {name}`, or see images/"
                    ),
                )
            }),
            ImageRef::Host => self.built(engine, image, image::host).await,
            ImageRef::Rootfs(directory) => {
                let directory = directory.canonicalize().map_err(|error| refuse(image, error))?;
                let for_errors = image.clone();
                let make = move || view::of_directory(&directory).map_err(|error| refuse(&for_errors, error));
                self.built(engine, image, make).await
            }
            ImageRef::Stored(_) => {
                let (wanted, data_dir) = (image.clone(), data_dir.to_owned());
                let make = move || {
                    let root = image::resolve(&wanted, &data_dir)?;
                    let missing = || refuse(&wanted, "it has no root file system");
                    let lower = root.lower.ok_or_else(missing)?;
                    view::of_directory(&lower).map_err(|error| refuse(&wanted, error))
                };
                self.built(engine, image, make).await
            }
            ImageRef::Tar(file) => self.tar(engine, image, file.clone()).await,
        }
    }

    /// An image that is made of pieces of this host.
    async fn built(
        &self,
        engine: &Engine,
        image: &ImageRef,
        make: impl FnOnce() -> Result<Root, Error> + Send + 'static,
    ) -> Result<Ready, Error> {
        let made = blocking(move || {
            let root = make();
            let skeleton = root.as_ref().map_or(Ok(Vec::new()), view::skeleton)?;
            Ok((root, skeleton))
        });
        let (root, skeleton) = made.await.map_err(|error| refuse(image, error))?;
        let root = root?;
        let tag = blake3::hash(&skeleton).to_hex()[..32].to_owned();
        let body = || stream::iter([Ok(Bytes::from(skeleton))]);
        let ready = self.imported(engine, image, "exuvia-skeleton", &tag, body).await?;
        Ok(Ready {
            binds: root.binds,
            ..ready
        })
    }

    async fn tar(&self, engine: &Engine, image: &ImageRef, file: PathBuf) -> Result<Ready, Error> {
        let to_hash = file.clone();
        let hashed = blocking(move || {
            let mut hasher = blake3::Hasher::new();
            io::copy(&mut std::fs::File::open(&to_hash)?, &mut hasher)?;
            Ok(hasher.finalize().to_hex()[..32].to_owned())
        });
        let tag = hashed.await.map_err(|error| refuse(image, error))?;
        self.imported(engine, image, "exuvia-tar", &tag, || contents(file))
            .await
    }

    async fn imported<S>(
        &self,
        engine: &Engine,
        image: &ImageRef,
        repo: &str,
        tag: &str,
        body: impl FnOnce() -> S,
    ) -> Result<Ready, Error>
    where
        S: Stream<Item = io::Result<Bytes>> + Send + 'static,
    {
        let name = format!("{repo}:{tag}");
        let _one_at_a_time = self.importing.lock().await;
        if let Some(ready) = found(engine, image, &name).await? {
            return Ok(ready);
        }
        engine
            .import(repo, tag, body())
            .await
            .map_err(|failure| refuse(image, failure))?;
        found(engine, image, &name)
            .await?
            .ok_or_else(|| refuse(image, "the engine took it and then had it not"))
    }
}

async fn found(engine: &Engine, image: &ImageRef, name: &str) -> Result<Option<Ready>, Error> {
    let inspected = match engine.image(name).await {
        Ok(inspected) => inspected,
        Err(Failure::NotFound(_)) => return Ok(None),
        Err(failure) => return Err(refuse(image, failure)),
    };
    let id = inspected.id.ok_or_else(|| refuse(image, "the engine tells no id"))?;
    let volumes = inspected.config.and_then(|config| config.volumes).unwrap_or_default();
    Ok(Some(Ready {
        id,
        volumes,
        binds: Vec::new(),
    }))
}

/// The bytes of a tar; zstd is undone here, since older engines know only gzip, bzip2 and xz.
fn contents(file: PathBuf) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static {
    const CHUNK: usize = 256 << 10;
    let (sender, receiver) = mpsc::channel(4);
    // Ends by itself: at the end of the file, or when the receiver is gone.
    tokio::task::spawn_blocking(move || {
        let mut reader = match open(&file) {
            Ok(reader) => reader,
            Err(error) => return drop(sender.blocking_send(Err(error))),
        };
        loop {
            let mut chunk = vec![0; CHUNK];
            let sent = match reader.read(&mut chunk) {
                Ok(0) => return,
                Ok(length) => {
                    chunk.truncate(length);
                    sender.blocking_send(Ok(Bytes::from(chunk)))
                }
                Err(error) => return drop(sender.blocking_send(Err(error))),
            };
            if sent.is_err() {
                return;
            }
        }
    });
    ReceiverStream::new(receiver)
}

fn open(path: &Path) -> io::Result<Box<dyn Read>> {
    const ZSTD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
    let mut file = std::fs::File::open(path)?;
    let mut magic = Vec::new();
    Read::by_ref(&mut file).take(4).read_to_end(&mut magic)?;
    let whole = std::fs::File::open(path)?;
    if magic == ZSTD {
        Ok(Box::new(zstd::Decoder::new(whole)?))
    } else {
        Ok(Box::new(whole))
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?
}

fn refuse(image: &ImageRef, reason: impl ToString) -> Error {
    Error::Image {
        image: image.to_string(),
        reason: reason.to_string(),
    }
}
