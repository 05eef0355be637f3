//! Walls that are missing on purpose: the launcher is told less than the server asked for, and the sandbox is refused.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use exuvia::sandbox::{Backend, Error};

use crate::support::{Bench, LAUNCHER};

/// What is done to the launcher's plan, and the wall that is then named.
const WEAKENED: [(&str, &str); 5] = [
    (r#"s/"tmp_bytes":8388608/"tmp_bytes":83886080/"#, "mount /tmp size"),
    (
        r#"s/"shm_bytes":67108864/"shm_bytes":671088640/"#,
        "mount /dev/shm size",
    ),
    (r#"s/"tmp_inodes":10000/"tmp_inodes":20000/"#, "mount /tmp inodes"),
    (r#"s/"file_bytes":2147483648/"file_bytes":4294967296/"#, "Max file size"),
    (r#"s/"open_files":4096/"open_files":8192/"#, "Max open files"),
];

#[tokio::test]
async fn a_sandbox_without_a_wall_is_refused_and_leaves_nothing() {
    let bin = tempfile::tempdir().unwrap();
    for (edit, wall) in WEAKENED {
        let launcher = bin.path().join("weakening");
        // Standard input is the listener, which `sed` must not touch.
        let text = format!("#!/bin/sh\nsed -i '{edit}' \"$2\" </dev/null && exec '{LAUNCHER}' \"$@\"\n");
        fs::write(&launcher, text).unwrap();
        fs::set_permissions(&launcher, fs::Permissions::from_mode(0o755)).unwrap();
        let Some(bench) = Bench::with_launcher("a_sandbox_without_a_wall_is_refused_and_leaves_nothing", launcher)
        else {
            return;
        };
        let spec = bench.spec();
        match bench.backend.create(&spec).await {
            Err(Error::Breached(breaches)) => {
                assert!(
                    breaches.iter().any(|breach| breach.wall == wall),
                    "{wall}: {breaches:?}"
                );
            }
            other => panic!("{wall}: {other:?}"),
        }
        assert_eq!(bench.traces(&spec.id), Vec::<String>::new(), "{wall}");
    }
}
