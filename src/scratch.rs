//! Data directories of tests. Shared with the tests outside of the library (`tests/support`).
//!
//! A directory goes when the thread of its test ends: that is after the test's runtime has ended, and with it every task and
//! every thread that wrote there. One that is removed under a service that still works does not go, or comes back.

use std::cell::RefCell;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

thread_local! {
    static KEPT: RefCell<Vec<Kept>> = const { RefCell::new(Vec::new()) };
}

/// A fresh directory. That this is dropped removes nothing yet.
#[derive(Debug)]
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new() -> Self {
        Self::of(tempfile::tempdir().expect("a temporary directory"))
    }

    pub fn new_in(parent: &Path) -> Self {
        Self::of(tempfile::tempdir_in(parent).expect("a temporary directory"))
    }

    fn of(directory: TempDir) -> Self {
        let path = directory.path().to_owned();
        KEPT.with_borrow_mut(|kept| kept.push(Kept(Some(directory))));
        Self(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

struct Kept(Option<TempDir>);

impl Drop for Kept {
    fn drop(&mut self) {
        let Some(directory) = self.0.take() else { return };
        let path = directory.path().to_owned();
        if let Err(error) = directory.close() {
            eprintln!("`{}` stays: {error}", path.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_outlives_the_runtime_that_writes_there() {
        let test = std::thread::spawn(|| {
            let runtime = tokio::runtime::Runtime::new().expect("a runtime");
            runtime.block_on(async {
                let scratch = Scratch::new();
                let path = scratch.path().to_owned();
                let writing = path.clone();
                // As a service does that nobody shut down.
                tokio::task::spawn_blocking(move || {
                    for n in 0..2000 {
                        let deep = writing.join("blobs").join((n % 16).to_string());
                        std::fs::create_dir_all(&deep).expect("it is still there");
                        std::fs::write(deep.join(n.to_string()), "x").expect("it is still there");
                    }
                    assert!(writing.is_dir());
                });
                drop(scratch);
                path
            })
        });
        let path = test.join().expect("it ends well");
        assert!(!path.exists());
    }
}
