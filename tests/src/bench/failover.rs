//! `failover`: 100 agents and three replicas. The first replica follows the API server, the second
//! replica never reaches the API server, and the third replica loses its connection after a minute.
//! Then all replicas lose their connections, and later all connections return. Replicas are real
//! processes. Agents are the real session and reconcile loop, with a dataplane in memory.
//!
//! Unlike other benches, this bench checks a time. The time consists mostly of time-outs and
//! pauses, and depends little on the machine.

use std::time::Duration;

use anyhow::{Result, ensure};
use tokio::runtime::Builder;

use super::report::Figure;
use crate::failover::{Mode, Outcome, Scenario, run as play};

/// Longest time until all agents have programmed everything. The limit applies at the start, and
/// after one replica has lost the connection to its API server.
const FAILOVER_LIMIT_SECONDS: f64 = 40.0;

/// Runs the bench twice. In the first run, cut connections to the API server are refused. In the
/// second run, they are silent, as if the network dropped all packets.
///
/// # Errors
/// Agents do not move to the healthy replica in time, move more often than necessary, or move while
/// no replica is connected to its API server.
pub fn run(agents: Option<usize>, services: Option<u32>) -> Result<Vec<Figure>> {
    let agents = agents.unwrap_or(100);
    let mut figures = Vec::new();
    for (cut, name) in [(Mode::Refusing, "refused"), (Mode::Silent, "silent")] {
        let scenario = Scenario {
            agents,
            newcomers: 10,
            services: services.unwrap_or(1_000),
            cut_after: Duration::from_secs(60),
            cut,
            calm: Duration::from_secs(60),
        };
        let runtime = Builder::new_multi_thread().enable_all().build()?;
        let outcome = runtime.block_on(play(scenario))?;
        check(&outcome)?;
        let figure =
            |what: &str, value: f64, unit| Figure::alone(format!("failover/{name}/{what}/{agents}"), value, unit);
        figures.extend([
            figure("start-to-all-programmed", outcome.start_seconds, "s"),
            figure("agents-at-the-replica-that-is-cut-off", outcome.agents_at_cut as f64, ""),
            figure("cut-to-all-on-the-healthy-replica", outcome.failover_seconds, "s"),
            figure("most-moves-of-an-agent", outcome.most_moves as f64, ""),
            figure("moves-in-the-minute-after-failover", outcome.moves_in_calm as f64, ""),
            figure("moves-while-all-are-cut-off", outcome.moves_while_all_cut_off as f64, ""),
            figure("new-agents-programmed-while-all-are-cut-off", outcome.newcomers_seconds, "s"),
            figure("return-to-all-programmed", outcome.return_seconds, "s"),
        ]);
    }
    Ok(figures)
}

fn check(outcome: &Outcome) -> Result<()> {
    let limit = FAILOVER_LIMIT_SECONDS;
    ensure!(
        outcome.start_seconds <= limit && outcome.failover_seconds <= limit,
        "the agents took longer than {limit} s: {outcome:?}"
    );
    // An agent may move from the replica that never lists to the replica that is cut off later, and
    // then to the healthy replica.
    ensure!(outcome.most_moves <= 2, "an agent moved more than twice: {outcome:?}");
    let needless = outcome.moves_in_calm + outcome.moves_while_all_cut_off;
    ensure!(needless == 0, "agents moved without a reason: {outcome:?}");
    Ok(())
}
