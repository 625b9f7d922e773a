//! Runs benches: `make bench`, or `make bench ONLY=name`.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Parser;
use headgate_tests::bench::{
    apiserver_load, connect, conntrack, control_plane_memory, delta, failover, fleet, growth, iptables, ipvs, lagging,
    memory,
    report::{Figure, publish},
    slow, snapshots, storm, warm_restart, wire,
};

/// Measures Headgate beside an anchor in the same run; prints the figures and writes them as JSON
#[derive(Debug, Parser)]
#[command(
    after_help = "The benches with a fleet need root, and two cores. While tuning the control plane, one round takes half a minute:\n  \
cargo build --release -p headgate-control-plane -p headgate-tests --bins\n  \
target/release/bench --only fleet --agents 500 --seconds 10 --services 1000\n\
Only the control plane has to be built anew after that; what counts then is server-cpu-per-message and memory-per-agent.\n\
Where the control plane's CPU time goes is measured where perf is installed (Debian package linux-perf)."
)]
struct Arguments {
    /// Run only this bench
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
    /// Number of services, where a bench has one size (default: each bench's own)
    #[arg(long, value_name = "N")]
    services: Option<u32>,
    /// Measure here, inside User-Mode Linux, for the bench that asked for it
    #[arg(long, hide = true)]
    inside: bool,
    /// Folder for the JSON files
    #[arg(long, default_value = "target/bench", value_name = "DIR")]
    out: PathBuf,
    /// List the benches
    #[arg(long)]
    list: bool,
    #[command(flatten)]
    load: fleet::Load,
}

type Bench = fn(&Arguments) -> Result<Vec<Figure>>;

const BENCHES: &[(&str, &str, Bench)] = &[
    ("delta", "one endpoint changes: CPU of both sides and bytes, at three sizes", |_| delta::run()),
    ("fleet", "thousands of agents on one replica: delay, CPU and memory", |a| fleet::run(&a.load, a.services)),
    ("wire", "bytes of an endpoint's change per node, alone and in bursts; fails above its goals", |_| wire::run()),
    ("storm", "all agents come back at once", |a| storm::run(&a.load, a.services)),
    ("snapshots", "thousands of agents that have nothing come at once; fails when order or memory is not kept", |a| {
        snapshots::run(&a.load, a.services)
    }),
    ("slow", "agents that read slowly or not at all, beside others", |a| slow::run(&a.load, a.services)),
    ("apiserver-load", "what the API server sees of 1, 100 and 5,000 agents", |a| {
        apiserver_load::run(&a.load, a.services)
    }),
    ("lagging", "agents move to a replica whose watch is held back", |a| lagging::run(&a.load, a.services)),
    (
        "failover",
        "100 agents while replicas lose their API servers; fails when they are late or move to and fro",
        |a| failover::run(a.load.agents, a.services),
    ),
    ("iptables-full", "the first sync, legacy and nft", |a| iptables::run(iptables::Bench::Full, a.services)),
    ("iptables-incremental", "one endpoint changes, legacy and nft", |a| {
        iptables::run(iptables::Bench::Incremental, a.services)
    }),
    ("iptables-growth", "the first sync from 1,000 to 50,000 services, nft: time and memory", |a| {
        growth::run(a.services)
    }),
    ("ipvs", "loads and changes beside ipvsadm, inside User-Mode Linux", |a| ipvs::run(a.services)),
    ("conntrack", "a thousand stale UDP flows among a million entries", |_| conntrack::run()),
    (
        "warm-restart",
        "agents that begin where their rules are in place; fails when one writes, or a client notices",
        |a| warm_restart::run(a.services),
    ),
    ("agent-memory", "memory of the agent and the programs it runs", |a| memory::run(a.services)),
    (
        "control-plane-memory",
        "memory of the control plane for an endpoint, from 1,000 to 50,000 services; fails above its goal",
        |a| control_plane_memory::run(a.services),
    ),
    ("iptables-connect", "a new connection through the first and the last service", |a| connect::run(a.services)),
];

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    if arguments.inside {
        return ipvs::measure_inside(arguments.services);
    }
    if arguments.list {
        BENCHES.iter().for_each(|(name, what, _)| println!("{name:<24} {what}"));
        return Ok(());
    }
    let chosen: Vec<_> =
        BENCHES.iter().filter(|(name, ..)| arguments.only.as_deref().is_none_or(|only| only == *name)).collect();
    if chosen.is_empty() {
        let names: Vec<_> = BENCHES.iter().map(|(name, ..)| *name).collect();
        bail!("no bench is called {:?}; there are {}", arguments.only.unwrap_or_default(), names.join(", "));
    }
    for (name, _, bench) in chosen {
        publish(name, &bench(&arguments)?, &arguments.out)?;
    }
    Ok(())
}
