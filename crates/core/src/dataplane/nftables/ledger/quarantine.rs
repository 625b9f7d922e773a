//! Quarantined services: the kernel rejects their elements. Plans leave these services out, and
//! their last good elements stay in the kernel.

use std::{
    collections::{BTreeSet, HashSet},
    sync::Arc,
};

use super::{
    super::element::{Element, port_number},
    ElementRound, NftablesLedger, NftablesPlan, ProgrammedElements,
};
use crate::{model::ServiceKey, node_facts::NodeFacts, state::State};

impl NftablesLedger {
    /// Records that the kernel has accepted all plans so far. [`Self::set_quarantined`] treats the
    /// changes of unconfirmed plans as rejected.
    pub fn confirm(&mut self) {
        self.quarantine.confirm();
    }

    /// The services that need one of these elements. The cost grows with the number of all
    /// elements.
    #[must_use]
    pub fn services_of(&self, elements: &HashSet<Element>) -> Vec<Arc<ServiceKey>> {
        let needs =
            |programmed: &ProgrammedElements| programmed.all_elements().any(|element| elements.contains(&element));
        self.programmed.iter().filter(|(_, programmed)| needs(programmed)).map(|(key, _)| Arc::clone(key)).collect()
    }

    /// Quarantines these services and releases all other services. Each further [`Self::full`]
    /// keeps or restores the elements that the quarantined services had before the unconfirmed
    /// plans, if these elements are known. The caller must pass released services to
    /// [`Self::changed`].
    pub fn set_quarantined(&mut self, services: &BTreeSet<Arc<ServiceKey>>) {
        let Self { quarantine, programmed, .. } = self;
        quarantine.set(services, |key| programmed.get(key).cloned());
    }

    /// Makes the next [`Self::full`] leave out the last good elements of a quarantined service. The
    /// kernel rejects them now.
    pub fn forget_last_good(&mut self, service: &ServiceKey) {
        self.quarantine.last_good(service).into_iter().for_each(|last_good| *last_good = None);
    }

    /// Records the last good elements of a quarantined service as programmed.
    pub(super) fn keep_last_good(&mut self, key: &Arc<ServiceKey>) {
        if let Some(Some(last_good)) = self.quarantine.last_good(key).cloned() {
            self.replace(&ProgrammedElements::default(), &last_good, &mut ElementRound::default());
            self.programmed.insert(Arc::clone(key), last_good);
        }
    }

    /// Returns the plan that would program some services, whether or not they are quarantined. The
    /// records stay as they are, so the caller must not execute the plan. A trial of the plan shows
    /// whether the kernel accepts these services.
    pub fn trial(&mut self, state: &State, node: &NodeFacts, services: &BTreeSet<Arc<ServiceKey>>) -> NftablesPlan {
        let shape = self.shape.clone();
        let before: Vec<ProgrammedElements> =
            services.iter().map(|key| self.programmed.get(key).cloned().unwrap_or_default()).collect();
        let mut round = ElementRound::default();
        for key in services {
            self.program(state, node, key, None, &mut round);
        }
        let plan = self.finish(round, services.len());
        let mut round = ElementRound::default();
        for (key, before) in services.iter().zip(before) {
            let tried = self.programmed.remove(key).unwrap_or_default();
            self.replace(&tried, &before, &mut round);
            let numbers_of = |programmed: &ProgrammedElements| -> BTreeSet<u32> {
                programmed.groups.iter().map(|group| port_number(group.number)).collect()
            };
            let (old, new) = (numbers_of(&before), numbers_of(&tried));
            new.difference(&old).for_each(|number| self.numbers.release(*number));
            old.difference(&new).for_each(|number| self.numbers.take_back(*number));
            if !before.is_empty() {
                self.programmed.insert(Arc::clone(key), before);
            }
        }
        self.shape = shape;
        plan
    }
}
