//! Quarantined services: the kernel rejects their rules. Steps pass them over, and their last good
//! rules stay.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use super::{ExistingTables, Ledger, Programmed, Table};
use crate::{
    dataplane::rules::{
        names::{CANARY, INVALID_COUNTER, LOCALHOST_COUNTER},
        script::Script,
        service::DispatchLine,
    },
    model::ServiceKey,
    node_facts::NodeFacts,
    state::State,
};

/// What was programmed of a service. `lines` has its dispatch lines if the dispatch chains have
/// others now.
#[derive(Debug, Clone)]
pub(super) struct Before {
    pub(super) programmed: Programmed,
    pub(super) lines: Option<Vec<DispatchLine>>,
}

/// What was programmed of a service, dispatch lines included.
#[derive(Debug, Clone)]
struct Kept {
    programmed: Programmed,
    lines: Vec<DispatchLine>,
}

/// The quarantined services, and what confirmed scripts programmed.
#[derive(Debug, Default)]
pub(super) struct Quarantine {
    /// Services that scripts have changed since the last confirmation, as they were before.
    before: HashMap<Arc<ServiceKey>, Before>,
    /// A full script was made since the last confirmation: of services that are not in `before`,
    /// nothing older is known.
    is_after_full: bool,
    /// The quarantined services, with what stays of them.
    kept: HashMap<Arc<ServiceKey>, Option<Kept>>,
}

impl Quarantine {
    pub(super) fn contains(&self, key: &ServiceKey) -> bool {
        !self.kept.is_empty() && self.kept.contains_key(key)
    }

    /// Records that a step changed a service, of which `before` was programmed.
    pub(super) fn changed(&mut self, key: &Arc<ServiceKey>, before: Before) {
        if !self.is_after_full {
            self.before.entry(Arc::clone(key)).or_insert(before);
        }
    }
}

impl Ledger {
    /// The kernel has accepted the scripts so far. Changes of scripts that are not confirmed count
    /// as rejected when [`Self::set_quarantined`] is called.
    pub fn confirm(&mut self) {
        self.quarantine.before.clear();
        self.quarantine.is_after_full = false;
    }

    /// Whether a service is quarantined.
    #[must_use]
    pub fn is_quarantined(&self, key: &ServiceKey) -> bool {
        self.quarantine.contains(key)
    }

    /// Quarantines these services and no others. The next [`Self::full`] leaves what was programmed
    /// of them before the unconfirmed scripts, as far as it is known and still in the kernel. A
    /// service that is released has to be planned as changed.
    pub fn set_quarantined(&mut self, services: &BTreeSet<Arc<ServiceKey>>) {
        self.quarantine.kept.retain(|key, _| services.contains(key));
        for key in services {
            if !self.quarantine.kept.contains_key(key) {
                let kept = self.last_good(key);
                self.quarantine.kept.insert(Arc::clone(key), kept);
            }
        }
    }

    fn last_good(&mut self, key: &Arc<ServiceKey>) -> Option<Kept> {
        let before = match self.quarantine.before.remove(key) {
            Some(before) => before,
            None if self.quarantine.is_after_full => return None,
            None => Before { programmed: self.programmed.get(key)?.clone(), lines: None },
        };
        let Before { programmed, lines } = before;
        let lines = lines.unwrap_or_else(|| self.dispatch.lines(key, &programmed.dispatch));
        Some(Kept { programmed, lines })
    }

    /// Takes from the dispatch chains what is still needed of them, before a full script writes
    /// them anew.
    pub(super) fn begin_full(&mut self) {
        self.quarantine.is_after_full = true;
        for (key, Before { programmed, lines }) in &mut self.quarantine.before {
            lines.get_or_insert_with(|| self.dispatch.lines(key, &programmed.dispatch));
        }
    }

    /// Adds what stays of a quarantined service, if the kernel has it.
    pub(super) fn keep(&mut self, key: &Arc<ServiceKey>, existing: &ExistingTables) {
        let chains = &existing.get(Table::Nat).chains;
        let is_there = |kept: &mut Kept| {
            let mut own = kept.programmed.chains.iter();
            own.all(|(name, hash)| {
                chains.get(&name.to_string()).is_some_and(|found| found.is_none_or(|found| found == *hash))
            })
        };
        let slot = self.quarantine.kept.entry(Arc::clone(key)).or_default();
        *slot = slot.take().and_then(|mut kept| is_there(&mut kept).then_some(kept));
        let Some(Kept { mut programmed, mut lines }) = slot.clone() else { return };
        if !self.dispatch.is_compact() {
            // The classic layout has no such chain.
            lines.retain(|line| !line.chain.is_hairpin());
            programmed.dispatch = lines.iter().map(|line| (line.chain, line.selector)).collect();
        }
        self.dispatch.insert(key, lines);
        self.tally.add(programmed.tally);
        self.programmed.insert(Arc::clone(key), programmed);
    }

    /// A script that shows whether the kernel accepts the rules of some services: it writes their
    /// chains as they are wanted, and their dispatch lines into the canary chains, to which nothing
    /// jumps. If the kernel rejects it, no service's chain has changed. If it accepts it, the
    /// services' chains are in place, but services that are new or had no endpoints do not answer
    /// yet. [`Self::end_of_trials`] has to follow.
    #[must_use]
    pub fn trial(&self, state: &State, node: &NodeFacts, services: &[Arc<ServiceKey>]) -> Script {
        let mut script = Script::default();
        // All chains of services are in nat. What filter rejects has to come before them.
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

    /// A script that shows whether the kernel accepts rules that count packets.
    /// [`Self::end_of_trials`] has to follow.
    #[must_use]
    pub fn trial_of_counters() -> Script {
        let rule = |counter| format!("-A {CANARY} -m nfacct --nfacct-name {counter}\n");
        let mut script = Script::default();
        script.write_chain(Table::Nat, &CANARY, &rule(LOCALHOST_COUNTER));
        script.write_chain(Table::Filter, &CANARY, &rule(INVALID_COUNTER));
        script
    }

    /// A script that shows whether the kernel accepts rules that match SCTP.
    /// [`Self::end_of_trials`] has to follow.
    #[must_use]
    pub fn trial_of_sctp() -> Script {
        let mut script = Script::default();
        script.write_chain(Table::Nat, &CANARY, &format!("-A {CANARY} -p sctp -m sctp --dport 1\n"));
        script
    }

    /// Empties the canary chains after [`Self::trial`]s.
    #[must_use]
    pub fn end_of_trials() -> Script {
        let mut script = Script::default();
        script.write_chain(Table::Nat, &CANARY, "");
        script.write_chain(Table::Filter, &CANARY, "");
        script
    }
}
