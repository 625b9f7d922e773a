//! `userspace`: connections through the agent's proxy and through HAProxy in TCP mode with splice,
//! one thread each, behind the same rules.
//!
//! `userspace-idle`: the memory of both for idle connections.
//!
//! The agent programs its rules and carries connections. Then the bench kills the agent, keeps the
//! gate of its rules closed by hand, and HAProxy listens at the addresses of the agent's listeners.
//! The proxy has one processor. The client and the server share another processor.

pub mod datagrams;
mod load;

use std::{
    fs,
    io::Read as _,
    net::{SocketAddr, TcpStream},
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};

use self::load::{ECHO, KEEP, ONCE, SOURCE, Work, open};
use super::{
    memory::{self, Mode, Page, status_mb},
    report::{Figure, median},
    workload,
};
use crate::testbed::{
    netns::Namespace,
    process::{Process, program},
};

/// The listeners of the agent for addresses of Services, as in `docs/userspace.md`.
const LISTENERS: [&str; 2] = ["169.254.77.1:10245", "169.254.77.1:10246"];
const ENDPOINTS: u32 = 4;
/// More connections than the bench `userspace` opens at a time.
const CONNECTIONS: usize = 100;
const IDLE_CONNECTIONS: usize = 10_000;
/// The most memory of the agent for an idle connection.
const IDLE_GOAL_BYTES: f64 = 3_000.0;
const ROUNDS: usize = 5;
const ROUND_TRIPS: usize = 40_000;
const MEASURED: Duration = Duration::from_secs(4);
/// The proxies reach the state in which they are measured within this time.
const LONGEST_START: Duration = Duration::from_secs(30);
/// A closed connection and a closed gate take effect within this time.
const SETTLE: Duration = Duration::from_millis(500);

/// The names of figures, and their units. Less is better.
type Names = [(&'static str, &'static str)];

/// Runs the bench. The figures are medians of five rounds, in which the proxies take turns.
///
/// # Errors
/// HAProxy is not installed, a program does not start, or a connection fails.
pub fn run() -> Result<Vec<Figure>> {
    let names = [
        ("userspace/cpu-per-gigabyte", "ms"),
        ("userspace/cpu-per-connection", "µs"),
        ("userspace/round-trip-p50", "µs"),
        ("userspace/round-trip-p99", "µs"),
    ];
    // Each proxy carries a few connections at a time.
    let bench = Bench::new(CONNECTIONS)?;
    let target = bench.target;
    bench.compare(&names, move |proxy| {
        let mut times = round_trips(target)?;
        times.sort_by(f64::total_cmp);
        let bytes = load::run(proxy, 4, MEASURED, &|work| receive(target, work))?;
        let connections = load::run(proxy, 8, MEASURED, &|work| connect(target, work))?;
        Ok(vec![
            bytes.cpu_seconds * 1e3 / (bytes.count / 1e9),
            connections.cpu_seconds * 1e6 / connections.count,
            times[times.len() / 2],
            times[times.len() * 99 / 100],
        ])
    })
}

/// Runs the bench `userspace-idle`: the memory of the proxies for 10,000 idle connections, or for
/// as many as the limit of open files allows.
///
/// # Errors
/// As [`run`], or the agent needs more memory than the goal.
pub fn idle() -> Result<Vec<Figure>> {
    let bench = Bench::new(IDLE_CONNECTIONS)?;
    let (target, count) = (bench.target, bench.connections);
    let names = [("userspace-idle/memory-per-connection", "bytes")];
    let mut figures = bench.compare(&names, move |proxy| Ok(vec![memory_of_idle(proxy, target, count)?]))?;
    let used = figures[0].value;
    ensure!(used <= IDLE_GOAL_BYTES, "an idle connection needs {used} bytes, the goal is {IDLE_GOAL_BYTES}");
    figures.push(Figure::alone("userspace-idle/connections", count as f64, ""));
    Ok(figures)
}

/// The namespace, with a control plane and a server.
struct Bench {
    folder: tempfile::TempDir,
    namespace: Namespace,
    /// The Service's address.
    target: SocketAddr,
    /// How many connections the programs can carry at a time.
    connections: usize,
    _control_plane: Process,
}

