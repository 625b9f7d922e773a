//! Quarantined services: the kernel rejects their rules. Steps skip these services, and their last
//! good rules remain in the kernel.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use super::{ExistingTables, Ledger, Programmed, Table};
use crate::{
    dataplane::rules::{
        line::Line,
        names::{CANARY, INVALID_COUNTER, LOCALHOST_COUNTER},
        script::Script,
        service::DispatchLine,
    },
    model::{Family, ServiceKey},
    node_facts::NodeFacts,
    state::State,
};

/// The rules of a service that were programmed before the unconfirmed scripts. `lines` contains the
/// old dispatch lines of the service if the dispatch chains now have other lines.
#[derive(Debug, Clone)]
pub(super) struct Before {
    pub(super) programmed: Programmed,
    pub(super) lines: Option<Vec<DispatchLine>>,
}

/// The last rules of a service that the kernel accepted.
#[derive(Debug, Clone)]
struct LastGood {
    programmed: Programmed,
    lines: Vec<DispatchLine>,
}

/// The quarantined services, and the rules that confirmed scripts programmed.
#[derive(Debug, Default)]
pub(super) struct Quarantine {
    /// For each service that scripts changed since the last confirmation, its rules before the
    /// first of these changes.
    before: HashMap<Arc<ServiceKey>, Before>,
    /// True if a full script was made since the last confirmation. The older rules of services that
    /// are not in `before` are then unknown.
    is_after_full: bool,
    /// The quarantined services with their last good rules, or `None` if these rules are unknown.
    services: HashMap<Arc<ServiceKey>, Option<LastGood>>,
}

impl Quarantine {
    pub(super) fn contains(&self, key: &ServiceKey) -> bool {
        !self.services.is_empty() && self.services.contains_key(key)
    }

    /// Records that a step changed a service whose programmed rules were `before`.
    pub(super) fn changed(&mut self, key: &Arc<ServiceKey>, before: Before) {
        if !self.is_after_full {
            self.before.entry(Arc::clone(key)).or_insert(before);
        }
    }
}

impl Ledger {
    /// Records that the kernel has accepted all scripts so far. [`Self::set_quarantined`] treats
    /// the changes of unconfirmed scripts as rejected.
    pub fn confirm(&mut self) {
        self.quarantine.before.clear();
        self.quarantine.is_after_full = false;
    }

    /// True if a service is quarantined.
    #[must_use]
    pub fn is_quarantined(&self, key: &ServiceKey) -> bool {
        self.quarantine.contains(key)
    }

    /// Quarantines these services and releases all other services. The next [`Self::full`] keeps
    /// the rules that the quarantined services had before the unconfirmed scripts, if these rules
    /// are known and still in the kernel. The caller must pass released services to
    /// [`Self::changed`].
    pub fn set_quarantined(&mut self, services: &BTreeSet<Arc<ServiceKey>>) {
        self.quarantine.services.retain(|key, _| services.contains(key));
        for key in services {
            if !self.quarantine.services.contains_key(key) {
                let last_good = self.take_last_good(key);
                self.quarantine.services.insert(Arc::clone(key), last_good);
            }
        }
    }

    fn take_last_good(&mut self, key: &Arc<ServiceKey>) -> Option<LastGood> {
        let before = match self.quarantine.before.remove(key) {
            Some(before) => before,
            None if self.quarantine.is_after_full => return None,
            None => Before { programmed: self.programmed.get(key)?.clone(), lines: None },
        };
        let Before { programmed, lines } = before;
        let lines = lines.unwrap_or_else(|| self.dispatch.lines(key, &programmed.dispatch));
        Some(LastGood { programmed, lines })
    }

    /// Saves the dispatch lines that may have to be restored, before a full script replaces the
    /// dispatch chains.
    pub(super) fn begin_full(&mut self) {
        self.quarantine.is_after_full = true;
        for (key, Before { programmed, lines }) in &mut self.quarantine.before {
            lines.get_or_insert_with(|| self.dispatch.lines(key, &programmed.dispatch));
        }
    }

