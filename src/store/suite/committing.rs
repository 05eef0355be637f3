//! Cases: a commit happens whole or not at all, and never after the end.

use std::sync::Arc;

use tokio::task::JoinSet;

use super::{Fixture, Picture, picture, sample};
use crate::audit::{Link, seal};
use crate::ids::RunId;
use crate::run::Event;
use crate::store::{Commit, Error, RunRecord, Signal, Store};

async fn created(store: &dyn Store, n: u64) -> RunRecord {
    store.create(sample::task(n)).await.unwrap();
    store.run(&RunId::from_bits(n.into())).await.unwrap()
}

pub async fn a_commit_becomes_visible_as_one(fixture: impl Fixture) {
    let (store, other) = (fixture.open(), fixture.open());
    let record = created(&*store, 1).await;
    let resume = |by: &str| Signal::Resume {
        by: by.to_owned(),
        accept: Vec::new(),
    };
    store.signal(&record.run, resume("a")).await.unwrap();
    store.signal(&record.run, resume("b")).await.unwrap();
    let before = picture(&*store, &record.run).await;
    let mut commit = sample::step(&record);
    commit.entries.push(sample::entry(3));
    commit.consumed = vec![before.inbox[0].id];
    store.commit(commit.clone()).await.unwrap();

    let mut journal = before.journal.clone();
    journal.extend(commit.entries.clone());
    let mut audit = before.audit.clone();
    audit.push(seal(&Link::of(&audit[0]), commit.audit[0].clone()));
    let expected = Picture {
        record: RunRecord {
            state: "REASONING".to_owned(),
            seq: 3,
            revision: 1,
            updated_at: commit.entries[1].at,
            ..record.clone()
        },
        journal,
        checkpoint: commit.checkpoint.clone().unwrap(),
        inbox: vec![before.inbox[1].clone()],
        audit,
    };
    assert_eq!(picture(&*store, &record.run).await, expected);
    assert_eq!(picture(&*other, &record.run).await, expected);
}

pub async fn a_refused_commit_changes_nothing(fixture: impl Fixture) {
    let store = fixture.open();
    created(&*store, 1).await;
    let record = store
        .claim(&RunId::from_bits(1), &sample::owner(1), None)
        .await
        .unwrap();
    let before = picture(&*store, &record.run).await;
    type Edit = fn(&mut Commit);
    let cases: [(&str, Edit); 12] = [
        ("is at fence 1, not 0", |commit| commit.fence = 0),
        ("is at fence 1, not 2", |commit| commit.fence = 2),
        ("is at entry 1, not 0", |commit| commit.expected_seq = 0),
        ("is at entry 1, not 2", |commit| commit.expected_seq = 2),
        ("it has no entry", |commit| commit.entries.clear()),
        ("not numbered one after the other", |commit| commit.entries[0].seq = 3),
        ("not numbered one after the other", |commit| {
            commit.entries.push(sample::entry(2));
        }),
        ("has format version 9", |commit| commit.entries[0].format_version = 9),
        ("has format version 9", |commit| {
            commit.checkpoint.as_mut().unwrap().format_version = 9;
        }),
        ("does not have the next revision", |commit| {
            commit.checkpoint = Some(sample::checkpoint(2, 2));
        }),
        ("ahead of its entries", |commit| {
            commit.checkpoint = Some(sample::checkpoint(1, 3));
        }),
        ("which is not in the inbox", |commit| commit.consumed = vec![77]),
    ];
    for (text, edit) in cases {
        let mut commit = sample::step(&record);
        edit(&mut commit);
        let error = store.commit(commit).await.unwrap_err();
        assert!(error.to_string().contains(text), "{error}, not {text}");
        assert_eq!(picture(&*store, &record.run).await, before, "{text}");
    }
    store.commit(sample::step(&record)).await.unwrap();
}

pub async fn commits_of_many_runs_at_once_keep_to_themselves(fixture: impl Fixture) {
    let store = fixture.open();
    let mut calls = JoinSet::new();
    for n in 0..32 {
        let store = store.clone();
        calls.spawn(async move {
            let mut record = created(&*store, n).await;
            for _ in 0..5 {
                // A refused commit beside the good ones of other runs must not take them with it.
                let stale = Commit {
                    expected_seq: record.seq + 1,
                    ..sample::step(&record)
                };
                let good = store.commit(sample::step(&record));
                let (good, stale) = tokio::join!(good, store.commit(stale));
                good.unwrap();
                assert!(
                    matches!(stale, Err(Error::StaleSeq { .. } | Error::Damaged { .. })),
                    "{stale:?}"
                );
                record = store.run(&record.run).await.unwrap();
            }
            assert_eq!((record.seq, record.revision), (6, 5));
        });
    }
    calls.join_all().await;
    assert_whole(&*store, 32, 6).await;
}

