//! The model as a whole: the changes and problems that result from objects. Above a test, a comment
//! such as `// rows: 1` names the rows of docs/behaviours.md that the test covers.

#![allow(clippy::unwrap_used, clippy::needless_pass_by_value)]

mod gates;
mod hostile;
mod ports;
mod replay;

use headgate_core::{Dirty, Node, ProxyProtocol, Service, State, TrafficPolicy};
use serde::Deserialize as _;
use serde_json::{Value, json};

use super::*;
use crate::model::{GateChange, PodChange};

fn object(value: &Value) -> Object {
    let header = crate::objects::ManifestHeader::deserialize(value).unwrap();
    let kind = ObjectKind::of(&header.api_version, &header.kind).unwrap();
    Object::deserialize(kind, value).unwrap()
}

/// A model, and the state after its changes.
#[derive(Default)]
struct Bench {
    model: Model,
    state: State,
    nodes: BTreeMap<Arc<str>, Node>,
    /// The changes of pods and of gates so far.
    pods: Vec<PodChange>,
    gates: Vec<GateChange>,
}

impl Bench {
    fn apply(&mut self, value: &Value) {
        self.model.event(Event::Apply(Box::new(object(value))), "");
    }

    fn delete(&mut self, kind: ObjectKind, namespace: &str, name: &str) {
        self.model.event(Event::Delete(ObjectKey::new(kind, namespace, name)), "");
    }

    fn flush(&mut self) -> Vec<TriggeredChange> {
        let Transaction { changes, nodes, pods, gates, .. } = self.model.take();
        self.pods.extend(pods);
        self.gates.extend(gates);
        for change in &changes {
            assert!(self.state.apply(change.change.clone(), &mut Dirty::default()), "no effect: {change:?}");
        }
        for node in nodes {
            match node {
                NodeChange::Apply(node) | NodeChange::ApplyExcluded(node) => {
                    drop(self.nodes.insert(node.name.clone(), node));
                }
                NodeChange::Remove(name) => drop(self.nodes.remove(&name)),
            }
        }
        changes
    }

    /// An empty bench whose Services have this budget.
    fn within(service_budget: u32) -> Self {
        Self::new(ModelSettings { service_budget, ..ModelSettings::default() })
    }

    fn new(settings: ModelSettings) -> Self {
        Self { model: Model::new(settings), ..Self::default() }
    }

    fn with(values: &[Value]) -> Self {
        let mut bench = Self::default();
        values.iter().for_each(|value| bench.apply(value));
        bench.flush();
        bench
    }

    fn service(&self, name: &str) -> Option<&Service> {
        self.state.entry(&ServiceKey::new("x", name))?.service()
    }

    /// The endpoints as `address:ports`, with `!` after each terminating port.
    fn endpoints(&self, name: &str) -> Vec<String> {
        let Some(entry) = self.state.entry(&ServiceKey::new("x", name)) else { return Vec::new() };
        let port = |of_port: headgate_core::PortState<'_>| {
            format!("{}{}", of_port.port.port, if of_port.conditions.terminating { "!" } else { "" })
        };
        let ports = |endpoint: &headgate_core::Endpoint| endpoint.port_states().map(port).collect::<Vec<_>>().join(",");
        entry.endpoints().values().map(|endpoint| format!("{}:{}", endpoint.address, ports(endpoint))).collect()
    }

    fn problems(&mut self) -> Vec<String> {
        let problems = self.model.take_problems().unwrap_or_default();
        problems.into_iter().map(|p| format!("{} {} {}", p.object, p.field, p.message)).collect()
    }
}

fn service(name: &str, spec: Value) -> Value {
    let mut value = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"namespace": "x", "name": name},
        "spec": {"clusterIP": "10.0.0.1", "ports": [{"name": "http", "port": 80}]}});
    spec.as_object().unwrap().iter().for_each(|(key, field)| value["spec"][key] = field.clone());
    value
}

fn slice(name: &str, service: &str, endpoints: Value, ports: Value) -> Value {
    json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"namespace": "x", "name": name, "labels": {"kubernetes.io/service-name": service}},
        "endpoints": endpoints, "ports": ports})
}

fn ready(address: &str) -> Value {
    json!({"addresses": [address]})
}

fn http(port: u32) -> Value {
    json!([{"name": "http", "port": port}])
}

