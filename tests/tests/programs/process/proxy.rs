//! An agent in mode userspace: what it tells about the connections that it carries, and what
//! annotations of Services ask of it.

use std::{
    io::{self, ErrorKind, Read as _, Write as _},
    net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket},
    thread,
    time::Duration,
};

use nix::sys::signal::Signal;

use super::rig::{Program, Rig, eventually, service, slice};

/// The addresses of the endpoint.
const ENDPOINTS: [&str; 2] = ["10.244.1.1:8080", "[fd00:244::1]:8080"];
/// The ClusterIPs with their port.
const CLUSTER_IPS: [&str; 2] = ["10.96.0.1:80", "[fd00:96::1]:80"];

/// The ranges of pods.
pub(super) const POD_RANGES: &str = "--pod-ranges=10.244.0.0/16,fd00:244::/32";

/// A node with the Service ns/web and its endpoint. Programs on the node can have the addresses of
/// the endpoint, but no interface has them, so that the proxy connects to them.
pub(super) fn rig() -> Rig {
    let rig = Rig::web(1);
    rig.put("web-2", &slice_v6());
    // Programs may also listen on an IPv6 address that no interface has.
    rig.set_parameter("net/ipv6/ip_nonlocal_bind", "1");
    rig.ip("route add local 10.244.1.1/32 dev lo\nroute add local fd00:244::1/128 dev lo\n\
            route add 10.96.0.0/16 dev uplink\nroute add fd00:96::/64 dev uplink\n");
    rig
}

/// The slice with the endpoint's IPv6 address.
fn slice_v6() -> String {
    let slice = slice("web", &[], "").replace("name: web-1", "name: web-2").replace("IPv4", "IPv6");
    slice + "- {addresses: [\"fd00:244::1\"], nodeName: node-a}\n"
}

/// Serves the endpoint: sends back what it reads.
pub(super) fn serve(rig: &Rig) {
    for address in ENDPOINTS {
        let listener = rig.run(|| TcpListener::bind(address).unwrap());
        thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                thread::spawn(move || {
                    let mut buffer = [0; 4096];
                    while let Ok(count @ 1..) = stream.read(&mut buffer) {
                        stream.write_all(&buffer[..count]).unwrap();
                    }
                });
            }
        });
    }
}

/// Opens a connection and exchanges this number of bytes.
pub(super) fn exchange(rig: &Rig, address: &str, bytes: usize) -> Result<TcpStream, String> {
    let address: SocketAddr = address.parse().unwrap();
    let mut stream = rig.run(|| TcpStream::connect(address)).map_err(|error| error.to_string())?;
    stream.write_all(&vec![b'x'; bytes]).map_err(|error| error.to_string())?;
    stream.read_exact(&mut vec![0; bytes]).map_err(|error| error.to_string())?;
    Ok(stream)
}

/// Starts an agent in mode userspace and waits until it carries connections of both families.
fn carrying(rig: &Rig, arguments: &[&str]) -> Program {
    let agent = rig.agent(&[&["--proxy-mode=userspace", POD_RANGES], arguments].concat());
    for address in CLUSTER_IPS {
        eventually("the agent carries connections", || {
            let _open = exchange(rig, address, 1)?;
            let list = rig.headgatectl(&["connections", "node-a"])?;
            if list.contains(address) { Ok(()) } else { Err(list) }
        });
    }
    agent
}

/// The cells of a list of headgatectl, row by row.
fn rows(list: &str) -> Vec<Vec<&str>> {
    list.lines().map(|line| line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect()).collect()
}

/// The bytes that were sent and received, row by row of a list of connections.
fn bytes(list: &str) -> Vec<String> {
    rows(list).iter().skip(1).map(|row| row.iter().skip(8).copied().collect::<Vec<_>>().join("/")).collect()
}

