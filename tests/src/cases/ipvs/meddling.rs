//! Other programs change the device, the sets and the virtual servers while an agent runs, or turn
//! IPv6 off.

use anyhow::{Context, Result, ensure};

use super::super::case::{SourceAddress, ask};
use super::super::changes::within;
use super::super::run::run;
use super::{CHANGED_BY_HAND, difference, kernel, returns_to, without_marker};
use crate::testbed::manifests::{Service, Via};
use crate::testbed::{AgentSetup, Family, Namespace, Testbed};

use SourceAddress::{Kept, Masqueraded};
use Via::{ClusterIp, LoadBalancerIp};

type Step<'a> = &'a dyn Fn() -> Result<()>;

/// Another program removes objects that a change needs. When the agent programs the next change, it
/// notices that objects are missing, and restores all of them before it reports the change as
/// programmed. The agent does not wait for its periodic check.
///
/// Needs machines with [`super::super::lifecycle::some_services`] and no running programs.
pub fn a_change_restores_objects_that_were_removed(bed: &Testbed) -> Result<()> {
    bed.start_programs("node-a", &AgentSetup::with(&["--ipvs-sync-period", "1h"]))?;
    let node = bed.machines().machine("node-a")?;
    let change_and_undo =
        || bed.set_endpoints("steady", &["a1", "b2"]).and_then(|()| bed.set_endpoints("steady", &["a1", "b1"]));
    let affinity = || -> Result<()> {
        for timeout in [Some(600), None] {
            bed.update_service("steady", |service| service.affinity_timeout_seconds = timeout)?;
        }
        Ok(())
    };
    let node_port = || -> Result<()> {
        bed.update(|manifests| manifests.add(Service::new("new", &["a2"])))?;
        bed.update(|manifests| manifests.remove("new").map(drop))
    };
    let flush_servers = || node.tool("ipvsadm", &["-C"]).map(drop);
    let steps: [(&str, Step<'_>, Step<'_>); 5] = [
        ("virtual servers were flushed, and endpoints change", &flush_servers, &change_and_undo),
        ("virtual servers were flushed, and settings change", &flush_servers, &affinity),
        ("the device was removed", &|| node.ip_batch("link del kube-ipvs0\n"), &change_and_undo),
        ("the device was brought up", &|| node.ip_batch("link set kube-ipvs0 up\n"), &change_and_undo),
        ("a set was destroyed", &|| node.tool("ipset", &["destroy", "KUBE-NODE-PORT-SERVERS"]).map(drop), &node_port),
    ];
    let before = without_marker(kernel(bed, "node-a")?);
    for (what, step, change) in steps {
        step().with_context(|| what.to_owned())?;
        change().with_context(|| what.to_owned())?;
        within(CHANGED_BY_HAND, || {
            let different = difference(&before, &without_marker(kernel(bed, "node-a")?));
            ensure!(different.is_empty(), "different:\n{}", different.join("\n"));
            Ok(())
        })
        .with_context(|| what.to_owned())?;
        run(bed, &[ask("a3", "other", ClusterIp).ports(&["tcp", "udp"]).answered(&["c1"], Kept)])
            .with_context(|| what.to_owned())?;
    }
    Ok(())
}

/// The agent removes foreign objects from its device, sets and virtual servers, and restores
/// objects that other programs changed.
///
/// Needs machines with [`super::super::lifecycle::some_services`] and no running programs.
pub fn changes_of_other_programs_are_reverted(bed: &Testbed) -> Result<()> {
    bed.write(|manifests| {
        let mut ranged = Service::new("ranged", &["a1"]);
        ranged.source_ranges = vec!["10.244.0.0/16".to_owned(), "fd00:10:244::/48".to_owned()];
        manifests.add(ranged)
    })?;
    bed.start_programs("node-a", &AgentSetup::with(&["--ipvs-sync-period", "1s"]))?;
    let node = bed.machines().machine("node-a")?;
    let before = kernel(bed, "node-a")?;
    let server = bed.address("steady", ClusterIp, Family::V4, "tcp")?;

    // Add an unknown address of each family to the device, and change the prefix length and the
    // scope of a wanted address.
    let address = server.ip();
    node.ip_batch(&format!(
        "addr add 10.96.200.1/16 dev kube-ipvs0\naddr add fd00:10:96::c8/112 dev kube-ipvs0\n\
         addr del {address}/32 dev kube-ipvs0\naddr add {address}/24 dev kube-ipvs0 scope host\n"
    ))?;
    // An entry that admits a range becomes an entry that excludes it.
    let set = "KUBE-LOAD-BALANCER-SOURCE-CIDR";
    let saved = node.tool("ipset", &["save", set])?;
    let range = saved.lines().find(|line| line.starts_with("add ")).context("the set has no entry")?;
    let range = range.split(' ').nth(2).context("the entry of the set has no range")?;
    node.tool("ipset", &["-exist", "add", set, range, "nomatch"])?;
    // Change the settings of a virtual server and its destinations, and add a destination.
    let server = server.to_string();
    node.tool("ipvsadm", &["-E", "-t", &server, "-s", "wlc", "-p", "77"])?;
    let saved = node.tool("ipvsadm", &["-Sn"])?;
    let added: Vec<&str> = saved.lines().filter(|line| line.starts_with(&format!("-a -t {server} "))).collect();
    ensure!(added.len() == 2, "{server} has the destinations {added:?}");
    for (line, change) in added.into_iter().zip([["-w", "0"], ["-x", "5"]]) {
        let destination = line.split(' ').nth(4).context("a destination without an address")?;
        node.tool("ipvsadm", &[&["-e", "-t", &server, "-r", destination, "-m"][..], &change].concat())?;
    }
    node.tool("ipvsadm", &["-a", "-t", &server, "-r", "198.18.77.1:80", "-g", "-w", "9"])?;

    returns_to(bed, "node-a", &before)?;
    run(
        bed,
        &[
            ask("a3", "steady", ClusterIp).answered(&["a1", "b1"], Kept),
            ask("a3", "ranged", LoadBalancerIp).answered(&["a1"], Masqueraded("node-a")),
        ],
    )
}

/// The agent turns IPv6 on for its device, both on a node where new devices have no IPv6, and after
/// another program has turned IPv6 off.
///
/// Needs machines with [`super::super::lifecycle::some_services`] and no running programs.
pub fn ipv6_is_turned_on_for_the_device(bed: &Testbed) -> Result<()> {
    let node = bed.machines().machine("node-a")?;
    let switch_off = |node: &Namespace, device: &str| {
        node.run(|| {
            let path = format!("/proc/sys/net/ipv6/conf/{device}/disable_ipv6");
            std::fs::write(&path, "1").with_context(|| path)
        })
    };
    let answers = || run(bed, &[ask("a3", "steady", ClusterIp).ports(&["tcp", "udp"]).answered(&["a1", "b1"], Kept)]);
    switch_off(node, "default")?;
    bed.start_programs("node-a", &AgentSetup::with(&["--ipvs-sync-period", "1s"]))?;
    answers()?;
    let before = kernel(bed, "node-a")?;
    switch_off(node, "kube-ipvs0")?;
    returns_to(bed, "node-a", &before).context("after IPv6 was turned off on the device")?;
    answers()
}
