//! The inputs of the rules that are not part of the shared state: how rules recognise local pods,
//! and which addresses answer NodePorts, by the settings, the Node and the machine's interfaces.

use std::{net::IpAddr, sync::Arc};

use headgate_core::{
    Demand, Family, Node,
    addresses::DialPolicy,
    explain::{self, Mode},
    iptables::NodePortAddresses,
    view::{LocalDetector, MasqueradeConfig},
};
use ipnet::IpNet;

use headgate_settings::{DetectLocal, NodePortSelector, Settings};

/// The settings that [`NodeInputs`] are resolved from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeSettings {
    /// How rules recognise local pods.
    pub detect_local: DetectLocal,
    /// Which addresses answer NodePorts.
    pub node_ports: NodePortSelector,
    /// An address of the node that takes precedence over the addresses in the Node.
    pub bind_address: Option<IpAddr>,
    /// The ranges of `--pod-ranges`.
    pub pod_ranges: Vec<IpNet>,
    /// True if programs of the node connect to endpoints: a proxy, or health checks.
    pub dials: bool,
    /// True if a proxy carries connections.
    pub has_proxy: bool,
}

/// The resolved settings, for both families.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeInputs {
    /// How IPv4 rules recognise local pods. `None` when the rules cannot recognise local pods.
    pub detector_v4: Option<LocalDetector>,
    /// How IPv6 rules recognise local pods. `None` when the rules cannot recognise local pods.
    pub detector_v6: Option<LocalDetector>,
    /// IPv4 addresses that answer NodePorts and health-check node ports.
    pub node_ports_v4: NodePortAddresses,
    /// IPv6 addresses that answer NodePorts and health-check node ports.
    pub node_ports_v6: NodePortAddresses,
    /// Addresses of the machine's interfaces, sorted, without Services' in mode ipvs; or empty.
    pub interfaces: Vec<IpAddr>,
    /// The addresses that programs of the node connect to.
    pub dialled: Arc<DialPolicy>,
}

impl NodeInputs {
    /// How rules of a family recognise local pods. `None` when the rules cannot recognise local
    /// pods.
    pub fn detector(&self, family: Family) -> Option<&LocalDetector> {
        match family {
            Family::V4 => self.detector_v4.as_ref(),
            Family::V6 => self.detector_v6.as_ref(),
        }
    }

    /// The addresses of a family that answer NodePorts.
    pub fn node_ports(&self, family: Family) -> &NodePortAddresses {
        match family {
            Family::V4 => &self.node_ports_v4,
            Family::V6 => &self.node_ports_v6,
        }
    }

    /// The addresses at which NodePorts answer in mode IPVS, which programs each of them.
    pub fn listed_node_ports(&self, family: Family) -> Vec<IpAddr> {
        let all = match self.node_ports(family) {
            NodePortAddresses::All => &self.interfaces,
            NodePortAddresses::Only(addresses) => addresses,
        };
        all.iter().filter(|address| Family::of(**address) == family && !address.is_loopback()).copied().collect()
    }

    /// The settings on which the forwarding table of a mode depends. Mode IPVS programs no NodePort
    /// in a family of which the node has no address.
    pub fn settings(&self, mode: Mode) -> explain::NodeSettings {
        let node_ports = |family| match mode {
            Mode::Ipvs if self.listed_node_ports(family).is_empty() => NodePortAddresses::Only(Vec::new()),
            _ => self.node_ports(family).clone(),
        };
        explain::NodeSettings {
            mode,
            masquerade: MasqueradeConfig {
                detector_v4: self.detector_v4.clone(),
                detector_v6: self.detector_v6.clone(),
                ..MasqueradeConfig::default()
            },
            node_ports_v4: node_ports(Family::V4),
            node_ports_v6: node_ports(Family::V6),
            localhost_node_ports: false,
        }
    }
}

impl NodeSettings {
    /// Copies the relevant part of the settings.
    pub fn of(settings: &Settings) -> Self {
        Self {
            detect_local: settings.detect_local.clone(),
            node_ports: settings.node_ports.clone(),
            bind_address: settings.bind_address,
            ..Self::default()
        }
    }

    /// The ranges of all pods that the settings name: `--pod-ranges` and the cluster CIDRs.
    pub fn ranges_of_pods(&self) -> Vec<IpNet> {
        let DetectLocal::ClusterCidr(cidrs) = &self.detect_local else { return self.pod_ranges.clone() };
        [&self.pod_ranges[..], cidrs].concat()
    }

