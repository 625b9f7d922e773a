//! One table with every kind of object and expression that the client knows, in two forms: objects
//! of Headgate's client, and input of `nft`.

use std::net::{Ipv4Addr, Ipv6Addr};

use Expression as E;
use nftables_netlink::{
    AddressFamily, BaseChain, Bytes, Chain, ChainType, Comparison, CtKey, DataType, Direction, DynamicSet,
    DynamicSetOperation, Element, Expression, FibFlags, FibResult, Generator, Hook, LookupResult, MetaKey, NatFlags,
    NatKind, PayloadBase, Policy, Register, Reject, Rule, Set, SetFlags, Table, TableName, Transaction, Value, Verdict,
};

pub(super) const TEXT: &str = r#"
table inet shop {
  map services {
    type ipv4_addr . inet_proto . inet_service : mark . mark . mark
    elements = { 10.0.0.1 . tcp . 80 : 0x1 . 0x3 . 0x0 }
  }
  map endpoints {
    type mark . mark : ipv4_addr . inet_service
    size 1024
    elements = { 0x1 . 0x0 : 10.1.0.1 . 8080 }
  }
  set affinity { type mark . ipv4_addr; size 1000; flags dynamic,timeout; timeout 3h; }
  set brief { type ipv4_addr; flags timeout; timeout 1h; elements = { 10.0.0.9 timeout 2h } }
  set counted { type ipv4_addr; counter; elements = { 10.0.0.7 } }
  set both { type ipv4_addr . inet_service; flags interval; elements = { 10.0.0.0/8 . 80-90 } }
  set nets { type ipv6_addr; flags interval; elements = { fd00::/64 } }
  map weights { type ipv4_addr : mark; elements = { 10.0.0.1 : 0x7 } }
  map dispatch { type mark : verdict; elements = { 0x3 : goto pick-3 } }
  chain pick-3 {
    numgen random mod 3 offset 5 6 accept
    jhash ip saddr . tcp sport mod 7 seed 0xdeadbeef offset 2 3 accept
  }
  chain seen {
    meta mark vmap @dispatch
    counter accept
  }
  chain pre {
    type nat hook prerouting priority -100; policy accept;
    fib daddr type local jump pick-3 comment "hello"
    ip daddr 10.0.0.1 tcp dport 80 dnat ip to 10.1.0.1:8080 persistent
    ip6 daddr @nets return
  }
  chain post {
    type nat hook postrouting priority 100; policy accept;
    ct status dnat ct direction original masquerade fully-random
    ct original ip daddr 10.0.0.0/12 snat ip to 10.9.0.1
  }
  chain filter {
    type filter hook forward priority 0; policy drop;
    ct state established,related accept
    meta l4proto tcp ct original proto-dst 80 goto seen
    tcp dport 80-90 reject with tcp reset
    tcp dport != 80 limit rate 10/second burst 5 packets log prefix "shop: "
    update @affinity { meta mark . ip saddr timeout 5m }
    iifname "lo" meta mark and 0xff == 0x1 ip daddr != @counted reject with icmpx port-unreachable
  }
  chain divert {
    type filter hook prerouting priority -300; policy accept;
    udp dport 53 notrack
    ip daddr 10.0.0.1 udp dport 54 udp dport set 55 ip daddr set 127.0.0.1
  }
}
"#;

const TCP: u8 = 6;
const UDP: u8 = 17;
const R1: Register = Register::R1;

fn ip(last: [u8; 4]) -> Value {
    Ipv4Addr::from(last).into()
}

fn join(parts: &[Value]) -> Value {
    Value::concatenation(parts)
}

fn mark(number: u32) -> Value {
    Value::host_u32(number)
}

fn ipv4() -> [E; 2] {
    [E::Meta { key: MetaKey::NfProtocol, to: R1 }, E::equal(R1, Value::byte(2))]
}

fn protocol(number: u8) -> [E; 2] {
    [E::Meta { key: MetaKey::L4Protocol, to: R1 }, E::equal(R1, Value::byte(number))]
}

fn source(to: Register) -> E {
    E::Payload { base: PayloadBase::Network, offset: 12, length: 4, to }
}

