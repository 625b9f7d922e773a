//! Scripts for `iptables-restore --noflush`.

use std::{
    collections::BTreeSet,
    fmt::{Display, Write as _},
    sync::Arc,
};

use super::{
    ExistingTables, RulesHash, Table,
    names::{ChainName, GateChain, MARK_MASQ},
};
use crate::model::ServiceKey;

/// Number of services whose chains are rendered and written together.
const SERVICES_AT_ONCE: usize = 256;

/// Number of rules in one step of [`Writing::LateInSteps`], for chains that do not belong to a
/// service.
const RULES_PER_STEP: usize = 512;

/// How a script holds the rules of services' chains.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub enum Writing {
    /// The script holds the rules as text.
    #[default]
    Text,
    /// The script does not hold the rules. While the caller writes the script to
    /// `iptables-restore`, it renders the rules of a few services at a time. So the memory for
    /// rules does not depend on the number of services.
    Late,
    /// Like [`Self::Late`], and the table nat is also written in many steps, each with its own
    /// `COMMIT`. The first steps each write the chains of a few services. The next steps each write
    /// a bounded number of rules of the other chains. The last step writes the jumps from the
    /// built-in chains.
    ///
    /// `iptables-restore` holds one step at a time, so its memory is bounded too. For
    /// `iptables-nft-restore`, steps also save time. `iptables-nft-restore` keeps the chain names
    /// of a step in a sorted list. It searches this list from the start for each rule and each
    /// target, so the time for a step grows with the square of the number of names.
    ///
    /// This mode is allowed only if no rule in the kernel jumps to chains of Headgate. Otherwise
    /// packets would pass unfinished rules.
    LateInSteps,
}

