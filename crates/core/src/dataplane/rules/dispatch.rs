//! Dispatch chains: chains that contain rules of many services. The rules of a service in a
//! dispatch chain are its dispatch lines.
//!
//! In the classic layout a dispatch chain is one list. In the compact layout its lines are divided
//! into groups. Each group is a separate chain, and one rule of the dispatch chain jumps to the
//! group. The jump matches an address prefix if the lines of the group match addresses. The jump
//! matches a port range if the lines match NodePorts. The prefix length is chosen from the
//! addresses of the cluster, so that both the number and the length of groups are small.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt::Display,
    net::IpAddr,
    sync::Arc,
};

use ipnet::IpNet;

use super::{
    RulesTable,
    line::Line,
    names::{ChainKind, ChainName, DispatchChain, MARK_MASQ},
    ruleset::Ruleset,
    script::Script,
    service::{DispatchLine, Selector},
};
use crate::model::{Family, Protocol, ServiceKey};

/// A part of a dispatch chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum DispatchGroup {
    /// The dispatch chain itself; its lines are in no group.
    Top,
    /// ClusterIPs with this prefix. A group of ClusterIPs has common masquerading rules, so other
    /// addresses with the prefix form a separate group.
    ClusterIps(IpNet),
    /// Other addresses with this prefix.
    Addresses(IpNet),
    /// NodePorts `32·block` to `32·block + 31` of a protocol.
    Ports(Protocol, u16),
}

const PORTS_PER_GROUP: u16 = 32;

type Lines = BTreeMap<Arc<ServiceKey>, String>;

/// The dispatch chains of one family.
#[derive(Debug)]
pub struct Dispatch {
    ruleset: Arc<Ruleset>,
    /// Prefix length of address groups; `None` in the classic layout.
    prefix_length: Option<u8>,
    groups: HashMap<DispatchChain, BTreeMap<DispatchGroup, Lines>>,
    dirty: BTreeSet<(DispatchChain, DispatchGroup)>,
}

impl Dispatch {
    /// Creates empty dispatch chains. `addresses` are the addresses to dispatch in the compact
    /// layout; `None` selects the classic layout. `in_use` is the prefix length of the rules in the
    /// kernel. The new chains use this length while its cost is less than twice the lowest possible
    /// cost.
    #[must_use]
    pub fn new(ruleset: Arc<Ruleset>, addresses: Option<&[IpAddr]>, in_use: Option<u8>) -> Self {
        let prefix_length = addresses.map(|addresses| choose_prefix_length(ruleset.config.family, addresses, in_use));
        let chains = ruleset.dispatch_chains(prefix_length.is_some());
        let dirty = chains.map(|chain| (chain, DispatchGroup::Top)).collect();
        Self { ruleset, prefix_length, groups: HashMap::new(), dirty }
    }

    /// True for the compact layout.
    #[must_use]
    pub fn is_compact(&self) -> bool {
        self.prefix_length.is_some()
    }

    /// The prefix length of address groups; `None` in the classic layout.
    pub(super) fn prefix_length(&self) -> Option<u8> {
        self.prefix_length
    }

    /// Returns the dispatch chains of this layout.
    pub fn chains(&self) -> impl Iterator<Item = DispatchChain> + use<> {
        self.ruleset.dispatch_chains(self.is_compact())
    }

    /// Adds the lines of a service, which must not have lines yet.
    pub fn insert(&mut self, key: &Arc<ServiceKey>, lines: Vec<DispatchLine>) {
        for line in lines {
            let group = self.group(line.selector);
            let groups = self.groups.entry(line.chain).or_default();
            if !groups.contains_key(&group) {
                self.dirty.insert((line.chain, DispatchGroup::Top));
            }
            groups.entry(group).or_default().entry(Arc::clone(key)).or_default().push_str(&line.rule);
            self.dirty.insert((line.chain, group));
        }
    }

    /// Removes the lines of a service from the chains and groups that `selectors` name.
    pub fn remove(&mut self, key: &ServiceKey, selectors: &[(DispatchChain, Selector)]) {
        for (chain, selector) in selectors {
            let group = self.group(*selector);
            let Some(groups) = self.groups.get_mut(chain) else { continue };
            let Some(lines) = groups.get_mut(&group) else { continue };
            if lines.remove(key).is_some() {
                self.dirty.insert((*chain, group));
            }
            if lines.is_empty() && group != DispatchGroup::Top {
                groups.remove(&group);
                self.dirty.insert((*chain, DispatchGroup::Top));
            }
        }
    }

