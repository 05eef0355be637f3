//! Packs: many small blobs in one file, so that a hundred thousand small files do not become as many objects.
//!
//! `packs/NAME.pack`, format version 1, little-endian:
//!
//! ```text
//! "EXP" version:u8
//! record*    blob:[32] length:u32 bytes        the bytes of a blob's own file (`blobs.rs`)
//! place*     blob:[32] offset:u64 length:u32   ascending by blob: the index
//! trailer    blake3 of the index:[32] count:u32 "EXPE"
//! ```
//!
//! The name is the hash of the index. A pack is never changed: written elsewhere, synced, then moved to its name. The index
//! of the whole store is in memory, made from the packs' own and brought up to date when a blob is not found and the
//! directory has changed; a pack whose own index is damaged is read record by record.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, RwLock};

use super::error::Error;
use super::folder::tick;
use super::id::BlobId;

const MAGIC: &[u8; 4] = b"EXP\x01";
const END: &[u8; 4] = b"EXPE";
const PLACE: usize = 44;
const TRAILER: usize = 40;
const RECORD: usize = 36;

/// Where a blob's bytes lie in a pack.
#[derive(Debug, Clone)]
pub(super) struct Place {
    pub pack: Arc<PathBuf>,
    pub offset: u64,
    pub length: u32,
}

/// A pack, and what is in it.
pub(super) type Content = (PathBuf, Vec<(BlobId, Place)>);

/// All packs of a store.
#[derive(Debug)]
pub(super) struct Packs {
    directory: PathBuf,
    state: RwLock<State>,
}

#[derive(Debug, Default)]
struct State {
    known: HashSet<PathBuf>,
    places: HashMap<BlobId, Place>,
    /// The directory's time when it was listed; `None` when it may have changed since without a trace.
    listed: Option<i64>,
}

impl Packs {
    pub fn open(directory: PathBuf) -> Result<Self, Error> {
        fs::create_dir_all(&directory).map_err(|e| failed("make", &directory, e))?;
        let state = RwLock::default();
        Ok(Self { directory, state })
    }

    /// Whether it is known where a blob lies, without a look at the disk.
    pub fn knows(&self, id: BlobId) -> bool {
        self.read().places.contains_key(&id)
    }

    pub fn find(&self, id: BlobId) -> Result<Option<Place>, Error> {
        if let Some(place) = self.read().places.get(&id) {
            return Ok(Some(place.clone()));
        }
        if !self.refresh()? {
            return Ok(None);
        }
        Ok(self.read().places.get(&id).cloned())
    }

    /// The bytes of a blob's own file. A pack that has gone was written anew: it is looked for again.
    pub fn bytes(&self, id: BlobId) -> Result<Option<Vec<u8>>, Error> {
        for _ in 0..3 {
            let Some(place) = self.find(id)? else {
                return Ok(None);
            };
            match read(&place) {
                Ok(bytes) => return Ok(Some(bytes)),
                Err(error) if error.kind() == io::ErrorKind::NotFound => self.forget(),
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    let reason = format!("its pack `{}` is cut short", place.pack.display());
                    return Err(Error::Damaged { id, reason });
                }
                Err(error) => return Err(failed("read", &place.pack, error)),
            }
        }
        Ok(None)
    }

    /// What each pack holds.
    pub fn all(&self) -> Result<Vec<Content>, Error> {
        self.forget();
        self.refresh()?;
        let state = self.read();
        let mut all = Vec::new();
        for pack in &state.known {
            all.push((pack.clone(), index(pack)?));
        }
        Ok(all)
    }

    /// Where a finished pack belongs.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.join(format!("{name}.pack"))
    }

    pub fn forget(&self) {
        *self.state.write().unwrap_or_else(|poisoned| poisoned.into_inner()) = State::default();
    }

    fn read(&self) -> std::sync::RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Takes in the packs that are new; `false` when there can be none.
    fn refresh(&self) -> Result<bool, Error> {
        let listing = |e| failed("list", &self.directory, e);
        let meta = fs::metadata(&self.directory).map_err(listing)?;
        let changed = meta.ctime() * 1_000_000_000 + meta.ctime_nsec();
        if self.read().listed == Some(changed) {
            return Ok(false);
        }
        // What changes from here on has a later time than `changed`, should that be older than this.
        let now = tick().map_err(listing)?;
        let mut fresh = Vec::new();
        for entry in fs::read_dir(&self.directory).map_err(listing)? {
            let path = entry.map_err(listing)?.path();
            let is_pack = path.extension().is_some_and(|extension| extension == "pack");
            if is_pack && !self.read().known.contains(&path) {
                match index(&path) {
                    Ok(places) => fresh.push((path, places)),
                    // Taken away in between.
                    Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
                    Err(error) => return Err(error),
                }
            }
        }
        let mut state = self.state.write().unwrap_or_else(|poisoned| poisoned.into_inner());
        for (path, places) in fresh {
            state.places.extend(places);
            state.known.insert(path);
        }
        state.listed = (changed < now).then_some(changed);
        Ok(true)
    }
}

