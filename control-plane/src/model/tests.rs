//! The model as a whole: the changes and problems that result from objects. Above a test, a comment
//! such as `// rows: 1` names the rows of docs/behaviours.md that the test covers.

#![allow(clippy::unwrap_used, clippy::needless_pass_by_value)]

mod gates;
mod hostile;
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

    /// The endpoints as `address:ports`.
    fn endpoints(&self, name: &str) -> Vec<String> {
        let Some(entry) = self.state.entry(&ServiceKey::new("x", name)) else { return Vec::new() };
        let ports = |endpoint: &headgate_core::Endpoint| {
            endpoint.port_states().map(|of| of.port.port.to_string()).collect::<Vec<_>>().join(",")
        };
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
