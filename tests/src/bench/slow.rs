//! `slow`: agents that never read, and agents that read 1 KB a second, beside others on the same
//! replica. Its memory does not grow while they stay, and the others do not feel them, be they slow
//! from the beginning or after they had everything: phases without and with either take turns in
//! one run.

use std::{
    sync::mpsc::{self, RecvTimeoutError},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};

use super::{
    fleet::{Load, SETTLING, apart, check_deliveries, warn},
    report::Figure,
};
use crate::fleet::{
    Break, Client, Fault, Member,
    latency::Histogram,
    phase::Phase,
    stage::{CONVERGENCE_LIMIT, Stage},
};

/// Agents that never read.
const NEVER: usize = 100;
/// Agents that read slowly.
const SLOW: usize = 100;
/// What they read.
const BYTES_PER_SECOND: u32 = 1_000;
/// Times that phases without and with them follow each other: many short ones, since these times
/// follow the machine's speed, which drifts.
const ROUNDS: u32 = 8;
/// Phases of a round.
const PHASES: u32 = 3;
/// After this, connections that were reset cost nothing more.
const BREATH: Duration = Duration::from_secs(1);
/// Changes are made for so long before times are measured beside agents that hang since a moment
/// ago.
const WARMING_UP: Duration = Duration::from_secs(2);
/// The phase after the rounds, in which memory is looked at, takes this part of the time.
const WATCHED: u32 = 3;
/// How often memory is looked at.
const SAMPLING: Duration = Duration::from_millis(500);
/// How much later than without them the others may have a change, at p99.
const WORSE: f64 = 1.1;
/// Memory that may come and go whatever agents do: an allocator's, and a log's that fills up to its
/// bound.
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

/// Agents for a replica of the stage that have a fault from the beginning: so many that never read,
/// and so many that read slowly.
#[must_use]
pub fn slow_members(stage: &Stage, never: usize, slow: usize, replica: usize) -> Vec<Member> {
    let member = |number| Member { fault: fault(number, never), ..unmeasured(stage, "slow", number, replica) };
    (0..never + slow).map(member).collect()
}

fn unmeasured(stage: &Stage, name: &str, number: usize, replica: usize) -> Member {
    let replicas = vec![stage.replicas[replica].address()];
    Member { node: format!("{name}-{number:05}"), replicas, ..Member::default() }
}

fn fault(number: usize, never: usize) -> Fault {
    if number < never { Fault::NeverRead } else { Fault::SlowRead { bytes_per_second: BYTES_PER_SECOND } }
}

/// Name of the nodes whose agents are sound until they have everything.
const HANGING: &str = "hanging";

fn is_hanging(client: &Client) -> bool {
    client.member().node.starts_with(HANGING)
}

fn is_slow(client: &Client) -> bool {
    !client.member().is_measured && !is_hanging(client)
}

