//! `exuvia audit`: verify the audit log, query it, print its newest signed head.
//!
//! All three only read, work on the data directory beside a running server, and make nothing where there is nothing.

pub(super) mod network;

use std::fmt::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args as Arguments, Subcommand};
use serde_json::json;

use super::{Context, Error, Exit};
use crate::audit::files::Files;
use crate::audit::head::PublicKey;
use crate::audit::query::{self, Filter};
use crate::audit::verify::{self, Broken, Input, Report};
use crate::audit::{self, Link, Sealed};
use crate::clock::{self, Clock, Timestamp};
use crate::error::Kind;
use crate::store::Store;
use crate::store::sqlite::Sqlite;

/// Look at the audit log.
#[derive(Debug, Arguments)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Check that nothing was edited, deleted, reordered or cut off; names the first broken entry (exit code 1).
    Verify(Verify),
    /// Find entries, the newest ones, oldest first.
    Query(Query),
    /// Show what a run or a sandbox did at its border: each decision, and what was used in all.
    Network(network::Network),
    /// Print the newest signed head: keep it somewhere else, and `verify --head` can later prove a cut tail.
    Head,
}

#[derive(Debug, Arguments)]
struct Verify {
    /// Check this copy of the log alone, without a store.
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// The signed heads to check against [default: those of the data directory]
    #[arg(long, value_name = "FILE")]
    heads: Option<PathBuf>,
    /// The public key that the heads are signed with [default: that of the data directory]
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
    /// A head that was kept elsewhere, as `audit head` prints it; may be given more than once
    #[arg(long, value_name = "COUNT:HASH")]
    head: Vec<Link>,
}

#[derive(Debug, Arguments)]
struct Query {
    #[arg(long)]
    run: Option<String>,
    #[arg(long)]
    task: Option<String>,
    #[arg(long)]
    sandbox: Option<String>,
    /// How the action begins: `exec`, `policy.decided`
    #[arg(long, value_name = "PREFIX")]
    action: Option<String>,
    /// Who did it: `server`, `user:alice`, `run:run_…`
    #[arg(long)]
    actor: Option<String>,
    /// Not before this: `2026-01-31T12:00:00Z`, or `2h` ago
    #[arg(long, value_name = "TIME", value_parser = when)]
    since: Option<When>,
    /// Before this
    #[arg(long, value_name = "TIME", value_parser = when)]
    until: Option<When>,
    /// At most so many
    #[arg(long, default_value_t = 1000)]
    limit: usize,
}

/// A time as it is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum When {
    At(Timestamp),
    Ago(Duration),
}

impl When {
    fn from(self, now: Timestamp) -> Timestamp {
        match self {
            Self::At(at) => at,
            Self::Ago(ago) => Timestamp(now.0.saturating_sub(i64::try_from(ago.as_millis()).unwrap_or(i64::MAX))),
        }
    }
}

fn when(text: &str) -> Result<When, String> {
    if let Ok(ago) = humantime::parse_duration(text) {
        return Ok(When::Ago(ago));
    }
    let at = humantime::parse_rfc3339_weak(text).map_err(|error| format!("{error} (or a duration like `2h`)"))?;
    let since = at
        .duration_since(std::time::UNIX_EPOCH)
        .map_err(|error| error.to_string())?;
    Ok(When::At(Timestamp(0).plus(since)))
}

pub async fn run(args: Args, context: &Context) -> Result<Exit, Error> {
    match args.command {
        Command::Verify(args) => verify(args, context).await,
        Command::Query(args) => query(args, context).await,
        Command::Network(args) => network::network(args, context).await,
        Command::Head => head(context),
    }
}

async fn verify(args: Verify, context: &Context) -> Result<Exit, Error> {
    let files = Files::of(&context.data_dir);
    let key = match &args.key {
        Some(path) => Some(PublicKey::read(path)?.ok_or_else(|| no_such_file(path))?),
        None => PublicKey::of(&files)?,
    };
    if let Some(path) = args.file.iter().chain(&args.heads).find(|path| !path.is_file()) {
        return Err(no_such_file(path));
    }
    let store = match args.file {
        Some(_) => None,
        None => Some(open(context)?),
    };
    let input = Input {
        store: store.as_ref().map(|store| store as &dyn Store),
        log: Some(args.file.unwrap_or(files.log)),
        heads: args.heads.unwrap_or(files.heads),
        key,
        anchors: args.head,
    };
    let held = verify::hold(&files.lock).await?;
    let report = verify::verify(&input).await?;
    drop(held);

    let mut object = serde_json::to_value(&report).expect("a report has string keys only");
    object["ok"] = json!(report.first().is_none());
    object["first_broken"] = json!(report.first());
    context.finish(&object, &report_text(&report));
    Ok(match report.first() {
        None => Exit::Ok,
        Some(_) => Exit::Failed,
    })
}

