//! `storm`: a replica dies, and all agents come back at once: to another replica with nothing
//! changed, to a third with 20 services changed meanwhile, and to the same with nothing changed.
//! What they are sent is exactly what differs; time and CPU are reported.

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

/// Services that change while agents are away.
pub const CHANGED: u32 = 20;
/// Longest time until everybody is back.
const LIMIT: Duration = Duration::from_secs(180);
/// Share of sessions that must be resumed where agents come back to their replica: who is sent away
/// in between comes without a ticket.
const RESUMED: f64 = 0.95;

/// How everybody came back.
#[derive(Debug, Clone)]
pub struct Return {
    /// From the moment that they lost their replica to the moment that the last had everything.
    pub seconds: f64,
    /// CPU time of the replica that they came to.
    pub cpu: CpuTime,
    /// What they were sent.
    pub summary: Summary,
    /// Handshakes that resumed a TLS session.
    pub resumed_handshakes: u64,
    /// The replica's memory at its highest, in bytes.
    pub highest_bytes: u64,
    /// Services that the agents which hold a state would have had to program anew.
    pub dirty_services: u64,
}

/// The three ways.
#[derive(Debug, Clone)]
pub struct Storm {
    /// To another replica, nothing has changed.
    pub elsewhere: Return,
    /// To another replica, [`CHANGED`] services have changed.
    pub changed: Return,
    /// To the same replica, nothing has changed.
    pub same: Return,
}

/// Runs the bench.
///
/// # Errors
/// When agents are sent anything that they have, or do not end up with the source's state.
pub fn run(load: &Load, services: Option<u32>) -> Result<Vec<Figure>> {
    let agents = load.agents.unwrap_or(5_000);
    let storm = apart(|| measure(&mut load.stage(agents, services)?, agents))?;
    let mut figures = Vec::new();
    for (way, back) in [("elsewhere", &storm.elsewhere), ("20-changed", &storm.changed), ("same-replica", &storm.same)]
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
            figure("memory-highest", back.highest_bytes as f64 / 1e6, "MB"),
        ]);
    }
    Ok(figures)
}

/// Lets a storm break over a stage without replicas. The stage's agents hold the source's state
/// afterwards.
///
/// # Errors
/// See [`run`].
pub fn measure(stage: &mut Stage, agents: usize) -> Result<Storm> {
    ensure!(stage.setup().full_agents > 0, "an agent that holds a state is needed, for the digests of the others");
    let (first, second) = (stage.start_replica(&[])?, stage.start_replica(&[])?);
    stage.join(0, agents, first)?;
    everybody_says_their_digests(stage)?;
    let elsewhere = elsewhere(stage, agents, second)?;
    everybody_says_their_digests(stage)?;
    let changed = changed_meanwhile(stage, agents)?;
    let same = same_replica(stage, agents)?;
    stage.compare_digests()?;
    Ok(Storm { elsewhere, changed, same })
}

/// Agents without a state resume by the digests of one that has: they are at the same version.
fn everybody_says_their_digests(stage: &Stage) -> Result<()> {
    let has_one = stage.fleet.ask(|worker| {
        worker.set_handshakes(usize::MAX);
        worker.refresh_reference()
    })?;
    ensure!(has_one, "no agent holds a state");
    Ok(())
}

fn elsewhere(stage: &mut Stage, agents: usize, second: usize) -> Result<Return> {
    let address = stage.replicas[second].address();
    stage.fleet.ask(move |worker| worker.redirect(&[address]))?;
    let timer = Timer::start(stage, second)?;
    // The second is the first from now on.
    stage.kill_replica(0)?;
    let back = timer.wait(stage, 0, agents, 0, |summary| summary.by_digests)?;
    nothing_was_sent(&back, agents)?;
    Ok(back)
}

fn changed_meanwhile(stage: &mut Stage, agents: usize) -> Result<Return> {
    let third = stage.start_replica(&[])?;
    let address = stage.replicas[third].address();
    let changes = stage.replicas[third].metric(&stage.machines, "headgate_store_changes_total")?;
    stage.fleet.ask(|worker| worker.suspend(Break::Reset, |_| true))?;
    stage.kill_replica(0)?;
    let third = third - 1;
    let step = stage.source.services() / CHANGED;
    ensure!(step > 0, "fewer services than change");
    let services: Vec<u32> = (0..CHANGED).map(|number| number * step).collect();
    let mut version = 0;
    for service in &services {
        version = stage.source.toggle(*service)?;
    }
    let until = Instant::now() + LIMIT;
    while stage.replicas[third].metric(&stage.machines, "headgate_store_changes_total")? < changes + f64::from(CHANGED)
    {
        ensure!(Instant::now() < until, "a replica does not learn of changes");
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
        bail!("{agents} agents were sent {sent:?} buckets and resources, where {expected:?} differ");
    }
    ensure!(received.batch_resources == 0, "{} resources came in batches", received.batch_resources);
    let expected = u64::from(CHANGED) * stage.setup().full_agents as u64;
    ensure!(back.dirty_services == expected, "{} services would be programmed, not {expected}", back.dirty_services);
    Ok(back)
}

fn same_replica(stage: &mut Stage, agents: usize) -> Result<Return> {
    let timer = Timer::start(stage, 0)?;
    let address = stage.replicas[0].address();
    stage.fleet.ask(move |worker| worker.reconnect(Break::Reset, &[address], |_| true))?;
    let back = timer.wait(stage, 0, agents, 0, |summary| summary.by_log)?;
    nothing_was_sent(&back, agents)?;
    let resumed = back.resumed_handshakes as f64 / agents as f64;
    ensure!(resumed >= RESUMED, "only {resumed:.3} of the TLS sessions were resumed");
    Ok(back)
}

/// No snapshot, no resource, nothing to program.
fn nothing_was_sent(back: &Return, agents: usize) -> Result<()> {
    let received = back.summary.present;
    let sent = [received.chunk_bytes, received.chunk_resources, received.buckets, received.batch_resources];
    ensure!(sent == [0; 4], "{agents} agents with nothing missing were sent {received:?}");
    ensure!(
        back.dirty_services == 0,
        "{} services would be programmed, of which none has changed",
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

    /// Waits until so many agents came back in the way that `count` counts, and have everything.
    fn wait(
        self,
        stage: &Stage,
        replica: usize,
        agents: usize,
        slices: u64,
        count: fn(&Summary) -> usize,
    ) -> Result<Return> {
        let are_back = move |worker: &Worker| count(&worker.summary()) == agents && worker.having(slices) == agents;
        stage.fleet.wait_until("everybody is back", LIMIT, are_back)?;
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
