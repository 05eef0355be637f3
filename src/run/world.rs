//! The tools' world over a real sandbox, and the record of what they ran in it.

use std::sync::{Mutex, PoisonError};

use async_trait::async_trait;
use serde_json::json;

use super::bench::{self, Bench};
use crate::audit::Record;
use crate::border::{self, Mark};
use crate::sandbox::files::{self, Range, Search};
use crate::sandbox::{self, Cause};
use crate::tool::world::{
    Blame, Command, Entry, Error, FileKind, Found, Listing, Lost, Match, Outcome, Refusal, Stat, World,
};

/// Most bytes of each stream that a command's result is made from.
const OUTPUT: usize = 8 << 20;
/// Most refusals of the network that one result lists.
const MOST_TOLD: usize = 5;

/// Inside the bench's sandbox, on behalf of one step.
#[derive(Debug)]
pub struct Inside<'a> {
    bench: &'a Bench,
    /// The step's idempotency key; every command finds it in its environment.
    key: &'a str,
    /// When the step began, for what its network was refused since.
    since: Option<Mark>,
    records: Mutex<Vec<Record>>,
}

impl<'a> Inside<'a> {
    pub fn new(bench: &'a Bench, key: &'a str, since: Option<Mark>) -> Self {
        Self {
            bench,
            key,
            since,
            records: Mutex::default(),
        }
    }

    /// What was run, for the audit record.
    pub fn into_records(self) -> Vec<Record> {
        self.records.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    fn on_record(&self, command: &Command, outcome: &str, details: serde_json::Value) {
        let mut details = details;
        details["argv"] = command.argv.clone().into();
        details["cwd"] = command.cwd.clone().into();
        let record = self.bench.audit_record("exec.ended", outcome, details);
        self.records.lock().unwrap_or_else(PoisonError::into_inner).push(record);
    }
}

#[async_trait]
impl World for Inside<'_> {
    async fn exec(&self, command: &Command) -> Result<Outcome, Error> {
        let mut asked = sandbox::Command::new(command.argv.iter().map(String::as_bytes))
            .cwd(command.cwd.as_bytes())
            .timeout(command.timeout);
        asked.env.clone_from(self.bench.env());
        let mut asked = asked.env("EXUVIA_IDEMPOTENCY_KEY", self.key);
        asked.env.extend(command.env.clone());
        let finished = match self.bench.sandbox().run(asked, OUTPUT).await {
            Ok(finished) => finished,
            Err(error) => {
                self.on_record(command, "not_started", json!({ "reason": crate::error::chain(&error) }));
                return Err(refusal(error));
            }
        };
        let ended = finished.ended;
        let details = json!({ "cause": ended.cause, "duration_ms": ended.duration.as_millis() as u64,
            "cpu_ms": ended.cpu.as_millis() as u64, "max_rss_bytes": ended.max_rss_bytes,
            "killed_descendants": ended.killed_descendants, "stdout_bytes": finished.stdout.total_bytes(),
            "stderr_bytes": finished.stderr.total_bytes() });
        self.on_record(command, outcome_of(&ended.cause), details);
        if let Some(reason) = ended.cause.sandbox_gone() {
            let blame = match ended.cause.is_by_program() {
                true => Blame::Program,
                false => Blame::Host,
            };
            return Err(Lost { reason, blame }.into());
        }
        Ok(Outcome {
            stdout: finished.stdout,
            stderr: finished.stderr,
            cause: ended.cause,
        })
    }

    async fn read(&self, path: &str) -> Result<Vec<u8>, Error> {
        let content = self
            .bench
            .sandbox()
            .files()
            .read(path, Range::default())
            .await
            .map_err(refusal)?;
        match content.truncated {
            false => Ok(content.bytes),
            true => Err(Error::refused(
                Refusal::TooLarge,
                format!("it has {} bytes", content.total_bytes),
            )),
        }
    }

    async fn write(&self, path: &str, content: &[u8]) -> Result<(), Error> {
        self.bench
            .sandbox()
            .files()
            .write(path, content, None)
            .await
            .map_err(refusal)
    }

    async fn stat(&self, path: &str) -> Result<Stat, Error> {
        Ok(stat(&self.bench.sandbox().files().stat(path).await.map_err(refusal)?))
    }

