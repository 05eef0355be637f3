//! Two builds of the server beside each other, call by call in turn: what a change made of it, also on a machine that is not idle.

use crate::STEP;
use crate::peers::{Result, Table, setting};
use crate::server::Server;

/// What is measured with each build; the second names the base of its ratio.
const NAMES: [[&str; 2]; 8] = [
    ["this: pool, create", "other: pool, create"],
    ["this: pool, first exec of true", "other: pool, first exec of true"],
    ["this: pool, kill", "other: pool, kill"],
    ["this: pool, create, true, kill", "other: pool, create, true, kill"],
    [
        "this: pool empty, create, true, kill",
        "other: pool empty, create, true, kill",
    ],
    ["this: pool empty, kill", "other: pool empty, kill"],
    ["this: warm exec of true", "other: warm exec of true"],
    ["this: warm python step", "other: warm python step"],
];
/// Warm execs for each sandbox that is made.
const EXECS: usize = 5;

/// `EXUVIA_BENCH_OTHER` is the other build's program; `EXUVIA_BENCH_ROUNDS` (60).
pub async fn measure(other: std::ffi::OsString) -> Result<Table> {
    let rounds = setting("EXUVIA_BENCH_ROUNDS", 60)?;
    let mut sides = Vec::new();
    for program in [None, Some(other)] {
        let start = async |arguments: &[&str]| match &program {
            None => Server::start(arguments).await,
            Some(program) => Server::of(program, arguments).await,
        };
        let (pooled, bare) = (start(&["--pool", "default=8..8"]).await?, start(&[]).await?);
        let warm = bare.create().await?;
        let can_code = bare.can_code(&warm, STEP).await?;
        sides.push((pooled, bare, warm, can_code));
    }
    let mut table = Table::with_gap(std::time::Duration::ZERO);
    for round in 0..=rounds {
        for turn in 0..sides.len() {
            // Neither is always the first.
            let side = (turn + round) % sides.len();
            let (pooled, bare, warm, can_code) = &sides[side];
            let [create, first, kill, whole, empty, last, exec, step] = NAMES.map(|pair| (pair[side], pair[1]));
            for (full, _, _, _) in &sides {
                full.fill().await?;
            }
            let lap = table.time(round, whole.0, whole.1, pooled.create_true_kill()).await?;
            table.note(round, create.0, create.1, lap.create);
            table.note(round, first.0, first.1, lap.run);
            table.note(round, kill.0, kill.1, lap.kill);
            for (full, _, _, _) in &sides {
                full.fill().await?;
            }
            let lap = table.time(round, empty.0, empty.1, bare.create_true_kill()).await?;
            table.note(round, last.0, last.1, lap.kill);
            for _ in 0..EXECS {
                table.time(round, exec.0, exec.1, bare.works(warm)).await?;
            }
            if *can_code {
                table.time(round, step.0, step.1, bare.code(warm, STEP)).await?;
            }
        }
    }
    for (pooled, bare, _, _) in sides {
        pooled.stop().await?;
        bare.stop().await?;
    }
    Ok(table)
}
