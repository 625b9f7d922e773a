//! References: 11 bytes in a message that stand for a value which the receiver already has: the key
//! of a Service, or the placement of an endpoint.
//!
//! A reference is the beginning of SHA-256 over the value, in the canonical form of
//! [`crate::state::digest`]. It is so long that two values never have the same reference by chance,
//! and that nobody finds a name whose reference equals that of a given Service. Whoever chooses two
//! names with equal references, which takes 2^44 hashes, confuses only these two.

use std::{collections::HashSet, sync::Arc};

use crate::{
    model::{Placement, ServiceKey},
    state::{State, digest::Form},
};

/// A reference.
pub type Reference = [u8; 11];

/// Returns the reference to a Service's key.
#[must_use]
pub fn service(key: &ServiceKey) -> Reference {
    let mut form = Form::new(b's');
    form.key(key);
    first_bytes(form)
}

/// Returns the reference to a placement.
#[must_use]
pub fn placement(placement: &Placement) -> Reference {
    let mut form = Form::new(b'p');
    form.placement(placement);
    first_bytes(form)
}

fn first_bytes(form: Form) -> Reference {
    let [first @ .., _, _, _, _, _] = form.finish().to_le_bytes();
    first
}

/// The values in a state that a message may refer to. The key of a Service belongs to these values
/// only if the Service itself is known. Endpoints without a Service are not enough.
#[derive(Debug, Default)]
pub struct Referable {
    /// Keys of Services.
    pub services: Vec<Arc<ServiceKey>>,
    /// Placements of endpoints.
    pub placements: HashSet<Arc<Placement>>,
}

impl Referable {
    /// Collects the values, for the start of a stream. The cost is linear in the size of the state.
    #[must_use]
    pub fn of(state: &State) -> Self {
        let mut found = Self::default();
        for (key, entry) in state.entries() {
            if entry.service().is_some() {
                found.services.push(Arc::clone(key));
            }
            for endpoint in entry.endpoints().values() {
                if !found.placements.contains(&endpoint.placement) {
                    found.placements.insert(Arc::clone(&endpoint.placement));
                }
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_differ_between_kinds_and_values() {
        let key = ServiceKey::new("prod", "web");
        assert_eq!(service(&key), service(&key.clone()));
        assert_ne!(service(&key), service(&ServiceKey::new("pro", "dweb")));
        assert_ne!(service(&key), placement(&Placement::default()));
        assert_ne!(placement(&Placement::on("a")), placement(&Placement::on("b")));
        let in_zone = Placement { zone: Some("a".into()), ..Placement::default() };
        assert_ne!(placement(&Placement::on("a")), placement(&in_zone));
    }
}
