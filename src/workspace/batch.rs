//! Many blobs made durable by one pass over the disk.
//!
//! Small blobs are gathered in packs (`packs.rs`), or have files of their own where they are few. All are staged under other names; `commit` writes the file system out (`syncfs`), moves them to their own names and
//! writes it out again. So a blob under its own name always has its content on the disk, and after `commit` the name is
//! there too. A batch also relies on blobs that it found stored: another process may just have moved those, so their
//! names are covered by the same second pass. Dropped without `commit`, nothing of it is left.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use super::blobs::{Blobs, FORMAT_VERSION, HEADER, MAGIC, RAW, ZSTD};
use super::error::Error;
use super::folder::{date_now, tick};
use super::id::BlobId;
use super::packs::Packing;

/// Content up to this size is hashed and packed in memory.
const IN_MEMORY: usize = 1 << 20;
/// Content below this size is never packed: a disk block is no smaller.
const WORTH_PACKING: usize = 512;
const LEVEL: i32 = 1;
/// A blob whose file would have at most so many bytes goes into a pack,
pub(super) const SMALL: usize = 32 << 10;
/// if there are at least so many of them,
const MANY: usize = 8;
/// and a pack of at least so many bytes is full.
const FULL: usize = 8 << 20;
/// A blob that is found stored is dated anew when it is older than this (nanoseconds): less than any grace period.
const FRESH: i64 = 60 * 1_000_000_000;

/// Blobs that become durable together.
pub struct Batch {
    blobs: Blobs,
    staging: Option<TempDir>,
    staged: HashMap<BlobId, PathBuf>,
    packing: Packing,
    packed: HashSet<BlobId>,
    /// Full packs: where they are staged, and their names.
    packs: Vec<(PathBuf, String)>,
    streamed: u64,
    relies_on_stored: bool,
    /// Keeps a collector away while this is open; and when that was.
    lock: Option<(File, i64)>,
    /// Files that need not be looked at again for their age.
    dated: HashSet<PathBuf>,
    packer: Option<zstd::bulk::Compressor<'static>>,
    buffer: Vec<u8>,
}

impl Batch {
    pub(super) fn new(blobs: Blobs) -> Self {
        Self {
            blobs,
            staging: None,
            staged: HashMap::new(),
            packing: Packing::default(),
            packed: HashSet::new(),
            packs: Vec::new(),
            streamed: 0,
            relies_on_stored: false,
            lock: None,
            dated: HashSet::new(),
            packer: None,
            buffer: Vec::new(),
        }
    }

    /// Adds a blob; it is durable once the batch is committed.
    ///
    /// # Errors
    /// [`Error::Io`] when the disk refuses.
    pub fn put(&mut self, bytes: &[u8]) -> Result<BlobId, Error> {
        let id = BlobId::from_bytes(*blake3::hash(bytes).as_bytes());
        if self.is_known(id)? {
            return Ok(id);
        }
        let packed = self.pack(bytes);
        let (codec, content) = match &packed {
            Some(packed) => (ZSTD, packed.as_slice()),
            None => (RAW, bytes),
        };
        let mut whole = Vec::with_capacity(HEADER + content.len());
        whole.extend_from_slice(&header(codec, bytes.len() as u64));
        whole.extend_from_slice(content);
        if whole.len() <= SMALL {
            self.packing.add(id, &whole);
            self.packed.insert(id);
            if self.packing.size() >= FULL {
                self.stage_pack()?;
            }
        } else {
            self.stage(id, &whole)?;
        }
        Ok(id)
    }

    fn stage(&mut self, id: BlobId, whole: &[u8]) -> Result<(), Error> {
        let path = self.staging()?.join(id.to_string());
        fs::write(&path, whole).map_err(writing(&path))?;
        self.staged.insert(id, path);
        Ok(())
    }

    fn stage_pack(&mut self) -> Result<(), Error> {
        let (name, bytes) = std::mem::take(&mut self.packing).finish();
        let path = self.staging()?.join(format!("{name}.pack"));
        fs::write(&path, bytes).map_err(writing(&path))?;
        self.packs.push((path, name));
        Ok(())
    }

