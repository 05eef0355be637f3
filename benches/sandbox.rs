//! How long a sandbox takes, beside what else a host offers, measured in one interleaved run.
//!
//! `cargo bench --bench sandbox`, as root. What is not installed is named and left out. `EXUVIA_BENCH_ROUNDS` (100) rounds,
//! in each of which every case runs once, so that all see the same weather. `EXUVIA_BENCH_IMAGE` (`exuvia/python`) is the
//! Docker image; it must have `true` and `sleep`. There is no pool here: every sandbox is made when it is asked for.
//!
//! Then `EXUVIA_BENCH_CYCLES` (400) sandboxes, 1 to 16 in flight: how many in a second. Then `EXUVIA_BENCH_IDLE` (200)
//! sandboxes at once that do nothing: what each of them takes. 0 leaves such a part out.

mod peers;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use exuvia::ids::SandboxId;
use exuvia::sandbox::backend::oci::Oci;
use exuvia::sandbox::identity::Claim;
use exuvia::sandbox::{Backend, Command as Exec, ImageRef, Isolation, Limits, Sandbox, Spec, seccomp};
use peers::{Engine, Result, Runc, Table, succeeds, told};

const PROGRAM: &str = env!("CARGO_BIN_EXE_exuvia");

const COLD: &str = "oci: create, `true`, destroy";
const WARM: &str = "oci: exec of `true`, warm";

fn main() -> Result<()> {
    // `cargo test --benches` only wants to know whether it builds.
    if std::env::args().any(|word| word == "--test") {
        return Ok(());
    }
    let rounds = peers::setting("EXUVIA_BENCH_ROUNDS", 100)?;
    let cycles = peers::setting("EXUVIA_BENCH_CYCLES", 400)?;
    let idle = peers::setting("EXUVIA_BENCH_IDLE", 200)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        if rounds > 0 {
            measure(rounds).await?;
        }
        if cycles > 0 {
            throughput(cycles).await?;
        }
        if idle > 0 {
            idleness(idle).await?;
        }
        Ok(())
    })
}

/// Whole lives in a second, by how many are lived at once.
async fn throughput(cycles: usize) -> Result<()> {
    let data = tempfile::tempdir()?;
    let ours = Arc::new(Ours::open(data.path())?);
    ours.cold().await?;
    println!("create, `true`, destroy: sandboxes in a second\n");
    for flight in [1, 2, 4, 8, 16] {
        let (begun, mut flying) = (Instant::now(), tokio::task::JoinSet::new());
        for _ in 0..flight {
            let ours = Arc::clone(&ours);
            flying.spawn(async move {
                for _ in 0..cycles / flight {
                    ours.cold().await.map_err(|error| error.to_string())?;
                }
                Ok::<usize, String>(cycles / flight)
            });
        }
        let lives: usize = flying.join_all().await.into_iter().sum::<std::result::Result<_, _>>()?;
        println!(
            "{flight:4} in flight {:8.1}",
            lives as f64 / begun.elapsed().as_secs_f64()
        );
    }
    println!();
    Ok(())
}

/// What sandboxes cost that do nothing.
async fn idleness(count: usize) -> Result<()> {
    const FLIGHT: usize = 8;
    let data = tempfile::tempdir()?;
    let ours = Arc::new(Ours::open(data.path())?);
    ours.cold().await?;
    let (begun, free) = (Instant::now(), available()?);
    let mut flying = tokio::task::JoinSet::new();
    for first in 0..FLIGHT {
        let ours = Arc::clone(&ours);
        flying.spawn(async move {
            let mut made = Vec::new();
            for _ in (first..count).step_by(FLIGHT) {
                made.push(ours.sandbox().await.map_err(|error| error.to_string())?);
            }
            Ok::<_, String>(made)
        });
    }
    let made = flying.join_all().await;
    let made: Vec<Sandbox> = made
        .into_iter()
        .collect::<std::result::Result<Vec<_>, _>>()?
        .into_iter()
        .flatten()
        .collect();
    let took = begun.elapsed();
    tokio::time::sleep(Duration::from_secs(2)).await;
    let (mut own, mut charged) = (0, 0);
    for sandbox in &made {
        own += proportional(&data.path().join("sandboxes").join(sandbox.id().as_str()))?;
        charged += sandbox.usage().await?.memory_bytes;
    }
    let fallen = free.saturating_sub(available()?);
    let each = |bytes: u64| bytes as f64 / made.len() as f64 / f64::from(1 << 20);
    println!(
        "{} idle sandboxes at once, made at {:.0} in a second; MiB for each\n",
        made.len(),
        made.len() as f64 / took.as_secs_f64()
    );
    println!("  proportional set of its first process  {:6.3}", each(own));
    println!("  charged to its control group           {:6.3}", each(charged));
    println!("  fall of the host's available memory    {:6.3}", each(fallen));
    works(made.last().ok_or("none was made")?).await?;
    let begun = Instant::now();
    for sandbox in &made {
        sandbox.close(Duration::ZERO).await?;
    }
    println!(
        "  destroyed at {:.0} in a second, one by one",
        made.len() as f64 / begun.elapsed().as_secs_f64()
    );
    Ok(())
}

