//! Cases: what is read back.

use std::collections::BTreeMap;

use super::{Fixture, Row, picture, sample};
use crate::clock::Timestamp;
use crate::error::Kind;
use crate::ids::{ApprovalId, RunId, TaskId};
use crate::store::{Commit, Error, Query, RunRecord, Signal, Store};

pub async fn a_journal_pages_without_gap_or_double(fixture: impl Fixture) {
    let store = fixture.open();
    let run = RunId::from_bits(1);
    store.create(sample::task(1)).await.unwrap();
    store.create(sample::task(2)).await.unwrap();
    let mut commit = sample::step(&store.run(&run).await.unwrap());
    commit.entries = (2..=25).map(sample::entry).collect();
    store.commit(commit).await.unwrap();
    let whole = store.journal(&run, 0, usize::MAX).await.unwrap();
    assert_eq!(whole.len(), 25);
    for limit in [1, 7, 25, 26] {
        let mut paged = Vec::new();
        loop {
            let after = paged.len() as u64;
            let page = store.journal(&run, after, limit).await.unwrap();
            assert!(page.len() <= limit);
            if page.is_empty() {
                break;
            }
            paged.extend(page);
        }
        assert_eq!(paged, whole, "{limit}");
    }
    for (after, limit) in [(25, 1), (u64::MAX, 9), (0, 0)] {
        assert_eq!(store.journal(&run, after, limit).await.unwrap(), []);
        assert_eq!(store.audit_log(after, limit).await.unwrap(), []);
    }
    assert_eq!(store.audit_log(1, 1).await.unwrap()[0].seq, 2);
}

pub async fn checkpoints_are_found_by_revision(fixture: impl Fixture) {
    let store = fixture.open();
    let run = RunId::from_bits(1);
    store.create(sample::task(1)).await.unwrap();
    for _ in 0..2 {
        store
            .commit(sample::step(&store.run(&run).await.unwrap()))
            .await
            .unwrap();
    }
    let without = Commit {
        checkpoint: None,
        ..sample::step(&store.run(&run).await.unwrap())
    };
    store.commit(without).await.unwrap();
    assert_eq!(store.run(&run).await.unwrap().revision, 2);
    for (revision, expected) in [
        (Some(0), sample::checkpoint(0, 1)),
        (Some(1), sample::checkpoint(1, 2)),
        (Some(2), sample::checkpoint(2, 3)),
        (None, sample::checkpoint(2, 3)),
    ] {
        assert_eq!(store.checkpoint(&run, revision).await.unwrap(), expected);
    }
    let error = store.checkpoint(&run, Some(3)).await.unwrap_err();
    assert_eq!(error.to_string(), format!("no checkpoint `{run}/3`"));
}

/// Creates runs 1 to 6, two for each second; 5 and 6 end.
async fn six(store: &dyn Store) -> Vec<RunRecord> {
    let mut records = Vec::new();
    for n in 1..=6 {
        let mut new = sample::task(n);
        new.record.created_at = Timestamp(n.div_ceil(2) as i64);
        new.record.labels.insert("half".to_owned(), (n % 2).to_string());
        store.create(new.clone()).await.unwrap();
        if n > 4 {
            store
                .commit(sample::end(&new.record, sample::finished()))
                .await
                .unwrap();
        }
        records.push(store.run(&new.record.run).await.unwrap());
    }
    records.sort_by_key(|record| (record.created_at, record.run.clone()));
    records
}

pub async fn lists_page_and_filter(fixture: impl Fixture) {
    let store = fixture.open();
    let mut newest_first = six(&*store).await;
    newest_first.reverse();
    let all = Query {
        limit: 100,
        ..Query::default()
    };
    assert_eq!(store.list(&all).await.unwrap(), newest_first);
    for limit in [1, 4] {
        let mut paged: Vec<RunRecord> = Vec::new();
        loop {
            let after = paged.last().map(|record| (record.created_at, record.run.clone()));
            let query = Query {
                after,
                limit,
                ..all.clone()
            };
            let page = store.list(&query).await.unwrap();
            if page.is_empty() {
                break;
            }
            paged.extend(page);
        }
        assert_eq!(paged, newest_first, "{limit}");
    }
    let labels = |pairs: &[(&str, &str)]| -> BTreeMap<String, String> {
        let owned = pairs
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        owned.collect()
    };
    let states = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    for (states, labels, expected) in [
        (states(&["FINISHED"]), labels(&[]), vec![5, 6]),
        (states(&["FINISHED", "QUEUED"]), labels(&[]), vec![1, 2, 3, 4, 5, 6]),
        (states(&["finished"]), labels(&[]), vec![]),
        (states(&[]), labels(&[("half", "1")]), vec![1, 3, 5]),
        (
            states(&["QUEUED"]),
            labels(&[("half", "1"), ("a \"b\" ü", "{}")]),
            vec![1, 3],
        ),
        (states(&[]), labels(&[("half", "1"), ("n", "2")]), vec![]),
        (states(&[]), labels(&[("half", "")]), vec![]),
    ] {
        let query = Query {
            states,
            labels,
            ..all.clone()
        };
        let found = store.list(&query).await.unwrap();
        let wanted = |record: &&RunRecord| expected.iter().any(|n| record.run == RunId::from_bits(*n));
        let expected: Vec<RunRecord> = newest_first.iter().filter(wanted).cloned().collect();
        assert_eq!(found, expected, "{query:?}");
    }
}

