//! `exuvia image build` that is cut off: by an interrupt, and by SIGKILL.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Instant;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::desk::Desk;
use crate::support::server::LONG;
use crate::support::skip;

/// A builder that does what real ones do: it mounts, leaves things in its temporary directory, and starts what leaves its
/// group and its session.
const SCRIPT: &str = r#"#!/bin/bash
set -e
work=$(mktemp -d)
mkdir "$work/root" "$work/proc"
mount -t tmpfs none "$work/root"
touch "$work/root/in-it"
echo "fetching packages"
setsid sleep 98761 &
printf 'step 1 of 2\rstep 2 of 2\n' >&2
sleep 98761
"#;

struct Build {
    desk: Desk,
    child: Child,
    said: PathBuf,
}

impl Build {
    fn begin(test: &str) -> Option<Self> {
        if !nix::unistd::geteuid().is_root() || !Path::new("/usr/bin/mmdebstrap").exists() {
            skip(test, &"needs root, and mmdebstrap");
            return None;
        }
        let desk = Desk::bare();
        let script = desk.file("slow/build.sh", SCRIPT);
        fs::set_permissions(script, fs::Permissions::from_mode(0o755)).unwrap();
        let said = desk.path().join("said");
        let mut command = desk.command(&["image", "build", "slow"]);
        let child = command
            .stdout(Stdio::null())
            .stderr(fs::File::create(&said).unwrap())
            .spawn()
            .unwrap();
        let build = Self { desk, child, said };
        // It tells line by line what its builder says, while it says it.
        let told = "fetching packages\nstep 1 of 2\nstep 2 of 2\n";
        until("it is told", || fs::read_to_string(&build.said).unwrap() == told);
        until("its sleepers are there", || sleepers().len() == 2);
        assert_eq!(build.scratch().len(), 1);
        Some(build)
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id() as i32), signal).unwrap();
    }

    /// Unfinished images.
    fn scratch(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.desk.data().join("images")).unwrap();
        let paths = entries.map(|entry| entry.unwrap().path());
        paths
            .filter(|path| path.file_name().unwrap().to_str().unwrap().starts_with(".scratch-"))
            .collect()
    }

    /// No process of it, and no mount.
    fn nothing_runs(&self) {
        until("its processes end", || sleepers().is_empty());
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let data = self.desk.data().to_str().unwrap().to_owned();
        assert!(!mounts.contains(&data), "{mounts}");
    }
}

fn sleepers() -> Vec<String> {
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let lines = processes.filter_map(|entry| fs::read_to_string(entry.path().join("cmdline")).ok());
    lines.filter(|line| line == "sleep\098761\0").collect()
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < LONG, "{what}");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

// One after the other: they look for the same processes.
#[test]
fn a_build_that_is_cut_off_leaves_no_process_mount_or_file() {
    let Some(mut build) = Build::begin("a_build_that_is_cut_off_leaves_no_process_mount_or_file") else {
        return;
    };
    build.signal(Signal::SIGINT);
    assert_eq!(build.child.wait().unwrap().code(), Some(130));
    assert!(sleepers().is_empty(), "they are gone before it ends");
    build.nothing_runs();
    assert_eq!(build.scratch(), Vec::<PathBuf>::new());

    for remedy in [["image", "gc"], ["doctor", "--fix"]] {
        let mut build = Build::begin("").unwrap();
        build.signal(Signal::SIGKILL);
        build.child.wait().unwrap();
        build.nothing_runs();
        assert_eq!(build.scratch().len(), 1, "nobody was left to remove it");
        let told = build.desk.call(&["doctor"]).stdout;
        assert!(told.contains("unfinished image"), "{told}");
        build.desk.call(&remedy);
        assert_eq!(build.scratch(), Vec::<PathBuf>::new(), "{remedy:?}");
    }
}