    /// Returns the lines of a service. `selectors` has the order in which the lines were added.
    pub(super) fn lines(&self, key: &ServiceKey, selectors: &[(DispatchChain, Selector)]) -> Vec<DispatchLine> {
        let mut texts = BTreeMap::new();
        let line = |(chain, selector): &(DispatchChain, Selector)| {
            let group = self.group(*selector);
            let text = || self.groups.get(chain)?.get(&group)?.get(key).map(String::as_str);
            let lines =
                texts.entry((*chain, group)).or_insert_with(|| text().unwrap_or_default().split_inclusive('\n'));
            Some(DispatchLine { chain: *chain, selector: *selector, rule: lines.next()?.to_owned() })
        };
        selectors.iter().filter_map(line).collect()
    }

    /// Writes the chains that changed since the last call. Groups come before the dispatch chains
    /// that jump to them, and groups that became empty are deleted.
    pub fn write_changed(&mut self, script: &mut Script) {
        let dirty = std::mem::take(&mut self.dirty);
        let (tops, groups): (Vec<_>, Vec<_>) = dirty.into_iter().partition(|(_, group)| *group == DispatchGroup::Top);
        for (chain, group) in groups {
            let Some(name) = group_chain(chain, group) else { continue };
            match self.groups.get(&chain).and_then(|groups| groups.get(&group)) {
                Some(lines) => script.write_chain(chain.table(), &name, &self.group_rules(chain, group, name, lines)),
                None => script.delete_chain(chain.table(), &name),
            }
        }
        for (chain, _) in tops {
            script.write_chain(chain.table(), &chain.name(), &self.top_rules(chain));
        }
    }

    /// Returns the names of all group chains. The ledger uses them to find stale chains.
    pub fn group_chains(&self) -> impl Iterator<Item = (RulesTable, ChainName)> {
        self.groups.iter().flat_map(|(chain, groups)| {
            groups.keys().filter_map(|group| Some((chain.table(), group_chain(*chain, *group)?)))
        })
    }

    /// Returns the number of rules in a table that groups need in addition to the lines of
    /// services: the jumps to groups, and their masquerading rules. The cost is linear in the
    /// number of groups.
    pub(super) fn group_overhead(&self, table: RulesTable) -> usize {
        let masquerade = if self.masquerades_cluster_ips() { 2 } else { 0 };
        let of_table = self.groups.iter().filter(|(chain, _)| chain.table() == table);
        let groups = of_table.flat_map(|(chain, groups)| groups.keys().map(|group| (*chain, *group)));
        let overhead = groups.map(|group| match group {
            (_, DispatchGroup::Top) => 0,
            (DispatchChain::NatServices, DispatchGroup::ClusterIps(_)) => 1 + masquerade,
            _ => 1,
        });
        overhead.sum()
    }

    fn group(&self, selector: Selector) -> DispatchGroup {
        match (self.prefix_length, selector) {
            (None, _) => DispatchGroup::Top,
            (Some(_), Selector::NodePort(protocol, port)) => DispatchGroup::Ports(protocol, port / PORTS_PER_GROUP),
            (Some(length), Selector::ClusterIp(address)) => {
                prefix(address, length).map_or(DispatchGroup::Top, DispatchGroup::ClusterIps)
            }
            (Some(length), Selector::Address(address)) => {
                prefix(address, length).map_or(DispatchGroup::Top, DispatchGroup::Addresses)
            }
            // The endpoints of a node usually share a prefix of length 24 in IPv4 and 120 in IPv6.
            (Some(_), Selector::Hairpin(address)) => {
                prefix(address, self.ruleset.config.family.host_prefix_length() - 8)
                    .map_or(DispatchGroup::Top, DispatchGroup::Addresses)
            }
        }
    }

    fn group_rules(&self, chain: DispatchChain, group: DispatchGroup, name: ChainName, lines: &Lines) -> String {
        match (chain, group) {
            (DispatchChain::NatHairpin | DispatchChain::FilterHairpin, _) => distinct_with_chain(name, lines),
            (DispatchChain::NatServices, DispatchGroup::ClusterIps(_)) => match self.group_masquerade(name) {
                Some([mark, unmark]) => mark + &with_chain(name, lines) + &unmark,
                None => with_chain(name, lines),
            },
            _ => with_chain(name, lines),
        }
    }

    fn masquerades_cluster_ips(&self) -> bool {
        let config = &self.ruleset.config;
        config.masquerade.covers_cluster_ips(config.family)
    }

