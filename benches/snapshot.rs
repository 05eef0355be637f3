//! What a step's snapshot costs a sandbox, and what it takes to go on from it in another: workspaces laid over a base beside
//! plain directories, in one interleaved run.
//!
//! `cargo bench --bench snapshot`, as root. `EXUVIA_BENCH_ROUNDS` (5) rounds, `EXUVIA_BENCH_FILES` (12000) files of some KiB in
//! directories of 30, of which 100, 1,000 and 10,000 are written anew. `EXUVIA_BENCH_DIR` is where the data directory is made.
//!
//! - *frozen*: from before the sandbox is told to stand still until after it goes on again;
//! - *durable*: from there until the snapshot is on the disk;
//! - *recreate*: from before the sandbox is destroyed until another one with the workspace as it was answers; *settled*: the
//!   same after the background work of the snapshot has ended. The snapshot was taken of what was destroyed.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use exuvia::ids::SandboxId;
use exuvia::sandbox::backend::oci::Oci;
use exuvia::sandbox::disk::{self, Volumes};
use exuvia::sandbox::identity::Claim;
use exuvia::sandbox::{Backend, Command, ImageRef, Isolation, Limits, Sandbox, Spec, seccomp};
use exuvia::workdir::{WorkDir, WorkDirs};
use exuvia::workspace::overlay::{Bases, Reading, Site};
use exuvia::workspace::{Owner, Pool, Revision, Trees};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

