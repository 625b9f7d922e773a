//! Runs the benches: `make bench`, or `make bench ONLY=name` for one of them.

use std::path::PathBuf;

use anyhow::{Result, bail, ensure};
use clap::Parser;
use headgate_tests::bench::{
    everywhere, fleet, iptables, ipvs, memory, nft_latency, nft_memory, nft_replace, nftables,
    report::{Figure, publish},
    rollouts, snapshots, storm, under_attack, userspace, wire,
};

/// Measures Headgate, compares it with an anchor in the same run, prints the figures and writes
/// them as JSON
#[derive(Debug, Parser)]
#[command(
    after_help = "Benches with a fleet need root and two cores. To tune the control plane, run a short round of half a minute:\n  \
cargo build --release -p headgate-control-plane -p headgate-tests --bins\n  \
target/release/bench --only fleet --agents 500 --seconds 10 --services 1000\n\
For the next round, build only the control plane again, and compare server-cpu-per-message and memory-per-idle-agent."
)]
struct Arguments {
    /// Run only this bench
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
    /// Number of Services, for benches with a configurable size (default: chosen by each bench)
    #[arg(long, value_name = "N")]
    services: Option<u32>,
    /// This program runs inside User-Mode Linux
    #[arg(long, hide = true)]
    inside: bool,
    /// Make this number of changes, for `make path`
    #[arg(long, hide = true, value_name = "N")]
    path: Option<u32>,
    /// Folder for the JSON files
    #[arg(long, default_value = "target/bench", value_name = "DIR")]
    out: PathBuf,
    /// List the benches
    #[arg(long)]
    list: bool,
    #[command(flatten)]
    load: fleet::Load,
    #[command(flatten)]
    rollouts: rollouts::Rollouts,
    #[command(flatten)]
    attacks: under_attack::Attacks,
}

type Bench = fn(&Arguments) -> Result<Vec<Figure>>;

const BENCHES: &[(&str, &str, Bench)] = &[
    ("fleet", "thousands of agents at one replica: latency, CPU time and memory", |a| fleet::run(&a.load, a.services)),
    (
        "everywhere",
        "from a change's trigger to the last of thousands of agents; fails if replicas disagree or a goal is missed",
        |a| everywhere::run(&a.load, a.services),
    ),
    ("wire", "bytes of an endpoint's change for a node, alone and in bursts; fails if a goal is missed", |_| {
        wire::run()
    }),
    ("storm", "all agents reconnect at once", |a| storm::run(&a.load, a.services)),
    (
        "snapshots",
        "thousands of agents without state connect at once; fails if the order is wrong or memory exceeds its bound",
        |a| snapshots::run(&a.load, a.services),
    ),
    ("iptables-full", "the first sync, legacy and nft", |a| iptables::run(iptables::Bench::Full, a.services)),
    ("iptables-incremental", "one endpoint changes, legacy and nft", |a| {
        iptables::run(iptables::Bench::Incremental, a.services)
    }),
    ("ipvs", "loads and changes compared with ipvsadm, inside User-Mode Linux", |a| ipvs::run(a.services)),
    ("agent-memory", "memory of the agent and the programs that it runs", |a| memory::run(a.services)),
    ("nft-full", "the first sync in nftables mode, for several sizes", |a| nftables::full(a.services)),
    ("nft-incremental", "one endpoint changes in nftables mode, for several sizes", |a| {
        nftables::incremental(a.services)
    }),
    ("nft-latency", "from a change in the API server until the kernel has it, in nftables mode", |a| {
        nft_latency::run(a.services)
    }),
    ("nft-burst", "1,000 Services change in one transaction, in nftables mode", |a| nftables::burst(a.services)),
    ("nft-memory", "memory of an agent in nftables mode; fails if the agent runs a program", |a| {
        nft_memory::run(a.services)
    }),
    (
        "nft-replace",
        "new connections while one Service's endpoints are replaced; fails if a connection is refused or misled",
        |_| nft_replace::run(),
    ),
    (
        "rollouts",
        "pods are replaced under load, with the drain barrier, a sleep and no wait; fails if the barrier loses a request",
        |a| rollouts::run(&a.rollouts),
    ),
    (
        "under-attack",
        "changes, probes and memory while pods and tenants attack, beside quiet times; fails if a goal is missed",
        |a| under_attack::run(&a.attacks, a.services),
    ),
    ("userspace", "connections through the agent's proxy and through HAProxy behind the same rules", |_| {
        userspace::run()
    }),
    (
        "userspace-idle",
        "memory of the agent's proxy and of HAProxy for 10,000 idle connections; fails if the goal is missed",
        |_| userspace::idle(),
    ),
    (
        "userspace-udp",
        "datagrams through the agent's proxy and direct; fails if datagrams are lost without a count or the goal is missed",
        |_| userspace::datagrams::run(),
    ),
];

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    if arguments.inside {
        return match arguments.only.as_deref() {
            Some("under-attack") => under_attack::measure_inside(&arguments.attacks, arguments.services),
            _ => ipvs::measure_inside(arguments.services),
        };
    }
    if let Some(changes) = arguments.path {
        return nft_latency::path(changes);
    }
    if arguments.list {
        BENCHES.iter().for_each(|(name, what, _)| println!("{name:<24} {what}"));
        return Ok(());
    }
    let chosen: Vec<_> =
        BENCHES.iter().filter(|(name, ..)| arguments.only.as_deref().is_none_or(|only| only == *name)).collect();
    if chosen.is_empty() {
        let names: Vec<_> = BENCHES.iter().map(|(name, ..)| *name).collect();
        bail!("no bench is called {:?}; the benches are {}", arguments.only.unwrap_or_default(), names.join(", "));
    }
    let mut missed = Vec::new();
    for (name, _, bench) in chosen {
        let figures = bench(&arguments)?;
        publish(name, &figures, &arguments.out)?;
        missed.extend(figures.into_iter().filter(Figure::misses_goal).map(|figure| figure.name));
    }
    ensure!(missed.is_empty(), "{} goals are missed:\n{}", missed.len(), missed.join("\n"));
    Ok(())
}
