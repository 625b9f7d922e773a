//! `fleet`: thousands of agents at one replica on one core, each with its own TLS connection, while
//! endpoints change. The bench measures the replica's memory for each agent, the latency of
//! changes, the replica's CPU time for each delivered message, and a profile of the replica's CPU
//! time.
//!
//! The replica and the load generator each have one core and one network namespace. The kernel
//! receives packets on the core of their destination, as on two machines. The replica is a real
//! process with a stand-in API server over HTTP.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use super::{
    profile::{Profile, Sampling},
    report::Figure,
};
use crate::fleet::{
    Settings,
    bare::{self, BareWrites},
    phase::Phase,
    rig::Wire,
    stage::{Setup, Stage},
};

/// The pause before each measurement of memory. The programs release temporary memory during this
/// pause.
pub(super) const SETTLING: Duration = Duration::from_secs(5);
/// The shortest duration of a CPU profile.
const LEAST_SAMPLED: Duration = Duration::from_secs(5);
/// If the load generator uses more than this share of its core, it counts as the bottleneck.
const BUSY: f64 = 0.9;
/// The bench warns if other programs use more than this share of a core. The stand-in API server
/// and the source of changes also run on the load's core.
const FOREIGN: f64 = 0.15;
/// The bench warns if more than this share of a core's time is stolen.
const STOLEN: f64 = 0.02;
/// The largest p99 latency that `--find-largest` allows, in milliseconds.
const HELD_P99_MS: f64 = 50.0;
/// The duration of the measurement of bare writes, in seconds.
const BARE_SECONDS: u32 = 5;
/// `--find-largest` ends when the smallest number of agents that fails is at most this factor above
/// the largest number that succeeds.
const CLOSE: f64 = 1.06;

/// Options of the benches with a fleet.
#[derive(Debug, Clone, clap::Args)]
pub struct Load {
    /// Number of agents in benches with a fleet [default: 5000; snapshots: 2000; slow: 1000;
    /// lagging: 500; apiserver-load: 1, 100 and 5000; failover: 100]
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
    /// The network between replica and agents
    #[arg(long, value_enum, default_value = "veth")]
    pub wire: Wire,
    /// Search for the largest number of agents with a p99 of at most 50 ms, beginning with --agents
    /// (fleet)
    #[arg(long)]
    pub find_largest: bool,
}

