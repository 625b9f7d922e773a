//! What a chain does with a packet for one frontend.

use std::collections::BTreeSet;

use headgate_core::{forwarding::Origin, frontends::Frontend, view::LocalDetector};
use ipnet::IpNet;

use super::parse::{ChainId, Condition, Rule, Rules, Target, Test};
use crate::outcome::Outcome;

/// The maximum depth of jumps. The kernel has a limit too.
const MAX_DEPTH: usize = 16;

/// The beginning of the names of the chains that admit the clients in source ranges. In other
/// chains, a source stands for a pod of the node.
const ADMITTING: &str = "KUBE-FW-";

/// The sets that lead connections to the proxy of mode userspace while they contain all addresses.
/// Without [`Sets`], a packet meets the rules that apply while the proxy accepts no connections.
const GATES: [&str; 2] = ["KUBE-GATE", "KUBE-6-GATE"];

/// Who sends a packet, and what the rules know about it.
#[derive(Clone, Copy)]
pub(crate) struct Client<'a> {
    pub(crate) origin: Origin,
    pub(crate) detector: Option<&'a LocalDetector>,
    pub(crate) sets: Option<Sets<'a>>,
}

/// The sets that rules use: given the name of a set, whether it contains the parts of the frontend
/// that the flags name. `None` if the set does not exist, or depends on the source.
pub(crate) type Sets<'a> = &'a dyn Fn(&str, &str, &Frontend) -> Option<bool>;

/// The gates while the proxy accepts connections.
pub(super) fn closed_gates(set: &str, _: &str, _: &Frontend) -> Option<bool> {
    Some(GATES.contains(&set))
}

#[derive(Clone, Copy)]
pub(crate) struct FirstPacket<'a> {
    pub(crate) client: Client<'a>,
    pub(crate) frontend: Frontend,
    /// The number of jumps and gotos so far. 0 for a caller that asks about a frontend.
    pub(crate) depth: usize,
}

/// The chains with a rule that the decoder does not understand, and those in which it gave up.
pub(crate) type Unknown = BTreeSet<Box<str>>;

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

impl FirstPacket<'_> {
    fn meets(&self, Condition { test, is_negated }: &Condition, chain: &str) -> Met {
        let Client { origin, detector, sets } = self.client;
        let is_from_pod = origin == Origin::Pod;
        let is_met = match test {
            Test::Destination(net) => match self.frontend {
                Frontend::Address(address, ..) => net.contains(&address),
                // The rules for NodePorts on one address were found before.
                Frontend::NodePort(..) => false,
            },
            Test::Source(net) if is_loopback(net) => false,
            Test::Source(net) if !is_negated && chain.starts_with(ADMITTING) => return Met::From(*net),
            Test::Source(net) => match detector {
                Some(LocalDetector::Cidr(range)) if range.trunc() == net.trunc() => is_from_pod,
                _ => return Met::Unknown,
            },
            Test::Interface(name) => match detector {
                Some(LocalDetector::BridgeInterface(bridge)) if **name == **bridge => is_from_pod,
                Some(LocalDetector::InterfaceNamePrefix(prefix)) if name.strip_suffix('+') == Some(prefix) => {
                    is_from_pod
                }
                _ => return Met::Unknown,
            },
            Test::Protocol(protocol) => *protocol == Some(self.frontend.protocol()),
            Test::Ports(first, last) => (*first..=*last).contains(&self.frontend.port()),
            Test::ToNode => matches!(self.frontend, Frontend::NodePort(..)),
            Test::FromNode => origin == Origin::Node,
            Test::Constant(value) => *value,
            Test::Random(probability) if *probability > 0.0 && *probability < 1.0 => return Met::Sometimes,
            Test::Random(probability) => *probability > 0.0,
            Test::Translated => false,
            Test::Recorded if !is_negated => return Met::IfRecorded,
            Test::InSet(set, _) if sets.is_none() && GATES.contains(&&**set) => false,
            Test::InSet(set, flags) => match sets.and_then(|contains| contains(set, flags, &self.frontend)) {
                Some(contains) => contains,
                None => return Met::Unknown,
            },
            Test::Recorded | Test::Unknown => return Met::Unknown,
        };
        if is_met != *is_negated { Met::Always } else { Met::Never }
    }
}

impl Rules {
    /// Follows a packet through a chain. Appends to `unknown`.
    pub(crate) fn evaluate(&self, id: ChainId, packet: FirstPacket<'_>, unknown: &mut Unknown) -> Outcome {
        if packet.depth == 0 {
            self.more_steps();
        }
        let chain = self.chain(id);
        if let Some(choice) = &chain.choice {
            let is_other = choice.protocol.is_some_and(|protocol| protocol != packet.frontend.protocol());
            let endpoints = Some(&choice.endpoints).filter(|endpoints| !is_other && !endpoints.is_empty());
            let goes_on = is_other || choice.is_partial;
            return Outcome { endpoints: endpoints.cloned().into_iter().collect(), goes_on, ..Outcome::default() };
        }
        if packet.depth > MAX_DEPTH {
            unknown.insert(chain.name.clone());
            return Outcome::default();
        }
        self.evaluate_rules(&chain.rules, &chain.name, packet, unknown)
    }

    /// True if the chain that is the target decides nothing about a packet. It may set a mark, with
    /// which a later hook masquerades the packet.
    pub(super) fn only_marks(&self, target: &Target) -> bool {
        let (Target::Jump(id) | Target::Goto(id)) = target else { return *target == Target::Nothing };
        let chain = self.chain(*id);
        chain.choice.is_none() && chain.rules.iter().all(|rule| rule.target == Target::Nothing)
    }

    /// Follows a packet through some rules of a chain. Appends to `unknown`.
    pub(super) fn evaluate_rules(
        &self,
        rules: &[Rule],
        chain: &str,
        packet: FirstPacket<'_>,
        unknown: &mut Unknown,
    ) -> Outcome {
        let (mut all, mut admits) = (Outcome::default(), None);
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
            let mut outcome = self.follow(&rule.target, packet, unknown);
            let goes_on = std::mem::take(&mut outcome.goes_on);
            match met {
                Met::IfRecorded => {
                    outcome.recorded.append(&mut outcome.endpoints);
                    outcome.admitted.clear();
                }
                Met::From(range) => {
                    outcome.admitted.insert(range);
                    *admits.get_or_insert(false) |= goes_on;
                }
                _ => {}
            }
            all.add(outcome);
            if met == Met::Always && !goes_on {
                return all;
            }
        }
        // Clients that are not admitted pass. The result applies to the others.
        all.goes_on = admits.unwrap_or(true);
        all
    }

    fn follow(&self, target: &Target, packet: FirstPacket<'_>, unknown: &mut Unknown) -> Outcome {
        let deeper = FirstPacket { depth: packet.depth + 1, ..packet };
        match *target {
            Target::End(ending) => Outcome::ends(ending),
            Target::Return => Outcome::returns(),
            Target::Translate(endpoint) => Outcome::reaches(endpoint),
            Target::Jump(id) => self.evaluate(id, deeper, unknown).of_jump(),
            Target::Goto(id) => self.evaluate(id, deeper, unknown).of_goto(),
            Target::Nothing | Target::Unknown => Outcome::goes_on(),
        }
    }
}

/// Whether a range contains loopback addresses, which only the node itself uses.
pub(super) fn is_loopback(net: &IpNet) -> bool {
    net.addr().is_loopback()
}
