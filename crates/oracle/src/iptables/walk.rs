//! The way from a base chain to the rules of single frontends.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use headgate_core::{
    Family, Protocol,
    forwarding::{Fate, Origin, Problem},
    frontends::Frontend,
    masquerade::LocalDetector,
};
use ipnet::IpNet;

use super::{
    evaluate::{Packet, Reached, Sets, is_loopback},
    parse::{ChainId, Condition, Content, Rule, Rules, TableName, Target},
};
use crate::ending::Ending;

/// The chain of NodePorts. Its rules are read once, although a rule for each address leads to it.
const NODE_PORTS: &str = "KUBE-NODEPORTS";

/// The maximum depth of jumps.
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
    fn narrow(&mut self, condition: &Condition) -> bool {
        match condition {
            Condition::Destination(net, false) => {
                let smaller = match self.destination {
                    None => Some(*net),
                    Some(old) if old.contains(net) => Some(*net),
                    Some(old) if net.contains(&old) => Some(old),
                    Some(_) => None,
                };
                self.destination = smaller;
                smaller.is_some()
            }
            Condition::Protocol(protocol, false) => {
                let is_same = protocol.is_some() && self.protocol.is_none_or(|old| Some(old) == *protocol);
                self.protocol = *protocol;
                is_same
            }
            Condition::Ports(first, last, false) => {
                let (from, to) = self.ports.unwrap_or((0, u16::MAX));
                let both = (*first.max(&from), *last.min(&to));
                self.ports = Some(both);
                both.0 <= both.1
            }
            Condition::ToNode(negated) => self.to_node.replace(!negated).is_none_or(|old| old != *negated),
            Condition::Translated(negated) => self.translated.replace(!negated).is_none_or(|old| old != *negated),
            _ => true,
        }
    }

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

/// The walk of one origin through one table.
#[derive(Debug)]
pub(crate) struct Walk<'a> {
    rules: &'a Rules,
    table: TableName,
    origin: Origin,
    detector: Option<&'a LocalDetector>,
    sets: Option<&'a dyn Sets>,
    family: Family,
    /// All packets are to the node.
    is_at_node: bool,
    /// Frontends whose packets are decided by a rule for many frontends.
    cuts: Vec<(Reach<'a>, Option<Ending>)>,
    /// What happens to packets for each frontend. The first rule of a frontend decides.
    pub(crate) reached: BTreeMap<Frontend, Reached>,
    /// The addresses whose packets reach the chain of NodePorts.
    pub(crate) node_port_addresses: BTreeSet<IpAddr>,
    /// Packets to all addresses of the node reach the chain of NodePorts.
    pub(crate) is_any_address: bool,
    has_node_ports: bool,
    pub(crate) problems: BTreeSet<Problem>,
}

impl<'a> Walk<'a> {
    pub(crate) fn new(
        rules: &'a Rules,
        family: Family,
        table: TableName,
        origin: Origin,
        detector: Option<&'a LocalDetector>,
        sets: Option<&'a dyn Sets>,
    ) -> Self {
        Self {
            rules,
            table,
            origin,
            detector,
            sets,
            family,
            is_at_node: false,
            cuts: Vec::new(),
            reached: BTreeMap::new(),
            node_port_addresses: BTreeSet::new(),
            is_any_address: false,
            has_node_ports: false,
            problems: BTreeSet::new(),
        }
    }

    /// Walks from the rules of a base chain that lead to `targets` down. What other programs do
    /// with packets before and after these rules does not count, but if a rule before them ends all
    /// packets, then no rule of `targets` has an effect.
    pub(crate) fn from(&mut self, base: &'a str, targets: &[&str]) {
        let rules: &'a Rules = self.rules;
        let Some(Content::Rules(list)) = rules.find(self.table, base).map(|id| &rules.chain(id).content) else {
            return;
        };
        let target = |rule: &Rule| match rule.target {
            Target::Jump(id) | Target::Goto(id) => Some(&*rules.chain(id).name),
            _ => None,
        };
        let is_ours = |rule: &&Rule| target(rule).is_some_and(|target| targets.contains(&target));
        self.is_at_node = base == "INPUT";
        // The packets that do not meet another condition miss the rules of Headgate. A jump for all
        // packets beside such a jump is enough.
        let is_whole = |condition: &Condition| match condition {
            Condition::Constant(value) => *value,
            Condition::ToNode(negated) => *negated && base == "OUTPUT",
            _ => false,
        };
        for name in targets {
            let mut jumps = list.iter().filter(|rule| target(rule) == Some(name)).peekable();
            if jumps.peek().is_some() && !jumps.any(|rule| rule.conditions.iter().all(is_whole)) {
                self.not_understood(base);
            }
        }
        let count = list.iter().rposition(|rule| is_ours(&rule)).map_or(0, |last| last + 1);
        for rule in &list[..count] {
            let ending = rule.target.ending().filter(|_| rule.conditions.is_empty());
            if is_ours(&rule) {
                if let Some(reach) = self.narrowed(rule, Reach::default(), base) {
                    self.many(rule, reach, base, 0);
                }
            } else if ending.is_some() {
                self.cuts.push((Reach { translated: Some(false), ..Reach::default() }, ending));
            }
        }
        if self.rules.is_exhausted() {
            let (family, table) = (self.family, self.table.as_str());
            self.problems.insert(Problem::NotUnderstood(format!(
                "cannot verify the rules of table {table} ({family}): they lead packets through too many chains"
            )));
        }
    }

