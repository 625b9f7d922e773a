//! The access of a full plan to the state.

use std::sync::Arc;

use crate::{
    model::ServiceKey,
    node_facts::NodeFacts,
    state::{Dirty, State},
};

/// Number of Services that a full plan reads while the state is locked.
const SERVICES_AT_ONCE: usize = 256;

/// Gives a full plan access to the state, which may change between two calls.
pub trait StateSource {
    /// Calls `read` with the present state, the facts about the node, and what changed since the
    /// last step was planned. The state is locked while `read` runs, so `read` must not wait.
    /// A source whose plan nobody needs any more does not call `read`.
    fn look(&self, read: &mut dyn FnMut(&State, &NodeFacts, &Dirty));
}

/// A state that does not change.
#[derive(Debug, Clone, Copy)]
pub struct FixedState<'a>(pub &'a State, pub &'a NodeFacts);

impl StateSource for FixedState<'_> {
    fn look(&self, read: &mut dyn FnMut(&State, &NodeFacts, &Dirty)) {
        read(self.0, self.1, &Dirty::default());
    }
}

/// Returns the Services of a source, in order.
pub(super) fn services(source: &dyn StateSource) -> Vec<Arc<ServiceKey>> {
    let mut keys = Vec::new();
    source.look(&mut |state, _, _| keys.extend(state.entries().map(|(key, _)| Arc::clone(key))));
    keys.sort_unstable();
    keys
}

/// Divides Services into the parts that a full plan reads while the state is locked.
pub(super) fn parts(services: &[Arc<ServiceKey>]) -> impl Iterator<Item = &[Arc<ServiceKey>]> {
    services.chunks(SERVICES_AT_ONCE)
}
