//! The one writer: a thread with its own connection that puts all queued writes into one transaction.
//!
//! Group commit: the sync to disk is paid once for a batch. While one batch is being synced the next one queues up, so
//! batches grow with the load and a lone write never waits for company. Each write has a savepoint of its own, so that a
//! refused one takes nothing with it; all are answered after COMMIT. When COMMIT fails, all fail: a refusal was decided
//! on what the others had written. Dropping the writer ends the queued work first.

use std::sync::Arc;
use std::thread::{self, JoinHandle};

use rusqlite::Connection;
use tokio::sync::{mpsc, oneshot};

use super::{Fail, schema};
use crate::store::Error;

/// Callers wait (and hold their own work back) when this many writes are queued.
const QUEUE: usize = 1024;
/// Writes of one transaction; bounds how long the first of them waits for the last.
const BATCH: usize = 256;

#[derive(Debug)]
pub(super) struct Writer {
    /// `None` while it is being dropped, and where nothing may be written.
    queue: Option<mpsc::Sender<Ask>>,
    thread: Option<JoinHandle<()>>,
}

enum Ask {
    Write(Box<dyn Job>),
    DataVersion(oneshot::Sender<Result<u64, rusqlite::Error>>),
}

/// A write in three parts, each called once, in this order.
trait Job: Send {
    /// Does the work; `Err` = refused, to be undone.
    fn work(&mut self, connection: &Connection) -> Result<(), ()>;
    /// The transaction was lost.
    fn lose(&mut self, why: &Arc<rusqlite::Error>);
    fn answer(self: Box<Self>);
}

struct Write<T, F> {
    doing: &'static str,
    work: Option<F>,
    result: Option<Result<T, Error>>,
    reply: oneshot::Sender<Result<T, Error>>,
}

impl<T, F> Job for Write<T, F>
where
    T: Send,
    F: FnOnce(&Connection) -> Result<T, Fail> + Send,
{
    fn work(&mut self, connection: &Connection) -> Result<(), ()> {
        let work = self.work.take().expect("called once");
        let result = schema::check(connection).and_then(|()| work(connection));
        let result = result.map_err(|fail| fail.into_error(self.doing));
        self.result.insert(result).as_ref().map(|_| ()).map_err(|_| ())
    }

    fn lose(&mut self, why: &Arc<rusqlite::Error>) {
        self.result = Some(Err(Error::Backend {
            doing: self.doing,
            source: Box::new(why.clone()),
        }));
    }

    fn answer(self: Box<Self>) {
        if let Some(result) = self.result {
            // The caller may be gone; the transaction ended whole all the same.
            let _gone = self.reply.send(result);
        }
    }
}

impl Writer {
    pub(super) fn start(connection: Connection) -> Result<Self, Error> {
        let (queue, asked) = mpsc::channel(QUEUE);
        let thread = thread::Builder::new()
            .name("store-writer".to_owned())
            .spawn(move || run(&connection, asked))
            .map_err(|source| Error::Backend {
                doing: "start its writer",
                source: Box::new(source),
            })?;
        Ok(Self {
            queue: Some(queue),
            thread: Some(thread),
        })
    }

    /// One that refuses every write, for a store that is only read.
    pub(super) fn none() -> Self {
        Self {
            queue: None,
            thread: None,
        }
    }

    /// Does `work` in a write transaction; durable once this returns `Ok`.
    pub(super) async fn write<T, F>(&self, doing: &'static str, work: F) -> Result<T, Error>
    where
        T: Send + 'static,
        F: FnOnce(&Connection) -> Result<T, Fail> + Send + 'static,
    {
        let (reply, result) = oneshot::channel();
        let write = Write {
            doing,
            work: Some(work),
            result: None,
            reply,
        };
        self.ask(doing, Ask::Write(Box::new(write))).await?;
        result.await.map_err(|_| stopped(doing))?
    }

    /// SQLite's `data_version` as this connection sees it: other connections' commits move it, its own do not.
    pub(super) async fn data_version(&self) -> Result<u64, Error> {
        const DOING: &str = "ask for changes";
        let (reply, result) = oneshot::channel();
        self.ask(DOING, Ask::DataVersion(reply)).await?;
        let version = result.await.map_err(|_| stopped(DOING))?;
        version.map_err(|error| Fail::from(error).into_error(DOING))
    }

    async fn ask(&self, doing: &'static str, ask: Ask) -> Result<(), Error> {
        let queue = self.queue.as_ref().ok_or_else(|| Error::Backend {
            doing,
            source: "it is open for reading only".into(),
        })?;
        queue.send(ask).await.map_err(|_| stopped(doing))
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        drop(self.queue.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the store's writer panicked");
        }
    }
}

fn stopped(doing: &'static str) -> Error {
    Error::Backend {
        doing,
        source: "its writer has stopped".into(),
    }
}

fn run(connection: &Connection, mut asked: mpsc::Receiver<Ask>) {
    while let Some(first) = asked.blocking_recv() {
        let mut batch = Vec::new();
        let mut next = Some(first);
        while let Some(ask) = next {
            match ask {
                Ask::Write(job) => batch.push(job),
                Ask::DataVersion(reply) => {
                    // The caller may be gone.
                    let _gone = reply.send(connection.pragma_query_value(None, "data_version", |row| row.get(0)));
                }
            }
            next = if batch.len() < BATCH {
                asked.try_recv().ok()
            } else {
                None
            };
        }
        if batch.is_empty() {
            continue;
        }
        if let Err(error) = transact(connection, &mut batch) {
            let why = Arc::new(error);
            batch.iter_mut().for_each(|job| job.lose(&why));
        }
        batch.into_iter().for_each(Job::answer);
    }
}

fn transact(connection: &Connection, batch: &mut [Box<dyn Job>]) -> Result<(), rusqlite::Error> {
    connection.execute_batch("BEGIN IMMEDIATE")?;
    let done = batch
        .iter_mut()
        .try_for_each(|job| in_savepoint(connection, job.as_mut()))
        .and_then(|()| connection.execute_batch("COMMIT"));
    if done.is_err() && !connection.is_autocommit() {
        connection.execute_batch("ROLLBACK")?;
    }
    done
}

fn in_savepoint(connection: &Connection, job: &mut dyn Job) -> Result<(), rusqlite::Error> {
    let run = |sql| connection.prepare_cached(sql)?.execute([]).map(drop);
    run("SAVEPOINT job")?;
    if job.work(connection).is_err() {
        // A full disk and the like end the whole transaction; this then fails, and the batch with it.
        run("ROLLBACK TO job")?;
    }
    run("RELEASE job")
}
