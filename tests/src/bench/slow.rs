//! `slow`: agents that never read, and agents that read 1 KB a second, beside others on the same replica. Its memory does not grow while they stay, and
//! the others do not feel them: phases with them and without take turns in one run.

use std::{
    sync::mpsc::{self, RecvTimeoutError},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};

use super::{
    fleet::{Load, SETTLING, apart, check_deliveries, warn},
    report::Figure,
};
use crate::fleet::{Break, Fault, Member, latency::Histogram, phase::Phase, stage::Stage};

/// Agents that never read.
const NEVER: usize = 100;
/// Agents that read slowly.
const SLOW: usize = 100;
/// What they read.
const BYTES_PER_SECOND: u32 = 1_000;
/// Times that phases without and with them follow each other: many short ones, since these times follow the machine's speed, which drifts.
const ROUNDS: u32 = 10;
/// After this, connections that were reset cost nothing more.
const BREATH: Duration = Duration::from_secs(1);
/// The phase after the rounds, in which memory is looked at, takes this part of the time.
const WATCHED: u32 = 3;
/// How often memory is looked at.
const SAMPLING: Duration = Duration::from_millis(500);
/// How much later than without them the others may have a change, at p99.
const WORSE: f64 = 1.1;
/// Memory that may come and go whatever agents do: an allocator's, and a log's that fills up to its bound.
const SLACK_BYTES: u64 = 4 << 20;

/// Runs the bench.
///
/// # Errors
/// When memory grows while slow agents stay, or the others get something late, or not at all.
pub fn run(load: &Load, services: Option<u32>) -> Result<Vec<Figure>> {
    let agents = load.agents.unwrap_or(1_000);
    apart(|| {
        let mut stage = load.stage(agents + NEVER + SLOW, services)?;
        measure(&mut stage, agents, load)
    })
}

/// Agents at fault for a replica of the stage: so many that never read, and so many that read slowly.
#[must_use]
pub fn slow_members(stage: &Stage, never: usize, slow: usize, replica: usize) -> Vec<Member> {
    let address = stage.replicas[replica].address();
    let faults = std::iter::repeat_n(Fault::NeverRead, never)
        .chain(std::iter::repeat_n(Fault::SlowRead { bytes_per_second: BYTES_PER_SECOND }, slow));
    let member = |(number, fault)| Member {
        node: format!("slow-{number:05}"),
        replicas: vec![address],
        fault,
        ..Member::default()
    };
    faults.enumerate().map(member).collect()
}

fn measure(stage: &mut Stage, agents: usize, load: &Load) -> Result<Vec<Figure>> {
    stage.start_replica(&[])?;
    stage.join(0, agents, 0)?;
    std::thread::sleep(SETTLING);
    let (mut without, mut with) = (Histograms::default(), Histograms::default());
    let mut sockets_without = 0;
    let time = load.time() / (2 * ROUNDS);
    let address = stage.replicas[0].address();
    for round in 0..ROUNDS {
        let phase = Phase::run(stage, 0, time, load.rate)?;
        check_deliveries(&phase, agents)?;
        warn(&phase, agents);
        without.add(&phase);
        sockets_without = socket_bytes()?;
        if round == 0 {
            let slow = slow_members(stage, NEVER, SLOW, 0);
            stage.fleet.join(slow)?;
        } else {
            stage.fleet.ask(move |worker| worker.resume(&[address]))?;
        }
        std::thread::sleep(SETTLING);
        let phase = Phase::run(stage, 0, time, load.rate)?;
        check_deliveries(&phase, agents)?;
        warn(&phase, agents);
        with.add(&phase);
        if round + 1 < ROUNDS {
            stage.fleet.ask(|worker| worker.suspend(Break::Reset, |client| !client.is_sound()))?;
            std::thread::sleep(BREATH);
        }
    }
    let (phase, samples) = with_memory(stage, load.time() / WATCHED, load.rate)?;
    check_deliveries(&phase, agents)?;
    let growth = growth(&samples)?;
    let sockets_with = socket_bytes()?;
    stage.replicas[0].check_running()?;
    stage.compare_digests()?;
    let most = SLACK_BYTES.max(growth.first / 50);
    ensure!(growth.last <= growth.first + most, "memory grows with time beside slow agents: {growth:?}");
    let (with_p99, without_p99) = (with.ms(0.99), without.ms(0.99));
    ensure!(
        with_p99 <= without_p99 * WORSE,
        "slow agents make the others wait: p99 is {with_p99:.2} ms beside them, and {without_p99:.2} ms without"
    );
    let label = format!("{agents}+{}", NEVER + SLOW);
    let name = |what: &str| format!("slow/{what}/{label}");
    let against = |what: &str, share: f64| {
        Figure::against(name(what), with.ms(share), "ms", "the same without slow agents", without.ms(share))
    };
    Ok(vec![
        against("p50", 0.5),
        against("p99", 0.99),
        Figure::against(
            name("memory-late"),
            growth.last as f64 / 1e6,
            "MB",
            "early in the phase with slow agents",
            growth.first as f64 / 1e6,
        ),
        Figure::against(
            name("kernel-socket-memory"),
            sockets_with as f64 / 1e6,
            "MB",
            "the same without slow agents",
            sockets_without as f64 / 1e6,
        ),
    ])
}

/// Memory of all TCP sockets of this kernel: what was sent and is not read waits there, and not in the replica.
fn socket_bytes() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/net/sockstat").context("reading /proc/net/sockstat")?;
    let line = text.lines().find(|line| line.starts_with("TCP:")).context("/proc/net/sockstat knows no TCP")?;
    let pages =
        line.split_whitespace().skip_while(|word| *word != "mem").nth(1).and_then(|pages| pages.parse::<u64>().ok());
    Ok(pages.with_context(|| format!("/proc/net/sockstat: {line}"))? * 4_096)
}

/// Latencies of several phases. The median of their quantiles: one phase in which the machine was elsewhere decides nothing.
#[derive(Default)]
struct Histograms(Vec<Histogram>);

impl Histograms {
    fn add(&mut self, phase: &Phase) {
        self.0.push(phase.latency.clone());
    }

    fn ms(&self, share: f64) -> f64 {
        super::report::median(self.0.iter().map(|histogram| histogram.quantile(share) as f64 / 1e3).collect())
    }
}

/// Memory of the replica early and late in a phase: the highest of the first third, and of the last.
#[derive(Debug, Clone, Copy)]
pub struct Growth {
    /// In bytes.
    pub first: u64,
    /// In bytes.
    pub last: u64,
}

fn growth(samples: &[u64]) -> Result<Growth> {
    let third = samples.len() / 3;
    let highest =
        |part: &[u64]| part.iter().copied().max().context("memory was looked at too rarely: let it last longer");
    Ok(Growth { first: highest(&samples[..third])?, last: highest(&samples[samples.len() - third..])? })
}

/// A phase, and the replica's memory during it.
fn with_memory(stage: &mut Stage, time: Duration, rate: u32) -> Result<(Phase, Vec<u64>)> {
    let memory = stage.replicas[0].memory();
    std::thread::scope(|scope| {
        let (stop, is_over) = mpsc::channel::<()>();
        let sampler = scope.spawn(move || -> Result<Vec<u64>> {
            let mut samples = Vec::new();
            while is_over.recv_timeout(SAMPLING) == Err(RecvTimeoutError::Timeout) {
                samples.push(memory.resident_bytes()?);
            }
            Ok(samples)
        });
        let phase = Phase::run(stage, 0, time, rate);
        drop(stop);
        let samples = sampler.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        Ok((phase?, samples))
    })
}
