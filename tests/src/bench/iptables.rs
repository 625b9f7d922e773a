//! `iptables-full` and `iptables-incremental`: the real dataplane on the real kernel, in a
//! namespace. The bench compares the dataplane with a ruleset of kube-proxy's shape, and with a
//! minimal ruleset for the Services alone. A change is also compared with the smallest possible
//! change while Headgate's rules are in the kernel. The smallest possible change adds one rule to a
//! chain that no rule jumps to.

use std::{
    io::Write as _,
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail};
use headgate_core::{Change, Dirty, NodeFacts, State, explain::Mode};
use headgate_node_agent::dataplane::{
    FixedState, NodeDataplane as _,
    iptables::{IptablesDataplane, IptablesOptions, Variant},
};

use super::{
    clock::wall_ms,
    kube_proxy_shape,
    memory::verification,
    report::{Figure, median},
    two_level_shape, workload,
};
use crate::testbed::netns::Namespace;

const ENDPOINTS: u32 = 10;
const CHANGES: u32 = 9;

/// The largest number of Services in kube-proxy's shape in the nft variant. Loading takes quadratic
/// time: 10,000 Services do not load within 600 s. Clusters with more Services than this number are
/// measured without this anchor.
const NFT_ANCHOR_MAX_SERVICES: u32 = 1_000;

fn sizes(variant: Variant, services: Option<u32>) -> Vec<u32> {
    match (services, variant) {
        (Some(services), _) => vec![services],
        (None, Variant::Nft) => vec![NFT_ANCHOR_MAX_SERVICES, 10_000],
        (None, _) => vec![10_000],
    }
}

/// The smallest possible change. In the nft variant, a transaction that adds a rule with a target
/// makes the kernel walk all rules that packets can reach from base chains. The legacy variant
/// reads and writes the whole table.
const LEAST_CHANGE: &str = "*nat\n:BENCH-LEAST - [0:0]\n-A BENCH-LEAST -j RETURN\nCOMMIT\n";

/// The bench to report. Each run measures the first sync and the change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bench {
    /// The first sync.
    Full,
    /// The change of one endpoint.
    Incremental,
}

/// Runs a bench in both variants.
///
/// # Errors
/// A namespace cannot be created, or a program fails.
pub fn run(bench: Bench, services: Option<u32>) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for variant in [Variant::Legacy, Variant::Nft] {
        for services in sizes(variant, services) {
            figures.extend(measured(bench, variant, services)?);
        }
    }
    Ok(figures)
}

fn measured(bench: Bench, variant: Variant, services: u32) -> Result<Vec<Figure>> {
    let pick = |timings: &Timings| match bench {
        Bench::Full => timings.full_ms,
        Bench::Incremental => timings.change_ms,
    };
    let what = if bench == Bench::Full { "iptables-full" } else { "iptables-incremental" };
    let label = if variant == Variant::Legacy { "legacy" } else { "nft" };
    let name = |what: &str| format!("{what}/{label}/{services}x{ENDPOINTS}");
    let (ours, least_ms, verified) = in_namespace("ours", |_| ours(&name(what), variant, services))?;
    let mut figures = if bench == Bench::Full { verified } else { Vec::new() };
    if variant == Variant::Nft && services > NFT_ANCHOR_MAX_SERVICES {
        figures.push(Figure::alone(name(what), pick(&ours), "ms"));
    } else {
        let beside = in_namespace("anchor", |_| anchor(variant, services))?;
        figures.push(Figure::against(name(what), pick(&ours), "ms", "a ruleset of kube-proxy's shape", pick(&beside)));
    }
    let by_hand = in_namespace("by-hand", |_| by_hand(variant, services))?;
    let (figure, shape) = (name(&format!("{what}/of-two-level")), "the Services alone, by hand, on two levels");
    figures.push(Figure::against(figure, pick(&ours), "ms", shape, pick(&by_hand)));
    if bench == Bench::Incremental {
        let anchor = "one rule in a chain that no rule jumps to, by hand";
        figures.push(Figure::against(name("iptables-incremental/of-least"), ours.change_ms, "ms", anchor, least_ms));
    }
    Ok(figures)
}

struct Timings {
    full_ms: f64,
    change_ms: f64,
}

