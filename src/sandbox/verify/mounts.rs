//! What the sandbox sees mounted.

use super::{Breach, Mounts, Writable};
use crate::sandbox::mountinfo::Entry;
use std::path::Path;

pub(super) fn breaches(table: &[Entry], expected: &Mounts, exists: &dyn Fn(&str) -> bool) -> Vec<Breach> {
    let mut breaches = root(table, expected);
    for entry in table {
        breaches.extend(anywhere(entry, expected));
    }
    for place in &expected.writable {
        breaches.extend(writable(table, place));
    }
    for path in expected.masked.iter().filter(|path| exists(path)) {
        // A whole file system that is not there hides what is in it.
        if Path::new(path).starts_with("/sys") && top(table, "/sys").is_none() {
            continue;
        }
        if !top(table, path).is_some_and(is_empty) {
            breaches.push(Breach::new(
                format!("masked {path}"),
                "nothing to be seen",
                shown(top(table, path)),
            ));
        }
    }
    for path in expected.read_only.iter().filter(|path| exists(path)) {
        if !top(table, path).is_some_and(|entry| entry.has("ro")) {
            breaches.push(Breach::new(format!("read-only {path}"), "ro", shown(top(table, path))));
        }
    }
    breaches
}

/// What is mounted at a place: the last of those that are.
fn top<'a>(table: &'a [Entry], point: &str) -> Option<&'a Entry> {
    table.iter().rev().find(|entry| entry.point == Path::new(point))
}

fn shown(entry: Option<&Entry>) -> String {
    match entry {
        Some(entry) => format!("{} {}", entry.kind, entry.options.join(",")),
        None => "no mount".to_owned(),
    }
}

fn root(table: &[Entry], expected: &Mounts) -> Vec<Breach> {
    let Some(root) = top(table, "/") else {
        return vec![Breach::new("mount /", "a root", "no mount")];
    };
    flags(root, &[&["ro"], expected.root.as_slice()].concat())
        .into_iter()
        .collect()
}

fn flags(entry: &Entry, wanted: &[&str]) -> Option<Breach> {
    let missing = wanted.iter().any(|flag| !entry.has(flag));
    missing.then(|| {
        let wall = format!("mount {}", entry.point.display());
        Breach::new(wall, wanted.join(","), entry.options.join(","))
    })
}

/// What holds for every mount.
fn anywhere(entry: &Entry, expected: &Mounts) -> Vec<Breach> {
    let mut breaches = Vec::new();
    let point = entry.point.to_string_lossy();
    let wall = || format!("mount {point}");
    for tie in &entry.propagation {
        let follows = tie.starts_with("master:") || tie.starts_with("propagate_from:");
        if !(expected.may_follow && follows) && tie != "unbindable" {
            breaches.push(Breach::new(format!("propagation of {point}"), "private", tie));
        }
    }
    let is_named = expected.writable.iter().any(|place| place.point == point)
        || expected.system.iter().any(|system| **system == *point)
        || is_device(entry);
    if !entry.has("ro") && !is_named {
        breaches.push(Breach::new(wall(), "ro", entry.options.join(",")));
    }
    let is_workspace = point == "/workspace";
    if let Some(secret) = expected.secret.as_deref().filter(|_| !is_workspace) {
        let mut texts = vec![entry.root.to_string_lossy().into_owned(), entry.source.clone()];
        texts.extend(entry.super_options.iter().cloned());
        if let Some(text) = texts.iter().find(|text| text.contains(&*secret.to_string_lossy())) {
            breaches.push(Breach::new(wall(), "no path of the service", text));
        }
    }
    breaches
}

/// A device that is bound on: writing to it changes no file.
fn is_device(entry: &Entry) -> bool {
    const NAMES: [&str; 6] = ["/null", "/zero", "/full", "/random", "/urandom", "/tty"];
    let is_one = NAMES.iter().any(|name| entry.root == Path::new(name));
    is_one && ["devtmpfs", "tmpfs"].contains(&entry.kind.as_str())
}

/// A file that is the null device, a directory that is an empty file system, or what the forge keeps for this: an empty
/// file and an empty directory of a file system that nobody can write.
fn is_empty(entry: &Entry) -> bool {
    let is_null = is_device(entry) && entry.root == Path::new("/null");
    let is_void = entry.root == Path::new("/") || VOIDS.iter().any(|void| entry.root.ends_with(void));
    // Of a template over an image the root is an overlay.
    let is_ours = ["tmpfs", "overlay"].contains(&entry.kind.as_str());
    is_null || (is_ours && entry.has("ro") && is_void)
}

/// As the forge calls them in each of its templates.
const VOIDS: [&str; 2] = ["dev/empty", "dev/void"];

fn writable(table: &[Entry], place: &Writable) -> Vec<Breach> {
    let wall = format!("mount {}", place.point);
    let Some(entry) = top(table, place.point) else {
        return vec![Breach::new(wall, "to be there", "no mount")];
    };
    let mut breaches: Vec<Breach> = flags(entry, &place.flags).into_iter().collect();
    if let Some((bytes, inodes)) = place.tmpfs {
        if entry.kind != "tmpfs" {
            breaches.push(Breach::new(wall.clone(), "tmpfs", &entry.kind));
        }
        // `size=` is in KiB, or in bytes with no letter.
        let size = entry.value("size").and_then(|size| match size.strip_suffix('k') {
            Some(kib) => kib.parse::<u64>().ok()?.checked_mul(1024),
            None => size.parse().ok(),
        });
        let cap = |what: &str, found: Option<u64>, most: u64| {
            let is_held = found.is_some_and(|found| found <= most);
            let found = found.map_or("no limit".to_owned(), |found| found.to_string());
            (!is_held).then(|| Breach::new(format!("{wall} {what}"), format!("{most} at most"), found))
        };
        // The kernel rounds up to whole pages.
        breaches.extend(cap("size", size, bytes.next_multiple_of(4096)));
        let found = entry.value("nr_inodes").and_then(|count| count.parse().ok());
        breaches.extend(cap("inodes", found, inodes));
    }
    breaches
}
