//! Work that follows each change of the rules: the cleanup of connection tracking, health-check
//! node ports, and endpoint checks.
//!
//! An observer reads the state while a step is planned, and acts once the rules of the step are in
//! the kernel. An observer never delays programming: slow or fallible work runs in a separate
//! thread or task, which retries by itself.

pub mod conntrack;
pub mod endpoint_checks;
mod follower;
pub mod health_check_ports;

pub use follower::{Changes, Follower, Mailbox};

use std::{collections::BTreeSet, sync::Arc};

use headgate_core::{NodeFacts, ServiceKey, State, forwarding::Table};

/// The services that a step programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope<'a> {
    /// All services, as in the first sync and in repairs.
    All,
    /// Only these services.
    Services(&'a BTreeSet<Arc<ServiceKey>>),
}

/// Work that follows each change of the rules. The reconcile loop calls observers on its thread.
pub trait Observer: Send {
    /// Reads the state for a step that is being planned. The caller holds the lock of the state, so
    /// this method must only compute. If the previous step failed, `scope` includes the services of
    /// that step.
    fn plan(&mut self, state: &State, node: &NodeFacts, scope: Scope<'_>);

    /// Does the work of the step that was planned last. The caller calls this method when the rules
    /// of this step are in the kernel.
    fn applied(&mut self);

    /// Gets what the kernel forwards before the first step, if the state of the last run is unknown
    /// or may be older than the rules.
    fn found(&mut self, _tables: &[Table]) {}

    /// Does the work for a state from disk. The caller calls this method repeatedly while the
    /// kernel has the rules of an earlier run and no control plane has confirmed the state. `state`
    /// may be older than the rules.
    fn restored(&mut self, _state: &State, _node: &NodeFacts) {}
}

#[cfg(test)]
mod tests;
