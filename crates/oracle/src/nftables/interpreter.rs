//! Executes rules for one packet, with every result of random numbers and hashes.

use std::{
    cmp::Ordering,
    collections::{BTreeSet, HashMap},
    net::SocketAddr,
    ops::ControlFlow,
    rc::Rc,
};

use headgate_core::{
    address_from_bytes,
    forwarding::{Fate, NodePortsAt, Origin},
    frontends::Frontend,
    view::LocalDetector,
};
use ipnet::IpNet;
use nftables_netlink::{
    ChainType, Comparison, Expression, Hook, LookupResult, NatKind, Policy, Register, RegisterRange, Value, Verdict,
};

use super::{
    dump::{DumpedSet, NftablesDump},
    packet::{Key, Packet, Registers, Word},
};
use crate::outcome::{Ending, Outcome};

/// The maximum depth of jumps, as in the kernel.
const MAX_DEPTH: usize = 16;

/// The maximum number of results of a random number or a hash that are followed.
const MAX_RESULTS: u32 = 1 << 16;

/// The sets of the addresses that answer NodePorts, of Headgate and of kube-proxy. Other sets
/// contain addresses of Services.
const NODE_PORT_ADDRESSES: [&str; 2] = ["node-port-addresses", "nodeport-ips"];

/// The set of the addresses of the node, which exists if rules cannot ask the routing table. Rules
/// then list the addresses that answer NodePorts, also if all do.
const NODE_ADDRESSES: &str = "node-addresses";

#[derive(Clone, Copy)]
struct At<'c> {
    packet: Packet,
    chain: &'c str,
    depth: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Numbers {
    count: u32,
    first: u32,
    to: Register,
}

/// What a lookup finds for the results of a random number or a hash.
#[derive(Debug)]
struct Drawn<'a> {
    /// The distinct data of the elements.
    data: BTreeSet<&'a [u8]>,
    /// There is an element for every result.
    is_complete: bool,
}

/// A set, the beginning of a key in it, and the rest of the key.
type Draw<'a> = (&'a str, Vec<u8>, Numbers);

#[derive(Debug)]
pub(super) struct Interpreter<'a> {
    dump: &'a NftablesDump,
    detector: Option<&'a LocalDetector>,
    /// A set that contains every key for this run.
    full: Option<&'a str>,
    /// The groups of elements so far. All packets share them, because a group may have thousands of
    /// elements and few endpoints.
    drawn: HashMap<Draw<'a>, Rc<Drawn<'a>>>,
    /// The steps that are left: expressions and rules to execute, and elements to read.
    steps_left: u64,
    /// The chains with something that is not understood.
    pub(super) unknown: BTreeSet<String>,
    /// How the rules recognise an address that answers NodePorts, if a packet reached such a rule.
    pub(super) node_ports_at: Option<NodePortsAt>,
}

impl<'a> Interpreter<'a> {
    pub(super) fn new(
        dump: &'a NftablesDump,
        detector: Option<&'a LocalDetector>,
        full: Option<&'a str>,
        max_steps: u64,
    ) -> Self {
        Self {
            dump,
            detector,
            full,
            drawn: HashMap::new(),
            steps_left: max_steps,
            unknown: BTreeSet::new(),
            node_ports_at: None,
        }
    }

    /// True if no steps are left. What the interpreter returns is then wrong.
    pub(super) fn is_exhausted(&self) -> bool {
        self.steps_left == 0
    }

    fn count_steps(&mut self, count: usize) {
        self.steps_left = self.steps_left.saturating_sub(count as u64);
    }

