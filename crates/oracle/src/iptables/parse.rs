//! The rules in the output of `iptables-save`.

use std::{
    cell::Cell,
    collections::{BTreeSet, HashMap},
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use headgate_core::{Family, Protocol, forwarding::Problem};
use ipnet::IpNet;

/// A table that decides about packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum TableName {
    Mangle,
    Nat,
    Filter,
}

impl TableName {
    fn parse(name: &str) -> Option<Self> {
        [Self::Mangle, Self::Nat, Self::Filter].into_iter().find(|table| table.as_str() == name)
    }

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Mangle => "mangle",
            Self::Nat => "nat",
            Self::Filter => "filter",
        }
    }
}

/// A condition of a rule. `true` after a value means that the condition is negated.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Condition {
    Destination(IpNet, bool),
    Source(IpNet, bool),
    Interface(Box<str>, bool),
    /// `None` for a protocol that Services do not use.
    Protocol(Option<Protocol>, bool),
    Ports(u16, u16, bool),
    /// The destination is an address of the node.
    ToNode(bool),
    /// The source is an address of the node.
    FromNode(bool),
    /// The same for each first packet of a connection.
    Constant(bool),
    Random(f64),
    /// The packet was translated, and begins a connection.
    Translated(bool),
    /// The client was recorded for ClientIP affinity.
    Recorded,
    /// The name of a set, and the addresses and ports to compare.
    InSet(Box<str>, Box<str>, bool),
    /// Something that the decoder does not understand.
    Unknown,
}

/// What a rule does with packets that meet its conditions.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Target {
    Accept,
    Drop,
    Reject,
    Return,
    Translate(SocketAddr),
    /// Goes on with the next rule.
    Nothing,
    Jump(ChainId),
    Goto(ChainId),
    /// Something that the decoder does not understand.
    Unknown,
}

/// The position of a chain in [`Rules`].
pub(crate) type ChainId = usize;

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Rule {
    pub(crate) conditions: Vec<Condition>,
    pub(crate) target: Target,
}

/// The rules of a chain.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Content {
    Rules(Vec<Rule>),
    /// The chain only chooses among endpoints.
    Choice(Choice),
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
    pub(crate) content: Content,
}

/// The steps that a dump without rules may take.
const LEAST_STEPS: u64 = 2_000_000;

/// The steps that a dump may take more for each rule, and for each frontend that no rule names. A
/// rule of Headgate is followed six times for each frontend of its Service.
const STEPS_EACH: u64 = 1000;

/// How many rules the decoder may still follow. Without a limit, a few chains of another program
/// that each jump to the next chain several times would take years.
#[derive(Debug)]
struct Steps(Cell<u64>);

impl Default for Steps {
    fn default() -> Self {
        Self(Cell::new(LEAST_STEPS))
    }
}

/// The rules of the tables mangle, nat and filter of one family.
#[derive(Debug, Default)]
pub struct Rules {
    steps: Steps,
    chains: Vec<Chain>,
    ids: HashMap<(TableName, Box<str>), ChainId>,
    table: Option<TableName>,
    /// The chain whose rules are being read.
    current: Option<ChainId>,
}

impl Rules {
    /// Takes the next line of `iptables-save`, which prints the rules of a chain one after the
    /// other. Ignores the lines of other tables.
    pub fn line(&mut self, line: &str) {
        if let Some(name) = line.strip_prefix('*') {
            self.end_chain();
            self.table = TableName::parse(name.trim());
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
            match &mut self.chains[id].content {
                Content::Rules(rules) => rules.push(rule),
                // The rules of this chain are not together.
                Content::Choice(_) => {
                    let rules = vec![Rule { conditions: vec![Condition::Unknown], target: Target::Unknown }];
                    self.chains[id].content = Content::Rules(rules);
                }
            }
        } else if line == "COMMIT" {
            self.end_chain();
            self.table = None;
        }
    }

    /// Returns the chain of this name.
    pub(crate) fn find(&self, table: TableName, name: &str) -> Option<ChainId> {
        self.ids.get(&(table, Box::from(name))).copied()
    }

    pub(crate) fn chain(&self, id: ChainId) -> &Chain {
        &self.chains[id]
    }

    /// Allows the steps of one more rule or frontend.
    pub(super) fn more_steps(&self) {
        self.steps.0.update(|left| left.saturating_add(STEPS_EACH));
    }

    /// Takes a step. Returns false if none is left.
    pub(super) fn step(&self) -> bool {
        self.steps.0.update(|left| left.saturating_sub(1));
        !self.is_exhausted()
    }

    /// True if the decoder has given up.
    pub(super) fn is_exhausted(&self) -> bool {
        self.steps.0.get() == 0
    }

    /// Adds a problem for each of `targets` to which no rule of a base chain jumps.
    pub(crate) fn check_base(
        &self,
        table: TableName,
        base: &str,
        targets: &[&str],
        family: Family,
        problems: &mut BTreeSet<Problem>,
    ) {
        let rules = match self.find(table, base).map(|id| &self.chains[id].content) {
            Some(Content::Rules(rules)) => &rules[..],
            _ => &[],
        };
        let name = table.as_str();
        for target in targets {
            let leads = |rule: &Rule| match rule.target {
                Target::Jump(id) | Target::Goto(id) => &*self.chains[id].name == *target,
                _ => false,
            };
            if !rules.iter().any(leads) {
                problems.insert(Problem::Broken(format!(
                    "no rule of chain {base} in table {name} ({family}) leads to chain {target}, so no Service has the rules of this chain"
                )));
            }
        }
    }

