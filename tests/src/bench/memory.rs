//! `agent-memory`: the memory of the agent's process, at rest and at its peak, without Services and
//! with 10,000 Services × 10 endpoints. The bench also measures the peak memory of the agent
//! together with the programs that the agent runs. The memory of these programs is compared with
//! the memory of `iptables-restore` alone, which loads all rules at once. The bench runs real
//! programs: a control plane with a folder of manifests, and an agent.

use std::{
    fmt::Write as _,
    fs,
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use headgate_core::{NodeFacts, State, explain::NodeSettings};
use headgate_node_agent::dataplane::NodeDataplane;
use headgate_oracle::{Comparison, compare};
use nix::sys::{
    resource::{UsageWho, getrusage},
    time::TimeValLike as _,
};

use super::{
    clock::{thread_cpu, wall_ms},
    report::Figure,
    workload,
};
use crate::testbed::{
    netns::Namespace,
    page,
    process::{Process, program},
};

const ENDPOINTS: u32 = 10;
const SERVICES_PER_FILE: u32 = 100;
const LONGEST_SYNC: Duration = Duration::from_secs(120);

/// Runs the bench in both variants.
///
/// # Errors
/// A program does not start, or the first sync does not end in time.
pub fn run(services: Option<u32>) -> Result<Vec<Figure>> {
    let services = services.unwrap_or(10_000);
    let mut figures = Vec::new();
    for variant in ["legacy", "nft"] {
        let empty = measure(Mode::Iptables(variant), 0, 0, Alone::No)?;
        let full = measure(Mode::Iptables(variant), services, ENDPOINTS, Alone::Too)?;
        let name = |what: &str| format!("agent-memory/{variant}/{what}/{services}x{ENDPOINTS}");
        let anchor = "an empty agent";
        figures.push(Figure::against(name("resident"), full.resident, "MB", anchor, empty.resident));
        figures.push(Figure::against(name("peak"), full.highest, "MB", anchor, empty.highest));
        figures.push(Figure::against(
            name("peak-with-programs"),
            full.with_programs,
            "MB",
            anchor,
            empty.with_programs,
        ));
        let alone = "iptables-restore alone, which loads all rules at once";
        figures.push(Figure::against(name("programs-peak"), full.programs, "MB", alone, full.program_alone));
    }
    Ok(figures)
}

/// Measurements of an agent. Memory is in megabytes of 1,000,000 bytes.
pub(super) struct Measured {
    /// The memory of the agent, five seconds after the first sync.
    pub(super) resident: f64,
    /// The peak memory of the agent.
    pub(super) highest: f64,
    /// The largest sampled memory of the agent and its children together.
    with_programs: f64,
    /// The largest sampled memory of the children during the whole measurement. The agent's first
    /// check of all rules may also start children.
    pub(super) programs: f64,
    /// The peak memory of `iptables-restore` alone, or 0 if it is not measured.
    program_alone: f64,
    /// The memory of an agent that restarts and finds its rules, five seconds after its first sync,
    /// and the peak memory of this agent; 0 in mode iptables.
    pub(super) restarted: [f64; 2],
}

/// The mode of the agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// iptables in a variant.
    Iptables(&'static str),
    /// nftables.
    Nftables,
    /// The proxy, on one processor.
    Userspace,
}

/// Whether `iptables-restore` alone is measured, too.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Alone {
    /// `iptables-restore` alone is not measured.
    No,
    /// `iptables-restore` alone is measured with the agent's rules.
    Too,
}

pub(super) fn measure(mode: Mode, services: u32, endpoints: u32, alone: Alone) -> Result<Measured> {
    let folder = tempfile::tempdir().context("creating a folder for manifests")?;
    let manifests = folder.path().join("manifests");
    fs::create_dir(&manifests)?;
    write_manifests(&manifests, services, endpoints)?;
    let namespace = Namespace::create(format!("hg{}-bench-memory", std::process::id()))?;
    namespace.ip_batch("link set lo up\n")?;
    let mut control_plane = Command::new(program("headgate-control-plane")?);
    control_plane.arg("--source").arg(format!("files:{}", manifests.display()));
    control_plane.args(["--listen", "127.0.0.1:7443", "--insecure-loopback", "--log", "warn"]);
    let control_plane =
        Process::start("control plane", &namespace, control_plane, &folder.path().join("control-plane.log"))?;
    let mut agent = start_agent(&namespace, folder.path(), mode)?;
    let mut measured = watch(&namespace, &mut agent, services, endpoints).and_then(|measured| {
        let program_alone = match (mode, alone) {
            (Mode::Iptables(variant), Alone::Too) => program_alone(variant, &namespace, &folder.path().join("rules"))?,
            _ => 0.0,
        };
        Ok(Measured { program_alone, ..measured })
    });
    if let (Ok(measured), Mode::Nftables) = (&mut measured, mode) {
        agent.terminate()?;
        agent = start_agent(&namespace, folder.path(), mode)?;
        let again = watch(&namespace, &mut agent, services, endpoints)?;
        measured.restarted = [again.resident, again.highest];
    }
    let log = agent.log_tail();
    agent.kill()?;
    control_plane.kill()?;
    measured.with_context(|| format!("the agent's log ends with:\n{log}"))
}

