//! Shared copies of strings, lists and placements. A cluster has many endpoints, but they have few
//! different names, port lists, hints and placements.

use std::sync::Arc;

use headgate_core::{EndpointPort, Hints, Placement, pool::Pool};

/// Shared strings, port lists, hints and placements.
#[derive(Debug, Default)]
pub(super) struct Interner {
    strings: Pool<str>,
    ports: Pool<[EndpointPort]>,
    hints: Pool<Hints>,
    placements: Pool<Placement>,
}

impl Interner {
    /// The shared copy of a string; `None` for an empty string.
    pub(super) fn string(&mut self, text: &str) -> Option<Arc<str>> {
        (!text.is_empty()).then(|| self.strings.get(text, || text.into()))
    }

    /// The shared copy of a name, which may be empty.
    pub(super) fn name(&mut self, text: &str) -> Arc<str> {
        self.string(text).unwrap_or_default()
    }

    /// The shared copy of a port list, sorted and without duplicates.
    pub(super) fn ports(&mut self, mut ports: Vec<EndpointPort>) -> Arc<[EndpointPort]> {
        ports.sort_unstable();
        ports.dedup();
        self.ports.get(ports.as_slice(), || ports.as_slice().into())
    }

    /// The shared copy of hints, sorted and without duplicates; `None` if there are no
    /// hints.
    pub(super) fn hints(&mut self, mut hints: Hints) -> Option<Arc<Hints>> {
        for list in [&mut hints.zones, &mut hints.nodes] {
            list.sort_unstable();
            list.dedup();
        }
        let is_empty = hints.zones.is_empty() && hints.nodes.is_empty();
        (!is_empty).then(|| self.hints.get(&hints, || Arc::new(hints.clone())))
    }

    /// The shared copy of a placement.
    pub(super) fn placement(&mut self, placement: &Placement) -> Arc<Placement> {
        self.placements.get(placement, || Arc::new(placement.clone()))
    }
}
