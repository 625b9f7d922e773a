//! Reads and writes the rules of one family: the rules of the iptables dataplane, or the iptables
//! rules of the IPVS dataplane.

use std::convert::Infallible;

use headgate_core::iptables::{
    ExistingReader, ExistingTables, Jump, RulesLedger, RulesTable, Script, beside_ipvs, names::CANARY,
};
use headgate_oracle::iptables;

use super::{
    super::{DataplaneError, ErrorKind},
    programs::Programs,
};
use crate::bisect;

/// A chain that the kernel refuses to delete.
#[derive(Debug)]
pub(in crate::dataplane) struct Kept {
    pub(in crate::dataplane) table: RulesTable,
    pub(in crate::dataplane) name: String,
    /// A warning for the log: the chain, and the kernel's error.
    pub(in crate::dataplane) sentence: String,
}

impl Programs {
    pub(in crate::dataplane) fn existing_tables(&self) -> Result<ExistingTables, DataplaneError> {
        let mut tables = ExistingTables::default();
        for table in RulesTable::ALL {
            tables.set(table, self.existing(table)?);
        }
        Ok(tables)
    }

    pub(in crate::dataplane) fn for_decoder(&self) -> Result<iptables::Rules, DataplaneError> {
        let mut rules = iptables::Rules::default();
        for table in RulesTable::ALL {
            self.save(table, |line| rules.line(line))?;
        }
        Ok(rules)
    }

    /// Runs a script, and returns the chains that could not be deleted because a foreign rule jumps
    /// to them. They stay without rules.
    pub(in crate::dataplane) fn restore_leaving(&self, script: &Script) -> Result<Vec<Kept>, DataplaneError> {
        let rejected = match self.restore(script) {
            Ok(()) => return Ok(Vec::new()),
            Err(error) if script.chains_deleted() == 0 || error.kind == ErrorKind::Unavailable => return Err(error),
            Err(error) => error,
        };
        let (writes, deletions) = script.clone().split_deletions();
        if !writes.is_empty() {
            self.restore(&writes)?;
        }
        tracing::debug!(error = %rejected, "deleting chains one by one");
        Ok(self.delete_chains(&deletions))
    }

    /// Deletes as many chains as possible. Returns the others.
    fn delete_chains(&self, chains: &[(RulesTable, String)]) -> Vec<Kept> {
        let attempt = |chains: &[(RulesTable, String)]| {
            Ok::<_, Infallible>(self.restore(&Script::deleting(chains)).err().map(|error| error.message))
        };
        let refused = bisect::find_faults(chains, "", u32::MAX, attempt).unwrap_or_default();
        let kept = refused.into_iter().flat_map(|bisect::FaultyItems { items, reason }| {
            items.into_iter().map(move |(table, name)| {
                let sentence = format!(
                    "chain {name} of table {table} ({}) cannot be deleted and stays empty; rules of other software may jump to it: {reason}",
                    self.family()
                );
                Kept { table, name, sentence }
            })
        });
        // A script changes one table after the other, and may delete chains before it fails.
        kept.filter(|kept| self.has_chain(kept.table, &kept.name).unwrap_or(true)).collect()
    }

    /// Describes the first missing jump or canary chain, if any. A flush removes them.
    pub(in crate::dataplane) fn missing(&self, jumps: &[Jump]) -> Result<Option<String>, DataplaneError> {
        let in_words = |what: &str, table: RulesTable| format!("{what} of table {table} ({})", self.family());
        if !self.has_chain(RulesTable::Mangle, CANARY)? {
            return Ok(Some(in_words(&format!("chain {CANARY}"), RulesTable::Mangle)));
        }
        for jump in jumps {
            if !self.has_rule(jump.table, jump.from, &jump.rule)? {
                return Ok(Some(in_words(&format!("a rule in chain {}", jump.from), jump.table)));
            }
        }
        Ok(None)
    }

    pub(in crate::dataplane) fn cleanup(&self) -> Result<(), DataplaneError> {
        self.delete(&RulesLedger::cleanup(&self.existing_tables()?))
    }

    /// Removes our rules and chains, except those that a kube-proxy in mode ipvs uses.
    pub(in crate::dataplane) fn cleanup_beside_ipvs(&self) -> Result<(), DataplaneError> {
        let mut existing = ExistingTables::default();
        for table in RulesTable::ALL {
            let reader = ExistingReader::sparing(table, beside_ipvs::chains(table));
            existing.set(table, self.existing_by(table, reader)?);
        }
        let script = beside_ipvs::cleanup(&existing).map_err(|rule| {
            let message = format!(
                "kube-proxy runs in mode ipvs, but has not written its rules in this variant of iptables: the rule `{rule}` is not its own. Look for the reason in the log of kube-proxy, and repeat --cleanup when kube-proxy has written its rules"
            );
            DataplaneError::new(ErrorKind::Retry, message)
        })?;
        self.delete(&script)
    }

    /// Runs a script that only deletes. Returns an error that names the chains that stay, without
    /// rules, because other rules jump to them.
    pub(in crate::dataplane) fn delete(&self, script: &Script) -> Result<(), DataplaneError> {
        let kept = if script.is_empty() { Vec::new() } else { self.restore_leaving(script)? };
        let sentences: Vec<String> = kept.into_iter().map(|kept| kept.sentence).collect();
        if sentences.is_empty() { Ok(()) } else { Err(DataplaneError::new(ErrorKind::Fatal, sentences.join("; "))) }
    }
}
