//! Two trees as text that people read and `git apply` takes.
//!
//! The format is that of `git diff` (gitformat documentation, "Generating patch text with -p"): no `index` lines, for our
//! addresses are not git's. Git knows three modes of files (100644, 100755, 120000) and no empty directories: what it cannot
//! say is in [`Patch::unshown`] and in [`Trees::changes`]. Content that is binary, large, or came after the text or the time
//! was used up is named the way git names binary files; `git apply` refuses such a patch, as it does git's own.

use std::time::{Duration, Instant};

use serde::Serialize;
use similar::{Algorithm, DiffOp, capture_diff_slices_deadline, group_diff_ops};

use super::diff::Change;
use super::error::Error;
use super::id::TreeId;
use super::name::shown;
use super::tree::Node;
use super::trees::Trees;

/// How much is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PatchLimits {
    /// Files larger than this are named only.
    pub file_bytes: u64,
    /// When the text is longer than this, further files are named only.
    pub text_bytes: usize,
    /// When this is used up, further files are named only. The search for a short diff of one file gives up earlier, and the
    /// diff is then right, but longer than need be.
    pub time: Duration,
}

impl Default for PatchLimits {
    fn default() -> Self {
        Self {
            file_bytes: 1 << 20,
            text_bytes: 16 << 20,
            time: Duration::from_secs(10),
        }
    }
}

/// A unified diff in git's format, and what it does not show.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Patch {
    /// Bytes, for files need not be UTF-8.
    pub text: Vec<u8>,
    pub unshown: Vec<(String, Unshown)>,
}

/// Why a change is not, or not wholly, in the text of a patch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Unshown {
    Binary,
    Large,
    /// The text or the time was used up.
    Late,
    /// A git repository's own files.
    Git,
    /// A mode that git does not know: permission bits of a file, or a directory's.
    Mode,
    EmptyDirectory,
}

const CONTEXT: usize = 3;
/// As git does: a NUL within the first 8,000 bytes makes a file binary.
const SNIFFED: usize = 8000;
/// The most that goes into one file's search for a short diff.
const SEARCH: Duration = Duration::from_secs(1);

impl Trees {
    /// Writes what differs between two trees as a patch.
    ///
    /// # Errors
    /// [`Error::Missing`], [`Error::Damaged`], [`Error::UnknownVersion`].
    pub fn patch(&self, old: TreeId, new: TreeId, limits: &PatchLimits) -> Result<Patch, Error> {
        let mut writer = Writer {
            trees: self,
            limits,
            end: Instant::now() + limits.time,
            patch: Patch::default(),
        };
        let changes = self.changes(old, new)?;
        for (n, change) in changes.iter().enumerate() {
            // A directory's content stands next to it: before it when it goes, after it when it comes.
            let near = [n.checked_sub(1), n.checked_add(1)];
            let near = near.into_iter().flatten().filter_map(|n| changes.get(n));
            if change.is_of_git() {
                writer.patch.unshown.push((change.shown_path(), Unshown::Git));
                continue;
            }
            writer.change(change, near)?;
        }
        Ok(writer.patch)
    }
}

struct Writer<'a> {
    trees: &'a Trees,
    limits: &'a PatchLimits,
    end: Instant,
    patch: Patch,
}

/// A file or a link, as git sees it.
struct Side<'a> {
    mode: &'static str,
    node: &'a Node,
}

impl<'a> Side<'a> {
    fn of(node: Option<&'a Node>) -> Option<Self> {
        let node = node?;
        let mode = match node {
            Node::File { mode, .. } if mode & 0o100 != 0 => "100755",
            Node::File { .. } => "100644",
            Node::Symlink { .. } => "120000",
            Node::Directory { .. } => return None,
        };
        Some(Self { mode, node })
    }
}