    /// Records the last good rules of a quarantined service as programmed, if the kernel has them.
    pub(super) fn keep_last_good(&mut self, key: &Arc<ServiceKey>, existing: &ExistingTables) {
        let chains = &existing.get(Table::Nat).chains;
        let is_in_kernel = |last_good: &LastGood| {
            let mut own = last_good.programmed.chains.iter();
            own.all(|(name, hash)| {
                chains.get(&name.to_string()).is_some_and(|found| found.is_none_or(|found| found == *hash))
            })
        };
        let slot = self.quarantine.services.entry(Arc::clone(key)).or_default();
        *slot = slot.take().filter(is_in_kernel);
        let Some(LastGood { mut programmed, mut lines }) = slot.clone() else { return };
        if !self.dispatch.is_compact() {
            // The classic layout has no hairpin chains.
            lines.retain(|line| !line.chain.is_hairpin());
            programmed.dispatch = lines.iter().map(|line| (line.chain, line.selector)).collect();
        }
        self.dispatch.insert(key, lines);
        self.tally.add(programmed.tally);
        self.programmed.insert(Arc::clone(key), programmed);
    }

    /// Returns a script that tests whether the kernel accepts the rules of some services. The
    /// script writes the wanted chains of these services. It writes their dispatch lines into the
    /// canary chains, to which no rule jumps. If the kernel rejects the script, no chain of a
    /// service has changed. If the kernel accepts the script, the chains are in place, but the
    /// kernel does not forward traffic of services that are new or had no endpoints. The caller
    /// must run [`Self::end_of_trials`] afterwards.
    #[must_use]
    pub fn trial(&self, state: &State, node: &NodeFacts, services: &[Arc<ServiceKey>]) -> Script {
        let mut script = Script::default();
        // The chains of services are in nat. Filter comes first, so that nat does not change if the
        // kernel rejects filter.
        script.put_filter_first();
        for chain in self.ruleset.chains.iter().filter(|chain| chain.name != CANARY) {
            script.write_chain(chain.table, &chain.name, &chain.rules);
        }
        let (mut nat, mut filter) = (String::new(), String::new());
        for key in services {
            let rules = self.render(state, node, key);
            for chain in rules.chains {
                script.write_chain(Table::Nat, &chain.name, &chain.rules);
            }
            for line in rules.dispatch {
                let canary = if line.chain.table() == Table::Nat { &mut nat } else { &mut filter };
                canary.push_str("-A ");
                canary.push_str(CANARY);
                canary.push_str(&line.rule);
            }
        }
        script.write_chain(Table::Nat, &CANARY, &nat);
        script.write_chain(Table::Filter, &CANARY, &filter);
        script
    }

    /// Returns a script that tests whether the kernel accepts rules that count packets. The caller
    /// must run [`Self::end_of_trials`] afterwards.
    #[must_use]
    pub fn trial_of_counters() -> Script {
        let rule = |counter| format!("-A {CANARY} -m nfacct --nfacct-name {counter}\n");
        let mut script = Script::default();
        script.write_chain(Table::Nat, &CANARY, &rule(LOCALHOST_COUNTER));
        script.write_chain(Table::Filter, &CANARY, &rule(INVALID_COUNTER));
        script
    }

    /// Returns a script that tests whether the kernel accepts rules that match SCTP. The caller
    /// must run [`Self::end_of_trials`] afterwards.
    #[must_use]
    pub fn trial_of_sctp() -> Script {
        let mut script = Script::default();
        script.write_chain(Table::Nat, &CANARY, &format!("-A {CANARY} -p sctp -m sctp --dport 1\n"));
        script
    }

    /// Returns a script that tests whether the kernel accepts rules that match the gate of mode
    /// userspace, which must exist. The caller must run [`Self::end_of_trials`] afterwards.
    #[must_use]
    pub fn trial_of_gate(family: Family) -> Script {
        let mut rule = String::new();
        Line::append(&mut rule, CANARY).while_gate_is_closed(family).end();
        let mut script = Script::default();
        script.write_chain(Table::Nat, &CANARY, &rule);
        script
    }

    /// Returns a script that empties the canary chains after trials.
    #[must_use]
    pub fn end_of_trials() -> Script {
        let mut script = Script::default();
        script.write_chain(Table::Nat, &CANARY, "");
        script.write_chain(Table::Filter, &CANARY, "");
        script
    }
}
