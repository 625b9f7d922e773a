//! The steps of the demo. Each step makes one change, checks the result, and fails if the result is
//! not the expected one.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use headgate_tests::testbed::manifests::{Manifests, Port, Service, Via, ready};
use headgate_tests::testbed::plan::{self, CONTROL, CONTROL_PORT, HTTP_PORT, NODES};
use headgate_tests::testbed::{AgentInfo, Backend, Family, Outcome, Request, Testbed, Transport};

use crate::interrupt::Interrupt;
use crate::keep;
use crate::screen::{Screen, shown};

/// The web Service.
pub(crate) const SERVICE: &str = "web";
/// The pod that sends requests to the Service.
pub(crate) const CLIENT: &str = "a3";
/// The machine that sends requests to node ports.
const OUTSIDE: &str = "outside-1";

/// The number of requests in a step. With six pods, the probability that a pod gets no request is
/// about 1 in 500 million.
const REQUESTS: usize = 120;
const START: [&str; 3] = ["a1", "b1", "c1"];
const SCALED_UP: [&str; 6] = ["a1", "a2", "b1", "b2", "c1", "c2"];
const SCALED_DOWN: [&str; 4] = ["a1", "b1", "b2", "c1"];
/// The pod that fails.
const VICTIM: &str = "b1";
/// How long the control plane is stopped.
const ABSENCE: Duration = Duration::from_secs(3);

/// Runs all steps. With `keep`, prints commands to try after the last step, and waits for an
/// interruption. This interruption counts as success.
pub(crate) fn tell(backend: Backend, keep: bool, screen: &Screen, interrupt: &Interrupt) -> Result<()> {
    screen.title(
        "Headgate: one control plane, three nodes, one web Service",
        "Each machine is a network namespace. Sockets, rules and programs are real.",
    );
    let began = Instant::now();
    let demo = Demo::start(backend, screen, interrupt).with_context(|| format!("step {}", screen.current_step()))?;
    let result = demo.steps().with_context(|| format!("step {}", screen.current_step()));
    if let Err(error) = result {
        if !interrupt.came() {
            demo.print_logs();
        }
        return Err(error);
    }
    screen.plain("");
    screen.note(&format!("All steps succeeded in {}.", shown(began.elapsed())));
    if keep {
        keep::print_commands(&demo.bed, screen)?;
        interrupt.wait();
    }
    Ok(())
}

struct Demo<'a> {
    bed: Testbed,
    screen: &'a Screen,
    interrupt: &'a Interrupt,
}

/// The number of answered requests of each pod.
type Spread = BTreeMap<String, usize>;

impl<'a> Demo<'a> {
    fn start(backend: Backend, screen: &'a Screen, interrupt: &'a Interrupt) -> Result<Self> {
        let address = plan::address(CONTROL).context("the plan has no address for the control plane")?.v4;
        screen.step("A cluster starts: control plane, node-a, node-b and node-c, eight pods");
        let began = Instant::now();
        let mut manifests = Manifests::default();
        let port = Port { name: "http", transport: Transport::Http, port: 80, target_port: HTTP_PORT };
        let mut service = Service::new(SERVICE, &START);
        service.ports = vec![port];
        manifests.add(service)?;
        let bed = Testbed::machines_only(backend, manifests)?;
        let demo = Self { bed, screen, interrupt };
        interrupt.check()?;
        screen.note(&format!("manifests: {}", demo.bed.machines().folder().join("manifests").display()));
        screen.note(&format!("control plane: http://{address}:{CONTROL_PORT}, without TLS, because this is a test"));
        let started = demo.start_programs();
        if let Err(error) = started {
            if !interrupt.came() {
                demo.print_logs();
            }
            return Err(error);
        }
        let agents = demo.bed.agents()?;
        ensure!(agents.len() == NODES.len(), "{} agents are connected instead of {}", agents.len(), NODES.len());
        screen.seen(&format!(
            "{} agents have programmed the Service with {backend}, {} after the start",
            agents.len(),
            shown(began.elapsed())
        ));
        Ok(demo)
    }

    fn start_programs(&self) -> Result<()> {
        self.bed.start_control_plane()?;
        for node in &NODES {
            self.interrupt.check()?;
            self.bed.start_agent(node.name)?;
        }
        self.bed.wait_programmed()
    }

