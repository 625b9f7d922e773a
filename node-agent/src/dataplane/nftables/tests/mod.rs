//! The rules and elements in the real kernel. Each test makes network namespaces, and needs root.
#![allow(clippy::unwrap_used)]

mod affinity;
mod decoding;
mod forwarding;
mod hashing;
mod misses;
mod rig;

use headgate_core::Family;

use super::{layout::Layout, why_replaced};

#[test]
fn a_table_of_an_earlier_run_is_not_blamed_on_another_program() {
    let before = why_replaced(Family::V4, &Layout::default());
    assert!(before.starts_with("the table ip headgate differs") && before.contains("another mode"), "{before}");
    let rig = rig::Rig::new(Family::V4);
    let after = why_replaced(Family::V4, &rig.layout);
    assert!(after.contains("was changed by another program") && !after.contains("mode"), "{after}");
}
