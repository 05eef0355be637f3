//! Verifying: walks a chain and names the first entry that is not as it was written.
//!
//! [`Walk`] is pure: entries in, the first [`Broken`] out. [`verify`] feeds it the store and the log side by side and
//! compares the two. What cannot be decided is said in the report's notes, never passed over.

use std::path::{Path, PathBuf};

use serde::Serialize;
use tokio::io::{AsyncBufReadExt, BufReader};

use super::chain::hash;
use super::head::{Head, PublicKey};
use super::{Error, Link, Sealed, files};
use crate::store::{self, Store};

/// Where something was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    Store,
    Log,
    Heads,
    /// Between store and log.
    Both,
}

/// What is wrong with an entry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, thiserror::Error)]
#[serde(tag = "problem", rename_all = "snake_case")]
pub enum Problem {
    #[error("it cannot be read: {reason}")]
    Unreadable { reason: String },
    #[error("its content does not fit its hash: it was edited")]
    Edited,
    #[error("it is missing: entry {next} stands in its place")]
    Missing { next: u64 },
    #[error("it stands behind entry {after}: the order was changed")]
    Displaced { after: u64 },
    #[error("it stands there more than once")]
    Repeated,
    #[error("it does not go on from the entry before it: one of the two was replaced")]
    Unlinked,
    #[error("it and what came after it were cut off: a signed head counts {signed} entries")]
    Cut { signed: u64 },
    #[error("a signed head names another hash for it: the chain was rewritten")]
    NotAsSigned,
    #[error("the signature of the head that names it is wrong")]
    Forged,
    #[error("store and log have different entries there")]
    Differs,
    #[error("the log has it and the store does not")]
    NotInStore,
}

/// The first broken entry of one source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Broken {
    pub source: Source,
    pub seq: u64,
    #[serde(flatten)]
    pub problem: Problem,
}

/// What verifying found.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Where the good part of the store's chain ends; `None` when it was not asked.
    pub store: Option<Link>,
    pub log: Option<Link>,
    /// Signed heads with a good signature.
    pub heads: u64,
    pub newest_head: Option<Head>,
    /// Lowest number first; one for each source.
    pub broken: Vec<Broken>,
    /// What could not be decided, and what is odd but no proof of harm.
    pub notes: Vec<String>,
}

impl Report {
    /// The first broken entry; `None` = the chain is whole as far as the notes say.
    pub fn first(&self) -> Option<&Broken> {
        self.broken.first()
    }
}

/// What to verify.
#[derive(Debug)]
pub struct Input<'a> {
    pub store: Option<&'a dyn Store>,
    pub log: Option<PathBuf>,
    /// The signed heads and the key to check them with.
    pub heads: PathBuf,
    pub key: Option<PublicKey>,
    /// Heads that were kept elsewhere and are trusted as they are.
    pub anchors: Vec<Link>,
}

/// Checks everything in `input` against itself, against the heads and against each other. Writes nothing. Hold the files
/// still meanwhile ([`hold`]).
pub async fn verify(input: &Input<'_>) -> Result<Report, Error> {
    let mut report = Report::default();
    let heads = read_heads(input, &mut report).await?;
    let mut trusted: Vec<Link> = heads.iter().map(Head::link).chain(input.anchors.clone()).collect();
    trusted.sort_by_key(|link| link.seq);
    let newest = trusted.last().map_or(0, |link| link.seq);

    let mut log = match &input.log {
        Some(path) => Some(LogReader::open(path).await?),
        None => None,
    };
    let mut log_walk = Walk::new(trusted.clone());
    let mut store_walk = Walk::new(trusted);
    let mut differs = None;
    if let Some(store) = input.store {
        let mut rows = Rows::new(store);
        while let Some(row) = rows.next().await? {
            let line = match &mut log {
                Some(log) => log.next().await?,
                None => None,
            };
            let pair = (&row, &line);
            if let (Ok(row), Some(Ok(line))) = pair
                && row != line
                && differs.is_none()
            {
                differs = Some(row.seq);
            }
            store_walk.push(row);
            line.into_iter().for_each(|line| log_walk.push(line));
        }
    }
    // What the log has beyond the store.
    let mut beyond = None;
    if let Some(log) = &mut log {
        while let Some(line) = log.next().await? {
            log_walk.push(line);
            if store_walk.broken.is_none() {
                beyond = beyond.or(Some(store_walk.at.seq + 1));
            }
        }
        if log.is_torn {
            report.notes.push(
                "the log's last line is incomplete (a crash while it was written); the next catch-up replaces it"
                    .to_owned(),
            );
        }
    }

    if log.as_ref().is_some_and(|log| log.lines.is_none()) && newest == 0 {
        report
            .notes
            .push("there is no log file and no signed head of one".to_owned());
    } else if input.log.is_some() {
        report.log = Some(log_walk.at.clone());
        report.broken.extend(log_walk.finish(Source::Log));
    }
    if input.store.is_some() {
        report.store = Some(store_walk.at.clone());
        report.broken.extend(store_walk.finish(Source::Store));
    }
    if input.store.is_some() && input.log.is_some() {
        let found = differs.map(|seq| (seq, Problem::Differs));
        let found = found.or(beyond.map(|seq| (seq, Problem::NotInStore)));
        report.broken.extend(found.map(|(seq, problem)| Broken {
            source: Source::Both,
            seq,
            problem,
        }));
    }
    report.broken.sort_by_key(|broken| broken.seq);
    note_limits(&mut report, newest);
    Ok(report)
}

