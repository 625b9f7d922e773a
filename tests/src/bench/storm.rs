//! `storm`: all agents lose their connections and reconnect at the same time, in three ways. In the
//! first way, they move to another replica, and nothing has changed. In the second way, they move
//! to another replica, and 20 Services have changed. In the third way, they return to the same
//! replica, and nothing has changed. The bench checks that agents receive only the buckets that
//! differ, and reports the time and the CPU time.

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};

use super::{
    fleet::{Load, apart},
    report::Figure,
};
use crate::fleet::{
    Break,
    rig::CpuTime,
    stage::Stage,
    worker::{Summary, Worker},
};

/// The number of Services that change while agents are disconnected.
pub const CHANGED: u32 = 20;
/// Longest time until all agents have reconnected.
const LIMIT: Duration = Duration::from_secs(180);
/// The smallest share of TLS sessions that are resumed when agents return to their replica. This
/// limit is below 1, because an agent loses its session ticket when a connection attempt is
/// refused.
const RESUMED: f64 = 0.95;

/// The measurements of one way to reconnect.
#[derive(Debug, Clone)]
pub struct Return {
    /// The time from the loss of the connections until all agents have everything, in seconds.
    pub seconds: f64,
    /// The CPU time of the replica to which the agents connect.
    pub cpu: CpuTime,
    /// What the agents received.
    pub summary: Summary,
    /// The number of TLS handshakes that resumed a session.
    pub resumed_handshakes: u64,
    /// The replica's peak memory, in bytes.
    pub highest_bytes: u64,
    /// The number of Services that the agents with a state would have programmed.
    pub dirty_services: u64,
}

/// The measurements of the three ways to reconnect.
#[derive(Debug, Clone)]
pub struct Storm {
    /// Agents move to another replica, and nothing has changed.
    pub elsewhere: Return,
    /// Agents move to another replica, and [`CHANGED`] Services have changed.
    pub changed: Return,
    /// Agents return to the same replica, and nothing has changed.
    pub same: Return,
}

/// Runs the bench.
///
/// # Errors
/// Agents receive resources of buckets that do not differ, or their state differs from the
/// source.
pub fn run(load: &Load, services: Option<u32>) -> Result<Vec<Figure>> {
    let agents = load.agents.unwrap_or(5_000);
    let storm = apart(|| measure(&mut load.stage(agents, services)?, agents))?;
    let mut figures = Vec::new();
    for (way, back) in
        [("other-replica", &storm.elsewhere), ("20-changed", &storm.changed), ("same-replica", &storm.same)]
    {
        let figure = |what: &str, value: f64, unit| Figure::alone(format!("storm/{way}/{what}/{agents}"), value, unit);
        let received = back.summary.present;
        let each = |total: u64| total as f64 / agents as f64;
        figures.extend([
            figure("all-back", back.seconds, "s"),
            figure("server-cpu-per-agent", back.cpu.busy() * 1e6 / agents as f64, "µs"),
            figure("snapshot-bytes-per-agent", each(received.chunk_bytes), "bytes"),
            figure("resources-per-agent", each(received.chunk_resources + received.batch_resources), ""),
            figure("services-to-program-per-agent", back.dirty_services as f64 / load.full_agents as f64, ""),
            figure("message-bytes-per-agent", each(received.bytes), "bytes"),
            figure("tls-sessions-resumed", each(back.resumed_handshakes) * 100.0, "%"),
            figure("memory-peak", back.highest_bytes as f64 / 1e6, "MB"),
        ]);
    }
    Ok(figures)
}

/// Starts replicas on a stage without replicas, and lets the agents reconnect in the three ways.
/// Checks that the agents have the source's state at the end.
///
/// # Errors
/// Agents receive resources of buckets that do not differ, or their state differs from the
/// source.
pub fn measure(stage: &mut Stage, agents: usize) -> Result<Storm> {
    ensure!(stage.setup().full_agents > 0, "no agent holds a state: --full-agents must be at least 1");
    let (first, second) = (stage.start_replica()?, stage.start_replica()?);
    stage.join(0, agents, first)?;
    give_digests_to_all_agents(stage)?;
    let elsewhere = elsewhere(stage, agents, second)?;
    give_digests_to_all_agents(stage)?;
    let changed = changed_meanwhile(stage, agents)?;
    let same = same_replica(stage, agents)?;
    stage.compare_digests()?;
    Ok(Storm { elsewhere, changed, same })
}

/// Copies the digests of an agent that holds a state to all agents without a state. The digests are
/// also correct for the agents without a state, because all agents are at the same version. The
/// agents send the digests when they resume.
fn give_digests_to_all_agents(stage: &Stage) -> Result<()> {
    let holds_state = stage.fleet.ask(|worker| {
        worker.set_handshakes(usize::MAX);
        worker.refresh_reference()
    })?;
    ensure!(holds_state, "no agent holds a state");
    Ok(())
}