// rows: 1, 2
#[test]
fn headless_and_external_name_services_are_not_served() {
    let mut bench = Bench::with(&[service("s", json!({}))]);
    assert!(bench.service("s").is_some());
    for spec in [json!({"clusterIP": "None"}), json!({"type": "ExternalName", "clusterIP": "", "ports": []})] {
        bench.apply(&service("s", spec));
        bench.flush();
        assert_eq!(bench.service("s"), None);
        assert_eq!(bench.problems(), [""; 0]);
        bench.apply(&service("s", json!({})));
        bench.flush();
        assert!(bench.service("s").is_some());
    }
    let mut bench = Bench::with(&[service("s", json!({"clusterIP": ""}))]);
    assert_eq!(bench.service("s"), None);
    assert!(bench.problems()[0].contains("spec.clusterIP"));
}

/// A Service with the label service-proxy-name, or a slice with the label headless, is ignored
/// while it has the label.
// rows: 3, 4
#[test]
fn objects_are_ignored_while_a_label_excludes_them() {
    let (mut taken, mut dns_only) = (service("s", json!({})), slice("a", "s", json!([ready("10.1.0.1")]), http(1)));
    taken["metadata"]["labels"]["service.kubernetes.io/service-proxy-name"] = json!("");
    dns_only["metadata"]["labels"]["service.kubernetes.io/headless"] = json!("");
    let (own, serving) = (service("s", json!({})), slice("a", "s", json!([ready("10.1.0.1")]), http(1)));
    let mut bench = Bench::with(&[own.clone(), serving.clone()]);
    for _ in 0..2 {
        bench.apply(&taken);
        bench.apply(&dns_only);
        bench.flush();
        assert_eq!((bench.service("s"), bench.endpoints("s").len()), (None, 0));
        bench.apply(&own);
        bench.apply(&serving);
        bench.flush();
        assert_eq!((bench.service("s").is_some(), bench.endpoints("s").len()), (true, 1));
    }
}

/// Slices of type FQDN are ignored. Addresses of the wrong family are reported and left out.
// rows: 5
#[test]
fn fqdn_slices_are_ignored_and_wrong_families_are_reported() {
    let mut fqdn = slice("a", "s", json!([ready("web.example.org")]), http(1));
    fqdn["addressType"] = json!("FQDN");
    let mut v6 = slice("b", "s", json!([ready("fd00::1"), ready("10.1.0.1")]), http(1));
    v6["addressType"] = json!("IPv6");
    let mut bench = Bench::with(&[fqdn, v6]);
    assert_eq!(bench.endpoints("s"), ["fd00::1:1"]);
    assert!(
        bench.problems()[0].starts_with("EndpointSlice x/b endpoints[1].addresses[0] 10.1.0.1 is not an IPv6 address")
    );
}

// rows: 7
#[test]
fn slice_ports_need_a_number() {
    let ports =
        json!([{"port": 5}, {"name": "a"}, {"name": "b", "port": 0}, {"name": "c", "port": 4, "protocol": "UDP"}]);
    let mut bench = Bench::with(&[slice("a", "s", json!([{"addresses": ["10.1.0.1", "10.1.0.2"]}]), ports)]);
    assert_eq!(bench.endpoints("s"), ["10.1.0.1:5,4"]);
    assert_eq!(bench.problems(), [""; 0]);
    let mut bench = Bench::with(&[slice("a", "s", json!([ready("10.1.0.1")]), json!([{"name": "a"}]))]);
    assert_eq!(bench.endpoints("s"), [""; 0], "an endpoint without ports receives nothing");
    assert_eq!(bench.problems(), [""; 0]);
}

// rows: 8
#[test]
fn conditions_have_defaults() {
    let bench = Bench::with(&[slice(
        "a",
        "s",
        json!([{"addresses": ["10.1.0.1"], "conditions": {}, "nodeName": " Node-A ", "zone": "z",
            "hints": {"forZones": [{"name": "z2"}, {"name": "z1"}, {"name": "z2"}]}}]),
        http(1),
    )]);
    let entry = bench.state.entry(&ServiceKey::new("x", "s")).unwrap();
    let endpoint = entry.endpoints().values().next().unwrap();
    assert_eq!(endpoint.conditions, headgate_core::Conditions::READY);
    assert_eq!(endpoint.placement.node.as_deref(), Some("node-a"));
    let zones: Vec<&str> = endpoint.placement.hints.as_ref().unwrap().zones.iter().map(|zone| &**zone).collect();
    assert_eq!(zones, ["z1", "z2"]);
}

// rows: 9, 10
#[test]
fn slices_are_merged_port_by_port() {
    let dying =
        json!({"addresses": ["10.1.0.1"], "conditions": {"ready": false, "serving": true, "terminating": true}});
    let a = slice("a", "s", json!([dying]), http(1));
    let b = slice("b", "s", json!([ready("10.1.0.1"), ready("10.1.0.2")]), http(2));
    for order in [[&a, &b], [&b, &a]] {
        let mut bench = Bench::with(&order.map(Clone::clone));
        assert_eq!(bench.endpoints("s"), ["10.1.0.1:1!,2", "10.1.0.2:2"]);
        assert_eq!(bench.problems(), [""; 0]);
        bench.delete(ObjectKind::EndpointSlice, "x", "b");
        bench.flush();
        assert_eq!(bench.endpoints("s"), ["10.1.0.1:1!"]);
    }
}

