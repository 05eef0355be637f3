//! Cases: one writer a run (requirement E12).

use tokio::task::JoinSet;

use super::{Fixture, picture, sample};
use crate::ids::RunId;
use crate::store::{Error, RunRecord};

/// E12: the worker that slept through its own take-over wakes up and writes.
pub async fn an_owner_that_was_taken_over_cannot_write(fixture: impl Fixture) {
    let (store, other) = (fixture.open(), fixture.open());
    let run = RunId::from_bits(1);
    store.create(sample::task(1)).await.unwrap();
    let old = store.claim(&run, &sample::owner(1), None).await.unwrap();
    store.commit(sample::step(&old)).await.unwrap();
    let old = store.run(&run).await.unwrap();

    let new = other
        .claim(&run, &sample::owner(2), Some(&sample::owner(1)))
        .await
        .unwrap();
    assert_eq!((new.fence, new.owner.clone(), new.seq), (2, Some(sample::owner(2)), 2));
    let before = picture(&*store, &run).await;
    let error = store.commit(sample::step(&old)).await.unwrap_err();
    assert!(
        matches!(error, Error::StaleFence { fence: 1, found: 2, .. }),
        "{error:?}"
    );
    assert_eq!(picture(&*store, &run).await, before);

    other.commit(sample::step(&new)).await.unwrap();
    assert_eq!(store.run(&run).await.unwrap().seq, 3);
}

pub async fn a_claim_is_not_taken_from_the_living(fixture: impl Fixture) {
    let store = fixture.open();
    let run = RunId::from_bits(1);
    store.create(sample::task(1)).await.unwrap();
    let owners = [1, 2, 3].map(sample::owner);
    // Nobody has it.
    let held = store.claim(&run, &owners[0], Some(&owners[2])).await.unwrap();
    assert_eq!(held, store.run(&run).await.unwrap());

    // A process with the same pid, started at another time, is another process. That nobody had it, or that somebody
    // else was dead, when the caller looked is no leave to take it now.
    let reused = crate::store::Owner {
        started: 99,
        ..owners[0].clone()
    };
    for stale in [None, Some(&reused), Some(&owners[2])] {
        let error = store.claim(&run, &owners[1], stale).await.unwrap_err();
        assert!(matches!(error, Error::Owned { pid: 1, .. }), "{error:?}");
        assert_eq!(store.run(&run).await.unwrap(), held);
    }
    let taken = store.claim(&run, &owners[1], Some(&owners[0])).await.unwrap();
    let expected = RunRecord {
        fence: 2,
        owner: Some(owners[1].clone()),
        updated_at: taken.updated_at,
        ..held
    };
    assert_eq!(taken, expected);
}

pub async fn a_release_counts_for_its_own_fence_only(fixture: impl Fixture) {
    let store = fixture.open();
    let run = RunId::from_bits(1);
    store.create(sample::task(1)).await.unwrap();
    store.claim(&run, &sample::owner(1), None).await.unwrap();
    let held = store
        .claim(&run, &sample::owner(2), Some(&sample::owner(1)))
        .await
        .unwrap();
    store.release(&run, 1).await.unwrap();
    assert_eq!(store.run(&run).await.unwrap(), held);

    store.release(&run, 2).await.unwrap();
    let released = store.run(&run).await.unwrap();
    assert_eq!(
        (released.owner.clone(), released.fence, released.is_terminal),
        (None, 2, false)
    );
    store.release(&run, 2).await.unwrap();
    assert_eq!(store.run(&run).await.unwrap(), released);
    let next = store.claim(&run, &sample::owner(3), None).await.unwrap();
    assert_eq!(next.fence, 3);
}

pub async fn of_many_claims_at_once_one_wins(fixture: impl Fixture) {
    let instances = [fixture.open(), fixture.open()];
    let run = RunId::from_bits(1);
    instances[0].create(sample::task(1)).await.unwrap();
    let mut claims = JoinSet::new();
    for n in 0..16 {
        let (store, run) = (instances[n as usize % 2].clone(), run.clone());
        claims.spawn(async move { store.claim(&run, &sample::owner(n), None).await });
    }
    let results = claims.join_all().await;
    let won: Vec<_> = results.iter().filter_map(|result| result.as_ref().ok()).collect();
    assert_eq!(won.len(), 1);
    assert_eq!(*won[0], instances[0].run(&run).await.unwrap());
    let owned = |result: &&Result<RunRecord, Error>| matches!(result, Err(Error::Owned { .. }));
    assert_eq!(results.iter().filter(owned).count(), 15);
}
