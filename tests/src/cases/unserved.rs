//! Cases of mode nftables: packets that no Service serves.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;
use socket2::{Domain, Protocol, Socket, Type};

use super::case::{SourceAddress, ask};
use super::changes::eventually;
use super::nftables::metric;
use super::raw::{address, neighbour_of_loopback};
use super::run::run;
use crate::testbed::manifests::{Service, Via};
use crate::testbed::{AgentSetup, Family, Outcome, Request, Testbed, Transport};

use SourceAddress::Masqueraded;
use Via::{ClusterIp, ExternalIp, NodePort};

/// A port that a Service does not have is refused at its ClusterIP. An unused address of a
/// ServiceCIDR answers nothing. An externalIP that an interface of the node holds is served.
///
/// Needs machines without services and without running programs.
pub fn addresses(bed: &Testbed) -> Result<()> {
    let node = bed.machines().machine("node-a")?;
    let unused: [IpAddr; 2] = ["10.97.0.77".parse()?, "fd00:10:97::77".parse()?];
    bed.write(|manifests| {
        manifests.add(Service::new("web", &["a1", "b1"]))?;
        manifests.further.push(json!({
            "apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR", "metadata": { "name": "unused" },
            "spec": { "cidrs": ["10.97.0.0/24", "fd00:10:97::/112"] },
        }));
        Ok(())
    })?;
    for family in Family::BOTH {
        let address = bed.address("web", ExternalIp, family, "tcp")?.ip();
        // The kernel never chooses these addresses as a source.
        let rest = if address.is_ipv4() { "32 dev lo scope host" } else { "128 dev lo preferred_lft 0" };
        node.ip_batch(&format!("addr add {address}/{rest}\n"))?;
    }
    bed.start_programs("node-a", &AgentSetup::default())?;
    for (family, unused) in Family::BOTH.into_iter().zip(unused) {
        let cluster = bed.address("web", ClusterIp, family, "tcp")?;
        for from in ["a3", "outside-1"] {
            for transport in [Transport::Tcp, Transport::Udp] {
                let ask = |to: SocketAddr| bed.machines().ask(from, &Request::new(transport, to));
                let undefined = SocketAddr::new(cluster.ip(), 4);
                let outcome = ask(undefined)?;
                ensure!(outcome == Outcome::Refused, "{from} asks {undefined}: {outcome}, expected: refused");
            }
        }
        let unused = SocketAddr::new(unused, 80);
        let outcome = bed.machines().ask("a3", &Request::new(Transport::Tcp, unused).expecting_silence())?;
        ensure!(outcome == Outcome::TimedOut, "a3 asks {unused}: {outcome}, expected: timed out");
    }
    run(
        bed,
        &[ask("outside-1", "web", ExternalIp).ports(&["tcp", "udp"]).answered(&["a1", "b1"], Masqueraded("node-a"))],
    )
}

/// An address that an interface gets while the agent runs answers NodePorts, and connections to the
/// address are masqueraded. The agent writes two elements, and makes no full sync.
///
/// Needs machines without services and without running programs.
pub fn a_new_address_of_the_node_answers_node_ports(bed: &Testbed) -> Result<()> {
    bed.write(|manifests| manifests.add(Service::new("web", &["b1"])))?;
    bed.start_programs("node-a", &AgentSetup::default())?;
    let full_syncs = || metric(bed, "headgate_agent_apply_duration_seconds_count{kind=\"full\"}");
    let before = full_syncs()?;
    bed.machines()
        .machine("node-a")?
        .ip_batch("addr add 192.0.2.21/24 dev eth0\naddr add 2001:db8:0:1::21/64 dev eth0 nodad preferred_lft 0\n")?;
    for (family, further) in [(Family::V4, "192.0.2.21"), (Family::V6, "2001:db8:0:1::21")] {
        let node_port = bed.address("web", NodePort("node-a"), family, "tcp")?.port();
        let to = SocketAddr::new(further.parse()?, node_port);
        eventually(|| {
            let outcome = bed.machines().ask("outside-1", &Request::new(Transport::Tcp, to))?;
            let Outcome::Answered(answer) = &outcome else { bail!("{to}: {outcome}") };
            ensure!(answer.source.ip() == address("node-a", family)?, "{to}: {outcome}");
            Ok(())
        })?;
    }
    ensure!(full_syncs()? == before, "an address caused a full sync");
    Ok(())
}

