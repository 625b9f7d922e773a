//! The table: its services, and its cases by group.

use anyhow::Result;

use super::case::{Case, EVERY_TRANSPORT, SourceAddress, ask, rows};
use super::{hints, intake};
use crate::testbed::manifests::{Endpoint, Service, Via};
use crate::testbed::{Backend, Family, Manifests};

use SourceAddress::{Kept, Masqueraded};
use Via::{ClusterIp, ExternalIp, LoadBalancerIp, Localhost, NodePort};

/// The endpoints of `web` and of other services with ordinary endpoints.
pub const WEB: &[&str] = &["a1", "a2", "b1", "c1"];

/// A group: its name, and a function that returns its cases.
pub type Group = (&'static str, fn() -> Vec<Case>);

/// The groups, which the test `the_table` runs.
pub const GROUPS: [Group; 9] = [
    ("cluster_ip", cluster_ip),
    ("node_port", node_port),
    ("external_addresses", external_addresses),
    ("endpoint_conditions", endpoint_conditions),
    ("external_traffic_policy", external_traffic_policy),
    ("internal_traffic_policy", internal_traffic_policy),
    ("source_ranges", source_ranges),
    ("topology", hints::topology),
    ("intake", intake::intake),
];

/// All services of the table. All of them exist while a case runs, so that the test also finds
/// interference between services.
pub fn services() -> Result<Manifests> {
    let mut all = Manifests::default();
    let mut add = |name: &str, endpoints: &[&str], change: &dyn Fn(&mut Service)| {
        let mut service = Service::new(name, endpoints);
        change(&mut service);
        all.add(service)
    };
    add("web", WEB, &|_| {})?;
    add("self", &["a1"], &|_| {})?;
    add("host-network", &["node-c"], &|_| {})?;

    add("empty", &[], &|_| {})?;
    add("empty-local", &[], &|service| (service.external_local, service.internal_local) = (true, true))?;
    add("unready", &[], &|service| service.endpoints = vec![Endpoint::not_ready("a1"), Endpoint::not_ready("b1")])?;
    add("partly-ready", &["b1"], &|service| {
        service.endpoints.extend([Endpoint::not_ready("a1"), Endpoint::terminating("c1")]);
    })?;
    add("published", &[], &|service| {
        service.endpoints = vec![Endpoint::published("a1"), Endpoint::published("b1"), Endpoint::not_ready("c1")];
    })?;
    add("draining", &[], &|service| {
        service.endpoints = vec![Endpoint::terminating("a1"), Endpoint::terminating("b1"), Endpoint::not_ready("c1")];
    })?;

    add("external-local", &["a1", "c1"], &|service| service.external_local = true)?;
    add("external-local-draining", &["b1"], &|service| {
        service.external_local = true;
        service.endpoints.push(Endpoint::terminating("a1"));
    })?;
    add("internal-local", &["a1", "c1"], &|service| service.internal_local = true)?;
    add("internal-local-draining", &["b1"], &|service| {
        service.internal_local = true;
        service.endpoints.push(Endpoint::terminating("a1"));
    })?;

    let ranges = |v4: &str, v6: &str| vec![v4.to_owned(), v6.to_owned()];
    add("ranges-outside", WEB, &|service| service.source_ranges = ranges("192.0.2.100/32", "2001:db8:0:1::64/128"))?;
    add("ranges-pods", WEB, &|service| service.source_ranges = ranges("10.244.0.0/16", " fd00:10:244::/48"))?;
    add("ranges-nodes", WEB, &|service| service.source_ranges = ranges("192.0.2.8/29", "2001:db8:0:1::8/125"))?;
    add("ranges-open", WEB, &|service| {
        service.source_ranges = ranges("0.0.0.0/0", "::/0");
        service.source_ranges.push("10.1.2.3/32".to_owned());
    })?;

    add("ranges-node-address", WEB, &|service| {
        // The ranges contain only the addresses of node-a.
        service.source_ranges = ranges("192.0.2.11/32", "2001:db8:0:1::b/128");
    })?;
    add("ranges-halves", WEB, &|service| {
        service.source_ranges = ranges(" 0.0.0.0/1 ", "::/1");
        service.source_ranges.extend(ranges("128.0.0.0/1", "8000::/1"));
    })?;
    add("ranges-one-family", WEB, &|service| service.source_ranges = vec!["192.0.2.100/32".to_owned()])?;
    add("ranges-empty", &[], &|service| service.source_ranges = ranges("10.244.0.0/16", "fd00:10:244::/48"))?;
    add("ranges-local", &["a1", "c1"], &|service| {
        service.external_local = true;
        service.source_ranges = ranges("192.0.2.96/27", "2001:db8:0:1::60/123");
    })?;

    add("sticky", WEB, &|service| service.affinity_timeout_seconds = Some(10_800))?;
    add("sticky-briefly", WEB, &|service| service.affinity_timeout_seconds = Some(2))?;
    add("no-node-ports", WEB, &|service| service.has_node_ports = false)?;
    hints::services(&mut all)?;
    intake::services(&mut all)?;
    Ok(all)
}

/// Cluster addresses: all clients reach them over all protocols, and endpoints get equal shares.
pub fn cluster_ip() -> Vec<Case> {
    vec![
        ask("a3", "web", ClusterIp).ports(EVERY_TRANSPORT).answered_evenly(WEB, Kept).rows(&[16, 20, 30, 31, 37]),
        ask("c2", "web", ClusterIp).ports(EVERY_TRANSPORT).answered(WEB, Kept).rows(&[31, 37]),
        ask("b3", "web", ClusterIp).ports(&["second"]).answered(WEB, Kept).rows(&[6, 31]),
        ask("node-a", "web", ClusterIp).ports(EVERY_TRANSPORT).answered(WEB, Masqueraded("node-a")).rows(&[33, 37]),
        ask("outside-1", "web", ClusterIp).ports(EVERY_TRANSPORT).answered(WEB, Masqueraded("node-a")).rows(&[32]),
        ask("outside-2", "web", ClusterIp).answered(WEB, Masqueraded("node-b")).rows(&[32]),
        ask("a3", "host-network", ClusterIp).ports(EVERY_TRANSPORT).answered(&["node-c"], Kept).rows(&[31, 37]),
        ask("node-a", "host-network", ClusterIp).answered(&["node-c"], Masqueraded("node-a")).rows(&[33, 37]),
        ask("node-c", "host-network", ClusterIp).answered(&["node-c"], Masqueraded("node-c")).rows(&[33, 37]),
        // The source address changes if an endpoint reaches itself.
        ask("a1", "self", ClusterIp).ports(EVERY_TRANSPORT).answered(&["a1"], Masqueraded("node-a")).rows(&[36]),
        ask("a1", "self", ExternalIp).answered(&["a1"], Masqueraded("node-a")).rows(&[36, 58]),
        ask("a2", "self", ClusterIp).ports(EVERY_TRANSPORT).answered(&["a1"], Kept).rows(&[31]),
    ]
}

/// Node ports: all clients reach them on every node, and the node that receives the request
/// masquerades it.
pub fn node_port() -> Vec<Case> {
    vec![
        ask("outside-1", "web", NodePort("node-a"))
            .ports(EVERY_TRANSPORT)
            .answered_evenly(WEB, Masqueraded("node-a"))
            .rows(&[16, 30, 45, 46, 51]),
        ask("outside-2", "web", NodePort("node-b"))
            .ports(&["second"])
            .answered(WEB, Masqueraded("node-b"))
            .rows(&[6, 45, 51]),
        ask("a3", "web", NodePort("node-a"))
            .ports(EVERY_TRANSPORT)
            .answered(WEB, Masqueraded("node-a"))
            .rows(&[45, 51]),
        ask("a3", "web", NodePort("node-b"))
            .ports(EVERY_TRANSPORT)
            .answered(WEB, Masqueraded("node-b"))
            .rows(&[45, 46, 51]),
        ask("a3", "web", NodePort("node-c")).answered(WEB, Masqueraded("node-c")).rows(&[45, 46, 51]),
        ask("node-a", "web", NodePort("node-a"))
            .ports(EVERY_TRANSPORT)
            .answered(WEB, Masqueraded("node-a"))
            .rows(&[45, 51]),
        ask("node-a", "web", NodePort("node-b")).answered(WEB, Masqueraded("node-b")).rows(&[45, 51]),
        ask("a1", "self", NodePort("node-a")).answered(&["a1"], Masqueraded("node-a")).rows(&[36, 51]),
        ask("outside-1", "host-network", NodePort("node-a"))
            .answered(&["node-c"], Masqueraded("node-a"))
            .rows(&[37, 51]),
        // The endpoint is on the node that gets the request. The packet does not leave the node, so
        // the node does not masquerade it.
        ask("outside-1", "host-network", NodePort("node-c")).answered(&["node-c"], Kept).rows(&[37]),
        // Node ports on loopback work over IPv4 only: the kernel sends no packets with the source
        // ::1 to other machines.
        ask("node-a", "web", Localhost)
            .ports(&["tcp", "udp", "http"])
            .over(&[Family::V4])
            .answered(WEB, Masqueraded("node-a"))
            .except(Backend::Ipvs, "IPVS has no virtual servers on loopback, because their packets would keep a loopback source, to which no endpoint can reply")
            .rows(&[48]),
        ask("node-a", "web", Localhost).ports(&["tcp", "udp"]).over(&[Family::V6]).refused().rows(&[49]),
    ]
}

/// External and load balancer addresses, which no machine holds: outside clients reach them through
/// a node, and pods and nodes reach them too.
pub fn external_addresses() -> Vec<Case> {
    let mut cases = Vec::new();
    for via in [ExternalIp, LoadBalancerIp] {
        cases.extend(rows(
            &[16, 51, 58],
            [
                ask("outside-1", "web", via).ports(EVERY_TRANSPORT).answered_evenly(WEB, Masqueraded("node-a")),
                ask("outside-2", "web", via).ports(&["second"]).answered(WEB, Masqueraded("node-b")),
                ask("a3", "web", via).ports(EVERY_TRANSPORT).answered(WEB, Masqueraded("node-a")),
                ask("node-a", "web", via).ports(EVERY_TRANSPORT).answered(WEB, Masqueraded("node-a")),
                ask("outside-1", "host-network", via).answered(&["node-c"], Masqueraded("node-a")),
            ],
        ));
    }
    // A service without node ports still serves its other addresses.
    cases.extend(rows(
        &[66],
        [
            ask("outside-1", "no-node-ports", LoadBalancerIp)
                .ports(EVERY_TRANSPORT)
                .answered(WEB, Masqueraded("node-a")),
            ask("a3", "no-node-ports", LoadBalancerIp).answered(WEB, Masqueraded("node-a")),
            ask("a3", "no-node-ports", ClusterIp).answered(WEB, Kept),
            // No program listens on this port.
            ask("outside-1", "no-node-ports", NodePort("node-a")).ports(&["tcp", "udp"]).refused(),
        ],
    ));
    cases
}

/// Endpoint conditions decide which endpoints are usable. Services without usable endpoints refuse
/// connections.
pub fn endpoint_conditions() -> Vec<Case> {
    let mut cases = Vec::new();
    for via in [ClusterIp, ExternalIp, LoadBalancerIp, NodePort("node-a")] {
        let refused: &[u8] = if via == ClusterIp { &[40] } else { &[57] };
        for from in ["a3", "outside-1"] {
            cases.push(ask(from, "empty", via).ports(EVERY_TRANSPORT).refused().rows(refused));
            cases.push(ask(from, "unready", via).refused().rows(&[23]));
        }
        // Requests of a node are also refused, even at addresses of other machines.
        cases.push(ask("node-a", "empty", via).ports(EVERY_TRANSPORT).refused().rows(refused));
        // A service with policies Local also refuses if it has no endpoints on any node.
        cases.push(ask("outside-1", "empty-local", via).ports(&["tcp", "udp"]).refused().rows(refused));
        let source = if via == ClusterIp { Kept } else { Masqueraded("node-a") };
        cases.push(ask("a3", "partly-ready", via).ports(&["tcp", "udp"]).answered(&["b1"], source).rows(&[20, 23]));
        cases.push(ask("a3", "draining", via).ports(EVERY_TRANSPORT).answered(&["a1", "b1"], source).rows(&[21, 23]));
        cases.push(ask("a3", "published", via).ports(EVERY_TRANSPORT).answered(&["a1", "b1"], source).rows(&[24]));
    }
    cases.push(ask("a3", "empty", NodePort("node-b")).ports(&["tcp", "udp"]).refused().rows(&[57]));
    cases
}

/// `externalTrafficPolicy: Local`: requests from outside reach only endpoints on the node and keep
/// their source, or are dropped. Requests from the cluster reach all endpoints.
pub fn external_traffic_policy() -> Vec<Case> {
    const ALL: &[&str] = &["a1", "c1"];
    let mut cases = vec![
        ask("outside-1", "external-local", NodePort("node-a"))
            .ports(EVERY_TRANSPORT)
            .answered(&["a1"], Kept)
            .rows(&[52]),
        ask("outside-1", "external-local", NodePort("node-c"))
            .ports(EVERY_TRANSPORT)
            .answered(&["c1"], Kept)
            .rows(&[52]),
        ask("outside-1", "external-local", NodePort("node-b")).ports(EVERY_TRANSPORT).dropped().rows(&[53]),
        // Another node counts as outside.
        ask("node-b", "external-local", NodePort("node-a")).answered(&["a1"], Kept).rows(&[52]),
        ask("a3", "external-local", NodePort("node-a")).ports(EVERY_TRANSPORT).answered(ALL, Kept).rows(&[54]),
        ask("b3", "external-local", NodePort("node-b")).answered(ALL, Kept).rows(&[54]),
        ask("node-a", "external-local", NodePort("node-a")).answered(ALL, Masqueraded("node-a")).rows(&[55]),
        ask("node-b", "external-local", NodePort("node-b")).answered(ALL, Masqueraded("node-b")).rows(&[55]),
        // The policy does not apply to the cluster address.
        ask("b3", "external-local", ClusterIp).ports(EVERY_TRANSPORT).answered(ALL, Kept).rows(&[31]),
        ask("outside-2", "external-local", ClusterIp).answered(ALL, Masqueraded("node-b")).rows(&[32]),
        // Terminating endpoints serve if the node has no other endpoints.
        ask("outside-1", "external-local-draining", NodePort("node-a"))
            .ports(EVERY_TRANSPORT)
            .answered(&["a1"], Kept)
            .rows(&[22]),
        ask("outside-1", "external-local-draining", NodePort("node-b")).answered(&["b1"], Kept).rows(&[20, 52]),
        ask("outside-1", "external-local-draining", NodePort("node-c")).dropped().rows(&[53]),
        ask("a3", "external-local-draining", NodePort("node-a")).answered(&["b1"], Kept).rows(&[20, 54]),
    ];
    for via in [ExternalIp, LoadBalancerIp] {
        cases.extend([
            ask("outside-1", "external-local", via).ports(EVERY_TRANSPORT).answered(&["a1"], Kept).rows(&[52]),
            ask("outside-2", "external-local", via).ports(EVERY_TRANSPORT).dropped().rows(&[53]),
            ask("a3", "external-local", via).answered(ALL, Kept).rows(&[54]),
            ask("b3", "external-local", via).answered(ALL, Kept).rows(&[54]),
            ask("node-b", "external-local", via).answered(ALL, Masqueraded("node-b")).rows(&[55]),
        ]);
    }
    cases
}

/// `internalTrafficPolicy: Local`: requests to the cluster address reach only endpoints on the
/// node, or are dropped.
pub fn internal_traffic_policy() -> Vec<Case> {
    const ALL: &[&str] = &["a1", "c1"];
    vec![
        ask("a3", "internal-local", ClusterIp).ports(EVERY_TRANSPORT).answered(&["a1"], Kept).rows(&[38]),
        ask("c2", "internal-local", ClusterIp).answered(&["c1"], Kept).rows(&[38]),
        ask("b3", "internal-local", ClusterIp).ports(EVERY_TRANSPORT).dropped().rows(&[39]),
        ask("node-a", "internal-local", ClusterIp).answered(&["a1"], Masqueraded("node-a")).rows(&[33, 38]),
        ask("node-b", "internal-local", ClusterIp).ports(&["tcp", "udp"]).dropped().rows(&[39]),
        ask("outside-1", "internal-local", ClusterIp).answered(&["a1"], Masqueraded("node-a")).rows(&[32, 38]),
        ask("outside-2", "internal-local", ClusterIp).dropped().rows(&[39]),
        ask("a3", "internal-local-draining", ClusterIp).answered(&["a1"], Kept).rows(&[22]),
        ask("c2", "internal-local-draining", ClusterIp).dropped().rows(&[39]),
        // The policy does not apply to other addresses.
        ask("outside-1", "internal-local", NodePort("node-b"))
            .ports(EVERY_TRANSPORT)
            .answered(ALL, Masqueraded("node-b"))
            .rows(&[56]),
        ask("outside-2", "internal-local", ExternalIp).answered(ALL, Masqueraded("node-b")).rows(&[56]),
        ask("outside-2", "internal-local", LoadBalancerIp).answered(ALL, Masqueraded("node-b")).rows(&[56]),
    ]
}

/// `loadBalancerSourceRanges` restrict only the load balancer address. They also apply to pods and
/// nodes.
pub fn source_ranges() -> Vec<Case> {
    // Rules of nftables check ranges before they refuse packets to a Service without endpoints.
    let unserved = Backend::ALL.map(|backend| {
        let question = ask("outside-1", "ranges-empty", LoadBalancerIp).ports(EVERY_TRANSPORT);
        let case = if backend.uses_nftables() { question.dropped() } else { question.refused() };
        let others = Backend::ALL.into_iter().filter(|other| *other != backend);
        others.fold(case.rows(&[65]), |case, other| case.except(other, "it has a case of its own"))
    });
    let mut cases = vec![
        ask("outside-1", "ranges-outside", LoadBalancerIp)
            .ports(EVERY_TRANSPORT)
            .answered(WEB, Masqueraded("node-a"))
            .rows(&[60]),
        ask("outside-2", "ranges-outside", LoadBalancerIp).ports(EVERY_TRANSPORT).dropped().rows(&[60]),
        ask("a3", "ranges-outside", LoadBalancerIp).ports(&["tcp", "udp"]).dropped().rows(&[61]),
        ask("node-a", "ranges-outside", LoadBalancerIp).ports(&["tcp", "udp"]).dropped().rows(&[62]),
        ask("outside-2", "ranges-outside", NodePort("node-b"))
            .ports(EVERY_TRANSPORT)
            .answered(WEB, Masqueraded("node-b"))
            .rows(&[63]),
        ask("outside-2", "ranges-outside", ExternalIp).answered(WEB, Masqueraded("node-b")).rows(&[63]),
        ask("a3", "ranges-outside", ClusterIp).answered(WEB, Kept).rows(&[63]),
        ask("a3", "ranges-pods", LoadBalancerIp).answered(WEB, Masqueraded("node-a")).rows(&[61]),
        ask("outside-1", "ranges-pods", LoadBalancerIp).dropped().rows(&[60]),
        ask("node-a", "ranges-nodes", LoadBalancerIp)
            .ports(&["tcp", "udp"])
            .answered(WEB, Masqueraded("node-a"))
            .rows(&[62]),
        ask("outside-1", "ranges-nodes", LoadBalancerIp).dropped().rows(&[60]),
        ask("node-a", "ranges-node-address", LoadBalancerIp)
            .ports(EVERY_TRANSPORT)
            .answered(WEB, Masqueraded("node-a"))
            .rows(&[62]),
        ask("node-b", "ranges-node-address", LoadBalancerIp).ports(&["tcp", "udp"]).dropped().rows(&[62]),
        // A range of one family does not restrict the other family.
        ask("outside-2", "ranges-one-family", LoadBalancerIp).over(&[Family::V4]).dropped().rows(&[11, 60]),
        ask("outside-2", "ranges-one-family", LoadBalancerIp)
            .over(&[Family::V6])
            .answered(WEB, Masqueraded("node-b"))
            .rows(&[11, 64]),
        // A range with prefix length 0 admits all clients. The two ranges with prefix length 1 also
        // admit all clients. White space around ranges is ignored.
        ask("outside-2", "ranges-open", LoadBalancerIp).answered(WEB, Masqueraded("node-b")).rows(&[64]),
        ask("a3", "ranges-open", LoadBalancerIp).answered(WEB, Masqueraded("node-a")).rows(&[64]),
        ask("outside-2", "ranges-halves", LoadBalancerIp).answered(WEB, Masqueraded("node-b")).rows(&[64]),
        ask("a3", "ranges-halves", LoadBalancerIp).answered(WEB, Masqueraded("node-a")).rows(&[64]),
        ask("a3", "ranges-empty", LoadBalancerIp).refused().rows(&[57]),
        // Ranges are checked before the policy, also for pods and the node itself.
        ask("outside-1", "ranges-local", LoadBalancerIp).answered(&["a1"], Kept).rows(&[52, 60]),
        ask("outside-2", "ranges-local", LoadBalancerIp).dropped().rows(&[53]),
        ask("a3", "ranges-local", LoadBalancerIp).dropped().rows(&[61]),
        ask("node-a", "ranges-local", LoadBalancerIp).dropped().rows(&[62]),
        ask("a3", "ranges-local", NodePort("node-a")).answered(&["a1", "c1"], Kept).rows(&[54, 63]),
    ];
    cases.extend(unserved);
    cases
}
