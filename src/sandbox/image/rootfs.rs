//! Root file systems from a directory, used where it lies, or from a tar that is unpacked once and kept by the hash of its
//! bytes.

use std::fs::{self, File};
use std::io::{self, Read, Seek};
use std::path::{Path, PathBuf};

use super::digest::Hashing;
use super::layer::{Unpacking, Whiteouts};
use super::packing::{self, Packing};
use super::roots::{Key, Roots};
use super::{Error, Job};

pub(super) fn directory(path: &Path) -> Result<PathBuf, Error> {
    let path = fs::canonicalize(path).map_err(|source| Error::Read {
        path: path.to_owned(),
        source,
    })?;
    if path.is_dir() {
        Ok(path)
    } else {
        Err(Error::NoDirectory(path))
    }
}

/// The directory that the tar is unpacked in, under `data_dir/images`; made when there is none yet.
pub(super) fn unpacked(path: &Path, data_dir: &Path) -> Result<PathBuf, Error> {
    let failed = |source| Error::Read {
        path: path.to_owned(),
        source,
    };
    let mut file = File::open(path).map_err(failed)?;
    let mut hasher = blake3::Hasher::new();
    io::copy(&mut file, &mut hasher).map_err(failed)?;
    let key = Key::of_tar(&hasher.finalize());
    let roots = Roots::open(data_dir)?;
    if let Some(home) = roots.find(&key)? {
        return Ok(home);
    }
    let job = Job::default();
    let claim = roots.claim(&key, &job)?;
    if !claim.is_made() {
        file.rewind().map_err(failed)?;
        claim.make(|root| unpack(file, root, &job))?;
    }
    claim.used()
}

fn unpack(file: impl Read + 'static, root: &Path, job: &Job) -> Result<(), Error> {
    let mut unpacking = Unpacking::new(root, job)?;
    unpacking.layer(decoded(file, job)?, Whiteouts::Keep)?;
    unpacking.finish().map(drop)
}

/// Undoes the compression, told by the first bytes.
pub(super) fn decoded(mut from: impl Read + 'static, job: &Job) -> Result<Box<dyn Read>, Error> {
    let mut first = Vec::new();
    Read::by_ref(&mut from)
        .take(6)
        .read_to_end(&mut first)
        .map_err(Error::tar)?;
    let packing = Packing::of_bytes(&first);
    let whole = Hashing::new(io::Cursor::new(first).chain(from));
    packing::unpacked(packing, whole, &job.bounds).map_err(Error::tar)
}

#[cfg(test)]
mod tests;
