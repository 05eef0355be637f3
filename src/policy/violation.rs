//! What is wrong with a policy file, and where.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A place in a file, both numbers from 1; columns count characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Position {
    pub line: usize,
    pub column: usize,
}

/// One problem. Prints as `policies/x.toml:12:3: tools.rules[2].verdict: …`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Violation {
    /// What the policy was read from; `None` where there is no file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// Absent where the problem is that something is missing altogether.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub position: Option<Position>,
    /// `tools.rules[2].match.command`; empty for the file as a whole.
    pub path: String,
    /// What is wrong, and what is allowed.
    pub message: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(file) = &self.file {
            write!(f, "{file}:")?;
        }
        if let Some(Position { line, column }) = self.position {
            write!(f, "{line}:{column}:")?;
        }
        if self.file.is_some() || self.position.is_some() {
            f.write_str(" ")?;
        }
        if !self.path.is_empty() {
            write!(f, "{}: ", self.path)?;
        }
        f.write_str(&self.message)
    }
}

/// All of them, one a line.
pub(super) fn lines(violations: &[Violation]) -> String {
    let lines: Vec<String> = violations.iter().map(|violation| format!("  {violation}")).collect();
    lines.join("\n")
}

/// The one of `known` that `text` was most likely meant to be.
pub(super) fn nearest<'a>(text: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    known
        .into_iter()
        .map(|candidate| (strsim::jaro_winkler(text, candidate), candidate))
        .filter(|(likeness, _)| *likeness > 0.8)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, candidate)| candidate)
}

/// `; did you mean …?` where something is near, and what there is.
pub(super) fn suggestion(text: &str, known: &[&str]) -> String {
    let near = nearest(text, known.iter().copied()).map(|near| format!("did you mean `{near}`? "));
    format!(
        "{}known are {}",
        near.unwrap_or_default(),
        listed(known.iter().copied())
    )
}

/// `` `a`, `b`, `c` ``.
pub(super) fn listed<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    let quoted: Vec<String> = names.into_iter().map(|name| format!("`{name}`")).collect();
    quoted.join(", ")
}
