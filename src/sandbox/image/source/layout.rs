//! OCI image layouts, in a directory or an archive.

use oci_spec::image::{Descriptor, ImageIndex};

use super::Blobs;
use crate::sandbox::image::manifest::{self, Document, Found, Place, Platform};
use crate::sandbox::image::{Digest, Error};

/// Annotations that name an image in an index: the format's own, and what engines write.
const NAMES: [&str; 2] = ["org.opencontainers.image.ref.name", "io.containerd.image.name"];
/// Indexes within indexes.
const DEEPEST: usize = 4;

pub(super) fn open(blobs: Blobs, tag: Option<&str>, platform: &Platform) -> Result<(Found, Blobs), Error> {
    let header = blobs.document("oci-layout")?;
    #[derive(serde::Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Header {
        image_layout_version: String,
    }
    let header: Header = serde_json::from_slice(&header).map_err(|error| Error::format("`oci-layout`", error))?;
    if header.image_layout_version != "1.0.0" {
        return Err(Error::format(
            "`oci-layout`",
            format!("version `{}`", header.image_layout_version),
        ));
    }
    let index = blobs.document("index.json")?;
    let index: ImageIndex = serde_json::from_slice(&index).map_err(|error| Error::format("`index.json`", error))?;
    let found = descend(&blobs, select(&index, tag, platform)?, platform)?;
    Ok((found, blobs))
}

fn blob(digest: &Digest) -> String {
    format!("blobs/sha256/{}", digest.hex())
}

/// The one image that is meant.
fn select(index: &ImageIndex, tag: Option<&str>, platform: &Platform) -> Result<Place, Error> {
    let names = |descriptor: &Descriptor| -> Vec<String> {
        let notes = descriptor.annotations().clone().unwrap_or_default();
        NAMES.iter().filter_map(|name| notes.get(*name).cloned()).collect()
    };
    let named: Vec<&Descriptor> = manifest::images(index)
        .filter(|descriptor| {
            tag.is_none_or(|tag| names(descriptor).iter().any(|name| super::docker::is_named(name, tag)))
        })
        .collect();
    let every = || -> Vec<String> {
        let all = manifest::images(index).map(|descriptor| {
            let own = names(descriptor);
            own.first().cloned().unwrap_or_else(|| descriptor.digest().to_string())
        });
        all.collect()
    };
    match (named.as_slice(), tag) {
        ([], Some(tag)) => Err(Error::NoTag {
            wanted: tag.to_owned(),
            have: every(),
        }),
        ([], None) => Err(Error::format("`index.json`", "it has no image")),
        ([only], _) => Place::of(only),
        // One image for several platforms may be spread out here too.
        (several, _) if several.iter().all(|one| one.platform().is_some()) && same_name(several, names) => {
            manifest::choose(index, platform)
        }
        (several, _) if several.iter().all(|one| one.digest() == several[0].digest()) => Place::of(several[0]),
        _ => Err(Error::Several(every())),
    }
}

fn same_name(several: &[&Descriptor], names: impl Fn(&Descriptor) -> Vec<String>) -> bool {
    several.iter().all(|one| names(one) == names(several[0]))
}

fn descend(blobs: &Blobs, mut at: Place, platform: &Platform) -> Result<Found, Error> {
    for _ in 0..DEEPEST {
        let bytes = blobs.document(&blob(&at.digest))?;
        at.check("the manifest", &bytes)?;
        match Document::read(&bytes)? {
            Document::Index(index) => at = manifest::choose(&index, platform)?,
            Document::Manifest(manifest) => {
                let config = blobs.document(&blob(&manifest::config_of(&manifest)?.digest))?;
                return manifest::found(at.digest, &manifest, &config, platform, blob);
            }
        }
    }
    Err(Error::format("the index", "it leads from index to index"))
}
