//! What the tests of this folder share: random directories, and a full comparison of two of them.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fmt;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use proptest::prelude::*;

use super::attributes::Attributes;
use super::folder::{Folder, tick};
use super::index::Index;
use super::limits::Limits;
use super::name::shown;
use super::snapshot::Snapshot;
use super::trees::Trees;

/// What a directory is to hold.
pub type Plan = BTreeMap<Vec<u8>, Thing>;

#[derive(Clone, PartialEq, Eq)]
pub enum Thing {
    File { content: Vec<u8>, mode: u32 },
    Link(Vec<u8>),
    Directory { mode: u32, content: Plan },
}

/// Short enough to be read when a test fails.
impl fmt::Debug for Thing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { content, mode } => write!(f, "{mode:o} {:?}", shown(content)),
            Self::Link(target) => write!(f, "-> {:?}", shown(target)),
            Self::Directory { mode, content } => {
                write!(f, "{mode:o} ")?;
                f.debug_map()
                    .entries(content.iter().map(|(name, thing)| (shown(name), thing)))
                    .finish()
            }
        }
    }
}

/// So many cases; failing ones are printed, not kept in files.
pub fn cases(count: u32) -> ProptestConfig {
    ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(count)
    }
}

/// Names that programs get wrong (T17), few enough that two plans meet.
pub fn names() -> Vec<Vec<u8>> {
    let mut names: Vec<Vec<u8>> = [
        &b"a"[..],
        b"b",
        b"c d",
        b"-rf",
        b"new\nline",
        b"tab\there",
        b"quo\"te",
        b"back\\slash",
        b"\xff\xfe",
        b"...",
        b" lead",
        b"trail ",
    ]
    .map(<[u8]>::to_vec)
    .to_vec();
    names.push("雪☃🦀".into());
    names.push(vec![b'n'; 255]);
    names
}

pub fn content() -> impl Strategy<Value = Vec<u8>> {
    let line = prop::sample::select(vec![
        "one", "two", "three", "", "x y", "\r", "-- a", "+++ b", "\\ No", "é",
    ]);
    let lines = (prop::collection::vec(line, 0..30), any::<bool>()).prop_map(|(lines, ended)| {
        let mut text = lines.join("\n").into_bytes();
        if ended && !text.is_empty() {
            text.push(b'\n');
        }
        text
    });
    prop_oneof![4 => lines, 1 => prop::collection::vec(1_u8..=255, 0..200)]
}

pub fn plan() -> impl Strategy<Value = Plan> {
    let target = prop::sample::select(vec![&b"a"[..], b"../..", b"/etc/passwd", b"gone", b"./x//y", b"\xff"]);
    let file = (content(), prop::sample::select(vec![0o644, 0o755, 0o600, 0o400, 0o777]))
        .prop_map(|(content, mode)| Thing::File { content, mode });
    let leaf = prop_oneof![5 => file, 1 => target.prop_map(|t| Thing::Link(t.to_vec()))];
    let level = |thing: BoxedStrategy<Thing>| prop::collection::btree_map(prop::sample::select(names()), thing, 0..7);
    let thing = leaf.prop_recursive(3, 24, 6, move |inner| {
        (prop::sample::select(vec![0o755, 0o700, 0o770]), level(inner))
            .prop_map(|(mode, content)| Thing::Directory { mode, content })
    });
    level(thing.boxed())
}

pub fn build(dir: &Path, plan: &Plan) {
    for (name, thing) in plan {
        let path = dir.join(OsStr::from_bytes(name));
        match thing {
            Thing::File { content, mode } => {
                fs::write(&path, content).unwrap();
                fs::set_permissions(&path, fs::Permissions::from_mode(*mode)).unwrap();
            }
            Thing::Link(target) => symlink(OsStr::from_bytes(target), &path).unwrap(),
            Thing::Directory { mode, content } => {
                fs::create_dir(&path).unwrap();
                build(&path, content);
                fs::set_permissions(&path, fs::Permissions::from_mode(*mode)).unwrap();
            }
        }
    }
}

