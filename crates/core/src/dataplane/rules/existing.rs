//! The rules in the kernel, read from the output of `iptables-save`.

use std::{
    collections::{BTreeMap, HashMap},
    hash::{DefaultHasher, Hasher as _},
};

use super::{
    RulesTable,
    names::{self, ChainName, SERVICES},
};

/// The built-in chains.
pub(super) const BASE_CHAINS: [&str; 5] = ["PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"];

/// A hash of the rules of a chain, in order. It is computed line by line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RulesHash(u64);

impl RulesHash {
    /// Returns the hash of complete rules, one per line.
    #[must_use]
    pub fn of(rules: &str) -> Self {
        let mut hash = Self::default();
        rules.lines().for_each(|rule| hash.add(rule));
        hash
    }

    fn add(&mut self, rule: &str) {
        let mut hasher = DefaultHasher::new();
        hasher.write_u64(self.0);
        hasher.write(rule.as_bytes());
        self.0 = hasher.finish();
    }
}

/// The chains of Headgate in one table, and the rules of the built-in chains.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct ExistingRules {
    /// Chains with names of Headgate, with the hash of their rules, or `None` if the hash is
    /// unknown.
    pub chains: HashMap<String, Option<RulesHash>>,
    /// Rules of the built-in chains in order, each without the leading `-A `.
    pub base_rules: Vec<String>,
    /// Chains of Headgate to which a rule in a foreign chain jumps, each with one such rule,
    /// without the leading `-A `, if possible in a chain that the reader spares. The kernel does
    /// not delete these chains.
    pub referenced: BTreeMap<String, String>,
    /// Prefix length of the address groups of KUBE-SERVICES; `None` for the classic layout.
    pub prefix_length: Option<u8>,
}

/// Reads the output of `iptables-save` line by line, so that the text of a large table is never in
/// memory as a whole.
#[derive(Debug)]
pub struct ExistingReader {
    table: RulesTable,
    foreign: &'static [&'static str],
    is_in_table: bool,
    existing: ExistingRules,
}

impl ExistingReader {
    /// Creates a reader for one table.
    #[must_use]
    pub fn new(table: RulesTable) -> Self {
        Self::sparing(table, &[])
    }

    /// Creates a reader for one table that takes chains with these names for foreign chains.
    #[must_use]
    pub fn sparing(table: RulesTable, foreign: &'static [&'static str]) -> Self {
        Self { table, foreign, is_in_table: false, existing: ExistingRules::default() }
    }

    fn is_ours(&self, name: &str) -> bool {
        !self.foreign.contains(&name) && is_ours(self.table, name)
    }

    /// Reads the next line. Ignores lines of other tables, and rules of foreign chains that do not
    /// jump to a chain of Headgate. No line causes an error.
    pub fn line(&mut self, line: &str) {
        if let Some(name) = line.strip_prefix('*') {
            self.is_in_table = name.trim() == self.table.as_str();
        } else if !self.is_in_table {
        } else if let Some(declaration) = line.strip_prefix(':') {
            let name = declaration.split(' ').next().unwrap_or_default();
            if self.is_ours(name) {
                self.existing.chains.insert(name.to_owned(), Some(RulesHash::default()));
            }
        } else if let Some(rule) = line.strip_prefix("-A ") {
            self.rule(line, rule);
        }
    }

    fn rule(&mut self, line: &str, rule: &str) {
        // iptables 1.8.9 prints a second space after `--nfacct-name`. Other versions may print only
        // one space.
        if line.contains("--nfacct-name  ") {
            let line = line.replace("--nfacct-name  ", "--nfacct-name ");
            return self.rule(&line, line.strip_prefix("-A ").unwrap_or(&line));
        }
        let (chain, rest) = rule.split_once(' ').unwrap_or((rule, ""));
        if let Some(Some(hash)) = self.existing.chains.get_mut(chain) {
            hash.add(line);
            if chain == SERVICES && self.table == RulesTable::Nat {
                self.existing.prefix_length = self.existing.prefix_length.or_else(|| group_prefix_length(rest));
            }
        } else if BASE_CHAINS.contains(&chain) {
            self.existing.base_rules.push(rule.to_owned());
        } else if let Some(target) = target(rest).filter(|target| self.is_ours(target)) {
            let is_spared = self.foreign.contains(&chain);
            let found = self.existing.referenced.entry(target.to_owned()).or_insert_with(|| rule.to_owned());
            if is_spared {
                rule.clone_into(found);
            }
        }
    }

    /// Returns the rules that were read.
    #[must_use]
    pub fn finish(self) -> ExistingRules {
        self.existing
    }
}