/// Bytes that the host could still give.
fn available() -> Result<u64> {
    field(Path::new("/proc/meminfo"), "MemAvailable:")
}

/// Proportional set of the first process of the sandbox that lives in `dir`.
fn proportional(dir: &Path) -> Result<u64> {
    let record: serde_json::Value = serde_json::from_slice(&fs::read(dir.join("owner.json"))?)?;
    field(
        Path::new(&format!("/proc/{}/smaps_rollup", record["init"]["pid"])),
        "Pss:",
    )
}

/// A line `NAME VALUE kB`, in bytes.
fn field(file: &Path, name: &str) -> Result<u64> {
    let text = fs::read_to_string(file)?;
    let value = text
        .lines()
        .find_map(|line| line.strip_prefix(name)?.trim().strip_suffix(" kB"));
    let value: u64 = value
        .ok_or_else(|| format!("`{}` has no {name}", file.display()))?
        .parse()?;
    Ok(value << 10)
}

async fn measure(rounds: usize) -> Result<()> {
    let data = tempfile::tempdir()?;
    let ours = Ours::open(data.path())?;
    let warm = ours.sandbox().await?;
    let (runc, docker) = (
        told("runc", Runc::open(data.path())),
        told("docker", Engine::open().await),
    );
    let mut table = Table::with_gap(Duration::ZERO);
    let t = &mut table;
    // The first round warms caches and is not counted.
    for round in 0..=rounds {
        t.time(round, "process: fork and exec of `true`", COLD, async {
            succeeds(&mut Command::new("/bin/true"))
        })
        .await?;
        let lap = ours.cold().await?;
        t.note(round, COLD, COLD, lap.create + lap.run + lap.destroy);
        t.note(round, "  create, until the guest answers", COLD, lap.create);
        t.note(round, "  first exec of `true`", COLD, lap.run);
        t.note(round, "  destroy", COLD, lap.destroy);
        t.time(round, "exuvia sandbox run -- true", COLD, async {
            let data = data.path();
            succeeds(
                Command::new(PROGRAM)
                    .arg("--data-dir")
                    .arg(data)
                    .args(["sandbox", "run", "--", "true"]),
            )
        })
        .await?;
        if let Some(runc) = &runc {
            t.time(round, "runc run", COLD, async { runc.run(&["true"]) }).await?;
        }
        if let Some(docker) = &docker {
            let name = "docker: create, start, wait, logs, delete";
            t.time(round, name, COLD, docker.cold(&["true"])).await?;
        }
        t.time(round, WARM, WARM, works(&warm)).await?;
        if let Some(runc) = &runc {
            t.time(round, "runc exec, warm", WARM, async { runc.exec(&["true"]) })
                .await?;
        }
        if let Some(docker) = &docker {
            t.time(round, "docker exec, warm", WARM, docker.exec(&["true"])).await?;
        }
    }
    warm.close(Duration::ZERO).await?;
    if let Some(docker) = docker {
        docker.close().await?;
    }
    drop(runc);
    println!("{table}");
    Ok(())
}

/// The parts of one sandbox's life.
struct Lap {
    create: Duration,
    run: Duration,
    destroy: Duration,
}

/// The `oci` backend, through the library.
struct Ours {
    data: std::path::PathBuf,
    backend: Arc<dyn Backend>,
    filter: Vec<u8>,
}

impl Ours {
    fn open(data: &Path) -> Result<Self> {
        Ok(Self {
            data: data.to_owned(),
            backend: Arc::new(Oci::new(data)?),
            filter: seccomp::default_filter()?,
        })
    }

    async fn sandbox(&self) -> Result<Sandbox> {
        // Free again when this returns, but not given out while a sandbox uses it.
        let claim = Claim::take(&self.data)?;
        let spec = Spec {
            id: SandboxId::random(),
            image: ImageRef::Host,
            isolation: Isolation::Container,
            limits: Limits::default(),
            identity: claim.identity(),
            workspace: None,
            mounts: Vec::new(),
            labels: BTreeMap::new(),
        };
        Ok(Sandbox::open(Arc::clone(&self.backend), spec, self.filter.clone()).await?)
    }

    async fn cold(&self) -> Result<Lap> {
        let begun = Instant::now();
        let sandbox = self.sandbox().await?;
        let created = Instant::now();
        works(&sandbox).await?;
        let ran = Instant::now();
        sandbox.close(Duration::ZERO).await?;
        Ok(Lap {
            create: created - begun,
            run: ran - created,
            destroy: ran.elapsed(),
        })
    }
}

async fn works(sandbox: &Sandbox) -> Result<()> {
    let ended = sandbox.run(Exec::new(["true"]), 0).await?.ended;
    if ended.is_success() {
        Ok(())
    } else {
        Err(format!("{:?}", ended.cause).into())
    }
}