fn in_namespace<T: Send>(name: &str, work: impl FnOnce(&Namespace) -> Result<T> + Send) -> Result<T> {
    let namespace = Namespace::create(format!("hg{}-bench-{name}", std::process::id()))?;
    namespace.run(|| work(&namespace))
}

/// Headgate's timings, the time of the smallest possible change in milliseconds, and what a
/// verification costs after the first sync.
fn ours(name: &str, variant: Variant, services: u32) -> Result<(Timings, f64, Vec<Figure>)> {
    let config = IptablesOptions { variant, masquerade: workload::masquerade(), ..IptablesOptions::default() };
    let mut backend = IptablesDataplane::new(config)?;
    let node = NodeFacts::named("node-000");
    let mut state = workload::state(services, ENDPOINTS);
    let (full_ms, report) = wall_ms(|| backend.sync_full(&FixedState(&state, &node)));
    report?;
    let verified = verification(name, &mut backend, (&state, &node), &workload::settings(Mode::Iptables))?;
    let (mut times, mut least) = (Vec::new(), Vec::new());
    for i in 0..CHANGES {
        let (ms, result) = wall_ms(|| one_change(&mut backend, &mut state, &node, services, i));
        result?;
        times.push(ms);
        // The two changes are measured alternately, so that other load affects both equally.
        let (ms, result) = wall_ms(|| restore(variant, LEAST_CHANGE));
        result?;
        least.push(ms);
    }
    Ok((Timings { full_ms, change_ms: median(times) }, median(least), verified))
}

/// Adds one endpoint to a Service in the middle of the list.
fn one_change(
    backend: &mut IptablesDataplane,
    state: &mut State,
    node: &NodeFacts,
    services: u32,
    i: u32,
) -> Result<()> {
    let service = services / 2 + i;
    let mut dirty = Dirty::default();
    let added = workload::endpoint(service, ENDPOINTS);
    state.apply(Change::Endpoint(workload::key(service), added), &mut dirty);
    backend.plan(state, node, &dirty);
    let report = backend.apply()?;
    if report.services_planned != 1 || !(1..=2).contains(&report.objects_written) {
        bail!("one endpoint changed, but the report is {report:?}");
    }
    Ok(())
}

fn anchor(variant: Variant, services: u32) -> Result<Timings> {
    let full = kube_proxy_shape::full(services, ENDPOINTS);
    let (full_ms, loaded) = wall_ms(|| restore(variant, &full));
    loaded?;
    restore(variant, kube_proxy_shape::JUMPS)?;
    let change_ms = changes(variant, services, |service| kube_proxy_shape::partial(services, ENDPOINTS + 1, service))?;
    Ok(Timings { full_ms, change_ms })
}

fn by_hand(variant: Variant, services: u32) -> Result<Timings> {
    let full = two_level_shape::full(services, ENDPOINTS);
    let (full_ms, loaded) = wall_ms(|| restore(variant, &full));
    loaded?;
    let change_ms = changes(variant, services, |service| two_level_shape::change(service, ENDPOINTS + 1))?;
    Ok(Timings { full_ms, change_ms })
}

/// The median time of several scripts. Each script changes one Service in the middle of the list.
fn changes(variant: Variant, services: u32, script: impl Fn(u32) -> String) -> Result<f64> {
    let mut times = Vec::new();
    for i in 0..CHANGES {
        let script = script(services / 2 + i);
        let (ms, loaded) = wall_ms(|| restore(variant, &script));
        loaded?;
        times.push(ms);
    }
    Ok(median(times))
}

fn restore(variant: Variant, script: &str) -> Result<()> {
    let program = if variant == Variant::Legacy { "iptables-legacy-restore" } else { "iptables-nft-restore" };
    let mut child = Command::new(program)
        .args(["--noflush", "--counters", "-w", "5"])
        .stdin(Stdio::piped())
        .spawn()
        .with_context(|| format!("starting {program} (package iptables; `make setup` installs it)"))?;
    child.stdin.take().context("no pipe")?.write_all(script.as_bytes())?;
    let status = child.wait()?;
    if !status.success() {
        bail!("{program}: {status}");
    }
    Ok(())
}