fn destination(to: Register) -> E {
    E::Payload { base: PayloadBase::Network, offset: 16, length: 4, to }
}

fn port(offset: u32, to: Register) -> E {
    E::Payload { base: PayloadBase::Transport, offset, length: 2, to }
}

fn meta(key: MetaKey, to: Register) -> E {
    E::Meta { key, to }
}

fn base(table: &TableName, name: &str, kind: ChainType, hook: Hook, priority: i32, policy: Policy) -> Chain {
    Chain::base(table, name, BaseChain { kind, hook, priority, policy })
}

/// User data that marks the keys (0) or the data (1) of a set for `nft` as numbers in the machine's
/// byte order.
fn in_host_order(of: u8) -> Vec<u8> {
    [&[of, 4], &1_u32.to_ne_bytes()[..]].concat()
}

/// The table of [`TEXT`], without the user data that `nft` adds to sets.
pub(super) struct Specimen {
    pub(super) chains: Vec<Chain>,
    pub(super) sets: Vec<(Set, Vec<Element>)>,
    pub(super) rules: Vec<Rule>,
}

pub(super) fn specimen(table: &TableName) -> Specimen {
    use DataType::{Ipv4Address, Ipv6Address, Mark, Port, Protocol};
    let service = [Ipv4Address, Protocol, Port];
    let key = |address, protocol, port| join(&[ip(address), Value::byte(protocol), Value::port(port)]);
    let index = |parts: &[u32]| join(&parts.iter().map(|part| mark(*part)).collect::<Vec<_>>());
    let mut counted = Set::new(table, "counted", &[Ipv4Address]);
    counted.expressions.push(E::counter());
    let interval = SetFlags { interval: true, ..SetFlags::default() };
    let end_of_interval =
        |address: &str| Element { interval_end: true, ..Element::new(address.parse::<Ipv6Addr>().unwrap().into()) };
    let sets = vec![
        (
            Set::map(table, "services", &service, &[Mark, Mark, Mark]),
            vec![Element::new(key([10, 0, 0, 1], TCP, 80)).with_value(index(&[1, 3, 0]))],
        ),
        (
            Set::map(table, "endpoints", &[Mark, Mark], &[Ipv4Address, Port]).with_size(1024),
            vec![Element::new(index(&[1, 0])).with_value(join(&[ip([10, 1, 0, 1]), Value::port(8080)]))],
        ),
        (
            Set::new(table, "affinity", &[Mark, Ipv4Address]).with_size(1000).dynamic().with_timeout_ms(10_800_000),
            vec![],
        ),
        (
            Set::new(table, "brief", &[Ipv4Address]).with_timeout_ms(3_600_000),
            vec![Element::new(ip([10, 0, 0, 9])).with_timeout_ms(7_200_000)],
        ),
        (counted, vec![Element { expressions: vec![E::counter()], ..Element::new(ip([10, 0, 0, 7])) }]),
        (
            Set {
                flags: SetFlags { concatenated_ranges: true, ..interval },
                field_lengths: vec![4, 2],
                ..Set::new(table, "both", &[Ipv4Address, Port])
            },
            vec![Element {
                key_end: Some(join(&[ip([10, 255, 255, 255]), Value::port(90)])),
                ..Element::new(join(&[ip([10, 0, 0, 0]), Value::port(80)]))
            }],
        ),
        (
            Set { flags: interval, ..Set::new(table, "nets", &[Ipv6Address]) },
            vec![
                // `nft` adds this element, which ends the range below the first interval. That
                // range is not in the set.
                end_of_interval("::"),
                Element::new("fd00::".parse::<Ipv6Addr>().unwrap().into()),
                end_of_interval("fd00:0:0:1::"),
            ],
        ),
        (
            Set { user_data: in_host_order(1), ..Set::map(table, "weights", &[Ipv4Address], &[Mark]) },
            vec![Element::new(ip([10, 0, 0, 1])).with_value(mark(7))],
        ),
        (
            Set { user_data: in_host_order(0), ..Set::verdict_map(table, "dispatch", &[Mark]) },
            vec![Element::new(mark(3)).with_verdict(Verdict::Goto("pick-3".into()))],
        ),
    ];
    let (accept, nat, filter) = (Policy::Accept, ChainType::Nat, ChainType::Filter);
    let chains = vec![
        Chain::regular(table, "pick-3"),
        Chain::regular(table, "seen"),
        base(table, "pre", nat, Hook::Prerouting, -100, accept),
        base(table, "post", nat, Hook::Postrouting, 100, accept),
        base(table, "filter", filter, Hook::Forward, 0, Policy::Drop),
        base(table, "divert", filter, Hook::Prerouting, -300, accept),
    ];
    Specimen { chains, sets, rules: rules(table) }
}

