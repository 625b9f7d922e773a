//! The placements in the state. A message may refer to a placement (discovery.proto, section 13)
//! only if its receiver holds it. Therefore, this module knows since which version the state has
//! held each placement without a break.

use std::{collections::HashMap, sync::Arc};

use headgate_core::Placement;

/// The placements of all endpoints.
#[derive(Debug, Default)]
pub(super) struct Placements(HashMap<Arc<Placement>, Users>);

#[derive(Debug)]
struct Users {
    /// How many endpoints have the placement.
    count: u32,
    /// The version at which the first of them got it.
    since: u64,
}

impl Placements {
    /// Adds the placement of an endpoint that `version` has created or changed.
    pub(super) fn take(&mut self, version: u64, placement: &Arc<Placement>) {
        if let Some(users) = self.0.get_mut(placement) {
            users.count = users.count.saturating_add(1);
        } else {
            self.0.insert(Arc::clone(placement), Users { count: 1, since: version });
        }
    }

    /// Releases the placement of an old value of an endpoint.
    pub(super) fn release(&mut self, placement: &Placement) {
        let Some(users) = self.0.get_mut(placement) else { return };
        users.count -= 1;
        if users.count == 0 {
            self.0.remove(placement);
        }
    }

    /// True if the state has held the placement since `version` or longer.
    pub(super) fn has_held_since(&self, version: u64, placement: &Placement) -> bool {
        self.0.get(placement).is_some_and(|users| users.since <= version)
    }

    /// Number of placements.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_placement_is_held_from_its_first_to_its_last_endpoint() {
        let mut placements = Placements::default();
        let node = Arc::new(Placement::on("node-1"));
        placements.take(3, &node);
        placements.take(5, &node);
        placements.release(&node);
        assert_eq!([2, 3].map(|version| placements.has_held_since(version, &node)), [false, true]);
        placements.release(&node);
        assert_eq!(placements.len(), 0);
        placements.take(6, &node);
        assert_eq!([5, 6].map(|version| placements.has_held_since(version, &node)), [false, true]);
    }
}
