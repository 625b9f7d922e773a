//! Pods, or programs on the node, open thousands of connections to HTTP ports. Meanwhile honest
//! clients get their answers, also from the attacker's own address, and the rest of the program has
//! its memory and its open files.

use std::{
    io::Write as _,
    net::{Ipv4Addr, SocketAddr, TcpStream},
};

use headgate_tests::{fleet::rig::allow_open_files, testbed::page};
use socket2::{Domain, Socket, Type};

use super::super::{
    proxy,
    rig::{Program, REPLICA_OPTIONS, Rig, eventually, node, service, slice},
};

const HEALTH: u16 = 10256;
const METRICS: u16 = 10249;
const DRAIN: u16 = 10270;
const REPLICA: u16 = 7480;
/// What an attack may cost in memory.
const MOST_BYTES: u64 = 32 << 20;
const EVICTED: &str = "headgate_agent_http_connections_closed_total";

/// Opens connections from 127.0.0.`host` to a port of the node, and sends on each as many of these
/// bytes as the kernel takes.
fn crowd(rig: &Rig, host: u8, port: u16, connections: usize, first: &[u8]) -> Vec<TcpStream> {
    let open = || {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.bind(&SocketAddr::from((Ipv4Addr::new(127, 0, 0, host), 0)).into()).unwrap();
        socket.connect(&SocketAddr::from((Ipv4Addr::LOCALHOST, port)).into()).unwrap();
        socket.set_nonblocking(true).unwrap();
        let mut stream = TcpStream::from(socket);
        let mut left = first;
        while let Ok(sent @ 1..) = stream.write(left) {
            left = &left[sent..];
        }
        stream
    };
    rig.run(|| (0..connections).map(|_| open()).collect())
}

/// Unfinished headers of this size.
fn unfinished(bytes: usize) -> Vec<u8> {
    let mut header = b"GET /healthz HTTP/1.1\r\nHost: node\r\nX-Long: ".to_vec();
    header.resize(bytes, b'x');
    header
}

/// Checks the memory of a program after an attack.
fn has_grown_little(program: &Program, before: u64) {
    let after = program.resident_bytes();
    println!("resident memory: {before} bytes before, {after} after");
    assert!(after < before + MOST_BYTES, "{before} bytes before, {after} after");
}

#[test]
fn unfinished_headers_and_unread_answers_cost_an_agent_little_memory() {
    allow_open_files(10_000).unwrap();
    let rig = Rig::web(10);
    let drain = format!("--drain-address=127.0.0.1:{DRAIN}");
    let agent = rig.agent(&["--proxy-mode=nftables", &drain]);
    rig.until_programmed();
    rig.until_health("/healthz", 200);
    eventually("the drain page is served", || rig.get(DRAIN, "/v1/drain"));
    let before = agent.resident_bytes();
    let mut open = Vec::new();
    // The drain page has more places, because the hooks of all pods may wait at it.
    for (port, connections) in [(HEALTH, 400), (METRICS, 400), (DRAIN, 1_200)] {
        // The honest requests of this test come from the same address.
        open.push(crowd(&rig, 1, port, connections, &unfinished(8_000)));
        open.push(crowd(&rig, 1, port, connections, &unfinished(400_000)));
        assert_eq!(rig.health("/healthz").unwrap().0, 200);
        assert_eq!(rig.health("/livez").unwrap().0, 200);
    }
    open.push(crowd(&rig, 1, METRICS, 300, &b"GET /metrics HTTP/1.1\r\nHost: node\r\n\r\n".repeat(100)));
    assert_eq!(rig.health("/livez").unwrap().0, 200);
    let (code, _) = rig.page("/metrics").unwrap();
    assert_eq!((code, rig.get(DRAIN, "/v1/drain?timeout=0").unwrap().0), (200, 400));
    has_grown_little(&agent, before);
    for port in ["health", "metrics", "drain"] {
        let evicted = format!("{EVICTED}{{port=\"{port}\",reason=\"evicted\"}}");
        rig.until_metric(&evicted, |evicted| evicted > 100.0);
    }
    agent.until_logged("network=127.0.0.1");
    drop(open);
}

#[test]
fn idle_connections_leave_files_to_the_stream_and_to_services() {
    allow_open_files(10_000).unwrap();
    let rig = proxy::rig();
    proxy::serve(&rig);
    let agent = rig.agent_with_open_files(4_096, &["--proxy-mode=userspace", proxy::POD_RANGES]);
    rig.until_programmed();
    eventually("the agent carries connections", || proxy::exchange(&rig, "10.96.0.1:80", 1));
    let mut open: Vec<_> = (2..=4).map(|host| crowd(&rig, host, HEALTH, 1_400, b"")).collect();
    assert_eq!(rig.health("/livez").unwrap().0, 200);
    let carried: Vec<TcpStream> = (0..300).map(|_| proxy::exchange(&rig, "10.96.0.1:80", 10).unwrap()).collect();
    // A change arrives over the stream.
    rig.put("more", &service("more", 20, ""));
    rig.put("more-1", &slice("more", &[("node-a", 1)], ""));
    eventually("the agent carries connections of the new Service", || proxy::exchange(&rig, "10.96.0.20:80", 1));
    // A new stream needs a file, too.
    open.push(crowd(&rig, 2, HEALTH, 300, b""));
    assert_eq!(rig.health("/healthz").unwrap().0, 200);
    // On a slow machine, the first connections of a network may have ended by themselves.
    let least = f64::from(3 * (1_400 - 128) + (300 - 128));
    rig.until_metric(&format!("{EVICTED}{{port=\"health\",reason=\"evicted\"}}"), |evicted| evicted >= least);
    rig.until_metric("process_open_fds", |files| files > 0.0 && files < 2_000.0);
    agent.until_logged("network=127.0.0.");
    drop((open, carried));
}

