//! File calls: the portable cases, and those that need real programs to set a trap.

use std::time::Duration;

use super::Case;
use crate::sandbox::Error;
use crate::sandbox::backend::Lack;
use crate::sandbox::files::{Kind, Range, Search};

fn code<T: std::fmt::Debug>(result: Result<T, Error>) -> String {
    match result {
        Err(Error::File { code, .. }) => code,
        other => panic!("a file error was due: {other:?}"),
    }
}

pub async fn files_round_trip(case: &Case) {
    let files = case.sandbox.files();
    let content: Vec<u8> = (0..1_000_000_u32).map(|n| (n * 7 % 251) as u8).collect();
    files.write("deep/er/file", &content, Some(0o755)).await.unwrap();
    let read = files.read("/workspace/deep/er/file", Range::default()).await.unwrap();
    assert!(read.bytes == content && !read.truncated && read.total_bytes == 1_000_000);
    let part = files
        .read(
            "deep/er/file",
            Range {
                offset: 10,
                length: Some(5),
            },
        )
        .await
        .unwrap();
    assert_eq!((part.bytes.as_slice(), part.truncated), (&content[10..15], true));
    let stat = files.stat("deep/er/file").await.unwrap();
    assert_eq!((stat.kind, stat.size, stat.mode), (Kind::Regular, 1_000_000, 0o755));
    files.write("deep/er/file", b"", None).await.unwrap();
    assert_eq!(
        files.stat("deep/er/file").await.unwrap().mode,
        0o755,
        "an existing file keeps its mode"
    );
    assert_eq!(files.read("deep/er/file", Range::default()).await.unwrap().bytes, b"");
    files.rename("deep/er/file", "moved").await.unwrap();
    files.mkdir("d").await.unwrap();
    files.mkdir_all("d/e/f").await.unwrap();
    files.remove("moved").await.unwrap();
    files.remove_all("d").await.unwrap();
    files.remove_all("deep").await.unwrap();
    assert_eq!(files.list("", 9, 0).await.unwrap().entries, []);
    assert_eq!(case.output("ls").await, "", "the program sees the same");
}

/// T17.
pub async fn t17_file_names_are_bytes(case: &Case) {
    let files = case.sandbox.files();
    let long = "n".repeat(255);
    let names: [&[u8]; 6] = [
        "🐚".as_bytes(),
        "貝殻".as_bytes(),
        b"new\nline",
        b"-rf",
        long.as_bytes(),
        b"\xff\xfe",
    ];
    for name in names {
        files.write(name, name, None).await.unwrap();
        assert_eq!(files.read(name, Range::default()).await.unwrap().bytes, name);
    }
    let mut expected = names.map(<[u8]>::to_vec).to_vec();
    expected.sort();
    let listed = files.list("", 1, 0).await.unwrap().entries;
    assert_eq!(listed.into_iter().map(|entry| entry.path).collect::<Vec<_>>(), expected);
}

pub async fn file_errors_are_typed(case: &Case) {
    let files = case.sandbox.files();
    files.write("f", b"x", None).await.unwrap();
    files.mkdir_all("d/e").await.unwrap();
    assert_eq!(code(files.read("none", Range::default()).await), "not_found");
    assert_eq!(code(files.read("d", Range::default()).await), "is_directory");
    assert_eq!(code(files.write("d", b"x", None).await), "is_directory");
    assert_eq!(code(files.write("f/g", b"x", None).await), "not_directory");
    assert_eq!(code(files.list("f", 1, 0).await), "not_directory");
    assert_eq!(code(files.mkdir("d").await), "exists");
    assert_eq!(code(files.remove("d").await), "not_empty");
    assert_eq!(code(files.write("n".repeat(256), b"", None).await), "too_large");
    assert_eq!(code(files.stat("a\0b").await), "bad_request");
    assert_eq!(code(files.remove_all("/workspace/..").await), "bad_request");
    let search = Search {
        pattern: "(".to_owned(),
        ..Search::default()
    };
    assert_eq!(code(files.search(search).await), "invalid_pattern");
}

