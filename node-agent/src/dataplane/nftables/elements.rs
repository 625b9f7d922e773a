//! Converts elements of [`headgate_core::nftables`] to the kernel's form and back, and writes them.

use std::{
    borrow::Cow,
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use headgate_core::{
    Family, Protocol,
    frontends::Frontend,
    nftables::{Counted, Element, Lookup, NftablesPlan, Pick, Refusal, Selection, Target},
    view::MasqueradeSources,
};
use ipnet::IpNet;
use nftables_netlink::{DataType, ElementData, Expression, Set, TableName, Transaction, Value};

use super::{Connection, NftablesFamily};
use crate::dataplane::DataplaneError;

pub(super) fn table_name(family: Family) -> TableName {
    let family = match family {
        Family::V4 => nftables_netlink::Family::Ip,
        Family::V6 => nftables_netlink::Family::Ip6,
    };
    TableName::new(family, "headgate")
}

/// The name of the map from frontends to targets.
pub(super) fn lookup_map(lookup: Lookup) -> &'static str {
    match lookup {
        Lookup::Service => "services",
        Lookup::Inside => "inside-services",
        Lookup::NodePort => "node-ports",
        Lookup::InsideNodePort => "inside-node-ports",
    }
}

pub(super) mod names {
    pub(in super::super) const AFFINITY_ENDPOINTS: &str = "affinity-endpoints";
    pub(in super::super) const CLUSTER_IPS: &str = "cluster-ips";
    pub(in super::super) const ENDPOINTS: &str = "endpoints";
    /// The protocols whose connections the proxy of mode userspace accepts.
    pub(in super::super) const GATE: &str = "gate";
    pub(in super::super) const GUARDED: &str = "guarded";
    pub(in super::super) const HAIRPINS: &str = "hairpins";
    pub(in super::super) const MEMBERS: &str = "members";
    /// The addresses of the node, where the rules cannot query the routing table.
    pub(in super::super) const NODE_ADDRESSES: &str = "node-addresses";
    /// The addresses that answer NodePorts, except 127.0.0.0/8.
    pub(in super::super) const NODE_PORT_ADDRESSES: &str = "node-port-addresses";
    /// The frontends whose TCP connections do not go to the proxy of mode userspace.
    pub(in super::super) const STRAIGHT: &str = "straight";
    /// The start of the names of sets of admitted clients; the prefix length follows.
    pub(in super::super) const ADMITTED: &str = "admitted-";
    /// The end of the names of sets and maps of NodePorts.
    pub(in super::super) const NODE_PORTS: &str = "-node-ports";
}

/// The name of the set of frontends without endpoints whose packets are refused in this way.
pub(super) fn refusal_set(refusal: Refusal) -> &'static str {
    match refusal {
        Refusal::Reject => "rejected",
        Refusal::Drop => "dropped",
    }
}

/// The name of the set of frontends of which these clients are masqueraded.
pub(super) fn masquerade_set(sources: MasqueradeSources) -> &'static str {
    match sources {
        MasqueradeSources::Nobody => "masquerade-nobody",
        MasqueradeSources::Outside => "masquerade-outside",
        MasqueradeSources::Node => "masquerade-node",
        MasqueradeSources::Everyone => "masquerade-everyone",
    }
}

pub(super) fn counter_set(counted: Counted) -> &'static str {
    match counted {
        Counted::Connections => "counted-connections",
        Counted::Traffic => "counted-traffic",
    }
}

pub(super) fn counter_sets() -> impl Iterator<Item = String> {
    let both = |counted| [counter_set(counted).to_owned(), of_node_ports(counter_set(counted))];
    Counted::ALL.into_iter().flat_map(both)
}

/// The sets of counters. The kernel counts in the element that a rule finds.
pub(super) fn sets_of_counters(table: &TableName, family: Family) -> impl Iterator<Item = Set> {
    let frontend = [address_type(family), DataType::Protocol, DataType::Port];
    counter_sets().map(move |name| {
        let key = if name.ends_with(names::NODE_PORTS) { &frontend[1..] } else { &frontend[..] };
        Set { expressions: vec![Expression::counter()], ..Set::new(table, name, key) }
    })
}

