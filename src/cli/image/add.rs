//! `image import`, `pull`, `build`: what brings images in. An interrupt stops the work, and nothing of it stays.

use std::future::Future;
use std::path::Path;

use serde_json::json;

use super::progress::Shown;
use super::{Bounded, Build, Import, Pull, show};
use crate::cli::run::interrupted;
use crate::cli::{Context, Error, Exit};
use crate::clock::{Clock, System};
use crate::error::Kind;
use crate::sandbox::image::registry::{self, Login, Patience};
use crate::sandbox::image::{Bounds, Job, Name, Options, Source, Store, StoreError, Stored, build};

/// Runs it with progress on stderr, until it is done or interrupted.
async fn watched<T>(bounded: &Bounded, work: impl AsyncFnOnce(Job) -> Result<T, StoreError>) -> Result<T, Error> {
    let shown = Shown::new();
    let job = Job::bounded(Bounds {
        bytes: bounded.max_size.as_u64(),
        ..Bounds::default()
    });
    let cancel = job.cancel.clone();
    let told = shown.clone();
    let job = job.watched(move |progress| told.tell(&progress));
    let worked = stopped_by(interrupted(), work(job), || cancel.cancel()).await;
    shown.done();
    Ok(worked?)
}

/// The work's end, which an interrupt brings about early.
async fn stopped_by<T>(interrupt: impl Future<Output = ()>, work: impl Future<Output = T>, stop: impl FnOnce()) -> T {
    tokio::pin!(work);
    tokio::select! {
        done = &mut work => return done,
        () = interrupt => stop(),
    }
    work.await
}

pub(super) async fn import(args: Import, store: &Store, context: &Context) -> Result<Exit, Error> {
    let source: Source = args
        .source
        .parse()
        .map_err(|error: String| Error::new(Kind::Invalid, error))?;
    let name = match args.name {
        Some(name) => name,
        None => name_of(match &source {
            Source::Rootfs(path) | Source::Tar(path) | Source::Layout { path, .. } | Source::Archive { path, .. } => {
                path
            }
        })?,
    };
    let mut options = Options {
        platform: args.platform.unwrap_or_default(),
        ..Options::default()
    };
    if let Some(path) = args.config {
        if !matches!(source, Source::Rootfs(_) | Source::Tar(_)) {
            return Err(Error::new(
                Kind::Invalid,
                "`--config` is for `rootfs:` and `tar:`; others bring their own",
            ));
        }
        let unreadable = |why: String| Error::new(Kind::Invalid, format!("`{}`: {why}", path.display()));
        let bytes = std::fs::read(&path).map_err(|error| unreadable(error.to_string()))?;
        options.config = serde_json::from_slice(&bytes).map_err(|error| unreadable(error.to_string()))?;
    }
    let stored = watched(&args.bounded, async |job| {
        let (store, name) = (store.clone(), name.clone());
        let work = tokio::task::spawn_blocking(move || store.import(&source, &options, &name, System.now(), &job));
        work.await.unwrap_or(Err(StoreError::Cancelled))
    });
    Ok(added(&name, &stored.await?, context))
}

pub(super) async fn pull(args: Pull, store: &Store, context: &Context) -> Result<Exit, Error> {
    let reference = registry::reference(&args.reference)?;
    let name = match args.name {
        Some(name) => name,
        None => registry::default_name(&reference)?,
    };
    let login = match (
        args.docker_config,
        args.username.zip(args.password_from),
        args.token_from,
    ) {
        (Some(path), _, _) => {
            let path = std::path::absolute(&path).map_err(|error| Error::new(Kind::Invalid, error.to_string()))?;
            Login::DockerConfig(path)
        }
        (None, Some((name, password)), _) => Login::Password { name, password },
        (None, None, Some(token)) => Login::Token(token),
        (None, None, None) => Login::Anonymous,
    };
    let options = registry::Options {
        platform: args.platform.unwrap_or_default(),
        login,
        patience: Patience {
            total: args.timeout,
            ..Patience::default()
        },
        plain_http: args.plain_http,
        authorities: args.registry_ca,
    };
    let stored = watched(&args.bounded, async |job| {
        registry::pull(store, &reference, &options, &name, System.now(), &job).await
    });
    Ok(added(&name, &stored.await?, context))
}

pub(super) async fn build(args: Build, store: &Store, context: &Context) -> Result<Exit, Error> {
    let folder = std::fs::canonicalize(&args.folder)
        .map_err(|error| Error::new(Kind::Invalid, format!("`{}`: {error}", args.folder.display())))?;
    let name = match args.name {
        Some(name) => name,
        None => name_of(&folder)?,
    };
    let plan = build::Plan {
        folder,
        with: args.with,
        packages: args.packages,
    };
    let stored = watched(&args.bounded, async |job| {
        build::build(store, &plan, &name, System.now(), &job).await
    });
    Ok(added(&name, &stored.await?, context))
}

/// The name of a file without what tells its format.
fn name_of(path: &Path) -> Result<Name, Error> {
    let path = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let full = path
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .to_ascii_lowercase();
    let mut stem = full.as_str();
    for end in [".zst", ".gz", ".xz", ".tgz", ".tar", ".oci"] {
        stem = stem.strip_suffix(end).unwrap_or(stem);
    }
    let named: Result<Name, StoreError> = stem.parse();
    named.map_err(|error| Error::of(Kind::Invalid, &error).hint("give it one with `--name`"))
}

fn added(name: &Name, stored: &Stored, context: &Context) -> Exit {
    let text = format!("{name}  {}  {}", stored.digest, show::size(stored.bytes));
    context.finish(&json!({ "name": name, "image": stored }), &text);
    Exit::Ok
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_give_their_images_names() {
        for (path, name) in [
            ("/x/python", "python"),
            ("/x/App.tar.zst", "app"),
            ("/x/app-1.2.tgz", "app-1.2"),
            ("/x/rootfs.tar", "rootfs"),
        ] {
            let expected = if name == "rootfs" { None } else { Some(name) };
            let named = name_of(Path::new(path)).ok().map(|name| name.to_string());
            assert_eq!(named.as_deref(), expected);
        }
    }

    #[tokio::test]
    async fn an_interrupt_stops_the_work_and_waits_for_its_end() {
        let cancel = Job::default().cancel;
        let stop = cancel.clone();
        let ended = stopped_by(async {}, async { cancel.cancelled().await }, || stop.cancel());
        ended.await;
        let undisturbed = stopped_by(std::future::pending(), async { 5 }, || panic!("nobody interrupted"));
        assert_eq!(undisturbed.await, 5);
    }
}
