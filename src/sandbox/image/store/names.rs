//! `names.json`: which name means which image.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::replace;
use crate::sandbox::image::{Digest, Error, Name};

const FILE: &str = "names.json";

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Index {
    format_version: u32,
    names: BTreeMap<Name, Digest>,
}

pub(super) fn read(images: &Path) -> Result<BTreeMap<Name, Digest>, Error> {
    match fs::read(images.join(FILE)) {
        Ok(bytes) => {
            let index: Index = serde_json::from_slice(&bytes).map_err(|error| Error::format("`names.json`", error))?;
            if index.format_version != 1 {
                let why = format!("format version {}, and this program knows 1", index.format_version);
                return Err(Error::format("`names.json`", why));
            }
            Ok(index.names)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(BTreeMap::new()),
        Err(error) => Err(Error::store("read the names")(error)),
    }
}

/// Replaces the index. The store's lock is held.
pub(super) fn change(images: &Path, change: impl FnOnce(&mut BTreeMap<Name, Digest>)) -> Result<(), Error> {
    let mut names = read(images)?;
    change(&mut names);
    let index = Index {
        format_version: 1,
        names,
    };
    serde_json::to_vec_pretty(&index)
        .map_err(io::Error::from)
        .and_then(|bytes| replace(&images.join(FILE), &bytes))
        .map_err(Error::store("write the names"))
}
