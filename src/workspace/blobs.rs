//! Blobs on the local disk, found by the blake3 of their content: `ab/cdef…` under one directory, or in a pack with other
//! small ones (`packs.rs`).
//!
//! A file is `"EXB" version:u8 codec:u8 size:u64` (little-endian) and then the content, as it is or as one zstd frame.
//! Promises: a blob that is there under its name is whole and on the disk (see `batch.rs`); what is read is verified
//! against its address before the last byte is handed out; many processes may read and write one store at once.
//!
//! Who holds a store open holds a shared lock on its `lock` file. Who finds itself alone when opening clears `tmp`, so that
//! what a killed process had staged does not stay.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::batch::Batch;
use super::error::Error;
use super::folder::Folder;
use super::id::BlobId;
use super::packs::Packs;

pub(super) const FORMAT_VERSION: u8 = 1;
pub(super) const MAGIC: &[u8; 3] = b"EXB";
pub(super) const HEADER: usize = 13;
pub(super) const RAW: u8 = 0;
pub(super) const ZSTD: u8 = 1;

/// A store of blobs; cheap to clone.
#[derive(Debug, Clone)]
pub struct Blobs {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    root: PathBuf,
    folder: Folder,
    packs: Packs,
    /// Held, shared, for as long as the store is open.
    _lock: File,
}

impl Blobs {
    /// Opens the store in `root`, which is made when it is not there.
    ///
    /// # Errors
    /// [`Error::Io`] when the directory cannot be made, opened or locked.
    pub fn open(root: &Path) -> Result<Self, Error> {
        let failed = |doing| move |e: io::Error| Error::io(doing, root.as_os_str().as_encoded_bytes(), e);
        let staging = root.join("tmp");
        fs::create_dir_all(&staging).map_err(failed("make"))?;
        let folder = Folder::open(root).map_err(failed("open"))?;
        let lock = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(root.join("lock"))
            .map_err(failed("lock"))?;
        if lock.try_lock().is_ok() {
            for left in fs::read_dir(&staging).map_err(failed("clear"))? {
                let left = left.map_err(failed("clear"))?.path();
                fs::remove_dir_all(left).map_err(failed("clear"))?;
            }
            lock.unlock().map_err(failed("lock"))?;
        }
        lock.lock_shared().map_err(failed("lock"))?;
        let packs = Packs::open(root.join("packs"))?;
        Ok(Self {
            shared: Arc::new(Shared {
                root: root.to_owned(),
                folder,
                packs,
                _lock: lock,
            }),
        })
    }

    /// Begins a set of blobs that become durable together.
    pub fn batch(&self) -> Batch {
        Batch::new(self.clone())
    }

    /// Stores one blob, durably before it returns.
    ///
    /// # Errors
    /// [`Error::Io`] when the disk refuses.
    pub fn put(&self, bytes: &[u8]) -> Result<BlobId, Error> {
        let mut batch = self.batch();
        let id = batch.put(bytes)?;
        batch.commit()?;
        Ok(id)
    }

    /// Stores what `reader` gives, of at most `limit` bytes, durably before it returns. Memory use does not grow with it.
    ///
    /// # Errors
    /// [`Error::Source`] when the reader fails, [`Error::Limit`] when it gives more, [`Error::Io`] when the disk refuses.
    pub fn put_reader(&self, reader: &mut dyn Read, limit: u64) -> Result<(BlobId, u64), Error> {
        let mut batch = self.batch();
        let stored = batch.put_reader(reader, limit)?;
        batch.commit()?;
        Ok(stored)
    }

