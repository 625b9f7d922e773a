//! Tables, chains and sets.

use nftables_netlink::{Existing, Kernel as _};

use super::*;

#[test]
fn the_fake_and_the_real_kernel_agree_on_tables() {
    let put = |existing| change(|all, table| all.put_table(&Table::new(table.clone()), existing));
    let with = |owned, persistent| {
        change(|all, table| all.add_table(&Table { owned, persistent, ..Table::new(table.clone()) }))
    };
    let delete = || change(Transaction::delete_table);
    run(
        "tables",
        vec![
            ("added twice", vec![(put(Existing::Kept), 0), (put(Existing::Kept), 0), (put(Existing::Refused), EEXIST)]),
            ("missing", vec![(delete(), ENOENT)]),
            ("deleted with its contents", vec![(prepared(), 0), (rule("base", vec![jump("a")]), 0), (delete(), 0)]),
            (
                "gets an owner later",
                vec![(put(Existing::Kept), 0), (with(true, false), EOPNOTSUPP), (with(true, true), EOPNOTSUPP)],
            ),
            ("persistent without an owner", vec![(with(false, true), 0), (with(true, true), 0)]),
            ("owned", vec![(with(true, true), 0), (with(true, true), 0), (with(true, false), EOPNOTSUPP)]),
            ("loses its owner", vec![(with(true, true), 0), (with(false, true), EOPNOTSUPP)]),
            (
                "deleted and added in one transaction",
                vec![
                    (prepared(), 0),
                    (
                        change(|all, table| {
                            all.delete_table(table);
                            all.add_table(&Table::new(table.clone()));
                            all.add_chain(&Chain::regular(table, "a"));
                        }),
                        0,
                    ),
                ],
            ),
            (
                "elements of a table deleted in the transaction",
                vec![
                    (prepared(), 0),
                    (
                        change(|all, table| {
                            all.delete_table(table);
                            all.add_elements(table, "map", [entry(1, 1)]);
                        }),
                        ENOENT,
                    ),
                ],
            ),
        ],
    );
}

#[test]
fn the_fake_and_the_real_kernel_agree_on_chains() {
    let add = |chain: fn(&TableName) -> Chain, existing| change(|all, table| all.put_chain(&chain(table), existing));
    let delete =
        |names: &'static [&str]| change(|all, table| names.iter().for_each(|name| all.delete_chain(table, name)));
    let regular: fn(&TableName) -> Chain = |table| Chain::regular(table, "a");
    let nat = |hook, priority| change(|all, table| all.add_chain(&base(table, "nat", ChainType::Nat, hook, priority)));
    let route = |hook| change(|all, table| all.add_chain(&base(table, "route", ChainType::Route, hook, 0)));
    let refill = change(|all, table| {
        all.flush_chain(table, "base");
        all.delete_chain(table, "a");
        all.add_chain(&Chain::regular(table, "a"));
        all.add_rule(&Rule::new(table, "a", vec![Expression::counter()]));
        all.add_rule(&Rule::new(table, "base", vec![jump("a")]));
    });
    run(
        "chains",
        vec![
            ("without a table", vec![(add(regular, Existing::Kept), ENOENT)]),
            (
                "added twice",
                vec![(prepared(), 0), (add(regular, Existing::Kept), 0), (add(regular, Existing::Refused), EEXIST)],
            ),
            (
                "changed to a base chain",
                vec![
                    (prepared(), 0),
                    (add(|table| base(table, "a", ChainType::Filter, Hook::Input, 0), Existing::Kept), EOPNOTSUPP),
                    (add(|table| Chain::regular(table, "base"), Existing::Kept), 0),
                    (add(|table| base(table, "base", ChainType::Filter, Hook::Input, 1), Existing::Kept), EOPNOTSUPP),
                    (add(|table| base(table, "base", ChainType::Filter, Hook::Output, 0), Existing::Kept), EOPNOTSUPP),
                    (add(|table| base(table, "base", ChainType::Nat, Hook::Input, 0), Existing::Kept), EEXIST),
                ],
            ),
            (
                "another policy",
                vec![
                    (prepared(), 0),
                    (
                        add(
                            |table| {
                                let mut chain = base(table, "base", ChainType::Filter, Hook::Input, 0);
                                chain.base.as_mut().unwrap().policy = Policy::Drop;
                                chain
                            },
                            Existing::Kept,
                        ),
                        0,
                    ),
                ],
            ),
            ("missing", vec![(prepared(), 0), (delete(&["none"]), ENOENT)]),
            ("with rules of its own", vec![(prepared(), 0), (rule("a", vec![jump("b")]), 0), (delete(&["a"]), 0)]),
            (
                "in use by a rule",
                vec![
                    (prepared(), 0),
                    (rule("base", vec![jump("a")]), 0),
                    (delete(&["a"]), EBUSY),
                    (delete(&["base"]), 0),
                    (delete(&["a"]), 0),
                ],
            ),
            (
                "deleted before the chain with the jump to it",
                vec![
                    (prepared(), 0),
                    (rule("a", vec![jump("b")]), 0),
                    (delete(&["b", "a"]), EBUSY),
                    (delete(&["a", "b"]), 0),
                ],
            ),
            (
                "in use by an element",
                vec![
                    (prepared(), 0),
                    (change(|all, table| all.add_elements(table, "verdicts", [number(1).with_verdict(goto("a"))])), 0),
                    (delete(&["a"]), EBUSY),
                    (
                        change(|all, table| {
                            all.delete_elements(table, "verdicts", [number(1)]);
                            all.delete_chain(table, "a");
                        }),
                        0,
                    ),
                ],
            ),
            (
                "in use by a set that is deleted",
                vec![
                    (prepared(), 0),
                    (change(|all, table| all.add_elements(table, "verdicts", [number(1).with_verdict(goto("a"))])), 0),
                    (
                        change(|all, table| {
                            all.delete_set(table, "verdicts");
                            all.delete_chain(table, "a");
                        }),
                        0,
                    ),
                ],
            ),
            ("replaced in one transaction", vec![(prepared(), 0), (rule("base", vec![jump("a")]), 0), (refill, 0)]),
            (
                "types and hooks",
                vec![
                    (prepared(), 0),
                    (nat(Hook::Forward, 0), EOPNOTSUPP),
                    (nat(Hook::Prerouting, -200), EOPNOTSUPP),
                    (nat(Hook::Prerouting, -199), 0),
                    (route(Hook::Input), EOPNOTSUPP),
                    (route(Hook::Output), 0),
                ],
            ),
        ],
    );
}

