//! The access of a full sync to the state.

use headgate_core::{NodeFacts, State};

/// Gives a full sync access to the state, which may change between two calls.
pub trait StateSource {
    /// Calls `plan` with the present state. The state is locked while `plan` runs, so `plan` must
    /// not wait.
    fn look(&self, plan: &mut dyn FnMut(&State, &NodeFacts));
}

/// A state that does not change.
#[derive(Debug, Clone, Copy)]
pub struct FixedState<'a>(pub &'a State, pub &'a NodeFacts);

impl StateSource for FixedState<'_> {
    fn look(&self, plan: &mut dyn FnMut(&State, &NodeFacts)) {
        plan(self.0, self.1);
    }
}
