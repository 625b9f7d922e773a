//! Sends packets through rules. The fake kernel treats packets as the real kernel does.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
};

use anyhow::Result;
use nftables_netlink::{
    AddressFamily, BaseChain, Chain, ChainType, Comparison, CtKey, DataType, Direction, DynamicSet,
    DynamicSetOperation, Element, Expression, Family, FibFlags, FibResult, Generator, Hook, Kernel, LookupResult,
    MetaKey, NatFlags, NatKind, Nftables, PayloadBase, Policy, Register, Reject, Rule, Set, Table, TableName,
    Transaction, Value, Verdict,
    fake::{Action, FakeKernel, Fate, Misses, Packet},
};

use super::{in_namespace, table_name};
use headgate_tests::testbed::process::output;

use Expression as E;

const R1: Register = Register::R1;
const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

fn base(table: &TableName, kind: ChainType, hook: Hook) -> Chain {
    Chain::base(table, "base", BaseChain { kind, hook, priority: 0, policy: Policy::Accept })
}

fn port(to: Register) -> E {
    E::Payload { base: PayloadBase::Transport, offset: 2, length: 2, to }
}

fn is_udp() -> [E; 2] {
    [E::Meta { key: MetaKey::L4Protocol, to: R1 }, E::equal(R1, Value::byte(17))]
}

/// Expressions that add the value of register 1 and the number of the rule to the set `seen`.
fn note(number: u32) -> Vec<E> {
    vec![
        E::Immediate { to: Register::word(1), value: Value::host_u32(number) },
        E::DynamicSet(DynamicSet {
            set: "seen".into(),
            operation: DynamicSetOperation::Add,
            key: R1,
            data: None,
            timeout_ms: None,
            expressions: vec![],
        }),
    ]
}

/// The expressions under test, for packets to UDP ports of this host. For each element, [`ruleset`]
/// adds a rule that records the value of register 1.
fn expressions() -> Vec<Vec<E>> {
    let ct = |key, direction| vec![E::Conntrack { key, direction, to: R1 }];
    let address = |offset, to| E::Payload { base: PayloadBase::Network, offset, length: 4, to };
    let hash = |length, modulus, offset| {
        let (first, next) = (Register::R2, Register::R2.after(4));
        let mut all = vec![address(12, first), address(16, next), port(next.after(4))];
        // The hash reads whole words, so set the bytes after the port too.
        all.push(E::Immediate { to: next.after(8), value: Value(vec![3; 12]) });
        all.push(E::Hash { from: first, length, modulus, seed: Some(0x1234_5678), offset, to: R1 });
        all
    };
    let original = Some(Direction::Original);
    let mut all = vec![
        vec![address(12, R1)],
        vec![address(16, R1)],
        vec![port(R1)],
        vec![E::Meta { key: MetaKey::NfProtocol, to: R1 }],
        vec![E::Meta { key: MetaKey::L4Protocol, to: R1 }],
        vec![E::Meta { key: MetaKey::Mark, to: R1 }],
        ct(CtKey::State, None),
        ct(CtKey::Direction, None),
        ct(CtKey::L3Protocol, None),
        ct(CtKey::Protocol, None),
        ct(CtKey::DestinationIp, original),
        ct(CtKey::SourceIp, Some(Direction::Reply)),
        ct(CtKey::DestinationPort, original),
        vec![E::Fib { result: FibResult::AddressType, flags: FibFlags::DESTINATION, to: R1 }],
        vec![port(R1), E::Bitwise { from: R1, to: R1, mask: Value::port(0xf0f0), xor: Value::port(0x0f00) }],
        vec![port(R1), E::Range { register: R1, inverted: false, first: Value::port(7000), last: Value::port(7010) }],
        vec![port(R1), E::Range { register: R1, inverted: true, first: Value::port(7000), last: Value::port(7010) }],
        vec![port(R1), E::Compare { register: R1, comparison: Comparison::Greater, value: Value::port(7005) }],
        vec![port(R1), E::Compare { register: R1, comparison: Comparison::LessOrEqual, value: Value::port(7005) }],
        vec![port(R1), E::Lookup { set: "ranges".into(), key: R1, result: LookupResult::Present }],
        vec![port(R1), E::Lookup { set: "ranges".into(), key: R1, result: LookupResult::Absent }],
        vec![port(R1), E::Lookup { set: "map".into(), key: R1, result: LookupResult::Into(R1) }],
        vec![E::NumberGenerator { generator: Generator::Incremental, modulus: 5, offset: 100, to: R1 }],
    ];
    all.extend((1..=24).map(|length| hash(length, 1_000_000, 7)));
    all.extend([1, 2, 3, 1000, u32::MAX].map(|modulus| hash(8, modulus, 0)));
    all
}

