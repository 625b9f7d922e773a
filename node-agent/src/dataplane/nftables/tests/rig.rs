//! A ledger, its rules, and the kernel in a network namespace.

use std::{
    cell::Cell,
    collections::{BTreeMap, BTreeSet},
    io::ErrorKind,
    net::{IpAddr, UdpSocket},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use headgate_core::{
    Change, ClientIpAffinity, Dirty, Endpoint, EndpointPort, Family, FixedState, NodeFacts, Placement, Protocol,
    Service, ServiceKey, ServicePort, State, TrafficPolicy,
    iptables::NodePortAddresses,
    nftables::{Element, NftablesConfig, NftablesLedger, NftablesPlan},
    view::LocalDetector,
};
use headgate_oracle::nftables::NftablesDump;
use nftables_netlink::{Expression, Nftables, Table, Transaction};
use nix::sched::{CloneFlags, unshare};

use super::super::{
    dump, elements,
    layout::{Layout, LayoutConfig, table_name},
};

/// The protocols, with their numbers.
pub(super) const PROTOCOLS: [(Protocol, u8); 3] = [(Protocol::Tcp, 6), (Protocol::Udp, 17), (Protocol::Sctp, 132)];

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

/// A Service with consistent-hash. One port: each has thousands of elements.
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

/// A node. Its network namespace is that of the test's thread, until the thread makes another rig.
pub(super) struct Rig {
    pub(super) family: Family,
    pub(super) config: LayoutConfig,
    pub(super) kernel: Nftables,
    pub(super) state: State,
    pub(super) node: NodeFacts,
    pub(super) ledger: NftablesLedger,
    pub(super) layout: Layout,
}

impl Rig {
    /// Programs a kernel without Services.
    ///
    /// # Panics
    /// The process may not make network namespaces.
    pub(super) fn new(family: Family) -> Self {
        Self::with(family, true)
    }

    /// Programs a kernel without Services, with or without `fib`.
    pub(super) fn with(family: Family, has_fib: bool) -> Self {
        unshare(CloneFlags::CLONE_NEWNET)
            .expect("this test makes a network namespace and needs root: run the tests as root (`sudo make test`)");
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
            kernel: Nftables::open().unwrap(),
            state: State::default(),
            node: NodeFacts { addresses: vec![address(family, NODES, 1)], ..NodeFacts::named("here") },
            ledger: NftablesLedger::new(NftablesConfig::new(family)),
            layout: Layout::default(),
            config,
        };
        let plan =
            rig.ledger.full(&FixedState(&rig.state, &rig.node), headgate_core::nftables::ExistingElements::default());
        rig.commit(&plan);
        rig
    }

    /// Applies changes in one transaction, as the agent does.
    pub(super) fn apply(&mut self, changes: impl IntoIterator<Item = Change>) -> NftablesPlan {
        let mut dirty = Dirty::default();
        changes.into_iter().for_each(|change| _ = self.state.apply(change, &mut dirty));
        let plan = self.ledger.changed(&self.state, &self.node, &dirty);
        self.commit(&plan);
        plan
    }

    /// Replaces the addresses of the node's interfaces, in a transaction of their own.
    pub(super) fn set_interfaces(&mut self, interfaces: Vec<IpAddr>) {
        self.config.interfaces = interfaces;
        self.commit(&NftablesPlan::default());
    }

    /// Changes which addresses answer NodePorts.
    pub(super) fn set_node_port_addresses(&mut self, addresses: NodePortAddresses) {
        self.config.node_port_addresses = addresses;
        self.commit(&NftablesPlan::default());
    }

    /// The table in the kernel.
    pub(super) fn dump(&mut self) -> NftablesDump {
        dump::read(&mut self.kernel, &table_name(self.family)).unwrap().unwrap()
    }

    pub(super) fn elements(&mut self, set: &str) -> Vec<nftables_netlink::Element> {
        let mut elements = self.kernel.elements(&table_name(self.family), set).unwrap();
        elements.sort_by(|a, b| a.key.cmp(&b.key));
        elements
    }

    /// Makes clients and endpoints addresses of this host, so that packets of a test reach the
    /// endpoints, each of which gets a socket for UDP.
    pub(super) fn serve(&self, endpoints: impl IntoIterator<Item = u8>) -> Servers {
        let (option, all, name) = match self.family {
            Family::V4 => ("-4", "10.0.0.0/8", "ipv4"),
            Family::V6 => ("-6", "fd00::/16", "ipv6"),
        };
        for arguments in [&["link", "set", "lo", "up"][..], &[option, "route", "add", "local", all, "dev", "lo"]] {
            assert!(Command::new("ip").args(arguments).status().unwrap().success(), "ip {arguments:?}");
        }
        std::fs::write(format!("/proc/sys/net/{name}/ip_nonlocal_bind"), "1").unwrap();
        let open = |last| {
            let socket = UdpSocket::bind((address(self.family, PODS, last), 8080)).unwrap();
            socket.set_nonblocking(true).unwrap();
            socket
        };
        let sockets = endpoints.into_iter().map(open).collect();
        Servers { family: self.family, sockets, client_port: Cell::new(10_000) }
    }

    fn commit(&mut self, plan: &NftablesPlan) {
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

/// Endpoints that receive datagrams.
pub(super) struct Servers {
    family: Family,
    sockets: Vec<UdpSocket>,
    /// The source port of the last connection. A port that comes again would belong to an earlier
    /// connection, whose packets conntrack sends where they went before.
    client_port: Cell<u16>,
}

impl Servers {
    /// The endpoint that a new connection of a client to the UDP port of a Service reaches. The
    /// client is the pod with this number, which has an address of its own.
    pub(super) fn reached(&self, client: u32, service: u8) -> IpAddr {
        let client = match address(self.family, PODS, 0) {
            IpAddr::V4(base) => IpAddr::from((u32::from(base) + 256 + client).to_be_bytes()),
            IpAddr::V6(base) => IpAddr::from((u128::from(base) + (u128::from(client + 1) << 64)).to_be_bytes()),
        };
        self.client_port.update(|port| port + 1);
        let socket = UdpSocket::bind((client, self.client_port.get())).unwrap();
        socket.send_to(b"hello", (address(self.family, CLUSTER, service), 80)).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while Instant::now() < deadline {
            for server in &self.sockets {
                match server.recv(&mut [0; 16]) {
                    Ok(_) => return server.local_addr().unwrap().ip(),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                    Err(error) => panic!("{error}"),
                }
            }
            thread::yield_now();
        }
        panic!("a datagram of {client} reached no endpoint");
    }

    /// The endpoints that these many new connections of one client reach.
    pub(super) fn reached_often(&self, client: u32, service: u8, connections: u32) -> BTreeSet<IpAddr> {
        (0..connections).map(|_| self.reached(client, service)).collect()
    }
}
