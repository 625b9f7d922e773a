//! Evaluation of expressions for a packet.

use std::net::IpAddr;

use super::{
    Action, Connection,
    expressions::{address_length, fib_length, meta_length},
    hash::{jhash, scale},
    state::{Stored, element_key},
    walk::Walker,
};
use crate::{
    AddressFamily, Comparison, CtKey, Direction, DynamicSet, DynamicSetOperation, Element, ElementData, Expression,
    FibFlags, FibResult, Generator, LookupResult, MetaKey, NatKind, PayloadBase, Register, RegisterRange, Reject,
    SetData, SocketKey, TableName, Value, Verdict,
};

/// How processing continues after an expression.
pub(super) enum Flow {
    /// Processing continues with the next expression.
    Next,
    /// The expression does not match, so the rule ends.
    Break,
    /// The rule ends with a verdict.
    Verdict(Verdict),
    /// The packet is rejected.
    Reject(Reject),
}

impl Flow {
    fn matches(holds: bool) -> Self {
        if holds { Self::Next } else { Self::Break }
    }
}

impl Walker<'_> {
    fn load(&self, from: Register, length: u32) -> Vec<u8> {
        let start = usize::try_from(from.index() * 4).unwrap_or(usize::MAX);
        let length = usize::try_from(length).unwrap_or_default();
        self.registers.get(start..start.saturating_add(length)).map(<[u8]>::to_vec).unwrap_or_default()
    }

    fn store(&mut self, to: Register, bytes: &[u8]) -> Flow {
        let start = usize::try_from(to.index() * 4).unwrap_or(usize::MAX);
        let padded = start.saturating_add(bytes.len().next_multiple_of(4));
        let Some(place) = self.registers.get_mut(start..padded) else { return Flow::Break };
        place.fill(0);
        place[..bytes.len()].copy_from_slice(bytes);
        Flow::Next
    }

    /// Stores a value. Without a value the rule does not match.
    fn store_found(&mut self, to: Register, bytes: Option<Vec<u8>>) -> Flow {
        bytes.map_or(Flow::Break, |bytes| self.store(to, &bytes))
    }

    fn random(&mut self) -> u32 {
        self.state.random.pop_front().unwrap_or_default()
    }

    fn address(&self, range: Option<RegisterRange>, family: AddressFamily) -> Option<IpAddr> {
        let bytes = self.load(range?.first, address_length(family));
        <[u8; 4]>::try_from(bytes.as_slice())
            .map(IpAddr::from)
            .or_else(|_| <[u8; 16]>::try_from(bytes.as_slice()).map(IpAddr::from))
            .ok()
    }

    fn port(&self, range: Option<RegisterRange>) -> Option<u16> {
        self.load(range?.first, 2).try_into().ok().map(u16::from_be_bytes)
    }
}

