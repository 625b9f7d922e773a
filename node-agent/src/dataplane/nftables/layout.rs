//! The rules: base chains, those that they call, and maps from endpoint counts to chains.

mod datagrams;
pub(super) mod picks;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use headgate_core::{
    Family, Protocol,
    iptables::NodePortAddresses,
    nftables::{Counted, Lookup, Refusal, Shape},
    view::{LocalDetector, MasqueradeSources},
};
use ipnet::IpNet;
use nftables_netlink::{
    BaseChain, Chain, ChainType, Comparison, DataType, Element, Expression, Hook, Policy, Register, Rule, Set,
    TableName, Transaction, Value, Verdict, comment,
};

pub(super) use super::elements::table_name;
use super::{
    elements::{
        GROUP_WORD, MASQUERADE_SOURCES, REFUSALS, TIMEOUT_WORD, admitted, admitted_set, counter_set, fixed_sets,
        has_address, lookup_map, masquerade_set, names, node_address_set, of_node_ports, proxy_sets, refusal_set,
        sets_of_counters,
    },
    expressions::{Expressions, Side, jump},
};

/// Priority `dstnat`.
const DESTINATION_NAT: i32 = -100;
/// Priority `srcnat`.
const SOURCE_NAT: i32 = 100;
/// The priority of the chains that check source ranges. They run before translation.
const BEFORE_NAT: i32 = DESTINATION_NAT - 10;

const COUNTERS: &str = "counters";
const FIREWALL: &str = "firewall";
const INSIDE: &str = "inside";
const INSIDE_NODE_PORTS: &str = "inside-node-ports";
const NODE_PORTS: &str = "node-ports";
const REJECT: &str = "reject";
const SERVICES: &str = "services";
const UNSERVED: &str = "unserved";
const UNUSED_PORTS: &str = "unused-ports";
const UNSERVED_NODE_PORTS: &str = "unserved-node-ports";
const LOOPBACK_GUARD: &str = "loopback-guard";
const MASQUERADING: &str = "masquerading";
const MASQUERADING_NODE_PORTS: &str = "masquerading-node-ports";

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LayoutConfig {
    pub(super) family: Family,
    pub(super) detector: Option<LocalDetector>,
    pub(super) node_port_addresses: NodePortAddresses,
    pub(super) localhost_node_ports: bool,
    /// The addresses of the node's interfaces in this family.
    pub(super) interfaces: Vec<IpAddr>,
    /// The address of the node that answers pings to ClusterIPs. `None` if such pings are refused.
    pub(super) ping_answered_by: Option<IpAddr>,
    /// True if rules can query the routing table whether an address belongs to the node (`fib`).
    /// Otherwise a set contains the addresses.
    pub(super) has_fib: bool,
    /// True if the kernel parameter `nf_conntrack_tcp_be_liberal` is set. With this parameter,
    /// conntrack does not mark packets outside of the TCP window as INVALID.
    pub(super) conntrack_tcp_be_liberal: bool,
    /// True if the kernel counts the connections and the traffic of each frontend.
    pub(super) counts_services: bool,
    /// The listener of a proxy for each map of frontends. The listeners have one IP address. Empty
    /// if no proxy runs. While the set `gate` contains a protocol, rules send it to the proxy.
    pub(super) listeners: BTreeMap<Lookup, SocketAddr>,
}

impl LayoutConfig {
    /// Returns whether NodePorts answer on 127.0.0.0/8. If so, the kernel parameter
    /// `route_localnet` must be set, and the table needs the chain [`LOOPBACK_GUARD`].
    pub(super) fn has_loopback_guard(&self) -> bool {
        self.node_port_addresses.include_localhost(self.family, self.localhost_node_ports)
    }

