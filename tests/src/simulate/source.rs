//! The objects at the API server, and what each node must forward because of them.
// The stand-in API server refuses no object of these functions.
#![allow(clippy::unwrap_used)]

use std::{
    collections::{BTreeMap, BTreeSet},
    net::Ipv4Addr,
    ops::Range,
    sync::{LazyLock, OnceLock},
    time::{Duration, Instant},
};

use crate::apiserver::{
    ApiServer, Kind,
    objects::{endpoint_slice, node, pod, service, service_cidr},
};
use serde_json::{Value, json};

/// The addresses of endpoints by the ClusterIP that leads to them.
pub type Forwarding = BTreeMap<Ipv4Addr, BTreeSet<Ipv4Addr>>;

/// The namespace of all objects.
pub const NAMESPACE: &str = "shop";

/// How large the world is.
#[derive(Debug, Clone, Copy)]
pub struct Size {
    /// The number of replicas, at most 9.
    pub replicas: usize,
    /// The number of nodes, at most 100.
    pub nodes: usize,
    /// The number of Services that always exist, at most 150.
    pub services: usize,
}

/// Set once, before the world begins. Otherwise the world has the default size.
static SIZE: OnceLock<Size> = OnceLock::new();

/// Sets the size of the world of this process.
///
/// # Errors
/// The world would be too small or too large, or has begun.
pub fn set_size(size: Size) -> Result<(), String> {
    let Size { replicas, nodes, services } = size;
    if !(2..=9).contains(&replicas) || !(3..=100).contains(&nodes) || !(FEWEST_SERVICES..=150).contains(&services) {
        return Err(format!("a world has 2 to 9 replicas, 3 to 100 nodes and {FEWEST_SERVICES} to 150 Services"));
    }
    SIZE.set(size).map_err(|_| "the world has begun".to_owned())
}

/// How large the world is.
pub fn size() -> Size {
    *SIZE.get_or_init(|| Size { replicas: 2, nodes: 3, services: 20 })
}

/// The nodes.
pub static NODES: LazyLock<Vec<&'static str>> = LazyLock::new(|| {
    let name = |number: usize| match u8::try_from(number) {
        Ok(number @ 0..26) => format!("node-{}", char::from(b'a' + number)),
        _ => format!("node-{number}"),
    };
    (0..size().nodes).map(|number| &*name(number).leak()).collect()
});

/// A node that never has an agent.
pub const BARE: &str = "bare-node";
/// The readiness gate of pods that wait for it.
pub const GATE: &str = "headgate.io/programmed";
/// The number of Services with the policy Cluster.
pub const CLUSTER: usize = 3;
/// The Service with `internalTrafficPolicy: Local`.
pub const LOCAL: usize = CLUSTER;
/// A Service that never changes, and that questions break in kernels.
pub const BAIT: usize = CLUSTER + 1;
/// A Service that may be deleted and created again. No question is about its endpoints.
pub const AGAIN: usize = CLUSTER + 2;
/// The others never change.
const FEWEST_SERVICES: usize = CLUSTER + 3;

/// Services without endpoints, which some kernels reject.
pub fn crowd() -> Range<usize> {
    size().services..size().services + 80
}

/// What the EndpointSlices say about a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// The EndpointSlices have the endpoint, and say that it is ready.
    Ready,
    /// The endpoint is neither ready nor terminating.
    Unready,
    /// The endpoint is not ready, and its pod waits for the readiness gate.
    Gated,
    /// The endpoint is terminating and serving.
    Stopping,
    /// The EndpointSlices do not have the endpoint any more.
    Gone,
}

/// A pod. Its address is never used again.
#[derive(Debug, Clone)]
pub struct Pod {
    /// The name.
    pub name: String,
    /// The address.
    pub address: Ipv4Addr,
    /// The index of its node.
    pub node: usize,
    /// Indices of Services.
    pub services: Vec<usize>,
    /// What the EndpointSlices say.
    pub phase: Phase,
    /// The resourceVersion of the last change.
    pub version: u64,
    /// True if a question is about this pod. Nothing else changes the pod then.
    is_taken: bool,
    /// True if all replicas knew the pod at the start of the round.
    pub is_known: bool,
    /// True if the pod had gone, and an older backup brought it back.
    pub is_back: bool,
}

