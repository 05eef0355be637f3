//! File calls: what the sandbox's own programs could do with files, asked for from outside.
//!
//! The host touches no file and follows no name here; the guest's file plane does, as the sandbox's user. Its answers are
//! hostile: bounded in number and size, and believed only as far as a program's output would be.

mod call;
mod stream;
mod watch;

use std::time::Duration;

pub use stream::{Reading, Writing};
pub use watch::{Change, ChangeKind, Watch};

use crate::wire::{
    self, FileType,
    file_reply::{Done, Kind as Reply},
    file_request::{self, Kind as Request},
};

use super::{Error, Sandbox};
use call::Call;

/// How long one call that is no stream may take.
const LIMIT: Duration = Duration::from_secs(60);
/// Most bytes that [`Files::read`] returns.
const MAX_READ: usize = 64 << 20;
/// Most entries or matches of one call.
const MAX_RESULTS: usize = 100_000;
/// Most bytes of the answer to a call that is no stream. Names and links can be 4 KiB each, and a guest that lies sends more.
const MAX_ANSWER: usize = 2 * MAX_READ;

/// The files of a sandbox. Paths are bytes, absolute or relative to the default working directory.
#[derive(Debug, Clone, Copy)]
pub struct Files<'a> {
    sandbox: &'a Sandbox,
}

/// What kind of thing a name stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Regular,
    Directory,
    Symlink,
    /// FIFO, socket or device.
    Other,
}

/// One file, as its name says; a symbolic link is not followed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// As asked for, or below the listed directory.
    pub path: Vec<u8>,
    pub kind: Kind,
    pub size: u64,
    /// Permission bits, 0..=0o7777.
    pub mode: u32,
    /// Nanoseconds since the Unix epoch.
    pub modified_ns: i64,
    pub link_target: Option<Vec<u8>>,
}

/// A part of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Content {
    pub bytes: Vec<u8>,
    /// Size of the whole file.
    pub total_bytes: u64,
    /// There is more after `bytes`.
    pub truncated: bool,
}

/// Which part of a file is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Range {
    pub offset: u64,
    /// `None` = to the end.
    pub length: Option<u64>,
}

/// Entries of a tree, each directory before what it holds, siblings by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listing {
    pub entries: Vec<Entry>,
    pub truncated: bool,
}

/// What to look for.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Search {
    /// A directory, or one file.
    pub path: Vec<u8>,
    /// In the syntax of crate `regex`.
    pub pattern: String,
    /// Which files; one without a slash is for names at any depth. `None` = all.
    pub glob: Option<String>,
    pub max_matches: u32,
}

/// A line that matches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Match {
    /// Below the searched directory.
    pub path: Vec<u8>,
    /// From 1.
    pub line: u64,
    /// Without its end, cut at 400 bytes.
    pub text: Vec<u8>,
}

/// What a search found, in the order of a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    pub matches: Vec<Match>,
    pub files_read: u64,
    pub truncated: bool,
}

impl<'a> Files<'a> {
    pub(super) fn new(sandbox: &'a Sandbox) -> Self {
        Self { sandbox }
    }

    /// Reads a regular file into memory, 64 MiB at most; see [`Files::read_stream`].
    pub async fn read(&self, path: impl AsRef<[u8]>, range: Range) -> Result<Content, Error> {
        let request = file_request::Read {
            path: path.as_ref().to_vec(),
            offset: range.offset,
            length: match range.length {
                // 0 means "to the end" on the wire.
                Some(0) => 1,
                length => length.unwrap_or(MAX_READ as u64).min(MAX_READ as u64),
            },
        };
        let mut bytes = Vec::new();
        let done = self.call(Request::Read(request), None, |reply| match reply {
            Reply::Data(data) if bytes.len() + data.len() <= MAX_READ => {
                bytes.extend_from_slice(&data);
                Ok(())
            }
            Reply::Info(_) => Ok(()),
            other => Err(other),
        });
        let done = done.await?;
        let truncated = done.truncated || (range.length == Some(0) && !bytes.is_empty());
        if range.length == Some(0) {
            bytes.clear();
        }
        Ok(Content {
            bytes,
            total_bytes: done.total,
            truncated,
        })
    }

    /// Puts `bytes` in place of the file at `path`, whole or not at all. Parents are made. `mode` is for a new file; the
    /// default is 0644, and an existing one keeps its own.
    pub async fn write(&self, path: impl AsRef<[u8]>, bytes: &[u8], mode: Option<u32>) -> Result<(), Error> {
        let request = file_request::Write {
            path: path.as_ref().to_vec(),
            mode: mode.unwrap_or(0),
        };
        let info = |reply| match reply {
            Reply::Info(_) => Ok(()),
            other => Err(other),
        };
        self.call(Request::Write(request), Some(bytes), info).await.map(drop)
    }

    /// Reads a regular file of any size, piece by piece.
    pub async fn read_stream(&self, path: impl AsRef<[u8]>, range: Range) -> Result<Reading, Error> {
        Reading::open(self.sandbox, path.as_ref(), range).await
    }

    /// Writes a file of any size, piece by piece: it is there, whole, when [`Writing::finish`] succeeds, or not at all. Parents
    /// are made; `mode` is as in [`Files::write`].
    pub async fn write_stream(&self, path: impl AsRef<[u8]>, mode: Option<u32>) -> Result<Writing, Error> {
        Writing::open(self.sandbox, path.as_ref(), mode).await
    }

