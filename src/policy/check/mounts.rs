//! Mounts: which host paths may go where.

use super::super::input::MountInput;
use super::super::rules::{directory, is_within};
use super::Checker;
use crate::sandbox::Mount;

/// Host paths that no sandbox gets, nor anything below them: kernel interfaces, and where engines keep their sockets.
const NEVER_SOURCES: &[&str] = &["/proc", "/sys", "/dev", "/run", "/var/run"];
/// What the sandbox puts there itself.
const NEVER_TARGETS: &[&str] = &crate::sandbox::RESERVED;

impl Checker<'_> {
    /// By target. With a parent: its mounts, or some of them.
    pub(super) fn mounts(&mut self, written: Option<&[MountInput]>) -> Vec<Mount> {
        let Some(written) = written else {
            return self.parent.map(|parent| parent.mounts.clone()).unwrap_or_default();
        };
        let mut mounts: Vec<Mount> = Vec::new();
        for (n, mount) in written.iter().enumerate() {
            let source = self.place(&format!("/mounts/{n}/source"), mount.source.as_deref(), NEVER_SOURCES);
            let target = self.place(&format!("/mounts/{n}/target"), mount.target.as_deref(), NEVER_TARGETS);
            let (Some(source), Some(target)) = (source, target) else {
                continue;
            };
            if mounts.iter().any(|other| other.target.as_os_str() == target.as_str()) {
                self.problem(
                    &format!("/mounts/{n}/target"),
                    format!("`{target}` is the target of two mounts"),
                );
            }
            let mount = Mount {
                source: source.into(),
                target: target.into(),
            };
            if let Some(parent) = self.parent.filter(|parent| !parent.mounts.contains(&mount)) {
                let shown = |mount: &Mount| format!("{} at {}", mount.source.display(), mount.target.display());
                let given: Vec<String> = parent.mounts.iter().map(shown).collect();
                let given = if given.is_empty() {
                    "none".to_owned()
                } else {
                    given.join(", ")
                };
                let message = format!(
                    "`{}` is not among the mounts of policy `{}`: {given}",
                    shown(&mount),
                    parent.name
                );
                self.problem(&format!("/mounts/{n}"), message);
            }
            mounts.push(mount);
        }
        mounts.sort_by(|a, b| a.target.cmp(&b.target));
        mounts
    }

    fn place(&mut self, pointer: &str, text: Option<&str>, never: &[&str]) -> Option<String> {
        let message = match directory(text?) {
            Ok(path) if path == "/" => "`/` cannot be used: name what is needed".to_owned(),
            Ok(path) => match never.iter().find(|root| is_within(&path, root)) {
                Some(root) => format!("`{path}` cannot be used: nothing within `{root}` can"),
                None => return Some(path),
            },
            Err(message) => message,
        };
        self.problem(pointer, message);
        None
    }
}