/// The objects. Pods are never removed from the list before [`Self::forget`].
#[derive(Debug)]
pub struct Source {
    /// The pods.
    pub pods: Vec<Pod>,
    /// Since when each Node exists.
    nodes: Vec<Option<Instant>>,
    created: u32,
    /// When the Service that may be deleted was created or deleted last, and whether it exists.
    again: (Instant, bool),
    /// When a pod changed that a node may use or not, depending on such pods.
    last_moved: Instant,
}

/// The name of a Service.
pub fn service_name(service: usize) -> String {
    format!("web-{service}")
}

/// The ClusterIP of a Service.
pub fn cluster_ip(service: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 96, 1, u8::try_from(service + 1).unwrap())
}

/// Whether a ready endpoint that no question is about keeps the node from using terminating ones.
fn has_anchor(service: usize, node: usize) -> bool {
    service != LOCAL || node + 1 != NODES.len()
}

impl Source {
    /// Writes the Nodes and Services, and the pods that never change.
    pub fn new(api: &ApiServer) -> Self {
        let mut source = Self {
            pods: Vec::new(),
            nodes: vec![None; NODES.len()],
            created: 0,
            again: (Instant::now(), true),
            last_moved: Instant::now(),
        };
        api.apply(service_cidr("kubernetes", &["10.96.0.0/16"]).build()).unwrap();
        for index in 0..NODES.len() {
            source.put_node(api, index);
        }
        for index in 0..size().services {
            source.put_service(api, index);
            for node in (0..NODES.len()).filter(|node| *node == 0 || index == LOCAL && has_anchor(index, *node)) {
                let anchor = source.add(api, node, &[index], Phase::Ready);
                source.pods[anchor].is_taken = true;
            }
        }
        source
    }

    /// Creates a Service.
    pub fn put_service(&self, api: &ApiServer, index: usize) {
        let built = service(NAMESPACE, &service_name(index)).cluster_ip(&cluster_ip(index).to_string());
        let built = built.port("", "TCP", 80, 8080);
        let policy = if index == LOCAL { "Local" } else { "Cluster" };
        api.apply(built.field("spec.internalTrafficPolicy", policy).build()).unwrap();
    }

    /// Deletes a Service, if it exists.
    pub fn delete_service(&self, api: &ApiServer, index: usize) {
        let name = service_name(index);
        if api.get(Kind::Service, NAMESPACE, &name).is_some() {
            api.delete(Kind::Service, NAMESPACE, &name).unwrap();
        }
    }

    /// Deletes or creates the Service [`AGAIN`]. Its EndpointSlice stays, and is written anew.
    pub fn set_again(&mut self, api: &ApiServer, exists: bool) {
        if self.again.1 == exists {
            return;
        }
        self.again = (Instant::now(), exists);
        if exists {
            self.put_service(api, AGAIN);
        } else {
            self.delete_service(api, AGAIN);
        }
        let version = self.write(api, AGAIN);
        self.pods.iter_mut().filter(|pod| pod.services.contains(&AGAIN)).for_each(|pod| pod.version = version);
    }

    /// Creates or deletes the Node that never has an agent.
    pub fn set_bare_node(api: &ApiServer, exists: bool) {
        if exists {
            api.apply(node(BARE).address("InternalIP", "192.0.2.250").build()).unwrap();
        } else if api.get(Kind::Node, "", BARE).is_some() {
            api.delete(Kind::Node, "", BARE).unwrap();
        }
    }

    /// Goes back to an older backup: some pods that have gone are there again.
    pub fn go_back(&mut self, api: &ApiServer, mut is_in_backup: impl FnMut() -> bool) {
        for index in 0..self.pods.len() {
            let pod = &mut self.pods[index];
            if pod.phase == Phase::Gone && !pod.is_taken && is_in_backup() {
                (pod.phase, pod.is_back) = (Phase::Unready, true);
                self.set(api, index, Phase::Ready);
            }
        }
    }

    /// Creates a Node.
    pub fn put_node(&mut self, api: &ApiServer, index: usize) {
        let address = format!("192.0.2.{}", 11 + index);
        api.apply(node(NODES[index]).address("InternalIP", &address).build()).unwrap();
        self.nodes[index].get_or_insert(Instant::now());
    }

    /// Deletes a Node.
    pub fn delete_node(&mut self, api: &ApiServer, index: usize) {
        if self.nodes[index].take().is_some() {
            api.delete(Kind::Node, "", NODES[index]).unwrap();
        }
    }

