//! What a cluster's users would have asked for: Services and their EndpointSlices, as ordinary
//! YAML.
//!
//! Every service is dual-stack, has a number, and its addresses follow from that: cluster 10.96.0.N
//! and fd00:10:96::N, external 198.51.100.N and 2001:db8:100::N, load balancer 203.0.113.N and
//! 2001:db8:200::N, node ports from 30000 + 10 × N.

mod yaml;

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::client::Transport;
use super::plan::{self, Family, HTTP_PORT, LINE_PORT, SECOND_LINE_PORT};

/// Namespace of every service.
pub const NAMESPACE: &str = "testbed";
/// Service whose port is the number of times that the manifests were written: seen there, a change
/// has reached the control plane.
pub(super) const MARKER: &str = "marker";
/// Its address.
pub const MARKER_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 96, 255, 254);

/// Nodes and services of a testbed.
#[derive(Debug, Clone, Default)]
pub struct Manifests {
    services: Vec<Service>,
    /// Labels `topology.kubernetes.io/zone` of nodes that differ from the plan; `None` for none.
    pub zones: BTreeMap<&'static str, Option<&'static str>>,
    /// Further documents, as they are. They are not counted as services or endpoints, so they must
    /// be none that are served.
    pub further: Vec<Value>,
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
    /// Sets `type`, and leaves out the fields that such a Service does not have.
    pub service_type: ServiceType,
    /// Without it, a Service of type LoadBalancer has no node ports.
    pub has_node_ports: bool,
    /// Sets the label `service.kubernetes.io/service-proxy-name`.
    pub proxy_name: Option<&'static str>,
    /// Sets the label `service.kubernetes.io/headless` of all slices.
    pub headless_slices: bool,
    /// Further slices, beside the one of `endpoints`.
    pub more_slices: Vec<Slice>,
    /// Changes the manifest at last (RFC 7386, JSON Merge Patch), for what has no field here. It
    /// must not change what is counted.
    pub patch: Option<fn(&Service) -> Value>,
}

/// `type` of a Service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServiceType {
    /// `ClusterIP`.
    ClusterIp,
    /// `NodePort`.
    NodePort,
    /// `LoadBalancer`.
    LoadBalancer,
    /// `ExternalName`: nothing to program.
    ExternalName,
    /// `ClusterIP` with "None" for an address: nothing to program.
    Headless,
}

/// A further slice of a service.
#[derive(Debug, Clone)]
pub struct Slice {
    /// End of its name.
    pub suffix: &'static str,
    /// Its ports: names, transports and target ports.
    pub ports: Vec<Port>,
    /// Its endpoints.
    pub endpoints: Vec<Endpoint>,
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
    /// No conditions at all, in place of the above.
    pub unconditional: bool,
    /// `hints.forZones`.
    pub hint_zones: Vec<String>,
    /// `hints.forNodes`.
    pub hint_nodes: Vec<String>,
    /// A pod whose address follows in `addresses`.
    pub second_address: Option<&'static str>,
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
        Self {
            name: name.to_owned(),
            ready: true,
            serving: true,
            terminating: false,
            unconditional: false,
            hint_zones: Vec::new(),
            hint_nodes: Vec::new(),
            second_address: None,
        }
    }

    /// A pod that has not become ready.
    pub fn not_ready(name: &str) -> Self {
        Self { ready: false, serving: false, ..Self::ready(name) }
    }

    /// A pod that is about to end and still serves.
    pub fn terminating(name: &str) -> Self {
        Self { ready: false, terminating: true, ..Self::ready(name) }
    }

    /// A pod of a Service with `publishNotReadyAddresses` that is neither ready nor going to be:
    /// slices call it ready.
    pub fn published(name: &str) -> Self {
        Self { serving: false, terminating: true, ..Self::ready(name) }
    }

    /// A ready pod that is meant for clients on a node, and in the node's zone.
    pub fn for_node(name: &str, node: &str, zone: &str) -> Self {
        Self { hint_nodes: vec![node.to_owned()], ..Self::for_zone(name, zone) }
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
    /// A service on ready pods, with every kind of address, policies "Cluster", and these ports:
    /// `tcp`, `udp` and `sctp`, all three 80; `second`, TCP 90; and `http`, 8080.
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
            service_type: ServiceType::LoadBalancer,
            has_node_ports: true,
            proxy_name: None,
            headless_slices: false,
            more_slices: Vec::new(),
            patch: None,
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

    /// Where `server` is to be reached for the port called `port`: the slice that lists it may have
    /// a number of its own.
    pub fn target_port(&self, server: &str, port: &str) -> Result<u16> {
        let mut slices = self.more_slices.iter().filter(|slice| slice.endpoints.iter().any(|pod| pod.name == server));
        let of_slice = slices.find_map(|slice| slice.ports.iter().find(|candidate| candidate.name == port));
        Ok(of_slice.map_or(self.port(port)?, |port| port).target_port)
    }

    /// The port called `name`.
    pub fn port(&self, name: &str) -> Result<&Port> {
        let found = self.ports.iter().find(|port| port.name == name);
        found.with_context(|| format!("service {} has no port called {name}", self.name))
    }

    /// Its cluster address.
    pub fn cluster_ip(&self, family: Family) -> IpAddr {
        address(family, [10, 96, 0], [0xfd00, 0x10, 0x96], self.number)
    }

    /// Its external address.
    pub fn external_ip(&self, family: Family) -> IpAddr {
        address(family, [198, 51, 100], [0x2001, 0xdb8, 0x100], self.number)
    }

    /// Its load balancer address.
    pub fn load_balancer_ip(&self, family: Family) -> IpAddr {
        address(family, [203, 0, 113], [0x2001, 0xdb8, 0x200], self.number)
    }

    /// Node port of its port at `index`.
    pub fn node_port(&self, index: usize) -> Result<u16> {
        ensure!(index < 10, "service {} has too many ports for the plan of node ports", self.name);
        Ok(30_000 + 10 * u16::from(self.number) + u16::try_from(index)?)
    }
}

fn address(family: Family, v4: [u8; 3], v6: [u16; 3], number: u8) -> IpAddr {
    match family {
        Family::V4 => Ipv4Addr::new(v4[0], v4[1], v4[2], number).into(),
        Family::V6 => Ipv6Addr::new(v6[0], v6[1], v6[2], 0, 0, 0, 0, u16::from(number)).into(),
    }
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
