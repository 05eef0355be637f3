//! How long a gVisor sandbox takes, beside `runsc` itself and Docker with it, in one interleaved run.
//!
//! `cargo bench --bench gvisor`, as root, with `runsc` (`make setup`). `EXUVIA_BENCH_ROUNDS` (20) rounds. What is not there
//! is named and left out: Docker needs the runtime `runsc` and an image, `EXUVIA_BENCH_IMAGE` (`exuvia/python`).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use exuvia::ids::SandboxId;
use exuvia::sandbox::backend::gvisor::Runsc;
use exuvia::sandbox::backend::oci::Oci;
use exuvia::sandbox::identity::Claim;
use exuvia::sandbox::{Backend, Command as Exec, ImageRef, Isolation, Limits, Sandbox, Spec, seccomp};

/// Any error: a benchmark only tells it and stops.
type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const CASES: [&str; 9] = [
    "gvisor: create, until the guest answers",
    "gvisor: destroy",
    "gvisor: exec of `true`, warm",
    "gvisor: freeze",
    "gvisor: thaw",
    "gvisor: checkpoint",
    "gvisor: restore, until the guest answers",
    "runsc run of `true`",
    "docker run --runtime runsc of `true`",
];

fn main() -> Result<()> {
    // `cargo test --benches` only wants to know whether it builds.
    if std::env::args().any(|word| word == "--test") {
        return Ok(());
    }
    let rounds = std::env::var("EXUVIA_BENCH_ROUNDS").map_or(Ok(20), |text| text.parse())?;
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?
        .block_on(measure(rounds))
}

async fn measure(rounds: usize) -> Result<()> {
    let runsc = Runsc::find()?;
    let data = tempfile::tempdir()?;
    let backend: Arc<dyn Backend> = Arc::new(Oci::new(data.path())?);
    let bundle = bundle(data.path())?;
    let docker = docker();
    let mut took: [Vec<Duration>; CASES.len()] = Default::default();
    println!("load before: {}", fs::read_to_string("/proc/loadavg")?.trim());
    // The first round warms caches and is not counted.
    for round in 0..=rounds {
        let mut note = |case: usize, begun: Instant| {
            if round > 0 {
                took[case].push(begun.elapsed());
            }
        };
        let claim = Claim::take(data.path())?;
        let begun = Instant::now();
        let sandbox = Sandbox::open(Arc::clone(&backend), spec(&claim), seccomp::default_filter()?).await?;
        note(0, begun);
        for _ in 0..3 {
            let begun = Instant::now();
            let finished = sandbox.run(Exec::new(["true"]), 0).await?;
            note(2, begun);
            if !finished.ended.is_success() {
                return Err(format!("`true` ended so: {:?}", finished.ended.cause).into());
            }
        }
        let begun = Instant::now();
        sandbox.freeze().await?;
        note(3, begun);
        let begun = Instant::now();
        sandbox.thaw().await?;
        note(4, begun);
        let snapshot = data.path().join(format!("snapshot-{round}"));
        let begun = Instant::now();
        let still = sandbox.checkpoint(&snapshot).await?;
        note(5, begun);
        drop(still);
        sandbox.close(Duration::ZERO).await?;
        let begun = Instant::now();
        let filter = seccomp::default_filter()?;
        let restored = Sandbox::restore(Arc::clone(&backend), spec(&claim), filter, &snapshot).await?;
        note(6, begun);
        let begun = Instant::now();
        restored.close(Duration::ZERO).await?;
        note(1, begun);
        fs::remove_dir_all(&snapshot)?;

        let begun = Instant::now();
        succeed(runsc_run(&runsc.path, data.path(), &bundle, round))?;
        note(7, begun);
        if docker {
            let begun = Instant::now();
            succeed(docker_run())?;
            note(8, begun);
        }
    }
    println!("load after: {}\n", fs::read_to_string("/proc/loadavg")?.trim());
    println!("{rounds} rounds, runsc {}; milliseconds\n", runsc.version()?);
    println!("{:42} {:>8} {:>8} {:>8}", "", "p50", "p99", "least");
    for (name, mut took) in CASES.into_iter().zip(took) {
        took.sort_unstable();
        let at = |part: usize| took.get((took.len() * part / 100).min(took.len().saturating_sub(1)));
        if let (Some(p50), Some(p99), Some(least)) = (at(50), at(99), took.first()) {
            let ms = |time: &Duration| time.as_secs_f64() * 1000.0;
            println!("{name:42} {:8.2} {:8.2} {:8.2}", ms(p50), ms(p99), ms(least));
        }
    }
    Ok(())
}

fn spec(claim: &Claim) -> Spec {
    Spec {
        id: SandboxId::random(),
        image: ImageRef::Host,
        isolation: Isolation::Gvisor,
        limits: Limits::default(),
        identity: claim.identity(),
        workspace: None,
        mounts: Vec::new(),
        labels: Default::default(),
    }
}

/// The plainest bundle over the host's own programs.
fn bundle(data: &Path) -> Result<PathBuf> {
    let dir = data.join("bundle");
    fs::create_dir_all(dir.join("rootfs"))?;
    let mount = |path: &str| serde_json::json!({ "destination": path, "type": "bind", "source": path, "options": ["ro", "rbind"] });
    let mounts: Vec<_> = ["/usr", "/bin", "/lib", "/lib64"].map(mount).into();
    let config = serde_json::json!({ "ociVersion": "1.0.2", "root": { "path": "rootfs", "readonly": true },
        "process": { "user": { "uid": 0, "gid": 0 }, "args": ["/usr/bin/true"], "cwd": "/" }, "mounts": mounts,
        "linux": { "namespaces": [{ "type": "pid" }, { "type": "mount" }] } });
    fs::write(dir.join("config.json"), config.to_string())?;
    Ok(dir)
}

fn runsc_run(runsc: &Path, data: &Path, bundle: &Path, round: usize) -> Command {
    let mut command = Command::new(runsc);
    command
        .arg(format!("--root={}", data.join("runsc").display()))
        .args([
            "--platform=systrap",
            "--network=none",
            "--ignore-cgroups=true",
            "run",
            "--bundle",
        ])
        .arg(bundle)
        .arg(format!("bench-{round:08}"));
    command
}

fn docker_run() -> Command {
    let image = std::env::var("EXUVIA_BENCH_IMAGE").unwrap_or_else(|_| "exuvia/python".to_owned());
    let mut command = Command::new("docker");
    command.args(["run", "--rm", "--runtime", "runsc", "--network", "none", &image, "true"]);
    command
}

/// Whether Docker can be compared with.
fn docker() -> bool {
    match succeed(docker_run()) {
        Ok(()) => true,
        Err(error) => {
            eprintln!("left out: docker with the runtime runsc: {error}");
            false
        }
    }
}

fn succeed(mut command: Command) -> Result<()> {
    let output = command.stdin(Stdio::null()).output()?;
    match output.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned().into()),
    }
}