#[test]
fn slices_that_disagree_on_a_port_are_a_problem() {
    let on = |node: &str| json!([{"addresses": ["10.1.0.1"], "nodeName": node}]);
    let (a, b) = (slice("a", "s", on("n1"), http(1)), slice("b", "s", on("n2"), http(1)));
    for order in [[&a, &b], [&b, &a]] {
        let mut bench = Bench::with(&order.map(Clone::clone));
        let entry = bench.state.entry(&ServiceKey::new("x", "s")).unwrap();
        assert_eq!(entry.endpoints().values().next().unwrap().placement.node.as_deref(), Some("n2"));
        assert!(bench.problems()[0].contains("EndpointSlice x/b and EndpointSlice x/a list the same port"));
        bench.apply(&slice("b", "s", on("n1"), http(1)));
        assert_eq!(bench.model.take_problems(), Some(Vec::new()));
    }
}

// rows: 11, 12, 13
#[test]
fn addresses_are_canonical_and_have_a_family_of_their_service() {
    let mut value = service(
        "s",
        json!({"clusterIP": "010.000.000.001", "type": "LoadBalancer", "externalIPs": ["192.0.2.001", "2001:db8::1"],
            "externalTrafficPolicy": "Local", "healthCheckNodePort": 30001,
            "loadBalancerSourceRanges": [" 198.51.100.7/24 ", "::/0", "2001:db8::/32"]}),
    );
    value["status"] = json!({"loadBalancer": {"ingress": [
        {"ip": "203.0.113.1"}, {"ip": "203.0.113.2", "ipMode": "Proxy"}, {"hostname": "lb"}, {"ip": "203.0.113.3", "ipMode": "VIP"}]}});
    let mut bench = Bench::with(&[value]);
    let service = bench.service("s").unwrap();
    let texts = |list: &[std::net::IpAddr]| list.iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(texts(&service.cluster_ips), ["10.0.0.1"]);
    assert_eq!(texts(&service.external_ips), ["192.0.2.1"]);
    assert_eq!(texts(&service.load_balancer_ips), ["203.0.113.1", "203.0.113.3"]);
    let ranges: Vec<String> = service.load_balancer_source_ranges.iter().map(ToString::to_string).collect();
    assert_eq!(ranges, ["198.51.100.0/24"], "a /0 range allows all addresses of its family");
    assert_eq!((service.external_traffic_policy, service.health_check_node_port), (TrafficPolicy::Local, 30001));
    assert_eq!(bench.problems(), [""; 0]);
}

/// Only a ClusterIP may be a link-local address, because no machine holds it.
#[test]
fn addresses_that_other_machines_cannot_reach_are_left_out_and_reported() {
    for (address, is_cluster_ip) in
        [("0.0.0.0", false), ("127.0.0.1", false), ("224.0.0.1", false), ("169.254.48.10", true)]
    {
        let mut value = service("s", json!({"type": "LoadBalancer", "externalIPs": [address, "192.0.2.1"]}));
        value["status"] = json!({"loadBalancer": {"ingress": [{"ip": address}, {"ip": "203.0.113.1"}]}});
        let mut bench = Bench::with(&[value, slice("a", "s", json!([ready(address), ready("10.1.0.1")]), http(1))]);
        let service = bench.service("s").unwrap();
        assert_eq!(service.load_balancer_ips, ["203.0.113.1".parse::<std::net::IpAddr>().unwrap()]);
        assert_eq!(service.external_ips, ["192.0.2.1".parse::<std::net::IpAddr>().unwrap()]);
        assert_eq!(bench.endpoints("s"), ["10.1.0.1:1"]);
        let problems = bench.problems();
        assert!(problems.iter().all(|problem| problem.contains(&format!("{address} is a"))) || address == "0.0.0.0");
        assert_eq!(problems.len(), 3, "{problems:?}");
        let bench = Bench::with(&[service_at(address)]);
        assert_eq!(bench.service("s").is_some(), is_cluster_ip, "{address}");
    }
}

fn service_at(address: &str) -> Value {
    service("s", json!({"clusterIP": address, "clusterIPs": [address]}))
}

