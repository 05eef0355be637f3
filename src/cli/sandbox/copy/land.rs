//! Writing what a hostile side sends: by descriptor, one component at a time, never through a link.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use nix::fcntl::{AtFlags, OFlag, open, openat, renameat};
use nix::sys::stat::{Mode, fstatat, mkdirat};
use nix::unistd::{UnlinkatFlags, symlinkat, unlinkat};

use crate::workspace::Name;

const DIRECTORY: OFlag = OFlag::O_DIRECTORY.union(OFlag::O_CLOEXEC).union(OFlag::O_RDONLY);

/// A directory here. What is made in it is in it: names are single components, and links in their place are not followed.
#[derive(Debug)]
pub(super) struct Folder(OwnedFd);

/// What a name stands for now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum There {
    Nothing,
    Directory,
    Else,
}

impl Folder {
    /// Opens one that the person named: links on the way there are theirs.
    pub fn open(path: &Path) -> io::Result<Self> {
        Ok(Self(open(path, DIRECTORY, Mode::empty())?))
    }

    /// Makes a directory, or takes the one that is there.
    ///
    /// # Errors
    /// Something else is there; a link to a directory is something else.
    pub fn folder(&self, name: &Name, mode: u32) -> io::Result<Self> {
        // Its owner must be able to fill it.
        let mode = Mode::from_bits_truncate((mode & 0o777) | 0o700);
        match mkdirat(&self.0, &**name, mode) {
            Ok(()) | Err(nix::Error::EEXIST) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(Self(openat(
            &self.0,
            &**name,
            DIRECTORY | OFlag::O_NOFOLLOW,
            Mode::empty(),
        )?))
    }

    /// Makes a link; what was there is replaced, if it is no directory.
    pub fn link(&self, name: &Name, target: &[u8]) -> io::Result<()> {
        let draft = self.draft_name();
        symlinkat(target, &self.0, draft.as_str())?;
        self.put(&draft, name)
    }

    /// Begins a file, under a name of its own until it is whole.
    pub fn draft(&self, mode: u32) -> io::Result<Draft<'_>> {
        let draft = self.draft_name();
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        // The umask is the kernel's to apply.
        let file = openat(&self.0, draft.as_str(), flags, Mode::from_bits_truncate(mode & 0o777))?;
        Ok(Draft {
            folder: self,
            name: Some(draft),
            file: File::from(file),
        })
    }

    pub fn there(&self, name: &Name) -> io::Result<There> {
        match fstatat(&self.0, &**name, AtFlags::AT_SYMLINK_NOFOLLOW) {
            Ok(stat) if stat.st_mode & nix::libc::S_IFMT == nix::libc::S_IFDIR => Ok(There::Directory),
            Ok(_) => Ok(There::Else),
            Err(nix::Error::ENOENT) => Ok(There::Nothing),
            Err(error) => Err(error.into()),
        }
    }

    /// As no other process makes it, and no name of the other side can be foreseen to be.
    fn draft_name(&self) -> String {
        format!(".{}", crate::ids::TraceId::random())
    }

    fn put(&self, draft: &str, name: &Name) -> io::Result<()> {
        let put = renameat(&self.0, draft, &self.0, &**name);
        if put.is_err() {
            self.remove(draft);
        }
        Ok(put?)
    }

    fn remove(&self, draft: &str) {
        // What cannot be removed is told by its own failure.
        let _ = unlinkat(&self.0, draft, UnlinkatFlags::NoRemoveDir);
    }
}

/// A file that is being written. Dropped before `finish`, it is gone.
#[derive(Debug)]
pub(super) struct Draft<'a> {
    folder: &'a Folder,
    /// `None` = finished.
    name: Option<String>,
    pub file: File,
}

impl Draft<'_> {
    /// Puts it in its place: a file or link that was there is replaced.
    pub fn finish(mut self, name: &Name) -> io::Result<()> {
        match self.name.take() {
            Some(draft) => self.folder.put(&draft, name),
            None => Ok(()),
        }
    }
}

impl Drop for Draft<'_> {
    fn drop(&mut self) {
        if let Some(draft) = self.name.take() {
            self.folder.remove(&draft);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn name(text: &str) -> Name {
        Name::new(text.as_bytes()).unwrap()
    }

    fn write(folder: &Folder, at: &str, text: &str) -> io::Result<()> {
        let mut draft = folder.draft(0o6755)?;
        draft.file.write_all(text.as_bytes())?;
        draft.finish(&name(at))
    }

    #[test]
    fn nothing_is_written_through_a_link() {
        let dir = tempfile::tempdir().unwrap();
        let outside = dir.path().join("outside");
        std::fs::create_dir(&outside).unwrap();
        std::fs::write(outside.join("file"), "theirs").unwrap();
        let target = dir.path().join("target");
        std::fs::create_dir(&target).unwrap();
        let folder = Folder::open(&target).unwrap();
        // A link that came first, and then a directory of the same name.
        folder.link(&name("a"), b"../outside").unwrap();
        assert!(folder.folder(&name("a"), 0o755).is_err());
        // A file over a link replaces the link.
        symlink(outside.join("file"), target.join("b")).unwrap();
        write(&folder, "b", "mine").unwrap();
        assert_eq!(std::fs::read_to_string(outside.join("file")).unwrap(), "theirs");
        let placed = std::fs::symlink_metadata(target.join("b")).unwrap();
        assert!(placed.is_file());
        assert_eq!(
            placed.permissions().mode() & 0o7022,
            0,
            "no set-id bits, nothing beyond the umask"
        );
        // A link over a file, and over a directory.
        folder.link(&name("b"), b"/etc/passwd").unwrap();
        assert_eq!(std::fs::read_link(target.join("b")).unwrap(), Path::new("/etc/passwd"));
        folder.folder(&name("d"), 0).unwrap();
        assert!(folder.link(&name("d"), b"x").is_err() && write(&folder, "d", "x").is_err());
        assert_eq!(folder.there(&name("d")).unwrap(), There::Directory);
        assert_eq!(folder.there(&name("a")).unwrap(), There::Else);
        assert_eq!(folder.there(&name("c")).unwrap(), There::Nothing);
        // What was not finished is gone, as are the drafts of what failed.
        drop(folder.draft(0o644).unwrap());
        let mut left: Vec<_> = std::fs::read_dir(&target)
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        left.sort();
        assert_eq!(left, ["a", "b", "d"]);
    }
}
