//! `nft-full`, `nft-incremental` and `nft-burst`: the nftables dataplane on the real kernel, in a
//! namespace, for several sizes of the cluster. One size is compared with a ruleset of kube-proxy's
//! nftables shape in the same run: the size of the command line, or 1,000 Services.
//!
//! Each figure is a median. The two sides are measured alternately, so that other load affects both
//! equally.

use std::{ops::Range, time::Duration};

use anyhow::{Result, ensure};
use headgate_core::{Change, Conditions, Dirty, Endpoint, Family, NodeFacts, Service, State, explain::Mode};
use headgate_node_agent::dataplane::{
    FixedState, NodeDataplane as _,
    nftables::{NftablesDataplane, NftablesOptions},
};

use super::{
    clock::{thread_cpu, wall_ms},
    kube_proxy_nft_shape as shape,
    memory::verification,
    report::{Figure, median},
    workload,
};
use crate::testbed::netns::Namespace;

const ENDPOINTS: u32 = 10;
/// The sizes without a size on the command line.
const SIZES: [u32; 5] = [100, 1_000, 10_000, 25_000, 50_000];
/// The size that is compared with kube-proxy's shape, without a size on the command line. `nft`
/// needs some ten seconds for 10,000 Services.
const ANCHOR_SERVICES: u32 = 1_000;
const LOADS: usize = 3;
const CHANGES: u32 = 300;
const ANCHOR_CHANGES: u32 = 5;
/// The number of Services that change in one transaction.
const BURST: u32 = 1_000;
const BURSTS: u32 = 10;
/// The largest number of endpoints for which a new table has chains.
const LARGEST_SPARE_COUNT: u32 = 16;
/// The number of endpoints of a large Service.
const LARGE: u32 = 1_000;

/// The first sync, for all sizes × 10, and for 10,000 × 25.
///
/// # Errors
/// A namespace cannot be created, or a sync fails.
pub fn full(services: Option<u32>) -> Result<Vec<Figure>> {
    let sizes = sizes(services, &SIZES).into_iter().map(|services| (services, ENDPOINTS));
    let anchor_services = services.unwrap_or(ANCHOR_SERVICES);
    let mut figures = Vec::new();
    let mut per_endpoint = None;
    for (services, endpoints) in sizes.chain([(services.unwrap_or(10_000), 25)]) {
        let state = workload::state(services, endpoints);
        let (mut wall, mut cpu, mut anchor) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..LOADS {
            let (ms, cpu_ms, ..) = in_namespace(|| first_sync(&state))?;
            wall.push(ms);
            cpu.push(cpu_ms);
            if (services, endpoints) == (anchor_services, ENDPOINTS) {
                let script = shape::full(services, endpoints);
                anchor.push(in_namespace(|| {
                    let (ms, loaded) = wall_ms(|| shape::load(&script));
                    loaded.map(|()| ms)
                })?);
            }
        }
        let (name, wall, cpu) = (format!("nft-full/{services}x{endpoints}"), median(wall), median(cpu));
        figures.extend(in_namespace(|| {
            let (.., mut backend, node) = first_sync(&state)?;
            verification(&name, &mut backend, (&state, &node), &workload::settings(Mode::Nftables))
        })?);
        figures.push(if anchor.is_empty() {
            Figure::alone(&name, wall, "ms")
        } else {
            Figure::against(&name, wall, "ms", "a ruleset of kube-proxy's shape", median(anchor))
        });
        figures.push(Figure::against(format!("{name}/cpu"), cpu, "ms", "wall-clock time", wall));
        let us = cpu * 1e3 / f64::from(services * endpoints);
        let beside = *per_endpoint.get_or_insert(us);
        figures.push(Figure::against(format!("{name}/cpu-per-endpoint"), us, "µs", "the smallest size", beside));
    }
    Ok(figures)
}

