//! The rules that lead to the proxy of mode userspace.

use std::net::SocketAddr;

use super::*;
use crate::iptables::names::GateChain;

/// The configuration of mode userspace.
pub(super) fn with_proxy() -> RenderConfig {
    let listener = |(chain, port): (GateChain, u16)| (chain, SocketAddr::new(ip("169.254.77.1"), port));
    let listeners = GateChain::ALL.into_iter().zip(10245..).map(listener).collect();
    RenderConfig { listeners, layout: Layout::Classic, ..config() }
}

/// A kube-proxy that takes over removes the chains of services, and knows nothing about the gate.
#[test]
fn the_chains_of_the_gate_are_removed_without_those_of_kube_proxy() {
    let (mut kernel, mut without) = (FakeKernel::default(), FakeKernel::default());
    let script = |config| {
        RulesLedger::new(ruleset(config)).full(&FixedState(&State::default(), &node()), ExistingTables::default()).0
    };
    kernel.restore(&script(with_proxy()).to_string()).unwrap();
    without.restore(&script(config()).to_string()).unwrap();
    let saved = ExistingTables::parse(&RulesTable::ALL.map(|table| kernel.save(table)).concat());
    kernel.restore(&RulesLedger::cleanup_of_gates(&saved).to_string()).unwrap();
    assert_eq!(kernel.save(RulesTable::Filter), without.save(RulesTable::Filter));
    let to_proxy = "-A KUBE-POSTROUTING -d 169.254.77.1/32 -j RETURN\n";
    assert_eq!(kernel.save(RulesTable::Nat).replace(to_proxy, ""), without.save(RulesTable::Nat));
}
