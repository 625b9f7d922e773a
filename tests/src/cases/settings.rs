//! Effects of agents' settings on packets.

use std::net::SocketAddr;

use anyhow::{Result, ensure};

use super::case::{Case, EVERY_TRANSPORT, SourceAddress, ask};
use super::run::run;
use crate::testbed::manifests::{Service, Via};
use crate::testbed::{AgentSetup, Backend, Family, Manifests, Outcome, Request, Testbed, Transport, iptables};

use SourceAddress::{Kept, Masqueraded};
use Via::{ClusterIp, ExternalIp, LoadBalancerIp, Localhost, NodePort};

/// The services of this module's scenarios.
pub fn services() -> Result<Manifests> {
    let mut manifests = Manifests::default();
    manifests.add(Service::new("web", &["a1", "b1", "c1"]))?;
    manifests.add(Service::new("of-b", &["b1", "b2"]))?;
    manifests.add(Service { external_local: true, ..Service::new("local-of-b", &["b1", "c1"]) })?;
    manifests.add(Service { external_local: true, ..Service::new("local-elsewhere", &["a1", "c1"]) })?;
    Ok(manifests)
}

/// Three agents with different settings: node-a masquerades everything, node-b cannot tell pods
/// from other clients, and node-c uses another bit of the packet mark.
///
/// Needs machines with [`services`] and no running programs.
pub fn masquerading(bed: &Testbed) -> Result<()> {
    const WEB: &[&str] = &["a1", "b1", "c1"];
    bed.start_control_plane()?;
    bed.start_agent_with("node-a", &AgentSetup::with(&["--masquerade-all"]))?;
    bed.start_agent_with("node-b", &AgentSetup { cannot_tell_pods: true, ..AgentSetup::default() })?;
    bed.start_programmed("node-c", &AgentSetup::with(&["--iptables-masquerade-bit", "7"]))?;
    const PORTS: &[&str] = &["tcp", "udp"];
    run(
        bed,
        &[
            // node-a masquerades all requests to cluster addresses. The option does not affect
            // requests to other addresses.
            ask("a3", "web", ClusterIp).ports(PORTS).answered(WEB, Masqueraded("node-a")),
            ask("node-a", "web", ClusterIp).ports(PORTS).answered(WEB, Masqueraded("node-a")),
            ask("outside-1", "web", ClusterIp).answered(WEB, Masqueraded("node-a")),
            ask("a3", "local-of-b", ClusterIp).answered(&["b1", "c1"], Masqueraded("node-a")),
            ask("a3", "local-of-b", LoadBalancerIp).answered(&["b1", "c1"], Kept),
            // node-b masquerades no requests to cluster addresses.
            ask("b3", "web", ClusterIp).ports(PORTS).answered(WEB, Kept),
            ask("outside-2", "of-b", ClusterIp).ports(PORTS).answered(&["b1", "b2"], Kept),
            ask("node-b", "of-b", ClusterIp).answered(&["b1", "b2"], Kept),
            // node-b masquerades requests to its other addresses.
            ask("outside-2", "of-b", NodePort("node-b")).answered(&["b1", "b2"], Masqueraded("node-b")),
            // node-b treats its pods as outside clients, so the policy Local applies to pods. The
            // node itself still reaches all endpoints.
            ask("b3", "local-of-b", ExternalIp).answered(&["b1"], Kept),
            ask("b3", "local-elsewhere", ExternalIp).dropped(),
            ask("node-b", "local-elsewhere", ExternalIp).answered(&["a1", "c1"], Masqueraded("node-b")),
            // On node-c, the choice of the mark does not affect which requests are masqueraded.
            ask("c2", "web", ClusterIp).answered(WEB, Kept),
            ask("c2", "web", NodePort("node-c")).ports(PORTS).answered(WEB, Masqueraded("node-c")),
            ask("node-c", "web", ClusterIp).answered(WEB, Masqueraded("node-c")),
            ask("outside-1", "web", NodePort("node-c")).ports(PORTS).answered(WEB, Masqueraded("node-c")),
        ],
    )?;
    if bed.backend().uses_nftables() {
        // Mode nftables uses no packet mark.
        return Ok(());
    }
    let lock = bed.machines().xtables_lock("node-c");
    for family in Family::BOTH {
        let rules = iptables::save(bed.machines().machine("node-c")?, bed.backend().variant(), family, &lock)?;
        // The rules set the chosen bit, and clear this bit before the packet leaves the node. The
        // rules do not use the default bit.
        for expected in ["--set-xmark 0x80/0x80", "-A KUBE-POSTROUTING -j MARK --set-xmark 0x80/0x0"] {
            ensure!(rules.contains(expected), "the rules do not contain {expected}:\n{rules}");
        }
        ensure!(!rules.contains("0x4000"), "the rules use the default bit:\n{rules}");
    }
    Ok(())
}

/// Additional addresses of nodes, in both families. The kernel never chooses the IPv6 address as a
/// source, because the address is deprecated from the start.
const FURTHER: [(&str, &str, &str); 3] = [
    ("node-a", "192.0.2.21", "2001:db8:0:1::21"),
    ("node-b", "192.0.2.22", "2001:db8:0:1::22"),
    ("node-c", "192.0.2.23", "2001:db8:0:1::23"),
];

