//! The way from a base chain to the rules of single frontends.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
};

use headgate_core::{
    Family, Protocol,
    forwarding::{Fate, NodePortsAt, Origin, Problem},
    frontends::Frontend,
    iptables::RulesTable,
};
use ipnet::IpNet;

use super::{
    evaluate::{Client, FirstPacket, is_loopback},
    parse::{ChainId, Condition, Rule, Rules, Target, Test},
};
use crate::outcome::{Ending, Outcome};

/// The chain of NodePorts. Its rules are read once, although a rule for each address leads to it.
const NODE_PORTS: &str = "KUBE-NODEPORTS";

const MAX_DEPTH: usize = 16;

/// The maximum number of rules that end the way of packets for more than one frontend.
const MAX_CUTS: usize = 64;

/// The packets that can reach a rule.
#[derive(Debug, Clone, Copy, Default)]
struct Reach<'a> {
    destination: Option<IpNet>,
    to_node: Option<bool>,
    translated: Option<bool>,
    protocol: Option<Protocol>,
    ports: Option<(u16, u16)>,
    /// The chain with a condition on the way that only some of these packets may meet.
    uncertain: Option<&'a str>,
}

impl Reach<'_> {
    /// The only frontend whose packets are in reach. If `is_at_node`, all packets are to the node.
    fn frontend(&self, family: Family, is_at_node: bool) -> Option<Frontend> {
        let (first, last) = self.ports?;
        let protocol = self.protocol.filter(|_| first == last && self.translated != Some(true))?;
        match (self.destination, self.to_node) {
            (Some(net), None | Some(false)) if net.prefix_len() == net.max_prefix_len() => {
                Some(Frontend::Address(net.addr(), protocol, first))
            }
            (None, to_node) if to_node.unwrap_or(is_at_node) => Some(Frontend::NodePort(family, protocol, first)),
            _ => None,
        }
    }

    fn includes(&self, frontend: &Frontend, is_translated: bool) -> bool {
        let is_here = match frontend {
            Frontend::Address(address, ..) => {
                self.destination.is_none_or(|net| net.contains(address)) && self.to_node != Some(true)
            }
            Frontend::NodePort(..) => self.destination.is_none() && self.to_node != Some(false),
        };
        is_here
            && self.translated.is_none_or(|wanted| wanted == is_translated)
            && self.protocol.is_none_or(|wanted| wanted == frontend.protocol())
            && self.ports.is_none_or(|(first, last)| (first..=last).contains(&frontend.port()))
    }
}

pub(super) struct Walk<'a> {
    rules: &'a Rules,
    table: RulesTable,
    client: Client<'a>,
    family: Family,
    /// All packets are to the node.
    is_at_node: bool,
    /// Frontends whose packets are decided by a rule for many frontends.
    cuts: Vec<(Reach<'a>, Option<Ending>)>,
    /// What happens to packets for each frontend. The first rule of a frontend decides.
    pub(super) reached: BTreeMap<Frontend, Outcome>,
    /// The addresses whose packets reach the chain of NodePorts.
    pub(super) node_ports_at: NodePortsAt,
    has_node_ports: bool,
    pub(super) problems: BTreeSet<Problem>,
}

impl<'a> Walk<'a> {
    pub(super) fn new(rules: &'a Rules, family: Family, table: RulesTable, client: Client<'a>) -> Self {
        Self {
            rules,
            table,
            client,
            family,
            is_at_node: false,
            cuts: Vec::new(),
            reached: BTreeMap::new(),
            node_ports_at: NodePortsAt::Only(BTreeSet::new()),
            has_node_ports: false,
            problems: BTreeSet::new(),
        }
    }

