//! Services, slices and Nodes that change while the programs run.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::case::{Case, SourceAddress, ask};
use super::run::run;
use crate::testbed::manifests::{Endpoint, Port, Service, ServiceType, Slice, Via, ready};
use crate::testbed::plan::{LINE_PORT, SECOND_LINE_PORT};
use crate::testbed::{Family, Outcome, Request, Testbed, Transport};

use SourceAddress::{Kept, Masqueraded};
use Via::{ClusterIp, ExternalIp, LoadBalancerIp, NodePort};

const PODS: &[&str] = &["a1", "c1"];
/// Longest wait for the effect of a change that the agent does not report as programmed.
const EVENTUALLY: Duration = Duration::from_secs(120);

/// Repeats `check` until it succeeds. Returns its last error after [`EVENTUALLY`].
pub fn eventually(check: impl Fn() -> Result<()>) -> Result<()> {
    within(EVENTUALLY, check)
}

/// Repeats `check` until it succeeds. Returns its last error after `limit`.
pub fn within(limit: Duration, check: impl Fn() -> Result<()>) -> Result<()> {
    let deadline = Instant::now() + limit;
    loop {
        let checked = Instant::now();
        match check() {
            Ok(()) => return Ok(()),
            Err(error) if Instant::now() >= deadline => return Err(error),
            // A check may need much processor time, and the programs under test need some of it.
            Err(_) => std::thread::sleep(checked.elapsed().max(Duration::from_millis(100))),
        }
    }
}

/// Changes one service and waits until the agents have programmed the change.
fn change(bed: &Testbed, service: &str, change: impl FnOnce(&mut Service)) -> Result<()> {
    bed.update_service(service, change)
}

/// A Service changes its type several times, and then its port numbers. Its load balancer address
/// works with and without node ports.
pub fn type_switches(bed: &Testbed) -> Result<()> {
    bed.update(|manifests| manifests.add(Service::new("switching", PODS)))?;
    let internal = || ask("a3", "switching", ClusterIp).ports(&["tcp", "udp"]).answered(PODS, Kept);
    let external = || ask("outside-1", "switching", ExternalIp).answered(PODS, Masqueraded("node-a"));
    let node_port = || ask("outside-1", "switching", NodePort("node-b")).ports(&["tcp", "udp"]);
    let balancer = || ask("outside-2", "switching", LoadBalancerIp).ports(&["tcp", "udp"]);
    let (by_port, by_balancer) =
        (|| node_port().answered(PODS, Masqueraded("node-b")), || balancer().answered(PODS, Masqueraded("node-b")));
    let everything = || vec![internal(), external(), by_port(), by_balancer()];
    let steps: [(ServiceType, bool, Vec<Case>); 7] = [
        (ServiceType::LoadBalancer, true, everything()),
        (
            ServiceType::ExternalName,
            true,
            vec![
                ask("a3", "switching", ClusterIp).gone(),
                ask("outside-1", "switching", ExternalIp).gone(),
                // No rule exists for this port, and no program listens on the port.
                node_port().refused(),
            ],
        ),
        (ServiceType::ClusterIp, true, vec![internal(), external(), node_port().refused(), balancer().gone()]),
        (ServiceType::NodePort, true, vec![internal(), external(), by_port(), balancer().gone()]),
        (ServiceType::LoadBalancer, false, vec![internal(), external(), node_port().refused(), by_balancer()]),
        (ServiceType::Headless, true, vec![ask("a3", "switching", ExternalIp).gone(), node_port().refused()]),
        (ServiceType::LoadBalancer, true, everything()),
    ];
    for (service_type, has_node_ports, cases) in steps {
        change(bed, "switching", |service| {
            (service.service_type, service.has_node_ports) = (service_type, has_node_ports);
        })?;
        run(bed, &cases).with_context(|| format!("as {service_type:?}, node ports: {has_node_ports}"))?;
    }
    let old = bed.address("switching", LoadBalancerIp, crate::testbed::Family::V4, "tcp")?;
    change(bed, "switching", |service| service.ports.iter_mut().for_each(|port| port.port += 1000))?;
    run(bed, &everything()).context("after the port numbers were changed")?;
    expect_unserved(bed, old, bed.backend().binds_addresses())
}

/// Checks a removed port at an address that the service still has. The node does not translate the
/// packet, and either refuses it or leaves it without an answer.
fn expect_unserved(bed: &Testbed, to: std::net::SocketAddr, is_refused: bool) -> Result<()> {
    let outcome = bed.machines().ask("a3", &Request::new(Transport::Tcp, to).expecting_silence())?;
    let expected = if is_refused { Outcome::Refused } else { Outcome::TimedOut };
    ensure!(outcome == expected, "a request to a removed port: {outcome}, expected: {expected}");
    Ok(())
}

