//! Scripts for `iptables-restore --noflush`.

use std::{
    collections::BTreeSet,
    fmt::{Display, Write as _},
    sync::Arc,
};

use super::{ExistingTables, RulesHash, RulesTable, names::ChainName};
use crate::model::ServiceKey;

/// Number of rules in one step of the table nat, in a script that writes this table in steps.
const RULES_PER_STEP: usize = 512;

/// A script for `iptables-restore`. The part for one table takes effect atomically, unless the
/// table is written in steps.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Script {
    /// The parts of the tables, in the order of [`RulesTable::ALL`].
    parts: [Part; RulesTable::ALL.len()],
    chains_written: u32,
    chains_deleted: u32,
    filter_first: bool,
    /// The rules in the kernel, while a full script is planned. The script leaves out chains that
    /// the kernel already has.
    existing: Option<ExistingTables>,
    /// True if the chains in nat that do not belong to a service are written in `steps`, each with
    /// its own `COMMIT`. The jumps from the built-in chains come last.
    ///
    /// `iptables-restore` holds one step at a time, so its memory is bounded. For
    /// `iptables-nft-restore`, steps also save time. `iptables-nft-restore` keeps the chain names
    /// of a step in a sorted list. It searches this list from the start for each rule and each
    /// target, so the time for a step grows with the square of the number of names.
    is_in_steps: bool,
    /// The rules of a chain may continue in the next step, which does not declare the chain again.
    steps: Vec<Part>,
    /// The services whose chains the script writes, in order.
    services: Vec<Arc<ServiceKey>>,
}

#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Part {
    /// Declarations of chains. They are written first, because a rule may jump to any chain. They
    /// are written in descending order, because `iptables-nft` inserts each chain into a sorted
    /// list by searching from the start. In ascending order its time would grow with the square of
    /// the number of chains: 10,000 chains would take 9 s instead of 3.7 s.
    declarations: BTreeSet<String>,
    body: String,
    /// Deletions of chains. They are written last, when no rule jumps to these chains any more.
    deletions: String,
    /// Number of rules in this part, including those that were passed on.
    rules: usize,
}

impl Part {
    fn texts(&self) -> impl Iterator<Item = &str> {
        let declarations = self.declarations.iter().rev().map(String::as_str);
        declarations.chain([self.body.as_str(), self.deletions.as_str()])
    }

    fn is_empty(&self) -> bool {
        self.texts().all(str::is_empty)
    }
}

impl Script {
    fn part(&mut self, table: RulesTable) -> &mut Part {
        &mut self.parts[table as usize]
    }

    /// Creates a script that leaves out chains that are in `existing`.
    #[must_use]
    pub(super) fn comparing_with(existing: ExistingTables, is_in_steps: bool) -> Self {
        Self { existing: Some(existing), is_in_steps, ..Self::default() }
    }

    /// Ends the comparison and returns the rules with which the script was compared.
    pub(super) fn take_existing(&mut self) -> ExistingTables {
        self.existing.take().unwrap_or_default()
    }

    fn is_in_kernel(&self, table: RulesTable, name: &impl Display, hash: RulesHash) -> bool {
        let has = |existing: &ExistingTables| existing.get(table).has_chain_with(&name.to_string(), hash);
        self.existing.as_ref().is_some_and(has)
    }

    /// Creates or replaces a chain. `rules` consists of complete lines. While a full script is
    /// planned, leaves out a chain that the kernel already has.
    pub fn write_chain(&mut self, table: RulesTable, name: &impl Display, rules: &str) {
        if self.existing.is_some() && self.is_in_kernel(table, name, RulesHash::of(rules)) {
            return;
        }
        if table == RulesTable::Nat && self.is_in_steps {
            self.put_chain_in_steps(name, rules);
        } else {
            self.put_chain(table, name, rules);
        }
    }

    fn put_chain(&mut self, table: RulesTable, name: &impl Display, rules: &str) {
        self.chains_written += 1;
        let part = self.part(table);
        part.declarations.insert(declaration(name));
        part.body.push_str(rules);
        part.rules += rules.lines().count();
    }

    fn put_chain_in_steps(&mut self, name: &impl Display, rules: &str) {
        self.chains_written += 1;
        self.open_step().declarations.insert(declaration(name));
        for rule in rules.split_inclusive('\n') {
            let step = self.open_step();
            step.body.push_str(rule);
            step.rules += 1;
        }
    }

    fn open_step(&mut self) -> &mut Part {
        if self.steps.last().is_none_or(|step| step.rules >= RULES_PER_STEP) {
            self.steps.push(Part::default());
        }
        let last = self.steps.len() - 1;
        &mut self.steps[last]
    }