async fn query(args: Query, context: &Context) -> Result<Exit, Error> {
    let now = clock::System.now();
    let filter = Filter {
        run: args.run,
        task: args.task,
        sandbox: args.sandbox,
        action: args.action,
        actor: args.actor,
        since: args.since.map(|when| when.from(now)),
        until: args.until.map(|when| when.from(now)),
    };
    let store = open(context)?;
    let found = query::find(&store, &filter, args.limit).await?;
    if found.entries.is_empty() {
        known(&store, &filter).await?;
    }
    let mut text: String = found.entries.iter().map(entry_text).collect();
    if found.left_out > 0 {
        let _infallible = writeln!(text, "({} older entries left out: raise --limit)", found.left_out);
    }
    let object = json!({ "entries": found.entries, "left_out": found.left_out });
    context.finish(&object, &text);
    Ok(Exit::Ok)
}

/// Refuses an id that the whole record does not have: it is mistyped, or of other data.
async fn known(store: &Sqlite, filter: &Filter) -> Result<(), Error> {
    let alone = |run: &Option<String>, task: &Option<String>, sandbox: &Option<String>| Filter {
        run: run.clone(),
        task: task.clone(),
        sandbox: sandbox.clone(),
        ..Filter::default()
    };
    for (what, id, alone) in [
        ("run", &filter.run, alone(&filter.run, &None, &None)),
        ("task", &filter.task, alone(&None, &filter.task, &None)),
        ("sandbox", &filter.sandbox, alone(&None, &None, &filter.sandbox)),
    ] {
        if let Some(id) = id
            && query::find(store, &alone, 1).await?.entries.is_empty()
        {
            let message = format!("no {what} `{}` on the record", crate::ids::shown(id));
            return Err(Error::new(Kind::NotFound, message).hint("`exuvia audit query` lists what is there"));
        }
    }
    Ok(())
}

fn head(context: &Context) -> Result<Exit, Error> {
    let files = Files::of(&context.data_dir);
    let Some(head) = audit::head::newest(&files)? else {
        return Err(
            Error::new(Kind::NotFound, format!("no signed head in `{}`", files.heads.display()))
                .hint("the first run of a data directory signs one"),
        );
    };
    let Some(key) = PublicKey::of(&files)? else {
        return Err(no_such_file(&files.public_key));
    };
    if !key.has_signed(&head) {
        let message = format!("the newest head in `{}` has a wrong signature", files.heads.display());
        return Err(Error::new(Kind::WrongState, message).hint("exuvia audit verify"));
    }
    let link = head.link();
    let object = json!({ "head": head, "link": link.to_string(), "public_key": key.encode() });
    context.finish(&object, &format!("{link}\nsigned {} by {}", head.at, key.encode()));
    Ok(Exit::Ok)
}

/// Opens the store of the data directory, which must be there.
fn open(context: &Context) -> Result<Sqlite, Error> {
    if !Sqlite::exists(&context.data_dir) {
        let message = format!("no data in `{}`", context.data_dir.display());
        return Err(Error::new(Kind::NotFound, message).hint("--data-dir DIR, or EXUVIA_DATA_DIR"));
    }
    Ok(Sqlite::open(&context.data_dir, Arc::new(clock::System))?)
}

fn no_such_file(path: &std::path::Path) -> Error {
    Error::new(Kind::Invalid, format!("no such file: `{}`", path.display()))
}

fn report_text(report: &Report) -> String {
    let mut text = String::new();
    for broken in &report.broken {
        let Broken { source, seq, problem } = broken;
        let source = match source {
            verify::Source::Store => "store",
            verify::Source::Log => "log",
            verify::Source::Heads => "signed heads",
            verify::Source::Both => "store and log",
        };
        text += &format!("BROKEN at entry {seq} ({source}): {problem}\n");
    }
    if report.broken.is_empty() {
        text += "ok";
        for (name, link) in [("store", &report.store), ("log", &report.log)] {
            if let Some(link) = link {
                text += &format!(", {name}: {} entries", link.seq);
            }
        }
        text += &format!(", {} signed heads\n", report.heads);
    }
    for note in &report.notes {
        text += &format!("note: {note}\n");
    }
    printable(&text)
}

/// One entry on one line.
fn entry_text(entry: &Sealed) -> String {
    let Sealed { seq, record, .. } = entry;
    let mut line = format!(
        "{seq} {} {} {} {}",
        record.at, record.actor, record.action, record.outcome
    );
    for (name, id) in &record.ids {
        line += &format!(" {name}={id}");
    }
    if !record.details.is_null() {
        line += &format!(" {}", record.details);
    }
    printable(&line.replace('\n', "\\n")) + "\n"
}

