//! The table: services, and cases on them by group.

use anyhow::Result;

use super::case::{Case, EVERY_TRANSPORT, Source, ask};
use crate::testbed::manifests::{Endpoint, Service, Via};
use crate::testbed::{Backend, Family, Manifests};

use Backend::{IptablesLegacy, IptablesNft};
use Source::{Kept, Masqueraded};
use Via::{ClusterIp, ExternalIp, LoadBalancerIp, Localhost, NodePort};

/// Endpoints of `web` and of the other services with nothing special about their endpoints.
pub const WEB: &[&str] = &["a1", "a2", "b1", "c1"];

/// All services of the table. Every group runs with all of them in place, so that they can get in each other's way.
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

    add("zoned", &[], &|service| {
        service.endpoints = vec![
            Endpoint::for_zone("a1", "zone-1"),
            Endpoint::for_zone("b1", "zone-1"),
            Endpoint::for_zone("c1", "zone-2"),
        ];
    })?;
    add("half-zoned", &["b1"], &|service| service.endpoints.push(Endpoint::for_zone("a1", "zone-1")))?;
    add("elsewhere", &[], &|service| service.endpoints = vec![Endpoint::for_zone("a1", "zone-9")])?;

    add("sticky", WEB, &|service| service.affinity_timeout_seconds = Some(10_800))?;
    add("sticky-briefly", WEB, &|service| service.affinity_timeout_seconds = Some(2))?;
    Ok(all)
}

/// The cluster address: reached from everywhere, over everything, evenly, each port for itself.
pub fn cluster_ip() -> Vec<Case> {
    vec![
        ask("a3", "web", ClusterIp).ports(EVERY_TRANSPORT).answered_evenly(WEB, Kept),
        ask("c2", "web", ClusterIp).ports(EVERY_TRANSPORT).answered(WEB, Kept),
        ask("b3", "web", ClusterIp).ports(&["second"]).answered(WEB, Kept),
        ask("node-a", "web", ClusterIp).ports(EVERY_TRANSPORT).answered(WEB, Masqueraded("node-a")),
        ask("outside-1", "web", ClusterIp).ports(EVERY_TRANSPORT).answered(WEB, Masqueraded("node-a")),
        ask("outside-2", "web", ClusterIp).answered(WEB, Masqueraded("node-b")),
        ask("a3", "host-network", ClusterIp).ports(EVERY_TRANSPORT).answered(&["node-c"], Kept),
        ask("node-a", "host-network", ClusterIp).answered(&["node-c"], Masqueraded("node-a")),
        ask("node-c", "host-network", ClusterIp).answered(&["node-c"], Masqueraded("node-c")),
        // An endpoint that happens to choose itself is the one whose source changes.
        ask("a1", "self", ClusterIp).ports(EVERY_TRANSPORT).answered(&["a1"], Masqueraded("node-a")),
        ask("a1", "self", ExternalIp).answered(&["a1"], Masqueraded("node-a")),
        ask("a2", "self", ClusterIp).ports(EVERY_TRANSPORT).answered(&["a1"], Kept),
    ]
}

/// Node ports: at every node, from everywhere, masqueraded by the node that was asked.
pub fn node_port() -> Vec<Case> {
    vec![
        ask("outside-1", "web", NodePort("node-a")).ports(EVERY_TRANSPORT).answered_evenly(WEB, Masqueraded("node-a")),
        ask("outside-2", "web", NodePort("node-b")).ports(&["second"]).answered(WEB, Masqueraded("node-b")),
        ask("a3", "web", NodePort("node-a")).ports(EVERY_TRANSPORT).answered(WEB, Masqueraded("node-a")),
        ask("a3", "web", NodePort("node-b")).ports(EVERY_TRANSPORT).answered(WEB, Masqueraded("node-b")),
        ask("a3", "web", NodePort("node-c")).answered(WEB, Masqueraded("node-c")),
        ask("node-a", "web", NodePort("node-a")).ports(EVERY_TRANSPORT).answered(WEB, Masqueraded("node-a")),
        ask("node-a", "web", NodePort("node-b")).answered(WEB, Masqueraded("node-b")),
        ask("a1", "self", NodePort("node-a")).answered(&["a1"], Masqueraded("node-a")),
        ask("outside-1", "host-network", NodePort("node-a")).answered(&["node-c"], Masqueraded("node-a")),
        // What ends on the node that was asked never leaves it, and sources are translated on leaving.
        ask("outside-1", "host-network", NodePort("node-c")).answered(&["node-c"], Kept),
        // At the loopback address over IPv4 only: the kernel lets nothing from ::1 out.
        ask("node-a", "web", Localhost)
            .ports(&["tcp", "udp", "http"])
            .over(&[Family::V4])
            .answered(WEB, Masqueraded("node-a")),
        ask("node-a", "web", Localhost).ports(&["tcp", "udp"]).over(&[Family::V6]).refused(),
    ]
}

