//! Cases of mode nftables: packets that no Service serves.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::case::{SourceAddress, ask};
use super::changes::eventually;
use super::raw::{address, neighbour_of_loopback};
use super::run::run;
use crate::testbed::manifests::{Service, Via};
use crate::testbed::{AgentSetup, Family, Outcome, Request, Testbed, Transport};

use SourceAddress::Masqueraded;
use Via::{ClusterIp, ExternalIp};

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
    bed.start_control_plane()?;
    bed.start_agent("node-a")?;
    bed.wait_programmed()?;
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
        let outcome = bed.machines().ask("a3", &Request::new(Transport::Tcp, unused))?;
        ensure!(outcome == Outcome::TimedOut, "a3 asks {unused}: {outcome}, expected: timed out");
    }
    run(
        bed,
        &[ask("outside-1", "web", ExternalIp).ports(&["tcp", "udp"]).answered(&["a1", "b1"], Masqueraded("node-a"))],
    )
}

/// With NodePorts on 127.0.0.0/8, datagrams of a neighbour for 127.0.0.1 do not reach the node's
/// sockets. Without these NodePorts the agent's table has no guard: the same datagrams arrive,
/// because the kernel parameter `route_localnet` stays on.
///
/// Needs machines without services and without running programs.
pub fn neighbours_cannot_reach_loopback(bed: &Testbed) -> Result<()> {
    const PORT: u16 = 9999;
    bed.start_control_plane()?;
    bed.start_agent("node-b")?;
    bed.wait_programmed()?;
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
