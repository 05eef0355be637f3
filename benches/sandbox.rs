//! How long a sandbox takes, beside what else a host offers, measured in one interleaved run.
//!
//! `cargo bench --bench sandbox`, as root. What is not installed is named and left out. `EXUVIA_BENCH_ROUNDS` (100) rounds,
//! in each of which every case runs once, so that all see the same weather. `EXUVIA_BENCH_IMAGE` (`exuvia/python`) is the
//! Docker image; it must have `true` and `sleep`. There is no pool here: every sandbox is made when it is asked for.
//!
//! Then `EXUVIA_BENCH_CYCLES` (400) sandboxes, 1 to 16 in flight: how many in a second. Then `EXUVIA_BENCH_IDLE` (200)
//! sandboxes at once that do nothing: what each of them takes. 0 leaves such a part out.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bollard::exec::{StartExecOptions, StartExecResults};
use bollard::models::{ContainerCreateBody, ExecConfig, HostConfig};
use bollard::query_parameters::{
    CreateContainerOptions, RemoveContainerOptions, StartContainerOptions, WaitContainerOptions,
};
use exuvia::ids::SandboxId;
use exuvia::sandbox::backend::oci::Oci;
use exuvia::sandbox::identity::Claim;
use exuvia::sandbox::{Backend, Command as Exec, ImageRef, Isolation, Limits, Sandbox, Spec, seccomp};
use futures::StreamExt;

const PROGRAM: &str = env!("CARGO_BIN_EXE_exuvia");

/// Any error: a benchmark only tells it and stops.
type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// One thing that is measured, and what it is compared with.
struct Case {
    name: &'static str,
    /// The case that its ratio is taken to.
    base: &'static str,
    took: Vec<Duration>,
}

const CASES: [(&str, &str); 11] = [
    ("process: fork and exec of `true`", "oci: create, `true`, destroy"),
    ("oci: create, `true`, destroy", "oci: create, `true`, destroy"),
    ("  create, until the guest answers", "oci: create, `true`, destroy"),
    ("  first exec of `true`", "oci: create, `true`, destroy"),
    ("  destroy", "oci: create, `true`, destroy"),
    ("exuvia sandbox run -- true", "oci: create, `true`, destroy"),
    ("runc run", "oci: create, `true`, destroy"),
    ("docker: create, start, wait, delete", "oci: create, `true`, destroy"),
    ("oci: exec of `true`, warm", "oci: exec of `true`, warm"),
    ("runc exec, warm", "oci: exec of `true`, warm"),
    ("docker exec, warm", "oci: exec of `true`, warm"),
];

fn main() -> Result<()> {
    // `cargo test --benches` only wants to know whether it builds.
    if std::env::args().any(|word| word == "--test") {
        return Ok(());
    }
    let number = |name: &str, otherwise: usize| std::env::var(name).map_or(Ok(otherwise), |text| text.parse());
    let rounds = number("EXUVIA_BENCH_ROUNDS", 100)?;
    let (cycles, idle) = (number("EXUVIA_BENCH_CYCLES", 400)?, number("EXUVIA_BENCH_IDLE", 200)?);
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
    let runc = Runc::open(data.path());
    let docker = Engine::open().await;
    let (runc, docker) = (told("runc", runc), told("docker", docker));
    let mut cases: Vec<Case> = CASES
        .map(|(name, base)| Case {
            name,
            base,
            took: Vec::new(),
        })
        .into();
    // The first round warms caches and is not counted.
    for round in 0..=rounds {
        let mut note = |case: usize, took: Duration| {
            if round > 0 {
                cases[case].took.push(took);
            }
        };
        let begun = Instant::now();
        succeeds(&mut Command::new("/bin/true"))?;
        note(0, begun.elapsed());

        let lap = ours.cold().await?;
        for (case, took) in (1..).zip([lap.create + lap.run + lap.destroy, lap.create, lap.run, lap.destroy]) {
            note(case, took);
        }

        let begun = Instant::now();
        succeeds(
            Command::new(PROGRAM)
                .args(["--data-dir"])
                .arg(data.path())
                .args(["sandbox", "run", "--", "true"]),
        )?;
        note(5, begun.elapsed());

        if let Some(runc) = &runc {
            let begun = Instant::now();
            runc.run(&format!("exuvia-bench-{}-{round}", std::process::id()))?;
            note(6, begun.elapsed());
        }
        if let Some(docker) = &docker {
            let begun = Instant::now();
            docker.cold().await?;
            note(7, begun.elapsed());
        }

        let begun = Instant::now();
        works(&warm).await?;
        note(8, begun.elapsed());

        if let Some(runc) = &runc {
            let begun = Instant::now();
            succeeds(runc.command().args(["exec", &runc.warm, "true"]))?;
            note(9, begun.elapsed());
        }
        if let Some(docker) = &docker {
            let begun = Instant::now();
            docker.exec().await?;
            note(10, begun.elapsed());
        }
    }
    warm.close(Duration::ZERO).await?;
    if let Some(docker) = docker {
        docker.close().await?;
    }
    drop(runc);
    println!("{}", table(&cases, rounds));
    Ok(())
}