fn ruleset(table: &TableName) -> Transaction {
    let mut all = Transaction::new();
    all.add_table(&Table::new(table.clone()));
    all.add_chain(&base(table, ChainType::Filter, Hook::Output));
    all.add_set(&Set::new(table, "seen", &[DataType::Mark, DataType::Mark]).with_size(10_000).dynamic());
    all.add_set(&Set::new(table, "ranges", &[DataType::Port]).with_ranges(&[DataType::Port]));
    all.add_elements(table, "ranges", Element::interval(Value::port(7002), Value::port(7004)));
    all.add_elements(table, "ranges", Element::interval(Value::port(7007), Value::port(7008)));
    all.add_set(&Set::map(table, "map", &[DataType::Port], &[DataType::Mark]));
    let other = Element { catch_all: true, ..Element::default() };
    all.add_elements(
        table,
        "map",
        [Element::new(Value::port(7001)).with_value(Value::host_u32(9)), other.with_value(Value::host_u32(10))],
    );
    for (number, expressions) in (0..).zip(expressions()) {
        let parts = [is_udp().to_vec(), expressions, note(number)];
        all.add_rule(&Rule::new(table, "base", parts.concat()));
    }
    all
}

fn seen(kernel: &mut impl Kernel, table: &TableName) -> Result<BTreeSet<Value>> {
    Ok(kernel.elements(table, "seen")?.into_iter().map(|element| element.key).collect())
}

#[test]
fn expressions_give_the_results_of_the_real_kernel() {
    let table = table_name();
    let (ports, real) = in_namespace("evaluate", || {
        output("ip", &["link", "set", "lo", "up"]);
        let mut kernel = Nftables::open()?;
        kernel.commit(&ruleset(&table_name()))?;
        let mut ports = Vec::new();
        for port in 7000..7012 {
            let socket = UdpSocket::bind((LOOPBACK, 0))?;
            socket.send_to(b"hello", (LOOPBACK, port))?;
            ports.push((socket.local_addr()?.port(), port));
        }
        Ok((ports, seen(&mut kernel, &table_name())?))
    });
    let fake = FakeKernel::new();
    let mut kernel = fake.connect();
    kernel.commit(&ruleset(&table)).unwrap();
    for (source, port) in ports {
        let walk = fake.walk(Hook::Output, &mut Packet::new(17, (LOOPBACK, source), (LOOPBACK, port)));
        assert_eq!((walk.fate, walk.actions), (Fate::Accepted, vec![]));
    }
    let memory = seen(&mut kernel, &table).unwrap();
    let numbers: BTreeSet<_> = real.iter().map(|key| key.0[4..].to_vec()).collect();
    assert_eq!(numbers.len(), expressions().len(), "a rule recorded no result: {numbers:?}");
    let (only_real, only_memory) =
        (real.difference(&memory).collect::<Vec<_>>(), memory.difference(&real).collect::<Vec<_>>());
    assert!(
        only_real.is_empty() && only_memory.is_empty(),
        "only in the real kernel {only_real:?}, only in the fake kernel {only_memory:?}"
    );
}

/// A ruleset that translates UDP ports by the map `slots`. Two equal rules look up the port;
/// packets without a match reach the expressions in `rest`.
fn service(table: &TableName, rest: &[E]) -> Transaction {
    let mut all = Transaction::new();
    all.add_table(&Table::new(table.clone()));
    all.add_chain(&base(table, ChainType::Nat, Hook::Output));
    all.add_set(&Set::map(table, "slots", &[DataType::Port], &[DataType::Port]));
    let port = || [is_udp().to_vec(), vec![port(R1)]].concat();
    let translate = vec![
        E::Lookup { set: "slots".into(), key: R1, result: LookupResult::Into(Register::R2) },
        E::Immediate { to: R1, value: Value::from(LOOPBACK) },
        E::Nat {
            kind: NatKind::Destination,
            family: AddressFamily::Ip,
            address: Some(R1.into()),
            port: Some(Register::R2.into()),
            flags: NatFlags::NONE,
        },
    ];
    for _ in 0..2 {
        all.add_rule(&Rule::new(table, "base", [port(), translate.clone()].concat()));
    }
    all.add_rule(&Rule::new(table, "base", [port(), rest.to_vec()].concat()));
    all
}

fn slot(from: u16, to: u16) -> Element {
    Element::new(Value::port(from)).with_value(Value::port(to))
}

