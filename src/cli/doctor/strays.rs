//! What dead servers left on this host. Where a data directory is gone nothing else would find it. Where it is still there the next
//! server on it would: so only that of this data directory is ended here, and of others it is told.

use std::path::Path;

use super::{Finding, State};
use crate::clock::{Clock, System};
use crate::error::chain;
use crate::fleet;
use crate::sandbox::backend::{Backends, docker};
use crate::sandbox::cgroup::Hierarchies;
use crate::sandbox::image::Store;
use crate::sandbox::strays::{self, Place};
use crate::sandbox::{BackendName, identity, reconcile};
use crate::workdir;
use crate::workspace::overlay::Bases;

const NAME: &str = "strays";
const REMEDY: &str = "exuvia doctor --fix ends them";

/// Lists them; with `fix`, ends them.
pub(super) async fn look(data_dir: &Path, fix: bool) -> Finding {
    match found(data_dir, fix).await {
        Ok(left) if left.is_empty() => Finding::new(NAME, State::Ok, "none", REMEDY),
        Ok(left) => Finding::new(NAME, State::Weak, left.join("; "), REMEDY),
        Err(message) => Finding::new(NAME, State::Weak, message, "run as root"),
    }
}

/// What is there, or with `fix` what stays.
async fn found(data_dir: &Path, fix: bool) -> Result<Vec<String>, String> {
    let hierarchies = Hierarchies::detect().map_err(|error| chain(&error))?;
    let mut left = Vec::new();
    for place in strays::places(data_dir, &hierarchies).map_err(|error| chain(&error))? {
        let is_ours = place.is_ruin() || place.is(data_dir);
        match fix && is_ours {
            true => left.extend(clear(&place).await),
            false => left.extend(left_behind(&place, is_ours)?),
        }
    }
    for stray in strays::find(&hierarchies, &System).map_err(|error| chain(&error))? {
        let of = stray
            .taken
            .as_ref()
            .map_or("unknown".to_owned(), |(_, taken)| taken.data_dir.display().to_string());
        let shown = format!(
            "sandbox `{}` with {} processes, of `{of}`",
            stray.name,
            stray.pids.len()
        );
        let ended = fix.then(|| strays::end(&hierarchies, &stray));
        left.extend(told(shown, ended));
    }
    containers(fix, &mut left).await?;
    left.extend(images(data_dir, fix)?);
    if fix {
        identity::sweep();
    }
    Ok(left)
}

/// What is told of one thing that was found, and perhaps ended.
fn told<E: std::error::Error>(shown: String, ended: Option<Result<(), E>>) -> Option<String> {
    match ended {
        Some(Ok(())) => None,
        Some(Err(error)) => Some(format!("{shown}: {}", chain(&error))),
        None => Some(shown),
    }
}

/// What dead servers left in a data directory that is there, but for what the next one goes on with.
fn left_behind(place: &Place, is_ours: bool) -> Result<Vec<String>, String> {
    let dir = place.path();
    let remedy = match is_ours {
        true => String::new(),
        false => format!(
            " (its next server ends that, or `exuvia doctor --fix --data-dir {}`)",
            dir.display()
        ),
    };
    let sandboxes = [BackendName::Oci, BackendName::Docker].map(|backend| place.left_behind(backend));
    let sandboxes = sandboxes
        .into_iter()
        .flatten()
        .filter(|id| !is_leased(dir, id.as_str()));
    let behind = workdir::left_behind(dir).map_err(|error| chain(&error))?;
    let behind = behind
        .iter()
        .filter(|dir_of_one| !is_leased(dir, &dir_of_one.file_name().unwrap_or_default().to_string_lossy()));
    let bases = Bases::new(dir).left_behind().map_err(|error| chain(&error))?;
    let bases = bases.iter();
    Ok(sandboxes
        .map(|id| format!("sandbox `{id}`, of `{}`{remedy}", dir.display()))
        .chain(behind.map(|dir| format!("working directory `{}`{remedy}", dir.display())))
        .chain(bases.map(|dir| format!("unfinished base `{}`{remedy}", dir.display())))
        .collect())
}

/// Ends that, as the start of a server would; gives what stays.
async fn clear(place: &Place) -> Vec<String> {
    let dir = place.path();
    let is_kept = |name: &str| is_leased(dir, name);
    let backends = Backends::new(dir);
    let mut failed = Vec::new();
    for name in [BackendName::Oci, BackendName::Docker] {
        if place.left_behind(name).is_empty() {
            continue;
        }
        let reaped = async { reconcile::reap(backends.get(name).await?.as_ref(), |id| is_kept(id.as_str())).await };
        if let Err(error) = reaped.await {
            failed.push(format!("sandboxes of `{}`: {}", dir.display(), chain(&error)));
        }
    }
    if let Err(error) = workdir::sweep(dir, is_kept) {
        failed.push(format!("working directories of `{}`: {}", dir.display(), chain(&error)));
    }
    if let Err(error) = Bases::new(dir).sweep() {
        failed.push(format!("unfinished bases of `{}`: {}", dir.display(), chain(&error)));
    }
    failed
}

/// Unfinished images of this data directory that nobody is at.
fn images(data_dir: &Path, fix: bool) -> Result<Vec<String>, String> {
    if !data_dir.join("images").is_dir() {
        return Ok(Vec::new());
    }
    let swept = Store::open(data_dir).and_then(|store| {
        if fix {
            store.sweep()?;
        }
        store.left_behind()
    });
    let left = swept.map_err(|error| chain(&error))?;
    Ok(left
        .iter()
        .map(|dir| format!("unfinished image `{}`", dir.display()))
        .collect())
}

/// Containers of an engine: those that no data directory above has told of.
async fn containers(fix: bool, left: &mut Vec<String>) -> Result<(), String> {
    let Some(engine) = docker::Strays::open().await else {
        return Ok(());
    };
    for stray in engine.find().await.map_err(|failure| failure.to_string())? {
        let is_told = left.iter().any(|told| told.contains(stray.id.as_str()));
        if is_told || is_leased(&stray.data_dir, stray.id.as_str()) {
            continue;
        }
        let shown = format!("container of sandbox `{}`, of `{}`", stray.id, stray.data_dir.display());
        let is_gone = !stray.data_dir.join("sandboxes").join(stray.id.as_str()).exists();
        let ended = match fix && is_gone {
            true => Some(engine.end(&stray).await),
            false => None,
        };
        if matches!(ended, Some(Ok(())))
            && let Some(taken) = identity::claims().get(&stray.identity.base)
            && taken.data_dir == stray.data_dir
        {
            identity::forget(stray.identity, taken);
        }
        left.extend(told(shown, ended));
    }
    Ok(())
}

/// Whether the next server of that directory goes on with it.
fn is_leased(data_dir: &Path, name: &str) -> bool {
    name.parse()
        .is_ok_and(|id| fleet::is_leased(data_dir, &id, System.now()))
}
