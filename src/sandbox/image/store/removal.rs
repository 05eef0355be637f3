//! Taking images out again: one name, or all that nobody needs.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{Store, names, uses};
use crate::clock::Timestamp;
use crate::sandbox::image::roots::Key;
use crate::sandbox::image::{Digest, Error, Name, StoredRef};

/// How long a root that was just looked up is kept: until the sandbox that it was looked up for has left its note.
const GRACE: Duration = Duration::from_secs(60);

/// What became of an image whose name was taken away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Removed {
    /// Its files are gone.
    Files,
    /// They bear another name too, or were used just now; `gc` removes them when nobody needs them.
    NameOnly,
}

/// What a collection removed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Collected {
    pub records: usize,
    pub roots: usize,
    /// Bytes of the removed roots.
    pub bytes: u64,
}

impl Store {
    /// Takes a name away, and the image's files unless another name needs them.
    ///
    /// # Errors
    /// [`Error::InUse`] when a sandbox stands on them and no other name has them.
    pub fn remove(&self, name: &Name, now: Timestamp) -> Result<Removed, Error> {
        let image = StoredRef {
            name: name.clone(),
            digest: None,
        };
        let key = {
            let _alone = self.roots.lock()?;
            let mut named = names::read(self.roots.images())?;
            let digest = named.remove(name).ok_or_else(|| Error::NotStored(name.to_string()))?;
            let key = self.by_digest(&digest)?.map(|stored| Key::of_chain(&stored.chain));
            let others = self.named_keys(named.values())?;
            if let Some(key) = key.as_ref().filter(|key| !others.contains(key)) {
                let mut uses = uses::all(&self.data_dir).map_err(Error::store("list the sandboxes"))?;
                if let Some(sandboxes) = uses.remove(key) {
                    return Err(Error::InUse {
                        image: image.to_string(),
                        sandboxes,
                    });
                }
            }
            names::change(self.roots.images(), |names| {
                names.remove(name);
            })?;
            if !named.values().any(|other| *other == digest) {
                self.forget(&digest)?;
            }
            key.filter(|key| !others.contains(key))
        };
        match key {
            Some(key) if self.collect_root(&key, now)?.is_some() => Ok(Removed::Files),
            Some(_) | None => Ok(Removed::NameOnly),
        }
    }

    /// Removes what no name and no sandbox needs, and what killed processes left.
    pub fn collect(&self, now: Timestamp) -> Result<Collected, Error> {
        let mut collected = Collected::default();
        {
            let _alone = self.roots.lock()?;
            let named: BTreeSet<Digest> = names::read(self.roots.images())?.into_values().collect();
            let uses = uses::all(&self.data_dir).map_err(Error::store("list the sandboxes"))?;
            for stored in self.records()? {
                // One that a sandbox stands on may be asked for again, by its digest.
                if !named.contains(&stored.digest) && !uses.contains_key(&Key::of_chain(&stored.chain)) {
                    self.forget(&stored.digest)?;
                    collected.records += 1;
                }
            }
        }
        for key in self.roots.keys()? {
            if let Some(bytes) = self.collect_root(&key, now)? {
                collected.roots += 1;
                collected.bytes += bytes;
            }
        }
        self.sweep()?;
        Ok(collected)
    }

    /// What killed imports and builds left.
    pub fn left_behind(&self) -> Result<Vec<PathBuf>, Error> {
        self.roots.left()
    }

    /// Removes that.
    pub fn sweep(&self) -> Result<(), Error> {
        // Making one sweeps.
        self.roots.scratch().map(drop)
    }

    fn forget(&self, digest: &Digest) -> Result<(), Error> {
        fs::remove_file(self.record(digest)).map_err(Error::store("remove a record"))
    }

    fn named_keys<'a>(&self, digests: impl Iterator<Item = &'a Digest>) -> Result<BTreeSet<Key>, Error> {
        let mut keys = BTreeSet::new();
        for digest in digests {
            keys.extend(self.by_digest(digest)?.map(|stored| Key::of_chain(&stored.chain)));
        }
        Ok(keys)
    }

    /// Removes a root that nobody needs; answers how large it was.
    fn collect_root(&self, key: &Key, now: Timestamp) -> Result<Option<u64>, Error> {
        let before = Timestamp(now.0.saturating_sub(GRACE.as_millis() as i64));
        let Some(claim) = self.roots.claim_unused(key, before)? else {
            return Ok(None);
        };
        // Asked while nobody can look it up or name it.
        let known = self.records()?;
        if known.iter().any(|stored| Key::of_chain(&stored.chain) == *key) {
            return Ok(None);
        }
        let uses = uses::all(&self.data_dir).map_err(Error::store("list the sandboxes"))?;
        if uses.contains_key(key) || !claim.is_made() {
            return Ok(None);
        }
        let bytes = size(&self.roots.images().join(key.as_str()));
        claim.remove()?;
        Ok(Some(bytes))
    }
}

/// Of all files below, as far as they can be read.
fn size(directory: &Path) -> u64 {
    let mut bytes = 0;
    let mut waiting = vec![directory.to_owned()];
    while let Some(directory) = waiting.pop() {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            match entry.metadata() {
                Ok(about) if about.is_dir() => waiting.push(entry.path()),
                Ok(about) => bytes += about.len(),
                Err(_) => {}
            }
        }
    }
    bytes
}
