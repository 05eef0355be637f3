use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};

use tempfile::TempDir;

use super::*;
use crate::wire::Match;
use file_request::Kind;

fn ask(plane: &Plane, kind: Kind, content: &[&[u8]]) -> Vec<file_reply::Kind> {
    let mut chunks = content.iter().map(|chunk| Bytes::copy_from_slice(chunk));
    let mut replies = Vec::new();
    plane
        .serve(
            FileRequest { kind: Some(kind) },
            &mut || chunks.next().ok_or_else(|| io::ErrorKind::UnexpectedEof.into()),
            &mut |reply| {
                replies.push(reply.kind.unwrap());
                Ok(())
            },
        )
        .unwrap();
    replies
}

fn code(replies: &[file_reply::Kind]) -> &str {
    match replies.last().unwrap() {
        file_reply::Kind::Error(error) => &error.code,
        file_reply::Kind::Done(_) => "done",
        other => panic!("not a last reply: {other:?}"),
    }
}

fn write(path: &str, mode: u32) -> Kind {
    Kind::Write(file_request::Write {
        path: path.into(),
        mode,
    })
}

fn read(path: &str) -> Kind {
    Kind::Read(file_request::Read {
        path: path.into(),
        offset: 0,
        length: 0,
    })
}

fn names(directory: &TempDir) -> Vec<String> {
    let entries = fs::read_dir(directory.path()).unwrap();
    let mut names: Vec<_> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn confined() -> (TempDir, Plane) {
    let root = TempDir::new().unwrap();
    let plane = Plane::confined(directory(root.path()).unwrap());
    (root, plane)
}

#[test]
fn a_write_makes_parents_keeps_a_mode_and_follows_a_link() {
    let (root, plane) = confined();
    assert_eq!(
        code(&ask(&plane, write("a/b/new", 0o755), &[b"one", b"two", b""])),
        "done"
    );
    let path = root.path().join("a/b/new");
    assert_eq!(fs::read(&path).unwrap(), b"onetwo");
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o755);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
    symlink("/a/b/new", root.path().join("link")).unwrap();
    assert_eq!(code(&ask(&plane, write("link", 0), &[b"x", b""])), "done");
    assert_eq!(fs::read(&path).unwrap(), b"x");
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o640);
    assert!(fs::symlink_metadata(root.path().join("link")).unwrap().is_symlink());
}

#[test]
fn a_write_that_breaks_off_leaves_nothing() {
    let (root, plane) = confined();
    fs::write(root.path().join("old"), "old").unwrap();
    let broken = plane.serve(
        FileRequest {
            kind: Some(write("old", 0)),
        },
        &mut || Err(io::ErrorKind::UnexpectedEof.into()),
        &mut |_| Ok(()),
    );
    assert!(broken.is_err());
    assert_eq!(names(&root), ["old"]);
    assert_eq!(fs::read(root.path().join("old")).unwrap(), b"old");
}

#[test]
fn nothing_leads_out_of_a_confined_plane() {
    let outside = TempDir::new().unwrap();
    fs::write(outside.path().join("secret"), "secret").unwrap();
    let (root, plane) = confined();
    symlink(outside.path().join("secret"), root.path().join("absolute")).unwrap();
    symlink(
        "../".repeat(20) + outside.path().join("secret").to_str().unwrap(),
        root.path().join("up"),
    )
    .unwrap();
    symlink(outside.path(), root.path().join("directory")).unwrap();
    for path in ["absolute", "up", "directory/secret", "../secret"] {
        assert_eq!(code(&ask(&plane, read(path), &[])), "not_found", "{path}");
    }
    // The link's target is taken for a name inside, where it is made.
    ask(&plane, write("absolute", 0), &[b"x", b""]);
    assert_eq!(fs::read(outside.path().join("secret")).unwrap(), b"secret");
}

#[test]
fn magic_links_are_not_followed() {
    let root = TempDir::new().unwrap();
    fs::write(root.path().join("file"), "x").unwrap();
    let path = format!("/proc/self/root{}/file", root.path().display());
    let replies = ask(&Plane::of_process(), read(&path), &[]);
    assert!(
        matches!(replies.last(), Some(file_reply::Kind::Error(error)) if error.errno == libc::ELOOP),
        "{replies:?}"
    );
}

#[test]
fn a_fifo_is_refused_at_once() {
    let (root, plane) = confined();
    nix::unistd::mkfifo(&root.path().join("fifo"), Mode::from_bits_truncate(0o666)).unwrap();
    assert_eq!(code(&ask(&plane, read("fifo"), &[])), "not_regular");
    assert_eq!(code(&ask(&plane, write("fifo", 0), &[b""])), "not_regular");
    let search = file_request::Search {
        path: "fifo".into(),
        pattern: "x".into(),
        ..Default::default()
    };
    assert_eq!(code(&ask(&plane, Kind::Search(search), &[])), "not_regular");
}

#[test]
fn a_read_has_offset_length_and_total() {
    let (root, plane) = confined();
    fs::write(root.path().join("f"), "0123456789").unwrap();
    let part = file_request::Read {
        path: "f".into(),
        offset: 2,
        length: 3,
    };
    let replies = ask(&plane, Kind::Read(part), &[]);
    assert!(matches!(&replies[0], file_reply::Kind::Info(info) if info.size == 10));
    assert_eq!(
        replies[1..],
        [
            file_reply::Kind::Data(b"234".to_vec().into()),
            file_reply::Kind::Done(Done {
                truncated: true,
                total: 10
            })
        ]
    );
    assert_eq!(code(&ask(&plane, read("."), &[])), "is_directory");
}