/// Turns what is in `dir` into another plan, leaving alone what is the same in both.
pub fn rebuild(dir: &Path, old: &Plan, new: &Plan) {
    for (name, was) in old {
        if new.get(name) != Some(was) {
            let path = dir.join(OsStr::from_bytes(name));
            match (was, new.get(name)) {
                (Thing::Directory { content: old, .. }, Some(Thing::Directory { content, mode })) => {
                    rebuild(&path, old, content);
                    fs::set_permissions(&path, fs::Permissions::from_mode(*mode)).unwrap();
                }
                (Thing::Directory { .. }, _) => fs::remove_dir_all(&path).unwrap(),
                _ => fs::remove_file(&path).unwrap(),
            }
        }
    }
    let missing = |name: &[u8]| fs::symlink_metadata(dir.join(OsStr::from_bytes(name))).is_err();
    let add: Plan = new
        .iter()
        .filter(|(n, _)| missing(n))
        .map(|(n, t)| (n.clone(), t.clone()))
        .collect();
    build(dir, &add);
}

/// All that `lstat`, reading and `readlink` tell of what is in a directory, times included.
pub fn everything(dir: &Path) -> BTreeMap<Vec<u8>, (u32, u64, i64, Vec<u8>)> {
    let mut all = BTreeMap::new();
    let mut todo = vec![dir.to_owned()];
    while let Some(at) = todo.pop() {
        for entry in fs::read_dir(&at).unwrap() {
            let path = entry.unwrap().path();
            let meta = fs::symlink_metadata(&path).unwrap();
            let (content, size) = if meta.is_dir() {
                todo.push(path.clone());
                (Vec::new(), 0)
            } else if meta.is_symlink() {
                (
                    fs::read_link(&path).unwrap().as_os_str().as_bytes().to_vec(),
                    meta.len(),
                )
            } else if meta.is_file() {
                (fs::read(&path).unwrap(), meta.len())
            } else {
                (Vec::new(), 0)
            };
            let name = path.strip_prefix(dir).unwrap().as_os_str().as_bytes().to_vec();
            let mtime = meta.mtime() * 1_000_000_000 + meta.mtime_nsec();
            all.insert(name, (meta.mode(), size, mtime, content));
        }
    }
    all
}

/// Names that are one file, and the extended attributes that paths have.
pub type Beside = (BTreeSet<BTreeSet<Vec<u8>>>, BTreeMap<Vec<u8>, Attributes>);

/// Which names in a directory are one file, and the extended attributes of all.
pub fn links_and_attributes(dir: &Path) -> Beside {
    let mut inodes: BTreeMap<u64, BTreeSet<Vec<u8>>> = BTreeMap::new();
    let mut attributes = BTreeMap::new();
    for name in everything(dir).into_keys() {
        let path = dir.join(OsStr::from_bytes(&name));
        let meta = fs::symlink_metadata(&path).unwrap();
        if meta.is_file() || meta.is_dir() {
            let found = Attributes::of(fs::File::open(&path).unwrap()).unwrap();
            if found != Attributes::default() {
                attributes.insert(name.clone(), found);
            }
        }
        if meta.is_file() {
            inodes.entry(meta.ino()).or_default().insert(name);
        }
    }
    let links = inodes.into_values().filter(|names| names.len() > 1).collect();
    (links, attributes)
}

/// The same without times.
pub fn timeless(dir: &Path) -> BTreeMap<Vec<u8>, (u32, u64, Vec<u8>)> {
    let all = everything(dir).into_iter();
    all.map(|(name, (mode, size, _, content))| (name, (mode, size, content)))
        .collect()
}

/// Waits until nothing that exists can be racy any more.
pub fn past_this_tick() {
    let now = tick().unwrap();
    while tick().unwrap() <= now {
        std::thread::yield_now();
    }
}

pub fn snapshot(trees: &Trees, dir: &Path, base: Option<&Index>) -> Snapshot {
    trees
        .snapshot(&Folder::open(dir).unwrap(), base, Limits::default())
        .unwrap()
}

/// A store and a place for directories.
pub struct Bench {
    pub trees: Trees,
    pub dir: tempfile::TempDir,
}

impl Bench {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let trees = Trees::open(&dir.path().join("data")).unwrap();
        Self { trees, dir }
    }

    /// A fresh directory that holds `plan`.
    pub fn made(&self, name: &str, plan: &Plan) -> std::path::PathBuf {
        let path = self.dir.path().join(name);
        fs::create_dir(&path).unwrap();
        build(&path, plan);
        path
    }
}
