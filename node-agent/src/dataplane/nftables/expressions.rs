//! The expressions of rules: conditions, loads and actions. If a condition is not met, the kernel
//! does not execute the rest of the rule, and continues with the next rule.

use std::net::{IpAddr, SocketAddr};

use headgate_core::{Family, Protocol, view::LocalDetector};
use ipnet::IpNet;
use nftables_netlink::{
    AddressFamily, Bytes, Comparison, CtKey, Direction, DynamicSet, DynamicSetOperation, Expression, FibFlags,
    FibResult, Generator, LookupResult, MetaKey, NatFlags, NatKind, PayloadBase, Register, Reject, Value, Verdict,
};

use super::elements::protocol_number;

/// `NF_CT_STATE_INVALID_BIT` of `linux/netfilter/nf_conntrack_common.h`.
const STATE_INVALID: u32 = 1;
/// `NF_CT_STATE_UNTRACKED_BIT` of `linux/netfilter/nf_conntrack_common.h`.
const STATE_UNTRACKED: u32 = 64;
/// `NF_CT_STATE_BIT(IP_CT_NEW)` of `linux/netfilter/nf_conntrack_common.h`.
const STATE_NEW: u32 = 8;
/// The bits of established and related connections.
const STATE_ESTABLISHED_OR_RELATED: u32 = 2 | 4;
/// `IPS_DST_NAT` of `linux/netfilter/nf_conntrack_common.h`.
const STATUS_DNAT: u32 = 32;
/// The offset of the checksum in the UDP header (RFC 768).
const UDP_CHECKSUM_OFFSET: u32 = 6;
/// `RTN_LOCAL` of `linux/rtnetlink.h`.
const LOCAL: u32 = 2;
/// `ICMP_PORT_UNREACH` of `linux/icmp.h`.
const ICMP_PORT_UNREACHABLE: u8 = 3;
/// `ICMPV6_PORT_UNREACH` of `linux/icmpv6.h`.
const ICMP6_PORT_UNREACHABLE: u8 = 4;
/// `ICMP_ECHO` of `linux/icmp.h`.
const ICMP_ECHO: u8 = 8;
/// `ICMPV6_ECHO_REQUEST` of `linux/icmpv6.h`.
const ICMP6_ECHO_REQUEST: u8 = 128;

/// Builds expressions for one family.
#[derive(Debug, Clone, Copy)]
pub(super) struct Expressions {
    pub(super) family: Family,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Source,
    Destination,
}

impl Expressions {
    pub(super) fn address_bytes(self) -> u32 {
        match self.family {
            Family::V4 => 4,
            Family::V6 => 16,
        }
    }

    fn address_offset(self, side: Side) -> u32 {
        match (self.family, side) {
            (Family::V4, Side::Source) => 12,
            (Family::V4, Side::Destination) => 16,
            (Family::V6, Side::Source) => 8,
            (Family::V6, Side::Destination) => 24,
        }
    }

    pub(super) fn address(self, side: Side, to: Register) -> Expression {
        let (offset, length) = (self.address_offset(side), self.address_bytes());
        Expression::Payload { base: PayloadBase::Network, offset, length, to }
    }

    pub(super) fn set_address(self, side: Side, from: Register) -> Expression {
        Expression::SetPayload {
            base: PayloadBase::Network,
            offset: self.address_offset(side),
            length: self.address_bytes(),
            from,
            // IPv6 has no checksum of the header.
            checksum_offset: (self.family == Family::V4).then_some(10),
            in_pseudo_header: true,
        }
    }

    pub(super) fn set_port(self, side: Side, from: Register) -> Expression {
        Expression::SetPayload {
            base: PayloadBase::Transport,
            offset: if side == Side::Source { 0 } else { 2 },
            length: 2,
            from,
            checksum_offset: Some(UDP_CHECKSUM_OFFSET),
            in_pseudo_header: false,
        }
    }

    pub(super) fn source_port(self, to: Register) -> Expression {
        Expression::Payload { base: PayloadBase::Transport, offset: 0, length: 2, to }
    }

    /// Continues if the packet has this protocol.
    pub(super) fn is_of(self, protocol: Protocol) -> [Expression; 2] {
        let (to, number) = (Register::R1, Value::byte(protocol_number(protocol)));
        [Expression::Meta { key: MetaKey::L4Protocol, to }, Expression::equal(to, number)]
    }

