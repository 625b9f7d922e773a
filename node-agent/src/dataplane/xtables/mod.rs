//! What all dataplanes with iptables rules share: programs that read and write rules, tests of
//! matches, and the search for services whose rules are rejected.

pub(super) mod bisect;
mod flushes;
pub(super) mod programs;
mod rules;
mod sctp;
mod variant;

pub use programs::Variant;
pub(super) use variant::choose;

use headgate_core::{
    Family,
    iptables::{Jump, RulesTable, Script, Tally},
};

pub(super) use self::{flushes::Flushes, rules::Kept};
use self::{programs::Programs, sctp::Sctp};
use super::{
    DataplaneError, ErrorKind, Report, RulesDifferences, Statistics, TableStatistics,
    dual_stack::has_ipv6,
    kernel_modules::{NF_TABLES, NFNETLINK_ACCT},
    leftovers::Leftover,
};
use crate::packet_counters;

/// Reads and writes the rules of one family, for any dataplane.
#[derive(Debug)]
pub(super) struct FamilyRules {
    pub(super) programs: Programs,
    pub(super) sctp: Sctp,
    /// The number of rules that the last step wrote to the tables nat and filter.
    last_written: [u32; 2],
}

impl FamilyRules {
    /// Creates the reader and writer for a variant, which must not be `Auto`.
    pub(super) fn new(family: Family, variant: Variant) -> Self {
        Self { programs: Programs::new(family, variant), sctp: Sctp::default(), last_written: [0; 2] }
    }

    /// Counts the rules of a script that is about to be written.
    pub(super) fn count(&mut self, script: &Script) {
        let written = |table| u32::try_from(script.rules_written(table)).unwrap_or(u32::MAX);
        self.last_written = [written(RulesTable::Nat), written(RulesTable::Filter)];
    }

    pub(super) fn statistics(&self, tally: &Tally, counts_packets: bool) -> Statistics {
        let [nat, filter] = self.last_written;
        let rules = vec![
            TableStatistics { table: "nat", total: tally.nat_rules, last: nat },
            TableStatistics { table: "filter", total: tally.filter_rules, last: filter },
        ];
        Statistics { rules, no_local: tally.no_local, counts_packets }
    }

    /// Checks that the canary chain and the jumps to our chains exist. Returns a sentence that
    /// names the first missing jump or chain, if any.
    pub(super) fn check(&self, jumps: &[Jump]) -> Result<Option<String>, DataplaneError> {
        let missing = self.programs.missing(jumps)?;
        Ok(missing.map(|missing| format!("somebody else has removed {missing}")))
    }
}

/// Adds the result of a script to the report, with a warning for each chain in `kept` (not deleted)
/// that `is_new`, so that a repair does not repeat it.
pub(super) fn note_written(
    report: &mut Report,
    script: &Script,
    kept: Vec<Kept>,
    mut is_new: impl FnMut(RulesTable, &str) -> bool,
) {
    for Kept { table, name, sentence } in kept {
        report.warnings.extend(is_new(table, &name).then_some(sentence));
    }
    report.objects_written += script.chains_written() + script.chains_deleted();
}

/// What a full script would change. `recorded`, `found` and `planned` are the prefix lengths of
/// address groups in the ledger, the kernel and the script. Another division is no foreign change
/// if the kernel has the programmed one.
pub(super) fn differences(
    script: &Script,
    recorded: Option<u8>,
    found: Option<u8>,
    planned: Option<u8>,
) -> RulesDifferences {
    if found == recorded && planned != recorded {
        return RulesDifferences { is_redivided: true, ..RulesDifferences::default() };
    }
    let services = script.services().iter().cloned().collect();
    RulesDifferences { count: script.chains_written() + script.chains_deleted(), services, is_redivided: false }
}

/// The leftovers of a dataplane that uses this variant of iptables.
pub(super) fn leftovers(variant: Variant) -> Vec<Leftover> {
    vec![rules_of(variant), packet_counters()]
}

/// All our rules in a variant of iptables.
pub(crate) fn rules_of(variant: Variant) -> Leftover {
    rules(variant, Programs::cleanup)
}

/// Our rules in a variant of iptables, except those that a kube-proxy in mode ipvs uses.
pub(crate) fn rules_beside_ipvs(variant: Variant) -> Leftover {
    rules(variant, Programs::cleanup_beside_ipvs)
}

fn rules(variant: Variant, clean_up: fn(&Programs) -> Result<(), DataplaneError>) -> Leftover {
    let name = if variant == Variant::Legacy { "iptables-legacy" } else { "iptables-nft" };
    Leftover::new(name, move || {
        let families = Family::BOTH.into_iter().filter(|family| *family == Family::V4 || has_ipv6());
        let clean_up = |family| clean_up(&Programs::new(family, variant)).map_err(|error| error.of(family));
        DataplaneError::join_all(families.map(clean_up))
    })
}

/// Chains of the kubelet, whose names begin like those of kube-proxy.
const OF_KUBELET: [&str; 4] = ["KUBE-KUBELET-CANARY", "KUBE-IPTABLES-HINT", "KUBE-FIREWALL", "KUBE-MARK-DROP"];

/// Calls `take` with each line of `iptables-save` that is a chain of kube-proxy or a rule in it, for
/// both families and all variants that are installed. Errors: a table cannot be read.
pub(crate) fn kube_proxys_chains(take: &mut dyn FnMut(&str)) -> Result<(), DataplaneError> {
    let variants: &[Variant] =
        if NF_TABLES.is_present() { &[Variant::Legacy, Variant::Nft] } else { &[Variant::Legacy] };
    for programs in variants.iter().flat_map(|variant| Family::BOTH.map(|family| Programs::new(family, *variant))) {
        for table in [RulesTable::Nat, RulesTable::Filter] {
            let read = programs.save(table, |line| {
                let chain = line.strip_prefix("-A ").or_else(|| line.strip_prefix(':')).unwrap_or_default();
                let chain = chain.split(' ').next().unwrap_or_default();
                if chain.starts_with("KUBE-") && !OF_KUBELET.contains(&chain) {
                    take(line);
                }
            });
            read.or_else(|error| if error.kind == ErrorKind::Unavailable { Ok(()) } else { Err(error) })?;
        }
    }
    Ok(())
}

/// The packet counters that rules increment. The kernel keeps one while a rule uses it.
pub(crate) fn packet_counters() -> Leftover {
    Leftover::new("packet counters", || {
        if !NFNETLINK_ACCT.is_present() {
            return Ok(());
        }
        packet_counters::remove().map_err(|error| {
            DataplaneError::new(
                ErrorKind::Fatal,
                format_args!("cannot remove packet counters (nfnetlink_acct): {error}"),
            )
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_rules_as_this_agent_divided_them_are_divided_anew() {
        for (recorded, found, planned, expected) in [
            (Some(24), Some(24), Some(26), true),
            (None, None, Some(24), true),
            (Some(24), Some(24), Some(24), false),
            // Another program removed or wrote the rules.
            (Some(24), None, Some(26), false),
            (Some(24), Some(26), Some(26), false),
        ] {
            let found = differences(&Script::default(), recorded, found, planned);
            assert_eq!(found.is_redivided, expected, "{recorded:?} {planned:?}");
        }
    }
}
