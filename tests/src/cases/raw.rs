//! Packets that well-behaved clients do not send, and a check of a node's own refused UDP packets.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use headgate_node_agent::packet_counters;
use serde_json::json;
use socket2::{Domain, Protocol, Socket, Type};

use super::changes::eventually;
use crate::testbed::client::{ANSWER_TIMEOUT, HeldConnection};
use crate::testbed::manifests::{Service, Via};
use crate::testbed::{AgentSetup, Backend, Family, Namespace, Testbed, iptables, plan};

/// How long to wait until sent packets have arrived.
const QUIET: Duration = Duration::from_millis(300);
const TCP_HEADER_BYTES: usize = 20;
const FLAG_ACK: u8 = 0x10;

/// The fields of a TCP segment that the tests use.
#[derive(Debug, Clone, Copy)]
struct Segment {
    source: u16,
    destination: u16,
    sequence: u32,
    acknowledgement: u32,
    payload_bytes: u32,
}

impl Segment {
    fn parse(bytes: &[u8]) -> Option<Self> {
        let word = |at: usize| Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        let header_bytes = usize::from(bytes.get(12)? >> 4) * 4;
        Some(Self {
            source: u16::from_be_bytes([*bytes.first()?, *bytes.get(1)?]),
            destination: u16::from_be_bytes([*bytes.get(2)?, *bytes.get(3)?]),
            sequence: word(4)?,
            acknowledgement: word(8)?,
            payload_bytes: u32::try_from(bytes.len().checked_sub(header_bytes)?).ok()?,
        })
    }

    /// Encodes the segment with ACK set, one byte of payload, and a checksum for these addresses.
    fn encode(self, from: IpAddr, to: IpAddr) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(self.source.to_be_bytes());
        bytes.extend(self.destination.to_be_bytes());
        bytes.extend(self.sequence.to_be_bytes());
        bytes.extend(self.acknowledgement.to_be_bytes());
        bytes.extend([5 << 4, FLAG_ACK, 0x20, 0, 0, 0, 0, 0, b'x']);
        debug_assert_eq!(bytes.len(), TCP_HEADER_BYTES + 1);
        let mut covered = Vec::new();
        for address in [from, to] {
            match address {
                IpAddr::V4(v4) => covered.extend(v4.octets()),
                IpAddr::V6(v6) => covered.extend(v6.octets()),
            }
        }
        covered.extend([0, 6, 0, 21]);
        covered.extend(&bytes);
        covered.push(0);
        let sum: u32 = covered.chunks_exact(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
        let folded = (sum & 0xffff) + (sum >> 16);
        let checksum = !u16::try_from((folded & 0xffff) + (folded >> 16)).unwrap_or(u16::MAX);
        bytes[16..18].copy_from_slice(&checksum.to_be_bytes());
        bytes
    }
}

/// A raw TCP socket of a pod. The socket is wrapped as a `UdpSocket`, which has `send_to` and
/// `recv`.
fn raw_tcp(bed: &Testbed, pod: &str, address: IpAddr) -> Result<UdpSocket> {
    bed.machines().machine(pod)?.run(|| {
        let socket = Socket::new(Domain::for_address(SocketAddr::new(address, 0)), Type::RAW, Some(Protocol::TCP))?;
        socket.bind(&SocketAddr::new(address, 0).into())?;
        socket.set_read_timeout(Some(QUIET))?;
        Ok(UdpSocket::from(socket))
    })
}

/// The last segment of a connection that has arrived at the server.
fn last_segment(socket: &UdpSocket, family: Family, client_port: u16, server_port: u16) -> Result<Segment> {
    let mut last = None;
    let mut buffer = [0; 2048];
    while let Ok(received) = socket.recv(&mut buffer) {
        let packet = &buffer[..received];
        let header_bytes = if family == Family::V4 { usize::from(packet[0] & 0x0f) * 4 } else { 0 };
        let segment = packet.get(header_bytes..).and_then(Segment::parse);
        last = segment.filter(|found| (found.source, found.destination) == (client_port, server_port)).or(last);
    }
    last.context("no segment of the connection arrived at the server")
}

