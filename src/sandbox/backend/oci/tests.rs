//! What every backend promises, on real containers and under the real system-call filter.

use std::path::Path;
use std::sync::Arc;

use super::Oci;
use crate::sandbox::backend::suite::{self, Subject};
use crate::sandbox::{ImageRef, Isolation, seccomp};

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