/// Every run has a whole journal of that length, and the audit chain has one entry for each of theirs.
async fn assert_whole(store: &dyn Store, runs: u64, length: u64) {
    for n in 0..runs {
        let journal = store.journal(&RunId::from_bits(n.into()), 0, usize::MAX).await.unwrap();
        let seqs: Vec<u64> = journal.iter().map(|entry| entry.seq).collect();
        assert_eq!(seqs, (1..=length).collect::<Vec<_>>());
    }
    let audit = store.audit_log(0, usize::MAX).await.unwrap();
    let mut link = Link::start();
    for entry in &audit {
        assert_eq!(*entry, seal(&link, entry.record.clone()));
        link = Link::of(entry);
    }
    assert_eq!(link.seq, runs * length);
}

/// A5: a thousand times, exactly one of two ends is taken, and it stays.
pub async fn cancel_and_finish_race_to_one_end(fixture: impl Fixture) {
    let instances = [fixture.open(), fixture.open()];
    for batch in 0..10 {
        let mut races = JoinSet::new();
        for n in batch * 100..(batch + 1) * 100 {
            let [one, other] = instances.clone();
            races.spawn(async move {
                let record = created(&*one, n).await;
                let finish = one.commit(sample::end(&record, sample::finished()));
                let cancel = other.commit(sample::end(&record, sample::cancelled()));
                // Which is sent first changes from race to race.
                let (finish, cancel) = if n % 2 == 0 {
                    tokio::join!(finish, cancel)
                } else {
                    let (cancel, finish) = tokio::join!(cancel, finish);
                    (finish, cancel)
                };
                let (won, lost) = match (finish, cancel) {
                    (Ok(()), Err(lost)) => ("FINISHED", lost),
                    (Err(lost), Ok(())) => ("CANCELLED", lost),
                    both => panic!("run {n}: {both:?}"),
                };
                assert!(matches!(lost, Error::Ended { .. }), "{lost:?}");
                let end = one.run(&record.run).await.unwrap();
                assert_eq!((end.state.as_str(), end.is_terminal, end.seq), (won, true, 2));
                let journal = one.journal(&record.run, 0, usize::MAX).await.unwrap();
                let ends = journal
                    .iter()
                    .filter(|entry| matches!(entry.event, Event::Ended { .. }));
                assert_eq!(ends.count(), 1);
            });
        }
        races.join_all().await;
    }
    assert_eq!(instances[0].unfinished().await.unwrap(), []);
}

pub async fn an_ended_run_takes_nothing_more(fixture: impl Fixture) {
    let store = fixture.open();
    created(&*store, 1).await;
    let run = RunId::from_bits(1);
    let claimed = store.claim(&run, &sample::owner(1), None).await.unwrap();
    store.commit(sample::end(&claimed, sample::finished())).await.unwrap();
    let end = picture(&*store, &run).await;
    assert_eq!((end.record.owner.clone(), end.record.fence), (None, 1));

    let next = store.commit(sample::step(&end.record)).await;
    let late = store.commit(sample::end(&claimed, sample::cancelled())).await;
    let claim = store.claim(&run, &sample::owner(2), None).await.map(drop);
    let signal = store
        .signal(
            &run,
            Signal::Resume {
                by: "x".to_owned(),
                accept: Vec::new(),
            },
        )
        .await;
    for refused in [next, late, claim, signal] {
        assert!(matches!(refused, Err(Error::Ended { .. })), "{refused:?}");
    }
    store.release(&run, claimed.fence).await.unwrap();
    assert_eq!(picture(&*store, &run).await, end);
}

pub async fn two_instances_write_one_run_without_gap_or_double(fixture: impl Fixture) {
    let instances = [fixture.open(), fixture.open()];
    let record = created(&*instances[0], 0).await;
    let write = async |store: Arc<dyn Store>| {
        let mut done = 0;
        while done < 20 {
            let record = store.run(&record.run).await.unwrap();
            match store.commit(sample::step(&record)).await {
                Ok(()) => done += 1,
                Err(Error::StaleSeq { .. }) => {}
                Err(error) => panic!("{error:?}"),
            }
        }
    };
    let [one, other] = instances.clone();
    tokio::join!(write(one), write(other));
    assert_whole(&*instances[1], 1, 41).await;
}