/// `externalTrafficPolicy: Local` is ignored for Services without external addresses or NodePorts.
// rows: 52
#[test]
fn external_policy_local_needs_external_addresses_or_node_ports() {
    let policy = |spec: Value| Bench::with(&[service("s", spec)]).service("s").unwrap().external_traffic_policy;
    assert_eq!(policy(json!({"externalTrafficPolicy": "Local"})), TrafficPolicy::Cluster);
    assert_eq!(policy(json!({"externalTrafficPolicy": "Local", "type": "NodePort"})), TrafficPolicy::Local);
    assert_eq!(policy(json!({"externalTrafficPolicy": "Local", "externalIPs": ["192.0.2.1"]})), TrafficPolicy::Local);
    let affinity = |spec: Value| Bench::with(&[service("s", spec)]).service("s").unwrap().session_affinity;
    assert_eq!(affinity(json!({"sessionAffinity": "ClientIP"})).unwrap().timeout_seconds, 10_800);
    assert_eq!(affinity(json!({"sessionAffinity": "None"})), None);
}

// rows: 14, 15
#[test]
fn ports_can_change_and_deleted_services_can_return() {
    let mut bench = Bench::with(&[service("s", json!({})), slice("a", "s", json!([ready("10.1.0.1")]), http(1))]);
    let ports = json!([{"name": "a", "port": 80}, {"name": "b", "port": 80, "protocol": "UDP"}, {"name": "c", "port": 80, "protocol": "SCTP"}]);
    bench.apply(&service("s", json!({"ports": ports})));
    bench.flush();
    assert_eq!(bench.service("s").unwrap().ports.len(), 3);
    bench.delete(ObjectKind::Service, "x", "s");
    bench.flush();
    assert_eq!((bench.service("s"), bench.endpoints("s").len()), (None, 1), "slices are removed by their own events");
    bench.apply(&service("s", json!({"clusterIP": "10.0.0.9"})));
    bench.flush();
    assert_eq!(bench.service("s").unwrap().cluster_ips[0].to_string(), "10.0.0.9");
}

/// Pending changes that cancel each other out are dropped.
// rows: 19
#[test]
fn changes_that_cancel_each_other_out_are_dropped() {
    let mut bench = Bench::with(&[service("s", json!({})), slice("a", "s", json!([ready("10.1.0.1")]), http(1))]);
    bench.delete(ObjectKind::Service, "x", "s");
    bench.apply(&slice("a", "s", json!([]), http(1)));
    bench.apply(&service("other", json!({})));
    bench.apply(&slice("a", "s", json!([ready("10.1.0.1")]), http(1)));
    bench.apply(&service("s", json!({})));
    bench.delete(ObjectKind::Service, "x", "other");
    assert_eq!(bench.flush(), []);
}

// rows: 9, 15
#[test]
fn an_address_moves_between_slices_without_a_gap() {
    let mut bench = Bench::with(&[slice("a", "s", json!([ready("10.1.0.1")]), http(1))]);
    bench.apply(&slice("a", "s", json!([]), http(1)));
    bench.apply(&slice("b", "s", json!([ready("10.1.0.1")]), http(1)));
    assert_eq!(bench.flush(), []);
    bench.apply(&slice("b", "t", json!([ready("10.1.0.1")]), http(1)));
    bench.flush();
    assert_eq!((bench.endpoints("s").len(), bench.endpoints("t").len()), (0, 1));
}

#[test]
fn new_endpoints_come_before_their_service_and_removals_come_last() {
    let mut bench = Bench::with(&[service("old", json!({})), slice("o", "old", json!([ready("10.1.0.9")]), http(1))]);
    bench.delete(ObjectKind::Service, "x", "old");
    bench.delete(ObjectKind::EndpointSlice, "x", "o");
    bench.apply(&service("z", json!({})));
    bench.apply(&slice("z", "z", json!([ready("10.1.0.1")]), http(1)));
    let order: Vec<&str> = bench
        .flush()
        .iter()
        .map(|change| match &change.change {
            Change::Endpoint(..) => "endpoint",
            Change::Service(_) => "service",
            Change::RemoveService(_) => "no service",
            Change::RemoveEndpoint(..) => "no endpoint",
            _ => "other",
        })
        .collect();
    assert_eq!(order, ["endpoint", "service", "no service", "no endpoint"]);
}

