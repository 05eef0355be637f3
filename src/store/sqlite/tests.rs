//! What only SQLite promises: files and modes, versions of the file, several openers, durability against `kill -9`.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::sync::Arc;

use rusqlite::Connection;
use tokio::task::JoinSet;

use super::*;
use crate::audit::{Link, seal};
use crate::clock::System;
use crate::store::suite::{Fixture, Row, picture, sample, store_suite};

struct OnDisk(tempfile::TempDir);

impl OnDisk {
    fn sqlite(&self) -> Result<Sqlite, Error> {
        Sqlite::open(self.0.path(), Arc::new(System))
    }

    fn raw(&self) -> Connection {
        Connection::open(schema::path(self.0.path())).unwrap()
    }
}

impl Fixture for OnDisk {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn open(&self) -> Arc<dyn Store> {
        Arc::new(self.sqlite().unwrap())
    }

    fn tamper(&self, row: Row<'_>, from: &str, to: &str) {
        let db = self.raw();
        let of_run = |run: &RunId| format!("run = (SELECT id FROM runs WHERE run = '{run}')");
        let (table, column, place) = match row {
            Row::Entry(run, seq) => ("entries", "entry", format!("{} AND seq = {seq}", of_run(run))),
            Row::Checkpoint(run, revision) => (
                "checkpoints",
                "checkpoint",
                format!("{} AND revision = {revision}", of_run(run)),
            ),
            Row::Signal(run) => ("inbox", "signal", of_run(run)),
            Row::Audit(seq) => ("audit", "entry", format!("seq = {seq}")),
        };
        db.execute_batch("DROP TRIGGER IF EXISTS audit_is_not_edited; DROP TRIGGER IF EXISTS entries_are_not_edited")
            .unwrap();
        let text: String = db
            .query_row(&format!("SELECT {column} FROM {table} WHERE {place}"), [], |row| {
                row.get(0)
            })
            .unwrap();
        assert!(text.contains(from));
        let update = format!("UPDATE {table} SET {column} = ?1 WHERE {place}");
        assert_eq!(db.execute(&update, [text.replacen(from, to, 1)]).unwrap(), 1);
    }
}

store_suite!(OnDisk);

#[tokio::test]
async fn the_directory_and_its_files_are_for_their_owner_alone() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("a/b");
    assert!(!Sqlite::exists(&data));
    let store = Sqlite::open(&data, Arc::new(System)).unwrap();
    store.create(sample::task(1)).await.unwrap();
    assert!(Sqlite::exists(&data));
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&data), 0o700);
    let modes: BTreeMap<String, u32> = fs::read_dir(&data)
        .unwrap()
        .map(|file| file.unwrap())
        .map(|file| (file.file_name().into_string().unwrap(), mode(&file.path())))
        .collect();
    let expected = ["exuvia.db", "exuvia.db-shm", "exuvia.db-wal", "exuvia.db.lock"];
    assert_eq!(modes, expected.map(|name| (name.to_owned(), 0o600)).into());
}

#[tokio::test]
async fn commits_are_synced() {
    let store = OnDisk::new();
    store.open();
    for connection in [
        schema::prepare(store.0.path()).unwrap(),
        schema::connect(store.0.path()).unwrap(),
    ] {
        let pragma = |name| connection.pragma_query_value(None, name, |row| row.get::<_, rusqlite::types::Value>(0));
        assert_eq!(pragma("journal_mode").unwrap(), "wal".to_owned().into());
        assert_eq!(pragma("synchronous").unwrap(), 2.into());
        assert_eq!(pragma("foreign_keys").unwrap(), 1.into());
    }
}

/// F2: a database of a newer build is refused by name and stays as it is, at opening and while it is open.
#[tokio::test]
async fn a_newer_database_is_refused() {
    let fixture = OnDisk::new();
    let store = fixture.sqlite().unwrap();
    store.create(sample::task(1)).await.unwrap();
    let before = picture(&store, &sample::task(1).record.run).await;
    fixture.raw().execute("UPDATE meta SET value = 3", []).unwrap();

    let path = schema::path(fixture.0.path());
    let text = format!(
        "the database `{}` has format version 3; this build reads up to 2",
        path.display()
    );
    assert_eq!(fixture.sqlite().unwrap_err().to_string(), text);
    let written = store.commit(sample::step(&before.record)).await;
    assert_eq!(written.unwrap_err().to_string(), text);
    fixture.raw().execute("UPDATE meta SET value = 2", []).unwrap();
    assert_eq!(picture(&fixture.sqlite().unwrap(), &before.record.run).await, before);
}

