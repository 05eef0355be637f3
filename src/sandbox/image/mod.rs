//! Images: where the root file system of a sandbox comes from.
//!
//! Owns: turning an [`ImageRef`] into a [`Root`], a recipe that a backend builds from, and the store of unpacked tars. Must
//! not know: how mounts are made. An image is hostile: nothing of it is run or loaded on the host, no name in it is followed
//! by the host, and what a sandbox relies on (`/dev`, `/proc`, mount points, `/etc/passwd`) is ours and lies over it.
//!
//! `host.rs` is the `host` image, `rootfs.rs` directories and tars.

mod host;
mod rootfs;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{Error, Identity, ImageRef, Mount};

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
/// [`Error::Image`] when there is none, or it is hostile; [`Error::Unsupported`] for an image that only an engine has.
pub fn resolve(image: &ImageRef, data_dir: &Path) -> Result<Root, Error> {
    let lower = match image {
        ImageRef::Host => return host(),
        ImageRef::Rootfs(path) => rootfs::directory(path).map_err(|reason| refused(image, reason))?,
        ImageRef::Tar(path) => rootfs::unpacked(path, data_dir).map_err(|reason| refused(image, reason))?,
        ImageRef::Docker(_) => {
            return Err(Error::Unsupported {
                wanted: format!("image `{image}`"),
                missing:
                    "the `oci` backend has no registry client: use the `docker` backend, or export the image to a tar"
                        .to_owned(),
            });
        }
    };
    Ok(Root {
        lower: Some(lower),
        files: own_files(),
        ..Root::default()
    })
}

/// The view of this host: the `host` image.
///
/// # Errors
/// [`Error::Image`] when it cannot be read.
pub fn host() -> Result<Root, Error> {
    host::root()
}

fn refused(image: &ImageRef, reason: rootfs::Refused) -> Error {
    let image = image.to_string();
    let reason = match reason {
        // The name of the image ends with it: once is enough.
        rootfs::Refused::Read { path, source } if image.ends_with(&*path.to_string_lossy()) => {
            format!("cannot read it: {source}")
        }
        reason => crate::error::chain(&reason),
    };
    Error::Image { image, reason }
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
