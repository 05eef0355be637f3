//! How fast a group reads and writes a disk: `io.max` of version 2. Nothing of version 1 holds what is written through the page
//! cache, so there it cannot be had.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::sys::stat::{major, minor};

use super::file::{read, write};
use super::{Controller, Error, Group, Version};
use crate::sandbox::disk::Rates;

impl Group {
    /// Holds the group to `rates` on the disk that `place` lies on, and reads that back. Memory is no disk.
    ///
    /// # Errors
    /// [`Error::NoRates`] where this host cannot.
    pub fn limit_rates(&self, rates: Rates, place: &Path) -> Result<(), Error> {
        if rates.is_unlimited() {
            return Ok(());
        }
        if self.version() == Version::V1 {
            let what = "control groups of version 1 do not hold what is written through the page cache";
            return Err(Error::NoRates(what.to_owned()));
        }
        let Some(disk) = disk_of(place)? else { return Ok(()) };
        self.hand_down_io()?;
        let file = self.file(Controller::Io, "io.max");
        let wanted = line(&disk, rates);
        write(&file, &wanted)?;
        let found = read(&file)?;
        match found.lines().any(|found| found == wanted) {
            true => Ok(()),
            false => Err(Error::NotTaken {
                path: file,
                wanted,
                found: found.trim().to_owned(),
            }),
        }
    }

    /// The controller that nothing else needs, from the top to this group.
    fn hand_down_io(&self) -> Result<(), Error> {
        let home = self.file(Controller::Io, "");
        let above: Vec<&Path> = home.ancestors().skip(1).take(2).collect();
        for dir in above.into_iter().rev() {
            let there = read(&dir.join("cgroup.controllers"))?;
            if !there.split_whitespace().any(|name| name == "io") {
                let what = format!("the control group `{}` has no `io`", dir.display());
                return Err(Error::NoRates(what));
            }
            write(&dir.join("cgroup.subtree_control"), "+io")?;
        }
        Ok(())
    }
}

/// As the kernel writes it. Documentation/admin-guide/cgroup-v2.rst, "IO Interface Files".
fn line(disk: &str, rates: Rates) -> String {
    let rate = |rate: Option<u64>| rate.map_or("max".to_owned(), |rate| rate.to_string());
    format!(
        "{disk} rbps={} wbps={} riops=max wiops=max",
        rate(rates.read),
        rate(rates.write)
    )
}

/// The whole disk that holds a directory, as `MAJOR:MINOR`; `None` for memory.
fn disk_of(place: &Path) -> Result<Option<String>, Error> {
    let found = fs::metadata(place).map_err(|source| Error::file(place, source))?;
    let number = format!("{}:{}", major(found.dev()), minor(found.dev()));
    let device = PathBuf::from(format!("/sys/dev/block/{number}"));
    if !device.exists() {
        let kind = nix::sys::statfs::statfs(place).map_err(|errno| Error::file(place, errno.into()))?;
        return match kind.filesystem_type() {
            nix::sys::statfs::TMPFS_MAGIC => Ok(None),
            _ => Err(Error::NoRates(format!("`{}` lies on no one disk", place.display()))),
        };
    }
    // Of a part of a disk only the whole can be held.
    let whole = match device.join("partition").exists() {
        true => read(&device.join("../dev"))?.trim().to_owned(),
        false => number,
    };
    Ok(Some(whole))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_written_as_the_kernel_tells_them() {
        let some = Rates {
            read: Some(1 << 20),
            write: None,
        };
        assert_eq!(line("7:3", some), "7:3 rbps=1048576 wbps=max riops=max wiops=max");
        assert_eq!(disk_of(Path::new("/dev/shm")).unwrap(), None);
        assert!(matches!(disk_of(Path::new("/proc")), Err(Error::NoRates(_))));
    }
}
