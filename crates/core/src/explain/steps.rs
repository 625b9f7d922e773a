//! The steps of a packet to one frontend.

use std::net::IpAddr;

use super::{ExplainedEndpoint, Explainer, Mode, PacketFate, Source, endpoints};
use crate::{
    behaviours::{
        view::{self, Destination, TopologyMode},
        view::{LocalDetector, MasqueradeSources, Outcome, ServicePortView},
    },
    dataplane::iptables::NodePortAddresses,
    model::{Family, Protocol, ServicePort, TrafficPolicy},
    state::frontends::{Claim, Frontend},
};

/// How the rules treat a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Class {
    Node,
    LocalPod,
    Outside,
}

/// A packet on its way to one frontend of a Service.
pub(super) struct Path<'a> {
    pub(super) explainer: &'a Explainer<'a>,
    pub(super) port: &'a ServicePort,
    pub(super) view: ServicePortView,
    pub(super) kind: Claim,
    pub(super) frontend: Frontend,
    /// The address at which the packet reaches a NodePort, if it is known.
    pub(super) node_address: Option<IpAddr>,
    pub(super) steps: Vec<String>,
}

impl Path<'_> {
    /// Writes the steps. Returns the fate of the packet, and the endpoints.
    pub(super) fn walk(&mut self) -> (PacketFate, Vec<ExplainedEndpoint>) {
        let class = self.source();
        if let Some(fate) = self.destination() {
            return (fate, Vec::new());
        }
        if let Some(fate) = self.source_ranges() {
            return (fate, Vec::new());
        }
        let policy = self.policy(class);
        let view = self.view.clone();
        let outcome = view.outcome(policy);
        let chosen = if let Outcome::Forwarded(chosen) = outcome { chosen } else { &[] };
        let (facts, family) = (self.explainer.facts, self.view.family);
        let all = self.explainer.endpoints.values();
        let explained = endpoints::explain(all, self.port, family, facts, policy, chosen);
        self.hints(policy);
        let fate = match outcome {
            Outcome::Rejected => {
                self.step("No endpoint on any node is ready, or serves while it terminates. The node refuses the connection: the client gets an ICMP error at once.");
                PacketFate::Rejected
            }
            Outcome::Dropped => {
                self.step("No endpoint on this node is ready, or serves while it terminates, and the policy is Local. The node drops the packet, so the client waits until its timeout.");
                PacketFate::Dropped
            }
            Outcome::Forwarded(_) if self.is_refused_sctp() => {
                self.step("The proxy of mode userspace cannot carry SCTP. The node refuses the connection.");
                PacketFate::Rejected
            }
            Outcome::Forwarded(chosen) => {
                self.choice(chosen, &explained);
                self.source_address(class, chosen);
                PacketFate::Forwarded
            }
        };
        (fate, explained)
    }

    fn step(&mut self, text: impl Into<String>) {
        self.steps.push(text.into());
    }

    fn is_refused_sctp(&self) -> bool {
        let has_proxy = matches!(self.explainer.settings.mode, Mode::Userspace | Mode::UserspaceIptables);
        has_proxy && self.view.protocol == Protocol::Sctp
    }

    /// Classifies the source as the rules do.
    fn source(&mut self) -> Class {
        let Source::Address { address, is_local_pod } = self.explainer.source else {
            self.step("The packet comes from the node itself.");
            return Class::Node;
        };
        if address.is_loopback() || self.explainer.facts.addresses.contains(&address) {
            self.step(format!("The source {address} is an address of this node."));
            return Class::Node;
        }
        let detector = self.explainer.settings.masquerade.detector(self.view.family);
        let (is_pod, how) = match detector {
            Some(LocalDetector::Cidr(range)) if range.contains(&address) => (true, format!("because it is in {range}")),
            Some(LocalDetector::Cidr(range)) => (false, format!("because it is not in {range}")),
            Some(LocalDetector::BridgeInterface(name)) => {
                (is_local_pod, format!("if the packet arrives through the bridge {name}"))
            }
            Some(LocalDetector::InterfaceNamePrefix(prefix)) => {
                (is_local_pod, format!("if the packet arrives through an interface {prefix}*"))
            }
            None => (false, "because the agent has no range or interface of pods (see --detect-local-mode)".to_owned()),
        };
        let by_interface = !matches!(detector, None | Some(LocalDetector::Cidr(_)));
        let text = match (is_pod, by_interface) {
            (true, _) => format!("The rules treat the source {address} as a pod of this node, {how}."),
            (false, false) => format!("The rules treat the source {address} as no pod of this node, {how}."),
            (false, true) => {
                format!(
                    "No endpoint on this node has the address {address}. The rules treat the source as a pod of this node {how}. The next steps assume that it does not."
                )
            }
        };
        self.step(text);
        if is_pod { Class::LocalPod } else { Class::Outside }
    }

    /// Explains the frontend. Returns a fate if the Service does not serve the frontend.
    fn destination(&mut self) -> Option<PacketFate> {
        let (frontend, kind, key) = (self.frontend, self.kind.as_str(), self.explainer.key);
        let name = if self.port.name.is_empty() { String::new() } else { format!(", port {}", self.port.name) };
        self.step(format!("{frontend} is the {kind} of Service {key}{name}."));
        if self.kind == Claim::ExternalIp && self.explainer.facts.ignores_external_ips {
            self.step("This node ignores externalIPs: its feature gate AllowServiceExternalIPs is off.");
            return Some(PacketFate::NotServed);
        }
        if let Some(conflict) = self.explainer.state.frontends().conflict(key, frontend, self.kind) {
            self.step(format!("{conflict}. No packet reaches {key} there."));
            return Some(PacketFate::NotServed);
        }
        if self.kind == Claim::NodePort { self.node_port() } else { None }
    }

    /// Explains at which addresses of the node a NodePort answers.
    fn node_port(&mut self) -> Option<PacketFate> {
        let settings = self.explainer.settings;
        let (family, has_localhost) = (self.view.family, settings.localhost_node_ports && settings.mode != Mode::Ipvs);
        let (addresses, is_wanted) = (settings.node_ports(family), has_localhost && family == Family::V4);
        let Some(address) = self.node_address else {
            let text = match addresses {
                NodePortAddresses::All => "NodePorts answer on all addresses of the node.".to_owned(),
                NodePortAddresses::Only(addresses) if addresses.is_empty() => {
                    self.step("No address of the node is selected for NodePorts (nodePortAddresses).");
                    return Some(PacketFate::NotServed);
                }
                NodePortAddresses::Only(addresses) => {
                    let list: Vec<String> = addresses.iter().map(IpAddr::to_string).collect();
                    format!("NodePorts answer on {} (nodePortAddresses).", list.join(", "))
                }
            };
            self.step(text);
            return None;
        };
        if address.is_loopback() {
            let is_served = addresses.include_localhost(self.view.family, is_wanted);
            self.step(if is_served {
                "NodePorts answer on loopback addresses, for clients on the node."
            } else {
                "NodePorts do not answer on loopback addresses of this node."
            });
            return (!is_served).then_some(PacketFate::NotServed);
        }
        let is_known = self.explainer.facts.addresses.contains(&address);
        match addresses {
            NodePortAddresses::Only(selected) if !selected.contains(&address) => {
                self.step(format!("NodePorts do not answer on {address} (nodePortAddresses)."));
                Some(PacketFate::NotServed)
            }
            NodePortAddresses::All if !is_known => {
                self.step(format!(
                    "NodePorts answer on all addresses of the node. The next steps assume that {address} is one of them: the Node does not list it."
                ));
                None
            }
            _ => {
                self.step(format!("NodePorts answer on {address}."));
                None
            }
        }
    }

    /// Explains the source ranges of load balancer IPs. Returns a fate if they do not admit the
    /// client.
    fn source_ranges(&mut self) -> Option<PacketFate> {
        let ranges = &self.view.source_ranges;
        let Frontend::Address(destination, ..) = self.frontend else { return None };
        let is_checked = self.view.has_any_endpoint || self.explainer.settings.mode.guards_without_endpoints();
        if self.kind != Claim::LoadBalancerIp || ranges.is_open() || !is_checked {
            return None;
        }
        let (is_admitted, who) = match self.explainer.source {
            Source::Address { address, .. } => (ranges.admits(address, destination), address.to_string()),
            Source::Node => (ranges.admits_node, "the addresses of the Node".to_owned()),
        };
        if is_admitted {
            self.step(format!("loadBalancerSourceRanges admits {who}."));
            return None;
        }
        let list: Vec<String> = ranges.ranges.iter().map(ToString::to_string).collect();
        let text = format!(
            "loadBalancerSourceRanges admits only {}, and not {who}. The node drops the packet.",
            list.join(", ")
        );
        self.step(text);
        Some(PacketFate::Dropped)
    }

    /// Explains which policy applies.
    fn policy(&mut self, class: Class) -> TrafficPolicy {
        let view = &self.view;
        let (policy, text) = if self.kind == Claim::ClusterIp {
            let policy = view.internal_traffic_policy;
            (policy, format!("internalTrafficPolicy is {policy}"))
        } else {
            let of_service = view.external_traffic_policy;
            let policy = view.external_policy(class != Class::Outside);
            let exception = match class {
                _ if policy == of_service => "",
                Class::Node => ", but does not apply to packets from the node itself",
                Class::LocalPod | Class::Outside => ", but does not apply to packets from pods of this node",
            };
            (policy, format!("externalTrafficPolicy is {of_service}{exception}"))
        };
        let set = match policy {
            TrafficPolicy::Cluster => "endpoints on all nodes can be chosen",
            TrafficPolicy::Local => "only endpoints on this node can be chosen",
        };
        self.step(format!("{text}: {set}."));
        policy
    }

    /// Explains topology hints, if an endpoint has some and the policy is Cluster.
    fn hints(&mut self, policy: TrafficPolicy) {
        let facts = self.explainer.facts;
        if policy.is_local() {
            return;
        }
        let candidates = view::candidates(self.explainer.endpoints.values(), self.port, self.view.family);
        let has_hints =
            candidates.clone().any(|candidate| candidate.conditions.ready && candidate.placement.hints.is_some());
        let zone = facts.zone.as_deref().filter(|zone| !zone.is_empty());
        let text = match view::topology_mode(candidates, facts) {
            TopologyMode::SameNode => {
                "Every ready endpoint has a hint for nodes, and some name this node: the others are left out."
                    .to_owned()
            }
            TopologyMode::SameZone => format!(
                "Every ready endpoint has a hint for zones, and some name zone {}, the zone of this node: the others are left out.",
                zone.unwrap_or_default()
            ),
            TopologyMode::Any if has_hints => format!(
                "Some endpoints have hints, but the hints do not apply: every ready endpoint must have a hint, and one of the hints must name this node or its zone ({}).",
                zone.unwrap_or("this node has no zone")
            ),
            TopologyMode::Any => return,
        };
        self.step(text);
    }

    /// Explains how the node chooses among the endpoints.
    fn choice(&mut self, chosen: &[Destination], explained: &[ExplainedEndpoint]) {
        let is_chosen = |endpoint: &&ExplainedEndpoint| endpoint.left_out.is_none();
        if explained.iter().filter(is_chosen).all(|endpoint| !endpoint.conditions.ready) {
            self.step("No endpoint is ready, so the node uses endpoints that terminate and still serve.");
        }
        let failing = self.explainer.facts.failing.of(self.explainer.key);
        let is_checked = self.view.protocol == Protocol::Tcp && self.explainer.service.is_checked_by_tcp();
        if is_checked && chosen.iter().all(|endpoint| failing.contains(&endpoint.socket_address())) {
            self.step("All these endpoints fail the health checks of this node, so the node uses all of them.");
        }
        let algorithm = self.view.load_balancing.map_or_else(String::new, |algorithm| {
            format!(" The Service asks for {algorithm} (headgate.io/load-balancing).")
        });
        let weights = chosen.iter().any(|endpoint| endpoint.weight != chosen[0].weight);
        let weights = if weights { ", in proportion to their weights" } else { "" };
        let text = match (chosen.len(), self.view.affinity_timeout_seconds) {
            (1, _) => "A new connection goes to the only endpoint that can be chosen.".to_owned(),
            (count, None) => format!("A new connection goes to one of {count} endpoints{weights}.{algorithm}"),
            (count, Some(seconds)) => format!(
                "A new connection goes to one of {count} endpoints{weights}.{algorithm} A client keeps its endpoint while it connects again within {seconds} s (sessionAffinity)."
            ),
        };
        self.step(text);
    }

    /// Explains the source address that the endpoint sees.
    fn source_address(&mut self, class: Class, chosen: &[Destination]) {
        let settings = self.explainer.settings;
        let masquerade = &settings.masquerade;
        let sources = if self.kind == Claim::ClusterIp {
            masquerade.sources_to_cluster_ips(self.view.family)
        } else {
            MasqueradeSources::to_external_destinations(self.view.external_traffic_policy)
        };
        let is_masqueraded = match sources {
            MasqueradeSources::Nobody => false,
            MasqueradeSources::Outside => class != Class::LocalPod,
            MasqueradeSources::Node => class == Class::Node,
            MasqueradeSources::Everyone => true,
        };
        let is_carried = match settings.mode {
            // Datagrams to NodePorts go straight to the endpoints.
            _ if self.view.bypasses_proxy => false,
            Mode::Userspace => self.view.protocol == Protocol::Tcp || self.kind != Claim::NodePort,
            Mode::UserspaceIptables => self.view.protocol == Protocol::Tcp,
            Mode::Iptables | Mode::Ipvs | Mode::Nftables => false,
        };
        let is_on_node = |endpoint: &&Destination| self.explainer.facts.addresses.contains(&endpoint.address);
        let on_node = chosen.iter().filter(is_on_node).count();
        let is_hairpin = |client: &IpAddr| chosen.iter().any(|endpoint| endpoint.address == *client) && !is_masqueraded;
        let text = match self.explainer.source {
            _ if is_carried => {
                "The proxy of the node connects to the endpoint, so the endpoint sees an address of the node."
                    .to_owned()
            }
            Source::Node => "The endpoint sees an address of the node.".to_owned(),
            Source::Address { address, .. } if !is_masqueraded || on_node == chosen.len() => {
                let hairpin = if is_hairpin(&address) {
                    " If the node chooses the client itself, it replaces the source address by its own."
                } else {
                    ""
                };
                format!("The endpoint sees the source address {address}.{hairpin}")
            }
            Source::Address { address, .. } => {
                let exception = if on_node > 0 {
                    format!(
                        " An endpoint in the network of this node sees {address}, because the packet does not leave the node."
                    )
                } else {
                    String::new()
                };
                format!(
                    "The node replaces the source address by its own (masquerading), so the endpoint sees an address of the node.{exception}"
                )
            }
        };
        self.step(text);
    }
}
