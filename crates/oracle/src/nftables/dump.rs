//! A dump of a table, in a compact form.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use std::net::IpAddr;

use headgate_core::{Family, Protocol, address_from_bytes, frontends::Frontend};
use ipnet::{IpNet, IpSubnets, Ipv4Subnets, Ipv6Subnets};
use nftables_netlink::{
    BaseChain, DataType, Element, ElementData, Expression, Hook, Set, TableName, ValueType, Verdict,
};

/// A dump of a table.
#[derive(Debug)]
pub struct NftablesDump {
    /// The name of the table.
    pub name: TableName,
    /// The chains, by name.
    pub chains: BTreeMap<String, DumpedChain>,
    /// The sets and maps, by name.
    pub sets: HashMap<String, DumpedSet>,
}

/// A chain.
#[derive(Debug, Default)]
pub struct DumpedChain {
    /// The hook, if packets enter the rules here.
    pub base: Option<BaseChain>,
    /// The expressions of each rule.
    pub rules: Vec<Vec<Expression>>,
}

/// A set or map with its elements.
#[derive(Debug, Clone)]
pub struct DumpedSet {
    key: ValueType,
    /// The elements, sorted by key. Empty for a verdict map.
    pub elements: Vec<Packed>,
    /// The elements of a verdict map.
    pub verdicts: BTreeMap<Vec<u8>, Verdict>,
    /// Packets add elements, which expire. The decoder needs no such elements.
    pub is_recorded: bool,
    /// The keys are ranges.
    pub(super) has_ranges: bool,
    /// The ranges, if they are of addresses. The decoder does not understand others.
    pub(super) ranges: Vec<IpNet>,
}

/// The key of an element, followed by its data.
pub type Packed = Box<[u8]>;

/// Returns the compact form of an element.
pub fn pack(element: Element) -> Packed {
    let mut bytes = element.key.0;
    if let Some(ElementData::Value(value)) = element.data {
        bytes.extend(value.0);
    }
    bytes.into_boxed_slice()
}

impl NftablesDump {
    pub(super) fn family(&self) -> Family {
        if self.name.family == nftables_netlink::Family::Ip6 { Family::V6 } else { Family::V4 }
    }

    /// The number of rules, expressions and elements.
    pub fn size(&self) -> u64 {
        let rules = self.chains.values().flat_map(|chain| &chain.rules).map(|rule| rule.len() + 1);
        let elements = self.sets.values().map(|set| set.elements.len() + set.verdicts.len());
        rules.chain(elements).sum::<usize>() as u64
    }

    /// The base chains of a hook, in the order in which packets pass them.
    pub(super) fn base_chains(&self, hook: Hook) -> Vec<(&str, BaseChain)> {
        let all = self.chains.iter().filter_map(|(name, chain)| Some((&**name, chain.base?)));
        let mut of_hook: Vec<_> = all.filter(|(_, base)| base.hook == hook).collect();
        of_hook.sort_by_key(|(_, base)| base.priority);
        of_hook
    }

    /// Every frontend that is a key of one of these sets or maps.
    pub(super) fn frontends<'a>(&self, sets: impl Iterator<Item = &'a DumpedSet>) -> BTreeSet<Frontend> {
        let address = match self.family() {
            Family::V4 => DataType::Ipv4Address,
            Family::V6 => DataType::Ipv6Address,
        };
        let at_address = ValueType::concatenation(&[address, DataType::Protocol, DataType::Port]);
        let at_node = ValueType::concatenation(&[DataType::Protocol, DataType::Port]);
        let mut all = BTreeSet::new();
        for set in sets {
            let has_address = set.key == at_address;
            if has_address || set.key == at_node {
                let keys = set.range(&[]).map(|(key, _)| key).chain(set.verdicts.keys().map(Vec::as_slice));
                all.extend(keys.filter_map(|key| self.frontend(key, has_address)));
            }
        }
        all
    }

    fn frontend(&self, key: &[u8], has_address: bool) -> Option<Frontend> {
        let (address, rest) = if has_address { key.split_at_checked(self.address_bytes())? } else { (&[][..], key) };
        let [protocol, _, _, _, high, low, ..] = *rest else { return None };
        let protocol = Protocol::ALL.into_iter().find(|known| protocol_number(*known) == protocol)?;
        let port = u16::from_be_bytes([high, low]);
        Some(if has_address {
            Frontend::Address(address_from_bytes(address)?, protocol, port)
        } else {
            Frontend::NodePort(self.family(), protocol, port)
        })
    }

    pub(super) fn address_bytes(&self) -> usize {
        usize::from(self.family().host_prefix_length()) / 8
    }
}