#[test]
fn the_fake_and_the_real_kernel_agree_on_sets() {
    let put = |existing, fill: fn(Set) -> Set| {
        change(|all, table| {
            all.put_set(&fill(Set::new(table, "set", &[DataType::Mark]).with_size(2)), existing);
        })
    };
    let add = |fill: fn(&TableName) -> Set| {
        change(|all, table| {
            all.add_set(&fill(table));
        })
    };
    let delete = || change(|all, table| all.delete_set(table, "set"));
    let use_set = || rule("a", vec![mark(), find("set", LookupResult::Present)]);
    run(
        "sets",
        vec![
            (
                "added twice",
                vec![
                    (prepared(), 0),
                    (put(Existing::Kept, |set| set), 0),
                    (put(Existing::Refused, |set| set), EEXIST),
                    (put(Existing::Kept, |set| set.with_size(3)), 0),
                    (put(Existing::Kept, |set| Set { size: None, ..set }), 0),
                    (put(Existing::Kept, |set| Set { timeout_ms: Some(5), ..set.with_timeout_ms(5) }), EEXIST),
                ],
            ),
            (
                "required",
                vec![
                    (prepared(), 0),
                    (put(Existing::Required, |set| set), 0),
                    (put(Existing::Required, |set| Set { name: "other".into(), ..set }), ENOENT),
                ],
            ),
            ("deleted", vec![(prepared(), 0), (delete(), 0), (delete(), ENOENT)]),
            (
                "in use",
                vec![
                    (prepared(), 0),
                    (use_set(), 0),
                    (delete(), EBUSY),
                    (
                        change(|all, table| {
                            all.flush_chain(table, "a");
                            all.delete_set(table, "set");
                        }),
                        0,
                    ),
                ],
            ),
            (
                "deleted and added in one transaction",
                vec![
                    (prepared(), 0),
                    (
                        change(|all, table| {
                            all.add_elements(table, "set", [number(1)]);
                            all.delete_set(table, "set");
                            all.add_set(&Set::new(table, "set", &[DataType::Mark]));
                            all.add_elements(table, "set", [number(2)]);
                        }),
                        0,
                    ),
                ],
            ),
            (
                "long keys",
                vec![
                    (prepared(), 0),
                    (add(|table| Set::new(table, "long", &[DataType::InterfaceName; 4])), 0),
                    (add(|table| Set::new(table, "longer", &[DataType::InterfaceName; 5])), EINVAL),
                    (
                        add(|table| Set::map(table, "long-data", &[DataType::Mark], &[DataType::InterfaceName; 5])),
                        EINVAL,
                    ),
                ],
            ),
            (
                "a timeout without the flag",
                vec![
                    (prepared(), 0),
                    (add(|table| Set { timeout_ms: Some(5), ..Set::new(table, "timeout", &[DataType::Mark]) }), EINVAL),
                ],
            ),
            (
                "anonymous without a rule",
                vec![(prepared(), 0), (add(|table| Set::new(table, "", &[DataType::Mark]).anonymous()), EINVAL)],
            ),
        ],
    );
}

#[test]
fn both_kernels_protect_tables_with_an_owner() {
    let table = table_name();
    let owned = |persistent| {
        change(|all, table| all.add_table(&Table { owned: true, persistent, ..Table::new(table.clone()) }))
    };
    let add = change(|all, table| {
        all.add_chain(&Chain::regular(table, "a"));
    });
    let mut answers = Vec::new();
    let mut play = |first: &mut dyn FnMut(&Transaction) -> i32, second: &mut dyn FnMut(&Transaction) -> i32| {
        answers.push([
            first(&owned(true)),
            second(&owned(true)),
            second(&add),
            second(&change(Transaction::delete_table)),
            first(&add),
        ]);
    };
    let fake = FakeKernel::new();
    let (mut one, mut other) = (fake.connect(), fake.connect());
    play(&mut |all| answer(one.commit(all)).0, &mut |all| answer(other.commit(all)).0);
    drop(one);
    let memory = [answer(other.commit(&owned(true))).0, other.chains(&table).unwrap().len().try_into().unwrap()];
    let kernel = in_namespace("owners", || {
        let (mut one, mut other) = (Nftables::open()?, Nftables::open()?);
        play(&mut |all| answer(one.commit(all)).0, &mut |all| answer(other.commit(all)).0);
        drop(one);
        Ok([answer(other.commit(&owned(true))).0, other.chains(&table)?.len().try_into()?])
    });
    assert_eq!(answers[0], [0, EPERM, EPERM, EPERM, 0]);
    assert_eq!(answers[0], answers[1]);
    assert_eq!((memory, kernel), ([0, 1], [0, 1]));
}
