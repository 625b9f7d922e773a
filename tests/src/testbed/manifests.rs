//! The manifests of a testbed: Nodes, Services and EndpointSlices.
//!
//! Every service is dual-stack and has a number N, which determines its addresses: cluster
//! 10.96.0.N and fd00:10:96::N, external 198.51.100.N and 2001:db8:100::N, load balancer
//! 203.0.113.N and 2001:db8:200::N, node ports from 30000 + 10 × N.

mod yaml;

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::client::Transport;
use super::plan::{self, Family, HTTP_PORT, LINE_PORT, SECOND_LINE_PORT};

/// The Kubernetes namespace of every service.
pub const NAMESPACE: &str = "testbed";
/// A Service whose port is the generation of the manifests. The port shows which generation the
/// control plane holds.
pub(super) const MARKER: &str = "marker";
/// The cluster address of the marker.
pub const MARKER_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 96, 255, 254);

/// Nodes and services of a testbed.
#[derive(Debug, Clone, Default)]
pub struct Manifests {
    services: Vec<Service>,
    /// Services get numbers above this one.
    numbers_above: u8,
    /// Zones of nodes that differ from the plan. The value `None` leaves out the node's label
    /// `topology.kubernetes.io/zone`.
    pub zones: BTreeMap<&'static str, Option<&'static str>>,
    /// Additional documents, written unchanged. The testbed does not count the services and
    /// endpoints in these documents, so Headgate must not serve any of them.
    pub further: Vec<Value>,
}

/// A Service and its EndpointSlices.
#[derive(Debug, Clone)]
pub struct Service {
    /// The unique name.
    pub name: String,
    /// The number that determines the addresses. [`Manifests::add`] sets it.
    pub number: u8,
    /// The ports, in order.
    pub ports: Vec<Port>,
    /// The endpoints of the first slice.
    pub endpoints: Vec<Endpoint>,
    /// Sets `externalTrafficPolicy: Local`.
    pub external_local: bool,
    /// Sets `internalTrafficPolicy: Local`.
    pub internal_local: bool,
    /// Sets `sessionAffinity: ClientIP` with this time-out in seconds.
    pub affinity_timeout_seconds: Option<u32>,
    /// Sets `loadBalancerSourceRanges`.
    pub source_ranges: Vec<String>,
    /// Sets `type`, and leaves out the fields that a Service of this type does not have.
    pub service_type: ServiceType,
    /// Whether the Service has node ports. Sets `allocateLoadBalancerNodePorts`.
    pub has_node_ports: bool,
    /// Sets the label `service.kubernetes.io/service-proxy-name`.
    pub proxy_name: Option<&'static str>,
    /// Sets the label `service.kubernetes.io/headless` of all slices.
    pub headless_slices: bool,
    /// Sets the annotation `service.cilium.io/weight` of the slice of `endpoints`.
    pub weight: Option<u16>,
    /// Additional slices, beside the slice of `endpoints`.
    pub more_slices: Vec<Slice>,
    /// A JSON Merge Patch (RFC 7386) for fields of the manifest that this struct lacks. The patch
    /// must not change the numbers of services and endpoints.
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
    /// `ExternalName`. Agents program nothing for this type.
    ExternalName,
    /// `ClusterIP` with the address "None". Agents program nothing for such a Service.
    Headless,
}

/// An additional slice of a service.
#[derive(Debug, Clone)]
pub struct Slice {
    /// The end of the slice's name.
    pub suffix: &'static str,
    /// The ports: names, transports and target ports.
    pub ports: Vec<Port>,
    /// The endpoints.
    pub endpoints: Vec<Endpoint>,
}

/// One port of a service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Port {
    /// The name, which the ports of slices repeat.
    pub name: &'static str,
    /// The protocol of the port's servers. In the manifest, the protocol of HTTP is TCP.
    pub transport: Transport,
    /// The port at cluster, external and load balancer addresses.
    pub port: u16,
    /// The port at pods.
    pub target_port: u16,
}

/// One endpoint of a slice: a pod, or a server on a node's host network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// The name of the pod, or of the node for its host network.
    pub name: String,
    /// The condition `ready`.
    pub ready: bool,
    /// The condition `serving`.
    pub serving: bool,
    /// The condition `terminating`.
    pub terminating: bool,
    /// Leaves out all conditions.
    pub unconditional: bool,
    /// `hints.forZones`.
    pub hint_zones: Vec<String>,
    /// `hints.forNodes`.
    pub hint_nodes: Vec<String>,
    /// The pod whose address is the second item of `addresses`.
    pub second_address: Option<&'static str>,
    /// Differs between pods that have the same name and address one after the other.
    pub incarnation: u32,
}

