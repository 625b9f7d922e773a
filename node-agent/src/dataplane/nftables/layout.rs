//! The rules: base chains, the chains that they call, and the maps from numbers to chains.
//!
//! `docs/nftables.md` shows the way of a packet.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use headgate_core::{
    Family,
    iptables::NodePortAddresses,
    masquerade::LocalDetector,
    nftables::{Lookup, MasqueradeSources, Pick, Refusal, Shape},
};
use ipnet::IpNet;
use nftables_netlink::{
    BaseChain, Chain, ChainType, Comparison, DataType, DynamicSetOperation, Element, Expression, Hook, Policy,
    Register, Rule, Set, TableName, Transaction, Value, Verdict,
};

use super::{
    elements::{
        address_type, admitted, admitted_set, fixed_sets, lookup_map, masquerade_number, names, refusal_number,
    },
    expressions::{Expressions, Side, jump},
};

/// Priority `dstnat`.
const DESTINATION_NAT: i32 = -100;
/// Priority `srcnat`.
const SOURCE_NAT: i32 = 100;
/// Source ranges are checked before the destination is translated.
const BEFORE_NAT: i32 = DESTINATION_NAT - 10;

const FIREWALL: &str = "firewall";
const INSIDE: &str = "inside";
const INSIDE_NODE_PORTS: &str = "inside-node-ports";
const NODE_PORTS: &str = "node-ports";
const REJECT: &str = "reject";
const SERVICES: &str = "services";
const UNSERVED: &str = "unserved";
const UNSERVED_NODE_PORTS: &str = "unserved-node-ports";
const LOOPBACK_GUARD: &str = "loopback-guard";
/// The map from the number of a [`MasqueradeSources`] to what happens.
const MASQUERADING: &str = "masquerading";
/// The map from the number of a [`Refusal`] to a verdict.
const REFUSALS: &str = "refusals";

/// The most clients that a timeout's map of ClientIP affinity records.
const MAX_RECORDED_CLIENTS: u32 = 1 << 17;

/// The configuration that rules depend on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LayoutConfig {
    pub(super) family: Family,
    pub(super) detector: Option<LocalDetector>,
    pub(super) node_port_addresses: NodePortAddresses,
    pub(super) localhost_node_ports: bool,
    /// `nf_conntrack_tcp_be_liberal` is on: no packet is outside the window.
    pub(super) conntrack_tcp_be_liberal: bool,
}

impl LayoutConfig {
    /// Whether NodePorts answer on 127.0.0.0/8, which needs `route_localnet` and a guard.
    pub(super) fn has_loopback_guard(&self) -> bool {
        let may_answer = match &self.node_port_addresses {
            NodePortAddresses::All => true,
            NodePortAddresses::Only(addresses) => addresses.iter().any(IpAddr::is_loopback),
        };
        self.family == Family::V4 && self.localhost_node_ports && may_answer
    }
}

/// A chain with its rules.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct ChainContent {
    pub(super) base: Option<BaseChain>,
    pub(super) rules: Vec<Vec<Expression>>,
}

/// Everything in a table except the elements that services add.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) sets: BTreeMap<String, Set>,
    pub(super) chains: BTreeMap<String, ChainContent>,
    /// Maps from a number to a verdict.
    pub(super) verdicts: BTreeMap<(String, u32), Verdict>,
}

/// The table of a family.
pub(super) fn table_name(family: Family) -> TableName {
    let family = match family {
        Family::V4 => nftables_netlink::Family::Ip,
        Family::V6 => nftables_netlink::Family::Ip6,
    };
    TableName::new(family, "headgate")
}

/// The chain of a [`Pick`].
fn pick_chain(pick: &Pick) -> String {
    let Pick { lookup, affinity_timeout_seconds, count } = pick;
    match affinity_timeout_seconds {
        Some(timeout) => format!("{}-of-{count}-affinity-{timeout}s", lookup_map(*lookup)),
        None => format!("{}-of-{count}", lookup_map(*lookup)),
    }
}

/// The pick of a chain with this name.
pub(super) fn pick_of_chain(name: &str) -> Option<Pick> {
    Lookup::ALL.into_iter().find_map(|lookup| {
        let rest = name.strip_prefix(lookup_map(lookup))?.strip_prefix("-of-")?;
        let (count, timeout) = match rest.split_once("-affinity-") {
            Some((count, timeout)) => (count, Some(timeout.strip_suffix('s')?.parse().ok()?)),
            None => (rest, None),
        };
        Some(Pick { lookup, affinity_timeout_seconds: timeout, count: count.parse().ok()? })
    })
}

/// The map from endpoint counts to chains.
fn picks_map(lookup: Lookup, affinity_timeout_seconds: Option<u32>) -> String {
    match affinity_timeout_seconds {
        Some(timeout) => format!("{}-by-count-affinity-{timeout}s", lookup_map(lookup)),
        None => format!("{}-by-count", lookup_map(lookup)),
    }
}

