//! The `host` image: a read-only view of the host's own programs, so that a first sandbox needs no download.
//!
//! `/usr` and what belongs to it, and of `/etc` only what programs need to start. Never homes, `/var`, `/opt`, `/root`,
//! accounts, keys, the time zone (it is UTC), or anything that tells one host from another. Mounts below these paths do not
//! come along.

use std::io;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::{Root, names, own_files};
use crate::sandbox::Error;

/// Top-level names that belong to `/usr`, as directories or as links into it.
const TOP: [&str; 8] = ["usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "libexec"];

/// What programs read of `/etc`, by name or by the start of a name (`*`); entries that the host lacks are left out.
const ETC: [&str; 30] = [
    "alternatives",
    "bash.bashrc",
    "bash_completion.d",
    "ca-certificates",
    "ca-certificates.conf",
    "debian_version",
    "fonts",
    "gitattributes",
    "host.conf",
    "java-*",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "locale.alias",
    "login.defs",
    "lsb-release",
    "magic",
    "magic.mime",
    "mime.types",
    "networks",
    "os-release",
    "perl",
    "pki/tls/certs",
    "protocols",
    "python3*",
    "services",
    "skel",
    "ssl/certs",
    "ssl/openssl.cnf",
    "terminfo",
];

/// How long a look at the host holds: a hundred questions to the file system, for each of many sandboxes in a row. What it
/// found is looked at again where it is mounted.
const FRESH: Duration = Duration::from_secs(1);

pub(super) fn root() -> Result<Root, Error> {
    static SEEN: Mutex<Option<(Instant, Root)>> = Mutex::new(None);
    let mut seen = SEEN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((at, root)) = &*seen
        && at.elapsed() < FRESH
    {
        return Ok(root.clone());
    }
    let root = view(Path::new("/"))?;
    *seen = Some((Instant::now(), root.clone()));
    Ok(root)
}

fn view(host: &Path) -> Result<Root, Error> {
    let refused = |reason: String| Error::Image {
        image: "host".to_owned(),
        reason,
    };
    if !host.join("usr/bin").is_dir() {
        return Err(refused("this host has no `/usr/bin`".to_owned()));
    }
    shown(host).map_err(|error| refused(error.to_string()))
}

fn shown(host: &Path) -> io::Result<Root> {
    let mut root = Root {
        files: own_files(),
        ..Root::default()
    };
    let mut show = |name: &Path| root.show(&host.join(name), &Path::new("/").join(name));
    for name in TOP {
        show(Path::new(name))?;
    }
    let etc = Path::new("etc");
    let all = names(&host.join(etc))?;
    for wanted in ETC {
        match wanted.strip_suffix('*') {
            Some(start) => {
                for name in all.iter().filter(|name| name.starts_with(start)) {
                    show(&etc.join(name))?;
                }
            }
            None => show(&etc.join(wanted))?,
        }
    }
    Ok(root)
}

#[cfg(test)]
mod tests {
    use std::fs;

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
            ["/usr", "/lib64", "/etc/python3.11", "/etc/services", "/etc/ssl/certs"]
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