impl Bench {
    /// Starts a control plane and a server for a number of connections.
    fn new(connections: usize) -> Result<Self> {
        let connections = load::raise_open_files(connections)?;
        let folder = tempfile::tempdir().context("creating a folder")?;
        let manifests = folder.path().join("manifests");
        fs::create_dir(&manifests)?;
        memory::write_manifests(&manifests, 1, ENDPOINTS)?;
        let namespace = Namespace::create(format!("hg{}-bench-userspace", std::process::id()))?;
        // Clients need an address. It is none of an endpoint, because the proxy does not connect to
        // addresses of interfaces.
        let mut commands =
            String::from("link set lo up\naddr add 192.0.2.1/32 dev lo\nroute add 10.96.0.0/12 dev lo src 192.0.2.1\n");
        for endpoint in 0..ENDPOINTS {
            commands.push_str(&format!("route add local {}/32 dev lo\n", workload::endpoint_ip(0, endpoint)));
        }
        namespace.ip_batch(&commands)?;
        // Closed connections stay for a minute. So the client needs many ports.
        namespace.set_sysctls(&[("ipv4/ip_local_port_range", "12000 65535")])?;
        namespace.run(load::serve)?;
        let mut control_plane = Command::new(program("headgate-control-plane")?);
        control_plane.arg("--source").arg(format!("files:{}", manifests.display()));
        control_plane.args(["--listen", "127.0.0.1:7443", "--insecure-loopback", "--log", "warn"]);
        let log = folder.path().join("control-plane.log");
        let control_plane = Process::start("control plane", &namespace, control_plane, &log)?;
        let target = SocketAddr::new(workload::cluster_ip(0), 80);
        Ok(Self { folder, namespace, target, connections, _control_plane: control_plane })
    }

    /// Adds objects to the manifests of the control plane.
    fn add_manifest(&self, text: &str) -> Result<()> {
        Ok(fs::write(self.folder.path().join("manifests/more.yaml"), text)?)
    }

