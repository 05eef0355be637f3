//! The image store: what is under which name, and everything that is done to it.
//!
//! ```text
//!  DATA/images/names.json          name -> digest, replaced whole
//!              records/HEX.json    what is known of the image with that digest; where its root is
//!              root-HEX            see `roots.rs`
//! ```
//!
//! An image is added in this order: root, record, name. So a name always leads to a whole image, and a process killed on the
//! way leaves at most what `gc` removes.

mod names;
mod removal;
pub(super) mod uses;

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub use self::removal::{Collected, Removed};
use super::config::Config;
use super::digest::Hashing;
use super::layer::Unpacking;
use super::manifest::{Found, Layer, Platform};
use super::packing::{self, Packing};
use super::roots::{Claim, Key, Roots, Scratch};
use super::source::{Blobs, Source};
use super::{Digest, Error, Job, Name, Progress, StoredRef};
use crate::clock::Timestamp;

/// What is known of a stored image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stored {
    pub format_version: u32,
    /// Of its manifest; of its configuration where it came without one.
    pub digest: Digest,
    /// Of its layers, one over the other: images with the same share one root.
    pub chain: Digest,
    pub layers: usize,
    /// In its layers, before later ones hide some.
    pub entries: u64,
    pub bytes: u64,
    pub config: Config,
    /// Where it came from.
    pub source: String,
    pub created_at: Timestamp,
}

const FORMAT_VERSION: u32 = 1;

/// What an import is told besides where to look.
#[derive(Debug, Clone, Default)]
pub struct Options {
    pub platform: Platform,
    /// For root file systems, which bring none: the `config` of an image, as JSON.
    pub config: serde_json::Map<String, serde_json::Value>,
    /// What the record says of where it came from, when that is more than the source.
    pub origin: Option<String>,
}

/// See the module. Blocking, all of it.
#[derive(Debug, Clone)]
pub struct Store {
    data_dir: PathBuf,
    pub(super) roots: Roots,
}

impl Store {
    pub fn open(data_dir: &Path) -> Result<Self, Error> {
        let roots = Roots::open(data_dir)?;
        fs::create_dir_all(roots.images().join("records")).map_err(Error::store("make a directory"))?;
        Ok(Self {
            data_dir: data_dir.to_owned(),
            roots,
        })
    }

    /// Adds an image under a name, which may have meant another until now. Unpacks it unless that was done before.
    pub fn import(
        &self,
        source: &Source,
        options: &Options,
        name: &Name,
        now: Timestamp,
        job: &Job,
    ) -> Result<Stored, Error> {
        let scratch = self.roots.scratch()?;
        let config = serde_json::Value::Object(options.config.clone());
        let (found, blobs) = source.open(&options.platform, &config, &scratch, job)?;
        let claim = self.claim(&found, job)?;
        let origin = options.origin.clone().unwrap_or_else(|| source.to_string());
        self.add(claim, &found, &blobs, &origin, name, now, job)
    }

    /// The right to unpack an image, or the knowledge that it was.
    pub(super) fn claim(&self, found: &Found, job: &Job) -> Result<Claim, Error> {
        self.roots.claim(&Key::of_chain(&found.whole.chain()), job)
    }

    pub(super) fn scratch(&self) -> Result<Scratch, Error> {
        self.roots.scratch()
    }

    #[expect(clippy::too_many_arguments, reason = "all of it is one image")]
    pub(super) fn add(
        &self,
        claim: Claim,
        found: &Found,
        blobs: &Blobs,
        source: &str,
        name: &Name,
        now: Timestamp,
        job: &Job,
    ) -> Result<Stored, Error> {
        let chain = found.whole.chain();
        // Of this image, or of another with the same layers.
        let known = self.of_chain(&chain)?;
        let counted = match known {
            Some(known) if claim.is_made() => (known.entries, known.bytes),
            Some(_) | None if claim.is_made() => (0, 0),
            Some(_) | None => claim.make(|root| unpack(found, blobs, root, job))?,
        };
        let stored = Stored {
            format_version: FORMAT_VERSION,
            digest: found.digest.clone(),
            chain,
            layers: found.layers.len(),
            entries: counted.0,
            bytes: counted.1,
            config: found.whole.config.clone(),
            source: source.to_owned(),
            created_at: now,
        };
        let _alone = self.roots.lock()?;
        replace(
            &self.record(&stored.digest),
            &serde_json::to_vec_pretty(&stored)
                .map_err(io::Error::from)
                .map_err(Error::store("write a record"))?,
        )
        .map_err(Error::store("write a record"))?;
        names::change(self.roots.images(), |names| {
            names.insert(name.clone(), stored.digest.clone());
        })?;
        drop(claim);
        Ok(stored)
    }

    fn record(&self, digest: &Digest) -> PathBuf {
        self.roots
            .images()
            .join("records")
            .join(format!("{}.json", digest.hex()))
    }

