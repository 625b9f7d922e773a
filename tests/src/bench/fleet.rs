//! `fleet`: thousands of agents on one replica that has one core, each with a TLS connection of its own, while endpoints change. Memory per agent, the time
//! from a change to every agent, and the replica's CPU time per delivered message.
//!
//! Replica and load have a core each, and a network namespace each; packets are taken in by the core of the machine that they arrive at, as they would be on
//! two machines. The replica is the real program, on a stand-in API server over real HTTP.

use std::{sync::Arc, time::Duration};

use anyhow::{Context as _, Result, bail};

use super::report::Figure;
use crate::fleet::{
    Fleet, Member, Settings,
    certificates::Authority,
    latency::{Histogram, Timetable},
    rig::{self, CpuTime, LOAD_CORE, Machines, Replica, ReplicaSetup, SERVER_CORE, Wire},
    source::Source,
};

/// Longest time until all agents have everything, at first and after the last change.
const CONVERGENCE_LIMIT: Duration = Duration::from_secs(300);
/// Pause before memory is looked at, in which what was needed for a moment is given back.
const SETTLING: Duration = Duration::from_secs(5);
/// Open files that neither connections nor their epoll entries need.
const SPARE_FILES: u64 = 4_096;
/// A load generator that is busier than this is taken for the bottleneck.
const BUSY: f64 = 0.9;
/// Other programs that take more of a core than this are worth a warning. The stand-in API server and the changes belong to the load's core.
const FOREIGN: f64 = 0.15;

/// How large, how long, and on what.
#[derive(Debug, Clone, clap::Args)]
pub struct Load {
    /// Agents, of the benches with a fleet
    #[arg(long, value_name = "N", default_value_t = 5_000)]
    pub agents: usize,
    /// Agents among them that decode everything into the state of a real agent
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub full_agents: usize,
    /// How long endpoints change, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    pub seconds: u64,
    /// Endpoint changes a second
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub rate: u32,
    /// Pause of an agent between two ACKs, in milliseconds
    #[arg(long, value_name = "MILLISECONDS", default_value_t = 250)]
    pub ack_interval_ms: u64,
    /// What is between replica and agents
    #[arg(long, value_enum, default_value = "veth")]
    pub wire: Wire,
    /// Search for the largest number of agents that holds a p99 of 50 ms, from --agents upwards or downwards (fleet)
    #[arg(long)]
    pub find_largest: bool,
}

/// Endpoints of each service.
pub const ENDPOINTS: u32 = 10;

/// A replica with its source, and a fleet without agents.
pub struct Stage {
    // In the order in which they have to go: agents first, then what they are connected to.
    /// The agents.
    pub fleet: Fleet,
    /// Replicas that run.
    pub replicas: Vec<Replica>,
    /// What they watch.
    pub source: Source,
    /// What they run on.
    pub machines: Machines,
    files: crate::fleet::certificates::ServerFiles,
    folder: tempfile::TempDir,
    load: Load,
}

impl Stage {
    /// Starts everything but agents, on the cores that they are to have. The calling thread is bound to the load's core from then on.
    ///
    /// # Errors
    /// When something does not start.
    pub fn set(load: &Load, services: u32) -> Result<Self> {
        rig::pin_this_thread(LOAD_CORE)?;
        rig::allow_open_files(2 * load.agents as u64 + SPARE_FILES)?;
        let folder = tempfile::tempdir().context("making a folder")?;
        let authority = Arc::new(Authority::new()?);
        let files = authority.write_server_files(folder.path())?;
        let machines = Machines::create(load.wire)?;
        let timetable = Arc::new(Timetable::default());
        let source = Source::start(machines.server(), Arc::clone(&timetable), services, ENDPOINTS)?;
        let settings = Settings { ack_interval: Duration::from_millis(load.ack_interval_ms), ..Settings::default() };
        let fleet = Fleet::start(settings, authority, timetable, machines.agents(), Some(LOAD_CORE))?;
        Ok(Self { fleet, replicas: Vec::new(), source, machines, files, folder, load: load.clone() })
    }

    /// Starts a replica on the server's core; the source is listed when this returns.
    ///
    /// # Errors
    /// When it does not serve.
    pub fn start_replica(&mut self, options: &[&str]) -> Result<&Replica> {
        let kubeconfig = self.source.api().kubeconfig();
        self.start_replica_on(&kubeconfig, options)
    }

