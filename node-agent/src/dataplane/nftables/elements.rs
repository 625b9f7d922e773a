//! Elements of [`headgate_core::nftables`] as the kernel has them.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use headgate_core::{
    Family, Protocol,
    frontends::Frontend,
    nftables::{Element, Lookup, MasqueradeSources, Refusal},
};
use ipnet::IpNet;
use nftables_netlink::{DataType, ElementData, Set, TableName, Value};

/// Map from a frontend to its group, for each [`Lookup`].
pub(super) fn lookup_map(lookup: Lookup) -> &'static str {
    match lookup {
        Lookup::Service => "services",
        Lookup::Inside => "inside-services",
        Lookup::NodePort => "node-ports",
        Lookup::InsideNodePort => "inside-node-ports",
    }
}

/// Names of maps and sets.
pub(super) mod names {
    pub(in super::super) const AFFINITIES: &str = "affinities";
    pub(in super::super) const CLUSTER_IPS: &str = "cluster-ips";
    pub(in super::super) const COUNTS: &str = "counts";
    pub(in super::super) const ENDPOINTS: &str = "endpoints";
    pub(in super::super) const GUARDED: &str = "guarded";
    pub(in super::super) const HAIRPINS: &str = "hairpins";
    pub(in super::super) const MASQUERADE: &str = "masquerade";
    pub(in super::super) const MASQUERADE_NODE_PORTS: &str = "masquerade-node-ports";
    pub(in super::super) const MEMBERS: &str = "members";
    pub(in super::super) const UNSERVED: &str = "unserved";
    pub(in super::super) const UNSERVED_NODE_PORTS: &str = "unserved-node-ports";
    /// The start of the names of sets of admitted clients; the prefix length follows.
    pub(in super::super) const ADMITTED: &str = "admitted-";
}

/// The set of admitted clients for a prefix length.
pub(super) fn admitted(prefix_length: u8) -> String {
    format!("{}{prefix_length}", names::ADMITTED)
}

/// The type of an address of a family.
pub(super) fn address_type(family: Family) -> DataType {
    match family {
        Family::V4 => DataType::Ipv4Address,
        Family::V6 => DataType::Ipv6Address,
    }
}

/// The sets and maps that exist whatever the services are.
pub(super) fn fixed_sets(table: &TableName, family: Family) -> Vec<Set> {
    use DataType::{Mark, Port, Protocol};
    let address = address_type(family);
    let (frontend, node_port) = ([address, Protocol, Port], [Protocol, Port]);
    let map = |name: &str, key: &[DataType], data: &[DataType]| Set::map(table, name, key, data);
    let mut sets = vec![
        map(names::AFFINITIES, &[Mark], &[Mark]).with_key_in_host_order(),
        map(names::COUNTS, &[Mark], &[Mark]).with_key_in_host_order(),
        Set::map(table, names::ENDPOINTS, &[Mark, Mark], &[address, Port]),
        map(names::MASQUERADE, &frontend, &[Mark]),
        map(names::MASQUERADE_NODE_PORTS, &node_port, &[Mark]),
        map(names::UNSERVED, &frontend, &[Mark]),
        map(names::UNSERVED_NODE_PORTS, &node_port, &[Mark]),
        Set::new(table, names::CLUSTER_IPS, &[address]),
        Set::new(table, names::GUARDED, &frontend),
        Set::new(table, names::HAIRPINS, &[address, address]),
        Set::new(table, names::MEMBERS, &[Mark, address, Port]),
    ];
    sets.extend(Lookup::ALL.into_iter().map(|lookup| {
        let key: &[DataType] = if matches!(lookup, Lookup::Service | Lookup::Inside) { &frontend } else { &node_port };
        map(lookup_map(lookup), key, &[Mark])
    }));
    sets
}

/// The set of clients that source ranges of a prefix length admit.
pub(super) fn admitted_set(table: &TableName, family: Family, prefix_length: u8) -> Set {
    let address = address_type(family);
    Set::new(table, admitted(prefix_length), &[address, DataType::Protocol, DataType::Port, address])
}

/// The number of a value in a map.
pub(super) fn refusal_number(refusal: Refusal) -> u32 {
    match refusal {
        Refusal::Reject => 1,
        Refusal::Drop => 2,
    }
}

