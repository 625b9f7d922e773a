//! A dump of a table, in a compact form.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use headgate_core::{Family, Protocol, address_from_bytes, frontends::Frontend};
use nftables_netlink::{
    BaseChain, ChainType, DataType, Element, ElementData, Expression, Hook, Nftables, NftablesError, Set, SetData,
    TableName, ValueType, Verdict,
};

/// A dump of a table.
#[derive(Debug)]
pub struct Dump {
    name: TableName,
    family: Family,
    pub(super) chains: BTreeMap<String, Chain>,
    pub(super) sets: HashMap<String, SetDump>,
}

/// A chain with the expressions of its rules.
#[derive(Debug, Default)]
pub(super) struct Chain {
    pub(super) base: Option<BaseChain>,
    pub(super) rules: Vec<Vec<Expression>>,
}

/// A set or map with its elements.
#[derive(Debug)]
pub(super) struct SetDump {
    key: ValueType,
    pub(super) key_bytes: usize,
    /// The elements, sorted by key.
    elements: Vec<Packed>,
    /// The elements of a verdict map.
    verdicts: BTreeMap<Vec<u8>, Verdict>,
    /// Packets add elements, which expire.
    pub(super) is_recorded: bool,
    /// The decoder does not understand such keys.
    pub(super) has_ranges: bool,
}

/// The key of an element, followed by its data.
type Packed = Box<[u8]>;

/// Returns the compact form of an element.
fn pack(element: Element) -> Packed {
    let mut bytes = element.key.0;
    if let Some(ElementData::Value(value)) = element.data {
        bytes.extend(value.0);
    }
    bytes.into_boxed_slice()
}

impl Dump {
    /// Reads a table. The result is `None` if the table does not exist. Does not read the elements
    /// that packets add.
    ///
    /// # Errors
    /// The errors of `kernel`.
    pub fn read(kernel: &mut Nftables, name: &TableName) -> Result<Option<Self>, NftablesError> {
        let family = if name.family == nftables_netlink::Family::Ip6 { Family::V6 } else { Family::V4 };
        let listed = kernel.chains(name)?;
        if listed.is_empty() {
            return Ok(None);
        }
        let chains = listed.into_iter().map(|listed| {
            let chain = listed.object;
            (chain.name, Chain { base: chain.base, rules: Vec::new() })
        });
        let mut chains: BTreeMap<String, Chain> = chains.collect();
        for listed in kernel.rules(name, None)? {
            let rule = listed.object;
            chains.entry(rule.chain).or_default().rules.push(rule.expressions);
        }
        let mut sets = HashMap::new();
        for listed in kernel.sets(name)? {
            let set = listed.object;
            let mut dumped = SetDump::new(&set);
            if set.data == Some(SetData::Verdicts) {
                let elements = kernel.elements(name, &set.name)?.into_iter();
                let verdicts = elements.filter_map(|element| match element.data {
                    Some(ElementData::Verdict(verdict)) => Some((element.key.0, verdict)),
                    _ => None,
                });
                dumped.verdicts = verdicts.collect();
            } else if !dumped.is_recorded {
                dumped.elements = kernel.elements_as(name, &set.name, pack)?;
            }
            sets.insert(set.name, dumped);
        }
        Ok(Some(Self { name: name.clone(), family, chains, sets }))
    }

    /// The name of the table.
    pub(super) fn name(&self) -> &TableName {
        &self.name
    }

    pub(super) fn family(&self) -> Family {
        self.family
    }

    /// The number of rules, expressions and elements.
    #[must_use]
    pub fn size(&self) -> u64 {
        let rules = self.chains.values().flat_map(|chain| &chain.rules).map(|rule| rule.len() + 1);
        let elements = self.sets.values().map(|set| set.elements.len() + set.verdicts.len());
        rules.chain(elements).sum::<usize>() as u64
    }

    pub(super) fn has_base_chain(&self, kind: ChainType, hook: Hook) -> bool {
        self.base_chains(hook).iter().any(|(_, base)| base.kind == kind)
    }

    /// The base chains of a hook, in the order in which packets pass them.
    pub(super) fn base_chains(&self, hook: Hook) -> Vec<(&str, BaseChain)> {
        let all = self.chains.iter().filter_map(|(name, chain)| Some((&**name, chain.base?)));
        let mut of_hook: Vec<_> = all.filter(|(_, base)| base.hook == hook).collect();
        of_hook.sort_by_key(|(_, base)| base.priority);
        of_hook
    }

