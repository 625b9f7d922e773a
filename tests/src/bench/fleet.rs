//! `fleet`: thousands of agents at one replica on one core, each with its own TLS connection, while
//! endpoints change. The bench measures the replica's memory for each agent, the latency of
//! changes, and the replica's CPU time for each delivered message.
//!
//! The replica and the load generator each have one core and one network namespace. The kernel
//! receives packets on the core of their destination, as on two machines. The replica is a real
//! process with a stand-in API server over HTTP.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use super::report::Figure;
use crate::fleet::{
    Settings,
    bare::{self, BareWrites},
    phase::Phase,
    stage::{Setup, Stage},
};

/// The pause before each measurement of memory. The programs release temporary memory during this
/// pause.
pub(super) const SETTLING: Duration = Duration::from_secs(5);
/// If the load generator uses more than this share of its core, it counts as the bottleneck.
const BUSY: f64 = 0.9;
/// The bench warns if other programs use more than this share of a core. The stand-in API server
/// and the source of changes also run on the load's core.
const FOREIGN: f64 = 0.15;
/// The bench warns if more than this share of a core's time is stolen.
const STOLEN: f64 = 0.02;
/// The duration of the measurement of bare writes, in seconds.
const BARE_SECONDS: u32 = 5;

/// Options of the benches with a fleet.
#[derive(Debug, Clone, clap::Args)]
pub struct Load {
    /// Number of agents in benches with a fleet [default: 5000; snapshots: 2000]
    #[arg(long, value_name = "N")]
    pub agents: Option<usize>,
    /// Number of these agents that decode all messages into the state of a real agent
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub full_agents: usize,
    /// Duration of the endpoint changes, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    pub seconds: u64,
    /// Endpoint changes per second
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub rate: u32,
    /// Average time between two ACKs of an agent, in milliseconds; the actual time differs by up to
    /// 40 %
    #[arg(long, value_name = "MILLISECONDS", default_value_t = 250)]
    pub ack_interval_ms: u64,
    /// Number of replicas in the bench `everywhere`, which share the agents
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub replicas: usize,
}

impl Load {
    /// Creates a stage for `agents` agents, with one core for the replicas and one for the load.
    ///
    /// # Errors
    /// A part of the stage does not start.
    pub(super) fn stage(&self, agents: usize, services: Option<u32>) -> Result<Stage> {
        Stage::set(self.setup(agents, services))
    }

    /// The settings of a stage for `agents` agents.
    pub(super) fn setup(&self, agents: usize, services: Option<u32>) -> Setup {
        Setup {
            services: services.unwrap_or(10_000),
            endpoints: 10,
            agents,
            full_agents: self.full_agents,
            settings: Settings { ack_interval: Duration::from_millis(self.ack_interval_ms), ..Settings::default() },
            is_pinned: true,
        }
    }

    pub(super) fn time(&self) -> Duration {
        Duration::from_secs(self.seconds)
    }
}

