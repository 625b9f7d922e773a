//! A tenant writes EndpointSlices with addresses that pods must not reach, and lets the programs of
//! a node connect there: the proxy of mode userspace, and health checks.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use headgate_tests::testbed::Namespace;

use super::super::{
    proxy::{self, exchange, serve},
    rig::{Rig, eventually, node, service, slice},
};

/// A Service that is reached by its ClusterIP.
const CLUSTER_IP: &str = "10.96.0.1:80";
/// Addresses that no proxy may connect to, although the ranges of pods contain them: metadata
/// servers, with and without NAT64, and the node.
const NEVER_V4: [&str; 3] = ["168.63.129.16", "100.100.100.200", "192.0.2.11"];
const NEVER_V6: [&str; 4] = ["fd00:ec2::254", "64:ff9b::a9fe:a9fe", "64:ff9b::6464:64c8", "2001:db8::11"];
/// An address that is in no range of pods.
const ELSEWHERE: &str = "203.0.113.9";
const RANGES: &str =
    "--pod-ranges=10.244.0.0/16,168.63.0.0/16,100.64.0.0/10,192.0.2.0/24,fd00::/8,64:ff9b::/96,2001:db8::/32";

/// Counts the connections to an address. A connection gets a byte once it is counted, and stays
/// open.
fn count(rig: &Rig, address: &str) -> Arc<AtomicU32> {
    let address = SocketAddr::new(address.parse().unwrap(), 8080);
    let listener = rig.run(|| TcpListener::bind(address).unwrap());
    let connections = Arc::new(AtomicU32::new(0));
    let counter = Arc::clone(&connections);
    thread::spawn(move || {
        let mut open = Vec::new();
        for stream in listener.incoming() {
            counter.fetch_add(1, Ordering::SeqCst);
            let mut stream = stream.unwrap();
            // The client may have gone.
            let _ = stream.write_all(b"x");
            open.push(stream);
        }
    });
    connections
}

/// A slice of ns/`name` with these addresses.
fn slice_of(name: &str, suffix: &str, addresses: &[impl AsRef<str>]) -> String {
    let is_v6 = addresses.iter().any(|address| address.as_ref().contains(':'));
    let mut text = slice(name, &[], "").replace(&format!("name: {name}-1"), &format!("name: {name}-{suffix}"));
    if is_v6 {
        text = text.replace("IPv4", "IPv6");
    }
    for address in addresses {
        text += &format!("- {{addresses: [\"{}\"], nodeName: node-a}}\n", address.as_ref());
    }
    text
}

/// A node with the Service ns/web and its endpoint, whose programs can have all hostile addresses.
fn node_with_hostile_addresses() -> Rig {
    let rig = proxy::rig();
    for address in NEVER_V4.iter().chain(&[ELSEWHERE]).filter(|address| **address != "192.0.2.11") {
        rig.ip(&format!("route add local {address}/32 dev lo\n"));
    }
    for address in NEVER_V6.iter().filter(|address| **address != "2001:db8::11") {
        rig.ip(&format!("route add local {address}/128 dev lo\n"));
    }
    serve(&rig);
    rig
}

fn only_honest_endpoints_are_dialled(rules: &str) {
    let rig = node_with_hostile_addresses();
    let hostile: Vec<&str> = NEVER_V4.into_iter().chain([ELSEWHERE]).chain(NEVER_V6).collect();
    let listeners: Vec<(&str, Arc<AtomicU32>)> =
        hostile.iter().map(|address| (*address, count(&rig, address))).collect();
    // On a busy machine, the agent may be late. Without the annotation, the rules would then lead
    // straight to the endpoints.
    rig.put("web", &proxy::annotated("proxy-protocol", "v1"));
    let _agent = rig.agent(&["--proxy-mode=userspace", RANGES, rules]);
    for address in [CLUSTER_IP, "[fd00:96::1]:80"] {
        eventually("the agent carries connections", || {
            let _open = exchange(&rig, address, 1)?;
            let list = rig.headgatectl(&["connections", "node-a"])?;
            if list.contains(address) { Ok(()) } else { Err(list) }
        });
    }
    rig.put("web-3", &slice_of("web", "3", &[&NEVER_V4[..], &[ELSEWHERE]].concat()));
    rig.put("web-4", &slice_of("web", "4", &NEVER_V6));
    rig.until_said(&["agents"], &["does not connect to some endpoints", "--pod-ranges", "ns/web"]);
    for address in [CLUSTER_IP, "[fd00:96::1]:80"] {
        for _ in 0..40 {
            eventually("the Service answers", || {
                let answered = exchange(&rig, address, 1);
                // Only the rules refuse connections, while the agent is late.
                assert!(!answered.as_ref().is_err_and(|error| !error.contains("refused")), "{answered:?}");
                answered
            });
        }
    }
    for (address, connections) in listeners {
        assert_eq!(connections.load(Ordering::SeqCst), 0, "connections to {address} with {rules}");
    }
    // The Service is no problem any more.
    rig.remove("web-3");
    rig.remove("web-4");
    eventually("the problem ends", || {
        let agents = rig.headgatectl(&["agents"])?;
        if agents.contains("does not connect") { Err(agents) } else { Ok(()) }
    });
}