    /// Every frontend that is a key of a set or map.
    pub(super) fn frontends(&self) -> BTreeSet<Frontend> {
        let address = match self.family {
            Family::V4 => DataType::Ipv4Address,
            Family::V6 => DataType::Ipv6Address,
        };
        let at_address = ValueType::concatenation(&[address, DataType::Protocol, DataType::Port]);
        let at_node = ValueType::concatenation(&[DataType::Protocol, DataType::Port]);
        let mut all = BTreeSet::new();
        for set in self.sets.values() {
            let has_address = set.key == at_address;
            if has_address || set.key == at_node {
                let keys = set.elements.iter().filter_map(|element| element.get(..set.key_bytes));
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
            Frontend::NodePort(self.family, protocol, port)
        })
    }

    pub(super) fn address_bytes(&self) -> usize {
        match self.family {
            Family::V4 => 4,
            Family::V6 => 16,
        }
    }
}

/// The number of a protocol in the IP header.
pub(super) fn protocol_number(protocol: Protocol) -> u8 {
    match protocol {
        Protocol::Tcp => 6,
        Protocol::Udp => 17,
        Protocol::Sctp => 132,
    }
}

impl SetDump {
    fn new(set: &Set) -> Self {
        Self {
            key: set.key,
            key_bytes: set.key.length_bytes as usize,
            elements: Vec::new(),
            verdicts: BTreeMap::new(),
            is_recorded: set.flags.timeout || set.flags.dynamic,
            has_ranges: set.flags.interval,
        }
    }

    /// The data of an element. `None` if no element has the key.
    pub(super) fn get(&self, key: &[u8]) -> Option<&[u8]> {
        let at = self.elements.binary_search_by(|element| self.key_of(element).cmp(key)).ok()?;
        self.elements[at].get(self.key_bytes..)
    }

    /// The verdict of an element of a verdict map.
    pub(super) fn verdict(&self, key: &[u8]) -> Option<&Verdict> {
        self.verdicts.get(key)
    }

    /// The keys that begin with `start`.
    pub(super) fn keys<'a>(&'a self, start: &[u8]) -> impl Iterator<Item = &'a [u8]> {
        self.range(start).map(|(key, _)| key)
    }

    /// The keys that begin with `start`, with their data.
    pub(super) fn range<'a>(&'a self, start: &[u8]) -> impl Iterator<Item = (&'a [u8], &'a [u8])> {
        let first = self.elements.partition_point(|element| self.key_of(element) < start);
        let left = &self.elements[first..];
        // Elements are sorted, so those with this beginning follow each other.
        let count = left.partition_point(|element| self.key_of(element).starts_with(start));
        left[..count].iter().map(|element| element.split_at_checked(self.key_bytes).unwrap_or((element, &[])))
    }

    fn key_of<'a>(&self, element: &'a [u8]) -> &'a [u8] {
        element.get(..self.key_bytes).unwrap_or(element)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Dump {
        /// The elements of each set whose data differs from that in an earlier dump, as sets and
        /// keys.
        pub(crate) fn replaced_since(&self, before: &Self) -> BTreeSet<(String, Vec<u8>)> {
            let mut replaced = BTreeSet::new();
            for (name, set) in &self.sets {
                let Some(old) = before.sets.get(name) else { continue };
                for (key, data) in set.range(&[]) {
                    if old.get(key).is_some_and(|old| old != data) {
                        replaced.insert((name.clone(), key.to_vec()));
                    }
                }
            }
            replaced
        }

        /// Makes lookups miss these elements: in the rules of a set for which `misses` returns
        /// true, given the set, the chain, and the number of the rule among those of the chain that
        /// look for an element of the set.
        pub(crate) fn miss(
            &mut self,
            elements: &BTreeSet<(String, Vec<u8>)>,
            misses: impl Fn(&str, &str, usize) -> bool,
        ) {
            for name in elements.iter().map(|(set, _)| set.clone()).collect::<BTreeSet<_>>() {
                let Some(set) = self.sets.get(&name) else { continue };
                let is_kept = |element: &&Packed| !elements.contains(&(name.clone(), set.key_of(element).to_vec()));
                let other = SetDump {
                    elements: set.elements.iter().filter(is_kept).cloned().collect(),
                    verdicts: set.verdicts.clone(),
                    ..*set
                };
                let other_name = format!("{name}, incomplete");
                for (chain_name, chain) in &mut self.chains {
                    let finds =
                        |expression: &Expression| matches!(expression, Expression::Lookup { set, .. } if *set == name);
                    let rules = chain.rules.iter_mut().filter(|rule| rule.iter().any(finds)).enumerate();
                    for (_, rule) in rules.filter(|(number, _)| misses(&name, chain_name, *number)) {
                        for expression in rule {
                            if let Expression::Lookup { set, .. } = expression
                                && *set == name
                            {
                                set.clone_from(&other_name);
                            }
                        }
                    }
                }
                self.sets.insert(other_name, other);
            }
        }
    }
}
