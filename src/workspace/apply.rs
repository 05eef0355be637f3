//! Applying: what a run changed goes into the user's own directory, if that is still what the run began with.
//!
//! First every touched path is compared with the base; one difference and nothing is written ([`Error::Conflict`] lists all).
//! Then all new content is staged in `.exuvia-apply` inside the directory and synced, and only then moved to its place, file by
//! file, each move atomic. A path that already is as it should become counts as done, so an apply that was killed can be run
//! again. By descriptor throughout; a link on the way to a path is a conflict, never followed.

use std::collections::HashSet;
use std::fmt;
use std::fs::File;
use std::io;
use std::path::Path;

use super::clearing;
use super::diff::{Change, ChangeKind};
use super::error::Error;
use super::folder::{FileType, Folder, Meta};
use super::id::TreeId;
use super::import;
use super::name::shown;
use super::tree::Node;
use super::trees::Trees;

/// What was written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Applied {
    pub changes: Vec<(String, ChangeKind)>,
    /// How many of them were there already.
    pub already: usize,
    /// A git repository's own files, which are never written: the run's hooks would run as the user.
    pub left_out: Vec<String>,
}

/// A path of the user's directory that is not what the run began with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conflict {
    pub path: String,
    pub reason: Reason,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The run added it, and something else is there.
    Exists,
    /// The run changed or removed it, and it is gone.
    Gone,
    Differs,
    /// The run removed this directory, and it holds more than it did.
    HoldsMore,
    /// A directory on the way is gone or is none, maybe a link.
    NoWay,
}

impl fmt::Display for Conflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let why = match self.reason {
            Reason::Exists => "is there already, and the run added it",
            Reason::Gone => "is gone, and the run changed it",
            Reason::Differs => "was changed here too",
            Reason::HoldsMore => "was removed by the run, and holds more than it did",
            Reason::NoWay => "lies below something that is no longer a directory",
        };
        write!(f, "`{}` {why}", self.path)
    }
}

const STAGING: &[u8] = b".exuvia-apply";

impl Trees {
    /// Writes what differs between `base` and `new` into the directory `dir`.
    ///
    /// New and changed files get the present time; run by root, they get the owner of what they replace, else of `dir`.
    ///
    /// # Errors
    /// [`Error::Conflict`]: nothing is written. [`Error::HalfApplied`]: some is, each path wholly, and applying again goes
    /// on. Else nothing is written: [`Error::NoDirectory`], [`Error::NotADirectory`], [`Error::Unreadable`], [`Error::Io`],
    /// [`Error::Missing`], [`Error::Damaged`].
    pub fn apply(&self, dir: &Path, base: TreeId, new: TreeId) -> Result<Applied, Error> {
        let root = import::open(dir)?;
        let (left_out, changes): (Vec<_>, Vec<_>) = self.changes(base, new)?.into_iter().partition(Change::is_of_git);
        let steps = self.check(&root, &changes)?;
        let applied = Applied {
            changes: changes
                .iter()
                .map(|change| (change.shown_path(), change.kind()))
                .collect(),
            already: steps.iter().filter(|step| step.already).count(),
            left_out: left_out.iter().map(Change::shown_path).collect(),
        };
        if applied.already == steps.len() {
            return Ok(applied);
        }
        let _lock = clear_staging(&root)?;
        let staging = root.create_folder(STAGING).map_err(|e| Error::io("make", STAGING, e))?;
        let mut work = Work {
            trees: self,
            root: &root,
            staging,
            home: root.meta().map_err(|e| Error::io("look at", b".", e))?,
            modes: Vec::new(),
            done: 0,
        };
        let done = work.carry_out(&steps);
        clearing::remove(&root, STAGING, &mut Vec::new())?;
        done?;
        Ok(applied)
    }