#[test]
fn an_invalid_version_is_reported_and_the_last_good_one_stays() {
    let bad = [
        (json!({"ports": []}), "spec.ports "),
        (json!({"ports": [{"port": 0}]}), "spec.ports[0].port"),
        (json!({"ports": [{"port": 70000}]}), "spec.ports[0].port"),
        (json!({"ports": [{"port": 80, "protocol": "ICMP"}]}), "spec.ports[0].protocol"),
        (json!({"ports": [{"port": 80, "nodePort": -1}]}), "spec.ports[0].nodePort"),
        (json!({"clusterIP": "300.1.1.1"}), "spec.clusterIP "),
        (json!({"clusterIP": "127.0.0.1"}), "spec.clusterIP "),
        (json!({"clusterIPs": ["10.0.0.1", "10.0.0.2"]}), "spec.clusterIPs[1]"),
        (json!({"clusterIPs": ["10.0.0.2"]}), "spec.clusterIP "),
        (json!({"loadBalancerSourceRanges": ["10.0.0.0"]}), "spec.loadBalancerSourceRanges[0]"),
        (json!({"type": "Magic"}), "spec.type"),
        (json!({"sessionAffinity": "Cookie"}), "spec.sessionAffinity "),
        (json!({"internalTrafficPolicy": "local"}), "spec.internalTrafficPolicy "),
    ];
    for (spec, field) in bad {
        let mut bench = Bench::with(&[service("s", json!({}))]);
        let good = bench.service("s").cloned();
        bench.apply(&service("s", spec.clone()));
        assert_eq!(bench.flush(), [], "{spec}");
        assert_eq!(bench.service("s").cloned(), good);
        let problems = bench.problems();
        assert!(problems.len() == 1 && problems[0].starts_with(&format!("Service x/s {field}")), "{problems:?}");
        assert!(problems[0].ends_with("its last good version stays in use"), "{problems:?}");
        bench.apply(&service("s", json!({})));
        assert_eq!(bench.model.take_problems(), Some(Vec::new()), "a valid version removes the problem");
        bench.apply(&service("s", spec));
        bench.delete(ObjectKind::Service, "x", "s");
        bench.flush();
        assert_eq!(bench.service("s"), None, "a deleted object is removed");
        assert_eq!(bench.model.take_problems(), Some(Vec::new()));
    }
}

#[test]
fn without_a_good_version_the_valid_parts_are_used() {
    let ports = json!([{"name": "a", "port": 80}, {"name": "b", "port": 70000}, {"name": "a", "port": 81}]);
    let mut bench = Bench::with(&[service("s", json!({"ports": ports}))]);
    assert_eq!(bench.service("s").unwrap().ports.len(), 1);
    let problems = bench.problems();
    assert!(problems.len() == 2 && problems.iter().all(|p| p.ends_with("the rest of it is in use")), "{problems:?}");
    let mut value = service("s", json!({"type": "LoadBalancer", "loadBalancerSourceRanges": ["nonsense"]}));
    value["status"] = json!({"loadBalancer": {"ingress": [{"ip": "203.0.113.1"}]}});
    let bench = Bench::with(&[value]);
    assert!(bench.service("s").unwrap().load_balancer_ips.is_empty(), "invalid source ranges close the load balancer");
    let mut bench = Bench::with(&[service("s", json!({"externalIPs": ["300.1.1.1", "192.0.2.1"]}))]);
    assert_eq!(bench.service("s").unwrap().external_ips.len(), 1);
    assert!(bench.problems()[0].starts_with("Service x/s spec.externalIPs[0]"));
}

