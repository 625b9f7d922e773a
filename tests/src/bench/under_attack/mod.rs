//! `under-attack`: pods, tenants and a node attack, with nothing but what they have, while others
//! change a Service, probe pages, drain a pod and enrol. For each attack the bench starts the real
//! programs, measures a quiet phase, and then the attack. It prints the honest requests of both
//! phases side by side, with the peak memory and the processor time of the programs and their
//! children, and checks the goals below.
//!
//! The stand-in API server and all clients run on the same machine, and take their share of the
//! processors in both phases. The agent may open 4,096 files, so that a pod with fewer connections
//! than this process may open can use them up. Mode IPVS is measured inside User-Mode Linux, which
//! has one processor and slow system calls.

mod attackers;
mod bed;
mod enrolment;
mod honest;
mod servers;
mod usage;

use std::{
    sync::atomic::{AtomicBool, AtomicU8, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use nix::sys::resource::{Resource, setrlimit};

use self::{
    bed::{Bed, Enrols, HEALTH_NODE_PORT, HEALTH_PORT, LOAD_BALANCER, NODE_ADDRESS, OUTSIDE},
    honest::{Probe, Requests},
    usage::{Meter, Usage},
};
use super::{nftables::percentile, report::Figure};
use crate::uml;

/// The longest time of all attacks inside User-Mode Linux.
const INSIDE_TIME_LIMIT: Duration = Duration::from_secs(2_400);
/// The files that this program may open inside.
const INSIDE_FILES: u64 = 65_536;
/// The prefix of the line with the figures in the output of the program inside.
const MARK: &str = "figures: ";

/// A change of another tenant may take this long in any case, in milliseconds.
const CHANGE_MS: f64 = 100.0;
/// How many times longer than in the quiet phase a change may take.
const TIMES_QUIET: f64 = 2.0;
/// How much more memory than in the quiet phase an agent in mode nftables may use, in megabytes.
const AGENT_MB: f64 = 32.0;
/// How many times more memory than in the quiet phase an agent in another mode may use.
const AGENT_TIMES_QUIET: f64 = 1.3;
/// How much more memory than in the quiet phase a replica may use, in megabytes.
const REPLICA_MB: f64 = 64.0;
/// The longest time until a node has its certificate, in milliseconds.
const ENROLMENT_MS: f64 = 5_000.0;

/// Options of the bench.
#[derive(Debug, Clone, clap::Args)]
pub struct Attacks {
    /// Run only these attacks, separated by commas (under-attack)
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub attacks: Vec<String>,
    /// The modes of the agent, separated by commas (under-attack). Mode ipvs runs inside User-Mode
    /// Linux; for the others, the kernel must support them
    #[arg(long, value_name = "MODES", value_delimiter = ',', value_enum, default_value = "nftables")]
    pub attack_modes: Vec<AttackMode>,
    /// Attack with full size: longer phases, 10,000 Services, and more connections and targets
    /// (under-attack)
    #[arg(long)]
    pub full_attacks: bool,
    /// Length of the quiet phase and of the attack, in seconds (under-attack) [default: 4 and 8;
    /// with full size: 20 and 90]
    #[arg(long, value_name = "SECONDS")]
    pub attack_seconds: Option<u64>,
    /// Another argument of the agent, such as --log=info; repeat the option for more. It replaces
    /// an argument of the bench with the same flag, and {folder} stands for the folder with the
    /// bench's files (under-attack)
    #[arg(long = "agent-argument", value_name = "FLAG=VALUE", allow_hyphen_values = true)]
    pub agent_arguments: Vec<String>,
    /// Another argument of the control plane, as --agent-argument (under-attack)
    #[arg(long = "control-plane-argument", value_name = "FLAG=VALUE", allow_hyphen_values = true)]
    pub control_plane_arguments: Vec<String>,
}

/// The mode of the agent under attack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum AttackMode {
    /// nftables.
    Nftables,
    /// iptables, legacy variant.
    IptablesLegacy,
    /// iptables, nft variant.
    IptablesNft,
    /// IPVS.
    Ipvs,
    /// The proxy in the agent.
    Userspace,
}

impl AttackMode {
    /// The value of `--proxy-mode`, as the page `/proxyMode` shows it.
    fn name(self) -> &'static str {
        match self {
            Self::Nftables => "nftables",
            Self::IptablesLegacy | Self::IptablesNft => "iptables",
            Self::Ipvs => "ipvs",
            Self::Userspace => "userspace",
        }
    }

    fn arguments(self) -> &'static [&'static str] {
        match self {
            Self::Nftables => &["--proxy-mode=nftables"],
            Self::IptablesLegacy => &["--proxy-mode=iptables", "--iptables-variant=legacy"],
            Self::IptablesNft => &["--proxy-mode=iptables", "--iptables-variant=nft"],
            // User-Mode Linux has no nf_tables.
            Self::Ipvs => &["--proxy-mode=ipvs", "--iptables-variant=legacy"],
            Self::Userspace => &["--proxy-mode=userspace"],
        }
    }

    /// The name of the figures.
    fn label(self) -> &'static str {
        match self {
            Self::IptablesLegacy => "iptables-legacy",
            Self::IptablesNft => "iptables-nft",
            _ => self.name(),
        }
    }

    fn is_iptables(self) -> bool {
        matches!(self, Self::IptablesLegacy | Self::IptablesNft)
    }
}