#[test]
fn headgatectl_metrics_and_the_access_log_show_the_connections_of_the_proxy() {
    let rig = rig();
    serve(&rig);
    let agent = carrying(&rig, &["--userspace-access-log", "--userspace-service-counters"]);
    rig.until_metric("headgate_userspace_connections_open", |open| open == 0.0);
    eventually("no connection is listed", || match rig.headgatectl(&["connections", "node-a"])? {
        list if list == "Node node-a carries no such connection.\n" => Ok(()),
        list => Err(list),
    });
    // On a busy machine, a connection may go past the agent, and counts and ends may be late.
    let (open, list) = eventually("three connections are listed", || {
        let open = [(0, 5), (1, 5000), (0, 50)].map(|(family, bytes)| exchange(&rig, CLUSTER_IPS[family], bytes));
        let open = open.into_iter().collect::<Result<Vec<TcpStream>, String>>()?;
        let list = rig.headgatectl(&["connections", "node-a", "ns/web"])?;
        let are_all = bytes(&list) == ["4.8 KiB/4.8 KiB", "50 B/50 B", "5 B/5 B"];
        if are_all { Ok((open, list)) } else { Err(list) }
    });
    println!("{list}");
    let rows = rows(&list);
    assert_eq!(
        rows[0],
        ["SERVICE", "PROTOCOL", "CLIENT", "ADDRESS", "ENDPOINT", "STATE", "AGE", "IDLE", "SENT", "RECEIVED"]
    );
    let client = open[1].local_addr().unwrap().to_string();
    assert_eq!(rows[1][..6], ["ns/web:http", "TCP", &client, CLUSTER_IPS[1], ENDPOINTS[1], "open"]);
    assert_eq!(rows[1][8..], ["4.8 KiB", "4.8 KiB"]);
    assert_eq!((rows.len(), rows[3][8]), (4, "5 B"));
    let json = rig.headgatectl(&["connections", "node-a", "--limit", "1", "-o", "json"]).unwrap();
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&json["connections"][0]["bytes_to_client"], &json["left_out"]), (&5000.into(), &2.into()));
    let limited = rig.headgatectl(&["connections", "node-a", "--limit", "1"]).unwrap();
    assert!(
        limited.ends_with("\n2 more connections with fewer bytes: name a Service, or raise --limit\n"),
        "{limited}"
    );
    let other = rig.headgatectl(&["connections", "node-a", "ns/other"]).unwrap();
    assert_eq!(other, "Node node-a carries no such connection.\n");

    let of_service = |name: &str| format!("headgate_userspace_service_{name}{{namespace=\"ns\",service=\"web\"}}");
    rig.until_metric("headgate_userspace_connections_open", |open| open == 3.0);
    rig.until_metric(&of_service("connections_open"), |open| open == 3.0);
    let accepted = rig.metric(&of_service("connections_accepted_total"));
    assert!(accepted >= 5.0 && rig.metric("headgate_userspace_connections_accepted_total") == accepted);
    rig.until_metric(&of_service("bytes_to_clients_total"), |bytes| bytes >= 5055.0);
    // The counters stay when the Service loses its endpoints, and end with the Service.
    rig.remove("web-1");
    rig.remove("web-2");
    // The Service has no endpoint.
    rig.until_said(&["services"], &["0/0"]);
    rig.until_programmed();
    assert_eq!(rig.metric(&of_service("connections_accepted_total")), accepted);
    rig.remove("web");
    rig.until_metric(&of_service("connections_accepted_total"), |value| value == 0.0);
    assert_eq!(rig.metric("headgate_userspace_connections_accepted_total"), accepted);

    drop(open);
    rig.until_metric("headgate_userspace_connections_open", |open| open == 0.0);
    let line = eventually("the end is logged", || {
        let log = agent.log();
        log.lines().find(|line| line.contains(&format!("client={client}"))).map(str::to_owned).ok_or(log.clone())
    });
    println!("{line}");
    for part in [
        "connection ended: closed",
        "service=ns/web:http",
        "bytes_to_endpoint=5000 bytes_to_client=5000",
        "duration_ms=",
    ] {
        assert!(line.contains(part), "{part} is not in {line}");
    }
}

/// Sends a datagram of this length to the Service and waits for the answer of the endpoint. Late
/// answers to shorter datagrams may come first.
fn ask(client: &UdpSocket, bytes: usize) -> Result<(), String> {
    let failed = |error: io::Error| error.to_string();
    client.send(&vec![b'x'; bytes]).map_err(failed)?;
    while client.recv(&mut [0; 4096]).map_err(failed)? != bytes {}
    Ok(())
}