impl Load {
    /// Creates a stage for `agents` agents, with one core for the replicas and one for the load.
    ///
    /// # Errors
    /// A part of the stage does not start.
    pub(super) fn stage(&self, agents: usize, services: Option<u32>) -> Result<Stage> {
        Stage::set(Setup {
            services: services.unwrap_or(10_000),
            endpoints: 10,
            agents,
            full_agents: self.full_agents,
            wire: self.wire,
            settings: Settings { ack_interval: Duration::from_millis(self.ack_interval_ms), ..Settings::default() },
            is_pinned: true,
        })
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
    apart(|| if load.find_largest { find_largest(load, services) } else { run_once(load, services) })
}

fn run_once(load: &Load, services: Option<u32>) -> Result<Vec<Figure>> {
    let agents = load.agents.unwrap_or(5_000);
    let mut stage = load.stage(agents, services)?;
    stage.start_replica(&[])?;
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
    let phase = Phase::run(&mut stage, 0, load.time(), load.rate)?;
    let profile = profile(&mut stage, load)?;
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
    figures.extend(profile.iter().flat_map(|profile| profile_figures(profile, &phase, &label)));
    Ok(figures)
}

/// Checks that every change has reached every agent and was measured.
pub(super) fn check_deliveries(phase: &Phase, agents: usize) -> Result<()> {
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

/// Measures a CPU profile of the replica in a separate phase, because sampling slows the process
/// down.
fn profile(stage: &mut Stage, load: &Load) -> Result<Option<Profile>> {
    let Some(sampling) = Sampling::start(stage.replicas[0].id())? else { return Ok(None) };
    Phase::run(stage, 0, (load.time() / 4).max(LEAST_SAMPLED), load.rate)?;
    sampling.finish()
}

/// The figures of a CPU profile: for each purpose, the replica's CPU time for a message.
fn profile_figures(profile: &Profile, phase: &Phase, label: &str) -> Vec<Figure> {
    let each = phase.server.busy() * 1e6 / phase.messages.max(1) as f64;
    let figure = |(what, share): (&str, f64)| {
        let name = format!("fleet/server-cpu-for/{what}/{label}");
        Figure::against(name, share * each, "µs", "all", each)
    };
    profile.shares().into_iter().map(figure).collect()
}

/// Searches for the largest number of agents whose p99 is at most [`HELD_P99_MS`], by adding and
/// suspending agents of one replica.
fn find_largest(load: &Load, services: Option<u32>) -> Result<Vec<Figure>> {
    let start = load.agents.unwrap_or(5_000);
    let most = (start * 4).min(Stage::most_agents()?).max(start);
    let mut stage = load.stage(most, services)?;
    stage.start_replica(&[])?;
    let (mut joined, mut figures) = (0, Vec::new());
    let (mut holds, mut fails): (Option<usize>, Option<usize>) = (None, None);
    let mut agents = start;
    let (mut by_cpu, mut is_ended_by_load) = (0.0, false);
    loop {
        if agents > joined {
            stage.fleet.ask(|worker| worker.resume_at(None))?;
            stage.join(joined, agents - joined, 0)?;
            joined = agents;
        } else {
            stage.fleet.ask(move |worker| worker.resume_at(Some(agents)))?;
            stage.wait_for_all(0)?;
        }
        let phase = Phase::run(&mut stage, 0, load.time(), load.rate)?;
        check_deliveries(&phase, agents)?;
        warn(&phase, agents);
        let p99 = phase.quantile_ms(0.99);
        let label = format!("{agents}x{}/s", load.rate);
        println!(
            "{agents} agents: p99 {p99:.1} ms, server {:.0} %, load {:.0} %",
            share(&phase),
            phase.load_share() * 100.0
        );
        figures.push(Figure::alone(format!("fleet/p99/{label}"), p99, "ms"));
        figures.push(Figure::alone(format!("fleet/server-core-share/{label}"), share(&phase), "%"));
        if p99 <= HELD_P99_MS {
            holds = Some(agents);
            by_cpu = phase.agents_by_cpu(agents);
        } else {
            fails = Some(agents);
            is_ended_by_load = phase.load_share() > BUSY && phase.server_seconds() < BUSY * phase.seconds;
        }
        agents = match (holds, fails) {
            (Some(holds), Some(fails)) if fails as f64 <= holds as f64 * CLOSE => break,
            (Some(holds), Some(fails)) => usize::midpoint(holds, fails),
            (Some(holds), None) if holds >= most => {
                println!(
                    "the search ends at {most} agents, which still have an allowed p99: it tries at most four times the first number, within the \
                     limit of open files; use a larger --agents or raise the limit"
                );
                break;
            }
            (Some(holds), None) => (holds * 5 / 4).min(most),
            (None, Some(fails)) if fails <= 10 => bail!("even {fails} agents have a p99 above {HELD_P99_MS} ms"),
            (None, _) => agents * 4 / 5,
        };
    }
    if is_ended_by_load {
        println!(
            "the load generator, not the replica, limits the search: largest-by-server-cpu is the number of agents that the replica's core could \
             serve, by its CPU time with the largest number of agents that succeeded"
        );
    }
    figures.push(Figure::alone("fleet/largest-within-50-ms", holds.unwrap_or_default() as f64, "agents"));
    figures.push(Figure::alone("fleet/largest-by-server-cpu", by_cpu, "agents"));
    Ok(figures)
}

fn share(phase: &Phase) -> f64 {
    phase.server_seconds() / phase.seconds * 100.0
}