/// The map from affinity timeouts to chains.
fn affinity_map(lookup: Lookup) -> String {
    format!("{}-by-affinity", lookup_map(lookup))
}

/// The chain that looks for the endpoint of a recorded client.
fn affinity_chain(lookup: Lookup, timeout_seconds: u32) -> String {
    format!("{}-affinity-{timeout_seconds}s", lookup_map(lookup))
}

/// The map of recorded clients.
pub(super) fn clients_map(timeout_seconds: u32) -> String {
    format!("clients-{timeout_seconds}s")
}

impl Layout {
    /// The layout for a configuration and a shape.
    pub(super) fn new(config: &LayoutConfig, shape: &Shape) -> Self {
        let mut layout = Self::default();
        let builder =
            Builder { config, expressions: Expressions { family: config.family }, table: table_name(config.family) };
        for set in fixed_sets(&builder.table, config.family) {
            layout.add_set(set);
        }
        for length in &shape.prefix_lengths {
            layout.add_set(admitted_set(&builder.table, config.family, *length));
        }
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

    fn add_chain(&mut self, name: &str, rules: Vec<Vec<Expression>>) {
        self.chains.insert(name.to_owned(), ChainContent { base: None, rules });
    }

    fn add_verdict(&mut self, map: &str, number: u32, verdict: Verdict) {
        self.verdicts.insert((map.to_owned(), number), verdict);
    }

    /// Adds what leads from one layout to another to a transaction. Returns the number of chains
    /// that are written or deleted.
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
        let element = |number: &u32| Element::new(Value::host_u32(*number));
        for ((map, number), verdict) in &self.verdicts {
            if new.verdicts.get(&(map.clone(), *number)) != Some(verdict) {
                transaction.delete_elements(table, map.as_str(), [element(number)]);
            }
        }
        for (name, content) in new.chains.iter().filter(|(name, _)| changed(name)) {
            written += 1;
            for rule in &content.rules {
                transaction.add_rule(&Rule::new(table, name, rule.clone()));
            }
        }
        for ((map, number), verdict) in &new.verdicts {
            if self.verdicts.get(&(map.clone(), *number)) != Some(verdict) {
                transaction.add_elements(table, map.as_str(), [element(number).with_verdict(verdict.clone())]);
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

/// What all parts of the layout need.
struct Builder<'a> {
    config: &'a LayoutConfig,
    expressions: Expressions,
    table: TableName,
}

/// The first word of the registers.
const FIRST: Register = Register::word(0);
/// A word that no key reaches: in IPv6, the key of a frontend has 6 words.
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
                // A packet outside the window is not translated back. The client's kernel would
                // answer it with a reset, which ends the connection.
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

    /// With `route_localnet` on, neighbours could reach services that are bound to 127.0.0.1
    /// (CVE-2020-8558). Only translated connections may.
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

    /// The conditions under which a destination address may answer NodePorts, one per rule.
    fn node_port_destinations(&self) -> Vec<Vec<Expression>> {
        let to = self.expressions;
        match &self.config.node_port_addresses {
            NodePortAddresses::All => {
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
            NodePortAddresses::Only(addresses) => {
                let of_family = addresses.iter().filter(|address| Family::of(**address) == self.config.family);
                let answering = of_family.filter(|address| {
                    !address.is_loopback() || (address.is_ipv4() && self.config.localhost_node_ports)
                });
                let compare =
                    |address: &IpAddr| to.in_range(Side::Destination, &IpNet::from(*address), Comparison::Equal);
                answering.map(compare).collect()
            }
        }
    }

    /// Clients that source ranges do not admit are dropped.
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

    /// Loads the key of a lookup.
    fn key(&self, lookup: Lookup, to: Register) -> Vec<Expression> {
        match lookup {
            Lookup::Service | Lookup::Inside => self.expressions.frontend(to),
            Lookup::NodePort | Lookup::InsideNodePort => self.expressions.node_port(to),
        }
    }

    /// Loads the number of the packet's group.
    fn group(&self, lookup: Lookup, key: Register, to: Register) -> Vec<Expression> {
        let mut all = self.key(lookup, key);
        all.extend(self.expressions.number(lookup_map(lookup), key, to));
        all
    }

    fn add_dispatch(&self, shape: &Shape, layout: &mut Layout) {
        let inside = |outer: Lookup, chain: &str| {
            let sources = self.config.detector.iter().map(|detector| self.expressions.is_from_pod(detector));
            let sources = sources.chain([self.expressions.is_local(Side::Source)]);
            let rule = |source: Vec<Expression>| {
                let mut all = self.group(outer, FIRST, FIRST);
                all.push(self.expressions.is_found(FIRST));
                all.extend(source);
                all.push(jump(chain));
                all
            };
            sources.map(rule).collect::<Vec<_>>()
        };
        let mut services = inside(Lookup::Inside, INSIDE);
        services.extend(self.dispatch(Lookup::Service, shape, layout));
        for mut destination in self.node_port_destinations() {
            destination.push(jump(NODE_PORTS));
            services.push(destination);
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
    fn dispatch(&self, lookup: Lookup, shape: &Shape, layout: &mut Layout) -> Vec<Vec<Expression>> {
        let to = self.expressions;
        let table = &self.table;
        layout.add_set(Set::verdict_map(table, picks_map(lookup, None), &[DataType::Mark]).with_key_in_host_order());
        let by = |numbers: &str, chains: &str| {
            let mut all = self.group(lookup, FIRST, FIRST);
            all.extend(to.number(numbers, FIRST, FIRST));
            all.push(to.verdict_of(chains, FIRST));
            all
        };
        let mut rules = Vec::new();
        let timeouts: BTreeSet<u32> = shape
            .picks
            .iter()
            .filter(|pick| pick.lookup == lookup)
            .filter_map(|pick| pick.affinity_timeout_seconds)
            .collect();
        if !timeouts.is_empty() {
            let map = affinity_map(lookup);
            layout.add_set(Set::verdict_map(table, &map, &[DataType::Mark]).with_key_in_host_order());
            rules.push(by(names::AFFINITIES, &map));
        }
        for timeout in timeouts {
            self.add_affinity(lookup, timeout, layout);
        }
        // Before Linux 6.17 a lookup may miss while a transaction replaces the key. The second
        // lookup sees the new element.
        rules.extend([by(names::COUNTS, &picks_map(lookup, None)), by(names::COUNTS, &picks_map(lookup, None))]);
        let mut drop = self.group(lookup, FIRST, FIRST);
        drop.extend([to.is_found(FIRST), Expression::Verdict(Verdict::Drop)]);
        rules.push(drop);
        rules
    }

    /// The chain of an affinity timeout: recorded clients keep their endpoint, others get one.
    fn add_affinity(&self, lookup: Lookup, timeout: u32, layout: &mut Layout) {
        let to = self.expressions;
        let table = &self.table;
        let address = address_type(self.config.family);
        let (key, data) = ([DataType::Mark, address], [address, DataType::Port]);
        let clients = Set::map(table, clients_map(timeout), &key, &data).with_size(MAX_RECORDED_CLIENTS);
        layout.add_set(clients.with_timeout_ms(u64::from(timeout) * 1000).dynamic());
        let by_count = picks_map(lookup, Some(timeout));
        layout.add_set(Set::verdict_map(table, &by_count, &[DataType::Mark]).with_key_in_host_order());

        // The group and the endpoint, side by side, are the key of a member.
        let endpoint = FIRST.after(4);
        let mut recorded = self.client(lookup, SECOND);
        recorded.extend(self.group(lookup, FIRST, FIRST));
        recorded.push(to.lookup(&clients_map(timeout), SECOND, endpoint));
        recorded.push(to.is_in(names::MEMBERS, FIRST));
        recorded.push(to.record(&clients_map(timeout), DynamicSetOperation::Update, SECOND, Some(endpoint)));
        recorded.push(to.translate(endpoint));
        let mut unrecorded = self.group(lookup, FIRST, FIRST);
        unrecorded.extend(to.number(names::COUNTS, FIRST, FIRST));
        unrecorded.push(to.verdict_of(&by_count, FIRST));
        let chain = affinity_chain(lookup, timeout);
        layout.add_chain(&chain, vec![recorded, unrecorded.clone(), unrecorded]);
        layout.add_verdict(&affinity_map(lookup), timeout, Verdict::Jump(chain));
    }

    /// Loads the number of the packet's service port and the address of its client. The groups for
    /// both policies share the records of the port.
    fn client(&self, lookup: Lookup, at: Register) -> Vec<Expression> {
        let mut all = self.group(lookup, FIRST, at);
        let (mask, xor) = (Value::host_u32(!1), Value::host_u32(0));
        all.push(Expression::Bitwise { from: at, to: at, mask, xor });
        all.push(self.expressions.address(Side::Source, at.after(4)));
        all
    }

    /// The chain of a pick.
    fn add_pick(&self, pick: &Pick, layout: &mut Layout) {
        let Pick { lookup, affinity_timeout_seconds, count } = *pick;
        let to = self.expressions;
        let mut draw = self.group(lookup, FIRST, FIRST);
        draw.push(to.random(count, FIRST.after(4)));
        draw.push(to.lookup(names::ENDPOINTS, FIRST, FIRST));
        let mut plain = draw.clone();
        plain.push(to.translate(FIRST));
        let chain = pick_chain(pick);
        let mut rules = Vec::new();
        if let Some(timeout) = affinity_timeout_seconds {
            // A full map ends the rule; the next one sends the client on without a record.
            let mut recording = self.client(lookup, SECOND);
            recording.extend(draw);
            let clients = clients_map(timeout);
            recording.push(to.record(&clients, DynamicSetOperation::Delete, SECOND, Some(FIRST)));
            recording.push(to.record(&clients, DynamicSetOperation::Add, SECOND, Some(FIRST)));
            recording.push(to.translate(FIRST));
            rules.push(recording);
        }
        rules.push(plain);
        layout.add_chain(&chain, rules);
        layout.add_verdict(&picks_map(lookup, affinity_timeout_seconds), count, Verdict::Jump(chain));
    }

    fn add_masquerading(&self, layout: &mut Layout) {
        let to = self.expressions;
        layout.add_set(Set::verdict_map(&self.table, MASQUERADING, &[DataType::Mark]).with_key_in_host_order());
        let mut hairpin = vec![
            to.address(Side::Source, FIRST),
            to.address(Side::Destination, FIRST.after(to.address_bytes())),
            to.is_in(names::HAIRPINS, FIRST),
        ];
        hairpin.push(to.masquerade());
        let by = |mut key: Vec<Expression>, map: &str| {
            key.extend(to.number(map, FIRST, FIRST));
            key.push(to.verdict_of(MASQUERADING, FIRST));
            key
        };
        layout.add_chain(
            MASQUERADING,
            vec![
                hairpin,
                by(to.original_frontend(FIRST), names::MASQUERADE),
                by(to.original_node_port(FIRST), names::MASQUERADE_NODE_PORTS),
            ],
        );
        let mut outside = Vec::new();
        if let Some(detector) = &self.config.detector {
            let mut pods = to.is_from_pod(detector);
            pods.push(Expression::Verdict(Verdict::Return));
            outside.push(pods);
        }
        outside.push(vec![to.masquerade()]);
        let mut node = to.is_local(Side::Source);
        node.push(to.masquerade());
        let chains = [
            (MasqueradeSources::Outside, "masquerade-outside", outside),
            (MasqueradeSources::Node, "masquerade-node", vec![node]),
            (MasqueradeSources::Everyone, "masquerade-everyone", vec![vec![to.masquerade()]]),
        ];
        layout.add_verdict(MASQUERADING, masquerade_number(MasqueradeSources::Nobody), Verdict::Return);
        for (sources, chain, rules) in chains {
            layout.add_chain(chain, rules);
            layout.add_verdict(MASQUERADING, masquerade_number(sources), Verdict::Goto(chain.to_owned()));
        }
    }

    /// Packets that no rule translated, for frontends without endpoints and for unused addresses
    /// and ports.
    fn add_unserved(&self, service_cidrs: &BTreeSet<IpNet>, layout: &mut Layout) {
        let to = self.expressions;
        layout.add_set(Set::verdict_map(&self.table, REFUSALS, &[DataType::Mark]).with_key_in_host_order());
        layout.add_verdict(REFUSALS, refusal_number(Refusal::Reject), Verdict::Goto(REJECT.to_owned()));
        layout.add_verdict(REFUSALS, refusal_number(Refusal::Drop), Verdict::Drop);
        layout.add_chain(REJECT, vec![vec![to.reject()]]);
        let refuse = |mut key: Vec<Expression>, map: &str| {
            key.extend(to.number(map, FIRST, FIRST));
            key.push(to.verdict_of(REFUSALS, FIRST));
            key
        };
        // A Service may have got its first endpoint since the packet passed the rules that
        // translate. Its client sends again.
        let drop_served = |lookup| {
            let mut all = self.group(lookup, FIRST, FIRST);
            all.extend([to.is_found(FIRST), Expression::Verdict(Verdict::Drop)]);
            all
        };
        let mut rules = vec![refuse(to.frontend(FIRST), names::UNSERVED), drop_served(Lookup::Service)];
        rules.push(vec![
            to.address(Side::Destination, FIRST),
            to.is_in(names::CLUSTER_IPS, FIRST),
            Expression::Verdict(Verdict::Goto(REJECT.to_owned())),
        ]);
        for range in service_cidrs {
            let mut unused = to.in_range(Side::Destination, range, Comparison::Equal);
            unused.push(Expression::Verdict(Verdict::Drop));
            rules.push(unused);
        }
        layout.add_chain(UNSERVED, rules);
        let rules = vec![refuse(to.node_port(FIRST), names::UNSERVED_NODE_PORTS), drop_served(Lookup::NodePort)];
        layout.add_chain(UNSERVED_NODE_PORTS, rules);
    }
}

fn loopback() -> IpNet {
    IpNet::new_assert(Ipv4Addr::new(127, 0, 0, 0).into(), 8)
}