#[test]
fn headgatectl_and_metrics_show_the_sessions_and_the_dropped_datagrams_of_the_proxy() {
    let rig = rig();
    let udp = |text: String| text.replace("TCP", "UDP").replace("name: http", "name: dns");
    rig.put("web", &udp(service("web", 1, "")));
    rig.put("web-1", &udp(slice("web", &[("node-a", 1)], "")));
    rig.put("web-2", &udp(slice_v6()));
    for address in ENDPOINTS {
        let socket = rig.run(|| UdpSocket::bind(address).unwrap());
        thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok((count, from)) = socket.recv_from(&mut buffer) {
                socket.send_to(&buffer[..count], from).unwrap();
            }
        });
    }
    let _agent = rig.agent(&["--proxy-mode=userspace", POD_RANGES, "--userspace-service-counters"]);
    let clients = ["0.0.0.0:0", "[::]:0"].map(|local| rig.run(|| UdpSocket::bind(local).unwrap()));
    for (client, address) in clients.iter().zip(CLUSTER_IPS) {
        rig.run(|| client.connect(address).unwrap());
        client.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
        eventually("the agent carries datagrams", || {
            ask(client, 1)?;
            let list = rig.headgatectl(&["connections", "node-a"])?;
            if list.contains(address) { Ok(()) } else { Err(list) }
        });
    }
    clients[1].set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    for count in 1..=9 {
        // On a busy machine, a datagram may go past the agent, and then it does not count.
        eventually("the agent carries a datagram", || {
            ask(&clients[1], 600)?;
            let mut seen = String::new();
            for _ in 0..20 {
                seen = rig.headgatectl(&["connections", "node-a", "--limit", "1", "-o", "json"])?;
                let json: serde_json::Value = serde_json::from_str(&seen).map_err(|error| error.to_string())?;
                if json["connections"][0]["bytes_to_client"].as_u64() >= Some(600 * count) {
                    return Ok(());
                }
                thread::sleep(Duration::from_millis(100));
            }
            Err(seen)
        });
    }
    let list = rig.headgatectl(&["connections", "node-a", "ns/web"]).unwrap();
    println!("{list}");
    let rows = rows(&list);
    let client = clients[1].local_addr().unwrap().to_string();
    assert_eq!(rows[0].last(), Some(&"DATAGRAMS"));
    assert_eq!(rows[1][..6], ["ns/web:dns", "UDP", &client, CLUSTER_IPS[1], ENDPOINTS[1], "answered"]);
    assert_eq!(rows[1][8..10], ["5.2 KiB", "5.2 KiB"]);
    let json = rig.headgatectl(&["connections", "node-a", "--limit", "1", "-o", "json"]).unwrap();
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let session = &json["connections"][0];
    assert_eq!((&session["protocol"], &json["left_out"]), (&"UDP".into(), &1.into()));
    assert!(session["datagrams_to_client"].as_u64().unwrap() >= 10, "{json}");
    assert_eq!(session["datagrams_to_client"], session["datagrams_to_endpoint"]);
    let other = rig.headgatectl(&["connections", "node-a", "ns/other"]).unwrap();
    assert_eq!(other, "Node node-a carries no such connection.\n");

    let of_service = |name: &str| format!("headgate_userspace_service_{name}{{namespace=\"ns\",service=\"web\"}}");
    rig.until_metric("headgate_userspace_udp_sessions", |sessions| sessions == 2.0);
    rig.until_metric(&of_service("udp_sessions"), |sessions| sessions == 2.0);
    for direction in ["to_endpoints", "to_clients"] {
        rig.until_metric(&format!("headgate_userspace_datagrams_{direction}_total"), |count| count >= 11.0);
        rig.until_metric(&of_service(&format!("datagram_bytes_{direction}_total")), |bytes| bytes >= 5402.0);
    }
    assert_eq!(rig.metric("headgate_userspace_datagrams_dropped_total"), 0.0);
    // The limit covers the sessions of both families, so a third client gets none.
    rig.put("web", &udp(annotated("max-connections", "2")));
    let limited = "headgate_userspace_datagrams_dropped_by_reason_total{reason=\"limit\"}";
    eventually("the third client has no session", || {
        let third = rig.run(|| UdpSocket::bind("0.0.0.0:0").unwrap());
        rig.run(|| third.connect(CLUSTER_IPS[0]).unwrap());
        third.send(b"x").unwrap();
        if rig.metric(limited) > 0.0 { Ok(()) } else { Err("no datagram was dropped".to_owned()) }
    });
    let of_service = of_service("datagrams_dropped_total");
    eventually("all counts agree", || {
        let names = [limited, "headgate_userspace_datagrams_dropped_total", of_service.as_str()];
        let counts = names.map(|name| rig.metric(name));
        if counts.iter().all(|count| *count == counts[0]) { Ok(()) } else { Err(format!("{counts:?}")) }
    });
}

