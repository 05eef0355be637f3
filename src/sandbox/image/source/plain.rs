//! Root file systems without documents: a directory or a tar. They are given a configuration that says what they hold, so
//! that the same content has the same address.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::Blobs;
use crate::sandbox::image::config::Whole;
use crate::sandbox::image::digest::Hashing;
use crate::sandbox::image::layer::Whiteouts;
use crate::sandbox::image::manifest::{Found, Layer, Platform};
use crate::sandbox::image::roots::Scratch;
use crate::sandbox::image::{Digest, Error, Job, rootfs};

/// `config` is that of an image: `Env`, `WorkingDir`, `Cmd`.
pub(super) fn tar(path: &Path, config: &Value, job: &Job) -> Result<(Found, Blobs), Error> {
    let file = File::open(path).map_err(|source| Error::Read {
        path: path.to_owned(),
        source,
    })?;
    let whole = Hashing::new(rootfs::decoded(file, job)?);
    io::copy(&mut job.reader(whole.clone()), &mut io::sink()).map_err(Error::tar)?;
    let (diff_id, _) = whole.finish().map_err(Error::tar)?;
    Ok((found(diff_id, config)?, Blobs::Single(path.to_owned())))
}

/// Copies it into a tar first: what is hashed is then what is unpacked.
pub(super) fn directory(path: &Path, config: &Value, scratch: &Scratch, job: &Job) -> Result<(Found, Blobs), Error> {
    let path = rootfs::directory(path)?;
    let copy = scratch.path().join("rootfs.tar");
    let mut into = File::create(&copy).map_err(Error::store("copy a directory"))?;
    let mut tar = tar::Builder::new(&mut into);
    tar.follow_symlinks(false);
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| Error::Read { path, source }
    };
    let mut waiting = vec![PathBuf::new()];
    while let Some(below) = waiting.pop() {
        let directory = path.join(&below);
        let mut inner: Vec<PathBuf> = fs::read_dir(&directory)
            .and_then(|entries| entries.map(|entry| Ok(below.join(entry?.file_name()))).collect())
            .map_err(failed(&directory))?;
        inner.sort();
        for name in inner {
            job.go_on()?;
            append(&mut tar, &path.join(&name), &name, &mut waiting).map_err(failed(&path.join(&name)))?;
        }
    }
    tar.finish().map_err(Error::store("copy a directory"))?;
    drop(tar);
    drop(into);
    let hashed = Hashing::new(File::open(&copy).map_err(failed(&copy))?);
    let (diff_id, _) = hashed.finish().map_err(failed(&copy))?;
    Ok((found(diff_id, config)?, Blobs::Single(copy)))
}

/// What it is and when it was changed; neither owners nor what only this host has.
fn append<W: io::Write>(
    tar: &mut tar::Builder<W>,
    source: &Path,
    name: &Path,
    waiting: &mut Vec<PathBuf>,
) -> io::Result<()> {
    let about = fs::symlink_metadata(source)?;
    let mut header = tar::Header::new_gnu();
    header.set_mode(about.mode() & 0o777);
    header.set_mtime(about.mtime().max(0) as u64);
    header.set_size(0);
    let kind = about.file_type();
    if kind.is_dir() {
        header.set_entry_type(tar::EntryType::Directory);
        waiting.push(name.to_owned());
        tar.append_data(&mut header, name, io::empty())
    } else if kind.is_symlink() {
        header.set_entry_type(tar::EntryType::Symlink);
        tar.append_link(&mut header, name, fs::read_link(source)?)
    } else if kind.is_file() {
        header.set_entry_type(tar::EntryType::Regular);
        let file = File::open(source)?;
        header.set_size(file.metadata()?.len());
        tar.append_data(&mut header, name, io::Read::take(file, about.len()))
    } else {
        Ok(())
    }
}

fn found(diff_id: Digest, config: &Value) -> Result<Found, Error> {
    let platform = Platform::default();
    let document = serde_json::json!({
        "architecture": platform.architecture, "os": platform.os, "config": config,
        "rootfs": { "type": "layers", "diff_ids": [diff_id] },
    });
    let document = document.to_string().into_bytes();
    let layer = Layer {
        blob: "layer".to_owned(),
        place: None,
        packing: None,
        diff_id,
    };
    Ok(Found {
        digest: Digest::of(&document),
        whole: Whole::read(&document)?,
        layers: vec![layer],
        whiteouts: Whiteouts::Keep,
    })
}
