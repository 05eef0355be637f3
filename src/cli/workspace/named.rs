//! What the data directory names of the workspace store.
//!
//! Conservative: whatever looks like an address in a checkpoint, a journal, a task, the audit chain (where snapshots of
//! sandboxes are) or a lease counts as one. So a new place that keeps an address is found without being told of here.

use std::collections::HashSet;
use std::fs;
use std::path::Path;

use serde_json::Value;

use super::super::Error;
use crate::error::Kind;
use crate::store::{self, Query, Store};
use crate::workspace::overlay::Bases;
use crate::workspace::{BlobId, Revision, TreeId};

/// Runs, entries and records that are read at a time.
const PAGE: usize = 500;

/// What is named, and by what.
#[derive(Debug, Default)]
pub struct Named {
    /// Workspaces at the checkpoints of runs: those must be whole.
    pub revisions: Vec<(Name, Revision)>,
    /// Workspaces that are named elsewhere too.
    pub elsewhere: HashSet<Revision>,
    /// Whatever else looks like an address.
    pub addresses: HashSet<BlobId>,
}

/// A run at a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Name {
    pub run: String,
    pub revision: u64,
    pub is_live: bool,
}

pub async fn find(store: &dyn Store, data_dir: &Path) -> Result<Named, Error> {
    let mut named = Named::default();
    let mut query = Query {
        limit: PAGE,
        ..Query::default()
    };
    loop {
        let runs = store.list(&query).await?;
        for run in &runs {
            let is_live = !run.is_terminal;
            for revision in 0..=run.revision {
                let checkpoint = match store.checkpoint(&run.run, Some(revision)).await {
                    Ok(checkpoint) => checkpoint,
                    Err(store::Error::NotFound { .. }) => continue,
                    Err(error) => return Err(error.into()),
                };
                let mut inner = Named::default();
                inner.take(&checkpoint.state);
                let times = inner.elsewhere.iter().find(|found| found.tree == checkpoint.tree);
                let workspace = times.copied().unwrap_or(checkpoint.tree.into());
                let name = Name {
                    run: run.run.to_string(),
                    revision,
                    is_live,
                };
                named.revisions.push((name, workspace));
                named.elsewhere.extend(inner.elsewhere);
                named.addresses.extend(inner.addresses);
            }
            named.take(&store.spec(&run.task).await?);
            let mut after = 0;
            loop {
                let entries = store.journal(&run.run, after, PAGE).await?;
                let Some(last) = entries.last() else { break };
                after = last.seq;
                for entry in &entries {
                    named.take(&value(entry)?);
                }
            }
        }
        match runs.last() {
            Some(last) if runs.len() >= PAGE => query.after = Some((last.created_at, last.run.clone())),
            Some(_) | None => break,
        }
    }
    let mut after = 0;
    loop {
        let records = store.audit_log(after, PAGE).await?;
        let Some(last) = records.last() else { break };
        after = last.seq;
        for record in &records {
            named.take(&value(&record.record)?);
        }
    }
    leases(data_dir, &mut named).map_err(|error| Error::of(Kind::Internal, &error))?;
    // Workspaces of sandboxes may be laid over them.
    let bases = Bases::new(data_dir).revisions();
    named
        .elsewhere
        .extend(bases.map_err(|error| Error::of(Kind::Internal, &error))?);
    Ok(named)
}

fn value(of: &impl serde::Serialize) -> Result<Value, Error> {
    serde_json::to_value(of).map_err(|error| Error::of(Kind::Internal, &error))
}

fn leases(data_dir: &Path, named: &mut Named) -> std::io::Result<()> {
    let entries = match fs::read_dir(data_dir.join("fleet")) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    for entry in entries {
        match fs::read_to_string(entry?.path()) {
            Ok(text) => named.take(&Value::String(text)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

impl Named {
    /// Takes whatever looks like an address.
    fn take(&mut self, value: &Value) {
        match value {
            Value::Object(fields) => {
                let text = |name: &str| fields.get(name).and_then(Value::as_str);
                if let Some(tree) = text("tree").and_then(|tree| tree.parse::<TreeId>().ok()) {
                    let times = text("times").and_then(|times| times.parse().ok());
                    self.elsewhere.insert(Revision { tree, times });
                }
                fields.values().for_each(|value| self.take(value));
            }
            Value::Array(values) => values.iter().for_each(|value| self.take(value)),
            Value::String(text) => {
                let words = text.split(|c: char| !c.is_ascii_hexdigit());
                self.addresses.extend(
                    words
                        .filter(|word| word.len() == 64)
                        .filter_map(|word| word.parse::<BlobId>().ok()),
                );
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn whatever_looks_like_an_address_is_one() {
        let id = |n: u8| BlobId::from_bytes([n; 32]);
        let mut named = Named::default();
        named.take(&json!({
            "workspace": { "tree": id(1).to_string(), "times": id(2).to_string() },
            "list": [format!("stored as {}, which is long", id(3)), "ab", 7, null],
            "sandbox": { "tree": id(4).to_string() },
            "hash": format!("{}0", id(5)),
        }));
        let tree = |n: u8| TreeId::from_bytes([n; 32]);
        let both = Revision {
            tree: tree(1),
            times: Some(id(2)),
        };
        assert_eq!(named.elsewhere, [both, tree(4).into()].into());
        assert_eq!(named.addresses, [id(1), id(2), id(3), id(4)].into());
    }
}