/// F2: what version 1 wrote is read by this build, and a reader alone leaves it as it is.
#[tokio::test]
async fn f2_a_database_of_version_1_is_brought_up_to_date_by_a_writer() {
    let fixture = OnDisk::new();
    let store = fixture.sqlite().unwrap();
    store.create(sample::task(1)).await.unwrap();
    let before = picture(&store, &sample::task(1).record.run).await;
    drop(store);
    let older = "ALTER TABLE runs DROP COLUMN base; UPDATE meta SET value = 1;";
    fixture.raw().execute_batch(older).unwrap();
    let refused = Sqlite::read_only(fixture.0.path(), std::sync::Arc::new(crate::clock::System)).unwrap_err();
    assert!(
        matches!(refused, Error::UnknownVersion { found: 1, known: 2, .. }),
        "{refused:?}"
    );
    assert_eq!(picture(&fixture.sqlite().unwrap(), &before.record.run).await, before);
}

/// E5: what replay opens reads everything and writes nothing.
#[tokio::test]
async fn e5_a_store_that_is_only_read_refuses_every_write() {
    let fixture = OnDisk::new();
    let store = fixture.sqlite().unwrap();
    store.create(sample::task(1)).await.unwrap();
    let before = picture(&store, &sample::task(1).record.run).await;
    let reader = Sqlite::read_only(fixture.0.path(), std::sync::Arc::new(crate::clock::System)).unwrap();
    assert_eq!(picture(&reader, &before.record.run).await, before);
    assert!(reader.create(sample::task(2)).await.is_err());
    assert!(reader.commit(sample::step(&before.record)).await.is_err());
    assert!(reader.claim(&before.record.run, &sample::owner(1), None).await.is_err());
    assert_eq!(picture(&store, &before.record.run).await, before);
    let missing = Sqlite::read_only(
        &fixture.0.path().join("none"),
        std::sync::Arc::new(crate::clock::System),
    );
    assert!(matches!(missing, Err(Error::NotFound { .. })));
    assert!(!fixture.0.path().join("none").exists());
}

#[test]
fn a_file_that_is_no_store_is_refused_and_kept() {
    let dir = tempfile::tempdir().unwrap();
    let path = schema::path(dir.path());
    let garbage = "no database ".repeat(1000);
    fs::write(&path, &garbage).unwrap();
    let open = || Sqlite::open(dir.path(), Arc::new(System)).unwrap_err();
    assert!(matches!(open(), Error::Damaged { .. }));
    assert_eq!(fs::read_to_string(&path).unwrap(), garbage);

    fs::remove_file(&path).unwrap();
    Connection::open(&path)
        .unwrap()
        .execute_batch("CREATE TABLE other (x)")
        .unwrap();
    let before = fs::read(&path).unwrap();
    assert!(
        open()
            .to_string()
            .ends_with("is damaged: it has tables but no format version")
    );
    assert_eq!(fs::read(&path).unwrap(), before);
}

#[test]
fn many_open_a_new_directory_at_once() {
    for _ in 0..5 {
        let dir = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| Sqlite::open(&dir.path().join("data"), Arc::new(System)).unwrap());
            }
        });
    }
}

