//! What attackers do. Each attack runs until it is told that it is over, with nothing but what a
//! pod, a tenant or a node has.

use std::{
    collections::VecDeque,
    future::poll_fn,
    io::{ErrorKind, Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use anyhow::{Context as _, Result};
use bytes::Bytes;
use headgate_proto::{
    address_to_wire, frame,
    v1::{self, agent_message::Body},
};
use serde_json::{Value, json};
use socket2::{Domain, Socket, Type};
use tokio::time::timeout;

use super::{
    Load,
    bed::{ATTACKER, Bed, DRAIN_PORT, GATEWAY, HEALTH_NODE_PORT, HEALTH_PORT, METRICS_PORT, NODE, STREAM_PORT},
    honest::request,
};
use crate::apiserver::objects::{self, ServiceBuilder};

/// The namespace of the hostile tenant.
const TENANT: &str = "tenant";
/// The node whose certificate is stolen in the attack on the drain barrier.
const EVIL_NODE: &str = "node-evil";
/// A pod on that node.
const EVIL_POD: Ipv4Addr = Ipv4Addr::new(10, 244, 0, 20);
/// The bytes of one request that becomes too long, so that a server refuses it.
const UNFINISHED_BYTES: usize = 400 << 10;
/// The bytes of a request that a server keeps, because its headers may still end in time.
const KEPT_BYTES: usize = 4 << 10;
/// The most connections that an attacker opens before it looks at all of them.
const OPENED_AT_ONCE: usize = 500;

fn service(name: &str, host: u8) -> ServiceBuilder {
    objects::service(TENANT, name).cluster_ip(&Ipv4Addr::new(10, 111, 1, host).to_string())
}

/// Writes the objects of `next` with a pause between two, until the attack is over.
fn edit(bed: &Bed, is_over: &AtomicBool, pause: Duration, mut next: impl FnMut(u32) -> Value) -> Result<()> {
    for number in 0.. {
        if is_over.load(Ordering::Relaxed) {
            break;
        }
        bed.write(next(number))?;
        std::thread::sleep(pause);
    }
    Ok(())
}

/// A Service has externalIPs that no Service may have, and is edited.
pub(super) fn external_ips(bed: &Bed, load: &Load, is_over: &AtomicBool) -> Result<()> {
    let addresses: Vec<String> = (0..load.findings).map(|n| Ipv4Addr::from(0xef00_0000 + n).to_string()).collect();
    edit(bed, is_over, Duration::from_millis(500), |number| {
        let mut addresses = addresses.clone();
        let length = addresses.len();
        addresses.rotate_left(number as usize % length.max(1));
        service("wide", 1).port("http", "TCP", 80, 8080).field("spec.externalIPs", addresses).build()
    })
}

/// Eight slices have an annotation with many entries that cannot be read, and are edited. So is one
/// whose weights ask for thousands of slots for each port of a Service with a hundred.
pub(super) fn weights(bed: &Bed, load: &Load, is_over: &AtomicBool) -> Result<()> {
    bed.write(service("weights", 1).port("http", "TCP", 80, 8080).build())?;
    bed.write(with_ports(service("weighted", 2), PORTS).build())?;
    // Short entries, so that the annotation has a size that the API server accepts.
    let letter =
        |n: u32| char::from(b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"[n as usize % 62]);
    let entry = |n: u32| [letter(n / 3_844), letter(n / 62), letter(n)].into_iter().collect::<String>();
    let entries: Vec<String> = (0..load.findings).map(entry).collect();
    edit(bed, is_over, Duration::from_millis(200), |number| {
        if number % 2 == 1 {
            // The greatest common divisor is 1, so no weight can be made smaller.
            let light = number / 2 % 2 * 39;
            let weight = |host: u32| format!("10.245.0.{host}={}", if host == light { 99 } else { 100 });
            let mut slice = slice_of_ports("weighted", PORTS, 40, true);
            slice["metadata"]["annotations"] =
                json!({"headgate.io/weights": (0..40).map(weight).collect::<Vec<_>>().join(",")});
            return slice;
        }
        let mut entries = entries.clone();
        let length = entries.len();
        entries.rotate_left(number as usize % length.max(1));
        let name = format!("weights-{}", number / 2 % 8);
        let mut slice = objects::endpoint_slice(TENANT, &name, "weights").port("http", "TCP", 8080).build();
        slice["metadata"]["annotations"] = json!({"headgate.io/weights": entries.join(",")});
        slice
    })
}

/// An endpoint slice for all ports of a Service with many ports. Its last endpoint is ready or not.
fn slice_of_ports(name: &str, ports: u16, endpoints: u8, is_last_ready: bool) -> Value {
    let mut slice = objects::endpoint_slice(TENANT, &format!("{name}-1"), name);
    for port in 0..ports {
        slice = slice.port(&format!("p{port}"), "TCP", 8_000 + port);
    }
    for host in 0..endpoints {
        let address = Ipv4Addr::new(10, 245, 0, host);
        slice = slice.pod_endpoint(&address.to_string(), NODE, ("none", "none"), is_last_ready || host + 1 < endpoints);
    }
    slice.build()
}

fn with_ports(mut service: ServiceBuilder, ports: u16) -> ServiceBuilder {
    for port in 0..ports {
        service = service.port(&format!("p{port}"), "TCP", 1_000 + port, 8_000 + port);
    }
    service
}

const PORTS: u16 = 100;

/// Six Services with a hundred ports each want thousands of slots for each port, and are edited.
pub(super) fn slots(bed: &Bed, _: &Load, is_over: &AtomicBool) -> Result<()> {
    edit(bed, is_over, Duration::from_millis(200), |number| {
        let name = format!("slots-{}", number / 2 % 6);
        if number >= 12 || number % 2 == 1 {
            return slice_of_ports(&name, PORTS, 10, number / 12 % 2 == 0);
        }
        let host = u8::try_from(number / 2 % 6).unwrap_or_default();
        let mut service = with_ports(service(&name, 10 + host), PORTS).build();
        service["metadata"]["annotations"] = json!({"headgate.io/load-balancing": "consistent-hash"});
        service
    })
}

/// A Service has a hundred ports at thousands of external addresses, and is edited.
pub(super) fn frontends(bed: &Bed, load: &Load, is_over: &AtomicBool) -> Result<()> {
    let addresses: Vec<String> = (0..load.external_ips).map(|n| Ipv4Addr::from(0xc612_0000 + n).to_string()).collect();
    edit(bed, is_over, Duration::from_millis(500), |number| match number {
        0 => with_ports(service("frontends", 1), PORTS).field("spec.externalIPs", addresses.clone()).build(),
        _ => slice_of_ports("frontends", PORTS, 2, number % 2 == 0),
    })
}

/// Services have thousands of health-check targets that drop all packets.
pub(super) fn health_checks(bed: &Bed, load: &Load, is_over: &AtomicBool) -> Result<()> {
    const SERVICES: u32 = 4;
    for number in 0..SERVICES {
        let name = format!("checked-{number}");
        let host = u8::try_from(number).unwrap_or_default();
        let mut service = service(&name, host).port("http", "TCP", 80, 8080).build();
        service["metadata"]["annotations"] =
            json!({"headgate.io/health-check": "tcp", "headgate.io/health-check-interval": "500ms"});
        bed.write(service)?;
        let each = load.targets / SERVICES;
        // A slice has at most 1,000 endpoints.
        for (part, first) in (0..each).step_by(1_000).enumerate() {
            let mut slice = objects::endpoint_slice(TENANT, &format!("{name}-{part}"), &name).port("http", "TCP", 8080);
            for target in first..each.min(first + 1_000) {
                let address = Ipv4Addr::from(0x0af5_0000 + number * each + target);
                slice = slice.endpoint(&address.to_string(), NODE);
            }
            bed.write(slice.build())?;
        }
    }
    until(is_over);
    Ok(())
}

fn until(is_over: &AtomicBool) {
    while !is_over.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A number of connections of the attacker to one address.
pub(super) struct Crowd {
    pub(super) target: SocketAddr,
    pub(super) connections: usize,
    /// How many bytes of one request each connection sends, which do not end the request.
    pub(super) bytes: usize,
}

/// A connection that the attacker keeps open.
struct Held {
    stream: TcpStream,
    sent: usize,
}

impl Crowd {
    fn open(&self) -> Option<Held> {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).ok()?;
        socket.set_nonblocking(true).ok()?;
        socket.bind(&SocketAddr::from((ATTACKER, 0)).into()).ok()?;
        match socket.connect(&self.target.into()) {
            Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => None,
            _ => Some(Held { stream: socket.into(), sent: 0 }),
        }
    }

    /// Sends what the socket takes. Returns false if the other side has closed the connection.
    fn advance(&self, held: &mut Held, filler: &[u8]) -> bool {
        while held.sent < self.bytes {
            let left = &filler[held.sent..self.bytes];
            match held.stream.write(left) {
                Ok(written) => held.sent += written,
                Err(error) if is_later(&error) => return true,
                Err(_) => return false,
            }
        }
        match held.stream.read(&mut [0; 512]) {
            Ok(read) => read > 0,
            Err(error) => is_later(&error),
        }
    }
}

fn is_later(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::NotConnected)
}

/// Keeps the connections of all crowds open, and opens those again that are closed, until the
/// attack is over.
pub(super) fn crowd(bed: &Bed, crowds: &[Crowd], is_over: &AtomicBool) -> Result<()> {
    let mut filler = b"GET / HTTP/1.1\r\nHost: victim\r\n".to_vec();
    let mut number = 0;
    while filler.len() < UNFINISHED_BYTES {
        // Few long lines: servers also limit the number of lines.
        filler.extend_from_slice(format!("X-{number}: {}\r\n", "a".repeat(8_000)).as_bytes());
        number += 1;
    }
    bed.pods.run(|| {
        let mut all: Vec<VecDeque<Held>> = crowds.iter().map(|_| VecDeque::new()).collect();
        while !is_over.load(Ordering::Relaxed) {
            for (crowd, held) in crowds.iter().zip(&mut all) {
                held.retain_mut(|one| crowd.advance(one, &filler));
                let missing = crowd.connections.saturating_sub(held.len()).min(OPENED_AT_ONCE);
                held.extend((0..missing).map_while(|_| crowd.open()));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    })
}

/// Requests that become too long, and requests that do not end, at all pages of the agent. Idle
/// connections cost it less: see [`health_node_port`].
pub(super) fn agent_pages(bed: &Bed, load: &Load, is_over: &AtomicBool) -> Result<()> {
    let ports = [HEALTH_PORT, DRAIN_PORT, METRICS_PORT];
    let crowds: Vec<Crowd> = ports
        .into_iter()
        .flat_map(|port| {
            let target = SocketAddr::from((GATEWAY, port));
            let part = |connections: usize, bytes| Crowd { target, connections: connections / ports.len(), bytes };
            [part(load.unfinished, UNFINISHED_BYTES), part(load.idle, KEPT_BYTES)]
        })
        .collect();
    crowd(bed, &crowds, is_over)
}

/// Idle connections at a health-check node port.
pub(super) fn health_node_port(bed: &Bed, load: &Load, is_over: &AtomicBool) -> Result<()> {
    let target = SocketAddr::from((GATEWAY, HEALTH_NODE_PORT));
    crowd(bed, &[Crowd { target, connections: load.idle.min(1_000), bytes: 0 }], is_over)
}

/// One pod asks the drain page with several threads and without a pause.
pub(super) fn drain_page(bed: &Bed, _: &Load, is_over: &AtomicBool) -> Result<()> {
    const THREADS: usize = 4;
    let doorway = bed.pods.doorway()?;
    let page = SocketAddr::from((GATEWAY, DRAIN_PORT));
    std::thread::scope(|scope| {
        let ask = || -> Result<()> {
            doorway.enter()?;
            while !is_over.load(Ordering::Relaxed) {
                // An answer is not needed.
                let _ = request(Some(ATTACKER), page, "/v1/drain?timeout=1s&namespace=tenant", Duration::from_secs(2));
            }
            Ok(())
        };
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(ask)).collect();
        threads.into_iter().try_for_each(|thread| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)).context("asking the drain page")
        })
    })
}

