//! Where images come from, besides registries: directories, tars, layouts and archives of this host.
//!
//! Whatever it is, what comes out is the same: the documents, checked against their addresses, and a way to read the layers.

mod blobs;
mod docker;
mod layout;
mod plain;

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde_json::Value;

pub(super) use self::blobs::Blobs;
use super::manifest::{Found, Platform};
use super::roots::Scratch;
use super::{Error, Job};

/// Written `rootfs:DIR`, `tar:FILE`, `layout:DIR[:TAG]`, `archive:FILE[:TAG]`, or a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A root file system; it is copied.
    Rootfs(PathBuf),
    /// A tar of a root file system: plain, gzip, zstd or xz.
    Tar(PathBuf),
    /// An OCI image layout.
    Layout { path: PathBuf, tag: Option<String> },
    /// A layout in a tar, or what `docker save` writes.
    Archive { path: PathBuf, tag: Option<String> },
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (word, path, tag) = match self {
            Self::Rootfs(path) => ("rootfs", path, &None),
            Self::Tar(path) => ("tar", path, &None),
            Self::Layout { path, tag } => ("layout", path, tag),
            Self::Archive { path, tag } => ("archive", path, tag),
        };
        write!(f, "{word}:{}", path.display())?;
        match tag {
            Some(tag) => write!(f, ":{tag}"),
            None => Ok(()),
        }
    }
}

impl FromStr for Source {
    type Err = String;

    /// A bare path is taken for what it is on disk.
    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("rootfs", path)) if !path.is_empty() => return Ok(Self::Rootfs(path.into())),
            Some(("tar", path)) if !path.is_empty() => return Ok(Self::Tar(path.into())),
            Some(("layout", rest)) if !rest.is_empty() => {
                let (path, tag) = tagged(rest);
                return Ok(Self::Layout { path, tag });
            }
            Some(("archive", rest)) if !rest.is_empty() => {
                let (path, tag) = tagged(rest);
                return Ok(Self::Archive { path, tag });
            }
            Some(_) | None => {}
        }
        let (path, tag) = tagged(text);
        if path.join("oci-layout").is_file() {
            Ok(Self::Layout { path, tag })
        } else if path.is_dir() && tag.is_none() {
            Ok(Self::Rootfs(path))
        } else if path.is_file() && (tag.is_some() || blobs::is_archive(&path)) {
            Ok(Self::Archive { path, tag })
        } else if path.is_file() {
            Ok(Self::Tar(path))
        } else {
            Err(format!(
                "`{text}` is nothing to import: use `rootfs:DIR`, `tar:FILE`, `layout:DIR[:TAG]`, `archive:FILE[:TAG]`, or a path"
            ))
        }
    }
}

/// A path and what comes after its last colon; a path that is there as it stands has no tag.
fn tagged(text: &str) -> (PathBuf, Option<String>) {
    // A tag may be a whole name, `archive:x.tar:registry/name:tag`: the path is the longest start that is there.
    if Path::new(text).exists() {
        return (text.into(), None);
    }
    let ends = text.match_indices(':').map(|(at, _)| at).rev();
    for at in ends {
        if Path::new(&text[..at]).exists() {
            return (
                text[..at].into(),
                Some(text[at + 1..].to_owned()).filter(|tag| !tag.is_empty()),
            );
        }
    }
    (text.into(), None)
}

impl Source {
    /// Reads the documents. What has to be kept for reading the layers goes into `scratch`.
    /// `config` is for root file systems that come without one.
    pub(super) fn open(
        &self,
        platform: &Platform,
        config: &Value,
        scratch: &Scratch,
        job: &Job,
    ) -> Result<(Found, Blobs), Error> {
        match self {
            Self::Rootfs(path) => plain::directory(path, config, scratch, job),
            Self::Tar(path) => plain::tar(path, config, job),
            Self::Layout { path, tag } => layout::open(Blobs::directory(path)?, tag.as_deref(), platform),
            Self::Archive { path, tag } => {
                let blobs = Blobs::archive(path, scratch, job)?;
                if blobs.has("index.json") && blobs.has("oci-layout") {
                    layout::open(blobs, tag.as_deref(), platform)
                } else if blobs.has("manifest.json") {
                    docker::open(blobs, tag.as_deref(), platform)
                } else {
                    let why = "it has neither `index.json` nor `manifest.json`: a root file system is `tar:FILE`";
                    Err(Error::format("the archive", why))
                }
            }
        }
    }
}
