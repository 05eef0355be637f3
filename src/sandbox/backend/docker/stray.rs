//! Containers of ours whose maker is dead, whichever data directory they are from: one that is gone is served by nobody again.

use std::path::PathBuf;

use bollard::models::ContainerSummary;

use super::engine::{self, Engine, Failure};
use super::record::Record;
use super::{LABEL_DATA, LABEL_RECORD, LABEL_SANDBOX, data_label, is_named, label};
use crate::ids::SandboxId;
use crate::sandbox::Identity;

/// The engine of this host, for its strays.
#[derive(Debug)]
pub struct Strays(Engine);

/// A sandbox whose maker is dead.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stray {
    pub id: SandboxId,
    pub identity: Identity,
    /// It may be gone.
    pub data_dir: PathBuf,
    container: String,
}

impl Strays {
    /// `None` where no engine answers: what it holds cannot be looked at now.
    pub async fn open() -> Option<Self> {
        let socket = engine::default_socket().ok()?;
        Engine::connect(&socket).await.ok().map(Self)
    }

    /// # Errors
    /// What the engine says.
    pub async fn find(&self) -> Result<Vec<Stray>, Failure> {
        let containers = self.0.list_with(&[LABEL_SANDBOX.to_owned()]).await?;
        Ok(containers.iter().filter_map(judge).collect())
    }

    /// # Errors
    /// What the engine says; that it is gone by now is fine.
    pub async fn end(&self, stray: &Stray) -> Result<(), Failure> {
        match self.0.remove(&stray.container).await {
            Ok(()) | Err(Failure::NotFound(_)) => Ok(()),
            Err(failure) => Err(failure),
        }
    }
}

/// Labels come from images too: the name, the place of its socket and the label of the data directory have to agree.
fn judge(container: &ContainerSummary) -> Option<Stray> {
    let id: SandboxId = label(container, LABEL_SANDBOX)?.parse().ok()?;
    let record: Record = serde_json::from_str(label(container, LABEL_RECORD)?).ok()?;
    let ctl = format!("/sandboxes/{id}/ctl");
    let mounts = container.mounts.iter().flatten();
    let data_dir = mounts
        .filter_map(|mount| mount.source.as_deref()?.strip_suffix(&ctl))
        .map(PathBuf::from)
        .find(|dir| label(container, LABEL_DATA) == Some(&data_label(dir)))?;
    let is_stray = is_named(container, &id) && !record.owner.is_alive();
    is_stray.then(|| Stray {
        id,
        identity: record.identity,
        data_dir,
        container: container.id.clone().unwrap_or_default(),
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use bollard::models::MountPoint;

    use super::*;
    use crate::process::Process;
    use crate::sandbox::Limits;
    use crate::sandbox::backend::docker::json;

    #[test]
    fn only_a_container_of_ours_with_a_dead_maker_is_one() {
        let id = SandboxId::random();
        let me = Process::current().unwrap();
        let dead = Process {
            started: me.started + 1,
            ..me.clone()
        };
        let container = |owner: &Process, name: String, dir: &str, labelled: &str| ContainerSummary {
            id: Some("c0ffee".to_owned()),
            names: Some(vec![name]),
            labels: Some(HashMap::from([
                (LABEL_SANDBOX.to_owned(), id.to_string()),
                (LABEL_DATA.to_owned(), data_label(labelled.as_ref())),
                (
                    LABEL_RECORD.to_owned(),
                    json(&Record {
                        owner: owner.clone(),
                        identity: Identity { base: 1 << 20 },
                        limits: Limits::default(),
                        has_workspace: false,
                        isolation: crate::sandbox::Isolation::Container,
                    }),
                ),
            ])),
            mounts: Some(vec![MountPoint {
                source: Some(format!("{dir}/sandboxes/{id}/ctl")),
                ..MountPoint::default()
            }]),
            ..ContainerSummary::default()
        };
        let name = format!("/exuvia-{id}");
        let stray = Stray {
            id: id.clone(),
            identity: Identity { base: 1 << 20 },
            data_dir: "/gone".into(),
            container: "c0ffee".to_owned(),
        };
        assert_eq!(judge(&container(&dead, name.clone(), "/gone", "/gone")), Some(stray));
        assert_eq!(judge(&container(&me, name.clone(), "/gone", "/gone")), None);
        assert_eq!(judge(&container(&dead, "/mine".to_owned(), "/gone", "/gone")), None);
        assert_eq!(judge(&container(&dead, name, "/gone", "/other")), None);
    }
}
