//! Reads: the one place where the async side waits for SQLite, on blocking threads, a few at a time.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use rusqlite::Connection;
use tokio::sync::Semaphore;

use super::{Fail, schema};
use crate::store::Error;

/// Reads at once. More would only queue up at the processor.
const READERS: usize = 4;

#[derive(Debug)]
pub(super) struct Readers {
    dir: PathBuf,
    permits: Arc<Semaphore>,
    idle: Arc<Mutex<Vec<Connection>>>,
}

impl Readers {
    pub(super) fn new(dir: PathBuf) -> Self {
        Self {
            dir,
            permits: Arc::new(Semaphore::new(READERS)),
            idle: Arc::default(),
        }
    }

    /// Does `read` in one read transaction, so that it sees one state of the store.
    pub(super) async fn read<T, F>(&self, doing: &'static str, read: F) -> Result<T, Error>
    where
        T: Send + 'static,
        F: FnOnce(&Connection) -> Result<T, Fail> + Send + 'static,
    {
        let failed = |source: Box<dyn std::error::Error + Send + Sync>| Error::Backend { doing, source };
        let permit = self.permits.clone().acquire_owned().await;
        let permit = permit.map_err(|closed| failed(closed.into()))?;
        let (dir, idle) = (self.dir.clone(), self.idle.clone());
        let work = move || {
            // Held until the read ends, even when the caller is gone.
            let _permit = permit;
            let spare = idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let connection = spare.map_or_else(|| open(&dir), Ok)?;
            let result = in_transaction(&connection, read).map_err(|fail| fail.into_error(doing));
            if connection.is_autocommit() {
                idle.lock().unwrap_or_else(PoisonError::into_inner).push(connection);
            }
            result
        };
        let done = tokio::task::spawn_blocking(work).await;
        done.map_err(|error| failed(error.into()))?
    }
}

fn open(dir: &std::path::Path) -> Result<Connection, Error> {
    let connection = schema::connect(dir)?;
    let query_only = connection.pragma_update(None, "query_only", true);
    query_only.map_err(|error| Fail::from(error).into_error("open its database"))?;
    Ok(connection)
}

fn in_transaction<T>(connection: &Connection, read: impl FnOnce(&Connection) -> Result<T, Fail>) -> Result<T, Fail> {
    let transaction = connection.unchecked_transaction()?;
    let result = read(&transaction)?;
    transaction.commit()?;
    Ok(result)
}