impl Writer<'_> {
    fn change<'c>(&mut self, change: &Change, near: impl Iterator<Item = &'c Change>) -> Result<(), Error> {
        let path = &change.path;
        if let Some(why) = directory(change, near) {
            self.patch.unshown.push((shown(path), why));
        }
        match (Side::of(change.before.as_ref()), Side::of(change.after.as_ref())) {
            (None, None) => Ok(()),
            (Some(before), Some(after)) if is_link(&before) == is_link(&after) => {
                if before.mode != after.mode {
                    self.header(path);
                    self.line(format!("old mode {}\nnew mode {}", before.mode, after.mode).as_bytes());
                } else if is_same_content(before.node, after.node) {
                    self.patch.unshown.push((shown(path), Unshown::Mode));
                    return Ok(());
                } else {
                    self.header(path);
                }
                self.content(path, Some(&before), Some(&after))
            }
            (before, after) => {
                if let Some(before) = before {
                    self.header(path);
                    self.line(format!("deleted file mode {}", before.mode).as_bytes());
                    self.content(path, Some(&before), None)?;
                }
                if let Some(after) = after {
                    self.header(path);
                    self.line(format!("new file mode {}", after.mode).as_bytes());
                    self.content(path, None, Some(&after))?;
                }
                Ok(())
            }
        }
    }

    fn content(&mut self, path: &[u8], before: Option<&Side<'_>>, after: Option<&Side<'_>>) -> Result<(), Error> {
        let (old, new) = match (self.bytes(before)?, self.bytes(after)?) {
            (Ok(old), Ok(new)) => (old, new),
            (Err(why), _) | (_, Err(why)) => {
                if before.zip(after).is_none_or(|(b, a)| !is_same_content(b.node, a.node)) {
                    self.names(path, before.is_some(), after.is_some());
                    self.patch.unshown.push((shown(path), why));
                }
                return Ok(());
            }
        };
        if old == new {
            return Ok(());
        }
        // A tab ends a name that a reader would else take to end at its first space.
        let tab: &[u8] = if path.contains(&b' ') { b"\t" } else { b"" };
        let side = |there: bool, prefix| {
            if there {
                [&quoted(prefix, path), tab].concat()
            } else {
                b"/dev/null".to_vec()
            }
        };
        self.line(&[b"--- ", side(before.is_some(), "a/").as_slice()].concat());
        self.line(&[b"+++ ", side(after.is_some(), "b/").as_slice()].concat());
        self.hunks(&old, &new);
        Ok(())
    }

    /// The content of a side, or why it is not shown.
    fn bytes(&self, side: Option<&Side<'_>>) -> Result<Result<Vec<u8>, Unshown>, Error> {
        let Some(side) = side else {
            return Ok(Ok(Vec::new()));
        };
        match side.node {
            Node::Symlink { target } => Ok(Ok(target.clone())),
            Node::Directory { .. } => Ok(Ok(Vec::new())),
            Node::File { size: 0, .. } => Ok(Ok(Vec::new())),
            Node::File { size, .. } if *size > self.limits.file_bytes => Ok(Err(Unshown::Large)),
            Node::File { blob, .. } => {
                if self.patch.text.len() > self.limits.text_bytes || Instant::now() >= self.end {
                    return Ok(Err(Unshown::Late));
                }
                let bytes = self.trees.blobs.get(*blob)?;
                let binary = bytes.iter().take(SNIFFED).any(|byte| *byte == 0);
                Ok(if binary { Err(Unshown::Binary) } else { Ok(bytes) })
            }
        }
    }

    fn hunks(&mut self, old: &[u8], new: &[u8]) {
        let old: Vec<&[u8]> = old.split_inclusive(|byte| *byte == b'\n').collect();
        let new: Vec<&[u8]> = new.split_inclusive(|byte| *byte == b'\n').collect();
        let deadline = self.end.min(Instant::now() + SEARCH);
        let ops = capture_diff_slices_deadline(Algorithm::Myers, &old, &new, Some(deadline));
        for group in group_diff_ops(ops, CONTEXT) {
            let (Some(first), Some(last)) = (group.first(), group.last()) else {
                continue;
            };
            let was = range(first.old_range().start, last.old_range().end);
            let is = range(first.new_range().start, last.new_range().end);
            self.line(format!("@@ -{was} +{is} @@").as_bytes());
            for op in group {
                match op {
                    DiffOp::Equal { old_index, len, .. } => self.lines(b' ', &old[old_index..old_index + len]),
                    DiffOp::Delete { old_index, old_len, .. } => {
                        self.lines(b'-', &old[old_index..old_index + old_len]);
                    }
                    DiffOp::Insert { new_index, new_len, .. } => {
                        self.lines(b'+', &new[new_index..new_index + new_len]);
                    }
                    DiffOp::Replace {
                        old_index,
                        old_len,
                        new_index,
                        new_len,
                    } => {
                        self.lines(b'-', &old[old_index..old_index + old_len]);
                        self.lines(b'+', &new[new_index..new_index + new_len]);
                    }
                }
            }
        }
    }

    fn lines(&mut self, sign: u8, lines: &[&[u8]]) {
        for line in lines {
            self.patch.text.push(sign);
            self.patch.text.extend_from_slice(line);
            if !line.ends_with(b"\n") {
                self.patch.text.extend_from_slice(b"\n\\ No newline at end of file\n");
            }
        }
    }

    fn header(&mut self, path: &[u8]) {
        let line = [b"diff --git ", quoted("a/", path).as_slice(), b" ", &quoted("b/", path)].concat();
        self.line(&line);
    }

    fn names(&mut self, path: &[u8], before: bool, after: bool) {
        let side = |there: bool, prefix| {
            if there {
                quoted(prefix, path)
            } else {
                b"/dev/null".to_vec()
            }
        };
        let (a, b) = (side(before, "a/"), side(after, "b/"));
        self.line(&[b"Binary files ", a.as_slice(), b" and ", &b, b" differ"].concat());
    }

    fn line(&mut self, line: &[u8]) {
        self.patch.text.extend_from_slice(line);
        self.patch.text.push(b'\n');
    }
}