#[test]
fn headgatectl_connections_names_the_mode_that_can_answer() {
    let rig = rig();
    let _agent = rig.agent(&["--proxy-mode=nftables"]);
    rig.until_programmed();
    let error = rig.headgatectl(&["connections", "node-a"]).unwrap_err();
    assert!(error.contains("the agent runs nftables: start the agent with --proxy-mode userspace"), "{error}");
}

/// The manifest of the Service ns/web with an annotation.
pub(super) fn annotated(name: &str, value: &str) -> String {
    let annotations = format!("name: web, annotations: {{headgate.io/{name}: \"{value}\"}}}}");
    service("web", 1, "").replace("name: web}", &annotations)
}

/// Sends `hello` and closes this direction. Returns the client's address, and all that the endpoint
/// received and sent back.
fn echoed(rig: &Rig, to: SocketAddr) -> Result<(SocketAddr, Vec<u8>), String> {
    let exchange = || -> io::Result<_> {
        let mut stream = rig.run(|| TcpStream::connect(to))?;
        stream.write_all(b"hello")?;
        stream.shutdown(Shutdown::Write)?;
        let mut received = Vec::new();
        stream.read_to_end(&mut received)?;
        Ok((stream.local_addr()?, received))
    };
    exchange().map_err(|error| format!("{to}: {error}"))
}

/// The header of version 1, and `hello`.
fn version_1(client: SocketAddr, to: SocketAddr) -> Vec<u8> {
    let family = if to.is_ipv4() { "TCP4" } else { "TCP6" };
    let (from, at) = (client.ip(), to.ip());
    format!("PROXY {family} {from} {at} {} {}\r\nhello", client.port(), to.port()).into()
}

/// The header of version 2, and `hello`.
fn version_2(client: SocketAddr, to: SocketAddr) -> Vec<u8> {
    let octets = |ip| match ip {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    };
    let (family, length) = if to.is_ipv4() { (0x11, 12) } else { (0x21, 36) };
    let mut header = b"\r\n\r\n\0\r\nQUIT\n\x21".to_vec();
    header.extend([family, 0, length]);
    header.extend([octets(client.ip()), octets(to.ip())].concat());
    header.extend([client.port().to_be_bytes(), to.port().to_be_bytes()].concat());
    header.extend(b"hello");
    header
}

/// The ClusterIPs and NodePorts of the Service.
fn addresses() -> impl Iterator<Item = SocketAddr> {
    CLUSTER_IPS.into_iter().chain(["192.0.2.11:30001", "[2001:db8::11]:30001"]).map(|to| to.parse().unwrap())
}

/// Waits until no proxy accepts connections and all addresses refuse them.
fn expect_refusals(rig: &Rig, when: &str) {
    for to in addresses() {
        eventually(&format!("{to} refuses connections {when}"), || {
            match rig.run(|| TcpStream::connect_timeout(&to, Duration::from_secs(5))) {
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => Ok(()),
                other => Err(format!("{other:?}")),
            }
        });
    }
}

#[test]
fn endpoints_get_the_proxy_header_and_nobody_reaches_them_without_a_proxy() {
    only_the_proxy_reaches_endpoints("--userspace-rules=nftables");
}

#[test]
fn endpoints_behind_iptables_get_the_proxy_header_and_nobody_reaches_them_without_a_proxy() {
    only_the_proxy_reaches_endpoints("--userspace-rules=iptables");
}

fn only_the_proxy_reaches_endpoints(rules: &str) {
    let rig = rig();
    serve(&rig);
    rig.put("web", &annotated("proxy-protocol", "v1"));
    let agent = carrying(&rig, &[rules]);
    for to in addresses() {
        // The agent may still have the Service without the annotation.
        eventually("endpoints get version 1", || {
            let (client, received) = echoed(&rig, to)?;
            if received == version_1(client, to) { Ok(()) } else { Err(format!("{to}: {received:?}")) }
        });
    }
    agent.signal(Signal::SIGSTOP);
    expect_refusals(&rig, "while the agent hangs");
    agent.signal(Signal::SIGCONT);
    rig.put("web", &annotated("proxy-protocol", "v2"));
    for to in addresses() {
        eventually("endpoints get version 2", || {
            let (client, received) = echoed(&rig, to)?;
            if received == version_2(client, to) { Ok(()) } else { Err(format!("{to}: {received:?}")) }
        });
    }
    drop(agent);
    expect_refusals(&rig, "after the agent was killed");
    // The next agent adopts the rules. Without the annotation, connections need no proxy.
    let agent = carrying(&rig, &[rules]);
    assert_eq!(rig.metric("headgate_agent_drift_total"), 0.0);
    rig.put("web", &service("web", 1, ""));
    let until_plain = |to: &str| {
        eventually("endpoints get no header", || match echoed(&rig, to.parse().unwrap())? {
            (_, received) if received == b"hello" => Ok(()),
            (_, received) => Err(format!("{received:?}")),
        });
    };
    until_plain(CLUSTER_IPS[0]);
    rig.headgatectl(&["wait", "ns/web"]).unwrap();
    drop(agent);
    until_plain(CLUSTER_IPS[1]);
}