/// All values of [`MasqueradeSources`], in the order of the rules.
pub(super) const MASQUERADE_SOURCES: [MasqueradeSources; 4] =
    [MasqueradeSources::Nobody, MasqueradeSources::Outside, MasqueradeSources::Node, MasqueradeSources::Everyone];

/// Both answers to packets for frontends without endpoints.
pub(super) const REFUSALS: [Refusal; 2] = [Refusal::Reject, Refusal::Drop];

pub(super) fn of_node_ports(set: &str) -> String {
    format!("{set}{}", names::NODE_PORTS)
}

pub(super) fn admitted(prefix_length: u8) -> String {
    format!("{}{prefix_length}", names::ADMITTED)
}

pub(super) fn address_type(family: Family) -> DataType {
    match family {
        Family::V4 => DataType::Ipv4Address,
        Family::V6 => DataType::Ipv6Address,
    }
}

/// The sets and maps that exist even without services.
pub(super) fn fixed_sets(table: &TableName, family: Family) -> Vec<Set> {
    use DataType::{Mark, Port, Protocol};
    let address = address_type(family);
    let (frontend, node_port) = ([address, Protocol, Port], [Protocol, Port]);
    let mut sets = vec![
        Set::map(table, names::ENDPOINTS, &[Mark, Mark], &[address, Port]),
        // Rules do not use the first two words: see `Builder::add_pick`.
        Set::map(table, names::AFFINITY_ENDPOINTS, &[Mark, Mark], &[Mark, Mark, address, Port]),
        Set::new(table, names::CLUSTER_IPS, &[address]),
        Set::new(table, names::GUARDED, &frontend),
        Set::new(table, names::HAIRPINS, &[address, address]),
        Set::new(table, names::MEMBERS, &[address, Port, Mark]),
    ];
    let by_frontend = MASQUERADE_SOURCES.map(masquerade_set).into_iter().chain(REFUSALS.map(refusal_set));
    for name in by_frontend {
        sets.push(Set::new(table, name, &frontend));
        sets.push(Set::new(table, of_node_ports(name), &node_port));
    }
    sets.extend(Lookup::ALL.into_iter().map(|lookup| {
        let key: &[DataType] = if has_address(lookup) { &frontend } else { &node_port };
        Set::map(table, lookup_map(lookup), key, &[Mark; 5])
    }));
    sets
}

/// Returns whether the keys of a map begin with an address.
pub(super) fn has_address(lookup: Lookup) -> bool {
    matches!(lookup, Lookup::Service | Lookup::Inside)
}

/// The time after which the gate opens if the proxy does not renew the element.
const GATE_TIMEOUT_MS: u64 = 800;

/// The gate of mode userspace, whose elements the proxy adds and renews, and the sets of frontends
/// that do not go to the proxy.
pub(super) fn proxy_sets(table: &TableName, family: Family) -> [Set; 3] {
    let frontend = [address_type(family), DataType::Protocol, DataType::Port];
    [
        Set::new(table, names::GATE, &[DataType::Protocol]).with_timeout_ms(GATE_TIMEOUT_MS),
        Set::new(table, names::STRAIGHT, &frontend),
        Set::new(table, of_node_ports(names::STRAIGHT), &frontend[1..]),
    ]
}

pub(super) fn gate_element(protocol: Protocol) -> nftables_netlink::Element {
    nftables_netlink::Element::new(Value::byte(protocol_number(protocol)))
}

/// The name of the map from the addresses of Services to the ports of listeners. `None` for
/// NodePorts, whose datagrams are not redirected.
pub(super) fn listener_map(lookup: Lookup) -> Option<&'static str> {
    match lookup {
        Lookup::Service => Some("udp-listeners"),
        Lookup::Inside => Some("inside-udp-listeners"),
        Lookup::NodePort | Lookup::InsideNodePort => None,
    }
}

/// The map from ports of listeners to the addresses that replies come from.
pub(super) const REPLY_ADDRESSES: &str = "udp-reply-addresses";
/// The map from ports of listeners to the ports that replies come from.
pub(super) const REPLY_PORTS: &str = "udp-reply-ports";

pub(super) fn datagram_maps() -> impl Iterator<Item = &'static str> {
    Lookup::ALL.into_iter().filter_map(listener_map).chain([REPLY_ADDRESSES, REPLY_PORTS])
}