    /// Continues if the UDP datagram has a checksum.
    pub(super) fn has_udp_checksum(self) -> [Expression; 2] {
        let (base, offset, register) = (PayloadBase::Transport, UDP_CHECKSUM_OFFSET, Register::R1);
        let comparison = Comparison::NotEqual;
        [
            Expression::Payload { base, offset, length: 2, to: register },
            Expression::Compare { register, comparison, value: Value::port(0) },
        ]
    }

    /// Continues if the packet is exempt from connection tracking.
    pub(super) fn is_untracked(self) -> Vec<Expression> {
        ct_bits(CtKey::State, STATE_UNTRACKED, Comparison::NotEqual)
    }

    pub(super) fn destination_port(self, to: Register) -> Expression {
        Expression::Payload { base: PayloadBase::Transport, offset: 2, length: 2, to }
    }

    /// Loads the packet's protocol and destination port into two words.
    pub(super) fn node_port(self, to: Register) -> Vec<Expression> {
        vec![Expression::Meta { key: MetaKey::L4Protocol, to }, self.destination_port(to.after(4))]
    }

    /// Loads the packet's destination address, protocol and destination port.
    pub(super) fn frontend(self, to: Register) -> Vec<Expression> {
        let mut all = vec![self.address(Side::Destination, to)];
        all.extend(self.node_port(to.after(self.address_bytes())));
        all
    }

    /// Loads protocol and destination port of the connection's first packet, as its client sent it.
    pub(super) fn original_node_port(self, to: Register) -> Vec<Expression> {
        let direction = Some(Direction::Original);
        vec![
            Expression::Meta { key: MetaKey::L4Protocol, to },
            Expression::Conntrack { key: CtKey::DestinationPort, direction, to: to.after(1) },
        ]
    }

    /// Loads the destination address of the connection's first packet, as its client sent it.
    pub(super) fn original_destination(self, to: Register) -> Expression {
        let key = match self.family {
            Family::V4 => CtKey::DestinationIp,
            Family::V6 => CtKey::DestinationIp6,
        };
        Expression::Conntrack { key, direction: Some(Direction::Original), to }
    }

    /// Loads destination address, protocol and port of the connection's first packet, as sent.
    pub(super) fn original_frontend(self, to: Register) -> Vec<Expression> {
        let mut all = vec![self.original_destination(to)];
        all.extend(self.original_node_port(to.after(self.address_bytes())));
        all
    }

    /// Continues if the packet begins a connection.
    pub(super) fn is_new(self) -> Vec<Expression> {
        ct_bits(CtKey::State, STATE_NEW, Comparison::NotEqual)
    }

    /// Continues if conntrack marks the packet as INVALID, for example outside of the TCP window.
    pub(super) fn is_invalid(self) -> Vec<Expression> {
        ct_bits(CtKey::State, STATE_INVALID, Comparison::NotEqual)
    }

    /// Continues if the packet's conntrack state is neither ESTABLISHED nor RELATED.
    pub(super) fn is_not_established(self) -> Vec<Expression> {
        ct_bits(CtKey::State, STATE_ESTABLISHED_OR_RELATED, Comparison::Equal)
    }

    /// Continues if the connection's destination is translated.
    pub(super) fn is_translated(self) -> Vec<Expression> {
        ct_bits(CtKey::Status, STATUS_DNAT, Comparison::NotEqual)
    }

    /// Continues if the connection's destination is not translated.
    pub(super) fn is_not_translated(self) -> Vec<Expression> {
        ct_bits(CtKey::Status, STATUS_DNAT, Comparison::Equal)
    }

    /// Continues if the packet did not arrive on the loopback interface.
    pub(super) fn is_not_from_loopback(self) -> Vec<Expression> {
        vec![
            Expression::Meta { key: MetaKey::InputInterfaceName, to: Register::R1 },
            Expression::Compare {
                register: Register::R1,
                comparison: Comparison::NotEqual,
                value: Value::interface_name("lo"),
            },
        ]
    }

    /// Continues if the address belongs to this node. Needs a kernel with `fib`.
    pub(super) fn is_local(self, side: Side) -> Vec<Expression> {
        self.compare_with_local(side, Comparison::Equal)
    }

    /// Continues if the address does not belong to this node. Needs a kernel with `fib`.
    pub(super) fn is_not_local(self, side: Side) -> Vec<Expression> {
        self.compare_with_local(side, Comparison::NotEqual)
    }

    fn compare_with_local(self, side: Side, comparison: Comparison) -> Vec<Expression> {
        let flags = if side == Side::Source { FibFlags::SOURCE } else { FibFlags::DESTINATION };
        let register = Register::R1;
        vec![
            Expression::Fib { result: FibResult::AddressType, flags, to: register },
            Expression::Compare { register, comparison, value: Value::host_u32(LOCAL) },
        ]
    }