/// The sizes of the attacks.
#[derive(Debug, Clone, Copy)]
struct Load {
    services: u32,
    quiet: Duration,
    attack: Duration,
    /// Wrong values in one object.
    findings: u32,
    /// Valid externalIPs of a Service with a hundred ports.
    external_ips: u32,
    /// Connections whose request becomes too long.
    unfinished: usize,
    /// Connections that wait: without a byte, or at the agent's pages with unfinished headers.
    idle: usize,
    /// Targets of health checks.
    targets: u32,
    /// Nodes without an agent.
    nodes: u32,
}

const SMALL: Load = Load {
    services: 200,
    quiet: Duration::from_secs(4),
    attack: Duration::from_secs(8),
    findings: 60_000,
    external_ips: 4_000,
    unfinished: 1_000,
    idle: 3_600,
    targets: 2_400,
    nodes: 1_000,
};

const FULL: Load = Load {
    services: 10_000,
    quiet: Duration::from_secs(20),
    attack: Duration::from_secs(90),
    findings: 60_000,
    external_ips: 4_000,
    unfinished: 2_300,
    idle: 8_250,
    targets: 8_000,
    nodes: 5_000,
};

/// What the honest do beside changes and probes of the agent's health.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Beside {
    Nothing,
    /// A load balancer probes a health-check node port.
    NodePortProbes,
    /// Endpoints are checked.
    Checks,
    /// A pod stops.
    Drains,
    /// Nodes enrol.
    Enrolments,
}

/// One attack.
struct Attack {
    name: &'static str,
    what: &'static str,
    beside: Beside,
    /// Writes objects that exist before the quiet phase.
    prepare: fn(&Bed, &Load) -> Result<()>,
    run: fn(&Bed, &Load, &AtomicBool) -> Result<()>,
}

fn nothing(_: &Bed, _: &Load) -> Result<()> {
    Ok(())
}