/// External and load balancer addresses, which no machine has: from outside by way of a node, and from within.
pub fn external_addresses() -> Vec<Case> {
    let mut cases = Vec::new();
    for via in [ExternalIp, LoadBalancerIp] {
        cases.extend([
            ask("outside-1", "web", via).ports(EVERY_TRANSPORT).answered_evenly(WEB, Masqueraded("node-a")),
            ask("outside-2", "web", via).ports(&["second"]).answered(WEB, Masqueraded("node-b")),
            ask("a3", "web", via).ports(EVERY_TRANSPORT).answered(WEB, Masqueraded("node-a")),
            ask("node-a", "web", via).ports(EVERY_TRANSPORT).answered(WEB, Masqueraded("node-a")),
            ask("outside-1", "host-network", via).answered(&["node-c"], Masqueraded("node-a")),
        ]);
    }
    cases
}

const OUTPUT_NOT_REJECTED: &str = "iptables rules reject external addresses without endpoints where packets arrive or pass, as \
    kube-proxy's do; what a node itself sends there leaves it";

/// Services without usable endpoints refuse; conditions decide which are usable.
pub fn endpoint_conditions() -> Vec<Case> {
    let mut cases = Vec::new();
    for via in [ClusterIp, ExternalIp, LoadBalancerIp, NodePort("node-a")] {
        for from in ["a3", "outside-1"] {
            cases.push(ask(from, "empty", via).ports(EVERY_TRANSPORT).refused());
            cases.push(ask(from, "unready", via).refused());
        }
        let own = ask("node-a", "empty", via).ports(EVERY_TRANSPORT).refused();
        cases.push(if matches!(via, ExternalIp | LoadBalancerIp) {
            own.except(IptablesLegacy, OUTPUT_NOT_REJECTED).except(IptablesNft, OUTPUT_NOT_REJECTED)
        } else {
            own
        });
        // Local policies, too, refuse where there is nothing anywhere.
        cases.push(ask("outside-1", "empty-local", via).ports(&["tcp", "udp"]).refused());
        let source = if via == ClusterIp { Kept } else { Masqueraded("node-a") };
        cases.push(ask("a3", "partly-ready", via).ports(&["tcp", "udp"]).answered(&["b1"], source));
        cases.push(ask("a3", "draining", via).ports(EVERY_TRANSPORT).answered(&["a1", "b1"], source));
    }
    cases.push(ask("a3", "empty", NodePort("node-b")).ports(&["tcp", "udp"]).refused());
    cases
}

/// `externalTrafficPolicy: Local`: what comes from outside stays on its node and keeps its source, or is dropped; the cluster's own
/// traffic is spread over all endpoints.
pub fn external_traffic_policy() -> Vec<Case> {
    const ALL: &[&str] = &["a1", "c1"];
    let mut cases = vec![
        ask("outside-1", "external-local", NodePort("node-a")).ports(EVERY_TRANSPORT).answered(&["a1"], Kept),
        ask("outside-1", "external-local", NodePort("node-c")).ports(EVERY_TRANSPORT).answered(&["c1"], Kept),
        ask("outside-1", "external-local", NodePort("node-b")).ports(EVERY_TRANSPORT).dropped(),
        // Another node is outside as well.
        ask("node-b", "external-local", NodePort("node-a")).answered(&["a1"], Kept),
        ask("a3", "external-local", NodePort("node-a")).ports(EVERY_TRANSPORT).answered(ALL, Kept),
        ask("b3", "external-local", NodePort("node-b")).answered(ALL, Kept),
        ask("node-a", "external-local", NodePort("node-a")).answered(ALL, Masqueraded("node-a")),
        ask("node-b", "external-local", NodePort("node-b")).answered(ALL, Masqueraded("node-b")),
        // The cluster address is none of the policy's business.
        ask("b3", "external-local", ClusterIp).ports(EVERY_TRANSPORT).answered(ALL, Kept),
        ask("outside-2", "external-local", ClusterIp).answered(ALL, Masqueraded("node-b")),
        // Endpoints that drain serve where the node has no others.
        ask("outside-1", "external-local-draining", NodePort("node-a")).ports(EVERY_TRANSPORT).answered(&["a1"], Kept),
        ask("outside-1", "external-local-draining", NodePort("node-b")).answered(&["b1"], Kept),
        ask("outside-1", "external-local-draining", NodePort("node-c")).dropped(),
        ask("a3", "external-local-draining", NodePort("node-a")).answered(&["b1"], Kept),
    ];
    for via in [ExternalIp, LoadBalancerIp] {
        cases.extend([
            ask("outside-1", "external-local", via).ports(EVERY_TRANSPORT).answered(&["a1"], Kept),
            ask("outside-2", "external-local", via).ports(EVERY_TRANSPORT).dropped(),
            ask("a3", "external-local", via).answered(ALL, Kept),
            ask("b3", "external-local", via).answered(ALL, Kept),
            ask("node-b", "external-local", via).answered(ALL, Masqueraded("node-b")),
        ]);
    }
    cases
}

