//! Input for `iptables-restore --noflush`.

use std::{
    collections::BTreeSet,
    fmt::{Display, Write as _},
    sync::Arc,
};

use super::{
    ExistingTables, RulesHash, Table,
    names::{ChainName, MARK_MASQ},
};
use crate::model::ServiceKey;

/// Services that are rendered and written in one go.
const SERVICES_AT_ONCE: usize = 256;

/// Rules of other chains in nat that are a step of their own by [`Writing::LateInSteps`].
const RULES_PER_STEP: usize = 512;

/// How a script holds the rules of services' own chains.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub enum Writing {
    /// As text.
    #[default]
    Text,
    /// Not at all: they are rendered while the script is written, a few services at a time, so that
    /// there is never more of them in memory.
    Late,
    /// Likewise, and everything in nat is written in many steps: first each few services, then the
    /// other chains by a bounded number of rules, at last what leads to our chains. So
    /// `iptables-restore` does not hold more either. `iptables-nft-restore` also needs it for its
    /// time: it keeps the names of the chains that a step is about in a sorted list, and searches
    /// that from the start for each rule and its target, so that a step costs the square of its
    /// names. Only for a kernel in which nothing leads to our chains yet: no packet sees what is
    /// unfinished.
    LateInSteps,
}

/// A part of a script's text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Piece<'a> {
    /// Complete lines.
    Text(&'a str),
    /// What [`super::Ledger::write_late`] writes for these services.
    Services(&'a [Arc<ServiceKey>]),
}

/// A restore script under construction. One table's part is one atomic step, but see
/// [`Writing::LateInSteps`].
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Script {
    mangle: Part,
    nat: Part,
    filter: Part,
    chains_written: u32,
    chains_deleted: u32,
    filter_first: bool,
    /// What the kernel has, while a full script is written: chains that are there already are left
    /// out.
    existing: Option<ExistingTables>,
    writing: Writing,
    /// Services whose chains are rendered late, in order.
    late: Vec<Arc<ServiceKey>>,
    /// Names of their chains that are declared with them, and not at the head of the table's part.
    late_chains: BTreeSet<String>,
    /// By [`Writing::LateInSteps`]: the other chains in nat. A chain may go on in the next step,
    /// which does not declare it again.
    steps: Vec<Part>,
}

#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Part {
    /// Chains come first, since rules may lead to any of them, and in descending order:
    /// iptables-nft keeps its list of chains sorted and looks for each one's place from the start,
    /// so that ascending order costs the square of their number (10,000 chains: 9 s instead of 3.7
    /// s).
    declarations: BTreeSet<String>,
    body: String,
    /// Deletions come last, when nothing leads to the chain any more.
    deletions: String,
    /// Rules to be written, those rendered late included.
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
    fn part(&mut self, table: Table) -> &mut Part {
        match table {
            Table::Mangle => &mut self.mangle,
            Table::Nat => &mut self.nat,
            Table::Filter => &mut self.filter,
        }
    }

    /// A script that leaves out what the kernel has already.
    #[must_use]
    pub(super) fn comparing_with(existing: ExistingTables, writing: Writing) -> Self {
        Self { existing: Some(existing), writing, ..Self::default() }
    }

    /// Ends the comparison and gives back what it was made with.
    pub(super) fn take_existing(&mut self) -> ExistingTables {
        self.existing.take().unwrap_or_default()
    }

    fn is_there(&self, table: Table, name: &impl Display, hash: RulesHash) -> bool {
        let has = |existing: &ExistingTables| existing.get(table).has_chain_with(&name.to_string(), hash);
        self.existing.as_ref().is_some_and(has)
    }

    /// Creates or replaces a chain. `rules` are complete lines.
    pub fn write_chain(&mut self, table: Table, name: &impl Display, rules: &str) {
        if self.existing.is_none() || !self.is_there(table, name, RulesHash::of(rules)) {
            self.put_chain(table, name, rules);
        }
    }

    fn put_chain(&mut self, table: Table, name: &impl Display, rules: &str) {
        self.chains_written += 1;
        if table == Table::Nat && self.writing == Writing::LateInSteps {
            return self.put_chain_in_steps(name, rules);
        }
        let part = self.part(table);
        part.declarations.insert(declaration(name));
        part.body.push_str(rules);
        part.rules += rules.lines().count();
    }

    fn put_chain_in_steps(&mut self, name: &impl Display, rules: &str) {
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

    /// The same for a chain of a service's own, in nat; `hash` is that of its rules.
    pub(super) fn write_service_chain(&mut self, key: &Arc<ServiceKey>, name: ChainName, rules: &str, hash: RulesHash) {
        if self.is_there(Table::Nat, &name, hash) {
            return;
        }
        match self.writing {
            Writing::Text => return self.put_chain(Table::Nat, &name, rules),
            Writing::Late => self.nat.declarations.insert(declaration(&name)),
            Writing::LateInSteps => self.late_chains.insert(name.to_string()),
        };
        self.nat.rules += rules.lines().count();
        self.chains_written += 1;
        if self.late.last() != Some(key) {
            self.late.push(Arc::clone(key));
        }
    }

    /// True when a chain is declared at the head of nat's part.
    pub(super) fn declares(&self, name: ChainName) -> bool {
        self.nat.declarations.contains(&declaration(&name))
    }

    /// True when a chain is to be declared with its rules, which are rendered late.
    pub(super) fn declares_late(&self, name: ChainName) -> bool {
        self.late_chains.contains(&name.to_string())
    }

    /// Empties a chain now and deletes it at the end of its table's step.
    pub fn delete_chain(&mut self, table: Table, name: &impl Display) {
        let part = self.part(table);
        part.declarations.insert(declaration(name));
        // Writing to a String cannot fail.
        let _ = writeln!(part.deletions, "-X {name}");
        self.chains_deleted += 1;
    }

    /// Inserts a rule at the head of a chain.
    pub fn insert_first(&mut self, table: Table, chain: &str, rule: &str) {
        let part = self.part(table);
        let _ = writeln!(part.body, "-I {chain} {rule}");
        part.rules += 1;
        self.chains_written += 1;
    }

    /// Deletes a rule.
    pub fn delete_rule(&mut self, table: Table, chain: &str, rule: &str) {
        let _ = writeln!(self.part(table).body, "-D {chain} {rule}");
        self.chains_written += 1;
    }

    /// Filter rejects and drops packets before nat stops translating them. Without this, nat begins
    /// to translate before filter stops. In both cases no packet finds neither.
    pub fn put_filter_first(&mut self) {
        self.filter_first = true;
    }

    /// The script without its deletions, and the chains that it deletes. For when the kernel
    /// rejects a deletion, since it then rejects the whole step.
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
        self.late.is_empty() && self.parts().all(Part::is_empty)
    }

    /// Rules that it writes to a table.
    #[must_use]
    pub fn rules_written(&self, table: Table) -> usize {
        match table {
            Table::Mangle => self.mangle.rules,
            Table::Nat => self.nat.rules + self.steps.iter().map(|step| step.rules).sum::<usize>(),
            Table::Filter => self.filter.rules,
        }
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

    /// Length of the text that it holds, in bytes, headers excepted.
    #[must_use]
    pub fn len_bytes(&self) -> usize {
        self.parts().map(|part| part.texts().map(str::len).sum::<usize>()).sum()
    }

    fn parts(&self) -> impl Iterator<Item = &Part> {
        [&self.mangle, &self.nat, &self.filter].into_iter().chain(&self.steps)
    }

    /// The script in pieces, in order, for writing to a pipe without copying.
    pub fn pieces(&self) -> impl Iterator<Item = Piece<'_>> {
        let services = || self.late.chunks(SERVICES_AT_ONCE).map(Piece::Services);
        let is_in_steps = self.writing == Writing::LateInSteps && !self.late.is_empty();
        // Services' chains lead to this one, whose rule comes with the rest.
        let target = declaration(&MARK_MASQ);
        let needs_target = self.steps.iter().any(|step| step.declarations.contains(&target));
        let target = (is_in_steps && needs_target).then(|| [":", MARK_MASQ, " - [0:0]\n"].map(Piece::Text));
        let first = target.into_iter().flat_map(|target| step("*nat\n", target.into_iter()));
        let steps = is_in_steps.then(services).into_iter().flatten();
        let steps = first.chain(steps.flat_map(|services| step("*nat\n", std::iter::once(services))));
        let others = self.steps.iter().flat_map(|part| step("*nat\n", part.texts().map(Piece::Text)));
        let steps = steps.chain(others);

        let part = move |table: Table| {
            let (head, part) = match table {
                Table::Mangle => ("*mangle\n", &self.mangle),
                Table::Nat => ("*nat\n", &self.nat),
                Table::Filter => ("*filter\n", &self.filter),
            };
            let has_services = table == Table::Nat && !is_in_steps && !self.late.is_empty();
            let declarations = part.declarations.iter().rev().map(String::as_str);
            let texts = declarations.chain([part.body.as_str()]).map(Piece::Text);
            let late = has_services.then(services).into_iter().flatten();
            let deletions = [Piece::Text(part.deletions.as_str())];
            let is_used = has_services || !part.is_empty();
            is_used.then(|| step(head, texts.chain(late).chain(deletions))).into_iter().flatten()
        };
        let order = if self.filter_first { [Table::Filter, Table::Nat] } else { [Table::Nat, Table::Filter] };
        steps.chain([Table::Mangle].into_iter().chain(order).flat_map(part))
    }
}

fn step<'a>(head: &'a str, pieces: impl Iterator<Item = Piece<'a>>) -> impl Iterator<Item = Piece<'a>> {
    std::iter::once(Piece::Text(head)).chain(pieces).chain([Piece::Text("COMMIT\n")])
}

pub(super) fn declaration(name: &impl Display) -> String {
    format!(":{name} - [0:0]\n")
}

/// Services that are rendered late are only counted.
impl Display for Script {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.pieces().try_for_each(|piece| match piece {
            Piece::Text(text) => f.write_str(text),
            Piece::Services(services) => writeln!(f, "# chains of {} services", services.len()),
        })
    }
}