/// The number of a value in a map.
pub(super) fn masquerade_number(sources: MasqueradeSources) -> u32 {
    match sources {
        MasqueradeSources::Nobody => 1,
        MasqueradeSources::Outside => 2,
        MasqueradeSources::Node => 3,
        MasqueradeSources::Everyone => 4,
    }
}

fn protocol_number(protocol: Protocol) -> u8 {
    match protocol {
        Protocol::Tcp => 6,
        Protocol::Udp => 17,
        Protocol::Sctp => 132,
    }
}

fn frontend_key(frontend: Frontend) -> Vec<Value> {
    let (address, protocol, port) = match frontend {
        Frontend::Address(address, protocol, port) => (Some(address), protocol, port),
        Frontend::NodePort(_, protocol, port) => (None, protocol, port),
    };
    let address = address.map(Value::from);
    address.into_iter().chain([Value::byte(protocol_number(protocol)), Value::port(port)]).collect()
}

/// The set of an element, and the element in the form of the kernel.
pub(super) fn encode(element: &Element) -> (String, nftables_netlink::Element) {
    let of = |name: &str, key: &[Value]| (name.to_owned(), nftables_netlink::Element::new(Value::concatenation(key)));
    let map = |name: &str, key: &[Value], value: Value| {
        let (name, element) = of(name, key);
        (name, element.with_value(value))
    };
    // Numbers in keys are in host byte order, like the registers that hold them. Numbers in values
    // are in network byte order, see [`super::expressions::Expressions::number`].
    let (number, value) = (Value::host_u32, Value::network_u32);
    match *element {
        Element::ClusterIp(address) => (names::CLUSTER_IPS.into(), nftables_netlink::Element::new(address.into())),
        Element::Hairpin(address) => of(names::HAIRPINS, &[address.into(), address.into()]),
        Element::Service(frontend, group) | Element::Inside(frontend, group) => {
            let lookup = Lookup::of(element).map_or(Lookup::Service, |(lookup, _)| lookup);
            map(lookup_map(lookup), &frontend_key(frontend), value(group))
        }
        Element::Unserved(frontend, refusal) => {
            let name = by_frontend(frontend, names::UNSERVED, names::UNSERVED_NODE_PORTS);
            map(name, &frontend_key(frontend), value(refusal_number(refusal)))
        }
        Element::Masquerade(frontend, sources) => {
            let name = by_frontend(frontend, names::MASQUERADE, names::MASQUERADE_NODE_PORTS);
            map(name, &frontend_key(frontend), value(masquerade_number(sources)))
        }
        Element::Guarded(frontend) => of(names::GUARDED, &frontend_key(frontend)),
        Element::Admitted(frontend, range) => {
            let mut key = frontend_key(frontend);
            key.push(range.addr().into());
            of(&admitted(range.prefix_len()), &key)
        }
        Element::Count(group, count) => map(names::COUNTS, &[number(group)], value(count)),
        Element::Affinity(group, timeout) => map(names::AFFINITIES, &[number(group)], value(timeout)),
        Element::Endpoint(group, slot, address, port) => {
            let endpoint = Value::concatenation(&[address.into(), Value::port(port)]);
            map(names::ENDPOINTS, &[number(group), number(slot)], endpoint)
        }
        Element::Member(group, address, port) => {
            of(names::MEMBERS, &[number(group), address.into(), Value::port(port)])
        }
    }
}

fn by_frontend(frontend: Frontend, addresses: &'static str, node_ports: &'static str) -> &'static str {
    match frontend {
        Frontend::Address(..) => addresses,
        Frontend::NodePort(..) => node_ports,
    }
}

/// Elements by set, in the order of the sets' names.
pub(super) fn by_set(elements: &[Element]) -> BTreeMap<String, Vec<nftables_netlink::Element>> {
    let mut sets: BTreeMap<String, Vec<nftables_netlink::Element>> = BTreeMap::new();
    for element in elements {
        let (set, element) = encode(element);
        sets.entry(set).or_default().push(element);
    }
    sets
}

