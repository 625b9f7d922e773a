//! Input for `iptables-restore --noflush`.

use std::{
    collections::BTreeSet,
    fmt::{Display, Write as _},
};

use super::{ExistingTables, RulesHash, Table};

/// A restore script under construction. One table's part is one atomic step.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Script {
    mangle: Part,
    nat: Part,
    filter: Part,
    chains_written: u32,
    chains_deleted: u32,
    filter_first: bool,
    /// What the kernel has, while a full script is written: chains that are there already are left out.
    existing: Option<ExistingTables>,
}

#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Part {
    /// Chains come first, since rules may lead to any of them, and in descending order: iptables-nft keeps its list of chains sorted and looks
    /// for each one's place from the start, so that ascending order costs the square of their number (10,000 chains: 9 s instead of 3.7 s).
    declarations: BTreeSet<String>,
    body: String,
    /// Deletions come last, when nothing leads to the chain any more.
    deletions: String,
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
    fn part(&mut self, table: Table) -> &mut Part {
        match table {
            Table::Mangle => &mut self.mangle,
            Table::Nat => &mut self.nat,
            Table::Filter => &mut self.filter,
        }
    }

    /// A script that leaves out what the kernel has already.
    #[must_use]
    pub(super) fn comparing_with(existing: ExistingTables) -> Self {
        Self { existing: Some(existing), ..Self::default() }
    }

    /// Ends the comparison and frees what it took.
    pub(super) fn forget_existing(&mut self) {
        self.existing = None;
    }

    /// Creates or replaces a chain. `rules` are complete lines.
    pub fn write_chain(&mut self, table: Table, name: &impl Display, rules: &str) {
        if let Some(existing) = &self.existing
            && existing.get(table).has_chain_with(&name.to_string(), RulesHash::of(rules))
        {
            return;
        }
        // Writing to a String cannot fail.
        let part = self.part(table);
        part.declarations.insert(format!(":{name} - [0:0]\n"));
        part.body.push_str(rules);
        self.chains_written += 1;
    }

    /// Empties a chain now and deletes it at the end of its table's step.
    pub fn delete_chain(&mut self, table: Table, name: &impl Display) {
        let part = self.part(table);
        part.declarations.insert(format!(":{name} - [0:0]\n"));
        let _ = writeln!(part.deletions, "-X {name}");
        self.chains_deleted += 1;
    }

    /// Inserts a rule at the head of a chain.
    pub fn insert_first(&mut self, table: Table, chain: &str, rule: &str) {
        let _ = writeln!(self.part(table).body, "-I {chain} {rule}");
        self.chains_written += 1;
    }

    /// Deletes a rule.
    pub fn delete_rule(&mut self, table: Table, chain: &str, rule: &str) {
        let _ = writeln!(self.part(table).body, "-D {chain} {rule}");
        self.chains_written += 1;
    }

    /// Refusals come into force before translations end. Without this, translations begin before refusals end. Either way a packet
    /// never finds neither.
    pub fn put_filter_first(&mut self) {
        self.filter_first = true;
    }

    /// The same without its deletions, and the chains that these were of. For when a deletion is refused, since that refuses the whole step.
    #[must_use]
    pub fn split_deletions(mut self) -> (Self, Vec<(Table, String)>) {
        let mut deletions = Vec::new();
        for table in Table::ALL {
            let text = std::mem::take(&mut self.part(table).deletions);
            deletions.extend(text.lines().filter_map(|line| Some((table, line.strip_prefix("-X ")?.to_owned()))));
        }
        (self, deletions)
    }

    /// Deletes chains that are empty.
    #[must_use]
    pub fn deleting(chains: &[(Table, String)]) -> Self {
        let mut script = Self::default();
        for (table, name) in chains {
            let _ = writeln!(script.part(*table).deletions, "-X {name}");
        }
        script
    }

    /// True when there is nothing to do.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        [&self.mangle, &self.nat, &self.filter].iter().all(|part| part.is_empty())
    }

    /// Rules that it writes to a table. Cost: the length of the script.
    #[must_use]
    pub fn rules_written(&self, table: Table) -> usize {
        let part = match table {
            Table::Mangle => &self.mangle,
            Table::Nat => &self.nat,
            Table::Filter => &self.filter,
        };
        part.body.lines().filter(|line| !line.starts_with("-D ")).count()
    }

    /// Chains created or replaced, jumps included.
    #[must_use]
    pub fn chains_written(&self) -> u32 {
        self.chains_written
    }

    /// Chains deleted.
    #[must_use]
    pub fn chains_deleted(&self) -> u32 {
        self.chains_deleted
    }

    /// Length of the text, in bytes, headers excepted.
    #[must_use]
    pub fn len_bytes(&self) -> usize {
        [&self.mangle, &self.nat, &self.filter].iter().map(|part| part.texts().map(str::len).sum::<usize>()).sum()
    }

    /// The text in pieces, in order, for writing to a pipe without copying.
    pub fn pieces(&self) -> impl Iterator<Item = &str> {
        let (mangle, nat, filter) = (("*mangle\n", &self.mangle), ("*nat\n", &self.nat), ("*filter\n", &self.filter));
        let order = if self.filter_first { [mangle, filter, nat] } else { [mangle, nat, filter] };
        let used = order.into_iter().filter(|(_, part)| !part.is_empty());
        used.flat_map(|(head, part)| std::iter::once(head).chain(part.texts()).chain(["COMMIT\n"]))
    }
}

impl Display for Script {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.pieces().try_for_each(|piece| f.write_str(piece))
    }
}
