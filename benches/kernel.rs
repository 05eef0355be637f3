//! How long one line of Python takes in a fresh process, beside what else a host offers, measured in one interleaved run.
//!
//! `cargo bench --bench kernel`, as root. What is not installed is named and left out. `EXUVIA_BENCH_ROUNDS` (200) rounds, in
//! each of which every case runs once, so that all see the same weather. Each case begins when every lane waits again, and
//! `EXUVIA_BENCH_GAP_MS` (5) later.
//! `EXUVIA_BENCH_IMAGE` (`exuvia/python`) is the Docker image of `docker exec`.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use exuvia::ids::SandboxId;
use exuvia::sandbox::backend::oci::Oci;
use exuvia::sandbox::identity::Claim;
use exuvia::sandbox::kernel::{Event, Fresh, Kernel, Language, Options, Run, RunOptions, Warm, WarmOptions, mould};
use exuvia::sandbox::{Command as Exec, ImageRef, Isolation, Limits, Sandbox, Spec, seccomp};

const LINE: &str = "print(sum(range(10)))";
const SAYS: &[u8] = b"45\n";

/// Any error: a benchmark only tells it and stops.
type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const CASES: [&str; 11] = [
    "fresh process, cast ahead",
    "fresh process, cast when asked for",
    "fresh process, started when asked for",
    "fresh process, forked ahead",
    "fresh process, started ahead",
    "kernel, state kept",
    "exec of python3 -c in the sandbox",
    "python3 -c, no sandbox",
    "docker exec python3 -c",
    "bash, shell started ahead",
    "node, interpreter started ahead",
];

fn main() -> Result<()> {
    // `cargo test --benches` only wants to know whether it builds.
    if std::env::args().any(|word| word == "--test") {
        return Ok(());
    }
    let number = |name: &str, default: u64| std::env::var(name).map_or(Ok(default), |text| text.parse());
    let rounds = number("EXUVIA_BENCH_ROUNDS", 200)?;
    let gap = Duration::from_millis(number("EXUVIA_BENCH_GAP_MS", 5)?);
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?
        .block_on(measure(rounds, gap))
}

async fn measure(rounds: u64, gap: Duration) -> Result<()> {
    let data = tempfile::tempdir()?;
    let sandbox = Arc::new(open(data.path()).await?);
    let mould = Arc::new(mould(&sandbox, BTreeMap::new()).await?);
    let warm_as = |language, fresh, lanes, mould| {
        let options = WarmOptions {
            fresh,
            lanes,
            mould,
            ..WarmOptions::default()
        };
        let sandbox = Arc::clone(&sandbox);
        async move { Warm::start(&sandbox, language, options).await }
    };
    let warm = |language, fresh| warm_as(language, fresh, 1, None);
    let cast = warm_as(Language::Python, Fresh::Forked, 1, Some(Arc::clone(&mould))).await?;
    let late_cast = warm_as(Language::Python, Fresh::Forked, 0, Some(mould)).await?;
    let late_start = warm_as(Language::Python, Fresh::Forked, 0, None).await?;
    let forked = warm(Language::Python, Fresh::Forked).await?;
    let executed = warm(Language::Python, Fresh::Executed).await?;
    let kernel = Kernel::start(&sandbox, Language::Python, Options::default()).await?;
    let bash = warm(Language::Bash, Fresh::Forked).await?;
    let node = told("node", warm(Language::Node, Fresh::Forked).await);
    let docker = told("docker", Docker::open());
    let mut took: [Vec<Duration>; CASES.len()] = Default::default();
    // The first round warms caches and is not counted.
    for round in 0..=rounds {
        for (case, took) in took.iter_mut().enumerate() {
            // What the case before has set going (a fork, a start) is its own affair.
            let lanes = [Some(&cast), Some(&forked), Some(&executed), Some(&bash), node.as_ref()];
            while lanes.iter().flatten().any(|lane| lane.parked() == 0) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            tokio::time::sleep(gap).await;
            let begun = Instant::now();
            match case {
                0 => says(cast.run(LINE, RunOptions::default())?).await?,
                1 => says(late_cast.run(LINE, RunOptions::default())?).await?,
                2 => says(late_start.run(LINE, RunOptions::default())?).await?,
                3 => says(forked.run(LINE, RunOptions::default())?).await?,
                4 => says(executed.run(LINE, RunOptions::default())?).await?,
                5 => says(kernel.run(LINE, RunOptions::default())?).await?,
                6 => {
                    let finished = sandbox.run(Exec::new(["python3", "-c", LINE]), 64).await?;
                    check(&finished.stdout.bytes())?;
                }
                7 => output(Command::new("/usr/bin/python3").args(["-c", LINE]))?,
                8 => match &docker {
                    Some(docker) => output(Command::new("docker").args(["exec", &docker.0, "python3", "-c", LINE]))?,
                    None => continue,
                },
                9 => says(bash.run("echo $((45))", RunOptions::default())?).await?,
                _ => match &node {
                    Some(node) => says(node.run("console.log(45)", RunOptions::default())?).await?,
                    None => continue,
                },
            }
            if round > 0 {
                took.push(begun.elapsed());
            }
        }
    }
    println!("{}", table(&took, rounds, gap));
    drop((cast, late_cast, late_start, forked, executed, kernel, bash, node));
    sandbox.close(Duration::ZERO).await?;
    Ok(())
}