#[test]
fn the_proxy_behind_nftables_connects_to_no_metadata_server_no_port_of_the_node_and_no_foreign_range() {
    only_honest_endpoints_are_dialled("--userspace-rules=nftables");
}

#[test]
fn the_proxy_behind_iptables_connects_to_no_metadata_server_no_port_of_the_node_and_no_foreign_range() {
    only_honest_endpoints_are_dialled("--userspace-rules=iptables");
}

#[test]
fn no_rule_leads_to_a_metadata_server_that_is_the_only_endpoint() {
    let rig = node_with_hostile_addresses();
    let connections = count(&rig, "168.63.129.16");
    rig.put("trap", &service("trap", 2, ""));
    rig.put("trap-1", &slice_of("trap", "1", &["168.63.129.16"]));
    for rules in ["--userspace-rules=nftables", "--userspace-rules=iptables"] {
        let agent = rig.agent(&["--proxy-mode=userspace", RANGES, rules]);
        eventually("the agent carries connections", || exchange(&rig, CLUSTER_IP, 1));
        rig.until_programmed();
        // The replica may not have had the Service when the agent connected.
        eventually(&format!("connections are refused with {rules}"), || {
            match rig.run(|| TcpStream::connect("10.96.0.2:80")).map_err(|error| error.kind()) {
                Ok(_) => panic!("a connection was accepted with {rules}"),
                Err(ErrorKind::ConnectionRefused) => Ok(()),
                Err(other) => Err(other.to_string()),
            }
        });
        assert!(agent.terminate().0.success());
    }
    assert_eq!(connections.load(Ordering::SeqCst), 0);
}

#[test]
fn datagrams_reach_no_metadata_server_and_no_port_of_the_node() {
    let rig = node_with_hostile_addresses();
    let udp = |text: String| text.replace("TCP", "UDP").replace("name: http", "name: dns");
    rig.put("web", &udp(service("web", 1, "")).replace(", nodePort: 30001", "").replace("NodePort", "ClusterIP"));
    rig.put("web-1", &udp(slice("web", &[("node-a", 1)], "")));
    rig.put("web-3", &udp(slice_of("web", "3", &[&NEVER_V4[..], &[ELSEWHERE]].concat())));
    let bind = |address: &str| {
        let socket = rig.run(|| UdpSocket::bind((address, 8080)).unwrap());
        socket.set_nonblocking(true).unwrap();
        socket
    };
    let hostile: Vec<UdpSocket> = NEVER_V4.into_iter().chain([ELSEWHERE]).map(bind).collect();
    let honest = rig.run(|| UdpSocket::bind("10.244.1.1:8080").unwrap());
    thread::spawn(move || {
        while let Ok((count, from)) = honest.recv_from(&mut [0; 64]) {
            honest.send_to(&b"answer"[..count.min(6)], from).unwrap();
        }
    });
    let _agent = rig.agent(&["--proxy-mode=userspace", RANGES, "--userspace-rules=nftables"]);
    let ask = |timeout: u64| {
        // Each socket has a session of its own, so that the agent chooses again.
        let client = rig.run(|| UdpSocket::bind("192.0.2.11:0").unwrap());
        client.set_read_timeout(Some(Duration::from_secs(timeout))).unwrap();
        let failed = |error: std::io::Error| error.to_string();
        rig.run(|| client.connect(CLUSTER_IP)).map_err(failed)?;
        client.send(b"x").map_err(failed)?;
        client.recv(&mut [0; 64]).map(drop).map_err(failed)
    };
    eventually("the agent carries datagrams", || {
        ask(1)?;
        let list = rig.headgatectl(&["connections", "node-a"])?;
        if list.contains(CLUSTER_IP) { Ok(()) } else { Err(list) }
    });
    let round = || -> Result<(), String> {
        // What came before the agent had closed its gate went straight to endpoints.
        for socket in &hostile {
            while socket.recv_from(&mut [0; 64]).is_ok() {}
        }
        (0..40).try_for_each(|_| ask(10))?;
        match hostile.iter().find(|socket| socket.recv_from(&mut [0; 64]).is_ok()) {
            Some(socket) => Err(format!("a datagram at {:?}", socket.local_addr())),
            None => Ok(()),
        }
    };
    // On a busy machine, the agent may be late, and its gate opens. This does not happen each time.
    let rounds = [round(), round(), round()];
    assert!(rounds.contains(&Ok(())), "{rounds:?}");
}