    /// Starts an agent, and waits until it has programmed its rules.
    fn start_agent(&self) -> Result<Process> {
        let mut agent = memory::start_agent(&self.namespace, self.folder.path(), Mode::Userspace)?;
        let started = Instant::now();
        // An agent that finds the rules of the last one writes nothing.
        let is_programmed = |page: Page| page.value("headgate_agent_version_programmed") >= 1.0;
        while !Page::of(&self.namespace).is_some_and(is_programmed) {
            agent.check_running()?;
            ensure!(started.elapsed() < LONGEST_START, "the agent did not program its rules in time");
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(agent)
    }

    /// The value of a metric of the agent.
    fn agent_counter(&self, name: &str) -> Result<f64> {
        Ok(Page::of(&self.namespace).context("the agent serves no metrics")?.value(name))
    }

    /// Measures both proxies in several rounds. `measure` gets the process of a proxy, and runs in
    /// the namespace, on the processor that the proxy does not use.
    fn compare(&self, names: &Names, measure: impl Fn(u32) -> Result<Vec<f64>> + Sync) -> Result<Vec<Figure>> {
        let measure = |proxy| self.namespace.run(|| load::use_the_other_processor().and_then(|()| measure(proxy)));
        let mut rounds = [Vec::new(), Vec::new()];
        for _ in 0..ROUNDS {
            rounds[0].push(self.headgate(measure)?);
            rounds[1].push(self.haproxy(measure)?);
        }
        let figure = |(number, (name, unit)): (usize, &(&'static str, &'static str))| {
            let [ours, theirs] =
                [0, 1].map(|proxy: usize| median(rounds[proxy].iter().map(|round| round[number]).collect()));
            Figure::against(*name, ours, unit, "HAProxy behind the same rules", theirs)
        };
        Ok(names.iter().enumerate().map(figure).collect())
    }

    fn headgate(&self, measure: impl Fn(u32) -> Result<Vec<f64>>) -> Result<Vec<f64>> {
        let agent = self.start_agent()?;
        std::thread::sleep(SETTLE);
        let figures = measure(agent.id());
        let log = agent.log_tail();
        agent.kill()?;
        figures.with_context(|| format!("the agent's log ends with:\n{log}"))
    }

    /// Measures HAProxy behind the rules of the agent, which has been killed.
    fn haproxy(&self, measure: impl Fn(u32) -> Result<Vec<f64>>) -> Result<Vec<f64>> {
        // The last element of the killed agent expires.
        std::thread::sleep(SETTLE * 2);
        let configuration = self.folder.path().join("haproxy.cfg");
        fs::write(&configuration, configuration_of_haproxy(self.connections))?;
        let mut haproxy = memory::on_one_processor(Path::new("haproxy"));
        haproxy.args(["-db", "-f"]).arg(&configuration);
        let mut haproxy = Process::start("HAProxy", &self.namespace, haproxy, &self.folder.path().join("haproxy.log"))?;
        let started = Instant::now();
        while self.namespace.run(|| Ok(TcpStream::connect(LISTENERS[0])?)).is_err() {
            haproxy.check_running()?;
            ensure!(started.elapsed() < LONGEST_START, "HAProxy does not listen in time");
            std::thread::sleep(Duration::from_millis(20));
        }
        self.gate("add", " timeout 1h")?;
        std::thread::sleep(SETTLE);
        let figures = measure(haproxy.id());
        self.gate("delete", "")?;
        let log = haproxy.log_tail();
        haproxy.kill()?;
        figures.with_context(|| format!("HAProxy's log ends with:\n{log}"))
    }

    /// Changes the element that leads TCP connections to the listeners.
    fn gate(&self, change: &str, timeout: &str) -> Result<()> {
        let mut nft = Command::new("nft");
        nft.arg(format!("{change} element ip headgate gate {{ tcp{timeout} }}"));
        let status = self.namespace.spawn(nft)?.wait()?;
        ensure!(status.success(), "nft cannot {change} the element of the set gate: {status}");
        Ok(())
    }
}

fn configuration_of_haproxy(connections: usize) -> String {
    let [first, second] = LISTENERS;
    let mut text = format!(
        "global\n  nbthread 1\n  maxconn {}\n  maxpipes 100\n  tune.pipesize 262144\n\
         defaults\n  mode tcp\n  option splice-request\n  option splice-response\n\
         timeout connect 3s\n  timeout client 1h\n  timeout server 1h\n\
         listen test\n  bind {first} backlog 4096\n  bind {second} backlog 4096\n  balance random\n",
        connections + 200
    );
    for number in 0..ENDPOINTS {
        text += &format!("  server s{number} {}:8080\n", workload::endpoint_ip(0, number));
    }
    text
}

/// The times in which one byte goes to the server and back, in microseconds.
fn round_trips(target: SocketAddr) -> Result<Vec<f64>> {
    use std::io::Write as _;
    let (mut stream, mut byte) = (open(target, ECHO)?, [7]);
    let mut trip = || {
        let began = Instant::now();
        stream.write_all(&byte)?;
        stream.read_exact(&mut byte)?;
        Ok(began.elapsed().as_secs_f64() * 1e6)
    };
    (0..ROUND_TRIPS).map(|_| trip()).collect()
}

/// Receives as many bytes as the proxy carries.
fn receive(target: SocketAddr, work: &Work) -> Result<()> {
    let (mut stream, mut buffer) = (open(target, SOURCE)?, vec![0; 256 << 10]);
    while work.goes_on() {
        work.count(stream.read(&mut buffer)? as u64);
    }
    Ok(())
}

/// Opens connections one after the other. Each carries a byte in both directions.
fn connect(target: SocketAddr, work: &Work) -> Result<()> {
    while work.goes_on() {
        let (mut stream, mut answer) = (open(target, ONCE)?, Vec::new());
        stream.read_to_end(&mut answer)?;
        ensure!(answer == [ONCE], "the answer is {answer:?}");
        work.count(1);
    }
    Ok(())
}

/// The resident memory of the proxy for each of `count` idle connections, in bytes.
fn memory_of_idle(proxy: u32, target: SocketAddr, count: usize) -> Result<f64> {
    let resident = || {
        std::thread::sleep(SETTLE);
        status_mb(proxy, "VmRSS")
    };
    // The server closes the connections of the last measurement.
    drop(open(target, ECHO)?);
    let before = resident()?;
    let mut idle = Vec::new();
    for _ in 0..count {
        let mut stream = open(target, KEEP)?;
        stream.read_exact(&mut [0])?;
        idle.push(stream);
    }
    let grown = resident()? - before;
    // The proxy has a descriptor for each side of a connection.
    let held = fs::read_dir(Path::new("/proc").join(proxy.to_string()).join("fd"))?.count();
    ensure!(held > 2 * count, "the proxy does not carry the connections: it has {held} descriptors");
    Ok(grown * 1e6 / count as f64)
}