/// Evaluates an expression. `at` is the handle of the rule and the position of the expression in
/// the rule.
pub(super) fn evaluate(walker: &mut Walker<'_>, table: &TableName, at: (u64, usize), expression: &Expression) -> Flow {
    match expression {
        Expression::Payload { base, offset, length, to } => {
            let header = match base {
                PayloadBase::LinkLayer => Vec::new(),
                PayloadBase::Network => walker.packet.network_header(),
                PayloadBase::Transport => walker.packet.transport_header(),
            };
            let start = usize::try_from(*offset).unwrap_or(usize::MAX);
            let end = start.saturating_add(usize::try_from(*length).unwrap_or(usize::MAX));
            walker.store_found(*to, header.get(start..end).map(<[u8]>::to_vec))
        }
        Expression::SetPayload { base, offset, length, from, .. } => {
            let bytes = walker.load(*from, *length);
            Flow::matches(walker.packet.write(*base, *offset, &bytes))
        }
        Expression::Meta { key, to } => {
            let value = meta(walker, *key);
            walker.store_found(*to, value)
        }
        Expression::SetMeta { key, from } => {
            let value = walker.load(*from, meta_length(*key));
            if let (MetaKey::Mark, Ok(bytes)) = (key, value.try_into()) {
                walker.packet.mark = u32::from_ne_bytes(bytes);
            }
            Flow::Next
        }
        Expression::Conntrack { key, direction, to } => {
            let value = conntrack(walker, *key, *direction);
            walker.store_found(*to, value)
        }
        Expression::SetConntrack { from, .. } => {
            let value = walker.load(*from, 4).try_into().map(u32::from_ne_bytes).unwrap_or_default();
            if let Some(connection) = &mut walker.packet.connection {
                connection.mark = value;
            }
            Flow::Next
        }
        Expression::Compare { register, comparison, value } => {
            let found = walker.load(*register, length(value));
            Flow::matches(match comparison {
                Comparison::Equal => found == value.0,
                Comparison::NotEqual => found != value.0,
                Comparison::Less => found < value.0,
                Comparison::LessOrEqual => found <= value.0,
                Comparison::Greater => found > value.0,
                Comparison::GreaterOrEqual => found >= value.0,
            })
        }
        Expression::Range { register, inverted, first, last } => {
            let found = walker.load(*register, length(first));
            Flow::matches((first.0 <= found && found <= last.0) != *inverted)
        }
        Expression::Bitwise { from, to, mask, xor } => {
            let found = walker.load(*from, length(mask));
            let bits = found.iter().zip(&mask.0).zip(&xor.0).map(|((byte, mask), xor)| (byte & mask) ^ xor);
            let bits: Vec<u8> = bits.collect();
            walker.store(*to, &bits)
        }
        Expression::ByteOrder { from, to, length, size, .. } => {
            let mut bytes = walker.load(*from, *length);
            let is_little_endian = cfg!(target_endian = "little");
            for number in bytes.chunks_mut(usize::try_from(*size).unwrap_or(1)).filter(|_| is_little_endian) {
                number.reverse();
            }
            walker.store(*to, &bytes)
        }
        Expression::Lookup { set, key, result } => lookup(walker, table, &set.name, *key, *result),
        Expression::Immediate { to, value } => walker.store(*to, &value.0),
        Expression::Verdict(verdict) => Flow::Verdict(verdict.clone()),
        Expression::NumberGenerator { generator, modulus, offset, to } => {
            let number = match generator {
                Generator::Random => scale(walker.random(), *modulus),
                Generator::Incremental => {
                    let next = walker.state.counters.entry(at).or_default();
                    let number = *next % modulus;
                    *next = (number + 1) % modulus;
                    number
                }
            };
            walker.store(*to, &(number + offset).to_ne_bytes())
        }
        Expression::Hash { from, length, modulus, seed, offset, to } => {
            let hash = jhash(&walker.load(*from, *length), seed.unwrap_or_default());
            walker.store(*to, &(scale(hash, *modulus) + offset).to_ne_bytes())
        }
        Expression::Fib { result, flags, to } => {
            let value = fib(walker, *result, *flags);
            walker.store(*to, &value)
        }
        Expression::Reject(how) => Flow::Reject(*how),
        Expression::DynamicSet(change) => dynamic(walker, table, change),
        Expression::Counter { .. } | Expression::Limit { .. } => Flow::Next,
        Expression::Log { prefix, .. } => {
            walker.actions.push(Action::Logged(prefix.clone().unwrap_or_default()));
            Flow::Next
        }
        Expression::NoTrack => {
            walker.packet.connection = None;
            walker.actions.push(Action::Untracked);
            Flow::Next
        }
        Expression::Socket { key, to } => {
            let value = walker.packet.socket.map(|transparent| match key {
                SocketKey::Mark => vec![0; 4],
                _ => vec![u8::from(transparent)],
            });
            walker.store_found(*to, value)
        }
        Expression::Unknown { .. } => Flow::Break,
        _ => translate(walker, expression),
    }
}

fn length(value: &Value) -> u32 {
    u32::try_from(value.0.len()).unwrap_or(u32::MAX)
}

fn name(interface: Option<&(u32, String)>) -> Vec<u8> {
    Value::interface_name(interface.map(|(_, name)| name.as_str()).unwrap_or_default()).0
}

