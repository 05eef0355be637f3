//! The `host` image: a read-only view of the host's own programs, so that a first sandbox needs no download.
//!
//! `/usr` and what belongs to it, and of `/etc` only what programs need to start. Never homes, `/var`, `/opt`, `/root`,
//! accounts, keys, the time zone (it is UTC), or anything that tells one host from another. Mounts below these paths do not
//! come along.

use std::fs;
use std::path::{Path, PathBuf};

use super::{Bind, Root, own_files};
use crate::sandbox::Error;

/// Top-level names that belong to `/usr`, as directories or as links into it.
const TOP: [&str; 7] = ["bin", "sbin", "lib", "lib32", "lib64", "libx32", "libexec"];

/// What programs read of `/etc`; entries that the host lacks are left out.
const ETC: [&str; 29] = [
    "alternatives",
    "bash.bashrc",
    "bash_completion.d",
    "ca-certificates",
    "ca-certificates.conf",
    "debian_version",
    "fonts",
    "gitattributes",
    "java-8-openjdk",
    "java-11-openjdk",
    "java-17-openjdk",
    "java-21-openjdk",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "locale.alias",
    "lsb-release",
    "magic",
    "magic.mime",
    "mime.types",
    "os-release",
    "perl",
    "pki/tls/certs",
    "protocols",
    "python3",
    "services",
    "skel",
    "ssl/certs",
    "ssl/openssl.cnf",
];

pub(super) fn root() -> Result<Root, Error> {
    view(Path::new("/"))
}

fn view(host: &Path) -> Result<Root, Error> {
    let mut root = Root {
        lower: None,
        binds: Vec::new(),
        links: Vec::new(),
        files: own_files(),
    };
    if !host.join("usr/bin").is_dir() {
        return Err(Error::Image {
            image: "host".to_owned(),
            reason: "this host has no `/usr/bin`".to_owned(),
        });
    }
    root.show(host, Path::new("usr"));
    TOP.iter().for_each(|name| root.show(host, Path::new(name)));
    ETC.iter()
        .for_each(|name| root.show(host, &Path::new("etc").join(name)));
    // `python3.11` and its like carry a version in the name.
    let entries = fs::read_dir(host.join("etc")).into_iter().flatten().flatten();
    let mut versioned: Vec<PathBuf> = entries
        .map(|entry| PathBuf::from(entry.file_name()))
        .filter(|name| name.to_str().is_some_and(|name| name.starts_with("python3.")))
        .collect();
    versioned.sort();
    versioned
        .iter()
        .for_each(|name| root.show(host, &Path::new("etc").join(name)));
    Ok(root)
}

impl Root {
    /// Adds one path as the host has it: a link as a link, the rest as a bind.
    fn show(&mut self, host: &Path, name: &Path) {
        let target = Path::new("/").join(name);
        let source = host.join(name);
        match fs::symlink_metadata(&source) {
            Ok(found) if found.is_symlink() => {
                if let Ok(held) = fs::read_link(&source) {
                    self.links.push((target, held));
                }
            }
            Ok(found) if found.is_dir() || found.is_file() => self.binds.push(Bind { source, target }),
            Ok(_) | Err(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_stay_links_and_nothing_private_is_shown() {
        let host = tempfile::tempdir().unwrap();
        let path = |name: &str| host.path().join(name);
        for dir in [
            "usr/bin",
            "lib64",
            "root/.ssh",
            "home",
            "var",
            "opt",
            "etc/ssl/certs",
            "etc/ssl/private",
            "etc/python3.11",
        ] {
            fs::create_dir_all(path(dir)).unwrap();
        }
        for file in ["etc/shadow", "etc/passwd", "etc/services", "etc/machine-id"] {
            fs::write(path(file), "x").unwrap();
        }
        std::os::unix::fs::symlink("usr/bin", path("bin")).unwrap();
        let root = view(host.path()).unwrap();
        let bound: Vec<&str> = root.binds.iter().map(|bind| bind.target.to_str().unwrap()).collect();
        assert_eq!(
            bound,
            ["/usr", "/lib64", "/etc/services", "/etc/ssl/certs", "/etc/python3.11"]
        );
        assert_eq!(root.links, [("/bin".into(), "usr/bin".into())]);
        assert!(
            root.files
                .iter()
                .any(|(path, text)| path == Path::new("/etc/passwd") && text.contains("sandbox:x:1000:1000"))
        );
    }

    #[test]
    fn a_host_without_usr_is_no_image() {
        let empty = tempfile::tempdir().unwrap();
        assert!(matches!(view(empty.path()), Err(Error::Image { .. })));
    }
}
