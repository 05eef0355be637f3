//! Removing what a guest left behind, by descriptor.

use std::io;

use super::error::Error;
use super::folder::{FileType, Folder};
use super::name::push;

/// Removes `name` from `folder` with all that is below it. `path` is for errors alone.
///
/// # Errors
/// [`Error::Limit`] where directories nest deeper than `depth`; some may then be gone already.
pub(super) fn remove(folder: &Folder, name: &[u8], path: &mut Vec<u8>, depth: u32) -> Result<(), Error> {
    let before = path.len();
    push(path, name);
    let done = remove_at(folder, name, path, depth);
    path.truncate(before);
    done
}

fn remove_at(folder: &Folder, name: &[u8], path: &mut Vec<u8>, depth: u32) -> Result<(), Error> {
    match folder.look(name).map_err(|e| Error::io("look at", path, e))? {
        None => return Ok(()),
        Some(meta) if meta.file_type != FileType::Directory => {
            return absent_is_fine(folder.remove_file(name)).map_err(|e| Error::io("remove", path, e));
        }
        Some(_) => {}
    }
    if depth == 0 {
        let path = super::name::shown(path);
        let what = "nested directories while removing";
        return Err(Error::Limit { what, limit: 0, path });
    }
    let inner = folder.enter(name).map_err(|e| Error::io("enter", path, e))?;
    let names = inner.names(u64::MAX).map_err(|e| Error::io("list", path, e))?;
    for name in names.unwrap_or_default() {
        remove(&inner, &name, path, depth - 1)?;
    }
    absent_is_fine(folder.remove_folder(name)).map_err(|e| Error::io("remove", path, e))
}

fn absent_is_fine(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}