fn told<T, E: std::fmt::Display>(name: &str, opened: std::result::Result<T, E>) -> Option<T> {
    opened.inspect_err(|error| eprintln!("SKIPPED {name}: {error}")).ok()
}

fn check(bytes: &[u8]) -> Result<()> {
    match bytes {
        SAYS => Ok(()),
        other => Err(format!("it said {:?}", String::from_utf8_lossy(other)).into()),
    }
}

async fn says(mut run: Run) -> Result<()> {
    let mut stdout = Vec::new();
    while let Some(event) = run.events.recv().await {
        match event {
            Event::Stdout(bytes) => stdout.extend(bytes),
            Event::Ended(ended) if ended.ok => return check(&stdout),
            other => return Err(format!("{other:?}").into()),
        }
    }
    Err("it has no end".into())
}

fn output(command: &mut Command) -> Result<()> {
    let output = command.stdin(Stdio::null()).output()?;
    if !output.status.success() {
        return Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr)).into());
    }
    check(&output.stdout)
}

async fn open(data: &Path) -> Result<Sandbox> {
    let claim = Claim::take(data)?;
    let spec = Spec {
        id: SandboxId::random(),
        image: ImageRef::Host,
        isolation: Isolation::Container,
        limits: Limits {
            cpus: 2.0,
            ..Limits::default()
        },
        identity: claim.identity(),
        workspace: None,
        mounts: Vec::new(),
        labels: BTreeMap::new(),
    };
    let backend = Arc::new(Oci::new(data)?);
    Ok(Sandbox::open(backend, spec, seccomp::default_filter()?).await?)
}

/// A container that stays, through the engine's own program.
struct Docker(String);

impl Docker {
    fn open() -> Result<Self> {
        let image = std::env::var("EXUVIA_BENCH_IMAGE").unwrap_or_else(|_| "exuvia/python".to_owned());
        let name = format!("exuvia-bench-kernel-{}", std::process::id());
        let words = ["run", "--detach", "--rm", "--network", "none", "--name", &name];
        let output = Command::new("docker")
            .args(words)
            .args(["--entrypoint", "sleep", &image, "100000"])
            .output()?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).trim().into());
        }
        Ok(Self(name))
    }
}

impl Drop for Docker {
    fn drop(&mut self) {
        let removed = Command::new("docker").args(["rm", "--force", &self.0]).output();
        if !removed.as_ref().is_ok_and(|output| output.status.success()) {
            eprintln!("docker: the container {} stays: {removed:?}", self.0);
        }
    }
}

fn table(took: &[Vec<Duration>; CASES.len()], rounds: u64, gap: Duration) -> String {
    let profile = if cfg!(debug_assertions) {
        "without optimisation"
    } else {
        "optimised"
    };
    let mut text = format!("{rounds} rounds, {gap:?} between cases, this build {profile}; milliseconds\n\n");
    text += &format!("{:36} {:>8} {:>8} {:>8} {:>8}\n", "", "p50", "p99", "least", "ratio");
    let base = quantile(&took[0], 50).unwrap_or_default();
    for (name, took) in CASES.iter().zip(took) {
        let [Some(p50), Some(p99), Some(least)] = [50, 99, 0].map(|percent| quantile(took, percent)) else {
            continue;
        };
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let ratio = p50.as_secs_f64() / base.as_secs_f64();
        text += &format!(
            "{name:36} {:8.2} {:8.2} {:8.2} {ratio:7.1}x\n",
            ms(p50),
            ms(p99),
            ms(least)
        );
    }
    text
}

/// The nearest rank.
fn quantile(took: &[Duration], percent: usize) -> Option<Duration> {
    let mut sorted = took.to_vec();
    sorted.sort();
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied()
}
