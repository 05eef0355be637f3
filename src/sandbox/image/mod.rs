//! Images: where the root file system of a sandbox comes from.
//!
//! Owns: turning an [`ImageRef`] into a [`Root`], a recipe that a backend builds from; the store of images, and all ways into
//! it. Must not know: how mounts are made. An image is hostile: nothing of it is run or loaded on the host, no name in it is
//! followed by the host, and what a sandbox relies on (`/dev`, `/proc`, mount points, `/etc/passwd`) is ours and lies over it.
//!
//! ```text
//!  source/    rootfs, tar, layout, archive ─┐
//!  registry/  pull ─────────────────────────┼─► manifest.rs, config.rs: what is promised (digests, sizes, platform)
//!  build.rs   mmdebstrap, docker, buildah ──┘           │
//!                                           store/ ◄────┤ names, records, removal
//!                                           roots.rs    │ made once, whole or not at all
//!                                           layer.rs ◄──┘ tar by tar (tape.rs), by descriptor (place.rs), unpacked (packing.rs)
//! ```
//!
//! `host.rs` is the `host` image, `rootfs.rs` directories and tars that are used without being imported. Why it is as it is:
//! `docs/adr/0014-image-store.md`.

pub mod build;
mod config;
mod digest;
mod error;
mod host;
mod job;
mod layer;
mod manifest;
mod name;
mod packing;
mod place;
pub mod registry;
mod rootfs;
mod roots;
mod source;
mod store;
mod tape;
#[cfg(test)]
mod testing;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub use self::config::Config;
pub use self::digest::Digest;
pub use self::error::Error as StoreError;
use self::error::Error;
pub use self::job::{Bounds, Job, Progress};
pub use self::manifest::Platform;
pub use self::name::{Name, StoredRef};
pub use self::source::Source;
pub use self::store::{Collected, Options, Removed, Store, Stored};
use super::{Error as SandboxError, Identity, ImageRef, Mount};

/// A recipe for a read-only root file system.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Root {
    /// A directory of the host that lies below everything else.
    pub lower: Option<PathBuf>,
    /// Host paths, bound read-only; not what is mounted below them.
    pub binds: Vec<Mount>,
    /// Symbolic links: path, then what it holds.
    pub links: Vec<(PathBuf, PathBuf)>,
    /// Files of ours.
    pub files: Vec<(PathBuf, String)>,
}