    /// Whether the Node has existed since two seconds before `asked`. Each replica knows it then,
    /// so that it counts.
    pub fn counts(&self, node: usize, asked: Instant) -> bool {
        self.nodes[node].is_some_and(|since| since + Duration::from_secs(2) <= asked)
    }

    /// Adds a pod with an endpoint of each Service, and returns its index.
    pub fn add(&mut self, api: &ApiServer, node: usize, services: &[usize], phase: Phase) -> usize {
        self.created += 1;
        let [_, high, middle, low] = self.created.to_be_bytes();
        let (name, address) = (format!("pod-{}", self.created), Ipv4Addr::new(10, 128 + high, middle, low));
        if phase == Phase::Gated {
            let gated = pod(NAMESPACE, &name, &format!("uid-{name}")).gate(GATE);
            let gated = gated.condition("ContainersReady", "True", "");
            api.apply(gated.condition("Ready", "False", "ReadinessGatesNotReady").build()).unwrap();
        }
        let services = services.to_vec();
        let (is_taken, is_known, is_back) = Default::default();
        self.pods.push(Pod { name, address, node, services, phase, version: 0, is_taken, is_known, is_back });
        let index = self.pods.len() - 1;
        self.set(api, index, phase);
        index
    }

    /// Changes the phase of a pod, and writes the EndpointSlices.
    pub fn set(&mut self, api: &ApiServer, pod: usize, phase: Phase) {
        if self.pods[pod].phase == Phase::Gone {
            return;
        }
        self.pods[pod].phase = phase;
        if self.pods[pod].services.iter().any(|service| !has_anchor(*service, self.pods[pod].node)) {
            self.last_moved = Instant::now();
        }
        for service in self.pods[pod].services.clone() {
            let version = self.write(api, service);
            self.pods[pod].version = version;
        }
    }

    /// Writes a second EndpointSlice of a Service, with an endpoint whose trigger time is after the
    /// start of each agent.
    pub fn trace(&self, api: &ApiServer) {
        let name = service_name(0);
        let slice = endpoint_slice(NAMESPACE, &format!("{name}-traced"), &name).port("", "TCP", 8080);
        let mut slice = slice.endpoint("10.255.255.1", NODES[0]).build();
        let trigger = json!({ "endpoints.kubernetes.io/last-change-trigger-time": "2999-01-01T00:00:00Z" });
        slice["metadata"]["annotations"] = trigger;
        api.apply(slice).unwrap();
    }

    /// Writes the EndpointSlice of a Service, and returns its resourceVersion.
    fn write(&self, api: &ApiServer, service: usize) -> u64 {
        let name = service_name(service);
        let slice = endpoint_slice(NAMESPACE, &format!("{name}-1"), &name).port("", "TCP", 8080);
        let here = self.pods.iter().filter(|pod| pod.phase != Phase::Gone && pod.services.contains(&service));
        let slice = here.fold(slice, |slice, pod| slice.endpoint_json(endpoint(pod)));
        let written = api.apply(slice.build()).unwrap();
        written["metadata"]["resourceVersion"].as_str().and_then(|version| version.parse().ok()).unwrap()
    }

    /// A pod that no question is about, for a question. Nothing else changes it from now on.
    pub fn take(&mut self, api: &ApiServer, choice: usize, services: &[usize]) -> usize {
        let is_free =
            |pod: &Pod| pod.is_known && !pod.is_taken && pod.phase == Phase::Ready && pod.services == services;
        let free: Vec<usize> = (0..self.pods.len()).filter(|index| is_free(&self.pods[*index])).collect();
        let taken = match free.len() {
            0 => self.add(api, choice % NODES.len(), services, Phase::Ready),
            count => free[choice % count],
        };
        self.pods[taken].is_taken = true;
        taken
    }

    /// Lets nothing else change a pod until [`Self::release`].
    pub fn hold(&mut self, pod: usize) {
        self.pods[pod].is_taken = true;
    }

    /// Lets other things change a pod again.
    pub fn release(&mut self, pod: usize) {
        self.pods[pod].is_taken = false;
    }

    /// The pods that no question is about.
    pub fn free(&self) -> Vec<usize> {
        let is_free = |pod: &Pod| !pod.is_taken && pod.phase == Phase::Ready;
        (0..self.pods.len()).filter(|index| is_free(&self.pods[*index])).collect()
    }