fn elsewhere(stage: &mut Stage, agents: usize, second: usize) -> Result<Return> {
    let address = stage.replicas[second].address();
    stage.fleet.ask(move |worker| worker.redirect(&[address]))?;
    let timer = Timer::start(stage, second)?;
    // After this call, the second replica has index 0.
    stage.kill_replica(0)?;
    let back = timer.wait(stage, 0, agents, 0, |summary| summary.by_digests)?;
    nothing_was_sent(&back, agents)?;
    Ok(back)
}

fn changed_meanwhile(stage: &mut Stage, agents: usize) -> Result<Return> {
    let third = stage.start_replica()?;
    let address = stage.replicas[third].address();
    let changes = stage.replicas[third].metric(&stage.machines, "headgate_store_changes_total")?;
    stage.fleet.ask(|worker| worker.suspend(Break::Reset, |_| true))?;
    stage.kill_replica(0)?;
    let third = third - 1;
    let step = stage.source.services() / CHANGED;
    ensure!(step > 0, "the source has fewer than {CHANGED} Services");
    let services: Vec<u32> = (0..CHANGED).map(|number| number * step).collect();
    let mut version = 0;
    for service in &services {
        version = stage.source.toggle(*service)?;
    }
    let until = Instant::now() + LIMIT;
    while stage.replicas[third].metric(&stage.machines, "headgate_store_changes_total")? < changes + f64::from(CHANGED)
    {
        ensure!(Instant::now() < until, "a replica does not receive changes");
        std::thread::sleep(Duration::from_millis(20));
    }
    let timer = Timer::start(stage, third)?;
    stage.fleet.ask(move |worker| worker.resume(&[address], |_| true))?;
    let back = timer.wait(stage, third, agents, version, |summary| summary.by_digests)?;
    let (buckets, resources) = stage.source.buckets_of(&services);
    let received = back.summary.present;
    let expected = (buckets.len() as u64 * agents as u64, resources * agents as u64);
    if (received.buckets, received.chunk_resources) != expected {
        let sent = (received.buckets, received.chunk_resources);
        bail!("{agents} agents received {sent:?} buckets and resources, expected {expected:?}");
    }
    ensure!(received.batch_resources == 0, "{} resources arrived in batches", received.batch_resources);
    let expected = u64::from(CHANGED) * stage.setup().full_agents as u64;
    ensure!(
        back.dirty_services == expected,
        "agents would program {} Services, expected {expected}",
        back.dirty_services
    );
    Ok(back)
}

fn same_replica(stage: &mut Stage, agents: usize) -> Result<Return> {
    let timer = Timer::start(stage, 0)?;
    let address = stage.replicas[0].address();
    stage.fleet.ask(move |worker| worker.reconnect(Break::Reset, &[address], |_| true))?;
    let back = timer.wait(stage, 0, agents, 0, |summary| summary.by_log)?;
    nothing_was_sent(&back, agents)?;
    let resumed = back.resumed_handshakes as f64 / agents as f64;
    ensure!(resumed >= RESUMED, "only a share of {resumed:.3} of the TLS sessions was resumed");
    Ok(back)
}

/// Checks that agents received no snapshot and no resource, and have no Service to program.
fn nothing_was_sent(back: &Return, agents: usize) -> Result<()> {
    let received = back.summary.present;
    let sent = [received.chunk_bytes, received.chunk_resources, received.buckets, received.batch_resources];
    ensure!(sent == [0; 4], "{agents} agents received {received:?} although nothing had changed");
    ensure!(
        back.dirty_services == 0,
        "agents would program {} Services although nothing had changed",
        back.dirty_services
    );
    Ok(())
}

struct Timer {
    start: Instant,
    cpu: CpuTime,
    resumed_handshakes: u64,
}

impl Timer {
    fn start(stage: &Stage, replica: usize) -> Result<Self> {
        let resumed_handshakes = stage.fleet.ask(|worker| worker.summary().counts.resumed_handshakes)?;
        Ok(Self { start: Instant::now(), cpu: stage.replicas[replica].cpu()?, resumed_handshakes })
    }

    /// Waits until `count` of the summary equals `agents` and all agents have everything.
    fn wait(
        self,
        stage: &Stage,
        replica: usize,
        agents: usize,
        slices: u64,
        count: fn(&Summary) -> usize,
    ) -> Result<Return> {
        let are_back = move |worker: &Worker| count(&worker.summary()) == agents && worker.having(slices) == agents;
        stage.fleet.wait_until("all agents have reconnected", LIMIT, are_back)?;
        let seconds = self.start.elapsed().as_secs_f64();
        let replica = &stage.replicas[replica];
        let (summary, dirty_services) = stage.fleet.ask(|worker| {
            let dirty = worker.clients().iter().filter_map(|client| client.agent().dirty_services());
            (worker.summary(), dirty.sum())
        })?;
        Ok(Return {
            seconds,
            cpu: replica.cpu()?.since(&self.cpu),
            resumed_handshakes: summary.counts.resumed_handshakes - self.resumed_handshakes,
            summary,
            highest_bytes: replica.highest_resident_bytes()?,
            dirty_services,
        })
    }
}
