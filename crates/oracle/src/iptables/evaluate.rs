//! What a chain does with a packet for one frontend.

use std::{collections::BTreeSet, net::SocketAddr, sync::Arc};

use headgate_core::{
    forwarding::{Fate, Origin},
    frontends::Frontend,
    masquerade::LocalDetector,
};
use ipnet::IpNet;

use super::parse::{ChainId, Condition, Content, Rule, Rules, Target, with_recorded};
use crate::ending::Ending;

/// The maximum depth of jumps. The kernel has a limit too.
const MAX_DEPTH: usize = 16;

/// The beginning of the names of the chains that admit the clients in source ranges. In other
/// chains, a source stands for a pod of the node.
const ADMITTING: &str = "KUBE-FW-";

/// The sets that lead connections to the proxy of mode userspace while they contain all addresses.
/// Without [`Sets`], a packet meets the rules that apply while the proxy accepts no connections.
const GATES: [&str; 2] = ["KUBE-GATE", "KUBE-6-GATE"];

/// The first packet of a connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Packet<'a> {
    pub(crate) origin: Origin,
    pub(crate) frontend: Frontend,
    pub(crate) detector: Option<&'a LocalDetector>,
    pub(crate) sets: Option<&'a dyn Sets>,
    /// The number of jumps and gotos so far. 0 for a caller that asks about a frontend.
    pub(crate) depth: usize,
}

/// The chains with a rule that the decoder does not understand, and those in which it gave up.
pub(crate) type Unknown = BTreeSet<Box<str>>;

/// The sets that rules use.
pub(crate) trait Sets: std::fmt::Debug {
    /// Whether a set contains the parts of the frontend that `flags` names. `None` if the set does
    /// not exist, or depends on the source.
    fn contains(&self, set: &str, flags: &str, frontend: &Frontend) -> Option<bool>;
}

/// The gates while the proxy accepts connections.
#[derive(Debug)]
pub(crate) struct ClosedGates;

impl Sets for ClosedGates {
    fn contains(&self, set: &str, _: &str, _: &Frontend) -> Option<bool> {
        Some(GATES.contains(&set))
    }
}

impl Target {
    /// How the target ends a packet.
    pub(super) fn ending(&self) -> Option<Ending> {
        match self {
            Self::Accept => Some(Ending::Accept),
            Self::Drop => Some(Ending::Drop),
            Self::Reject => Some(Ending::Reject),
            _ => None,
        }
    }
}

/// What a chain does with a packet.
#[derive(Debug, Clone, Default)]
pub(crate) struct Reached {
    endpoints: Endpoints,
    recorded: BTreeSet<SocketAddr>,
    pub(crate) ending: Option<Ending>,
    /// Some packets leave the chain at its end.
    passes: bool,
    /// Some packets leave the chain earlier. They meet none of its later rules.
    left: bool,
    /// The clients to whom this applies. `None` for all clients.
    pub(crate) admitted: Option<BTreeSet<IpNet>>,
}

#[derive(Debug, Clone, Default)]
enum Endpoints {
    #[default]
    None,
    /// The endpoints of one chain, which several frontends share.
    Shared(Arc<[SocketAddr]>),
    Many(BTreeSet<SocketAddr>),
}

impl Endpoints {
    fn add(&mut self, others: Self) {
        *self = match (std::mem::take(self), others) {
            (one, Self::None) => one,
            (Self::None, other) => other,
            (one, other) => {
                let mut all = one.into_set();
                all.extend(other.into_set());
                Self::Many(all)
            }
        };
    }

    fn into_set(self) -> BTreeSet<SocketAddr> {
        match self {
            Self::None => BTreeSet::new(),
            Self::Shared(shared) => shared.iter().copied().collect(),
            Self::Many(many) => many,
        }
    }
}

impl Reached {
    /// The fate of packets that this chain may translate.
    pub(crate) fn fate(&self) -> Fate {
        let endpoints = match &self.endpoints {
            Endpoints::None => return Fate::NotServed,
            Endpoints::Shared(shared) if self.recorded.is_empty() => Arc::clone(shared),
            other => with_recorded(other.clone().into_set(), &self.recorded).into_iter().collect(),
        };
        match self.passes || self.left || self.ending.is_some() {
            _ if endpoints.is_empty() => Fate::NotServed,
            true => Fate::Partly(endpoints),
            false => Fate::Forwarded(endpoints),
        }
    }