/// Adds a pod with the address 10.244.1.9 to a node.
fn pod(rig: &Rig, number: u8) -> Namespace {
    let pod = Namespace::for_test(&format!("deputy-pod-{number}")).unwrap();
    rig.ip(&format!(
        "link add pod type veth peer name eth0 netns {}\nlink set pod up\naddr add 10.244.1.254/24 dev pod\n",
        pod.name()
    ));
    let links =
        "link set lo up\nlink set eth0 up\naddr add 10.244.1.9/24 dev eth0\nroute add default via 10.244.1.254\n";
    pod.ip_batch(links).unwrap();
    pod
}

/// Sends a request from a pod, and returns the whole answer.
fn get(pod: &Namespace, address: &str, path: &str) -> Result<String, String> {
    let address: SocketAddr = address.parse().unwrap();
    let answer = pod.run(|| {
        let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(5))?;
        stream.set_read_timeout(Some(Duration::from_secs(30)))?;
        write!(stream, "GET {path} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    });
    answer.map_err(|error| format!("{error:#}"))
}

/// The page of the node takes the client of a Service for the pod that it is, whatever address of
/// the node the EndpointSlice names.
#[test]
fn a_pod_does_not_pass_as_its_node_at_the_page_for_pods_that_stop() {
    for (number, rules) in [(1, "--userspace-rules=nftables"), (2, "--userspace-rules=iptables")] {
        let rig = Rig::serving(&[("node", node("podCIDRs: [10.244.1.0/24]"))]);
        let pod = pod(&rig, number);
        let arguments = [
            "--proxy-mode=userspace",
            "--pod-ranges=10.244.0.0/16,192.0.2.0/24",
            "--drain-address=0.0.0.0:10261",
            rules,
        ];
        // The endpoints are addresses of the node: its own, and the gateway of its pods.
        for (service_number, address) in [(3_u8, "192.0.2.11"), (4, "10.244.1.254")] {
            let name = format!("trap-{service_number}");
            rig.put(&name, &service(&name, service_number, ""));
            rig.put(&format!("{name}-1"), &slice_of(&name, "1", &[address]).replace("8080", "10261"));
        }
        let agent = rig.agent(&arguments);
        // The proxy accepts connections once the agent has programmed the node.
        rig.until_programmed();
        for through in ["10.96.0.3:80", "10.96.0.4:80", "192.0.2.11:30003", "10.244.1.254:30004", "192.0.2.11:10261"] {
            let answer =
                eventually(&format!("{through} answers"), || get(&pod, through, "/v1/drain?pod=ns/victim&timeout=1s"));
            assert!(
                answer.contains(" 403 ") && answer.contains("10.244.1.9 is none"),
                "{through} with {rules}: {answer}"
            );
        }
        let agents = rig.headgatectl(&["agents"]).unwrap();
        assert!(!agents.contains("does not connect"), "the rules keep the client's address: {agents}");
        drop(agent);
    }
}

#[test]
fn mode_userspace_without_ranges_of_pods_does_not_start_and_names_the_flags() {
    let rig = Rig::new();
    for more in [&[][..], &["--detect-local-mode=NodeCIDR", "--cluster-cidr=10.244.0.0/16"]] {
        let arguments = [
            "--node-name=node-a",
            "--control-plane=http://127.0.0.1:7443",
            "--insecure-loopback",
            "--proxy-mode=userspace",
        ];
        let (status, log) = rig.run_agent(&[&arguments[..], more].concat());
        assert!(
            status.code() == Some(1) && log.contains("--pod-ranges") && log.contains("--cluster-cidr"),
            "{status}: {log}"
        );
    }
}

/// The manifest of a Service of a namespace that asks for health checks.
fn checked(name: &str, namespace: &str, number: u8, interval: &str) -> String {
    let annotations = format!(
        "name: {name}, annotations: {{headgate.io/health-check: tcp, headgate.io/health-check-interval: {interval}}}}}"
    );
    service(name, number, "")
        .replace(&format!("name: {name}}}"), &annotations)
        .replace("namespace: ns", &format!("namespace: {namespace}"))
}

#[test]
fn checks_reach_only_pods_of_the_services_that_may_ask_for_them() {
    let rig = node_with_hostile_addresses();
    let listeners =
        ["168.63.129.16", "192.0.2.11", ELSEWHERE, "100.100.100.200"].map(|address| (address, count(&rig, address)));
    rig.ip("route add local 10.244.1.2/31 dev lo\n");
    let (honest, foreign) = (count(&rig, "10.244.1.2"), count(&rig, "10.244.1.3"));
    rig.put("some", &checked("some", "ns", 2, "500ms"));
    rig.put(
        "some-1",
        &slice_of("some", "1", &["10.244.1.2", "168.63.129.16", "192.0.2.11", ELSEWHERE, "100.100.100.200"]),
    );
    rig.put("other", &checked("other", "elsewhere", 3, "500ms"));
    let other = slice_of("other", "1", &["10.244.1.3"]).replace("namespace: ns", "namespace: elsewhere");
    rig.put("other-1", &other);
    let agent = rig.agent(&["--health-check-namespaces=ns", "--health-check-interval=500ms", RANGES]);
    eventually("the pod is checked", || match honest.load(Ordering::SeqCst) {
        checks @ 0..=3 => Err(format!("{checks} checks")),
        _ => Ok(()),
    });
    assert_eq!(foreign.load(Ordering::SeqCst), 0, "its namespace may not ask for checks");
    for (address, checks) in listeners {
        assert_eq!(checks.load(Ordering::SeqCst), 0, "checks of {address}");
    }
    let not_dialled =
        "because their addresses are in no range of pods, or are addresses of the node or of metadata servers";
    rig.until_said(
        &["agents"],
        &["--health-check-namespaces does not name", "elsewhere/other", not_dialled, "ns/some"],
    );
    drop(agent);
    // Without the flag, no endpoint is checked. The checks of the first agent are counted once this
    // connection is.
    let mut last = rig.run(|| TcpStream::connect("10.244.1.2:8080").unwrap());
    last.read_exact(&mut [0]).unwrap();
    let before = honest.load(Ordering::SeqCst);
    let _agent = rig.agent(&["--health-check-interval=500ms", RANGES]);
    rig.until_said(&["agents"], &["--health-check-namespaces does not name", "ns/some"]);
    assert_eq!((rig.metric("headgate_agent_endpoints_checked"), honest.load(Ordering::SeqCst)), (0.0, before));
}

#[test]
fn a_namespace_with_thousands_of_silent_targets_does_not_blind_the_checks_of_another() {
    let begun = Instant::now();
    let rig = node_with_hostile_addresses();
    // Nobody answers for these addresses.
    rig.ip("route add 10.244.64.0/18 dev uplink\nroute add local 10.244.1.2/32 dev lo\n");
    let silent: Vec<String> = (0..2_000).map(|last| format!("10.244.{}.{}", 64 + last / 250, 1 + last % 250)).collect();
    for (number, part) in silent.chunks(1_000).enumerate() {
        let text = slice_of("evil", &number.to_string(), part).replace("namespace: ns", "namespace: hostile");
        rig.put(&format!("evil-{number}"), &text);
    }
    rig.put("evil", &checked("evil", "hostile", 9, "500ms"));
    let agent = rig.agent(&["--health-check-namespaces=*", "--health-check-timeout=1s", RANGES]);
    // The cap of the Service.
    rig.until_metric("headgate_agent_endpoints_checked", |checked| checked == 1_000.0);
    rig.until_metric("headgate_agent_endpoint_checks_total{result=\"failed\"}", |failed| failed > 0.0);
    rig.until_said(&["agents"], &["the node checks only 1,000 endpoints of a Service", "hostile/evil"]);
    let honest = count(&rig, "10.244.1.2");
    rig.put("some", &checked("some", "ns", 2, "500ms"));
    // 10.244.1.3 is an endpoint on which nobody listens.
    rig.ip("route add local 10.244.1.3/32 dev lo\n");
    rig.put("some-1", &slice_of("some", "1", &["10.244.1.2", "10.244.1.3"]));
    agent.until_logged("namespace=ns endpoint=10.244.1.3:8080");
    eventually("the endpoint that works is checked", || match honest.load(Ordering::SeqCst) {
        checks @ 0..=1 => Err(format!("{checks} checks")),
        _ => Ok(()),
    });
    // The limit of lines for each namespace: ten at once, and then one in six seconds.
    let lines = agent.log().lines().filter(|line| line.contains("namespace=hostile")).count();
    let seconds = begun.elapsed().as_secs();
    assert!(lines as u64 <= 20 + seconds / 6, "{lines} lines about the hostile namespace in {seconds} s");
}
