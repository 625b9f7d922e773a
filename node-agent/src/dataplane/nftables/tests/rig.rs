//! A ledger, its rules, and a kernel.

use std::{collections::BTreeMap, net::IpAddr};

use headgate_core::{
    Change, ClientIpAffinity, Dirty, Endpoint, EndpointPort, Family, FixedState, NodeFacts, Placement, Protocol,
    Service, ServiceKey, ServicePort, State, TrafficPolicy,
    iptables::NodePortAddresses,
    masquerade::LocalDetector,
    nftables::{Element, Ledger, NftablesConfig, Plan},
};
use nftables_netlink::{Expression, Kernel, Table, Transaction};

use super::super::{
    elements,
    layout::{Layout, LayoutConfig, table_name},
};

/// The protocols, with their numbers.
pub(super) const PROTOCOLS: [(Protocol, u8); 3] = [(Protocol::Tcp, 6), (Protocol::Udp, 17), (Protocol::Sctp, 132)];

/// An address of the family, which ends with `last`: `[network, last]`.
pub(super) fn address(family: Family, network: u8, last: u8) -> IpAddr {
    match family {
        Family::V4 => [10, network, 0, last].into(),
        Family::V6 => [0xfd00, network.into(), 0, 0, 0, 0, 0, last.into()].into(),
    }
}

/// The network of ClusterIPs.
pub(super) const CLUSTER: u8 = 96;
/// The network of pods.
pub(super) const PODS: u8 = 244;
/// The network of nodes.
pub(super) const NODES: u8 = 10;
/// The network of external clients.
pub(super) const CLIENTS: u8 = 50;

pub(super) fn key(number: u8) -> ServiceKey {
    ServiceKey::new("ns", &format!("svc{number}"))
}

/// A Service with one TCP, UDP and SCTP port 80, and a NodePort.
pub(super) fn service(family: Family, number: u8) -> Service {
    let ports = PROTOCOLS.map(|(protocol, _)| ServicePort {
        name: format!("{protocol:?}").as_str().into(),
        protocol,
        port: 80,
        node_port: 30_000 + u16::from(number),
    });
    Service {
        external_ips: vec![address(family, CLIENTS, number)],
        load_balancer_ips: vec![address(family, CLIENTS, 100 + number)],
        ..Service::new(key(number), vec![address(family, CLUSTER, number)], ports.into())
    }
}

/// Services of all shapes in a family: with and without affinity, with both policies, with and
/// without source ranges, and with consistent-hash.
pub(super) fn shapes(family: Family) -> Vec<Service> {
    let mut all = Vec::new();
    for affinity in [None, Some(10), Some(10_800)] {
        for policy in [TrafficPolicy::Cluster, TrafficPolicy::Local] {
            for has_ranges in [false, true] {
                let number = u8::try_from(all.len() + 1).unwrap();
                let range = address(family, CLIENTS, 200).into();
                all.push(Service {
                    session_affinity: affinity.map(|timeout_seconds| ClientIpAffinity { timeout_seconds }),
                    external_traffic_policy: policy,
                    internal_traffic_policy: policy,
                    load_balancer_source_ranges: if has_ranges { vec![range] } else { vec![] },
                    ..service(family, number)
                });
            }
        }
    }
    for affinity in [None, Some(10)] {
        let number = u8::try_from(all.len() + 1).unwrap();
        all.push(Service {
            session_affinity: affinity.map(|timeout_seconds| ClientIpAffinity { timeout_seconds }),
            external_traffic_policy: TrafficPolicy::Local,
            internal_traffic_policy: TrafficPolicy::Local,
            ..hashed_service(family, number)
        });
    }
    all
}

/// A Service with consistent-hash. It has only one port, because each port has thousands of
/// elements.
pub(super) fn hashed_service(family: Family, number: u8) -> Service {
    let mut service = service(family, number);
    service.ports.rotate_left(usize::from(number) % PROTOCOLS.len());
    service.ports.truncate(1);
    Service { load_balancing: "consistent-hash".into(), ..service }
}

/// A pod of a Service on a node. Its ports have number 8080.
pub(super) fn endpoint(family: Family, last: u8, node: &str) -> Endpoint {
    let ports = PROTOCOLS.map(|(protocol, _)| EndpointPort::new(format!("{protocol:?}"), protocol, 8080));
    Endpoint { placement: Placement::on(node).into(), ..Endpoint::new(address(family, PODS, last), ports.into()) }
}