/// Starts an agent that follows the control plane on the loopback address of `namespace`.
///
/// # Errors
/// The agent does not start.
pub(super) fn start_agent(namespace: &Namespace, folder: &Path, mode: Mode) -> Result<Process> {
    let path = program("headgate-node-agent")?;
    let mut agent = if mode == Mode::Userspace { on_one_processor(&path) } else { Command::new(path) };
    agent.args(["--node-name", "node-000", "--control-plane", "http://127.0.0.1:7443", "--insecure-loopback"]);
    agent.args(["--cluster-cidr", "11.0.0.0/8", "--log", "warn"]);
    match mode {
        Mode::Iptables(variant) => agent.args(["--proxy-mode", "iptables", "--iptables-variant", variant]),
        Mode::Nftables => agent.args(["--proxy-mode", "nftables", "--nodeport-addresses", "0.0.0.0/0,::/0"]),
        Mode::Userspace => agent.args(["--proxy-mode", "userspace"]),
    };
    agent.arg("--state-dir").arg(folder.join("state"));
    Process::start("agent", namespace, agent, &folder.join("agent.log"))
}

/// A command that runs a program on the first processor.
pub(super) fn on_one_processor(program: &Path) -> Command {
    let mut command = Command::new("taskset");
    command.args(["-c", "0"]).arg(program);
    command
}

