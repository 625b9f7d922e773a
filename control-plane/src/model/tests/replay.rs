//! Random tests: the order and the grouping of events do not change the result.

use std::collections::BTreeMap;

use headgate_core::{Conditions, Family, Placement, view::ServiceSize};
use proptest::prelude::*;

use super::*;

/// The `spec.type` of a Service, and whether the Service has a ClusterIP.
fn any_type() -> impl Strategy<Value = (&'static str, bool)> {
    prop_oneof![
        3 => Just(("ClusterIP", true)),
        2 => Just(("NodePort", true)),
        3 => Just(("LoadBalancer", true)),
        1 => Just(("ExternalName", false)),
        1 => Just(("ClusterIP", false)),
    ]
}

prop_compose! {
    /// Ports by name, number, protocol and NodePort.
    fn any_ports()(
        name in prop_oneof![4 => Just("http"), 1 => Just("renamed")], port in 80_u16..82, node_port in prop_oneof![Just(0_u16), Just(30_080)],
        protocol in prop_oneof![4 => Just("TCP"), 1 => Just("UDP"), 1 => Just("SCTP")], has_second in any::<bool>(),
    ) -> Value {
        let mut ports = vec![json!({"name": name, "port": port, "nodePort": node_port, "protocol": protocol})];
        if has_second {
            ports.push(json!({"name": "metrics", "port": 9000}));
        }
        json!(ports)
    }
}

/// Labels and annotations, with and without an effect.
fn any_metadata() -> impl Strategy<Value = (Value, Value)> {
    let labels = prop_oneof![
        4 => Just(json!({})),
        1 => Just(json!({"service.kubernetes.io/service-proxy-name": ""})),
        1 => Just(json!({"service.kubernetes.io/service-proxy-name": "another"})),
    ];
    let annotations = prop_oneof![
        3 => Just(json!({})),
        1 => Just(json!({"headgate.io/scheduler": "lc", "headgate.io/load-balancing": "least-connections"})),
        1 => Just(json!({"headgate.io/proxy-protocol": "v1", "headgate.io/max-connections": "3"})),
        1 => Just(json!({"headgate.io/health-check": "tcp", "example.com/other": "x"})),
    ];
    (labels, annotations)
}

prop_compose! {
    fn any_service()(
        name in 0_u8..2, (of_type, has_address) in any_type(), is_dual in any::<bool>(), address in 1_u8..4, ports in any_ports(),
        (labels, annotations) in any_metadata(), policies in (any::<bool>(), any::<bool>()),
        affinity in prop::option::of(prop_oneof![Just(json!({})), Just(json!({"clientIP": {"timeoutSeconds": 30}}))]),
        external in prop_oneof![Just(json!([])), Just(json!(["192.0.2.100"])), Just(json!(["2001:db8::100", "192.0.2.101"]))],
        ingress in prop_oneof![
            Just(json!([])), Just(json!([{"ip": "203.0.113.1"}])), Just(json!([{"ip": "203.0.113.1", "ipMode": "Proxy"}, {"hostname": "b"}])),
        ],
        ranges in prop_oneof![Just(json!([])), Just(json!([" 198.51.100.0/24"])), Just(json!(["0.0.0.0/0", "::/0"]))],
    ) -> Value {
        let policy = |is_local| if is_local { "Local" } else { "Cluster" };
        let cluster_ip = if has_address { format!("10.0.0.{address}") } else { "None".to_owned() };
        let mut value = service(&format!("s{name}"), json!({
            "type": of_type, "clusterIP": cluster_ip, "ports": ports, "externalIPs": external, "loadBalancerSourceRanges": ranges,
            "internalTrafficPolicy": policy(policies.0), "externalTrafficPolicy": policy(policies.1),
        }));
        if has_address && is_dual {
            value["spec"]["clusterIPs"] = json!([cluster_ip, format!("fd00::{address}")]);
            value["spec"]["ipFamilies"] = json!(["IPv4", "IPv6"]);
        }
        if let Some(config) = affinity {
            value["spec"]["sessionAffinity"] = json!("ClientIP");
            value["spec"]["sessionAffinityConfig"] = config;
        }
        if of_type == "LoadBalancer" && policies.1 {
            value["spec"]["healthCheckNodePort"] = json!(31_000);
        }
        value["status"] = json!({"loadBalancer": {"ingress": ingress}});
        value["metadata"]["labels"] = labels;
        value["metadata"]["annotations"] = annotations;
        value
    }
}

