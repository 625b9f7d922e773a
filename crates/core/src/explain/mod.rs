//! What a node does with a packet to a Service, step by step, and why it leaves out endpoints.
//!
//! An explanation takes every decision from the functions that the dataplanes use: the view of the
//! Service, [`view::verdict`], source ranges and masquerading. It describes what the
//! node wants to do. It does not read the kernel.

mod endpoints;
mod steps;

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

pub use self::endpoints::{ExplainedEndpoint, LeftOut};
use self::steps::Path;
use crate::{
    behaviours::view::{self, MasqueradeConfig, ServicePortView, ServiceSize},
    dataplane::iptables::NodePortAddresses,
    model::{Family, NodeFacts, Protocol, Service, ServiceKey, ServicePort},
    state::{
        Endpoints, State,
        frontends::{Claim, Frontend, addresses_of, frontends_of_port},
    },
};

named! {
    /// How the node forwards packets. Named as in the option `--proxy-mode`, with the rules in
    /// front of the proxy if they are not those of nftables.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Mode {
        /// Rules of iptables.
        Iptables = "iptables",
        /// Virtual servers of IPVS.
        Ipvs = "ipvs",
        /// Maps of nftables.
        Nftables = "nftables",
        /// A proxy carries TCP connections and datagrams, behind rules of nftables.
        Userspace = "userspace",
        /// A proxy carries TCP connections, behind rules of iptables.
        UserspaceIptables = "userspace-iptables",
    }
}

impl Mode {
    /// True if source ranges also apply without endpoints. Other modes then reject all clients.
    pub(crate) fn guards_without_endpoints(self) -> bool {
        matches!(self, Self::Nftables | Self::Userspace)
    }
}

/// The settings of the node on which an explanation depends.
#[derive(Debug, Clone)]
pub struct NodeSettings {
    /// How the node forwards packets.
    pub mode: Mode,
    /// Masquerading, with the detectors of local pods.
    pub masquerade: MasqueradeConfig,
    /// IPv4 addresses that answer NodePorts.
    pub node_ports_v4: NodePortAddresses,
    /// IPv6 addresses that answer NodePorts.
    pub node_ports_v6: NodePortAddresses,
    /// True if NodePorts also answer on 127.0.0.0/8. Mode IPVS ignores this value.
    pub localhost_node_ports: bool,
}

impl NodeSettings {
    /// The addresses of a family that answer NodePorts.
    #[must_use]
    pub fn node_ports(&self, family: Family) -> &NodePortAddresses {
        match family {
            Family::V4 => &self.node_ports_v4,
            Family::V6 => &self.node_ports_v6,
        }
    }
}

/// Where a packet comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// A program in the network of the node.
    Node,
    /// A pod, or a client outside of the cluster.
    Address {
        /// The source address of the packet.
        address: IpAddr,
        /// The address is of a local pod. It counts if rules know local pods by interface.
        is_local_pod: bool,
    },
}

/// A destination address and port. Without a protocol, all protocols match.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct To {
    /// Address and port.
    pub at: SocketAddr,
    /// Protocol.
    pub protocol: Option<Protocol>,
}

named! {
    /// What happens to the packet.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum PacketFate {
        /// It goes to one of the chosen endpoints.
        Forwarded = "forwarded",
        /// The client gets an error at once.
        Rejected = "rejected",
        /// The node drops the packet.
        Dropped = "dropped",
        /// The Service has no rule for the packet: others, or the routes of the node, decide.
        NotServed = "not served",
    }
}

/// What a node does with a packet to one address and port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation {
    /// The destination, such as "10.96.0.10 port 80/TCP".
    pub destination: String,
    /// What the node does, in order, one sentence or two for each step.
    pub steps: Vec<String>,
    /// What happens to the packet.
    pub fate: PacketFate,
    /// The endpoints of the family, in order. Empty if the fate does not depend on them.
    pub endpoints: Vec<ExplainedEndpoint>,
}

/// The maximum number of destinations that [`explain`] explains without `to`.
pub const MAX_DESTINATIONS: usize = 32;

/// Explains what a node does with a packet to `to`. Without `to`, explains the addresses and
/// NodePorts of the Service, in the order of its ports, and returns the number of those beyond
/// [`MAX_DESTINATIONS`]. Returns `None` if the node does not know the Service.
#[must_use]
pub fn explain(
    state: &State,
    key: &ServiceKey,
    facts: &NodeFacts,
    settings: &NodeSettings,
    source: Source,
    to: Option<To>,
) -> Option<(Vec<Explanation>, usize)> {
    let key = state.key(key)?;
    let entry = state.entry(key)?;
    let (service, endpoints) = (entry.service()?, entry.endpoints());
    let explainer = Explainer { state, key, service, endpoints, facts, settings, source };
    Some(match to {
        Some(to) => (explainer.to(to), 0),
        None => explainer.all(),
    })
}

/// What the steps of all destinations share.
struct Explainer<'a> {
    state: &'a State,
    key: &'a Arc<ServiceKey>,
    service: &'a Service,
    endpoints: &'a Endpoints,
    facts: &'a NodeFacts,
    settings: &'a NodeSettings,
    source: Source,
}