fn told<T>(name: &str, opened: Result<T>) -> Option<T> {
    opened.inspect_err(|error| eprintln!("SKIPPED {name}: {error}")).ok()
}

fn table(cases: &[Case], rounds: usize) -> String {
    let profile = if cfg!(debug_assertions) {
        "without optimisation"
    } else {
        "optimised"
    };
    let mut text = format!("{rounds} rounds, this build {profile}; milliseconds\n\n");
    text += &format!("{:38} {:>8} {:>8} {:>8} {:>8}\n", "", "p50", "p99", "least", "ratio");
    let median = |case: &Case| quantile(&case.took, 50);
    for case in cases.iter().filter(|case| !case.took.is_empty()) {
        let base = cases.iter().find(|other| other.name == case.base).and_then(median);
        let [p50, p99, least] = [50, 99, 0].map(|percent| quantile(&case.took, percent).unwrap_or_default());
        let ratio = base.map_or(f64::NAN, |base| p50.as_secs_f64() / base.as_secs_f64());
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        text += &format!(
            "{:38} {:8.2} {:8.2} {:8.2} {ratio:7.1}x\n",
            case.name,
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

fn succeeds(command: &mut Command) -> Result<()> {
    let output = command.stdin(Stdio::null()).output()?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!(
        "{command:?}: {}, {}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    )
    .into())
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

/// `runc` with its own default configuration over a read-only view of the host, as the `host` image is.
struct Runc {
    dir: std::path::PathBuf,
    /// A container that stays.
    warm: String,
}

impl Runc {
    fn open(data: &Path) -> Result<Self> {
        let dir = data.join("runc");
        let root = dir.join("bundle/rootfs");
        fs::create_dir_all(root.join("usr"))?;
        for name in ["bin", "lib", "lib64"] {
            std::os::unix::fs::symlink(Path::new("usr").join(name), root.join(name))?;
        }
        for name in ["proc", "dev", "sys", "tmp"] {
            fs::create_dir(root.join(name))?;
        }
        let runc = Self {
            warm: format!("exuvia-bench-{}-warm", std::process::id()),
            dir,
        };
        succeeds(runc.command().arg("spec").arg("--bundle").arg(runc.dir.join("bundle")))?;
        runc.configure(&["sleep", "100000"])?;
        // The container keeps its streams open: none of them may be a pipe that is read to its end.
        let mut detached = runc.command();
        detached.args(["run", "--detach", &runc.warm]);
        let status = detached
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()?;
        if !status.success() {
            return Err(format!("{detached:?}: {status}").into());
        }
        runc.configure(&["true"])?;
        Ok(runc)
    }

    fn command(&self) -> Command {
        let mut command = Command::new("runc");
        command
            .arg("--root")
            .arg(self.dir.join("state"))
            .current_dir(self.dir.join("bundle").canonicalize().unwrap_or_default());
        command
    }

    fn configure(&self, words: &[&str]) -> Result<()> {
        let path = self.dir.join("bundle/config.json");
        let mut config: serde_json::Value = serde_json::from_slice(&fs::read(&path)?)?;
        config["process"]["terminal"] = false.into();
        config["process"]["args"] = words.into();
        let usr =
            serde_json::json!({ "destination": "/usr", "type": "bind", "source": "/usr", "options": ["bind", "ro"] });
        let mounts = config["mounts"]
            .as_array_mut()
            .ok_or("runc's configuration has no mounts")?;
        if !mounts.contains(&usr) {
            mounts.push(usr);
        }
        Ok(fs::write(path, config.to_string())?)
    }

    fn run(&self, name: &str) -> Result<()> {
        succeeds(self.command().args(["run", name]))
    }
}

impl Drop for Runc {
    fn drop(&mut self) {
        if let Err(error) = succeeds(self.command().args(["delete", "--force", &self.warm])) {
            eprintln!("runc: the container {} stays: {error}", self.warm);
        }
    }
}

/// A Docker engine, through its HTTP interface.
struct Engine {
    docker: bollard::Docker,
    image: String,
    warm: String,
}

impl Engine {
    async fn open() -> Result<Self> {
        let docker = bollard::Docker::connect_with_local_defaults()?
            .negotiate_version()
            .await?;
        let image = std::env::var("EXUVIA_BENCH_IMAGE").unwrap_or_else(|_| "exuvia/python".to_owned());
        docker.inspect_image(&image).await?;
        let mut engine = Self {
            docker,
            image,
            warm: String::new(),
        };
        engine.warm = engine.create(&["sleep", "100000"]).await?;
        engine
            .docker
            .start_container(&engine.warm, None::<StartContainerOptions>)
            .await?;
        Ok(engine)
    }

    async fn create(&self, words: &[&str]) -> Result<String> {
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        let body = ContainerCreateBody {
            image: Some(self.image.clone()),
            entrypoint: Some(Vec::new()),
            cmd: Some(words),
            host_config: Some(HostConfig {
                network_mode: Some("none".to_owned()),
                ..HostConfig::default()
            }),
            ..ContainerCreateBody::default()
        };
        Ok(self
            .docker
            .create_container(None::<CreateContainerOptions>, body)
            .await?
            .id)
    }

    async fn cold(&self) -> Result<()> {
        let id = self.create(&["true"]).await?;
        // Asked before it starts: it may end at once.
        let mut ended = self.docker.wait_container(
            &id,
            Some(WaitContainerOptions {
                condition: "next-exit".to_owned(),
            }),
        );
        let (started, ended) = tokio::join!(
            self.docker.start_container(&id, None::<StartContainerOptions>),
            ended.next()
        );
        started?;
        ended.ok_or("the engine did not tell of the end")??;
        self.delete(&id).await
    }

    async fn exec(&self) -> Result<()> {
        let config = ExecConfig {
            cmd: Some(vec!["true".to_owned()]),
            attach_stdout: Some(true),
            attach_stderr: Some(true),
            ..ExecConfig::default()
        };
        let id = self.docker.create_exec(&self.warm, config).await?.id;
        match self.docker.start_exec(&id, None::<StartExecOptions>).await? {
            StartExecResults::Attached { mut output, .. } => while output.next().await.transpose()?.is_some() {},
            StartExecResults::Detached => return Err("the exec is detached".into()),
        }
        match self.docker.inspect_exec(&id).await?.exit_code {
            Some(0) => Ok(()),
            other => Err(format!("the exec ended with {other:?}").into()),
        }
    }

    async fn delete(&self, id: &str) -> Result<()> {
        let options = RemoveContainerOptions {
            force: true,
            ..RemoveContainerOptions::default()
        };
        Ok(self.docker.remove_container(id, Some(options)).await?)
    }

    async fn close(&self) -> Result<()> {
        self.delete(&self.warm).await
    }
}