/// The answer to an echo request to this address: the sender's address, or `None` if the request
/// was refused.
fn ping(bed: &Testbed, from: &str, to: IpAddr) -> Result<Option<IpAddr>> {
    const ECHO_V4: u8 = 8;
    const ECHO_V6: u8 = 128;
    let machine = bed.machines().machine(from)?;
    machine.set_sysctls(&[("ipv4/ping_group_range", "0 0")])?;
    machine.run(|| {
        let (domain, protocol, kind) = match to {
            IpAddr::V4(_) => (Domain::IPV4, Protocol::ICMPV4, ECHO_V4),
            IpAddr::V6(_) => (Domain::IPV6, Protocol::ICMPV6, ECHO_V6),
        };
        let socket = Socket::new(domain, Type::DGRAM, Some(protocol))?;
        socket.set_read_timeout(Some(Duration::from_secs(60)))?;
        socket.connect(&SocketAddr::new(to, 0).into())?;
        socket.send(&[kind, 0, 0, 0, 0, 0, 0, 1])?;
        let mut answer = [0; 64];
        let socket = UdpSocket::from(socket);
        match socket.recv_from(&mut answer) {
            Ok((_, sender)) => Ok(Some(sender.ip())),
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => Ok(None),
            Err(error) => Err(error).with_context(|| format!("{from} pings {to}")),
        }
    })
}

/// A node with the flag `--nftables-reply-to-ping` answers pings to ClusterIPs. Other nodes refuse
/// them.
///
/// Needs machines without services and without running programs.
pub fn a_node_answers_pings_if_told_to(bed: &Testbed) -> Result<()> {
    bed.write(|manifests| {
        manifests.add(Service::new("web", &["a1", "b1"]))?;
        manifests.add(Service::new("without-endpoints", &[]))
    })?;
    bed.start_control_plane()?;
    bed.start_agent_with("node-a", &AgentSetup::with(&["--nftables-reply-to-ping"]))?;
    bed.start_programmed("node-b", &AgentSetup::default())?;
    for family in Family::BOTH {
        for service in ["web", "without-endpoints"] {
            let to = bed.service(service)?.cluster_ip(family);
            for from in ["a3", "outside-1", "node-a"] {
                let answer = ping(bed, from, to)?;
                ensure!(answer == Some(to), "{from} pings {to}: {answer:?}");
            }
            for from in ["b3", "outside-2"] {
                let answer = ping(bed, from, to)?;
                ensure!(answer.is_none(), "{from} pings {to}: {answer:?}");
            }
        }
    }
    run(bed, &[ask("a3", "web", ClusterIp).ports(&["tcp", "udp"]).answered(&["a1", "b1"], SourceAddress::Kept)])
}

/// With NodePorts on 127.0.0.0/8, datagrams of a neighbour for 127.0.0.1 do not reach the node's
/// sockets. Without these NodePorts the agent's table has no guard: the same datagrams arrive,
/// because the kernel parameter `route_localnet` stays on.
///
/// Needs machines without services and without running programs.
pub fn neighbours_cannot_reach_loopback(bed: &Testbed) -> Result<()> {
    const PORT: u16 = 9999;
    bed.start_programs("node-b", &AgentSetup::default())?;
    let listener = bed.machines().machine("node-b")?.run(|| {
        let socket = UdpSocket::bind(("127.0.0.1", PORT))?;
        socket.set_read_timeout(Some(Duration::from_millis(500)))?;
        Ok(socket)
    })?;
    let neighbour = neighbour_of_loopback(bed)?;
    let own = address("outside-2", Family::V4)?;
    let socket = neighbour.run(|| Ok(UdpSocket::bind((own, 0))?))?;
    let send = |text: &str| socket.send_to(text.as_bytes(), ("127.0.0.1", PORT)).context("sending to 127.0.0.1");
    send("guarded")?;
    bed.kill_agent("node-b")?;
    bed.start_agent_with("node-b", &AgentSetup::with(&["--iptables-localhost-nodeports=false"]))?;
    eventually(|| {
        send("open")?;
        let mut buffer = [0; 64];
        let received = listener.recv(&mut buffer).context("no datagram arrives although there is no guard")?;
        let text = String::from_utf8_lossy(&buffer[..received]);
        if text != "open" {
            // The test fails at once: the datagram was sent while the guard existed.
            panic!("{text:?} passed the guard");
        }
        Ok(())
    })
}