impl<'a> Explainer<'a> {
    fn all(&self) -> (Vec<Explanation>, usize) {
        let of = |port| frontends_of_port(self.service, port).map(move |(frontend, claim)| (port, claim, frontend));
        let mut frontends: Vec<_> = self.service.ports.iter().flat_map(of).collect();
        frontends.retain(|(.., frontend)| {
            let is_possible = match self.source {
                Source::Node => true,
                Source::Address { address, .. } => Family::of(address) == frontend.family(),
            };
            is_possible && self.service.cluster_ip(frontend.family()).is_some()
        });
        let explained = frontends.iter().take(MAX_DESTINATIONS);
        let explained = explained.filter_map(|(port, kind, frontend)| self.frontend(port, *kind, *frontend, None));
        (explained.collect(), frontends.len().saturating_sub(MAX_DESTINATIONS))
    }

    fn to(&self, to: To) -> Vec<Explanation> {
        let address = to.at.ip();
        let kind = self.kind_of(address);
        let ports = self.service.ports.iter();
        let ports = ports.filter(|port| to.protocol.is_none_or(|protocol| protocol == port.protocol));
        let found = ports.filter_map(|port| match kind {
            Some(kind) if port.port == to.at.port() => {
                self.frontend(port, kind, Frontend::Address(address, port.protocol, port.port), None)
            }
            None if port.node_port != 0 && port.node_port == to.at.port() => {
                let frontend = Frontend::NodePort(Family::of(address), port.protocol, port.node_port);
                self.frontend(port, Claim::NodePort, frontend, Some(address))
            }
            _ => None,
        });
        let found: Vec<Explanation> = found.collect();
        if found.is_empty() { vec![self.unknown(to, kind)] } else { found }
    }

    fn kind_of(&self, address: IpAddr) -> Option<Claim> {
        addresses_of(self.service).find(|(of_service, _)| *of_service == address).map(|(_, claim)| claim)
    }

    /// Explains a frontend; `None` if the Service has no rules in the family.
    fn frontend(
        &self,
        port: &'a ServicePort,
        kind: Claim,
        frontend: Frontend,
        node_address: Option<IpAddr>,
    ) -> Option<Explanation> {
        let family = frontend.family();
        let is_same = |view: &ServicePortView| {
            (&*view.port_name, view.protocol, view.port) == (&*port.name, port.protocol, port.port)
        };
        let destination = match (frontend, node_address) {
            (Frontend::NodePort(_, protocol, port), Some(address)) => Frontend::Address(address, protocol, port),
            _ => frontend,
        };
        let destination = destination.to_string();
        let size = self.state.entry(self.key).map(|entry| ServiceSize::of(entry, family));
        if let Some(excess) = size.and_then(ServiceSize::excess) {
            let (steps, fate) = (vec![format!("No rule matches: {excess}.")], PacketFate::NotServed);
            return Some(Explanation { destination, steps, fate, endpoints: Vec::new() });
        }
        let view = view::service_views(self.state, self.key, family, self.facts).into_iter().find(is_same)?;
        let mut path = Path { explainer: self, port, view, kind, frontend, node_address, steps: Vec::new() };
        let (fate, endpoints) = path.walk();
        Some(Explanation { destination, steps: path.steps, fate, endpoints })
    }

    /// Explains a destination that is no frontend of the Service.
    fn unknown(&self, to: To, kind: Option<Claim>) -> Explanation {
        let To { at, protocol } = to;
        let protocol_text = protocol.map_or_else(String::new, |protocol| format!("/{protocol}"));
        let destination = format!("{} port {}{protocol_text}", at.ip(), at.port());
        let all = Protocol::ALL;
        let protocols = all.into_iter().filter(|one| protocol.is_none_or(|wanted| wanted == *one));
        let family = Family::of(at.ip());
        let owner = protocols.flat_map(|protocol| {
            [Frontend::Address(at.ip(), protocol, at.port()), Frontend::NodePort(family, protocol, at.port())]
        });
        let foreign =
            |frontend: &Frontend| self.state.frontends().owner(frontend).filter(|owner| **owner != **self.key);
        let owner = owner.into_iter().find_map(|frontend| Some((frontend, foreign(&frontend)?)));
        let mode = self.settings.mode;
        let is_refused = kind == Some(Claim::ClusterIp) && !matches!(mode, Mode::Iptables | Mode::UserspaceIptables)
            || kind.is_some() && mode == Mode::Ipvs;
        let what = kind.map_or("address", Claim::as_str);
        let (step, fate) = match (owner, kind) {
            (Some((frontend, owner)), _) => {
                let text = format!("{frontend} belongs to Service {owner}: explain {owner} instead.");
                (text, PacketFate::NotServed)
            }
            (None, Some(_)) if is_refused => (
                format!(
                    "{} is the {what} of the Service, but the Service has no such port. The node refuses the connection.",
                    at.ip()
                ),
                PacketFate::Rejected,
            ),
            (None, Some(_)) => (
                format!(
                    "{} is the {what} of the Service, but the Service has no such port. No rule matches, and the packet follows the routes of the node.",
                    at.ip()
                ),
                PacketFate::NotServed,
            ),
            (None, None) => (
                format!(
                    "{destination} is neither an address of the Service nor one of its NodePorts. No rule of the Service matches."
                ),
                PacketFate::NotServed,
            ),
        };
        Explanation { destination, steps: vec![step], fate, endpoints: Vec::new() }
    }
}