/// A pack in the making.
#[derive(Default)]
pub(super) struct Packing {
    bytes: Vec<u8>,
    places: Vec<(BlobId, u64, u32)>,
}

impl Packing {
    pub fn add(&mut self, id: BlobId, bytes: &[u8]) {
        if self.bytes.is_empty() {
            self.bytes.extend_from_slice(MAGIC);
        }
        self.bytes.extend_from_slice(id.as_bytes());
        self.bytes.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
        let offset = self.bytes.len() as u64;
        self.bytes.extend_from_slice(bytes);
        self.places.push((id, offset, bytes.len() as u32));
    }

    pub fn len(&self) -> usize {
        self.places.len()
    }

    pub fn size(&self) -> usize {
        self.bytes.len()
    }

    /// The blobs in it, each as the bytes of its own file.
    pub fn blobs(&self) -> impl Iterator<Item = (BlobId, &[u8])> {
        let places = self.places.iter();
        places.map(|(id, offset, length)| (*id, &self.bytes[*offset as usize..][..*length as usize]))
    }

    /// Its name and its whole bytes.
    pub fn finish(mut self) -> (String, Vec<u8>) {
        self.places.sort_unstable_by_key(|(id, ..)| *id);
        let mut index = Vec::with_capacity(self.places.len() * PLACE);
        for (id, offset, length) in &self.places {
            index.extend_from_slice(id.as_bytes());
            index.extend_from_slice(&offset.to_le_bytes());
            index.extend_from_slice(&length.to_le_bytes());
        }
        let hash = blake3::hash(&index);
        self.bytes.extend_from_slice(&index);
        self.bytes.extend_from_slice(hash.as_bytes());
        self.bytes.extend_from_slice(&(self.places.len() as u32).to_le_bytes());
        self.bytes.extend_from_slice(END);
        (hash.to_hex().to_string(), self.bytes)
    }
}

fn read(place: &Place) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; place.length as usize];
    File::open(&*place.pack)?.read_exact_at(&mut bytes, place.offset)?;
    Ok(bytes)
}

/// What a pack says that it holds.
fn index(path: &Path) -> Result<Vec<(BlobId, Place)>, Error> {
    let file = File::open(path).map_err(|e| failed("open", path, e))?;
    let whole = written(&file).map_err(|e| failed("read", path, e))?;
    let places = match whole {
        Some(places) => places,
        None => scanned(&file).map_err(|e| failed("read", path, e))?,
    };
    let pack = Arc::new(path.to_owned());
    let place = |(id, offset, length)| {
        let pack = Arc::clone(&pack);
        (id, Place { pack, offset, length })
    };
    Ok(places.into_iter().map(place).collect())
}

/// The index at the end of a pack; `None` when it is damaged.
fn written(file: &File) -> io::Result<Option<Vec<(BlobId, u64, u32)>>> {
    let size = file.metadata()?.len();
    let Some(at) = size.checked_sub(TRAILER as u64) else {
        return Ok(None);
    };
    let mut trailer = [0; TRAILER];
    file.read_exact_at(&mut trailer, at)?;
    let count = u32::from_le_bytes([trailer[32], trailer[33], trailer[34], trailer[35]]) as usize;
    let length = count as u64 * PLACE as u64;
    if trailer[36..] != *END || length > at {
        return Ok(None);
    }
    let mut index = vec![0; length as usize];
    file.read_exact_at(&mut index, at - length)?;
    if blake3::hash(&index).as_bytes()[..] != trailer[..32] {
        return Ok(None);
    }
    let place = |bytes: &[u8]| (address(bytes), u64_at(&bytes[32..]), u32_at(&bytes[40..]));
    Ok(Some(index.chunks_exact(PLACE).map(place).collect()))
}

