//! The documents of an image: index, manifest, and which platform of several is wanted.

use std::fmt;
use std::str::FromStr;

use oci_spec::image::{Descriptor, ImageIndex, ImageManifest};

use super::config::Whole;
use super::layer::Whiteouts;
use super::packing::Packing;
use super::{Bounds, Digest, Error};

const INDEXES: [&str; 2] = [
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
];
const MANIFESTS: [&str; 2] = [
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
];
const CONFIGS: [&str; 2] = [
    "application/vnd.oci.image.config.v1+json",
    "application/vnd.docker.container.image.v1+json",
];

/// Everything that is asked for.
pub(super) fn accepted() -> String {
    [INDEXES, MANIFESTS].concat().join(", ")
}

/// `linux/ARCH` or `linux/ARCH/VARIANT`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Platform {
    pub os: String,
    pub architecture: String,
    pub variant: Option<String>,
}

impl Default for Platform {
    /// This host's.
    fn default() -> Self {
        let architecture = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => other,
        };
        Self {
            os: "linux".to_owned(),
            architecture: architecture.to_owned(),
            variant: None,
        }
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.os, self.architecture)?;
        match &self.variant {
            Some(variant) => write!(f, "/{variant}"),
            None => Ok(()),
        }
    }
}

impl FromStr for Platform {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.splitn(3, '/');
        match (parts.next(), parts.next(), parts.next()) {
            (Some("linux"), Some(architecture), variant) if !architecture.is_empty() => Ok(Self {
                os: "linux".to_owned(),
                architecture: architecture.to_owned(),
                variant: variant.map(str::to_owned),
            }),
            _ => Err(format!(
                "`{text}` is no platform: write `linux/amd64`, `linux/arm64/v8`"
            )),
        }
    }
}

impl Platform {
    fn takes(&self, other: &oci_spec::image::Platform) -> bool {
        other.os().to_string() == self.os
            && other.architecture().to_string() == self.architecture
            && (self.variant.is_none() || *other.variant() == self.variant)
    }

    /// # Errors
    /// [`Error::Platform`] when the image is for another.
    pub(super) fn check(&self, whole: &Whole) -> Result<(), Error> {
        let config = &whole.config;
        if config.os == self.os && config.architecture == self.architecture {
            return Ok(());
        }
        Err(Error::Platform {
            wanted: self.to_string(),
            have: vec![format!("{}/{}", config.os, config.architecture)],
        })
    }
}

/// Where one document or layer is: its address and length.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    pub digest: Digest,
    pub size: u64,
}

impl Place {
    pub fn of(descriptor: &Descriptor) -> Result<Self, Error> {
        Ok(Self {
            digest: descriptor.digest().to_string().parse()?,
            size: descriptor.size(),
        })
    }

    /// A document with this address.
    pub fn check(&self, what: &str, bytes: &[u8]) -> Result<(), Error> {
        self.digest.check(what, Digest::of(bytes))?;
        self.check_size(what, bytes.len() as u64)
    }

    pub fn check_size(&self, what: &str, found: u64) -> Result<(), Error> {
        if found == self.size {
            return Ok(());
        }
        Err(Error::Size {
            what: what.to_owned(),
            expected: self.size,
            found,
        })
    }
}

/// One layer of an image.
#[derive(Debug, Clone)]
pub(super) struct Layer {
    /// What its source calls it.
    pub blob: String,
    /// As packed; where it is not known, the configuration's hash of the unpacked layer still binds.
    pub place: Option<Place>,
    /// Told by the first bytes where nothing says it.
    pub packing: Option<Packing>,
    /// Of the unpacked layer.
    pub diff_id: Digest,
}

/// An image that was found, all but its layers' bytes.
#[derive(Debug)]
pub(super) struct Found {
    /// Of its manifest; of its configuration where there is no manifest.
    pub digest: Digest,
    pub whole: Whole,
    /// Lowest first.
    pub layers: Vec<Layer>,
    pub whiteouts: Whiteouts,
}

/// A document: an index leads to manifests, a manifest to one image.
pub(super) enum Document {
    Index(Box<ImageIndex>),
    Manifest(Box<ImageManifest>),
}