/// Whether the proxy of mode userspace writes the elements of a set.
pub(super) fn is_filled_by_proxy(set: &str) -> bool {
    set == names::GATE || datagram_maps().any(|map| map == set)
}

pub(super) fn datagram_sets(table: &TableName, family: Family) -> impl Iterator<Item = Set> {
    let (address, port) = (address_type(family), DataType::Port);
    let listeners = Lookup::ALL.into_iter().filter_map(listener_map);
    let listeners = listeners.map(move |map| Set::map(table, map, &[address, port], &[port]));
    listeners
        .chain([Set::map(table, REPLY_ADDRESSES, &[port], &[address]), Set::map(table, REPLY_PORTS, &[port], &[port])])
}

pub(super) fn node_address_set(table: &TableName, family: Family, name: &str) -> Set {
    Set::new(table, name, &[address_type(family)])
}

pub(super) fn has_node_addresses(set: &str) -> bool {
    matches!(set, names::NODE_ADDRESSES | names::NODE_PORT_ADDRESSES)
}

/// The set of clients that source ranges of a prefix length admit.
pub(super) fn admitted_set(table: &TableName, family: Family, prefix_length: u8) -> Set {
    let address = address_type(family);
    Set::new(table, admitted(prefix_length), &[address, DataType::Protocol, DataType::Port, address])
}

pub(super) fn protocol_number(protocol: Protocol) -> u8 {
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

/// The position of the affinity timeout among the words of a [`Target`]; with the next word, the
/// selection, it is the key of a pick. Word 0 is unused: `nft` 1.0.6 aborts when the first word of
/// a lookup's result is the key of another lookup.
pub(super) const TIMEOUT_WORD: u32 = 1;
/// The position of the number of the service port.
pub(super) const PORT_WORD: u32 = 3;
/// The position of the number of the group.
pub(super) const GROUP_WORD: u32 = 4;

/// The word for [`Selection::ProxyOnly`]. No group has as many slots.
const PROXY_ONLY_WORD: u32 = u32::MAX;

/// The bit of the word for [`Selection::ByClient`].
const BY_CLIENT_BIT: u32 = 1 << 30;

/// The word for a selection: the number of slots, with a bit for a slot by the client's address.
fn selection_word(selection: Selection) -> u32 {
    match selection {
        Selection::Random(slots) => slots,
        Selection::ByClient(slots) => BY_CLIENT_BIT | slots,
        Selection::ProxyOnly => PROXY_ONLY_WORD,
    }
}

fn target_value(target: Target) -> Value {
    let Target { group, selection, affinity_timeout_seconds } = target;
    let timeout = affinity_timeout_seconds.unwrap_or_default();
    let words = [0, timeout, selection_word(selection), target.port_number(), group];
    Value::concatenation(&words.map(Value::host_u32))
}

pub(super) fn pick_key(pick: &Pick) -> Value {
    let timeout = pick.affinity_timeout_seconds.unwrap_or_default();
    Value::concatenation(&[timeout, selection_word(pick.selection)].map(Value::host_u32))
}

pub(super) fn encode(element: &Element) -> nftables_netlink::Element {
    let of = |key: &[Value]| nftables_netlink::Element::new(Value::concatenation(key));
    let number = Value::host_u32;
    match *element {
        Element::ClusterIp(address) => of(&[address.into()]),
        Element::Hairpin(address) => of(&[address.into(), address.into()]),
        Element::Service(frontend, target) | Element::Inside(frontend, target) => {
            of(&frontend_key(frontend)).with_value(target_value(target))
        }
        Element::Unserved(frontend, _)
        | Element::Straight(frontend)
        | Element::Masquerade(frontend, _)
        | Element::Counter(frontend, _)
        | Element::Guarded(frontend) => of(&frontend_key(frontend)),
        Element::Admitted(frontend, range) => of(&[frontend_key(frontend), vec![range.addr().into()]].concat()),
        Element::Endpoint(group, slot, address, port) => {
            let value = [address.into(), Value::port(port)];
            of(&[number(group), number(slot)]).with_value(Value::concatenation(&value))
        }
        Element::AffinityEndpoint(group, slot, address, port) => {
            let value = [number(0), number(0), address.into(), Value::port(port)];
            of(&[number(group), number(slot)]).with_value(Value::concatenation(&value))
        }
        Element::Member(group, address, port) => of(&[address.into(), Value::port(port), number(group)]),
    }
}

pub(super) fn set_of(element: &Element) -> Cow<'static, str> {
    let by_frontend = |set: &'static str, frontend: &Frontend| match frontend {
        Frontend::Address(..) => Cow::Borrowed(set),
        Frontend::NodePort(..) => Cow::Owned(of_node_ports(set)),
    };
    match element {
        Element::ClusterIp(_) => names::CLUSTER_IPS.into(),
        Element::Hairpin(_) => names::HAIRPINS.into(),
        Element::Service(..) | Element::Inside(..) => {
            lookup_map(Lookup::of(element).map_or(Lookup::Service, |(lookup, ..)| lookup)).into()
        }
        Element::Unserved(frontend, refusal) => by_frontend(refusal_set(*refusal), frontend),
        Element::Straight(frontend) => by_frontend(names::STRAIGHT, frontend),
        Element::Masquerade(frontend, sources) => by_frontend(masquerade_set(*sources), frontend),
        Element::Counter(frontend, counted) => by_frontend(counter_set(*counted), frontend),
        Element::Guarded(_) => names::GUARDED.into(),
        Element::Admitted(_, range) => admitted(range.prefix_len()).into(),
        Element::Endpoint(..) => names::ENDPOINTS.into(),
        Element::AffinityEndpoint(..) => names::AFFINITY_ENDPOINTS.into(),
        Element::Member(..) => names::MEMBERS.into(),
    }
}

