//! What every backend promises, on real containers and under the real system-call filter.

use std::path::Path;
use std::sync::Arc;

use super::{Oci, make};
use crate::ids::SandboxId;
use crate::sandbox::backend::Backend;
use crate::sandbox::backend::suite::{self, Subject};
use crate::sandbox::identity::Claim;
use crate::sandbox::{ImageRef, Isolation, Limits, Spec, seccomp, verify};
use crate::skip::skipped;

async fn setup() -> Result<Subject, String> {
    // One for all cases, and for all runs: it holds nothing but the guest when they are over.
    let data = Path::new(concat!(env!("OUT_DIR"), "/oci-suite"));
    let oci = Oci::new(data).map_err(|error| error.to_string())?;
    Ok(Subject {
        backend: Arc::new(oci),
        image: ImageRef::Host,
        isolation: Isolation::Container,
        filter: seccomp::default_filter().map_err(|error| error.to_string())?,
    })
}

suite::backend_suite!(portable, setup);
suite::backend_suite!(real, setup);
suite::backend_suite!(limits, setup);
suite::backend_suite!(walls, setup);

/// A wall that is weaker than what was asked for is named when it is read back from a real sandbox.
#[tokio::test]
async fn a_wall_that_is_not_as_asked_for_is_named() {
    const NAME: &str = "a_wall_that_is_not_as_asked_for_is_named";
    type Stricter = fn(&mut Limits);
    let cases: [(Stricter, &str); 8] = [
        (|limits| limits.tmp_bytes /= 2, "mount /tmp size"),
        (|limits| limits.tmp_bytes /= 2, "mount /var/tmp size"),
        (|limits| limits.shm_bytes /= 2, "mount /dev/shm size"),
        (|limits| limits.tmp_inodes /= 2, "mount /tmp inodes"),
        (|limits| limits.file_bytes /= 2, "Max file size"),
        (|limits| limits.open_files /= 2, "Max open files"),
        (|limits| limits.memory_bytes /= 2, "memory"),
        (|limits| limits.pids /= 2, "processes"),
    ];
    let data = tempfile::tempdir().unwrap();
    let oci = match Oci::new(data.path()) {
        Ok(oci) => oci,
        Err(error) => {
            skipped(NAME, error);
            return;
        }
    };
    let claim = Claim::take(data.path()).unwrap();
    let spec = Spec {
        id: SandboxId::random(),
        image: ImageRef::Host,
        isolation: Isolation::Container,
        limits: Limits::default(),
        identity: claim.identity(),
        workspace: None,
        mounts: Vec::new(),
        labels: Default::default(),
    };
    oci.create(&spec).await.unwrap();
    let pid = oci.shared.record(&spec.id).unwrap().init.unwrap().pid as i32;
    let read_back = |spec: &Spec| verify::sandbox(pid, &oci.shared.hierarchies, &make::expected(&oci.shared, spec));
    assert_eq!(read_back(&spec), Ok(()));
    for (stricter, wall) in cases {
        let mut asked = spec.clone();
        stricter(&mut asked.limits);
        let breaches = read_back(&asked).unwrap_err();
        assert!(
            breaches.iter().any(|breach| breach.wall.starts_with(wall)),
            "{wall}: {breaches:?}"
        );
    }
    oci.destroy(&spec.id).await.unwrap();
}