/// What cannot be said of a change that has to do with a directory; `near` are the changes next to it.
fn directory<'c>(change: &Change, mut near: impl Iterator<Item = &'c Change>) -> Option<Unshown> {
    let prefix = [change.path.as_slice(), b"/"].concat();
    match (&change.before, &change.after) {
        (Some(Node::Directory { .. }), Some(Node::Directory { .. })) => Some(Unshown::Mode),
        (Some(Node::Directory { .. }), _) | (_, Some(Node::Directory { .. })) => {
            let is_empty = !near.any(|other| other.path.starts_with(&prefix));
            is_empty.then_some(Unshown::EmptyDirectory)
        }
        (
            None | Some(Node::File { .. } | Node::Symlink { .. }),
            None | Some(Node::File { .. } | Node::Symlink { .. }),
        ) => None,
    }
}

fn is_link(side: &Side<'_>) -> bool {
    matches!(side.node, Node::Symlink { .. })
}

fn is_same_content(before: &Node, after: &Node) -> bool {
    match (before, after) {
        (Node::File { blob: before, .. }, Node::File { blob: after, .. }) => before == after,
        (Node::Symlink { target: before }, Node::Symlink { target: after }) => before == after,
        _ => false,
    }
}

/// The lines `start..end` (from 0) as a hunk header counts them: from 1, and an empty range names the line before it.
fn range(start: usize, end: usize) -> String {
    match end - start {
        0 => format!("{start},0"),
        1 => format!("{}", start + 1),
        length => format!("{},{length}", start + 1),
    }
}

