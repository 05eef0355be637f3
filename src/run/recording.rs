//! A run as one file: JSON lines, the head first, then entries and checkpoints in the order in which they were written.
//!
//! Holds what the store holds of a run and nothing else: credentials are references there, and stay so. Workspaces are
//! named by their tree; with [`Files`] they are carried, too, so that the run can be forked where it is taken in.

use std::collections::BTreeMap;
use std::io;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use futures::TryStreamExt;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::event::Entry;
use super::{Error as RunError, Service, fold};
use crate::audit;
use crate::error::Kind;
use crate::ids::{RunId, SessionId, TaskId, TraceId};
use crate::store::{Checkpoint, Created, NewTask, Recorded, RunRecord, Store};
use crate::workspace::{BlobId, Pool, Revision, TreeId};

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
    pub files: Files,
}

/// What a recording carries besides, packed (zstd), by its address.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Files {
    /// The workspace of each checkpoint, as a tar.
    trees: BTreeMap<TreeId, Vec<u8>>,
    /// Times of files, and outputs that were too long for a result.
    blobs: BTreeMap<BlobId, Vec<u8>>,
}

impl Files {
    /// # Errors
    /// What is not in the store, or [`Error::TooLarge`].
    async fn of(pool: &Pool, recording: &Recording) -> Result<Self, RunError> {
        let mut files = Self::default();
        let (mut left, empty) = (MAX_BYTES, pool.empty().await?);
        for checkpoint in &recording.checkpoints {
            let revision = super::state::of_checkpoint(&recording.run, checkpoint)?.workspace;
            if let Some(times) = revision.times {
                files.blobs.entry(times).or_default();
            }
            // There is no archive of nothing, and nothing is everywhere.
            if revision.tree != empty && !files.trees.contains_key(&revision.tree) {
                let without_times = Revision::from(revision.tree);
                let pieces: Vec<Vec<u8>> = pool.archive(without_times).try_collect().await?;
                files.trees.insert(revision.tree, packed(&pieces.concat(), &mut left)?);
            }
        }
        let outputs = recording.entries.iter().filter_map(|entry| entry.event.result());
        let outputs = outputs.filter_map(|result| result.data.get("artifact").and_then(Value::as_str));
        files
            .blobs
            .extend(outputs.filter_map(|id| Some((id.parse().ok()?, Vec::new()))));
        for (id, content) in &mut files.blobs {
            *content = packed(&pool.artifact(*id).await?, &mut left)?;
        }
        Ok(files)
    }

    /// Puts everything into the store; what is not what its address says is refused.
    async fn unpack(&self, pool: &Pool) -> Result<(), RunError> {
        pool.empty().await?;
        for (tree, tar) in &self.trees {
            let pieces = futures::stream::iter([Ok::<_, io::Error>(tar.clone())]);
            let found = pool.take_archive(pieces).await?.tree;
            if found != *tree {
                return Err(Error::Address(tree.to_string()).into());
            }
        }
        for (id, content) in &self.blobs {
            let address = || Error::Address(id.to_string());
            let content = zstd::bulk::decompress(content, MAX_BYTES).map_err(|_| address())?;
            if pool.put_artifact(content).await? != *id {
                return Err(address().into());
            }
        }
        Ok(())
    }
}

/// Packed, if it fits into what is left of the room for all.
fn packed(content: &[u8], left: &mut usize) -> Result<Vec<u8>, Error> {
    let packed = zstd::bulk::compress(content, 0).map_err(|_| Error::TooLarge)?;
    // As it will stand in a line.
    *left = left.checked_sub(packed.len().div_ceil(3) * 4).ok_or(Error::TooLarge)?;
    Ok(packed)
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
    Tree {
        tree: TreeId,
        tar: String,
    },
    Blob {
        blob: BlobId,
        content: String,
    },
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
    #[error("with its files the recording would be larger than {MAX_BYTES} bytes")]
    TooLarge,
    #[error("what the recording has for `{0}` is something else")]
    Address(String),
    #[error("line {line}: it is not base64")]
    Base64 { line: usize },
}

impl Error {
    pub fn kind(&self) -> Kind {
        match self {
            Self::Line { .. } | Self::Order { .. } | Self::Empty | Self::Address(_) | Self::Base64 { .. } => {
                Kind::Invalid
            }
            Self::TooLarge => Kind::Exhausted,
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
            files: Files::default(),
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
        lines.extend(self.files.trees.iter().map(|(tree, tar)| Line::Tree {
            tree: *tree,
            tar: STANDARD.encode(tar),
        }));
        lines.extend(self.files.blobs.iter().map(|(blob, content)| Line::Blob {
            blob: *blob,
            content: STANDARD.encode(content),
        }));
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
            files: Files::default(),
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
                Line::Tree { tree, tar } => {
                    let tar = STANDARD.decode(tar).map_err(|_| Error::Base64 { line })?;
                    recording.files.trees.insert(tree, tar);
                }
                Line::Blob { blob, content } => {
                    let content = STANDARD.decode(content).map_err(|_| Error::Base64 { line })?;
                    recording.files.blobs.insert(blob, content);
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
    /// A run as one file; `with_workspace`: with the files of each checkpoint.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub async fn record_of(&self, id: &str, with_workspace: bool) -> Result<Recording, RunError> {
        let record = self.find(id).await?;
        let mut recording = Recording::of(self.shop().store.as_ref(), &record).await?;
        if with_workspace {
            recording.files = Files::of(self.workspaces(), &recording).await?;
        }
        Ok(recording)
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
            files,
            ..
        } = recording;
        let state = fold(&from, &entries)?;
        if !state.is_terminal() {
            return Err(Error::Unfinished.into());
        }
        // Durable before the run that names them.
        files.unpack(self.workspaces()).await?;
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
