//! One call right after the other, beside calls that come alone: what was asleep or out of the caches costs those more.

use std::time::Duration;

use crate::STEP;
use crate::peers::{Result, Table, setting};
use crate::server::Server;

/// Between two calls that come alone.
const APART: Duration = Duration::from_millis(200);

/// `EXUVIA_BENCH_ROUNDS` (60) of each kind of arrival, in turn.
pub async fn measure() -> Result<Table> {
    let rounds = setting("EXUVIA_BENCH_ROUNDS", 60)?;
    let pooled = Server::start(&["--pool", "default=8..8"]).await?;
    let warm = pooled.create().await?;
    let can_code = pooled.can_code(&warm, STEP).await?;
    let mut table = Table::with_gap(Duration::ZERO);
    for round in 0..=rounds {
        for (gap, names) in [
            (
                None,
                [
                    "tight: new from the pool, python",
                    "tight: new from the pool, true, killed",
                    "tight: exec, warm; true",
                    "tight: python step, warm",
                ],
            ),
            (
                Some(APART),
                [
                    "200 ms apart: new from the pool, python",
                    "200 ms apart: new from the pool, true, killed",
                    "200 ms apart: exec, warm; true",
                    "200 ms apart: python step, warm",
                ],
            ),
        ] {
            let [python, whole, exec, step] = names;
            pooled.fill().await?;
            if can_code {
                rest(gap).await;
                let id = table
                    .time(round, python, TIGHT_EXEC, pooled.create_and_code(STEP))
                    .await?;
                pooled.kill(&id).await?;
                pooled.fill().await?;
            }
            rest(gap).await;
            table.time(round, whole, TIGHT_EXEC, pooled.create_true_kill()).await?;
            pooled.fill().await?;
            if gap.is_none() {
                // The first of a row is not in a row yet.
                pooled.works(&warm).await?;
            }
            rest(gap).await;
            table.time(round, exec, TIGHT_EXEC, pooled.works(&warm)).await?;
            if can_code {
                if gap.is_none() {
                    pooled.code(&warm, STEP).await?;
                }
                rest(gap).await;
                table.time(round, step, TIGHT_EXEC, pooled.code(&warm, STEP)).await?;
            }
        }
    }
    pooled.stop().await?;
    Ok(table)
}

const TIGHT_EXEC: &str = "tight: exec, warm; true";

async fn rest(gap: Option<Duration>) {
    if let Some(gap) = gap {
        tokio::time::sleep(gap).await;
    }
}
