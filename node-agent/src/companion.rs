//! What follows the rules without being rules: cleanup of connection tracking, health-check node ports.
//!
//! A companion looks at the state while a step is planned, and acts once the step's rules are in the kernel. It never keeps programming waiting: whatever
//! takes time or may fail goes to a thread or task of its own, which tries again by itself.

use std::{collections::BTreeSet, sync::Arc};

use headgate_core::{ServiceKey, State, view::NodeFacts};

/// What a step programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope<'a> {
    /// Everything: the first sync, and repairs.
    All,
    /// These services.
    Services(&'a BTreeSet<Arc<ServiceKey>>),
}

/// Runs beside the backend, on the reconcile loop's thread.
pub trait Companion: Send {
    /// A step is planned. The state's lock is held: computes only. When an earlier step failed, its services are among this one's.
    fn plan(&mut self, state: &State, node: &NodeFacts, scope: Scope<'_>);

    /// The rules of the step that was planned last are in the kernel.
    fn applied(&mut self);
}
