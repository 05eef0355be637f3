//! What every backend promises, on real containers and under the real system-call filter.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::Oci;
use crate::sandbox::backend::suite::{self, Subject};
use crate::sandbox::{ImageRef, Isolation, seccomp};

/// The program that the launcher is part of: cargo puts it beside the folder of this test.
fn launcher() -> Result<PathBuf, String> {
    let me = std::env::current_exe().map_err(|error| error.to_string())?;
    let program = me.ancestors().nth(2).unwrap_or(Path::new("/")).join("exuvia");
    match program.is_file() {
        true => Ok(program),
        false => Err(format!(
            "`{}` is not built: run all tests, or `cargo build` first",
            program.display()
        )),
    }
}

async fn setup() -> Result<Subject, String> {
    // One for all cases, and for all runs: it holds nothing but the guest when they are over.
    let data = Path::new(concat!(env!("OUT_DIR"), "/oci-suite"));
    let oci = Oci::new(data, launcher()?).map_err(|error| error.to_string())?;
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
