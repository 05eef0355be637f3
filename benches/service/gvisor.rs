//! Sandboxes behind gVisor, from a pool in which they stand still; beside the engine with the same runtime.

use std::time::Duration;

use crate::STEP;
use crate::peers::{Result, Table, setting};
use crate::server::Server;
use crate::weight::cpu_of_sandboxes;

/// How long the pool is watched while nothing is asked of it.
const IDLE: Duration = Duration::from_secs(5);
/// The policy whose isolation is gVisor.
const POLICY: &str = "gvisor";
const BASE: &str = "new, pool empty: create";

/// `EXUVIA_BENCH_ROUNDS` (20).
pub async fn measure() -> Result<String> {
    let rounds = setting("EXUVIA_BENCH_ROUNDS", 20)?;
    let pooled = Server::start(&["--pool", &format!("{POLICY}=4..4")]).await?;
    pooled.fill().await?;
    // What was made last is frozen by then.
    tokio::time::sleep(IDLE).await;
    let before = cpu_of_sandboxes(&pooled)?;
    tokio::time::sleep(IDLE).await;
    let idle = cpu_of_sandboxes(&pooled)?.saturating_sub(before);
    let bare = Server::start(&[]).await?;
    let warm = bare.create_with(POLICY).await?;
    bare.code(&warm, STEP).await?;
    let mut table = Table::with_gap(Duration::ZERO);
    for round in 0..=rounds {
        pooled.fill().await?;
        let name = "new from the pool (thawed): create";
        let id = table.time(round, name, BASE, pooled.create_with(POLICY)).await?;
        let name = "  its first Python step";
        table.time(round, name, BASE, pooled.code(&id, STEP)).await?;
        table.time(round, "  its kill", BASE, pooled.kill(&id)).await?;
        pooled.fill().await?;
        let id = table.time(round, BASE, BASE, bare.create_with(POLICY)).await?;
        bare.kill(&id).await?;
        table
            .time(round, "warm: Python step", BASE, bare.code(&warm, STEP))
            .await?;
        table.time(round, "warm: exec of true", BASE, bare.works(&warm)).await?;
    }
    bare.stop().await?;
    pooled.stop().await?;
    Ok(format!(
        "{table}\nprocessor time of 4 parked sandboxes in {IDLE:?}: {idle:?}\n"
    ))
}