fn main() -> Result<()> {
    // `cargo test --benches` only wants to know whether it builds.
    if std::env::args().any(|word| word == "--test") {
        return Ok(());
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(measure())
}

fn setting(name: &str, default: usize) -> Result<usize> {
    Ok(std::env::var(name).map_or(Ok(default), |text| text.parse())?)
}

async fn measure() -> Result<()> {
    let (rounds, files) = (
        setting("EXUVIA_BENCH_ROUNDS", 5)?,
        setting("EXUVIA_BENCH_FILES", 12_000)?,
    );
    let place = std::env::var_os("EXUVIA_BENCH_DIR").map_or_else(std::env::temp_dir, PathBuf::from);
    let data = tempfile::tempdir_in(place)?;
    let (source, dir) = (data.path().join("source"), data.path().join("data"));
    fs::create_dir(&dir)?;
    (0..files).try_for_each(|n| write(&source, n, "first"))?;
    let trees = Trees::open(&dir)?;
    let plain = Pool::new(trees.clone());
    let begin = plain.import(&source).await?.revision;
    let bases = Bases::new(&dir);
    if let Err(lack) = bases.support() {
        eprintln!("SKIPPED overlay: {lack}");
    }
    let host = Host::open(&dir)?;
    let stop = CancellationToken::new();
    let mut keeping = JoinSet::new();
    host.work_dirs.expect(&Limits::default(), 4)?;
    keeping.spawn(host.work_dirs.clone().keep(stop.clone()));
    let kinds = [("overlay", plain.clone().over(bases)), ("plain", plain)];
    let mut rows: BTreeMap<(usize, &str), Vec<[Duration; 5]>> = BTreeMap::new();
    // The first round makes the base, warms caches and is not counted.
    for round in 0..=rounds {
        for changed in [100, 1_000, 10_000] {
            for (name, pool) in &kinds {
                let times = one(&host, pool, begin, files, changed.min(files), round).await?;
                if round > 0 {
                    rows.entry((changed, name)).or_default().push(times);
                }
            }
        }
    }
    println!("{rounds} rounds, {files} files; milliseconds, median (worst)\n");
    println!("changed                 frozen          durable             open         recreate          settled");
    for ((changed, name), mut times) in rows {
        let shown: Vec<String> = (0..5).map(|n| median(&mut times, n)).collect();
        println!("{changed:6} {name:9} {}", shown.join(" "));
    }
    stop.cancel();
    while keeping.join_next().await.is_some() {}
    disk::settle();
    Ok(())
}

fn median(times: &mut [[Duration; 5]], of: usize) -> String {
    times.sort_unstable_by_key(|times| times[of]);
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let (middle, worst) = (times[times.len() / 2][of], times[times.len() - 1][of]);
    format!("{:>7.2} ({:>6.1})", ms(middle), ms(worst))
}

fn write(dir: &Path, n: usize, text: &str) -> Result<()> {
    let folder = dir.join(format!("d{}", n / 30));
    if !folder.exists() {
        fs::create_dir_all(&folder)?;
    }
    let line = format!("{text} {n} {}\n", n * 7919 % 10_007);
    Ok(fs::write(folder.join(n.to_string()), line.repeat(20 + n % 400))?)
}

/// Frozen, durable, open, recreate, recreate when settled.
async fn one(
    host: &Host,
    pool: &Pool,
    begin: Revision,
    files: usize,
    changed: usize,
    round: usize,
) -> Result<[Duration; 5]> {
    let bench = host.sandbox(pool, begin).await?;
    for n in 0..changed {
        write(&bench.site.path(), n * (files / changed), &format!("round {round}"))?;
    }
    // What a tool call does last.
    bench.works().await?;
    let begun = Instant::now();
    bench.sandbox.freeze().await?;
    let reading = match bench.sandbox.is_alone().await {
        true => Reading::Later,
        false => Reading::Now,
    };
    let look = pool.look(&bench.site, reading).await?;
    bench.sandbox.thaw().await?;
    let thawed = Instant::now();
    let kept = pool.keep(&bench.site, look).await?;
    let durable = Instant::now();
    bench.close().await?;
    let destroyed = Instant::now();
    let next = host.sandbox(pool, kept.revision).await?;
    next.works().await?;
    let (frozen, durable_in, open, recreate) =
        (thawed - begun, durable - thawed, destroyed.elapsed(), durable.elapsed());
    host.settled().await?;
    let begun = Instant::now();
    next.close().await?;
    let last = host.sandbox(pool, kept.revision).await?;
    last.works().await?;
    let settled = begun.elapsed();
    last.close().await?;
    Ok([frozen, durable_in, open, recreate, settled])
}

struct Host {
    data: PathBuf,
    backend: Arc<dyn Backend>,
    work_dirs: WorkDirs,
    filter: Vec<u8>,
}

struct Bench {
    sandbox: Sandbox,
    site: Site,
    directory: WorkDir,
    _claim: Claim,
}

impl Host {
    fn open(data: &Path) -> Result<Self> {
        Ok(Self {
            data: data.to_owned(),
            backend: Arc::new(Oci::new(data)?),
            work_dirs: WorkDirs::new(data, Volumes::new(data)),
            filter: seccomp::default_filter()?,
        })
    }

    async fn sandbox(&self, pool: &Pool, revision: Revision) -> Result<Bench> {
        let claim = Claim::take(&self.data)?;
        let (id, limits) = (SandboxId::random(), Limits::default());
        let owner = claim.identity().host_uid();
        let directory = self.work_dirs.open(id.as_str(), &limits, owner)?;
        let owner = Owner { uid: owner, gid: owner };
        let site = pool.lay(directory.ground(), revision, Some(owner)).await?;
        let spec = Spec {
            id,
            image: ImageRef::Host,
            isolation: Isolation::Container,
            limits,
            identity: claim.identity(),
            workspace: Some(site.path()),
            mounts: Vec::new(),
            labels: BTreeMap::new(),
        };
        let sandbox = Sandbox::open(Arc::clone(&self.backend), spec, self.filter.clone()).await?;
        Ok(Bench {
            sandbox,
            site,
            directory,
            _claim: claim,
        })
    }

    /// Waits until no base is being made and volumes are ready.
    async fn settled(&self) -> Result<()> {
        loop {
            tokio::time::sleep(Duration::from_millis(200)).await;
            let bases = self.data.join("bases");
            let busy = |entry: &fs::DirEntry| entry.file_name().as_encoded_bytes().starts_with(b".");
            let is_busy = bases.exists() && fs::read_dir(bases)?.flatten().any(|entry| busy(&entry));
            if !is_busy && self.work_dirs.ready() >= 4 {
                return Ok(());
            }
        }
    }
}

impl Bench {
    async fn works(&self) -> Result<()> {
        let ended = self.sandbox.run(Command::new(["true"]), 0).await?.ended;
        match ended.is_success() {
            true => Ok(()),
            false => Err(format!("{:?}", ended.cause).into()),
        }
    }

    async fn close(self) -> Result<()> {
        self.sandbox.close(Duration::ZERO).await?;
        tokio::task::spawn_blocking(move || self.directory.remove()).await?;
        Ok(())
    }
}