    fn check<'a>(&self, root: &Folder, changes: &'a [Change]) -> Result<Vec<Step<'a>>, Error> {
        let made: HashSet<&[u8]> = changes
            .iter()
            .filter(|c| makes_directory(c))
            .map(|c| &*c.path)
            .collect();
        let mut steps = Vec::with_capacity(changes.len());
        let mut conflicts = Vec::new();
        for change in changes {
            match self.look(root, change, &made)? {
                Ok(step) => steps.push(step),
                Err(reason) => conflicts.push(Conflict {
                    path: change.shown_path(),
                    reason,
                }),
            }
        }
        if conflicts.is_empty() {
            Ok(steps)
        } else {
            Err(Error::Conflict(conflicts))
        }
    }

    /// Compares one path with what the run began with.
    fn look<'a>(
        &self,
        root: &Folder,
        change: &'a Change,
        made: &HashSet<&[u8]>,
    ) -> Result<Result<Step<'a>, Reason>, Error> {
        let path = &change.path;
        let (parents, name) = split(path);
        let Some(folder) = descend(root, parents).map_err(|e| Error::io("enter", path, e))? else {
            let gone_too = change.after.is_none();
            let step = |already| Step {
                change,
                meta: None,
                already,
            };
            return Ok(match change.before {
                None if made.contains(parents) => Ok(step(false)),
                Some(_) if gone_too => Ok(step(true)),
                Some(_) | None => Err(Reason::NoWay),
            });
        };
        let meta = folder.look(name).map_err(|e| Error::io("look at", path, e))?;
        let is = |node: Option<&Node>| self.is(&folder, name, path, meta.as_ref(), node);
        let step = |already| Step { change, meta, already };
        if is(change.after.as_ref())? {
            return Ok(Ok(step(true)));
        }
        if !is(change.before.as_ref())? {
            return Ok(Err(match (&change.before, meta) {
                (None, _) => Reason::Exists,
                (Some(_), None) => Reason::Gone,
                (Some(_), Some(_)) => Reason::Differs,
            }));
        }
        if let (Some(Node::Directory { tree, .. }), after) = (&change.before, &change.after)
            && !matches!(after, Some(Node::Directory { .. }))
        {
            let known = self.tree(*tree)?;
            let inside = folder.enter(name).map_err(|e| Error::io("enter", path, e))?;
            let names = inside.names(u64::MAX).map_err(|e| Error::io("list", path, e))?;
            if names.unwrap_or_default().iter().any(|name| known.get(name).is_none()) {
                return Ok(Err(Reason::HoldsMore));
            }
        }
        Ok(Ok(step(false)))
    }

    /// Whether a name is what a node says; of a directory, itself and not its content.
    fn is(
        &self,
        folder: &Folder,
        name: &[u8],
        path: &[u8],
        meta: Option<&Meta>,
        node: Option<&Node>,
    ) -> Result<bool, Error> {
        let (Some(meta), Some(node)) = (meta, node) else {
            return Ok(meta.is_none() && node.is_none());
        };
        match node {
            Node::Directory { mode, .. } => Ok(meta.file_type == FileType::Directory && meta.mode == *mode),
            Node::Symlink { target } => {
                let is_link = meta.file_type == FileType::Symlink;
                Ok(is_link && folder.read_link(name).map_err(|e| Error::io("read", path, e))? == *target)
            }
            Node::File { mode, size, blob, .. } => {
                if (meta.file_type, meta.mode, meta.size) != (FileType::File, *mode, *size) {
                    return Ok(false);
                }
                let (mut file, meta) = folder.open_file(name).map_err(|e| Error::io("read", path, e))?;
                if meta.file_type != FileType::File {
                    return Ok(false);
                }
                let mut hasher = blake3::Hasher::new();
                hasher
                    .update_reader(&mut file)
                    .map_err(|e| Error::io("read", path, e))?;
                Ok(hasher.finalize().as_bytes() == blob.as_bytes())
            }
        }
    }
}

/// A change that may be carried out.
struct Step<'a> {
    change: &'a Change,
    /// What was there when it was compared.
    meta: Option<Meta>,
    already: bool,
}

struct Work<'a> {
    trees: &'a Trees,
    root: &'a Folder,
    staging: Folder,
    /// The user's directory itself.
    home: Meta,
    /// Directories whose modes are set at the end, since one may forbid writing into it.
    modes: Vec<(&'a [u8], u16)>,
    done: usize,
}