#[test]
fn a_listing_is_sorted_and_bounded() {
    let (root, plane) = confined();
    fs::create_dir_all(root.path().join("b/c")).unwrap();
    fs::write(root.path().join("b/c/deep"), "").unwrap();
    fs::write(root.path().join("b/x"), "").unwrap();
    fs::write(root.path().join("a"), "abc").unwrap();
    symlink("a", root.path().join("l")).unwrap();
    let list = |depth, max_entries| {
        let list = file_request::List {
            path: Vec::new(),
            depth,
            max_entries,
        };
        let mut replies = ask(&plane, Kind::List(list), &[]);
        let file_reply::Kind::Done(done) = replies.pop().unwrap() else {
            panic!("not done")
        };
        let paths: Vec<_> = replies
            .into_iter()
            .map(|reply| match reply {
                file_reply::Kind::Info(info) => String::from_utf8(info.path).unwrap(),
                other => panic!("{other:?}"),
            })
            .collect();
        (paths.join(" "), done.truncated)
    };
    assert_eq!(list(1, 0), ("a b l".to_owned(), false));
    assert_eq!(list(2, 0), ("a b b/c b/x l".to_owned(), false));
    assert_eq!(list(9, 4), ("a b b/c b/c/deep".to_owned(), true));
    assert_eq!(list(9, 6), ("a b b/c b/c/deep b/x l".to_owned(), false));
}

#[test]
fn a_search_skips_what_is_not_text_of_the_tree() {
    let (root, plane) = confined();
    for (path, text) in [
        ("src/a.rs", "fn a() {}\nlet needle = 1;\r\n"),
        ("src/deep/b.rs", "needle"),
        ("c.txt", "needle"),
        (".git/config", "needle"),
        ("binary", "\0needle"),
    ] {
        fs::create_dir_all(root.path().join(path).parent().unwrap()).unwrap();
        fs::write(root.path().join(path), text).unwrap();
    }
    symlink("c.txt", root.path().join("link")).unwrap();
    let search = |glob: &str, max_matches| {
        let pattern = "^.*needle".to_owned();
        let search = file_request::Search {
            path: Vec::new(),
            pattern,
            glob: glob.to_owned(),
            max_matches,
        };
        let mut replies = ask(&plane, Kind::Search(search), &[]);
        let last = replies.pop();
        let found: Vec<_> = replies
            .into_iter()
            .map(|reply| match reply {
                file_reply::Kind::Match(Match { path, line, text }) => {
                    format!(
                        "{}:{line}:{}",
                        String::from_utf8(path).unwrap(),
                        String::from_utf8(text).unwrap()
                    )
                }
                other => panic!("{other:?}"),
            })
            .collect();
        (found, last)
    };
    let done = |truncated, total| Some(file_reply::Kind::Done(Done { truncated, total }));
    let a = "src/a.rs:2:let needle = 1;".to_owned();
    let b = "src/deep/b.rs:1:needle".to_owned();
    let c = "c.txt:1:needle".to_owned();
    assert_eq!(search("", 0), (vec![c.clone(), a.clone(), b.clone()], done(false, 3)));
    assert_eq!(search("*.rs", 0), (vec![a.clone(), b.clone()], done(false, 2)));
    assert_eq!(search("src/*.rs", 0), (vec![a], done(false, 1)));
    assert_eq!(search("", 1).0, [c]);
    let broken = file_request::Search {
        pattern: "(".to_owned(),
        ..Default::default()
    };
    assert_eq!(code(&ask(&plane, Kind::Search(broken), &[])), "invalid_pattern");
}

#[test]
fn a_tree_is_removed_without_following_links() {
    let outside = TempDir::new().unwrap();
    fs::write(outside.path().join("kept"), "").unwrap();
    let (root, plane) = confined();
    fs::create_dir_all(root.path().join("d/e")).unwrap();
    symlink(outside.path(), root.path().join("d/e/link")).unwrap();
    let remove = |recursive| {
        Kind::Remove(file_request::Remove {
            path: "d".into(),
            recursive,
        })
    };
    assert_eq!(code(&ask(&plane, remove(false), &[])), "not_empty");
    assert_eq!(code(&ask(&plane, remove(true), &[])), "done");
    assert_eq!((names(&root), names(&outside)), (vec![], vec!["kept".to_owned()]));
}

/// Far deeper than there are descriptors, and than a path can be long.
#[test]
fn a_tree_of_any_depth_is_removed() {
    use std::os::fd::AsFd;
    let (root, plane) = confined();
    let mut at = directory(root.path()).unwrap();
    let mode = nix::sys::stat::Mode::from_bits_truncate(0o755);
    for name in std::iter::once("deep").chain(std::iter::repeat_n("d", 5000)) {
        for side in ["a", "b"] {
            nix::sys::stat::mkdirat(at.as_fd(), side, mode).unwrap();
        }
        nix::sys::stat::mkdirat(at.as_fd(), name, mode).unwrap();
        let flags = nix::fcntl::OFlag::O_DIRECTORY | nix::fcntl::OFlag::O_CLOEXEC;
        at = nix::fcntl::openat(at.as_fd(), name, flags, nix::sys::stat::Mode::empty()).unwrap();
    }
    let remove = Kind::Remove(file_request::Remove {
        path: "deep".into(),
        recursive: true,
    });
    assert_eq!(code(&ask(&plane, remove, &[])), "done");
    assert_eq!(names(&root), ["a", "b"]);
}

#[test]
fn a_file_is_not_written_by_the_name_of_a_directory() {
    let (root, plane) = confined();
    assert_eq!(code(&ask(&plane, write("foo/", 0), &[b"x", b""])), "is_directory");
    assert_eq!(names(&root), Vec::<String>::new());
}
