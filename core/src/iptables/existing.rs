//! What a kernel has, as `iptables-save` prints it.

use std::collections::BTreeSet;

use super::{Table, fixed, names::ChainName};

/// The kernel's own chains.
const BASE_CHAINS: [&str; 5] = ["PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"];

/// Our chains in one table, and the rules in the kernel's own chains.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Existing {
    /// Names of chains that are ours by name.
    pub chains: BTreeSet<String>,
    /// Rules of the kernel's own chains, as `CHAIN REST`.
    pub base_rules: BTreeSet<String>,
}

impl Existing {
    /// Reads one table of `iptables-save` output. What is not ours is passed over; nothing is an error.
    #[must_use]
    pub fn parse(table: Table, save: &str) -> Self {
        let mut existing = Self::default();
        let mut here = false;
        for line in save.lines() {
            if let Some(name) = line.strip_prefix('*') {
                here = name.trim() == table.as_str();
            } else if !here {
                continue;
            } else if let Some(declaration) = line.strip_prefix(':') {
                let name = declaration.split(' ').next().unwrap_or_default();
                if is_ours(table, name) {
                    existing.chains.insert(name.to_owned());
                }
            } else if let Some(rule) = line.strip_prefix("-A ") {
                let chain = rule.split(' ').next().unwrap_or_default();
                if BASE_CHAINS.contains(&chain) {
                    existing.base_rules.insert(rule.to_owned());
                }
            }
        }
        existing
    }

    /// True when a rule stands in one of the kernel's own chains.
    #[must_use]
    pub fn has_rule(&self, chain: &str, rule: &str) -> bool {
        self.base_rules.contains(&format!("{chain} {rule}"))
    }

    /// Rules of the kernel's own chains that lead to a chain of ours, as (chain, rule).
    pub fn jumps_to_ours(&self, table: Table) -> impl Iterator<Item = (&str, &str)> {
        self.base_rules.iter().filter_map(move |rule| {
            let target = rule.split(" -j ").nth(1)?.split(' ').next()?;
            if is_ours(table, target) { rule.split_once(' ') } else { None }
        })
    }
}

/// True for names that only Headgate (or the kube-proxy that it replaces) gives.
#[must_use]
pub fn is_ours(table: Table, name: &str) -> bool {
    fixed::names(table).contains(&name) || ChainName::parse(name).is_some()
}