    /// Returns the fate of the first packet of a connection. Also returns the clients that reach
    /// the frontend, if the packets of others are dropped.
    pub(super) fn follow(&mut self, frontend: Frontend, origin: Origin) -> (Fate, Option<BTreeSet<IpNet>>) {
        let packet = Packet { origin, frontend };
        let is_node_port = matches!(frontend, Frontend::NodePort(..));
        let hooks: &[Hook] = match (origin, is_node_port) {
            (Origin::Node, false) => &[Hook::Output],
            (Origin::Node, true) => &[Hook::Output, Hook::Input],
            (_, false) => &[Hook::Prerouting, Hook::Forward],
            (_, true) => &[Hook::Prerouting, Hook::Input],
        };
        let dump = self.dump;
        let (mut admitted, mut all) = (None, Outcome::default());
        for (name, base) in hooks.iter().flat_map(|hook| dump.base_chains(*hook)) {
            let mut outcome = self.chain(name, packet, 0);
            if outcome.goes_on && base.policy == Policy::Drop {
                outcome.ending = outcome.ending.or(Some(Ending::Drop));
                outcome.goes_on = false;
            }
            if base.kind != ChainType::Nat && outcome.goes_on && !outcome.admitted.is_empty() {
                if outcome.ending == Some(Ending::Drop) {
                    admitted = Some(outcome.admitted);
                }
                continue;
            }
            all.endpoints.append(&mut outcome.endpoints);
            if outcome.ending.is_none() && !outcome.goes_on {
                break;
            }
            let fate = Ending::fate(outcome.ending);
            if !all.endpoints.is_empty() {
                return (Outcome { goes_on: true, ..all }.fate(), admitted);
            }
            if fate != Fate::NotServed {
                return (fate, admitted);
            }
        }
        (all.fate(), admitted)
    }

    /// Notes that a rule of a chain is not understood. Returns false: no packet meets it.
    fn not_understood(&mut self, chain: &str) -> bool {
        self.unknown.insert(chain.to_owned());
        false
    }

    fn chain(&mut self, name: &str, packet: Packet, depth: usize) -> Outcome {
        let dump = self.dump;
        let Some(chain) = dump.chains.get(name).filter(|_| depth <= MAX_DEPTH) else {
            self.not_understood(name);
            return Outcome::goes_on();
        };
        let mut all = Outcome::default();
        for rule in &chain.rules {
            self.count_steps(1);
            if self.is_exhausted() {
                break;
            }
            let mut outcome = self.rule(rule, Registers::default(), At { packet, chain: name, depth });
            let goes_on = std::mem::take(&mut outcome.goes_on);
            all.add(outcome);
            if !goes_on {
                return all.of_jump();
            }
        }
        all.returns = false;
        all.goes_on = true;
        all
    }

    fn rule(&mut self, rule: &[Expression], mut registers: Registers, at: At<'_>) -> Outcome {
        let packet = at.packet;
        for (position, expression) in rule.iter().enumerate() {
            self.count_steps(1);
            let rest = &rule[position + 1..];
            let is_met = match expression {
                _ if packet.load(expression, self.dump, &mut registers) => {
                    if let Expression::Fib { flags, .. } = expression
                        && *flags == nftables_netlink::FibFlags::DESTINATION
                        && matches!(packet.frontend, Frontend::NodePort(..))
                    {
                        self.node_ports_at = Some(NodePortsAt::AnyAddress);
                    }
                    true
                }
                Expression::Immediate { to, value } => {
                    registers.load(*to, &value.0);
                    true
                }
                Expression::Bitwise { from, to, mask, xor } => {
                    mask_register(&mut registers, *from, *to, mask, xor);
                    true
                }
                Expression::Compare { register, comparison, value } => {
                    let key = registers.key(*register, value.0.len());
                    match self.source_range(&key, value) {
                        Some(range) if *comparison == Comparison::NotEqual && is_drop(rest) => {
                            return drops_others([range]);
                        }
                        _ => self.compare(&key, *comparison, value, packet),
                    }
                }
                // The expression sets a property such as a mark, which rules read after routing.
                Expression::Unknown { name, .. } if name == "meta" => true,
                Expression::Counter { .. } | Expression::NoTrack | Expression::Log { .. } => true,
                Expression::Lookup { set, key, result } => {
                    match self.lookup((set, *key, result), rest, &mut registers, at) {
                        ControlFlow::Continue(is_met) => is_met,
                        ControlFlow::Break(outcome) => return outcome,
                    }
                }
                Expression::NumberGenerator { modulus, offset, to, .. }
                | Expression::Hash { modulus, offset, to, .. } => {
                    let numbers = Numbers { count: *modulus, first: *offset, to: *to };
                    let drawn = self.each_drawn(numbers, rest, registers, at);
                    return drawn.unwrap_or_else(|| self.each(numbers, rest, registers, at));
                }
                // A set may be full, and a client may exceed a rate.
                Expression::DynamicSet(_) | Expression::Limit { .. } => {
                    let mut outcome = self.rule(rest, registers, at);
                    outcome.goes_on = true;
                    return outcome;
                }
                Expression::Verdict(verdict) => return self.verdict(verdict, at),
                Expression::Reject(_) => return Outcome::ends(Ending::Reject),
                Expression::Nat { kind: NatKind::Destination, address: Some(address), port: Some(port), .. } => {
                    match self.endpoint(&registers, *address, *port) {
                        Some(endpoint) => return Outcome::reaches(endpoint),
                        None => self.not_understood(at.chain),
                    }
                }
                _ => self.not_understood(at.chain),
            };
            if !is_met {
                return Outcome::goes_on();
            }
        }
        Outcome::goes_on()
    }