const ATTACKS: &[Attack] = &[
    Attack {
        name: "external-ips",
        what: "a Service with 60,000 invalid externalIPs is edited",
        beside: Beside::Nothing,
        prepare: nothing,
        run: attackers::external_ips,
    },
    Attack {
        name: "weights",
        what: "slices with 60,000 unreadable weights, and the weights of a Service with 100 ports, are edited",
        beside: Beside::Nothing,
        prepare: nothing,
        run: attackers::weights,
    },
    Attack {
        name: "slots",
        what: "six Services with consistent-hash and 100 ports are edited",
        beside: Beside::Nothing,
        prepare: nothing,
        run: attackers::slots,
    },
    Attack {
        name: "frontends",
        what: "a Service with 4,000 externalIPs and 100 ports is edited",
        beside: Beside::Nothing,
        prepare: nothing,
        run: attackers::frontends,
    },
    Attack {
        name: "agent-pages",
        what: "a pod opens thousands of connections to the agent's pages, all with headers that do not end",
        beside: Beside::Nothing,
        prepare: nothing,
        run: attackers::agent_pages,
    },
    Attack {
        name: "health-node-port",
        what: "a pod holds idle connections to a health-check node port",
        beside: Beside::NodePortProbes,
        prepare: nothing,
        run: attackers::health_node_port,
    },
    Attack {
        name: "enrolment",
        what: "a pod sends garbage to the ports for enrolment and streams, and holds idle connections",
        beside: Beside::Enrolments,
        prepare: |bed, _| enrolment::write_nodes(bed),
        run: enrolment::garbage,
    },
    Attack {
        name: "health-checks",
        what: "Services of one namespace have thousands of health-check targets that never answer",
        beside: Beside::Checks,
        prepare: nothing,
        run: attackers::health_checks,
    },
    Attack {
        name: "barriers",
        what: "the agent of a node asks the drain barrier without a pause, and never reads",
        // The Nodes without an agent would let each honest drain wait for its time limit.
        beside: Beside::Nothing,
        prepare: attackers::write_nodes_for_barriers,
        run: attackers::barriers,
    },
    Attack {
        name: "drain-page",
        what: "a pod asks the drain page without a pause",
        beside: Beside::Drains,
        prepare: nothing,
        run: attackers::drain_page,
    },
];

/// Runs the attacks.
///
/// # Errors
/// A program does not start or ends, or an attack cannot be measured. A goal that is missed is no
/// error: its figure says so.
pub fn run(options: &Attacks, services: Option<u32>) -> Result<Vec<Figure>> {
    let size = if options.full_attacks { FULL } else { SMALL };
    let seconds = options.attack_seconds.map(Duration::from_secs);
    let load = Load {
        services: services.unwrap_or(size.services),
        quiet: seconds.unwrap_or(size.quiet),
        attack: seconds.unwrap_or(size.attack),
        ..size
    };
    let unknown = options.attacks.iter().find(|name| ATTACKS.iter().all(|attack| attack.name != **name));
    if let Some(unknown) = unknown {
        let names: Vec<_> = ATTACKS.iter().map(|attack| attack.name).collect();
        bail!("no attack is called {unknown:?}; the attacks are {}", names.join(", "));
    }
    let mut figures = Vec::new();
    let mut failures = Vec::new();
    let is_inside = uml::guest::is_here();
    for mode in &options.attack_modes {
        match (*mode == AttackMode::Ipvs, is_inside) {
            (true, false) => {
                figures.extend(inside()?);
                continue;
            }
            (false, true) => continue,
            _ => {}
        }
        let is_chosen = |name: &str| options.attacks.is_empty() || options.attacks.iter().any(|chosen| chosen == name);
        for attack in ATTACKS.iter().filter(|attack| is_chosen(attack.name)) {
            println!("{}, mode {}: {}", attack.name, mode.label(), attack.what);
            match measure(*mode, options, &load, attack) {
                Ok((quiet, attacked)) => figures.extend(compare(*mode, attack, &quiet, &attacked)),
                // The other attacks are measured all the same.
                Err(error) => {
                    eprintln!("{}, mode {}: not measured: {error:#}", attack.name, mode.label());
                    failures.push(format!("{} in mode {}", attack.name, mode.label()));
                }
            }
        }
    }
    // What could not be measured counts as a goal that is missed.
    let name = format!("under-attack/not-measured: {}", failures.join(", "));
    if !failures.is_empty() {
        figures.push(Figure::alone(name, failures.len() as f64, "").with_goal(0.0));
    }
    Ok(figures)
}

/// Runs this program with the same options inside User-Mode Linux, and returns the figures of mode
/// IPVS.
fn inside() -> Result<Vec<Figure>> {
    eprintln!("under-attack: mode ipvs runs inside User-Mode Linux; this takes some minutes");
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    if !arguments.iter().any(|argument| argument.starts_with("--only")) {
        arguments.push("--only=under-attack".into());
    }
    arguments.push("--inside".into());
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let output = uml::run_program_inside("bench under-attack", &arguments, INSIDE_TIME_LIMIT)?;
    let (figures, others): (Vec<_>, Vec<_>) = output.lines().partition(|line| line.starts_with(MARK));
    others.into_iter().for_each(|line| println!("{line}"));
    let figures = figures.into_iter().find_map(|line| line.strip_prefix(MARK));
    let figures = figures.context("the program inside User-Mode Linux printed no figures")?;
    serde_json::from_str(figures).context("reading the figures")
}