    /// Forgets the pods that are gone, and adds pods for the questions of a round. No question may
    /// be open.
    pub fn stock(&mut self, api: &ApiServer) {
        self.pods.retain(|pod| pod.phase != Phase::Gone);
        for service in 0..CLUSTER {
            for services in [&[service][..], &[service, LOCAL]] {
                let count = self.free().into_iter().filter(|pod| self.pods[*pod].services == services).count();
                // The last node has only one pod of the Service with a Local policy.
                let nodes = if services.len() > 1 && service > 0 { NODES.len() - 1 } else { NODES.len() };
                for number in count..3 {
                    self.add(api, number % nodes, services, Phase::Ready);
                }
            }
        }
    }

    /// All replicas know all pods now.
    pub fn settled(&mut self) {
        self.pods.iter_mut().for_each(|pod| pod.is_known = true);
    }

    /// Whether the node must forward to the pod. `None` if it depends on other pods.
    pub fn wants(&self, pod: &Pod, service: usize, node: usize) -> Option<bool> {
        let is_near = service != LOCAL || pod.node == node;
        let (changed, exists) = self.again;
        if service == AGAIN && (!exists || changed.elapsed() < Duration::from_secs(5)) {
            return None;
        }
        match pod.phase {
            Phase::Ready => Some(is_near),
            Phase::Unready | Phase::Gone => Some(false),
            Phase::Stopping if !is_near || has_anchor(service, node) => Some(false),
            Phase::Stopping | Phase::Gated => None,
        }
    }

    /// Whether the pods on which [`Self::wants`] may depend have not changed for some seconds. An
    /// answer holds for them as they were.
    fn is_steady(&self) -> bool {
        self.last_moved.elapsed() > Duration::from_secs(3)
    }

    /// In what a claim about a stopping pod differs from a node's kernel, one sentence for each
    /// Service. `is_wrong` gets whether the node forwards to the pod, and what [`Self::wants`]
    /// says.
    pub fn differences(
        &self,
        claim: &str,
        pod: &Pod,
        node: usize,
        kernel: &Forwarding,
        is_wrong: impl Fn(bool, Option<bool>) -> bool,
    ) -> Vec<String> {
        let stopping = Pod { phase: Phase::Stopping, ..pod.clone() };
        let difference = |service: &usize| {
            let is_found = kernel.get(&cluster_ip(*service)).is_some_and(|found| found.contains(&pod.address));
            let does = if is_found { "forwards" } else { "does not forward" };
            let (node_name, service_name) = (NODES[node], service_name(*service));
            let wanted = self.wants(&stopping, *service, node);
            let is_wrong = (wanted.is_some() || self.is_steady()) && is_wrong(is_found, wanted);
            is_wrong.then(|| format!("{claim}, but {node_name} {does} {service_name} to {}", pod.address))
        };
        pod.services.iter().filter_map(difference).collect()
    }

    /// What is wrong with the endpoints to which a node forwards. Only changes up to `version`
    /// count, and only these Services.
    pub fn compare(
        &self,
        node: usize,
        kernel: &Forwarding,
        version: u64,
        services: impl Fn(usize) -> bool,
    ) -> Option<String> {
        let nothing = BTreeSet::new();
        for pod in self.pods.iter().filter(|pod| pod.version <= version) {
            for service in pod.services.iter().filter(|service| services(**service)) {
                let found = kernel.get(&cluster_ip(*service)).unwrap_or(&nothing).contains(&pod.address);
                if self.wants(pod, *service, node).is_some_and(|wanted| wanted != found) {
                    let (does, name) = (if found { "forwards" } else { "does not forward" }, service_name(*service));
                    let (node, phase, at) = (NODES[node], pod.phase, pod.version);
                    return Some(format!("{node} {does} {name} to {} ({phase:?} since {at})", pod.address));
                }
            }
        }
        None
    }
}

fn endpoint(pod: &Pod) -> Value {
    let (is_ready, is_serving) = (pod.phase == Phase::Ready, matches!(pod.phase, Phase::Ready | Phase::Stopping));
    json!({
        "addresses": [pod.address.to_string()], "nodeName": NODES[pod.node],
        "conditions": {"ready": is_ready, "serving": is_serving, "terminating": pod.phase == Phase::Stopping},
        "targetRef": {"kind": "Pod", "namespace": NAMESPACE, "name": pod.name, "uid": format!("uid-{}", pod.name)},
    })
}
