//! What a cluster's users would have asked for: Services and their EndpointSlices, as ordinary YAML.
//!
//! Every service is dual-stack, has a number, and its addresses follow from that: cluster 10.96.0.N and fd00:10:96::N, external
//! 198.51.100.N and 2001:db8:100::N, load balancer 203.0.113.N and 2001:db8:200::N, node ports from 30000 + 10 × N.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::client::Transport;
use super::plan::{self, Family, HTTP_PORT, LINE_PORT, NODES, SECOND_LINE_PORT};

/// Namespace of every service.
pub const NAMESPACE: &str = "testbed";
/// Service whose port is the number of times that the manifests were written: seen there, a change has reached the control plane.
pub(super) const MARKER: &str = "marker";

/// Nodes and services of a testbed.
#[derive(Debug, Clone, Default)]
pub struct Manifests {
    services: Vec<Service>,
}

/// A Service and its EndpointSlices.
#[derive(Debug, Clone)]
pub struct Service {
    /// Name; unique.
    pub name: String,
    /// Its number, from which its addresses follow; given by [`Manifests::add`].
    pub number: u8,
    /// Ports, in order.
    pub ports: Vec<Port>,
    /// What slices say about pods.
    pub endpoints: Vec<Endpoint>,
    /// Sets `externalTrafficPolicy: Local`.
    pub external_local: bool,
    /// Sets `internalTrafficPolicy: Local`.
    pub internal_local: bool,
    /// Sets `sessionAffinity: ClientIP` with this time-out.
    pub affinity_timeout_seconds: Option<u32>,
    /// Sets `loadBalancerSourceRanges`.
    pub source_ranges: Vec<String>,
}

/// One port of a service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Port {
    /// Its name, by which it finds its endpoints.
    pub name: &'static str,
    /// What to speak to it; HTTP is TCP to Kubernetes.
    pub transport: Transport,
    /// At cluster, external and load balancer addresses.
    pub port: u16,
    /// At pods.
    pub target_port: u16,
}

/// What a slice says about one pod, or about a node's host network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// Pod, or node for its host network.
    pub name: String,
    /// Condition `ready`.
    pub ready: bool,
    /// Condition `serving`.
    pub serving: bool,
    /// Condition `terminating`.
    pub terminating: bool,
    /// `hints.forZones`.
    pub hint_zones: Vec<String>,
}

/// One of the ways to a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Via {
    /// Its cluster address.
    ClusterIp,
    /// Its external address, which no machine has.
    ExternalIp,
    /// Its load balancer address, which no machine has.
    LoadBalancerIp,
    /// Its node port at the address of this node.
    NodePort(&'static str),
    /// Its node port at the loopback address of the client's own node.
    Localhost,
}

impl Endpoint {
    /// A pod that is ready.
    pub fn ready(name: &str) -> Self {
        Self { name: name.to_owned(), ready: true, serving: true, terminating: false, hint_zones: Vec::new() }
    }

    /// A pod that has not become ready.
    pub fn not_ready(name: &str) -> Self {
        Self { ready: false, serving: false, ..Self::ready(name) }
    }

    /// A pod that is about to end and still serves.
    pub fn terminating(name: &str) -> Self {
        Self { ready: false, terminating: true, ..Self::ready(name) }
    }

    /// A ready pod that is meant for clients in a zone.
    pub fn for_zone(name: &str, zone: &str) -> Self {
        Self { hint_zones: vec![zone.to_owned()], ..Self::ready(name) }
    }
}

/// Ready endpoints on pods or nodes.
pub fn ready(names: &[&str]) -> Vec<Endpoint> {
    names.iter().map(|name| Endpoint::ready(name)).collect()
}

impl Service {
    /// A service on ready pods, with every kind of address, policies "Cluster", and these ports: `tcp`, `udp` and `sctp`, all three 80;
    /// `second`, TCP 90; and `http`, 8080.
    pub fn new(name: &str, endpoints: &[&str]) -> Self {
        let port = |name, transport, port, target_port| Port { name, transport, port, target_port };
        Self {
            name: name.to_owned(),
            number: 0,
            ports: vec![
                port("tcp", Transport::Tcp, 80, LINE_PORT),
                port("udp", Transport::Udp, 80, LINE_PORT),
                port("sctp", Transport::Sctp, 80, LINE_PORT),
                port("second", Transport::Tcp, 90, SECOND_LINE_PORT),
                port("http", Transport::Http, 8080, HTTP_PORT),
            ],
            endpoints: ready(endpoints),
            external_local: false,
            internal_local: false,
            affinity_timeout_seconds: None,
            source_ranges: Vec::new(),
        }
    }

