//! Services and endpoints, each as an object of the API server for kube-proxy, and as a change of
//! the state of an agent.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use anyhow::{Context as _, Result};
use headgate_core::{
    Change, ClientIpAffinity, Conditions, Dirty, Endpoint, EndpointPort, Family, Hints, NodeFacts, Placement, Protocol,
    Service, ServiceKey, ServicePort, State, TrafficPolicy,
    explain::{Mode, NodeSettings},
    iptables::NodePortAddresses,
};
use headgate_tests::{
    apiserver::{Kind, client},
    testbed::{Machines, plan, plan::CONTROL},
};
use http::Method;
use serde_json::{Value, json};

use crate::forwarding::masquerade;

/// The node of kube-proxy, which is in zone-1.
pub(super) const NODE: &str = "node-b";
const NAMESPACE: &str = "shop";
const SERVICES: u8 = 24;

pub(super) fn facts() -> NodeFacts {
    let address = plan::address(NODE).unwrap();
    let addresses = vec![address.v4.into(), address.v6.into()];
    NodeFacts { addresses, zone: Some("zone-1".into()), ..NodeFacts::named(NODE) }
}

pub(super) fn settings() -> NodeSettings {
    NodeSettings {
        mode: Mode::Iptables,
        masquerade: masquerade(),
        node_ports_v4: NodePortAddresses::All,
        node_ports_v6: NodePortAddresses::All,
        localhost_node_ports: false,
    }
}

/// The numbers, forms and endpoints of the Services in the recorded rules.
pub(super) fn catalogue() -> Vec<(u8, u16, Vec<u8>)> {
    vec![
        // A NodePort.
        (0, 0b01, vec![0, 1]),
        // A load balancer with policy Local, source ranges and affinity.
        (1, 0b1101_1010, vec![0, 1, 64]),
        // External addresses without endpoints.
        (2, 0b1000_0010, vec![]),
        // Policy Local for ClusterIPs, and no endpoint on the node.
        (3, 0b0100, vec![64, 65]),
        // Policy Local for external clients, and no endpoint on the node.
        (4, 0b1010, vec![64]),
        // Only endpoints that terminate.
        (5, 0b01, vec![2, 66]),
        // Endpoints with hints for zones.
        (6, 0b0, vec![128, 129, 192]),
        // Two addresses of the load balancer, and source ranges that admit the node.
        (8, 0b11_0010, vec![0, 64]),
    ]
}

/// The state that an agent has of the catalogue.
pub(super) fn state_of_catalogue() -> State {
    let mut state = with_kubernetes();
    for (number, bits, endpoints) in catalogue() {
        let mut apply = |change| drop(state.apply(change, &mut Dirty::default()));
        apply(Change::from(service(number, bits).0));
        endpoints.into_iter().flat_map(|form| endpoint(number, form)).for_each(|endpoint| {
            apply(Change::Endpoint(key(number), endpoint));
        });
    }
    state
}

/// The API server makes the Service `kubernetes`, which has no endpoints here.
fn with_kubernetes() -> State {
    let mut state = State::default();
    let port = ServicePort { name: "https".into(), protocol: Protocol::Tcp, port: 443, node_port: 0 };
    let key = ServiceKey::new("default", "kubernetes");
    state.apply(Service::new(key, vec![[10, 96, 0, 1].into()], vec![port]).into(), &mut Dirty::default());
    state
}

fn key(number: u8) -> ServiceKey {
    ServiceKey::new(NAMESPACE, &format!("svc{number}"))
}

