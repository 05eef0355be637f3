//! The database file: how it is opened, its tables, and the version that guards them.

use std::fs::{DirBuilder, OpenOptions};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::{Connection, OpenFlags, OptionalExtension};

use super::Fail;
use crate::store::Error;

/// One step for each version, from an empty file. Never edited once released: a change is a new step.
const MIGRATIONS: &[&str] = &[include_str!("v1.sql"), include_str!("v2.sql")];

const KNOWN: u64 = MIGRATIONS.len() as u64;

/// How long a call waits for another process's transaction before it fails.
const BUSY: Duration = Duration::from_secs(15);

/// The database of a data directory.
pub(super) fn path(dir: &Path) -> PathBuf {
    dir.join("exuvia.db")
}

/// Makes the directory and the database where they are missing and brings an older one up to date. A newer one, or a file
/// that is no such database, is left as it is.
pub(super) fn prepare(dir: &Path) -> Result<Connection, Error> {
    let file = |source: std::io::Error| Error::Backend {
        doing: "make its data directory",
        source: Box::new(source),
    };
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .map_err(file)?;
    // Two processes that open a new directory at once: one makes the tables. The switch to WAL does not wait by itself.
    let lock = private(&dir.join("exuvia.db.lock")).map_err(file)?;
    lock.lock().map_err(file)?;
    // SQLite would make the file with the umask's mode; its WAL and index take over the mode of the database.
    private(&path(dir)).map_err(file)?;
    let connection = connect(dir)?;
    migrate(&connection, dir).map_err(|fail| fail.into_error("open its database"))?;
    Ok(connection)
}

/// Opens one more connection to a database that [`prepare`] has seen.
pub(super) fn connect(dir: &Path) -> Result<Connection, Error> {
    let open = || {
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = Connection::open_with_flags(path(dir), flags)?;
        connection.busy_timeout(crate::chaos::patience(BUSY))?;
        connection.pragma_update(None, "synchronous", "FULL")?;
        connection.pragma_update(None, "foreign_keys", true)?;
        connection.set_prepared_statement_cache_capacity(64);
        Ok(connection)
    };
    open().map_err(|error: rusqlite::Error| Fail::from(error).into_error("open its database"))
}

/// Refuses a database that another build has moved on since it was opened.
pub(super) fn check(connection: &Connection) -> Result<(), Fail> {
    let mut version = connection.prepare_cached("SELECT value FROM meta WHERE name = 'format_version'")?;
    let found: u64 = version.query_row([], |row| row.get(0))?;
    known(found, connection)
}

/// Refuses a database that is not of exactly this build's version.
pub(super) fn require(connection: &Connection) -> Result<(), Error> {
    let select = "SELECT value FROM meta WHERE name = 'format_version'";
    let found: Result<u64, _> = connection.query_row(select, [], |row| row.get(0));
    match found.map_err(|error| Fail::from(error).into_error("open its database"))? {
        KNOWN => Ok(()),
        found => Err(Error::UnknownVersion {
            what: format!("the database `{}`", connection.path().unwrap_or_default()),
            found,
            known: KNOWN,
        }),
    }
}

fn migrate(connection: &Connection, dir: &Path) -> Result<(), Fail> {
    let found = version(connection, dir)?;
    known(found, connection)?;
    connection.pragma_update_and_check(None, "journal_mode", "WAL", |_| Ok(()))?;
    if found == KNOWN {
        return Ok(());
    }
    let transaction = connection.unchecked_transaction()?;
    for step in &MIGRATIONS[found as usize..] {
        transaction.execute_batch(step)?;
    }
    transaction.execute(
        "INSERT INTO meta (name, value) VALUES ('format_version', ?1)
         ON CONFLICT (name) DO UPDATE SET value = excluded.value",
        [KNOWN],
    )?;
    Ok(transaction.commit()?)
}

/// The version that the file says it has; 0 for an empty one.
fn version(connection: &Connection, dir: &Path) -> Result<u64, Fail> {
    let tables: u64 = connection.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
    if tables == 0 {
        return Ok(0);
    }
    let stranger = || Error::Damaged {
        what: format!("the database `{}`", path(dir).display()),
        reason: "it has tables but no format version".to_owned(),
    };
    let meta: u64 = connection.query_row(
        "SELECT count(*) FROM sqlite_schema WHERE type = 'table' AND name = 'meta'",
        [],
        |row| row.get(0),
    )?;
    if meta == 0 {
        return Err(stranger().into());
    }
    let found = connection
        .query_row("SELECT value FROM meta WHERE name = 'format_version'", [], |row| {
            row.get(0)
        })
        .optional()?;
    Ok(found.ok_or_else(stranger)?)
}

fn known(found: u64, connection: &Connection) -> Result<(), Fail> {
    if found <= KNOWN {
        return Ok(());
    }
    Err(Fail::Refused(Error::UnknownVersion {
        what: format!("the database `{}`", connection.path().unwrap_or_default()),
        found,
        known: KNOWN,
    }))
}

/// Opens a file, made for its owner alone whatever the umask.
fn private(path: &Path) -> std::io::Result<std::fs::File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    match options.clone().create_new(true).open(path) {
        Ok(file) => {
            file.set_permissions(PermissionsExt::from_mode(0o600))?;
            Ok(file)
        }
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => options.open(path),
        Err(error) => Err(error),
    }
}