/// The conditions of an endpoint. Some conditions may be missing.
fn any_conditions() -> impl Strategy<Value = Value> {
    let value = |ready: Option<bool>, serving: Option<bool>, terminating: Option<bool>| json!({"ready": ready, "serving": serving, "terminating": terminating});
    let any_one = || prop::option::of(any::<bool>());
    prop_oneof![1 => Just(json!({})), 3 => (any_one(), any_one(), any_one()).prop_map(move |(r, s, t)| value(r, s, t))]
}

prop_compose! {
    fn any_slice()(
        name in 0_u8..4, of in 0_u8..2, is_v6 in prop::bool::weighted(0.3), is_for_dns in prop::bool::weighted(0.2),
        endpoints in prop::collection::vec((0_u8..6, any_conditions(), 0_u8..3, 0_u8..4), 0..5), ports in 0_u8..4, has_trigger in any::<bool>(),
    ) -> Value {
        let endpoint = |(address, conditions, node, hint): (u8, Value, u8, u8)| {
            let last = address + 1;
            let address = if is_v6 { format!("fd00:1::{last}") } else { format!("10.1.0.{last}") };
            let mut endpoint = json!({"addresses": [address], "conditions": conditions, "zone": format!("z{node}")});
            if node > 0 { endpoint["nodeName"] = json!(format!("n{node}")); }
            match hint {
                0 => {}
                1 => endpoint["hints"] = json!({"forZones": [{"name": "z1"}]}),
                2 => endpoint["hints"] = json!({"forNodes": [{"name": "n1"}], "forZones": [{"name": "z2"}]}),
                _ => endpoint["hints"] = json!({}),
            }
            endpoint
        };
        let endpoints: Vec<Value> = endpoints.into_iter().map(endpoint).collect();
        let ports = match ports {
            0 => http(1),
            1 => json!([{"name": "http", "port": 2}, {"name": "metrics", "port": 3}]),
            2 => json!([{"name": "http", "port": 1, "protocol": "UDP"}, {"name": "renamed", "port": 1}]),
            _ => json!([{"port": 1}, {"name": "http"}]),
        };
        let mut value = slice(&format!("slice{name}{}", if is_v6 { "-v6" } else { "" }), &format!("s{of}"), json!(endpoints), ports);
        if is_v6 { value["addressType"] = json!("IPv6"); }
        if is_for_dns { value["metadata"]["labels"]["service.kubernetes.io/headless"] = json!(""); }
        if has_trigger {
            value["metadata"]["annotations"] = json!({"endpoints.kubernetes.io/last-change-trigger-time": "2024-01-01T00:00:00Z"});
        }
        value
    }
}

prop_compose! {
    fn any_node()(name in 0_u8..2, zone in 0_u8..3, address in 1_u8..3, is_tainted in any::<bool>(), other_label in any::<bool>()) -> Value {
        let mut labels = json!({});
        if zone > 0 { labels["topology.kubernetes.io/zone"] = json!(format!("z{zone}")); }
        if other_label { labels["example.com/other"] = json!("x"); }
        let taints = if is_tainted { json!([{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}]) } else { json!([]) };
        json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": format!("n{name}"), "labels": labels},
            "spec": {"taints": taints, "podCIDRs": [format!("10.1.{address}.0/24")]},
            "status": {"addresses": [{"type": "InternalIP", "address": format!("192.0.2.{address}")}]}})
    }
}

fn any_range() -> impl Strategy<Value = Value> {
    (0_u8..2, 96_u8..98).prop_map(|(name, second)| {
        json!({"apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR", "metadata": {"name": format!("range{name}")},
            "spec": {"cidrs": [format!("10.{second}.0.0/16")]}})
    })
}

/// A version of an object. There are few names and addresses, so objects often collide. Two
/// versions of an object may differ in every field that the model reads.
fn any_event() -> impl Strategy<Value = Value> {
    prop_oneof![6 => any_slice(), 4 => any_service(), 1 => any_node(), 1 => any_range()]
}