/// The records of a pack, up to where it makes no sense any more. What is read is verified against its address anyway.
fn scanned(file: &File) -> io::Result<Vec<(BlobId, u64, u32)>> {
    let size = file.metadata()?.len();
    let mut places = Vec::new();
    let mut at = MAGIC.len() as u64;
    let mut record = [0; RECORD];
    while at + RECORD as u64 <= size {
        file.read_exact_at(&mut record, at)?;
        let (offset, length) = (at + RECORD as u64, u32_at(&record[32..]));
        let mut magic = [0; 3];
        if offset + u64::from(length) > size || length < 3 {
            break;
        }
        file.read_exact_at(&mut magic, offset)?;
        if magic != *super::blobs::MAGIC {
            break;
        }
        places.push((address(&record), offset, length));
        at = offset + u64::from(length);
    }
    Ok(places)
}

fn address(bytes: &[u8]) -> BlobId {
    let mut id = [0; 32];
    id.copy_from_slice(&bytes[..32]);
    BlobId::from_bytes(id)
}

fn u64_at(bytes: &[u8]) -> u64 {
    let mut eight = [0; 8];
    eight.copy_from_slice(&bytes[..8]);
    u64::from_le_bytes(eight)
}

fn u32_at(bytes: &[u8]) -> u32 {
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

fn failed(doing: &'static str, path: &Path, error: io::Error) -> Error {
    Error::io(doing, path.as_os_str().as_encoded_bytes(), error)
}

#[cfg(test)]
mod tests {
    use super::super::blobs::Blobs;
    use super::*;

    fn contents() -> Vec<Vec<u8>> {
        (0..1000)
            .map(|n: u32| format!("content {n} ").repeat(n as usize % 90).into_bytes())
            .collect()
    }

    fn files(root: &Path) -> usize {
        let count = |entry: fs::DirEntry| match entry.path() {
            path if path.is_dir() => files(&path),
            _ => 1,
        };
        fs::read_dir(root).unwrap().map(|entry| count(entry.unwrap())).sum()
    }

    #[test]
    fn many_small_blobs_are_few_files() {
        let dir = tempfile::tempdir().unwrap();
        let blobs = Blobs::open(dir.path()).unwrap();
        let other = Blobs::open(dir.path()).unwrap();
        assert!(!other.contains(BlobId::from_bytes([1; 32])).unwrap());
        let mut batch = blobs.batch();
        let ids: Vec<BlobId> = contents().iter().map(|content| batch.put(content).unwrap()).collect();
        batch.commit().unwrap();
        assert!(files(dir.path()) < 10, "{} files", files(dir.path()));
        // Seen by one that had looked before, and by one that comes after.
        for store in [&blobs, &other, &Blobs::open(dir.path()).unwrap()] {
            for (id, content) in ids.iter().zip(contents()) {
                assert!(store.get(*id).unwrap() == content);
            }
        }
    }

    #[test]
    fn a_pack_without_its_index_is_read_all_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let blobs = Blobs::open(dir.path()).unwrap();
        let mut batch = blobs.batch();
        let ids: Vec<BlobId> = contents().iter().map(|content| batch.put(content).unwrap()).collect();
        batch.commit().unwrap();
        for pack in fs::read_dir(dir.path().join("packs")).unwrap() {
            let path = pack.unwrap().path();
            let bytes = fs::read(&path).unwrap();
            fs::write(&path, &bytes[..bytes.len() - 20]).unwrap();
        }
        let blobs = Blobs::open(dir.path()).unwrap();
        for (id, content) in ids.iter().zip(contents()) {
            assert!(blobs.get(*id).unwrap() == content);
        }
    }
}
