//! Services and slices with unusual content.

use anyhow::Result;
use serde_json::{Value, json};

use super::case::{Case, EVERY_TRANSPORT, SourceAddress, ask, rows};
use crate::testbed::manifests::{Endpoint, NAMESPACE, Port, Service, ServiceType, Slice, Via, ready};
use crate::testbed::plan::{LINE_PORT, SECOND_LINE_PORT};
use crate::testbed::{Family, Manifests, Transport};

use SourceAddress::{Kept, Masqueraded};
use Via::{ClusterIp, ExternalIp, LoadBalancerIp, NodePort};

fn port(name: &'static str, transport: Transport, target_port: u16) -> Port {
    Port { name, transport, port: 80, target_port }
}

fn tcp_slice(suffix: &'static str, target_port: u16, endpoints: Vec<Endpoint>) -> Slice {
    Slice { suffix, ports: vec![port("tcp", Transport::Tcp, target_port)], endpoints }
}

/// Adds services with unusual content.
pub(super) fn services(all: &mut Manifests) -> Result<()> {
    let mut add = |name: &str, endpoints: &[&str], change: &dyn Fn(&mut Service)| {
        let mut service = Service::new(name, endpoints);
        change(&mut service);
        all.add(service)
    };
    // Three slices. The first slice has b1 with all ports. Each of the other two slices has a1 and
    // c1 with some of the ports.
    add("sliced", &["b1"], &|service| {
        let (tcp, others): (Vec<Port>, Vec<Port>) =
            service.ports.iter().cloned().partition(|port| port.transport == Transport::Tcp);
        service.more_slices = vec![
            Slice { suffix: "tcp", ports: tcp, endpoints: ready(&["a1", "c1"]) },
            Slice { suffix: "others", ports: others, endpoints: ready(&["a1", "c1"]) },
        ];
    })?;
    // One port of the service has a different target port in each pod.
    add("targets-differ", &[], &|service| {
        service.ports.truncate(1);
        service.more_slices =
            vec![tcp_slice("first", LINE_PORT, ready(&["a1"])), tcp_slice("second", SECOND_LINE_PORT, ready(&["b1"]))];
    })?;
    // One port number with three protocols, each with its own pod.
    add("protocols", &[], &|service| {
        service.ports.truncate(3);
        let slice = |suffix, port: &Port, pod| Slice { suffix, ports: vec![port.clone()], endpoints: ready(&[pod]) };
        service.more_slices = vec![
            slice("tcp", &service.ports[0], "a1"),
            slice("udp", &service.ports[1], "b1"),
            slice("sctp", &service.ports[2], "c1"),
        ];
    })?;
    // The port numbers of service and slice are equal, but the names or protocols differ.
    add("misnamed", &[], &|service| {
        service.more_slices = vec![Slice {
            suffix: "misnamed",
            ports: vec![port("other", Transport::Tcp, LINE_PORT), port("tcp", Transport::Udp, LINE_PORT)],
            endpoints: ready(&["a1"]),
        }];
    })?;
    add("unconditional", &[], &|service| {
        service.endpoints = vec![Endpoint { unconditional: true, ..Endpoint::not_ready("a1") }];
    })?;
    add("two-addresses", &[], &|service| {
        service.endpoints = vec![Endpoint { second_address: Some("b1"), ..Endpoint::ready("a1") }];
    })?;
    // a1 is terminating in one slice and ready in another slice.
    add("duplicates", &[], &|service| {
        service.endpoints = vec![Endpoint::terminating("a1"), Endpoint::terminating("b1")];
        service.more_slices = vec![Slice { suffix: "living", ports: service.ports.clone(), endpoints: ready(&["a1"]) }];
    })?;
    // Two pods on the host network of node-c, with different ports and one slice each. One pod is
    // ready, and the other is not.
    add("host-pods", &[], &|service| {
        let (line, others): (Vec<Port>, Vec<Port>) =
            service.ports.iter().cloned().partition(|port| port.target_port == LINE_PORT);
        service.more_slices = vec![
            Slice { suffix: "line", ports: line, endpoints: ready(&["node-c"]) },
            Slice { suffix: "others", ports: others, endpoints: vec![Endpoint::not_ready("node-c")] },
        ];
    })?;
    // Two pods on the host network of node-c serve one port of the Service. The pod at LINE_PORT is
    // not ready. The ready pod's slice is the first by name in one Service, and the last in the
    // other.
    for (name, suffix) in [("ready-slice-first", "first"), ("ready-slice-last", "second")] {
        add(name, &[], &|service| {
            service.ports.truncate(3);
            service.endpoints = vec![Endpoint::not_ready("node-c")];
            let elsewhere = |port: &Port| Port { target_port: SECOND_LINE_PORT, ..port.clone() };
            let ports = service.ports.iter().map(elsewhere).collect();
            service.more_slices = vec![Slice { suffix, ports, endpoints: ready(&["node-c"]) }];
        })?;
    }
    // In order of names, b1 is not ready in the first slice and ready in the second slice. a1 is
    // ready in the first slice and terminating in the second slice. c1 is ready in the first slice
    // and not ready in the second slice, as two pods on the network of a node may be.
    add("listed-twice", &[], &|service| {
        service.endpoints = vec![Endpoint::ready("a1"), Endpoint::not_ready("b1"), Endpoint::ready("c1")];
        let endpoints = vec![Endpoint::terminating("a1"), Endpoint::ready("b1"), Endpoint::not_ready("c1")];
        service.more_slices = vec![Slice { suffix: "second", ports: service.ports.clone(), endpoints }];
    })?;
    add("one-family", &["a1", "c1"], &|service| {
        service.patch = Some(|service| {
            let address = service.cluster_ip(Family::V4);
            let single = json!({ "clusterIPs": [address], "ipFamilies": ["IPv4"], "ipFamilyPolicy": "SingleStack" });
            json!({ "spec": single })
        });
    })?;
    add("leading-zeros", &["a1"], &|service| {
        service.patch = Some(|service| {
            let (number, v6) = (service.number, service.cluster_ip(Family::V6));
            let cluster = format!("010.096.000.{number:03}");
            let (external, balancer) = (format!("198.051.100.{number:03}"), format!("203.000.113.{number:03}"));
            let external = [json!(external), json!(service.external_ip(Family::V6))];
            let ingress = [json!({ "ip": balancer }), json!({ "ip": service.load_balancer_ip(Family::V6) })];
            json!({
                "spec": { "clusterIP": cluster, "clusterIPs": [cluster, v6], "externalIPs": external },
                "status": { "loadBalancer": { "ingress": ingress } },
            })
        });
    })?;
    add("proxied", &["a1"], &|service| {
        service.patch = Some(|service| {
            let proxied = |family| json!({ "ip": service.load_balancer_ip(family), "ipMode": "Proxy" });
            let named = json!({ "hostname": "balancer.example" });
            let ingress = [proxied(Family::V4), named, proxied(Family::V6)];
            json!({ "status": { "loadBalancer": { "ingress": ingress } } })
        });
    })?;
    add("external-name", &["a1"], &|service| service.service_type = ServiceType::ExternalName)?;
    add("headless", &["a1"], &|service| service.service_type = ServiceType::Headless)?;
    add("handed-over", &["a1"], &|service| service.proxy_name = Some(""))?;
    add("dns-only", &["a1"], &|service| service.headless_slices = true)?;
    add("nameless", &[], &|_| {})?;
    let target = |name: &str| -> Vec<Value> { [Family::V4, Family::V6].map(|family| nameless(name, family)).into() };
    all.further.extend(target("nameless"));
    all.further.push(names_in_place_of_addresses("nameless"));
    Ok(())
}