proptest! {
    /// Only the last version of each object decides. Earlier versions, the order between objects,
    /// the number of transactions, and the choice of events or lists do not matter.
    #[test]
    fn only_the_present_objects_decide_the_state(
        events in prop::collection::vec((any_event(), any::<bool>(), any::<bool>()), 1..40),
        shuffle in any::<prop::sample::Index>(), endpoint_ports in prop_oneof![Just(50_000), 1_u32..12],
    ) {
        // Services keep their frontends.
        let settings = Arc::new(ModelSettings { service_budget: endpoint_ports, ..ModelSettings::default() });
        let mut by_event = Bench::default();
        by_event.model.endpoints.settings = Arc::clone(&settings);
        let mut last: BTreeMap<ObjectKey, Value> = BTreeMap::new();
        for (value, deletes, flushes) in &events {
            let key = object(value).key();
            if *deletes {
                by_event.model.event(Event::Delete(key.clone()), "");
                last.remove(&key);
            } else {
                by_event.apply(value);
                last.insert(key, value.clone());
            }
            if *flushes {
                by_event.flush();
            }
        }
        by_event.flush();
        let mut values: Vec<Value> = last.into_values().collect();
        if !values.is_empty() {
            let middle = shuffle.index(values.len());
            values.rotate_left(middle);
        }
        let mut squashed = Bench::default();
        squashed.model.endpoints.settings = settings;
        values.iter().for_each(|value| squashed.apply(value));
        squashed.flush();
        prop_assert_eq!(by_event.state.digests(), squashed.state.digests());
        prop_assert_eq!(&by_event.nodes, &squashed.nodes);
        values.reverse();
        for kind in ObjectKind::ALL {
            let listed = values.iter().map(object).filter(|object| object.key().kind == kind);
            by_event.model.replace(kind, listed.map(|object| Event::Apply(Box::new(object))).collect());
        }
        prop_assert_eq!(by_event.flush(), vec![], "a list of known objects changes nothing");
        let (mut left, mut right) = (by_event, squashed);
        prop_assert_eq!(left.problems(), right.problems());
        for kind in ObjectKind::ALL {
            left.model.replace(kind, Vec::new());
        }
        left.flush();
        prop_assert_eq!(left.state.digests().resource_count(), 0);
        prop_assert!(left.model.endpoints.is_empty(), "the model still has endpoints of removed slices: {:?}", left.model.endpoints);
    }
}

/// The key of a port in kube-proxy's endpoint cache: service, port name, protocol, address, number.
type PortKey = (String, String, String, String, u64);

/// The conditions, node, zone and hints of a port.
type PortFacts = (Conditions, Value, Value, Value);

/// The ports that kube-proxy would compute (`endpointInfoByServicePort` and `addEndpoints`) if it
/// visited the slices in order of name, and preferred ready entries.
fn of_kube_proxy(slices: &[Value]) -> BTreeMap<PortKey, PortFacts> {
    let mut slices: Vec<&Value> = slices.iter().collect();
    slices.sort_by_key(|slice| slice["metadata"]["name"].as_str().unwrap());
    let mut found: BTreeMap<PortKey, PortFacts> = BTreeMap::new();
    for slice in slices {
        let labels = &slice["metadata"]["labels"];
        if !labels["service.kubernetes.io/headless"].is_null() {
            continue;
        }
        for port in slice["ports"].as_array().unwrap() {
            let (name, Some(number)) = (port["name"].as_str().unwrap_or_default(), port["port"].as_u64()) else {
                continue;
            };
            for endpoint in slice["endpoints"].as_array().unwrap() {
                let key: PortKey = (
                    labels["kubernetes.io/service-name"].as_str().unwrap().to_owned(),
                    name.to_owned(),
                    port["protocol"].as_str().unwrap_or("TCP").to_owned(),
                    endpoint["addresses"][0].as_str().unwrap().to_owned(),
                    number,
                );
                let condition = |name: &str, default| endpoint["conditions"][name].as_bool().unwrap_or(default);
                let conditions = Conditions {
                    ready: condition("ready", true),
                    serving: condition("serving", true),
                    terminating: condition("terminating", false),
                };
                let names = |list: &Value| {
                    let names = list.as_array().into_iter().flatten().map(|hint| hint["name"].clone());
                    Value::from(names.collect::<Vec<_>>())
                };
                let hints = json!([names(&endpoint["hints"]["forZones"]), names(&endpoint["hints"]["forNodes"])]);
                let facts = (conditions, endpoint["nodeName"].clone(), endpoint["zone"].clone(), hints);
                // Unlike kube-proxy, Headgate prefers ready entries.
                let precedence = |of: &Conditions| (of.ready, !of.terminating, of.serving);
                let replaces = found.get(&key).is_none_or(|(found, ..)| {
                    precedence(&conditions) > precedence(found)
                        || precedence(&conditions) == precedence(found) && !conditions.terminating
                });
                if replaces {
                    found.insert(key, facts);
                }
            }
        }
    }
    found
}