pub async fn unfinished_runs_are_listed_oldest_first(fixture: impl Fixture) {
    let store = fixture.open();
    let expected: Vec<RunRecord> = six(&*store)
        .await
        .into_iter()
        .filter(|record| !record.is_terminal)
        .collect();
    assert_eq!(expected.len(), 4);
    assert_eq!(store.unfinished().await.unwrap(), expected);
}

pub async fn an_inbox_keeps_its_order(fixture: impl Fixture) {
    let instances = [fixture.open(), fixture.open()];
    let run = RunId::from_bits(1);
    instances[0].create(sample::task(1)).await.unwrap();
    instances[0].create(sample::task(2)).await.unwrap();
    let by = "user:x".to_owned();
    let reason = "r".to_owned();
    let signals = [
        Signal::Pause {
            now: true,
            by: by.clone(),
            reason: reason.clone(),
        },
        Signal::Decide {
            approval: Some(ApprovalId::from_bits(1)),
            approved: true,
            by: by.clone(),
            reason: reason.clone(),
        },
        Signal::Decide {
            approval: None,
            approved: false,
            by: by.clone(),
            reason: reason.clone(),
        },
        Signal::Resume {
            by: by.clone(),
            accept: Vec::new(),
        },
        Signal::Cancel { by, reason },
    ];
    for (n, signal) in signals.iter().enumerate() {
        instances[n % 2].signal(&run, signal.clone()).await.unwrap();
        instances[0].signal(&RunId::from_bits(2), signal.clone()).await.unwrap();
    }
    let inbox = instances[1].inbox(&run).await.unwrap();
    let order: Vec<Signal> = inbox.iter().map(|pending| pending.signal.clone()).collect();
    assert_eq!(order, signals);
    assert!(inbox.is_sorted_by(|a, b| a.id < b.id));

    let record = instances[0].run(&run).await.unwrap();
    let consumed: Vec<u64> = inbox.iter().map(|pending| pending.id).collect();
    instances[0]
        .commit(Commit {
            consumed: consumed.clone(),
            ..sample::step(&record)
        })
        .await
        .unwrap();
    assert_eq!(instances[1].inbox(&run).await.unwrap(), []);
    assert_eq!(instances[1].inbox(&RunId::from_bits(2)).await.unwrap().len(), 5);
    // An id does not come back, not even when the newest row is gone.
    instances[1].signal(&run, signals[0].clone()).await.unwrap();
    assert!(!consumed.contains(&instances[0].inbox(&run).await.unwrap()[0].id));
}

pub async fn what_is_not_there_is_not_found(fixture: impl Fixture) {
    let store = fixture.open();
    let (run, task) = (RunId::from_bits(1), TaskId::from_bits(1));
    let signal = Signal::Resume {
        by: String::new(),
        accept: Vec::new(),
    };
    let results = [
        store.run(&run).await.map(drop),
        store.run_of_task(&task).await.map(drop),
        store.spec(&task).await.map(drop),
        store.claim(&run, &sample::owner(1), None).await.map(drop),
        store.release(&run, 1).await,
        store.commit(sample::step(&sample::task(1).record)).await,
        store.journal(&run, 0, 1).await.map(drop),
        store.checkpoint(&run, None).await.map(drop),
        store.signal(&run, signal).await,
        store.inbox(&run).await.map(drop),
    ];
    for (n, result) in results.into_iter().enumerate() {
        assert_eq!(result.map_err(|error| error.kind()), Err(Kind::NotFound), "call {n}");
    }
    assert_eq!(store.unfinished().await.unwrap(), []);
    assert_eq!(store.audit_log(0, 9).await.unwrap(), []);
}

