//! Counts of the programmed rules, updated with each change.

use super::{RulesTable, service::ServiceRules};
use crate::behaviours::view::NoLocalEndpoints;

/// Counts for one service or for all services.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tally {
    /// Rules in nat.
    pub nat_rules: u32,
    /// Rules in filter.
    pub filter_rules: u32,
    /// Service ports with a Local policy that have no endpoint on this node.
    pub no_local: NoLocalEndpoints,
}

impl Tally {
    /// Counts the rules of one service. The cost is linear in the size of the rules.
    pub(super) fn of(rules: &ServiceRules) -> Self {
        let mut tally = Self { no_local: rules.no_local, ..Self::default() };
        for chain in &rules.chains {
            tally.add_rules(RulesTable::Nat, &chain.rules);
        }
        for line in &rules.dispatch {
            tally.add_rules(line.chain.table(), &line.rule);
        }
        tally
    }

    /// Adds the number of `rules`, one rule per line.
    pub(super) fn add_rules(&mut self, table: RulesTable, rules: &str) {
        let lines = u32::try_from(rules.lines().count()).unwrap_or(u32::MAX);
        self.add_count(table, lines);
    }

    pub(super) fn add_count(&mut self, table: RulesTable, count: u32) {
        match table {
            RulesTable::Nat => self.nat_rules = self.nat_rules.saturating_add(count),
            RulesTable::Filter => self.filter_rules = self.filter_rules.saturating_add(count),
            // Rules in mangle are not counted.
            RulesTable::Mangle => {}
        }
    }

    pub(super) fn add(&mut self, other: Self) {
        self.nat_rules = self.nat_rules.saturating_add(other.nat_rules);
        self.filter_rules = self.filter_rules.saturating_add(other.filter_rules);
        self.no_local.add(other.no_local);
    }

    pub(super) fn subtract(&mut self, other: Self) {
        self.nat_rules = self.nat_rules.saturating_sub(other.nat_rules);
        self.filter_rules = self.filter_rules.saturating_sub(other.filter_rules);
        self.no_local.subtract(other.no_local);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::net::IpAddr;

    use super::*;
    use crate::{
        dataplane::{
            iptables::ruleset,
            rules::{ExistingTables, Layout, RenderConfig, RulesLedger},
            shared::FixedState,
        },
        fake_kernel::iptables::FakeKernel,
        model::{
            Change, Endpoint, EndpointPort, Family, NodeFacts, Protocol, Service, ServiceKey, ServicePort,
            TrafficPolicy,
        },
        state::{Dirty, State},
    };

    fn service(number: u8, node_port: u16, policy: TrafficPolicy) -> Change {
        let port = ServicePort { name: "p".into(), protocol: Protocol::Tcp, port: 80, node_port };
        let key = ServiceKey::new("ns", &format!("s{number}"));
        let mut service = Service::new(key, vec![IpAddr::from([10, 96, number, 1])], vec![port]);
        service.internal_traffic_policy = policy;
        service.external_traffic_policy = policy;
        Change::from(service)
    }

    fn endpoint(number: u8, last: u8) -> Change {
        let ports = [EndpointPort::new("p", Protocol::Tcp, 8080)];
        let endpoint = Endpoint::new(IpAddr::from([10, 244, number, last]), ports.into());
        Change::Endpoint(ServiceKey::new("ns", &format!("s{number}")), endpoint)
    }

    fn rules_in(kernel: &FakeKernel, table: RulesTable) -> u32 {
        let count = kernel.save(table).lines().filter(|line| line.starts_with("-A ")).count();
        count.try_into().unwrap()
    }

    #[test]
    fn the_counts_equal_the_numbers_of_rules_in_the_kernel() {
        for layout in [Layout::Classic, Layout::Compact] {
            let (mut state, mut kernel) = (State::default(), FakeKernel::default());
            let mut config = RenderConfig { layout, ..RenderConfig::new(Family::V4) };
            config.masquerade.all = true;
            let mut ledger = RulesLedger::new(ruleset(config));
            let facts = NodeFacts::named("n");
            let mut step = |ledger: &mut RulesLedger, changes: Vec<Change>, is_full: bool| {
                let mut dirty = Dirty::default();
                changes.into_iter().for_each(|change| _ = state.apply(change, &mut dirty));
                let (script, _) = if is_full {
                    ledger.full(&FixedState(&state, &facts), ExistingTables::default())
                } else {
                    ledger.changed(&state, &facts, &dirty)
                };
                kernel.restore(&script.to_string()).unwrap();
                let tally = ledger.tally();
                assert_eq!(tally.nat_rules, rules_in(&kernel, RulesTable::Nat), "{layout:?}");
                assert_eq!(tally.filter_rules, rules_in(&kernel, RulesTable::Filter), "{layout:?}");
                (tally.no_local.internal, tally.no_local.external)
            };
            let (cluster, local) = (TrafficPolicy::Cluster, TrafficPolicy::Local);
            let first =
                vec![service(1, 30001, cluster), endpoint(1, 1), service(2, 0, cluster), service(3, 0, cluster)];
            assert_eq!(step(&mut ledger, first, true), (0, 0));
            assert_eq!(step(&mut ledger, vec![endpoint(2, 1), endpoint(2, 2), endpoint(1, 2)], false), (0, 0));
            // Endpoints exist, but none of them is on this node.
            assert_eq!(step(&mut ledger, vec![service(1, 30001, local), service(2, 0, local)], false), (2, 1));
            // Service 3 has no endpoint on any node, so it does not count.
            assert_eq!(step(&mut ledger, vec![service(3, 30003, local)], false), (2, 1));
            assert_eq!(step(&mut ledger, vec![Change::RemoveService(ServiceKey::new("ns", "s1"))], false), (1, 0));
            assert_eq!(step(&mut ledger, vec![service(2, 0, cluster)], false), (0, 0));
        }
    }
}
