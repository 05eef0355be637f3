//! What a client of the sandbox service sees, through gRPC, beside what a host offers without us; one interleaved run.
//!
//! `cargo bench --bench service`, as root. What is not installed is named and left out. `EXUVIA_BENCH_ROUNDS` (60) rounds, in
//! each of which every case runs once, so that all see the same weather; `EXUVIA_BENCH_GAP_MS` (0) between two cases: 0 is a
//! tight loop, 50 is isolated arrivals. `EXUVIA_BENCH_IMAGE` (`exuvia/python`) is what `docker` is measured with.
//! `EXUVIA_BENCH_ONLY` runs one part: `latency`, `arrivals`, `rate` (or of it `burst` alone), `refill`, `output`, `weight` or `gvisor`. With
//! `EXUVIA_BENCH_OTHER` only two builds are compared: this and that program.

#[path = "service/arrivals.rs"]
mod arrivals;
#[path = "service/gvisor.rs"]
mod gvisor;
#[path = "service/output.rs"]
mod output;
mod peers;
#[path = "service/rate.rs"]
mod rate;
#[path = "service/server.rs"]
mod server;
#[path = "service/versus.rs"]
mod versus;
#[path = "service/weight.rs"]
mod weight;

use std::process::Command;
use std::time::Duration;

use peers::{Engine, Result, Runc, Table, succeeds, told};
use server::Server;

/// A Python step: the same text everywhere.
const STEP: &str = "print(6*7)";

fn main() -> Result<()> {
    // `cargo test --benches` only wants to know whether it builds.
    if std::env::args().any(|word| word == "--test") {
        return Ok(());
    }
    let only = std::env::var("EXUVIA_BENCH_ONLY").unwrap_or_default();
    let asked = |name: &str| only.is_empty() || only == name;
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?
        .block_on(async {
            if let Some(other) = std::env::var_os("EXUVIA_BENCH_OTHER") {
                println!("{}", versus::measure(other).await?);
                return Ok(());
            }
            if asked("latency") {
                println!("{}", latencies().await?);
            }
            if asked("arrivals") {
                println!("{}", arrivals::measure().await?);
            }
            if asked("rate") {
                println!("{}", rate::measure().await?);
            }
            if only == "burst" {
                println!("{:.1} a second", rate::burst().await?);
            }
            if asked("refill") {
                println!("{}", rate::refill().await?);
            }
            if asked("output") {
                println!("{}", output::measure().await?);
            }
            if asked("weight") {
                println!("{}", weight::measure().await?);
            }
            if asked("gvisor") {
                match exuvia::sandbox::backend::gvisor::Runsc::find() {
                    Ok(_) => println!("{}", gvisor::measure().await?),
                    Err(lack) => eprintln!("SKIPPED gvisor: {lack}"),
                }
            }
            Ok(())
        })
}

const PYTHON_DOCKER: &str = "docker: create, start, wait, logs, delete; python";
const TRUE_DOCKER: &str = "docker: create, start, wait, logs, delete; true";
const TRUE_EXEC: &str = "docker exec, warm; true";
const PYTHON_EXEC: &str = "docker exec, warm; python";
const PYTHON_BARE: &str = "process: python3 -c, nothing around it";

async fn latencies() -> Result<Table> {
    let rounds = peers::setting("EXUVIA_BENCH_ROUNDS", 60)?;
    let pooled = Server::start(&["--pool", "default=8..8"]).await?;
    let bare = Server::start(&[]).await?;
    let warm = bare.create().await?;
    let can_code = bare.can_code(&warm, STEP).await?;
    let data = tempfile::tempdir()?;
    let runc = told("runc", Runc::open(data.path()));
    let docker = told("docker", Engine::open().await);

    let gap = Duration::from_millis(peers::setting("EXUVIA_BENCH_GAP_MS", 0)? as u64);
    let mut table = Table::with_gap(gap);
    for round in 0..=rounds {
        let t = &mut table;
        if can_code {
            // Full again before each of these: what they measure is a hit.
            pooled.fill().await?;
            let name = "new sandbox from the pool, python; result is back";
            let id = t.time(round, name, PYTHON_DOCKER, pooled.create_and_code(STEP)).await?;
            pooled.kill(&id).await?;
            // What follows is not measured beside its refilling.
            pooled.fill().await?;
            let name = "new sandbox, pool empty, python; result is back";
            let id = t.time(round, name, PYTHON_DOCKER, bare.create_and_code(STEP)).await?;
            bare.kill(&id).await?;
            t.time(round, PYTHON_BARE, PYTHON_DOCKER, async {
                succeeds(Command::new(peers::python()).args(["-c", STEP]))
            })
            .await?;
            if let Some(runc) = &runc {
                t.time(round, "runc run; python", PYTHON_DOCKER, async {
                    runc.run(&["python3", "-c", STEP])
                })
                .await?;
            }
            if let Some(docker) = &docker {
                t.time(
                    round,
                    PYTHON_DOCKER,
                    PYTHON_DOCKER,
                    docker.cold(&["python3", "-c", STEP]),
                )
                .await?;
            }
        }

        pooled.fill().await?;
        let name = "new sandbox from the pool, true, killed";
        let lap = t.time(round, name, TRUE_DOCKER, pooled.create_true_kill()).await?;
        t.note(round, "  hit: create", TRUE_DOCKER, lap.create);
        t.note(round, "  hit: first exec of true", TRUE_DOCKER, lap.run);
        t.note(round, "  hit: kill", TRUE_DOCKER, lap.kill);
        pooled.fill().await?;
        let name = "new sandbox, pool empty, true, killed";
        let lap = t.time(round, name, TRUE_DOCKER, bare.create_true_kill()).await?;
        t.note(round, "  empty: create", TRUE_DOCKER, lap.create);
        t.note(round, "  empty: first exec of true", TRUE_DOCKER, lap.run);
        t.note(round, "  empty: kill", TRUE_DOCKER, lap.kill);
        t.time(round, "process: fork and exec of true", TRUE_DOCKER, async {
            succeeds(&mut Command::new("/bin/true"))
        })
        .await?;
        if let Some(runc) = &runc {
            t.time(round, "runc run; true", TRUE_DOCKER, async { runc.run(&["true"]) })
                .await?;
        }
        if let Some(docker) = &docker {
            t.time(round, TRUE_DOCKER, TRUE_DOCKER, docker.cold(&["true"])).await?;
        }

        t.time(round, "exec in a warm sandbox; true", TRUE_EXEC, bare.works(&warm))
            .await?;
        if can_code {
            let name = "python step, fresh process in a warm sandbox";
            t.time(round, name, PYTHON_EXEC, bare.code(&warm, STEP)).await?;
        }
        if let Some(runc) = &runc {
            t.time(round, "runc exec, warm; true", TRUE_EXEC, async {
                runc.exec(&["true"])
            })
            .await?;
        }
        if let Some(docker) = &docker {
            t.time(round, TRUE_EXEC, TRUE_EXEC, docker.exec(&["true"])).await?;
            if can_code {
                t.time(round, PYTHON_EXEC, PYTHON_EXEC, docker.exec(&["python3", "-c", STEP]))
                    .await?;
            }
        }
    }
    if let Some(docker) = docker {
        docker.close().await?;
    }
    pooled.stop().await?;
    bare.stop().await?;
    Ok(table)
}
