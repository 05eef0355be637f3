//! Pulling images from a registry (OCI distribution protocol).
//!
//! A registry is not believed: every document and layer is held to its digest and its size, every answer to a bound, and a
//! wait for the next bytes to a deadline. Connections are TLS; plain HTTP is for a registry on this host's loopback alone, when
//! asked for. Credentials are fetched for the moment of use (`login.rs`) and go to the registry and to the token service that
//! it names, never to where a redirect leads.
//!
//! ```text
//! manifest ─► (index ─► the platform's manifest) ─► configuration ─► claim by layers ─► layers, several at once ─► unpack
//! ```
//!
//! Cancelling is dropping the future, or the job's token; either leaves nothing.

mod auth;
mod fetch;
mod login;

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use futures::{StreamExt, TryStreamExt, stream};
use oci_spec::distribution::Reference;

use self::fetch::Session;
pub use self::login::Login;
use super::manifest::{self, Document, Found, Layer, Place, Platform};
use super::source::Blobs;
use super::store::{Store, Stored};
use super::{Digest, Job, Name};
use crate::clock::Timestamp;
use crate::error::Kind;

/// Why a registry gave nothing that can be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("`{text}` names nothing in a registry: {why}")]
    Reference { text: String, why: String },
    #[error("plain HTTP is for registries on this host's loopback, and `{0}` is none")]
    PlainHttp(String),
    #[error("registry `{registry}` does not let us have {what} ({status})")]
    Denied {
        registry: String,
        what: String,
        status: u16,
    },
    #[error("registry `{registry}` has no {what}")]
    NotFound { registry: String, what: String },
    #[error("registry `{registry}` answered {status} for {what}")]
    Status {
        registry: String,
        what: String,
        status: u16,
    },
    #[error("could not get {what} from registry `{registry}`: {reason}")]
    Transport {
        registry: String,
        what: String,
        reason: String,
    },
    #[error("registry `{registry}` sent nothing more of {what} for {} s", .after.as_secs_f32())]
    Stalled {
        registry: String,
        what: String,
        after: Duration,
    },
    #[error("registry `{registry}` sends more than {limit} bytes as {what}")]
    TooMuch { registry: String, what: String, limit: u64 },
    #[error("the pull took longer than {} s", .0.as_secs_f32())]
    Deadline(Duration),
    #[error("the way in to registry `{registry}` makes no sense: {why}")]
    Challenge { registry: String, why: String },
    #[error("registry `{registry}` has a certificate that is not to be trusted: {reason}")]
    Certificate { registry: String, reason: String },
    #[error("`{}` holds no certificates: {why}", .path.display())]
    Authority { path: PathBuf, why: String },
    #[error("no login for registry `{registry}` can be had: {why}")]
    Login { registry: String, why: String },
}

impl Error {
    pub fn kind(&self) -> Kind {
        match self {
            Self::Reference { .. }
            | Self::TooMuch { .. }
            | Self::Challenge { .. }
            | Self::Login { .. }
            | Self::Authority { .. } => Kind::Invalid,
            Self::PlainHttp(_) | Self::Denied { .. } | Self::Certificate { .. } => Kind::Denied,
            Self::NotFound { .. } => Kind::NotFound,
            Self::Status { .. } | Self::Transport { .. } => Kind::Unavailable,
            Self::Stalled { .. } | Self::Deadline(_) => Kind::Deadline,
        }
    }

    pub(super) fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Denied { .. } => {
                Some("name a login: `--docker-config FILE`, or `--username NAME --password-from env:NAME`")
            }
            Self::PlainHttp(_) => Some("leave out `--plain-http`; a registry of your network needs a certificate"),
            Self::Certificate { .. } => Some(
                "name who signed it, if you trust them: `--registry-ca FILE`; a name or a date that is wrong they must mend",
            ),
            Self::Authority { .. } => Some("write PEM: `-----BEGIN CERTIFICATE-----`, one or several"),
            Self::NotFound { .. } => Some("check the name and the tag; private images look as if they were not there"),
            Self::Deadline(_) => Some("give it more time with `--timeout`"),
            Self::Transport { .. } | Self::Stalled { .. } => {
                Some("check network, proxy variables and certificates, and try again")
            }
            Self::Reference { .. } => Some("write `REGISTRY/REPOSITORY:TAG` or `REGISTRY/REPOSITORY@sha256:…`"),
            Self::Status { .. } | Self::TooMuch { .. } | Self::Challenge { .. } | Self::Login { .. } => None,
        }
    }
}

/// How patient a pull is.
#[derive(Debug, Clone)]
pub struct Patience {
    pub connect: Duration,
    /// Between two pieces of an answer.
    pub idle: Duration,
    /// For everything.
    pub total: Duration,
    /// Tries of one document or layer.
    pub attempts: u32,
    /// Before the second try; twice as long before each further one.
    pub pause: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(10),
            idle: Duration::from_secs(30),
            total: Duration::from_secs(3600),
            attempts: 4,
            pause: Duration::from_millis(500),
        }
    }
}

/// What a pull is told besides what to pull.
#[derive(Debug, Clone, Default)]
pub struct Options {
    pub platform: Platform,
    pub login: Login,
    pub patience: Patience,
    /// Speak HTTP without TLS. Only to loopback addresses.
    pub plain_http: bool,
    /// Certificates (PEM) of authorities that are trusted besides those of this host.
    pub authorities: Option<PathBuf>,
}