/// A full disk ends a whole batch: what was not acknowledged is not there, what was is, and the writer goes on.
#[tokio::test]
async fn a_full_disk_loses_nothing_that_was_acknowledged() {
    let fixture = OnDisk::new();
    let connection = schema::prepare(fixture.0.path()).unwrap();
    let pages: u64 = connection
        .pragma_query_value(None, "page_count", |row| row.get(0))
        .unwrap();
    connection
        .pragma_update_and_check(None, "max_page_count", pages + 6, |_| Ok(()))
        .unwrap();
    let store = Arc::new(Sqlite {
        writer: Writer::start(connection).unwrap(),
        readers: Readers::new(fixture.0.path().to_owned()),
        clock: Arc::new(System),
    });
    let mut calls = JoinSet::new();
    for n in 0..64 {
        let store = store.clone();
        calls.spawn(async move { (n, store.create(sample::task(n)).await) });
    }
    let mut acknowledged = Vec::new();
    for (n, result) in calls.join_all().await {
        match result {
            Ok(_) => acknowledged.push(RunId::from_bits(n.into())),
            Err(error) => assert!(matches!(error, Error::Backend { .. }), "{error:?}"),
        }
    }
    assert!(acknowledged.len() < 64);
    let mut there: Vec<RunId> = store
        .unfinished()
        .await
        .unwrap()
        .into_iter()
        .map(|run| run.run)
        .collect();
    acknowledged.sort();
    there.sort();
    assert_eq!(there, acknowledged);
    assert!(store.data_version().await.is_ok());
}

/// The variable that makes [`a_killed_writer`] the process that is killed: its data directory.
const VICTIM: &str = "EXUVIA_TEST_STORE_VICTIM";
const RUNS: u64 = 4;

/// Not a test by itself: what [`what_was_acknowledged_outlives_kill_9`] starts as a process of its own. It commits on
/// several runs at once and prints each position that was acknowledged.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_writer() {
    let Some(dir) = std::env::var_os(VICTIM) else {
        return;
    };
    let store = Arc::new(Sqlite::open(Path::new(&dir), Arc::new(System)).unwrap());
    let mut runs = JoinSet::new();
    for n in 0..RUNS {
        let store = store.clone();
        runs.spawn(async move {
            let run = RunId::from_bits(n.into());
            loop {
                let record = store.run(&run).await.unwrap();
                store.commit(sample::step(&record)).await.unwrap();
                let line = format!("\nacknowledged {n} {}\n", record.seq + 1);
                std::io::stdout().lock().write_all(line.as_bytes()).unwrap();
            }
        });
    }
    runs.join_all().await;
}

#[tokio::test]
async fn what_was_acknowledged_outlives_kill_9() {
    let fixture = OnDisk::new();
    let store = fixture.sqlite().unwrap();
    for n in 0..RUNS {
        store.create(sample::task(n)).await.unwrap();
    }
    drop(store);
    let name = "store::sqlite::tests::a_killed_writer";
    let mut acknowledged = BTreeMap::new();
    // Killed after so many acknowledgements; the moment within the next commit is the scheduler's.
    for lines in [1, 3, 10, 29, 57, 101, 160] {
        let mut victim = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture", "--test-threads=1"])
            .env(VICTIM, fixture.0.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut output = BufReader::new(victim.stdout.take().unwrap())
            .lines()
            .map_while(Result::ok);
        let mut note = |line: String| {
            let mut words = line.split(' ');
            if words.next() != Some("acknowledged") {
                return 0;
            }
            let number = |word: Option<&str>| word.unwrap().parse::<u64>().unwrap();
            acknowledged.insert(number(words.next()), number(words.next()));
            1
        };
        let mut seen = 0;
        while seen < lines {
            seen += note(output.next().expect("the writer writes until it is killed"));
        }
        victim.kill().unwrap();
        for line in output {
            note(line);
        }
        assert!(!victim.wait().unwrap().success());

        let store = fixture.sqlite().unwrap();
        let mut entries = 0;
        for n in 0..RUNS {
            let now = picture(&store, &RunId::from_bits(n.into())).await;
            let seqs: Vec<u64> = now.journal.iter().map(|entry| entry.seq).collect();
            assert_eq!(seqs, (1..=now.record.seq).collect::<Vec<_>>());
            assert!(now.record.seq >= acknowledged.get(&n).copied().unwrap_or(1));
            // Entry, checkpoint and audit record of one commit came together.
            assert_eq!(
                (now.checkpoint.revision, now.checkpoint.seq),
                (now.record.seq - 1, now.record.seq)
            );
            entries += now.record.seq;
        }
        let audit = store.audit_log(0, usize::MAX).await.unwrap();
        assert_eq!(audit.len() as u64, entries);
        let mut link = Link::start();
        for entry in audit {
            assert_eq!(entry, seal(&link, entry.record.clone()));
            link = Link::of(&entry);
        }
    }
}