/// The ports in the model's state. Also checks that each endpoint has its normal form: a port
/// stores conditions or a placement only if they differ from the first port.
fn of_state(state: &State) -> BTreeMap<PortKey, PortFacts> {
    let mut found = BTreeMap::new();
    for (key, entry) in state.entries() {
        for endpoint in entry.endpoints().values() {
            let first = &endpoint.ports[0];
            assert!(first.conditions.is_none() && first.placement.is_none(), "{endpoint:?}");
            for port in endpoint.ports.iter() {
                assert_ne!(port.conditions, Some(endpoint.conditions));
                assert_ne!(port.placement.as_ref(), Some(&endpoint.placement));
            }
            for of_port in endpoint.port_states() {
                let Placement { node, zone, hints, weight: _ } = &**of_port.placement;
                let hints = hints.as_deref().cloned().unwrap_or_default();
                let key = (
                    key.name.to_string(),
                    of_port.port.name.to_string(),
                    of_port.port.protocol.to_string(),
                    of_port.address.to_string(),
                    u64::from(of_port.port.port),
                );
                let text = |name: &Option<Arc<str>>| json!(name.as_deref());
                let hints = json!([
                    hints.zones.iter().map(|name| &**name).collect::<Vec<_>>(),
                    hints.nodes.iter().map(|name| &**name).collect::<Vec<_>>(),
                ]);
                found.insert(key, (of_port.conditions, text(node), text(zone), hints));
            }
        }
    }
    found
}

proptest! {
    /// Each port has the conditions, node, zone and hints that kube-proxy would use, for any slices
    /// and for any earlier versions of these slices.
    // rows: 9, 10
    #[test]
    fn every_port_has_the_conditions_and_hints_that_kube_proxy_would_use(
        before in prop::collection::vec(any_slice(), 0..8), after in prop::collection::vec(any_slice(), 1..8),
    ) {
        let mut bench = Bench::with(&before);
        let mut last: BTreeMap<ObjectKey, Value> = BTreeMap::new();
        for value in before.into_iter().chain(after) {
            bench.apply(&value);
            last.insert(object(&value).key(), value);
        }
        bench.flush();
        let slices: Vec<Value> = last.into_values().collect();
        prop_assert_eq!(of_state(&bench.state), of_kube_proxy(&slices));
    }
}