    /// Creates or replaces a chain of a service in nat. `hash` is the hash of `rules`.
    pub(super) fn write_service_chain(&mut self, key: &Arc<ServiceKey>, name: ChainName, rules: &str, hash: RulesHash) {
        if self.is_in_kernel(RulesTable::Nat, &name, hash) {
            return;
        }
        self.put_chain(RulesTable::Nat, &name, rules);
        if self.services.last() != Some(key) {
            self.services.push(Arc::clone(key));
        }
    }

    /// Passes the text to `write`, if there is any, and forgets it. The counts stay.
    pub(super) fn pass_on(&mut self, write: &mut dyn FnMut(&Self)) {
        if self.is_empty() {
            return;
        }
        write(self);
        for table in RulesTable::ALL {
            let rules = self.rules_written(table);
            *self.part(table) = Part { rules, ..Part::default() };
        }
        self.steps.clear();
    }

    /// Empties a chain at the start of the part for its table and deletes it at the end.
    pub fn delete_chain(&mut self, table: RulesTable, name: &impl Display) {
        let part = self.part(table);
        part.declarations.insert(declaration(name));
        // Writing to a String cannot fail.
        let _ = writeln!(part.deletions, "-X {name}");
        self.chains_deleted += 1;
    }

    /// Adds the insertion of a rule at the head of a chain.
    pub fn insert_first(&mut self, table: RulesTable, chain: &str, rule: &str) {
        let part = self.part(table);
        let _ = writeln!(part.body, "-I {chain} {rule}");
        part.rules += 1;
        self.chains_written += 1;
    }

    /// Adds the deletion of a rule.
    pub fn delete_rule(&mut self, table: RulesTable, chain: &str, rule: &str) {
        let _ = writeln!(self.part(table).body, "-D {chain} {rule}");
        self.chains_written += 1;
    }

    /// Writes filter before nat. A script that adds REJECT or DROP rules needs this order: filter
    /// must reject packets before nat stops translating their addresses. By default nat comes
    /// first, so that nat translates packets before filter stops rejecting them. In both cases
    /// every packet is either translated or rejected.
    pub fn put_filter_first(&mut self) {
        self.filter_first = true;
    }

    /// Returns the script without deletions of chains, and the chains that the script would have
    /// deleted. If the kernel rejects one deletion, the whole part for that table fails. Callers
    /// then use this function.
    #[must_use]
    pub fn split_deletions(mut self) -> (Self, Vec<(RulesTable, String)>) {
        let mut deletions = Vec::new();
        for table in RulesTable::ALL {
            let text = std::mem::take(&mut self.part(table).deletions);
            deletions.extend(text.lines().filter_map(|line| Some((table, line.strip_prefix("-X ")?.to_owned()))));
        }
        (self, deletions)
    }

    /// Returns a script that deletes these empty chains.
    #[must_use]
    pub fn deleting(chains: &[(RulesTable, String)]) -> Self {
        let mut script = Self::default();
        for (table, name) in chains {
            let _ = writeln!(script.part(*table).deletions, "-X {name}");
        }
        script
    }

    /// True if the script changes nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.parts.iter().chain(&self.steps).all(Part::is_empty)
    }

    /// Number of rules that the script writes to a table.
    #[must_use]
    pub fn rules_written(&self, table: RulesTable) -> usize {
        let in_steps = self.steps.iter().filter(|_| table == RulesTable::Nat).map(|step| step.rules);
        self.parts[table as usize].rules + in_steps.sum::<usize>()
    }

    /// Number of chains that are created or replaced, and of jumps that are inserted or deleted.
    #[must_use]
    pub fn chains_written(&self) -> u32 {
        self.chains_written
    }

    /// Number of chains that are deleted.
    #[must_use]
    pub fn chains_deleted(&self) -> u32 {
        self.chains_deleted
    }

    /// The services whose chains the script writes.
    #[must_use]
    pub fn services(&self) -> &[Arc<ServiceKey>] {
        &self.services
    }

    /// Returns the text in pieces of complete lines, in order, so that a caller can write it to a
    /// pipe without copying it.
    pub fn pieces(&self) -> impl Iterator<Item = &str> {
        let steps = self.steps.iter().map(|step| (RulesTable::Nat, step));
        let order = if self.filter_first {
            [RulesTable::Filter, RulesTable::Nat]
        } else {
            [RulesTable::Nat, RulesTable::Filter]
        };
        let tables = [RulesTable::Mangle].into_iter().chain(order).map(|table| (table, &self.parts[table as usize]));
        steps.chain(tables).filter(|(_, part)| !part.is_empty()).flat_map(|(table, part)| {
            let head = match table {
                RulesTable::Mangle => "*mangle\n",
                RulesTable::Nat => "*nat\n",
                RulesTable::Filter => "*filter\n",
            };
            std::iter::once(head).chain(part.texts()).chain(["COMMIT\n"])
        })
    }
}

fn declaration(name: &impl Display) -> String {
    format!(":{name} - [0:0]\n")
}

/// The text of the script.
impl Display for Script {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.pieces().try_for_each(|piece| f.write_str(piece))
    }
}