    /// Stages the small blobs that are left, in the form that suits their number.
    fn stage_small(&mut self) -> Result<(), Error> {
        if self.packing.len() >= MANY {
            return self.stage_pack();
        }
        let packing = std::mem::take(&mut self.packing);
        for (id, whole) in packing.blobs() {
            self.stage(id, whole)?;
        }
        Ok(())
    }

    /// Adds what `reader` gives, of at most `limit` bytes. Memory use does not grow with it.
    ///
    /// # Errors
    /// [`Error::Source`] when the reader fails, [`Error::Limit`] when it gives more, [`Error::Io`] when the disk refuses.
    pub fn put_reader(&mut self, reader: &mut dyn Read, limit: u64) -> Result<(BlobId, u64), Error> {
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.clear();
        let stored = self.put_buffered(reader, limit, &mut buffer);
        self.buffer = buffer;
        stored
    }

    fn put_buffered(
        &mut self,
        reader: &mut dyn Read,
        limit: u64,
        buffer: &mut Vec<u8>,
    ) -> Result<(BlobId, u64), Error> {
        let most = limit.min(IN_MEMORY as u64) + 1;
        Read::take(&mut *reader, most)
            .read_to_end(buffer)
            .map_err(Error::Source)?;
        if buffer.len() as u64 > limit {
            return Err(beyond(limit));
        }
        if buffer.len() <= IN_MEMORY {
            return Ok((self.put(buffer)?, buffer.len() as u64));
        }
        self.put_stream(buffer, reader, limit)
    }

    /// Stages content of which `head` is read already.
    fn put_stream(&mut self, head: &[u8], reader: &mut dyn Read, limit: u64) -> Result<(BlobId, u64), Error> {
        self.streamed += 1;
        let name = format!("stream-{}", self.streamed);
        let path = self.staging()?.join(name);
        let file = File::create_new(&path).map_err(writing(&path))?;
        file.write_all_at(&[0; HEADER], 0).map_err(writing(&path))?;
        let sample = &head[..head.len().min(128 << 10)];
        let codec = if self.pack(sample).is_some() { ZSTD } else { RAW };
        let streamed = copy(head, reader, limit, &file, codec, &path);
        let (id, size) = match streamed {
            Ok(streamed) => streamed,
            Err(error) => {
                // Best effort: the whole staging directory goes with the batch.
                let _ = fs::remove_file(&path);
                return Err(error);
            }
        };
        if self.is_known(id)? {
            fs::remove_file(&path).map_err(writing(&path))?;
        } else {
            file.write_all_at(&header(codec, size), 0).map_err(writing(&path))?;
            self.staged.insert(id, path);
        }
        Ok((id, size))
    }

    /// Makes all of it durable.
    ///
    /// # Errors
    /// [`Error::Io`] when the disk refuses; then none, some or all of it is stored, and no caller may count on it.
    pub fn commit(mut self) -> Result<(), Error> {
        self.stage_small()?;
        let is_new = !(self.staged.is_empty() && self.packs.is_empty());
        if !is_new && !self.relies_on_stored {
            return Ok(());
        }
        if is_new {
            self.blobs.sync()?;
        }
        for (staged, name) in std::mem::take(&mut self.packs) {
            fs::rename(&staged, self.blobs.packs().path(&name)).map_err(writing(&staged))?;
        }
        for (id, staged) in std::mem::take(&mut self.staged) {
            let path = self.blobs.path(&id);
            let moved = match fs::rename(&staged, &path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => path
                    .parent()
                    .map_or(Ok(()), fs::create_dir_all)
                    .and_then(|()| fs::rename(&staged, &path)),
                done => done,
            };
            moved.map_err(writing(&path))?;
        }
        self.blobs.sync()
    }

    fn is_known(&mut self, id: BlobId) -> Result<bool, Error> {
        if self.staged.contains_key(&id) || self.packed.contains(&id) {
            return Ok(true);
        }
        let opened = self.hold()?;
        let Some(path) = self.blobs.stored(id)? else {
            return Ok(false);
        };
        self.relies_on_stored = true;
        if !self.dated.contains(&path) {
            let meta = fs::metadata(&path).map_err(writing(&path))?;
            if meta.mtime().saturating_mul(1_000_000_000) < opened - FRESH {
                date_now(&path).map_err(writing(&path))?;
            }
            self.dated.insert(path);
        }
        Ok(true)
    }

