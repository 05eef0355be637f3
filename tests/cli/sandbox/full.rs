//! A disk here that is full.

use std::collections::HashMap;
use std::fs::{self, File};
use std::path::PathBuf;

use exuvia::api::proto::FileInfo;
use exuvia::api::proto::file_info::Type;
use nix::mount::{MsFlags, mount, umount};

use super::double::{Double, Script};
use crate::desk::Desk;
use crate::support::skip;

/// A file system with room for 64 KiB; gone when it is dropped.
struct Small(PathBuf);

impl Small {
    /// `None`, said on stderr, where nothing can be mounted.
    fn new(test: &str, desk: &Desk) -> Option<Self> {
        let place = desk.path().join("small");
        fs::create_dir(&place).unwrap();
        match mount(Some("none"), &place, Some("tmpfs"), MsFlags::empty(), Some("size=64k")) {
            Ok(()) => Some(Self(place)),
            Err(error) => {
                skip(test, &error);
                None
            }
        }
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = umount(&self.0);
    }
}

fn large() -> Double {
    let info = FileInfo {
        path: b"large".to_vec(),
        r#type: Type::Regular.into(),
        mode: 0o644,
        ..Default::default()
    };
    Double::start(Script {
        files: HashMap::from([(b"large".to_vec(), info)]),
        contents: HashMap::from([(b"large".to_vec(), vec![7; 1 << 20])]),
        ..Default::default()
    })
}

#[test]
fn a_copy_to_a_full_disk_says_so_and_leaves_nothing() {
    let desk = Desk::bare();
    let Some(small) = Small::new("a_copy_to_a_full_disk_says_so_and_leaves_nothing", &desk) else {
        return;
    };
    let double = large();
    let error = double.call(&desk, &["sandbox", "cp", "sbx_x:large", "small"]).ended(8);
    assert_eq!(error["error"]["kind"], "exhausted", "{error}");
    assert_eq!(
        error["error"]["message"],
        "cannot copy `large`: No space left on device (os error 28)"
    );
    assert_eq!(fs::read_dir(&small.0).unwrap().count(), 0);
    // One that was there stays as it was.
    fs::write(small.0.join("large"), "mine").unwrap();
    double
        .call(&desk, &["sandbox", "cp", "sbx_x:large", "small/large"])
        .ended(8);
    assert_eq!(fs::read_to_string(small.0.join("large")).unwrap(), "mine");
}

/// However little it is, and however the command ends.
#[test]
fn output_that_cannot_be_written_is_told() {
    let Some(desk) = Desk::new("output_that_cannot_be_written_is_told") else {
        return;
    };
    let served = crate::served::Served::tidy(&desk);
    let made = served.sandbox(&desk, &["create"]);
    let id = made.stdout.trim_end();
    let full = || File::options().write(true).open("/dev/full").unwrap();
    for words in [
        vec!["sandbox", "exec", id, "--", "echo", "hi"],
        vec!["sandbox", "run", "--", "echo", "hi"],
        vec!["sandbox", "run", "--", "sh", "-c", "while echo hi; do :; done"],
    ] {
        let mut command = desk.plain(&words);
        let done = command
            .env("EXUVIA_SERVER", &served.url)
            .stdout(full())
            .output()
            .unwrap();
        let said = String::from_utf8(done.stderr).unwrap();
        assert_eq!(
            (done.status.code(), said.as_str()),
            (
                Some(8),
                "exuvia: cannot write the output: No space left on device (os error 28)\n"
            ),
            "{words:?}"
        );
    }
}

#[test]
fn standard_output_that_is_full_is_no_success() {
    let desk = Desk::bare();
    let double = large();
    let full = File::options().write(true).open("/dev/full").unwrap();
    let mut command = double.plain(&desk, &["sandbox", "cp", "sbx_x:large", "-"]);
    let done = command.stdout(full).output().unwrap();
    assert_eq!(done.status.code(), Some(8), "{}", String::from_utf8_lossy(&done.stderr));
}
