//! What follows the rules without being rules: cleanup of connection tracking, health-check node
//! ports.
//!
//! A observer looks at the state while a step is planned, and acts once the step's rules are in the
//! kernel. It never keeps programming waiting: whatever takes time or may fail goes to a thread or
//! task of its own, which tries again by itself.

pub mod conntrack;
pub mod endpoint_checks;
mod follower;
pub mod health_check_ports;

pub use follower::{Changes, Find, Follower, Mailbox};

use std::{collections::BTreeSet, sync::Arc};

use headgate_core::{Family, ServiceKey, State, iptables::NodePortAddresses, view::NodeFacts};
use tokio::sync::watch;

use crate::node_inputs::NodeInputs;

/// What a step programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope<'a> {
    /// Everything: the first sync, and repairs.
    All,
    /// These services.
    Services(&'a BTreeSet<Arc<ServiceKey>>),
}

/// Runs beside the backend, on the reconcile loop's thread.
pub trait Observer: Send {
    /// A step is planned. The state's lock is held: computes only. When an earlier step failed, its
    /// services are among this one's.
    fn plan(&mut self, state: &State, node: &NodeFacts, scope: Scope<'_>);

    /// The rules of the step that was planned last are in the kernel.
    fn applied(&mut self);

    /// Rules of an earlier run are in the kernel and stay for now; this state from disk, perhaps
    /// older than they are, is all that is known.
    fn restored(&mut self, _state: &State, _node: &NodeFacts) {}
}

/// Which of the node's addresses answer NodePorts, as resolved last.
#[derive(Debug, Clone)]
pub struct NodePorts(watch::Receiver<NodeInputs>);

impl NodePorts {
    /// Follows what the reconcile loop resolves.
    #[must_use]
    pub fn of_inputs(inputs: watch::Receiver<NodeInputs>) -> Self {
        Self(inputs)
    }

    /// Those of a family.
    #[must_use]
    pub fn of(&self, family: Family) -> NodePortAddresses {
        self.0.borrow().node_ports(family).clone()
    }
}

/// All addresses.
impl Default for NodePorts {
    fn default() -> Self {
        Self(watch::channel(NodeInputs::default()).1)
    }
}

#[cfg(test)]
mod tests;
