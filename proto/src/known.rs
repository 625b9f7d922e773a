//! The values that references stand for, on the receiver's side (discovery.proto, section 13).

use std::{collections::HashMap, sync::Arc};

use headgate_core::{
    Placement, ServiceKey,
    reference::{self, Referable, Reference},
};

/// [`Known::has_learned_much`] is true if the tables have more than `LEARNED_MUCH` values plus
/// twice the number of values in the state.
const LEARNED_MUCH: usize = 4096;

/// A reference to a value that this side does not hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a change refers to a {0} that is missing in this agent's state")]
pub struct UnknownReference(&'static str);

/// The known values: those of the state, and those that messages have brought. The replica also
/// refers to values of resources that this side cannot use.
#[derive(Debug, Default)]
pub(crate) struct Known {
    services: HashMap<Reference, Arc<ServiceKey>>,
    placements: HashMap<Reference, Arc<Placement>>,
    /// Number of values in the state of the last [`Known::add`].
    held: Option<usize>,
}

impl Known {
    /// Adds the values in a state. Forgets all others if many have been learned.
    pub(crate) fn add(&mut self, referable: Referable) {
        self.held = Some(referable.services.len() + referable.placements.len());
        if self.has_learned_much() {
            self.services.clear();
            self.placements.clear();
        }
        self.services.extend(referable.services.into_iter().map(|key| (reference::service(&key), key)));
        let placements = referable.placements.into_iter();
        self.placements.extend(placements.map(|placement| (reference::placement(&placement), placement)));
    }

    /// Returns true if a [`Known::add`] is due. Until then, values of removed resources stay in the
    /// tables.
    pub(crate) fn has_learned_much(&self) -> bool {
        self.services.len() + self.placements.len() > 2 * self.held.unwrap_or_default() + LEARNED_MUCH
    }

    pub(crate) fn learn_service(&mut self, key: &ServiceKey) {
        self.services.entry(reference::service(key)).or_insert_with(|| Arc::new(key.clone()));
    }

    pub(crate) fn forget_service(&mut self, key: &ServiceKey) {
        self.services.remove(&reference::service(key));
    }

    /// Learns a placement, except from the first snapshot: the state will have nearly all of these.
    pub(crate) fn learn_placement(&mut self, placement: &Arc<Placement>) {
        if self.held.is_some() {
            self.placements.insert(reference::placement(placement), Arc::clone(placement));
        }
    }

    pub(crate) fn service(&self, reference: &[u8]) -> Result<ServiceKey, UnknownReference> {
        self.services.get(reference).map(|key| (**key).clone()).ok_or(UnknownReference("service"))
    }

    pub(crate) fn placement(&self, reference: &[u8]) -> Result<Arc<Placement>, UnknownReference> {
        self.placements.get(reference).cloned().ok_or(UnknownReference("placement"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_is_known_until_it_is_removed_and_learned_values_are_bounded() {
        let mut known = Known::default();
        let [web, db] = ["web", "db"].map(|name| ServiceKey::new("prod", name));
        let is_known = |known: &Known, key: &ServiceKey| known.service(&reference::service(key)).as_ref() == Ok(key);
        known.add(Referable { services: vec![Arc::new(web.clone())], ..Referable::default() });
        known.learn_service(&db);
        assert!(is_known(&known, &web) && is_known(&known, &db));
        known.forget_service(&web);
        assert!(!is_known(&known, &web));
        known.add(Referable::default());
        assert!(is_known(&known, &db), "the replica may hold a Service that this side cannot use");
        for number in 0..LEARNED_MUCH {
            assert!(!known.has_learned_much());
            known.learn_placement(&Placement::on(&format!("n{number}")).into());
        }
        assert!(known.has_learned_much());
        known.add(Referable::default());
        assert!(!is_known(&known, &db) && !known.has_learned_much());
    }
}
