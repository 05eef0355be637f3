//! A range of user ids that is taken while a sandbox needs it.

use std::path::{Path, PathBuf};

use super::backend::oci;
use super::{Error, Identity};

/// A taken range; given back when dropped. What a killed process held is free again once it is gone.
#[derive(Debug)]
pub struct Claim {
    data_dir: PathBuf,
    identity: Identity,
}

impl Claim {
    /// Takes a free range of this data directory.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when all are taken.
    pub fn take(data_dir: &Path) -> Result<Self, Error> {
        Ok(Self {
            data_dir: data_dir.to_owned(),
            identity: oci::allocate(data_dir)?,
        })
    }

    pub fn identity(&self) -> Identity {
        self.identity
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        oci::release(&self.data_dir, self.identity);
    }
}