/// F2: on every kind of row.
pub async fn an_unknown_format_version_is_refused_by_name(fixture: impl Fixture) {
    let store = fixture.open();
    let run = RunId::from_bits(1);
    store.create(sample::task(1)).await.unwrap();
    store
        .signal(
            &run,
            Signal::Resume {
                by: String::new(),
                accept: Vec::new(),
            },
        )
        .await
        .unwrap();
    let id = store.inbox(&run).await.unwrap()[0].id;
    for row in [
        Row::Entry(&run, 1),
        Row::Checkpoint(&run, 0),
        Row::Signal(&run),
        Row::Audit(1),
    ] {
        fixture.tamper(row, r#""format_version":1"#, r#""format_version":2"#);
    }
    let store = fixture.open();
    let newer = |what: String| format!("{what} has format version 2; this build reads up to 1");
    let refused = [
        (
            store.journal(&run, 0, 9).await.map(drop),
            newer(format!("entry 1 of run `{run}`")),
        ),
        (
            store.checkpoint(&run, None).await.map(drop),
            newer(format!("checkpoint 0 of run `{run}`")),
        ),
        (
            store.inbox(&run).await.map(drop),
            newer(format!("signal {id} of run `{run}`")),
        ),
        (store.audit_log(0, 9).await.map(drop), newer("audit entry 1".to_owned())),
        // Nor is a chain continued that cannot be read.
        (
            store.audit(vec![sample::about(&run, "x")]).await,
            newer("audit entry 1".to_owned()),
        ),
        (
            store.commit(sample::step(&store.run(&run).await.unwrap())).await,
            newer("audit entry 1".to_owned()),
        ),
    ];
    for (result, text) in refused {
        let error = result.unwrap_err();
        assert_eq!((error.to_string(), error.kind()), (text, Kind::WrongState));
    }
    fixture.tamper(Row::Audit(1), r#""format_version":2"#, r#""format_version":1"#);
    assert_eq!(store.run(&run).await.unwrap(), sample::task(1).record);
    assert_eq!(store.audit_log(0, 9).await.unwrap().len(), 1);
}

pub async fn what_cannot_be_read_is_damaged(fixture: impl Fixture) {
    let store = fixture.open();
    let run = RunId::from_bits(1);
    store.create(sample::task(1)).await.unwrap();
    fixture.tamper(Row::Entry(&run, 1), r#""type":"submitted""#, r#""type":"unheard""#);
    fixture.tamper(Row::Checkpoint(&run, 0), r#""revision":0"#, r#""revision":5"#);
    fixture.tamper(Row::Audit(1), "}", "");
    let store = fixture.open();
    for result in [
        store.journal(&run, 0, 9).await.map(drop),
        store.checkpoint(&run, None).await.map(drop),
        store.audit_log(0, 9).await.map(drop),
    ] {
        assert!(matches!(result, Err(Error::Damaged { .. })), "{result:?}");
    }
}

/// E11: a step that failed, one that runs and one that was never begun can be told apart after a restart.
pub async fn what_was_acknowledged_is_there_after_reopening(fixture: impl Fixture) {
    let store = fixture.open();
    let run = RunId::from_bits(1);
    store.create(sample::task(1)).await.unwrap();
    let claimed = store.claim(&run, &sample::owner(1), None).await.unwrap();
    store.commit(sample::step(&claimed)).await.unwrap();
    let refused = store.commit(sample::step(&claimed)).await;
    assert!(matches!(refused, Err(Error::StaleSeq { .. })));
    store
        .signal(
            &run,
            Signal::Resume {
                by: "x".to_owned(),
                accept: Vec::new(),
            },
        )
        .await
        .unwrap();
    let before = picture(&*store, &run).await;
    assert_eq!(
        (before.record.seq, before.record.owner.clone()),
        (2, Some(sample::owner(1)))
    );
    drop(store);

    let reopened = fixture.open();
    assert_eq!(picture(&*reopened, &run).await, before);
    reopened.commit(sample::step(&before.record)).await.unwrap();
    assert_eq!(reopened.run(&run).await.unwrap().seq, 3);
}

pub async fn the_data_version_tells_of_others(fixture: impl Fixture) {
    let (store, other) = (fixture.open(), fixture.open());
    let run = RunId::from_bits(1);
    let mut seen = store.data_version().await.unwrap();
    let mut changed = async || {
        let now = store.data_version().await.unwrap();
        std::mem::replace(&mut seen, now) != now
    };
    other.create(sample::task(1)).await.unwrap();
    assert!(changed().await);
    assert!(!changed().await);
    store.claim(&run, &sample::owner(1), None).await.unwrap();
    other.run(&run).await.unwrap();
    assert!(!changed().await);
    other
        .signal(
            &run,
            Signal::Resume {
                by: String::new(),
                accept: Vec::new(),
            },
        )
        .await
        .unwrap();
    assert!(changed().await);
}
