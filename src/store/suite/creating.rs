//! Cases: tasks are created once.

use std::collections::BTreeSet;

use tokio::task::JoinSet;

use super::{Fixture, Picture, picture, sample};
use crate::audit;
use crate::store::{Created, Error, Pending};

pub async fn a_new_task_is_there_whole(fixture: impl Fixture) {
    let store = fixture.open();
    let new = sample::task(1);
    let created = store.create(new.clone()).await.unwrap();
    assert_eq!(created, Created::New(new.record.clone()));
    let expected = Picture {
        record: new.record.clone(),
        journal: vec![new.first],
        checkpoint: new.checkpoint,
        inbox: Vec::<Pending>::new(),
        audit: vec![audit::seal(&audit::Link::start(), new.audit[0].clone())],
    };
    assert_eq!(picture(&*store, &new.record.run).await, expected);
    assert_eq!(store.spec(&new.record.task).await.unwrap(), new.spec);
    assert_eq!(store.run_of_task(&new.record.task).await.unwrap(), new.record);
}

pub async fn the_same_key_and_body_give_the_same_task(fixture: impl Fixture) {
    let store = fixture.open();
    store.create(sample::with_key(1, "key", "body")).await.unwrap();
    let first = store.run(&sample::task(1).record.run).await.unwrap();
    store.commit(sample::step(&first)).await.unwrap();
    let before = picture(&*store, &first.run).await;
    // It answers with the run as it is now, and writes nothing.
    let again = store.create(sample::with_key(2, "key", "body")).await.unwrap();
    assert_eq!(again, Created::Known(before.record.clone()));
    assert_eq!(picture(&*store, &first.run).await, before);
    assert_eq!(store.unfinished().await.unwrap(), [before.record]);
}

pub async fn the_same_key_with_another_body_is_refused(fixture: impl Fixture) {
    let store = fixture.open();
    let new = sample::with_key(1, "key", "body");
    store.create(new.clone()).await.unwrap();
    let before = picture(&*store, &new.record.run).await;
    let error = store.create(sample::with_key(2, "key", "other")).await.unwrap_err();
    let refused =
        |error: &Error| matches!(error, Error::KeyReused { key, task } if key == "key" && *task == new.record.task);
    assert!(refused(&error), "{error:?}");
    let asked = |n, key, body| sample::with_key(n, key, body).idempotency.unwrap();
    let error = store.known(&asked(2, "key", "other")).await.unwrap_err();
    assert!(refused(&error), "{error:?}");
    let known = store.known(&asked(2, "key", "body")).await.unwrap();
    assert_eq!(known.as_ref(), Some(&before.record));
    assert_eq!(store.known(&asked(2, "else", "body")).await.unwrap(), None);
    assert_eq!(picture(&*store, &new.record.run).await, before);
    assert_eq!(store.unfinished().await.unwrap(), [before.record]);
}

pub async fn one_key_many_times_at_once_makes_one_task(fixture: impl Fixture) {
    let instances = [fixture.open(), fixture.open()];
    let mut calls = JoinSet::new();
    for n in 0..16 {
        let store = instances[n as usize % 2].clone();
        calls.spawn(async move { store.create(sample::with_key(n, "key", "body")).await.unwrap() });
    }
    let (mut made, mut tasks) = (0, BTreeSet::new());
    for created in calls.join_all().await {
        match created {
            Created::New(record) => {
                made += 1;
                tasks.insert(record.task.to_string());
            }
            Created::Known(record) => {
                tasks.insert(record.task.to_string());
            }
        }
    }
    assert_eq!((made, tasks.len()), (1, 1));
    assert_eq!(instances[0].unfinished().await.unwrap().len(), 1);
    assert_eq!(instances[0].audit_log(0, usize::MAX).await.unwrap().len(), 1);
}

pub async fn a_taken_id_is_refused(fixture: impl Fixture) {
    let store = fixture.open();
    let new = sample::task(1);
    store.create(new.clone()).await.unwrap();
    let before = picture(&*store, &new.record.run).await;
    let error = store.create(sample::with_key(1, "key", "body")).await.unwrap_err();
    assert!(matches!(error, Error::Backend { .. }), "{error:?}");
    assert_eq!(picture(&*store, &new.record.run).await, before);
    // The key was not kept either.
    let other = store.create(sample::with_key(2, "key", "other")).await.unwrap();
    assert!(matches!(other, Created::New(_)));
}