#[test]
fn idle_connections_do_not_silence_a_health_check_node_port() {
    let balanced = "  type: LoadBalancer\n  externalTrafficPolicy: Local\n  healthCheckNodePort: 31500\n";
    let service_text = service("web", 10, "").replace("  type: NodePort\n", balanced);
    let endpoints = slice("web", &[("node-a", 10)], "");
    let rig = Rig::serving(&[("node", node("")), ("web", service_text), ("web-1", endpoints)]);
    // In mode iptables, the port answers on all addresses of the node.
    let _agent = rig.agent(&[]);
    let probe = |address: &str| match rig.get_at(address, "/")? {
        (200, _) => Ok(()),
        (found, body) => Err(format!("{found} {body}")),
    };
    eventually("the port answers 200", || probe("127.0.0.1:31500"));
    let open = [1, 2, 3].map(|host| crowd(&rig, host, 31_500, 250, b""));
    let half = crowd(&rig, 1, 31_500, 250, b"GET / HTTP/1.1\r\n");
    for _ in 0..3 {
        probe("127.0.0.1:31500").unwrap();
        probe("192.0.2.11:31500").unwrap();
    }
    let evicted = format!("{EVICTED}{{port=\"health_check_node_port\",reason=\"evicted\"}}");
    rig.until_metric(&evicted, |evicted| evicted > 300.0);
    drop((open, half));
}

#[test]
fn many_health_check_node_ports_leave_files_to_the_agent() {
    let mut manifests = vec![("node", node(""))];
    let text: Vec<String> = (1..=60u16)
        .map(|number| {
            let port = 31_000 + number;
            let balanced =
                format!("  type: LoadBalancer\n  externalTrafficPolicy: Local\n  healthCheckNodePort: {port}\n");
            let number = number as u8;
            service(&format!("web-{number}"), number, "").replace("  type: NodePort\n", &balanced)
        })
        .collect();
    manifests.push(("services", text.join("---\n")));
    let rig = Rig::serving(&manifests);
    // An eighth of the limit is for these ports. Each Service has a port in both families.
    let agent = rig.agent_with_open_files(800, &["--proxy-mode=nftables"]);
    rig.until_metric("headgate_agent_health_check_listeners", |listeners| listeners == 100.0);
    agent.until_logged("the limit of open files (ulimit -n) allows only 100 of these ports");
    rig.until_health("/healthz", 200);
    rig.put("more", &service("more", 100, ""));
    eventually("the change is programmed", || match rig.tool("nft", &["list", "ruleset"]) {
        rules if rules.contains("10.96.0.100") => Ok(()),
        rules => Err(rules),
    });
}

#[test]
fn the_pages_of_a_control_plane_answer_during_attacks() {
    allow_open_files(10_000).unwrap();
    let rig = Rig::new();
    let source = rig.manifests();
    let replica = rig.control_plane(&[&[source.as_str()], &REPLICA_OPTIONS[..]].concat(), &[]);
    eventually("the replica is ready", || match rig.replica_page("/readyz")? {
        (200, _) => Ok(()),
        (found, body) => Err(format!("{found} {body}")),
    });
    let before = replica.resident_bytes();
    let mut open = vec![
        crowd(&rig, 1, REPLICA, 1_100, &unfinished(8_000)),
        crowd(&rig, 1, REPLICA, 1_200, &unfinished(400_000)),
        // HTTP/2: a preface, and a part of a frame with headers.
        crowd(&rig, 1, REPLICA, 300, &[PREFACE, &[0, 0x3f, 0, 1, 0, 0, 0, 0, 1], &[0; 16_000]].concat()),
    ];
    open.extend((2..=10).map(|host| crowd(&rig, host, REPLICA, 150, b"")));
    for page in ["/healthz", "/readyz", "/metrics"] {
        assert_eq!(rig.replica_page(page).unwrap().0, 200);
    }
    has_grown_little(&replica, before);
    eventually("the replica has closed connections", || {
        let (_, metrics) = rig.replica_page("/metrics")?;
        let closed = "headgate_http_connections_closed_total{port=\"pages\",reason=\"evicted\"}";
        match page::sample::<u64>(&metrics, closed) {
            1_001.. => Ok(()),
            evicted => Err(evicted.to_string()),
        }
    });
    replica.until_logged("network=127.0.0.1");
    drop(open);
}

/// The preface of HTTP/2, and an empty SETTINGS frame.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