/// Though a write replaces the file, for which a program needs no leave of the file's own.
pub async fn a_file_that_may_not_be_written_stays(case: &Case) {
    let files = case.sandbox.files();
    files.write("f", b"old", Some(0o444)).await.unwrap();
    case.output("ln -s f link").await;
    for name in ["f", "link"] {
        assert_eq!(code(files.write(name, b"new", None).await), "permission");
        assert_eq!(
            code(files.write_stream(name, None).await.unwrap().finish().await),
            "permission"
        );
    }
    assert_eq!(files.read("f", Range::default()).await.unwrap().bytes, b"old");
    assert_eq!(case.output("ls -A").await, "f\nlink\n");
    case.output("chmod u+w f").await;
    files.write("link", b"new", None).await.unwrap();
    assert_eq!(files.read("f", Range::default()).await.unwrap().bytes, b"new");
}

pub async fn listing_and_searching(case: &Case) {
    let files = case.sandbox.files();
    for (name, text) in [
        ("src/a.rs", "one\ntwo needle\n"),
        ("b.txt", "needle"),
        (".git/x", "needle"),
    ] {
        files.write(name, text.as_bytes(), None).await.unwrap();
    }
    let listing = files.list("/workspace", 2, 4).await.unwrap();
    let paths: Vec<_> = listing
        .entries
        .iter()
        .map(|entry| String::from_utf8_lossy(&entry.path))
        .collect();
    assert_eq!(
        (paths.join(" "), listing.truncated),
        (".git .git/x b.txt src".to_owned(), true)
    );
    let search = Search {
        pattern: "^two n".to_owned(),
        glob: Some("*.rs".to_owned()),
        ..Search::default()
    };
    let found = files.search(search).await.unwrap();
    let found: Vec<_> = found
        .matches
        .iter()
        .map(|found| (found.path.as_slice(), found.line, found.text.as_slice()))
        .collect();
    assert_eq!(found, [(b"src/a.rs".as_slice(), 2, b"two needle".as_slice())]);
}

/// T16.
pub async fn t16_magic_links_lead_nowhere(case: &Case) {
    let files = case.sandbox.files();
    case.output("ln -s /proc/self/root escape; ln -s /etc/shadow shadow; ln -s /proc/1/root/etc/shadow one")
        .await;
    let all = [
        "one",
        "shadow",
        "escape/etc/hostname",
        "/proc/self/root/etc/hostname",
        "/proc/self/cwd/x",
    ];
    let refused = match case.lacks(Lack::MagicLinksRefused) {
        true => &all[..2],
        false => &all,
    };
    for path in refused {
        let code = code(files.read(*path, Range::default()).await);
        assert!(
            ["other", "permission", "not_found"].contains(&code.as_str()),
            "{path}: {code}"
        );
    }
    if case.lacks(Lack::MagicLinksRefused) {
        return;
    }
    let result = files.write("escape/tmp/x", b"x", None).await;
    assert_eq!(code(result), "other");
    let result = files.write_stream("escape/tmp/x", None).await.unwrap().finish().await;
    assert_eq!(code(result), "other");
    assert_eq!(
        code(files.read_stream("escape/etc/hostname", Range::default()).await),
        "other"
    );
    assert_eq!(code(files.watch("escape/tmp", true).await), "other");
    assert_eq!(code(files.list("escape/tmp", 1, 0).await), "other");
    assert_eq!(code(files.rename("escape/tmp/a", "b").await), "other");
    assert_eq!(code(files.remove_all("escape/tmp").await), "other");
}

/// T18, the aborted upload.
pub async fn t18_an_aborted_write_leaves_nothing(case: &Case) {
    let files = case.sandbox.files();
    files.write("kept", b"old", None).await.unwrap();
    let endless = vec![0; 64 << 20];
    let cut = tokio::time::timeout(Duration::from_millis(15), files.write("kept", &endless, None)).await;
    assert!(cut.is_err(), "it should still be under way");
    // The guest learns of the hang-up on its own time: waits for the level.
    for _ in 0..100 {
        if case.output("ls -A").await == "kept\n" {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(case.output("ls -A; cat kept").await, "kept\nold");
}

pub async fn devices_do_not_block(case: &Case) {
    let files = case.sandbox.files();
    case.output("mkfifo fifo").await;
    for path in ["fifo", "/dev/null", "/dev/zero"] {
        assert_eq!(code(files.read(path, Range::default()).await), "not_regular", "{path}");
        let result = files.write(path, b"x", None).await;
        assert!(["not_regular", "permission"].contains(&code(result).as_str()), "{path}");
    }
    let search = Search {
        pattern: "x".to_owned(),
        ..Search::default()
    };
    assert_eq!(
        files.search(search).await.unwrap().matches,
        [],
        "a FIFO on the way is passed by"
    );
}