/// One endpoint of a Service is added, removed, replaced or drained.
///
/// # Errors
/// A namespace cannot be created, or a step fails or writes more than the change needs.
pub fn incremental(services: Option<u32>) -> Result<Vec<Figure>> {
    let anchor_services = services.unwrap_or(ANCHOR_SERVICES);
    let anchor = in_namespace(|| anchor_changes(anchor_services))?;
    let mut figures = Vec::new();
    let mut smallest: Option<Vec<Timed>> = None;
    for services in sizes(services, &SIZES) {
        let measured = in_namespace(|| changes(services))?;
        let beside = smallest.get_or_insert_with(|| measured.clone());
        for (timed, beside) in measured.iter().zip(beside) {
            let name = |what: &str| format!("nft-incremental/{}/{what}/{services}x{ENDPOINTS}", timed.what);
            let smallest = "the smallest size";
            let (apply, before) = (timed.apply(50), beside.apply(50));
            figures.push(Figure::against(name("kernel-step-p50"), apply, "ms", smallest, before));
            figures.push(Figure::alone(name("kernel-step-p99"), timed.apply(99), "ms"));
            figures.push(Figure::against(name("plan-p50"), timed.plan(50), "ms", smallest, beside.plan(50)));
        }
        if services == anchor_services
            && let Some(added) = measured.first()
        {
            let name = |what: &str| format!("nft-incremental/{what}/{services}x{ENDPOINTS}");
            let (ours, Anchor { list_ms, load_ms }) = (added.plan(50) + added.apply(50), &anchor);
            let shape = "kube-proxy's shape: list and nft -f";
            figures.push(Figure::against(name("add-of-listed"), ours, "ms", shape, list_ms + load_ms));
            figures.push(Figure::against(name("add-of-unlisted"), ours, "ms", "the nft -f alone", *load_ms));
        }
    }
    Ok(figures)
}

/// 1,000 Services get an endpoint in one transaction.
///
/// # Errors
/// A namespace cannot be created, or a step fails.
pub fn burst(services: Option<u32>) -> Result<Vec<Figure>> {
    let anchor_services = services.unwrap_or(ANCHOR_SERVICES);
    let mut figures = Vec::new();
    for services in sizes(services, &SIZES[1..]) {
        let timed = in_namespace(|| bursts(services))?;
        let name = |what: &str| format!("nft-burst/{what}/{}-of-{services}x{ENDPOINTS}", BURST.min(services));
        let (plan, apply) = (timed.plan(50), timed.apply(50));
        let both = plan + apply;
        figures.push(if services == anchor_services {
            let anchor = in_namespace(|| anchor_burst(services))?;
            Figure::against(name("both"), both, "ms", "kube-proxy's shape: list and nft -f", anchor)
        } else {
            Figure::alone(name("both"), both, "ms")
        });
        figures.push(Figure::against(name("plan"), plan, "ms", "both", both));
        figures.push(Figure::against(name("kernel-step"), apply, "ms", "both", both));
    }
    Ok(figures)
}

fn sizes(services: Option<u32>, default: &[u32]) -> Vec<u32> {
    services.map_or_else(|| default.to_vec(), |services| vec![services])
}

fn in_namespace<T: Send>(work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let namespace = Namespace::create(format!("hg{}-bench-nftables", std::process::id()))?;
    namespace.run(work)
}

/// Creates the dataplane of the benches, for both families, as an agent does.
///
/// # Errors
/// The kernel lacks what the dataplane needs.
fn dataplane() -> Result<NftablesDataplane> {
    Ok(NftablesDataplane::new(&NftablesOptions {
        families: Family::BOTH.to_vec(),
        masquerade: workload::masquerade(),
        localhost_node_ports: false,
        conntrack_tcp_be_liberal: false,
        owns_tables: true,
        replies_to_ping: false,
        unused_features: Vec::new(),
        counts_services: false,
        has_proxy: false,
    })?)
}

/// Makes the first sync in an empty namespace. Returns the wall-clock time and the CPU time in
/// milliseconds, the dataplane and its node.
fn first_sync(state: &State) -> Result<(f64, f64, NftablesDataplane, NodeFacts)> {
    let (mut backend, node) = (dataplane()?, NodeFacts::named("node-000"));
    let cpu = thread_cpu();
    let (ms, report) = wall_ms(|| backend.sync_full(&FixedState(state, &node)));
    report?;
    Ok((ms, thread_cpu().saturating_sub(cpu).as_secs_f64() * 1e3, backend, node))
}