pub(super) fn write(
    delete: &[Element],
    add: impl Iterator<Item = Element>,
    table: &TableName,
    transaction: &mut Transaction,
) {
    by_set(delete.iter().copied(), |set, elements| {
        transaction.delete_elements(table, set, elements.iter().map(encode));
    });
    by_set(add, |set, elements| {
        transaction.add_elements(table, set, elements.iter().map(encode));
    });
}

/// The number of elements that [`by_set`] collects. Their message has at most the size at which the
/// client of nftables begins another message.
const COLLECTED: usize = 512;

/// Passes the elements of each set to `write`, at most [`COLLECTED`] at a time.
fn by_set(elements: impl Iterator<Item = Element>, mut write: impl FnMut(&str, &[Element])) {
    let mut sets: BTreeMap<Cow<'static, str>, Vec<Element>> = BTreeMap::new();
    for element in elements {
        let set = set_of(&element);
        if let Some(collected) = sets.get_mut(&set) {
            collected.push(element);
            if collected.len() == COLLECTED {
                write(&set, collected);
                collected.clear();
            }
        } else {
            sets.insert(set, vec![element]);
        }
    }
    sets.iter().filter(|(_, collected)| !collected.is_empty()).for_each(|(set, collected)| write(set, collected));
}

/// Converts an element that the kernel lists in one of our sets. Returns `None` if this agent never
/// writes such an element: the bytes must be exactly those that [`encode`] produces.
pub(super) fn decode(family: Family, set: &str, element: &nftables_netlink::Element) -> Option<Element> {
    let read = read(family, set, element)?;
    let mut written = encode(&read);
    if let ([Expression::Counter { .. }], Element::Counter(..)) = (&element.expressions[..], &read) {
        // The kernel adds the counter, with the present counts.
        written.expressions.clone_from(&element.expressions);
    }
    (set_of(&read) == set && written == *element).then_some(read)
}

