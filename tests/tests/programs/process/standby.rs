//! Another service proxy works on the node: a stand-in for kube-proxy, with its pages, its process
//! and its rules. The agent stands by, takes over, and yields.

use std::{
    io::{Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use headgate_tests::testbed::written;

use super::rig::{Program, Rig, eventually, node, service_v4, slice};

const SERVICE: ([u8; 4], u16) = ([10, 96, 0, 1], 80);
const STANDBY: [&str; 2] = ["--standby=auto", "--proxy-mode=nftables"];
/// All rounds together are longer than any pause of the agent. The time without a sign in a round
/// is much shorter than this pause, because a busy machine makes it longer.
const ROUNDS: usize = 4;

/// The rules of kube-proxy for the Service, with its names.
const RULES: &str = "*nat
:KUBE-SERVICES - [0:0]
:KUBE-SVC-WEBWEBWEBWEBWEB2 - [0:0]
:KUBE-SEP-WEBWEBWEBWEBWEB2 - [0:0]
:KUBE-PROXY-CANARY - [0:0]
-A KUBE-SERVICES -d 10.96.0.1/32 -p tcp -m comment --comment \"ns/web:http cluster IP\" -m tcp --dport 80 -j KUBE-SVC-WEBWEBWEBWEBWEB2
-A KUBE-SVC-WEBWEBWEBWEBWEB2 -m comment --comment \"ns/web:http -> 10.244.1.1:8080\" -j KUBE-SEP-WEBWEBWEBWEBWEB2
-A KUBE-SEP-WEBWEBWEBWEBWEB2 -p tcp -m comment --comment ns/web:http -m tcp -j DNAT --to-destination 10.244.1.1:8080
COMMIT
";
const JUMPS: &str = "*nat
-I PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES
-I OUTPUT -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES
COMMIT
";

/// Threads that serve until the value is dropped.
struct Threads {
    stop: Arc<AtomicBool>,
    all: Vec<JoinHandle<()>>,
}

impl Threads {
    fn new() -> Self {
        Self { stop: Arc::default(), all: Vec::new() }
    }

    /// Serves each connection to a port of the node on a thread of its own.
    fn serve(&mut self, rig: &Rig, port: u16, answer: fn(TcpStream)) {
        let listener = eventually("the port is free", || {
            rig.run(|| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))).map_err(|error| error.to_string())
        });
        listener.set_nonblocking(true).unwrap();
        let stop = Arc::clone(&self.stop);
        self.all.push(thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                match listener.accept() {
                    Ok((stream, _)) => {
                        stream.set_nonblocking(false).unwrap();
                        stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
                        thread::spawn(move || answer(stream));
                    }
                    Err(_) => thread::sleep(Duration::from_millis(20)),
                }
            }
        }));
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.all.drain(..).for_each(|thread| thread.join().unwrap());
    }
}

/// Sends back each byte.
fn echo(mut stream: TcpStream) {
    let mut byte = [0];
    while stream.read_exact(&mut byte).is_ok() && stream.write_all(&byte).is_ok() {}
}

/// Answers as kube-proxy does.
fn page(mut stream: TcpStream) {
    let mut request = [0; 512];
    let length = stream.read(&mut request).unwrap_or_default();
    let body = match String::from_utf8_lossy(&request[..length]).split(' ').nth(1) {
        Some("/proxyMode") => "iptables",
        Some("/metrics") => "kubeproxy_sync_proxy_rules_last_timestamp_seconds 1.7e+09\n",
        _ => "{}",
    };
    let _ = write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len());
}

/// A kube-proxy that runs.
struct KubeProxy {
    _process: Program,
    _pages: Threads,
}

impl KubeProxy {
    /// Starts the process, writes the rules, and then serves the pages, once their ports are free.
    fn start(rig: &Rig) -> Self {
        let process = rig.idle("kube-proxy");
        write_rules(rig, RULES);
        if !rig.tool("iptables-legacy-save", &["-t", "nat"]).contains("-j KUBE-SERVICES") {
            write_rules(rig, JUMPS);
        }
        let mut pages = Threads::new();
        pages.serve(rig, 10249, page);
        pages.serve(rig, 10256, page);
        Self { _process: process, _pages: pages }
    }
}

