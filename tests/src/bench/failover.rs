//! `failover`: 100 agents and three replicas. One follows the API server, one never lists it, and
//! one loses it after a minute; then all lose it, and it comes back. Replicas are the real program;
//! agents are the real session and reconcile loop, with a kernel that is only recorded.
//!
//! Unlike elsewhere a time is a promise here: it is made of time-outs and pauses, hardly of work.

use std::time::Duration;

use anyhow::{Result, ensure};
use tokio::runtime::Builder;

use super::report::Figure;
use crate::failover::{Mode, Outcome, Scenario, run as play};

/// All agents are on the healthy replica, with everything programmed, so soon after another lost
/// its API server.
const FAILOVER_LIMIT_SECONDS: f64 = 40.0;

/// Runs the bench, once with an API server that refuses connections and once with a network that
/// carries nothing.
///
/// # Errors
/// When agents do not come to the healthy replica in time, move to and fro, or move while no
/// replica has its API server.
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
            figure("cut-to-all-on-the-healthy-one", outcome.failover_seconds, "s"),
            figure("most-moves-of-an-agent", outcome.most_moves as f64, ""),
            figure("moves-in-a-minute-after-that", outcome.moves_in_calm as f64, ""),
            figure("moves-while-all-are-cut-off", outcome.moves_while_all_cut_off as f64, ""),
            figure("agents-without-state-while-all-are-cut-off", outcome.newcomers_seconds, "s"),
            figure("return-to-all-programmed", outcome.return_seconds, "s"),
        ]);
    }
    Ok(figures)
}

fn check(outcome: &Outcome) -> Result<()> {
    let limit = FAILOVER_LIMIT_SECONDS;
    ensure!(outcome.start_seconds <= limit && outcome.failover_seconds <= limit, "later than {limit} s: {outcome:?}");
    // From the replica that never lists to the one that is cut off later, and on to the healthy
    // one.
    ensure!(outcome.most_moves <= 2, "an agent moves to and fro: {outcome:?}");
    let needless = outcome.moves_in_calm + outcome.moves_while_all_cut_off;
    ensure!(needless == 0, "agents move without need: {outcome:?}");
    Ok(())
}