/// Returns the chain that is the target of a rule's `-j` or `-g`. Ignores text in quotes, which is
/// a comment.
pub(super) fn target(rule: &str) -> Option<&str> {
    let unquoted = rule.split('"').step_by(2);
    let mut words = unquoted.flat_map(str::split_ascii_whitespace);
    words.find(|word| matches!(*word, "-j" | "-g"))?;
    words.next()
}

/// Returns the prefix length of a rule such as `-d 10.96.0.0/24 -j KUBE-SVC-G-…`.
fn group_prefix_length(rule: &str) -> Option<u8> {
    let (prefix, target) = rule.strip_prefix("-d ")?.split_once(" -j ")?;
    ChainName::parse(target)?;
    prefix.split_once('/')?.1.parse().ok()
}

impl ExistingRules {
    /// Parses one table in the output of `iptables-save`.
    #[must_use]
    pub fn parse(table: RulesTable, save: &str) -> Self {
        let mut reader = ExistingReader::new(table);
        save.lines().for_each(|line| reader.line(line));
        reader.finish()
    }

    /// True if the chain exists and has exactly these rules.
    #[must_use]
    pub fn has_chain_with(&self, name: &str, rules: RulesHash) -> bool {
        self.chains.get(name).is_some_and(|existing| *existing == Some(rules))
    }

    /// Returns the rules of a built-in chain that are among `rules`, in the order of that chain.
    pub fn found_in<'a>(&'a self, chain: &str, rules: &[&str]) -> Vec<&'a str> {
        let of_chain = self.base_rules.iter().filter_map(|rule| rule.strip_prefix(chain)?.strip_prefix(' '));
        of_chain.filter(|rule| rules.contains(rule)).collect()
    }

    /// True if a chain exists, is empty, and cannot be deleted because a foreign rule jumps to it.
    #[must_use]
    pub fn is_undeletable_and_empty(&self, name: &str) -> bool {
        self.referenced.contains_key(name) && self.has_chain_with(name, RulesHash::default())
    }

    /// True if a rule outside of Headgate's chains jumps to a chain of Headgate, so that packets
    /// may reach that chain.
    #[must_use]
    pub fn leads_to_ours(&self, table: RulesTable) -> bool {
        !self.referenced.is_empty() || self.jumps_to_ours(table).next().is_some()
    }

    /// Returns the rules of the built-in chains that jump to a chain of Headgate, as (chain, rule).
    pub fn jumps_to_ours(&self, table: RulesTable) -> impl Iterator<Item = (&str, &str)> {
        self.base_rules.iter().filter_map(
            move |rule| {
                if is_ours(table, target(rule)?) { rule.split_once(' ') } else { None }
            },
        )
    }
}

/// The rules in the kernel, for all tables that Headgate writes, in the order of
/// [`RulesTable::ALL`].
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct ExistingTables([ExistingRules; RulesTable::ALL.len()]);

impl ExistingTables {
    /// Sets the rules of one table.
    pub fn set(&mut self, table: RulesTable, existing: ExistingRules) {
        self.0[table as usize] = existing;
    }

    /// Parses the complete output of `iptables-save`.
    #[must_use]
    pub fn parse(save: &str) -> Self {
        Self(RulesTable::ALL.map(|table| ExistingRules::parse(table, save)))
    }

    /// Returns the rules of one table.
    #[must_use]
    pub fn get(&self, table: RulesTable) -> &ExistingRules {
        &self.0[table as usize]
    }
}

/// True for names of chains that Headgate, or the kube-proxy that it replaced, has created.
#[must_use]
pub fn is_ours(table: RulesTable, name: &str) -> bool {
    names::all(table).contains(&name) || ChainName::parse(name).is_some()
}