fn write_rules(rig: &Rig, rules: &str) {
    let rules = rules.to_owned();
    rig.run(move || {
        let mut command = Command::new("iptables-legacy-restore");
        // Programs of other tests may hold the lock of iptables.
        let mut child = command.args(["-w", "--noflush"]).stdin(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(rules.as_bytes()).unwrap();
        assert!(child.wait().unwrap().success());
    });
}

fn connect(rig: &Rig) -> Result<TcpStream, String> {
    let connect = || TcpStream::connect_timeout(&SocketAddr::from(SERVICE), Duration::from_secs(60));
    rig.run(connect).map_err(|error| error.to_string())
}

/// True if the server answers on this connection.
fn works(mut stream: &TcpStream) -> Result<(), String> {
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut byte = [0];
    stream.write_all(b"x").and_then(|()| stream.read_exact(&mut byte)).map_err(|error| error.to_string())
}

fn new_connection_works(rig: &Rig) -> Result<(), String> {
    works(&connect(rig)?)
}

fn written(rig: &Rig) -> Vec<(String, String)> {
    rig.run(written::here).unwrap()
}

fn assert_nothing_written(before: &[(String, String)], after: &[(String, String)]) {
    assert_eq!(before.len(), after.len(), "the lists differ");
    for (before, after) in before.iter().zip(after) {
        assert_eq!(before, after);
    }
}

/// A node with the Service, a server at its endpoint, and rules that lead there.
fn bed() -> (Rig, Threads) {
    let endpoints = slice("web", &[("node-a", 1)], "");
    let rig = Rig::serving(&[("node", node("")), ("web", service_v4("web", 1, "")), ("web-1", endpoints)]);
    rig.ip("addr add 10.244.1.1/32 dev lo\nroute add default via 192.0.2.1 dev uplink\n");
    let tentative = || rig.tool("ip", &["addr", "show", "tentative"]);
    eventually("no address is tentative", || {
        Some(tentative()).filter(String::is_empty).map(drop).ok_or_else(tentative)
    });
    let mut server = Threads::new();
    server.serve(&rig, 8080, echo);
    (rig, server)
}

#[test]
fn an_agent_writes_nothing_takes_over_and_yields_while_connections_survive() {
    let (rig, _server) = bed();
    let kube_proxy = KubeProxy::start(&rig);
    eventually("kube-proxy serves the Service", || new_connection_works(&rig));
    let opened = connect(&rig).unwrap();
    works(&opened).unwrap();

    // It stands by, is ready, and says why.
    let before = written(&rig);
    let state = format!("--state-dir={}", rig.path("state").display());
    let agent = rig.agent(&[&STANDBY[..], &[&*state][..]].concat());
    agent.until_logged("standby: kube-proxy (iptables) runs");
    rig.until_said(&["agents"], &["standby", "node-a: standby: kube-proxy (iptables) runs", "1 in standby"]);
    eventually("the agent is ready", || match rig.get(10262, "/healthz")? {
        (200, text) if text.contains("kube-proxy (iptables)") => Ok(()),
        other => Err(format!("{other:?}")),
    });
    rig.until_said(&["wait", "ns/web", "--timeout=30s"], &["0 nodes have", "not known on 1 in standby"]);
    // A change reaches the agent, and not the node.
    rig.put("more", &service_v4("more", 2, ""));
    rig.until_said(&["wait", "ns/more", "--timeout=30s"], &["not known on 1 in standby"]);
    assert_nothing_written(&before, &written(&rig));
    works(&opened).unwrap();

    // kube-proxy ends, and its rules stay.
    drop(kube_proxy);
    agent.until_logged("this agent programs the node");
    rig.until_said(&["agents"], &["up to date"]);
    rig.until_said(&["wait", "ns/more", "--timeout=30s"], &["1 node has programmed it"]);
    works(&opened).unwrap();
    eventually("new connections work", || new_connection_works(&rig));
    let chains = || rig.tool("iptables-legacy-save", &["-t", "nat"]);
    eventually("the rules of kube-proxy go", || if chains().contains("KUBE-SVC") { Err(chains()) } else { Ok(()) });
    let taken_over = connect(&rig).unwrap();
    works(&taken_over).unwrap();

    // It returns.
    let returned = thread::scope(|scope| {
        let starting = scope.spawn(|| KubeProxy::start(&rig));
        agent.until_logged("has returned to this node and works");
        starting.join().unwrap()
    });
    rig.until_said(&["agents"], &["node-a: standby: kube-proxy (iptables) runs"]);
    eventually("the rules of this agent go", || match rig.tool("nft", &["list", "ruleset"]) {
        rules if rules.contains("table ip headgate") => Err(rules),
        _ => Ok(()),
    });
    assert!(chains().contains("KUBE-SVC"));
    for stream in [&opened, &taken_over] {
        works(stream).unwrap();
    }
    new_connection_works(&rig).unwrap();
    drop(returned);
}

/// Where kube-proxy listens elsewhere, its process is the sign; a process that comes and goes is no
/// absence either.
#[test]
fn a_proxy_at_odd_ports_that_ends_again_and_again_is_not_gone() {
    let (rig, _server) = bed();
    write_rules(&rig, RULES);
    let process = rig.idle("kube-proxy");
    let agent = rig.agent(&STANDBY);
    agent.until_logged("standby: kube-proxy runs");
    drop(process);
    for _ in 0..ROUNDS {
        thread::sleep(Duration::from_secs(4));
        let _process = rig.idle("kube-proxy");
        thread::sleep(Duration::from_secs(6));
    }
    assert!(!agent.log().contains("this agent programs the node"), "{}", agent.log());
    agent.until_logged("this agent programs the node");
}

/// Nobody shows a sign but the rules, which somebody writes again and again.
#[test]
fn rules_that_somebody_writes_are_a_sign_of_a_proxy_that_nobody_sees() {
    let (rig, _server) = bed();
    write_rules(&rig, RULES);
    let agent = rig.agent(&STANDBY);
    agent.until_logged("standby: kube-proxy runs");
    for round in 0..2 * ROUNDS {
        thread::sleep(Duration::from_secs(4));
        write_rules(&rig, &RULES.replace("10.244.1.1:8080", &format!("10.244.1.1:{}", 8081 + round)));
    }
    assert!(!agent.log().contains("this agent programs the node"), "{}", agent.log());
    agent.until_logged("this agent programs the node");
}

#[test]
fn without_any_sign_the_agent_programs_at_once_and_remembers_it() {
    let (rig, _server) = bed();
    let state = format!("--state-dir={}", rig.path("state").display());
    let arguments = ["--standby=auto", "--proxy-mode=iptables", "--iptables-variant=legacy", &state];
    let agent = rig.agent(&arguments);
    rig.until_programmed();
    assert!(!agent.log().contains("standby:"), "{}", agent.log());
    agent.terminate();
    // Its rules have the names of kube-proxy's, and it knows that it wrote them.
    let again = rig.agent(&arguments);
    rig.until_programmed();
    assert!(!again.log().contains("standby:"), "{}", again.log());
}

#[test]
fn kept_beside_another_proxy_the_agent_reports_it() {
    let (rig, _server) = bed();
    let _agent = rig.agent(&["--standby=auto", "--proxy-mode=nftables", "--on-other-proxy=keep"]);
    rig.until_programmed();
    let _process = rig.idle("kube-proxy");
    rig.until_said(&["agents"], &["degraded: kube-proxy runs on this node"]);
    rig.until_metric("headgate_agent_degraded_modes", |value| value >= 1.0);
    assert!(rig.tool("nft", &["list", "ruleset"]).contains("table ip headgate"));
}

#[test]
fn kernel_parameters_stay_while_another_proxy_works() {
    let (rig, _server) = bed();
    let _kube_proxy = KubeProxy::start(&rig);
    let before = written(&rig);
    eventually("the agent knows the mode", || {
        let (status, log) = rig.run_agent(&["--init-only", "--node-name=node-a"]);
        assert!(status.success() && log.contains("no kernel parameter is set, because kube-proxy"), "{log}");
        // On a busy machine, the page with the mode may not answer in time.
        if log.contains("because kube-proxy (iptables) runs") { Ok(()) } else { Err(log) }
    });
    assert_nothing_written(&before, &written(&rig));
}