    /// What becomes of translated packets in filter.
    pub(crate) fn filtered(&self, fate: Fate, protocol: Protocol) -> Fate {
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
        let (Content::Rules(list), 0..=MAX_DEPTH) = (&chain.content, depth) else {
            self.not_understood(&chain.name);
            return true;
        };
        let cuts = self.cuts.len();
        for rule in list {
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
            let is_all = rule.conditions.iter().all(|one| matches!(one, Condition::Constant(true)));
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
        for condition in &rule.conditions {
            let meets = match condition {
                Condition::Constant(value) => *value,
                Condition::FromNode(negated) => (self.origin == Origin::Node) != *negated,
                Condition::Source(net, negated) if is_loopback(net) => *negated,
                Condition::Destination(net, true) if is_loopback(net) => true,
                Condition::Protocol(_, true)
                | Condition::Ports(_, _, true)
                | Condition::Destination(_, true)
                | Condition::Source(..)
                | Condition::Interface(..)
                | Condition::Random(_)
                | Condition::Recorded
                | Condition::InSet(..)
                | Condition::Unknown => {
                    reach.uncertain = reach.uncertain.or(Some(chain));
                    true
                }
                Condition::Translated(negated) if self.table != TableName::Filter => *negated,
                other => reach.narrow(other),
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
        if self.reached.get(&frontend).is_some_and(Reached::is_final) {
            return;
        }
        if let Some((_, ending)) = self.cuts.iter().find(|(reach, _)| reach.includes(&frontend, false)) {
            let ending = *ending;
            self.reached.entry(frontend).or_insert_with(|| Reached::untranslated(ending));
            return;
        }
        if let Some(before) = uncertain.filter(|_| !self.rules.only_marks(&rule.target)) {
            self.not_understood(before);
        }
        let packet = Packet { origin: self.origin, frontend, detector: self.detector, sets: self.sets, depth: 0 };
        let mut unknown = BTreeSet::new();
        let reached = self.rules.evaluate_rules(std::slice::from_ref(rule), chain, packet, &mut unknown);
        if !self.rules.is_exhausted() {
            unknown.iter().for_each(|chain| self.not_understood(chain));
        }
        match self.reached.get_mut(&frontend) {
            Some(old) => old.follow_with(reached),
            None => {
                self.reached.insert(frontend, reached);
            }
        }
    }

    /// Follows a rule for many frontends. Returns false if none of its packets goes on.
    fn many(&mut self, rule: &Rule, reach: Reach<'a>, chain: &str, depth: usize) -> bool {
        match rule.target {
            Target::Nothing => true,
            Target::Jump(id) | Target::Goto(id) => {
                let goes_on = if &*self.rules.chain(id).name == NODE_PORTS && self.table == TableName::Nat {
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
            Target::Accept if reach.translated == Some(true) => true,
            Target::Accept | Target::Drop | Target::Reject | Target::Return => {
                let has_sets = self.sets.is_some();
                let is_set = |condition: &Condition| matches!(condition, Condition::InSet(..));
                let ending = rule.target.ending();
                let is_certain = reach.uncertain.is_none();
                let is_cut = is_certain && self.cuts.len() < MAX_CUTS;
                if is_cut {
                    self.cuts.push((reach, ending));
                }
                // In filter, Headgate refuses packets of single frontends.
                let refuses = matches!(ending, Some(Ending::Drop | Ending::Reject));
                let is_foreign = self.table == TableName::Filter && refuses && reach.translated != Some(false);
                let is_by_set = has_sets && rule.conditions.iter().any(is_set);
                if is_foreign || !(is_cut || is_by_set) {
                    self.not_understood(reach.uncertain.unwrap_or(chain));
                }
                !is_certain
            }
        }
    }

    /// Reads the chain of NodePorts.
    fn node_ports(&mut self, id: ChainId, reach: Reach<'a>, depth: usize) {
        match reach.destination {
            Some(net) if net.prefix_len() == net.max_prefix_len() => {
                self.node_port_addresses.insert(net.addr());
            }
            Some(_) => self.not_understood(NODE_PORTS),
            None => self.is_any_address = reach.to_node == Some(true),
        }
        if !std::mem::replace(&mut self.has_node_ports, true) {
            let reach = Reach { destination: None, to_node: Some(true), ..reach };
            self.chain(id, reach, depth + 1);
        }
    }

    fn not_understood(&mut self, chain: &str) {
        let (family, table) = (self.family, self.table.as_str());
        self.problems.insert(Problem::NotUnderstood(format!(
            "cannot verify what chain {chain} in table {table} ({family}) does: it contains a rule that Headgate does not write"
        )));
    }
}
