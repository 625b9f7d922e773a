//! An agent in mode userspace: what it tells about the connections that it carries.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    thread,
};

use super::rig::{Program, Rig, eventually, node, service, slice};

/// The addresses of the endpoint.
const ENDPOINTS: [&str; 2] = ["10.244.1.1:8080", "[fd00:244::1]:8080"];
/// The ClusterIPs with their port.
const CLUSTER_IPS: [&str; 2] = ["10.96.0.1:80", "[fd00:96::1]:80"];

/// A node with the Service ns/web and its endpoint, whose addresses belong to the node.
fn rig() -> Rig {
    let v6 = slice("web", &[], "").replace("name: web-1", "name: web-2").replace("IPv4", "IPv6")
        + "- {addresses: [\"fd00:244::1\"], nodeName: node-a}\n";
    let rig = Rig::serving(&[
        ("node", node("")),
        ("web", service("web", 1, "")),
        ("web-1", slice("web", &[("node-a", 1)], "")),
        ("web-2", v6),
    ]);
    rig.ip("addr add 10.244.1.1/32 dev lo\naddr add fd00:244::1/128 dev lo nodad\n\
            route add 10.96.0.0/16 dev uplink\nroute add fd00:96::/64 dev uplink\n");
    rig
}

/// Serves the endpoint: sends back what it reads.
fn serve(rig: &Rig) {
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
fn exchange(rig: &Rig, address: &str, bytes: usize) -> Result<TcpStream, String> {
    let address: SocketAddr = address.parse().unwrap();
    let mut stream = rig.run(|| TcpStream::connect(address)).map_err(|error| error.to_string())?;
    stream.write_all(&vec![b'x'; bytes]).map_err(|error| error.to_string())?;
    stream.read_exact(&mut vec![0; bytes]).map_err(|error| error.to_string())?;
    Ok(stream)
}

/// Starts an agent in mode userspace and waits until it carries connections of both families.
fn carrying(rig: &Rig, arguments: &[&str]) -> Program {
    let agent = rig.agent(&[&["--proxy-mode=userspace"], arguments].concat());
    for address in CLUSTER_IPS {
        eventually("the agent carries connections", || {
            let _open = exchange(rig, address, 1)?;
            let list = rig.headgatectl(&["connections", "node-a"])?;
            if list.contains(address) { Ok(()) } else { Err(list) }
        });
    }
    agent
}

#[test]
fn headgatectl_metrics_and_the_access_log_show_the_connections_of_the_proxy() {
    let rig = rig();
    serve(&rig);
    let agent = carrying(&rig, &["--userspace-access-log", "--userspace-service-counters"]);
    rig.until_metric("headgate_userspace_connections_open", |open| open == 0.0);
    let list = rig.headgatectl(&["connections", "node-a"]).unwrap();
    assert_eq!(list, "Node node-a carries no such connection.\n");
    let open: Vec<TcpStream> =
        [(0, 5), (1, 5000), (0, 50)].map(|(family, bytes)| exchange(&rig, CLUSTER_IPS[family], bytes).unwrap()).into();
    let list = rig.headgatectl(&["connections", "node-a", "ns/web"]).unwrap();
    println!("{list}");
    let rows: Vec<Vec<&str>> =
        list.lines().map(|line| line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect()).collect();
    assert_eq!(rows[0], ["SERVICE", "CLIENT", "ADDRESS", "ENDPOINT", "STATE", "AGE", "IDLE", "SENT", "RECEIVED"]);
    let client = open[1].local_addr().unwrap().to_string();
    assert_eq!(rows[1][..5], ["ns/web:http", &client, CLUSTER_IPS[1], ENDPOINTS[1], "open"]);
    assert_eq!(rows[1][7..], ["4.8 KiB", "4.8 KiB"]);
    assert_eq!((rows.len(), rows[3][7]), (4, "5 B"));
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
    assert_eq!(rig.metric(&of_service("connections_open")), 3.0);
    let accepted = rig.metric(&of_service("connections_accepted_total"));
    assert!(accepted >= 5.0 && rig.metric("headgate_userspace_connections_accepted_total") == accepted);
    assert!(rig.metric(&of_service("bytes_to_clients_total")) >= 5055.0);
    // The counters stay when the Service loses its endpoints, and end with the Service.
    rig.remove("web-1");
    rig.remove("web-2");
    eventually("the Service has no endpoint", || {
        let services = rig.headgatectl(&["services"])?;
        if services.contains("0/0") { Ok(()) } else { Err(services) }
    });
    rig.until_programmed();
    assert_eq!(rig.metric(&of_service("connections_accepted_total")), accepted);
    rig.remove("web");
    rig.until_metric(&of_service("connections_accepted_total"), |value| value == 0.0);
    assert_eq!(rig.metric("headgate_userspace_connections_accepted_total"), accepted);

    drop(open);
    rig.until_metric("headgate_userspace_connections_open", |open| open == 0.0);
    let log = agent.log();
    let line = log.lines().find(|line| line.contains(&format!("client={client}"))).unwrap();
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

#[test]
fn headgatectl_connections_names_the_mode_that_can_answer() {
    let rig = rig();
    let _agent = rig.agent(&["--proxy-mode=nftables"]);
    rig.until_programmed();
    let error = rig.headgatectl(&["connections", "node-a"]).unwrap_err();
    assert!(error.contains("the agent runs nftables: start the agent with --proxy-mode userspace"), "{error}");
}