/// Says what the heads do not cover and where the log is behind.
fn note_limits(report: &mut Report, newest: u64) {
    let end = report
        .store
        .iter()
        .chain(&report.log)
        .map(|link| link.seq)
        .max()
        .unwrap_or(0);
    if newest == 0 {
        report
            .notes
            .push("no signed head: a cut tail cannot be excluded".to_owned());
    } else if end > newest {
        report.notes.push(format!(
            "entries {} to {end} are newer than the newest signed head: nothing vouches yet that they are all there is",
            newest + 1
        ));
    }
    if let (Some(store), Some(log)) = (&report.store, &report.log)
        && log.seq < store.seq
        && report.broken.is_empty()
    {
        report.notes.push(format!(
            "the log does not have entries {} to {} of the store yet",
            log.seq + 1,
            store.seq
        ));
    }
}

/// Keeps the mirror of a data directory from writing for as long as the answer is held; `None` where none has ever written.
pub async fn hold(lock: &Path) -> Result<Option<std::fs::File>, Error> {
    let path = lock.to_owned();
    let locked = tokio::task::spawn_blocking(move || {
        let Some(file) = files::open_plain(&path)? else {
            return Ok(None);
        };
        file.lock_shared()
            .map_err(|source| files::failed("lock", &path, source))?;
        Ok(Some(file))
    });
    locked
        .await
        .unwrap_or_else(|error| Err(files::failed("lock", lock, std::io::Error::other(error))))
}

/// The heads with a good signature; the others go into the report.
async fn read_heads(input: &Input<'_>, report: &mut Report) -> Result<Vec<Head>, Error> {
    let Some(text) = files::read(&input.heads)? else {
        return Ok(Vec::new());
    };
    let Some(key) = &input.key else {
        report
            .notes
            .push("there are signed heads but no key to check them with".to_owned());
        return Ok(Vec::new());
    };
    let mut heads: Vec<Head> = Vec::new();
    let mut broken = None;
    for line in text.split_inclusive(|byte| *byte == b'\n') {
        let Some(line) = line.strip_suffix(b"\n") else {
            let note = "the last signed head is incomplete (a crash while it was written)";
            report.notes.push(note.to_owned());
            break;
        };
        let problem = match Head::read(&input.heads, &String::from_utf8_lossy(line)) {
            Ok(head) if key.has_signed(&head) => {
                heads.push(head);
                continue;
            }
            Ok(head) => (head.count, Problem::Forged),
            Err(error) => {
                let before = heads.last().map_or(0, |head| head.count);
                let reason = error.to_string();
                (before + 1, Problem::Unreadable { reason })
            }
        };
        broken = broken.or(Some(problem));
    }
    report.broken.extend(broken.map(|(seq, problem)| Broken {
        source: Source::Heads,
        seq,
        problem,
    }));
    report.heads = heads.len() as u64;
    report.newest_head = heads.last().cloned();
    Ok(heads)
}

/// Checks one chain, entry by entry.
#[derive(Debug)]
pub struct Walk {
    /// The last good entry.
    at: Link,
    /// Rising; what the chain must agree with.
    trusted: std::iter::Peekable<std::vec::IntoIter<Link>>,
    newest: u64,
    broken: Option<(u64, Problem)>,
}

impl Walk {
    /// `trusted`: in rising order.
    pub fn new(trusted: Vec<Link>) -> Self {
        Self {
            at: Link::start(),
            newest: trusted.last().map_or(0, |link| link.seq),
            trusted: trusted.into_iter().peekable(),
            broken: None,
        }
    }

