//! What an agent's settings do to packets.

use std::net::SocketAddr;

use anyhow::{Result, ensure};

use super::case::{Case, EVERY_TRANSPORT, SourceAddress, ask};
use super::run::run;
use crate::testbed::manifests::{Service, Via};
use crate::testbed::{AgentSetup, Backend, Family, Manifests, Outcome, Request, Testbed, Transport, iptables};

use SourceAddress::{Kept, Masqueraded};
use Via::{ClusterIp, ExternalIp, LoadBalancerIp, Localhost, NodePort};

/// Services of the scenario here.
pub fn services() -> Result<Manifests> {
    let mut manifests = Manifests::default();
    manifests.add(Service::new("web", &["a1", "b1", "c1"]))?;
    manifests.add(Service::new("of-b", &["b1", "b2"]))?;
    manifests.add(Service { external_local: true, ..Service::new("local-of-b", &["b1", "c1"]) })?;
    manifests.add(Service { external_local: true, ..Service::new("local-elsewhere", &["a1", "c1"]) })?;
    Ok(manifests)
}

/// Three nodes, set up in three ways: node-a masquerades everything, node-b cannot tell pods from
/// others, node-c marks packets by another bit.
///
/// On machines with [`services`] on which nothing runs yet.
pub fn masquerading(bed: &Testbed) -> Result<()> {
    const WEB: &[&str] = &["a1", "b1", "c1"];
    bed.start_control_plane()?;
    bed.start_agent_with("node-a", &AgentSetup::with(&["--masquerade-all"]))?;
    bed.start_agent_with("node-b", &AgentSetup { cannot_tell_pods: true, ..AgentSetup::default() })?;
    bed.start_agent_with("node-c", &AgentSetup::with(&["--iptables-masquerade-bit", "7"]))?;
    bed.wait_programmed()?;
    const PORTS: &[&str] = &["tcp", "udp"];
    run(
        bed,
        &[
            // node-a: all that goes to cluster addresses, and nothing more than usual of the rest.
            ask("a3", "web", ClusterIp).ports(PORTS).answered(WEB, Masqueraded("node-a")),
            ask("node-a", "web", ClusterIp).ports(PORTS).answered(WEB, Masqueraded("node-a")),
            ask("outside-1", "web", ClusterIp).answered(WEB, Masqueraded("node-a")),
            ask("a3", "local-of-b", ClusterIp).answered(&["b1", "c1"], Masqueraded("node-a")),
            ask("a3", "local-of-b", LoadBalancerIp).answered(&["b1", "c1"], Kept),
            // node-b: nothing that goes to cluster addresses...
            ask("b3", "web", ClusterIp).ports(PORTS).answered(WEB, Kept),
            ask("outside-2", "of-b", ClusterIp).ports(PORTS).answered(&["b1", "b2"], Kept),
            ask("node-b", "of-b", ClusterIp).answered(&["b1", "b2"], Kept),
            // ...but what goes to other addresses.
            ask("outside-2", "of-b", NodePort("node-b")).answered(&["b1", "b2"], Masqueraded("node-b")),
            // Its pods are as good as outside: no short cut for them, though there is one for the
            // node.
            ask("b3", "local-of-b", ExternalIp).answered(&["b1"], Kept),
            ask("b3", "local-elsewhere", ExternalIp).dropped(),
            ask("node-b", "local-elsewhere", ExternalIp).answered(&["a1", "c1"], Masqueraded("node-b")),
            // node-c: as usual.
            ask("c2", "web", ClusterIp).answered(WEB, Kept),
            ask("c2", "web", NodePort("node-c")).ports(PORTS).answered(WEB, Masqueraded("node-c")),
            ask("node-c", "web", ClusterIp).answered(WEB, Masqueraded("node-c")),
            ask("outside-1", "web", NodePort("node-c")).ports(PORTS).answered(WEB, Masqueraded("node-c")),
        ],
    )?;
    let lock = bed.machines().xtables_lock("node-c");
    for family in Family::BOTH {
        let rules = iptables::save(bed.machines().machine("node-c")?, bed.backend().variant(), family, &lock)?;
        // Set, cleared before the packet leaves, and the default bit is nobody's.
        for expected in ["--set-xmark 0x80/0x80", "-A KUBE-POSTROUTING -j MARK --set-xmark 0x80/0x0"] {
            ensure!(rules.contains(expected), "{expected} is not among the rules:\n{rules}");
        }
        ensure!(!rules.contains("0x4000"), "the default bit is used as well:\n{rules}");
    }
    Ok(())
}

/// Addresses that nodes have besides the planned one. Nobody sends from the second of each pair,
/// which is deprecated from the start.
const FURTHER: [(&str, &str, &str); 3] = [
    ("node-a", "192.0.2.21", "2001:db8:0:1::21"),
    ("node-b", "192.0.2.22", "2001:db8:0:1::22"),
    ("node-c", "192.0.2.23", "2001:db8:0:1::23"),
];

/// Three nodes that answer NodePorts on other addresses, tell their pods in other ways, and of
/// which one ignores externalIPs.
///
/// On machines with [`services`] on which nothing runs yet.
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
    // One range, of IPv4; pods by how their interfaces are called.
    let by_name = ["--detect-local-mode=InterfaceNamePrefix", "--pod-interface-name-prefix=veth-"];
    start("node-a", &[&by_name[..], &["--nodeport-addresses=192.0.2.11/32"]].concat())?;
    // All addresses but localhost; only b3 is seen as a pod, by its interface; no externalIPs.
    let by_bridge = ["--detect-local-mode=BridgeInterface", "--pod-bridge-interface=veth-b3"];
    let fewer = ["--iptables-localhost-nodeports=false", "--feature-gates=AllowServiceExternalIPs=false"];
    start("node-b", &[&by_bridge[..], &fewer].concat())?;
    // The Node's own addresses, and pods by its podCIDRs.
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
        // A pod takes the short way, in each mode.
        ask("a3", "local-of-b", LoadBalancerIp).answered(&["b1", "c1"], Kept),
        ask("c2", "local-of-b", LoadBalancerIp).answered(&["b1", "c1"], Kept),
        ask("b3", "local-elsewhere", LoadBalancerIp).answered(&["a1", "c1"], Kept),
        // Another pod of node-b is as good as outside.
        ask("b2", "web", ClusterIp).answered(WEB, Masqueraded("node-b")),
        ask("b2", "local-elsewhere", LoadBalancerIp).dropped(),
        // 127.0.0.1 is not in the range, and is switched off, and is not the Node's.
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
            // node-a names no range of IPv6, so that all its addresses of that family answer.
            let answers = node == "node-b" || (node == "node-a" && family == Family::V6);
            ensure!(matches!(outcome, Outcome::Answered(_)) == answers, "NodePort at {to} of {node}: {outcome}");
            ensure!(answers || outcome == Outcome::Refused, "NodePort at {to} of {node}: {outcome}");
        }
    }
    Ok(())
}

/// A pod that a service sends to itself reaches itself where the host's firewall forwards nothing
/// by default: the proxy marks such connections as its own, and lets through what it has marked.
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
            // Other connections are none of the proxy's business: the firewall decides.
            ask("a3", "self", ClusterIp)
                .dropped()
                .except(Backend::Ipvs, "IPVS takes connections in INPUT and sends them on from OUTPUT"),
        ],
    )
}