/// A programmed cluster.
pub(super) struct Programmed {
    backend: NftablesDataplane,
    state: State,
    node: NodeFacts,
}

impl Programmed {
    /// Programs the cluster into the namespace of the calling thread.
    ///
    /// # Errors
    /// The first sync fails.
    pub(super) fn new(state: State) -> Result<Self> {
        let (mut backend, node) = (dataplane()?, NodeFacts::named("node-000"));
        backend.sync_full(&FixedState(&state, &node))?;
        Ok(Self { backend, state, node })
    }

    /// Applies changes in one step. Returns the times of the plan and of the kernel step in
    /// milliseconds, and the number of written objects.
    ///
    /// # Errors
    /// The step fails.
    pub(super) fn step(&mut self, changes: impl IntoIterator<Item = Change>) -> Result<(f64, f64, u32)> {
        let mut dirty = Dirty::default();
        for change in changes {
            self.state.apply(change, &mut dirty);
        }
        let (plan_ms, ()) = wall_ms(|| self.backend.plan(&self.state, &self.node, &dirty));
        let (apply_ms, report) = wall_ms(|| self.backend.apply());
        Ok((plan_ms, apply_ms, report?.objects_written))
    }
}

/// The times of a kind of step in milliseconds.
#[derive(Debug, Clone)]
struct Timed {
    what: &'static str,
    plan: Vec<f64>,
    apply: Vec<f64>,
}

impl Timed {
    fn new(what: &'static str) -> Self {
        Self { what, plan: Vec::new(), apply: Vec::new() }
    }

    /// Measures a step with one change.
    fn step(&mut self, cluster: &mut Programmed, change: Change) -> Result<()> {
        let (plan_ms, apply_ms, _) = cluster.step([change])?;
        self.plan.push(plan_ms);
        self.apply.push(apply_ms);
        Ok(())
    }

    fn plan(&self, percent: usize) -> f64 {
        percentile(&self.plan, percent)
    }

    fn apply(&self, percent: usize) -> f64 {
        percentile(&self.apply, percent)
    }
}

/// The value below which `percent` of the values lie; 0 without values.
pub(super) fn percentile(values: &[f64], percent: usize) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values.get(values.len() * percent / 100).copied().unwrap_or_default()
}

fn added(service: u32, number: u32) -> Change {
    Change::Endpoint(workload::key(service), workload::endpoint(service, number))
}

fn removed(service: u32, number: u32) -> Change {
    Change::RemoveEndpoint(workload::key(service), workload::endpoint_ip(service, number))
}

fn draining(service: u32, number: u32) -> Change {
    let endpoint = workload::endpoint(service, number);
    let conditions = Conditions { ready: false, serving: true, terminating: true };
    Change::Endpoint(workload::key(service), Endpoint { conditions, ..endpoint })
}

/// The objects that the change of one endpoint of a ClusterIP writes and deletes at most. Two slots
/// are deleted and added, and so is the target of the frontend.
const MAX_WRITTEN: u32 = 6;

