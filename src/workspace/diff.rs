//! What differs between two trees.

use serde::Serialize;

use super::error::Error;
use super::id::TreeId;
use super::name::{join, shown};
use super::tree::{Entry, Node, Tree};
use super::trees::Trees;

/// One path that differs. A directory whose content alone differs is no change; its content is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// Relative to the root, components joined by `/`; any bytes.
    pub path: Vec<u8>,
    pub before: Option<Node>,
    pub after: Option<Node>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ChangeKind {
    Added,
    Removed,
    /// Other content, maybe another mode too.
    Modified,
    /// Another mode alone.
    Mode,
    /// A file became a link or a directory, or the like.
    Type,
}

impl Change {
    pub fn kind(&self) -> ChangeKind {
        match (&self.before, &self.after) {
            (None, _) => ChangeKind::Added,
            (Some(_), None) => ChangeKind::Removed,
            (Some(Node::File { blob: before, .. }), Some(Node::File { blob: after, .. })) => {
                if before == after {
                    ChangeKind::Mode
                } else {
                    ChangeKind::Modified
                }
            }
            (Some(Node::Directory { .. }), Some(Node::Directory { .. })) => ChangeKind::Mode,
            (Some(Node::Symlink { .. }), Some(Node::Symlink { .. })) => ChangeKind::Modified,
            (Some(Node::File { .. } | Node::Directory { .. } | Node::Symlink { .. }), Some(_)) => ChangeKind::Type,
        }
    }

    /// Whether it lies in a git repository's own files. They are carried in the workspace, but they are a way to have code
    /// run (hooks, configuration) wherever they are put, and no patch can show them.
    pub fn is_of_git(&self) -> bool {
        self.path
            .split(|byte| *byte == b'/')
            .any(|component| component.eq_ignore_ascii_case(b".git"))
    }

    /// The path on one harmless line.
    pub fn shown_path(&self) -> String {
        shown(&self.path)
    }
}

impl Trees {
    /// Lists what differs, in an order in which it can be carried out: what leaves a directory before the directory
    /// itself, what enters it after; else by name. Trees that are shared are not even read. Content, modes and types
    /// count; extended attributes, and which names share an inode, do not.
    ///
    /// # Errors
    /// [`Error::Missing`], [`Error::Damaged`], [`Error::UnknownVersion`].
    pub fn changes(&self, old: TreeId, new: TreeId) -> Result<Vec<Change>, Error> {
        let mut changes = Vec::new();
        self.compare(&[], Some(old), Some(new), &mut changes)?;
        Ok(changes)
    }

    fn compare(
        &self,
        path: &[u8],
        old: Option<TreeId>,
        new: Option<TreeId>,
        changes: &mut Vec<Change>,
    ) -> Result<(), Error> {
        if old == new {
            return Ok(());
        }
        let load = |id: Option<TreeId>| id.map_or(Ok(Tree::default()), |id| self.tree(id));
        let (old, new) = (load(old)?, load(new)?);
        let mut names: Vec<&[u8]> = old.entries().iter().chain(new.entries()).map(name).collect();
        names.sort_unstable();
        names.dedup();
        for name in names {
            let (before, after) = (old.get(name), new.get(name));
            if before.map(Node::bare) == after.map(Node::bare) {
                continue;
            }
            let path = join(path, name);
            let (inner_before, inner_after) = (inner(before), inner(after));
            let leaves = inner_before.is_some() && inner_after.is_none();
            if leaves {
                self.compare(&path, inner_before, None, changes)?;
            }
            if !is_content_alone(before, after) {
                changes.push(Change {
                    path: path.clone(),
                    before: before.cloned(),
                    after: after.cloned(),
                });
            }
            if !leaves {
                self.compare(&path, inner_before, inner_after, changes)?;
            }
        }
        Ok(())
    }
}

fn name(entry: &Entry) -> &[u8] {
    &entry.name
}

fn inner(node: Option<&Node>) -> Option<TreeId> {
    match node? {
        Node::Directory { tree, .. } => Some(*tree),
        Node::File { .. } | Node::Symlink { .. } => None,
    }
}

fn is_content_alone(before: Option<&Node>, after: Option<&Node>) -> bool {
    match (before, after) {
        (Some(Node::Directory { mode: before, .. }), Some(Node::Directory { mode: after, .. })) => before == after,
        _ => false,
    }
}