    fn dialled(&self, node: Option<&Node>, interfaces: &[IpAddr]) -> DialPolicy {
        if !self.dials {
            return DialPolicy::default();
        }
        let (pod_cidrs, addresses) = node.map(|node| (&*node.pod_cidrs, &*node.addresses)).unwrap_or_default();
        let ranges = [&self.ranges_of_pods(), pod_cidrs].concat();
        let policy = DialPolicy::new(ranges, interfaces.iter().chain(addresses).copied());
        DialPolicy { has_proxy: self.has_proxy, ..policy }
    }

    /// True when the result of [`Self::resolve`] depends on the Node.
    pub fn needs_node(&self) -> bool {
        self.detect_local == DetectLocal::NodeCidr || self.node_ports.primary
    }

    /// True when the result of [`Self::resolve`] depends on the addresses of the interfaces.
    pub fn needs_interfaces(&self) -> bool {
        self.dials || !self.node_ports.cidrs.is_empty()
    }

    /// Resolves the settings, with the addresses of the machine's `interfaces`, sorted, unique.
    pub fn resolve(&self, node: Option<&Node>, interfaces: &[IpAddr]) -> NodeInputs {
        NodeInputs {
            interfaces: interfaces.to_vec(),
            dialled: Arc::new(self.dialled(node, interfaces)),
            detector_v4: self.detector(Family::V4, node),
            detector_v6: self.detector(Family::V6, node),
            node_ports_v4: self.addresses(Family::V4, node, interfaces),
            node_ports_v6: self.addresses(Family::V6, node, interfaces),
        }
    }

    /// Returns the settings that could not be resolved, as one sentence for each setting and
    /// family. Families without affected Services are left out, for example IPv6 in an IPv4
    /// cluster. A setting that needs the Node is left out until the Node is known.
    pub fn complaints(&self, is_node_known: bool, inputs: &NodeInputs, demand: &Demand) -> Vec<String> {
        let mut complaints = Vec::new();
        for family in Family::BOTH.into_iter().filter(|family| demand.of(*family).services > 0) {
            let missing = match &self.detect_local {
                DetectLocal::ClusterCidr(cidrs) if !cidrs.is_empty() => {
                    Some(format!("clusterCIDR has no {family} range: add one"))
                }
                DetectLocal::NodeCidr if is_node_known => Some(format!(
                    "detectLocalMode is NodeCIDR, and the Node has no {family} range among its podCIDRs: add such a range to the Node, or choose another mode"
                )),
                _ => None,
            };
            if let Some(missing) = missing.filter(|_| inputs.detector(family).is_none()) {
                complaints.push(format!(
                    "{missing}. In {family}, connections to ClusterIPs keep their source address, and rules cannot distinguish pods from other clients"
                ));
            }
            let is_dialled = |range: &IpNet| Family::of(range.addr()) == family;
            if self.dials && !inputs.dialled.ranges.iter().any(is_dialled) {
                complaints.push(format!(
                    "no {family} range of pods is known, so neither the proxy of mode userspace nor health checks connect to {family} endpoints: add the range to --pod-ranges"
                ));
            }
            let has_no_address = *inputs.node_ports(family) == NodePortAddresses::Only(vec![]);
            if has_no_address && demand.of(family).with_node_ports > 0 && (is_node_known || !self.needs_node()) {
                complaints.push(format!(
                    "nodePortAddresses selects no {family} address of this node, so no {family} NodePort answers: add a range that contains an {family} address of the node"
                ));
            }
        }
        complaints
    }

    fn detector(&self, family: Family, node: Option<&Node>) -> Option<LocalDetector> {
        let first = |cidrs: &[IpNet]| {
            cidrs.iter().find(|cidr| Family::of(cidr.addr()) == family).map(|cidr| LocalDetector::Cidr(*cidr))
        };
        match &self.detect_local {
            DetectLocal::ClusterCidr(cidrs) => first(cidrs),
            DetectLocal::NodeCidr => node.and_then(|node| first(&node.pod_cidrs)),
            DetectLocal::BridgeInterface(name) => Some(LocalDetector::BridgeInterface(name.clone())),
            DetectLocal::InterfaceNamePrefix(prefix) => Some(LocalDetector::InterfaceNamePrefix(prefix.clone())),
        }
    }