/// Measures mode IPVS. [`run`] starts this function inside User-Mode Linux.
///
/// # Errors
/// As for [`run`].
pub fn measure_inside(options: &Attacks, services: Option<u32>) -> Result<()> {
    uml::guest::mark_entered();
    setrlimit(Resource::RLIMIT_NOFILE, INSIDE_FILES, INSIDE_FILES).context("allowing open files")?;
    println!("{MARK}{}", serde_json::to_string(&run(options, services)?)?);
    Ok(())
}

/// What was seen in one phase.
struct Observed {
    changes: Requests,
    failed_connections: u64,
    probes: Requests,
    beside: Requests,
    agent: Usage,
    replica: Usage,
}

fn measure(mode: AttackMode, options: &Attacks, load: &Load, attack: &Attack) -> Result<(Observed, Observed)> {
    let enrols = if attack.beside == Beside::Enrolments { Enrols::Yes } else { Enrols::No };
    let mut bed = Bed::start(mode, options, load.services, enrols)?;
    (attack.prepare)(&bed, load)?;
    let phases = both_phases(&bed, load, attack);
    let running = bed.check_running();
    let logs = bed.logs();
    phases.and_then(|phases| running.map(|()| phases)).with_context(|| logs)
}

fn both_phases(bed: &Bed, load: &Load, attack: &Attack) -> Result<(Observed, Observed)> {
    let next_node = AtomicU8::new(0);
    let quiet = phase(bed, load, attack, &next_node, None)?;
    if quiet.probes.failed > 0 {
        println!("probes fail without an attack: {}", bed.logs());
    }
    ensure!(quiet.changes.failed == 0, "{} quiet changes did not arrive", quiet.changes.failed);
    let is_checked = attack.beside != Beside::Checks || quiet.beside.times_ms.len() > 2;
    ensure!(is_checked, "no endpoint is checked: allow health checks with --agent-argument");
    let attacked = phase(bed, load, attack, &next_node, Some(attack.run))?;
    Ok((quiet, attacked))
}

type Run = fn(&Bed, &Load, &AtomicBool) -> Result<()>;

/// Lets the honest work for the time of a phase, and the attacker at the same time.
fn phase(bed: &Bed, load: &Load, attack: &Attack, next_node: &AtomicU8, run: Option<Run>) -> Result<Observed> {
    let kubelet = Probe { source: None, target: (NODE_ADDRESS, HEALTH_PORT), path: "/healthz" };
    let balancer = Probe { source: Some(LOAD_BALANCER), target: (OUTSIDE, HEALTH_NODE_PORT), path: "/" };
    let (agent, replica) = (Meter::start(bed.agent.id())?, Meter::start(bed.replica.id())?);
    let began = Instant::now();
    let deadline = began + if run.is_some() { load.attack } else { load.quiet };
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let attacker = scope.spawn(|| run.map_or(Ok(()), |run| run(bed, load, &is_over)));
        let probes = scope.spawn(|| kubelet.run(&bed.node, &is_over));
        let outside =
            (attack.beside == Beside::NodePortProbes).then(|| scope.spawn(|| balancer.run(&bed.pods, &is_over)));
        let others = scope.spawn(|| match attack.beside {
            Beside::Drains => honest::drains(bed, deadline),
            Beside::Enrolments => enrolment::enrolments(bed, next_node, deadline),
            Beside::Nothing | Beside::NodePortProbes | Beside::Checks => Ok(Requests::default()),
        });
        let changes = honest::changes(bed, deadline);
        let others = joined(others);
        let checks = honest::gaps_between_checks(bed, began);
        is_over.store(true, Ordering::Relaxed);
        // The meters stop before the attackers close their connections.
        let (agent, replica) = (agent.finish(), replica.finish());
        joined(attacker).context("attacking")?;
        let mut probes = joined(probes)?;
        if let Some(outside) = outside.map(joined).transpose()? {
            probes.times_ms.extend(outside.times_ms);
            probes.failed += outside.failed;
        }
        let (changes, failed_connections) = changes?;
        let beside = if attack.beside == Beside::Checks { checks } else { others? };
        Ok(Observed { changes, failed_connections, probes, beside, agent: agent?, replica: replica? })
    })
}