/// `internalTrafficPolicy: Local`: what is sent to the cluster address stays on its node or is dropped.
pub fn internal_traffic_policy() -> Vec<Case> {
    const ALL: &[&str] = &["a1", "c1"];
    vec![
        ask("a3", "internal-local", ClusterIp).ports(EVERY_TRANSPORT).answered(&["a1"], Kept),
        ask("c2", "internal-local", ClusterIp).answered(&["c1"], Kept),
        ask("b3", "internal-local", ClusterIp).ports(EVERY_TRANSPORT).dropped(),
        ask("node-a", "internal-local", ClusterIp).answered(&["a1"], Masqueraded("node-a")),
        ask("node-b", "internal-local", ClusterIp).ports(&["tcp", "udp"]).dropped(),
        ask("outside-1", "internal-local", ClusterIp).answered(&["a1"], Masqueraded("node-a")),
        ask("outside-2", "internal-local", ClusterIp).dropped(),
        ask("a3", "internal-local-draining", ClusterIp).answered(&["a1"], Kept),
        ask("c2", "internal-local-draining", ClusterIp).dropped(),
        // Other addresses are none of the policy's business.
        ask("outside-1", "internal-local", NodePort("node-b"))
            .ports(EVERY_TRANSPORT)
            .answered(ALL, Masqueraded("node-b")),
        ask("outside-2", "internal-local", ExternalIp).answered(ALL, Masqueraded("node-b")),
        ask("outside-2", "internal-local", LoadBalancerIp).answered(ALL, Masqueraded("node-b")),
    ]
}

/// `loadBalancerSourceRanges`: guard the load balancer address, for pods and nodes as well, and nothing else.
pub fn source_ranges() -> Vec<Case> {
    vec![
        ask("outside-1", "ranges-outside", LoadBalancerIp).ports(EVERY_TRANSPORT).answered(WEB, Masqueraded("node-a")),
        ask("outside-2", "ranges-outside", LoadBalancerIp).ports(EVERY_TRANSPORT).dropped(),
        ask("a3", "ranges-outside", LoadBalancerIp).ports(&["tcp", "udp"]).dropped(),
        ask("node-a", "ranges-outside", LoadBalancerIp).ports(&["tcp", "udp"]).dropped(),
        ask("outside-2", "ranges-outside", NodePort("node-b"))
            .ports(EVERY_TRANSPORT)
            .answered(WEB, Masqueraded("node-b")),
        ask("outside-2", "ranges-outside", ExternalIp).answered(WEB, Masqueraded("node-b")),
        ask("a3", "ranges-outside", ClusterIp).answered(WEB, Kept),
        ask("a3", "ranges-pods", LoadBalancerIp).answered(WEB, Masqueraded("node-a")),
        ask("outside-1", "ranges-pods", LoadBalancerIp).dropped(),
        ask("node-a", "ranges-nodes", LoadBalancerIp).ports(&["tcp", "udp"]).answered(WEB, Masqueraded("node-a")),
        ask("outside-1", "ranges-nodes", LoadBalancerIp).dropped(),
        ask("outside-2", "ranges-open", LoadBalancerIp).answered(WEB, Masqueraded("node-b")),
        ask("a3", "ranges-open", LoadBalancerIp).answered(WEB, Masqueraded("node-a")),
    ]
}

/// Hints by zone: followed if all ready endpoints have them and one is meant for the zone.
pub fn topology() -> Vec<Case> {
    const NEAR: &[&str] = &["a1", "b1"];
    vec![
        ask("a3", "zoned", ClusterIp).ports(EVERY_TRANSPORT).answered_evenly(NEAR, Kept),
        ask("b3", "zoned", ClusterIp).answered(NEAR, Kept),
        ask("c2", "zoned", ClusterIp).ports(EVERY_TRANSPORT).answered(&["c1"], Kept),
        ask("node-c", "zoned", ClusterIp).answered(&["c1"], Masqueraded("node-c")),
        // The node that spreads is the one whose zone counts.
        ask("outside-1", "zoned", NodePort("node-c")).answered(&["c1"], Masqueraded("node-c")),
        ask("outside-1", "zoned", LoadBalancerIp).answered(NEAR, Masqueraded("node-a")),
        ask("a3", "half-zoned", ClusterIp).answered(NEAR, Kept),
        ask("c2", "half-zoned", ClusterIp).answered(NEAR, Kept),
        ask("a3", "elsewhere", ClusterIp).answered(&["a1"], Kept),
    ]
}
