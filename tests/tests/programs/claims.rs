//! What the programs claim about all nodes, with real processes: TLS, sockets, threads, signals,
//! disks and nftables. The simulation (`simulation.rs`) has the many faults and orders of events.
//! This test shows that its fakes resemble the programs, and judges with the same functions.
//!
//! ```text
//!   control: API server 127.0.0.1, replicas 192.0.2.1 and 192.0.2.2, all endpoints in 10.128.0.0/9
//!      └── br0 ── node-a 192.0.2.11, node-b 192.0.2.12, node-c 192.0.2.13
//! ```

mod barriers;

use std::{
    collections::BTreeMap,
    io::{Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, TcpListener, TcpStream},
    process::{Child, Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use headgate_tests::{
    apiserver::{ApiServer, Kind},
    monitoring,
    simulate::source::{
        CLUSTER, Forwarding, GATE, LOCAL, NAMESPACE, NODES, Phase, Pod, Source, cluster_ip, service_name,
    },
    testbed::{
        Namespace, page,
        process::{Process, output, program},
    },
};
use nix::sys::signal::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::commands;

/// A guard against hanging. No test asserts on time.
const GUARD: Duration = Duration::from_secs(120);
const REPLICAS: [&str; 2] = ["192.0.2.1", "192.0.2.2"];

fn eventually(what: &str, mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
    let until = Instant::now() + GUARD;
    while !is_so().with_context(|| what.to_owned())? {
        ensure!(Instant::now() < until, "not seen in time: {what}");
        sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// A running program that prints an answer in JSON.
struct Asked(Child);

impl Asked {
    fn start(namespace: &Namespace, mut command: Command) -> Result<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        Ok(Self(namespace.spawn(command)?))
    }

    fn waits(&mut self) -> Result<bool> {
        Ok(self.0.try_wait()?.is_none())
    }

    fn answer(self) -> Result<Value> {
        let said = self.0.wait_with_output()?;
        let text = String::from_utf8_lossy(&said.stdout);
        Ok(serde_json::from_str(&text).unwrap_or_else(|_| text.trim().into()))
    }
}

/// Everything. The fields are dropped in order.
struct World {
    replicas: BTreeMap<usize, Process>,
    agents: BTreeMap<usize, Process>,
    stranger: Option<Process>,
    source: Source,
    api: ApiServer,
    nodes: Vec<Namespace>,
    control: Namespace,
    folder: TempDir,
}

impl World {
    fn start() -> Result<Self> {
        let control = Namespace::for_test("claims-control")?;
        control.ip_batch(
            "link set lo up\nlink add br0 type bridge\naddr add 192.0.2.1/24 dev br0\naddr add 192.0.2.2/24 dev br0\n\
             link set br0 up\nroute add local 10.128.0.0/9 dev lo\n",
        )?;
        let mut nodes = Vec::new();
        for (index, name) in NODES.iter().enumerate() {
            let node = Namespace::for_test(&format!("claims-{name}"))?;
            control.ip_batch(&format!(
                "link add {name} type veth peer name eth0 netns {}\nlink set {name} master br0 up\n",
                node.name()
            ))?;
            node.ip_batch(&format!(
                "link set lo up\naddr add 192.0.2.{}/24 dev eth0\nlink set eth0 up\nroute add default via 192.0.2.1\n",
                11 + index
            ))?;
            nodes.push(node);
        }
        let folder = tempfile::tempdir()?;
        let certs = folder.path().join("certs").display().to_string();
        let (addresses, names) = (REPLICAS.join(","), NODES.join(","));
        output(
            program("headgatectl")?.to_str().context("the path of headgatectl")?,
            &["certs", "--out", &certs, "--server-ip", &addresses, "--node", &names, "--reader", "me"],
        );
        let api = control.run(|| Ok(ApiServer::start()?))?;
        std::fs::write(folder.path().join("kubeconfig"), api.kubeconfig())?;
        answer_as_endpoints(&control)?;
        let source = Source::new(&api);
        let (replicas, agents, stranger) = Default::default();
        let mut world = Self { replicas, agents, stranger, source, api, nodes, control, folder };
        (0..REPLICAS.len()).try_for_each(|place| world.start_replica(place))?;
        (0..NODES.len()).try_for_each(|node| world.start_agent(node))?;
        world.source.stock(&world.api);
        Ok(world)
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    fn start_replica(&mut self, place: usize) -> Result<()> {
        let (name, address) = (format!("replica-{place}"), REPLICAS[place]);
        let peers = REPLICAS.map(|address| format!("{address}:7444")).join(",");
        let mut command = commands::replica(self.folder.path(), &name, address)?;
        command.args(["--source=kubernetes", "--drain-grace-ms=500", "--ready-everywhere"]);
        command.arg(format!("--kubeconfig={}", self.path("kubeconfig"))).arg(format!("--peers={peers}"));
        let process = Process::start(&name, &self.control, command, &self.folder.path().join(&name))?;
        self.replicas.insert(place, process);
        Ok(())
    }

    fn start_agent(&mut self, node: usize) -> Result<()> {
        let name = NODES[node];
        let mut command = commands::agent(self.folder.path(), name)?;
        command.args(["--drain-address=0.0.0.0:10261", "--state-save-period=200ms"]);
        command.args(REPLICAS.map(|address| format!("--control-plane=https://{address}:7443")));
        let process = Process::start(name, &self.nodes[node], command, &self.folder.path().join(name))?;
        self.agents.insert(node, process);
        Ok(())
    }

    /// Starts `headgatectl`, which asks the running replicas.
    fn headgatectl(&self, arguments: &[&str]) -> Result<Asked> {
        let servers = self.replicas.keys().map(|place| format!("https://{}:7444", REPLICAS[*place]));
        let mut command = Command::new(program("headgatectl")?);
        command.arg(format!("--server={}", servers.collect::<Vec<_>>().join(",")));
        for (option, file) in [("ca", "ca.crt"), ("cert", "readers/me.crt"), ("key", "readers/me.key")] {
            command.arg(format!("--tls-{option}={}", self.path(&format!("certs/{file}"))));
        }
        command.arg("--output=json").args(arguments);
        Asked::start(&self.control, command)
    }

    /// What a node's kernel forwards.
    fn read(&self, node: usize) -> Result<Forwarding> {
        of_nftables(&serde_json::from_str(&self.nodes[node].tool("nft", &["-j", "list", "table", "ip", "headgate"])?)?)
    }

    /// Whether a node forwards connections of the pod's Services to the pod.
    fn forwards(&self, node: usize, pod: &Pod) -> Result<bool> {
        let kernel = self.read(node)?;
        Ok(pod
            .services
            .iter()
            .any(|service| kernel.get(&cluster_ip(*service)).is_some_and(|found| found.contains(&pod.address))))
    }

    /// The ends of the logs of all programs.
    fn logs(&self) -> String {
        let logs = self.replicas.values().chain(self.agents.values()).map(Process::log_tail);
        logs.collect::<Vec<_>>().join("\n\n")
    }

    /// Waits until each row of an answer has a value, one for each node.
    fn until_all(&self, command: &str, field: &str, wanted: &str) -> Result<()> {
        eventually(&format!("all nodes are {wanted}"), || {
            let rows = self.headgatectl(&[command])?.answer()?;
            let rows = rows.as_array().cloned().unwrap_or_default();
            Ok(rows.len() == NODES.len() && rows.iter().all(|row| row[field] == wanted))
        })
    }

    /// Waits until all agents are up to date, and compares all nodes with the source.
    fn settle(&mut self) -> Result<()> {
        eventually("all nodes forward as the source says", || {
            let read = (0..NODES.len()).map(|node| self.read(node)).collect::<Result<Vec<_>>>();
            let Ok(kernels) = read else { return Ok(false) };
            let mut kernels = kernels.iter().enumerate();
            Ok(kernels.all(|(node, kernel)| self.source.compare(node, kernel, u64::MAX, |_| true).is_none()))
        })?;
        self.until_all("agents", "state", "up_to_date")?;
        self.source.settled();
        Ok(())
    }

    /// Takes a pod of a Service for a question, and changes it.
    fn take(&mut self, services: &[usize], phase: Phase) -> Pod {
        let pod = self.source.take(&self.api, 0, services);
        self.source.set(&self.api, pod, phase);
        self.source.pods[pod].clone()
    }

    /// Adds a pod for a question.
    fn add(&mut self, phase: Phase) -> (usize, Pod) {
        let pod = self.source.add(&self.api, 1, &[0], phase);
        self.source.hold(pod);
        (pod, self.source.pods[pod].clone())
    }

    /// Compares a claim about a pod with all kernels.
    fn judge(&self, claim: &str, pod: &Pod, is_wrong: impl Fn(bool, Option<bool>) -> bool) -> Result<()> {
        for node in 0..NODES.len() {
            let differences = self.source.differences(claim, pod, node, &self.read(node)?, &is_wrong);
            ensure!(differences.is_empty(), "{differences:?}");
        }
        Ok(())
    }

    fn wait(&self, pod: &Pod, more: &[&str]) -> Result<Asked> {
        let service = format!("{NAMESPACE}/{}", service_name(pod.services[0]));
        let address = pod.address.to_string();
        self.headgatectl(&[&["wait", &service, "--endpoint", &address, "--timeout=60s"][..], more].concat())
    }

    fn drain(&self, pod: &Pod) -> Result<Asked> {
        self.headgatectl(&["drain", &format!("{NAMESPACE}/{}", pod.name), "--timeout=60s", "--silent=60s"])
    }

    /// Does what replicas refuse and count: bytes that are no TLS, a question of a node, and an
    /// agent with the certificate of another node.
    fn make_mistakes(&mut self) -> Result<()> {
        let say = || Ok(TcpStream::connect((REPLICAS[0], 7443))?.write_all(b"GET / HTTP/1.0\r\n\r\n")?);
        self.control.run(say)?;
        // On a busy machine, the replica may not answer in time.
        let mut said = String::new();
        let is_refused = eventually("a node may not read", || {
            let mut command = Command::new(program("headgatectl")?);
            command.arg(format!("--server=https://{}:7444", REPLICAS[0]));
            for (option, file) in [("ca", "ca.crt"), ("cert", "nodes/node-a.crt"), ("key", "nodes/node-a.key")] {
                command.arg(format!("--tls-{option}={}", self.path(&format!("certs/{file}"))));
            }
            command.args(["--output=json", "agents"]).stdout(Stdio::piped()).stderr(Stdio::piped());
            let refused = self.control.spawn(command)?.wait_with_output()?;
            said = String::from_utf8_lossy(&refused.stderr).into_owned();
            ensure!(!refused.status.success(), "a node may read");
            Ok(said.contains("reader"))
        });
        is_refused.with_context(|| said.clone())?;
        for end in ["crt", "key"] {
            std::fs::copy(
                self.path(&format!("certs/nodes/node-a.{end}")),
                self.path(&format!("certs/nodes/node-x.{end}")),
            )?;
        }
        let mut command = commands::agent(self.folder.path(), "node-x")?;
        command.args(REPLICAS.map(|address| format!("--control-plane=https://{address}:7443")));
        self.stranger = Some(Process::start("node-x", &self.control, command, &self.folder.path().join("node-x"))?);
        Ok(())
    }

    /// The metrics of all replicas and agents.
    fn metrics(&self) -> Result<Vec<monitoring::Page>> {
        let read = |namespace: &Namespace, address: &str| namespace.run(|| Ok(page::get(address, "/metrics")?));
        let replicas = REPLICAS.iter().map(|address| {
            let instance = format!("{address}:7480");
            Ok(monitoring::Page { job: "headgate-control-plane", text: read(&self.control, &instance)?, instance })
        });
        let agents = self.nodes.iter().map(|node| {
            let text = page::of_agent(node, "/metrics")?;
            Ok(monitoring::Page { job: "headgate-node-agent", instance: node.name().to_owned(), text })
        });
        replicas.chain(agents).collect()
    }

    /// Connects to a Service, and checks who answers.
    fn check_with_packets(&self, node: usize, service: usize) -> Result<()> {
        let mut answer = String::new();
        self.nodes[node].run(|| {
            let address = IpAddr::V4(cluster_ip(service));
            let mut stream = TcpStream::connect_timeout(&(address, 80).into(), GUARD)?;
            stream.read_to_string(&mut answer)?;
            Ok(())
        })?;
        let endpoints = &self.read(node)?[&cluster_ip(service)];
        ensure!(endpoints.contains(&answer.parse()?), "{answer} answers on {}, not {endpoints:?}", NODES[node]);
        Ok(())
    }
}

/// Answers connections to all endpoints with the address of the endpoint.
fn answer_as_endpoints(control: &Namespace) -> Result<()> {
    let listener = control.run(|| Ok(TcpListener::bind((Ipv4Addr::UNSPECIFIED, 8080))?))?;
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let address = stream.local_addr().map(|address| address.ip().to_string()).unwrap_or_default();
            // The client may have gone.
            let _ = stream.write_all(address.as_bytes());
        }
    });
    Ok(())
}

/// Reads the maps `services` (address, protocol, port → timeout, selection, number of endpoints,
/// port, group) and `endpoints` (group, slot → address, port).
fn of_nftables(listing: &Value) -> Result<Forwarding> {
    let elements = |name: &str| -> Result<Vec<[&Value; 2]>> {
        let mut all = listing["nftables"].as_array().context("no list")?.iter();
        let map = all.find(|object| object["map"]["name"] == name).with_context(|| format!("no map {name}"))?;
        let elements = map["map"]["elem"].as_array().map(Vec::as_slice).unwrap_or_default();
        Ok(elements.iter().map(|element| [&element[0]["concat"], &element[1]["concat"]]).collect())
    };
    let address = |value: &Value| value.as_str().context("no address")?.parse::<Ipv4Addr>().context("an address");
    let mut slots = BTreeMap::new();
    for [key, endpoint] in elements("endpoints")? {
        slots.insert((key[0].as_u64(), key[1].as_u64()), address(&endpoint[0])?);
    }
    let mut forwarding = Forwarding::new();
    for [frontend, target] in elements("services")? {
        let endpoints = forwarding.entry(address(&frontend[0])?).or_default();
        for slot in 0..target[2].as_u64().context("no number of endpoints")? {
            let endpoint = slots.get(&(target[4].as_u64(), Some(slot)));
            endpoints.insert(*endpoint.with_context(|| format!("no slot {slot} of {target}"))?);
        }
    }
    Ok(forwarding)
}

/// Runs a test in a new world. If it fails, shows the logs of all programs.
fn in_a_world(test: impl FnOnce(&mut World) -> Result<()>) {
    let mut world = World::start().unwrap();
    if let Err(error) = test(&mut world) {
        panic!("{error:#}\n{}", world.logs());
    }
}

#[test]
fn what_the_programs_claim_is_true() {
    in_a_world(ask_all);
}

fn ask_all(world: &mut World) -> Result<()> {
    world.settle()?;

    let (pod, shown) = world.add(Phase::Ready);
    let done = world.wait(&shown, &[])?.answer()?;
    ensure!(done["done"] == true, "{done}");
    world.judge("wait: done", &shown, |is_found, _| !is_found)?;
    world.source.release(pod);

    // An agent is frozen while a pod stops.
    world.agents[&1].signal(Signal::SIGSTOP)?;
    let pod = world.take(&[1, LOCAL], Phase::Stopping);
    let mut drain = world.drain(&pod)?;
    eventually("the other nodes have the change", || Ok(!world.forwards(0, &pod)? && !world.forwards(2, &pod)?))?;
    ensure!(world.forwards(1, &pod)? && drain.waits()?, "the barrier did not wait for the frozen agent");
    world.agents[&1].signal(Signal::SIGCONT)?;
    let drained = drain.answer()?;
    ensure!(drained["result"] == "drained", "{drained}");
    world.judge("drain: drained", &pod, |is_found, _| is_found)?;

    // An agent is killed while a pod goes, and starts with what it has on disk.
    eventually("the agent has saved its state", || {
        Ok(world.folder.path().join(format!("state-{}/state", NODES[2])).exists())
    })?;
    world.agents.remove(&2).context("no agent")?.kill()?;
    let pod = world.take(&[1], Phase::Gone);
    let mut gone = world.wait(&pod, &["--gone"])?;
    eventually("the other nodes have the change", || Ok(!world.forwards(0, &pod)? && !world.forwards(1, &pod)?))?;
    ensure!(world.forwards(2, &pod)? && gone.waits()?, "the answer did not wait for the agent that is gone");
    world.start_agent(2)?;
    let gone = gone.answer()?;
    ensure!(gone["done"] == true, "{gone}");
    world.judge("wait --gone: done", &pod, |is_found, _| is_found)?;

    // A replica is killed while a pod asks its own node.
    world.replicas.remove(&0).context("no replica")?.kill()?;
    let pod = world.take(&[2], Phase::Stopping);
    eventually("a pod is drained at the replica that is left", || {
        let mut command = Command::new(program("headgate-drain")?);
        let query = format!("pod={NAMESPACE}/{}&timeout=20s&silent=20s&settle=0", pod.name);
        let said = Asked::start(&world.nodes[pod.node], {
            command.args(["127.0.0.1:10261", &query]);
            command
        })?;
        Ok(said.answer()?.as_str().is_some_and(|said| said.starts_with("drained")))
    })?;
    world.judge("the pod asks: drained", &pod, |is_found, _| is_found)?;

    // It returns, and a pod starts.
    world.start_replica(0)?;
    let (_, pod) = world.add(Phase::Gated);
    let mut condition = Value::Null;
    eventually("the condition of the gate is set", || {
        let object = world.api.get(Kind::Pod, NAMESPACE, &pod.name).context("the pod is gone")?;
        let conditions = object["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let is_set = |condition: &&Value| condition["type"] == GATE && condition["status"] == "True";
        condition = conditions.iter().find(is_set).cloned().unwrap_or_default();
        Ok(!condition.is_null())
    })?;
    if condition["reason"] == "Programmed" {
        world.judge("gate: Programmed", &pod, |is_found, _| !is_found)?;
    }
    world.settle()?;
    world.until_all("verify", "result", "verified")?;
    (0..CLUSTER).try_for_each(|service| world.check_with_packets(service, service))?;
    world.make_mistakes()?;
    let mut queries = monitoring::queries("dashboard.json")?;
    // No write to the kernel has failed. The times until everywhere have tests of their own in
    // `streams`: a replica that has just returned may be the one that records them.
    let left_out = ["headgate_agent_applies_failed_total", "headgate_fleet_programmed_everywhere_seconds"];
    let count = queries.len();
    queries.retain(|query| !left_out.iter().any(|name| query.contains(name)));
    ensure!(queries.len() + 3 == count, "{} of {count} queries are left", queries.len());
    world.source.trace(&world.api);
    let mut found = Ok(());
    let waited = eventually("the dashboard has values", || {
        found = monitoring::find_values(&world.metrics()?, &queries);
        Ok(found.is_ok())
    });
    found.and(waited)
}
