//! What a phase of changes costs, and how long changes take to reach the agents.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use super::{
    latency::Histogram,
    rig::{CpuTime, LOAD_CORE, SERVER_CORE},
    stage::Stage,
};

/// What one phase of changes took.
#[derive(Debug, Clone)]
pub struct Phase {
    /// Times from changes to agents, in microseconds.
    pub latency: Histogram,
    /// Endpoint changes made.
    pub changes: u32,
    /// Messages that agents received.
    pub messages: u64,
    /// Batches that agents received.
    pub batches: u64,
    /// Bytes of messages that agents received.
    pub bytes: u64,
    /// ACKs that agents sent.
    pub acks: u64,
    /// CPU time of the replica.
    pub server: CpuTime,
    /// CPU time of its core.
    pub server_core: CpuTime,
    /// CPU time of the fleet's thread, in seconds.
    pub load_seconds: f64,
    /// CPU time of the load's core.
    pub load_core: CpuTime,
    /// How long it lasted.
    pub seconds: f64,
}

impl Phase {
    /// Makes changes for some time, so many a second, and waits until every sound agent has
    /// everything.
    ///
    /// # Errors
    /// When an agent does not get everything, or was sent what breaks the contract.
    pub fn run(stage: &mut Stage, replica: usize, time: Duration, rate: u32) -> Result<Self> {
        let before = stage.fleet.ask(|worker| (worker.summary(), worker.cpu(), drop(worker.record(true))))?;
        let start = Instant::now();
        let at = |stage: &Stage| -> Result<_> {
            let server = stage.replicas.get(replica).context("no such replica")?.cpu()?;
            let core = |core| if stage.setup().is_pinned { CpuTime::of_core(core) } else { Ok(CpuTime::default()) };
            Ok((server, core(SERVER_CORE)?, core(LOAD_CORE)?))
        };
        let (server, server_core, load_core) = at(stage)?;
        let (changes, version) = stage.source.change_for(time, rate)?;
        stage.wait_for_all(version)?;
        let seconds = start.elapsed().as_secs_f64();
        let after = at(stage)?;
        let (summary, cpu, latency) =
            stage.fleet.ask(|worker| (worker.summary(), worker.cpu(), worker.record(false)))?;
        let (earlier, earlier_cpu, ()) = before;
        Ok(Self {
            latency,
            changes,
            messages: summary.received.messages - earlier.received.messages,
            batches: summary.received.batches - earlier.received.batches,
            bytes: summary.received.bytes - earlier.received.bytes,
            acks: summary.counts.acks - earlier.counts.acks,
            server: after.0.since(&server),
            server_core: after.1.since(&server_core),
            load_seconds: cpu.saturating_sub(earlier_cpu).as_secs_f64(),
            load_core: after.2.since(&load_core),
            seconds,
        })
    }

    /// Milliseconds within which so large a share of all deliveries came.
    #[must_use]
    pub fn quantile_ms(&self, share: f64) -> f64 {
        self.latency.quantile_ms(share)
    }

    /// Seconds of the server's core: the replica's own, and what its packets took outside of any
    /// process.
    #[must_use]
    pub fn server_seconds(&self) -> f64 {
        self.server_core.with_interrupts(self.server.busy())
    }

    /// Agents that the server's core could serve at this rate of changes, by its own time alone.
    #[must_use]
    pub fn agents_by_cpu(&self, agents: usize) -> f64 {
        agents as f64 * self.seconds / self.server_seconds().max(f64::MIN_POSITIVE)
    }

    /// Share of the load's core that the load took.
    #[must_use]
    pub fn load_share(&self) -> f64 {
        self.load_core.with_interrupts(self.load_seconds) / self.seconds
    }

    /// Share of a core that was taken away by whoever runs this machine as a virtual one, the
    /// higher of the two.
    #[must_use]
    pub fn stolen_share(&self) -> f64 {
        self.server_core.stolen.max(self.load_core.stolen) / self.seconds
    }

    /// Share of the cores that other programs took. It has to be small for times to mean anything.
    #[must_use]
    pub fn foreign_share(&self) -> f64 {
        let foreign = |core: &CpuTime, own: f64| (core.user + core.system - own).max(0.0) / self.seconds;
        foreign(&self.server_core, self.server.busy()).max(foreign(&self.load_core, self.load_seconds))
    }
}