/// Runs a bench on a new thread. The stage pins the new thread to a core. The calling thread stays
/// unpinned, because other benches need all cores.
pub(super) fn apart<T: Send>(bench: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    std::thread::scope(|scope| scope.spawn(bench).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
}

/// Prints a warning if other programs, other virtual machines or a busy load generator make the
/// times of a phase unreliable.
pub(super) fn warn(phase: &Phase, agents: usize) {
    if phase.foreign_share() > FOREIGN {
        let percent = phase.foreign_share() * 100.0;
        println!(
            "other programs used {percent:.0} % of a core: the latencies below are unreliable, the CPU times are not"
        );
    }
    if phase.stolen_share() > STOLEN {
        let percent = phase.stolen_share() * 100.0;
        println!("other virtual machines used {percent:.0} % of a core: the times below are unreliable");
    }
    if phase.load_share() > BUSY {
        println!(
            "the load generator is the bottleneck ({:.0} % of its core), so it determines the latencies below; by the replica's CPU time alone, one \
             core would serve {:.0} agents",
            phase.load_share() * 100.0,
            phase.agents_by_cpu(agents)
        );
    }
}

/// Runs the bench.
///
/// # Errors
/// An agent does not receive everything, finds a violation of the contract, or has a state that
/// differs from the source in the end.
pub fn run(load: &Load, services: Option<u32>) -> Result<Vec<Figure>> {
    apart(|| measure(load, services))
}

fn measure(load: &Load, services: Option<u32>) -> Result<Vec<Figure>> {
    let agents = load.agents.unwrap_or(5_000);
    let mut stage = load.stage(agents, services)?;
    stage.start_replica()?;
    std::thread::sleep(SETTLING);
    let bare = bare::measure(&stage.machines, agents, BARE_SECONDS * load.rate, load.rate)?;
    let alone = stage.replicas[0].resident_bytes()?;
    let cpu = stage.replicas[0].cpu()?;
    let start = Instant::now();
    stage.join(0, agents, 0)?;
    let connecting = start.elapsed().as_secs_f64();
    let connected = stage.fleet.ask(|worker| worker.summary())?;
    let least = stage.source.resources() * agents as u64;
    if connected.present.chunk_resources < least {
        bail!("{agents} agents received {} resources, expected {least}", connected.present.chunk_resources);
    }
    let joined = stage.replicas[0].cpu()?.since(&cpu);
    std::thread::sleep(SETTLING);
    let idle = stage.replicas[0].resident_bytes()?;
    let phase = Phase::run(&mut stage, load.time(), load.rate)?;
    stage.replicas[0].check_running()?;
    stage.compare_digests()?;
    check_deliveries(&phase, agents)?;
    let (end, highest) = (stage.replicas[0].resident_bytes()?, stage.replicas[0].highest_resident_bytes()?);
    let label = format!("{agents}x{}/s", load.rate);
    let figure = |what: &str, value: f64, unit| Figure::alone(format!("fleet/{what}/{label}"), value, unit);
    let mut figures = vec![
        figure("memory-alone", alone as f64 / 1e6, "MB"),
        figure("memory-with-idle-agents", idle as f64 / 1e6, "MB"),
        figure("memory-at-end", end as f64 / 1e6, "MB"),
        figure("memory-peak", highest as f64 / 1e6, "MB"),
        figure("memory-per-idle-agent", idle.saturating_sub(alone) as f64 / 1e3 / agents as f64, "KB"),
        figure("memory-per-agent-at-end", end.saturating_sub(alone) as f64 / 1e3 / agents as f64, "KB"),
        figure("connecting-all", connecting, "s"),
        figure("connecting-cpu-per-agent", joined.busy() * 1e6 / agents as f64, "µs"),
    ];
    figures.extend(phase_figures(&phase, &bare, agents, &label));
    Ok(figures)
}

/// Checks that every change has reached every agent and was measured.
fn check_deliveries(phase: &Phase, agents: usize) -> Result<()> {
    let least = u64::from(phase.changes) * agents as u64;
    if phase.latency.count() < least || least == 0 {
        bail!("{} of {least} deliveries were measured", phase.latency.count());
    }
    Ok(())
}

fn phase_figures(phase: &Phase, bare: &BareWrites, agents: usize, label: &str) -> Vec<Figure> {
    warn(phase, agents);
    let name = |what: &str| format!("fleet/{what}/{label}");
    let figure = |what: &str, value: f64, unit| Figure::alone(name(what), value, unit);
    let against = |what: &str, value: f64, unit, anchor: f64| {
        Figure::against(name(what), value, unit, "bare writes to plain sockets", anchor)
    };
    let each = |seconds: f64| seconds * 1e6 / phase.messages.max(1) as f64;
    let deliveries = phase.latency.count().max(1) as f64;
    vec![
        against("p50", phase.quantile_ms(0.5), "ms", bare.latency.quantile_ms(0.5)),
        against("p99", phase.quantile_ms(0.99), "ms", bare.latency.quantile_ms(0.99)),
        figure("max", phase.latency.max() as f64 / 1e3, "ms"),
        figure("deliveries-measured", deliveries, ""),
        figure("messages", phase.messages as f64, ""),
        figure("changes-per-message", deliveries / phase.batches.max(1) as f64, ""),
        figure("bytes-per-message", phase.bytes as f64 / phase.messages.max(1) as f64, "bytes"),
        figure("acks", phase.acks as f64, ""),
        against("server-cpu-per-message", each(phase.server.busy()), "µs", bare.cpu_us),
        figure("server-cpu-per-message/user", each(phase.server.user), "µs"),
        figure("server-cpu-per-message/system", each(phase.server.system), "µs"),
        against(
            "server-cpu-per-message/with-interrupts",
            each(phase.server_seconds()),
            "µs",
            bare.cpu_with_interrupts_us,
        ),
        figure("server-cpu-per-delivered-change", phase.server_seconds() * 1e6 / deliveries, "µs"),
        figure("server-core-share", phase.server_seconds() / phase.seconds * 100.0, "%"),
        figure("agents-by-server-cpu", phase.agents_by_cpu(agents), ""),
        figure("load-cpu-per-message", each(phase.load_seconds), "µs"),
        figure("load-core-share", phase.load_share() * 100.0, "%"),
        figure("foreign-share", phase.foreign_share() * 100.0, "%"),
        figure("stolen-share", phase.stolen_share() * 100.0, "%"),
        figure("seconds", phase.seconds, "s"),
    ]
}
