//! Random histories of a directory against plain copies of it, and the files that programs get wrong.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use proptest::prelude::*;

use super::attributes::Attributes;
use super::folder::Folder;
use super::limits::Limits;
use super::snapshot::SpecialFile;
use super::testing::{Bench, cases, everything, links_and_attributes, names, snapshot};

/// One thing that a program does to a directory. Paths are numbers, see [`at`].
#[derive(Debug, Clone)]
pub(super) enum Deed {
    Write(usize, Vec<u8>),
    Append(usize),
    WriteFarBehind(usize),
    MakeFolder(usize),
    Rename(usize, usize),
    Remove(usize),
    Link(usize, usize),
    Symlink(usize),
    SetMode(usize, u32),
    SetAttribute(usize, Vec<u8>),
    SetTime(usize, u32),
}

pub(super) fn deed() -> impl Strategy<Value = Deed> {
    let path = 0_usize..60;
    let bytes = prop::collection::vec(any::<u8>(), 0..40);
    prop_oneof![
        4 => (path.clone(), bytes.clone()).prop_map(|(p, b)| Deed::Write(p, b)),
        1 => path.clone().prop_map(Deed::Append),
        1 => path.clone().prop_map(Deed::WriteFarBehind),
        3 => path.clone().prop_map(Deed::MakeFolder),
        2 => (path.clone(), path.clone()).prop_map(|(a, b)| Deed::Rename(a, b)),
        1 => path.clone().prop_map(Deed::Remove),
        4 => (path.clone(), path.clone()).prop_map(|(a, b)| Deed::Link(a, b)),
        1 => path.clone().prop_map(Deed::Symlink),
        1 => (path.clone(), prop::sample::select(vec![0o600, 0o644, 0o755])).prop_map(|(p, m)| Deed::SetMode(p, m)),
        2 => (path.clone(), bytes).prop_map(|(p, b)| Deed::SetAttribute(p, b)),
        1 => (path, any::<u32>()).prop_map(|(p, t)| Deed::SetTime(p, t)),
    ]
}

/// A place at the top, or below one of the first few names.
fn at(dir: &Path, number: usize) -> PathBuf {
    let names = names();
    let name = |n: usize| OsStr::from_bytes(&names[n % names.len()]).to_owned();
    match number / names.len() {
        0 => dir.join(name(number)),
        above => dir.join(name(above)).join(name(number)),
    }
}

/// Does it as far as the directory has it so; what fails changes nothing.
pub(super) fn act(dir: &Path, deed: &Deed) {
    let is_link = |path: &Path| fs::symlink_metadata(path).is_ok_and(|meta| meta.is_symlink());
    let open = |path: &Path| match is_link(path) {
        true => None,
        false => fs::File::options().write(true).open(path).ok(),
    };
    match deed {
        Deed::Write(path, bytes) => {
            let path = at(dir, *path);
            if !is_link(&path) {
                let _ = fs::write(path, bytes);
            }
        }
        Deed::Append(path) => {
            if let Some(file) = open(&at(dir, *path)) {
                file.write_all_at(b"more", file.metadata().unwrap().len()).unwrap();
            }
        }
        Deed::WriteFarBehind(path) => {
            if let Some(file) = open(&at(dir, *path)) {
                file.write_all_at(b"far", 300_000).unwrap();
            }
        }
        Deed::MakeFolder(path) => drop(fs::create_dir(at(dir, *path))),
        Deed::Rename(from, to) => drop(fs::rename(at(dir, *from), at(dir, *to))),
        Deed::Remove(path) => {
            let path = at(dir, *path);
            drop(fs::remove_file(&path).or_else(|_| fs::remove_dir_all(&path)));
        }
        Deed::Link(from, to) => drop(fs::hard_link(at(dir, *from), at(dir, *to))),
        Deed::Symlink(path) => drop(symlink("/nowhere/at all", at(dir, *path))),
        Deed::SetMode(path, mode) => {
            let path = at(dir, *path);
            if !is_link(&path) {
                let mode = if path.is_dir() { 0o755 } else { *mode };
                let _ = fs::set_permissions(path, fs::Permissions::from_mode(mode));
            }
        }
        Deed::SetAttribute(path, value) => {
            let path = at(dir, *path);
            if !is_link(&path)
                && let Ok(file) = fs::File::open(path)
            {
                let mut wanted = Attributes::of(&file).unwrap();
                if !value.is_empty() && value[0] % 4 == 0 {
                    wanted = Attributes::default();
                }
                wanted.insert(b"user.test", value);
                wanted.set(&file).unwrap();
            }
        }
        Deed::SetTime(path, seconds) => {
            if let Some(file) = open(&at(dir, *path)) {
                let time =
                    std::time::UNIX_EPOCH + std::time::Duration::new(u64::from(*seconds), seconds % 1_000_000_000);
                file.set_modified(time).unwrap();
            }
        }
    }
}

pub(super) fn copied(from: &Path, to: &Path) {
    let done = Command::new("cp").arg("-a").arg(from).arg(to).status().unwrap();
    assert!(done.success());
}