    /// Reads a blob, verified.
    ///
    /// # Errors
    /// [`Error::Missing`], [`Error::Damaged`], [`Error::UnknownVersion`].
    pub fn get(&self, id: BlobId) -> Result<Vec<u8>, Error> {
        let mut reader = self.reader(id)?;
        let mut bytes = vec![0; usize::try_from(reader.left).unwrap_or(usize::MAX).min(1 << 20)];
        let mut filled = 0;
        loop {
            match reader.next(&mut bytes[filled..])? {
                0 if reader.left == 0 => break,
                read => filled += read,
            }
            if filled == bytes.len() && reader.left > 0 {
                let more = usize::try_from(reader.left).unwrap_or(usize::MAX).min(bytes.len());
                bytes.resize(filled + more, 0);
            }
        }
        bytes.truncate(filled);
        Ok(bytes)
    }

    /// Opens a blob for reading as a stream; it fails at its end, not silently, when the content is not the addressed one.
    ///
    /// # Errors
    /// [`Error::Missing`], [`Error::Damaged`], [`Error::UnknownVersion`].
    pub fn reader(&self, id: BlobId) -> Result<Reader, Error> {
        let mut file = self.file(id)?;
        let damaged = |reason: &str| Error::Damaged {
            id,
            reason: reason.to_owned(),
        };
        let mut header = [0; HEADER];
        file.read_exact(&mut header)
            .map_err(|_| damaged("its header is cut short"))?;
        if header[..3] != *MAGIC {
            return Err(damaged("it does not begin like a blob"));
        }
        if header[3] != FORMAT_VERSION {
            return Err(Error::UnknownVersion {
                id,
                what: "blob",
                found: header[3],
                known: FORMAT_VERSION,
            });
        }
        let content = match header[4] {
            RAW => Content::Raw(file),
            ZSTD => Content::Zstd(Box::new(zstd::Decoder::new(file).map_err(|e| damaged(&e.to_string()))?)),
            _ => return Err(damaged("its codec is unknown")),
        };
        let mut size = [0; 8];
        size.copy_from_slice(&header[5..]);
        let reader = Reader {
            id,
            content,
            hasher: blake3::Hasher::new(),
            left: u64::from_le_bytes(size),
        };
        if reader.left == 0 {
            reader.verify()?;
        }
        Ok(reader)
    }

    /// The bytes of a blob's own file, wherever they lie.
    fn file(&self, id: BlobId) -> Result<Box<dyn Read + Send>, Error> {
        if !self.shared.packs.knows(id) {
            let path = self.path(&id);
            match File::open(&path) {
                Ok(file) => return Ok(Box::new(file)),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(Error::io("open", path.as_os_str().as_encoded_bytes(), error)),
            }
        }
        match self.shared.packs.bytes(id)? {
            Some(bytes) => Ok(Box::new(io::Cursor::new(bytes))),
            None => Err(Error::Missing(id)),
        }
    }

    pub fn contains(&self, id: BlobId) -> Result<bool, Error> {
        Ok(self.stored(id)?.is_some())
    }

    /// The file in which a blob is stored.
    pub(super) fn stored(&self, id: BlobId) -> Result<Option<PathBuf>, Error> {
        if !self.shared.packs.knows(id) {
            let path = self.path(&id);
            match fs::symlink_metadata(&path) {
                Ok(meta) => return Ok((meta.len() >= HEADER as u64).then_some(path)),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(Error::io("look at", path.as_os_str().as_encoded_bytes(), error)),
            }
        }
        Ok(self.shared.packs.find(id)?.map(|place| place.pack.to_path_buf()))
    }

    /// The blobs that have files of their own.
    pub(super) fn loose(&self) -> Result<Vec<(BlobId, PathBuf)>, Error> {
        let mut found = Vec::new();
        let listing = |path: &Path| {
            let failed = |e| Error::io("list", path.as_os_str().as_encoded_bytes(), e);
            let entries = fs::read_dir(path).map_err(failed)?;
            entries.collect::<io::Result<Vec<_>>>().map_err(failed)
        };
        for folder in listing(&self.shared.root)? {
            let begin = folder.file_name().into_string().unwrap_or_default();
            if begin.len() != 2 {
                continue;
            }
            for file in listing(&folder.path())? {
                let rest = file.file_name().into_string().unwrap_or_default();
                if let Ok(id) = format!("{begin}{rest}").parse() {
                    found.push((id, file.path()));
                }
            }
        }
        Ok(found)
    }