    /// Takes the next entry, or why there is none that can be read.
    pub fn push(&mut self, entry: Result<Sealed, Problem>) {
        let next = self.at.seq + 1;
        match (&mut self.broken, entry) {
            (None, Err(problem)) => self.broken = Some((next, problem)),
            (None, Ok(entry)) => match self.judge(&entry) {
                Ok(()) => self.at = Link::of(&entry),
                Err(broken) => self.broken = Some(broken),
            },
            // A missing entry that turns up later was moved.
            (Some((seq, problem)), Ok(entry)) => {
                if let Problem::Missing { next } = *problem
                    && entry.seq == *seq
                {
                    *problem = Problem::Displaced { after: next };
                }
            }
            (Some(_), Err(_)) => {}
        }
    }

    /// Ends the chain here.
    pub fn finish(self, source: Source) -> Option<Broken> {
        let cut = (self.newest > self.at.seq).then_some((self.at.seq + 1, Problem::Cut { signed: self.newest }));
        let (seq, problem) = self.broken.or(cut)?;
        Some(Broken { source, seq, problem })
    }

    fn judge(&mut self, entry: &Sealed) -> Result<(), (u64, Problem)> {
        let next = self.at.seq + 1;
        if hash(entry) != entry.hash {
            return Err((next, Problem::Edited));
        }
        if entry.seq > next {
            return Err((next, Problem::Missing { next: entry.seq }));
        }
        if entry.seq < next {
            return Err((entry.seq, Problem::Repeated));
        }
        if entry.prev != self.at.hash {
            return Err((next, Problem::Unlinked));
        }
        while let Some(link) = self.trusted.next_if(|link| link.seq <= next) {
            if link.seq == next && link.hash != entry.hash {
                return Err((next, Problem::NotAsSigned));
            }
        }
        Ok(())
    }
}

/// The store's entries, in order, with the unreadable one in its place.
struct Rows<'a> {
    store: &'a dyn Store,
    page: std::collections::VecDeque<Sealed>,
    after: u64,
    ended: bool,
}

impl<'a> Rows<'a> {
    const PAGE: usize = 512;

    fn new(store: &'a dyn Store) -> Self {
        Self {
            store,
            page: std::collections::VecDeque::new(),
            after: 0,
            ended: false,
        }
    }

    async fn next(&mut self) -> Result<Option<Result<Sealed, Problem>>, Error> {
        if self.page.is_empty() && !self.ended {
            let page = match self.store.audit_log(self.after, Self::PAGE).await {
                // One row spoils a page: go on singly up to that row.
                Err(store::Error::Damaged { .. } | store::Error::UnknownVersion { .. }) => {
                    self.store.audit_log(self.after, 1).await
                }
                page => page,
            };
            match page {
                Ok(page) => self.page = page.into(),
                Err(error @ (store::Error::Damaged { .. } | store::Error::UnknownVersion { .. })) => {
                    self.ended = true;
                    let reason = error.to_string();
                    return Ok(Some(Err(Problem::Unreadable { reason })));
                }
                Err(error) => return Err(Error::Store(error)),
            }
        }
        let entry = self.page.pop_front();
        self.after = entry.as_ref().map_or(self.after, |entry| entry.seq);
        self.ended |= entry.is_none();
        Ok(entry.map(Ok))
    }
}

/// The log's lines, in order.
struct LogReader {
    path: PathBuf,
    /// `None` = no such file.
    lines: Option<BufReader<tokio::fs::File>>,
    /// The last line has no end.
    is_torn: bool,
}

impl LogReader {
    async fn open(path: &Path) -> Result<Self, Error> {
        let lines = files::open_plain(path)?.map(|file| BufReader::new(tokio::fs::File::from_std(file)));
        Ok(Self {
            path: path.to_owned(),
            lines,
            is_torn: false,
        })
    }

    async fn next(&mut self) -> Result<Option<Result<Sealed, Problem>>, Error> {
        let Some(lines) = &mut self.lines else {
            return Ok(None);
        };
        let mut line = Vec::new();
        let read = lines.read_until(b'\n', &mut line).await;
        read.map_err(|source| files::failed("read", &self.path, source))?;
        if line.is_empty() {
            return Ok(None);
        }
        let Some(line) = line.strip_suffix(b"\n") else {
            self.is_torn = true;
            return Ok(None);
        };
        let entry = match std::str::from_utf8(line) {
            Ok(line) => super::read(line).map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        Ok(Some(entry.map_err(|reason| Problem::Unreadable { reason })))
    }
}

#[cfg(test)]
#[path = "verify_tests.rs"]
mod tests;