    /// The same on an API server of the caller's choice.
    ///
    /// # Errors
    /// When it does not serve.
    pub fn start_replica_on(&mut self, kubeconfig: &str, options: &[&str]) -> Result<&Replica> {
        let number = self.replicas.len();
        let name = format!("replica-{number}-{}", fastrand::u32(..));
        let setup = ReplicaSetup {
            name: &name,
            port: u16::try_from(7443 + 10 * number).context("too many replicas")?,
            kubeconfig,
            files: &self.files,
            options,
            core: Some(SERVER_CORE),
        };
        self.replicas.push(Replica::start(&self.machines, self.folder.path(), &setup)?);
        self.replicas.last().context("it was just pushed")
    }

    /// Members for so many agents of a replica, named from `first` on. The first of them hold a state, as far as the load asks for it.
    #[must_use]
    pub fn members(&self, first: usize, count: usize, replica: &Replica) -> Vec<Member> {
        let member = |number: usize| Member {
            node: format!("node-{number:05}"),
            replicas: vec![replica.address()],
            is_full: number < self.load.full_agents,
            is_measured: true,
            ..Member::default()
        };
        (first..first + count).map(member).collect()
    }

    /// Waits until every agent has all that the source had at a position.
    ///
    /// # Errors
    /// When that takes too long, or an agent was sent what breaks the contract.
    pub fn wait_for_all(&self, slices: u64) -> Result<()> {
        let what = format!("every agent has version {slices} of the source");
        self.fleet.wait_until(&what, CONVERGENCE_LIMIT, move |worker| worker.having(slices) == worker.clients().len())
    }

    /// Compares the state of every agent that holds one with the source's.
    ///
    /// # Errors
    /// When they differ, or there is none to compare.
    pub fn compare_digests(&self) -> Result<usize> {
        let expected = self.source.digests()?;
        let found = self.fleet.ask(|worker| worker.digests())?;
        for (agent, digests) in found.iter().enumerate() {
            let differing = expected.differing(digests).len();
            if differing > 0 {
                bail!("agent {agent} of those with a state differs from the source in {differing} of 1,024 buckets");
            }
        }
        if found.is_empty() {
            bail!("no agent holds a state that could be compared");
        }
        Ok(found.len())
    }
}

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
    /// Changes endpoints for the load's time, and waits until every agent has everything.
    ///
    /// # Errors
    /// When an agent does not get everything, or was sent what breaks the contract.
    pub fn run(stage: &mut Stage, replica: usize) -> Result<Self> {
        let (time, rate) = (Duration::from_secs(stage.load.seconds), stage.load.rate);
        let before = stage.fleet.ask(|worker| (worker.summary(), worker.cpu(), drop(worker.record(true))))?;
        let start = std::time::Instant::now();
        let at = |stage: &Stage| -> Result<_> {
            let server = stage.replicas.get(replica).context("no such replica")?.cpu()?;
            Ok((server, CpuTime::of_core(SERVER_CORE)?, CpuTime::of_core(LOAD_CORE)?))
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
        self.latency.quantile(share) as f64 / 1e3
    }

    /// Seconds of the server's core: the replica's own, and what its packets took outside of any process.
    #[must_use]
    pub fn server_seconds(&self) -> f64 {
        self.server.busy() + self.server_core.interrupts
    }

    /// Agents that the server's core could serve at this rate of changes, by its own time alone.
    #[must_use]
    pub fn agents_by_cpu(&self, agents: usize) -> f64 {
        agents as f64 * self.seconds / self.server_seconds().max(f64::MIN_POSITIVE)
    }

    /// Share of the load's core that the load took.
    #[must_use]
    pub fn load_share(&self) -> f64 {
        (self.load_seconds + self.load_core.interrupts) / self.seconds
    }

    /// Share of the cores that other programs took. It has to be small for times to mean anything.
    #[must_use]
    pub fn foreign_share(&self) -> f64 {
        let foreign = |core: &CpuTime, own: f64| (core.user + core.system - own).max(0.0) / self.seconds;
        foreign(&self.server_core, self.server.busy()).max(foreign(&self.load_core, self.load_seconds))
    }

    /// Says so when the times are not the server's.
    fn warn(&self, agents: usize) {
        if self.foreign_share() > FOREIGN {
            let percent = self.foreign_share() * 100.0;
            println!("other programs took {percent:.0} % of a core: the times below mean little, CPU times do");
        }
        if self.load_share() > BUSY {
            println!(
                "the load generator is the bottleneck ({:.0} % of its core): the times below are its own; by the server's CPU time alone, its core \
                 would serve {:.0} agents",
                self.load_share() * 100.0,
                self.agents_by_cpu(agents)
            );
        }
    }
}