fn meta(walker: &mut Walker<'_>, key: MetaKey) -> Option<Vec<u8>> {
    let packet = &*walker.packet;
    let is_v4 = packet.tuple.source.0.is_ipv4();
    let index = |interface: Option<&(u32, String)>| interface.map_or(0, |(index, _)| *index).to_ne_bytes().to_vec();
    Some(match key {
        MetaKey::Length => packet.length.to_ne_bytes().to_vec(),
        MetaKey::Protocol => (if is_v4 { 0x0800_u16 } else { 0x86dd }).to_be_bytes().to_vec(),
        MetaKey::Mark => packet.mark.to_ne_bytes().to_vec(),
        MetaKey::InputInterface => index(packet.input.as_ref()),
        MetaKey::OutputInterface => index(packet.output.as_ref()),
        MetaKey::InputInterfaceName => name(packet.input.as_ref()),
        MetaKey::OutputInterfaceName => name(packet.output.as_ref()),
        MetaKey::SocketUser => return None,
        MetaKey::NfProtocol => vec![if is_v4 { 2 } else { 10 }],
        MetaKey::L4Protocol => vec![packet.protocol],
        MetaKey::PacketType => vec![0],
        MetaKey::Random => walker.random().to_ne_bytes().to_vec(),
    })
}

fn conntrack(walker: &Walker<'_>, key: CtKey, direction: Option<Direction>) -> Option<Vec<u8>> {
    /// `NF_CT_STATE_UNTRACKED_BIT`
    const UNTRACKED: u32 = 64;
    let Some(connection) = &walker.packet.connection else {
        return (key == CtKey::State).then(|| UNTRACKED.to_ne_bytes().to_vec());
    };
    let tuple = if direction == Some(Direction::Reply) { connection.reply } else { connection.original };
    let is_v4 = tuple.source.0.is_ipv4();
    let address = |address: IpAddr| Value::from(address).0;
    Some(match key {
        CtKey::State => connection.state.to_ne_bytes().to_vec(),
        CtKey::Direction => vec![u8::from(connection.is_reply)],
        CtKey::Status => connection.status.to_ne_bytes().to_vec(),
        CtKey::Mark => connection.mark.to_ne_bytes().to_vec(),
        CtKey::Expiration | CtKey::Id => vec![0; 4],
        CtKey::L3Protocol => vec![if is_v4 { 2 } else { 10 }],
        CtKey::Protocol => vec![walker.packet.protocol],
        CtKey::SourcePort => tuple.source.1.to_be_bytes().to_vec(),
        CtKey::DestinationPort => tuple.destination.1.to_be_bytes().to_vec(),
        CtKey::SourceIp | CtKey::DestinationIp if !is_v4 => return None,
        CtKey::SourceIp6 | CtKey::DestinationIp6 if is_v4 => return None,
        CtKey::Source | CtKey::SourceIp | CtKey::SourceIp6 => address(tuple.source.0),
        CtKey::Destination | CtKey::DestinationIp | CtKey::DestinationIp6 => address(tuple.destination.0),
    })
}

fn lookup(walker: &mut Walker<'_>, table: &TableName, set: &str, key: Register, result: LookupResult) -> Flow {
    let Some(set) = walker.state.table(table).and_then(|table| table.set(set)).cloned() else { return Flow::Break };
    let key = Value(walker.load(key, set.set.key.length_bytes));
    let found = walker.find(&set, &key).map(|stored| stored.element.data);
    match (result, found) {
        (LookupResult::Present, Some(_)) | (LookupResult::Absent, None) => Flow::Next,
        (LookupResult::Into(to), Some(Some(ElementData::Value(value)))) => walker.store(to, &value.0),
        (LookupResult::Verdict, Some(Some(ElementData::Verdict(verdict)))) => Flow::Verdict(verdict),
        _ => Flow::Break,
    }
}