impl<'a> Work<'a> {
    fn carry_out(&mut self, steps: &[Step<'a>]) -> Result<(), Error> {
        let todo = || steps.iter().enumerate().filter(|(_, step)| !step.already);
        for (n, step) in todo() {
            self.stage(n, step)?;
        }
        self.staging
            .sync_file_system()
            .map_err(|e| Error::io("write to the disk", STAGING, e))?;
        for (n, step) in todo() {
            self.put(n, step).map_err(|e| self.half_way(step, e))?;
            self.done += 1;
        }
        for (path, mode) in std::mem::take(&mut self.modes).into_iter().rev() {
            let (parents, name) = split(path);
            let set = self.parent(parents).and_then(|folder| {
                let made = folder.enter(name)?;
                nix::sys::stat::fchmod(&made, nix::sys::stat::Mode::from_bits_truncate(u32::from(mode)))?;
                Ok(())
            });
            set.map_err(|e| Error::io("set the mode of", path, e))?;
        }
        self.root
            .sync_file_system()
            .map_err(|e| Error::io("write to the disk", b".", e))
    }

    /// Writes new content under a number.
    fn stage(&self, n: usize, step: &Step<'_>) -> Result<(), Error> {
        let path = &step.change.path;
        let number = n.to_string();
        match &step.change.after {
            None | Some(Node::Directory { .. }) => Ok(()),
            Some(Node::Symlink { target }) => {
                let made = self.staging.create_symlink(number.as_bytes(), target);
                made.and_then(|()| self.give(&self.staging, number.as_bytes(), step.meta))
                    .map_err(|e| Error::io("stage", path, e))
            }
            Some(Node::File { mode, blob, .. }) => {
                let failed = |e: io::Error| Error::io("stage", path, e);
                let mut file = self.staging.create_file(number.as_bytes()).map_err(failed)?;
                let mut reader = self.trees.blobs.reader(*blob)?;
                io::copy(&mut reader, &mut file).map_err(|error| match error.downcast::<Error>() {
                    Ok(own) => own,
                    Err(error) => failed(error),
                })?;
                self.give(&self.staging, number.as_bytes(), step.meta).map_err(failed)?;
                let mode = nix::sys::stat::Mode::from_bits_truncate(u32::from(*mode));
                nix::sys::stat::fchmod(&file, mode).map_err(|e| failed(e.into()))
            }
        }
    }

    /// Carries one change out, if its path is still what it was when it was compared.
    fn put(&mut self, n: usize, step: &Step<'a>) -> Result<(), Error> {
        let path = &step.change.path;
        let failed = |e: io::Error| Error::io("write", path, e);
        let (parents, name) = split(path);
        let folder = self.parent(parents).map_err(failed)?;
        let now = folder.look(name).map_err(failed)?;
        if !is_unchanged(step.meta, now) {
            let (path, reason) = (shown(path), Reason::Differs);
            return Err(Error::Conflict(vec![Conflict { path, reason }]));
        }
        let number = n.to_string();
        match (&step.change.before, &step.change.after) {
            (_, None) => match now.map(|meta| meta.file_type) {
                Some(FileType::Directory) => folder.remove_folder(name),
                _ => folder.remove_file(name),
            },
            (Some(Node::Directory { .. }), Some(Node::Directory { mode, .. })) => {
                self.modes.push((path, *mode));
                Ok(())
            }
            (before, Some(Node::Directory { mode, .. })) => {
                self.modes.push((path, *mode));
                let cleared = before.as_ref().map_or(Ok(()), |_| folder.remove_file(name));
                cleared
                    .and_then(|()| folder.create_folder(name))
                    .and_then(|_| self.give(&folder, name, None))
            }
            (None, Some(_)) => self.staging.rename_to_new(number.as_bytes(), &folder, name),
            (Some(Node::Directory { .. }), Some(_)) => folder
                .remove_folder(name)
                .and_then(|()| self.staging.rename_to_new(number.as_bytes(), &folder, name)),
            (Some(Node::File { .. } | Node::Symlink { .. }), Some(_)) => {
                self.staging.rename_to(number.as_bytes(), &folder, name)
            }
        }
        .map_err(failed)
    }

    /// Root's files in a user's directory would be in the user's way.
    fn give(&self, folder: &Folder, name: &[u8], replaced: Option<Meta>) -> io::Result<()> {
        if !nix::unistd::geteuid().is_root() {
            return Ok(());
        }
        let like = replaced.unwrap_or(self.home);
        folder.chown(name, like.uid, like.gid)
    }

    fn parent(&self, parents: &[u8]) -> io::Result<Folder> {
        descend(self.root, parents)?.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))
    }

    fn half_way(&self, step: &Step<'_>, error: Error) -> Error {
        if self.done == 0 {
            return error;
        }
        Error::HalfApplied {
            path: step.change.shown_path(),
            done: self.done,
            source: Box::new(error),
        }
    }
}