prop_compose! {
    /// A Service whose numbers are of every order of magnitude, and its slices, with how many of
    /// their endpoints are in which slice.
    fn any_large_service()(
        ports in 1_usize..40, node_ports in any::<bool>(), external in 0_usize..40, load_balancers in 0_usize..5,
        ranges in 0_usize..20, is_hashed in any::<bool>(),
        slices in prop::collection::vec((0_usize..60, 0_usize..4, any::<bool>()), 0..20),
    ) -> Vec<Value> {
        let number = |n: usize| u16::try_from(n).unwrap();
        let port = |n: usize| json!({"name": format!("p{n}"), "port": 80 + n, "nodePort": if node_ports { 30_000 + n } else { 0 }});
        let both = |prefix: &str, v6: &str, n: usize| if n.is_multiple_of(3) { format!("{v6}::{n:x}") } else { format!("{prefix}.{}.{}", n >> 8, n & 255) };
        let mut of_service = service("s", json!({
            "type": "LoadBalancer", "clusterIP": "10.0.0.1", "clusterIPs": ["10.0.0.1", "fd00::1"],
            "ports": (0..ports).map(port).collect::<Value>(),
            "externalIPs": (0..external).map(|n| both("192.0", "2001:db8:1", n + 1)).collect::<Vec<_>>(),
            "loadBalancerSourceRanges": (0..ranges).map(|n| if n.is_multiple_of(2) { format!("10.{n}.0.0/16") } else { format!("fd00:{n}::/64") }).collect::<Vec<_>>(),
        }));
        of_service["status"] = json!({"loadBalancer": {"ingress":
            (0..load_balancers).map(|n| json!({"ip": both("198.51", "2001:db8:2", n + 1)})).collect::<Value>()}});
        if is_hashed {
            of_service["metadata"]["annotations"] = json!({"headgate.io/load-balancing": "consistent-hash"});
        }
        let mut values = vec![of_service];
        for (at, (endpoints, ports, is_v6)) in slices.into_iter().enumerate() {
            let address = |n: usize| if is_v6 { format!("fd00:1:{:x}::{:x}", at, n + 1) } else { format!("10.{}.0.{}", number(at) + 1, n + 1) };
            let ports = (0..ports).map(|n| json!({"name": format!("p{n}"), "port": 8080 + n})).collect();
            let mut of_slice = slice(&format!("s-{at}"), "s", (0..endpoints).map(|n| ready(&address(n))).collect(), ports);
            of_slice["addressType"] = if is_v6 { "IPv6" } else { "IPv4" }.into();
            values.push(of_slice);
        }
        values
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Agents count what the control plane counts. Whatever was written before, and in which order,
    /// what is sent is within the budget. All ports fit into each of these budgets.
    #[test]
    fn agents_accept_what_is_within_the_budget(
        values in any_large_service(), other in any_large_service(), middle in any::<prop::sample::Index>(),
        endpoint_ports in 800_u32..3_000,
    ) {
        let mut bench = Bench::within(endpoint_ports);
        // What was written before does not matter.
        other.iter().chain(values.iter().rev()).for_each(|value| bench.apply(value));
        for value in &other[values.len().min(other.len())..] {
            let key = object(value).key();
            bench.delete(key.kind, &key.namespace, &key.name);
        }
        bench.flush();
        let mut present = Bench::within(endpoint_ports);
        let budget = endpoint_ports as usize;
        let (first, last) = values.split_at(middle.index(values.len()));
        last.iter().for_each(|value| present.apply(value));
        present.flush();
        first.iter().for_each(|value| present.apply(value));
        present.flush();
        prop_assert_eq!(bench.state.digests(), present.state.digests());
        prop_assert_eq!(bench.problems(), present.problems());
        let Some(entry) = bench.state.entry(&ServiceKey::new("x", "s")) else { return Ok(()) };
        for family in Family::BOTH {
            let Some(service) = entry.service() else { continue };
            let endpoints = entry.endpoints().keys().filter(|address| Family::of(**address) == family).count();
            prop_assert!(service.frontends(family) <= budget / 5);
            prop_assert!(service.ports.len() * endpoints <= budget);
            prop_assert!(service.virtual_servers(family) * endpoints <= budget * 4);
            prop_assert_eq!(ServiceSize::of(entry, family).excess(), None);
        }
    }

    /// The same with the largest budget and the limits of agents, without the objects.
    #[test]
    fn the_largest_budget_is_within_the_limits_of_agents(
        ports in prop_oneof![1_usize..10, 50_usize..6_000], addresses in 0_u32..13_000,
        slices in prop::collection::vec(prop_oneof![1_usize..1_000, 1_000_usize..70_000], 1..80),
    ) {
        use headgate_core::{Protocol, ServicePort, view::{MAX_DESTINATIONS, MAX_PORT_ENDPOINTS}};
        let settings = ModelSettings { service_budget: ModelSettings::MAX_SERVICE_BUDGET, ..ModelSettings::default() };
        let budget = settings.service_budget as usize;
        let port = |n: usize| ServicePort {
            name: "".into(), protocol: Protocol::Tcp, port: u16::try_from(n + 1).unwrap(), node_port: u16::try_from(n + 1).unwrap(),
        };
        let mut service = Service::new(ServiceKey::new("x", "s"), vec![[10, 0, 0, 1].into()], (0..ports).map(port).collect());
        service.external_ips = (0..addresses).map(|n| (0xc000_0000 + n).to_be_bytes().into()).collect();
        if parse::fit_frontends(&mut service, budget / 5, &mut Findings::default()).is_err() {
            return Ok(());
        }
        let mut endpoints = 0;
        for slice in slices {
            endpoints += if (endpoints + slice) * ports <= budget { slice } else { 0 };
        }
        let mut fitted = Fitted::from(service);
        fitted.fit([endpoints, 0], settings.destinations());
        prop_assert!(fitted.service.frontend_count() <= Service::MAX_FRONTENDS);
        prop_assert!(ports * endpoints <= MAX_PORT_ENDPOINTS);
        prop_assert!(fitted.service.virtual_servers(Family::V4) * endpoints <= MAX_DESTINATIONS);
    }
}