    /// Executes the rest of a rule for each result of a random number or a hash.
    fn each(&mut self, numbers: Numbers, rest: &[Expression], mut registers: Registers, at: At<'_>) -> Outcome {
        let mut all = Outcome::default();
        if numbers.count > MAX_RESULTS {
            self.not_understood(at.chain);
        }
        for number in 0..numbers.count.min(MAX_RESULTS) {
            self.count_steps(1);
            if self.is_exhausted() {
                break;
            }
            registers.load_number(numbers.to, numbers.first.wrapping_add(number));
            all.add(self.rule(rest, registers, at));
        }
        all
    }

    /// Executes the rest of a rule that uses the random number or hash only to look up an element:
    /// once for each distinct data that the lookup finds. `None` if the rule does something else.
    fn each_drawn(
        &mut self,
        numbers: Numbers,
        rest: &[Expression],
        mut registers: Registers,
        at: At<'_>,
    ) -> Option<Outcome> {
        registers.set(numbers.to, 0, Word::Unknown);
        let mut rest = rest;
        while let [Expression::Immediate { to, value }, after @ ..] = rest {
            registers.load(*to, &value.0);
            rest = after;
        }
        let [Expression::Lookup { set, key, result: LookupResult::Into(to) }, rest @ ..] = rest else { return None };
        // None of these expressions reads the number, or its value is not understood.
        let is_translation = rest.iter().all(|expression| {
            matches!(expression, Expression::DynamicSet(_) | Expression::Limit { .. } | Expression::Nat { .. })
        });
        let (name, set) = self.dump.sets.get_key_value(set)?;
        let is_plain = !set.has_ranges && !set.is_recorded && self.full != Some(name);
        let start_bytes = set.key_bytes().checked_sub(4)?;
        let is_at_end = start_bytes % 4 == 0 && numbers.to.index() as usize == key.index() as usize + start_bytes / 4;
        let is_number = registers.key(numbers.to, 4) == Key::Unknown;
        if !(is_translation && is_plain && is_at_end && is_number) {
            return None;
        }
        let drawn = self.drawn(set, (name, registers.bytes(*key, start_bytes)?, numbers));
        let mut all = Outcome { goes_on: !drawn.is_complete, ..Outcome::default() };
        for data in &drawn.data {
            self.count_steps(1);
            let mut registers = registers;
            registers.load(*to, data);
            all.add(self.rule(rest, registers, at));
        }
        Some(all)
    }

