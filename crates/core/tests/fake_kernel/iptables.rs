//! A kernel in memory for tests. It runs scripts for `iptables-restore` and is as strict as a real
//! kernel: the target of a jump must exist, a chain can be deleted only if it is empty and no rule
//! jumps to it, and the part of a script for one table takes effect completely or not at all.
// Each program of tests uses some of the functions.
#![allow(dead_code)]

use std::collections::BTreeMap;

use headgate_core::iptables::RulesTable;

type Chains = BTreeMap<String, Vec<String>>;

/// Targets that are not chains.
const VERDICTS: [&str; 7] = ["ACCEPT", "DROP", "REJECT", "RETURN", "MARK", "MASQUERADE", "DNAT"];

/// The three tables. At first they contain only the built-in chains.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FakeKernel {
    tables: BTreeMap<RulesTable, Chains>,
}

impl Default for FakeKernel {
    fn default() -> Self {
        let base = |names: &[&str]| names.iter().map(|name| ((*name).to_owned(), Vec::new())).collect::<Chains>();
        let all = ["PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"];
        let tables = [
            (RulesTable::Mangle, base(&all)),
            (RulesTable::Nat, base(&["PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"])),
            (RulesTable::Filter, base(&["INPUT", "FORWARD", "OUTPUT"])),
        ];
        Self { tables: tables.into() }
    }
}

impl FakeKernel {
    /// Runs a script as `iptables-restore --noflush` would.
    ///
    /// # Errors
    /// Returns the faulty line and the reason. Tables that were committed before this line stay
    /// changed.
    pub(crate) fn restore(&mut self, script: &str) -> Result<(), String> {
        let mut working: Option<(RulesTable, Chains)> = None;
        for line in script.lines() {
            let fault = |what: &str| format!("{what}: `{line}`");
            if let Some(name) = line.strip_prefix('*') {
                let table = RulesTable::ALL
                    .into_iter()
                    .find(|table| table.as_str() == name)
                    .ok_or_else(|| fault("unknown table"))?;
                working = Some((table, self.tables[&table].clone()));
            } else if line == "COMMIT" {
                let (table, chains) = working.take().ok_or_else(|| fault("COMMIT outside of a table"))?;
                self.tables.insert(table, chains);
            } else {
                let (_, chains) = working.as_mut().ok_or_else(|| fault("command outside of a table"))?;
                apply_line(chains, line).map_err(|what| fault(&what))?;
            }
        }
        if working.is_some() { Err("COMMIT is missing at the end".to_owned()) } else { Ok(()) }
    }

    /// Returns a table as `iptables-save` prints it.
    #[must_use]
    pub(crate) fn save(&self, table: RulesTable) -> String {
        let mut text = format!("*{table}\n");
        for name in self.tables[&table].keys() {
            text.push_str(&format!(":{name} - [0:0]\n"));
        }
        for (name, rules) in &self.tables[&table] {
            rules.iter().for_each(|rule| text.push_str(&format!("-A {name} {rule}\n")));
        }
        text + "COMMIT\n"
    }

    /// Number of rules in a table.
    #[must_use]
    pub(crate) fn rule_count(&self, table: RulesTable) -> usize {
        self.tables[&table].values().map(Vec::len).sum()
    }
}

fn apply_line(chains: &mut Chains, line: &str) -> Result<(), String> {
    if let Some(declaration) = line.strip_prefix(':') {
        let name = declaration.strip_suffix(" - [0:0]").ok_or("invalid declaration")?;
        chains.insert(name.to_owned(), Vec::new());
        return Ok(());
    }
    let (command, rest) = line.split_once(' ').ok_or("command without arguments")?;
    if command == "-X" {
        return delete_chain(chains, rest);
    }
    let (chain, rule) = rest.split_once(' ').ok_or("chain without a rule")?;
    check_target(chains, rule)?;
    let rules = chains.get_mut(chain).ok_or("no such chain")?;
    match command {
        "-A" => rules.push(rule.to_owned()),
        "-I" => rules.insert(0, rule.to_owned()),
        "-D" => {
            let position = rules.iter().position(|candidate| candidate == rule).ok_or("no such rule")?;
            rules.remove(position);
        }
        _ => return Err("unknown command".to_owned()),
    }
    Ok(())
}

fn target(rule: &str) -> Option<&str> {
    let position = if rule.starts_with("-j ") { Some(3) } else { rule.find(" -j ").map(|position| position + 4) };
    rule.get(position?..)?.split(' ').next()
}

fn check_target(chains: &Chains, rule: &str) -> Result<(), String> {
    match target(rule) {
        Some(target) if !VERDICTS.contains(&target) && !chains.contains_key(target) => {
            Err("target does not exist".to_owned())
        }
        _ => Ok(()),
    }
}

fn delete_chain(chains: &mut Chains, name: &str) -> Result<(), String> {
    if !chains.get(name).ok_or("no such chain")?.is_empty() {
        return Err("chain is not empty".to_owned());
    }
    if chains.values().flatten().any(|rule| target(rule) == Some(name)) {
        return Err("chain is in use".to_owned());
    }
    chains.remove(name);
    Ok(())
}