    fn addresses(&self, family: Family, node: Option<&Node>, interfaces: &[IpAddr]) -> NodePortAddresses {
        let NodePortSelector { primary, cidrs } = &self.node_ports;
        let of_family = || cidrs.iter().filter(|cidr| Family::of(cidr.addr()) == family);
        // As in kube-proxy, the ranges of one family do not restrict the other family, and a range
        // of all addresses restricts no family.
        if (!primary && of_family().next().is_none()) || of_family().any(|cidr| cidr.prefix_len() == 0) {
            return NodePortAddresses::All;
        }
        let is_selected = |address: &&IpAddr| of_family().any(|cidr| cidr.contains(*address));
        let mut selected: Vec<IpAddr> = interfaces.iter().filter(is_selected).copied().collect();
        if *primary {
            let own = node.map(|node| node.addresses.as_slice()).unwrap_or_default();
            let mut own = node_addresses(own, self.bind_address);
            own.retain(|address| Family::of(*address) == family && !selected.contains(address));
            selected.append(&mut own);
        }
        NodePortAddresses::Only(selected)
    }
}

/// The node's own addresses, one per family: the operator's `bind_address`, otherwise the first
/// address of that family in `of_node`. A Node lists InternalIPs before ExternalIPs.
pub fn node_addresses(of_node: &[IpAddr], bind_address: Option<IpAddr>) -> Vec<IpAddr> {
    let mut addresses: Vec<IpAddr> = bind_address.into_iter().collect();
    for address in of_node {
        if !addresses.iter().any(|other| Family::of(*other) == Family::of(*address)) {
            addresses.push(*address);
        }
    }
    addresses
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use headgate_core::{Dirty, Protocol, Service, ServiceKey, ServicePort, State};

    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    /// The node's own addresses and these ranges.
    fn primary(cidrs: &[&str]) -> NodePortSelector {
        NodePortSelector { primary: true, cidrs: cidrs.iter().map(|cidr| cidr.parse().unwrap()).collect() }
    }

    fn node(pod_cidrs: &[&str], addresses: &[&str]) -> Node {
        Node {
            name: "n".into(),
            zone: None,
            pod_cidrs: pod_cidrs.iter().map(|cidr| cidr.parse().unwrap()).collect(),
            addresses: addresses.iter().map(|address| ip(address)).collect(),
            going_away: false,
        }
    }

    // rows: 112
    #[test]
    fn row_112_the_operators_address_takes_precedence_over_the_addresses_of_the_node() {
        let of_node = [ip("10.0.0.1"), ip("10.0.0.2"), ip("fd00::1")];
        assert_eq!(node_addresses(&of_node, None), [ip("10.0.0.1"), ip("fd00::1")]);
        assert_eq!(node_addresses(&of_node, Some(ip("192.0.2.1"))), [ip("192.0.2.1"), ip("fd00::1")]);
        assert_eq!(node_addresses(&of_node, Some(ip("2001:db8::1"))), [ip("2001:db8::1"), ip("10.0.0.1")]);
        assert_eq!(node_addresses(&[], None), [] as [IpAddr; 0]);
    }

    // rows: 113
    #[test]
    fn row_113_each_mode_resolves_to_a_detector_for_each_family() {
        let resolve = |detect_local, node: Option<&Node>| {
            let inputs = NodeSettings { detect_local, ..NodeSettings::default() }.resolve(node, &[]);
            (inputs.detector_v4, inputs.detector_v6)
        };
        let cidr = |text: &str| Some(LocalDetector::Cidr(text.parse().unwrap()));
        let cluster = DetectLocal::ClusterCidr(vec!["10.0.0.0/8".parse().unwrap()]);
        assert_eq!(resolve(cluster, None), (cidr("10.0.0.0/8"), None));
        assert_eq!(resolve(DetectLocal::NodeCidr, None), (None, None));
        let both = node(&["fd00:1::/64", "10.1.0.0/24", "10.2.0.0/24"], &[]);
        assert_eq!(resolve(DetectLocal::NodeCidr, Some(&both)), (cidr("10.1.0.0/24"), cidr("fd00:1::/64")));
        let bridge = Some(LocalDetector::BridgeInterface("cni0".into()));
        assert_eq!(resolve(DetectLocal::BridgeInterface("cni0".into()), None), (bridge.clone(), bridge));
        let prefix = Some(LocalDetector::InterfaceNamePrefix("veth".into()));
        assert_eq!(resolve(DetectLocal::InterfaceNamePrefix("veth".into()), None), (prefix.clone(), prefix));
    }

    /// The demand of Services with these ClusterIPs, each with a NodePort.
    fn demand(cluster_ips: &[&str]) -> Demand {
        let mut state = State::default();
        for cluster_ip in cluster_ips {
            let port = ServicePort { name: "".into(), protocol: Protocol::Tcp, port: 80, node_port: 30_000 };
            let service = Service::new(ServiceKey::new("ns", cluster_ip), vec![ip(cluster_ip)], vec![port]);
            state.apply(service.into(), &mut Dirty::default());
        }
        *state.demand()
    }

    // rows: 113
    #[test]
    fn row_113_unresolved_settings_are_reported_for_families_with_services() {
        let both = demand(&["10.96.0.1", "fd00::1"]);
        let complaints = |settings: &NodeSettings, node: Option<&Node>, demand: &Demand| {
            settings.complaints(node.is_some(), &settings.resolve(node, &[]), demand)
        };
        let none = [] as [String; 0];
        let detect = |detect_local| NodeSettings { detect_local, ..NodeSettings::default() };
        let one = detect(DetectLocal::ClusterCidr(vec!["10.0.0.0/8".parse().unwrap()]));
        assert!(complaints(&one, None, &both)[0].starts_with("clusterCIDR has no IPv6 range"));
        // A cluster without IPv6 Services needs no IPv6 range.
        assert_eq!(complaints(&one, None, &demand(&["10.96.0.1"])), none);
        assert_eq!(complaints(&one, None, &Demand::default()), none);
        assert!(complaints(&one, None, &demand(&["fd00::1"]))[0].contains("has no IPv6 range"));
        let by_node = detect(DetectLocal::NodeCidr);
        assert_eq!(complaints(&by_node, None, &both), none);
        let v4_node = node(&["10.1.0.0/24"], &["192.0.2.1"]);
        assert_eq!(complaints(&by_node, Some(&v4_node), &demand(&["10.96.0.1"])), none);
        assert!(complaints(&by_node, Some(&v4_node), &both)[0].contains("no IPv6 range among its podCIDRs"));
        assert_eq!(complaints(&by_node, Some(&node(&[], &[])), &both).len(), 2);
        assert_eq!(complaints(&NodeSettings::default(), None, &both), none);
        let primary = NodeSettings { node_ports: primary(&[]), ..NodeSettings::default() };
        assert_eq!(complaints(&primary, None, &both), none);
        assert_eq!(complaints(&primary, Some(&v4_node), &demand(&["10.96.0.1"])), none);
        assert!(complaints(&primary, Some(&v4_node), &both)[0].contains("no IPv6 NodePort answers"));
    }

    #[test]
    fn programs_of_the_node_connect_to_the_ranges_of_pods_and_not_to_the_node() {
        let range = |text: &str| text.parse::<IpNet>().unwrap();
        let settings = NodeSettings {
            pod_ranges: vec![range("fd00::/16")],
            detect_local: DetectLocal::ClusterCidr(vec![range("10.244.0.0/16")]),
            dials: true,
            has_proxy: true,
            ..NodeSettings::default()
        };
        let own = node(&["10.9.0.0/24"], &["10.244.0.9"]);
        let inputs = settings.resolve(Some(&own), &["10.244.0.1", "127.0.0.1"].map(ip));
        let policy = &inputs.dialled;
        assert!(["10.244.1.1", "10.9.0.1", "fd00::1"].iter().all(|address| policy.permits(ip(address))));
        let left_out = ["10.244.0.1", "10.244.0.9", "10.10.0.1", "::1"];
        assert!(policy.has_proxy && !left_out.iter().any(|address| policy.permits(ip(address))));
        let idle = NodeSettings { dials: false, ..settings.clone() };
        assert_eq!(*idle.resolve(Some(&own), &[]).dialled, DialPolicy::default());
        assert!(settings.needs_interfaces() && !idle.needs_interfaces());
        let v4_only = NodeSettings { pod_ranges: Vec::new(), ..settings };
        let complaints =
            v4_only.complaints(true, &v4_only.resolve(Some(&own), &[]), &demand(&["10.96.0.1", "fd00::1"]));
        assert!(
            complaints.iter().any(|sentence| sentence.starts_with("no IPv6 range of pods is known")),
            "{complaints:?}"
        );
        assert!(!complaints.iter().any(|sentence| sentence.contains("no IPv4 range of pods")), "{complaints:?}");
    }

    // rows: 46, 47
    #[test]
    fn row_47_ranges_select_interface_addresses_and_do_not_restrict_the_other_family() {
        let interfaces = ["10.0.0.1", "127.0.0.1", "192.0.2.1", "::1", "fd00::1"].map(ip);
        let resolve = |cidrs: &[&str]| {
            let node_ports = NodePortSelector { primary: false, ..primary(cidrs) };
            let inputs = NodeSettings { node_ports, ..NodeSettings::default() }.resolve(None, &interfaces);
            (inputs.node_ports_v4, inputs.node_ports_v6)
        };
        let only = |addresses: &[&str]| NodePortAddresses::Only(addresses.iter().map(|a| ip(a)).collect());
        assert_eq!(resolve(&["10.0.0.0/8", "127.0.0.0/8"]), (only(&["10.0.0.1", "127.0.0.1"]), NodePortAddresses::All));
        assert_eq!(resolve(&["fd00::/16"]), (NodePortAddresses::All, only(&["fd00::1"])));
        assert_eq!(resolve(&["0.0.0.0/0", "10.0.0.0/8"]), (NodePortAddresses::All, NodePortAddresses::All));
        assert_eq!(resolve(&["198.51.100.0/24"]).0, only(&[]));
        assert_eq!(NodeSettings::default().resolve(None, &interfaces).node_ports_v4, NodePortAddresses::All);
    }

    // rows: 47
    #[test]
    fn row_47_primary_is_the_nodes_own_address_of_each_family() {
        let settings = NodeSettings { node_ports: primary(&[]), ..NodeSettings::default() };
        let inputs = settings.resolve(Some(&node(&[], &["10.0.0.1", "192.0.2.1"])), &[]);
        assert_eq!(inputs.node_ports_v4, NodePortAddresses::Only(vec![ip("10.0.0.1")]));
        assert_eq!(inputs.node_ports_v6, NodePortAddresses::Only(vec![]));
        assert!(settings.needs_node() && !settings.needs_interfaces());
        // Ranges add addresses, and a range of all addresses makes all addresses answer.
        let resolve = |cidrs: &[&str]| {
            let settings = NodeSettings { node_ports: primary(cidrs), ..NodeSettings::default() };
            assert!(settings.needs_node() && settings.needs_interfaces());
            let interfaces = ["10.0.0.1", "127.0.0.1", "::1"].map(ip);
            let inputs = settings.resolve(Some(&node(&[], &["10.0.0.1", "fd00::1"])), &interfaces);
            (inputs.node_ports_v4, inputs.node_ports_v6)
        };
        let only = |addresses: &[&str]| NodePortAddresses::Only(addresses.iter().map(|a| ip(a)).collect());
        let localhost = resolve(&["127.0.0.0/8", "::1/128"]);
        assert_eq!(localhost, (only(&["127.0.0.1", "10.0.0.1"]), only(&["::1", "fd00::1"])));
        assert_eq!(resolve(&["10.0.0.0/8"]), (only(&["10.0.0.1"]), only(&["fd00::1"])));
        assert_eq!(resolve(&["0.0.0.0/0"]), (NodePortAddresses::All, only(&["fd00::1"])));
    }

    #[test]
    fn mode_ipvs_answers_no_node_port_in_a_family_without_an_address() {
        let inputs = NodeSettings::default().resolve(None, &["10.0.0.1", "127.0.0.1", "::1"].map(ip));
        assert_eq!(inputs.listed_node_ports(Family::V4), [ip("10.0.0.1")]);
        assert_eq!(inputs.settings(Mode::Ipvs).node_ports_v4, NodePortAddresses::All);
        assert_eq!(inputs.settings(Mode::Ipvs).node_ports_v6, NodePortAddresses::Only(vec![]));
        assert_eq!(inputs.settings(Mode::Nftables).node_ports_v6, NodePortAddresses::All);
    }
}