/// The kind of address by which a client reaches a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Via {
    /// The service's cluster address.
    ClusterIp,
    /// The service's external address, which no machine holds.
    ExternalIp,
    /// The service's load balancer address, which no machine holds.
    LoadBalancerIp,
    /// The service's node port at the address of this node.
    NodePort(&'static str),
    /// The service's node port at the loopback address of the client's own node.
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
            incarnation: 0,
        }
    }

    /// A pod that has not become ready.
    pub fn not_ready(name: &str) -> Self {
        Self { ready: false, serving: false, ..Self::ready(name) }
    }

    /// A pod that is terminating and still serves.
    pub fn terminating(name: &str) -> Self {
        Self { ready: false, terminating: true, ..Self::ready(name) }
    }

    /// A terminating pod of a Service with `publishNotReadyAddresses`: the slice sets `ready`
    /// although the pod no longer serves.
    pub fn published(name: &str) -> Self {
        Self { serving: false, terminating: true, ..Self::ready(name) }
    }

    /// A ready pod with hints for clients on a node and in the node's zone.
    pub fn for_node(name: &str, node: &str, zone: &str) -> Self {
        Self { hint_nodes: vec![node.to_owned()], ..Self::for_zone(name, zone) }
    }

    /// A ready pod with a hint for clients in a zone.
    pub fn for_zone(name: &str, zone: &str) -> Self {
        Self { hint_zones: vec![zone.to_owned()], ..Self::ready(name) }
    }
}

/// Ready endpoints on these pods or nodes.
pub fn ready(names: &[&str]) -> Vec<Endpoint> {
    names.iter().map(|name| Endpoint::ready(name)).collect()
}

impl Service {
    /// A service with ready endpoints, every kind of address and traffic policies "Cluster". Its
    /// ports are `tcp`, `udp` and `sctp` (80), `second` (TCP 90), and `http` (8080).
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
            weight: None,
            more_slices: Vec::new(),
            patch: None,
        }
    }

    /// The address and port at which clients reach the port named `port` by `via`.
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

    /// The target port of `server` for the port named `port`. A slice may have its own target port.
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

    /// The cluster address.
    pub fn cluster_ip(&self, family: Family) -> IpAddr {
        address(family, [10, 96, 0], [0xfd00, 0x10, 0x96], self.number)
    }

    /// The external address.
    pub fn external_ip(&self, family: Family) -> IpAddr {
        address(family, [198, 51, 100], [0x2001, 0xdb8, 0x100], self.number)
    }

    /// The load balancer address.
    pub fn load_balancer_ip(&self, family: Family) -> IpAddr {
        address(family, [203, 0, 113], [0x2001, 0xdb8, 0x200], self.number)
    }

    /// The node port of the port at `index`.
    pub fn node_port(&self, index: usize) -> Result<u16> {
        ensure!(index < 10, "service {} has more than 10 ports, so it has too few node ports", self.name);
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
        ensure!(self.service(&service.name).is_err(), "a service called {} already exists", service.name);
        let taken = |number: &u8| self.services.iter().any(|service| service.number == *number);
        let number = (self.numbers_above + 1..=250).find(|number| !taken(number));
        let number = number.context("all numbers of services are taken")?;
        self.services.push(Service { number, ..service });
        Ok(())
    }

    /// Removes a service and its slices. The service's number becomes free.
    pub fn remove(&mut self, name: &str) -> Result<Service> {
        let found = self.services.iter().position(|service| service.name == name);
        Ok(self.services.remove(found.with_context(|| format!("no service called {name}"))?))
    }

    /// Removes everything that was added. The addresses of the removed services are not used again,
    /// because the kernel may still track connections to them.
    pub fn clear(&mut self) {
        let highest = self.services.iter().map(|service| service.number).max();
        *self = Self { numbers_above: highest.unwrap_or(self.numbers_above), ..Self::default() };
    }

    /// The service called `name`.
    pub fn service(&self, name: &str) -> Result<&Service> {
        self.services.iter().find(|service| service.name == name).with_context(|| format!("no service called {name}"))
    }

    /// The service called `name`, for changes.
    pub fn service_mut(&mut self, name: &str) -> Result<&mut Service> {
        let found = self.services.iter_mut().find(|service| service.name == name);
        found.with_context(|| format!("no service called {name}"))
    }
}
