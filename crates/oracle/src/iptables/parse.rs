//! The rules in the output of `iptables-save`.

use std::{
    cell::Cell,
    collections::{BTreeSet, HashMap},
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use headgate_core::{Family, Protocol, forwarding::Problem, iptables::RulesTable};
use ipnet::IpNet;

use crate::outcome::{Ending, with_recorded};

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Condition {
    pub(crate) test: Test,
    pub(crate) is_negated: bool,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Test {
    Destination(IpNet),
    Source(IpNet),
    Interface(Box<str>),
    /// `None` for a protocol that Services do not use.
    Protocol(Option<Protocol>),
    Ports(u16, u16),
    /// The destination is an address of the node.
    ToNode,
    /// The source is an address of the node.
    FromNode,
    /// The same for each first packet of a connection. Such a condition is not negated.
    Constant(bool),
    Random(f64),
    /// The packet was translated, and begins a connection.
    Translated,
    /// The client was recorded for ClientIP affinity.
    Recorded,
    /// The name of a set, and the addresses and ports to compare.
    InSet(Box<str>, Box<str>),
    /// Something that the decoder does not understand.
    Unknown,
}

/// What a rule does with packets that meet its conditions.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Target {
    End(Ending),
    Return,
    Translate(SocketAddr),
    /// Goes on with the next rule.
    Nothing,
    Jump(ChainId),
    Goto(ChainId),
    /// Something that the decoder does not understand.
    Unknown,
}

pub(crate) type ChainId = usize;

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Rule {
    pub(crate) conditions: Vec<Condition>,
    pub(crate) target: Target,
}

/// A chain that sends the packets of one protocol to one of some endpoints.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Choice {
    pub(crate) protocol: Option<Protocol>,
    pub(crate) endpoints: Arc<[SocketAddr]>,
    /// Some packets match no rule.
    pub(crate) is_partial: bool,
}

#[derive(Debug)]
pub(crate) struct Chain {
    pub(crate) name: Box<str>,
    /// Empty in a chain that only chooses among endpoints.
    pub(crate) rules: Vec<Rule>,
    pub(crate) choice: Option<Choice>,
}

/// The steps that a dump without rules may take.
const LEAST_STEPS: u64 = 2_000_000;

/// The steps that a dump may take more for each rule, and for each frontend that no rule names. A
/// rule of Headgate is followed six times for each frontend of its Service.
const STEPS_EACH: u64 = 1000;

/// The rules of the tables mangle, nat and filter of one family.
#[derive(Debug, Default)]
pub struct Rules {
    chains: Vec<Chain>,
    ids: HashMap<(RulesTable, Box<str>), ChainId>,
    table: Option<RulesTable>,
    /// How many rules the decoder has followed, and what allows more: a few foreign chains that
    /// each jump to the next one several times would take years.
    steps: Cell<u64>,
    steps_allowed_by: Cell<u64>,
    current: Option<ChainId>,
}

impl Rules {
    /// Takes the next line of `iptables-save`, which prints the rules of a chain one after the
    /// other. Ignores the lines of other tables.
    pub fn line(&mut self, line: &str) {
        if let Some(name) = line.strip_prefix('*') {
            self.end_chain();
            self.table = RulesTable::ALL.into_iter().find(|table| table.as_str() == name.trim());
            return;
        }
        let Some(table) = self.table else { return };
        if let Some(declaration) = line.strip_prefix(':') {
            self.id(table, declaration.split(' ').next().unwrap_or_default());
        } else if let Some(rule) = line.strip_prefix("-A ") {
            let (name, rest) = rule.split_once(' ').unwrap_or((rule, ""));
            let id = self.id(table, name);
            if self.current != Some(id) {
                self.end_chain();
                self.current = Some(id);
            }
            let rule = self.rule(table, rest);
            self.more_steps();
            let chain = &mut self.chains[id];
            // The rules of a chain may not be together.
            let is_split = chain.choice.take().is_some();
            chain.rules.push(if is_split { Rule { conditions: Vec::new(), target: Target::Unknown } } else { rule });
        } else if line == "COMMIT" {
            self.end_chain();
            self.table = None;
        }
    }

    pub(crate) fn find(&self, table: RulesTable, name: &str) -> Option<ChainId> {
        self.ids.get(&(table, Box::from(name))).copied()
    }