/// Three agents that serve NodePorts on different addresses and detect local pods in different
/// ways. One agent ignores externalIPs.
///
/// Needs machines with [`services`] and no running programs.
pub fn addresses_and_pods(bed: &Testbed) -> Result<()> {
    const WEB: &[&str] = &["a1", "b1", "c1"];
    for (node, v4, v6) in FURTHER {
        let commands = format!("addr add {v4}/24 dev eth0\naddr add {v6}/64 dev eth0 nodad preferred_lft 0\n");
        bed.machines().machine(node)?.ip_batch(&commands)?;
    }
    bed.start_control_plane()?;
    let start = |node, arguments: &[&str]| {
        bed.start_agent_with(node, &AgentSetup { cannot_tell_pods: true, ..AgentSetup::with(arguments) })
    };
    // node-a serves NodePorts on one IPv4 range. The prefix of interface names identifies pods.
    let by_name = ["--detect-local-mode=InterfaceNamePrefix", "--pod-interface-name-prefix=veth-"];
    start("node-a", &[&by_name[..], &["--nodeport-addresses=192.0.2.11/32"]].concat())?;
    // node-b serves NodePorts on all addresses except localhost, and ignores externalIPs. The
    // interface name identifies only b3 as a pod.
    let by_bridge = ["--detect-local-mode=BridgeInterface", "--pod-bridge-interface=veth-b3"];
    let fewer = ["--iptables-localhost-nodeports=false", "--feature-gates=AllowServiceExternalIPs=false"];
    start("node-b", &[&by_bridge[..], &fewer].concat())?;
    // node-c serves NodePorts on the Node's own addresses. The Node's podCIDRs identify pods.
    start("node-c", &["--detect-local-mode=NodeCIDR", "--nodeport-addresses=primary"])?;
    bed.wait_programmed()?;

    let pods = |node: &'static str, pod: &'static str, outside: &'static str| {
        [
            ask(pod, "web", ClusterIp).ports(&["tcp", "udp"]).answered(WEB, Kept),
            ask(node, "web", ClusterIp).answered(WEB, Masqueraded(node)),
            ask(outside, "web", NodePort(node)).ports(&["tcp", "udp"]).answered(WEB, Masqueraded(node)),
        ]
    };
    let mut cases: Vec<Case> =
        [pods("node-a", "a3", "outside-1"), pods("node-b", "b3", "outside-2"), pods("node-c", "c2", "outside-1")]
            .concat();
    cases.extend([
        ask("outside-1", "web", ClusterIp).answered(WEB, Masqueraded("node-a")),
        // In each mode a pod reaches all endpoints in spite of the policy Local.
        ask("a3", "local-of-b", LoadBalancerIp).answered(&["b1", "c1"], Kept),
        ask("c2", "local-of-b", LoadBalancerIp).answered(&["b1", "c1"], Kept),
        ask("b3", "local-elsewhere", LoadBalancerIp).answered(&["a1", "c1"], Kept),
        // node-b treats its other pods as outside clients.
        ask("b2", "web", ClusterIp).answered(WEB, Masqueraded("node-b")),
        ask("b2", "local-elsewhere", LoadBalancerIp).dropped(),
        // 127.0.0.1 is not in node-a's range, is turned off on node-b, and is not the address of
        // the Node node-c.
        ask("node-a", "web", Localhost).over(&[Family::V4]).refused(),
        ask("node-b", "web", Localhost).over(&[Family::V4]).refused(),
        ask("node-c", "web", Localhost).over(&[Family::V4]).refused(),
        ask("outside-2", "web", ExternalIp).dropped(),
        ask("b3", "web", ExternalIp).dropped(),
        ask("outside-2", "web", LoadBalancerIp).answered(WEB, Masqueraded("node-b")),
        ask("a3", "web", ExternalIp).answered(WEB, Masqueraded("node-a")),
    ]);
    run(bed, &cases)?;
    for (node, v4, v6) in FURTHER {
        for (family, address) in [(Family::V4, v4), (Family::V6, v6)] {
            let planned = bed.address("web", NodePort(node), family, "tcp")?;
            let to = SocketAddr::new(address.parse()?, planned.port());
            let outcome = bed.machines().ask("outside-1", &Request::new(Transport::Tcp, to))?;
            // node-a has no IPv6 range, so all its IPv6 addresses answer.
            let answers = node == "node-b" || (node == "node-a" && family == Family::V6);
            ensure!(matches!(outcome, Outcome::Answered(_)) == answers, "NodePort at {to} of {node}: {outcome}");
            ensure!(answers || outcome == Outcome::Refused, "NodePort at {to} of {node}: {outcome}");
        }
    }
    Ok(())
}

/// A pod reaches itself through a service although the host's firewall drops forwarded packets by
/// default. The proxy marks these connections, and its rules accept marked packets.
pub fn a_pod_reaches_itself_where_forwarding_is_denied(bed: &Testbed) -> Result<()> {
    bed.update(|manifests| {
        manifests.add(Service::new("self", &["a1"]))?;
        manifests.add(Service { external_local: true, ..Service::new("self-local", &["a1"]) })
    })?;
    let (node, lock) = (bed.machines().machine("node-a")?, bed.machines().xtables_lock("node-a"));
    for family in Family::BOTH {
        iptables::run(node, bed.backend().variant(), family, &lock, &["-P", "FORWARD", "DROP"])?;
    }
    const A1: &[&str] = &["a1"];
    let reaches_itself = |service, via| ask("a1", service, via).answered(A1, Masqueraded("node-a"));
    run(
        bed,
        &[
            ask("a1", "self", ClusterIp).ports(EVERY_TRANSPORT).answered(A1, Masqueraded("node-a")),
            reaches_itself("self", ExternalIp),
            reaches_itself("self", NodePort("node-a")),
            reaches_itself("self-local", LoadBalancerIp),
            // The proxy does not accept other connections, so the firewall drops them.
            ask("a3", "self", ClusterIp)
                .dropped()
                .except(Backend::Ipvs, "IPVS packets pass INPUT and OUTPUT, not FORWARD"),
        ],
    )
}