#[test]
fn invalid_annotations_are_ignored_and_reported() {
    /// The annotations, separated by spaces, what they change, and the problem.
    type Case = (&'static str, fn(&mut Service), Option<&'static str>);
    const CASES: [Case; 16] = [
        ("scheduler=mh", |service| service.scheduler = "mh".into(), None),
        ("scheduler=fastest", |_| (), Some("scheduler] \"fastest\" is not a scheduler of IPVS")),
        ("scheduler=", |_| (), Some("the cluster's scheduler is used")),
        (
            "health-check=tcp health-check-interval=5s",
            |service| (service.health_check, service.health_check_interval_ms) = ("tcp".into(), 5_000),
            None,
        ),
        ("health-check-interval=1500ms", |service| service.health_check_interval_ms = 1_500, None),
        ("health-check=http", |_| (), Some("its endpoints are not checked")),
        ("health-check-interval=1ms", |_| (), Some("the agents' interval is used")),
        ("health-check-interval=99999999999999999999s", |_| (), Some("is not a time between")),
        ("health-check-interval=5", |_| (), Some("is not a time between")),
        ("load-balancing=consistent-hash", |service| service.load_balancing = "consistent-hash".into(), None),
        (
            "load-balancing=fastest",
            |_| (),
            Some("write one of random, round-robin, least-connections, consistent-hash; "),
        ),
        ("proxy-protocol=v2", |service| service.proxy_protocol = Some(ProxyProtocol::V2), None),
        ("proxy-protocol=2", |_| (), Some("\"2\" is not a version of the PROXY protocol: write v1 or v2; its")),
        ("max-connections=1000", |service| service.max_connections = 1000, None),
        ("max-connections=0", |_| (), Some("write a whole number from 1 to 1000000; its connections are not")),
        ("max-connections=many", |_| (), Some("\"many\" is not a limit of connections")),
    ];
    let annotated = |annotations: &str| {
        let mut value = service("s", json!({}));
        for (name, text) in annotations.split(' ').map(|text| text.split_once('=').unwrap()) {
            value["metadata"]["annotations"][format!("headgate.io/{name}")] = json!(text);
        }
        value
    };
    for (annotations, change, problem) in CASES {
        let mut expected = Bench::with(&[service("s", json!({}))]).service("s").unwrap().clone();
        change(&mut expected);
        let mut bench = Bench::with(&[annotated(annotations)]);
        assert_eq!(bench.service("s"), Some(&expected), "{annotations}");
        let problems = bench.problems();
        assert_eq!(problems.len(), usize::from(problem.is_some()), "{problems:?}");
        assert!(problems.iter().all(|text| text.contains(problem.unwrap())), "{problems:?}");
        assert!(problems.iter().all(|text| text.starts_with("Service x/s metadata.annotations[headgate.io/")));
    }
    let endpoints = json!([ready("10.1.0.1"), ready("10.1.0.2"), ready("10.1.0.3")]);
    let mut weighted = slice("s-1", "s", endpoints, http(1));
    weighted["metadata"]["annotations"] =
        json!({"headgate.io/weights": "10.1.0.1=100, 10.1.0.2=101,10.1.0.2=0 ,10.1.0.9=2,x=1"});
    let mut bench = Bench::with(&[service("s", json!({})), weighted]);
    let entry = bench.state.entry(&ServiceKey::new("x", "s")).unwrap();
    let weights: Vec<u32> = entry.endpoints().values().map(|endpoint| endpoint.placement.weight.get()).collect();
    assert_eq!(weights, [100, 0, 1]);
    let problems = bench.problems();
    let field = "EndpointSlice x/s-1 metadata.annotations[headgate.io/weights] ";
    for text in
        ["\"10.1.0.2=101\" is not an address with a weight", "\"x=1\" is not", "10.1.0.9 is no address of this slice"]
    {
        assert!(problems.iter().any(|problem| problem.starts_with(&format!("{field}{text}"))), "{problems:?}");
    }
    assert_eq!(problems.len(), 3);
    // Cilium's weight counts for the endpoints without a weight of Headgate.
    for (text, weight, problem) in [
        ("0", 0, None),
        ("65535", 65_535, None),
        (" 50 ", 50, None),
        ("65536", 100, Some("from 0 to 65535")),
        ("-1", 100, Some("from 0")),
    ] {
        let mut weighted = slice("s-1", "s", json!([ready("10.1.0.1"), ready("10.1.0.2")]), http(1));
        weighted["metadata"]["annotations"] =
            json!({"headgate.io/weights": "10.1.0.1=3", "service.cilium.io/weight": text});
        let mut bench = Bench::with(&[service("s", json!({})), weighted]);
        let entry = bench.state.entry(&ServiceKey::new("x", "s")).unwrap();
        let hundredths = entry.endpoints().values().map(|endpoint| endpoint.placement.weight.hundredths());
        assert_eq!(hundredths.collect::<Vec<_>>(), [300, weight]);
        let problems = bench.problems();
        assert_eq!(problems.len(), usize::from(problem.is_some()), "{problems:?}");
        assert!(problems.iter().all(|text| text.contains(problem.unwrap())), "{problems:?}");
    }
    // The rest of a version with an invalid annotation is used.
    let mut bench = Bench::with(&[service("s", json!({}))]);
    let mut value = annotated("scheduler=fastest");
    value["spec"]["externalIPs"] = json!(["192.0.2.1"]);
    bench.apply(&value);
    bench.flush();
    assert_eq!(bench.service("s").unwrap().external_ips.len(), 1);
}

#[test]
fn invalid_endpoints_do_not_affect_the_others() {
    let addresses = ["10.1.0.1", "300.1.1.1", "127.0.0.1", "0.0.0.0", "224.0.0.1", "169.254.0.1"];
    let mut endpoints: Vec<Value> = addresses.into_iter().map(ready).collect();
    endpoints.push(json!({"addresses": []}));
    let mut bench = Bench::with(&[slice("a", "s", json!(endpoints), http(1))]);
    assert_eq!(bench.endpoints("s"), ["10.1.0.1:1"]);
    assert_eq!(bench.problems().len(), 6);
    let good = slice("a", "s", json!([ready("10.1.0.1")]), http(1));
    let mut unlabelled = good.clone();
    unlabelled["metadata"]["labels"] = json!({});
    for (bad, field) in [
        (unlabelled, "metadata.labels"),
        (slice("a", "s", json!([ready("10.1.0.1")]), http(70000)), "ports[0].port"),
        (
            slice("a", "s", json!([ready("10.1.0.1")]), json!([{"name": "http", "port": 1, "protocol": "X"}])),
            "ports[0].protocol",
        ),
    ] {
        let mut bench = Bench::with(std::slice::from_ref(&good));
        bench.apply(&bad);
        assert_eq!(bench.flush(), []);
        assert!(bench.problems()[0].starts_with(&format!("EndpointSlice x/a {field}")));
        assert_eq!(bench.endpoints("s"), ["10.1.0.1:1"]);
    }
}

