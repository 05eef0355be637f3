//! Cases: children read what lies before them from their parents; recorded runs are taken in whole.

use super::{Fixture, sample};
use crate::ids::RunId;
use crate::store::{Base, Error, NewTask, Recorded, RunRecord, Store};

/// A child of `parent` after its checkpoint `revision` (of a run that makes one with each entry).
fn child(n: u64, parent: &RunRecord, revision: u64) -> NewTask {
    let base = Base {
        seq: revision + 1,
        revision,
    };
    let new = sample::task(n);
    NewTask {
        first: sample::entry(base.seq + 1),
        checkpoint: sample::checkpoint(revision + 1, base.seq + 1),
        record: RunRecord {
            parent: Some(parent.run.clone()),
            base: Some(base),
            seq: base.seq + 1,
            revision: revision + 1,
            ..new.record.clone()
        },
        ..new
    }
}

async fn steps(store: &dyn Store, run: &RunId, n: usize) -> RunRecord {
    for _ in 0..n {
        let record = store.run(run).await.unwrap();
        store.commit(sample::step(&record)).await.unwrap();
    }
    store.run(run).await.unwrap()
}

async fn seqs(store: &dyn Store, run: &RunId, after: u64, limit: usize) -> Vec<u64> {
    let page = store.journal(run, after, limit).await.unwrap();
    page.iter().map(|entry| entry.seq).collect()
}

pub async fn a_fork_reads_its_beginning_from_its_parent(fixture: impl Fixture) {
    let store = fixture.open();
    let store = &*store;
    store.create(sample::task(1)).await.unwrap();
    let parent = steps(store, &RunId::from_bits(1), 5).await;
    let first = child(2, &parent, 3);
    let made = first.record.clone();
    store.create(first.clone()).await.unwrap();
    assert_eq!(store.run(&made.run).await.unwrap(), made);
    // Both go on, each on its own.
    let parent = steps(store, &parent.run, 2).await;
    let made = steps(store, &made.run, 2).await;
    let second = child(3, &made, 5);
    store.create(second.clone()).await.unwrap();
    let grandchild = steps(store, &second.record.run, 1).await;
    assert_eq!((parent.seq, made.seq, grandchild.seq), (8, 7, 8));

    let (of_parent, of_child) = (
        store.journal(&parent.run, 0, usize::MAX).await.unwrap(),
        store.journal(&made.run, 0, usize::MAX).await.unwrap(),
    );
    let of_grandchild = store.journal(&grandchild.run, 0, usize::MAX).await.unwrap();
    assert_eq!(of_child[..4], of_parent[..4]);
    assert_eq!(of_child[4], first.first);
    assert_eq!(of_grandchild[..6], of_child[..6]);
    assert_eq!(of_grandchild[6], second.first);
    for after in 0..10 {
        for limit in [1, 2, 3, 100] {
            let expected: Vec<u64> = (after + 1..=8).take(limit).collect();
            assert_eq!(
                seqs(store, &grandchild.run, after, limit).await,
                expected,
                "{after} {limit}"
            );
        }
    }
    for revision in 0..=7 {
        let found = store.checkpoint(&grandchild.run, Some(revision)).await.unwrap();
        assert_eq!(found, sample::checkpoint(revision, revision + 1));
    }
    assert_eq!(store.checkpoint(&grandchild.run, None).await.unwrap().revision, 7);
    assert!(store.checkpoint(&grandchild.run, Some(8)).await.is_err());
}

/// O(1): one entry and one checkpoint, whatever the parent has.
pub async fn a_fork_costs_the_same_whatever_lies_before_it(fixture: impl Fixture) {
    let store = fixture.open();
    store.create(sample::task(1)).await.unwrap();
    let parent = steps(&*store, &RunId::from_bits(1), 50).await;
    let new = child(2, &parent, 50);
    let audit = store.audit_log(0, usize::MAX).await.unwrap().len();
    store.create(new.clone()).await.unwrap();
    assert_eq!(store.audit_log(0, usize::MAX).await.unwrap().len(), audit + 1);
    // Its own rows: what comes after its base.
    assert_eq!(
        store.journal(&new.record.run, 51, usize::MAX).await.unwrap(),
        [new.first]
    );
    // What the child reads changes with its parent's text, so it is not a copy.
    fixture.tamper(super::Row::Entry(&parent.run, 7), "entry 7", "entry x");
    let seen = store.journal(&new.record.run, 6, 1).await.unwrap();
    assert_eq!(seen, store.journal(&parent.run, 6, 1).await.unwrap());
    assert!(format!("{seen:?}").contains("entry x"));
}

pub async fn a_recorded_run_is_there_whole(fixture: impl Fixture) {
    let store = fixture.open();
    let new = sample::task(1);
    let recorded = NewTask {
        recorded: Some(Recorded {
            entries: vec![sample::entry(2), sample::entry(3)],
            checkpoints: vec![sample::checkpoint(1, 3)],
        }),
        record: RunRecord {
            state: "FINISHED".to_owned(),
            is_terminal: true,
            seq: 3,
            revision: 1,
            ..new.record.clone()
        },
        ..new
    };
    store.create(recorded.clone()).await.unwrap();
    let run = &recorded.record.run;
    assert_eq!(store.run(run).await.unwrap(), recorded.record);
    let journal = [recorded.first.clone(), sample::entry(2), sample::entry(3)];
    assert_eq!(store.journal(run, 0, usize::MAX).await.unwrap(), journal);
    assert_eq!(store.checkpoint(run, None).await.unwrap(), sample::checkpoint(1, 3));
    assert_eq!(store.unfinished().await.unwrap(), []);
}

pub async fn a_fork_that_does_not_fit_is_refused(fixture: impl Fixture) {
    let store = fixture.open();
    store.create(sample::task(1)).await.unwrap();
    let parent = steps(&*store, &RunId::from_bits(1), 3).await;
    let good = child(2, &parent, 2);
    let edit = |edit: fn(&mut NewTask)| {
        let mut new = good.clone();
        edit(&mut new);
        new
    };
    let bad = [
        edit(|new| new.first.seq += 1),
        edit(|new| new.checkpoint.revision += 1),
        edit(|new| new.record.parent = None),
        edit(|new| new.record.base = None),
        edit(|new| new.record.is_terminal = true),
    ];
    for new in bad {
        let error = store.create(new).await.unwrap_err();
        assert!(matches!(error, Error::Damaged { .. }), "{error:?}");
    }
    let orphan = edit(|new| new.record.parent = Some(RunId::from_bits(99)));
    let error = store.create(orphan).await.unwrap_err();
    assert!(matches!(error, Error::NotFound { .. }), "{error:?}");
    store.create(good).await.unwrap();
}