/// Runs the bench.
///
/// # Errors
/// When an agent does not get everything, was sent what breaks the contract, or ends up with another state than the source's.
pub fn run(load: &Load, services: Option<u32>) -> Result<Vec<Figure>> {
    let services = services.unwrap_or(10_000);
    // The thread is bound to a core, and other benches are to have all.
    std::thread::scope(|scope| {
        let bench = scope.spawn(|| run_once(load, services));
        bench.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn run_once(load: &Load, services: u32) -> Result<Vec<Figure>> {
    let agents = load.agents;
    let mut stage = Stage::set(load, services)?;
    stage.start_replica(&[])?;
    std::thread::sleep(SETTLING);
    let replica = &stage.replicas[0];
    let alone = replica.resident_bytes()?;
    let cpu = replica.cpu()?;
    let start = std::time::Instant::now();
    stage.fleet.join(stage.members(0, agents, replica))?;
    let version = stage.source.api().version();
    let is_complete = stage.source.resources();
    stage.fleet.wait_until("every agent has its first snapshot", CONVERGENCE_LIMIT, move |worker| {
        worker.following() == worker.clients().len()
    })?;
    let connecting = start.elapsed().as_secs_f64();
    let connected = stage.fleet.ask(|worker| worker.summary())?;
    if connected.present.chunk_resources < is_complete * agents as u64 {
        bail!(
            "{agents} agents have {} resources at {version}, not {is_complete} each",
            connected.present.chunk_resources
        );
    }
    let joined = replica.cpu()?.since(&cpu);
    std::thread::sleep(SETTLING);
    let idle = replica.resident_bytes()?;
    let phase = Phase::run(&mut stage, 0)?;
    stage.replicas[0].check_running()?;
    stage.compare_digests()?;
    let least = u64::from(phase.changes) * agents as u64;
    if phase.latency.count() < least {
        bail!("{} of {least} deliveries were measured", phase.latency.count());
    }
    let replica = &stage.replicas[0];
    let (end, highest) = (replica.resident_bytes()?, replica.highest_resident_bytes()?);
    let kilobytes_per_agent = (idle.saturating_sub(alone)) as f64 / 1e3 / agents as f64;
    let label = format!("{agents}x{}/s", load.rate);
    let figure = |what: &str, value: f64, unit| Figure::alone(format!("fleet/{what}/{label}"), value, unit);
    let mut figures = vec![
        figure("p50", phase.quantile_ms(0.5), "ms"),
        figure("p99", phase.quantile_ms(0.99), "ms"),
        figure("max", phase.latency.max() as f64 / 1e3, "ms"),
        figure("deliveries-measured", phase.latency.count() as f64, ""),
        figure("messages", phase.messages as f64, ""),
        figure("changes-per-message", least as f64 / phase.batches.max(1) as f64, ""),
        figure("bytes-per-message", phase.bytes as f64 / phase.messages.max(1) as f64, "bytes"),
        figure("acks", phase.acks as f64, ""),
        figure("memory-alone", alone as f64 / 1e6, "MB"),
        figure("memory-with-idle-agents", idle as f64 / 1e6, "MB"),
        figure("memory-at-end", end as f64 / 1e6, "MB"),
        figure("memory-highest", highest as f64 / 1e6, "MB"),
        figure("memory-per-agent", kilobytes_per_agent, "KB"),
        figure("connecting-all", connecting, "s"),
        figure("connecting-cpu-per-agent", joined.busy() * 1e6 / agents as f64, "µs"),
    ];
    figures.extend(cpu_figures(&phase, agents, &label));
    Ok(figures)
}

fn cpu_figures(phase: &Phase, agents: usize, label: &str) -> Vec<Figure> {
    let figure = |what: &str, value: f64, unit| Figure::alone(format!("fleet/{what}/{label}"), value, unit);
    let each = |seconds: f64| seconds * 1e6 / phase.messages.max(1) as f64;
    phase.warn(agents);
    vec![
        figure("server-cpu-per-message", each(phase.server.busy()), "µs"),
        figure("server-cpu-per-message/user", each(phase.server.user), "µs"),
        figure("server-cpu-per-message/system", each(phase.server.system), "µs"),
        figure("server-cpu-per-message/with-interrupts", each(phase.server_seconds()), "µs"),
        figure("server-cpu-per-delivered-change", phase.server_seconds() * 1e6 / phase.latency.count() as f64, "µs"),
        figure("server-core-share", phase.server_seconds() / phase.seconds * 100.0, "%"),
        figure("agents-by-server-cpu", phase.agents_by_cpu(agents), ""),
        figure("load-cpu-per-message", each(phase.load_seconds), "µs"),
        figure("load-core-share", phase.load_share() * 100.0, "%"),
        figure("foreign-share", phase.foreign_share() * 100.0, "%"),
        figure("seconds", phase.seconds, "s"),
    ]
}