    /// Compares an address of the packet with a range.
    pub(super) fn in_range(self, side: Side, range: &IpNet, comparison: Comparison) -> Vec<Expression> {
        self.is_address_in_range(self.address(side, Register::R1), range, comparison)
    }

    /// Compares an address with a range. `address` loads it into [`Register::R1`].
    pub(super) fn is_address_in_range(
        self,
        address: Expression,
        range: &IpNet,
        comparison: Comparison,
    ) -> Vec<Expression> {
        let mut all = vec![address];
        all.extend(self.mask(range.prefix_len(), Register::R1));
        all.push(Expression::Compare { register: Register::R1, comparison, value: range.network().into() });
        all
    }

    /// Clears all bits of an address in a register after the first `prefix_length` bits. Returns
    /// `None` if `prefix_length` is the length of a whole address.
    pub(super) fn mask(self, prefix_length: u8, register: Register) -> Option<Expression> {
        let bits = usize::from(prefix_length);
        let length = usize::try_from(self.address_bytes()).unwrap_or(16);
        if bits >= length * 8 {
            return None;
        }
        let byte = |index: usize| match bits.saturating_sub(index * 8).min(8) {
            0 => 0,
            ones => 0xff_u8 << (8 - ones),
        };
        let mask = Value((0..length).map(byte).collect());
        Some(Expression::Bitwise { from: register, to: register, mask, xor: Value(vec![0; length]) })
    }

    /// Continues if the packet is from a local pod.
    pub(super) fn is_from_pod(self, detector: &LocalDetector) -> Vec<Expression> {
        let name = |value: Value| {
            vec![
                Expression::Meta { key: MetaKey::InputInterfaceName, to: Register::R1 },
                Expression::equal(Register::R1, value),
            ]
        };
        match detector {
            LocalDetector::Cidr(range) => self.in_range(Side::Source, range, Comparison::Equal),
            LocalDetector::BridgeInterface(bridge) => name(Value::interface_name(bridge)),
            // The kernel compares as many bytes as the value has.
            LocalDetector::InterfaceNamePrefix(prefix) => name(Value(prefix.bytes().take(15).collect())),
        }
    }

    /// Loads the packet mark into a word that the next lookup overwrites: else `nft`, for which a
    /// lookup loads only its first register, fails to list rules that use a later word.
    pub(super) fn placeholder(self, to: Register) -> Expression {
        Expression::Meta { key: MetaKey::Mark, to }
    }

    /// Placeholders for an address and a port: see [`Self::placeholder`].
    pub(super) fn endpoint_placeholders(self, to: Register) -> [Expression; 2] {
        [self.address(Side::Source, to), self.destination_port(to.after(self.address_bytes()))]
    }

    /// Looks a key up in a map, and loads the value. Continues if the map contains the key.
    pub(super) fn lookup(self, set: &str, key: Register, to: Register) -> Expression {
        Expression::Lookup { set: set.into(), key, result: LookupResult::Into(to) }
    }

    pub(super) fn is_in(self, set: &str, key: Register) -> Expression {
        Expression::Lookup { set: set.into(), key, result: LookupResult::Present }
    }

    pub(super) fn is_not_in(self, set: &str, key: Register) -> Expression {
        Expression::Lookup { set: set.into(), key, result: LookupResult::Absent }
    }

    /// Executes the verdict that a map contains for the key. If the map does not contain the key,
    /// the kernel continues with the next rule.
    pub(super) fn verdict_of(self, map: &str, key: Register) -> Expression {
        Expression::Lookup { set: map.into(), key, result: LookupResult::Verdict }
    }

    /// Loads a random number below `count`.
    pub(super) fn random(self, count: u32, to: Register) -> Expression {
        Expression::NumberGenerator { generator: Generator::Random, modulus: count, offset: 0, to }
    }

    /// Loads the slot below `slots` that a hash of the address in `from` selects. All nodes compute
    /// the same hash, unless their processors differ in byte order: the kernel reads the first 12
    /// bytes of an IPv6 address as numbers (`jhash` of `linux/jhash.h`).
    pub(super) fn hash_of_address(self, from: Register, slots: u32, to: Register) -> Expression {
        /// An arbitrary number, which must never change.
        const SEED: u32 = 0x6865_6164;
        let length = self.address_bytes();
        Expression::Hash { from, length, modulus: slots, seed: Some(SEED), offset: 0, to }
    }