#[test]
fn translated_packets_reach_the_destination_that_the_real_kernel_chooses() {
    let table = table_name();
    let reached = in_namespace("translate", || {
        output("ip", &["link", "set", "lo", "up"]);
        let mut kernel = Nftables::open()?;
        let server = UdpSocket::bind((LOOPBACK, 0))?;
        server.set_read_timeout(Some(std::time::Duration::from_secs(20)))?;
        let mut all = service(&table_name(), &[E::Verdict(Verdict::Drop)]);
        all.add_elements(&table_name(), "slots", [slot(7000, server.local_addr()?.port())]);
        kernel.commit(&all)?;
        let client = UdpSocket::bind((LOOPBACK, 0))?;
        client.send_to(b"hello", (LOOPBACK, 7000))?;
        let mut buffer = [0; 16];
        let (length, from) = server.recv_from(&mut buffer)?;
        server.send_to(&buffer[..length], from)?;
        client.set_read_timeout(Some(std::time::Duration::from_secs(20)))?;
        let (_, answered) = client.recv_from(&mut buffer)?;
        assert_eq!((from, answered), (client.local_addr()?, SocketAddr::new(LOOPBACK, 7000)));
        Ok(server.local_addr()?.port())
    });
    let fake = FakeKernel::new();
    let mut kernel = fake.connect();
    let mut all = service(&table, &[E::Verdict(Verdict::Drop)]);
    all.add_elements(&table, "slots", [slot(7000, reached)]);
    kernel.commit(&all).unwrap();
    let mut sent = Packet::new(17, (LOOPBACK, 5000), (LOOPBACK, 7000));
    let walk = fake.walk(Hook::Output, &mut sent);
    assert_eq!((walk.fate, walk.actions), (Fate::Accepted, vec![Action::DestinationTranslated(LOOPBACK, reached)]));
    assert_eq!(sent.connection.unwrap().reply.source, (LOOPBACK, reached));
    assert_eq!(sent.tuple.destination, (LOOPBACK, reached));
}

#[test]
fn lookups_of_replaced_keys_fail_as_often_as_the_test_sets() {
    let table = table_name();
    let fake = FakeKernel::new();
    let mut kernel = fake.connect();
    let mut all = service(&table, &[E::Verdict(Verdict::Drop)]);
    all.add_elements(&table, "slots", [slot(7000, 1), slot(7001, 2)]);
    kernel.commit(&all).unwrap();
    let mut swap = Transaction::new();
    swap.delete_elements(&table, "slots", [slot(7000, 1)]);
    swap.add_elements(&table, "slots", [slot(7000, 3)]);
    kernel.commit(&swap).unwrap();
    let fate = |port| {
        let mut packet = Packet::new(17, (LOOPBACK, 5000), (LOOPBACK, port));
        (fake.walk(Hook::Output, &mut packet).fate, packet.tuple.destination.1)
    };
    for (misses, replaced) in [
        (Misses::Never, (Fate::Accepted, 3)),
        // The lookup of the first rule misses, and the lookup of the second rule succeeds.
        (Misses::First(1), (Fate::Accepted, 3)),
        (Misses::First(2), (Fate::Dropped, 7000)),
        (Misses::Always, (Fate::Dropped, 7000)),
    ] {
        fake.miss_replaced_keys(misses);
        assert_eq!((fate(7000), fate(7001), fate(7002)), (replaced, (Fate::Accepted, 2), (Fate::Dropped, 7002)));
    }
    // The next transaction ends the time in which lookups of replaced keys may miss.
    let mut other = Transaction::new();
    other.add_elements(&table, "slots", [slot(7005, 5)]);
    kernel.commit(&other).unwrap();
    assert_eq!(fate(7000), (Fate::Accepted, 3));
}

#[test]
fn elements_expire_and_an_update_of_a_full_set_ends_the_rule() {
    let table = TableName::new(Family::Ip, "brief");
    let fake = FakeKernel::new();
    let mut kernel = fake.connect();
    let mut all = Transaction::new();
    all.add_table(&Table::new(table.clone()));
    all.add_chain(&base(&table, ChainType::Filter, Hook::Input));
    all.add_set(&Set::new(&table, "seen", &[DataType::Port]).with_size(2).dynamic().with_timeout_ms(1000));
    let add = E::DynamicSet(DynamicSet {
        set: "seen".into(),
        operation: DynamicSetOperation::Update,
        key: R1,
        data: None,
        timeout_ms: None,
        expressions: vec![],
    });
    all.add_rule(&Rule::new(&table, "base", vec![port(R1), add, E::Reject(Reject::TcpReset)]));
    kernel.commit(&all).unwrap();
    let fate = |port| fake.walk(Hook::Input, &mut Packet::new(6, (LOOPBACK, 1), (LOOPBACK, port))).fate;
    let refused = Fate::Rejected(Reject::TcpReset);
    assert_eq!([1, 2, 3, 1].map(fate), [refused, refused, Fate::Accepted, refused]);
    fake.advance_ms(600);
    assert_eq!(fate(2), refused);
    fake.advance_ms(600);
    assert_eq!(
        kernel.elements(&table, "seen").unwrap().len(),
        1,
        "expected only the second element, which its use has renewed"
    );
    assert_eq!(fate(3), refused);
}
