//! Where the audit files of a data directory lie, and how lines get into them whole.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use super::Error;

/// The audit files of one data directory. The keys lie apart from the log, so that the log can be handed out whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Files {
    /// The mirror: one entry a line.
    pub log: PathBuf,
    /// Signed heads: one a line, oldest first.
    pub heads: PathBuf,
    /// Held by whoever writes to the two above.
    pub lock: PathBuf,
    /// Ed25519, PKCS#8, for its owner alone.
    pub private_key: PathBuf,
    /// Ed25519, 32 bytes in base64, one line.
    pub public_key: PathBuf,
}

impl Files {
    pub fn of(data_dir: &Path) -> Self {
        let (audit, keys) = (data_dir.join("audit"), data_dir.join("keys"));
        Self {
            log: audit.join("audit.jsonl"),
            heads: audit.join("heads.jsonl"),
            lock: audit.join("audit.lock"),
            private_key: keys.join("audit-ed25519.pk8"),
            public_key: keys.join("audit-ed25519.pub"),
        }
    }

    /// Makes the directories, for their owner alone.
    pub(super) fn make_directories(&self) -> Result<(), Error> {
        for file in [&self.log, &self.private_key] {
            let dir = file.parent().expect("joined above");
            let made = DirBuilder::new().recursive(true).mode(0o700).create(dir);
            made.map_err(|source| failed("make", dir, source))?;
        }
        Ok(())
    }
}

pub(super) fn failed(doing: &'static str, path: &Path, source: io::Error) -> Error {
    Error::File {
        doing,
        path: path.to_owned(),
        source,
    }
}

/// Opens a file to read and append, made for its owner alone.
pub(super) fn open_private(path: &Path) -> Result<File, Error> {
    let mut options = OpenOptions::new();
    options.read(true).append(true).create(true).mode(0o600);
    options.open(path).map_err(|source| failed("open", path, source))
}

/// Makes a file with this content unless there is one: whole or not at all, and the first of several makers wins.
pub(super) fn make_once(path: &Path, content: &[u8], mode: u32) -> Result<(), Error> {
    // Made long ago, as for most: nothing has to be written and synced only to find that out.
    if path.exists() {
        return Ok(());
    }
    let make = || {
        let dir = path.parent().unwrap_or(Path::new("."));
        let mut draft = tempfile::Builder::new()
            .permissions(PermissionsExt::from_mode(mode))
            .tempfile_in(dir)?;
        draft.write_all(content)?;
        draft.as_file().sync_all()?;
        match draft.persist_noclobber(path) {
            Ok(_) => File::open(dir)?.sync_all(),
            Err(error) if error.error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            Err(error) => Err(error.error),
        }
    };
    make().map_err(|source| failed("make", path, source))
}

/// Opens a file to read; `None` when there is none. A pipe or a device in its place is refused, and never waited for.
pub(super) fn open_plain(path: &Path) -> Result<Option<File>, Error> {
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY);
    let open = || {
        let file = options.open(path)?;
        match file.metadata()?.is_file() {
            true => Ok(file),
            false => Err(io::Error::other("it is not a regular file")),
        }
    };
    match open() {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(failed("open", path, source)),
    }
}

/// Reads a small file; `None` when there is none.
pub(super) fn read(path: &Path) -> Result<Option<Vec<u8>>, Error> {
    let Some(mut file) = open_plain(path)? else {
        return Ok(None);
    };
    let mut bytes = Vec::new();
    let read = file.read_to_end(&mut bytes);
    read.map_err(|source| failed("read", path, source))?;
    Ok(Some(bytes))
}

/// A file of lines, only ever appended to, by the holder of the lock.
#[derive(Debug)]
pub(super) struct Lines {
    path: PathBuf,
    file: File,
}

impl Lines {
    pub(super) fn open(path: &Path) -> Result<Self, Error> {
        Ok(Self {
            path: path.to_owned(),
            file: open_private(path)?,
        })
    }

    /// The last whole line. What stands behind it is the torn write of a crash and is dropped.
    pub(super) fn last(&mut self) -> Result<Option<String>, Error> {
        let last = self.read_last();
        last.map_err(|source| failed("read", &self.path, source))
    }

    /// Appends whole lines and waits until they are on disk.
    pub(super) fn append(&mut self, lines: &str) -> Result<(), Error> {
        let append = self
            .file
            .write_all(lines.as_bytes())
            .and_then(|()| self.file.sync_data());
        append.map_err(|source| failed("append to", &self.path, source))
    }

    fn read_last(&mut self) -> io::Result<Option<String>> {
        const BLOCK: u64 = 16 * 1024;
        let length = self.file.metadata()?.len();
        let mut start = length;
        let mut tail = Vec::new();
        // Reads backwards until the tail holds the line break before the last whole line.
        while start > 0 && tail.iter().filter(|byte| **byte == b'\n').count() < 2 {
            let block = BLOCK.min(start);
            start -= block;
            let mut bytes = vec![0; block as usize];
            self.file.seek(SeekFrom::Start(start))?;
            self.file.read_exact(&mut bytes)?;
            bytes.append(&mut tail);
            tail = bytes;
        }
        let whole = tail.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        if whole < tail.len() {
            self.file.set_len(start + whole as u64)?;
            self.file.sync_data()?;
        }
        let Some(line) = tail[..whole].strip_suffix(b"\n") else {
            return Ok(None);
        };
        let begin = line.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        let line = String::from_utf8(line[begin..].to_vec());
        line.map(Some)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_last_line_is_found_and_a_torn_one_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lines");
        let long = "x".repeat(40_000);
        for (content, last, left) in [
            (String::new(), None, 0),
            ("torn".to_owned(), None, 0),
            ("one\n".to_owned(), Some("one".to_owned()), 4),
            ("one\ntwo\n".to_owned(), Some("two".to_owned()), 8),
            ("one\ntwo\nto".to_owned(), Some("two".to_owned()), 8),
            (format!("one\n{long}\n{long}"), Some(long.clone()), 40_005),
        ] {
            fs::write(&path, &content).unwrap();
            let mut lines = Lines::open(&path).unwrap();
            assert_eq!(lines.last().unwrap(), last);
            assert_eq!(fs::metadata(&path).unwrap().len(), left);
            lines.append("next\n").unwrap();
            assert_eq!(lines.last().unwrap().as_deref(), Some("next"));
        }
    }

    #[test]
    fn a_file_is_made_once_for_its_owner_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        make_once(&path, b"first", 0o600).unwrap();
        make_once(&path, b"second", 0o600).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"first");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
