//! A run as one file: JSON lines, the head first, then entries and checkpoints in the order in which they were written.
//!
//! Holds what the store holds of a run and nothing else: credentials are references there, and stay so. Workspaces are
//! named by their tree, not carried.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::event::Entry;
use super::{Error as RunError, Service, fold};
use crate::audit;
use crate::error::Kind;
use crate::ids::{RunId, SessionId, TaskId, TraceId};
use crate::store::{Checkpoint, Created, NewTask, Recorded, RunRecord, Store};

/// The version that this build writes.
pub const FORMAT_VERSION: u32 = 1;
/// Longest recording that is taken in.
pub const MAX_BYTES: usize = 256 << 20;

/// One run, whole.
#[derive(Debug, Clone, PartialEq)]
pub struct Recording {
    /// Of the run as it was recorded.
    pub run: RunId,
    pub task: TaskId,
    /// The frozen request, versioned JSON that only `task` reads.
    pub spec: Value,
    pub entries: Vec<Entry>,
    pub checkpoints: Vec<Checkpoint>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "line", rename_all = "snake_case")]
enum Line {
    Run {
        format_version: u32,
        run: RunId,
        task: TaskId,
        spec: Value,
    },
    Entry(Value),
    Checkpoint(Checkpoint),
}

/// A file that is no recording, or not one of a run that can be taken in.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("line {line} is not one of a recording")]
    Line {
        line: usize,
        #[source]
        source: serde_json::Error,
    },
    #[error("line {line}: {reason}")]
    Order { line: usize, reason: &'static str },
    #[error("the recording has format version {found}; this build reads version {FORMAT_VERSION}")]
    UnknownVersion { found: u64 },
    #[error("the recorded run has not ended: it can be replayed, not imported")]
    Unfinished,
    #[error("the recording is empty")]
    Empty,
}

impl Error {
    pub fn kind(&self) -> Kind {
        match self {
            Self::Line { .. } | Self::Order { .. } | Self::Empty => Kind::Invalid,
            Self::UnknownVersion { .. } | Self::Unfinished => Kind::WrongState,
        }
    }
}

impl Recording {
    /// Reads a run out of a store.
    ///
    /// # Errors
    /// As the store's.
    pub async fn of(store: &dyn Store, record: &RunRecord) -> Result<Self, RunError> {
        let mut checkpoints = Vec::new();
        for revision in 0..=record.revision {
            checkpoints.push(store.checkpoint(&record.run, Some(revision)).await?);
        }
        // Read last: what was committed meanwhile has no checkpoint here, and that is no gap.
        let mut entries = super::journal(store, &record.run).await?;
        entries.truncate(record.seq as usize);
        Ok(Self {
            run: record.run.clone(),
            task: record.task.clone(),
            spec: store.spec(&record.task).await?,
            entries,
            checkpoints,
        })
    }

    pub fn to_text(&self) -> String {
        let head = Line::Run {
            format_version: FORMAT_VERSION,
            run: self.run.clone(),
            task: self.task.clone(),
            spec: self.spec.clone(),
        };
        let mut lines = vec![head];
        let mut checkpoints = self.checkpoints.iter().peekable();
        for entry in &self.entries {
            lines.push(Line::Entry(
                serde_json::to_value(entry).expect("an entry is plain data"),
            ));
            while let Some(checkpoint) = checkpoints.next_if(|checkpoint| checkpoint.seq <= entry.seq) {
                lines.push(Line::Checkpoint(checkpoint.clone()));
            }
        }
        let text = lines
            .iter()
            .map(|line| serde_json::to_string(line).expect("a line is plain data") + "\n");
        text.collect()
    }

