//! `exuvia workspace`: look after the store of workspaces.

mod named;

use std::sync::Arc;
use std::time::Duration;

use clap::{Args as Arguments, Subcommand};
use serde_json::json;

use self::named::{Name, Named};
use super::{Context, Error, Exit};
use crate::clock;
use crate::error::Kind;
use crate::store::sqlite::Sqlite;
use crate::workspace::{self, Collected, Examined, Sweep, Trees};

/// Look after the store of workspaces and artifacts.
#[derive(Debug, Arguments)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Remove what no run, sandbox snapshot or artifact needs. A server may go on meanwhile.
    Gc(Gc),
    /// Read everything back, and tell what is missing or damaged and which runs that hurts (exit code 1).
    Fsck,
}

#[derive(Debug, Arguments)]
struct Gc {
    /// Keep what was written or used later than so long ago, needed or not; at least 10m
    #[arg(long, value_name = "TIME", default_value = "1d", value_parser = grace)]
    grace: Duration,
    /// Only tell what would be removed.
    #[arg(long)]
    dry_run: bool,
}

/// What a writer may take from the end of its batch to the transaction that names it, with much room.
const LEAST: Duration = Duration::from_secs(600);

fn grace(text: &str) -> Result<Duration, String> {
    let grace = super::duration(text)?;
    match grace < LEAST {
        true => Err("runs that are at work need at least 10m".to_owned()),
        false => Ok(grace),
    }
}

pub async fn run(args: Args, context: &Context) -> Result<Exit, Error> {
    if !Sqlite::exists(&context.data_dir) {
        let message = format!("no data in `{}`", context.data_dir.display());
        return Err(Error::new(Kind::NotFound, message).hint("--data-dir DIR, or EXUVIA_DATA_DIR"));
    }
    let store = Sqlite::open(&context.data_dir, Arc::new(clock::System))?;
    let named = named::find(&store, &context.data_dir).await?;
    let trees = Trees::open(&context.data_dir)?;
    match args.command {
        Command::Gc(args) => collect(args, trees, named, context).await,
        Command::Fsck => examine(trees, named, context).await,
    }
}

async fn collect(args: Gc, trees: Trees, named: Named, context: &Context) -> Result<Exit, Error> {
    let sweep = match args.dry_run {
        true => Sweep::OnlyTell,
        false => Sweep::Remove,
    };
    let collected = blocking(move || {
        let revisions: Vec<_> = named.revisions.into_iter().map(|(_, revision)| revision).collect();
        let mut addresses: Vec<_> = named.addresses.into_iter().collect();
        // With their times where they are whole; a tree that is named elsewhere may be long gone.
        let mut all = revisions;
        for revision in named.elsewhere {
            match trees.is_whole(revision) {
                true => all.push(revision),
                false => addresses.push(revision.tree.blob()),
            }
        }
        trees.collect(&all, &addresses, args.grace, sweep)
    })
    .await
    .map_err(|error| match error {
        workspace::Error::Missing(_) | workspace::Error::Damaged { .. } => Error::of(error.kind(), &error)
            .hint("nothing was removed; `exuvia workspace fsck` tells which runs it hurts"),
        other => other.into(),
    })?;
    let Collected {
        needed,
        removed,
        removed_bytes,
        young,
        repacked,
    } = collected;
    let object = json!({
        "needed": needed, "removed": removed, "removed_bytes": removed_bytes, "young": young,
        "repacked": repacked, "dry_run": args.dry_run,
    });
    let would = if args.dry_run { "would remove" } else { "removed" };
    let size = bytesize::ByteSize(removed_bytes);
    let text = format!(
        "{would} {removed} blobs ({size}); {needed} are needed, {young} are younger than {}",
        humantime::format_duration(args.grace)
    );
    context.finish(&object, &text);
    Ok(Exit::Ok)
}

async fn examine(trees: Trees, named: Named, context: &Context) -> Result<Exit, Error> {
    let examined = blocking(move || trees.examine(named.revisions, Vec::new())).await?;
    let Examined {
        blobs,
        bytes,
        damaged,
        hurt,
    } = &examined;
    let is_sound = damaged.is_empty() && hurt.is_empty();
    let mut text = String::new();
    for (blob, reason) in damaged {
        text.push_str(&format!("damaged  {blob}  {reason}\n"));
    }
    for hurt in hurt {
        let Name { run, revision, is_live } = &hurt.name;
        let live = if *is_live { ", which has not ended" } else { "" };
        text.push_str(&format!("hurt     {run} at revision {revision}{live}\n"));
        for fault in &hurt.faults {
            let path = if fault.path.is_empty() { "(root)" } else { &fault.path };
            text.push_str(&format!("         {path}: {} {}\n", fault.blob, fault.reason));
        }
    }
    text.push_str(&format!("{blobs} blobs read ({})", bytesize::ByteSize(*bytes)));
    text.push_str(if is_sound { ": all sound" } else { "" });
    let hurt: Vec<_> = hurt.iter().map(hurt_object).collect();
    let damaged: Vec<_> = damaged
        .iter()
        .map(|(blob, reason)| json!({ "blob": blob, "reason": reason }))
        .collect();
    let object = json!({ "blobs": blobs, "bytes": bytes, "damaged": damaged, "hurt": hurt });
    context.finish(&object, &text);
    Ok(if is_sound { Exit::Ok } else { Exit::Failed })
}