    pub(super) fn packs(&self) -> &Packs {
        &self.shared.packs
    }

    /// What writers share and a collector holds alone, see `collect.rs`.
    pub(super) fn sweep_lock(&self) -> Result<File, Error> {
        let path = self.shared.root.join("sweep.lock");
        let opened = File::options().create(true).truncate(false).write(true).open(&path);
        opened.map_err(|e| Error::io("open", path.as_os_str().as_encoded_bytes(), e))
    }

    /// The size of a blob's content as its header has it: not verified.
    pub fn size(&self, id: BlobId) -> Result<u64, Error> {
        Ok(self.reader(id)?.left)
    }

    pub(super) fn path(&self, id: &BlobId) -> PathBuf {
        let digits = id.to_string();
        self.shared.root.join(&digits[..2]).join(&digits[2..])
    }

    pub(super) fn staging(&self) -> PathBuf {
        self.shared.root.join("tmp")
    }

    /// Writes the store's file system to the disk.
    pub(super) fn sync(&self) -> Result<(), Error> {
        let root = self.shared.root.as_os_str().as_encoded_bytes();
        self.shared
            .folder
            .sync_file_system()
            .map_err(|e| Error::io("write to the disk", root, e))
    }
}

/// Reads one blob and checks it against its address.
pub struct Reader {
    id: BlobId,
    content: Content,
    hasher: blake3::Hasher,
    left: u64,
}

enum Content {
    Raw(Box<dyn Read + Send>),
    Zstd(Box<zstd::Decoder<'static, io::BufReader<Box<dyn Read + Send>>>>),
}

impl Reader {
    /// Bytes not yet read.
    pub fn left(&self) -> u64 {
        self.left
    }

    /// Reads some bytes; 0 at the end, or for an empty `buffer`. The last ones come only when the whole has proved right.
    ///
    /// # Errors
    /// [`Error::Damaged`].
    pub fn next(&mut self, buffer: &mut [u8]) -> Result<usize, Error> {
        let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(buffer.len());
        if most == 0 {
            return Ok(0);
        }
        let read = match &mut self.content {
            Content::Raw(file) => file.read(&mut buffer[..most]),
            Content::Zstd(decoder) => decoder.read(&mut buffer[..most]),
        };
        let read = read.map_err(|error| self.damaged(error.to_string()))?;
        if read == 0 {
            return Err(self.damaged(format!("{} bytes are missing at its end", self.left)));
        }
        self.hasher.update(&buffer[..read]);
        self.left -= read as u64;
        if self.left == 0 {
            self.verify()?;
        }
        Ok(read)
    }

    fn verify(&self) -> Result<(), Error> {
        if self.hasher.finalize().as_bytes() == self.id.as_bytes() {
            Ok(())
        } else {
            Err(self.damaged("its content has another hash".to_owned()))
        }
    }

    fn damaged(&self, reason: String) -> Error {
        Error::Damaged { id: self.id, reason }
    }
}

impl Read for Reader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.next(buffer).map_err(io::Error::other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        blake3::Hasher::new().finalize_xof().fill(&mut bytes);
        bytes
    }

    #[test]
    fn what_is_put_is_got() {
        let dir = tempfile::tempdir().unwrap();
        let blobs = Blobs::open(dir.path()).unwrap();
        let contents = [
            vec![],
            b"x".to_vec(),
            vec![0; 3 << 20],
            noise(1 << 20),
            noise((5 << 20) + 1),
            b"pack me ".repeat(400_000),
        ];
        for content in contents {
            let id = blobs.put(&content).unwrap();
            assert_eq!(*id.as_bytes(), *blake3::hash(&content).as_bytes());
            assert!(blobs.get(id).unwrap() == content);
            assert_eq!(blobs.size(id).unwrap(), content.len() as u64);
            let again = blobs.put_reader(&mut content.as_slice(), u64::MAX).unwrap();
            assert_eq!(again, (id, content.len() as u64));
        }
        assert_eq!(fs::read_dir(blobs.staging()).unwrap().count(), 0);
    }

