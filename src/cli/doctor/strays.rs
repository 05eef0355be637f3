//! What dead servers left, and no start of a server would find.

use super::{Finding, State};
use crate::clock::System;
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
        let behind = workdir::left_behind(&data_dir).map_err(|error| text(&error))?;
        if fix {
            workdir::sweep(&data_dir).map_err(|error| text(&error))?;
        } else {
            left.extend(
                behind
                    .iter()
                    .map(|dir| format!("working directory `{}`", dir.display())),
            );
        }
    }
    Ok(left)
}