/// Layers that are fetched at once.
const AT_ONCE: usize = 3;

/// An image in a registry: `REGISTRY/REPOSITORY[:TAG][@DIGEST]`.
///
/// # Errors
/// [`Error::Reference`] when it is none, or its digest is not SHA-256.
pub fn reference(text: &str) -> Result<Reference, Error> {
    let refuse = |why: String| Error::Reference {
        text: text.to_owned(),
        why,
    };
    let reference: Reference = text.parse().map_err(|error| refuse(crate::error::chain(&error)))?;
    if let Some(Err(error)) = reference.digest().map(|digest| digest.parse::<Digest>()) {
        return Err(refuse(error.to_string()));
    }
    Ok(reference)
}

/// What an image is called in the store when nothing else is said: as in the registry, without the registry.
///
/// # Errors
/// When that is no name.
pub fn default_name(reference: &Reference) -> Result<Name, super::Error> {
    let repository = reference.repository();
    let repository = repository.strip_prefix("library/").unwrap_or(repository);
    match reference.tag() {
        Some(tag) => format!("{repository}:{tag}").parse(),
        None => repository.parse(),
    }
}

/// Pulls an image into the store.
///
/// # Errors
/// Whatever is wrong with the registry or the image; nothing of it is kept then.
pub async fn pull(
    store: &Store,
    reference: &Reference,
    options: &Options,
    name: &Name,
    now: Timestamp,
    job: &Job,
) -> Result<Stored, super::Error> {
    // What runs on another thread ends with this future.
    let stop = job.cancel.child_token();
    let job = &Job {
        cancel: stop.clone(),
        ..job.clone()
    };
    let _guard = stop.clone().drop_guard();
    let pulling = pulling(store, reference, options, name, now, job);
    let limit = options.patience.total;
    tokio::select! {
        result = tokio::time::timeout(limit, pulling) => result.map_err(|_| Error::Deadline(limit))?,
        () = stop.cancelled() => Err(super::Error::Cancelled),
    }
}

async fn pulling(
    store: &Store,
    reference: &Reference,
    options: &Options,
    name: &Name,
    now: Timestamp,
    job: &Job,
) -> Result<Stored, super::Error> {
    let session = Session::open(reference, options, job).await?;
    let found = documents(&session, reference, &options.platform).await?;
    let bytes: u64 = places(&found).map(|place| place.size).fold(0, u64::saturating_add);
    if bytes > job.bounds.bytes {
        return Err(super::Error::TooLarge {
            what: "bytes",
            limit: job.bounds.bytes,
        });
    }
    let (claim, scratch, found) = {
        let (store, job) = (store.clone(), job.clone());
        blocking(move || Ok((store.claim(&found, &job)?, store.scratch()?, found))).await?
    };
    let folder = scratch.path().join("blobs/sha256");
    fs::create_dir_all(&folder).map_err(super::Error::store("make a directory"))?;
    if !claim.is_made() {
        // The same layer may stand in an image twice.
        let mut wanted: Vec<Place> = places(&found).cloned().collect();
        wanted.sort_by(|a, b| a.digest.cmp(&b.digest));
        wanted.dedup();
        let layers = wanted.len();
        let fetched = stream::iter((1..).zip(wanted))
            .map(|(layer, place)| {
                let into = folder.join(place.digest.hex());
                let session = &session;
                async move { session.layer(layer, layers, &place, &into).await }
            })
            .buffer_unordered(AT_ONCE);
        fetched.try_collect::<()>().await?;
    }
    let source = reference.to_string();
    let (store, job, name) = (store.clone(), job.clone(), name.clone());
    blocking(move || {
        let blobs = Blobs::directory(scratch.path())?;
        store.add(claim, &found, &blobs, &source, &name, now, &job)
    })
    .await
}

fn places(found: &Found) -> impl Iterator<Item = &Place> {
    found.layers.iter().filter_map(|layer: &Layer| layer.place.as_ref())
}

fn blob(digest: &Digest) -> String {
    format!("blobs/sha256/{}", digest.hex())
}

async fn documents(session: &Session<'_>, reference: &Reference, platform: &Platform) -> Result<Found, super::Error> {
    let asked = reference.digest().map(|digest| digest.parse::<Digest>()).transpose()?;
    let name = match &asked {
        Some(digest) => digest.to_string(),
        None => reference.tag().unwrap_or("latest").to_owned(),
    };
    let (bytes, digest) = session.manifest(&name).await?;
    if let Some(asked) = asked {
        asked.check("the manifest", digest.clone())?;
    }
    let (digest, manifest) = match Document::read(&bytes)? {
        Document::Manifest(manifest) => (digest, manifest),
        Document::Index(index) => {
            let place = manifest::choose(&index, platform)?;
            let (bytes, found) = session.manifest(&place.digest.to_string()).await?;
            place.check("the manifest", &bytes)?;
            match Document::read(&bytes)? {
                Document::Manifest(manifest) => (found, manifest),
                Document::Index(_) => {
                    return Err(super::Error::format("the index", "it leads from index to index"));
                }
            }
        }
    };
    let place = manifest::config_of(&manifest)?;
    let config = session.config(&place).await?;
    manifest::found(digest, &manifest, &config, platform, blob)
}

/// Off the async threads; its end is waited for.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, super::Error> + Send + 'static,
) -> Result<T, super::Error> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|error| super::Error::store("work")(std::io::Error::other(error)))?
}

#[cfg(test)]
mod tests;