    /// Translates the destination to the address in the register `address`, and to the port in the
    /// register after the address.
    pub(super) fn translate(self, address: Register) -> Expression {
        let port = address.after(self.address_bytes());
        let (kind, family, flags) = (NatKind::Destination, self.nat_family(), NatFlags::NONE);
        Expression::Nat { kind, family, address: Some(address.into()), port: Some(port.into()), flags }
    }

    /// Continues if the packet is an echo request, as `ping` sends it.
    pub(super) fn is_echo_request(self) -> Vec<Expression> {
        let (protocol, echo_request) = match self.family {
            Family::V4 => (libc::IPPROTO_ICMP, ICMP_ECHO),
            Family::V6 => (libc::IPPROTO_ICMPV6, ICMP6_ECHO_REQUEST),
        };
        let (to, base) = (Register::R1, PayloadBase::Transport);
        vec![
            Expression::Meta { key: MetaKey::L4Protocol, to },
            Expression::equal(to, Value::byte(u8::try_from(protocol).unwrap_or_default())),
            Expression::Payload { base, offset: 0, length: 1, to },
            Expression::equal(to, Value::byte(echo_request)),
        ]
    }

    /// Continues if the protocol of the packet is in a set.
    pub(super) fn is_protocol_in(self, set: &str) -> [Expression; 2] {
        let to = Register::R1;
        [Expression::Meta { key: MetaKey::L4Protocol, to }, self.is_in(set, to)]
    }

    pub(super) fn translate_to_listener(self, listener: SocketAddr) -> [Expression; 3] {
        let address = Register::R1;
        let port = address.after(self.address_bytes());
        [
            Expression::Immediate { to: address, value: listener.ip().into() },
            Expression::Immediate { to: port, value: Value::port(listener.port()) },
            self.translate(address),
        ]
    }

    /// Translates the destination to an address. Needs [`Register::R1`].
    pub(super) fn translate_to(self, address: IpAddr) -> Vec<Expression> {
        let (kind, flags) = (NatKind::Destination, NatFlags::NONE);
        vec![
            Expression::Immediate { to: Register::R1, value: address.into() },
            Expression::Nat { kind, family: self.nat_family(), address: Some(Register::R1.into()), port: None, flags },
        ]
    }

    fn nat_family(self) -> AddressFamily {
        match self.family {
            Family::V4 => AddressFamily::Ip,
            Family::V6 => AddressFamily::Ip6,
        }
    }

    /// Replaces the source with the node's address.
    pub(super) fn masquerade(self) -> Expression {
        Expression::Masquerade { port: None, flags: NatFlags::FULLY_RANDOM }
    }

    pub(super) fn reject(self) -> Expression {
        Expression::Reject(Reject::Icmp(match self.family {
            Family::V4 => ICMP_PORT_UNREACHABLE,
            Family::V6 => ICMP6_PORT_UNREACHABLE,
        }))
    }

    /// Continues at most `burst` times at once per key, and `burst` times more per `seconds`.
    pub(super) fn within_rate(self, set: &str, key: Register, burst: u32, seconds: u32) -> Expression {
        // `nft` can print a rate per hour, but not one per any other number of seconds.
        const HOUR_SECONDS: u64 = 3600;
        let rate = u64::from(burst) * HOUR_SECONDS / u64::from(seconds.max(1));
        let limit = Expression::Limit {
            rate: rate.max(1),
            seconds: HOUR_SECONDS,
            burst,
            bytes: Bytes::Ignored,
            inverted: false,
        };
        Expression::DynamicSet(DynamicSet {
            set: set.into(),
            operation: DynamicSetOperation::Update,
            key,
            data: None,
            timeout_ms: None,
            expressions: vec![limit],
        })
    }

    /// Changes an element of a dynamic set.
    pub(super) fn record(
        self,
        set: &str,
        operation: DynamicSetOperation,
        key: Register,
        data: Option<Register>,
    ) -> Expression {
        let (set, timeout_ms, expressions) = (set.into(), None, Vec::new());
        Expression::DynamicSet(DynamicSet { set, operation, key, data, timeout_ms, expressions })
    }
}

/// Executes another chain, and then continues with the next rule of this chain.
pub(super) fn jump(chain: &str) -> Expression {
    Expression::Verdict(Verdict::Jump(chain.to_owned()))
}

fn ct_bits(key: CtKey, bits: u32, comparison: Comparison) -> Vec<Expression> {
    let register = Register::R1;
    vec![
        Expression::Conntrack { key, direction: None, to: register },
        Expression::Bitwise { from: register, to: register, mask: Value::host_u32(bits), xor: Value::host_u32(0) },
        Expression::Compare { register, comparison, value: Value::host_u32(0) },
    ]
}