proptest! {
    #![proptest_config(cases(24))]

    /// Each point of a history, taken by the change since the last one, comes back as the plain copy of it has it, in a
    /// fresh directory and in one that is brought from point to point.
    #[test]
    fn a_history_comes_back(steps in prop::collection::vec(prop::collection::vec(deed(), 1..25), 1..5)) {
        let bench = Bench::new();
        let path = |name: String| bench.dir.path().join(name);
        let live = bench.made("live", &[].into());
        let (mut index, mut revisions) = (None, Vec::new());
        for (number, deeds) in steps.iter().enumerate() {
            deeds.iter().for_each(|deed| act(&live, deed));
            let taken = snapshot(&bench.trees, &live, index.as_ref());
            copied(&live, &path(format!("copy-{number}")));
            prop_assert_eq!(snapshot(&bench.trees, &live, None).revision, taken.revision);
            index = Some(taken.index);
            revisions.push(taken.revision);
        }
        let walked = path("walked".to_owned());
        let mut index = bench.trees.materialise(revisions[0], &walked, None).unwrap();
        let order = (0..revisions.len()).chain((0..revisions.len()).rev());
        for number in order {
            let copy = path(format!("copy-{number}"));
            let fresh = tempfile::tempdir_in(bench.dir.path()).unwrap();
            bench.trees.materialise(revisions[number], fresh.path(), None).unwrap();
            let folder = Folder::open(&walked).unwrap();
            index = bench.trees.restore(&folder, &index, revisions[number], None, Limits::default()).unwrap();
            for dir in [fresh.path(), &walked] {
                prop_assert_eq!(everything(dir), everything(&copy));
                prop_assert_eq!(links_and_attributes(dir), links_and_attributes(&copy));
            }
            let again = snapshot(&bench.trees, &walked, Some(&index)).revision;
            prop_assert_eq!(again, revisions[number]);
            // And through a tar stream, but for parts of seconds.
            let mut tar = Vec::new();
            bench.trees.write_tar(revisions[number], &mut tar).unwrap();
            if !everything(&copy).is_empty() {
                let read = bench.trees.read_tar(&mut tar.as_slice(), Limits::default()).unwrap();
                prop_assert_eq!(read.tree, revisions[number].tree);
            }
        }
    }
}

#[test]
fn one_content_has_one_tree_wherever_it_lies() {
    let bench = Bench::new();
    let make = |name: &str, order: [&str; 3]| {
        let dir = bench.made(name, &[].into());
        fs::write(dir.join(order[0]), "shared").unwrap();
        fs::hard_link(dir.join(order[0]), dir.join(order[1])).unwrap();
        fs::hard_link(dir.join(order[0]), dir.join(order[2])).unwrap();
        snapshot(&bench.trees, &dir, None).revision.tree
    };
    let linked = make("one", ["a", "b", "c"]);
    assert_eq!(make("two", ["c", "a", "b"]), linked);
    let dir = bench.made("three", &[].into());
    for name in ["a", "b", "c"] {
        fs::write(dir.join(name), "shared").unwrap();
    }
    assert_ne!(snapshot(&bench.trees, &dir, None).revision.tree, linked);
    // A name outside is nothing of the workspace's.
    fs::hard_link(dir.join("a"), bench.dir.path().join("outside")).unwrap();
    let plain = snapshot(&bench.trees, &dir, None);
    assert_eq!(
        (
            plain.report.hard_linked,
            bench.trees.tree(plain.revision.tree).unwrap().links()
        ),
        (1, None)
    );
}

#[test]
fn sockets_and_fifos_are_reported_and_not_followed() {
    let bench = Bench::new();
    let dir = bench.made("dir", &[].into());
    let _socket = std::os::unix::net::UnixListener::bind(dir.join("socket")).unwrap();
    nix::unistd::mkfifo(&dir.join("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let report = snapshot(&bench.trees, &dir, None).report;
    let skipped: Vec<_> = report.skipped.iter().map(|s| (s.path.as_str(), s.what)).collect();
    assert_eq!(skipped, [("fifo", SpecialFile::Fifo), ("socket", SpecialFile::Socket)]);
}

/// 4 GiB of holes with something behind them: stored and brought back with the memory of a small file and no more room.
#[test]
fn four_gibibytes_need_no_memory_and_no_room() {
    let bench = Bench::new();
    let dir = bench.made("dir", &[].into());
    let large = fs::File::create(dir.join("large")).unwrap();
    large.write_all_at(b"end", 4 << 30).unwrap();
    fs::write(dir.join("empty"), "").unwrap();
    let peak = || {
        nix::sys::resource::getrusage(nix::sys::resource::UsageWho::RUSAGE_SELF)
            .unwrap()
            .max_rss()
    };
    let before = peak();
    let taken = snapshot(&bench.trees, &dir, None);
    assert_eq!((taken.report.bytes, taken.report.files), ((4 << 30) + 3, 2));
    let copy = bench.dir.path().join("copy");
    bench.trees.materialise(taken.revision, &copy, None).unwrap();
    assert!(peak() - before < 64 << 10, "{} KiB more", peak() - before);
    let meta = fs::metadata(copy.join("large")).unwrap();
    assert_eq!(meta.len(), (4 << 30) + 3);
    assert!(meta.blocks() < 64, "{} blocks", meta.blocks());
    let mut end = [0; 4];
    fs::File::open(copy.join("large"))
        .unwrap()
        .read_exact_at(&mut end, (4 << 30) - 1)
        .unwrap();
    assert_eq!(&end, b"\0end");
}