/// The networks from `first` to `end`, which is the first address after them if `is_after`.
fn subnets(first: &[u8], end: &[u8], is_after: bool) -> Vec<IpNet> {
    let before = u8::from(is_after);
    let subnets = match [address_from_bytes(first), address_from_bytes(end)] {
        [Some(IpAddr::V4(first)), Some(IpAddr::V4(end))] => {
            let last = u32::from(end).saturating_sub(before.into());
            IpSubnets::from(Ipv4Subnets::new(first, last.into(), 0))
        }
        [Some(IpAddr::V6(first)), Some(IpAddr::V6(end))] => {
            let last = u128::from(end).saturating_sub(before.into());
            IpSubnets::from(Ipv6Subnets::new(first, last.into(), 0))
        }
        _ => return Vec::new(),
    };
    subnets.collect()
}

/// The number of a protocol in the IP header.
pub(super) fn protocol_number(protocol: Protocol) -> u8 {
    match protocol {
        Protocol::Tcp => 6,
        Protocol::Udp => 17,
        Protocol::Sctp => 132,
    }
}

impl DumpedSet {
    /// A set without elements.
    pub fn new(set: &Set) -> Self {
        Self {
            key: set.key,
            elements: Vec::new(),
            verdicts: BTreeMap::new(),
            is_recorded: set.flags.timeout || set.flags.dynamic,
            has_ranges: set.flags.interval,
            ranges: Vec::new(),
        }
    }

    /// True if the keys are ranges of addresses, which [`Self::set_ranges`] takes.
    pub fn has_ranges_of_addresses(&self) -> bool {
        let is_address = |of| self.key == ValueType::from(of);
        self.has_ranges && (is_address(DataType::Ipv4Address) || is_address(DataType::Ipv6Address))
    }

    /// Sets the ranges of addresses. The kernel lists the beginning of each, and the first address
    /// after it, unless none follows.
    pub fn set_ranges(&mut self, mut elements: Vec<Element>) {
        elements.sort_by(|one, other| (&one.key.0, !one.interval_end).cmp(&(&other.key.0, !other.interval_end)));
        let mut first: Option<Vec<u8>> = None;
        for Element { key, interval_end, .. } in elements {
            match first.take() {
                Some(start) if interval_end => self.ranges.extend(subnets(&start, &key.0, true)),
                _ if interval_end => {}
                _ => first = Some(key.0),
            }
        }
        if let Some(start) = first {
            let last = vec![u8::MAX; start.len()];
            self.ranges.extend(subnets(&start, &last, false));
        }
    }

    pub(super) fn key_bytes(&self) -> usize {
        self.key.length_bytes as usize
    }

    /// The data of an element. `None` if no element has the key.
    pub fn get(&self, key: &[u8]) -> Option<&[u8]> {
        let at = self.elements.binary_search_by(|element| self.split(element).0.cmp(key)).ok()?;
        Some(self.split(&self.elements[at]).1)
    }

    /// The keys that begin with `start`, with their data.
    pub fn range<'a>(&'a self, start: &[u8]) -> impl Iterator<Item = (&'a [u8], &'a [u8])> {
        let first = self.elements.partition_point(|element| self.split(element).0 < start);
        let left = &self.elements[first..];
        // Elements are sorted, so those with this beginning follow each other.
        let count = left.partition_point(|element| self.split(element).0.starts_with(start));
        left[..count].iter().map(|element| self.split(element))
    }

    /// The key and the data of an element.
    pub fn split<'a>(&self, element: &'a [u8]) -> (&'a [u8], &'a [u8]) {
        element.split_at_checked(self.key_bytes()).unwrap_or((element, &[]))
    }
}