    /// Whether the rules of both configurations are equal. The addresses in sets may differ.
    pub(super) fn has_rules_of(&self, other: &Self) -> bool {
        let without_addresses = |config: &Self| {
            let mut without = Self { interfaces: Vec::new(), ..config.clone() };
            if let NodePortAddresses::Only(addresses) = &mut without.node_port_addresses {
                addresses.clear();
            }
            (without, config.has_loopback_guard())
        };
        without_addresses(self) == without_addresses(other)
    }

    /// The addresses that answer NodePorts, without ranges of loopback addresses.
    fn addresses_of_node_ports(&self) -> impl Iterator<Item = IpAddr> {
        let addresses = match &self.node_port_addresses {
            NodePortAddresses::All => &self.interfaces,
            NodePortAddresses::Only(addresses) => addresses,
        };
        // NodePorts never answer on ::1.
        let answers = |address: &&IpAddr| {
            Family::of(**address) == self.family && (!address.is_loopback() || self.has_loopback_guard())
        };
        addresses.iter().filter(answers).copied()
    }

    /// The range of loopback addresses that answer NodePorts.
    fn loopback_of_node_ports(&self) -> Option<IpNet> {
        let has_range = self.node_port_addresses == NodePortAddresses::All && self.has_loopback_guard();
        has_range.then(loopback)
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct ChainContent {
    pub(super) base: Option<BaseChain>,
    pub(super) rules: Vec<RuleContent>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RuleContent {
    pub(super) expressions: Vec<Expression>,
    /// The comment that `nft` prints, encoded.
    pub(super) user_data: Vec<u8>,
}

impl From<Vec<Expression>> for RuleContent {
    fn from(expressions: Vec<Expression>) -> Self {
        Self { expressions, user_data: Vec::new() }
    }
}

impl RuleContent {
    fn with_comment(expressions: Vec<Expression>, text: &str) -> Self {
        Self { expressions, user_data: comment(text) }
    }
}

/// Everything in a table except the elements that services add.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) sets: BTreeMap<String, Set>,
    pub(super) chains: BTreeMap<String, ChainContent>,
    /// The elements that do not come from Services, by set and key: the verdicts of the maps from
    /// endpoint counts to chains, and the addresses of the node, which have no verdict.
    pub(super) elements: BTreeMap<(String, Value), Option<Verdict>>,
}

/// The name of the map from affinity timeouts and endpoint counts to chains.
fn picks_map(lookup: Lookup) -> String {
    format!("{}-by-count", lookup_map(lookup))
}

impl Layout {
    pub(super) fn new(config: &LayoutConfig, shape: &Shape) -> Self {
        let mut layout = Self::default();
        let builder =
            Builder { config, expressions: Expressions { family: config.family }, table: table_name(config.family) };
        for set in fixed_sets(&builder.table, config.family) {
            layout.add_set(set);
        }
        if config.counts_services {
            sets_of_counters(&builder.table, config.family).for_each(|set| layout.add_set(set));
            builder.add_counters(&mut layout);
        }
        for length in &shape.prefix_lengths {
            layout.add_set(admitted_set(&builder.table, config.family, *length));
        }
        if !config.listeners.is_empty() {
            proxy_sets(&builder.table, config.family).into_iter().for_each(|set| layout.add_set(set));
        }
        builder.add_datagrams(&mut layout);
        builder.add_node_addresses(&mut layout);
        builder.add_base_chains(&mut layout);
        builder.add_firewall(shape, &mut layout);
        builder.add_dispatch(shape, &mut layout);
        for pick in &shape.picks {
            builder.add_pick(pick, &mut layout);
        }
        builder.add_masquerading(&mut layout);
        builder.add_unserved(&shape.service_cidrs, &mut layout);
        layout
    }

    fn add_set(&mut self, set: Set) {
        self.sets.insert(set.name.clone(), set);
    }

    fn add_chain(&mut self, name: &str, rules: Vec<impl Into<RuleContent>>) {
        let rules = rules.into_iter().map(Into::into).collect();
        self.chains.insert(name.to_owned(), ChainContent { base: None, rules });
    }

    /// Returns whether the sets and base chains that both layouts have are equal. The kernel cannot
    /// change the properties of an existing set or base chain.
    pub(super) fn can_become(&self, new: &Self) -> bool {
        let sets = self.sets.iter().all(|(name, set)| new.sets.get(name).is_none_or(|wanted| wanted == set));
        let is_same = |(name, chain): (&String, &ChainContent)| {
            new.chains.get(name).is_none_or(|wanted| wanted.base == chain.base)
        };
        sets && self.chains.iter().all(is_same)
    }

    /// Names the chains, sets and elements that differ from those in the kernel.
    pub(super) fn differences(&self, found: &Self) -> Vec<String> {
        fn different<'a, K: Ord, V: PartialEq>(
            one: &'a BTreeMap<K, V>,
            other: &'a BTreeMap<K, V>,
        ) -> impl Iterator<Item = &'a K> {
            let differs = |(key, value): &(&K, &V)| other.get(*key) != Some(*value);
            let surplus = other.keys().filter(|key| !one.contains_key(*key));
            one.iter().filter(differs).map(|(key, _)| key).chain(surplus)
        }
        let chains = different(&self.chains, &found.chains).map(|name| format!("the chain {name}"));
        let sets = different(&self.sets, &found.sets).map(|name| format!("the set {name}"));
        let elements = different(&self.elements, &found.elements);
        let elements = elements.map(|(set, key)| format!("the element {key} of the set {set}"));
        chains.chain(sets).chain(elements).collect()
    }

