//! The cases on topology hints, by node and by zone.

use anyhow::Result;

use super::case::{Case, EVERY_TRANSPORT, SourceAddress, ask};
use crate::testbed::Manifests;
use crate::testbed::manifests::{Endpoint, Service, Via};

use SourceAddress::{Kept, Masqueraded};
use Via::{ClusterIp, LoadBalancerIp, NodePort};

fn zoned() -> Vec<Endpoint> {
    vec![Endpoint::for_zone("a1", "zone-1"), Endpoint::for_zone("b1", "zone-1"), Endpoint::for_zone("c1", "zone-2")]
}

/// Adds services with hints.
pub(super) fn services(all: &mut Manifests) -> Result<()> {
    let mut add = |name: &str, endpoints: Vec<Endpoint>, change: &dyn Fn(&mut Service)| {
        let mut service = Service { endpoints, ..Service::new(name, &[]) };
        change(&mut service);
        all.add(service)
    };
    let (ready, not_ready) = (Endpoint::ready, Endpoint::not_ready);
    let (for_zone, for_node) = (Endpoint::for_zone, Endpoint::for_node);
    let terminating_for =
        |name, zone: &str| Endpoint { hint_zones: vec![zone.to_owned()], ..Endpoint::terminating(name) };

    add("zoned", zoned(), &|_| {})?;
    add("half-zoned", vec![ready("b1"), for_zone("a1", "zone-1")], &|_| {})?;
    add("elsewhere", vec![for_zone("a1", "zone-9")], &|_| {})?;
    // Only ready endpoints count when the proxy decides whether to follow hints.
    add("zoned-but-unready", [zoned(), vec![not_ready("a2"), Endpoint::terminating("b2")]].concat(), &|_| {})?;
    add("zoned-draining", vec![terminating_for("a1", "zone-1"), terminating_for("c1", "zone-2")], &|_| {})?;
    add("zoned-local", zoned(), &|service| {
        (service.internal_local, service.external_local) = (true, true);
        // The hint of a1 names the other zone, but a1 is the only endpoint on node-a.
        service.endpoints.retain(|endpoint| endpoint.name != "a1");
        service.endpoints.push(for_zone("a1", "zone-2"));
    })?;

    let noded = || vec![for_node("a1", "node-a", "zone-1"), for_node("b1", "node-b", "zone-1")];
    add("noded", [noded(), vec![for_node("c1", "node-c", "zone-2")]].concat(), &|_| {})?;
    // No endpoint has a hint for node-b, so hints by zone decide on node-b.
    add(
        "noded-elsewhere",
        vec![
            for_node("a1", "node-a", "zone-1"),
            for_node("a2", "node-a", "zone-1"),
            for_node("c1", "node-c", "zone-2"),
        ],
        &|_| {},
    )?;
    // One endpoint has no hint by node, so hints by zone decide.
    add("half-noded", [noded(), vec![for_zone("c1", "zone-2")]].concat(), &|_| {})?;
    // One endpoint has no hint, so all endpoints are used.
    add("hardly-noded", [noded(), vec![ready("c1")]].concat(), &|_| {})
}

/// The proxy follows hints by node if all ready endpoints have such a hint and at least one of
/// these hints names the node. Otherwise it follows hints by zone, if all ready endpoints have such
/// a hint and at least one of these hints names the node's zone. Otherwise it uses all endpoints.
pub(super) fn topology() -> Vec<Case> {
    const NEAR: &[&str] = &["a1", "b1"];
    const ALL: &[&str] = &["a1", "b1", "c1"];
    vec![
        ask("a3", "zoned", ClusterIp).ports(EVERY_TRANSPORT).answered_evenly(NEAR, Kept).rows(&[25, 30]),
        ask("b3", "zoned", ClusterIp).answered(NEAR, Kept).rows(&[25]),
        ask("c2", "zoned", ClusterIp).ports(EVERY_TRANSPORT).answered(&["c1"], Kept).rows(&[25]),
        ask("node-c", "zoned", ClusterIp).answered(&["c1"], Masqueraded("node-c")).rows(&[25]),
        // The zone of the node that forwards the request decides.
        ask("outside-1", "zoned", NodePort("node-c")).answered(&["c1"], Masqueraded("node-c")).rows(&[25]),
        ask("outside-1", "zoned", LoadBalancerIp).answered(NEAR, Masqueraded("node-a")).rows(&[25]),
        ask("a3", "half-zoned", ClusterIp).answered(NEAR, Kept).rows(&[25, 26]),
        ask("c2", "half-zoned", ClusterIp).answered(NEAR, Kept).rows(&[25, 26]),
        ask("a3", "elsewhere", ClusterIp).answered(&["a1"], Kept).rows(&[26]),
        ask("a3", "zoned-but-unready", ClusterIp).answered(NEAR, Kept).rows(&[25]),
        ask("c2", "zoned-but-unready", ClusterIp).answered(&["c1"], Kept).rows(&[25]),
        ask("a3", "zoned-draining", ClusterIp).answered(&["a1", "c1"], Kept).rows(&[28]),
        ask("c2", "zoned-draining", ClusterIp).answered(&["a1", "c1"], Kept).rows(&[28]),
        ask("a3", "zoned-local", ClusterIp).answered(&["a1"], Kept).rows(&[28, 38]),
        ask("outside-1", "zoned-local", NodePort("node-a")).answered(&["a1"], Kept).rows(&[28, 52]),
        ask("outside-1", "zoned-local", NodePort("node-c")).answered(&["c1"], Kept).rows(&[28, 52]),
        ask("a3", "noded", ClusterIp).ports(EVERY_TRANSPORT).answered(&["a1"], Kept).rows(&[27]),
        ask("b3", "noded", ClusterIp).answered(&["b1"], Kept).rows(&[27]),
        ask("node-c", "noded", ClusterIp).answered(&["c1"], Masqueraded("node-c")).rows(&[27]),
        ask("outside-1", "noded", NodePort("node-b")).answered(&["b1"], Masqueraded("node-b")).rows(&[27]),
        ask("a3", "noded-elsewhere", ClusterIp).answered(&["a1", "a2"], Kept).rows(&[27]),
        ask("b3", "noded-elsewhere", ClusterIp).answered(&["a1", "a2"], Kept).rows(&[27]),
        ask("c2", "noded-elsewhere", ClusterIp).answered(&["c1"], Kept).rows(&[27]),
        ask("a3", "half-noded", ClusterIp).answered(NEAR, Kept).rows(&[25, 27]),
        ask("c2", "half-noded", ClusterIp).answered(&["c1"], Kept).rows(&[25, 27]),
        ask("a3", "hardly-noded", ClusterIp).answered(ALL, Kept).rows(&[26, 27]),
        ask("c2", "hardly-noded", ClusterIp).answered(ALL, Kept).rows(&[26, 27]),
    ]
}
