//! Services whose rules the kernel rejects. Steps skip them, and their last good rules remain.

use std::{collections::BTreeSet, sync::Arc};

use super::{ExistingTables, ProgrammedRules, RulesLedger, RulesTable};
use crate::{
    dataplane::rules::{
        line::Line,
        names::{CANARY, INVALID_COUNTER, LOCALHOST_COUNTER},
        script::Script,
        service::DispatchLine,
    },
    model::{Family, NodeFacts, ServiceKey},
    state::State,
};

/// A service's rules before the unconfirmed scripts, and its dispatch lines if they changed.
#[derive(Debug, Clone)]
pub(super) struct Before {
    pub(super) programmed: ProgrammedRules,
    pub(super) lines: Option<Vec<DispatchLine>>,
}

impl RulesLedger {
    /// Records that the kernel has accepted all scripts so far. [`Self::set_quarantined`] treats
    /// the changes of unconfirmed scripts as rejected.
    pub fn confirm(&mut self) {
        self.quarantine.confirm();
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
        let Self { quarantine, programmed, dispatch, .. } = self;
        quarantine.set(services, |key| Some(Before { programmed: programmed.get(key)?.clone(), lines: None }));
        for (key, Before { programmed, lines }) in quarantine.all_last_good() {
            lines.get_or_insert_with(|| dispatch.lines(key, &programmed.dispatch));
        }
    }

    /// Saves the dispatch lines that may have to be restored after a full script.
    pub(super) fn begin_full(&mut self) {
        self.quarantine.begin_full();
        for (key, Before { programmed, lines }) in self.quarantine.unconfirmed() {
            lines.get_or_insert_with(|| self.dispatch.lines(key, &programmed.dispatch));
        }
    }

    /// Records the last good rules of a quarantined service as programmed, if the kernel has them.
    pub(super) fn keep_last_good(&mut self, key: &Arc<ServiceKey>, existing: &ExistingTables) {
        let chains = &existing.get(RulesTable::Nat).chains;
        let is_in_kernel = |last_good: &Before| {
            let mut own = last_good.programmed.chains.iter();
            own.all(|(name, hash)| {
                chains.get(&name.to_string()).is_some_and(|found| found.is_none_or(|found| found == *hash))
            })
        };
        let Some(slot) = self.quarantine.last_good(key) else { return };
        *slot = slot.take().filter(is_in_kernel);
        let Some(Before { mut programmed, lines }) = slot.clone() else { return };
        let mut lines = lines.unwrap_or_default();
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
        // Services' chains are in nat, which must not change if the kernel rejects filter.
        script.put_filter_first();
        for chain in self.ruleset.chains.iter().filter(|chain| chain.name != CANARY) {
            script.write_chain(chain.table, &chain.name, &chain.rules);
        }
        let (mut nat, mut filter) = (String::new(), String::new());
        for key in services {
            let rules = self.render(state, node, key);
            for chain in rules.chains {
                script.write_chain(RulesTable::Nat, &chain.name, &chain.rules);
            }
            for line in rules.dispatch {
                let canary = if line.chain.table() == RulesTable::Nat { &mut nat } else { &mut filter };
                canary.push_str("-A ");
                canary.push_str(CANARY);
                canary.push_str(&line.rule);
            }
        }
        script.write_chain(RulesTable::Nat, &CANARY, &nat);
        script.write_chain(RulesTable::Filter, &CANARY, &filter);
        script
    }

    /// Returns a trial of rules that count packets, to be followed by [`Self::end_of_trials`].
    #[must_use]
    pub fn trial_of_counters() -> Script {
        let rule = |counter| format!("-A {CANARY} -m nfacct --nfacct-name {counter}\n");
        let mut script = Script::default();
        script.write_chain(RulesTable::Nat, &CANARY, &rule(LOCALHOST_COUNTER));
        script.write_chain(RulesTable::Filter, &CANARY, &rule(INVALID_COUNTER));
        script
    }

    /// Returns a trial of rules that match SCTP, to be followed by [`Self::end_of_trials`].
    #[must_use]
    pub fn trial_of_sctp() -> Script {
        let mut script = Script::default();
        script.write_chain(RulesTable::Nat, &CANARY, &format!("-A {CANARY} -p sctp -m sctp --dport 1\n"));
        script
    }

    /// Returns a trial of rules that match the gate, which must exist, as [`Self::trial_of_sctp`].
    #[must_use]
    pub fn trial_of_gate(family: Family) -> Script {
        let mut rule = String::new();
        Line::append(&mut rule, CANARY).while_gate_is_closed(family).end();
        let mut script = Script::default();
        script.write_chain(RulesTable::Nat, &CANARY, &rule);
        script
    }

    /// Returns a script that empties the canary chains after trials.
    #[must_use]
    pub fn end_of_trials() -> Script {
        let mut script = Script::default();
        script.write_chain(RulesTable::Nat, &CANARY, "");
        script.write_chain(RulesTable::Filter, &CANARY, "");
        script
    }
}
