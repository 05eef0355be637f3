//! `exuvia replay`: recorded runs on today's machine. Reads the data directory, or exported files; writes nothing.

use std::path::Path;
use std::sync::Arc;

use serde_json::{Value, json};

use super::{Context, Error, Exit, remote, task};
use crate::api::proto::task_service_client::TaskServiceClient;
use crate::clock::System;
use crate::error::Kind;
use crate::ids::{RunId, TaskId};
use crate::run::recording::Recording;
use crate::run::replay::{Divergence, replay};
use crate::store::sqlite::Sqlite;
use crate::store::{Query, RunRecord, Store};

/// Runs that are listed at a time.
const PAGE: usize = 500;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Runs or tasks by id, or exported files (names with a `/` or ending in `.jsonl`).
    #[arg(required_unless_present = "all", value_name = "RUN|FILE")]
    runs: Vec<String>,
    /// Every run of the data directory.
    #[arg(long)]
    all: bool,
    /// Do it again for real from this revision, as a new run of the server, with new authorisation.
    #[arg(long, value_name = "REVISION", conflicts_with = "all")]
    live_from: Option<u64>,
    /// With --live-from: take the policy as it is now, although it has changed.
    #[arg(long = "accept", value_name = "WHAT", value_parser = ["policy"], requires = "live_from")]
    accept: Vec<String>,
    /// With --live-from: the server.
    #[arg(long, env = "EXUVIA_SERVER", default_value = remote::DEFAULT, value_name = "URL")]
    server: String,
}

pub async fn run(args: Args, context: &Context) -> Result<Exit, Error> {
    if let Some(revision) = args.live_from {
        let [run] = args.runs.as_slice() else {
            return Err(Error::new(Kind::Invalid, "--live-from takes one run".to_owned()));
        };
        let client: TaskServiceClient<_> = remote::connect(&args.server).await?;
        return task::fork::fork(client, task::fork::Args::at(run, revision, args.accept), context).await;
    }
    let mut tally = Tally::default();
    let is_file = |name: &&String| name.contains('/') || name.ends_with(".jsonl");
    for file in args.runs.iter().filter(is_file) {
        tally.tell(file, read(Path::new(file)), context);
    }
    let ids: Vec<&String> = args.runs.iter().filter(|name| !is_file(name)).collect();
    if args.all || !ids.is_empty() {
        let store = Sqlite::read_only(&context.data_dir, Arc::new(System)).map_err(|error| of(&error.into()))?;
        let mut records = Vec::new();
        for id in ids {
            records.push(find(&store, id).await?);
        }
        if args.all {
            records = all(&store).await?;
        }
        for record in &records {
            let recording = Recording::of(&store, record).await.map_err(|error| of(&error));
            tally.tell(record.run.as_str(), recording, context);
        }
    }
    let Tally { same, diverged, failed } = tally;
    context.finish(
        &json!({ "same": same, "diverged": diverged, "failed": failed }),
        &format!("{same} the same, {diverged} diverged, {failed} could not be replayed"),
    );
    Ok(match diverged + failed {
        0 => Exit::Ok,
        _ => Exit::Failed,
    })
}

#[derive(Debug, Default)]
struct Tally {
    same: u64,
    diverged: u64,
    failed: u64,
}

impl Tally {
    /// Replays one run and says how it went, one line a run.
    fn tell(&mut self, name: &str, recording: Result<Recording, Error>, context: &Context) {
        let replayed = recording.and_then(|recording| {
            let found = replay(&recording).map_err(|error| of(&error))?;
            Ok((recording.entries.len(), found))
        });
        let (object, text) = match replayed {
            Ok((entries, None)) => {
                self.same += 1;
                let object = json!({ "run": name, "result": "same", "entries": entries });
                (object, format!("{name}: the same, {entries} entries"))
            }
            Ok((_, Some(found))) => {
                self.diverged += 1;
                let text = diverged(name, &found);
                (json!({ "run": name, "result": "diverged", "divergence": found }), text)
            }
            Err(error) => {
                self.failed += 1;
                let object = json!({ "run": name, "result": "failed", "error": error.message });
                (object, format!("{name}: {}", error.message))
            }
        };
        match context.json {
            true => out!("{object}"),
            false => out!("{}", super::report::clean(&text)),
        }
    }
}

fn diverged(name: &str, found: &Divergence) -> String {
    let short = |value: &Value| {
        let text = value.to_string();
        let end = text.floor_char_boundary(400);
        match end < text.len() {
            true => format!("{}…", &text[..end]),
            false => text,
        }
    };
    let place = if found.at.is_empty() { "the entry" } else { &found.at };
    format!(
        "{name}: diverged at entry {} ({}), {place}\n  expected {}\n  got      {}",
        found.seq,
        found.event,
        short(&found.expected),
        short(&found.got)
    )
}

fn read(file: &Path) -> Result<Recording, Error> {
    let text =
        std::fs::read_to_string(file).map_err(|error| Error::new(Kind::Invalid, format!("cannot read it: {error}")))?;
    Recording::parse(&text).map_err(|error| of(&error.into()))
}

async fn find(store: &dyn Store, id: &str) -> Result<RunRecord, Error> {
    let found = match (id.parse::<RunId>(), id.parse::<TaskId>()) {
        (Ok(run), _) => store.run(&run).await,
        (Err(_), Ok(task)) => store.run_of_task(&task).await,
        (Err(_), Err(_)) => {
            let message = format!("`{}` is neither a run id, a task id nor a file", crate::ids::shown(id));
            return Err(Error::new(Kind::Invalid, message));
        }
    };
    found.map_err(|error| of(&error.into()))
}

/// Every run, newest first.
async fn all(store: &dyn Store) -> Result<Vec<RunRecord>, Error> {
    let mut records: Vec<RunRecord> = Vec::new();
    loop {
        let query = Query {
            after: records.last().map(|last| (last.created_at, last.run.clone())),
            limit: PAGE,
            ..Query::default()
        };
        let page = store.list(&query).await.map_err(|error| of(&error.into()))?;
        let is_last = page.len() < PAGE;
        records.extend(page);
        if is_last {
            return Ok(records);
        }
    }
}

fn of(error: &crate::run::Error) -> Error {
    Error::of(error.kind(), error)
}
