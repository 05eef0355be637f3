//! Root file systems put together from directories of the host: what is bound read-only, and what is a link.
//!
//! A container of such an image starts from a *skeleton*: a tiny image that holds just the links and mount points, made once
//! by content. Nothing is copied. Binds are not recursive, so a file system that is mounted below one is not shown (an
//! engine before 25 could not make it read-only).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::sandbox::Mount;

/// A root file system made of pieces.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct View {
    pub binds: Vec<Mount>,
    /// Name inside, and what it says.
    pub links: Vec<(PathBuf, PathBuf)>,
}

/// What belongs to the host's `/usr`: the same names on every merged and unmerged layout.
const BESIDE_USR: [&str; 8] = [
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/etc/ssl/certs",
];

/// Entries of `/etc` that programs need and that hold nothing of the operator's: by name, or by the start of a name (`*`).
const ETC: [&str; 24] = [
    "alternatives",
    "bash.bashrc",
    "ca-certificates.conf",
    "debian_version",
    "host.conf",
    "java-*",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "login.defs",
    "lsb-release",
    "magic",
    "magic.mime",
    "mime.types",
    "networks",
    "nsswitch.conf",
    "os-release",
    "perl",
    "protocols",
    "python3*",
    "services",
    "terminfo",
    "timezone",
];

/// Top-level names that a sandbox gets from us and never from a root file system.
const OURS: [&str; 7] = ["proc", "sys", "dev", "tmp", "workspace", ".exuvia", "lost+found"];

/// Files below `/etc` that the engine or we write for each sandbox.
const OURS_IN_ETC: [&str; 4] = ["hosts", "hostname", "resolv.conf", "mtab"];

impl View {
    /// The read-only view of this host.
    pub fn of_host() -> io::Result<Self> {
        let mut view = Self::default();
        for path in BESIDE_USR {
            view.add(Path::new(path), Path::new(path))?;
        }
        view.add(Path::new("/etc/ssl/openssl.cnf"), Path::new("/etc/ssl/openssl.cnf"))?;
        for name in names(Path::new("/etc"))? {
            let wanted = |pattern: &&str| match pattern.strip_suffix('*') {
                Some(start) => name.starts_with(start),
                None => name == **pattern,
            };
            if ETC.iter().any(wanted) {
                view.add(&Path::new("/etc").join(&name), &Path::new("/etc").join(&name))?;
            }
        }
        Ok(view)
    }

    /// An unpacked root file system. `/etc` is bound entry by entry, since some entries are ours.
    pub fn of_directory(root: &Path) -> io::Result<Self> {
        let mut view = Self::default();
        for name in names(root)? {
            if name == "etc" && fs::symlink_metadata(root.join("etc"))?.is_dir() {
                for inner in names(&root.join("etc"))? {
                    if !OURS_IN_ETC.contains(&inner.as_str()) {
                        view.add(&root.join("etc").join(&inner), &Path::new("/etc").join(&inner))?;
                    }
                }
            } else if !OURS.contains(&name.as_str()) {
                view.add(&root.join(&name), &Path::new("/").join(&name))?;
            }
        }
        Ok(view)
    }

    /// Adds a name as what it is: a link stays a link, a file or directory is bound, anything else is left out.
    fn add(&mut self, source: &Path, target: &Path) -> io::Result<()> {
        let kind = match fs::symlink_metadata(source) {
            Ok(data) => data.file_type(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        };
        if kind.is_symlink() {
            self.links.push((target.into(), fs::read_link(source)?));
        } else if kind.is_dir() || kind.is_file() {
            self.binds.push(Mount {
                source: source.into(),
                target: target.into(),
            });
        }
        Ok(())
    }

    /// The skeleton as a tar; the same bytes for the same view.
    pub fn skeleton(&self) -> io::Result<Vec<u8>> {
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
            let mut header = tar::Header::new_gnu();
            header.set_entry_type(tar::EntryType::Directory);
            header.set_mode(mode);
            header.set_size(0);
            tar.append_data(&mut header, name, io::empty())?;
        }
        for (name, says) in &self.links {
            let mut header = tar::Header::new_gnu();
            header.set_entry_type(tar::EntryType::Symlink);
            header.set_mode(0o777);
            header.set_size(0);
            tar.append_link(&mut header, name.strip_prefix("/").unwrap_or(name), says)?;
        }
        tar.into_inner()
    }
}

/// The names in a directory that are text, sorted.
fn names(directory: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(directory)? {
        names.extend(entry?.file_name().into_string());
    }
    names.sort();
    Ok(names)
}

/// The accounts that exist in a `host` sandbox, as `/etc/passwd` and `/etc/group`.
pub fn accounts(user: u32) -> (String, String) {
    (
        format!(
            "root:x:0:0:root:/:/usr/sbin/nologin\nsandbox:x:{user}:{user}:sandbox:/workspace:/bin/sh\n\
             nobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n"
        ),
        format!("root:x:0:\nsandbox:x:{user}:\nnogroup:x:65534:\n"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
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
            View::of_directory(root.path()).unwrap(),
            View {
                binds: vec![bind("etc/apt"), bind("etc/passwd"), bind("usr")],
                links: vec![
                    ("/bin".into(), "usr/bin".into()),
                    ("/etc/sly".into(), "/etc/shadow".into())
                ],
            }
        );
    }

    #[test]
    fn the_host_view_shows_no_accounts_keys_or_homes() {
        let view = View::of_host().unwrap();
        let shown: Vec<&Path> = view.binds.iter().map(|bind| bind.target.as_path()).collect();
        assert!(shown.contains(&Path::new("/usr")));
        for secret in [
            "/etc/shadow",
            "/etc/passwd",
            "/etc/ssh/x",
            "/root/.ssh",
            "/home/x",
            "/etc/ssl/private/k",
        ] {
            assert!(
                !shown.iter().any(|bind| Path::new(secret).starts_with(bind)),
                "{secret}"
            );
        }
    }

    #[test]
    fn a_skeleton_is_the_same_for_the_same_view() {
        let view = View::of_host().unwrap();
        assert_eq!(view.skeleton().unwrap(), view.skeleton().unwrap());
    }
}
