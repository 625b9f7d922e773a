//! `slow`: agents that never read and agents that read 1 KB a second, together with normal agents
//! on one replica. The replica's memory must not grow with time, and the latency of the normal
//! agents must not increase. Some slow agents are slow from the beginning. The other slow agents
//! become slow only after they have received everything. This module calls them hanging agents.
//! Phases without slow agents, with slow agents and with hanging agents alternate in one run.

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

/// The number of agents that never read.
const NEVER: usize = 100;
/// The number of agents that read slowly.
const SLOW: usize = 100;
/// The speed of agents that read slowly.
const BYTES_PER_SECOND: u32 = 1_000;
/// The number of rounds. Many short rounds are better than few long ones, because the machine's
/// speed drifts.
const ROUNDS: u32 = 8;
/// The number of phases in a round.
const PHASES: u32 = 3;
/// The pause after connections were reset. During this pause the replica drops these connections.
const BREATH: Duration = Duration::from_secs(1);
/// The duration of the changes between the moment at which agents begin to hang and the measurement
/// of latencies.
const WARMING_UP: Duration = Duration::from_secs(2);
/// The phase that measures memory lasts `--seconds` divided by this number.
const WATCHED: u32 = 3;
/// How often memory is measured.
const SAMPLING: Duration = Duration::from_millis(500);
/// The largest allowed ratio of the p99 with slow agents to the p99 without slow agents.
const WORSE: f64 = 1.1;
/// The growth of memory that is always allowed. Memory also grows because of the allocator, and
/// because of the log until the log reaches its bound.
const SLACK_BYTES: u64 = 4 << 20;

/// Runs the bench.
///
/// # Errors
/// Memory grows with time while slow agents are connected, or the normal agents receive changes
/// late or not at all.
pub fn run(load: &Load, services: Option<u32>) -> Result<Vec<Figure>> {
    let agents = load.agents.unwrap_or(1_000);
    apart(|| {
        let mut stage = load.stage(agents + NEVER + SLOW, services)?;
        measure(&mut stage, agents, load)
    })
}

/// Describes agents of a replica. The agents are slow from the beginning: `never` agents never
/// read, and `slow` agents read slowly.
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

/// The prefix of the node names of hanging agents. Hanging agents read normally until they have
/// everything.
const HANGING: &str = "hanging";

fn is_hanging(client: &Client) -> bool {
    client.member().node.starts_with(HANGING)
}

fn is_slow(client: &Client) -> bool {
    !client.member().is_measured && !is_hanging(client)
}

fn measure(stage: &mut Stage, agents: usize, load: &Load) -> Result<Vec<Figure>> {
    stage.start_replica(&[])?;
    // The hanging agents join between two halves of the normal agents.
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
    // The hanging agents read again, and must receive the present state.
    stage.fleet.ask(|worker| worker.set_fault(Fault::None, is_hanging))?;
    let (_, version) = stage.source.change_for(BREATH, load.rate)?;
    stage.wait_for_all(version)?;
    stage.replicas[0].check_running()?;
    stage.compare_digests()?;
    let most = SLACK_BYTES.max(growth.first / 50);
    ensure!(growth.last <= growth.first + most, "memory grows with time while slow agents are connected: {growth:?}");
    let label = format!("{agents}+{}", NEVER + SLOW);
    let name = |what: &str| format!("slow/{what}/{label}");
    let against = |what: &str, with: &Histograms, share: f64| {
        Figure::against(name(what), with.ms(share), "ms", "without slow agents", without.ms(share))
    };
    for (with, what) in [(&slow, "that are slow from the beginning"), (&hanging, "that hang")] {
        let (with_p99, without_p99) = (with.ms(0.99), without.ms(0.99));
        ensure!(
            with_p99 <= without_p99 * WORSE,
            "agents {what} delay normal agents: p99 is {with_p99:.2} ms with them and {without_p99:.2} ms without them"
        );
    }
    Ok(vec![
        against("p50", &slow, 0.5),
        against("p99", &slow, 0.99),
        against("p50-hanging", &hanging, 0.5),
        against("p99-hanging", &hanging, 0.99),
        Figure::against(
            name("memory-at-end"),
            growth.last as f64 / 1e6,
            "MB",
            "the start of the phase with slow agents",
            growth.first as f64 / 1e6,
        ),
        Figure::against(
            name("kernel-socket-memory"),
            sockets_with as f64 / 1e6,
            "MB",
            "without slow agents",
            sockets_without as f64 / 1e6,
        ),
    ])
}

/// Connects the agents that are slow from the beginning of their connection, and waits for
/// [`SETTLING`].
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

/// Connects the hanging agents, waits until they have everything, and then lets them hang.
fn begin_hanging(stage: &Stage) -> Result<()> {
    let address = stage.replicas[0].address();
    stage.fleet.ask(move |worker| {
        worker.set_fault(Fault::None, is_hanging);
        worker.resume(&[address], is_hanging);
    })?;
    let what = "the agents that will hang have everything";
    stage.fleet.wait_until(what, CONVERGENCE_LIMIT, |worker| worker.having(0) == worker.healthy())?;
    std::thread::sleep(BREATH);
    stage.fleet.ask(|worker| {
        for number in 0..NEVER + SLOW {
            let node = format!("{HANGING}-{number:05}");
            worker.set_fault(fault(number, NEVER), |client| client.member().node == node);
        }
    })
}

/// The memory of all TCP sockets of this kernel, in bytes. If an agent does not read, sent bytes
/// wait in sockets, and not in the replica.
fn socket_bytes() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/net/sockstat").context("reading /proc/net/sockstat")?;
    let line = text.lines().find(|line| line.starts_with("TCP:")).context("/proc/net/sockstat has no line for TCP")?;
    let pages =
        line.split_whitespace().skip_while(|word| *word != "mem").nth(1).and_then(|pages| pages.parse::<u64>().ok());
    Ok(pages.with_context(|| format!("/proc/net/sockstat: {line}"))? * 4_096)
}

/// The latencies of several phases. Figures are medians of the phases' quantiles, so one disturbed
/// phase has little influence.
#[derive(Default)]
struct Histograms(Vec<Histogram>);

impl Histograms {
    fn ms(&self, share: f64) -> f64 {
        super::report::median(self.0.iter().map(|histogram| histogram.quantile_ms(share)).collect())
    }
}

/// The memory of the replica at the start and at the end of a phase.
#[derive(Debug, Clone, Copy)]
pub struct Growth {
    /// The largest value in the first third of the phase, in bytes.
    pub first: u64,
    /// The largest value in the last third of the phase, in bytes.
    pub last: u64,
}

fn growth(samples: &[u64]) -> Result<Growth> {
    let third = samples.len() / 3;
    let highest = |part: &[u64]| part.iter().copied().max().context("too few samples of memory: increase --seconds");
    Ok(Growth { first: highest(&samples[..third])?, last: highest(&samples[samples.len() - third..])? })
}

/// Runs a phase, and samples the replica's memory during the phase.
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