    fn steps(&self) -> Result<()> {
        self.cluster_ip()?;
        self.node_port()?;
        self.scale("up", &SCALED_UP)?;
        self.scale("down", &SCALED_DOWN)?;
        self.pod_dies()?;
        self.control_plane_leaves()?;
        self.control_plane_returns()
    }

    fn cluster_ip(&self) -> Result<()> {
        let to = self.bed.address(SERVICE, Via::ClusterIp, Family::V4, "http")?;
        self.screen.step(&format!("Pod {CLIENT} sends requests to the ClusterIP, {}", url(to)));
        self.ask_cluster_ip(&START)?;
        let to = self.bed.address(SERVICE, Via::ClusterIp, Family::V6, "http")?;
        let spread = self.spread(CLIENT, Via::ClusterIp, Family::V6, REQUESTS)?;
        expect(&spread, &START)?;
        self.screen.seen(&format!("over IPv6, {}: {}", url(to), sentence(&spread)));
        Ok(())
    }

    fn node_port(&self) -> Result<()> {
        let port = self.bed.address(SERVICE, Via::NodePort("node-a"), Family::V4, "http")?.port();
        self.screen.step(&format!("A machine outside the cluster sends requests to the NodePort {port} of every node"));
        let mut total = Spread::new();
        for node in &NODES {
            let spread = self.spread(OUTSIDE, Via::NodePort(node.name), Family::V4, REQUESTS / NODES.len())?;
            for (pod, count) in spread {
                *total.entry(pod).or_default() += count;
            }
        }
        expect(&total, &START)?;
        self.draw(&total);
        self.screen.seen(&format!("{}, over all three nodes", sentence(&total)));
        Ok(())
    }

