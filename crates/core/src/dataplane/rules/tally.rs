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