impl Document {
    /// By its own media type, else by what it has.
    pub fn read(bytes: &[u8]) -> Result<Self, Error> {
        const WHAT: &str = "the manifest";
        #[derive(serde::Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Shape {
            schema_version: u32,
            media_type: Option<String>,
            manifests: Option<serde::de::IgnoredAny>,
        }
        let shape: Shape = serde_json::from_slice(bytes).map_err(|error| Error::format(WHAT, error))?;
        if shape.schema_version != 2 {
            return Err(Error::format(WHAT, format!("schema version {}", shape.schema_version)));
        }
        let is_index = match shape.media_type.as_deref() {
            Some(media_type) if INDEXES.contains(&media_type) => true,
            Some(media_type) if MANIFESTS.contains(&media_type) => false,
            Some(other) => return Err(Error::MediaType(other.to_owned())),
            None => shape.manifests.is_some(),
        };
        let failed = |error| Error::format(WHAT, error);
        Ok(if is_index {
            Self::Index(serde_json::from_slice(bytes).map_err(failed)?)
        } else {
            Self::Manifest(serde_json::from_slice(bytes).map_err(failed)?)
        })
    }
}

/// Manifests and indexes of an index; what else may be in one (signatures, notes on how it was built) is none.
pub(super) fn images(index: &ImageIndex) -> impl Iterator<Item = &Descriptor> {
    index.manifests().iter().filter(|descriptor| {
        let media_type = descriptor.media_type().to_string();
        let is_note = descriptor
            .annotations()
            .as_ref()
            .is_some_and(|notes| notes.contains_key("vnd.docker.reference.type"));
        let is_nowhere = descriptor
            .platform()
            .as_ref()
            .is_some_and(|platform| platform.os().to_string() == "unknown");
        let is_document = INDEXES.contains(&media_type.as_str()) || MANIFESTS.contains(&media_type.as_str());
        is_document && !is_note && !is_nowhere && descriptor.artifact_type().is_none()
    })
}

/// The image for a platform: the first that fits, as the format says.
pub(super) fn choose(index: &ImageIndex, platform: &Platform) -> Result<Place, Error> {
    let mut all = images(index);
    let fits = |descriptor: &&Descriptor| match descriptor.platform() {
        Some(other) => platform.takes(other),
        // Says nothing; its configuration will.
        None => true,
    };
    if let Some(chosen) = all.find(fits) {
        return Place::of(chosen);
    }
    let shown = |descriptor: &Descriptor| {
        let platform = descriptor.platform().as_ref()?;
        Some(format!("{}/{}", platform.os(), platform.architecture()))
    };
    Err(Error::Platform {
        wanted: platform.to_string(),
        have: images(index).filter_map(shown).collect(),
    })
}

/// Where a manifest's configuration is.
pub(super) fn config_of(manifest: &ImageManifest) -> Result<Place, Error> {
    let media_type = manifest.config().media_type().to_string();
    if !CONFIGS.contains(&media_type.as_str()) {
        return Err(Error::MediaType(media_type));
    }
    let place = Place::of(manifest.config())?;
    if place.size > Bounds::DOCUMENT {
        return Err(Error::TooLarge {
            what: "bytes in its configuration",
            limit: Bounds::DOCUMENT,
        });
    }
    Ok(place)
}

/// An image from its manifest (whose address was checked) and its configuration.
pub(super) fn found(
    digest: Digest,
    manifest: &ImageManifest,
    config: &[u8],
    platform: &Platform,
    blob: impl Fn(&Digest) -> String,
) -> Result<Found, Error> {
    config_of(manifest)?.check("the image's configuration", config)?;
    let whole = Whole::read(config)?;
    platform.check(&whole)?;
    if manifest.layers().len() != whole.diff_ids.len() {
        let why = format!(
            "it has {} layers, and its configuration {}",
            manifest.layers().len(),
            whole.diff_ids.len()
        );
        return Err(Error::format("the manifest", why));
    }
    let layer = |(descriptor, diff_id): (&Descriptor, &Digest)| {
        let place = Place::of(descriptor)?;
        Ok(Layer {
            blob: blob(&place.digest),
            packing: Some(Packing::of_media_type(descriptor.media_type().as_ref())?),
            place: Some(place),
            diff_id: diff_id.clone(),
        })
    };
    let layers = manifest.layers().iter().zip(&whole.diff_ids).map(layer);
    Ok(Found {
        layers: layers.collect::<Result<_, Error>>()?,
        digest,
        whole,
        whiteouts: Whiteouts::Apply,
    })
}