    /// How all packets end. `None` if some of them go on.
    pub(crate) fn ending_of_all(&self) -> Option<Ending> {
        self.ending.filter(|_| !self.passes && !self.left)
    }

    /// The packet was not translated, and ends so.
    pub(crate) fn untranslated(ending: Option<Ending>) -> Self {
        Self { ending, passes: ending.is_none(), ..Self::default() }
    }

    /// True if no packet meets a later rule.
    pub(crate) fn is_final(&self) -> bool {
        !self.passes
    }

    /// Adds what a later rule does with the packets that passed the earlier ones.
    pub(crate) fn follow_with(&mut self, later: Self) {
        self.passes = later.passes;
        self.add(later);
    }

    fn add(&mut self, other: Self) {
        self.endpoints.add(other.endpoints);
        self.recorded.extend(other.recorded);
        self.ending = self.ending.or(other.ending);
        self.left |= other.left;
        if let Some(admitted) = other.admitted {
            self.admitted.get_or_insert_default().extend(admitted);
        }
    }
}

/// Whether a packet meets a condition.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Met {
    Always,
    Never,
    /// At random.
    Sometimes,
    /// If the client was recorded.
    IfRecorded,
    /// If the client is in the range.
    From(IpNet),
    /// The decoder does not know.
    Unknown,
}

impl Met {
    fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Never, _) | (_, Self::Never) => Self::Never,
            (Self::Always, other) => other,
            (one, Self::Always) => one,
            (one, other) if one == other => one,
            // With affinity, a rule may need a recorded client and be random.
            (Self::IfRecorded, Self::Sometimes) | (Self::Sometimes, Self::IfRecorded) => Self::IfRecorded,
            _ => Self::Unknown,
        }
    }
}

fn when(condition: bool) -> Met {
    if condition { Met::Always } else { Met::Never }
}

impl Packet<'_> {
    fn meets(&self, condition: &Condition, chain: &str) -> Met {
        match condition {
            Condition::Destination(net, negated) => match self.frontend {
                Frontend::Address(address, ..) => when(net.contains(&address) != *negated),
                // The rules for NodePorts on one address were found before.
                Frontend::NodePort(..) => when(*negated),
            },
            Condition::Source(net, negated) if is_loopback(net) => when(*negated),
            Condition::Source(net, false) if chain.starts_with(ADMITTING) => Met::From(*net),
            Condition::Source(net, negated) => match self.detector {
                Some(LocalDetector::Cidr(range)) if range.trunc() == net.trunc() => self.is_from_pod(*negated),
                _ => Met::Unknown,
            },
            Condition::Interface(name, negated) => match self.detector {
                Some(LocalDetector::BridgeInterface(bridge)) if **name == **bridge => self.is_from_pod(*negated),
                Some(LocalDetector::InterfaceNamePrefix(prefix)) if name.strip_suffix('+') == Some(prefix) => {
                    self.is_from_pod(*negated)
                }
                _ => Met::Unknown,
            },
            Condition::Protocol(protocol, negated) => when((*protocol == Some(self.frontend.protocol())) != *negated),
            Condition::Ports(first, last, negated) => {
                when((*first..=*last).contains(&self.frontend.port()) != *negated)
            }
            Condition::ToNode(negated) => when(matches!(self.frontend, Frontend::NodePort(..)) != *negated),
            Condition::FromNode(negated) => when((self.origin == Origin::Node) != *negated),
            Condition::Constant(value) => when(*value),
            Condition::Random(probability) if *probability >= 1.0 => Met::Always,
            Condition::Random(probability) if *probability <= 0.0 => Met::Never,
            Condition::Random(_) => Met::Sometimes,
            Condition::Translated(negated) => when(*negated),
            Condition::Recorded => Met::IfRecorded,
            Condition::InSet(set, _, negated) if self.sets.is_none() && GATES.contains(&&**set) => when(*negated),
            Condition::InSet(set, flags, negated) => {
                let contains = self.sets.and_then(|sets| sets.contains(set, flags, &self.frontend));
                contains.map_or(Met::Unknown, |contains| when(contains != *negated))
            }
            Condition::Unknown => Met::Unknown,
        }
    }

    fn is_from_pod(&self, negated: bool) -> Met {
        when((self.origin == Origin::Pod) != negated)
    }
}