fn joined<T>(thread: std::thread::ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// The figures of an attack, each beside the quiet phase, and with its goal.
fn compare(mode: AttackMode, attack: &Attack, quiet: &Observed, attacked: &Observed) -> Vec<Figure> {
    let name = |what: &str| format!("under-attack/{}/{}/{what}", mode.label(), attack.name);
    let against = |what: &str, value: f64, unit, anchor: f64| Figure::against(name(what), value, unit, "quiet", anchor);
    let times = |what: &str, percent, before: &Requests, after: &Requests| {
        let name = format!("{what}-p{percent}");
        against(&name, percentile(&after.times_ms, percent), "ms", percentile(&before.times_ms, percent))
    };
    let count = |what: &str, failed: u64| Figure::alone(name(what), failed as f64, "");
    let floor = if mode.is_iptables() { 0.0 } else { CHANGE_MS };
    let twice = |figure: Figure| {
        let goal = (figure.anchor.unwrap_or_default() * TIMES_QUIET).max(floor);
        figure.with_goal(goal)
    };
    let quiet_failed = quiet.probes.failed + quiet.beside.failed;
    let mut figures = vec![
        // Without an attack, nothing may fail.
        count("quiet-requests-failed", quiet_failed).with_goal(0.0),
        times("change", 50, &quiet.changes, &attacked.changes),
        twice(times("change", 99, &quiet.changes, &attacked.changes)),
        count("changes", attacked.changes.times_ms.len() as u64),
        count("changes-failed", attacked.changes.failed),
        count("connections-failed", attacked.failed_connections),
        times("probe", 99, &quiet.probes, &attacked.probes),
        count("probes", attacked.probes.times_ms.len() as u64),
        count("probes-failed", attacked.probes.failed).with_goal(0.0),
    ];
    match attack.beside {
        Beside::Nothing | Beside::NodePortProbes => {}
        Beside::Checks => figures.extend([times("check-gap", 50, &quiet.beside, &attacked.beside), {
            let gap = times("check-gap", 99, &quiet.beside, &attacked.beside);
            let goal = gap.anchor.unwrap_or_default() * TIMES_QUIET;
            gap.with_goal(goal)
        }]),
        Beside::Drains => figures.extend([
            times("drain", 50, &quiet.beside, &attacked.beside),
            times("drain", 99, &quiet.beside, &attacked.beside),
            count("drains-failed", attacked.beside.failed),
        ]),
        Beside::Enrolments => figures.extend([
            times("enrolment", 50, &quiet.beside, &attacked.beside),
            times("enrolment", 99, &quiet.beside, &attacked.beside).with_goal(ENROLMENT_MS),
            count("enrolments", attacked.beside.times_ms.len() as u64),
            count("enrolments-failed", attacked.beside.failed),
        ]),
    }
    let agent = against("agent-memory", attacked.agent.peak_mb, "MB", quiet.agent.peak_mb);
    let agent_goal = match mode {
        AttackMode::Nftables => quiet.agent.peak_mb + AGENT_MB,
        _ => quiet.agent.peak_mb * AGENT_TIMES_QUIET,
    };
    let replica = against("replica-memory", attacked.replica.peak_mb, "MB", quiet.replica.peak_mb);
    figures.extend([
        agent.with_goal(agent_goal),
        replica.with_goal(quiet.replica.peak_mb + REPLICA_MB),
        against("agent-cpu", attacked.agent.cpu_percent, "%", quiet.agent.cpu_percent),
        against("replica-cpu", attacked.replica.cpu_percent, "%", quiet.replica.cpu_percent),
    ]);
    figures
}