    fn scale(&self, direction: &str, pods: &[&'static str]) -> Result<()> {
        let before = self.bed.service(SERVICE)?.endpoints.iter().filter(|endpoint| endpoint.ready).count();
        self.screen.step(&format!("The Service is scaled {direction}, from {before} pods to {}", pods.len()));
        self.edit(|service| {
            service.endpoints = ready(pods);
            Ok(())
        })?;
        self.ask_cluster_ip(pods)
    }

    fn pod_dies(&self) -> Result<()> {
        self.screen.step(&format!("Pod {VICTIM} fails: its network goes down, and its endpoint becomes unready"));
        self.bed.machines().machine(VICTIM)?.ip_batch("link set eth0 down\n")?;
        self.edit(|service| {
            let endpoint = service.endpoints.iter_mut().find(|endpoint| endpoint.name == VICTIM);
            let endpoint = endpoint.with_context(|| format!("{VICTIM} is not an endpoint"))?;
            (endpoint.ready, endpoint.serving) = (false, false);
            Ok(())
        })?;
        self.ask_cluster_ip(&survivors())
    }

    fn control_plane_leaves(&self) -> Result<()> {
        self.screen.step("The control plane stops, and forwarding continues");
        self.bed.stop_control_plane()?;
        ensure!(self.bed.agents().is_err(), "the stopped control plane still answers");
        let began = Instant::now();
        let mut total = Spread::new();
        while began.elapsed() < ABSENCE {
            for (pod, count) in self.spread(CLIENT, Via::ClusterIp, Family::V4, 10)? {
                *total.entry(pod).or_default() += count;
            }
        }
        expect(&total, &survivors())?;
        self.draw(&total);
        self.screen.seen(&format!(
            "{}, in {} without a control plane; no request was lost",
            sentence(&total),
            shown(ABSENCE)
        ));
        Ok(())
    }

    fn control_plane_returns(&self) -> Result<()> {
        self.screen.step("The control plane starts again, and the agents resume");
        let began = Instant::now();
        self.bed.start_control_plane()?;
        self.bed.wait_programmed()?;
        let waited = began.elapsed();
        let agents = self.bed.agents()?;
        ensure!(agents.len() == NODES.len(), "{} agents are connected instead of {}", agents.len(), NODES.len());
        for agent in &agents {
            let AgentInfo { node, resume, resumed_resources, .. } = agent;
            self.screen.note(&format!("{node}: resumed with {resume}, {resumed_resources} resources sent"));
            ensure!(
                resume == "digests" && *resumed_resources == 0,
                "{node} resumed with {resume:?} and {resumed_resources} resources, expected digests and 0 resources"
            );
        }
        self.screen.seen(&format!("all agents are up to date after {}, and no resource was sent again", shown(waited)));
        self.scale("up again", &survivors_and_new())
    }

    /// Changes the manifests, waits until every node has programmed the change, and prints the
    /// time.
    fn edit(&self, change: impl FnOnce(&mut Service) -> Result<()>) -> Result<()> {
        self.interrupt.check()?;
        let began = Instant::now();
        self.bed.update(|manifests| change(manifests.service_mut(SERVICE)?))?;
        let waited = began.elapsed();
        self.screen.note(&format!("{} from the edit of the manifest until all nodes have the rules", shown(waited)));
        Ok(())
    }

    fn ask_cluster_ip(&self, pods: &[&str]) -> Result<()> {
        let spread = self.spread(CLIENT, Via::ClusterIp, Family::V4, REQUESTS)?;
        expect(&spread, pods)?;
        self.draw(&spread);
        self.screen.seen(&sentence(&spread));
        Ok(())
    }

    /// Sends `count` requests, and counts the answers of each pod.
    ///
    /// # Errors
    /// A request is not answered.
    fn spread(&self, from: &str, via: Via, family: Family, count: usize) -> Result<Spread> {
        let request = Request::new(Transport::Http, self.bed.address(SERVICE, via, family, "http")?);
        let mut spread = Spread::new();
        for number in 1..=count {
            self.interrupt.check()?;
            match self.bed.machines().ask(from, &request)? {
                Outcome::Answered(answer) => *spread.entry(answer.server).or_default() += 1,
                other => {
                    bail!("request {number} of {count} from {from} to {} was not answered: {other}", url(request.to))
                }
            }
        }
        Ok(spread)
    }

    fn draw(&self, spread: &Spread) {
        let largest = spread.values().copied().max().unwrap_or_default();
        for (pod, count) in spread {
            let node = NODES.iter().position(|node| node.pods.contains(&pod.as_str()));
            let label = format!("{pod} {}", node.map_or("?", |node| NODES[node].name));
            self.screen.bar(&label, node.unwrap_or_default(), *count, largest);
        }
    }

    /// Prints the ends of the programs' logs, to help to find the cause of a failure.
    fn print_logs(&self) {
        let Ok(entries) = std::fs::read_dir(self.bed.machines().folder()) else { return };
        let mut logs: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
        logs.retain(|path| path.extension().is_some_and(|extension| extension == "log"));
        logs.sort();
        for path in logs {
            let text = std::fs::read_to_string(&path).unwrap_or_default();
            let lines: Vec<&str> = text.lines().collect();
            eprintln!("--- the end of {}", path.file_name().unwrap_or_default().to_string_lossy());
            for line in &lines[lines.len().saturating_sub(12)..] {
                eprintln!("{line}");
            }
        }
    }
}

fn survivors() -> Vec<&'static str> {
    SCALED_DOWN.into_iter().filter(|pod| *pod != VICTIM).collect()
}

fn survivors_and_new() -> Vec<&'static str> {
    survivors().into_iter().chain(["a2"]).collect()
}

/// Checks that exactly these pods answered.
fn expect(spread: &Spread, pods: &[&str]) -> Result<()> {
    let mut expected = pods.to_vec();
    expected.sort_unstable();
    let found: Vec<&str> = spread.keys().map(String::as_str).collect();
    ensure!(found == expected, "the pods {found:?} answered, expected {expected:?}");
    Ok(())
}

/// The URL of a web server, without the default port.
pub(crate) fn url(to: SocketAddr) -> String {
    match to {
        SocketAddr::V4(v4) if v4.port() == 80 => format!("http://{}/", v4.ip()),
        SocketAddr::V6(v6) if v6.port() == 80 => format!("http://[{}]/", v6.ip()),
        other => format!("http://{other}/"),
    }
}

fn sentence(spread: &Spread) -> String {
    let requests: usize = spread.values().sum();
    format!("{requests} requests, {requests} answers, from {} pods", spread.len())
}