fn fib(walker: &Walker<'_>, result: FibResult, flags: FibFlags) -> Vec<u8> {
    /// `RTN_UNICAST`, `RTN_LOCAL`, `RTN_MULTICAST`
    const TYPES: [u32; 3] = [1, 2, 5];
    let tuple = walker.packet.tuple;
    let address = if flags.contains(FibFlags::SOURCE) { tuple.source.0 } else { tuple.destination.0 };
    let is_local = address.is_loopback() || walker.state.local_addresses.contains(&address);
    match result {
        FibResult::AddressType => {
            let kind = if is_local { 1 } else { usize::from(address.is_multicast()) * 2 };
            TYPES[kind].to_ne_bytes().to_vec()
        }
        _ if flags.contains(FibFlags::PRESENT) => vec![1],
        // The fake does not model routes.
        _ => vec![0; usize::try_from(fib_length(result)).unwrap_or_default()],
    }
}

/// Evaluates expressions that translate addresses or deliver packets to a proxy.
fn translate(walker: &mut Walker<'_>, expression: &Expression) -> Flow {
    let action = match expression {
        Expression::Nat { kind, family, address, port, .. } => {
            let (address, port) = (walker.address(*address, *family), walker.port(*port));
            let tuple = &mut walker.packet.tuple;
            let end = if *kind == NatKind::Source { &mut tuple.source } else { &mut tuple.destination };
            *end = (address.unwrap_or(end.0), port.unwrap_or(end.1));
            match kind {
                NatKind::Source => Action::SourceTranslated(end.0, end.1),
                NatKind::Destination => Action::DestinationTranslated(end.0, end.1),
            }
        }
        Expression::Masquerade { flags, .. } => Action::Masqueraded(*flags),
        Expression::Redirect { port, .. } => {
            let end = &mut walker.packet.tuple.destination.1;
            let before = *end;
            let port = walker.port(*port).unwrap_or(before);
            walker.packet.tuple.destination.1 = port;
            Action::Redirected(port)
        }
        Expression::TransparentProxy { family, address, port } => {
            let address = walker.address(address.map(Into::into), *family);
            Action::Proxied(address, walker.port(port.map(Into::into)))
        }
        _ => return Flow::Break,
    };
    let status = match action {
        Action::DestinationTranslated(..) | Action::Redirected(_) => Connection::DESTINATION_TRANSLATED,
        Action::Proxied(..) => 0,
        _ => Connection::SOURCE_TRANSLATED,
    };
    let reply = walker.packet.tuple.reversed();
    if let Some(connection) = &mut walker.packet.connection {
        connection.status |= status;
        connection.reply = if status == 0 { connection.reply } else { reply };
    }
    walker.actions.push(action);
    Flow::Verdict(Verdict::Accept)
}

fn dynamic(walker: &mut Walker<'_>, table: &TableName, change: &DynamicSet) -> Flow {
    let found = walker.state.table(table).and_then(|table| table.set(&change.set.name)).cloned();
    let Some(set) = found else { return Flow::Break };
    let mut element = Element::new(Value(walker.load(change.key, set.set.key.length_bytes)));
    if let (Some(from), Some(SetData::Values(of))) = (change.data, set.set.data) {
        element.data = Some(ElementData::Value(Value(walker.load(from, of.length_bytes))));
    }
    element.timeout_ms = change.timeout_ms;
    element.expressions.clone_from(if change.expressions.is_empty() {
        &set.set.expressions
    } else {
        &change.expressions
    });
    let timeout = change.timeout_ms.or(set.set.timeout_ms);
    let expires_at_ms = timeout.map(|after| walker.state.now_ms + after);
    let most = usize::try_from(set.set.size.unwrap_or(65_535)).unwrap_or(usize::MAX);
    let key = element_key(&element);
    let contents = walker.state.contents.entry(set.handle).or_default();
    let is_full = contents.len() >= most;
    match (change.operation, contents.get_mut(&key)) {
        (DynamicSetOperation::Delete, _) => {
            contents.remove(&key);
            return Flow::Next;
        }
        // The element keeps its data.
        (DynamicSetOperation::Update, Some(stored)) => stored.expires_at_ms = expires_at_ms,
        (DynamicSetOperation::Add, Some(_)) => {}
        (_, None) if is_full => return Flow::Break,
        (_, None) => {
            contents.insert(key.clone(), Stored::new(element, expires_at_ms));
        }
    }
    let now_ms = walker.state.now_ms;
    Flow::matches(contents.get_mut(&key).is_none_or(|stored| stored.is_within_limit(now_ms)))
}