impl Root {
    /// Adds a host path as what it is: a link stays a link, a file or directory is bound; anything else, or nothing, is left
    /// out.
    pub(super) fn show(&mut self, source: &Path, target: &Path) -> io::Result<()> {
        let kind = match fs::symlink_metadata(source) {
            Ok(found) => found.file_type(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        };
        if kind.is_symlink() {
            self.links.push((target.into(), fs::read_link(source)?));
        } else if kind.is_dir() || kind.is_file() {
            self.binds.push(Mount {
                source: source.into(),
                target: target.into(),
            });
        }
        Ok(())
    }
}

/// The names in a directory that are text, sorted.
pub(super) fn names(directory: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(directory)? {
        names.extend(entry?.file_name().into_string());
    }
    names.sort();
    Ok(names)
}

/// What the programs in a sandbox are called, and where they live: in the same words as their environment says it.
pub const USER: &str = "sandbox";
pub const HOME: &str = "/tmp";
pub const HOSTNAME: &str = "sandbox";

/// Finds or unpacks an image.
///
/// # Errors
/// [`SandboxError::Image`] when there is none, or it is hostile; [`SandboxError::Unsupported`] for an image that only an
/// engine has.
pub fn resolve(image: &ImageRef, data_dir: &Path) -> Result<Root, SandboxError> {
    let lower = match image {
        ImageRef::Host => return host(),
        ImageRef::Rootfs(path) => rootfs::directory(path),
        ImageRef::Tar(path) => rootfs::unpacked(path, data_dir),
        ImageRef::Stored(stored) => Store::open(data_dir).and_then(|store| store.root(stored)),
        ImageRef::Docker(name) => {
            return Err(SandboxError::Unsupported {
                wanted: format!("image `{image}`"),
                missing: format!(
                    "only the `docker` backend takes images from an engine; `docker save {name} > FILE` and \
                     `exuvia image import archive:FILE` bring it into the store"
                ),
            });
        }
    };
    Ok(Root {
        lower: Some(lower.map_err(|error| refused(image, &error))?),
        files: own_files(),
        ..Root::default()
    })
}

/// The image with the digest that its name has now, so that it stays the same; other images are given back as they are.
///
/// # Errors
/// [`SandboxError::Image`] when the store has none of that name.
pub fn pinned(image: ImageRef, data_dir: &Path) -> Result<ImageRef, SandboxError> {
    let ImageRef::Stored(stored) = image else {
        return Ok(image);
    };
    match Store::open(data_dir).and_then(|store| store.get(&stored)) {
        Ok(found) => Ok(ImageRef::Stored(StoredRef {
            digest: Some(found.digest),
            ..stored
        })),
        Err(error) => Err(refused(&ImageRef::Stored(stored), &error)),
    }
}

/// The variables that commands get from the image, below what the caller sets (see `config.rs` for which).
///
/// # Errors
/// [`SandboxError::Image`] when the store has no such image.
pub fn environment(image: &ImageRef, data_dir: &Path) -> Result<BTreeMap<String, String>, SandboxError> {
    match image {
        ImageRef::Stored(stored) => Store::open(data_dir)
            .and_then(|store| store.get(stored))
            .map(|found| found.config.env)
            .map_err(|error| refused(image, &error)),
        ImageRef::Host | ImageRef::Rootfs(_) | ImageRef::Tar(_) | ImageRef::Docker(_) => Ok(BTreeMap::new()),
    }
}

/// Notes in a sandbox's directory that it stands on `root`: the store keeps that while the directory is there.
///
/// # Errors
/// When the note cannot be written.
pub fn hold(root: &Root, sandbox: &Path) -> io::Result<()> {
    store::uses::hold(root, sandbox)
}

/// The view of this host: the `host` image.
///
/// # Errors
/// [`SandboxError::Image`] when it cannot be read.
pub fn host() -> Result<Root, SandboxError> {
    host::root()
}

fn refused(image: &ImageRef, error: &Error) -> SandboxError {
    let mut reason = crate::error::chain(error);
    if let Some(hint) = error.hint() {
        reason = format!("{reason} ({hint})");
    }
    SandboxError::Image {
        image: image.to_string(),
        reason,
    }
}

/// The accounts of a sandbox whose programs run as `user`: `/etc/passwd` and `/etc/group`.
pub fn accounts(user: u32) -> [(&'static str, String); 2] {
    [
        (
            "/etc/passwd",
            format!(
                "root:x:0:0:root:/:/usr/sbin/nologin\n{USER}:x:{user}:{user}::{HOME}:/bin/sh\n\
                 nobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n"
            ),
        ),
        (
            "/etc/group",
            format!("root:x:0:\ntty:x:5:\n{USER}:x:{user}:\nnogroup:x:65534:\n"),
        ),
    ]
}

/// Files that every sandbox has in place of the image's: nobody's names, no resolver, no host identity.
fn own_files() -> Vec<(PathBuf, String)> {
    let files = [
        ("/etc/hostname", format!("{HOSTNAME}\n")),
        ("/etc/hosts", format!("127.0.0.1 localhost {HOSTNAME}\n::1 localhost\n")),
        (
            "/etc/nsswitch.conf",
            "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\nservices: files\nprotocols: files\n"
                .to_owned(),
        ),
        (
            "/etc/resolv.conf",
            "# A sandbox asks no name server: names are resolved by the egress proxy.\n".to_owned(),
        ),
        ("/etc/machine-id", "uninitialized\n".to_owned()),
    ];
    let files = accounts(Identity::USER).into_iter().chain(files);
    files.map(|(path, text)| (path.into(), text)).collect()
}
