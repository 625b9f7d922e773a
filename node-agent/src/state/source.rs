//! How a full sync reads the state.

use headgate_core::{State, view::NodeFacts};

/// Where a full sync finds the state, which goes on changing meanwhile.
pub trait StateSource {
    /// Shows the state of the moment. Nobody can change it while `plan` runs, so that it should
    /// compute and not wait.
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