    /// Where a port is to be asked for by the given way.
    pub fn socket_address(&self, via: Via, family: Family, port: &str) -> Result<SocketAddr> {
        let (index, found) = self
            .ports
            .iter()
            .enumerate()
            .find(|(_, candidate)| candidate.name == port)
            .with_context(|| format!("service {} has no port called {port}", self.name))?;
        Ok(match via {
            Via::ClusterIp => SocketAddr::new(self.cluster_ip(family), found.port),
            Via::ExternalIp => SocketAddr::new(self.external_ip(family), found.port),
            Via::LoadBalancerIp => SocketAddr::new(self.load_balancer_ip(family), found.port),
            Via::NodePort(node) => {
                let address = plan::address(node).with_context(|| format!("no node called {node}"))?;
                SocketAddr::new(address.of(family), self.node_port(index)?)
            }
            Via::Localhost => SocketAddr::new(family.loopback(), self.node_port(index)?),
        })
    }

    /// The port called `name`.
    pub fn port(&self, name: &str) -> Result<&Port> {
        let found = self.ports.iter().find(|port| port.name == name);
        found.with_context(|| format!("service {} has no port called {name}", self.name))
    }

    fn cluster_ip(&self, family: Family) -> IpAddr {
        address(family, [10, 96, 0], [0xfd00, 0x10, 0x96], self.number)
    }

    fn external_ip(&self, family: Family) -> IpAddr {
        address(family, [198, 51, 100], [0x2001, 0xdb8, 0x100], self.number)
    }

    fn load_balancer_ip(&self, family: Family) -> IpAddr {
        address(family, [203, 0, 113], [0x2001, 0xdb8, 0x200], self.number)
    }

    fn node_port(&self, index: usize) -> Result<u16> {
        ensure!(index < 10, "service {} has too many ports for the plan of node ports", self.name);
        Ok(30_000 + 10 * u16::from(self.number) + u16::try_from(index)?)
    }

    fn manifest(&self) -> Result<Value> {
        let mut ports = Vec::new();
        for (index, port) in self.ports.iter().enumerate() {
            ports.push(json!({
                "name": port.name, "protocol": protocol(port.transport), "port": port.port,
                "targetPort": port.target_port, "nodePort": self.node_port(index)?,
            }));
        }
        let mut spec = json!({
            "type": "LoadBalancer",
            "clusterIP": self.cluster_ip(Family::V4),
            "clusterIPs": Family::BOTH.map(|family| self.cluster_ip(family)),
            "ipFamilies": ["IPv4", "IPv6"],
            "ipFamilyPolicy": "RequireDualStack",
            "externalIPs": Family::BOTH.map(|family| self.external_ip(family)),
            "externalTrafficPolicy": policy(self.external_local),
            "internalTrafficPolicy": policy(self.internal_local),
            "sessionAffinity": "None",
            "ports": ports,
        });
        if let Some(seconds) = self.affinity_timeout_seconds {
            spec["sessionAffinity"] = json!("ClientIP");
            spec["sessionAffinityConfig"] = json!({ "clientIP": { "timeoutSeconds": seconds } });
        }
        if !self.source_ranges.is_empty() {
            spec["loadBalancerSourceRanges"] = json!(self.source_ranges);
        }
        let ingress = Family::BOTH.map(|family| json!({ "ip": self.load_balancer_ip(family), "ipMode": "VIP" }));
        Ok(json!({
            "apiVersion": "v1", "kind": "Service",
            "metadata": { "name": self.name, "namespace": NAMESPACE },
            "spec": spec,
            "status": { "loadBalancer": { "ingress": ingress } },
        }))
    }

    fn slice(&self, family: Family) -> Result<Value> {
        let ports: Vec<Value> = self
            .ports
            .iter()
            .map(|port| json!({ "name": port.name, "protocol": protocol(port.transport), "port": port.target_port }))
            .collect();
        let endpoints: Result<Vec<Value>> = self.endpoints.iter().map(|endpoint| endpoint.manifest(family)).collect();
        let suffix = if family == Family::V4 { "v4" } else { "v6" };
        Ok(json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {
                "name": format!("{}-{suffix}", self.name), "namespace": NAMESPACE,
                "labels": { "kubernetes.io/service-name": self.name },
            },
            "addressType": family.to_string(),
            "ports": ports,
            "endpoints": endpoints?,
        }))
    }
}

impl Endpoint {
    fn manifest(&self, family: Family) -> Result<Value> {
        let node = plan::node_of(&self.name).with_context(|| format!("no pod or node called {}", self.name))?;
        let address = plan::address(&self.name).with_context(|| format!("{} has no address", self.name))?;
        let mut endpoint = json!({
            "addresses": [address.of(family)],
            "conditions": { "ready": self.ready, "serving": self.serving, "terminating": self.terminating },
            "nodeName": node.name,
            "zone": node.zone,
        });
        if !self.hint_zones.is_empty() {
            let zones: Vec<Value> = self.hint_zones.iter().map(|zone| json!({ "name": zone })).collect();
            endpoint["hints"] = json!({ "forZones": zones });
        }
        Ok(endpoint)
    }
}