/// How much smaller the maps of clients are than those of the agent, so that tests can fill them.
pub(super) const SHRINK: u32 = 1024;
/// The number of slots of hashed groups, so that tests are fast.
const HASHED_SLOTS: u32 = 64;

/// Whether the shrunk maps have an element.
pub(super) fn is_kept(element: &Element) -> bool {
    !matches!(element, Element::Endpoint(_, HASHED_SLOTS.., ..) | Element::AffinityEndpoint(_, HASHED_SLOTS.., ..))
}

fn shrink(layout: &mut Layout) {
    for set in layout.sets.values_mut() {
        set.size = set.size.map(|size| size / SHRINK);
    }
    let rules = layout.chains.values_mut().flat_map(|chain| &mut chain.rules);
    for expression in rules.flat_map(|rule| &mut rule.expressions) {
        if let Expression::Hash { modulus, .. } = expression {
            *modulus = HASHED_SLOTS;
        }
        if let Expression::DynamicSet(change) = expression {
            for limit in &mut change.expressions {
                let Expression::Limit { rate, burst, .. } = limit else { continue };
                *rate /= u64::from(SHRINK);
                *burst /= SHRINK;
            }
        }
    }
}

pub(super) struct Rig<K> {
    pub(super) family: Family,
    pub(super) config: LayoutConfig,
    pub(super) kernel: K,
    pub(super) state: State,
    pub(super) node: NodeFacts,
    pub(super) ledger: Ledger,
    pub(super) layout: Layout,
}

impl<K: Kernel> Rig<K> {
    /// Programs a kernel without Services.
    pub(super) fn new(family: Family, kernel: K) -> Self {
        Self::with(family, kernel, true)
    }

    /// Programs a kernel without Services, with or without `fib`.
    pub(super) fn with(family: Family, kernel: K, has_fib: bool) -> Self {
        let pods: IpAddr = address(family, PODS, 0);
        let detector = ipnet::IpNet::new(pods, if family == Family::V4 { 16 } else { 32 }).unwrap();
        let config = LayoutConfig {
            family,
            detector: Some(LocalDetector::Cidr(detector)),
            node_port_addresses: NodePortAddresses::All,
            localhost_node_ports: true,
            interfaces: vec![address(family, NODES, 1)],
            ping_answered_by: Some(address(family, NODES, 1)),
            has_fib,
            counts_services: false,
            conntrack_tcp_be_liberal: false,
            listeners: BTreeMap::new(),
        };
        let mut rig = Self {
            family,
            kernel,
            state: State::default(),
            node: NodeFacts { addresses: vec![address(family, NODES, 1)], ..NodeFacts::named("here") },
            ledger: Ledger::new(NftablesConfig::new(family)),
            layout: Layout::default(),
            config,
        };
        let plan = rig.ledger.full(&FixedState(&rig.state, &rig.node), headgate_core::nftables::Existing::default());
        rig.commit(&plan);
        rig
    }

    /// Applies changes in one transaction, as the agent does.
    pub(super) fn apply(&mut self, changes: impl IntoIterator<Item = Change>) -> Plan {
        let mut dirty = Dirty::default();
        for change in changes {
            self.state.apply(change, &mut dirty);
        }
        let plan = self.ledger.changed(&self.state, &self.node, &dirty);
        self.commit(&plan);
        plan
    }

    /// Replaces the addresses of the node's interfaces, in a transaction of their own.
    pub(super) fn set_interfaces(&mut self, interfaces: Vec<IpAddr>) {
        self.config.interfaces = interfaces;
        self.commit(&Plan::default());
    }

    /// Changes which addresses answer NodePorts.
    pub(super) fn set_node_port_addresses(&mut self, addresses: NodePortAddresses) {
        self.config.node_port_addresses = addresses;
        self.commit(&Plan::default());
    }

    fn commit(&mut self, plan: &Plan) {
        let table = table_name(self.family);
        let mut transaction = Transaction::new();
        transaction.add_table(&Table::new(table.clone()));
        let mut layout = Layout::new(&self.config, self.ledger.shape());
        shrink(&mut layout);
        self.layout.change_to(&layout, &table, &mut transaction);
        let delete: Vec<Element> = plan.delete.iter().copied().filter(is_kept).collect();
        elements::write(&delete, plan.added(&self.ledger).filter(is_kept), &table, &mut transaction);
        self.kernel.commit(&transaction).unwrap();
        self.layout = layout;
    }
}