    /// Tells of changes in a directory, and with `recursive` in all below it, from when this returns.
    pub async fn watch(&self, path: impl AsRef<[u8]>, recursive: bool) -> Result<Watch, Error> {
        Watch::open(self.sandbox, path.as_ref(), recursive).await
    }

    pub async fn stat(&self, path: impl AsRef<[u8]>) -> Result<Entry, Error> {
        let request = file_request::Stat {
            path: path.as_ref().to_vec(),
        };
        let mut found = None;
        self.call(Request::Stat(request), None, |reply| match reply {
            Reply::Info(info) if found.is_none() => {
                found = Some(entry(info));
                Ok(())
            }
            other => Err(other),
        })
        .await?;
        found.ok_or_else(|| self.lost("it told nothing of a file"))
    }

    /// Entries below `path`; depth 1 = its own.
    pub async fn list(&self, path: impl AsRef<[u8]>, depth: u32, max_entries: u32) -> Result<Listing, Error> {
        let request = file_request::List {
            path: path.as_ref().to_vec(),
            depth,
            max_entries,
        };
        let mut entries = Vec::new();
        let done = self.call(Request::List(request), None, |reply| match reply {
            Reply::Info(info) if entries.len() < MAX_RESULTS => {
                entries.push(entry(info));
                Ok(())
            }
            other => Err(other),
        });
        let truncated = done.await?.truncated;
        Ok(Listing { entries, truncated })
    }

    pub async fn search(&self, search: Search) -> Result<Found, Error> {
        let request = file_request::Search {
            path: search.path,
            pattern: search.pattern,
            glob: search.glob.unwrap_or_default(),
            max_matches: search.max_matches,
        };
        let mut matches = Vec::new();
        let done = self.call(Request::Search(request), None, |reply| match reply {
            Reply::Match(wire::Match { path, line, text }) if matches.len() < MAX_RESULTS => {
                matches.push(Match { path, line, text });
                Ok(())
            }
            other => Err(other),
        });
        let done = done.await?;
        Ok(Found {
            matches,
            files_read: done.total,
            truncated: done.truncated,
        })
    }

    /// Makes one directory.
    pub async fn mkdir(&self, path: impl AsRef<[u8]>) -> Result<(), Error> {
        let path = path.as_ref().to_vec();
        let request = file_request::Mkdir { path, parents: false };
        self.call(Request::Mkdir(request), None, Err).await.map(drop)
    }

    /// Makes a directory and its parents; fine when it is there.
    pub async fn mkdir_all(&self, path: impl AsRef<[u8]>) -> Result<(), Error> {
        let path = path.as_ref().to_vec();
        let request = file_request::Mkdir { path, parents: true };
        self.call(Request::Mkdir(request), None, Err).await.map(drop)
    }

    /// Removes a file, a symbolic link or an empty directory.
    pub async fn remove(&self, path: impl AsRef<[u8]>) -> Result<(), Error> {
        let path = path.as_ref().to_vec();
        let request = file_request::Remove { path, recursive: false };
        self.call(Request::Remove(request), None, Err).await.map(drop)
    }

    /// Removes whatever is there, with all that it holds.
    pub async fn remove_all(&self, path: impl AsRef<[u8]>) -> Result<(), Error> {
        let path = path.as_ref().to_vec();
        let request = file_request::Remove { path, recursive: true };
        self.call(Request::Remove(request), None, Err).await.map(drop)
    }

    pub async fn rename(&self, from: impl AsRef<[u8]>, to: impl AsRef<[u8]>) -> Result<(), Error> {
        let request = file_request::Rename {
            from: from.as_ref().to_vec(),
            to: to.as_ref().to_vec(),
        };
        self.call(Request::Rename(request), None, Err).await.map(drop)
    }

    fn lost(&self, reason: impl Into<String>) -> Error {
        Error::GuestLost {
            sandbox: self.sandbox.id().clone(),
            reason: reason.into(),
        }
    }

    /// One request. `take` gets each reply before the last, and gives back one that is out of place.
    async fn call(
        &self,
        request: Request,
        content: Option<&[u8]>,
        mut take: impl FnMut(Reply) -> Result<(), Reply>,
    ) -> Result<Done, Error> {
        let (mut call, frame) = Call::open(self.sandbox, request, Some(LIMIT)).await?;
        let sending = call::send(call.control(), frame, content);
        let answer = async {
            let mut bytes = 0;
            loop {
                let reply = call.reply().await?;
                bytes += reply.encoded_len();
                if bytes > MAX_ANSWER {
                    return Err(Error::File {
                        code: "too_large".to_owned(),
                        message: format!("the answer is larger than {MAX_ANSWER} bytes: ask for less at a time"),
                    });
                }
                match reply {
                    Reply::Done(done) => return Ok(done),
                    other => take(other).map_err(|_| self.lost("its answer to a file call was out of place"))?,
                }
            }
        };
        let answer = call::beside(answer, sending).await;
        call.close(&answer).await;
        answer
    }
}

fn entry(info: wire::FileInfo) -> Entry {
    let kind = match FileType::try_from(info.r#type) {
        Ok(FileType::Regular) => Kind::Regular,
        Ok(FileType::Directory) => Kind::Directory,
        Ok(FileType::Symlink) => Kind::Symlink,
        Ok(FileType::Other | FileType::Unspecified) | Err(_) => Kind::Other,
    };
    Entry {
        path: info.path,
        kind,
        size: info.size,
        mode: info.mode & 0o7777,
        modified_ns: info.mtime_ns,
        link_target: (kind == Kind::Symlink).then_some(info.link_target),
    }
}
