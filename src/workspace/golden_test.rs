//! Every format that was ever written is still read: stores kept in `tests/fixtures/workspace/`.
//!
//! A new format adds a store; those that are there are never written again. `EXUVIA_WRITE_FIXTURES=1` writes the ones
//! that are missing.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::attributes::Attributes;
use super::testing::{everything, links_and_attributes, snapshot};
use super::trees::{Revision, Trees};

/// What was written, by which encoding it was first said.
const KEPT: [&str; 2] = ["tree-1", "tree-2"];

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/workspace")
}

/// The directory that a store holds.
fn build(dir: &Path, name: &str) {
    fs::create_dir(dir).unwrap();
    fs::create_dir(dir.join("src")).unwrap();
    fs::write(dir.join("src/main.rs"), "fn main() {}\n").unwrap();
    fs::write(dir.join("empty"), "").unwrap();
    fs::write(dir.join("long"), "a line that is said again\n".repeat(100)).unwrap();
    symlink("/etc/passwd", dir.join("link")).unwrap();
    for (name, mode) in [
        ("src", 0o755),
        ("src/main.rs", 0o644),
        ("long", 0o644),
        ("empty", 0o600),
    ] {
        fs::set_permissions(dir.join(name), fs::Permissions::from_mode(mode)).unwrap();
    }
    if name != "tree-1" {
        fs::hard_link(dir.join("long"), dir.join("src/again")).unwrap();
        let mut attributes = Attributes::default();
        attributes.insert(b"user.origin", b"https://example.invalid/");
        attributes.set(fs::File::open(dir.join("empty")).unwrap()).unwrap();
        attributes.set(fs::File::open(dir.join("src")).unwrap()).unwrap();
    }
    let old = std::time::UNIX_EPOCH + std::time::Duration::new(1_700_000_000, 123_456_789);
    for name in ["src/main.rs", "empty", "long", "src"] {
        let file = fs::File::open(dir.join(name)).unwrap();
        file.set_modified(old).unwrap();
    }
    let touched = Command::new("touch")
        .args(["-h", "-d", "@1700000000.5"])
        .arg(dir.join("link"))
        .status();
    assert!(touched.unwrap().success());
}

#[test]
fn every_format_ever_written_is_read() {
    for name in KEPT {
        let scratch = tempfile::tempdir().unwrap();
        let dir = scratch.path().join("dir");
        build(&dir, name);
        let kept = fixtures().join(name);
        if !kept.exists() && std::env::var_os("EXUVIA_WRITE_FIXTURES").is_some() {
            let trees = Trees::open(&kept).unwrap();
            let revision = snapshot(&trees, &dir, None).revision;
            fs::write(
                kept.join("revision.json"),
                serde_json::to_vec_pretty(&revision).unwrap(),
            )
            .unwrap();
            drop(trees);
            fs::remove_dir(kept.join("blobs/tmp")).unwrap();
            fs::remove_file(kept.join("blobs/lock")).unwrap();
            fs::remove_file(kept.join("blobs/sweep.lock")).unwrap();
        }
        // A copy: opening a store makes files in it.
        let data = scratch.path().join("data");
        let copied = Command::new("cp").arg("-r").arg(&kept).arg(&data).status().unwrap();
        assert!(copied.success());
        let revision: Revision = serde_json::from_slice(&fs::read(data.join("revision.json")).unwrap()).unwrap();
        let trees = Trees::open(&data).unwrap();
        let copy = scratch.path().join("copy");
        trees.materialise(revision, &copy, None).unwrap();
        assert_eq!(everything(&copy), everything(&dir), "{name}");
        assert_eq!(links_and_attributes(&copy), links_and_attributes(&dir), "{name}");
        // And what is written now has the same name.
        assert_eq!(snapshot(&trees, &dir, None).revision, revision, "{name}");
    }
}
