#![allow(clippy::unwrap_used)]
use proptest::prelude::*;

use super::*;
use crate::{
    AddressFamily, DataType, Direction, DynamicSet, DynamicSetOperation, Element, Expression, Generator, LookupResult,
    NatFlags, NatKind, PayloadBase, Register, Rule, Set, Table, TableName, Transaction, Value, Verdict, comment,
    comment_of, model::CtKey,
};

fn table() -> TableName {
    TableName::new(Family::Inet, "t")
}

fn rule() -> Rule {
    let to = Register::R1;
    Rule::new(
        &table(),
        "a",
        vec![
            Expression::Payload { base: PayloadBase::Network, offset: 16, length: 4, to },
            Expression::NumberGenerator { generator: Generator::Random, modulus: 3, offset: 5, to: Register::word(1) },
            Expression::Conntrack { key: CtKey::DestinationPort, direction: Some(Direction::Original), to },
            Expression::Lookup { set: "eps".into(), key: to, result: LookupResult::Into(Register::R2) },
            Expression::Nat {
                kind: NatKind::Destination,
                family: AddressFamily::Ip,
                address: Some(Register::R2.into()),
                port: Some(Register::word(5).into()),
                flags: NatFlags::PERSISTENT,
            },
            Expression::Verdict(Verdict::Goto("b".into())),
        ],
    )
    .with_comment("hello")
}

/// The offset of an element in a request, from the start of the message header.
fn offset_of_element(payload: &[u8], index: usize) -> usize {
    let (_, fields) = split(payload).unwrap();
    let list = fields.bytes(element::LIST_ELEMENTS).unwrap();
    let one = headgate_netlink::checked_attributes(list).nth(index).unwrap().unwrap().1;
    // Add the message header (16 bytes), subtract the element's attribute header (4 bytes).
    one.as_ptr().addr() - payload.as_ptr().addr() + 16 - 4
}

#[test]
fn long_lists_of_elements_are_divided_without_loss() {
    let elements = (0..10_000_u32).map(|key| Element::new(Value::host_u32(key)).with_value(Value::port(1)));
    let requests = put_elements(libc::NFT_MSG_NEWSETELEM, libc::NLM_F_CREATE, &table(), "m", elements.clone());
    assert!(requests.len() > 5 && requests.iter().all(|request| request.length() < 60_000));
    let read = requests.iter().flat_map(|request| read_elements(request.payload()).unwrap().list.unwrap());
    assert!(read.eq(elements));
    for index in [0, 7, 500] {
        let payload = requests[0].payload();
        let offset = offset_of_element(payload, index);
        // The offset of an error points to the element or to an attribute within it.
        for within in [0, 4, 12] {
            let (found, _) = element_at(payload, offset + within).unwrap();
            assert_eq!(found, index);
        }
    }
    assert_eq!(element_at(requests[0].payload(), 20), None);
}

#[test]
fn comments_are_user_data() {
    let long = "é".repeat(300);
    assert_eq!(comment("hello"), b"\0\x06hello\0");
    assert_eq!(comment_of(&comment("hello")), Some("hello"));
    assert_eq!(comment_of(&comment(&long)).unwrap().len(), 252);
    assert_eq!(comment_of(&[7, 2, 1, 2, 0, 2, b'a', 0]), Some("a"));
    assert_eq!(comment_of(&[0, 9, 1]), None);
}

fn requests() -> Vec<headgate_netlink::Request> {
    let mut all = Transaction::new();
    all.add_table(&Table::new(table()).owned_and_persistent());
    all.add_rule(&rule());
    all.add_rule(&Rule::new(
        &table(),
        "a",
        vec![Expression::DynamicSet(DynamicSet {
            set: "s".into(),
            operation: DynamicSetOperation::Update,
            key: Register::R1,
            data: None,
            timeout_ms: Some(5),
            expressions: vec![
                Expression::counter(),
                Expression::Limit { rate: 1, seconds: 2, burst: 3, bytes: crate::Bytes::Counted, inverted: true },
            ],
        })],
    ));
    all.add_set(&Set::verdict_map(&table(), "m", &[DataType::Mark; 2]).with_size(3));
    all.add_elements(&table(), "m", [Element::new(Value(vec![0; 8])).with_verdict(Verdict::Jump("b".into()))]);
    all.requests().to_vec()
}

proptest! {
    #[test]
    fn any_bytes_decode_or_return_an_error(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        of in any::<prop::sample::Index>(), cut in 0..400_usize, other in prop::collection::vec(any::<u8>(), 0..100),
    ) {
        let all = requests();
        let mut bytes = all[of.index(all.len())].payload().to_vec();
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        bytes.truncate(cut);
        for bytes in [bytes, other] {
            for command in 0..32 {
                let _ = crate::monitor::changed(command, &bytes);
            }
            let _ = element_at(&bytes, cut);
        }
    }
}
