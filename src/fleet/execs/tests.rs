//! Logs and their readers.

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::sandbox::{Cause, Ended};

fn finish() -> Finish {
    Finish::of(Ended::new(Cause::Exited { code: 0 }), None, None)
}

/// Everything a reader gets to its end.
async fn all(mut reader: Reader) -> (Vec<(Channel, u64, Vec<u8>)>, [Counts; 3]) {
    let mut came = Vec::new();
    let mut end = None;
    while let Some(item) = reader.next().await {
        assert_eq!(end, None, "the end is last");
        match item {
            Item::Output { channel, offset, bytes } => came.push((channel, offset, bytes.to_vec())),
            Item::Ended { counts, .. } => end = Some(counts),
        }
    }
    (came, end.expect("there is an end"))
}

fn joined(came: &[(Channel, u64, Vec<u8>)], of: Channel) -> Vec<u8> {
    let pieces = came.iter().filter(|(channel, ..)| *channel == of);
    pieces.flat_map(|(.., bytes)| bytes.clone()).collect()
}

#[tokio::test(start_paused = true)]
async fn a_writer_waits_for_the_slowest_reader_and_nothing_is_lost() {
    let log = Log::new(Overflow::Wait);
    let quick = log.read_from([0; 3]).unwrap();
    let slow = log.read_from([0; 3]).unwrap();
    let whole: Vec<u8> = (0..12_000_000_u32).map(|n| n as u8).collect();
    let writer = async {
        for (n, chunk) in whole.chunks(60_000).enumerate() {
            log.push(Channel::Stdout, n as u64 * 60_000, chunk.to_vec()).await;
        }
        log.end(finish());
    };
    let quick = all(quick);
    let slow = async {
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert!(log.finish().is_none() && log.made()[0] < 1_000_000, "the writer waits");
        all(slow).await
    };
    let ((), (quick, _), (slow, counts)) = tokio::join!(writer, quick, slow);
    assert!(joined(&quick, Channel::Stdout) == whole && joined(&slow, Channel::Stdout) == whole);
    let bytes = whole.len() as u64;
    assert_eq!(
        counts[0],
        Counts {
            bytes,
            dropped_bytes: 0
        }
    );
    assert!(log.cost() < 5 << 20, "memory is bounded");
}

#[tokio::test]
async fn without_waiting_the_oldest_goes_and_is_counted() {
    let log = Log::new(Overflow::Drop);
    let reader = log.read_from([0; 3]).unwrap();
    let chunk = vec![7; 100_000];
    for n in 0..100 {
        log.push(Channel::Stderr, n * 100_000, chunk.clone()).await;
    }
    log.end(finish());
    let (came, counts) = all(reader).await;
    let kept = joined(&came, Channel::Stderr).len() as u64;
    assert_eq!(counts[1].bytes, 10_000_000);
    assert_eq!(counts[1].dropped_bytes, 10_000_000 - kept);
    assert_eq!(came[0].1, 10_000_000 - kept, "the gap is told by the offset");
    assert!(kept > 500_000);
    let refused = log.read_from([0; 3]).unwrap_err();
    assert_eq!(
        (refused.channel, refused.first, refused.end),
        (Channel::Stderr, 10_000_000 - kept, 10_000_000)
    );
}

#[tokio::test(start_paused = true)]
async fn what_nobody_reads_waits_until_it_may_not() {
    let log = Log::new(Overflow::Wait);
    let writer = {
        let log = Arc::clone(&log);
        async move {
            for n in 0..100 {
                log.push(Channel::Stdout, n * 50_000, vec![1; 50_000]).await;
            }
        }
    };
    tokio::pin!(writer);
    let stuck = tokio::time::timeout(Duration::from_secs(60), &mut writer).await;
    assert!(stuck.is_err());
    // Killed: it must be able to end.
    log.stop_waiting();
    writer.await;
    assert_eq!(log.made()[0], 5_000_000);
}

#[tokio::test]
async fn the_first_end_is_the_end_and_nothing_comes_after() {
    let log = Log::new(Overflow::Wait);
    let reader = log.read_from([0; 3]).unwrap();
    log.push(Channel::Pty, 0, b"before".to_vec()).await;
    assert!(log.end(finish()));
    assert!(!log.end(finish()));
    log.push(Channel::Pty, 6, b"after".to_vec()).await;
    let (came, counts) = all(reader).await;
    assert_eq!(came, [(Channel::Pty, 0, b"before".to_vec())]);
    assert_eq!(counts[2].bytes, 6);
}