    /// Adds the changes from this layout to `new` to a transaction. Returns the number of chains
    /// that the transaction writes or deletes.
    pub(super) fn change_to(&self, new: &Self, table: &TableName, transaction: &mut Transaction) -> u32 {
        let mut written = 0;
        let old_chains = |name: &String| self.chains.get(name);
        for (_, set) in new.sets.iter().filter(|(name, _)| !self.sets.contains_key(*name)) {
            transaction.add_set(set);
        }
        for (name, content) in new.chains.iter().filter(|(name, _)| old_chains(name).is_none()) {
            let chain = match content.base {
                Some(base) => Chain::base(table, name, base),
                None => Chain::regular(table, name),
            };
            transaction.add_chain(&chain);
        }
        let changed = |name: &String| new.chains.get(name) != self.chains.get(name);
        for (name, _) in self.chains.iter().filter(|(name, content)| changed(name) && !content.rules.is_empty()) {
            transaction.flush_chain(table, name);
        }
        for (place, _) in self.elements.iter().filter(|(place, verdict)| new.elements.get(*place) != Some(*verdict)) {
            transaction.delete_elements(table, place.0.as_str(), [Element::new(place.1.clone())]);
        }
        for (name, content) in new.chains.iter().filter(|(name, _)| changed(name)) {
            written += 1;
            for rule in &content.rules {
                let RuleContent { expressions, user_data } = rule.clone();
                transaction.add_rule(&Rule { user_data, ..Rule::new(table, name, expressions) });
            }
        }
        for (place, verdict) in &new.elements {
            if self.elements.get(place) != Some(verdict) {
                let element = Element::new(place.1.clone());
                let element = match verdict {
                    Some(verdict) => element.with_verdict(verdict.clone()),
                    None => element,
                };
                transaction.add_elements(table, place.0.as_str(), [element]);
            }
        }
        for name in self.chains.keys().filter(|name| !new.chains.contains_key(*name)) {
            written += 1;
            transaction.delete_chain(table, name);
        }
        for name in self.sets.keys().filter(|name| !new.sets.contains_key(*name)) {
            transaction.delete_set(table, name);
        }
        written
    }
}

/// The inputs of all parts of a layout.
struct Builder<'a> {
    config: &'a LayoutConfig,
    expressions: Expressions,
    table: TableName,
}

