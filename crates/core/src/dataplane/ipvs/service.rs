//! The kernel objects of one service: virtual servers, elements of sets, and addresses.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use super::{
    super::ipsets::{IpSetElement, Set},
    config::{IpvsConfig, SchedulerProblem},
    objects::{ServerKey, Settings},
    server::Wanted,
};
use crate::{
    behaviours::view::{Destination, ServicePortView},
    model::{FailingEndpoints, Protocol, Service, TrafficPolicy, Weight},
};

/// The kind of address of a virtual server. Among services that want it, the first kind wins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AddressKind {
    /// ClusterIP.
    ClusterIp,
    /// externalIP.
    ExternalIp,
    /// Load balancer IP.
    LoadBalancerIp,
    /// NodePort.
    NodePort,
}

/// All kernel objects of one service in one family, except iptables rules.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct ServicePlan {
    /// Virtual servers.
    pub servers: BTreeMap<ServerKey, (AddressKind, Wanted)>,
    /// Elements of sets.
    pub elements: BTreeSet<(Set, IpSetElement)>,
    /// Addresses that Headgate's device must have, even if no virtual server has the address.
    pub device_addresses: BTreeSet<IpAddr>,
    /// A problem with the annotations of the service.
    pub problem: Option<SchedulerProblem>,
}

/// Computes the kernel objects of a service from the views of its ports. The views must include the
/// endpoints that fail health checks; these endpoints get weight 0.
#[must_use]
pub fn plan(
    config: &IpvsConfig,
    service: &Service,
    views: &[ServicePortView],
    failing: &FailingEndpoints,
) -> ServicePlan {
    let mut endpoints = views.iter().flat_map(|view| view.cluster_endpoints.iter().chain(&view.local_endpoints));
    let has_weights = endpoints.any(|endpoint| endpoint.weight != Weight::default());
    let (settings, problem) = config.settings_for(service, has_weights);
    let mut plan = ServicePlan { problem: problem.filter(|_| !views.is_empty()), ..ServicePlan::default() };
    for view in views {
        let settings = Settings { persistence_seconds: view.affinity_timeout_seconds, ..settings };
        Port { config, service, failing, view, settings, cluster: None, local: None }.plan(&mut plan);
    }
    if service.has_health_check_node_port() && !views.is_empty() {
        plan.elements.insert((Set::HealthCheckNodePort, IpSetElement::Port(service.health_check_node_port)));
    }
    plan
}

/// Destinations with their weights.
type Weighted = Arc<[(SocketAddr, u32)]>;

struct Port<'a> {
    config: &'a IpvsConfig,
    service: &'a Service,
    failing: &'a FailingEndpoints,
    view: &'a ServicePortView,
    settings: Settings,
    /// Destinations for Cluster policy, once they are computed.
    cluster: Option<Weighted>,
    /// Destinations for Local policy, once they are computed.
    local: Option<Weighted>,
}