/// A packet far outside the TCP window does not end its connection. Conntrack classifies the packet
/// as invalid and does not translate the packet's source back. The client would answer the packet
/// with a reset, and the reset would end the connection. The agent's rules therefore drop and count
/// the packet.
pub fn a_packet_outside_the_window_does_not_end_a_connection(bed: &Testbed) -> Result<()> {
    bed.update(|manifests| manifests.add(Service::new("windowed", &["a1"])))?;
    for family in Family::BOTH {
        let (server, client) = (address("a1", family)?, address("a3", family)?);
        let to = bed.address("windowed", Via::ClusterIp, family, "tcp")?;
        let socket = raw_tcp(bed, "a1", server)?;
        let mut held = HeldConnection::open(bed.machines().machine("a3")?, to)?;
        held.check()?;
        let (client_port, server_port) = (held.answer.source.port(), held.answer.port);
        let disturb = || -> Result<()> {
            let heard = last_segment(&socket, family, client_port, server_port)?;
            let stray = Segment {
                source: server_port,
                destination: client_port,
                sequence: heard.acknowledgement.wrapping_add(1 << 28),
                // The client's reset would use this number as its sequence number, so the server
                // would accept the reset.
                acknowledgement: heard.sequence.wrapping_add(heard.payload_bytes),
                payload_bytes: 1,
            };
            socket.send_to(&stray.encode(server, client), SocketAddr::new(client, 0)).context("sending a segment")?;
            std::thread::sleep(QUIET);
            Ok(())
        };
        if matches!(bed.backend(), Backend::Ipvs | Backend::Nftables | Backend::Userspace) {
            // IPVS tracks its connections itself, so it translates this packet without a rule.
            // Rules of nftables have no counter for the packet.
            disturb()?;
            held.check().with_context(|| format!("over {family}, after a segment outside the TCP window"))?;
            continue;
        }
        let node = bed.machines().machine("node-a")?;
        let counted = || -> Result<u64> { Ok(node.run(|| Ok(packet_counters::read()?))?.invalid_dropped) };
        let counted_before = counted()?;
        disturb()?;
        eventually(|| {
            ensure!(counted()? > counted_before, "over {family} the dropped segment was not counted");
            Ok(())
        })?;
        held.check().with_context(|| format!("over {family}, after a segment outside the window"))?;
        // Without the rule the segment must end the connection. If the connection survived, the
        // test would not show that the rule has an effect.
        let lock = bed.machines().xtables_lock("node-a");
        iptables::run(node, bed.backend().variant(), family, &lock, &["-F", "KUBE-FORWARD"])?;
        // On a busy machine, the reset may be late, so the test sends several segments.
        let mut has_ended = false;
        for _ in 0..10 {
            disturb()?;
            has_ended = held.check().is_err();
            if has_ended {
                break;
            }
        }
        ensure!(has_ended, "over {family} the connection survives the segment even without the rule");
    }
    Ok(())
}

/// With NodePorts on 127.0.0.0/8 the kernel accepts packets for this network from neighbours. These
/// packets must not reach sockets that are bound to 127.0.0.1.
pub fn neighbours_cannot_reach_loopback(bed: &Testbed) -> Result<()> {
    const PORT: u16 = 9999;
    let node = bed.machines().machine("node-b")?;
    let listener = node.run(|| {
        let socket = UdpSocket::bind(("127.0.0.1", PORT))?;
        socket.set_read_timeout(Some(Duration::from_secs(60)))?;
        Ok(socket)
    })?;
    let neighbour = neighbour_of_loopback(bed)?;
    let own = address("outside-2", Family::V4)?;
    let socket = neighbour.run(|| Ok(UdpSocket::bind((own, 0))?))?;
    let send = |text: &str| socket.send_to(text.as_bytes(), ("127.0.0.1", PORT)).context("sending to 127.0.0.1");
    send("guarded")?;
    // The datagram has reached the rules.
    std::thread::sleep(QUIET);
    let lock = bed.machines().xtables_lock("node-b");
    iptables::run(node, bed.backend().variant(), Family::V4, &lock, &["-F", "KUBE-LOCALNET-GUARD"])?;
    send("open")?;
    let mut buffer = [0; 64];
    let received = listener.recv(&mut buffer).context("no datagram arrives although the guard is removed")?;
    ensure!(&buffer[..received] == b"open", "{:?} passed the guard", String::from_utf8_lossy(&buffer[..received]));
    Ok(())
}