    #[test]
    fn a_long_stream_is_kept_like_a_short_one() {
        let dir = tempfile::tempdir().unwrap();
        let blobs = Blobs::open(dir.path()).unwrap();
        for content in [noise((3 << 20) + 7), b"again and ".repeat(500_000)] {
            let (id, size) = blobs.put_reader(&mut content.as_slice(), u64::MAX).unwrap();
            assert_eq!(size, content.len() as u64);
            assert_eq!(*id.as_bytes(), *blake3::hash(&content).as_bytes());
            assert!(blobs.get(id).unwrap() == content);
        }
    }

    #[test]
    fn more_than_the_limit_is_refused_and_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let blobs = Blobs::open(dir.path()).unwrap();
        for length in [11, 4 << 20] {
            let refused = blobs.put_reader(&mut noise(length).as_slice(), length as u64 - 1);
            assert!(matches!(refused, Err(Error::Limit { .. })), "{refused:?}");
        }
        assert_eq!(fs::read_dir(blobs.staging()).unwrap().count(), 0);
    }

    #[test]
    fn a_missing_or_damaged_blob_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let blobs = Blobs::open(dir.path()).unwrap();
        let absent = BlobId::from_bytes([1; 32]);
        assert!(matches!(blobs.get(absent), Err(Error::Missing(id)) if id == absent));

        for content in [noise(2000), b"squeeze ".repeat(2000)] {
            let id = blobs.put(&content).unwrap();
            let path = blobs.path(&id);
            let good = fs::read(&path).unwrap();
            let mut places: Vec<usize> = (0..HEADER).collect();
            places.extend([HEADER, good.len() / 2, good.len() - 1]);
            for place in places {
                let mut bad = good.clone();
                bad[place] ^= 0x10;
                fs::write(&path, &bad).unwrap();
                let error = blobs.get(id).unwrap_err();
                match place {
                    3 => assert!(matches!(error, Error::UnknownVersion { found: 0x11, .. }), "{error}"),
                    _ => assert!(
                        matches!(error, Error::Damaged { id: named, .. } if named == id),
                        "{place}: {error}"
                    ),
                }
            }
            fs::write(&path, &good[..good.len() - 1]).unwrap();
            assert!(matches!(blobs.get(id), Err(Error::Damaged { .. })));
            fs::write(&path, &good).unwrap();
            assert!(blobs.get(id).unwrap() == content);
        }
    }

    #[test]
    fn what_a_killed_process_had_staged_goes_when_nobody_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let blobs = Blobs::open(dir.path()).unwrap();
        let mut batch = blobs.batch();
        batch.put(&noise(100_000)).unwrap();
        let count = || fs::read_dir(dir.path().join("tmp")).unwrap().count();
        assert_eq!(count(), 1);
        let second = Blobs::open(dir.path()).unwrap();
        assert_eq!(count(), 1, "somebody else is at work");
        std::mem::forget(batch.leak_staging());
        drop((second, blobs));
        assert_eq!(count(), 1);
        Blobs::open(dir.path()).unwrap();
        assert_eq!(count(), 0);
    }

    #[test]
    fn writers_of_the_same_blobs_do_not_disturb_each_other() {
        let dir = tempfile::tempdir().unwrap();
        let contents: Vec<Vec<u8>> = (0..50).map(|n| noise(100 + n)).collect();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let blobs = Blobs::open(dir.path()).unwrap();
                    let mut batch = blobs.batch();
                    let ids: Vec<BlobId> = contents.iter().map(|c| batch.put(c).unwrap()).collect();
                    batch.commit().unwrap();
                    for (id, content) in ids.into_iter().zip(&contents) {
                        assert!(blobs.get(id).unwrap() == *content);
                    }
                });
            }
        });
    }
}