/// The text without what could drive a terminal or hide in it: what a sandbox wrote ends up in details. Line breaks stay.
fn printable(text: &str) -> String {
    let mut clean = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' | '"' | '\'' | '\\' => clean.push(c),
            c => clean.extend(c.escape_debug()),
        }
    }
    clean
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use clap::Parser;

    use super::*;
    use crate::audit::{Mirror, Record};

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    async fn call(context: &Context, line: &[&str]) -> Result<Exit, Error> {
        let line = Line::try_parse_from(["audit"].iter().chain(line)).unwrap();
        run(line.args, context).await
    }

    fn record(n: i64) -> Record {
        Record {
            at: Timestamp(n),
            actor: "server".to_owned(),
            action: "exec.ended".to_owned(),
            outcome: "ok".to_owned(),
            ids: BTreeMap::from([("run".to_owned(), "r".to_owned())]),
            details: json!({ "argv": ["a\u{1b}[2J\nb\u{9b}31m\u{202e}c"] }),
        }
    }

    #[tokio::test]
    async fn a_broken_log_is_exit_1_and_no_data_is_refused_and_not_made() {
        let dir = tempfile::tempdir().unwrap();
        let context = Context {
            json: true,
            data_dir: dir.path().join("data"),
        };
        for line in [["verify"].as_slice(), &["query"], &["head"]] {
            let error = call(&context, line).await.unwrap_err();
            assert_eq!((error.kind, error.exit()), (Kind::NotFound, Exit::Refused), "{line:?}");
        }
        assert!(!context.data_dir.exists());

        let clock = Arc::new(clock::System);
        let store = Sqlite::open(&context.data_dir, clock.clone()).unwrap();
        store.audit((1..=3).map(record).collect()).await.unwrap();
        let mirror = Mirror::open(&context.data_dir, clock).unwrap();
        let link = mirror.catch_up(&store).await.unwrap();
        let log = mirror.files().log.to_str().unwrap().to_owned();
        let link = link.to_string();
        for line in [
            ["verify"].as_slice(),
            &["verify", "--head", &link],
            &["verify", "--file", &log],
            &["query", "--run", "r", "--since", "1970-01-01T00:00:00Z"],
            // The run is known; only nothing of it is as old as that.
            &["query", "--run", "r", "--until", "1970-01-01T00:00:00Z"],
            &["head"],
        ] {
            assert_eq!(call(&context, line).await.unwrap(), Exit::Ok, "{line:?}");
        }
        for unknown in ["--run", "--task", "--sandbox"] {
            let error = call(&context, &["query", unknown, "nobody"]).await.unwrap_err();
            assert_eq!((error.kind, error.exit()), (Kind::NotFound, Exit::Refused), "{unknown}");
        }
        // A head from elsewhere that this chain does not have.
        let foreign = format!("9:{}", Link::start().hash);
        assert_eq!(
            call(&context, &["verify", "--head", &foreign]).await.unwrap(),
            Exit::Failed
        );

        let text = std::fs::read_to_string(&log).unwrap();
        std::fs::write(&log, text.replacen("server", "nobody", 1)).unwrap();
        for line in [["verify"].as_slice(), &["verify", "--file", &log]] {
            assert_eq!(call(&context, line).await.unwrap(), Exit::Failed, "{line:?}");
        }
        // A pipe in the log's place is refused; nobody waits for a writer.
        std::fs::remove_file(&log).unwrap();
        nix::unistd::mkfifo(log.as_str(), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let error = call(&context, &["verify"]).await.unwrap_err();
        assert!(error.message.ends_with("it is not a regular file"), "{error}");
        let missing = call(&context, &["verify", "--file", "/nowhere"]).await.unwrap_err();
        assert_eq!(missing.exit(), Exit::Usage);
    }

    #[test]
    fn an_entry_is_one_line_that_drives_no_terminal() {
        let entry = audit::seal(&Link::start(), record(0));
        assert_eq!(
            entry_text(&entry),
            "1 1970-01-01T00:00:00.000Z server exec.ended ok run=r \
             {\"argv\":[\"a\\u001b[2J\\nb\\u{9b}31m\\u{202e}c\"]}\n"
        );
    }

    #[test]
    fn times_are_instants_or_ago() {
        assert_eq!(when("1970-01-01T00:00:02Z"), Ok(When::At(Timestamp(2000))));
        assert_eq!(when("2h").unwrap().from(Timestamp(7_200_005)), Timestamp(5));
        assert!(when("yesterday").is_err());
    }
}
