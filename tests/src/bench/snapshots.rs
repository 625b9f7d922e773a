//! `snapshots`: thousands of agents that have nothing come at once, as after an outage of
//! everything, and each needs a full snapshot. They are served in the order in which they came, and
//! the replica's memory stays bounded.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use super::{
    fleet::{Load, SETTLING, apart},
    report::Figure,
};
use crate::fleet::{Client, rig::CpuTime, stage::Stage, worker::Worker};

/// Snapshots that a replica sends at the same time
/// (`control-plane/src/serve/stream/snapshot_queue.rs`).
pub const IN_FLIGHT: usize = 64;
/// Memory that an agent may cost, ...
const BYTES_PER_AGENT: u64 = 16_000;
/// ... and what is kept besides: the buckets that are encoded, and what is half sent of as many as
/// are in flight.
const SHARED_BYTES: u64 = 32 << 20;
/// Share of pairs of agents that may be served in another order than they were welcomed in. Those
/// in flight end in any order, and the load reads what is there from one connection after the
/// other; without any order it would be a half.
const OVERTAKEN: f64 = 0.25;
/// Longest time until everybody has everything.
const LIMIT: Duration = Duration::from_secs(400);
/// How often the replica is asked.
const SAMPLING: Duration = Duration::from_millis(20);

/// What was seen.
#[derive(Debug, Clone)]
pub struct Snapshots {
    /// From the first connection to the last agent having everything, in seconds.
    pub seconds: f64,
    /// CPU time of the replica.
    pub cpu: CpuTime,
    /// Its memory before, and at its highest, in bytes.
    pub bytes: (u64, u64),
    /// Most snapshots that were seen being sent at the same time.
    pub in_flight: usize,
    /// Most that were seen waiting for their turn.
    pub waiting: usize,
    /// How many had to wait, be it for a moment that nobody saw.
    pub waited: usize,
    /// Share of pairs of agents that were served in another order than they were welcomed in.
    pub overtaken: f64,
    /// Bytes of snapshots that each agent was sent.
    pub bytes_each: u64,
}

/// Runs the bench.
///
/// # Errors
/// When more snapshots are sent at once than are admitted, in another order than agents came, or
/// memory grows beyond its bound.
pub fn run(load: &Load, services: Option<u32>) -> Result<Vec<Figure>> {
    let agents = load.agents.unwrap_or(2_000);
    let seen = apart(|| measure(&mut load.stage(agents, services)?, agents))?;
    let (before, highest) = seen.bytes;
    let growth = highest.saturating_sub(before);
    let allowed = BYTES_PER_AGENT * agents as u64 + SHARED_BYTES;
    ensure!(growth <= allowed, "memory grows by {growth} bytes with {agents} snapshots; {allowed} are enough");
    ensure!(seen.waited > 0, "nobody waited: there were too few agents to say anything about order");
    let overtaken = seen.overtaken;
    ensure!(
        overtaken <= OVERTAKEN,
        "of {overtaken:.3} of all pairs the later one was served first; {OVERTAKEN} are fair"
    );
    let figure = |what: &str, value: f64, unit| Figure::alone(format!("snapshots/{what}/{agents}"), value, unit);
    Ok(vec![
        figure("all-served", seen.seconds, "s"),
        figure("server-cpu-per-agent", seen.cpu.busy() * 1e3 / agents as f64, "ms"),
        figure("snapshot-bytes-per-agent", seen.bytes_each as f64 / 1e6, "MB"),
        figure("memory-growth-highest", growth as f64 / 1e6, "MB"),
        figure("memory-growth-per-agent", growth as f64 / 1e3 / agents as f64, "KB"),
        figure("in-flight-highest", seen.in_flight as f64, ""),
        figure("waiting-highest", seen.waiting as f64, ""),
        figure("waited", seen.waited as f64, ""),
        figure("pairs-overtaken", seen.overtaken * 100.0, "%"),
    ])
}

/// Lets so many agents come to a stage without replicas, all at once and with nothing.
///
/// # Errors
/// When somebody gets something else than a full snapshot, or more are sent at once than are
/// admitted. Order and memory are the caller's to judge.
pub fn measure(stage: &mut Stage, agents: usize) -> Result<Snapshots> {
    stage.start_replica(&[])?;
    std::thread::sleep(SETTLING);
    let replica = &stage.replicas[0];
    let (before, cpu) = (replica.resident_bytes()?, replica.cpu()?);
    stage.fleet.ask(|worker| worker.set_handshakes(usize::MAX))?;
    let start = Instant::now();
    stage.fleet.join(stage.members(0, agents, 0))?;
    let (mut in_flight, mut waiting) = (0, 0);
    while stage.fleet.ask(|worker| worker.having(0))? < agents {
        ensure!(start.elapsed() < LIMIT, "not everybody has everything after {} s", LIMIT.as_secs());
        let level = |name: &str| Ok::<_, anyhow::Error>(replica.metric(&stage.machines, name)? as usize);
        in_flight = in_flight.max(level("headgate_snapshots_in_flight")?);
        waiting = waiting.max(level("headgate_snapshots_waiting")?);
        std::thread::sleep(SAMPLING);
    }
    let seconds = start.elapsed().as_secs_f64();
    let (summary, overtaken) = stage.fleet.ask(|worker| (worker.summary(), overtaken(worker)))?;
    let (overtaken, received) = (overtaken.context("an agent has no place in the order")?, summary.present);
    ensure!(summary.by_full == agents, "{} agents of {agents} began with nothing", summary.by_full);
    let least = stage.source.resources() * agents as u64;
    ensure!(received.chunk_resources == least, "{} resources were sent, not {least}", received.chunk_resources);
    ensure!(in_flight <= IN_FLIGHT, "{in_flight} snapshots were sent at once, and {IN_FLIGHT} are admitted");
    let replica = &stage.replicas[0];
    Ok(Snapshots {
        seconds,
        cpu: replica.cpu()?.since(&cpu),
        bytes: (before, replica.highest_resident_bytes()?),
        in_flight,
        waiting,
        waited: replica.metric(&stage.machines, "headgate_snapshots_waited_total")? as usize,
        overtaken,
        bytes_each: received.chunk_bytes / agents as u64,
    })
}

/// Share of pairs that were served in another order than they were welcomed in. None unless all
/// were served.
fn overtaken(worker: &Worker) -> Option<f64> {
    let order: Option<Vec<(u64, u64)>> = worker.clients().iter().map(Client::first_snapshot).collect();
    let mut order = order?;
    order.sort_unstable();
    let later =
        |(at, (_, served)): (usize, &(u64, u64))| order[at + 1..].iter().filter(|(_, other)| other < served).count();
    let overtaken: usize = order.iter().enumerate().map(later).sum();
    let pairs = order.len() * order.len().saturating_sub(1) / 2;
    Some(overtaken as f64 / pairs.max(1) as f64)
}
