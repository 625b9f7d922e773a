//! `iptables-full` and `iptables-incremental`: the real backend on the real kernel, in a namespace, beside a ruleset of kube-proxy's shape.

use std::{
    io::Write as _,
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail};
use headgate_core::{
    Change, Dirty, State,
    masquerade::{LocalDetector, MasqueradeConfig},
    view::NodeFacts,
};
use headgate_node_agent::backend::{
    Backend as _,
    iptables::{Config, IptablesBackend, Variant},
};

use super::{
    clock::wall_ms,
    kube_proxy_shape,
    report::{Figure, median},
    workload,
};
use crate::testbed::netns::Namespace;

const ENDPOINTS: u32 = 10;
const CHANGES: u32 = 9;

/// How many services each variant is measured with. The nft variant takes kube-proxy's shape in quadratic time (10,000 services do not load within
/// 600 s), so both are compared at a size that it can load.
fn sizes(variant: Variant, services: Option<u32>) -> u32 {
    services.unwrap_or(if variant == Variant::Nft { 1_000 } else { 10_000 })
}

/// Which of the two benches to report; both come from one run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bench {
    /// The first sync.
    Full,
    /// One endpoint changes.
    Incremental,
}

/// Runs a bench in both variants.
///
/// # Errors
/// When a namespace cannot be made, or a program fails.
pub fn run(bench: Bench, services: Option<u32>) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for variant in [Variant::Legacy, Variant::Nft] {
        let services = sizes(variant, services);
        let ours = in_namespace("ours", |_| ours(variant, services))?;
        let anchor = in_namespace("anchor", |_| anchor(variant, services))?;
        let label = if variant == Variant::Legacy { "legacy" } else { "nft" };
        let (name, value, beside) = match bench {
            Bench::Full => ("iptables-full", ours.full_ms, anchor.full_ms),
            Bench::Incremental => ("iptables-incremental", ours.change_ms, anchor.change_ms),
        };
        let name = format!("{name}/{label}/{services}x{ENDPOINTS}");
        figures.push(Figure::against(name, value, "ms", "a ruleset of kube-proxy's shape", beside));
    }
    Ok(figures)
}

struct Timings {
    full_ms: f64,
    change_ms: f64,
}

fn in_namespace(name: &str, work: impl FnOnce(&Namespace) -> Result<Timings> + Send) -> Result<Timings> {
    let namespace = Namespace::create(format!("hg{}-bench-{name}", std::process::id()))?;
    namespace.run(|| work(&namespace))
}

fn ours(variant: Variant, services: u32) -> Result<Timings> {
    let detector = LocalDetector::Cidr("11.0.0.0/8".parse().context("cluster CIDR")?);
    let masquerade = MasqueradeConfig { detector_v4: Some(detector), ..MasqueradeConfig::default() };
    let config = Config { variant, masquerade, ..Config::default() };
    let mut backend = IptablesBackend::new(config)?;
    let node = NodeFacts::named("node-000");
    let mut state = workload::state(services, ENDPOINTS);
    let (full_ms, report) = wall_ms(|| backend.sync_full(&state, &node));
    report?;
    let mut times = Vec::new();
    for i in 0..CHANGES {
        let (ms, result) = wall_ms(|| one_change(&mut backend, &mut state, &node, services, i));
        result?;
        times.push(ms);
    }
    Ok(Timings { full_ms, change_ms: median(times) })
}

/// One endpoint comes to a service in the middle.
fn one_change(backend: &mut IptablesBackend, state: &mut State, node: &NodeFacts, services: u32, i: u32) -> Result<()> {
    let service = services / 2 + i;
    let mut dirty = Dirty::default();
    let added = workload::endpoint(service, ENDPOINTS);
    state.apply(Change::Endpoint(workload::key(service), added), &mut dirty);
    let plan = backend.plan(state, node, &dirty);
    let report = backend.apply(plan)?;
    if report.services_planned != 1 || report.objects_written != 2 {
        bail!("one endpoint changed, and {report:?}");
    }
    Ok(())
}

fn anchor(variant: Variant, services: u32) -> Result<Timings> {
    let full = kube_proxy_shape::full(services, ENDPOINTS);
    let (full_ms, loaded) = wall_ms(|| restore(variant, &full));
    loaded?;
    restore(variant, kube_proxy_shape::JUMPS)?;
    let mut times = Vec::new();
    for i in 0..CHANGES {
        let partial = kube_proxy_shape::partial(services, ENDPOINTS + 1, services / 2 + i);
        let (ms, loaded) = wall_ms(|| restore(variant, &partial));
        loaded?;
        times.push(ms);
    }
    Ok(Timings { full_ms, change_ms: median(times) })
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