/// An element of one of our sets, as the kernel lists it. `None` if its content has another form
/// than ours.
pub(super) fn decode(family: Family, set: &str, element: &nftables_netlink::Element) -> Option<Element> {
    let mut key = Reader { bytes: &element.key.0, family };
    let mut value = match &element.data {
        Some(ElementData::Value(value)) => Reader { bytes: &value.0, family },
        Some(ElementData::Verdict(_)) => return None,
        None => Reader { bytes: &[], family },
    };
    let decoded = match set {
        names::CLUSTER_IPS => Element::ClusterIp(key.address()?),
        names::HAIRPINS => {
            let address = key.address()?;
            (key.address()? == address).then_some(Element::Hairpin(address))?
        }
        names::UNSERVED | names::UNSERVED_NODE_PORTS => {
            let frontend = key.frontend(set == names::UNSERVED)?;
            let number = value.network_number()?;
            let refusal = [Refusal::Reject, Refusal::Drop].into_iter().find(|one| refusal_number(*one) == number)?;
            Element::Unserved(frontend, refusal)
        }
        names::MASQUERADE | names::MASQUERADE_NODE_PORTS => {
            use MasqueradeSources::{Everyone, Nobody, Node, Outside};
            let frontend = key.frontend(set == names::MASQUERADE)?;
            let number = value.network_number()?;
            let all = [Nobody, Outside, Node, Everyone];
            Element::Masquerade(frontend, all.into_iter().find(|one| masquerade_number(*one) == number)?)
        }
        names::GUARDED => Element::Guarded(key.frontend(true)?),
        names::COUNTS => Element::Count(key.number()?, value.network_number()?),
        names::AFFINITIES => Element::Affinity(key.number()?, value.network_number()?),
        names::ENDPOINTS => Element::Endpoint(key.number()?, key.number()?, value.address()?, value.port()?),
        names::MEMBERS => Element::Member(key.number()?, key.address()?, key.port()?),
        _ => {
            if let Some(length) = set.strip_prefix(names::ADMITTED) {
                let (frontend, address) = (key.frontend(true)?, key.address()?);
                Element::Admitted(frontend, IpNet::new(address, length.parse().ok()?).ok()?)
            } else {
                let lookup = Lookup::ALL.into_iter().find(|lookup| lookup_map(*lookup) == set)?;
                let frontend = key.frontend(matches!(lookup, Lookup::Service | Lookup::Inside))?;
                match lookup {
                    Lookup::Service | Lookup::NodePort => Element::Service(frontend, value.network_number()?),
                    Lookup::Inside | Lookup::InsideNodePort => Element::Inside(frontend, value.network_number()?),
                }
            }
        }
    };
    Some(decoded)
}

/// Reads the parts of a concatenation. Each part is padded to a multiple of 4 bytes.
struct Reader<'a> {
    bytes: &'a [u8],
    family: Family,
}

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (part, _) = self.bytes.split_first_chunk::<N>()?;
        self.bytes = self.bytes.get(N.next_multiple_of(4)..).unwrap_or_default();
        Some(*part)
    }

    fn number(&mut self) -> Option<u32> {
        self.take().map(u32::from_ne_bytes)
    }

    fn network_number(&mut self) -> Option<u32> {
        self.take().map(u32::from_be_bytes)
    }

    fn port(&mut self) -> Option<u16> {
        self.take().map(u16::from_be_bytes)
    }

    fn address(&mut self) -> Option<IpAddr> {
        match self.family {
            Family::V4 => self.take::<4>().map(|octets| Ipv4Addr::from(octets).into()),
            Family::V6 => self.take::<16>().map(|octets| Ipv6Addr::from(octets).into()),
        }
    }

    fn frontend(&mut self, has_address: bool) -> Option<Frontend> {
        let address = if has_address { Some(self.address()?) } else { None };
        let [number] = self.take()?;
        let all = [Protocol::Tcp, Protocol::Udp, Protocol::Sctp];
        let protocol = all.into_iter().find(|protocol| protocol_number(*protocol) == number)?;
        let port = self.port()?;
        Some(match address {
            Some(address) => Frontend::Address(address, protocol, port),
            None => Frontend::NodePort(self.family, protocol, port),
        })
    }
}
