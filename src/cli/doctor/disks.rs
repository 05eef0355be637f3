//! What can hold a workspace to its size here.

use std::path::Path;

use super::{Finding, State};
use crate::sandbox::Limits;
use crate::sandbox::disk::{Kind, Volumes};
use crate::workspace::overlay::Bases;

/// Really makes a volume within the default limits, and removes it.
pub(super) fn quota(data_dir: &Path) -> Finding {
    const NAME: &str = "disk quota";
    let remedy = "run as root, with loop devices and `mke2fs` (modprobe loop; package e2fsprogs); then this message";
    match try_one(data_dir) {
        Ok(Kind::Tmpfs) => Finding::new(
            NAME,
            State::Weak,
            "`tmpfs`: what is written counts as memory",
            "modprobe loop and install e2fsprogs, or mount the data directory's file system with `prjquota`",
        ),
        Ok(kind) => Finding::new(NAME, State::Ok, format!("`{kind}`"), remedy),
        Err(message) => Finding::new(NAME, State::Missing, message, remedy),
    }
}

fn try_one(data_dir: &Path) -> Result<Kind, String> {
    let (volumes, limits) = (Volumes::new(data_dir), Limits::default());
    let text = |error: &dyn std::error::Error| crate::error::chain(error);
    let kind = volumes.choose(&limits).map_err(|error| text(&error))?;
    std::fs::create_dir_all(data_dir).map_err(|error| text(&error))?;
    let dir = tempfile::Builder::new()
        .prefix(".doctor-")
        .tempdir_in(data_dir)
        .map_err(|error| text(&error))?;
    let made = volumes.make(dir.path(), &limits, 65534);
    crate::sandbox::disk::clear(dir.path()).map_err(|error| text(&error))?;
    made.map(|_| kind).map_err(|error| text(&error))
}

/// Really lays a directory over a base, and removes it.
pub(super) fn overlays(data_dir: &Path) -> Finding {
    const NAME: &str = "workspaces over bases";
    if let Err(error) = std::fs::create_dir_all(data_dir) {
        return Finding::new(
            NAME,
            State::Weak,
            error.to_string(),
            "see that the data directory can be made",
        );
    }
    match Bases::new(data_dir).support() {
        Ok(()) => Finding::new(NAME, State::Ok, "overlays over idmapped bases", ""),
        Err(lack) => Finding::new(
            NAME,
            State::Weak,
            format!("not here ({lack}): workspaces are plain directories, written out and walked as a whole"),
            "run as root on Linux 5.19 or later, with overlayfs, the data directory on ext4, xfs or btrfs",
        ),
    }
}

/// Each kind that a policy may demand with `disk_kind`.
pub(super) fn kinds(data_dir: &Path) -> Vec<Finding> {
    let kinds = Volumes::new(data_dir).kinds();
    let finding = |(kind, lack): (Kind, Result<(), String>)| {
        let (name, remedy) = match kind {
            Kind::Project => (
                "disk kind `project`",
                "mount the data directory's file system (ext4 with `tune2fs -O project,quota`, or xfs) with `prjquota`",
            ),
            Kind::Image => ("disk kind `image`", "modprobe loop; install e2fsprogs"),
            Kind::Tmpfs => ("disk kind `tmpfs`", "run as root"),
        };
        match lack {
            Ok(()) => Finding::new(name, State::Ok, "can be had", ""),
            Err(lack) => Finding::new(name, State::Absent, lack, remedy),
        }
    };
    kinds.map(finding).into()
}