/// An older Service has externalIPs that a Service gets as its ClusterIPs later. The ClusterIPs
/// belong to the later Service while it exists, also at ports that it does not have.
pub fn a_cluster_ip_belongs_to_its_service(bed: &Testbed) -> Result<()> {
    bed.update(|manifests| manifests.add(Service::new("covets", &["b1"])))?;
    let coveted = |ports| ask("a3", "covets", ExternalIp).ports(ports);
    let before = || vec![coveted(&["tcp", "udp", "second"]).answered(&["b1"], Masqueraded("node-a"))];
    run(bed, &before())?;
    bed.update(|manifests| {
        let mut owner = Service { service_type: ServiceType::ClusterIp, ..Service::new("owner", &["a1"]) };
        owner.ports.retain(|port| port.name != "second");
        owner.patch = Some(|owner| {
            let covets = Service { number: owner.number - 1, ..owner.clone() };
            let addresses = Family::BOTH.map(|family| covets.external_ip(family));
            json!({
                "metadata": { "creationTimestamp": "2026-06-01T00:00:00Z" },
                "spec": { "clusterIP": addresses[0], "clusterIPs": addresses, "externalIPs": null },
            })
        });
        manifests.add(owner)
    })?;
    let own = || ask("a3", "covets", ClusterIp).answered(&["b1"], Kept);
    let unused = coveted(&["second"]);
    let unused = if bed.backend().refuses_unused_ports() { unused.refused() } else { unused.gone() };
    run(bed, &[coveted(&["tcp", "udp"]).answered(&["a1"], Kept), unused, own()])
        .context("while another Service has the address as its ClusterIP")?;
    bed.update(|manifests| manifests.remove("owner").map(|_| ()))?;
    run(bed, &before()).context("after the other Service was removed")
}

/// Labels are added and removed: the label that assigns a Service to another proxy, and the label
/// that reserves slices for DNS.
pub fn labels_are_added_and_removed(bed: &Testbed) -> Result<()> {
    bed.update(|manifests| manifests.add(Service::new("labelled", PODS)))?;
    let served = || {
        vec![
            ask("a3", "labelled", ClusterIp).ports(&["tcp", "udp"]).answered(PODS, Kept),
            ask("outside-1", "labelled", NodePort("node-a")).answered(PODS, Masqueraded("node-a")),
        ]
    };
    for name in ["", "another-proxy"] {
        run(bed, &served())?;
        change(bed, "labelled", |service| service.proxy_name = Some(name))?;
        run(
            bed,
            &[ask("a3", "labelled", ClusterIp).gone(), ask("outside-1", "labelled", NodePort("node-a")).refused()],
        )
        .with_context(|| format!("with the proxy name {name:?}"))?;
        change(bed, "labelled", |service| service.proxy_name = None)?;
        run(bed, &served()).context("after the proxy name was removed")?;
        change(bed, "labelled", |service| service.headless_slices = true)?;
        run(bed, &[ask("a3", "labelled", ClusterIp).ports(&["tcp", "udp"]).refused()])
            .context("with headless slices")?;
        change(bed, "labelled", |service| service.headless_slices = false)?;
    }
    run(bed, &served())
}

/// Ports are added, renamed and removed. Other ports keep working.
pub fn ports_are_added_renamed_and_removed(bed: &Testbed) -> Result<()> {
    bed.update(|manifests| {
        manifests.add(Service { ports: Service::new("", &[]).ports[..2].to_vec(), ..Service::new("ported", PODS) })
    })?;
    let steady = || ask("a3", "ported", ClusterIp).ports(&["udp"]).answered(PODS, Kept);
    let by = |name: &'static [&'static str]| {
        [
            ask("a3", "ported", ClusterIp).ports(name).answered(PODS, Kept),
            ask("outside-1", "ported", NodePort("node-a")).ports(name).answered(PODS, Masqueraded("node-a")),
            steady(),
        ]
    };
    run(bed, &by(&["tcp"]))?;
    let extra = Port { name: "extra", transport: Transport::Tcp, port: 91, target_port: SECOND_LINE_PORT };
    change(bed, "ported", |service| service.ports.push(extra))?;
    run(bed, &by(&["tcp", "extra"])).context("with a further port")?;
    change(bed, "ported", |service| service.ports[0].name = "renamed")?;
    run(bed, &by(&["renamed", "extra"])).context("after a port was renamed in the Service and its slices")?;
    // A port of the Service matches ports of slices by name alone.
    change(bed, "ported", |service| {
        let slice = Slice { suffix: "kept", ports: service.ports.clone(), endpoints: ready(PODS) };
        service.endpoints.clear();
        service.more_slices = vec![slice];
        service.ports[0].name = "unmatched";
    })?;
    run(bed, &[ask("a3", "ported", ClusterIp).ports(&["unmatched"]).refused(), steady()])
        .context("after a port was renamed in the Service alone")?;
    change(bed, "ported", |service| service.ports[0].name = "renamed")?;
    run(bed, &by(&["renamed"])).context("after the old name of the port was restored")?;
    let gone = bed.address("ported", ClusterIp, crate::testbed::Family::V4, "extra")?;
    change(bed, "ported", |service| service.ports.truncate(2))?;
    run(bed, &by(&["renamed"])).context("after a port was removed")?;
    expect_unserved(bed, gone, bed.backend().refuses_unused_ports())
}