fn makes_directory(change: &Change) -> bool {
    let is_directory = |node: &Option<Node>| matches!(node, Some(Node::Directory { .. }));
    is_directory(&change.after) && !is_directory(&change.before)
}

/// Nothing but a directory's own content may have moved since.
fn is_unchanged(then: Option<Meta>, now: Option<Meta>) -> bool {
    match (then, now) {
        (None, None) => true,
        (Some(then), Some(now)) if then.file_type == FileType::Directory => {
            (then.file_type, then.inode) == (now.file_type, now.inode)
        }
        (Some(then), Some(now)) => then == now,
        (Some(_), None) | (None, Some(_)) => false,
    }
}

/// The directories above a path, and its last component.
fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|byte| *byte == b'/') {
        Some(at) => (&path[..at], &path[at + 1..]),
        None => (&[], path),
    }
}

/// Walks down without following links; `None` where a directory is absent or is none.
fn descend(root: &Folder, path: &[u8]) -> io::Result<Option<Folder>> {
    let mut folder = root.enter(b".")?;
    for name in path.split(|byte| *byte == b'/').filter(|name| !name.is_empty()) {
        folder = match folder.enter(name) {
            Ok(inner) => inner,
            Err(error) => {
                return match error.raw_os_error() {
                    Some(nix::libc::ENOENT | nix::libc::ENOTDIR | nix::libc::ELOOP) => Ok(None),
                    _ => Err(error),
                };
            }
        };
    }
    Ok(Some(folder))
}