    /// Reads the elements of a group, unless a packet has been here before.
    fn drawn(&mut self, set: &'a DumpedSet, draw: Draw<'a>) -> Rc<Drawn<'a>> {
        if let Some(drawn) = self.drawn.get(&draw) {
            return Rc::clone(drawn);
        }
        let (_, start, numbers) = &draw;
        let is_drawn = |key: &[u8]| {
            let number = key.last_chunk().map(|bytes| u32::from_ne_bytes(*bytes));
            number.is_some_and(|number| number.wrapping_sub(numbers.first) < numbers.count)
        };
        let elements: Vec<_> = set.range(start).filter(|(key, _)| is_drawn(key)).collect();
        let is_complete = elements.len() as u64 == u64::from(numbers.count);
        self.count_steps(elements.len());
        let data = elements.into_iter().map(|(_, data)| data).collect();
        let drawn = Rc::new(Drawn { data, is_complete });
        self.drawn.insert(draw, Rc::clone(&drawn));
        drawn
    }

    fn verdict(&mut self, verdict: &Verdict, at: At<'_>) -> Outcome {
        match verdict {
            Verdict::Accept => Outcome::ends(Ending::Accept),
            Verdict::Drop => Outcome::ends(Ending::Drop),
            Verdict::Continue => Outcome::goes_on(),
            Verdict::Return => Outcome::returns(),
            Verdict::Jump(target) => self.chain(target, at.packet, at.depth + 1),
            Verdict::Goto(target) => self.chain(target, at.packet, at.depth + 1).of_goto(),
            Verdict::Other(_) => {
                self.not_understood(at.chain);
                Outcome::goes_on()
            }
        }
    }

    fn endpoint(&self, registers: &Registers, address: RegisterRange, port: RegisterRange) -> Option<SocketAddr> {
        let address = address_from_bytes(&registers.bytes(address.first, self.dump.address_bytes())?)?;
        let port = registers.bytes(port.first, 2)?;
        Some(SocketAddr::new(address, u16::from_be_bytes([port[0], port[1]])))
    }

    /// Compares registers with a value. An unknown value differs from every value.
    fn compare(&self, key: &Key, comparison: Comparison, value: &Value, packet: Packet) -> bool {
        let is_pod = packet.origin == Origin::Pod;
        let ordering = match key {
            Key::Known(bytes) => Some(bytes.as_slice().cmp(&value.0)),
            Key::EndsWithSource(..) => {
                let range = self.source_range(key, value);
                let is_pods = matches!(self.detector, Some(LocalDetector::Cidr(cidr)) if Some(cidr.trunc()) == range);
                (is_pods && is_pod).then_some(Ordering::Equal)
            }
            Key::Interface => {
                let is_same = |name: &str| {
                    let mut padded = name.as_bytes().to_vec();
                    padded.resize(16, 0);
                    value.0 == padded
                };
                let is_pods = match self.detector {
                    Some(LocalDetector::BridgeInterface(name)) => is_same(name),
                    Some(LocalDetector::InterfaceNamePrefix(prefix)) => value.0 == prefix.as_bytes(),
                    _ => false,
                };
                (is_pods && is_pod).then_some(Ordering::Equal)
            }
            _ => None,
        };
        match comparison {
            Comparison::Equal => ordering.is_some_and(Ordering::is_eq),
            Comparison::NotEqual => ordering.is_none_or(Ordering::is_ne),
            Comparison::Less => ordering.is_some_and(Ordering::is_lt),
            Comparison::LessOrEqual => ordering.is_some_and(Ordering::is_le),
            Comparison::Greater => ordering.is_some_and(Ordering::is_gt),
            Comparison::GreaterOrEqual => ordering.is_some_and(Ordering::is_ge),
        }
    }

    /// The range that a rule compares with the source address.
    fn source_range(&self, key: &Key, value: &Value) -> Option<IpNet> {
        let Key::EndsWithSource(start, prefix_length) = key else { return None };
        let mut address = value.0.clone();
        address.resize(self.dump.address_bytes(), 0);
        IpNet::new(address_from_bytes(&address).filter(|_| start.is_empty())?, *prefix_length).ok()
    }

    /// Looks up an element. Returns whether the packet still meets the rule, or its outcome.
    fn lookup(
        &mut self,
        (name, from, result): (&str, Register, &LookupResult),
        rest: &[Expression],
        registers: &mut Registers,
        at: At<'_>,
    ) -> ControlFlow<Outcome, bool> {
        let dump = self.dump;
        let Some(set) = dump.sets.get(name) else {
            return ControlFlow::Continue(self.not_understood(at.chain));
        };
        let key = registers.key(from, set.key_bytes());
        if set.has_ranges {
            return self.lookup_range(set, &key, result, rest, at);
        }
        let found = match (&key, result) {
            _ if self.full == Some(name) => Some(&[][..]),
            (Key::EndsWithSource(start, _), LookupResult::Present) if set.is_recorded && start.is_empty() => {
                let mut outcome = self.rule(rest, *registers, at);
                outcome.recorded.append(&mut outcome.endpoints);
                outcome.goes_on = true;
                return ControlFlow::Break(outcome);
            }
            // A new client is not recorded.
            _ if set.is_recorded => None,
            (Key::Known(key), LookupResult::Verdict) => match set.verdicts.get(key) {
                Some(verdict) => return ControlFlow::Break(self.verdict(verdict, at)),
                None => None,
            },
            (Key::Known(key), _) => set.get(key),
            (Key::NodeAddress, _) if NODE_PORT_ADDRESSES.contains(&name) => self.node_address(set),
            // The source is an address of the node.
            (Key::EndsWithSource(start, _), _) if start.is_empty() => {
                let is_known = at.packet.origin == Origin::Node && !set.elements.is_empty();
                is_known.then_some(&[][..])
            }
            (Key::EndsWithSource(start, prefix_length), LookupResult::Present) => {
                let range = |(key, _): (&[u8], _)| {
                    IpNet::new(address_from_bytes(key.get(start.len()..)?)?, *prefix_length).ok()
                };
                let ranges: Vec<IpNet> = set.range(start).filter_map(range).collect();
                self.count_steps(ranges.len());
                if !ranges.is_empty() {
                    let mut outcome = self.rule(rest, *registers, at);
                    outcome.admitted.extend(ranges);
                    outcome.goes_on = true;
                    return ControlFlow::Break(outcome);
                }
                None
            }
            _ => None,
        };
        ControlFlow::Continue(match (result, found) {
            (LookupResult::Absent, found) => found.is_none(),
            (LookupResult::Present, found) => found.is_some(),
            (LookupResult::Into(to), Some(data)) => {
                registers.load(*to, data);
                true
            }
            (LookupResult::Into(_) | LookupResult::Verdict, _) => false,
        })
    }

    /// Looks up an address in a set of ranges.
    fn lookup_range(
        &mut self,
        set: &DumpedSet,
        key: &Key,
        result: &LookupResult,
        rest: &[Expression],
        at: At<'_>,
    ) -> ControlFlow<Outcome, bool> {
        let is_inside = match key {
            _ if !set.has_ranges_of_addresses() => None,
            Key::EndsWithSource(start, _) if start.is_empty() && *result == LookupResult::Absent && is_drop(rest) => {
                return ControlFlow::Break(drops_others(set.ranges.iter().copied()));
            }
            Key::Known(bytes) => {
                address_from_bytes(bytes).map(|address| set.ranges.iter().any(|range| range.contains(&address)))
            }
            // The ranges are of addresses of Services.
            Key::NodeAddress => Some(false),
            _ => None,
        };
        ControlFlow::Continue(match (is_inside, result) {
            (Some(is_inside), LookupResult::Present) => is_inside,
            (Some(is_inside), LookupResult::Absent) => !is_inside,
            _ => self.not_understood(at.chain),
        })
    }

    /// Whether the set of addresses that answer NodePorts contains the destination: the decoder
    /// assumes one of the addresses in the set.
    fn node_address<'s>(&mut self, set: &'s DumpedSet) -> Option<&'s [u8]> {
        let addresses: BTreeSet<_> = set.range(&[]).filter_map(|(key, _)| address_from_bytes(key)).collect();
        let is_known = !addresses.is_empty();
        self.count_steps(addresses.len());
        let lists_all = self.dump.sets.contains_key(NODE_ADDRESSES);
        self.node_ports_at =
            Some(if lists_all { NodePortsAt::Listed(addresses) } else { NodePortsAt::Only(addresses) });
        is_known.then_some(&[])
    }
}

