//! Tests of groups.
#![allow(clippy::unwrap_used)]

use std::{
    collections::{BTreeSet, HashSet},
    net::IpAddr,
};

use super::group::{Group, GroupKey, Numbers};
use crate::model::Protocol;

fn endpoints(last_bytes: &[u8]) -> Vec<(IpAddr, u16)> {
    last_bytes.iter().map(|last| ([10, 0, 0, *last].into(), 80)).collect()
}

#[test]
fn a_slot_moves_only_into_the_place_of_an_endpoint_that_leaves() {
    let key = GroupKey { protocol: Protocol::Tcp, port: 80, is_local: false };
    let group = Group { key, number: 2, affinity_timeout_seconds: None, slots: endpoints(&[4, 2, 9, 7]) };
    let after = |wanted: &[u8]| {
        let mut group = group.clone();
        group.set_endpoints(&endpoints(wanted).into_iter().collect::<BTreeSet<_>>());
        group.slots
    };
    assert_eq!(after(&[2, 4, 7, 9]), endpoints(&[4, 2, 9, 7]));
    assert_eq!(after(&[1, 2, 4, 7, 9]), endpoints(&[4, 2, 9, 7, 1]));
    assert_eq!(after(&[2, 4, 9]), endpoints(&[4, 2, 9]));
    assert_eq!(after(&[2, 7, 9]), endpoints(&[7, 2, 9]));
    // A replaced endpoint leaves its slot to the new one.
    assert_eq!(after(&[2, 4, 5, 7]), endpoints(&[4, 2, 5, 7]));
    assert_eq!(after(&[1]), endpoints(&[1]));
    assert_eq!(after(&[]), endpoints(&[]));
}

#[test]
fn a_released_number_is_used_again_late() {
    let mut numbers = Numbers::besides(&HashSet::from([2, 8]));
    // 4 and 6 are free, but the reserve of free numbers is not full.
    assert_eq!(numbers.take(), 10);
    for number in (12..200).step_by(2) {
        numbers.release(number);
    }
    assert_eq!(numbers.take(), 4);
}
