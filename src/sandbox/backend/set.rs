//! The backends of a data directory, each opened when it is first asked for.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::OnceCell;

use super::Backend;
use super::docker::Docker;
use super::oci::Oci;
use crate::sandbox::{BackendName, Error};

/// Backends by name; clones share what was opened.
#[derive(Debug, Clone)]
pub struct Backends(Arc<Opened>);

#[derive(Debug)]
struct Opened {
    data_dir: PathBuf,
    oci: OnceCell<Arc<dyn Backend>>,
    docker: OnceCell<Arc<dyn Backend>>,
}

impl Backends {
    pub fn new(data_dir: &Path) -> Self {
        let data_dir = data_dir.to_owned();
        Self(Arc::new(Opened {
            data_dir,
            oci: OnceCell::new(),
            docker: OnceCell::new(),
        }))
    }

    /// One backend under both names, for tests.
    pub fn only(backend: Arc<dyn Backend>) -> Self {
        let (oci, docker) = (OnceCell::from(Arc::clone(&backend)), OnceCell::from(backend));
        Self(Arc::new(Opened {
            data_dir: PathBuf::new(),
            oci,
            docker,
        }))
    }

    /// # Errors
    /// [`Error::Unsupported`] naming what this host lacks for it; asked again, it is tried again.
    pub async fn get(&self, name: BackendName) -> Result<Arc<dyn Backend>, Error> {
        let opened = &self.0;
        let backend = match name {
            BackendName::Oci => {
                opened
                    .oci
                    .get_or_try_init(|| async { Ok::<Arc<dyn Backend>, Error>(Arc::new(Oci::new(&opened.data_dir)?)) })
                    .await?
            }
            BackendName::Docker => {
                opened
                    .docker
                    .get_or_try_init(|| async {
                        Ok::<Arc<dyn Backend>, Error>(Arc::new(Docker::open(&opened.data_dir, None).await?))
                    })
                    .await?
            }
        };
        Ok(Arc::clone(backend))
    }
}
