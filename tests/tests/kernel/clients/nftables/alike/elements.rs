//! Elements of sets and maps.

use nftables_netlink::Existing;

use super::*;

fn add(set: &'static str, elements: impl IntoIterator<Item = Element>) -> Transaction {
    change(|all, table| all.add_elements(table, set, elements))
}

fn delete(set: &'static str, elements: impl IntoIterator<Item = Element>) -> Transaction {
    change(|all, table| all.delete_elements(table, set, elements))
}

/// Deletes key 1 of the map and adds it with other data. `is_deleted_first` chooses the order.
fn replace(is_deleted_first: bool) -> Transaction {
    change(|all, table| {
        if is_deleted_first {
            all.delete_elements(table, "map", [number(1)]);
        }
        all.add_elements(table, "map", [entry(1, 7)]);
        if !is_deleted_first {
            all.delete_elements(table, "map", [number(1)]);
        }
    })
}

#[test]
fn the_fake_and_the_real_kernel_agree_on_elements() {
    let exclusive = |element| change(|all, table| all.put_elements(table, "map", [element], Existing::Refused));
    let expiring = |fill: fn(Element) -> Element| {
        change(|all, table| {
            all.add_set(&Set::new(table, "brief", &[DataType::Mark]).with_timeout_ms(3_600_000));
            all.add_elements(table, "brief", [fill(number(1))]);
        })
    };
    let counted = || {
        change(|all, table| {
            let mut set = Set::new(table, "counted", &[DataType::Mark]);
            set.expressions.push(Expression::counter());
            all.add_set(&set);
            all.add_elements(table, "counted", [number(1)]);
        })
    };
    let pair = Element::new(Value::concatenation(&[Value::port(1), Value::port(2)]));
    run(
        "elements",
        vec![
            ("of a missing set", vec![(prepared(), 0), (add("none", [number(1)]), ENOENT)]),
            (
                "added twice",
                vec![
                    (prepared(), 0),
                    (add("map", [entry(1, 1), entry(2, 2)]), 0),
                    (add("map", [entry(3, 3), entry(1, 1)]), 0),
                    (exclusive(entry(1, 1)), EEXIST),
                    (add("map", [entry(4, 4), entry(5, 5), entry(1, 2)]), EEXIST),
                    (exclusive(entry(1, 2)), EEXIST),
                ],
            ),
            (
                "added twice in one transaction",
                vec![
                    (prepared(), 0),
                    (add("map", [entry(1, 1), entry(1, 1)]), 0),
                    (add("map", [entry(2, 1), entry(2, 2)]), EEXIST),
                ],
            ),
            (
                "replaced",
                vec![
                    (prepared(), 0),
                    (add("map", [entry(1, 1)]), 0),
                    (replace(true), 0),
                    (replace(true), 0),
                    (replace(false), 0),
                    (replace(false), 0),
                    (replace(true), ENOENT),
                ],
            ),
            (
                "deleted",
                vec![
                    (prepared(), 0),
                    (add("map", [entry(1, 1), entry(2, 2)]), 0),
                    (delete("map", [number(1), number(3)]), ENOENT),
                    (delete("map", [number(1), number(1)]), ENOENT),
                    (delete("map", [number(1)]), 0),
                    (delete("map", [entry(2, 9)]), 0),
                ],
            ),
            (
                "all deleted",
                vec![
                    (prepared(), 0),
                    (add("map", [entry(1, 1), entry(2, 2)]), 0),
                    (
                        change(|all, table| {
                            all.flush_set(table, "map");
                            all.add_elements(table, "map", [entry(1, 5)]);
                        }),
                        0,
                    ),
                    (change(|all, table| all.flush_set(table, "map")), 0),
                    (change(|all, table| all.flush_set(table, "map")), 0),
                ],
            ),
            (
                "in a full set",
                vec![
                    (prepared(), 0),
                    (add("set", [number(1), number(2)]), 0),
                    (add("set", [number(2)]), 0),
                    (add("set", [number(3)]), ENFILE),
                    (
                        change(|all, table| {
                            all.delete_elements(table, "set", [number(1)]);
                            all.add_elements(table, "set", [number(3)]);
                        }),
                        0,
                    ),
                    (
                        change(|all, table| {
                            all.add_elements(table, "set", [number(4)]);
                            all.delete_elements(table, "set", [number(3)]);
                        }),
                        ENFILE,
                    ),
                ],
            ),
            (
                "of the wrong length",
                vec![
                    (prepared(), 0),
                    (add("map", [entry(1, 1), Element::new(Value::port(1)).with_value(Value::host_u32(1))]), EINVAL),
                    (add("map", [number(1).with_value(Value::port(1))]), EINVAL),
                    (add("map", [pair]), EINVAL),
                    (delete("map", [Element::new(Value::port(1))]), EINVAL),
                ],
            ),
            (
                "of the wrong kind",
                vec![
                    (prepared(), 0),
                    (add("map", [number(1)]), EINVAL),
                    (add("set", [entry(1, 1)]), EINVAL),
                    (add("map", [number(1).with_verdict(Verdict::Drop)]), EINVAL),
                    (add("verdicts", [entry(1, 1)]), EINVAL),
                    (add("set", [Element { interval_end: true, ..number(1) }]), EINVAL),
                    (add("set", [number(1).with_timeout_ms(5)]), EINVAL),
                ],
            ),
            (
                "with verdicts",
                vec![
                    (prepared(), 0),
                    (add("verdicts", [number(1).with_verdict(goto("a")), number(2).with_verdict(Verdict::Drop)]), 0),
                    (add("verdicts", [number(3).with_verdict(goto("none"))]), ENOENT),
                    (add("verdicts", [number(3).with_verdict(goto("base"))]), EOPNOTSUPP),
                    (add("verdicts", [number(1).with_verdict(goto("b"))]), EEXIST),
                    (add("verdicts", [number(1).with_verdict(goto("a"))]), 0),
                ],
            ),
            (
                "that expire",
                vec![
                    (prepared(), 0),
                    (expiring(|element| element), 0),
                    (change(|all, table| all.add_elements(table, "brief", [number(2).with_timeout_ms(7_200_000)])), 0),
                ],
            ),
            (
                "with a counter",
                vec![
                    (prepared(), 0),
                    (counted(), 0),
                    (add("set", [number(1).with_expression(Expression::counter())]), 0),
                ],
            ),
            (
                "catch-all element",
                vec![
                    (prepared(), 0),
                    (add("map", [Element { catch_all: true, ..Element::default() }.with_value(Value::host_u32(9))]), 0),
                    (delete("map", [Element { catch_all: true, ..Element::default() }]), 0),
                    (delete("map", [Element { catch_all: true, ..Element::default() }]), ENOENT),
                ],
            ),
        ],
    );
}