    /// Walks from the rules of a base chain that lead to `targets` down. What other programs do
    /// with packets before and after these rules does not count, but if a rule before them ends all
    /// packets, then no rule of `targets` has an effect.
    pub(super) fn from(&mut self, base: &'a str, targets: &[&str]) {
        let rules: &'a Rules = self.rules;
        let Some(list) = rules.find(self.table, base).map(|id| &rules.chain(id).rules) else { return };
        let is_ours = |rule: &&Rule| rules.target(rule).is_some_and(|target| targets.contains(&target));
        self.is_at_node = base == "INPUT";
        // The packets that do not meet another condition miss the rules of Headgate. A jump for all
        // packets beside such a jump is enough.
        let is_whole = |condition: &Condition| match condition.test {
            Test::Constant(value) => value,
            Test::ToNode => condition.is_negated && base == "OUTPUT",
            _ => false,
        };
        for name in targets {
            let mut jumps = list.iter().filter(|rule| rules.target(rule) == Some(name)).peekable();
            if jumps.peek().is_some() && !jumps.any(|rule| rule.conditions.iter().all(is_whole)) {
                self.not_understood(base);
            }
        }
        let count = list.iter().rposition(|rule| is_ours(&rule)).map_or(0, |last| last + 1);
        for rule in &list[..count] {
            if is_ours(&rule) {
                if let Some(reach) = self.narrowed(rule, Reach::default(), base) {
                    self.many(rule, reach, base, 0);
                }
            } else if let (Target::End(ending), []) = (&rule.target, &rule.conditions[..]) {
                self.cuts.push((Reach { translated: Some(false), ..Reach::default() }, Some(*ending)));
            }
        }
        if self.rules.is_exhausted() {
            let (family, table) = (self.family, self.table);
            self.problems.insert(Problem::NotUnderstood(format!(
                "cannot verify the rules of table {table} ({family}): they lead packets through too many chains"
            )));
        }
    }

    /// What becomes of translated packets in filter.
    pub(super) fn filtered(&self, fate: Fate, protocol: Protocol) -> Fate {
        let (Fate::Forwarded(endpoints) | Fate::Partly(endpoints)) = &fate else { return fate };
        let refused = |endpoint: &SocketAddr| {
            let to = Frontend::Address(endpoint.ip(), protocol, endpoint.port());
            let (_, ending) = self.cuts.iter().find(|(reach, _)| reach.includes(&to, true))?;
            ending.filter(|ending| *ending != Ending::Accept)
        };
        match endpoints.iter().find_map(refused) {
            None => fate,
            Some(ending) if endpoints.iter().all(|endpoint| refused(endpoint).is_some()) => Ending::fate(Some(ending)),
            Some(_) => Fate::Partly(endpoints.iter().filter(|endpoint| refused(endpoint).is_none()).copied().collect()),
        }
    }

    /// Returns false if no packet leaves the chain at its end.
    fn chain(&mut self, id: ChainId, reach: Reach<'a>, depth: usize) -> bool {
        let rules: &'a Rules = self.rules;
        let chain = rules.chain(id);
        if chain.choice.is_some() || depth > MAX_DEPTH {
            self.not_understood(&chain.name);
            return true;
        }
        let cuts = self.cuts.len();
        for rule in &chain.rules {
            if !rules.step() {
                return true;
            }
            let Some(narrowed) = self.narrowed(rule, reach, &chain.name) else { continue };
            let goes_on = match narrowed.frontend(self.family, self.is_at_node) {
                Some(frontend) => {
                    self.decide(frontend, rule, &chain.name, reach.uncertain);
                    true
                }
                None => self.many(rule, narrowed, &chain.name, depth),
            };
            let is_all = rule.conditions.iter().all(|one| one.test == Test::Constant(true));
            if !goes_on && is_all {
                if rule.target == Target::Return {
                    break;
                }
                return false;
            }
        }
        // A RETURN leads back to the chain above.
        let here = self.cuts.split_off(cuts);
        self.cuts.extend(here.into_iter().filter(|(_, ending)| ending.is_some()));
        true
    }