/// A part of a script's text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Piece<'a> {
    /// Text that consists of complete lines.
    Text(&'a str),
    /// The text that [`super::Ledger::write_late`] renders for these services.
    Services(&'a [Arc<ServiceKey>]),
}

/// A script for `iptables-restore`. The part for one table takes effect atomically, except with
/// [`Writing::LateInSteps`].
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Script {
    /// The parts of the tables, in the order of [`Table::ALL`].
    parts: [Part; Table::ALL.len()],
    chains_written: u32,
    chains_deleted: u32,
    filter_first: bool,
    /// The rules in the kernel, while a full script is planned. The script leaves out chains that
    /// the kernel already has.
    existing: Option<ExistingTables>,
    writing: Writing,
    /// The services whose chains are rendered late, in order.
    late: Vec<Arc<ServiceKey>>,
    /// The chains that are declared together with their late rules. The head of the part for nat
    /// does not declare them.
    late_chains: BTreeSet<String>,
    /// With [`Writing::LateInSteps`], the chains in nat that do not belong to a service. The rules
    /// of a chain may continue in the next step, which does not declare the chain again.
    steps: Vec<Part>,
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
    /// Number of rules in this part, including rules that are rendered late.
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
        &mut self.parts[table as usize]
    }

    /// Creates a script that leaves out chains that are in `existing`.
    #[must_use]
    pub(super) fn comparing_with(existing: ExistingTables, writing: Writing) -> Self {
        Self { existing: Some(existing), writing, ..Self::default() }
    }

    /// Ends the comparison and returns the rules with which the script was compared.
    pub(super) fn take_existing(&mut self) -> ExistingTables {
        self.existing.take().unwrap_or_default()
    }

    fn is_in_kernel(&self, table: Table, name: &impl Display, hash: RulesHash) -> bool {
        let has = |existing: &ExistingTables| existing.get(table).has_chain_with(&name.to_string(), hash);
        self.existing.as_ref().is_some_and(has)
    }

    /// Creates or replaces a chain. `rules` consists of complete lines. While a full script is
    /// planned, leaves out a chain that the kernel already has.
    pub fn write_chain(&mut self, table: Table, name: &impl Display, rules: &str) {
        if self.existing.is_none() || !self.is_in_kernel(table, name, RulesHash::of(rules)) {
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

    /// Creates or replaces a chain of a service in nat. `hash` is the hash of `rules`.
    pub(super) fn write_service_chain(&mut self, key: &Arc<ServiceKey>, name: ChainName, rules: &str, hash: RulesHash) {
        if self.is_in_kernel(Table::Nat, &name, hash) {
            return;
        }
        match self.writing {
            Writing::Text => return self.put_chain(Table::Nat, &name, rules),
            Writing::Late => self.part(Table::Nat).declarations.insert(declaration(&name)),
            Writing::LateInSteps => self.late_chains.insert(name.to_string()),
        };
        self.part(Table::Nat).rules += rules.lines().count();
        self.chains_written += 1;
        if self.late.last() != Some(key) {
            self.late.push(Arc::clone(key));
        }
    }

    /// True if a chain is declared at the head of the part for nat.
    pub(super) fn declares(&self, name: ChainName) -> bool {
        self.parts[Table::Nat as usize].declarations.contains(&declaration(&name))
    }

    /// True if a chain must be declared together with its late rules.
    pub(super) fn declares_late(&self, name: ChainName) -> bool {
        self.late_chains.contains(&name.to_string())
    }

    /// Empties a chain at the start of the part for its table and deletes it at the end.
    pub fn delete_chain(&mut self, table: Table, name: &impl Display) {
        let part = self.part(table);
        part.declarations.insert(declaration(name));
        // Writing to a String cannot fail.
        let _ = writeln!(part.deletions, "-X {name}");
        self.chains_deleted += 1;
    }

    /// Adds the insertion of a rule at the head of a chain.
    pub fn insert_first(&mut self, table: Table, chain: &str, rule: &str) {
        let part = self.part(table);
        let _ = writeln!(part.body, "-I {chain} {rule}");
        part.rules += 1;
        self.chains_written += 1;
    }

    /// Adds the deletion of a rule.
    pub fn delete_rule(&mut self, table: Table, chain: &str, rule: &str) {
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
    pub fn split_deletions(mut self) -> (Self, Vec<(Table, String)>) {
        let mut deletions = Vec::new();
        for table in Table::ALL {
            let text = std::mem::take(&mut self.part(table).deletions);
            deletions.extend(text.lines().filter_map(|line| Some((table, line.strip_prefix("-X ")?.to_owned()))));
        }
        (self, deletions)
    }

    /// Returns a script that deletes these empty chains.
    #[must_use]
    pub fn deleting(chains: &[(Table, String)]) -> Self {
        let mut script = Self::default();
        for (table, name) in chains {
            let _ = writeln!(script.part(*table).deletions, "-X {name}");
        }
        script
    }

    /// True if the script changes nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.late.is_empty() && self.parts().all(Part::is_empty)
    }

    /// Number of rules that the script writes to a table.
    #[must_use]
    pub fn rules_written(&self, table: Table) -> usize {
        let in_steps = self.steps.iter().filter(|_| table == Table::Nat).map(|step| step.rules);
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

    /// Length of the text that the script holds, in bytes, without table headers.
    #[must_use]
    pub fn len_bytes(&self) -> usize {
        self.parts().map(|part| part.texts().map(str::len).sum::<usize>()).sum()
    }

    fn parts(&self) -> impl Iterator<Item = &Part> {
        self.parts.iter().chain(&self.steps)
    }

    /// Returns the script in pieces, in order, so that a caller can write it to a pipe without
    /// copying it.
    pub fn pieces(&self) -> impl Iterator<Item = Piece<'_>> {
        let services = || self.late.chunks(SERVICES_AT_ONCE).map(Piece::Services);
        let is_in_steps = self.writing == Writing::LateInSteps && !self.late.is_empty();
        // Chains of services jump to these chains, so the first step declares them. A later step
        // writes their rules.
        let targets = std::iter::once(MARK_MASQ).chain(GateChain::ALL.map(GateChain::name));
        let declared = |name| self.steps.iter().find_map(|step| step.declarations.get(&declaration(&name)));
        let targets: Vec<_> = targets.filter_map(declared).map(|target| Piece::Text(target)).collect();
        let first = (is_in_steps && !targets.is_empty()).then(|| step(Table::Nat, targets.into_iter()));
        let first = first.into_iter().flatten();
        let steps = is_in_steps.then(services).into_iter().flatten();
        let steps = first.chain(steps.flat_map(|services| step(Table::Nat, std::iter::once(services))));
        let others = self.steps.iter().flat_map(|part| step(Table::Nat, part.texts().map(Piece::Text)));
        let steps = steps.chain(others);

        let part = move |table: Table| {
            let part = &self.parts[table as usize];
            let has_services = table == Table::Nat && !is_in_steps && !self.late.is_empty();
            let declarations = part.declarations.iter().rev().map(String::as_str);
            let texts = declarations.chain([part.body.as_str()]).map(Piece::Text);
            let late = has_services.then(services).into_iter().flatten();
            let deletions = [Piece::Text(part.deletions.as_str())];
            let is_used = has_services || !part.is_empty();
            is_used.then(|| step(table, texts.chain(late).chain(deletions))).into_iter().flatten()
        };
        let order = if self.filter_first { [Table::Filter, Table::Nat] } else { [Table::Nat, Table::Filter] };
        steps.chain([Table::Mangle].into_iter().chain(order).flat_map(part))
    }
}

fn step<'a>(table: Table, pieces: impl Iterator<Item = Piece<'a>>) -> impl Iterator<Item = Piece<'a>> {
    let head = match table {
        Table::Mangle => "*mangle\n",
        Table::Nat => "*nat\n",
        Table::Filter => "*filter\n",
    };
    std::iter::once(Piece::Text(head)).chain(pieces).chain([Piece::Text("COMMIT\n")])
}

pub(super) fn declaration(name: &impl Display) -> String {
    format!(":{name} - [0:0]\n")
}

/// The text of the script. Services that are rendered late appear only as a comment with their
/// number.
impl Display for Script {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.pieces().try_for_each(|piece| match piece {
            Piece::Text(text) => f.write_str(text),
            Piece::Services(services) => writeln!(f, "# chains of {} services", services.len()),
        })
    }
}