fn rules(table: &TableName) -> Vec<Rule> {
    let rule = |chain: &str, parts: &[&[E]]| Rule::new(table, chain, parts.concat());
    let find = |set: &str, result| E::Lookup { set: set.into(), key: R1, result };
    let next = R1.after(4);
    let ct = |key, direction| E::Conntrack { key, direction, to: R1 };
    let compare = |comparison, value| E::Compare { register: R1, comparison, value };
    let any_of = |bits| {
        let mask = E::Bitwise { from: R1, to: R1, mask: mark(bits), xor: mark(0) };
        [mask, compare(Comparison::NotEqual, mark(0))]
    };
    let accept = || E::Verdict(Verdict::Accept);
    let local = E::Fib { result: FibResult::AddressType, flags: FibFlags::DESTINATION, to: R1 };
    vec![
        rule(
            "pick-3",
            &[&[
                E::NumberGenerator { generator: Generator::Random, modulus: 3, offset: 5, to: R1 },
                E::equal(R1, mark(6)),
                accept(),
            ]],
        ),
        rule(
            "pick-3",
            &[
                &ipv4(),
                &protocol(TCP),
                &[
                    source(Register::R2),
                    port(0, Register::R2.after(4)),
                    E::Hash { from: Register::R2, length: 8, modulus: 7, seed: Some(0xdead_beef), offset: 2, to: R1 },
                    E::equal(R1, mark(3)),
                    accept(),
                ],
            ],
        ),
        rule("seen", &[&[meta(MetaKey::Mark, R1), find("dispatch", LookupResult::Verdict)]]),
        rule("seen", &[&[E::counter(), E::Verdict(Verdict::Accept)]]),
        rule("pre", &[&[local, E::equal(R1, mark(2)), E::Verdict(Verdict::Jump("pick-3".into()))]])
            .with_comment("hello"),
        rule(
            "pre",
            &[
                &ipv4(),
                &[destination(R1), E::equal(R1, ip([10, 0, 0, 1]))],
                &protocol(TCP),
                &[
                    port(2, R1),
                    E::equal(R1, Value::port(80)),
                    E::Immediate { to: R1, value: ip([10, 1, 0, 1]) },
                    E::Immediate { to: Register::R2, value: Value::port(8080) },
                    E::Nat {
                        kind: NatKind::Destination,
                        family: AddressFamily::Ip,
                        address: Some(R1.into()),
                        port: Some(Register::R2.into()),
                        flags: NatFlags::PERSISTENT,
                    },
                ],
            ],
        ),
        rule(
            "pre",
            &[&[
                meta(MetaKey::NfProtocol, R1),
                E::equal(R1, Value::byte(10)),
                E::Payload { base: PayloadBase::Network, offset: 24, length: 16, to: R1 },
                find("nets", LookupResult::Present),
                E::Verdict(Verdict::Return),
            ]],
        ),
        rule(
            "post",
            &[
                &[ct(CtKey::Status, None)],
                &any_of(0x20),
                &[
                    ct(CtKey::Direction, None),
                    E::equal(R1, Value::byte(0)),
                    E::Masquerade { port: None, flags: NatFlags::FULLY_RANDOM },
                ],
            ],
        ),
        rule(
            "post",
            &[&[
                ct(CtKey::DestinationIp, Some(Direction::Original)),
                E::Bitwise { from: R1, to: R1, mask: ip([255, 240, 0, 0]), xor: ip([0, 0, 0, 0]) },
                E::equal(R1, ip([10, 0, 0, 0])),
                E::Immediate { to: R1, value: ip([10, 9, 0, 1]) },
                E::Nat {
                    kind: NatKind::Source,
                    family: AddressFamily::Ip,
                    address: Some(R1.into()),
                    port: None,
                    flags: NatFlags::NONE,
                },
            ]],
        ),
        rule("filter", &[&[ct(CtKey::State, None)], &any_of(6), &[E::Verdict(Verdict::Accept)]]),
        rule(
            "filter",
            &[
                &protocol(TCP),
                &[
                    ct(CtKey::DestinationPort, Some(Direction::Original)),
                    E::equal(R1, Value::port(80)),
                    E::Verdict(Verdict::Goto("seen".into())),
                ],
            ],
        ),
        rule(
            "filter",
            &[
                &protocol(TCP),
                &[
                    port(2, R1),
                    compare(Comparison::GreaterOrEqual, Value::port(80)),
                    compare(Comparison::LessOrEqual, Value::port(90)),
                    E::Reject(Reject::TcpReset),
                ],
            ],
        ),
        rule(
            "filter",
            &[
                &protocol(TCP),
                &[
                    port(2, R1),
                    compare(Comparison::NotEqual, Value::port(80)),
                    E::Limit { rate: 10, seconds: 1, burst: 5, bytes: Bytes::Ignored, inverted: false },
                    // [`TEXT`] names no log level, and the kernel lists the default level.
                    E::Log { prefix: Some("shop: ".into()), level: Some(4), group: None },
                ],
            ],
        ),
        rule(
            "filter",
            &[
                &ipv4(),
                &[
                    meta(MetaKey::Mark, R1),
                    source(next),
                    E::DynamicSet(DynamicSet {
                        set: "affinity".into(),
                        operation: DynamicSetOperation::Update,
                        key: R1,
                        data: None,
                        timeout_ms: Some(300_000),
                        expressions: vec![],
                    }),
                ],
            ],
        ),
        rule(
            "filter",
            &[
                &[meta(MetaKey::InputInterfaceName, R1), E::equal(R1, Value::interface_name("lo"))],
                &[
                    meta(MetaKey::Mark, R1),
                    E::Bitwise { from: R1, to: R1, mask: mark(0xff), xor: mark(0) },
                    E::equal(R1, mark(1)),
                ],
                &ipv4(),
                &[destination(R1), find("counted", LookupResult::Absent), E::Reject(Reject::Icmpx(1))],
            ],
        ),
        rule("divert", &[&protocol(UDP), &[port(2, R1), E::equal(R1, Value::port(53)), E::NoTrack]]),
        rule(
            "divert",
            &[
                &ipv4(),
                &[destination(R1), E::equal(R1, ip([10, 0, 0, 1]))],
                &protocol(UDP),
                &[
                    port(2, R1),
                    E::equal(R1, Value::port(54)),
                    E::Immediate { to: R1, value: Value::port(55) },
                    E::SetPayload {
                        base: PayloadBase::Transport,
                        offset: 2,
                        length: 2,
                        from: R1,
                        checksum_offset: Some(6),
                        in_pseudo_header: false,
                    },
                    E::Immediate { to: R1, value: ip([127, 0, 0, 1]) },
                    E::SetPayload {
                        base: PayloadBase::Network,
                        offset: 16,
                        length: 4,
                        from: R1,
                        checksum_offset: Some(10),
                        in_pseudo_header: true,
                    },
                ],
            ],
        ),
    ]
}

/// The whole table in one transaction.
pub(super) fn transaction(table: &TableName) -> Transaction {
    let specimen = specimen(table);
    let mut all = Transaction::new();
    all.add_table(&Table::new(table.clone()));
    specimen.chains.iter().for_each(|chain| all.add_chain(chain));
    for (set, elements) in &specimen.sets {
        all.add_set(set);
        all.add_elements(table, &set.name, elements.iter().cloned());
    }
    specimen.rules.iter().for_each(|rule| all.add_rule(rule));
    all
}