impl Port<'_> {
    fn plan(&mut self, plan: &mut ServicePlan) {
        let view = self.view;
        if let Some(address) = view.cluster_ip {
            self.address(plan, AddressKind::ClusterIp, Set::ClusterIp, address, view.internal_traffic_policy);
        }
        let policy = view.external_traffic_policy;
        let set = if policy.is_local() { Set::ExternalIpLocal } else { Set::ExternalIp };
        for address in &view.external_ips {
            self.address(plan, AddressKind::ExternalIp, set, *address, policy);
        }
        for address in &view.load_balancer_ips {
            self.address(plan, AddressKind::LoadBalancerIp, Set::LoadBalancer, *address, policy);
            self.source_ranges(plan, *address);
        }
        if view.node_port != 0 {
            self.node_port(plan);
        }
        self.loop_back(plan);
    }

    fn key(&self, address: IpAddr) -> ServerKey {
        ServerKey { address, protocol: self.view.protocol, port: self.view.port }
    }

    /// Adds an address of the service with its virtual server.
    fn address(&mut self, plan: &mut ServicePlan, kind: AddressKind, set: Set, address: IpAddr, policy: TrafficPolicy) {
        let key = self.key(address);
        plan.elements.insert((set, key.element()));
        if kind == AddressKind::LoadBalancerIp && policy.is_local() {
            plan.elements.insert((Set::LoadBalancerLocal, key.element()));
        }
        let is_on_device = !self.config.other_addresses.contains(&address);
        if is_on_device {
            plan.device_addresses.insert(address);
        }
        self.server(plan, kind, key, (set, key.element()), is_on_device, policy);
    }

    fn node_port(&mut self, plan: &mut ServicePlan) {
        let (protocol, port, policy) = (self.view.protocol, self.view.node_port, self.view.external_traffic_policy);
        let sets = [Some(Set::node_port(protocol)), policy.is_local().then(|| Set::node_port_local(protocol))];
        if protocol != Protocol::Sctp {
            plan.elements.extend(sets.into_iter().flatten().map(|set| (set, IpSetElement::Port(port))));
        }
        for address in &self.config.node_port_addresses {
            if crate::model::Family::of(*address) != self.view.family {
                continue;
            }
            let key = ServerKey { address: *address, protocol, port };
            if protocol == Protocol::Sctp {
                plan.elements.extend(sets.into_iter().flatten().map(|set| (set, key.element())));
            }
            plan.elements.insert((Set::NodePortServers, key.element()));
            self.server(plan, AddressKind::NodePort, key, (Set::NodePortServers, key.element()), false, policy);
        }
    }

    /// Adds a virtual server, or without endpoints an element that rejects or drops packets.
    fn server(
        &mut self,
        plan: &mut ServicePlan,
        kind: AddressKind,
        key: ServerKey,
        mark: (Set, IpSetElement),
        is_on_device: bool,
        policy: TrafficPolicy,
    ) {
        let destinations = self.destinations(policy);
        if destinations.is_empty() {
            let has_remote_only = policy.is_local() && self.view.has_any_endpoint;
            let set = if has_remote_only { Set::NoLocalEndpoints } else { Set::NoEndpoints };
            // One address may be listed as two kinds, such as externalIP and load balancer IP.
            if !plan.servers.contains_key(&key) {
                plan.elements.insert((set, key.element()));
            }
            return;
        }
        let wanted = Wanted { settings: self.settings, destinations, mark, is_on_device };
        plan.servers.entry(key).or_insert((kind, wanted));
    }

    fn destinations(&mut self, policy: TrafficPolicy) -> Weighted {
        let scheduler = self.settings.scheduler;
        let view = self.view;
        let (of_policy, endpoints) = match policy {
            TrafficPolicy::Cluster => (&mut self.cluster, &view.cluster_endpoints),
            TrafficPolicy::Local => (&mut self.local, &view.local_endpoints),
        };
        Arc::clone(of_policy.get_or_insert_with(|| {
            let weighted = endpoints.iter().map(|endpoint| (endpoint.socket_address(), endpoint.weight));
            let mut wanted: BTreeMap<SocketAddr, Weight> = weighted.collect();
            let failing = self.failing.among(self.service, view.protocol, wanted.keys().copied());
            // A scheduler that does not skip weight 0 gets no failing destinations.
            wanted.retain(|address, _| scheduler.skips_weight_zero() || !failing.contains(address));
            let count = wanted.len();
            // A failing destination keeps its position, and with it the weights of the others.
            let weigh = |(position, (address, weight)): (usize, (SocketAddr, Weight))| {
                (address, if failing.contains(&address) { 0 } else { scheduler.weight(position, count, weight) })
            };
            wanted.into_iter().enumerate().map(weigh).collect()
        }))
    }

    fn source_ranges(&self, plan: &mut ServicePlan, address: IpAddr) {
        let ranges = &self.view.source_ranges;
        // Without endpoints, packets from all clients are rejected.
        if ranges.is_open() || !self.view.has_any_endpoint {
            return;
        }
        let ServerKey { address, protocol, port } = self.key(address);
        plan.elements.insert((Set::LoadBalancerFirewall, IpSetElement::IpPort(address, protocol, port)));
        for range in &ranges.ranges {
            let element = IpSetElement::IpPortNet(address, protocol, port, *range);
            plan.elements.insert((Set::LoadBalancerSourceCidr, element));
        }
        if ranges.admits_node {
            let element = IpSetElement::IpPortIp(address, protocol, port, address);
            plan.elements.insert((Set::LoadBalancerSourceIp, element));
        }
    }

    /// Adds the elements of hairpin connections, on the node of the endpoint.
    fn loop_back(&self, plan: &mut ServicePlan) {
        let view = self.view;
        for endpoint in view.reachable_endpoints().iter().filter(|endpoint| endpoint.may_be_local) {
            let Destination { address, port, .. } = *endpoint;
            plan.elements.insert((Set::LoopBack, IpSetElement::IpPortIp(address, view.protocol, port, address)));
        }
    }
}