/// A Service whose form depends on bits: the type (2 bits), policy Local for internal and external
/// clients, source ranges, a second address, affinity, and externalIPs (2 bits).
fn service(number: u8, bits: u16) -> (Service, Value) {
    let bit = |at: u16| bits >> at & 1 == 1;
    let of_type = ["ClusterIP", "NodePort", "LoadBalancer", "ClusterIP"][usize::from(bits & 3)];
    let (is_external, is_load_balancer) = (of_type != "ClusterIP", of_type == "LoadBalancer");
    let node_port = |base: u16| if is_external { base + u16::from(number) } else { 0 };
    let port = |name: &str, protocol, port, node_port| ServicePort { name: name.into(), protocol, port, node_port };
    let ports =
        vec![port("web", Protocol::Tcp, 80, node_port(30000)), port("dns", Protocol::Udp, 53, node_port(30100))];
    let v6 = |net: &str| format!("{net}{number:x}").parse::<IpAddr>().unwrap();
    let cluster_ips = vec![IpAddr::from([10, 96, 1, number]), v6("fd00:10:96::1")];
    let mut service = Service::new(key(number), cluster_ips, ports);
    let policy = |is_local| if is_local { TrafficPolicy::Local } else { TrafficPolicy::Cluster };
    service.internal_traffic_policy = policy(bit(2));
    service.external_traffic_policy = policy(bit(3) && is_external);
    if is_load_balancer {
        service.load_balancer_ips = vec![IpAddr::from([203, 0, 114, number]), v6("2001:db8:b::")];
        if bit(5) {
            service.load_balancer_ips.push([203, 0, 115, number].into());
        }
        let ranges: &[&str] = match (bit(4), number % 2) {
            (false, _) => &[],
            (true, 0) => &["192.0.2.0/25", "192.0.2.128/25", "2001:db8:1::/64"],
            (true, _) => &["198.51.100.0/24", "10.0.0.0/8", "2001:db8:2::/48"],
        };
        service.load_balancer_source_ranges = ranges.iter().map(|range| range.parse().unwrap()).collect();
        service.health_check_node_port = if bit(3) { 30200 + u16::from(number) } else { 0 };
    }
    service.session_affinity = bit(6).then_some(ClientIpAffinity { timeout_seconds: 60 });
    if bit(7) {
        service.external_ips = vec![[203, 0, 113, number].into(), v6("2001:db8:e::")];
    }
    if bit(8) {
        // Another Service may claim it too.
        service.external_ips.push([203, 0, 113, 200].into());
    }
    let object = object(&service, of_type);
    (service, object)
}

fn object(service: &Service, of_type: &str) -> Value {
    let texts = |addresses: &[IpAddr]| addresses.iter().map(ToString::to_string).collect::<Vec<_>>();
    let ports = service.ports.iter().map(|port| {
        let mut value = json!({"name": port.name.as_str(), "protocol": port.protocol.to_string(), "port": port.port});
        if port.node_port != 0 {
            value["nodePort"] = port.node_port.into();
        }
        value
    });
    let ports: Vec<Value> = ports.collect();
    let mut spec = json!({
        "type": of_type,
        "clusterIP": service.cluster_ips[0],
        "clusterIPs": service.cluster_ips,
        "ipFamilyPolicy": "RequireDualStack",
        "externalIPs": service.external_ips,
        "internalTrafficPolicy": service.internal_traffic_policy.to_string(),
        "ports": ports,
    });
    if of_type != "ClusterIP" {
        spec["externalTrafficPolicy"] = service.external_traffic_policy.to_string().into();
    }
    if !service.load_balancer_source_ranges.is_empty() {
        spec["loadBalancerSourceRanges"] =
            json!(service.load_balancer_source_ranges.iter().map(ToString::to_string).collect::<Vec<_>>());
    }
    if service.health_check_node_port != 0 {
        spec["healthCheckNodePort"] = service.health_check_node_port.into();
    }
    if let Some(affinity) = service.session_affinity {
        spec["sessionAffinity"] = "ClientIP".into();
        spec["sessionAffinityConfig"] = json!({"clientIP": {"timeoutSeconds": affinity.timeout_seconds}});
    }
    let ingress: Vec<Value> = texts(&service.load_balancer_ips).into_iter().map(|ip| json!({ "ip": ip })).collect();
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"name": &*service.key.name, "namespace": NAMESPACE},
        "spec": spec, "status": {"loadBalancer": {"ingress": ingress}},
    })
}