fn address(family: Family, v4: [u8; 3], v6: [u16; 3], number: u8) -> IpAddr {
    match family {
        Family::V4 => Ipv4Addr::new(v4[0], v4[1], v4[2], number).into(),
        Family::V6 => Ipv6Addr::new(v6[0], v6[1], v6[2], 0, 0, 0, 0, u16::from(number)).into(),
    }
}

fn protocol(transport: Transport) -> &'static str {
    match transport {
        Transport::Tcp | Transport::Http => "TCP",
        Transport::Udp => "UDP",
        Transport::Sctp => "SCTP",
    }
}

fn policy(local: bool) -> &'static str {
    if local { "Local" } else { "Cluster" }
}

impl Manifests {
    /// Adds a service under the next free number.
    pub fn add(&mut self, service: Service) -> Result<()> {
        ensure!(self.service(&service.name).is_err(), "there is a service called {} already", service.name);
        let taken = |number: &u8| self.services.iter().any(|service| service.number == *number);
        let number = (1..=250).find(|number| !taken(number)).context("all numbers of services are taken")?;
        self.services.push(Service { number, ..service });
        Ok(())
    }

    /// Removes a service and its slices; its number becomes free.
    pub fn remove(&mut self, name: &str) -> Result<Service> {
        let found = self.services.iter().position(|service| service.name == name);
        Ok(self.services.remove(found.with_context(|| format!("no service called {name}"))?))
    }

    /// The service called `name`.
    pub fn service(&self, name: &str) -> Result<&Service> {
        self.services.iter().find(|service| service.name == name).with_context(|| format!("no service called {name}"))
    }

    /// The service called `name`, to be changed.
    pub fn service_mut(&mut self, name: &str) -> Result<&mut Service> {
        let found = self.services.iter_mut().find(|service| service.name == name);
        found.with_context(|| format!("no service called {name}"))
    }

    /// Numbers of services, marker included, and of endpoints, each address for itself.
    pub(super) fn counts(&self) -> (u64, u64) {
        let endpoints: usize = self.services.iter().map(|service| Family::BOTH.len() * service.endpoints.len()).sum();
        (self.services.len() as u64 + 1, endpoints as u64)
    }

    /// All documents, the marker with `generation` as its port last.
    pub(super) fn yaml(&self, generation: u16) -> Result<String> {
        let mut documents: Vec<Value> = NODES.iter().map(node).collect::<Result<_>>()?;
        for service in &self.services {
            documents.push(service.manifest()?);
            for family in Family::BOTH {
                documents.push(service.slice(family)?);
            }
        }
        documents.push(marker(generation));
        let mut yaml = String::new();
        for document in documents {
            yaml.push_str("---\n");
            yaml.push_str(&serde_saphyr::to_string(&document).context("writing YAML")?);
            if !yaml.ends_with('\n') {
                yaml.push('\n');
            }
        }
        Ok(yaml)
    }
}

fn node(node: &plan::NodePlan) -> Result<Value> {
    let address = plan::address(node.name).context("every node has an address")?;
    let pod_cidrs = plan::pod_networks(node.name).context("every node has pod networks")?;
    let mut addresses: Vec<Value> =
        address.both().iter().map(|address| json!({ "type": "InternalIP", "address": address })).collect();
    addresses.push(json!({ "type": "Hostname", "address": node.name }));
    Ok(json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {
            "name": node.name,
            "labels": { "kubernetes.io/hostname": node.name, "topology.kubernetes.io/zone": node.zone },
        },
        "spec": { "podCIDR": pod_cidrs[0], "podCIDRs": pod_cidrs },
        "status": { "addresses": addresses },
    }))
}

fn marker(generation: u16) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": { "name": MARKER, "namespace": NAMESPACE },
        "spec": {
            "type": "ClusterIP", "clusterIP": "10.96.255.254", "clusterIPs": ["10.96.255.254"], "ipFamilies": ["IPv4"],
            "ports": [{ "name": "generation", "protocol": "TCP", "port": generation }],
        },
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{Family, Manifests, Service, Via};

    #[test]
    fn documents_are_yaml_that_reads_back_as_it_was_meant() {
        let mut manifests = Manifests::default();
        manifests.add(Service::new("web", &["a1", "node-c"])).unwrap();
        let yaml = manifests.yaml(7).unwrap();
        let documents: Vec<serde_json::Value> =
            yaml.split("---\n").skip(1).map(|document| serde_saphyr::from_str(document).unwrap()).collect();
        assert_eq!(documents.len(), 3 + 3 + 1);
        assert_eq!(documents[3], manifests.service("web").unwrap().manifest().unwrap());
        assert_eq!(documents[5]["endpoints"][1]["addresses"][0], "2001:db8:0:1::d");
        let address = manifests.service("web").unwrap().socket_address(Via::ClusterIp, Family::V6, "udp").unwrap();
        assert_eq!(address.to_string(), "[fd00:10:96::1]:80");
    }
}
