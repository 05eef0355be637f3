//! What is asked: the frozen request that a run starts from, and the task file that a person writes.

mod labels;
mod model;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

pub use labels::check as check_labels;
pub use model::Model;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::Kind;
use crate::policy::{BudgetOverrides, Budgets};
use crate::run::event::FORMAT_VERSION;
use crate::sandbox::{BackendName, ImageRef};
use crate::workspace::Revision;

/// A task as accepted: everything resolved, nothing left to look up but the credential. Stored with the task.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Task {
    pub format_version: u32,
    pub prompt: String,
    pub model: Model,
    pub policy_name: String,
    /// The policy's canonical snapshot; the run keeps it whatever becomes of the file.
    pub policy: Value,
    pub policy_hash: String,
    pub budgets: Budgets,
    pub workspace: Revision,
    pub check: Option<String>,
    pub image: ImageRef,
    pub backend: BackendName,
    pub labels: BTreeMap<String, String>,
}

/// A stored task that this build cannot read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the task has format version {found}; this build reads version {FORMAT_VERSION}")]
    UnknownVersion { found: u64 },
    #[error("the stored task makes no sense")]
    Damaged(#[source] serde_json::Error),
}

impl Task {
    pub fn to_value(&self) -> Value {
        serde_json::to_value(self).expect("a task is plain data")
    }

    /// Reads a stored task back.
    ///
    /// # Errors
    /// An unknown `format_version` is refused before anything else is looked at (requirement F2).
    pub fn from_value(value: Value) -> Result<Self, Error> {
        let found = value.get("format_version").and_then(Value::as_u64).unwrap_or_default();
        if found != u64::from(FORMAT_VERSION) {
            return Err(Error::UnknownVersion { found });
        }
        serde_json::from_value(value).map_err(Error::Damaged)
    }
}

/// A task file (TOML) as a person writes it. Unknown keys are refused. Paths are relative to the file.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TaskFile {
    pub prompt: Option<String>,
    pub workspace: Option<PathBuf>,
    /// Start from nothing; needed with a `check` and no `workspace`.
    #[serde(default)]
    pub empty_workspace: bool,
    pub policy: Option<String>,
    /// `scripted:FILE`, `openai:MODEL`, `openai:MODEL@BASE_URL`.
    pub model: Option<String>,
    /// `env:NAME` or `file:PATH`.
    pub credential: Option<String>,
    pub check: Option<String>,
    pub image: Option<String>,
    pub backend: Option<BackendName>,
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    #[serde(default)]
    pub budgets: BudgetOverrides,
}

/// A task file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error("cannot read the task file `{path}`")]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("the task file `{path}` is not valid: {reason}")]
    Invalid { path: PathBuf, reason: String },
}

impl FileError {
    pub fn kind(&self) -> Kind {
        match self {
            Self::Read { .. } | Self::Invalid { .. } => Kind::Invalid,
        }
    }
}

impl TaskFile {
    /// Reads one, with its paths made absolute.
    pub fn load(path: &Path) -> Result<Self, FileError> {
        let text = std::fs::read_to_string(path).map_err(|source| FileError::Read {
            path: path.to_owned(),
            source,
        })?;
        let mut file: Self = toml::from_str(&text).map_err(|error| FileError::Invalid {
            path: path.to_owned(),
            reason: error.to_string(),
        })?;
        let folder = path.parent().unwrap_or(Path::new("."));
        file.workspace = file.workspace.map(|workspace| folder.join(workspace));
        file.model = file.model.map(|model| match model.strip_prefix("scripted:") {
            Some(script) => format!("scripted:{}", folder.join(script).display()),
            None => model,
        });
        Ok(file)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_task_file_with_unknown_keys_is_refused_and_says_where() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("task.toml");
        std::fs::write(&path, "prompt = \"x\"\nworkspce = \"y\"\n").unwrap();
        let message = TaskFile::load(&path).unwrap_err().to_string();
        assert!(message.contains("workspce") && message.contains("line 2"), "{message}");
    }

    #[test]
    fn paths_are_relative_to_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("task.toml");
        std::fs::write(
            &path,
            "workspace = \"w\"\nmodel = \"scripted:s.jsonl\"\n[budgets]\ntotal_time = \"5m\"\n",
        )
        .unwrap();
        let file = TaskFile::load(&path).unwrap();
        assert_eq!(file.workspace, Some(folder.path().join("w")));
        assert_eq!(
            file.model,
            Some(format!("scripted:{}", folder.path().join("s.jsonl").display()))
        );
        assert_eq!(file.budgets.total_time, Some(Duration::from_secs(300)));
    }
}