    /// Keeps a collector away from here on; gives the time when that began.
    fn hold(&mut self) -> Result<i64, Error> {
        if let Some((_, opened)) = &self.lock {
            return Ok(*opened);
        }
        let lock = self.blobs.sweep_lock()?;
        let failed = |e| Error::io("lock", b"sweep.lock", e);
        lock.lock_shared().map_err(failed)?;
        let opened = tick().map_err(failed)?;
        self.lock = Some((lock, opened));
        Ok(opened)
    }

    /// The packed form, where it is at least an eighth smaller.
    fn pack(&mut self, bytes: &[u8]) -> Option<Vec<u8>> {
        if bytes.len() < WORTH_PACKING {
            return None;
        }
        if self.packer.is_none() {
            self.packer = zstd::bulk::Compressor::new(LEVEL).ok();
        }
        // A packer that fails costs space, not content: it is stored as it is.
        let packed = self.packer.as_mut()?.compress(bytes).ok()?;
        (packed.len() < bytes.len() - bytes.len() / 8).then_some(packed)
    }

    fn staging(&mut self) -> Result<&Path, Error> {
        if self.staging.is_none() {
            let root = self.blobs.staging();
            self.staging = Some(TempDir::new_in(&root).map_err(writing(&root))?);
        }
        Ok(self.staging.as_ref().map_or(Path::new(""), TempDir::path))
    }

    /// Leaves the staged files behind, as a killed process does.
    #[cfg(test)]
    pub(super) fn leak_staging(mut self) -> Option<PathBuf> {
        self.staging.take().map(TempDir::keep)
    }
}

fn header(codec: u8, size: u64) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..3].copy_from_slice(MAGIC);
    header[3] = FORMAT_VERSION;
    header[4] = codec;
    header[5..].copy_from_slice(&size.to_le_bytes());
    header
}

/// Copies `head` and then `reader` behind the header of `file`, and gives the address and the size.
fn copy(
    head: &[u8],
    reader: &mut dyn Read,
    limit: u64,
    mut file: &File,
    codec: u8,
    path: &Path,
) -> Result<(BlobId, u64), Error> {
    io::Seek::seek(&mut file, io::SeekFrom::Start(HEADER as u64)).map_err(writing(path))?;
    let mut sink: Box<dyn Finish + '_> = match codec {
        ZSTD => Box::new(zstd::Encoder::new(file, LEVEL).map_err(writing(path))?),
        _ => Box::new(file),
    };
    let mut hasher = blake3::Hasher::new();
    let mut size = 0;
    let mut chunk = vec![0; 256 << 10];
    let mut ready = head;
    loop {
        size += ready.len() as u64;
        if size > limit {
            return Err(beyond(limit));
        }
        hasher.update(ready);
        sink.write_all(ready).map_err(writing(path))?;
        match reader.read(&mut chunk) {
            Ok(0) => break,
            Ok(read) => ready = &chunk[..read],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => ready = &[],
            Err(error) => return Err(Error::Source(error)),
        }
    }
    sink.finish().map_err(writing(path))?;
    Ok((BlobId::from_bytes(*hasher.finalize().as_bytes()), size))
}

/// A writer with something left to say at its end.
trait Finish: Write {
    fn finish(self: Box<Self>) -> io::Result<()>;
}

impl Finish for &File {
    fn finish(self: Box<Self>) -> io::Result<()> {
        Ok(())
    }
}

impl Finish for zstd::Encoder<'_, &File> {
    fn finish(self: Box<Self>) -> io::Result<()> {
        zstd::Encoder::finish(*self).map(drop)
    }
}

fn beyond(limit: u64) -> Error {
    Error::Limit {
        what: "bytes a file",
        limit,
        path: String::new(),
    }
}

fn writing(path: &Path) -> impl Fn(io::Error) -> Error + '_ {
    |error| Error::io("write", path.as_os_str().as_encoded_bytes(), error)
}