#[test]
fn a_list_replaces_all_objects_of_its_kind() {
    let mut bench = Bench::with(&[
        service("kept", json!({})),
        service("gone", json!({})),
        slice("a", "kept", json!([ready("10.1.0.1")]), http(1)),
        service("bad", json!({"ports": []})),
    ]);
    let undecodable = |name| Event::Undecodable {
        key: ObjectKey::new(ObjectKind::Service, "x", name),
        field: String::new(),
        message: "broken".to_owned(),
    };
    let listed = vec![undecodable("kept"), Event::Apply(Box::new(object(&service("new", json!({})))))];
    bench.model.replace(ObjectKind::Service, listed);
    assert_eq!(bench.flush().len(), 2, "`new` is added and `gone` is removed; `kept` and its endpoint do not change");
    assert!(bench.service("kept").is_some() && bench.service("new").is_some() && bench.service("gone").is_none());
    let problems = bench.problems();
    assert!(problems.len() == 1 && problems[0].starts_with("Service x/kept"), "{problems:?}");
}

/// The work of a step, in lookups of addresses in slices.
fn work(bench: &mut Bench, step: impl FnOnce(&mut Bench)) -> u64 {
    let before = bench.model.endpoints.visits();
    step(bench);
    bench.flush();
    bench.model.endpoints.visits() - before
}

#[test]
fn an_update_costs_as_much_in_a_service_of_many_slices_as_in_one_of_two() {
    const SIZE: u32 = 20;
    let endpoints = |number: u32| {
        let of_slice = number * SIZE..(number + 1) * SIZE;
        of_slice.map(|n| ready(&format!("10.2.{}.{}", n / 256, n % 256))).collect::<Vec<_>>()
    };
    let put = |bench: &mut Bench, number: u32, endpoints: Vec<Value>| {
        bench.apply(&slice(&format!("a{number}"), "s", json!(endpoints), http(1)));
    };
    let costs = |slices: u32| {
        let mut bench = Bench::default();
        let all = work(&mut bench, |bench| (0..slices).for_each(|number| put(bench, number, endpoints(number))));
        let of_changes = [0, 1].map(|number| {
            let mut changed = endpoints(number);
            changed[7] = ready(&format!("10.9.9.{number}"));
            work(&mut bench, |bench| put(bench, number, changed))
        });
        let removed: Vec<u64> = (0..slices)
            .map(|number| work(&mut bench, |bench| bench.delete(ObjectKind::EndpointSlice, "x", &format!("a{number}"))))
            .collect();
        assert!(bench.model.endpoints.is_empty() && bench.state.entry(&ServiceKey::new("x", "s")).is_none());
        let per_address = u64::from(slices * SIZE) * 8;
        assert!(all < per_address && removed.iter().sum::<u64>() < per_address, "{slices} slices: {all}, {removed:?}");
        of_changes
    };
    let of_two = costs(2);
    assert!(of_two.iter().all(|cost| *cost < 16), "{of_two:?}");
    assert_eq!(costs(200), of_two);
}

/// The result does not depend on which slice came first, which moved, and which was emptied.
#[test]
fn slices_that_move_or_become_empty_leave_their_addresses_to_other_slices() {
    let mut bench = Bench::default();
    let both = || json!([ready("10.1.0.1"), ready("10.1.0.2")]);
    for (name, port) in [("b", 2), ("a", 1), ("c", 3)] {
        bench.apply(&slice(name, "s", both(), http(port)));
    }
    bench.flush();
    assert_eq!(bench.endpoints("s"), ["10.1.0.1:1,2,3", "10.1.0.2:1,2,3"]);
    bench.apply(&slice("b", "t", both(), http(2)));
    bench.flush();
    assert_eq!(bench.endpoints("s"), ["10.1.0.1:1,3", "10.1.0.2:1,3"]);
    assert_eq!(bench.endpoints("t"), ["10.1.0.1:2", "10.1.0.2:2"]);
    bench.apply(&slice("a", "s", json!([]), http(1)));
    bench.apply(&slice("b", "s", json!([ready("10.1.0.2")]), http(2)));
    bench.flush();
    assert_eq!(bench.endpoints("s"), ["10.1.0.1:3", "10.1.0.2:2,3"]);
    assert!(bench.endpoints("t").is_empty());
    let mut v6 = slice("c", "s", json!([ready("fd00::1")]), http(3));
    v6["addressType"] = json!("IPv6");
    bench.apply(&v6);
    bench.apply(&slice("a", "s", both(), http(1)));
    bench.flush();
    assert_eq!(bench.endpoints("s"), ["10.1.0.1:1", "10.1.0.2:1,2", "fd00::1:3"]);
    for name in ["a", "b", "c"] {
        bench.delete(ObjectKind::EndpointSlice, "x", name);
    }
    bench.flush();
    assert!(bench.endpoints("s").is_empty() && bench.model.endpoints.is_empty());
}