    /// The id of a chain, which is created if it is new.
    fn id(&mut self, table: TableName, name: &str) -> ChainId {
        let key = (table, Box::from(name));
        *self.ids.entry(key).or_insert_with(|| {
            self.chains.push(Chain { name: name.into(), content: Content::Rules(Vec::new()) });
            self.chains.len() - 1
        })
    }

    /// Replaces the chain that was read by its endpoints, if it only chooses among endpoints.
    fn end_chain(&mut self) {
        let Some(id) = self.current.take() else { return };
        if let Content::Rules(rules) = &mut self.chains[id].content {
            match choice(rules) {
                Some(choice) => self.chains[id].content = Content::Choice(choice),
                None => rules.shrink_to_fit(),
            }
        }
    }

    fn rule(&mut self, table: TableName, text: &str) -> Rule {
        let mut words = words(text).into_iter().peekable();
        let (mut conditions, mut target) = (Vec::new(), Target::Nothing);
        let mut is_negated = false;
        while let Some(word) = words.next() {
            if word == "!" {
                is_negated = true;
                continue;
            }
            let negated = std::mem::take(&mut is_negated);
            let mut value = || words.next().unwrap_or_default();
            let condition = match word {
                "-d" => net(value()).map_or(Condition::Unknown, |net| Condition::Destination(net, negated)),
                "-s" => net(value()).map_or(Condition::Unknown, |net| Condition::Source(net, negated)),
                "-i" => Condition::Interface(value().into(), negated),
                "-p" => Condition::Protocol(protocol(value()), negated),
                "-m" => {
                    let module = value();
                    if !UNDERSTOOD.contains(&module) {
                        conditions.push(Condition::Unknown);
                    }
                    continue;
                }
                "--comment" | "--mask" | "--name" | "--seconds" | "--mode" | "--nfacct-name" => {
                    value();
                    continue;
                }
                "--reap" | "--rsource" | "--set" => continue,
                "--rcheck" => Condition::Recorded,
                "--dport" => {
                    ports(value()).map_or(Condition::Unknown, |(first, last)| Condition::Ports(first, last, negated))
                }
                "--probability" => value().parse().map_or(Condition::Unknown, Condition::Random),
                "--dst-type" => node(value()).map_or(Condition::Unknown, |()| Condition::ToNode(negated)),
                "--src-type" => node(value()).map_or(Condition::Unknown, |()| Condition::FromNode(negated)),
                "--ctstate" => {
                    let states: Vec<&str> = value().split(',').collect();
                    match states.contains(&"DNAT") && !states.contains(&"NEW") {
                        true => Condition::Translated(negated),
                        false => Condition::Constant(states.contains(&"NEW") != negated),
                    }
                }
                // The first packet of a connection has no mark.
                "--mark" => {
                    let value = value();
                    let (value, mask) = value.split_once('/').unwrap_or((value, "0xffffffff"));
                    match (number(value), number(mask)) {
                        (Some(value), Some(mask)) => Condition::Constant((value & mask == 0) != negated),
                        _ => Condition::Unknown,
                    }
                }
                "--icmp-type" | "--icmpv6-type" => {
                    value();
                    Condition::Constant(false)
                }
                "--match-set" => Condition::InSet(value().into(), value().into(), negated),
                "-j" | "-g" => {
                    target = self.target(table, word == "-g", value(), &mut words);
                    break;
                }
                _ => Condition::Unknown,
            };
            conditions.push(condition);
        }
        conditions.shrink_to_fit();
        Rule { conditions, target }
    }

    fn target<'a>(
        &self,
        table: TableName,
        is_goto: bool,
        name: &str,
        rest: &mut impl Iterator<Item = &'a str>,
    ) -> Target {
        match name {
            "ACCEPT" => Target::Accept,
            "DROP" => Target::Drop,
            "REJECT" => Target::Reject,
            "RETURN" => Target::Return,
            "MARK" | "CONNMARK" | "LOG" | "NFLOG" => Target::Nothing,
            // Only chains of the hook POSTROUTING masquerade.
            "MASQUERADE" | "SNAT" => Target::Accept,
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

/// The matches of iptables that the decoder understands.
const UNDERSTOOD: [&str; 14] = [
    "tcp",
    "udp",
    "sctp",
    "icmp",
    "icmp6",
    "comment",
    "conntrack",
    "addrtype",
    "statistic",
    "recent",
    "mark",
    "set",
    "nfacct",
    "state",
];

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

/// Understands only the type of addresses that belong to the node.
fn node(kind: &str) -> Option<()> {
    (kind == "LOCAL").then_some(())
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
            match condition {
                Condition::Protocol(Some(one), false) => protocol = Some(*one),
                Condition::Random(one) => probability = *one,
                Condition::Recorded => is_recorded = true,
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

/// Returns the endpoints of new clients, without those that do not receive recorded clients.
///
/// With ClientIP affinity, a chain names each endpoint twice: for clients that it recorded, and for
/// others. If one of the two rules is missing or wrong, then the endpoint is missing here.
pub(crate) fn with_recorded(endpoints: BTreeSet<SocketAddr>, recorded: &BTreeSet<SocketAddr>) -> BTreeSet<SocketAddr> {
    if recorded.is_empty() || endpoints.is_subset(recorded) {
        return endpoints;
    }
    endpoints.intersection(recorded).copied().collect()
}
