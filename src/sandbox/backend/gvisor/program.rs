//! Which `runsc` there is.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Names the file where it is not on the `PATH`.
const VARIABLE: &str = "EXUVIA_RUNSC";
/// The first release that is used: what is called here was seen to work with it, a checkpoint that lets the sandbox go on too.
const OLDEST: u32 = 2024_0729;
/// Before this, a device node in an image could reach the host's device (CVE-2026-96812).
const SAFE_DEVICES: u32 = 2026_0925;

/// A `runsc` that may be run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Runsc {
    pub path: PathBuf,
}

impl Runsc {
    /// Looks at `EXUVIA_RUNSC`, along the `PATH`, and where `make setup` puts it. Runs nothing: it is asked for by every sandbox.
    ///
    /// # Errors
    /// What is missing, in words.
    pub fn find() -> Result<Self, String> {
        let named = std::env::var_os(VARIABLE).map(PathBuf::from);
        let found = match named {
            Some(path) => path.is_file().then_some(path),
            None => places()
                .into_iter()
                .map(|dir| dir.join("runsc"))
                .find(|path| path.is_file()),
        };
        let Some(path) = found else {
            return Err(format!(
                "there is no `runsc` (gVisor) on the PATH: install it, set {VARIABLE}, or run `make setup`"
            ));
        };
        Self::at(&path)
    }

    fn at(path: &Path) -> Result<Self, String> {
        let cannot = |why: String| format!("`{}` cannot be used: {why}", path.display());
        let path = fs::canonicalize(path).map_err(|error| cannot(error.to_string()))?;
        let metadata = fs::metadata(&path).map_err(|error| cannot(error.to_string()))?;
        let is_ours = metadata.uid() == nix::unistd::geteuid().as_raw() || metadata.uid() == 0;
        if !is_ours || metadata.permissions().mode() & 0o022 != 0 {
            return Err(cannot("others could have written it".to_owned()));
        }
        Ok(Self { path })
    }

    /// As it says itself, `release-20240729.0` or `0.0~20240729.0`.
    ///
    /// # Errors
    /// Why it cannot be used.
    pub fn version(&self) -> Result<String, String> {
        let cannot = |why: String| format!("`{}` cannot be used: {why}", self.path.display());
        let said = Command::new(&self.path)
            .arg("--version")
            .env_clear()
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .output()
            .map_err(|error| cannot(error.to_string()))?;
        let said = String::from_utf8_lossy(&said.stdout).into_owned();
        let version = said.lines().find_map(|line| line.strip_prefix("runsc version "));
        let version = version.ok_or_else(|| cannot("it does not tell its version".to_owned()))?;
        match date(version) {
            Some(date) if date < OLDEST => Err(cannot(format!("{version} is too old, before 29 July 2024"))),
            Some(_) | None => Ok(version.to_owned()),
        }
    }
}

/// Whether this version has the fix for device nodes in images. One that does not tell its date is not trusted to.
pub fn is_safe_with_devices(version: &str) -> bool {
    date(version).is_some_and(|date| date >= SAFE_DEVICES)
}

/// Year, month and day as one number.
fn date(version: &str) -> Option<u32> {
    let digits = version.split(|c: char| !c.is_ascii_digit());
    digits.filter(|part| part.len() == 8).find_map(|part| part.parse().ok())
}

fn places() -> Vec<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    let tools = cache.or(home).map(|cache| cache.join("exuvia/tools"));
    std::env::split_paths(&path)
        .chain(tools)
        .filter(|dir| dir.is_absolute())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_is_known_by_its_date() {
        let dates = [
            "release-20240729.0",
            "0.0~20240729.0",
            "release-20260928.1-3-gabc",
            "VERSION_MISSING",
        ]
        .map(date);
        assert_eq!(dates, [Some(20_240_729), Some(20_240_729), Some(20_260_928), None]);
        assert_eq!(
            ["0.0~20240729.0", "release-20261001.0", "?"].map(is_safe_with_devices),
            [false, true, false]
        );
    }

    #[test]
    fn what_is_no_runsc_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("runsc");
        let write = |text: &str, mode: u32| {
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            Runsc::at(&path)
                .and_then(|runsc| runsc.version())
                .map_err(|why| why.rsplit(": ").next().unwrap().to_owned())
        };
        assert_eq!(write("#!/bin/sh\necho runsc version x", 0o755), Ok("x".to_owned()));
        assert_eq!(
            write("#!/bin/sh\necho runsc version 0.0~20221219.0", 0o755),
            Err("0.0~20221219.0 is too old, before 29 July 2024".to_owned())
        );
        assert_eq!(
            write("#!/bin/sh\necho hello", 0o755),
            Err("it does not tell its version".to_owned())
        );
        assert_eq!(
            write("#!/bin/sh\necho runsc version x", 0o777),
            Err("others could have written it".to_owned())
        );
    }
}
