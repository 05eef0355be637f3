//! The JSONL copy of the chain, kept up with the store, and the signed head after each batch.
//!
//! [`Mirror::catch_up`] is called after commits; it is off their path. It copies what the store has and the file lacks, under
//! a file lock, so that neither a crash nor several processes lose, double or reorder a line, and then signs a head for what
//! is now on disk: the order is store, log, head, each synced before the next, so a head never names what could be lost.
//! Before it copies it compares: a store that no longer has what the file or the newest head has is never "caught up" with.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Mutex;

use super::files::{self, Files, Lines};
use super::head::{Head, Signer};
use super::{Error, Link, Sealed};
use crate::clock::{Clock, Timestamp};
use crate::store::Store;

/// Entries that are copied at a time.
const PAGE: usize = 512;

#[derive(Debug)]
pub struct Mirror {
    files: Files,
    signer: Arc<Signer>,
    clock: Arc<dyn Clock>,
    /// Calls so far.
    calls: AtomicU64,
    last: Mutex<Pass>,
}

/// The last completed pass: a call that came before it began needs none of its own.
#[derive(Debug)]
struct Pass {
    covers: u64,
    link: Link,
}

impl Mirror {
    /// Makes what is missing: directories, the signing key.
    pub fn open(data_dir: &Path, clock: Arc<dyn Clock>) -> Result<Self, Error> {
        let files = Files::of(data_dir);
        let signer = Arc::new(Signer::open(&files)?);
        Ok(Self {
            files,
            signer,
            clock,
            calls: AtomicU64::new(0),
            last: Mutex::new(Pass {
                covers: 0,
                link: Link::start(),
            }),
        })
    }

    pub fn files(&self) -> &Files {
        &self.files
    }

    /// Copies every entry that was committed before this call, signs a head, and says where the file ends now. Calls that
    /// come while one is at work share the next pass. May be cancelled at any point: the next call goes on.
    ///
    /// # Errors
    /// [`Error::Diverged`] when the store, the file and the heads do not tell one story: someone has edited one of them.
    pub async fn catch_up(&self, store: &dyn Store) -> Result<Link, Error> {
        let ticket = self.calls.fetch_add(1, Ordering::SeqCst) + 1;
        let mut last = self.last.lock().await;
        if last.covers >= ticket {
            return Ok(last.link.clone());
        }
        let covers = self.calls.load(Ordering::SeqCst);
        let link = self.pass(store).await?;
        *last = Pass {
            covers,
            link: link.clone(),
        };
        Ok(link)
    }

    async fn pass(&self, store: &dyn Store) -> Result<Link, Error> {
        let files = self.files.clone();
        let mut copy = blocking(move || Copy::open(files)).await?;
        copy.is_in(store).await?;
        loop {
            let page = store.audit_log(copy.at.seq, PAGE).await.map_err(Error::Store)?;
            if page.is_empty() {
                break;
            }
            copy = blocking(move || copy.append(&page)).await?;
        }
        let (signer, now) = (self.signer.clone(), self.clock.now());
        blocking(move || copy.sign(&signer, now)).await
    }
}

/// File work, off the async threads. It ends whole even when the caller is gone, and only then gives up the lock.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T, Error> + Send + 'static) -> Result<T, Error> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(stopping) => Err(files::failed(
                "work in",
                Path::new("audit"),
                std::io::Error::other(stopping),
            )),
        },
    }
}

/// The files of one pass, locked.
struct Copy {
    files: Files,
    log: Lines,
    heads: Lines,
    /// Where the log ends.
    at: Link,
    newest: Option<Head>,
    /// Held until all of this is dropped.
    _lock: File,
}

impl Copy {
    fn open(files: Files) -> Result<Self, Error> {
        let lock = files::open_private(&files.lock)?;
        lock.lock()
            .map_err(|source| files::failed("lock", &files.lock, source))?;
        let mut log = Lines::open(&files.log)?;
        let mut heads = Lines::open(&files.heads)?;
        let at = match log.last()? {
            Some(line) => {
                let entry = super::read(&line).map_err(|error| Error::Damaged {
                    path: files.log.clone(),
                    reason: format!("last line: {error}"),
                })?;
                Link::of(&entry)
            }
            None => Link::start(),
        };
        let newest = match heads.last()? {
            Some(line) => Some(Head::read(&files.heads, &line)?),
            None => None,
        };
        Ok(Self {
            files,
            log,
            heads,
            at,
            newest,
            _lock: lock,
        })
    }

    /// Whether the store still has what the file ends with and what the newest head names.
    async fn is_in(&self, store: &dyn Store) -> Result<(), Error> {
        let signed = self.newest.as_ref().map(Head::link);
        for (path, link) in [(&self.files.log, Some(self.at.clone())), (&self.files.heads, signed)] {
            let Some(link) = link.filter(|link| link.seq > 0) else {
                continue;
            };
            let found = store.audit_log(link.seq - 1, 1).await.map_err(Error::Store)?;
            let reason = match found.first().map(Link::of) {
                Some(found) if found == link => continue,
                Some(found) if found.seq == link.seq => "the store has another one there",
                Some(_) | None => "the store does not have it",
            };
            return Err(diverged(path, link.seq, reason));
        }
        Ok(())
    }