#[test]
fn watch_events_have_trigger_times_and_listed_objects_do_not() {
    let at = |time: &str, endpoints: Value| {
        let mut value = slice("a", "s", endpoints, http(1));
        value["metadata"]["annotations"]["endpoints.kubernetes.io/last-change-trigger-time"] = json!(time);
        value
    };
    let mut bench = Bench::default();
    let first = at("2024-01-01T00:00:00Z", json!([ready("10.1.0.1")]));
    bench.model.replace(ObjectKind::EndpointSlice, vec![Event::Apply(Box::new(object(&first)))]);
    assert_eq!(bench.flush()[0].trigger_unix_ms, 0);
    bench.apply(&at("2024-01-01T00:00:01Z", json!([ready("10.1.0.1"), ready("10.1.0.2")])));
    bench.apply(&at("2024-01-01T00:00:02Z", json!([ready("10.1.0.1"), ready("10.1.0.2"), ready("10.1.0.3")])));
    let triggers: Vec<u64> = bench.flush().iter().map(|change| change.trigger_unix_ms).collect();
    assert_eq!(triggers, [1_704_067_201_000, 1_704_067_202_000]);
}

#[test]
fn nodes_and_service_cidrs_are_read_and_removed() {
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1", "labels": {"topology.kubernetes.io/zone": "z"}},
        "spec": {"podCIDR": "10.1.0.0/24", "podCIDRs": ["10.1.0.0/24", "fd00:1::/64"], "taints": [{"key": "ToBeDeletedByClusterAutoscaler"}]},
        "status": {"addresses": [{"type": "ExternalIP", "address": "203.0.113.1"}, {"type": "InternalIP", "address": "192.0.2.1"}]}});
    let cidr = json!({"apiVersion": "networking.k8s.io/v1beta1", "kind": "ServiceCIDR", "metadata": {"name": "k"}, "spec": {"cidrs": ["10.0.0.0/16"]}});
    let mut bench = Bench::with(&[node, cidr]);
    let held = &bench.nodes["n1"];
    assert_eq!(held.addresses.iter().map(ToString::to_string).collect::<Vec<_>>(), ["192.0.2.1", "203.0.113.1"]);
    assert!(held.pod_cidrs.len() == 2 && held.going_away && held.zone.as_deref() == Some("z"));
    assert_eq!(bench.state.service_cidr("k").unwrap().cidrs.len(), 1);
    bench.delete(ObjectKind::Node, "", "n1");
    bench.delete(ObjectKind::ServiceCidr, "", "k");
    bench.flush();
    assert!(bench.nodes.is_empty() && bench.state.service_cidrs().next().is_none());
}

#[test]
fn external_ips_that_are_not_allowed_are_left_out_and_are_problems() {
    let written = service("s", json!({"externalIPs": ["192.0.2.1", "198.51.100.1"], "externalTrafficPolicy": "Local"}));
    for (option, kept, policy) in [
        ("all", 2, TrafficPolicy::Local),
        ("192.0.2.0/24", 1, TrafficPolicy::Local),
        ("none", 0, TrafficPolicy::Cluster),
    ] {
        let external_ips = option.parse().unwrap();
        let mut bench = Bench::new(ModelSettings { external_ips, ..ModelSettings::default() });
        bench.apply(&written);
        bench.flush();
        let read = bench.service("s").unwrap();
        assert_eq!((read.external_ips.len(), read.external_traffic_policy), (kept, policy), "{option}");
        let problems = bench.problems();
        assert_eq!(problems.len(), 2 - kept, "{problems:?}");
        for problem in problems {
            assert!(problem.starts_with("Service x/s spec.externalIPs"), "{problem}");
            assert!(problem.contains("is not allowed (--external-ips") && problem.contains("is left out"), "{problem}");
        }
    }
}
