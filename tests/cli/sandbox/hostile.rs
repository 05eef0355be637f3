//! `cp` out of a sandbox that lies: nothing lands outside of the target.

use std::collections::HashMap;
use std::fs;

use exuvia::api::proto::FileInfo;
use exuvia::api::proto::file_info::Type;

use super::double::{Double, Script};
use crate::desk::Desk;

fn info(path: &[u8], kind: Type, target: &[u8]) -> FileInfo {
    FileInfo {
        path: path.to_vec(),
        r#type: kind.into(),
        mode: 0o6777,
        link_target: target.to_vec(),
        ..Default::default()
    }
}

/// A directory `out` with these entries; every file holds `evil`.
fn sandbox(entries: Vec<FileInfo>, deeper: Vec<(&str, Vec<FileInfo>)>) -> Double {
    let mut contents = HashMap::new();
    for (folder, file) in entries.iter().map(|file| ("out", file)).chain(
        deeper
            .iter()
            .flat_map(|(folder, files)| files.iter().map(move |file| (*folder, file))),
    ) {
        let name = file.path.rsplit(|byte| *byte == b'/').next().unwrap();
        contents.insert([folder.as_bytes(), b"/", name].concat(), b"evil".to_vec());
    }
    let mut listings = HashMap::from([(b"out".to_vec(), entries)]);
    listings.extend(
        deeper
            .into_iter()
            .map(|(folder, files)| (folder.as_bytes().to_vec(), files)),
    );
    Double::start(Script {
        files: HashMap::from([(b"out".to_vec(), info(b"out", Type::Directory, b""))]),
        listings,
        contents,
        ..Default::default()
    })
}

/// Everything below the desk but the target, as it was.
fn outside(desk: &Desk) -> Vec<(String, String)> {
    desk.files()
}

#[test]
fn names_that_lead_elsewhere_are_refused_or_taken_by_their_last_part() {
    for name in [&b".."[..], b".", b"a/..", b"", b"a\0b", b"/"] {
        let desk = Desk::bare();
        let before = outside(&desk);
        let double = sandbox(vec![info(name, Type::Regular, b"")], vec![]);
        let done = double.call(&desk, &["sandbox", "cp", "sbx_x:out", "got"]);
        assert_eq!(done.ended(6)["error"]["kind"], "denied", "{name:?}");
        assert_eq!(fs::read_dir(desk.path().join("got")).unwrap().count(), 0, "{name:?}");
        assert_eq!(outside(&desk), before);
    }
    // What stands before the last component counts for nothing.
    let desk = Desk::bare();
    let before = outside(&desk);
    let names = [&b"../../project/greeting.txt"[..], b"/etc/passwd", b"out/fine"];
    let double = sandbox(
        names.iter().map(|name| info(name, Type::Regular, b"")).collect(),
        vec![],
    );
    let done = double.call(&desk, &["sandbox", "cp", "sbx_x:out", "got"]).ended(0);
    assert_eq!((&done["files"], &done["bytes"]), (&3.into(), &12.into()));
    let mut got: Vec<_> = fs::read_dir(desk.path().join("got"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    got.sort();
    assert_eq!(got, ["fine", "greeting.txt", "passwd"]);
    assert_eq!(outside(&desk), before);
}

#[test]
fn a_link_is_kept_as_a_link_and_never_gone_through() {
    let desk = Desk::bare();
    let before = outside(&desk);
    // The same name twice: a link to a directory of ours, and then a directory with a file.
    for order in [[Type::Symlink, Type::Directory], [Type::Directory, Type::Symlink]] {
        let twice = order.map(|kind| info(b"a", kind, b"../project")).to_vec();
        let inside = vec![info(b"greeting.txt", Type::Regular, b"")];
        let double = sandbox(twice, vec![("out/a", inside)]);
        let done = double.call(&desk, &["sandbox", "cp", "sbx_x:out", "got"]);
        assert_eq!(done.code, 6, "{done:?}");
        assert_eq!(outside(&desk), before);
        fs::remove_dir_all(desk.path().join("got")).unwrap();
    }
    // A link of the person's own in the target is not gone through either.
    fs::create_dir(desk.path().join("got")).unwrap();
    std::os::unix::fs::symlink("../../project", desk.path().join("got/out")).unwrap();
    let double = sandbox(vec![info(b"greeting.txt", Type::Regular, b"")], vec![]);
    let done = double.call(&desk, &["sandbox", "cp", "sbx_x:out", "got"]);
    assert_eq!(done.code, 6, "{done:?}");
    assert_eq!(outside(&desk), before);
}

#[test]
fn modes_lose_what_raises_rights_and_odd_things_are_left_out() {
    use std::os::unix::fs::PermissionsExt;
    let desk = Desk::bare();
    let all = vec![
        info(b"run", Type::Regular, b""),
        info(b"pipe", Type::Other, b""),
        info(b"to", Type::Symlink, b"/etc/passwd"),
    ];
    let double = sandbox(all, vec![]);
    let done = double.call(&desk, &["sandbox", "cp", "sbx_x:out", "got"]).ended(1);
    assert_eq!(done["left_out"], serde_json::json!(["out/pipe"]));
    let got = desk.path().join("got");
    assert_eq!(fs::metadata(got.join("run")).unwrap().permissions().mode() & 0o7000, 0);
    assert_eq!(
        fs::read_link(got.join("to")).unwrap(),
        std::path::Path::new("/etc/passwd")
    );
    assert!(!got.join("pipe").exists());
}

#[test]
fn a_copy_has_an_end_whatever_the_other_side_sends() {
    let desk = Desk::bare();
    let double = sandbox(vec![info(b"big", Type::Regular, b"")], vec![]);
    let done = double.call(&desk, &["sandbox", "cp", "--limit", "3", "sbx_x:out", "got"]);
    assert_eq!(done.ended(7)["error"]["kind"], "exhausted");
    assert_eq!(
        fs::read_dir(desk.path().join("got")).unwrap().count(),
        0,
        "half a file is none"
    );
    // A directory that is in itself.
    let itself = vec![info(b"out", Type::Directory, b"")];
    let double = sandbox(itself.clone(), vec![]);
    {
        let mut script = double.script.lock().unwrap();
        let mut path = b"out".to_vec();
        for _ in 0..400 {
            path.extend(b"/out");
            script.listings.insert(path.clone(), itself.clone());
        }
    }
    let done = double.call(&desk, &["sandbox", "cp", "sbx_x:out", "deep"]);
    assert_eq!(done.ended(7)["error"]["kind"], "exhausted");
}