    fn append(mut self, page: &[Sealed]) -> Result<Self, Error> {
        let mut lines = String::new();
        for entry in page {
            if entry.seq != self.at.seq + 1 || entry.prev != self.at.hash {
                return Err(diverged(
                    &self.files.log,
                    self.at.seq + 1,
                    "the chain does not go on from there",
                ));
            }
            self.at = Link::of(entry);
            lines.push_str(&super::write(entry));
            lines.push('\n');
        }
        self.log.append(&lines)?;
        Ok(self)
    }

    /// Signs where the log ends, unless the newest head says so already.
    fn sign(mut self, signer: &Signer, now: Timestamp) -> Result<Link, Error> {
        let is_new = self.newest.as_ref().map_or(Link::start(), Head::link) != self.at;
        if is_new {
            let head = signer.sign(&self.at, now);
            let line = serde_json::to_string(&head).expect("a head has string keys only");
            self.heads.append(&format!("{line}\n"))?;
        }
        Ok(self.at)
    }
}

fn diverged(path: &Path, seq: u64, reason: &str) -> Error {
    Error::Diverged {
        path: path.to_owned(),
        seq,
        reason: reason.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tokio::task::JoinSet;

    use super::*;
    use crate::audit::head::PublicKey;
    use crate::audit::verify::{Input, verify};
    use crate::audit::{Record, write};
    use crate::clock::System;
    use crate::store::sqlite::Sqlite;

    fn record(n: i64) -> Record {
        Record {
            at: Timestamp(n),
            actor: "server".to_owned(),
            action: "exec.ended".to_owned(),
            outcome: "ok".to_owned(),
            ids: [("run".to_owned(), n.to_string())].into(),
            details: serde_json::Value::Null,
        }
    }

    async fn assert_even(dir: &Path, store: &dyn Store) {
        let files = Files::of(dir);
        let lines: String = store
            .audit_log(0, usize::MAX)
            .await
            .unwrap()
            .iter()
            .map(|entry| write(entry) + "\n")
            .collect();
        assert_eq!(fs::read_to_string(&files.log).unwrap(), lines);
        let input = Input {
            store: Some(store),
            log: Some(files.log.clone()),
            heads: files.heads.clone(),
            key: PublicKey::of(&files).unwrap(),
            anchors: vec![],
        };
        let report = verify(&input).await.unwrap();
        assert_eq!((report.broken, report.notes), (vec![], vec![]));
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn several_processes_lose_double_and_reorder_no_line() {
        let dir = tempfile::tempdir().unwrap();
        let mut calls = JoinSet::new();
        for process in 0..4 {
            let store = Arc::new(Sqlite::open(dir.path(), Arc::new(System)).unwrap());
            let mirror = Arc::new(Mirror::open(dir.path(), Arc::new(System)).unwrap());
            for task in 0..4 {
                let (store, mirror) = (store.clone(), mirror.clone());
                calls.spawn(async move {
                    for n in 0..8 {
                        store.audit(vec![record(process * 100 + task * 10 + n)]).await.unwrap();
                        let own = store.audit_log(0, usize::MAX).await.unwrap().len() as u64;
                        assert!(mirror.catch_up(&*store).await.unwrap().seq >= own);
                    }
                });
            }
        }
        calls.join_all().await;
        let store = Sqlite::open(dir.path(), Arc::new(System)).unwrap();
        assert_eq!(store.audit_log(0, usize::MAX).await.unwrap().len(), 128);
        assert_even(dir.path(), &store).await;
    }

    #[tokio::test]
    async fn a_crash_at_any_byte_of_a_write_is_made_good() {
        let dir = tempfile::tempdir().unwrap();
        let store = Sqlite::open(dir.path(), Arc::new(System)).unwrap();
        let mirror = Mirror::open(dir.path(), Arc::new(System)).unwrap();
        store.audit(vec![record(1)]).await.unwrap();
        mirror.catch_up(&store).await.unwrap();
        let files = mirror.files();
        let before = [&files.log, &files.heads].map(|path| fs::read(path).unwrap());
        store.audit(vec![record(2), record(3)]).await.unwrap();
        mirror.catch_up(&store).await.unwrap();
        let after = [&files.log, &files.heads].map(|path| fs::read(path).unwrap());
        // The log is written first, the head when that is whole.
        let crashes = (before[0].len()..after[0].len())
            .map(|log| (log, before[1].len()))
            .chain((before[1].len()..after[1].len()).map(|heads| (after[0].len(), heads)));
        for (log, heads) in crashes.step_by(13) {
            fs::write(&files.log, &after[0][..log]).unwrap();
            fs::write(&files.heads, &after[1][..heads]).unwrap();
            assert_eq!(mirror.catch_up(&store).await.unwrap().seq, 3);
            assert_even(dir.path(), &store).await;
        }
    }

    #[tokio::test]
    async fn nothing_new_writes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let store = Sqlite::open(dir.path(), Arc::new(System)).unwrap();
        let mirror = Mirror::open(dir.path(), Arc::new(System)).unwrap();
        assert_eq!(mirror.catch_up(&store).await.unwrap(), Link::start());
        store.audit(vec![record(1)]).await.unwrap();
        let link = mirror.catch_up(&store).await.unwrap();
        let heads = fs::read(&mirror.files().heads).unwrap();
        assert_eq!(mirror.catch_up(&store).await.unwrap(), link);
        assert_eq!(fs::read(&mirror.files().heads).unwrap(), heads);
        assert_eq!(heads.iter().filter(|byte| **byte == b'\n').count(), 1);
    }
}