/// A slice whose ports lack a number. Headgate uses no endpoint of a slice without
/// usable ports.
fn nameless(service: &str, family: Family) -> Value {
    let address = if family == Family::V4 { "10.244.1.10" } else { "fd00:10:244:1::a" };
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {
            "name": format!("{service}-{}", family.to_string().to_lowercase()), "namespace": NAMESPACE,
            "labels": { "kubernetes.io/service-name": service },
        },
        "addressType": family.to_string(),
        "ports": [{ "name": "tcp" }, { "name": "tcp", "port": 0 }, { "name": "tcp", "port": null }],
        "endpoints": [{ "addresses": [address], "nodeName": "node-a" }],
    })
}

/// A slice of address type FQDN.
fn names_in_place_of_addresses(service: &str) -> Value {
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {
            "name": format!("{service}-names"), "namespace": NAMESPACE,
            "labels": { "kubernetes.io/service-name": service },
        },
        "addressType": "FQDN",
        "ports": [{ "name": "tcp", "port": LINE_PORT }],
        "endpoints": [{ "addresses": ["pod.example"] }],
    })
}

/// The ports of [`Service::new`] whose target port is LINE_PORT.
const LINE: &[&str] = &["tcp", "udp", "sctp"];

/// The cases for Services and EndpointSlices with unusual content.
pub(super) fn intake() -> Vec<Case> {
    let mut cases = vec![
        ask("a3", "sliced", ClusterIp).ports(EVERY_TRANSPORT).answered(&["a1", "b1", "c1"], Kept).rows(&[9]),
        ask("outside-1", "sliced", NodePort("node-b"))
            .ports(&["tcp", "second"])
            .answered(&["a1", "b1", "c1"], Masqueraded("node-b"))
            .rows(&[6, 9]),
        ask("a3", "targets-differ", ClusterIp).answered(&["a1", "b1"], Kept).rows(&[6, 9]),
        ask("a3", "protocols", ClusterIp).ports(&["tcp"]).answered(&["a1"], Kept).rows(&[6, 16]),
        ask("a3", "protocols", ClusterIp).ports(&["udp"]).answered(&["b1"], Kept).rows(&[6, 16]),
        ask("a3", "protocols", ClusterIp).ports(&["sctp"]).answered(&["c1"], Kept).rows(&[6, 16]),
        ask("a3", "misnamed", ClusterIp).refused().rows(&[6]),
        ask("a3", "nameless", ClusterIp).refused().rows(&[5, 7]),
        ask("a3", "unconditional", ClusterIp).answered(&["a1"], Kept).rows(&[8]),
        ask("a3", "two-addresses", ClusterIp).answered(&["a1"], Kept).rows(&[7]),
        ask("b3", "duplicates", ClusterIp).ports(&["tcp", "udp"]).answered(&["a1"], Kept).rows(&[10]),
        ask("a3", "host-pods", ClusterIp).ports(LINE).answered(&["node-c"], Kept).rows(&[9, 10]),
        ask("a3", "host-pods", ClusterIp).ports(&["second", "http"]).refused().rows(&[9, 10]),
        ask("node-c", "host-pods", ClusterIp).answered(&["node-c"], Masqueraded("node-c")).rows(&[9, 10]),
        ask("node-c", "host-pods", ClusterIp).ports(&["second", "http"]).refused().rows(&[9, 10]),
        ask("outside-1", "host-pods", NodePort("node-a")).answered(&["node-c"], Masqueraded("node-a")).rows(&[9, 10]),
        ask("outside-1", "host-pods", NodePort("node-a")).ports(&["second"]).refused().rows(&[9, 10]),
        ask("a3", "ready-slice-first", ClusterIp).ports(LINE).answered(&["node-c"], Kept).rows(&[9, 10]),
        ask("a3", "ready-slice-last", ClusterIp).ports(LINE).answered(&["node-c"], Kept).rows(&[9, 10]),
        ask("a3", "listed-twice", ClusterIp).ports(EVERY_TRANSPORT).answered(&["a1", "b1", "c1"], Kept).rows(&[10]),
        ask("a3", "dns-only", ClusterIp).refused().rows(&[4]),
    ];
    for via in [ClusterIp, ExternalIp, LoadBalancerIp] {
        let source = if via == ClusterIp { Kept } else { Masqueraded("node-a") };
        cases.extend([
            ask("a3", "one-family", via).over(&[Family::V4]).answered(&["a1", "c1"], source).rows(&[5, 11]),
            ask("a3", "one-family", via).over(&[Family::V6]).dropped().rows(&[11]),
            ask("a3", "leading-zeros", via).answered(&["a1"], source).rows(&[12]),
            ask("a3", "headless", via).dropped().rows(&[1]),
            ask("a3", "external-name", via).dropped().rows(&[2]),
            ask("a3", "handed-over", via).dropped().rows(&[3]),
        ]);
    }
    cases.extend(rows(
        &[13],
        [
            ask("a3", "proxied", LoadBalancerIp).dropped(),
            ask("outside-1", "proxied", LoadBalancerIp).dropped(),
            ask("a3", "proxied", ClusterIp).answered(&["a1"], Kept),
            ask("outside-1", "proxied", NodePort("node-a")).answered(&["a1"], Masqueraded("node-a")),
        ],
    ));
    cases
}