/// The endpoint of both families with a form: the low 6 bits number it and choose its conditions,
/// bit 6 puts it on another node, and bit 7 gives it hints for its zone.
fn endpoint(number: u8, form: u8) -> [Endpoint; 2] {
    let (host, is_elsewhere, has_hints) = (form & 0x3f, form >> 6 & 1 == 1, form >> 7 == 1);
    let conditions = match host % 8 {
        2 => Conditions { ready: false, serving: true, terminating: true },
        3 => Conditions { ready: false, serving: false, terminating: false },
        _ => Conditions::READY,
    };
    let (node, zone): (&str, Arc<str>) =
        if is_elsewhere { ("node-c", "zone-2".into()) } else { (NODE, "zone-1".into()) };
    let hints = has_hints.then(|| Arc::new(Hints { zones: vec![Arc::clone(&zone)], nodes: Vec::new() }));
    let placement = Arc::new(Placement { zone: Some(zone), hints, ..Placement::on(node) });
    let ports: Arc<[EndpointPort]> =
        Arc::from([EndpointPort::new("dns", Protocol::Udp, 5353), EndpointPort::new("web", Protocol::Tcp, 8080)]);
    let addresses =
        [IpAddr::from([10, 244, number + 10, form]), format!("fd00:10:244:{number:x}::{form:x}").parse().unwrap()];
    addresses.map(|address| Endpoint {
        conditions,
        placement: Arc::clone(&placement),
        ..Endpoint::new(address, Arc::clone(&ports))
    })
}

fn slice(number: u8, family: Family, endpoints: &[Endpoint]) -> Value {
    let name = format!("svc{number}-{}", family.to_string().to_lowercase());
    let of = |endpoint: &Endpoint| {
        let Endpoint { address, conditions, placement, .. } = endpoint;
        let mut value = json!({
            "addresses": [address], "nodeName": placement.node.as_deref(), "zone": placement.zone.as_deref(),
            "conditions":
                {"ready": conditions.ready, "serving": conditions.serving, "terminating": conditions.terminating},
        });
        if let Some(hints) = &placement.hints {
            let zones: Vec<Value> = hints.zones.iter().map(|zone| json!({ "name": &**zone })).collect();
            value["hints"] = json!({ "forZones": zones });
        }
        value
    };
    let endpoints: Vec<Value> =
        endpoints.iter().filter(|endpoint| Family::of(endpoint.address) == family).map(of).collect();
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": family.to_string(),
        "metadata": {
            "name": name, "namespace": NAMESPACE, "labels": {"kubernetes.io/service-name": format!("svc{number}")},
        },
        "endpoints": endpoints,
        "ports": [{"name": "web", "port": 8080, "protocol": "TCP"}, {"name": "dns", "port": 5353, "protocol": "UDP"}],
    })
}

/// What the API server and the state hold.
pub(super) struct World {
    pub(super) state: State,
    services: BTreeSet<u8>,
    endpoints: BTreeMap<u8, Vec<u8>>,
    runtime: tokio::runtime::Runtime,
    client: kube::Client,
}