/// The objects for [`barriers`]: a pod on the attacking node, and Nodes without agents, whose names
/// each answer contains.
pub(super) fn write_nodes_for_barriers(bed: &Bed, load: &Load) -> Result<()> {
    bed.write(objects::node(EVIL_NODE).build())?;
    for number in 0..load.nodes {
        bed.write(objects::node(&format!("node-without-an-agent-in-a-long-name-{number:05}")).build())?;
    }
    bed.write(service("evil", 1).port("http", "TCP", 80, 8080).build())?;
    let slice = objects::endpoint_slice(TENANT, "evil-1", "evil").port("http", "TCP", 8080);
    bed.write(slice.pod_endpoint(&EVIL_POD.to_string(), EVIL_NODE, ("evil", "evil"), true).build())
}

/// The agent of one node asks the drain barrier and never reads an answer.
pub(super) fn barriers(bed: &Bed, _: &Load, is_over: &AtomicBool) -> Result<()> {
    bed.node.run(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            while !is_over.load(Ordering::Relaxed) {
                // The replica may refuse the stream or end it.
                let _ = ask_without_reading(is_over).await;
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        });
        Ok(())
    })
}

async fn ask_without_reading(is_over: &AtomicBool) -> Result<()> {
    /// The requests in one write.
    const TOGETHER: u64 = 64;
    let socket = tokio::net::TcpStream::connect((Ipv4Addr::LOCALHOST, STREAM_PORT)).await?;
    let (mut requests, connection) = h2::client::handshake(socket).await?;
    let connection = tokio::spawn(connection);
    let call = http::Request::post("http://replica/headgate.v1.Discovery/Sync")
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(())?;
    // The answers stay unread, so the replica may send no more than the first window.
    let (_answers, mut sender) = requests.send_request(call, false)?;
    let hello = Body::Hello(v1::Hello { node_name: EVIL_NODE.into(), ..v1::Hello::default() });
    sender.send_data(frame(&v1::AgentMessage { body: Some(hello) }), false)?;
    let mut id = 0;
    while !is_over.load(Ordering::Relaxed) && !connection.is_finished() {
        let mut bytes = Vec::new();
        for _ in 0..TOGETHER {
            id += 1;
            let address = address_to_wire(EVIL_POD.into());
            let body = Body::Barrier(v1::BarrierRequest { id, address, ..v1::BarrierRequest::default() });
            bytes.extend_from_slice(&frame(&v1::AgentMessage { body: Some(body) }));
        }
        let mut bytes = Bytes::from(bytes);
        while !bytes.is_empty() {
            sender.reserve_capacity(bytes.len());
            let capacity = timeout(Duration::from_millis(200), poll_fn(|context| sender.poll_capacity(context))).await;
            match capacity {
                Ok(capacity) => {
                    let capacity = capacity.context("the stream has ended")??.min(bytes.len());
                    sender.send_data(bytes.split_to(capacity), false)?;
                }
                // The replica reads no more. The stream stays, with what the replica keeps for it.
                Err(_) if !is_over.load(Ordering::Relaxed) => {}
                Err(_) => break,
            }
        }
    }
    connection.abort();
    Ok(())
}