fn read(family: Family, set: &str, element: &nftables_netlink::Element) -> Option<Element> {
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
        names::GUARDED => Element::Guarded(key.frontend(true)?),
        names::ENDPOINTS => Element::Endpoint(key.number()?, key.number()?, value.address()?, value.port()?),
        names::AFFINITY_ENDPOINTS => {
            value.unused_words(2)?;
            Element::AffinityEndpoint(key.number()?, key.number()?, value.address()?, value.port()?)
        }
        names::MEMBERS => {
            let (address, port) = (key.address()?, key.port()?);
            Element::Member(key.number()?, address, port)
        }
        _ => {
            if let Some(length) = set.strip_prefix(names::ADMITTED) {
                let (frontend, address) = (key.frontend(true)?, key.address()?);
                return Some(Element::Admitted(frontend, IpNet::new(address, length.parse().ok()?).ok()?));
            }
            if let Some(lookup) = Lookup::ALL.into_iter().find(|lookup| lookup_map(*lookup) == set) {
                let (frontend, target) = (key.frontend(has_address(lookup))?, value.target()?);
                return Some(match lookup {
                    Lookup::Service | Lookup::NodePort => Element::Service(frontend, target),
                    Lookup::Inside | Lookup::InsideNodePort => Element::Inside(frontend, target),
                });
            }
            let (set, has_address) = match set.strip_suffix(names::NODE_PORTS) {
                Some(set) => (set, false),
                None => (set, true),
            };
            let frontend = key.frontend(has_address)?;
            let sources = MASQUERADE_SOURCES.into_iter().find(|sources| masquerade_set(*sources) == set);
            let refusal = || REFUSALS.into_iter().find(|refusal| refusal_set(*refusal) == set);
            let counted = Counted::ALL.into_iter().find(|counted| counter_set(*counted) == set);
            match (sources, counted) {
                _ if set == names::STRAIGHT => Element::Straight(frontend),
                (Some(sources), _) => Element::Masquerade(frontend, sources),
                (None, Some(counted)) => Element::Counter(frontend, counted),
                (None, None) => Element::Unserved(frontend, refusal()?),
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

    fn unused_words(&mut self, words: usize) -> Option<()> {
        self.bytes = self.bytes.get(words * 4..)?;
        Some(())
    }

    fn target(&mut self) -> Option<Target> {
        let [_, timeout, selection, _, group] =
            [self.number()?, self.number()?, self.number()?, self.number()?, self.number()?];
        let selection = match selection {
            PROXY_ONLY_WORD => Selection::ProxyOnly,
            slots if slots & BY_CLIENT_BIT != 0 => Selection::ByClient(slots & !BY_CLIENT_BIT),
            slots => Selection::Random(slots),
        };
        Some(Target { group, selection, affinity_timeout_seconds: Some(timeout).filter(|timeout| *timeout != 0) })
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
        let protocol = Protocol::ALL.into_iter().find(|protocol| protocol_number(*protocol) == number)?;
        let port = self.port()?;
        Some(match address {
            Some(address) => Frontend::Address(address, protocol, port),
            None => Frontend::NodePort(self.family, protocol, port),
        })
    }
}

// Writes the endpoints of a first sync in several transactions, because one needs much memory, also
// in the kernel. No packet reaches a group before a frontend leads to it, so this is safe.

/// The number of elements in a transaction. About half a megabyte, and 30 ms.
pub(super) const PART: usize = 8192;

impl NftablesFamily {
    /// Writes endpoints of a plan for a table without elements, as long as they fill a transaction.
    /// Returns the number of these endpoints. Writes nothing for other plans.
    pub(super) fn write_endpoints(
        &mut self,
        kernel: &mut Connection,
        plan: &NftablesPlan,
    ) -> Result<usize, DataplaneError> {
        let (family, mut written) = (self.layout_config.family, 0);
        let table = table_name(family);
        if !plan.adds_everything {
            return Ok(written);
        }
        let failed = {
            let mut endpoints = self.ledger.elements().filter(is_endpoint);
            loop {
                let part: Vec<Element> = endpoints.by_ref().take(PART).collect();
                if part.len() < PART {
                    break None;
                }
                let mut transaction = Transaction::new();
                transaction.add_table(&kernel.table(family));
                fixed_sets(&table, family).iter().for_each(|set| transaction.add_set(set));
                write(&[], part.into_iter(), &table, &mut transaction);
                if let Err(error) = kernel.commit(family, &transaction) {
                    break Some((transaction, error));
                }
                written += PART;
            }
        };
        if let Some((transaction, error)) = failed {
            return Err(self.explain(&transaction, true, &error));
        }
        Ok(written)
    }
}

/// The elements without the first endpoints, which [`NftablesFamily::write_endpoints`] has written.
pub(super) fn after(written: usize, elements: impl Iterator<Item = Element>) -> impl Iterator<Item = Element> {
    let mut to_skip = written;
    elements.filter(move |element| {
        let is_written = to_skip > 0 && is_endpoint(element);
        to_skip -= usize::from(is_written);
        !is_written
    })
}

fn is_endpoint(element: &Element) -> bool {
    matches!(element, Element::Endpoint(..) | Element::AffinityEndpoint(..) | Element::Member(..))
}