fn measure(stage: &mut Stage, agents: usize, load: &Load) -> Result<Vec<Figure>> {
    stage.start_replica(&[])?;
    // In the midst of the others, as nodes come.
    stage.join(0, agents / 2, 0)?;
    stage.fleet.join((0..NEVER + SLOW).map(|number| unmeasured(stage, HANGING, number, 0)).collect())?;
    stage.join(agents / 2, agents - agents / 2, 0)?;
    stage.fleet.ask(|worker| worker.suspend(Break::Reset, is_hanging))?;
    std::thread::sleep(SETTLING);
    let phase_time = load.time() / (PHASES * ROUNDS);
    let measured = |stage: &mut Stage, histograms: &mut Histograms| -> Result<()> {
        let phase = Phase::run(stage, 0, phase_time, load.rate)?;
        check_deliveries(&phase, agents)?;
        warn(&phase, agents);
        histograms.0.push(phase.latency);
        Ok(())
    };
    let (mut without, mut slow, mut hanging) = (Histograms::default(), Histograms::default(), Histograms::default());
    let mut sockets_without = 0;
    for round in 0..ROUNDS {
        measured(stage, &mut without)?;
        sockets_without = socket_bytes()?;
        begin_slow(stage, round == 0)?;
        measured(stage, &mut slow)?;
        stage.fleet.ask(|worker| worker.suspend(Break::Reset, is_slow))?;
        std::thread::sleep(BREATH);
        begin_hanging(stage)?;
        Phase::run(stage, 0, WARMING_UP, load.rate)?;
        measured(stage, &mut hanging)?;
        stage.fleet.ask(|worker| worker.suspend(Break::Reset, is_hanging))?;
        std::thread::sleep(BREATH);
    }
    begin_hanging(stage)?;
    begin_slow(stage, false)?;
    let (phase, samples) = with_memory(stage, load.time() / WATCHED, load.rate)?;
    check_deliveries(&phase, agents)?;
    let growth = growth(&samples)?;
    let sockets_with = socket_bytes()?;
    // They find the present state, and not what they missed.
    stage.fleet.ask(|worker| worker.set_fault(Fault::None, is_hanging))?;
    let (_, version) = stage.source.change_for(BREATH, load.rate)?;
    stage.wait_for_all(version)?;
    stage.replicas[0].check_running()?;
    stage.compare_digests()?;
    let most = SLACK_BYTES.max(growth.first / 50);
    ensure!(growth.last <= growth.first + most, "memory grows with time beside slow agents: {growth:?}");
    let label = format!("{agents}+{}", NEVER + SLOW);
    let name = |what: &str| format!("slow/{what}/{label}");
    let against = |what: &str, with: &Histograms, share: f64| {
        Figure::against(name(what), with.ms(share), "ms", "the same without slow agents", without.ms(share))
    };
    for (with, what) in [(&slow, "are slow from the beginning"), (&hanging, "begin to hang")] {
        let (with_p99, without_p99) = (with.ms(0.99), without.ms(0.99));
        ensure!(
            with_p99 <= without_p99 * WORSE,
            "agents that {what} make the others wait: p99 is {with_p99:.2} ms beside them, and {without_p99:.2} ms without"
        );
    }
    Ok(vec![
        against("p50", &slow, 0.5),
        against("p99", &slow, 0.99),
        against("p50-hanging", &hanging, 0.5),
        against("p99-hanging", &hanging, 0.99),
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

/// Has the agents join that are slow from the beginning, or come back.
fn begin_slow(stage: &Stage, is_first: bool) -> Result<()> {
    let address = stage.replicas[0].address();
    if is_first {
        stage.fleet.join(slow_members(stage, NEVER, SLOW, 0))?;
    } else {
        stage.fleet.ask(move |worker| worker.resume(&[address], is_slow))?;
    }
    std::thread::sleep(SETTLING);
    Ok(())
}

/// Has the agents come back that are sound until they have everything, and then hang.
fn begin_hanging(stage: &Stage) -> Result<()> {
    let address = stage.replicas[0].address();
    stage.fleet.ask(move |worker| {
        worker.set_fault(Fault::None, is_hanging);
        worker.resume(&[address], is_hanging);
    })?;
    let what = "the agents that are to hang have everything";
    stage.fleet.wait_until(what, CONVERGENCE_LIMIT, |worker| worker.having(0) == worker.sound())?;
    std::thread::sleep(BREATH);
    stage.fleet.ask(|worker| {
        for number in 0..NEVER + SLOW {
            let node = format!("{HANGING}-{number:05}");
            worker.set_fault(fault(number, NEVER), |client| client.member().node == node);
        }
    })
}

/// Memory of all TCP sockets of this kernel: what was sent and is not read waits there, and not in
/// the replica.
fn socket_bytes() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/net/sockstat").context("reading /proc/net/sockstat")?;
    let line = text.lines().find(|line| line.starts_with("TCP:")).context("/proc/net/sockstat knows no TCP")?;
    let pages =
        line.split_whitespace().skip_while(|word| *word != "mem").nth(1).and_then(|pages| pages.parse::<u64>().ok());
    Ok(pages.with_context(|| format!("/proc/net/sockstat: {line}"))? * 4_096)
}

/// Latencies of several phases. The median of their quantiles: one phase in which the machine was
/// elsewhere decides nothing.
#[derive(Default)]
struct Histograms(Vec<Histogram>);

impl Histograms {
    fn ms(&self, share: f64) -> f64 {
        super::report::median(self.0.iter().map(|histogram| histogram.quantile_ms(share)).collect())
    }
}

/// Memory of the replica early and late in a phase: the highest of the first third, and of the
/// last.
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