#[tokio::test(start_paused = true)]
async fn a_reader_that_is_ahead_gets_what_it_has_not_had() {
    let log = Log::resumed(Overflow::Wait, [1000, 0, 0]);
    let writer = {
        let log = Arc::clone(&log);
        async move {
            for n in 0..100 {
                log.push(Channel::Stdout, 1000 + n * 50_000, vec![n as u8; 50_000])
                    .await;
            }
            log.end(finish());
        }
    };
    tokio::pin!(writer);
    // Nobody has come yet.
    assert!(tokio::time::timeout(Duration::from_secs(1), &mut writer).await.is_err());
    let reader = log.read_from([3_001_000, 0, 0]).unwrap();
    let ((), (came, counts)) = tokio::join!(writer, all(reader));
    assert_eq!(
        (came[0].1, joined(&came, Channel::Stdout).len()),
        (3_001_000, 2_000_000)
    );
    assert_eq!(
        counts[0],
        Counts {
            bytes: 5_001_000,
            dropped_bytes: 0
        }
    );
    assert!(log.read_from([5_001_001, 0, 0]).is_err(), "there is no more to come");
}

#[tokio::test]
async fn what_was_dropped_on_the_way_is_a_gap_and_what_comes_twice_comes_once() {
    let log = Log::resumed(Overflow::Drop, [100, 0, 0]);
    assert!(log.read_from([99, 0, 0]).is_err());
    let reader = log.read_from([100, 0, 0]).unwrap();
    log.push(Channel::Stdout, 100, b"ab".to_vec()).await;
    log.push(Channel::Stdout, 101, b"bcd".to_vec()).await;
    log.push(Channel::Stdout, 110, b"xyz".to_vec()).await;
    log.push(Channel::Stdout, 110, b"xyz".to_vec()).await;
    let late = log.read_from([106, 0, 0]).unwrap();
    log.end(finish());
    let (came, counts) = all(reader).await;
    let came: Vec<_> = came
        .iter()
        .map(|(_, offset, bytes)| (*offset, bytes.as_slice()))
        .collect();
    assert_eq!(came, [(100, b"ab".as_slice()), (102, b"cd"), (110, b"xyz")]);
    assert_eq!(
        counts[0],
        Counts {
            bytes: 113,
            dropped_bytes: 6
        }
    );
    let (_, counts) = all(late).await;
    assert_eq!(counts[0].dropped_bytes, 4);
}

proptest! {
    /// Whoever comes at whatever kept byte gets the rest of each channel, once, in order.
    #[test]
    fn any_kept_offset_gives_the_rest(
        chunks in prop::collection::vec((0..3_usize, prop::collection::vec(any::<u8>(), 1..50)), 0..40),
        cut: [prop::sample::Index; 3],
        split: prop::sample::Index,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let (whole, got, order) = runtime.block_on(async {
            let log = Log::new(Overflow::Wait);
            let mut whole: [Vec<u8>; 3] = Default::default();
            let middle = split.index(chunks.len() + 1);
            for (channel, bytes) in &chunks[..middle] {
                let offset = whole[*channel].len() as u64;
                whole[*channel].extend(bytes);
                log.push(Channel::ALL[*channel], offset, bytes.clone()).await;
            }
            let at: Offsets = std::array::from_fn(|n| cut[n].index(whole[n].len() + 1) as u64);
            let reader = log.read_from(at).unwrap();
            for (channel, bytes) in &chunks[middle..] {
                let offset = whole[*channel].len() as u64;
                whole[*channel].extend(bytes);
                log.push(Channel::ALL[*channel], offset, bytes.clone()).await;
            }
            log.end(finish());
            let (came, _) = all(reader).await;
            let got = Channel::ALL.map(|channel| joined(&came, channel));
            let rest: [Vec<u8>; 3] = std::array::from_fn(|n| whole[n][at[n] as usize..].to_vec());
            let mut next = at;
            let order = came.iter().all(|(channel, offset, bytes)| {
                let n = Channel::ALL.iter().position(|other| other == channel).unwrap();
                let is_next = next[n] == *offset;
                next[n] += bytes.len() as u64;
                is_next
            });
            (rest, got, order)
        });
        prop_assert_eq!(whole, got);
        prop_assert!(order, "offsets follow each other");
    }
}