/// Removes what a killed apply left, and keeps two from working at once: the lock is on the directory itself.
fn clear_staging(root: &Folder) -> Result<File, Error> {
    let own = root.enter(b".").map_err(|e| Error::io("open", b".", e))?;
    let lock = File::from(std::os::fd::OwnedFd::from(own));
    lock.try_lock().map_err(|_| {
        let busy = io::Error::new(io::ErrorKind::ResourceBusy, "another apply is at work in it");
        Error::io("lock", b".", busy)
    })?;
    clearing::remove(root, STAGING, &mut Vec::new())?;
    Ok(lock)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, symlink};

    use proptest::prelude::*;

    use super::super::testing::{Bench, Plan, Thing, build, cases, everything, plan, snapshot, timeless};
    use super::*;

    fn file(content: &str) -> Thing {
        Thing::File {
            content: content.as_bytes().to_vec(),
            mode: 0o644,
        }
    }

    fn folder(content: Plan) -> Thing {
        Thing::Directory { mode: 0o755, content }
    }

    fn plan_of<const N: usize>(things: [(&str, Thing); N]) -> Plan {
        things.map(|(name, thing)| (name.as_bytes().to_vec(), thing)).into()
    }

    fn tree(bench: &Bench, name: &str, plan: &Plan) -> TreeId {
        snapshot(&bench.trees, &bench.made(name, plan), None).revision.tree
    }

    proptest! {
        #![proptest_config(cases(24))]

        #[test]
        fn applying_makes_the_new_tree_of_the_old_one(old in plan(), new in plan()) {
            let bench = Bench::new();
            let (base, aim) = (tree(&bench, "user", &old), tree(&bench, "aim", &new));
            let user = bench.dir.path().join("user");
            let applied = bench.trees.apply(&user, base, aim).unwrap();
            prop_assert_eq!(applied.already, 0);
            prop_assert_eq!(timeless(&user), timeless(&bench.dir.path().join("aim")));
            let again = bench.trees.apply(&user, base, aim).unwrap();
            prop_assert_eq!(again.already, again.changes.len());
            prop_assert_eq!(again.changes, applied.changes);
        }

        /// Whatever the user did in the meantime: all or nothing, and never a path lost that the user changed.
        #[test]
        fn a_conflict_changes_nothing(old in plan(), new in plan(), now in plan()) {
            let bench = Bench::new();
            let (base, aim) = (tree(&bench, "old", &old), tree(&bench, "aim", &new));
            let user = bench.made("user", &now);
            let before = everything(&user);
            match bench.trees.apply(&user, base, aim) {
                Ok(_) => {}
                Err(Error::Conflict(conflicts)) => {
                    prop_assert!(!conflicts.is_empty());
                    prop_assert_eq!(everything(&user), before);
                }
                Err(other) => prop_assert!(false, "{other:?}"),
            }
        }
    }

    #[test]
    fn conflicts_are_all_listed() {
        let bench = Bench::new();
        let old = plan_of([
            ("dir", folder(plan_of([("in", file("1"))]))),
            ("edited", file("1")),
            ("gone", file("1")),
            ("same", file("1")),
            ("way", folder(plan_of([("in", file("1"))]))),
        ]);
        let new = plan_of([
            ("edited", file("2")),
            ("fresh", file("2")),
            ("gone", file("2")),
            ("same", file("2")),
            ("way", folder(plan_of([("in", file("2"))]))),
        ]);
        let (base, aim) = (tree(&bench, "old", &old), tree(&bench, "aim", &new));
        let outside = bench.made("outside", &plan_of([("in", file("1"))]));
        let user = bench.made("user", &old);
        fs::write(user.join("dir/mine"), "mine").unwrap();
        fs::write(user.join("edited"), "mine").unwrap();
        fs::write(user.join("fresh"), "mine").unwrap();
        fs::remove_file(user.join("gone")).unwrap();
        fs::remove_dir_all(user.join("way")).unwrap();
        symlink(&outside, user.join("way")).unwrap();
        let before = (everything(&user), everything(&outside));
        let Err(Error::Conflict(conflicts)) = bench.trees.apply(&user, base, aim) else {
            panic!("no conflict");
        };
        let conflicts: Vec<(&str, Reason)> = conflicts.iter().map(|c| (c.path.as_str(), c.reason)).collect();
        assert_eq!(
            conflicts,
            [
                ("dir", Reason::HoldsMore),
                ("edited", Reason::Differs),
                ("fresh", Reason::Exists),
                ("gone", Reason::Gone),
                ("way/in", Reason::NoWay),
            ]
        );
        assert_eq!((everything(&user), everything(&outside)), before);
    }

    #[test]
    fn what_a_killed_apply_left_is_no_hindrance() {
        let bench = Bench::new();
        let old = plan_of([("a", file("1")), ("b", file("1"))]);
        let new = plan_of([("a", file("2")), ("b", file("2"))]);
        let (base, aim) = (tree(&bench, "user", &old), tree(&bench, "aim", &new));
        let user = bench.dir.path().join("user");
        fs::create_dir(user.join(".exuvia-apply")).unwrap();
        fs::write(user.join(".exuvia-apply/0"), "half").unwrap();
        fs::write(user.join("a"), "2").unwrap();
        let applied = bench.trees.apply(&user, base, aim).unwrap();
        assert_eq!(
            applied.changes,
            [
                ("a".to_owned(), ChangeKind::Modified),
                ("b".to_owned(), ChangeKind::Modified)
            ]
        );
        assert_eq!(applied.already, 1);
        assert_eq!(timeless(&user), timeless(&bench.dir.path().join("aim")));
    }

    #[test]
    fn what_the_user_has_besides_stays() {
        let bench = Bench::new();
        let old = plan_of([("d", folder(plan_of([("f", file("1")), ("g", file("1"))])))]);
        let new = plan_of([("d", folder(plan_of([("f", file("2"))])))]);
        let (base, aim) = (tree(&bench, "user", &old), tree(&bench, "aim", &new));
        let user = bench.dir.path().join("user");
        build(&user, &plan_of([("mine", file("mine"))]));
        fs::write(user.join("d/mine"), "mine").unwrap();
        if nix::unistd::geteuid().is_root() {
            std::os::unix::fs::chown(user.join("d/f"), Some(4321), Some(1234)).unwrap();
        }
        let owner = fs::metadata(user.join("d/f")).unwrap().uid();
        bench.trees.apply(&user, base, aim).unwrap();
        let names: Vec<Vec<u8>> = everything(&user).into_keys().collect();
        assert_eq!(names, [&b"d"[..], b"d/f", b"d/mine", b"mine"]);
        assert_eq!(fs::read_to_string(user.join("d/f")).unwrap(), "2");
        assert_eq!(fs::metadata(user.join("d/f")).unwrap().uid(), owner);
    }
}
