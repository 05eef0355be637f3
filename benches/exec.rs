//! What an exec costs in a sandbox that is up: latency, bytes out and in, files, and the memory of this process meanwhile.
//!
//! `cargo bench --bench exec`, as root. `EXUVIA_BENCH_ROUNDS` (300) execs of `true`; `EXUVIA_BENCH_BYTES` (1 GiB) of output and
//! of each file.

use std::collections::BTreeMap;
use std::os::unix::fs::chown;
use std::sync::Arc;
use std::time::{Duration, Instant};

use exuvia::ids::SandboxId;
use exuvia::sandbox::backend::oci::Oci;
use exuvia::sandbox::files::Range;
use exuvia::sandbox::identity::Claim;
use exuvia::sandbox::{Cause, Command, ImageRef, Isolation, Limits, Sandbox, Spec, Stdin, seccomp};

/// Any error: a benchmark only tells it and stops.
type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> Result<()> {
    // `cargo test --benches` only wants to know whether it builds.
    if std::env::args().any(|word| word == "--test") {
        return Ok(());
    }
    let number = |name: &str, default: u64| std::env::var(name).map_or(Ok(default), |text| text.parse());
    let (rounds, bytes) = (
        number("EXUVIA_BENCH_ROUNDS", 300)?,
        number("EXUVIA_BENCH_BYTES", 1 << 30)?,
    );
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?
        .block_on(measure(rounds, bytes))
}

async fn measure(rounds: u64, bytes: u64) -> Result<()> {
    let (data, workspace) = (tempfile::tempdir()?, tempfile::tempdir()?);
    let claim = Claim::take(data.path())?;
    let uid = Some(claim.identity().host_uid());
    chown(workspace.path(), uid, uid)?;
    let spec = Spec {
        id: SandboxId::random(),
        image: ImageRef::Host,
        isolation: Isolation::Container,
        limits: Limits::default(),
        identity: claim.identity(),
        workspace: Some(workspace.path().to_owned()),
        mounts: Vec::new(),
        labels: BTreeMap::new(),
    };
    let backend = Arc::new(Oci::new(data.path())?);
    let sandbox = Sandbox::open(backend, spec, seccomp::default_filter()?).await?;
    let measured = all(&sandbox, rounds, bytes).await;
    sandbox.close(Duration::ZERO).await?;
    measured
}

async fn all(sandbox: &Sandbox, rounds: u64, bytes: u64) -> Result<()> {
    let mut took = Vec::new();
    for round in 0..=rounds {
        let begun = Instant::now();
        succeeds(sandbox, Command::new(["true"])).await?;
        // The first one warms caches.
        if round > 0 {
            took.push(begun.elapsed());
        }
    }
    took.sort();
    let at = |percent: usize| took[(took.len() * percent / 100).min(took.len() - 1)].as_secs_f64() * 1e3;
    println!(
        "exec of `true`, warm, ms: min {:.2}, p50 {:.2}, p99 {:.2}",
        at(0),
        at(50),
        at(99)
    );

    let flood = Command::new(["head", "-c", &bytes.to_string(), "/dev/zero"]);
    rate("output", sandbox, flood.clone(), bytes).await?;
    let detachable = flood.detachable();
    rate("output, detachable", sandbox, detachable, bytes).await?;
    let input = Stdin::Bytes(vec![7; 64 << 20]);
    let sink = Command::shell("cat > /dev/null").stdin(input);
    rate("input, 64 MiB", sandbox, sink, 64 << 20).await?;

    let files = sandbox.files();
    let piece = vec![7; 1 << 20];
    let begun = Instant::now();
    let mut writing = files.write_stream("big", None).await?;
    for _ in 0..bytes >> 20 {
        writing.write(&piece).await?;
    }
    writing.finish().await?;
    told("file write", bytes, begun);
    let begun = Instant::now();
    let mut reading = files.read_stream("big", Range::default()).await?;
    let mut read = 0;
    while let Some(bytes) = reading.next().await? {
        read += bytes.len() as u64;
    }
    told("file read", read, begun);
    files.remove("big").await?;
    Ok(())
}

async fn succeeds(sandbox: &Sandbox, command: Command) -> Result<u64> {
    let finished = sandbox.run(command, 0).await?;
    match finished.ended.cause {
        Cause::Exited { code: 0 } => Ok(finished.stdout.total_bytes()),
        other => Err(format!("{other:?}").into()),
    }
}

async fn rate(name: &str, sandbox: &Sandbox, command: Command, bytes: u64) -> Result<()> {
    let begun = Instant::now();
    let mut exec = sandbox.exec(command).await?;
    while exec.output.recv().await.is_some() {}
    let ended = exec.ended().await;
    if !ended.is_success() {
        return Err(format!("{name}: {ended:?}").into());
    }
    told(name, bytes, begun);
    Ok(())
}

fn told(name: &str, bytes: u64, begun: Instant) {
    let rate = bytes as f64 / begun.elapsed().as_secs_f64() / 1e6;
    println!(
        "{name}: {rate:.0} MB/s; this process holds {} MiB",
        resident_kib() >> 10
    );
}

fn resident_kib() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .unwrap_or_default();
    line.trim().trim_end_matches(" kB").parse().unwrap_or(0)
}
