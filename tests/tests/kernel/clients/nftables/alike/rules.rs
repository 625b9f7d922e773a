//! Rules, and the kernel's checks of chains that packets can reach.

use nftables_netlink::{AddressFamily, DynamicSet, DynamicSetOperation, Generator, MetaKey, NatFlags, NatKind, Reject};

use super::*;
use Expression as E;

/// Adds a row of chains. Each chain jumps to the next chain, and the base chain jumps to the first
/// chain.
fn row(length: usize) -> Transaction {
    change(|all, table| {
        let name = |index: usize| format!("row-{index}");
        (0..length).for_each(|index| all.add_chain(&Chain::regular(table, name(index))));
        for index in 1..length {
            all.add_rule(&Rule::new(table, name(index - 1), vec![jump(&name(index))]));
        }
        all.add_rule(&Rule::new(table, "base", vec![jump(&name(0))]));
    })
}

fn dynamic(set: &str) -> E {
    E::DynamicSet(DynamicSet {
        set: set.into(),
        operation: DynamicSetOperation::Update,
        key: Register::R1,
        data: None,
        timeout_ms: None,
        expressions: vec![],
    })
}

fn nat_chain(hook: Hook) -> Transaction {
    change(|all, table| all.add_chain(&base(table, "nat", ChainType::Nat, hook, 0)))
}

fn dnat() -> Vec<E> {
    let flags = NatFlags::NONE;
    let address = Some(Register::R1.into());
    vec![
        load(Value::host_u32(1)),
        E::Nat { kind: NatKind::Destination, family: AddressFamily::Ip, address, port: None, flags },
    ]
}

#[test]
fn the_fake_and_the_real_kernel_agree_on_rules() {
    let masquerade = || vec![E::Masquerade { port: None, flags: NatFlags::FULLY_RANDOM }];
    let two = change(|all, table| {
        all.add_rule(&Rule::new(table, "a", vec![E::counter()]));
        all.add_rule(&Rule::new(table, "none", vec![E::counter()]));
    });
    run(
        "rules",
        vec![
            ("in a missing chain", vec![(prepared(), 0), (two, ENOENT)]),
            (
                "deleted by an unknown handle",
                vec![(prepared(), 0), (change(|all, table| all.delete_rule(table, "a", 999)), ENOENT)],
            ),
            (
                "flushed with the table",
                vec![
                    (prepared(), 0),
                    (rule("base", vec![jump("a")]), 0),
                    (rule("a", vec![E::counter()]), 0),
                    (change(Transaction::flush_table), 0),
                ],
            ),
            (
                "verdicts",
                vec![
                    (prepared(), 0),
                    (rule("a", vec![jump("none")]), ENOENT),
                    (rule("a", vec![jump("base")]), EOPNOTSUPP),
                    (rule("a", vec![E::Verdict(Verdict::Return)]), 0),
                ],
            ),
            (
                "registers",
                vec![
                    (prepared(), 0),
                    (rule("a", vec![E::equal(Register::R1, Value::host_u32(1))]), ENODATA),
                    (rule("a", vec![E::Meta { key: MetaKey::Mark, to: Register::word(16) }]), ERANGE),
                    (rule("a", vec![E::Meta { key: MetaKey::InputInterfaceName, to: Register::word(13) }]), ERANGE),
                    (rule("a", vec![mark(), E::equal(Register::R1, Value(vec![0; 8]))]), ENODATA),
                    (
                        rule(
                            "a",
                            vec![E::NumberGenerator {
                                generator: Generator::Random,
                                modulus: 0,
                                offset: 0,
                                to: Register::R1,
                            }],
                        ),
                        ERANGE,
                    ),
                ],
            ),
            (
                "lookups",
                vec![
                    (prepared(), 0),
                    (rule("a", vec![mark(), find("none", LookupResult::Present)]), ENOENT),
                    (rule("a", vec![find("set", LookupResult::Present)]), ENODATA),
                    (rule("a", vec![mark(), find("set", LookupResult::Into(Register::R1))]), EINVAL),
                    (rule("a", vec![mark(), find("map", LookupResult::Verdict)]), EINVAL),
                    (rule("a", vec![mark(), find("verdicts", LookupResult::Into(Register::R1))]), EINVAL),
                    (rule("a", vec![mark(), find("map", LookupResult::Present)]), 0),
                    (rule("a", vec![mark(), find("map", LookupResult::Absent)]), 0),
                    (rule("a", vec![mark(), find("verdicts", LookupResult::Verdict)]), 0),
                ],
            ),
            (
                "dynamic sets",
                vec![
                    (prepared(), 0),
                    (rule("a", vec![mark(), dynamic("set")]), EOPNOTSUPP),
                    (rule("a", vec![mark(), dynamic("verdicts")]), EINVAL),
                    (rule("a", vec![mark(), dynamic("map")]), EINVAL),
                    (
                        change(|all, table| {
                            all.add_set(&Set::new(table, "dynamic", &[DataType::Mark]).with_size(5).dynamic());
                            all.add_rule(&Rule::new(table, "a", vec![mark(), dynamic("dynamic")]));
                        }),
                        0,
                    ),
                ],
            ),
            (
                "anonymous sets",
                vec![
                    (prepared(), 0),
                    (
                        change(|all, table| {
                            let name = all.add_set(&Set::new(table, "", &[DataType::Mark]).anonymous());
                            all.add_elements(table, name.clone(), [number(1)]);
                            all.add_rule(&Rule::new(table, "a", vec![mark(), find(name, LookupResult::Present)]));
                        }),
                        0,
                    ),
                    (change(|all, table| all.add_elements(table, "__set0", [number(2)])), EBUSY),
                    (rule("a", vec![mark(), find("__set0", LookupResult::Present)]), EBUSY),
                    (change(|all, table| all.flush_chain(table, "a")), 0),
                ],
            ),
            (
                "loops",
                vec![
                    (prepared(), 0),
                    (rule("a", vec![jump("b")]), 0),
                    (rule("b", vec![jump("a")]), 0),
                    (rule("base", vec![jump("a")]), EMLINK),
                    (change(|all, table| all.flush_chain(table, "b")), 0),
                    (rule("base", vec![jump("a")]), 0),
                    (rule("b", vec![jump("a")]), EMLINK),
                    (rule("b", vec![mark(), find("verdicts", LookupResult::Verdict)]), 0),
                    (
                        change(|all, table| all.add_elements(table, "verdicts", [number(1).with_verdict(goto("a"))])),
                        EMLINK,
                    ),
                ],
            ),
            ("a row of 15 chains", vec![(prepared(), 0), (row(15), 0)]),
            ("a row of 16 chains", vec![(prepared(), 0), (row(16), EMLINK)]),
            ("translation in a filter", vec![(prepared(), 0), (rule("base", dnat()), EOPNOTSUPP)]),
            (
                "translation in a chain that no hook reaches",
                vec![
                    (prepared(), 0),
                    (rule("a", dnat()), 0),
                    (rule("base", vec![jump("a")]), EOPNOTSUPP),
                    (nat_chain(Hook::Prerouting), 0),
                    (rule("nat", vec![jump("a")]), 0),
                    (rule("nat", masquerade()), EOPNOTSUPP),
                ],
            ),
            (
                "masquerade",
                vec![
                    (prepared(), 0),
                    (nat_chain(Hook::Postrouting), 0),
                    (rule("nat", masquerade()), 0),
                    (rule("nat", dnat()), EOPNOTSUPP),
                    (rule("nat", vec![E::Reject(Reject::Icmpx(1))]), EOPNOTSUPP),
                ],
            ),
        ],
    );
}