    /// Returns the first and the last rule of a group of ClusterIPs in nat, or `None` if traffic to
    /// ClusterIPs is not masqueraded. The first rule sets the mark before the lines of services
    /// match, and the last rule removes the mark if no line has matched. So each group needs two
    /// rules, instead of one rule in the chain of each service.
    fn group_masquerade(&self, group: ChainName) -> Option<[String; 2]> {
        if !self.masquerades_cluster_ips() {
            return None;
        }
        let config = &self.ruleset.config;
        let rule = |target: &dyn Display| {
            let mut rule = String::new();
            Line::append(&mut rule, group).masqueraded_to_cluster_ips(&config.masquerade, config.family).jump(target);
            rule
        };
        let mark = config.masquerade.mark();
        Some([rule(&MARK_MASQ), rule(&format_args!("MARK --set-xmark 0x0/{mark:#x}"))])
    }

    fn top_rules(&self, chain: DispatchChain) -> String {
        let mut rules = String::new();
        if let Some(groups) = self.groups.get(&chain) {
            for (group, lines) in groups {
                match group_chain(chain, *group) {
                    None => rules.push_str(&with_chain(chain.name(), lines)),
                    Some(name) => jump_to_group(&mut rules, chain, *group, name),
                }
            }
        }
        if chain == DispatchChain::NatServices {
            for rule in &self.ruleset.last_service_rules {
                rules.push_str("-A ");
                rules.push_str(chain.name());
                rules.push_str(rule);
            }
        }
        rules
    }
}

/// Renders lines like [`with_chain`], sorted and without duplicates. Two services with the same
/// endpoint have equal lines.
fn distinct_with_chain(name: ChainName, lines: &Lines) -> String {
    let rules: BTreeSet<&str> = lines.values().flat_map(|rules| rules.lines()).collect();
    rules.iter().map(|rule| format!("-A {name}{rule}\n")).collect()
}

/// Appends the rule of a dispatch chain that jumps to a group.
fn jump_to_group(rules: &mut String, chain: DispatchChain, group: DispatchGroup, name: ChainName) {
    let line = Line::append(rules, chain.name());
    match group {
        DispatchGroup::Top => line.end(),
        DispatchGroup::Addresses(prefix) if chain.is_hairpin() => line.source(prefix).jump(name),
        DispatchGroup::ClusterIps(prefix) | DispatchGroup::Addresses(prefix) => {
            line.add(format_args!("-d {prefix}")).jump(name);
        }
        DispatchGroup::Ports(protocol, block) => {
            let first = block * PORTS_PER_GROUP;
            let last = first + (PORTS_PER_GROUP - 1);
            let protocol_name = protocol.as_lower_str();
            line.protocol(protocol).add(format_args!("-m {protocol_name} --dport {first}:{last}")).jump(name);
        }
    }
}

fn prefix(address: IpAddr, length: u8) -> Option<IpNet> {
    IpNet::new(address, length).ok().map(|net| net.trunc())
}

fn group_chain(chain: DispatchChain, group: DispatchGroup) -> Option<ChainName> {
    match group {
        DispatchGroup::Top => None,
        DispatchGroup::ClusterIps(prefix) => {
            Some(ChainName::of(ChainKind::AddressGroup, &format!("{} cluster IP {prefix}", chain.name())))
        }
        DispatchGroup::Addresses(prefix) => {
            let kind = if chain.is_hairpin() { ChainKind::HairpinGroup } else { ChainKind::AddressGroup };
            Some(ChainName::of(kind, &format!("{} {prefix}", chain.name())))
        }
        DispatchGroup::Ports(protocol, block) => {
            Some(ChainName::of(ChainKind::NodePortGroup, &format!("{} {protocol} {block}", chain.name())))
        }
    }
}

/// Renders lines as complete rules of the chain `name`.
fn with_chain(name: impl Display, lines: &Lines) -> String {
    let name = name.to_string();
    let rules = lines.values().flat_map(|rules| rules.lines());
    rules.map(|rule| format!("-A {name}{rule}\n")).collect()
}

/// Returns the prefix length with the lowest cost. The cost is the maximum number of rules that a
/// packet passes: the number of groups plus the length of the longest group. The length `in_use` is
/// kept while its cost is less than twice the lowest cost.
fn choose_prefix_length(family: Family, addresses: &[IpAddr], in_use: Option<u8>) -> u8 {
    let host = family.host_prefix_length();
    let cost = |length: u8| {
        let mut groups: HashMap<IpNet, usize> = HashMap::new();
        for address in addresses {
            if let Ok(net) = IpNet::new(*address, length) {
                *groups.entry(net.trunc()).or_default() += 1;
            }
        }
        groups.len() + groups.values().max().copied().unwrap_or_default()
    };
    let candidates = host - 20..host;
    let (best_cost, best) = candidates.clone().map(|length| (cost(length), length)).min().unwrap_or((0, host - 8));
    in_use.filter(|length| candidates.contains(length) && cost(*length) < 2 * best_cost).unwrap_or(best)
}