/// True if the rest of a rule drops the packet.
fn is_drop(rest: &[Expression]) -> bool {
    let mut rest = rest.iter().filter(|expression| !matches!(expression, Expression::Counter { .. }));
    matches!(rest.next(), Some(Expression::Verdict(Verdict::Drop)))
}

/// The packets of clients outside of these ranges are dropped.
fn drops_others(ranges: impl IntoIterator<Item = IpNet>) -> Outcome {
    Outcome { goes_on: true, admitted: ranges.into_iter().collect(), ..Outcome::ends(Ending::Drop) }
}

fn mask_register(registers: &mut Registers, from: Register, to: Register, mask: &Value, xor: &Value) {
    let length = mask.0.len();
    match registers.key(from, length) {
        Key::Known(bytes) => {
            let masked: Vec<u8> =
                bytes.iter().zip(&mask.0).zip(&xor.0).map(|((byte, mask), xor)| (byte & mask) ^ xor).collect();
            registers.load(to, &masked);
        }
        Key::EndsWithSource(start, _) if start.is_empty() => {
            let ones: u32 = mask.0.iter().map(|byte| byte.leading_ones()).sum();
            registers.mask_source(to, length, u8::try_from(ones).unwrap_or(u8::MAX));
        }
        _ => registers.fill(to, length, |_| Word::Unknown),
    }
}