/// The first word of the registers. Keys are loaded here.
const FIRST: Register = Register::word(0);
/// The register at which targets are loaded. The key of a target does not reach this register: the
/// longest such key, an IPv6 frontend, has 6 words.
const SECOND: Register = Register::word(8);
impl Builder<'_> {
    fn add_base_chains(&self, layout: &mut Layout) {
        let is_new = || self.expressions.is_new();
        let is_untranslated = || [is_new(), self.expressions.is_not_translated()].concat();
        let then = |mut rule: Vec<Expression>, chain: &str| {
            rule.push(jump(chain));
            rule
        };
        let mut base = |name: &str, kind, hook, priority, rules: Vec<Vec<Expression>>| {
            let base = Some(BaseChain { kind, hook, priority, policy: Policy::Accept });
            let rules = rules.into_iter().map(Into::into).collect();
            layout.chains.insert(name.to_owned(), ChainContent { base, rules });
        };
        for (name, hook) in [("firewall-prerouting", Hook::Prerouting), ("firewall-output", Hook::Output)] {
            base(name, ChainType::Filter, hook, BEFORE_NAT, vec![then(is_new(), FIREWALL)]);
        }
        for (name, hook) in [("nat-prerouting", Hook::Prerouting), ("nat-output", Hook::Output)] {
            base(name, ChainType::Nat, hook, DESTINATION_NAT, vec![vec![jump(SERVICES)]]);
        }
        for (name, hook) in
            [("filter-input", Hook::Input), ("filter-forward", Hook::Forward), ("filter-output", Hook::Output)]
        {
            let mut rules = vec![then(is_untranslated(), UNSERVED)];
            if hook == Hook::Forward && !self.config.conntrack_tcp_be_liberal {
                // NAT does not translate an INVALID packet. If one of an endpoint reached the
                // client, its kernel would answer with a reset, which would end the connection.
                rules.push([self.expressions.is_invalid(), vec![Expression::Verdict(Verdict::Drop)]].concat());
            }
            if hook == Hook::Input {
                let to_node = self.node_port_destinations().into_iter();
                rules.extend(
                    to_node.map(|destination| then([is_untranslated(), destination].concat(), UNSERVED_NODE_PORTS)),
                );
            }
            if hook != Hook::Forward && self.config.has_loopback_guard() {
                rules.insert(0, vec![jump(LOOPBACK_GUARD)]);
            }
            if self.config.counts_services {
                let mut counted = self.expressions.is_translated();
                if hook == Hook::Input {
                    // A packet between programs of the node was counted in the chain of `output`.
                    counted.extend(self.expressions.is_not_from_loopback());
                }
                rules.insert(0, then(counted, COUNTERS));
            }
            base(name, ChainType::Filter, hook, 0, rules);
        }
        base(
            "nat-postrouting",
            ChainType::Nat,
            Hook::Postrouting,
            SOURCE_NAT,
            vec![then(self.expressions.is_translated(), MASQUERADING)],
        );
        if self.config.has_loopback_guard() {
            layout.add_chain(LOOPBACK_GUARD, vec![self.loopback_guard()]);
        }
    }

    /// Drops new connections to 127.0.0.0/8 from other addresses, except translated ones. With
    /// `route_localnet` on, neighbours could otherwise reach programs on 127.0.0.1 (CVE-2020-8558).
    fn loopback_guard(&self) -> Vec<Expression> {
        let (to, range) = (&self.expressions, loopback());
        [
            to.in_range(Side::Source, &range, Comparison::NotEqual),
            to.in_range(Side::Destination, &range, Comparison::Equal),
            to.is_not_established(),
            to.is_not_translated(),
            vec![Expression::Verdict(Verdict::Drop)],
        ]
        .concat()
    }

    fn add_node_addresses(&self, layout: &mut Layout) {
        let mut add = |name: &str, addresses: &mut dyn Iterator<Item = IpAddr>| {
            layout.add_set(node_address_set(&self.table, self.config.family, name));
            layout.elements.extend(addresses.map(|address| ((name.to_owned(), Value::from(address)), None)));
        };
        add(names::NODE_PORT_ADDRESSES, &mut self.config.addresses_of_node_ports());
        if !self.config.has_fib {
            add(names::NODE_ADDRESSES, &mut self.config.interfaces.iter().copied());
        }
    }

    /// Returns conditions on the source address. Packets that meet one come from the node itself.
    fn sources_of_node(&self) -> Vec<Vec<Expression>> {
        let to = self.expressions;
        if self.config.has_fib {
            return vec![to.is_local(Side::Source)];
        }
        let mut all = vec![vec![to.address(Side::Source, FIRST), to.is_in(names::NODE_ADDRESSES, FIRST)]];
        if self.config.family == Family::V4 {
            all.push(to.in_range(Side::Source, &loopback(), Comparison::Equal));
        }
        all
    }

    /// Returns conditions on the source. Packets that meet one of these conditions come from local
    /// pods or from the node itself.
    fn sources_inside(&self) -> impl Iterator<Item = Vec<Expression>> {
        let pods = self.config.detector.iter().map(|detector| self.expressions.is_from_pod(detector));
        pods.chain(self.sources_of_node())
    }

    /// Returns conditions on the destination address of the connection's first packet. Connections
    /// to NodePorts meet one of these conditions.
    fn original_node_port_destinations(&self) -> Vec<Vec<Expression>> {
        let to = self.expressions;
        let mut all = vec![vec![to.original_destination(FIRST), to.is_in(names::NODE_PORT_ADDRESSES, FIRST)]];
        let range = self.config.loopback_of_node_ports();
        all.extend(
            range.map(|range| to.is_address_in_range(to.original_destination(Register::R1), &range, Comparison::Equal)),
        );
        all
    }

    /// Returns conditions on the destination address. Packets that meet one may use NodePorts.
    fn node_port_destinations(&self) -> Vec<Vec<Expression>> {
        let to = self.expressions;
        match &self.config.node_port_addresses {
            NodePortAddresses::All if self.config.has_fib => {
                let mut all = to.is_local(Side::Destination);
                // NodePorts never answer on ::1.
                let excluded = match self.config.family {
                    Family::V4 if self.config.localhost_node_ports => None,
                    Family::V4 => Some(loopback()),
                    Family::V6 => Some(IpAddr::from(Ipv6Addr::LOCALHOST).into()),
                };
                if let Some(range) = excluded {
                    all.extend(to.in_range(Side::Destination, &range, Comparison::NotEqual));
                }
                vec![all]
            }
            NodePortAddresses::All | NodePortAddresses::Only(_) => {
                let in_set = [to.address(Side::Destination, FIRST), to.is_in(names::NODE_PORT_ADDRESSES, FIRST)];
                let range = self.config.loopback_of_node_ports();
                let in_range = range.map(|range| to.in_range(Side::Destination, &range, Comparison::Equal));
                [in_set.into()].into_iter().chain(in_range).collect()
            }
        }
    }

    fn add_firewall(&self, shape: &Shape, layout: &mut Layout) {
        let to = self.expressions;
        let frontend_bytes = to.address_bytes() + 8;
        let mut guarded = to.frontend(FIRST);
        guarded.push(to.is_in(names::GUARDED, FIRST));
        guarded.push(Expression::Verdict(Verdict::Goto("source-ranges".to_owned())));
        layout.add_chain(FIREWALL, vec![guarded]);
        let mut rules: Vec<Vec<Expression>> = Vec::new();
        for length in &shape.prefix_lengths {
            let source = FIRST.after(frontend_bytes);
            let mut rule = to.frontend(FIRST);
            rule.push(to.address(Side::Source, source));
            rule.extend(to.mask(*length, source));
            rule.push(to.is_in(&admitted(*length), FIRST));
            rule.push(Expression::Verdict(Verdict::Return));
            rules.push(rule);
        }
        rules.push(vec![Expression::Verdict(Verdict::Drop)]);
        layout.add_chain("source-ranges", rules);
    }

    fn key(&self, lookup: Lookup, to: Register) -> Vec<Expression> {
        match lookup {
            Lookup::Service | Lookup::Inside => self.expressions.frontend(to),
            Lookup::NodePort | Lookup::InsideNodePort => self.expressions.node_port(to),
        }
    }

    /// Loads the five words of the packet's target. Continues if the packet has a target.
    fn target(&self, lookup: Lookup, to: Register) -> Vec<Expression> {
        let words = TIMEOUT_WORD..=GROUP_WORD;
        let mut all: Vec<Expression> =
            words.map(|word| self.expressions.placeholder(Register::word(to.index() + word))).collect();
        all.extend(self.key(lookup, FIRST));
        all.push(self.expressions.lookup(lookup_map(lookup), FIRST, to));
        all
    }

    /// Continues if the packet has a target.
    fn has_target(&self, lookup: Lookup) -> Vec<Expression> {
        let mut all = self.target(lookup, SECOND);
        // The first word is always 0. The comparison with it makes `nft` print the lookup.
        all.push(Expression::equal(SECOND, Value::host_u32(0)));
        all
    }

    fn add_dispatch(&self, shape: &Shape, layout: &mut Layout) {
        let inside = |outer: Lookup, chain: &str| {
            let rule = |source: Vec<Expression>| {
                let mut all = self.has_target(outer);
                all.extend(source);
                all.push(jump(chain));
                all
            };
            self.sources_inside().map(|source| RuleContent::from(rule(source))).collect::<Vec<_>>()
        };
        let mut services = inside(Lookup::Inside, INSIDE);
        services.extend(self.dispatch(Lookup::Service, shape, layout));
        for mut destination in self.node_port_destinations() {
            destination.push(jump(NODE_PORTS));
            services.push(destination.into());
        }
        if let Some(address) = self.config.ping_answered_by {
            let to = &self.expressions;
            let mut ping = to.is_echo_request();
            ping.extend([to.address(Side::Destination, FIRST), to.is_in(names::CLUSTER_IPS, FIRST)]);
            ping.extend(to.translate_to(address));
            services.push(RuleContent::with_comment(ping, "the node answers pings to ClusterIPs"));
        }
        let mut node_ports = inside(Lookup::InsideNodePort, INSIDE_NODE_PORTS);
        node_ports.extend(self.dispatch(Lookup::NodePort, shape, layout));
        let rules = [
            (SERVICES, services),
            (NODE_PORTS, node_ports),
            (INSIDE, self.dispatch(Lookup::Inside, shape, layout)),
            (INSIDE_NODE_PORTS, self.dispatch(Lookup::InsideNodePort, shape, layout)),
        ];
        for (name, rules) in rules {
            layout.add_chain(name, rules);
        }
    }

    /// The rules that lead from a map of frontends to the chains that draw a slot.
    fn dispatch(&self, lookup: Lookup, shape: &Shape, layout: &mut Layout) -> Vec<RuleContent> {
        let to = self.expressions;
        let map = picks_map(lookup);
        layout.add_set(Set::verdict_map(&self.table, &map, &[DataType::Mark, DataType::Mark]));
        let timeouts = shape.picks.iter().filter(|pick| pick.lookup == lookup);
        for timeout in timeouts.filter_map(|pick| pick.affinity_timeout_seconds) {
            layout.add_set(self.clients_set(timeout));
            layout.add_set(self.recordings_set(timeout));
        }
        let mut by_count = self.target(lookup, SECOND);
        by_count.push(to.verdict_of(&map, SECOND.after(4 * TIMEOUT_WORD)));
        let text = format!("affinity timeout and number of endpoints (0: by client), from @{}", lookup_map(lookup));
        let by_count = RuleContent::with_comment(by_count, &text);
        let mut drop = self.has_target(lookup);
        drop.push(Expression::Verdict(Verdict::Drop));
        // Before Linux 6.17, a lookup may find no element while a transaction replaces the element.
        // The second rule repeats the lookup and finds the new element.
        let direct = [by_count.clone(), by_count, drop.into()];
        let mut rules: Vec<RuleContent> = self.redirect(lookup).into_iter().chain(direct).collect();
        if self.config.counts_services {
            let set = counter_set(Counted::Connections);
            let set = if has_address(lookup) { set.to_owned() } else { of_node_ports(set) };
            let mut count = self.has_target(lookup);
            count.push(to.is_in(&set, FIRST));
            rules.insert(0, RuleContent::with_comment(count, &format!("counts connections in @{set}")));
        }
        rules
    }

    /// Adds the chain that counts the packets of translated connections, by the destination of the
    /// connection's first packet.
    fn add_counters(&self, layout: &mut Layout) {
        let to = self.expressions;
        let set = counter_set(Counted::Traffic);
        let count = |key: Vec<Expression>, set: &str| {
            [key, vec![to.is_in(set, FIRST), Expression::Verdict(Verdict::Return)]].concat()
        };
        let rules =
            vec![count(to.original_frontend(FIRST), set), count(to.original_node_port(FIRST), &of_node_ports(set))];
        layout.add_chain(COUNTERS, rules);
    }

    /// Sends connections to the proxy of mode userspace while the set `gate` contains TCP. If the
    /// lookup in this set misses, the next rules send the connection to an endpoint.
    fn redirect(&self, lookup: Lookup) -> Option<RuleContent> {
        let (to, listener) = (self.expressions, self.config.listeners.get(&lookup)?);
        let mut rule = self.has_target(lookup);
        let straight = names::STRAIGHT.to_owned();
        let straight = if has_address(lookup) { straight } else { of_node_ports(&straight) };
        rule.push(to.is_not_in(&straight, FIRST));
        rule.extend(to.is_of(Protocol::Tcp));
        rule.extend(to.is_protocol_in(names::GATE));
        rule.extend(to.translate_to_listener(*listener));
        Some(RuleContent::with_comment(rule, "the proxy, while it accepts connections"))
    }

    fn add_masquerading(&self, layout: &mut Layout) {
        let to = self.expressions;
        let hairpin = vec![
            to.address(Side::Source, FIRST),
            to.address(Side::Destination, FIRST.after(to.address_bytes())),
            to.is_in(names::HAIRPINS, FIRST),
            to.masquerade(),
        ];
        // The proxy sees the addresses of its clients. Its own connections are not translated.
        let to_proxy = self.config.listeners.values().next().map(|listener| {
            let proxy = to.in_range(Side::Destination, &listener.ip().into(), Comparison::Equal);
            [proxy, vec![Expression::Verdict(Verdict::Return)]].concat()
        });
        let mut rules: Vec<Vec<Expression>> = to_proxy.into_iter().chain([hairpin]).collect();
        let decide = |key: Vec<Expression>, set: &str, sources: MasqueradeSources| {
            let verdict = match sources {
                MasqueradeSources::Nobody => Verdict::Return,
                sources => Verdict::Goto(masquerade_set(sources).to_owned()),
            };
            [key, vec![to.is_in(set, FIRST), Expression::Verdict(verdict)]].concat()
        };
        rules.extend(
            MASQUERADE_SOURCES.map(|sources| decide(to.original_frontend(FIRST), masquerade_set(sources), sources)),
        );
        let to_node_ports = self.original_node_port_destinations().into_iter();
        rules.extend(to_node_ports.map(|rule| [rule, vec![jump(MASQUERADING_NODE_PORTS)]].concat()));
        layout.add_chain(MASQUERADING, rules);
        let node_ports = MASQUERADE_SOURCES
            .map(|sources| decide(to.original_node_port(FIRST), &of_node_ports(masquerade_set(sources)), sources));
        layout.add_chain(MASQUERADING_NODE_PORTS, node_ports.into());
        let mut outside = Vec::new();
        if let Some(detector) = &self.config.detector {
            let mut pods = to.is_from_pod(detector);
            pods.push(Expression::Verdict(Verdict::Return));
            outside.push(pods);
        }
        outside.push(vec![to.masquerade()]);
        let node = self.sources_of_node().into_iter().map(|rule| [rule, vec![to.masquerade()]].concat());
        let chains = [
            (MasqueradeSources::Outside, outside),
            (MasqueradeSources::Node, node.collect()),
            (MasqueradeSources::Everyone, vec![vec![to.masquerade()]]),
        ];
        for (sources, rules) in chains {
            layout.add_chain(masquerade_set(sources), rules);
        }
    }

    /// Adds the chains that reject or drop untranslated packets. The destinations of these packets
    /// are frontends without endpoints, and addresses and ports that no Service uses.
    fn add_unserved(&self, service_cidrs: &BTreeSet<IpNet>, layout: &mut Layout) {
        let to = self.expressions;
        layout.add_chain(REJECT, vec![vec![to.reject()]]);
        let refuse = |key: Vec<Expression>, set: &str, refusal: Refusal| {
            let verdict = match refusal {
                Refusal::Reject => Verdict::Goto(REJECT.to_owned()),
                Refusal::Drop => Verdict::Drop,
            };
            [key, vec![to.is_in(set, FIRST), Expression::Verdict(verdict)]].concat()
        };
        // The frontend of an untranslated packet may have endpoints: the first one was added after
        // the packet passed the rules that translate, or an endpoint on the node's network has the
        // address and port of the frontend, which conntrack does not mark as translated.
        let leave_served = |lookup| [self.has_target(lookup), vec![Expression::Verdict(Verdict::Return)]].concat();
        let addresses = REFUSALS.map(|refusal| refuse(to.frontend(FIRST), refusal_set(refusal), refusal));
        let mut rules: Vec<Vec<Expression>> = addresses.into();
        rules.push(leave_served(Lookup::Service));
        rules.push(vec![
            to.address(Side::Destination, FIRST),
            to.is_in(names::CLUSTER_IPS, FIRST),
            Expression::Verdict(Verdict::Goto(UNUSED_PORTS.to_owned())),
        ]);
        // The map of targets may have missed a frontend whose target is replaced. Each frontend is
        // also in a set whose elements are not replaced: a packet to it is dropped and sent again.
        let mut unused_ports: Vec<Vec<Expression>> = MASQUERADE_SOURCES
            .map(|sources| [to.frontend(FIRST), vec![to.is_in(masquerade_set(sources), FIRST)]].concat())
            .map(|known| [known, vec![Expression::Verdict(Verdict::Drop)]].concat())
            .into();
        unused_ports.push(vec![to.reject()]);
        layout.add_chain(UNUSED_PORTS, unused_ports);
        for range in service_cidrs {
            let mut unused = to.in_range(Side::Destination, range, Comparison::Equal);
            unused.push(Expression::Verdict(Verdict::Drop));
            rules.push(unused);
        }
        layout.add_chain(UNSERVED, rules);
        let node_ports =
            REFUSALS.map(|refusal| refuse(to.node_port(FIRST), &of_node_ports(refusal_set(refusal)), refusal));
        let mut rules: Vec<Vec<Expression>> = node_ports.into();
        rules.push(leave_served(Lookup::NodePort));
        layout.add_chain(UNSERVED_NODE_PORTS, rules);
    }
}

fn loopback() -> IpNet {
    IpNet::new_assert(Ipv4Addr::new(127, 0, 0, 0).into(), 8)
}
