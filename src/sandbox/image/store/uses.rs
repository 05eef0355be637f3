//! Which sandboxes need which root: a note in the sandbox's own directory, gone with it.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

use crate::sandbox::image::Root;
use crate::sandbox::image::roots::Key;

/// The note's name in a sandbox's directory.
const FILE: &str = "image";

/// Notes that the sandbox whose directory is `sandbox` stands on `root`, which is then not removed while the directory is
/// there.
pub(in crate::sandbox::image) fn hold(root: &Root, sandbox: &Path) -> io::Result<()> {
    let name = root.lower.as_deref().and_then(|lower| lower.file_name()?.to_str());
    match name.and_then(Key::read) {
        Some(key) => fs::write(sandbox.join(FILE), key.as_str()),
        // It lies elsewhere.
        None => Ok(()),
    }
}

/// The roots that sandboxes stand on, each with these sandboxes.
pub(super) fn all(data_dir: &Path) -> io::Result<BTreeMap<Key, Vec<String>>> {
    let mut uses: BTreeMap<Key, Vec<String>> = BTreeMap::new();
    let sandboxes = data_dir.join("sandboxes");
    let names = match super::super::names(&sandboxes) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(uses),
        names => names?,
    };
    for name in names {
        match fs::read_to_string(sandboxes.join(&name).join(FILE)) {
            Ok(text) => {
                if let Some(key) = Key::read(text.trim()) {
                    uses.entry(key).or_default().push(name);
                }
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(uses)
}
