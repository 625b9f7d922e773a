//! The rules and elements in the real kernel. Each test makes network namespaces, and needs root.
#![allow(clippy::unwrap_used)]

mod affinity;
mod decoding;
mod forwarding;
mod hashing;
mod misses;
mod rig;

use std::{
    sync::{Arc, mpsc},
    time::Duration,
};

use headgate_core::{Family, FixedState, NodeFacts, State, view::MasqueradeConfig};
use nftables_netlink::{Chain, Nftables, Transaction};
use nix::sched::{CloneFlags, unshare};

use super::{
    NftablesDataplane, NftablesOptions,
    layout::{Layout, table_name},
    why_replaced,
};
use crate::dataplane::{Finding, NodeDataplane, metrics::DataplaneMetrics};

#[test]
fn a_table_of_an_earlier_run_is_not_blamed_on_another_program() {
    let before = why_replaced(Family::V4, &Layout::default());
    assert!(before.starts_with("the table ip headgate differs") && before.contains("another mode"), "{before}");
    let rig = rig::Rig::new(Family::V4);
    let after = why_replaced(Family::V4, &rig.layout);
    assert!(after.contains("was changed by another program") && !after.contains("mode"), "{after}");
}

#[test]
fn only_a_full_sync_forgets_what_another_program_changed() {
    unshare(CloneFlags::CLONE_NEWNET).expect("this test makes a network namespace and needs root");
    let config = NftablesOptions {
        families: vec![Family::V4],
        masquerade: MasqueradeConfig::default(),
        localhost_node_ports: false,
        conntrack_tcp_be_liberal: false,
        counts_services: false,
        has_proxy: false,
        owns_tables: false,
        replies_to_ping: false,
        unused_features: Vec::new(),
    };
    let mut dataplane = NftablesDataplane::new(&config).unwrap();
    let (wake, woken) = mpsc::channel();
    dataplane.follow(Arc::new(move || wake.send(()).unwrap_or_default()), DataplaneMetrics::default());
    let (state, node) = (State::default(), NodeFacts::named("here"));
    dataplane.sync_full(&FixedState(&state, &node)).unwrap();
    let mut transaction = Transaction::new();
    transaction.add_chain(&Chain::regular(&table_name(Family::V4), "foreign"));
    Nftables::open().unwrap().commit(&transaction).unwrap();
    woken.recv_timeout(Duration::from_secs(30)).unwrap();
    assert!(matches!(dataplane.check(), Ok(Finding::Changed(_))));
    // The caller may drop the result.
    drop(dataplane.verification(Family::V4).unwrap());
    assert!(matches!(dataplane.check(), Ok(Finding::Changed(_))));
    dataplane.sync_full(&FixedState(&state, &node)).unwrap();
    assert_eq!(dataplane.check(), Ok(Finding::Intact));
}