    pub(crate) fn chain(&self, id: ChainId) -> &Chain {
        &self.chains[id]
    }

    /// Allows the steps of one more rule or frontend.
    pub(super) fn more_steps(&self) {
        self.steps_allowed_by.update(|count| count + 1);
    }

    pub(super) fn step(&self) -> bool {
        let has_left = !self.is_exhausted();
        self.steps.update(|steps| steps + u64::from(has_left));
        has_left
    }

    /// True if the decoder has given up.
    pub(super) fn is_exhausted(&self) -> bool {
        self.steps.get() >= LEAST_STEPS + STEPS_EACH * self.steps_allowed_by.get()
    }

    /// Adds a problem for each chain to which no rule of its base chain jumps.
    pub(crate) fn check_bases(
        &self,
        needed: &[(RulesTable, &str, &[&str])],
        family: Family,
        problems: &mut BTreeSet<Problem>,
    ) {
        for (table, base, targets) in needed {
            let rules = self.find(*table, base).map_or(&[][..], |id| &self.chains[id].rules);
            let missing = targets.iter().filter(|target| !rules.iter().any(|rule| self.target(rule) == Some(target)));
            problems.extend(missing.map(|target| {
                Problem::Broken(format!(
                    "no rule of chain {base} in table {table} ({family}) leads to chain {target}, so no Service has the rules of this chain"
                ))
            }));
        }
    }

    pub(super) fn target(&self, rule: &Rule) -> Option<&str> {
        match rule.target {
            Target::Jump(id) | Target::Goto(id) => Some(&self.chains[id].name),
            _ => None,
        }
    }

    fn id(&mut self, table: RulesTable, name: &str) -> ChainId {
        let key = (table, Box::from(name));
        *self.ids.entry(key).or_insert_with(|| {
            self.chains.push(Chain { name: name.into(), rules: Vec::new(), choice: None });
            self.chains.len() - 1
        })
    }

    /// Replaces the chain that was read by its endpoints, if it only chooses among endpoints.
    fn end_chain(&mut self) {
        let Some(id) = self.current.take() else { return };
        let chain = &mut self.chains[id];
        chain.choice = choice(&chain.rules);
        if chain.choice.is_some() {
            chain.rules.clear();
        }
        chain.rules.shrink_to_fit();
    }

    fn rule(&mut self, table: RulesTable, text: &str) -> Rule {
        let mut words = words(text).into_iter().peekable();
        let (mut conditions, mut target) = (Vec::new(), Target::Nothing);
        let mut is_negated = false;
        while let Some(word) = words.next() {
            if word == "!" {
                is_negated = true;
                continue;
            }
            let mut is_negated = std::mem::take(&mut is_negated);
            let mut value = || words.next().unwrap_or_default();
            let mut test = match word {
                "-d" => net(value()).map_or(Test::Unknown, Test::Destination),
                "-s" => net(value()).map_or(Test::Unknown, Test::Source),
                "-i" => Test::Interface(value().into()),
                "-p" => Test::Protocol(protocol(value())),
                "-m" if is_understood(value()) => continue,
                "-m" => Test::Unknown,
                "--comment" | "--mask" | "--name" | "--seconds" | "--mode" | "--nfacct-name" => {
                    value();
                    continue;
                }
                "--reap" | "--rsource" | "--set" => continue,
                "--rcheck" => Test::Recorded,
                "--dport" => ports(value()).map_or(Test::Unknown, |(first, last)| Test::Ports(first, last)),
                "--probability" => value().parse().map_or(Test::Unknown, Test::Random),
                "--dst-type" if value() == "LOCAL" => Test::ToNode,
                "--src-type" if value() == "LOCAL" => Test::FromNode,
                "--ctstate" => {
                    let states: Vec<&str> = value().split(',').collect();
                    match states.contains(&"NEW") {
                        false if states.contains(&"DNAT") => Test::Translated,
                        is_new => Test::Constant(is_new),
                    }
                }
                // The first packet of a connection has no mark.
                "--mark" => {
                    let value = value();
                    let (value, mask) = value.split_once('/').unwrap_or((value, "0xffffffff"));
                    match (number(value), number(mask)) {
                        (Some(value), Some(mask)) => Test::Constant(value & mask == 0),
                        _ => Test::Unknown,
                    }
                }
                "--icmp-type" | "--icmpv6-type" => {
                    value();
                    Test::Constant(false)
                }
                "--match-set" => Test::InSet(value().into(), value().into()),
                "-j" | "-g" => {
                    target = self.read_target(table, word == "-g", value(), &mut words);
                    break;
                }
                _ => Test::Unknown,
            };
            if let Test::Constant(value) = &mut test {
                *value ^= std::mem::take(&mut is_negated);
            }
            conditions.push(Condition { test, is_negated });
        }
        conditions.shrink_to_fit();
        Rule { conditions, target }
    }

