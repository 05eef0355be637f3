//! What the tests of this binary share: a backend with a data directory of its own, and a look at the host from outside.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use exuvia::ids::SandboxId;
use exuvia::sandbox::backend::oci::Oci;
use exuvia::sandbox::identity::allocate;
use exuvia::sandbox::{Backend, Command, Error, Finished, Handle, ImageRef, Isolation, Limits, Sandbox, Spec, seccomp};

pub const PROGRAM: &str = env!("CARGO_BIN_EXE_exuvia");

/// Says that a test cannot run here, and fails it where it must.
pub fn skip(test: &str, reason: &dyn std::fmt::Display) {
    eprintln!("SKIPPED {test}: {reason}");
    assert!(
        std::env::var_os("EXUVIA_REQUIRE_ALL").is_none_or(|all| all != "1"),
        "{test} must run"
    );
}

/// A backend and its data directory.
pub struct Bench {
    pub data: tempfile::TempDir,
    pub backend: Oci,
}

impl Bench {
    /// `None`, said on stderr, where the machine cannot do it.
    pub fn new(test: &str) -> Option<Self> {
        let data = tempfile::tempdir().unwrap();
        let backend = Oci::new(data.path());
        Self::of(test, data, backend)
    }

    pub fn with_forge(test: &str, forge: PathBuf) -> Option<Self> {
        let data = tempfile::tempdir().unwrap();
        let backend = Oci::with_forge(data.path(), forge);
        Self::of(test, data, backend)
    }

    fn of(test: &str, data: tempfile::TempDir, backend: Result<Oci, Error>) -> Option<Self> {
        match backend {
            Ok(backend) => Some(Self { data, backend }),
            Err(error) => {
                skip(test, &error);
                None
            }
        }
    }

    pub fn spec(&self) -> Spec {
        Spec {
            id: SandboxId::random(),
            image: ImageRef::Host,
            isolation: Isolation::Container,
            limits: Limits {
                memory_bytes: 128 << 20,
                pids: 64,
                cpus: 0.5,
                tmp_bytes: 8 << 20,
                ..Limits::default()
            },
            identity: allocate(self.data.path()).unwrap(),
            workspace: None,
            mounts: Vec::new(),
            labels: BTreeMap::new(),
        }
    }

    pub async fn up(&self, spec: &Spec) -> Handle {
        let handle = self.backend.create(spec).await.unwrap();
        self.backend.start(&handle).await.unwrap();
        handle
    }

    /// A sandbox whose guest has answered.
    pub async fn open(&self, spec: Spec) -> Sandbox {
        let filter = seccomp::compile(seccomp::DEFAULT).unwrap();
        Sandbox::open(Arc::new(self.backend.clone()), spec, filter)
            .await
            .unwrap()
    }

    /// The sandbox's first process, as the host numbers it.
    pub fn init(&self, id: &SandboxId) -> i32 {
        let record = fs::read(self.data.path().join("sandboxes").join(id.as_str()).join("owner.json")).unwrap();
        let record: serde_json::Value = serde_json::from_slice(&record).unwrap();
        record["init"]["pid"].as_i64().unwrap() as i32
    }

    /// What is left of a sandbox anywhere on the host, in words.
    pub fn traces(&self, id: &SandboxId) -> Vec<String> {
        let mut traces = traces(id.as_str());
        let dir = self.data.path().join("sandboxes").join(id.as_str());
        traces.extend(dir.exists().then(|| format!("directory {}", dir.display())));
        traces
    }
}

/// Control groups, mounts and processes of this host that bear `name`.
pub fn traces(name: &str) -> Vec<String> {
    let groups = groups(name)
        .into_iter()
        .map(|group| format!("control group {}", group.display()));
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let mounts = mounts
        .lines()
        .filter(|line| line.contains(name))
        .map(|line| format!("mount {line}"));
    let mut traces: Vec<String> = groups.chain(mounts).collect();
    for process in fs::read_dir("/proc").unwrap().flatten() {
        let words = fs::read(process.path().join("cmdline")).unwrap_or_default();
        if String::from_utf8_lossy(&words).contains(name) {
            traces.push(format!("process {}", process.path().display()));
        }
    }
    traces
}

/// The control groups of a sandbox that exist.
pub fn groups(name: &str) -> Vec<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    let roots = mounts.lines().filter_map(|line| {
        let mut words = line.split(' ').skip(1);
        let (target, kind) = (words.next()?, words.next()?);
        kind.starts_with("cgroup")
            .then(|| Path::new(target).join("exuvia").join(name))
    });
    roots.filter(|dir| dir.exists()).collect()
}

/// Waits until each child of this process that has ended was awaited. Other tests have theirs, for a moment each.
pub fn no_zombies_stay() {
    let state = format!("Z {} ", std::process::id());
    let is_ended = |stat: &String| stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with(&state));
    let started = Instant::now();
    loop {
        let processes = fs::read_dir("/proc").unwrap().flatten();
        let stats = processes.filter_map(|process| fs::read_to_string(process.path().join("stat")).ok());
        let ended: Vec<String> = stats.filter(is_ended).collect();
        if ended.is_empty() {
            return;
        }
        assert!(started.elapsed() < Duration::from_secs(10), "{ended:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Runs a shell text and gives what it wrote, which must have gone well.
pub async fn sh(sandbox: &Sandbox, text: &str) -> String {
    let finished = run(sandbox, text).await;
    let output = finished.stdout.text();
    assert!(
        finished.ended.is_success(),
        "{text}: {:?}\n{output}{}",
        finished.ended,
        finished.stderr.text()
    );
    output
}

pub async fn run(sandbox: &Sandbox, text: &str) -> Finished {
    sandbox.run(Command::shell(text), 64 << 10).await.unwrap()
}
