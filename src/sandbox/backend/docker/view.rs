//! A [`Root`] as the engine can be given it: binds, and an image for the rest.
//!
//! A container of such an image starts from a *skeleton*: a tiny image that holds just the links, our own files and mount
//! points, made once by content. Nothing is copied. Binds are not recursive, so a file system that is mounted below one is
//! not shown (an engine before 25 could not make it read-only).

use std::fs;
use std::io;
use std::path::Path;

use crate::sandbox::image::{Root, names};

/// Top-level names that a sandbox gets from us and never from a root file system.
const OURS: [&str; 7] = ["proc", "sys", "dev", "tmp", "workspace", ".exuvia", "lost+found"];

/// Files below `/etc` that the engine writes for each sandbox.
const ENGINES: [&str; 4] = ["hosts", "hostname", "resolv.conf", "mtab"];

/// Files below `/etc` that differ between sandboxes: bound on, each its own.
const ACCOUNTS: [&str; 2] = ["passwd", "group"];

/// An unpacked root file system. `/etc` is bound entry by entry, since some entries are not the image's.
pub fn of_directory(root: &Path) -> io::Result<Root> {
    let mut view = Root::default();
    for name in names(root)? {
        if name == "etc" && fs::symlink_metadata(root.join("etc"))?.is_dir() {
            for inner in names(&root.join("etc"))? {
                if !ENGINES.contains(&inner.as_str()) {
                    view.show(&root.join("etc").join(&inner), &Path::new("/etc").join(&inner))?;
                }
            }
        } else if !OURS.contains(&name.as_str()) {
            view.show(&root.join(&name), &Path::new("/").join(&name))?;
        }
    }
    Ok(view)
}

/// The skeleton of a root as a tar; the same bytes for the same root.
pub fn skeleton(root: &Root) -> io::Result<Vec<u8>> {
    let mut tar = tar::Builder::new(Vec::new());
    // runc gives a tmpfs the mode of the directory below it, whatever was asked.
    let directories = [
        ("dev", 0o755),
        ("etc", 0o755),
        ("etc/ssl", 0o755),
        ("proc", 0o755),
        ("sys", 0o755),
        ("tmp", 0o1777),
        ("workspace", 0o755),
        (".exuvia", 0o755),
    ];
    for (name, mode) in directories {
        let mut header = header(tar::EntryType::Directory, mode, 0);
        tar.append_data(&mut header, name, io::empty())?;
    }
    for (name, says) in &root.links {
        let mut header = header(tar::EntryType::Symlink, 0o777, 0);
        tar.append_link(&mut header, below(name), says)?;
    }
    for (name, text) in &root.files {
        let elsewhere = |other: &&str| name == &Path::new("/etc").join(other);
        if !ENGINES.iter().chain(&ACCOUNTS).any(elsewhere) {
            let mut header = header(tar::EntryType::Regular, 0o444, text.len());
            tar.append_data(&mut header, below(name), text.as_bytes())?;
        }
    }
    tar.into_inner()
}

fn header(kind: tar::EntryType, mode: u32, size: usize) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(size as u64);
    header
}

fn below(path: &Path) -> &Path {
    path.strip_prefix("/").unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox::Mount;
    use std::io::Read;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_directory_is_shown_as_it_is_but_for_what_is_ours() {
        let root = tempfile::tempdir().unwrap();
        let path = |name: &str| root.path().join(name);
        for name in ["usr", "etc/apt", "proc", "tmp", ".exuvia"] {
            fs::create_dir_all(path(name)).unwrap();
        }
        fs::write(path("etc/passwd"), "").unwrap();
        fs::write(path("etc/resolv.conf"), "nameserver 192.0.2.1").unwrap();
        symlink("usr/bin", path("bin")).unwrap();
        symlink("/etc/shadow", path("etc/sly")).unwrap();

        let bind = |name: &str| Mount {
            source: path(name),
            target: Path::new("/").join(name),
        };
        assert_eq!(
            of_directory(root.path()).unwrap(),
            Root {
                binds: vec![bind("etc/apt"), bind("etc/passwd"), bind("usr")],
                links: vec![
                    ("/bin".into(), "usr/bin".into()),
                    ("/etc/sly".into(), "/etc/shadow".into())
                ],
                ..Root::default()
            }
        );
    }

    #[test]
    fn a_skeleton_has_links_and_the_files_that_all_sandboxes_share() {
        let file = |name: &str| (Path::new("/etc").join(name), format!("{name}\n"));
        let root = Root {
            links: vec![("/bin".into(), "usr/bin".into())],
            files: ["passwd", "group", "hosts", "nsswitch.conf"].map(file).into(),
            ..Root::default()
        };
        let tar = skeleton(&root).unwrap();
        assert_eq!(tar, skeleton(&root).unwrap());
        let mut found = Vec::new();
        for entry in tar::Archive::new(tar.as_slice()).entries().unwrap() {
            let mut entry = entry.unwrap();
            let (name, mut text) = (entry.path().unwrap().display().to_string(), String::new());
            entry.read_to_string(&mut text).unwrap();
            let link = entry.link_name().unwrap().map(|link| link.display().to_string());
            if !entry.header().entry_type().is_dir() {
                found.push((name, link.unwrap_or(text)));
            }
        }
        let expected = [("bin", "usr/bin"), ("etc/nsswitch.conf", "nsswitch.conf\n")];
        assert_eq!(found, expected.map(|(name, text)| (name.to_owned(), text.to_owned())));
    }
}