/// Samples memory until five seconds after the first sync.
fn watch(namespace: &Namespace, agent: &mut Process, services: u32, endpoints: u32) -> Result<Measured> {
    let started = Instant::now();
    let (mut with_programs, mut programs): (f64, f64) = (0.0, 0.0);
    let mut settled: Option<Instant> = None;
    loop {
        agent.check_running()?;
        let own = status_mb(agent.id(), "VmRSS")?;
        let children = children_mb(agent.id());
        with_programs = with_programs.max(own + children);
        programs = programs.max(children);
        if settled.is_none() && Page::of(namespace).is_some_and(|page| page.is_programmed(services, endpoints)) {
            settled = Some(Instant::now());
        }
        if settled.is_some_and(|at| at.elapsed() > Duration::from_secs(5)) {
            let highest = status_mb(agent.id(), "VmHWM")?;
            let with_programs = with_programs.max(highest);
            return Ok(Measured {
                resident: own,
                highest,
                with_programs,
                programs,
                program_alone: 0.0,
                restarted: [0.0; 2],
            });
        }
        if started.elapsed() > LONGEST_SYNC {
            bail!("{services} Services were not programmed within {} s", LONGEST_SYNC.as_secs());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Loads the rules of the namespace `full` into an empty namespace with `iptables-restore`, and
/// returns the program's peak memory in megabytes.
fn program_alone(variant: &str, full: &Namespace, rules: &Path) -> Result<f64> {
    let mut save = Command::new(format!("iptables-{variant}-save"));
    save.args(["-t", "nat"]).stdout(fs::File::create(rules)?);
    let saved = full.spawn(save)?.wait()?;
    if !saved.success() {
        bail!("iptables-{variant}-save: {saved}");
    }
    let empty = Namespace::create(format!("hg{}-bench-memory-alone", std::process::id()))?;
    let mut restore = Command::new(format!("iptables-{variant}-restore"));
    restore.args(["--noflush", "-w", "5"]).stdin(Stdio::from(fs::File::open(rules)?));
    let mut child = empty.spawn(restore)?;
    let mut highest: f64 = 0.0;
    let status = loop {
        // Reading the memory fails after the program has ended.
        highest = highest.max(status_mb(child.id(), "VmHWM").unwrap_or_default());
        if let Some(status) = child.try_wait()? {
            break status;
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    if !status.success() || highest == 0.0 {
        bail!("iptables-{variant}-restore alone: {status}, {highest} MB measured");
    }
    Ok(highest)
}

/// The agent's metrics page.
pub(super) struct Page(String);

impl Page {
    pub(super) fn of(namespace: &Namespace) -> Option<Self> {
        namespace.run(|| Ok(page::get("127.0.0.1:10249", "/metrics")?)).ok().map(Self)
    }

    /// The sum of a metric over its labels.
    pub(super) fn value(&self, name: &str) -> f64 {
        let lines = self.0.lines().filter(|line| line.starts_with(name));
        lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    }

    /// Whether the first sync of `services` Services is complete. The programmed version shows
    /// this, and the number of programmed rules, which mode nftables counts as written objects.
    pub(super) fn is_programmed(&self, services: u32, endpoints: u32) -> bool {
        let rules = f64::from(services) * f64::from(endpoints);
        self.value("headgate_agent_version_programmed") >= f64::from(services.min(1))
            && self.value("kubeproxy_sync_proxy_rules_iptables_total")
                + self.value("headgate_agent_objects_written_total")
                > rules
    }
}

/// What one verification of a kernel costs in this process: the time of the processor with the
/// programs that it runs, and the memory at its peak above the memory before.
///
/// # Errors
/// The kernel cannot be read, or the verification finds a difference.
pub(super) fn verification(
    name: &str,
    dataplane: &mut dyn NodeDataplane,
    (state, node): (&State, &NodeFacts),
    settings: &NodeSettings,
) -> Result<Vec<Figure>> {
    let own = std::process::id();
    fs::write("/proc/self/clear_refs", "5").context("resetting the peak of the memory")?;
    let before = status_mb(own, "VmRSS")?;
    let of_programs = || -> Result<f64> {
        let usage = getrusage(UsageWho::RUSAGE_CHILDREN)?;
        let used = usage.user_time() + usage.system_time();
        Ok(Duration::from_micros(u64::try_from(used.num_microseconds())?).as_secs_f64() * 1e3)
    };
    let programs_before = of_programs()?;
    // A thread of its own takes new memory, and not memory that the sync has released.
    let verify = || {
        let cpu = thread_cpu();
        let mut all = Comparison::default();
        for table in dataplane.decode()? {
            all.merge(compare(state, node, settings, table, &|_| true));
        }
        anyhow::Ok((thread_cpu().saturating_sub(cpu).as_secs_f64() * 1e3, all))
    };
    let (wall, verified) = wall_ms(|| std::thread::scope(|scope| scope.spawn(verify).join()));
    let (cpu, found) = verified.map_err(|_| anyhow::anyhow!("the verification has panicked"))??;
    ensure!(found.total == 0 && found.not_understood.is_empty(), "the verification found {found:?}");
    ensure!(found.frontends > 0, "the verification compared nothing");
    let programs = of_programs()? - programs_before;
    Ok(vec![
        Figure::against(format!("{name}/verification/cpu"), cpu + programs, "ms", "wall-clock time", wall),
        Figure::alone(format!("{name}/verification/cpu-of-programs"), programs, "ms"),
        Figure::alone(format!("{name}/verification/peak-above"), status_mb(own, "VmHWM")? - before, "MB"),
    ])
}

/// A memory field of `/proc/PID/status`, in megabytes of 1,000,000 bytes. The kernel prints KiB.
pub(super) fn status_mb(process: u32, field: &str) -> Result<f64> {
    let path = format!("/proc/{process}/status");
    let status = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    let kibibytes = line.and_then(|line| line.trim().split(' ').next()?.parse::<f64>().ok());
    Ok(kibibytes.with_context(|| format!("{path} has no {field}"))? * 1_024.0 / 1e6)
}

/// The resident memory of all children in megabytes. A child that has just ended counts as 0. So
/// does one that has not begun its program: until `execve(2)` it has the memory of its parent, and
/// takes none.
pub(super) fn children_mb(process: u32) -> f64 {
    let program = |id: u32| fs::read_link(format!("/proc/{id}/exe")).ok();
    let parent = program(process);
    let has_begun = |id: &u32| program(*id) != parent;
    let Ok(tasks) = fs::read_dir(format!("/proc/{process}/task")) else { return 0.0 };
    let lists = tasks.flatten().filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    let children: Vec<u32> =
        lists.flat_map(|list| list.split(' ').filter_map(|id| id.parse().ok()).collect::<Vec<_>>()).collect();
    children.into_iter().filter(has_begun).filter_map(|child| status_mb(child, "VmRSS").ok()).sum()
}

/// Writes the cluster as manifests for a control plane, with 100 Services in each file.
pub(super) fn write_manifests(folder: &Path, services: u32, endpoints: u32) -> Result<()> {
    // A control plane takes a folder without objects for one that is not mounted yet.
    fs::write(folder.join("none.yaml"), "apiVersion: v1\nkind: List\nitems: []\n")?;
    for first in (0..services).step_by(SERVICES_PER_FILE as usize) {
        let mut text = String::new();
        for service in first..services.min(first + SERVICES_PER_FILE) {
            let (key, ip) = (workload::key(service), workload::cluster_ip(service));
            // Writing to a String cannot fail.
            let _ = write!(
                text,
                "apiVersion: v1\nkind: Service\nmetadata: {{namespace: {0}, name: {1}}}\n\
                 spec: {{clusterIP: {ip}, clusterIPs: [{ip}], ports: [{{name: http, port: 80}}]}}\n---\n\
                 apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
                 metadata: {{namespace: {0}, name: {1}-a, labels: {{kubernetes.io/service-name: {1}}}}}\n\
                 addressType: IPv4\nports: [{{name: http, port: 8080}}]\nendpoints:\n",
                key.namespace, key.name
            );
            for number in 0..endpoints {
                let endpoint = workload::endpoint(service, number);
                let node = endpoint.placement.node.as_deref().unwrap_or_default();
                let _ = writeln!(text, "- {{addresses: [{}], nodeName: {node}}}", endpoint.address);
            }
            text.push_str("---\n");
        }
        fs::write(folder.join(format!("{first:05}.yaml")), text)?;
    }
    Ok(())
}