    /// # Errors
    /// An unknown `format_version` is refused before anything else is looked at (requirement F2).
    pub fn parse(text: &str) -> Result<Self, Error> {
        let mut lines = (1..).zip(text.lines()).filter(|(_, text)| !text.trim().is_empty());
        let (line, head) = lines.next().ok_or(Error::Empty)?;
        let value: Value = serde_json::from_str(head).map_err(|source| Error::Line { line, source })?;
        let found = value.get("format_version").and_then(Value::as_u64).unwrap_or_default();
        if found != u64::from(FORMAT_VERSION) {
            return Err(Error::UnknownVersion { found });
        }
        let head = serde_json::from_value(value).map_err(|source| Error::Line { line, source })?;
        let Line::Run { run, task, spec, .. } = head else {
            let reason = "a recording begins with its run";
            return Err(Error::Order { line, reason });
        };
        let mut recording = Self {
            run,
            task,
            spec,
            entries: Vec::new(),
            checkpoints: Vec::new(),
        };
        for (line, text) in lines {
            match serde_json::from_str(text).map_err(|source| Error::Line { line, source })? {
                Line::Run { .. } => {
                    let reason = "a recording has one run";
                    return Err(Error::Order { line, reason });
                }
                Line::Entry(entry) => {
                    let entry: Entry = serde_json::from_value(entry).map_err(|source| Error::Line { line, source })?;
                    if entry.seq != recording.entries.len() as u64 + 1 {
                        let reason = "its entries are not numbered one after the other";
                        return Err(Error::Order { line, reason });
                    }
                    recording.entries.push(entry);
                }
                Line::Checkpoint(checkpoint) => {
                    if checkpoint.revision != recording.checkpoints.len() as u64 {
                        let reason = "its checkpoints are not numbered one after the other";
                        return Err(Error::Order { line, reason });
                    }
                    recording.checkpoints.push(checkpoint);
                }
            }
        }
        match recording.entries.is_empty() || recording.checkpoints.is_empty() {
            true => Err(Error::Empty),
            false => Ok(recording),
        }
    }
}

impl Service {
    /// A run as one file.
    pub async fn record_of(&self, id: &str) -> Result<Recording, RunError> {
        let record = self.find(id).await?;
        Recording::of(self.shop().store.as_ref(), &record).await
    }

    /// Takes a recorded run in, under new ids. It has ended, so nothing drives it.
    ///
    /// # Errors
    /// [`Error::Unfinished`]; entries that this build's machine refuses.
    pub async fn import(&self, recording: Recording) -> Result<RunRecord, RunError> {
        let digest = blake3::hash(recording.to_text().as_bytes()).to_hex().to_string();
        let Recording {
            run: from,
            spec,
            entries,
            checkpoints,
            ..
        } = recording;
        let state = fold(&from, &entries)?;
        if !state.is_terminal() {
            return Err(Error::Unfinished.into());
        }
        let task = crate::task::Task::from_value(spec)?;
        let (mut entries, mut checkpoints) = (entries.into_iter(), checkpoints.into_iter());
        let (Some(first), Some(checkpoint)) = (entries.next(), checkpoints.next()) else {
            return Err(Error::Empty.into());
        };
        let revision = checkpoints.len() as u64;
        let record = RunRecord {
            task: TaskId::random(),
            run: RunId::random(),
            session: SessionId::random(),
            trace: TraceId::random(),
            parent: None,
            base: None,
            state: state.public().to_owned(),
            is_terminal: true,
            seq: state.seq,
            revision,
            fence: 0,
            owner: None,
            created_at: self.shop().clock.now(),
            updated_at: state.at,
            labels: task.labels.clone(),
        };
        let audit = audit::Record {
            at: record.created_at,
            actor: "client".to_owned(),
            action: "run.imported".to_owned(),
            outcome: "ok".to_owned(),
            ids: super::trail::ids(&record),
            details: serde_json::json!({ "recorded_as": from, "recording": digest, "entries": record.seq }),
        };
        let new = NewTask {
            spec: task.to_value(),
            idempotency: None,
            first,
            checkpoint,
            recorded: Some(Recorded {
                entries: entries.collect(),
                checkpoints: checkpoints.collect(),
            }),
            audit: vec![audit],
            record,
        };
        match self.shop().store.create(new).await? {
            Created::New(record) | Created::Known(record) => Ok(record),
        }
    }
}