    /// What is known of the image with this digest.
    pub fn by_digest(&self, digest: &Digest) -> Result<Option<Stored>, Error> {
        match fs::read(self.record(digest)) {
            Ok(bytes) => {
                let stored: Stored = serde_json::from_slice(&bytes)
                    .map_err(|error| Error::format(format!("the record of `{digest}`"), error))?;
                if stored.format_version == FORMAT_VERSION {
                    Ok(Some(stored))
                } else {
                    let why = format!(
                        "format version {}, and this program knows {FORMAT_VERSION}",
                        stored.format_version
                    );
                    Err(Error::format(format!("the record of `{digest}`"), why))
                }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(Error::store("read a record")(error)),
        }
    }

    fn records(&self) -> Result<Vec<Stored>, Error> {
        let names = super::names(&self.roots.images().join("records")).map_err(Error::store("list the records"))?;
        let digests = names
            .iter()
            .filter_map(|name| format!("sha256:{}", name.strip_suffix(".json")?).parse().ok());
        let mut records = Vec::new();
        for digest in digests.collect::<Vec<Digest>>() {
            records.extend(self.by_digest(&digest)?);
        }
        Ok(records)
    }

    fn of_chain(&self, chain: &Digest) -> Result<Option<Stored>, Error> {
        Ok(self.records()?.into_iter().find(|stored| stored.chain == *chain))
    }

    /// Every name and its image, by name.
    pub fn list(&self) -> Result<Vec<(Name, Stored)>, Error> {
        let mut all = Vec::new();
        for (name, digest) in names::read(self.roots.images())? {
            // Gone, if it is removed right now.
            all.extend(self.by_digest(&digest)?.map(|stored| (name, stored)));
        }
        Ok(all)
    }

    /// The image that is meant: by its digest where there is one, whatever bears the name today.
    pub fn get(&self, image: &StoredRef) -> Result<Stored, Error> {
        let missing = || Error::NotStored(image.to_string());
        let digest = match &image.digest {
            Some(digest) => digest.clone(),
            None => names::read(self.roots.images())?
                .remove(&image.name)
                .ok_or_else(missing)?,
        };
        self.by_digest(&digest)?.ok_or_else(missing)
    }

    /// Where its root file system is; it counts as used just now.
    pub fn root(&self, image: &StoredRef) -> Result<PathBuf, Error> {
        let stored = self.get(image)?;
        self.roots
            .find(&Key::of_chain(&stored.chain))?
            .ok_or_else(|| Error::NotStored(image.to_string()))
    }
}

/// Replaces a file, whole or not at all, and lastingly.
fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let directory = path.parent().unwrap_or(path);
    let mut fresh = tempfile::NamedTempFile::new_in(directory)?;
    io::Write::write_all(&mut fresh, bytes)?;
    fresh.as_file().sync_all()?;
    fresh.persist(path)?;
    File::open(directory)?.sync_all()
}

/// Unpacks all layers, and holds each to what was promised of it. Answers how many entries and bytes there were.
fn unpack(found: &Found, blobs: &Blobs, root: &Path, job: &Job) -> Result<(u64, u64), Error> {
    let mut unpacking = Unpacking::new(root, job)?;
    for (number, layer) in (1..).zip(&found.layers) {
        job.tell(Progress::Unpacking {
            layer: number,
            layers: found.layers.len(),
        });
        apply(&mut unpacking, number, layer, found, blobs, job)?;
    }
    unpacking.finish()
}

fn apply(
    unpacking: &mut Unpacking,
    number: usize,
    layer: &Layer,
    found: &Found,
    blobs: &Blobs,
    job: &Job,
) -> Result<(), Error> {
    let what = format!("layer {number}");
    let open = || {
        let missing = || Error::format("the image", format!("{what}, `{}`, is missing", layer.blob));
        blobs.open(&layer.blob)?.ok_or_else(missing)
    };
    let packing = match layer.packing {
        Some(packing) => packing,
        None => {
            let mut first = Vec::new();
            open()?.0.take(6).read_to_end(&mut first).map_err(Error::tar)?;
            Packing::of_bytes(&first)
        }
    };
    let (from, size) = open()?;
    if let Some(place) = &layer.place {
        place.check_size(&what, size)?;
    }
    let packed = Hashing::new(job.reader(from));
    let unpacked = packing::unpacked(packing, packed.clone(), &job.bounds).map_err(Error::tar)?;
    let unpacked = Hashing::new(unpacked.take(job.bounds.bytes.saturating_mul(2)));
    let applied = unpacking.layer(unpacked.clone(), found.whiteouts);
    // What was changed on the way may be a broken tar as well; the digest says what it really was.
    match &applied {
        Ok(()) | Err(Error::Tar(_) | Error::Entry { .. } | Error::Unpack { .. }) => {}
        Err(_) => return applied,
    }
    let rest = unpacked.finish();
    let (digest, _) = packed.finish().map_err(Error::tar)?;
    if let Some(place) = &layer.place {
        place.digest.check(what.as_str(), digest)?;
    }
    applied?;
    let (diff_id, _) = rest.map_err(Error::tar)?;
    layer.diff_id.check(format!("{what}, unpacked,"), diff_id)
}

#[cfg(test)]
mod tests;