/// A path as git writes it: in double quotes with C escapes where it has control characters, quotes, backslashes or bytes
/// beyond ASCII (`core.quotePath`).
fn quoted(prefix: &str, path: &[u8]) -> Vec<u8> {
    let plain = |byte: &u8| matches!(byte, 0x20..=0x7e) && !matches!(byte, b'"' | b'\\');
    let mut out = Vec::with_capacity(path.len() + 4);
    if path.iter().all(plain) {
        out.extend_from_slice(prefix.as_bytes());
        out.extend_from_slice(path);
        return out;
    }
    out.push(b'"');
    out.extend_from_slice(prefix.as_bytes());
    for byte in path {
        match byte {
            b'"' | b'\\' => out.extend_from_slice(&[b'\\', *byte]),
            0x07 => out.extend_from_slice(b"\\a"),
            0x08 => out.extend_from_slice(b"\\b"),
            b'\t' => out.extend_from_slice(b"\\t"),
            b'\n' => out.extend_from_slice(b"\\n"),
            0x0b => out.extend_from_slice(b"\\v"),
            0x0c => out.extend_from_slice(b"\\f"),
            b'\r' => out.extend_from_slice(b"\\r"),
            byte if plain(byte) => out.push(*byte),
            byte => out.extend_from_slice(format!("\\{byte:03o}").as_bytes()),
        }
    }
    out.push(b'"');
    out
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;
    use std::process::{Command, Stdio};

    use proptest::prelude::*;

    use super::super::testing::{Bench, Plan, Thing, cases, content, names, plan, snapshot};
    use super::*;

    /// Runs the real `git apply` on a directory.
    fn apply(dir: &Path, patch: &[u8]) -> Result<(), String> {
        let mut git = Command::new("git");
        git.args(["-c", "core.autocrlf=false", "apply", "--whitespace=nowarn", "-p1", "-"])
            .current_dir(dir);
        // Not inside any repository: then git apply works on the directory alone.
        git.env("GIT_CEILING_DIRECTORIES", dir.parent().unwrap())
            .env("GIT_CONFIG_NOSYSTEM", "1");
        let mut child = git.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        std::io::Write::write_all(&mut child.stdin.take().unwrap(), patch).unwrap();
        let output = child.wait_with_output().unwrap();
        if output.status.success() {
            Ok(())
        } else {
            Err(String::from_utf8_lossy(&output.stderr).into_owned())
        }
    }

    fn tree(bench: &Bench, name: &str, plan: &Plan) -> TreeId {
        snapshot(&bench.trees, &bench.made(name, plan), None).revision.tree
    }

    /// What git can say of a plan: two modes, no empty directories, nothing of git's own.
    fn gitlike(plan: Plan) -> Plan {
        let things = plan.into_iter().filter_map(|(name, thing)| {
            let thing = match thing {
                Thing::File { content, mode } => Thing::File {
                    content,
                    mode: if mode & 0o100 != 0 { 0o755 } else { 0o644 },
                },
                Thing::Link(target) => Thing::Link(target),
                Thing::Directory { content, .. } => {
                    let content = gitlike(content);
                    if content.is_empty() {
                        return None;
                    }
                    Thing::Directory { mode: 0o755, content }
                }
            };
            Some((name, thing))
        });
        things.collect()
    }

    proptest! {
        #![proptest_config(cases(24))]

        #[test]
        fn git_apply_makes_the_new_tree_of_the_old_one(old in plan(), new in plan()) {
            let (old, new) = (gitlike(old), gitlike(new));
            let bench = Bench::new();
            let (before, after) = (tree(&bench, "old", &old), tree(&bench, "new", &new));
            let patch = bench.trees.patch(before, after, &PatchLimits::default()).unwrap();
            prop_assert_eq!(&patch.unshown, &vec![]);
            let dir = bench.dir.path().join("old");
            if before != after {
                let text = String::from_utf8_lossy(&patch.text);
                prop_assert_eq!(apply(&dir, &patch.text), Ok(()), "{}", text);
            }
            prop_assert_eq!(snapshot(&bench.trees, &dir, None).revision.tree, after);
        }

        #[test]
        fn git_apply_takes_each_edit_of_one_file(
            name in prop::sample::select(names()), old in content(), new in content(), modes in any::<(bool, bool)>(),
        ) {
            let mode = |x| if x { 0o755 } else { 0o644 };
            let plan = |content, x| Plan::from([(name.clone(), Thing::File { content, mode: mode(x) })]);
            let bench = Bench::new();
            let (before, after) = (tree(&bench, "old", &plan(old, modes.0)), tree(&bench, "new", &plan(new, modes.1)));
            let patch = bench.trees.patch(before, after, &PatchLimits::default()).unwrap();
            let dir = bench.dir.path().join("old");
            if before != after {
                prop_assert_eq!(apply(&dir, &patch.text), Ok(()), "{}", String::from_utf8_lossy(&patch.text));
            }
            prop_assert_eq!(snapshot(&bench.trees, &dir, None).revision.tree, after);
        }
    }

    #[test]
    fn the_text_is_gits() {
        let bench = Bench::new();
        let file = |content: &[u8], mode| Thing::File {
            content: content.to_vec(),
            mode,
        };
        let numbers = |skip: u32| {
            (1..=20)
                .filter(|n| *n != skip)
                .map(|n| format!("{n}\n"))
                .collect::<String>()
        };
        let old: Plan = [
            (
                b"added dir".to_vec(),
                Thing::Directory {
                    mode: 0o755,
                    content: Plan::new(),
                },
            ),
            (b"bin".to_vec(), file(b"\0\x01", 0o644)),
            (b"edit me".to_vec(), file(numbers(0).as_bytes(), 0o644)),
            (b"gone".to_vec(), file(b"last words", 0o644)),
            (b"mode".to_vec(), file(b"#!\n", 0o644)),
            (b"private".to_vec(), file(b"", 0o644)),
        ]
        .into();
        let new: Plan = [
            (
                b"added dir".to_vec(),
                Thing::Directory {
                    mode: 0o755,
                    content: [
                        (b"empty".to_vec(), file(b"", 0o644)),
                        ("é".into(), Thing::Link(b"x".to_vec())),
                    ]
                    .into(),
                },
            ),
            (b"big".to_vec(), file(&[b'x'; 100], 0o644)),
            (b"bin".to_vec(), file(b"\0\x02", 0o644)),
            (b"edit me".to_vec(), file(numbers(10).as_bytes(), 0o644)),
            (b"mode".to_vec(), file(b"#!\n", 0o755)),
            (b"private".to_vec(), file(b"", 0o600)),
            (
                b"void".to_vec(),
                Thing::Directory {
                    mode: 0o755,
                    content: Plan::new(),
                },
            ),
        ]
        .into();
        let (old, new) = (tree(&bench, "old", &old), tree(&bench, "new", &new));
        let limits = PatchLimits {
            file_bytes: 99,
            ..PatchLimits::default()
        };
        let patch = bench.trees.patch(old, new, &limits).unwrap();
        let expected = "\
diff --git a/added dir/empty b/added dir/empty
new file mode 100644
diff --git \"a/added dir/\\303\\251\" \"b/added dir/\\303\\251\"
new file mode 120000
--- /dev/null
+++ \"b/added dir/\\303\\251\"\t
@@ -0,0 +1 @@
+x
\\ No newline at end of file
diff --git a/big b/big
new file mode 100644
Binary files /dev/null and b/big differ
diff --git a/bin b/bin
Binary files a/bin and b/bin differ
diff --git a/edit me b/edit me
--- a/edit me\t
+++ b/edit me\t
@@ -7,7 +7,6 @@
 7
 8
 9
-10
 11
 12
 13
diff --git a/gone b/gone
deleted file mode 100644
--- a/gone
+++ /dev/null
@@ -1 +0,0 @@
-last words
\\ No newline at end of file
diff --git a/mode b/mode
old mode 100644
new mode 100755
";
        assert_eq!(String::from_utf8(patch.text).unwrap(), expected);
        let unshown: Vec<(&str, Unshown)> = patch.unshown.iter().map(|(path, why)| (path.as_str(), *why)).collect();
        assert_eq!(
            unshown,
            [
                ("big", Unshown::Large),
                ("bin", Unshown::Binary),
                ("private", Unshown::Mode),
                ("void", Unshown::EmptyDirectory),
            ]
        );
    }

    #[test]
    fn without_time_files_are_named_only() {
        let bench = Bench::new();
        let file = |content: &[u8]| Thing::File {
            content: content.to_vec(),
            mode: 0o644,
        };
        let old = tree(&bench, "old", &[(b"f".to_vec(), file(b"1\n"))].into());
        let new = tree(&bench, "new", &[(b"f".to_vec(), file(b"2\n"))].into());
        let limits = PatchLimits {
            time: Duration::ZERO,
            ..PatchLimits::default()
        };
        let patch = bench.trees.patch(old, new, &limits).unwrap();
        assert_eq!(patch.text, b"diff --git a/f b/f\nBinary files a/f and b/f differ\n");
        assert_eq!(patch.unshown, [("f".to_owned(), Unshown::Late)]);
    }

    #[test]
    fn a_pathological_file_still_has_a_right_diff() {
        let bench = Bench::new();
        let noise = |seed: u8, count: usize| {
            let mut bytes = vec![0; count];
            blake3::Hasher::new_keyed(&[seed; 32]).finalize_xof().fill(&mut bytes);
            let lines: Vec<String> = bytes.iter().map(|byte| format!("{}\n", byte % 7)).collect();
            lines.concat().into_bytes()
        };
        let plan = |seed| {
            Plan::from([(
                b"f".to_vec(),
                Thing::File {
                    content: noise(seed, 200_000),
                    mode: 0o644,
                },
            )])
        };
        let (old, new) = (tree(&bench, "old", &plan(1)), tree(&bench, "new", &plan(2)));
        let patch = bench.trees.patch(old, new, &PatchLimits::default()).unwrap();
        let dir = bench.dir.path().join("old");
        assert_eq!(apply(&dir, &patch.text), Ok(()));
        assert!(fs::read(dir.join("f")).unwrap() == noise(2, 200_000));
    }
}