    fn read_target<'a>(
        &self,
        table: RulesTable,
        is_goto: bool,
        name: &str,
        rest: &mut impl Iterator<Item = &'a str>,
    ) -> Target {
        match name {
            "ACCEPT" => Target::End(Ending::Accept),
            "DROP" => Target::End(Ending::Drop),
            "REJECT" => Target::End(Ending::Reject),
            "RETURN" => Target::Return,
            "MARK" | "CONNMARK" | "LOG" | "NFLOG" => Target::Nothing,
            // Only chains of the hook POSTROUTING masquerade.
            "MASQUERADE" | "SNAT" => Target::End(Ending::Accept),
            "DNAT" => {
                let address = rest.find(|word| *word == "--to-destination").and_then(|_| rest.next()?.parse().ok());
                // Options such as --random or --persistent do not change the endpoint.
                address.map_or(Target::Unknown, Target::Translate)
            }
            name => match self.find(table, name) {
                Some(id) if is_goto => Target::Goto(id),
                Some(id) => Target::Jump(id),
                None => Target::Unknown,
            },
        }
    }
}

/// Whether the decoder understands a match of iptables.
fn is_understood(name: &str) -> bool {
    let all = "tcp udp sctp icmp icmp6 comment conntrack addrtype statistic recent mark set nfacct state";
    all.split(' ').any(|one| one == name)
}

/// Splits a rule into words. A comment in quotes is one word.
fn words(text: &str) -> Vec<&str> {
    let mut words = Vec::new();
    for (i, part) in text.split('"').enumerate() {
        if i % 2 == 1 {
            words.push(part);
        } else {
            words.extend(part.split_ascii_whitespace());
        }
    }
    words
}

fn net(text: &str) -> Option<IpNet> {
    text.parse().ok().or_else(|| Some(IpNet::from(text.parse::<IpAddr>().ok()?)))
}

fn protocol(name: &str) -> Option<Protocol> {
    Protocol::ALL.into_iter().find(|protocol| protocol.as_lower_str() == name)
}

fn ports(text: &str) -> Option<(u16, u16)> {
    let (first, last) = text.split_once(':').unwrap_or((text, text));
    Some((first.parse().ok()?, last.parse().ok()?))
}

fn number(text: &str) -> Option<u32> {
    match text.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

/// Returns the endpoints of a chain whose rules all translate the packets of one protocol.
fn choice(rules: &[Rule]) -> Option<Choice> {
    let mut protocols = BTreeSet::new();
    let (mut endpoints, mut recorded) = (BTreeSet::new(), BTreeSet::new());
    let mut is_partial = true;
    for rule in rules {
        let Target::Translate(endpoint) = rule.target else { return None };
        let (mut probability, mut is_recorded, mut protocol) = (1.0, false, None);
        for condition in &rule.conditions {
            match condition.test {
                _ if condition.is_negated => return None,
                Test::Protocol(Some(one)) => protocol = Some(one),
                Test::Random(one) => probability = one,
                Test::Recorded => is_recorded = true,
                _ => return None,
            }
        }
        protocols.insert(protocol);
        if is_recorded {
            recorded.insert(endpoint);
        } else if is_partial && probability > 0.0 {
            endpoints.insert(endpoint);
            is_partial = probability < 1.0;
        }
    }
    let mut protocols = protocols.into_iter();
    let (protocol, None) = (protocols.next()?, protocols.next()) else { return None };
    Some(Choice { protocol, endpoints: with_recorded(endpoints, &recorded).into_iter().collect(), is_partial })
}