impl Rules {
    /// Follows a packet through a chain. Appends to `unknown`.
    pub(crate) fn evaluate(&self, id: ChainId, packet: Packet<'_>, unknown: &mut Unknown) -> Reached {
        if packet.depth == 0 {
            self.more_steps();
        }
        let mut reached = Reached::default();
        let chain = self.chain(id);
        let rules = match &chain.content {
            Content::Rules(rules) => rules,
            Content::Choice(choice) => {
                let is_other = choice.protocol.is_some_and(|protocol| protocol != packet.frontend.protocol());
                reached.passes = is_other || choice.is_partial;
                if !is_other && !choice.endpoints.is_empty() {
                    reached.endpoints = Endpoints::Shared(Arc::clone(&choice.endpoints));
                }
                return reached;
            }
        };
        if packet.depth > MAX_DEPTH {
            unknown.insert(chain.name.clone());
            return reached;
        }
        self.evaluate_rules(rules, &chain.name, packet, unknown)
    }

    /// True if the chain that is the target decides nothing about a packet. It may set a mark, with
    /// which a later hook masquerades the packet.
    pub(super) fn only_marks(&self, target: &Target) -> bool {
        let (Target::Jump(id) | Target::Goto(id)) = target else { return *target == Target::Nothing };
        match &self.chain(*id).content {
            Content::Rules(rules) => rules.iter().all(|rule| rule.target == Target::Nothing),
            Content::Choice(_) => false,
        }
    }

    /// Follows a packet through some rules of a chain. Appends to `unknown`.
    pub(super) fn evaluate_rules(
        &self,
        rules: &[Rule],
        chain: &str,
        packet: Packet<'_>,
        unknown: &mut Unknown,
    ) -> Reached {
        let (mut reached, mut admits) = (Reached::default(), None);
        for rule in rules {
            if !self.step() {
                unknown.insert(chain.into());
                break;
            }
            let met = rule.conditions.iter().fold(Met::Always, |met, one| met.and(packet.meets(one, chain)));
            if met == Met::Never || rule.target == Target::Nothing {
                continue;
            }
            if met == Met::Unknown && self.only_marks(&rule.target) {
                continue;
            }
            if met == Met::Unknown || rule.target == Target::Unknown {
                unknown.insert(chain.into());
                continue;
            }
            let (result, goes_on) = self.follow(rule, packet, unknown);
            match met {
                Met::IfRecorded => {
                    reached.ending = reached.ending.or(result.ending);
                    reached.left |= result.left;
                    reached.recorded.extend(result.endpoints.into_set());
                }
                Met::From(range) => {
                    reached.add(result);
                    reached.admitted.get_or_insert_default().insert(range);
                    *admits.get_or_insert(false) |= goes_on;
                }
                _ => {
                    reached.add(result);
                    if met == Met::Always && !goes_on {
                        return reached;
                    }
                }
            }
        }
        // Clients that are not admitted pass. The result applies to the others.
        reached.passes = admits.unwrap_or(true);
        reached
    }

    /// What the target of a rule does with a packet, and whether the packet may go on with the next
    /// rule.
    fn follow(&self, rule: &Rule, packet: Packet<'_>, unknown: &mut Unknown) -> (Reached, bool) {
        let deeper = Packet { depth: packet.depth + 1, ..packet };
        match rule.target {
            Target::Accept | Target::Drop | Target::Reject => {
                (Reached { ending: rule.target.ending(), ..Reached::default() }, false)
            }
            Target::Return => (Reached { left: true, ..Reached::default() }, false),
            Target::Translate(endpoint) => {
                (Reached { endpoints: Endpoints::Many([endpoint].into()), ..Reached::default() }, false)
            }
            Target::Jump(id) => {
                let mut result = self.evaluate(id, deeper, unknown);
                let goes_on = std::mem::take(&mut result.passes) | std::mem::take(&mut result.left);
                (result, goes_on)
            }
            Target::Goto(id) => {
                let mut result = self.evaluate(id, deeper, unknown);
                result.left |= std::mem::take(&mut result.passes);
                (result, false)
            }
            Target::Nothing | Target::Unknown => (Reached::default(), true),
        }
    }
}

/// Whether a range contains loopback addresses, which only the node itself uses.
pub(super) fn is_loopback(net: &IpNet) -> bool {
    net.addr().is_loopback()
}
