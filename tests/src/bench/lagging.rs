//! `lagging`: agents move to a replica whose watch is held back, and wait there instead of being
//! given older state; then they move to and fro while the watch is held and let go at random, and
//! endpoints change. Nobody is ever sent a position of the source that is behind what it has.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::{
    fleet::{Load, apart},
    report::Figure,
};
use crate::fleet::{Break, Client, relay::Relay, stage::Stage};

/// How long the watch is held back at first: time enough for everybody to be welcomed.
const LIMIT: Duration = Duration::from_secs(120);
/// Moves to and fro.
const MOVES: u32 = 30;
/// Longest time between two moves.
const PAUSE_MS: u64 = 300;
/// A replica behind its agents lets them wait longer than this takes.
const BEHIND_WAIT: &[&str] = &["--behind-wait-seconds", "600"];

/// What was seen.
#[derive(Debug, Clone, Copy)]
pub struct Lagging {
    /// Agents that the replica kept waiting because it was behind them.
    pub waits: f64,
    /// Waits that ended by going back in time: none, ever.
    pub expired: f64,
    /// Consistent points that agents were brought to, and compared with what they had.
    pub points: u64,
    /// Agents that were sent a position of the source behind what they had: none, ever.
    pub older: usize,
    /// From letting the watch go to the last agent having everything, in seconds.
    pub catching_up_seconds: f64,
    /// Streams in the part with random moves.
    pub streams: u64,
}

/// Runs the bench.
///
/// # Errors
/// When an agent is given older state, or does not get everything in the end.
pub fn run(load: &Load, services: Option<u32>) -> Result<Vec<Figure>> {
    let agents = load.agents.unwrap_or(500);
    let lagging = apart(|| measure(&mut load.stage(agents, services)?, agents, MOVES, fastrand::u64(..)))?;
    let figure = |what: &str, value: f64, unit| Figure::alone(format!("lagging/{what}/{agents}"), value, unit);
    Ok(vec![
        figure("kept-waiting", lagging.waits, ""),
        figure("given-older-state", lagging.older as f64, ""),
        figure("points-checked", lagging.points as f64, ""),
        figure("caught-up-after-release", lagging.catching_up_seconds, "s"),
        figure("streams-in-random-moves", lagging.streams as f64, ""),
    ])
}

/// Moves agents between two replicas of a stage that has none yet. `seed` decides the moves.
///
/// # Errors
/// See [`run`].
pub fn measure(stage: &mut Stage, agents: usize, moves: u32, seed: u64) -> Result<Lagging> {
    let relay = Relay::start(stage.machines.server(), stage.source.api().address())?;
    let through = stage.kubeconfig_through(relay.address());
    let current = stage.start_replica(BEHIND_WAIT)?;
    let behind = stage.start_replica_on(&through, BEHIND_WAIT)?;
    stage.join(0, agents, current)?;
    let (catching_up_seconds, waits) = wait_for_one_behind(stage, &relay, agents, behind)?;
    let before = stage.fleet.ask(|worker| worker.summary().counts.connections)?;
    move_to_and_fro(stage, &relay, moves, seed).map_err(|error| error.context(format!("moves of seed {seed}")))?;
    stage.compare_digests()?;
    let (summary, older) = stage.fleet.ask(|worker| (worker.summary(), worker.violations().count()))?;
    let streams = summary.counts.connections - before;
    let points = summary.received.batches + summary.received.snapshots;
    ensure!(older == 0 && points > 0, "{older} agents were sent what they must not be, of {points} points");
    let expired = metric(stage, behind, "headgate_behind_waits_expired_total")?;
    ensure!(expired == 0.0, "{expired} agents were sent back in time");
    Ok(Lagging { waits, expired, points, older, catching_up_seconds, streams })
}

fn metric(stage: &Stage, replica: usize, name: &str) -> Result<f64> {
    stage.replicas[replica].metric(&stage.machines, name)
}

/// Everybody moves to a replica that is behind: all are welcomed, none is sent a resource, until it
/// has caught up.
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
    stage.fleet.wait_until("everybody is welcomed", LIMIT, move |worker| {
        worker.clients().iter().filter(|client| is_welcomed(client)).count() == worker.clients().len()
    })?;
    let until = Instant::now() + LIMIT;
    while metric(stage, behind, "headgate_behind_waits_total")? < agents as f64 {
        ensure!(Instant::now() < until, "a replica that is behind does not let its agents wait");
        std::thread::sleep(Duration::from_millis(20));
    }
    let waiting = stage.fleet.ask(|worker| worker.summary())?;
    let sent = waiting.present;
    ensure!(waiting.following == 0, "{} agents go on with a replica that is behind them", waiting.following);
    ensure!(sent.chunks + sent.batches + sent.snapshots == 0, "agents that have to wait were sent {sent:?}");
    let waits = metric(stage, behind, "headgate_behind_waits_total")?;
    let start = Instant::now();
    relay.release();
    stage.wait_for_all(version)?;
    Ok((start.elapsed().as_secs_f64(), waits))
}

fn move_to_and_fro(stage: &mut Stage, relay: &Relay, moves: u32, seed: u64) -> Result<()> {
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