#[test]
fn listeners_serve_only_what_the_rules_send_and_endpoints_that_are_services_do_not_loop() {
    for rules in ["--userspace-rules=nftables", "--userspace-rules=iptables"] {
        let rig = rig();
        serve(&rig);
        let _agent = carrying(&rig, &[rules, "--pod-ranges=10.96.0.0/16"]);
        for address in ["169.254.77.1", "fd68:6561:6467::1"] {
            for port in 10245..=10248 {
                let to = SocketAddr::new(address.parse().unwrap(), port);
                let mut stream = rig.run(|| TcpStream::connect(to)).unwrap();
                let ended = stream.read(&mut [0]).map_err(|error| error.kind());
                assert_eq!(ended, Err(ErrorKind::ConnectionReset), "{to} with {rules}");
            }
        }
        rig.until_metric("headgate_userspace_connections_unknown_destination_total", |count| count == 8.0);
        // The endpoint of this Service is the Service ns/web itself.
        rig.put("around", &service("around", 2, ""));
        let slice = slice("around", &[("node-a", 1)], "").replace("10.244.1.1", "10.96.0.1").replace("8080", "80");
        rig.put("around-1", &slice);
        eventually("the endpoint is not tried", || {
            drop(exchange(&rig, "10.96.0.2:80", 1));
            let loops = rig.metric("headgate_userspace_endpoint_loops_total");
            if loops > 0.0 { Ok(()) } else { Err(format!("no loop was found with {rules}")) }
        });
        rig.until_metric("headgate_userspace_connections_open", |open| open == 0.0);
    }
}

#[test]
fn connections_beyond_the_limit_of_a_service_are_reset() {
    let rig = rig();
    serve(&rig);
    let _agent = carrying(&rig, &[]);
    rig.put("web", &annotated("max-connections", "2"));
    rig.until_metric("headgate_userspace_connections_open", |open| open == 0.0);
    eventually("the third connection is reset", || {
        // The limit covers both families.
        let _open = [exchange(&rig, CLUSTER_IPS[0], 1)?, exchange(&rig, CLUSTER_IPS[1], 1)?];
        match exchange(&rig, CLUSTER_IPS[0], 1) {
            Ok(_) => Err("the third connection is open".to_owned()),
            Err(_) if rig.metric("headgate_userspace_connections_over_limit_total") >= 1.0 => Ok(()),
            Err(error) => Err(error),
        }
    });
}

#[test]
fn nodes_name_services_that_their_mode_cannot_serve_as_asked() {
    let rig = rig();
    rig.put("web", &annotated("proxy-protocol", "v2"));
    rig.put(
        "limited",
        &annotated("max-connections", "7")
            .replace("web", "limited")
            .replace("96.0.1", "96.0.2")
            .replace("96::1", "96::2")
            .replace("30001", "30002"),
    );
    let agent = rig.agent(&["--proxy-mode=nftables"]);
    let unserved = [
        "mode nftables has no proxy, so 1 Services with the annotation headgate.io/proxy-protocol send",
        "1 Services with the annotation headgate.io/max-connections have no limit",
    ];
    rig.until_said(&["agents"], &unserved);
    let services = rig.headgatectl(&["services"]).unwrap();
    assert!(services.contains("PROXY-PROTOCOL") && services.contains("MAX-CONNECTIONS"), "{services}");
    drop(agent);
    rig.put("limited", &service("limited", 2, "").replace("TCP", "SCTP"));
    let _agent = rig.agent(&["--proxy-mode=userspace", POD_RANGES]);
    let unserved = "mode userspace refuses connections of SCTP, and 1 Services have a port of SCTP: use mode nftables";
    rig.until_said(&["agents"], &[unserved]);
    let agents = rig.headgatectl(&["agents"]).unwrap();
    assert!(!agents.contains("has no proxy"), "{agents}");
}