fn changes(services: u32) -> Result<Vec<Timed>> {
    let mut cluster = Programmed::new(workload::state(services, ENDPOINTS))?;
    // The first steps add the chains for 9 and 11 endpoints, and later steps find these chains.
    for change in [added(0, ENDPOINTS), removed(0, ENDPOINTS), removed(0, 0), added(0, 0)] {
        cluster.step([change])?;
    }
    let [mut add, mut remove, mut replace, mut drain] = ["add", "remove", "replace", "drain"].map(Timed::new);
    for i in 0..CHANGES {
        // A prime step spreads the changes over the cluster.
        let service = (i * 7_919) % services;
        let mut step = |timed: &mut Timed, changes: &[Change]| -> Result<()> {
            let (plan_ms, apply_ms, written) = cluster.step(changes.iter().cloned())?;
            ensure!((1..=MAX_WRITTEN).contains(&written), "{}: {written} objects were written", timed.what);
            timed.plan.push(plan_ms);
            timed.apply.push(apply_ms);
            Ok(())
        };
        step(&mut add, &[added(service, ENDPOINTS)])?;
        step(&mut remove, &[removed(service, ENDPOINTS)])?;
        step(&mut replace, &[removed(service, 0), added(service, ENDPOINTS)])?;
        cluster.step([removed(service, ENDPOINTS), added(service, 0)])?;
        drain.step(&mut cluster, draining(service, 0))?;
        cluster.step([added(service, 0)])?;
    }
    cluster.step([workload::service(services).into()])?;
    let mut growing = |what: &'static str, numbers: Range<u32>| {
        let mut timed = Timed::new(what);
        for number in numbers {
            timed.step(&mut cluster, added(services, number))?;
        }
        Ok::<_, anyhow::Error>(timed)
    };
    // A new table has chains for the smaller numbers of endpoints. Each larger number needs a new
    // chain.
    let spare_count = growing("spare-count", 0..LARGEST_SPARE_COUNT)?;
    let new_count = growing("new-count", LARGEST_SPARE_COUNT..LARGEST_SPARE_COUNT + 30)?;
    let mut all = vec![add, remove, replace, drain, spare_count, new_count];
    for (what, endpoints, load_balancing) in
        [("large", LARGE, ""), ("hashed", ENDPOINTS, "consistent-hash"), ("hashed-100", 100, "consistent-hash")]
    {
        all.push(one_service(&mut cluster, services + 1, what, endpoints, load_balancing)?);
    }
    Ok(all)
}

/// An endpoint of another Service is added and removed again. The first two changes add chains and
/// are not measured.
fn one_service(
    cluster: &mut Programmed,
    number: u32,
    what: &'static str,
    endpoints: u32,
    load_balancing: &str,
) -> Result<Timed> {
    let service = Service { load_balancing: load_balancing.into(), ..workload::service(number) };
    cluster.step([Change::from(service)].into_iter().chain((0..endpoints).map(|endpoint| added(number, endpoint))))?;
    let mut timed = Timed::new(what);
    cluster.step([added(number, endpoints)])?;
    cluster.step([removed(number, endpoints)])?;
    for _ in 0..CHANGES / 6 {
        timed.step(cluster, added(number, endpoints))?;
        timed.step(cluster, removed(number, endpoints))?;
    }
    cluster.step([Change::RemoveService(workload::key(number))])?;
    Ok(timed)
}

fn bursts(services: u32) -> Result<Timed> {
    let mut cluster = Programmed::new(workload::state(services, ENDPOINTS))?;
    let mut timed = Timed::new("burst");
    let changed = BURST.min(services);
    cluster.step([added(0, ENDPOINTS)])?;
    cluster.step([removed(0, ENDPOINTS)])?;
    for _ in 0..BURSTS {
        for change in [added, removed] {
            let (plan_ms, apply_ms, written) = cluster.step((0..changed).map(|service| change(service, ENDPOINTS)))?;
            ensure!(written >= changed, "{changed} Services changed, but only {written} objects were written");
            timed.plan.push(plan_ms);
            timed.apply.push(apply_ms);
            // The kernel frees removed elements later, in the background.
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    Ok(timed)
}

/// The times of a change in kube-proxy's shape.
struct Anchor {
    list_ms: f64,
    load_ms: f64,
}

fn anchor_changes(services: u32) -> Result<Anchor> {
    shape::load(&shape::full(services, ENDPOINTS))?;
    let (mut lists, mut loads) = (Vec::new(), Vec::new());
    for i in 0..ANCHOR_CHANGES {
        let script = shape::change([(services / 2 + i) % services], ENDPOINTS + 1);
        let (ms, listed) = wall_ms(shape::list);
        listed?;
        lists.push(ms);
        let (ms, loaded) = wall_ms(|| shape::load(&script));
        loaded?;
        loads.push(ms);
    }
    Ok(Anchor { list_ms: median(lists), load_ms: median(loads) })
}

fn anchor_burst(services: u32) -> Result<f64> {
    shape::load(&shape::full(services, ENDPOINTS))?;
    let script = shape::change(0..BURST.min(services), ENDPOINTS + 1);
    let (ms, loaded) = wall_ms(|| {
        shape::list()?;
        shape::load(&script)
    });
    loaded.map(|()| ms)
}