/// A node's zone label changes, is removed and is set again. Services with hints use the endpoints
/// for the present zone.
pub fn zone_changes(bed: &Testbed) -> Result<()> {
    bed.update(|manifests| {
        let endpoints = [("a1", "zone-1"), ("b1", "zone-1"), ("c1", "zone-2")];
        let endpoints = endpoints.map(|(pod, zone)| Endpoint::for_zone(pod, zone)).to_vec();
        manifests.add(Service { endpoints, ..Service::new("zoned", &[]) })
    })?;
    const FIRST: &[&str] = &["a1", "b1"];
    const ALL: &[&str] = &["a1", "b1", "c1"];
    run(bed, &[ask("a3", "zoned", ClusterIp).answered(FIRST, Kept)])?;
    let steps: [(Option<&'static str>, &[&str]); 4] =
        [(Some("zone-2"), &["c1"]), (None, ALL), (Some("zone-9"), ALL), (Some("zone-1"), FIRST)];
    for (zone, expected) in steps {
        bed.update(|manifests| {
            manifests.zones.insert("node-a", zone);
            Ok(())
        })?;
        let near = [
            ask("a3", "zoned", ClusterIp).answered(expected, Kept),
            ask("outside-1", "zoned", NodePort("node-a")).answered(expected, Masqueraded("node-a")),
        ];
        eventually(|| run(bed, &near)).with_context(|| format!("node-a in {zone:?}"))?;
        run(bed, &[ask("b3", "zoned", ClusterIp).answered(FIRST, Kept)])
            .context("checking a node whose zone does not change")?;
    }
    Ok(())
}

/// A ServiceCIDR is added while the programs run. A Service with an address in this range works.
/// Another Service has addresses in the range as its externalIPs, which are served only before.
pub fn further_service_range(bed: &Testbed) -> Result<()> {
    const ADDRESSES: [&str; 2] = ["10.97.0.7", "fd00:10:97::7"];
    let patch = |_: &Service| json!({ "spec": { "externalIPs": ["10.97.0.9", "fd00:10:97::9"] } });
    bed.update(|manifests| manifests.add(Service { patch: Some(patch), ..Service::new("covets", &["b1"]) }))?;
    let coveted = |expected: fn(Request) -> Request| {
        let ask = |address: &str| {
            let to = (address.parse::<std::net::IpAddr>()?, 80).into();
            bed.machines().ask("a3", &expected(Request::new(Transport::Tcp, to)))
        };
        Ok::<_, anyhow::Error>([ask("10.97.0.9")?, ask("fd00:10:97::9")?])
    };
    let before = coveted(|request| request)?;
    ensure!(before.iter().all(|outcome| matches!(outcome, Outcome::Answered(_))), "before the range: {before:?}");
    bed.update(|manifests| {
        manifests.further.push(json!({
            "apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR", "metadata": { "name": "further" },
            "spec": { "cidrs": ["10.97.0.0/24", "fd00:10:97::/112"] },
        }));
        Ok(())
    })?;
    let patch = |_: &Service| json!({ "spec": { "clusterIP": ADDRESSES[0], "clusterIPs": ADDRESSES } });
    bed.update(|manifests| manifests.add(Service { patch: Some(patch), ..Service::new("elsewhere", &["a1"]) }))?;
    for address in ADDRESSES {
        for from in ["a3", "b3", "node-c"] {
            let request = Request::new(Transport::Tcp, (address.parse::<std::net::IpAddr>()?, 80).into());
            match bed.machines().ask(from, &request)? {
                Outcome::Answered(answer) => ensure!(answer.server == "a1" && answer.port == LINE_PORT, "{answer}"),
                other => anyhow::bail!("{from} asks {address}: {other}"),
            }
        }
    }
    let after = coveted(Request::expecting_silence)?;
    ensure!(!after.iter().any(|outcome| matches!(outcome, Outcome::Answered(_))), "in the range: {after:?}");
    run(bed, &[ask("a3", "covets", ClusterIp).answered(&["b1"], Kept)])
}
