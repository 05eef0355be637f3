//! Cases of files as streams, and of watches.

use std::time::Duration;

use super::{Case, is_full, resident_bytes};
use crate::sandbox::Error;
use crate::sandbox::files::{ChangeKind, Range, Watch};

/// T18, with 256 MiB (2 GiB when full): memory stays flat on both sides, and the file is there whole or not at all.
pub async fn t18_large_files_are_streams(case: &Case) {
    let pieces: u64 = if is_full() { 2048 } else { 256 };
    let files = case.sandbox.files();
    files.write("big", b"old", Some(0o640)).await.unwrap();
    let piece: Vec<u8> = (0..1_u32 << 20).map(|n| (n % 251) as u8).collect();
    let before = resident_bytes();
    let mut writing = files.write_stream("big", None).await.unwrap();
    for n in 0..pieces {
        if n == pieces / 2 {
            assert_eq!(std::fs::read(case.workspace.path().join("big")).unwrap(), b"old");
        }
        writing.write(&piece).await.unwrap();
    }
    let entry = writing.finish().await.unwrap();
    assert_eq!((entry.size, entry.mode), (pieces << 20, 0o640));
    let mut reading = files.read_stream("big", Range::default()).await.unwrap();
    assert_eq!(reading.entry().size, pieces << 20);
    let mut length = 0;
    while let Some(bytes) = reading.next().await.unwrap() {
        for (n, chunk) in bytes.chunks(4096).enumerate() {
            let at = (length + n * 4096) % piece.len();
            assert_eq!(chunk.first(), piece.get(at));
        }
        length += bytes.len();
    }
    assert_eq!(length as u64, pieces << 20);
    let grown = resident_bytes().saturating_sub(before);
    assert!(grown < 64 << 20, "{grown} bytes more than before");

    // One that is broken off, and one that has no place to go.
    let mut writing = files.write_stream("big", None).await.unwrap();
    writing.write(&piece).await.unwrap();
    drop(writing);
    for _ in 0..100 {
        if case.output("ls -A").await == "big\n" {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(
        case.output("ls -A; stat -c %s big").await,
        format!("big\n{}\n", pieces << 20)
    );
    let mut writing = files.write_stream("big/below", None).await.unwrap();
    let failed = async {
        for _ in 0..100 {
            writing.write(&piece).await?;
        }
        writing.finish().await.map(drop)
    };
    let error = failed.await.unwrap_err();
    assert!(
        matches!(&error, Error::File { code, .. } if code == "not_directory"),
        "{error:?}"
    );
    let missing = files.read_stream("none", Range::default()).await;
    assert!(matches!(missing, Err(Error::File { code, .. }) if code == "not_found"));
    let range = Range {
        offset: 5,
        length: Some(3),
    };
    let mut part = files.read_stream("big", range).await.unwrap();
    assert_eq!(part.next().await.unwrap().unwrap(), &piece[5..8]);
    assert_eq!(part.next().await.unwrap(), None);
    files.remove("big").await.unwrap();
}

/// The next changes, without those of attributes and content.
async fn names(watch: &mut Watch, count: usize) -> Vec<(ChangeKind, String)> {
    let mut found = Vec::new();
    while found.len() < count {
        let next = tokio::time::timeout(Duration::from_secs(10), watch.next()).await;
        let change = next.unwrap_or_else(|_| panic!("only {found:?}")).unwrap();
        match change.kind {
            ChangeKind::Attributes | ChangeKind::Modified => {}
            kind => found.push((kind, String::from_utf8(change.path).unwrap())),
        }
    }
    found
}

pub async fn changes_are_told(case: &Case) {
    use ChangeKind::{Created, MovedFrom, MovedTo, Removed};
    let files = case.sandbox.files();
    files.mkdir_all("d/old").await.unwrap();
    let missing = files.watch("none", false).await;
    assert!(matches!(missing, Err(Error::File { code, .. }) if code == "not_found"));
    let mut flat = files.watch("d", false).await.unwrap();
    let mut deep = files.watch("d", true).await.unwrap();
    let told = |list: &[(ChangeKind, &str)]| {
        let told = list.iter().map(|(kind, path)| (*kind, (*path).to_owned()));
        told.collect::<Vec<_>>()
    };
    case.output("echo x > d/a; echo y > d/old/b").await;
    assert_eq!(names(&mut flat, 1).await, told(&[(Created, "a")]));
    assert_eq!(names(&mut deep, 2).await, told(&[(Created, "a"), (Created, "old/b")]));
    case.output("mv d/old d/new").await;
    assert_eq!(names(&mut deep, 2).await, told(&[(MovedFrom, "old"), (MovedTo, "new")]));
    case.output("rm d/new/b").await;
    assert_eq!(
        names(&mut deep, 1).await,
        told(&[(Removed, "new/b")]),
        "by its new name"
    );
    assert_eq!(names(&mut flat, 2).await, told(&[(MovedFrom, "old"), (MovedTo, "new")]));
    // What appears in a directory before it can be watched is found: a name may come twice, none is missed.
    case.output("mkdir -p d/p/q/r; echo z > d/p/q/r/s").await;
    let mut found = Vec::new();
    while !found.contains(&(Created, "p/q/r/s".to_owned())) {
        found.extend(names(&mut deep, 1).await);
    }
    for path in ["p", "p/q", "p/q/r"] {
        assert!(found.contains(&(Created, path.to_owned())), "{path}: {found:?}");
    }
    case.output("echo more >> d/p/q/r/s").await;
    loop {
        let change = deep.next().await.unwrap();
        if (change.kind, change.path.as_slice()) == (ChangeKind::Modified, b"p/q/r/s") {
            break;
        }
    }
    files.remove_all("d").await.unwrap();
    loop {
        match tokio::time::timeout(Duration::from_secs(10), deep.next())
            .await
            .unwrap()
        {
            Ok(_) => {}
            Err(Error::File { code, .. }) => break assert_eq!(code, "not_found", "it is gone"),
            Err(other) => panic!("{other:?}"),
        }
    }
}