fn hurt_object(hurt: &workspace::Hurt<Name>) -> serde_json::Value {
    let fault = |fault: &workspace::Fault| json!({ "blob": fault.blob, "path": fault.path, "reason": fault.reason });
    json!({
        "run": hurt.name.run, "revision": hurt.name.revision, "live": hurt.name.is_live,
        "faults": hurt.faults.iter().map(fault).collect::<Vec<_>>(),
    })
}

async fn blocking<T: Send + 'static>(
    job: impl FnOnce() -> Result<T, workspace::Error> + Send + 'static,
) -> Result<T, workspace::Error> {
    match tokio::task::spawn_blocking(job).await {
        Ok(result) => result,
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use clap::Parser;

    use super::*;
    use crate::store::Store;
    use crate::store::suite::sample;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    async fn call(context: &Context, line: &[&str]) -> Result<Exit, Error> {
        let line = Line::try_parse_from(["workspace"].iter().chain(line)).unwrap();
        run(line.args, context).await
    }

    /// All files of the store that hold something.
    fn files(dir: &std::path::Path) -> Vec<PathBuf> {
        let mut found = Vec::new();
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => found.extend(files(&path)),
                false => found.push(path),
            }
        }
        found.retain(|path| path.extension().is_none_or(|extension| extension != "lock"));
        found.retain(|path| path.file_name().is_some_and(|name| name != "lock"));
        found
    }

    #[tokio::test]
    async fn a_runs_workspace_survives_gc_and_fsck_tells_what_hurts_it() {
        let dir = tempfile::tempdir().unwrap();
        let context = Context {
            json: false,
            data_dir: dir.path().join("data"),
        };
        let refused = call(&context, &["gc"]).await.unwrap_err();
        assert_eq!((refused.kind, context.data_dir.exists()), (Kind::NotFound, false));
        assert!(Line::try_parse_from(["workspace", "gc", "--grace", "9m"]).is_err());

        fs::create_dir(&context.data_dir).unwrap();
        let trees = Trees::open(&context.data_dir).unwrap();
        let source = dir.path().join("source");
        fs::create_dir(&source).unwrap();
        fs::write(source.join("file"), "of the run").unwrap();
        let revision = trees.import(&source, workspace::Limits::default()).unwrap().revision;
        let artifact = trees.put_artifact(b"named in the audit chain").unwrap();
        let lost = trees.put_artifact(b"named nowhere").unwrap();
        let store = Sqlite::open(&context.data_dir, Arc::new(clock::System)).unwrap();
        let mut task = sample::task(1);
        task.checkpoint.tree = revision.tree;
        task.checkpoint.state = json!({ "workspace": revision });
        task.audit[0].details = json!({ "said": format!("kept as {artifact}.") });
        store.create(task).await.unwrap();

        assert_eq!(call(&context, &["fsck"]).await.unwrap(), Exit::Ok);
        for path in files(&context.data_dir.join("blobs")) {
            let old = std::time::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
            fs::File::open(path).unwrap().set_modified(old).unwrap();
        }
        assert_eq!(call(&context, &["gc", "--dry-run"]).await.unwrap(), Exit::Ok);
        assert!(trees.blobs().contains(lost).unwrap());
        assert_eq!(call(&context, &["gc"]).await.unwrap(), Exit::Ok);
        assert!(!Trees::open(&context.data_dir).unwrap().blobs().contains(lost).unwrap());
        assert!(trees.blobs().contains(artifact).unwrap());
        trees.materialise(revision, &dir.path().join("copy"), None).unwrap();
        assert_eq!(call(&context, &["fsck"]).await.unwrap(), Exit::Ok);

        for path in files(&context.data_dir.join("blobs")) {
            let mut bytes = fs::read(&path).unwrap();
            let at = bytes.windows(10).position(|window| window == b"of the run");
            if let Some(at) = at {
                bytes[at] ^= 1;
                fs::write(&path, bytes).unwrap();
            }
        }
        assert_eq!(call(&context, &["fsck"]).await.unwrap(), Exit::Failed);
        let named = named::find(&store, &context.data_dir).await.unwrap();
        let examined = trees.examine(named.revisions, Vec::new()).unwrap();
        let [hurt] = examined.hurt.as_slice() else {
            panic!("{examined:?}");
        };
        assert_eq!((hurt.name.revision, hurt.name.is_live), (0, true));
        assert_eq!(hurt.faults[0].path, "file");
    }
}