/// The agent's rules accept health checks that are sent to the node's address. They do not accept
/// health checks that a neighbour sends to 127.0.0.1. An earlier version of the agent put the jump
/// to `KUBE-LOCALNET-GUARD`, which drops packets for 127.0.0.1, behind the rule that accepts health
/// checks. The agent moves this jump to the front.
///
/// Needs machines without running programs.
pub fn health_checks_do_not_open_loopback(bed: &Testbed) -> Result<()> {
    const PORT: u16 = 32_100;
    bed.write(|manifests| {
        let patch = |_: &Service| json!({ "spec": { "healthCheckNodePort": PORT } });
        manifests.add(Service { external_local: true, patch: Some(patch), ..Service::new("balanced", &["b1"]) })
    })?;
    bed.start_programs("node-b", &AgentSetup::default())?;
    let (node, lock) = (bed.machines().machine("node-b")?, bed.machines().xtables_lock("node-b"));
    let neighbour = neighbour_of_loopback(bed)?;
    let own = address("outside-2", Family::V4)?;
    let connect = |to: SocketAddr| {
        neighbour.run(|| {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP))?;
            socket.bind(&SocketAddr::new(own, 0).into())?;
            Ok(socket.connect_timeout(&to.into(), Duration::from_secs(1)).map_err(|error| error.kind()))
        })
    };
    let check = |when: &str| -> Result<()> {
        // The agent opens the port after it has programmed the Service.
        eventually(|| {
            let by_node = connect(SocketAddr::new(address("node-b", Family::V4)?, PORT))?;
            ensure!(by_node == Ok(()), "{when}, a health check at the node's address fails: {by_node:?}");
            Ok(())
        })?;
        let by_loopback = connect(SocketAddr::new(Family::V4.loopback(), PORT))?;
        ensure!(by_loopback == Err(ErrorKind::TimedOut), "{when}, a neighbour connects to 127.0.0.1: {by_loopback:?}");
        Ok(())
    };
    check("after the start")?;

    bed.stop_agent("node-b")?;
    let iptables = |arguments: &str| {
        let arguments: Vec<&str> = arguments.split(' ').collect();
        iptables::run(node, bed.backend().variant(), Family::V4, &lock, &arguments)
    };
    let saved = iptables::save(node, bed.backend().variant(), Family::V4, &lock)?;
    let is_jump = |line: &&str| line.starts_with("-A INPUT") && line.ends_with("-j KUBE-LOCALNET-GUARD");
    let position = saved.lines().filter(|line| line.starts_with("-A INPUT ")).position(|line| is_jump(&line));
    let position = position.with_context(|| format!("no jump in INPUT leads to the guard:\n{saved}"))? + 1;
    let rule = saved.lines().find(is_jump).unwrap_or_default().replace("-A INPUT ", "");
    iptables(&format!("-D INPUT {position}"))?;
    let file = bed.machines().folder().join("guard.rules");
    std::fs::write(&file, format!("*filter\n-A INPUT {rule}\nCOMMIT\n"))?;
    iptables::restore(node, bed.backend().variant(), Family::V4, &lock, &file)?;
    bed.start_programmed("node-b", &AgentSetup::default())?;
    check("after an update of the agent")
}

/// A machine outside the cluster that sends packets for 127.0.0.1 to node-b.
pub(super) fn neighbour_of_loopback(bed: &Testbed) -> Result<&Namespace> {
    let neighbour = bed.machines().machine("outside-2")?;
    let gateway = address("node-b", Family::V4)?;
    neighbour.set_sysctls(&[("ipv4/conf/all/route_localnet", "1")])?;
    neighbour.ip_batch(&format!("addr del 127.0.0.1/8 dev lo\nroute add 127.0.0.1/32 via {gateway}\n"))?;
    Ok(neighbour)
}

/// A program on a node sends UDP to a NodePort without endpoints and receives an ICMP refusal, like
/// every other client. A REJECT rule in OUTPUT would make the send fail with EPERM instead, which
/// programs do not treat as a refusal.
pub fn a_node_gets_an_icmp_refusal(bed: &Testbed) -> Result<()> {
    bed.update(|manifests| manifests.add(Service::new("empty", &[])))?;
    let node = bed.machines().machine("node-a")?;
    for family in Family::BOTH {
        for to_node in ["node-a", "node-b"] {
            let to = bed.address("empty", Via::NodePort(to_node), family, "udp")?;
            let answer = node.run(|| {
                let socket = UdpSocket::bind((address("node-a", family)?, 0))?;
                socket.set_read_timeout(Some(ANSWER_TIMEOUT))?;
                socket.connect(to)?;
                socket.send(b"who").with_context(|| format!("sending to {to}"))?;
                Ok(socket.recv(&mut [0; 64]).map_err(|error| error.kind()))
            })?;
            ensure!(answer == Err(ErrorKind::ConnectionRefused), "{to} is not refused: {answer:?}");
        }
    }
    Ok(())
}

pub(super) fn address(machine: &str, family: Family) -> Result<IpAddr> {
    Ok(plan::address(machine).with_context(|| format!("{machine} has no address"))?.of(family))
}