impl World {
    /// Connects to the API server on the machine of the control plane.
    pub(super) fn new(machines: &Machines, kubeconfig: &str) -> Result<Self> {
        let control = machines.machine(CONTROL)?;
        // The runtime's only worker opens the connections, so it has to be in the namespace.
        let runtime = control.run(|| {
            let mut builder = tokio::runtime::Builder::new_multi_thread();
            let runtime = builder.worker_threads(1).enable_all().build()?;
            runtime.block_on(async { tokio::spawn(async {}).await })?;
            Ok(runtime)
        })?;
        let client = runtime.block_on(client(kubeconfig))?;
        let world =
            Self { state: with_kubernetes(), services: BTreeSet::new(), endpoints: BTreeMap::new(), runtime, client };
        let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}});
        world.send(Method::POST, "/api/v1/namespaces", "application/json", &namespace)?;
        Ok(world)
    }

    fn send(&self, method: Method, path: &str, content_type: &str, body: &Value) -> Result<()> {
        let request = http::Request::builder().method(method).uri(path).header("content-type", content_type);
        let (request, client) = (request.body(body.to_string().into_bytes())?, self.client.clone());
        let sent = self.runtime.spawn(async move { client.request::<Value>(request).await.map(drop) });
        self.runtime.block_on(sent)?.with_context(|| format!("{path}: {body}"))
    }

    fn apply(&mut self, change: Change) {
        self.state.apply(change, &mut Dirty::default());
    }

    pub(super) fn set_service(&mut self, number: u8, bits: u16) -> Result<()> {
        self.remove_service(number)?;
        let (service, object) = service(number, bits);
        let path = Kind::Service.collection_path(Some(NAMESPACE));
        // The API server may not have released the address of the Service before.
        let attempts = (0..20).map(|attempt| {
            std::thread::sleep(std::time::Duration::from_millis(50 * attempt));
            self.send(Method::POST, &path, "application/json", &object)
        });
        let mut last = Ok(());
        for attempt in attempts {
            last = attempt;
            if last.is_ok() {
                break;
            }
        }
        last?;
        if !service.load_balancer_ips.is_empty() {
            let path = Kind::Service.object_path(NAMESPACE, &service.key.name) + "/status";
            let status = json!({ "status": object["status"] });
            self.send(Method::PATCH, &path, "application/merge-patch+json", &status)?;
        }
        self.services.insert(number);
        self.apply(service.into());
        Ok(())
    }

    fn remove_service(&mut self, number: u8) -> Result<()> {
        if self.services.remove(&number) {
            let path = Kind::Service.object_path(NAMESPACE, &key(number).name);
            self.send(Method::DELETE, &path, "application/json", &json!({}))?;
            self.apply(Change::RemoveService(key(number)));
        }
        Ok(())
    }

    pub(super) fn set_endpoints(&mut self, number: u8, forms: Vec<u8>) -> Result<()> {
        let endpoints: Vec<Endpoint> = forms.iter().flat_map(|form| endpoint(number, *form)).collect();
        for family in Family::BOTH {
            let object = slice(number, family, &endpoints);
            let name = object["metadata"]["name"].as_str().context("no name")?;
            let path = Kind::EndpointSlice.object_path(NAMESPACE, name) + "?fieldManager=test&force=true";
            self.send(Method::PATCH, &path, "application/apply-patch+yaml", &object)?;
        }
        let old = self.endpoints.insert(number, forms).unwrap_or_default();
        for endpoint in old.iter().flat_map(|form| endpoint(number, *form)) {
            self.apply(Change::RemoveEndpoint(key(number), endpoint.address));
        }
        endpoints.into_iter().for_each(|endpoint| self.apply(Change::Endpoint(key(number), endpoint)));
        Ok(())
    }

    /// Makes a random change. Returns what changed.
    pub(super) fn change(&mut self, rng: &mut fastrand::Rng) -> Result<String> {
        let number = rng.u8(0..SERVICES);
        Ok(match rng.u8(0..10) {
            0 => {
                self.remove_service(number)?;
                format!("svc{number} is removed")
            }
            1..4 => {
                let bits = rng.u16(0..512);
                self.set_service(number, bits)?;
                format!("svc{number} is {bits:#b}")
            }
            _ => {
                let forms: BTreeSet<u8> = (0..rng.u8(0..5)).map(|_| rng.u8(..)).collect();
                let text = format!("svc{number} has {forms:?}");
                self.set_endpoints(number, forms.into_iter().collect())?;
                text
            }
        })
    }
}