    async fn list(&self, path: &str, depth: u32, max_entries: u32) -> Result<Listing, Error> {
        let listing = self
            .bench
            .sandbox()
            .files()
            .list(path, depth, max_entries)
            .await
            .map_err(refusal)?;
        let entry = |entry: &files::Entry| Entry {
            path: text(&entry.path),
            stat: stat(entry),
            link_target: entry.link_target.as_deref().map(text),
        };
        Ok(Listing {
            entries: listing.entries.iter().map(entry).collect(),
            truncated: listing.truncated,
        })
    }

    async fn search(&self, path: &str, pattern: &str, glob: Option<&str>, max_matches: u32) -> Result<Found, Error> {
        let search = Search {
            path: path.into(),
            pattern: pattern.to_owned(),
            glob: glob.map(str::to_owned),
            max_matches,
        };
        let found = self.bench.sandbox().files().search(search).await.map_err(refusal)?;
        let matches = found.matches.iter().map(|found| Match {
            path: text(&found.path),
            line: found.line,
            text: text(&found.text),
        });
        Ok(Found {
            matches: matches.collect(),
            files_read: found.files_read,
            truncated: found.truncated,
        })
    }

    async fn put_artifact(&self, content: &[u8]) -> Result<String, Lost> {
        self.bench.put_artifact(content).await.map_err(lost)
    }

    /// What the border refused while the step ran: of several steps side by side each is told of all.
    fn aside(&self) -> Option<(&'static str, serde_json::Value)> {
        let refused = self.bench.post()?.refused_since(self.since?);
        let told: Vec<&border::Denied> = refused.iter().take(MOST_TOLD).collect();
        (!told.is_empty()).then(|| {
            let more = refused.len() - told.len();
            let details = json!({ "refused": told, "more": more, "how_to_ask": border::HOW_TO_ASK });
            ("network", details)
        })
    }

    async fn get_artifact(&self, id: &str) -> Result<Option<Vec<u8>>, Lost> {
        self.bench.artifact(id).await.map_err(lost)
    }
}

/// The outcome on the record of a command that ended like that.
fn outcome_of(cause: &Cause) -> &'static str {
    match cause {
        Cause::Exited { code: 0 } => "ok",
        Cause::Exited { .. } | Cause::Signalled { .. } => "failed",
        Cause::TimedOut { .. } => "timed_out",
        Cause::OutOfMemory { .. } => "out_of_memory",
        Cause::Killed { .. } | Cause::Disconnected | Cause::Superseded => "killed",
        Cause::SandboxKilled { .. }
        | Cause::SandboxExpired
        | Cause::SandboxIdle
        | Cause::SandboxShutdown
        | Cause::SandboxOutOfMemory { .. }
        | Cause::SandboxLost { .. } => "sandbox_lost",
    }
}

/// What the guest refused is an answer for the model; everything else means that the sandbox is gone.
fn refusal(error: sandbox::Error) -> Error {
    match error {
        sandbox::Error::NotStarted { code, message } | sandbox::Error::File { code, message } => {
            Error::refused(Refusal::from_code(&code), message)
        }
        sandbox::Error::Unsupported { .. }
        | sandbox::Error::Image { .. }
        | sandbox::Error::NotFound(_)
        | sandbox::Error::Backend { .. }
        | sandbox::Error::GuestLost { .. }
        | sandbox::Error::NoExec(_)
        | sandbox::Error::OutputDropped { .. }
        | sandbox::Error::Refused { .. }
        | sandbox::Error::Breached(_)
        | sandbox::Error::Disk(_)
        | sandbox::Error::CleanUp { .. } => Lost::new(crate::error::chain(&error)).into(),
    }
}

fn lost(error: bench::Error) -> Lost {
    Lost::new(crate::error::chain(&error))
}

fn stat(entry: &files::Entry) -> Stat {
    let kind = match entry.kind {
        files::Kind::Regular => FileKind::Regular,
        files::Kind::Directory => FileKind::Directory,
        files::Kind::Symlink => FileKind::Symlink,
        files::Kind::Other => FileKind::Other,
    };
    Stat { kind, size: entry.size }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
