//! What `docker save` wrote before it wrote layouts: `manifest.json`, a configuration, and a tar for each layer.

use serde::Deserialize;

use super::Blobs;
use crate::sandbox::image::config::Whole;
use crate::sandbox::image::layer::Whiteouts;
use crate::sandbox::image::manifest::{Found, Layer, Platform};
use crate::sandbox::image::{Digest, Error};

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Saved {
    config: String,
    repo_tags: Option<Vec<String>>,
    layers: Vec<String>,
}

/// Whether an image called `name` is meant by `asked`: its whole name, or the end of it after `:` or `/`.
pub(super) fn is_named(name: &str, asked: &str) -> bool {
    name.strip_suffix(asked)
        .is_some_and(|before| before.is_empty() || before.ends_with([':', '/']))
}

pub(super) fn open(blobs: Blobs, tag: Option<&str>, platform: &Platform) -> Result<(Found, Blobs), Error> {
    const WHAT: &str = "`manifest.json`";
    let all: Vec<Saved> =
        serde_json::from_slice(&blobs.document("manifest.json")?).map_err(|error| Error::format(WHAT, error))?;
    let every = || -> Vec<String> {
        let names = all.iter().map(|saved| saved.repo_tags.clone().unwrap_or_default());
        names.flatten().collect()
    };
    let names = |saved: &Saved| saved.repo_tags.clone().unwrap_or_default();
    let meant = |saved: &&Saved| tag.is_none_or(|tag| names(saved).iter().any(|name| is_named(name, tag)));
    let mut meant = all.iter().filter(meant);
    let saved = match (meant.next(), meant.next(), tag) {
        (Some(only), None, _) => only,
        (None, _, Some(tag)) => {
            return Err(Error::NoTag {
                wanted: tag.to_owned(),
                have: every(),
            });
        }
        (None, _, None) => return Err(Error::format(WHAT, "it has no image")),
        (Some(_), Some(_), _) => return Err(Error::Several(every())),
    };
    let config = blobs.document(&saved.config)?;
    let digest = Digest::of(&config);
    // The file bears its digest, in either of two forms.
    let bare = saved.config.strip_suffix(".json").unwrap_or(&saved.config);
    let named = bare
        .rsplit('/')
        .next()
        .and_then(|hex| format!("sha256:{hex}").parse::<Digest>().ok());
    named
        .ok_or_else(|| Error::format(WHAT, "its configuration bears no digest"))?
        .check("the image's configuration", digest.clone())?;
    let whole = Whole::read(&config)?;
    platform.check(&whole)?;
    if saved.layers.len() != whole.diff_ids.len() {
        let why = format!(
            "it has {} layers, and its configuration {}",
            saved.layers.len(),
            whole.diff_ids.len()
        );
        return Err(Error::format(WHAT, why));
    }
    let layer = |(blob, diff_id): (&String, &Digest)| Layer {
        blob: blob.trim_start_matches("./").to_owned(),
        place: None,
        packing: None,
        diff_id: diff_id.clone(),
    };
    let found = Found {
        layers: saved.layers.iter().zip(&whole.diff_ids).map(layer).collect(),
        digest,
        whole,
        whiteouts: Whiteouts::Apply,
    };
    Ok((found, blobs))
}
