//! What dead servers left, and no start of a server would find.

use std::path::{Path, PathBuf};

use super::{Finding, State};
use crate::clock::{Clock, System};
use crate::fleet;
use crate::sandbox::cgroup::Hierarchies;
use crate::sandbox::strays;
use crate::workdir;

const NAME: &str = "strays";
const REMEDY: &str = "exuvia doctor --fix ends them";

/// Lists them; with `fix`, ends them.
pub(super) fn look(fix: bool) -> Finding {
    match found(fix) {
        Ok(left) if left.is_empty() => Finding::new(NAME, State::Ok, "none", REMEDY),
        Ok(left) => Finding::new(NAME, State::Weak, left.join("; "), REMEDY),
        Err(message) => Finding::new(NAME, State::Weak, message, "run as root"),
    }
}

/// What is there, or with `fix` what stays.
fn found(fix: bool) -> Result<Vec<String>, String> {
    let text = |error: &dyn std::error::Error| crate::error::chain(error);
    let hierarchies = Hierarchies::detect().map_err(|error| text(&error))?;
    let mut left = Vec::new();
    for stray in strays::find(&hierarchies, &System).map_err(|error| text(&error))? {
        let of = stray
            .taken
            .as_ref()
            .map_or("unknown".to_owned(), |(_, taken)| taken.data_dir.display().to_string());
        let shown = format!(
            "sandbox `{}` with {} processes, of `{of}`",
            stray.name,
            stray.pids.len()
        );
        match fix.then(|| strays::end(&hierarchies, &stray)) {
            Some(Ok(())) => {}
            Some(Err(error)) => left.push(format!("{shown}: {}", text(&error))),
            None => left.push(shown),
        }
    }
    for data_dir in strays::mounted().map_err(|error| text(&error))? {
        let is_kept = |name: &str| is_leased(&data_dir, name);
        if fix {
            workdir::sweep(&data_dir, is_kept).map_err(|error| text(&error))?;
        } else {
            let behind = workdir::left_behind(&data_dir).map_err(|error| text(&error))?;
            let strange = |dir: &&PathBuf| !is_kept(&dir.file_name().unwrap_or_default().to_string_lossy());
            left.extend(
                behind
                    .iter()
                    .filter(strange)
                    .map(|dir| format!("working directory `{}`", dir.display())),
            );
        }
    }
    Ok(left)
}

/// Whether the next server of that directory goes on with it.
fn is_leased(data_dir: &Path, name: &str) -> bool {
    name.parse()
        .is_ok_and(|id| fleet::is_leased(data_dir, &id, System.now()))
}
