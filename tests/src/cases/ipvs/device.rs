//! In mode ipvs the node holds the services' addresses on the device `kube-ipvs0`. Routing daemons
//! must not announce the services' addresses. Rules of other programs for the node's addresses must
//! not apply to the services' addresses.

use anyhow::{Context, Result, ensure};

use super::super::case::{SourceAddress, ask};
use super::super::run::run;
use super::{difference, kernel, restart, without_marker};
use crate::testbed::client::HeldConnection;
use crate::testbed::iptables::{self, Variant};
use crate::testbed::manifests::{Service, Via};
use crate::testbed::plan::{self, LINE_PORT};
use crate::testbed::{AgentSetup, Family, Testbed};

use SourceAddress::{Kept, Masqueraded};
use Via::{ClusterIp, ExternalIp, LoadBalancerIp, NodePort};

/// The device is down, so that routing daemons do not announce its addresses. An earlier version of
/// the agent created a device that is up. The agent replaces such a device, and connections
/// continue.
///
/// Needs machines with [`super::super::lifecycle::some_services`] and no running programs.
pub fn a_device_that_is_up_is_replaced(bed: &Testbed) -> Result<()> {
    bed.start_programs("node-a", &AgentSetup::default())?;
    let node = bed.machines().machine("node-a")?;
    let is_down = |when: &str| -> Result<()> {
        let shown = node.tool("ip", &["link", "show", "kube-ipvs0"])?;
        ensure!(!shown.contains("UP"), "{when}, the device is up: {shown}");
        Ok(())
    };
    let answers = || {
        run(
            bed,
            &[
                ask("a3", "steady", ClusterIp).ports(&["tcp", "udp"]).answered(&["a1", "b1"], Kept),
                ask("outside-1", "steady", ExternalIp).answered(&["a1", "b1"], Masqueraded("node-a")),
            ],
        )
    };
    is_down("after the start")?;
    answers()?;
    let before = without_marker(kernel(bed, "node-a")?);
    let to = bed.address("steady", ClusterIp, Family::V4, "tcp")?;
    let mut held = HeldConnection::open(bed.machines().machine("a3")?, to)?;
    node.ip_batch("link set kube-ipvs0 up\n")?;
    restart(bed, &AgentSetup::default())?;
    is_down("after a restart of the agent")?;
    let different = difference(&before, &without_marker(kernel(bed, "node-a")?));
    ensure!(different.is_empty(), "different after a restart of the agent:\n{}", different.join("\n"));
    held.check().context("after a restart of the agent")?;
    answers()
}

/// A rule of another program follows Headgate's rules and translates packets that are sent to a
/// port of the node. CNI plugins write such rules for host ports, and Docker writes such rules for
/// published ports. The rule must not receive connections to a service's address.
///
/// Needs machines with [`super::super::lifecycle::some_services`] and no running programs.
pub fn rules_of_others_for_host_ports_do_not_get_service_traffic(bed: &Testbed) -> Result<()> {
    bed.write(|manifests| manifests.add(Service { external_local: true, ..Service::new("local", &["a1"]) }))?;
    bed.start_programs("node-a", &AgentSetup::default())?;
    let (node, lock) = (bed.machines().machine("node-a")?, bed.machines().xtables_lock("node-a"));
    let host_port = plan::address("a2").context("the plan has no address for a2")?;
    for family in Family::BOTH {
        let to = std::net::SocketAddr::new(host_port.of(family), LINE_PORT);
        for chain in ["PREROUTING", "OUTPUT"] {
            for protocol in ["tcp", "udp"] {
                let rule = format!(
                    "-t nat -A {chain} -p {protocol} --dport 80 -m addrtype --dst-type LOCAL -j DNAT --to-destination {to}"
                );
                iptables::run(node, Variant::Legacy, family, &lock, &rule.split(' ').collect::<Vec<_>>())?;
            }
        }
    }
    const BOTH: &[&str] = &["a1", "b1"];
    const PORTS: &[&str] = &["tcp", "udp"];
    let by_node = Masqueraded("node-a");
    run(
        bed,
        &[
            ask("a3", "steady", ClusterIp).ports(PORTS).answered(BOTH, Kept),
            ask("node-a", "steady", ClusterIp).ports(PORTS).answered(BOTH, by_node),
            ask("outside-1", "steady", ExternalIp).ports(PORTS).answered(BOTH, by_node),
            ask("outside-1", "steady", LoadBalancerIp).ports(PORTS).answered(BOTH, by_node),
            ask("outside-1", "steady", NodePort("node-a")).ports(PORTS).answered(BOTH, by_node),
            ask("outside-1", "local", ExternalIp).ports(PORTS).answered(&["a1"], Kept),
            ask("outside-1", "local", LoadBalancerIp).ports(PORTS).answered(&["a1"], Kept),
            ask("a3", "empty", ClusterIp).ports(PORTS).refused(),
        ],
    )?;
    // Connections to the host port reach a2, so the other program's rule is effective.
    let outside = bed.machines().machine("outside-1")?;
    for family in Family::BOTH {
        let to = std::net::SocketAddr::new(
            plan::address("node-a").context("the plan has no address for node-a")?.of(family),
            80,
        );
        let held = HeldConnection::open(outside, to)?;
        ensure!(held.answer.server == "a2", "the host port {to} leads to {}", held.answer.server);
    }
    Ok(())
}
