//! `snapshots`: thousands of agents without state connect at the same time, as after a complete
//! outage. Each agent needs a full snapshot. The replica must serve the agents approximately in the
//! order in which it welcomed them, and must use bounded memory.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use super::{
    fleet::{Load, SETTLING, apart},
    report::Figure,
};
use crate::fleet::{Client, rig::CpuTime, stage::Stage, worker::Worker};

/// The largest number of snapshots that a replica sends at the same time
/// (`control-plane/src/serve/stream.rs`).
pub const IN_FLIGHT: usize = 64;
/// Memory that each agent may use, in bytes.
const BYTES_PER_AGENT: u64 = 16_000;
/// Memory that may be used in addition, in bytes: encoded buckets, and partly sent snapshots.
const SHARED_BYTES: u64 = 32 << 20;
/// The largest allowed share of pairs of agents that are served in the opposite order of their
/// welcomes. The share is not 0, because simultaneous snapshots end in any order, and because the
/// load generator reads its connections in turn. A random order would give a share of 0.5.
const OVERTAKEN: f64 = 0.25;
/// Longest time until all agents have everything.
const LIMIT: Duration = Duration::from_secs(400);
/// How often the replica's metrics are read.
const SAMPLING: Duration = Duration::from_millis(20);

/// The measurements of a run.
#[derive(Debug, Clone)]
pub struct Snapshots {
    /// The time from the first connection until all agents have everything, in seconds.
    pub seconds: f64,
    /// The CPU time of the replica.
    pub cpu: CpuTime,
    /// The replica's memory before the agents connect, and its peak memory, in bytes.
    pub bytes: (u64, u64),
    /// The largest observed number of snapshots that were sent at the same time.
    pub in_flight: usize,
    /// The largest observed number of agents that waited for a snapshot.
    pub waiting: usize,
    /// The number of agents that had to wait, as counted by the replica.
    pub waited: usize,
    /// The share of pairs of agents that were served in the opposite order of their welcomes.
    pub overtaken: f64,
    /// The size of the snapshot that each agent received, in bytes.
    pub bytes_each: u64,
}

/// Runs the bench.
///
/// # Errors
/// The replica sends too many snapshots at the same time, serves agents in a wrong order, or uses
/// too much memory.
pub fn run(load: &Load, services: Option<u32>) -> Result<Vec<Figure>> {
    let agents = load.agents.unwrap_or(2_000);
    let seen = apart(|| measure(&mut load.stage(agents, services)?, agents))?;
    let (before, highest) = seen.bytes;
    let growth = highest.saturating_sub(before);
    let allowed = BYTES_PER_AGENT * agents as u64 + SHARED_BYTES;
    ensure!(growth <= allowed, "memory grew by {growth} bytes with {agents} snapshots, more than {allowed}");
    ensure!(seen.waited > 0, "no agent waited: there are too few agents to check the order");
    let overtaken = seen.overtaken;
    ensure!(
        overtaken <= OVERTAKEN,
        "in a share of {overtaken:.3} of all pairs the later agent was served first; {OVERTAKEN} is allowed"
    );
    let figure = |what: &str, value: f64, unit| Figure::alone(format!("snapshots/{what}/{agents}"), value, unit);
    Ok(vec![
        figure("all-served", seen.seconds, "s"),
        figure("server-cpu-per-agent", seen.cpu.busy() * 1e3 / agents as f64, "ms"),
        figure("snapshot-bytes-per-agent", seen.bytes_each as f64 / 1e6, "MB"),
        figure("memory-growth-peak", growth as f64 / 1e6, "MB"),
        figure("memory-growth-per-agent", growth as f64 / 1e3 / agents as f64, "KB"),
        figure("in-flight-peak", seen.in_flight as f64, ""),
        figure("waiting-peak", seen.waiting as f64, ""),
        figure("waited", seen.waited as f64, ""),
        figure("pairs-overtaken", seen.overtaken * 100.0, "%"),
    ])
}

/// Starts a replica on a stage without replicas, and connects `agents` agents without state at
/// once. The caller checks order and memory.
///
/// # Errors
/// An agent receives anything other than a full snapshot, or the replica sends too many snapshots
/// at once.
pub fn measure(stage: &mut Stage, agents: usize) -> Result<Snapshots> {
    stage.start_replica()?;
    std::thread::sleep(SETTLING);
    let replica = &stage.replicas[0];
    let (before, cpu) = (replica.resident_bytes()?, replica.cpu()?);
    stage.fleet.ask(|worker| worker.set_handshakes(usize::MAX))?;
    let start = Instant::now();
    stage.fleet.join(stage.members(0, agents, 0))?;
    let (mut in_flight, mut waiting) = (0, 0);
    while stage.fleet.ask(|worker| worker.having(0))? < agents {
        ensure!(start.elapsed() < LIMIT, "not all agents have everything after {} s", LIMIT.as_secs());
        let level = |name: &str| Ok::<_, anyhow::Error>(replica.metric(&stage.machines, name)? as usize);
        in_flight = in_flight.max(level("headgate_snapshots_in_flight")?);
        waiting = waiting.max(level("headgate_snapshots_waiting")?);
        std::thread::sleep(SAMPLING);
    }
    let seconds = start.elapsed().as_secs_f64();
    let (summary, overtaken) = stage.fleet.ask(|worker| (worker.summary(), overtaken(worker)))?;
    let (overtaken, received) = (overtaken.context("an agent has received no snapshot")?, summary.present);
    ensure!(summary.by_full == agents, "{} of {agents} agents received everything", summary.by_full);
    let least = stage.source.resources() * agents as u64;
    ensure!(received.chunk_resources == least, "{} resources were sent, expected {least}", received.chunk_resources);
    ensure!(in_flight <= IN_FLIGHT, "{in_flight} snapshots were sent at once, more than {IN_FLIGHT}");
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

/// The share of pairs of agents that were served in the opposite order of their welcomes. `None` if
/// an agent was not served.
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
