//! Reading and writing the rules of one family, whatever they are for: the iptables dataplane's,
//! and those beside virtual servers of IPVS.

use headgate_core::iptables::{ExistingTables, Jump, Ledger, Script, Table, names::CANARY};

use super::{
    super::{DataplaneError, ErrorKind},
    programs::Programs,
};

/// A chain that the kernel does not delete.
#[derive(Debug)]
pub(in crate::dataplane) struct Kept {
    /// Its table.
    pub(in crate::dataplane) table: Table,
    /// Its name.
    pub(in crate::dataplane) name: String,
    /// For the log: which chain, and what the kernel says.
    pub(in crate::dataplane) sentence: String,
}

impl Programs {
    /// What of ours the kernel has.
    pub(in crate::dataplane) fn existing_tables(&self) -> Result<ExistingTables, DataplaneError> {
        let mut tables = ExistingTables::default();
        for table in Table::ALL {
            tables.set(table, self.existing(table)?);
        }
        Ok(tables)
    }

    /// Runs a script. Where the kernel does not delete a chain because a rule of somebody else's
    /// leads to it, the chain stays, empty, and is named in a sentence: it must not keep everything
    /// else from being written.
    pub(in crate::dataplane) fn restore_leaving(&self, script: &Script) -> Result<Vec<Kept>, DataplaneError> {
        self.restore_leaving_by(script, &mut |script| self.restore(script))
    }

    /// The same for a script that `restore` runs, whole or without its deletions.
    pub(in crate::dataplane) fn restore_leaving_by(
        &self,
        script: &Script,
        restore: &mut dyn FnMut(&Script) -> Result<(), DataplaneError>,
    ) -> Result<Vec<Kept>, DataplaneError> {
        let rejected = match restore(script) {
            Ok(()) => return Ok(Vec::new()),
            Err(error) if script.chains_deleted() == 0 || error.kind == ErrorKind::Unavailable => return Err(error),
            Err(error) => error,
        };
        let (writes, deletions) = script.clone().split_deletions();
        if !writes.is_empty() {
            restore(&writes)?;
        }
        tracing::debug!(error = %rejected, "deleting chains one by one");
        let mut left = Vec::new();
        self.delete_what_can_be(&deletions, &mut left);
        Ok(left)
    }

    /// Deletes chains, by halves where the kernel rejects that.
    fn delete_what_can_be(&self, chains: &[(Table, String)], left: &mut Vec<Kept>) {
        if chains.is_empty() {
            return;
        }
        let Err(error) = self.restore(&Script::deleting(chains)) else { return };
        if let [(table, name)] = chains {
            // A script that failed at one table has done its work in those before.
            if let Ok(false) = self.has_chain(*table, name) {
                return;
            }
            let sentence = format!(
                "chain {name} of table {table} ({}) stays, empty, as when rules of others lead to it: {error}",
                self.family()
            );
            left.push(Kept { table: *table, name: name.clone(), sentence });
            return;
        }
        let (first, second) = chains.split_at(chains.len() / 2);
        self.delete_what_can_be(first, left);
        self.delete_what_can_be(second, left);
    }

    /// The first missing jump or canary, if any. Somebody who flushes tables removes the canary or
    /// the jumps.
    pub(in crate::dataplane) fn missing(&self, jumps: &[Jump]) -> Result<Option<String>, DataplaneError> {
        let in_words = |what: &str, table: Table| format!("{what} of table {table} ({})", self.family());
        if !self.has_chain(Table::Mangle, CANARY)? {
            return Ok(Some(in_words(&format!("chain {CANARY}"), Table::Mangle)));
        }
        for jump in jumps {
            if !self.has_rule(jump.table, jump.from, &jump.rule)? {
                return Ok(Some(in_words(&format!("a rule in chain {}", jump.from), jump.table)));
            }
        }
        Ok(None)
    }

    /// Removes everything that is ours.
    pub(in crate::dataplane) fn cleanup(&self) -> Result<(), DataplaneError> {
        let existing = self.existing_tables()?;
        let script = Ledger::cleanup(&existing);
        let left = if script.is_empty() { Vec::new() } else { self.restore_leaving(&script)? };
        let sentences: Vec<String> = left.into_iter().map(|left| left.sentence).collect();
        if sentences.is_empty() { Ok(()) } else { Err(DataplaneError::new(ErrorKind::Fatal, sentences.join("; "))) }
    }
}