    /// The packets that meet the conditions of a rule of `chain`. `None` if no packet does.
    fn narrowed(&self, rule: &Rule, mut reach: Reach<'a>, chain: &'a str) -> Option<Reach<'a>> {
        for Condition { test, is_negated } in &rule.conditions {
            let meets = match test {
                Test::Constant(value) => *value,
                Test::FromNode => (self.client.origin == Origin::Node) != *is_negated,
                Test::Source(net) if is_loopback(net) => *is_negated,
                Test::Destination(net) if *is_negated && is_loopback(net) => true,
                // kube-proxy counts connections to NodePorts at loopback addresses, which the table
                // does not describe.
                Test::Destination(net) if reach.to_node == Some(true) && is_loopback(net) => false,
                Test::Translated if self.table != RulesTable::Filter => *is_negated,
                Test::Translated => reach.translated.replace(!is_negated).is_none_or(|old| old != *is_negated),
                Test::ToNode => reach.to_node.replace(!is_negated).is_none_or(|old| old != *is_negated),
                Test::Destination(net) if !is_negated => {
                    let old = reach.destination.unwrap_or(*net);
                    let smaller = if old.contains(net) { *net } else { old };
                    reach.destination = Some(smaller).filter(|_| net.contains(&smaller));
                    reach.destination.is_some()
                }
                Test::Protocol(protocol) if !is_negated => {
                    let old = std::mem::replace(&mut reach.protocol, *protocol);
                    protocol.is_some() && old.is_none_or(|old| Some(old) == *protocol)
                }
                Test::Ports(first, last) if !is_negated => {
                    let (from, to) = reach.ports.unwrap_or((0, u16::MAX));
                    let (first, last) = *reach.ports.insert((*first.max(&from), *last.min(&to)));
                    first <= last
                }
                _ => {
                    reach.uncertain = reach.uncertain.or(Some(chain));
                    true
                }
            };
            if !meets {
                return None;
            }
        }
        Some(reach)
    }

    /// Decides about one frontend, if no earlier rule has decided. `uncertain` is the chain with a
    /// condition on the way to `chain` that only some packets may meet.
    fn decide(&mut self, frontend: Frontend, rule: &Rule, chain: &str, uncertain: Option<&str>) {
        if self.reached.get(&frontend).is_some_and(|outcome| !outcome.goes_on) {
            return;
        }
        if let Some((_, ending)) = self.cuts.iter().find(|(reach, _)| reach.includes(&frontend, false)) {
            let outcome = ending.map_or_else(Outcome::goes_on, Outcome::ends);
            self.reached.entry(frontend).or_insert(outcome);
            return;
        }
        if let Some(before) = uncertain.filter(|_| !self.rules.only_marks(&rule.target)) {
            self.not_understood(before);
        }
        let packet = FirstPacket { client: self.client, frontend, depth: 0 };
        let mut unknown = BTreeSet::new();
        let outcome = self.rules.evaluate_rules(std::slice::from_ref(rule), chain, packet, &mut unknown);
        if !self.rules.is_exhausted() {
            unknown.iter().for_each(|chain| self.not_understood(chain));
        }
        let reached = self.reached.entry(frontend).or_default();
        reached.goes_on = false;
        reached.add(outcome);
    }

    /// Follows a rule for many frontends. Returns false if none of its packets goes on.
    fn many(&mut self, rule: &Rule, reach: Reach<'a>, chain: &str, depth: usize) -> bool {
        match rule.target {
            Target::Nothing => true,
            Target::Jump(id) | Target::Goto(id) => {
                let goes_on = if &*self.rules.chain(id).name == NODE_PORTS && self.table == RulesTable::Nat {
                    self.node_ports(id, reach, depth);
                    true
                } else {
                    self.chain(id, reach, depth + 1)
                };
                goes_on && matches!(rule.target, Target::Jump(_))
            }
            Target::Unknown | Target::Translate(_) => {
                self.not_understood(chain);
                true
            }
            // No later rule of Headgate refuses translated packets.
            Target::End(Ending::Accept) if reach.translated == Some(true) => true,
            Target::End(_) | Target::Return => {
                let has_sets = self.client.sets.is_some();
                let is_set = |condition: &Condition| matches!(condition.test, Test::InSet(..));
                let ending = if let Target::End(ending) = rule.target { Some(ending) } else { None };
                let is_certain = reach.uncertain.is_none();
                let is_cut = is_certain && self.cuts.len() < MAX_CUTS;
                if is_cut {
                    self.cuts.push((reach, ending));
                }
                // In filter, Headgate refuses packets of single frontends.
                let refuses = matches!(ending, Some(Ending::Drop | Ending::Reject));
                let is_foreign = self.table == RulesTable::Filter && refuses && reach.translated != Some(false);
                let is_by_set = has_sets && rule.conditions.iter().any(is_set);
                if is_foreign || !(is_cut || is_by_set) {
                    self.not_understood(reach.uncertain.unwrap_or(chain));
                }
                !is_certain
            }
        }
    }

    fn node_ports(&mut self, id: ChainId, reach: Reach<'a>, depth: usize) {
        match reach.destination {
            Some(net) if net.prefix_len() == net.max_prefix_len() => {
                if let NodePortsAt::Only(addresses) = &mut self.node_ports_at {
                    addresses.insert(net.addr());
                }
            }
            Some(_) => self.not_understood(NODE_PORTS),
            None if reach.to_node == Some(true) => self.node_ports_at = NodePortsAt::AnyAddress,
            None => self.node_ports_at = NodePortsAt::Only(BTreeSet::new()),
        }
        if !std::mem::replace(&mut self.has_node_ports, true) {
            let reach = Reach { destination: None, to_node: Some(true), ..reach };
            self.chain(id, reach, depth + 1);
        }
    }

    fn not_understood(&mut self, chain: &str) {
        let (family, table) = (self.family, self.table);
        self.problems.insert(Problem::NotUnderstood(format!(
            "cannot verify what chain {chain} in table {table} ({family}) does: it contains a rule that Headgate does not know"
        )));
    }
}
