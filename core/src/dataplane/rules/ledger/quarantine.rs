//! Services that are set aside, since the kernel refuses their rules: how they are told from the others, and how their last good rules stay.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use super::{ExistingTables, Ledger, Programmed, Table};
use crate::{
    dataplane::rules::{dispatch::DispatchLine, fixed, script::Script},
    model::ServiceKey,
    node_facts::NodeFacts,
    state::State,
};

/// What was programmed of a service. Its dispatch lines are there when they are not those in the dispatch chains any more.
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

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Aside {
    /// Services that steps have changed since the last confirmation, as they were before.
    before: HashMap<Arc<ServiceKey>, Before>,
    /// A full script was made since then: of services that are not in `before`, nothing older is known.
    everything_is_new: bool,
    /// The services that are set aside, with what stays of them.
    kept: HashMap<Arc<ServiceKey>, Option<Kept>>,
}

impl Aside {
    pub(super) fn contains(&self, key: &ServiceKey) -> bool {
        !self.kept.is_empty() && self.kept.contains_key(key)
    }

    /// A step has changed a service, of which this was programmed.
    pub(super) fn changed(&mut self, key: &Arc<ServiceKey>, before: Before) {
        if !self.everything_is_new {
            self.before.entry(Arc::clone(key)).or_insert(before);
        }
    }
}

impl Ledger {
    /// The kernel has taken the scripts so far. Without it, what they changed counts as refused, should [`Self::set_aside`] be called.
    pub fn confirm(&mut self) {
        self.aside.before.clear();
        self.aside.everything_is_new = false;
    }

    /// True while a service is set aside.
    #[must_use]
    pub fn is_aside(&self, key: &ServiceKey) -> bool {
        self.aside.contains(key)
    }

    /// Sets just these services aside: steps pass them over, and the next [`Self::full`] leaves what was programmed of them before the scripts
    /// that are not confirmed, as far as it is known and still in the kernel. A service that is not among them any more has to be planned
    /// as changed.
    pub fn set_aside(&mut self, services: &BTreeSet<Arc<ServiceKey>>) {
        self.aside.kept.retain(|key, _| services.contains(key));
        for key in services {
            if !self.aside.kept.contains_key(key) {
                let kept = self.last_good(key);
                self.aside.kept.insert(Arc::clone(key), kept);
            }
        }
    }

    fn last_good(&mut self, key: &Arc<ServiceKey>) -> Option<Kept> {
        let before = match self.aside.before.remove(key) {
            Some(before) => before,
            None if self.aside.everything_is_new => return None,
            None => Before { programmed: self.programmed.get(key)?.clone(), lines: None },
        };
        let Before { programmed, lines } = before;
        let lines = lines.unwrap_or_else(|| self.shared.lines(key, &programmed.dispatch));
        Some(Kept { programmed, lines })
    }

    /// The dispatch chains are about to be written anew: what is to be found in them has to be taken now.
    pub(super) fn everything_becomes_new(&mut self) {
        self.aside.everything_is_new = true;
        for (key, Before { programmed, lines }) in &mut self.aside.before {
            lines.get_or_insert_with(|| self.shared.lines(key, &programmed.dispatch));
        }
    }

    /// Enters what stays of a service that is set aside, if the kernel has it.
    pub(super) fn keep(&mut self, key: &Arc<ServiceKey>, existing: &ExistingTables) {
        let chains = &existing.get(Table::Nat).chains;
        let is_there = |kept: &mut Kept| {
            let mut own = kept.programmed.chains.iter();
            own.all(|(name, hash)| {
                chains.get(&name.to_string()).is_some_and(|found| found.is_none_or(|found| found == *hash))
            })
        };
        let slot = self.aside.kept.entry(Arc::clone(key)).or_default();
        *slot = slot.take().and_then(|mut kept| is_there(&mut kept).then_some(kept));
        let Some(Kept { mut programmed, mut lines }) = slot.clone() else { return };
        if !self.shared.is_compact() {
            // The classic layout has no such chain.
            lines.retain(|line| !line.chain.is_hairpin());
            programmed.dispatch = lines.iter().map(|line| (line.chain, line.selector)).collect();
        }
        self.shared.insert(key, lines);
        self.tally.add(programmed.tally);
        self.programmed.insert(Arc::clone(key), programmed);
    }

    /// A script by which the kernel is asked whether it takes the rules of some services: their chains as they are wanted, and their dispatch
    /// lines in the canary chains, which nothing leads to. Where it is refused, no service's chain has changed. Where it is taken, so are the
    /// services' rules, though services that are new or refused do not answer yet. [`Self::end_of_trials`] is to follow.
    #[must_use]
    pub fn trial(&self, state: &State, node: &NodeFacts, services: &[Arc<ServiceKey>]) -> Script {
        let mut script = Script::default();
        // Chains of services are all in nat: what the filter refuses is to come before.
        script.put_filter_first();
        for chain in fixed::chains(&self.config).iter().filter(|chain| chain.name != fixed::CANARY) {
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
                canary.push_str(fixed::CANARY);
                canary.push_str(&line.rule);
            }
        }
        script.write_chain(Table::Nat, &fixed::CANARY, &nat);
        script.write_chain(Table::Filter, &fixed::CANARY, &filter);
        script
    }

    /// A script by which the kernel is asked whether it takes rules that count packets. [`Self::end_of_trials`] is to follow.
    #[must_use]
    pub fn trial_of_counters() -> Script {
        let rule = |counter| format!("-A {} -m nfacct --nfacct-name {counter}\n", fixed::CANARY);
        let mut script = Script::default();
        script.write_chain(Table::Nat, &fixed::CANARY, &rule(fixed::LOCALHOST_COUNTER));
        script.write_chain(Table::Filter, &fixed::CANARY, &rule(fixed::INVALID_COUNTER));
        script
    }

    /// A script by which the kernel is asked whether it takes rules that match SCTP. [`Self::end_of_trials`] is to follow.
    #[must_use]
    pub fn trial_of_sctp() -> Script {
        let mut script = Script::default();
        script.write_chain(Table::Nat, &fixed::CANARY, &format!("-A {} -p sctp -m sctp --dport 1\n", fixed::CANARY));
        script
    }

    /// Empties the canary chains after [`Self::trial`]s.
    #[must_use]
    pub fn end_of_trials() -> Script {
        let mut script = Script::default();
        script.write_chain(Table::Nat, &fixed::CANARY, "");
        script.write_chain(Table::Filter, &fixed::CANARY, "");
        script
    }
}
