//! Measures a phase of changes: its cost, and the latency of changes until agents have them.

use std::time::{Duration, Instant};

use anyhow::Result;

use super::{
    latency::Histogram,
    rig::{CpuTime, LOAD_CORE, Replica, SERVER_CORE},
    stage::Stage,
};

/// The measurements of one phase of changes.
#[derive(Debug, Clone)]
pub struct Phase {
    /// The latencies from changes to agents, in microseconds.
    pub latency: Histogram,
    /// The number of endpoint changes.
    pub changes: u32,
    /// The number of messages that agents received.
    pub messages: u64,
    /// The number of batches that agents received.
    pub batches: u64,
    /// The size of all messages that agents received, in bytes.
    pub bytes: u64,
    /// The number of ACKs that agents sent.
    pub acks: u64,
    /// The CPU time of all replicas.
    pub server: CpuTime,
    /// The CPU time of the replicas' core.
    pub server_core: CpuTime,
    /// The CPU time of the fleet's thread, in seconds.
    pub load_seconds: f64,
    /// The CPU time of the fleet's core.
    pub load_core: CpuTime,
    /// The duration, in seconds.
    pub seconds: f64,
}

impl Phase {
    /// Makes `rate` changes a second for some time, and waits until every healthy agent has
    /// everything.
    ///
    /// # Errors
    /// An agent does not get everything, or finds a violation of the contract.
    pub fn run(stage: &mut Stage, time: Duration, rate: u32) -> Result<Self> {
        let before = stage.fleet.ask(|worker| (worker.summary(), worker.cpu(), drop(worker.record(true))))?;
        let start = Instant::now();
        let at = |stage: &Stage| -> Result<_> {
            let add = |sum: CpuTime, replica: &Replica| Ok::<_, anyhow::Error>(sum.plus(&replica.cpu()?));
            let server = stage.replicas.iter().try_fold(CpuTime::default(), add)?;
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

    /// The quantile of the latencies for a share between 0 and 1, in milliseconds.
    #[must_use]
    pub fn quantile_ms(&self, share: f64) -> f64 {
        self.latency.quantile_ms(share)
    }

    /// CPU seconds of the replicas, including interrupts on their core.
    #[must_use]
    pub fn server_seconds(&self) -> f64 {
        self.server_core.with_interrupts(self.server.busy())
    }

    /// The number of agents that the replicas' core could serve at this rate of changes, if CPU
    /// time were the only limit.
    #[must_use]
    pub fn agents_by_cpu(&self, agents: usize) -> f64 {
        agents as f64 * self.seconds / self.server_seconds().max(f64::MIN_POSITIVE)
    }

    /// The share of the load's core that the fleet used.
    #[must_use]
    pub fn load_share(&self) -> f64 {
        self.load_core.with_interrupts(self.load_seconds) / self.seconds
    }

    /// The share of a core that the hypervisor took away (steal time), for the core with the larger
    /// share.
    #[must_use]
    pub fn stolen_share(&self) -> f64 {
        self.server_core.stolen.max(self.load_core.stolen) / self.seconds
    }

    /// The share of a core that other programs used, for the core with the larger share.
    /// Measurements are valid only if this share is small.
    #[must_use]
    pub fn foreign_share(&self) -> f64 {
        let foreign = |core: &CpuTime, own: f64| (core.user + core.system - own).max(0.0) / self.seconds;
        foreign(&self.server_core, self.server.busy()).max(foreign(&self.load_core, self.load_seconds))
    }
}
