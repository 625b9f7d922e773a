//! `lagging`: agents move to a replica whose watch is delayed. The agents must wait at this
//! replica, and must not receive older state. Afterwards, agents move between the replicas at
//! random. During these moves, the watch is delayed and released at random, and endpoints change.
//! No agent may receive an older position of the source than its own.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::{
    fleet::{Load, apart},
    report::Figure,
};
use crate::fleet::{Break, Client, relay::Relay, stage::Stage};

/// The time limit for two steps: the delayed replica welcomes all agents, and then all agents wait.
const LIMIT: Duration = Duration::from_secs(120);
/// The number of random moves.
const MOVES: u32 = 30;
/// Longest time between two moves, in milliseconds.
const PAUSE_MS: u64 = 300;
/// Options of the replicas. Agents may wait at a delayed replica for longer than the bench takes.
const BEHIND_WAIT: &[&str] = &["--behind-wait-seconds", "600"];

/// The results of a run.
#[derive(Debug, Clone, Copy)]
pub struct Lagging {
    /// The number of agents that waited because the replica was behind them.
    pub waits: f64,
    /// The number of waits after which the replica sent older state. It must be 0.
    pub expired: f64,
    /// The number of source positions that agents received and compared with their own position.
    pub points: u64,
    /// The number of agents that found a violation of the contract, such as a position of the
    /// source that is older than their own. It must be 0.
    pub older: usize,
    /// The time from the release of the watch until all agents have everything, in seconds.
    pub catching_up_seconds: f64,
    /// The number of streams during the random moves.
    pub streams: u64,
}

/// Runs the bench.
///
/// # Errors
/// An agent receives older state, or does not have everything in the end.
pub fn run(load: &Load, services: Option<u32>) -> Result<Vec<Figure>> {
    let agents = load.agents.unwrap_or(500);
    let lagging = apart(|| measure(&mut load.stage(agents, services)?, agents, MOVES, fastrand::u64(..)))?;
    let figure = |what: &str, value: f64, unit| Figure::alone(format!("lagging/{what}/{agents}"), value, unit);
    Ok(vec![
        figure("agents-that-waited", lagging.waits, ""),
        figure("agents-that-found-a-violation", lagging.older as f64, ""),
        figure("positions-checked", lagging.points as f64, ""),
        figure("caught-up-after-release", lagging.catching_up_seconds, "s"),
        figure("streams-in-random-moves", lagging.streams as f64, ""),
    ])
}

/// Starts two replicas on a stage without replicas, and moves agents between them. `seed`
/// determines the moves.
///
/// # Errors
/// An agent receives older state, or does not have everything in the end.
pub fn measure(stage: &mut Stage, agents: usize, moves: u32, seed: u64) -> Result<Lagging> {
    let relay = Relay::start(stage.machines.server(), stage.source.api().address())?;
    let through = stage.kubeconfig_through(relay.address());
    let current = stage.start_replica(BEHIND_WAIT)?;
    let behind = stage.start_replica_on(&through, BEHIND_WAIT)?;
    stage.join(0, agents, current)?;
    let (catching_up_seconds, waits) = wait_for_one_behind(stage, &relay, agents, behind)?;
    let before = stage.fleet.ask(|worker| worker.summary().counts.connections)?;
    move_at_random(stage, &relay, moves, seed).map_err(|error| error.context(format!("moves of seed {seed}")))?;
    stage.compare_digests()?;
    let (summary, older) = stage.fleet.ask(|worker| (worker.summary(), worker.violations().count()))?;
    let streams = summary.counts.connections - before;
    let points = summary.received.batches + summary.received.snapshots;
    ensure!(
        older == 0 && points > 0,
        "{older} agents found a violation of the contract, and {points} positions were compared"
    );
    let expired = metric(stage, behind, "headgate_behind_waits_expired_total")?;
    ensure!(expired == 0.0, "{expired} agents received older state after a wait");
    Ok(Lagging { waits, expired, points, older, catching_up_seconds, streams })
}

fn metric(stage: &Stage, replica: usize, name: &str) -> Result<f64> {
    stage.replicas[replica].metric(&stage.machines, name)
}

/// Moves all agents to a replica that is behind them. All agents are welcomed, and no agent
/// receives a resource until the replica has caught up. Returns the time in seconds from the
/// release of the watch until all agents have everything, and the number of agents that waited.
fn wait_for_one_behind(stage: &mut Stage, relay: &Relay, agents: usize, behind: usize) -> Result<(f64, f64)> {
    relay.hold();
    let mut version = 0;
    for _ in 0..20 {
        version = stage.source.change()?;
    }
    stage.wait_for_all(version)?;
    let address = stage.replicas[behind].address();
    stage.fleet.ask(move |worker| {
        worker.set_handshakes(usize::MAX);
        worker.refresh_reference();
        worker.reconnect(Break::Close, &[address], |_| true)
    })?;
    let is_welcomed = |client: &Client| client.mode().is_some();
    stage.fleet.wait_until("all agents are welcomed", LIMIT, move |worker| {
        worker.clients().iter().filter(|client| is_welcomed(client)).count() == worker.clients().len()
    })?;
    let until = Instant::now() + LIMIT;
    while metric(stage, behind, "headgate_behind_waits_total")? < agents as f64 {
        ensure!(Instant::now() < until, "not all agents wait at the replica that is behind them");
        std::thread::sleep(Duration::from_millis(20));
    }
    let waiting = stage.fleet.ask(|worker| worker.summary())?;
    let sent = waiting.present;
    ensure!(waiting.following == 0, "{} agents follow a replica that is behind them", waiting.following);
    ensure!(sent.chunks + sent.batches + sent.snapshots == 0, "agents that must wait received {sent:?}");
    let waits = metric(stage, behind, "headgate_behind_waits_total")?;
    let start = Instant::now();
    relay.release();
    stage.wait_for_all(version)?;
    Ok((start.elapsed().as_secs_f64(), waits))
}

fn move_at_random(stage: &mut Stage, relay: &Relay, moves: u32, seed: u64) -> Result<()> {
    let mut random = fastrand::Rng::with_seed(seed);
    let addresses: Vec<_> = stage.replicas.iter().map(crate::fleet::rig::Replica::address).collect();
    let mut version = 0;
    for _ in 0..moves {
        match random.u8(0..3) {
            0 => relay.hold(),
            1 => relay.release(),
            _ => {}
        }
        for _ in 0..random.u8(0..5) {
            version = stage.source.change()?;
        }
        let address = addresses[random.usize(0..addresses.len())];
        let (share, first) = (random.usize(2..6), random.usize(0..6));
        stage.fleet.ask(move |worker| {
            let counter = std::cell::Cell::new(first);
            worker.reconnect(Break::Reset, &[address], |_| {
                counter.set(counter.get() + 1);
                counter.get() % share == 0
            })
        })?;
        std::thread::sleep(Duration::from_millis(random.u64(0..PAUSE_MS)));
    }
    relay.release();
    stage.wait_for_all(version)
}
